"""Tiny random checkpoints in the Hub's layout, one for each feature of a family; the same bits on every machine.

Each module here is a family, and has
- `CONFIGS`, its checkpoints by name. The first is also split over meshes, so its layers repeat twice or three times;
- `STACK`, the checkpoint that represents the family in tests that need only one. Its layers have every kind of cache of
  the family and, if possible, form a head, a period and a tail. Other checkpoints' features show in their logits;
- `PARAMETERS`, the released models' numbers of parameters, as the Hub shows them (without duplicate and stale tensors);
  the number of a name is also that of its instruct and chat twins;
- `shapes(config)`, the tensors of a checkpoint, written out and not taken from the code under test;
- `SEEING`, if the family takes images: checkpoints with a tower, with prompts and pictures (`tests.zoo.seeing`).

Norms are not ones and logits are of size 10, because defaults hide errors; sequences are longer than every window,
chunk and original context.
"""

import importlib
import json
import pathlib
import pkgutil
import string
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import numpy as np
import safetensors.numpy
import tokenizers

from tests.zoo.seeing import Checkpoint


Values = Callable[[str, np.ndarray], Any]  # the values of a tensor of this name, made of normal noise
# Common keys of the families' config.json files.
COMMON = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2, head_dim=16, max_position_embeddings=64, hidden_act="silu", rope_theta=10000.0,
    tie_word_embeddings=False, torch_dtype="float32", attention_dropout=0.0, bos_token_id=1, eos_token_id=2,
    initializer_range=0.02, use_cache=True,
)  # fmt: skip
TOKENS = np.random.RandomState(0).randint(0, 64, (2, 40))


def attention(config: dict[str, Any], layer: str) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a layer's attention like Llama's, with biases if the config says so: name -> shape."""
    d, head = config["hidden_size"], config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    heads = config["num_attention_heads"]
    q, kv = heads * head, (config.get("num_key_value_heads") or heads) * head
    matrices = {
        f"{layer}.self_attn.q_proj.weight": (q, d),
        f"{layer}.self_attn.k_proj.weight": (kv, d),
        f"{layer}.self_attn.v_proj.weight": (kv, d),
        f"{layer}.self_attn.o_proj.weight": (d, q),
    }
    return matrices | (biases(matrices) if config.get("attention_bias") else {})


def mlp(path: str, width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Returns the tensors of a gated MLP like Llama's: name -> shape."""
    return {
        f"{path}.gate_proj.weight": (width, hidden),
        f"{path}.up_proj.weight": (width, hidden),
        f"{path}.down_proj.weight": (hidden, width),
    }


def biases(shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns the biases of linear maps with these weights: name -> shape."""
    return {name.removesuffix("weight") + "bias": shape[:1] for name, shape in shapes.items()}


def values(name: str, noise: np.ndarray) -> np.ndarray:
    """Returns the values of a tensor, made of normal noise. A family's module may replace this function."""
    return 1 + 0.3 * noise if "norm" in name else 0.4 * noise


def filled(
    shapes: Mapping[str, tuple[int, ...]], random: np.random.RandomState, make: Values = values
) -> dict[str, np.ndarray]:
    """Returns random float32 tensors of these names and shapes."""
    return {
        name: np.asarray(make(name, random.standard_normal(shape)), np.float32)
        for name, shape in sorted(shapes.items())
    }


def tensors(name: str) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors, from numpy's legacy generator, whose stream never changes."""
    module = MODULES[FAMILIES[name]]
    return filled(module.shapes(CONFIGS[name]), np.random.RandomState(1), getattr(module, "values", values))


def first_layers(name: str, layers: int) -> dict[str, np.ndarray]:
    """Returns a checkpoint's tensors without those of later layers, by their names beside a tower."""
    later = tuple(f"model.layers.{n}." for n in range(layers, CONFIGS[name]["num_hidden_layers"]))
    return {f"language_model.{key}": x for key, x in tensors(name).items() if not key.startswith(later)}


def write(folder: pathlib.Path, name: str, **changes: Any) -> pathlib.Path:
    """Writes the files of the checkpoint `name`; `changes` overwrite keys of its config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name] | changes))
    safetensors.numpy.save_file(tensors(name), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def golden() -> dict[str, np.ndarray]:
    """Returns transformers' logits of TOKENS, by checkpoint, as make_golden.py wrote them."""
    folder = pathlib.Path(__file__).parents[1] / "golden"
    return {name: array for path in sorted(folder.glob("*.npz")) for name, array in np.load(path).items()}


def write_tokenizer(folder: pathlib.Path) -> None:
    """Writes a tokenizer of 64 tokens: the space, letters, digits, and the end."""
    characters = " " + string.ascii_letters + string.digits
    vocabulary = {character: i for i, character in enumerate(characters)} | {"<end>": 63}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))


MODULES: dict[str, ModuleType] = {  # family -> its module, which may import what is above
    info.name: importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)
}
CONFIGS: dict[str, dict[str, Any]] = {n: config for module in MODULES.values() for n, config in module.CONFIGS.items()}
FAMILIES = {name: family for family, module in MODULES.items() for name in module.CONFIGS}  # checkpoint -> family
SEEING: dict[str, Checkpoint] = {  # those of the checkpoints that have a tower, too
    checkpoint.name: checkpoint for module in MODULES.values() for checkpoint in getattr(module, "SEEING", ())
}
