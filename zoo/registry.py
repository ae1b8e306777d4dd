"""Zoo names of models, and where their checkpoints are found."""

import pathlib
from collections.abc import Mapping

from zoo import models
from zoo.nn.model import AbstractConfig, AbstractModel, Family


# Zoo name -> Hub repository. Base and instruct models have different names.
REPOSITORIES = {
    "llama2-7b": "meta-llama/Llama-2-7b-hf",
    "llama2-7b-chat": "meta-llama/Llama-2-7b-chat-hf",
    "llama2-13b": "meta-llama/Llama-2-13b-hf",
    "llama2-13b-chat": "meta-llama/Llama-2-13b-chat-hf",
    "llama2-70b": "meta-llama/Llama-2-70b-hf",
    "llama2-70b-chat": "meta-llama/Llama-2-70b-chat-hf",
    "llama3-8b": "meta-llama/Meta-Llama-3-8B",
    "llama3-8b-instruct": "meta-llama/Meta-Llama-3-8B-Instruct",
    "llama3-70b": "meta-llama/Meta-Llama-3-70B",
    "llama3-70b-instruct": "meta-llama/Meta-Llama-3-70B-Instruct",
    "llama3.1-8b": "meta-llama/Llama-3.1-8B",
    "llama3.1-8b-instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "llama3.1-70b": "meta-llama/Llama-3.1-70B",
    "llama3.1-70b-instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "llama3.1-405b": "meta-llama/Llama-3.1-405B",
    "llama3.1-405b-instruct": "meta-llama/Llama-3.1-405B-Instruct",
    "llama3.2-1b": "meta-llama/Llama-3.2-1B",
    "llama3.2-1b-instruct": "meta-llama/Llama-3.2-1B-Instruct",
    "llama3.2-3b": "meta-llama/Llama-3.2-3B",
    "llama3.2-3b-instruct": "meta-llama/Llama-3.2-3B-Instruct",
    "llama3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
    "llama4-scout": "meta-llama/Llama-4-Scout-17B-16E",
    "llama4-scout-instruct": "meta-llama/Llama-4-Scout-17B-16E-Instruct",
    "llama4-maverick": "meta-llama/Llama-4-Maverick-17B-128E",
    "llama4-maverick-instruct": "meta-llama/Llama-4-Maverick-17B-128E-Instruct",
    "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1",
    "mistral-7b-v0.1-instruct": "mistralai/Mistral-7B-Instruct-v0.1",
    "mistral-7b-v0.2-instruct": "mistralai/Mistral-7B-Instruct-v0.2",
    "mistral-7b-v0.3": "mistralai/Mistral-7B-v0.3",
    "mistral-7b-v0.3-instruct": "mistralai/Mistral-7B-Instruct-v0.3",
    "mistral-small-3.1-24b": "mistralai/Mistral-Small-3.1-24B-Instruct-2503",
    "mistral-small-3.1-24b-base": "mistralai/Mistral-Small-3.1-24B-Base-2503",
    "mistral-small-3.2-24b": "mistralai/Mistral-Small-3.2-24B-Instruct-2506",
    "ministral3-3b-base": "mistralai/Ministral-3-3B-Base-2512",
    "ministral3-3b-instruct": "mistralai/Ministral-3-3B-Instruct-2512",
    "ministral3-3b-reasoning": "mistralai/Ministral-3-3B-Reasoning-2512",
    "ministral3-8b-base": "mistralai/Ministral-3-8B-Base-2512",
    "ministral3-8b-instruct": "mistralai/Ministral-3-8B-Instruct-2512",
    "ministral3-8b-reasoning": "mistralai/Ministral-3-8B-Reasoning-2512",
    "ministral3-14b-base": "mistralai/Ministral-3-14B-Base-2512",
    "ministral3-14b-instruct": "mistralai/Ministral-3-14B-Instruct-2512",
    "ministral3-14b-reasoning": "mistralai/Ministral-3-14B-Reasoning-2512",
    "devstral-small-2-24b": "mistralai/Devstral-Small-2-24B-Instruct-2512",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x7b-instruct": "mistralai/Mixtral-8x7B-Instruct-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "mixtral-8x22b-instruct": "mistralai/Mixtral-8x22B-Instruct-v0.1",
    "gemma-2b": "google/gemma-2b",
    "gemma-2b-it": "google/gemma-2b-it",
    "gemma-7b": "google/gemma-7b",
    "gemma-7b-it": "google/gemma-7b-it",
    "gemma2-2b": "google/gemma-2-2b",
    "gemma2-2b-it": "google/gemma-2-2b-it",
    "gemma2-9b": "google/gemma-2-9b",
    "gemma2-9b-it": "google/gemma-2-9b-it",
    "gemma2-27b": "google/gemma-2-27b",
    "gemma2-27b-it": "google/gemma-2-27b-it",
    "gemma3-270m": "google/gemma-3-270m",
    "gemma3-270m-it": "google/gemma-3-270m-it",
    "gemma3-1b": "google/gemma-3-1b-pt",
    "gemma3-1b-it": "google/gemma-3-1b-it",
    "gemma3-4b": "google/gemma-3-4b-pt",
    "gemma3-4b-it": "google/gemma-3-4b-it",
    "gemma3-12b": "google/gemma-3-12b-pt",
    "gemma3-12b-it": "google/gemma-3-12b-it",
    "gemma3-27b": "google/gemma-3-27b-pt",
    "gemma3-27b-it": "google/gemma-3-27b-it",
    "qwen2.5-0.5b": "Qwen/Qwen2.5-0.5B",
    "qwen2.5-0.5b-instruct": "Qwen/Qwen2.5-0.5B-Instruct",
    "qwen2.5-1.5b": "Qwen/Qwen2.5-1.5B",
    "qwen2.5-1.5b-instruct": "Qwen/Qwen2.5-1.5B-Instruct",
    "qwen2.5-7b": "Qwen/Qwen2.5-7B",
    "qwen2.5-7b-instruct": "Qwen/Qwen2.5-7B-Instruct",
    "qwen2.5-14b": "Qwen/Qwen2.5-14B",
    "qwen2.5-14b-instruct": "Qwen/Qwen2.5-14B-Instruct",
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-0.6b-base": "Qwen/Qwen3-0.6B-Base",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-1.7b-base": "Qwen/Qwen3-1.7B-Base",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-4b-base": "Qwen/Qwen3-4B-Base",
    "qwen3-4b-instruct-2507": "Qwen/Qwen3-4B-Instruct-2507",
    "qwen3-4b-thinking-2507": "Qwen/Qwen3-4B-Thinking-2507",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-8b-base": "Qwen/Qwen3-8B-Base",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-14b-base": "Qwen/Qwen3-14B-Base",
    "qwen3-32b": "Qwen/Qwen3-32B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
    "qwen3-30b-a3b-base": "Qwen/Qwen3-30B-A3B-Base",
    "qwen3-30b-a3b-instruct-2507": "Qwen/Qwen3-30B-A3B-Instruct-2507",
    "qwen3-30b-a3b-thinking-2507": "Qwen/Qwen3-30B-A3B-Thinking-2507",
    "qwen3-235b-a22b": "Qwen/Qwen3-235B-A22B",
    "qwen3-235b-a22b-instruct-2507": "Qwen/Qwen3-235B-A22B-Instruct-2507",
    "qwen3-235b-a22b-thinking-2507": "Qwen/Qwen3-235B-A22B-Thinking-2507",
    "qwen3-coder-480b-a35b": "Qwen/Qwen3-Coder-480B-A35B-Instruct",
    "qwen3-coder-480b-a35b-fp8": "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8",
    "qwen3-next-80b-a3b": "Qwen/Qwen3-Next-80B-A3B-Instruct",
    "qwen3-next-80b-a3b-fp8": "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8",
    "qwen3-next-80b-a3b-thinking": "Qwen/Qwen3-Next-80B-A3B-Thinking",
    "qwen3-next-80b-a3b-thinking-fp8": "Qwen/Qwen3-Next-80B-A3B-Thinking-FP8",
    "qwen3-coder-next": "Qwen/Qwen3-Coder-Next",
    "qwen3-coder-next-base": "Qwen/Qwen3-Coder-Next-Base",
    "qwen3-coder-next-fp8": "Qwen/Qwen3-Coder-Next-FP8",
    "qwen3-vl-2b": "Qwen/Qwen3-VL-2B-Instruct",
    "qwen3-vl-2b-thinking": "Qwen/Qwen3-VL-2B-Thinking",
    "qwen3-vl-4b": "Qwen/Qwen3-VL-4B-Instruct",
    "qwen3-vl-4b-thinking": "Qwen/Qwen3-VL-4B-Thinking",
    "qwen3-vl-8b": "Qwen/Qwen3-VL-8B-Instruct",
    "qwen3-vl-8b-thinking": "Qwen/Qwen3-VL-8B-Thinking",
    "qwen3-vl-32b": "Qwen/Qwen3-VL-32B-Instruct",
    "qwen3-vl-32b-thinking": "Qwen/Qwen3-VL-32B-Thinking",
    "qwen3-vl-30b-a3b": "Qwen/Qwen3-VL-30B-A3B-Instruct",
    "qwen3-vl-30b-a3b-thinking": "Qwen/Qwen3-VL-30B-A3B-Thinking",
    "qwen3-vl-235b-a22b": "Qwen/Qwen3-VL-235B-A22B-Instruct",
    "qwen3-vl-235b-a22b-thinking": "Qwen/Qwen3-VL-235B-A22B-Thinking",
    "qwen3.5-0.8b": "Qwen/Qwen3.5-0.8B",
    "qwen3.5-0.8b-base": "Qwen/Qwen3.5-0.8B-Base",
    "qwen3.5-2b": "Qwen/Qwen3.5-2B",
    "qwen3.5-2b-base": "Qwen/Qwen3.5-2B-Base",
    "qwen3.5-4b": "Qwen/Qwen3.5-4B",
    "qwen3.5-4b-base": "Qwen/Qwen3.5-4B-Base",
    "qwen3.5-9b": "Qwen/Qwen3.5-9B",
    "qwen3.5-9b-base": "Qwen/Qwen3.5-9B-Base",
    "qwen3.5-27b": "Qwen/Qwen3.5-27B",
    "qwen3.5-27b-fp8": "Qwen/Qwen3.5-27B-FP8",
    "qwen3.5-35b-a3b": "Qwen/Qwen3.5-35B-A3B",
    "qwen3.5-35b-a3b-base": "Qwen/Qwen3.5-35B-A3B-Base",
    "qwen3.5-35b-a3b-fp8": "Qwen/Qwen3.5-35B-A3B-FP8",
    "qwen3.5-122b-a10b": "Qwen/Qwen3.5-122B-A10B",
    "qwen3.5-122b-a10b-fp8": "Qwen/Qwen3.5-122B-A10B-FP8",
    "qwen3.5-397b-a17b": "Qwen/Qwen3.5-397B-A17B",
    "qwen3.5-397b-a17b-fp8": "Qwen/Qwen3.5-397B-A17B-FP8",
    "qwen3.6-27b": "Qwen/Qwen3.6-27B",
    "qwen3.6-27b-fp8": "Qwen/Qwen3.6-27B-FP8",
    "qwen3.6-35b-a3b": "Qwen/Qwen3.6-35B-A3B",
    "qwen3.6-35b-a3b-fp8": "Qwen/Qwen3.6-35B-A3B-FP8",
    "qwen3.8-27b": "Qwen/Qwen3.8-27B",
    "qwen3.8-27b-fp8": "Qwen/Qwen3.8-27B-FP8",
    "smollm3-3b": "HuggingFaceTB/SmolLM3-3B",
    "smollm3-3b-base": "HuggingFaceTB/SmolLM3-3B-Base",
    "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite",
    "deepseek-v2-lite-chat": "deepseek-ai/DeepSeek-V2-Lite-Chat",
    "deepseek-v2": "deepseek-ai/DeepSeek-V2",
    "deepseek-v2-chat": "deepseek-ai/DeepSeek-V2-Chat",
    "deepseek-v3": "deepseek-ai/DeepSeek-V3",
    "deepseek-v3-base": "deepseek-ai/DeepSeek-V3-Base",
    "deepseek-v3-0324": "deepseek-ai/DeepSeek-V3-0324",
    "deepseek-v3.1": "deepseek-ai/DeepSeek-V3.1",
    "deepseek-r1": "deepseek-ai/DeepSeek-R1",
    "kimi-k2": "moonshotai/Kimi-K2-Instruct",
    "kimi-k2-base": "moonshotai/Kimi-K2-Base",
    "kimi-k2-0905": "moonshotai/Kimi-K2-Instruct-0905",
    "granite4-micro": "ibm-granite/granite-4.0-micro",
    "granite4-h-micro": "ibm-granite/granite-4.0-h-micro",
    "granite4-h-tiny": "ibm-granite/granite-4.0-h-tiny",
    "granite4-h-small": "ibm-granite/granite-4.0-h-small",
    "nemotron-nano-9b-v2": "nvidia/NVIDIA-Nemotron-Nano-9B-v2",
    "nemotron-nano-9b-v2-base": "nvidia/NVIDIA-Nemotron-Nano-9B-v2-Base",
    "nemotron3-nano-30b-a3b": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "nemotron3-nano-30b-a3b-base": "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-Base-BF16",
    "nemotron3-super-120b-a12b": "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    "kimi-linear-48b-a3b": "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "kimi-linear-48b-a3b-base": "moonshotai/Kimi-Linear-48B-A3B-Base",
    "gpt-oss-20b": "openai/gpt-oss-20b",
    "gpt-oss-120b": "openai/gpt-oss-120b",
    "gpt2": "openai-community/gpt2",
    "gpt2-medium": "openai-community/gpt2-medium",
    "gpt2-large": "openai-community/gpt2-large",
    "gpt2-xl": "openai-community/gpt2-xl",
}

# Zoo name of a model without published weights -> Hub repository of a tokenizer whose ids fit its vocabulary.
TOKENIZERS = {
    "gpt3-52k": "hf-internal-testing/tiny-random-GPT2LMHeadModel",
    "gpt3-6b": "mistralai/Mistral-7B-v0.3",
    "gpt3-22b": "mistralai/Mistral-7B-v0.3",
    "gpt3-175b": "openai-community/gpt2",
}

# Zoo name -> folder of a checkpoint that is part of the package.
EMBEDDED = {"tiny": pathlib.Path(__file__).parent / "tiny"}

# config.json's model_type -> family, and zoo name -> config. Both are filled by `register`.
FAMILIES: dict[str, Family] = {}
CONFIGS: dict[str, AbstractConfig] = {}


def register(family: Family, repositories: Mapping[str, str] | None = None) -> None:
    """Make a family known to `zoo.load` and to the rest of the package. Users register families of their own by it.

    Args:
        family: the `FAMILY` of its file.
        repositories: zoo name -> Hub repository, for the names in `family.configs`.

    Raises:
        ValueError: if a zoo name or a model_type is taken, or `repositories` has a name that `family.configs` lacks.
            Nothing is registered then.
    """
    repositories = repositories or {}
    if unknown := sorted(repositories.keys() - family.configs.keys()):
        raise ValueError(f"{', '.join(unknown)} has a repository, but the configs of {family.name} have no such name.")
    for known, new in ((FAMILIES, family.model_types), (CONFIGS | EMBEDDED, family.configs)):
        if taken := sorted(known.keys() & set(new)):
            raise ValueError(f"{', '.join(taken)} is registered already; the family {family.name} needs other names.")
    FAMILIES.update(dict.fromkeys(family.model_types, family))
    CONFIGS.update(family.configs)
    REPOSITORIES.update(repositories)


for _family in models.FAMILIES.values():
    register(_family)


def family_of(value: AbstractModel | AbstractConfig) -> Family:
    """The family of a model or of a config.

    Raises:
        ValueError: if no registered family has this class of configs.
    """
    config = value.config if isinstance(value, AbstractModel) else value
    for family in FAMILIES.values():
        if family.Config is type(config):
            return family
    raise ValueError(f"No family has the class {type(config).__module__}.Config: call zoo.register with its FAMILY.")
