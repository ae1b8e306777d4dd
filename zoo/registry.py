"""Names of models, and where their checkpoints are. No logic beyond looking them up."""

import pathlib
import sys
from types import ModuleType
from typing import Any

from zoo import llama, qwen3


# config.json's model_type -> the file that implements it.
FAMILIES = {family.IMPLIED["model_type"]: family for family in (llama, qwen3)}

# Zoo name -> Hub repository. Base and instruct models are different names.
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
    "qwen3-0.6b": "Qwen/Qwen3-0.6B",
    "qwen3-0.6b-base": "Qwen/Qwen3-0.6B-Base",
    "qwen3-1.7b": "Qwen/Qwen3-1.7B",
    "qwen3-1.7b-base": "Qwen/Qwen3-1.7B-Base",
    "qwen3-4b": "Qwen/Qwen3-4B",
    "qwen3-4b-base": "Qwen/Qwen3-4B-Base",
    "qwen3-8b": "Qwen/Qwen3-8B",
    "qwen3-8b-base": "Qwen/Qwen3-8B-Base",
    "qwen3-14b": "Qwen/Qwen3-14B",
    "qwen3-14b-base": "Qwen/Qwen3-14B-Base",
    "qwen3-32b": "Qwen/Qwen3-32B",
}

# Zoo name -> folder, of what the package itself carries.
EMBEDDED = {"tiny": pathlib.Path(__file__).parent / "tiny"}

CONFIGS = {name: config for family in FAMILIES.values() for name, config in family.CONFIGS.items()}


def family_of(value: Any) -> ModuleType:
    """The family module that defines the class of a `Model` or a `Config`."""
    return sys.modules[type(value).__module__]
