"""Adapters of low rank (LoRA, arXiv:2106.09685): put into any model, kept apart from it, merged, and read and written.

model = lora.add(model, rank=16, alpha=16, key=key)   # over an int8 model this is QLoRA (arXiv:2305.14314)
adapters, frozen = lora.split(model)                  # what is trained, and what is not
lora.save(model, "adapter")                           # in PEFT's layout, which `lora.load` and peft read
model = lora.merge(model)                             # the same without adapters
"""

import fnmatch
import functools
import json
import os
import pathlib
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

import convert.hub
import convert.tensors
import kernels
from zoo.checkpoint import parameters, skeleton
from zoo.gather import gathered, write_once
from zoo.layers import AbstractExpertLinear, AbstractLinear, ExpertLinear, Linear
from zoo.registry import family_of
from zoo.surgery import map_linears, modules


T = TypeVar("T")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

# Keys of an adapter_config.json that do not change what it computes, given its tensors.
NOT_THE_MODEL = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "target_modules", "task_type",
}  # fmt: skip
# Ways to begin with that leave the base's weights alone.
INITIAL = (True, False, "gaussian", "orthogonal", "eva")
LAYERS = "layers.*"  # every linear map of the layers; not the head


class LoRALinear(AbstractLinear):
    """`base`, frozen, plus a trained update of low rank: `base(x) + alpha / rank * b(a(x))`.

    `b` starts at zero, so nothing changes at first.
    """

    base: AbstractLinear
    a: Float[Array, "rank in"]
    b: Float[Array, "out rank"]
    scale: float = eqx.field(static=True)

    def __init__(self, base: AbstractLinear, key: PRNGKeyArray, *, rank: int, alpha: float):
        out_features, in_features = base.shape
        self.base, self.scale = base, alpha / rank
        self.a = jax.random.normal(key, (rank, in_features)) * in_features**-0.5
        self.b = jnp.zeros((out_features, rank))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        a, b = self.a.astype(x.dtype), self.b.astype(x.dtype)
        return self.base(x) + self.scale * jnp.einsum("...r,or->...o", jnp.einsum("...i,ri->...r", x, a), b)

    def matrix(self) -> Float[Array, "out in"]:
        base = self.base.matrix()
        return base + self.scale * (self.b @ self.a).astype(base.dtype)

    def partition_specs(self, spec: P) -> "LoRALinear":
        parts = (self.base.partition_specs(spec), P(None, *spec[1:]), P(*spec[:1], None))
        return eqx.tree_at(lambda m: (m.base, m.a, m.b), self, parts)


class LoRAExpertLinear(AbstractExpertLinear):
    """`LoRALinear`, once for each expert."""

    base: AbstractExpertLinear
    a: Float[Array, "experts rank in"]
    b: Float[Array, "experts out rank"]
    scale: float = eqx.field(static=True)

    def __init__(self, base: AbstractExpertLinear, key: PRNGKeyArray, *, rank: int, alpha: float):
        experts, out_features, in_features = base.shape
        self.base, self.scale = base, alpha / rank
        self.a = jax.random.normal(key, (experts, rank, in_features)) * in_features**-0.5
        self.b = jnp.zeros((experts, out_features, rank))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    def __call__(self, x: Float[Array, "rows in"], group_sizes: Int[Array, " experts"]) -> Float[Array, "rows out"]:
        low = kernels.ragged_dot(x, self.a.astype(x.dtype), group_sizes)
        return self.base(x, group_sizes) + self.scale * kernels.ragged_dot(low, self.b.astype(x.dtype), group_sizes)

    def partition_specs(self, spec: P) -> "LoRAExpertLinear":
        experts, out, in_ = spec
        parts = (self.base.partition_specs(spec), P(experts, None, in_), P(experts, out, None))
        return eqx.tree_at(lambda m: (m.base, m.a, m.b), self, parts)


ADAPTERS = (LoRALinear, LoRAExpertLinear)


def add(model: T, *, rank: int, alpha: float, where: str = LAYERS, key: PRNGKeyArray) -> T:
    """`model` with an adapter over each linear map whose path matches `where`, experts' too.

    Raises:
        ValueError: if none matches.
    """
    found = False
    for kind, adapter in ((AbstractLinear, LoRALinear), (AbstractExpertLinear, LoRAExpertLinear)):
        if any(fnmatch.fnmatch(path, where) for path, _ in modules(model, kind)):
            found, make = True, functools.partial(adapter, rank=rank, alpha=alpha)
            model = map_linears(model, make, where, kind=kind, key=key)
    if not found:
        paths = ", ".join(path for path, _ in modules(model, (AbstractLinear, AbstractExpertLinear)))
        raise ValueError(f"No linear map matches {where!r}; the model has {paths}.")
    return model


def split(model: T) -> tuple[T, T | None]:
    """The adapters' arrays, and all others, each with None in place of the rest. Without adapters, all and None."""
    if not any(modules(model, ADAPTERS)):
        return model, None

    def is_trained(module: Any) -> Any:
        none = jax.tree.map(lambda _: False, module)
        return eqx.tree_at(lambda m: (m.a, m.b), none, (True, True)) if isinstance(module, ADAPTERS) else none

    return eqx.partition(model, jax.tree.map(is_trained, model, is_leaf=lambda m: isinstance(m, ADAPTERS)))


def joined(model: T, frozen: T | None) -> T:
    """The inverse of `split`."""
    return model if frozen is None else eqx.combine(model, frozen)


def merge(model: T) -> T:
    """`model` with plain linear maps that do what those with adapters did, computed in float32 and rounded once.

    Raises:
        ValueError: if an adapter lies over weights that are quantised, which the sum would not fit.
    """

    def plain(path: Any, module: Any) -> Any:
        if not isinstance(module, ADAPTERS):
            return module
        if not isinstance(module.base, Linear | ExpertLinear):
            name = jax.tree_util.keystr(path, simple=True, separator=".")
            raise ValueError(
                f"{name} is a {type(module.base).__name__}, whose weights are rounded; load the model without "
                "quantize= to merge the adapter."
            )
        weight = module.base.weight
        update = jnp.einsum("...or,...ri->...oi", module.b.astype(jnp.float32), module.a.astype(jnp.float32))
        return eqx.tree_at(
            lambda m: m.weight, module.base, (weight.astype(jnp.float32) + module.scale * update).astype(weight.dtype)
        )

    return jax.tree_util.tree_map_with_path(plain, model, is_leaf=lambda m: isinstance(m, ADAPTERS))


def save(model: Any, folder: str | os.PathLike, *, base: str = "") -> None:
    """Writes a model's adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors.

    `base` is the name of the model that they belong to. Of a model that several processes hold, all call this.

    Raises:
        ValueError: if the model has no adapters, some of several ranks or scales, or some over experts.
    """
    found, names = dict(modules(model, ADAPTERS)), tensor_names(model)
    kinds = {(m.a.shape[-2], m.scale) for m in found.values()}
    if len(kinds) != 1:
        raise ValueError(f"The model has adapters of {len(kinds)} kinds (rank and scale); PEFT's layout is of one.")
    ((rank, scale),) = kinds
    tensors = {}
    for path, module in found.items():
        for at, name in np.ndenumerate(names[path]):
            for part, array in (("lora_A", module.a), ("lora_B", module.b)):
                get = functools.partial(lambda array, at: gathered(array[at]), array, at)
                shape, dtype = array.shape[len(at) :], np.dtype(array.dtype)
                tensors[f"base_model.model.{name}.{part}.weight"] = (shape, dtype, get)
    adapted = {name for path in found for name in names[path].flat}
    last = {name.rpartition(".")[2] for name in adapted}
    others = {name for path, each in names.items() if path not in found for name in each.flat}
    whole = not any(name.rpartition(".")[2] in last for name in others)
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank,
        "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted(last if whole else adapted),
        "fan_in_fan_out": any(p.transposed for p in parameters(plain(model), family_of(model))),
    }  # fmt: skip
    write_once(model, tensors, functools.partial(_write, pathlib.Path(folder), config))


def _write(folder: pathlib.Path, config: dict[str, Any], tensors: dict[str, convert.tensors.Lazy]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    convert.tensors.write_file(folder / f"{WEIGHTS}.tmp", tensors)
    (folder / f"{CONFIG}.tmp").write_text(json.dumps(config, indent=2) + "\n")
    for name in (WEIGHTS, CONFIG):
        os.replace(folder / f"{name}.tmp", folder / name)


def load(model: T, folder: str | os.PathLike) -> T:
    """`model` with the adapters that a folder holds in PEFT's layout.

    Raises:
        OSError: if the folder lacks one of the two files.
        ValueError: if they say or hold anything that is not implemented, or does not fit the model, naming it.
    """
    folder = pathlib.Path(folder)
    rank, scale = _read_config(folder / CONFIG)
    tensors = {tensor.name: tensor for tensor in convert.tensors.open_file(folder / WEIGHTS)}
    used: set[str] = set()

    def stacked(names: np.ndarray, part: str, shape: tuple[int, ...]) -> jax.Array:
        """The tensors of a stack's layers; zeros where a layer has no adapter."""
        out = np.zeros((*names.shape, *shape), np.float32)
        for at, name in np.ndenumerate(names):
            if tensor := tensors.get(f"base_model.model.{name}.{part}.weight"):
                if tensor.shape != shape:
                    raise ValueError(f"{tensor.name} in {folder} has shape {tensor.shape}; the model needs {shape}.")
                out[at] = tensor.part((), np.dtype(np.float32))
                used.add(tensor.name)
        return jnp.asarray(out)

    def adapted(path: str, base: AbstractLinear, names: np.ndarray) -> AbstractLinear:
        *_, out_features, in_features = base.shape
        b, before = stacked(names, "lora_B", (out_features, rank)), len(used)
        a = stacked(names, "lora_A", (rank, in_features))
        if before == len(used):
            return base
        shell = LoRALinear.__new__(LoRALinear)
        for field, value in dict(base=base, a=a, b=b, scale=scale).items():
            object.__setattr__(shell, field, value)
        return shell

    linears, names = dict(modules(model, AbstractLinear)), tensor_names(model)
    new = [adapted(path, linear, names[path]) for path, linear in linears.items()]
    if unused := tensors.keys() - used:
        raise ValueError(
            f"{folder / WEIGHTS} has {len(unused)} tensors that the model has no place for: "
            f"{', '.join(sorted(unused)[:5])}."
        )
    return eqx.tree_at(lambda m: [linear for _, linear in modules(m, AbstractLinear)], model, new)


def _read_config(path: pathlib.Path) -> tuple[int, float]:
    """Rank and scale."""
    config = convert.hub.read_json(path)
    known = {"peft_type": "LORA", "bias": "none"}
    for key, value in config.items():
        if (key in known and value != known[key]) or (key == "init_lora_weights" and value not in INITIAL):
            raise ValueError(f"{path} says {key}={value!r}, which is not implemented.")
        other = {*known, *NOT_THE_MODEL, "r", "lora_alpha", "use_rslora", "init_lora_weights"}
        if key not in other and value:
            raise ValueError(f"{path} says {key}={value!r}, which is not implemented.")
    rank, alpha = config["r"], config["lora_alpha"]
    return rank, alpha / (rank**0.5 if config.get("use_rslora") else rank)


def plain(model: Any) -> Any:
    """The skeleton of a model as its family makes it."""
    return skeleton(family_of(model), model.config)


def tensor_names(model: Any) -> dict[str, np.ndarray]:
    """Path of a linear map -> the names of its modules in transformers, one for each layer of a stack."""
    found = {p.path: p.names for p in parameters(plain(model), family_of(model))}
    stem = np.vectorize(lambda name: name.removesuffix(".weight"), otypes=[object])
    return {path.removesuffix(".weight"): stem(names) for path, names in found.items() if path.endswith(".weight")}
