"""Save and load LoRA adapters in PEFT's layout: adapter_config.json and adapter_model.safetensors.

    peft.save(model, "adapter", base="Qwen/Qwen3-0.6B")  # PeftModel.from_pretrained reads it
    model = peft.load(model, "adapter")                  # reads what PeftModel.save_pretrained wrote

A linear map has the tensors lora_A (rank, in) and lora_B (out, rank). transformers keeps the experts of a layer as two
parameters of one module, gate_up_proj and down_proj. For each parameter PEFT (`target_parameters`) has one pair of
tensors for all experts: (experts * rank, in) and (out, rank * experts). If a family keeps gate and up as two maps,
their two adapters become one of twice the rank: see `fused`. With `save(..., per_expert=True)` each expert's maps have
adapters of their own instead, named as in checkpoints with a tensor for each expert, which vLLM reads.

The weights of a head are trained with the adapters, and stored whole (`modules_to_save`).
"""

import functools
import itertools
import json
import math
import os
import pathlib
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Float

import convert.files
import convert.machine
import convert.tensors
from zoo.lora import ADAPTERS, LoRAExpertLinear, LoRALinear
from zoo.nn.heads import AbstractHead
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear
from zoo.nn.model import AbstractModel, Family, has_vision
from zoo.registry import EMBEDDED, REPOSITORIES, family_of, is_local
from zoo.surgery import modules, path_name, shardings, with_head
from zoo.weights.checkpoint import match_wildcards, parameters, published_name, skeleton
from zoo.weights.gather import gathered, write_once
from zoo.weights.reading import Scan


T = TypeVar("T", bound=AbstractModel)
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
MANIFEST = f"{WEIGHTS}.manifest.json"  # the SHA-256 of WEIGHTS
BASE, OVER = "base.json", ("revision", "weights", "quantize")  # describes the weights that adapters were trained over
OWN = "base_model.model.{}"  # a tensor that is stored whole
TENSOR = "base_model.model.{}.lora_{}.weight"
TASKS = {None: "CAUSAL_LM", "embedding": "FEATURE_EXTRACTION", "classification": "SEQ_CLS", "reward": "SEQ_CLS"}

# Keys of adapter_config.json that do not change what an adapter computes, given its tensors.
NOT_THE_MODEL = {
    "auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
    "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout",
    "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
    "target_modules", "task_type",
}  # fmt: skip
READ = {"r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_parameters", "modules_to_save"}
INITIAL = (None, True, False, "gaussian", "orthogonal", "eva")  # initialisations that leave the base's weights alone

# What transformers 4 called an expert's maps. In a model with experts PEFT takes all modules of these names for such.
OF_AN_EXPERT = {"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"}


Parts = dict[int | None, tuple[str, tuple[int, ...]]]
"""A part of a parameter of a layer's experts, 0 gate, 1 up, None all -> the path of its map, and the layer's index in
that map's stack."""


class Pair(NamedTuple):
    """An adapter, which adds `scale * b @ a` to a weight; or the adapters of all experts of a layer."""

    a: Float[np.ndarray, "*experts rank in"]
    b: Float[np.ndarray, "*experts out rank"]
    scale: float


def save(
    model: AbstractModel,
    folder: str | os.PathLike[str],
    *,
    base: str = "",
    over: Mapping[str, str | None] | None = None,
    per_expert: bool = False,
) -> None:
    """Write a model's adapters, and the weights of its head. If several processes hold the model, all must call this.

    Process 0 writes.

    Args:
        model: a model with adapters from `zoo.lora`.
        folder: the folder to write.
        base: the model that the adapters belong to: a zoo name, a Hub repository or a folder. A zoo name is written as
            its repository, so that PEFT finds the model.
        over: describes the weights that the adapters were trained over, with the keys OVER. Written to base.json, for
            `warnings_of`.
        per_expert: write a pair of tensors for each map of each expert, such as experts.0.gate_proj, as vLLM reads
            them. `load` does, too; PEFT does not, since transformers has no such modules.

    Raises:
        ValueError: the model has no adapters, adapters of different ranks or scales, or one for a module that
            transformers does not have; its head has linear maps of sentence-transformers; or `per_expert` is asked of
            a family whose checkpoints have one tensor for all experts of a layer.
    """
    family, names = family_of(model), module_names(model)
    adapters = dict(modules(model, ADAPTERS))
    kinds = {(m.a.shape[-2], m.scale) for m in adapters.values()}
    if len(kinds) != 1:
        raise ValueError(f"The model has adapters of {len(kinds)} kinds (rank and scale); PEFT's layout is of one.")
    if homeless := sorted(adapters.keys() - names.keys()):  # of an optional part
        raise ValueError(f"{homeless[0]} has an adapter, but transformers has no such module.")
    ((rank, scale),) = kinds
    linears = {path: m for path, m in adapters.items() if isinstance(m, LoRALinear)}
    of_experts = {path: names[path] for path in adapters if path not in linears}
    experts = {} if per_expert else _by_parameter(of_experts, family)
    tensors: dict[str, convert.tensors.Lazy] = {}
    pair_of, swapped = _reader(adapters), family.experts_swapped_in_peft
    for path, m in linears.items():
        for at, name in np.ndenumerate(names[path]):
            tensors |= _lazy(name, m.a.shape[-2:], m.b.shape[-2:], functools.partial(pair_of, path, at))
    for module, of_module in experts.items():
        for parameter, parts in of_module.items():
            tensors |= _fused_lazy(wrapper(module, parameter, set(of_module)), parts, adapters, pair_of, swapped)
    if per_expert:
        _check_one_by_one(of_experts, family)
        for path, of_layers in of_experts.items():
            for at, name in np.ndenumerate(of_layers):
                tensors |= _each_lazy(name, adapters[path], functools.partial(pair_of, path, at))
    whole = _of_head(model)
    tensors |= {OWN.format(name): tensor for name, tensor in whole.items()}
    wrapped = [(f"experts.{p}", len(parts)) for of_module in experts.values() for p, parts in of_module.items()]
    several = sorted({parameter for parameter, count in wrapped if count > 1})
    target_modules, target_parameters = _targets(model, names, adapters.keys())
    if per_expert:
        target_modules = {name.rpartition(".")[2] for path in adapters for name in names[path].flat}
        target_parameters = set()
    config = {
        "peft_type": "LORA", "task_type": TASKS[model.head and model.head.kind],
        "base_model_name_or_path": base_name(base),
        "revision": (over or {}).get("revision"), "r": rank,
        "lora_alpha": scale * rank, "lora_dropout": 0.0, "bias": "none", "inference_mode": True,
        "target_modules": sorted(target_modules),
        "target_parameters": sorted(target_parameters | {parameter for parameter, _ in wrapped}) or None,
        "rank_pattern": {name: 2 * rank for name in several},
        "alpha_pattern": {name: 2 * scale * rank for name in several},
        "fan_in_fan_out": fan_in_fan_out(model),
    }  # fmt: skip
    config |= {"modules_to_save": sorted({name.partition(".")[0] for name in whole})} if whole else {}
    write_once(model, tensors, functools.partial(_write, convert.machine.path("folder", folder), config, over))


def _of_head(model: AbstractModel) -> dict[str, convert.tensors.Lazy]:
    """Return the tensors of a model's head by their names in its checkpoints, such as score.weight, in float32.

    Raises:
        ValueError: the head has linear maps of sentence-transformers, for which PEFT has no place.
    """
    found: dict[str, convert.tensors.Lazy] = {}
    for path, array in jax.tree_util.tree_leaves_with_path(model.head):
        assert model.head is not None, "it has an array"
        name, dtype = model.head.tensors[path_name(path)], np.dtype(np.float32)
        if "/" in name:
            raise ValueError(f"{name} is of a module of sentence-transformers, for which PEFT's layout has no place.")
        found[name] = array.shape, dtype, lambda array=array, dtype=dtype: gathered(array).astype(dtype)
    return found


def _by_parameter(names: Mapping[str, np.ndarray], family: Family) -> dict[str, dict[str, Parts]]:
    """Group the maps of experts, path -> names, by the module and by its parameter in which transformers keeps them."""
    places: dict[str, dict[str, Parts]] = {}
    for path, of_layers in names.items():
        for at, name in np.ndenumerate(of_layers):
            module, parameter, part = expert_place(name, family)
            places.setdefault(module, {}).setdefault(parameter, {})[part] = path, at
    return places


def _reader(adapters: Mapping[str, Any]) -> Callable[[str, tuple[int, ...]], Pair]:
    """Return a function that reads one layer's adapter, by path and index. Each stack is gathered once."""

    @functools.cache
    def whole(path: str) -> list[np.ndarray]:
        return [gathered(array).astype(np.float32) for array in (adapters[path].a, adapters[path].b)]

    def pair_of(path: str, at: tuple[int, ...]) -> Pair:
        a, b = whole(path)
        return Pair(a[at], b[at], adapters[path].scale)

    return pair_of


def _lazy(
    name: str, a: tuple[int, ...], b: tuple[int, ...], pair: Callable[[], Pair]
) -> dict[str, convert.tensors.Lazy]:
    """Return the two tensors of an adapter, of these shapes; `pair` is called when they are written."""
    dtype = np.dtype(np.float32)
    of_a: convert.tensors.Lazy = a, dtype, lambda: pair().a
    return {TENSOR.format(name, "A"): of_a, TENSOR.format(name, "B"): (b, dtype, lambda: pair().b)}


def _check_one_by_one(experts: Mapping[str, np.ndarray], family: Family) -> None:
    """Raise ValueError unless checkpoints have a tensor for each expert of these maps."""
    for path, names in experts.items():
        matched = (
            name for pattern, name in family.checkpoint_names.items() if match_wildcards(pattern, f"{path}.weight")
        )
        if "{expert}" not in next(matched):
            raise ValueError(
                f"{names.flat[0]} is one tensor for all experts in checkpoints of {family.name}, so there are no names "
                "of single ones: save the adapter without per_expert."
            )


def _each_lazy(name: str, adapter: LoRAExpertLinear, pair: Callable[[], Pair]) -> dict[str, convert.tensors.Lazy]:
    """Return the two tensors of each expert of a map, whose name has no number of an expert."""

    def of(expert: int) -> Pair:
        a, b, scale = pair()
        return Pair(a[expert], b[expert], scale)

    (start, _, end), shapes = name.rpartition("."), (adapter.a.shape[-2:], adapter.b.shape[-2:])
    each = (_lazy(f"{start}.{n}.{end}", *shapes, functools.partial(of, n)) for n in range(adapter.a.shape[-3]))
    return dict(itertools.chain.from_iterable(tensors.items() for tensors in each))


def _fused_lazy(
    name: str,
    parts: Parts,
    adapters: Mapping[str, Any],
    pair_of: Callable[[str, tuple[int, ...]], Pair],
    swap: bool,
) -> dict[str, convert.tensors.Lazy]:
    """Return PEFT's two tensors for a parameter of a layer's experts, as `fused` makes them of its parts' adapters."""
    first, _ = next(iter(parts.values()))
    *_, experts, out, in_ = adapters[first].shape
    rank = adapters[first].a.shape[-2] * len(parts)
    out = out if None in parts else 2 * out
    out, in_ = (in_, out) if swap else (out, in_)
    pair = lambda: fused({part: pair_of(*where) for part, where in parts.items()}, swap)
    return _lazy(name, (experts * rank, in_), (out, rank * experts), pair)


def _targets(model: AbstractModel, names: Mapping[str, np.ndarray], adapters: Collection[str]) -> tuple[set, set]:
    """Return the names of PEFT's `target_modules`, and those of the linear maps among its `target_parameters`.

    Modules are named by the last part of their names, unless another linear map without an adapter has that, too.
    """
    linears = {path for path, _ in modules(model, AbstractLinear) if path in names}
    adapted = {name for path in linears.intersection(adapters) for name in names[path].flat}
    others = {name for path in linears.difference(adapters) for name in names[path].flat}
    last = lambda names: {name.rpartition(".")[2] for name in names}
    # PEFT finds these as parameters, and not as modules.
    mistaken = {name for name in adapted if any(modules(model, AbstractExpertLinear)) and last({name}) & OF_AN_EXPERT}
    adapted -= mistaken
    in_config = lambda names: {replaced(name, family_of(model).renamed_by_peft) for name in names}
    targets = adapted if last(adapted) & last(others) else last(adapted)
    return in_config(targets), in_config(f"{name}.weight" for name in mistaken)


def _write(
    folder: pathlib.Path,
    config: dict[str, Any],
    over: Mapping[str, str | None] | None,
    tensors: dict[str, convert.tensors.Lazy],
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / BASE).unlink(missing_ok=True)
    if over:
        (folder / BASE).write_text(json.dumps(dict(over), indent=2) + "\n")
    for name in (WEIGHTS, MANIFEST):  # left by a process that was killed
        (folder / f"{name}.tmp").unlink(missing_ok=True)
    digest = convert.tensors.write_file(folder / f"{WEIGHTS}.tmp", tensors)
    convert.tensors.write_json(folder / f"{MANIFEST}.tmp", {WEIGHTS: digest})
    (folder / f"{CONFIG}.tmp").write_text(json.dumps(config, indent=2) + "\n")
    (folder / MANIFEST).unlink(missing_ok=True)  # first, so that it never lies beside other weights than its own
    for name in (WEIGHTS, CONFIG, MANIFEST):
        os.replace(folder / f"{name}.tmp", folder / name)


def base_name(source: str) -> str:
    """Return the name by which transformers finds a model: its Hub repository, or a folder's absolute path."""
    name = str(REPOSITORIES.get(source) or EMBEDDED.get(source) or source)
    return str(pathlib.Path(name).resolve()) if is_local(name) else name


def template_of(folder: str | os.PathLike[str] | None) -> pathlib.Path | None:
    """Return the file of an adapter's own chat template, or None if it was trained with the model's template."""
    path = pathlib.Path(folder, "chat_template.jinja") if folder else None
    return path if path and path.exists() else None


def warnings_of(folder: str | os.PathLike[str], *, quantize: str | None, weights: str | None = None) -> list[str]:
    """List differences between the model that an adapter is loaded into and the one that it was trained over.

    `weights` is the model's `zoo.fingerprint`. Without it, or without a base.json, weights are not compared.
    """
    path = pathlib.Path(folder) / BASE
    over = convert.files.read_json(path) if path.exists() else {}
    found, rounding = [], over.get("quantize", quantize or "none")
    if weights and over.get("weights", weights) != weights:
        found.append(f"WARNING: {folder} was trained over other weights than these ({path} has their hash).")
    if rounding != (quantize or "none"):
        words = lambda kind: {"none": "not quantised", "stored": "as stored"}.get(kind, f"quantised to {kind}")
        found.append(
            f"WARNING: {folder} was trained over weights {words(rounding)}; these are {words(quantize or 'none')}, so "
            "the model is not quite the one that was trained."
        )
    return found


def load(model: T, folder: str | os.PathLike[str], *, verify: bool = True, check_values: bool = True) -> T:
    """Put the adapters of a folder on a model, in float32. On a mesh they are split like the weights that they adapt.

    The weights of the model's head become those in the folder, if there are any.

    `verify` checks the file against the hash that `save` left beside it. `check_values` refuses NaN and infinities.

    Raises:
        OSError: if the folder lacks one of the two files.
        ValueError: if the model has adapters already, or if a key or a tensor is not implemented or does not fit the
            model; the message names it.
    """
    if any(modules(model, ADAPTERS)):
        raise ValueError("The model has adapters already; zoo.lora.merge puts them into its weights.")
    folder, family, names = pathlib.Path(folder), family_of(model), module_names(model)
    stored = _Stored(_read_config(folder / CONFIG), convert.tensors.open_file(folder / WEIGHTS), family)
    if verify and (folder / MANIFEST).exists():
        convert.tensors.verify_hashes(folder, MANIFEST, [WEIGHTS])
    if check_values:
        for tensor in stored.tensors.values():
            Scan().look(tensor, tensor.part((), np.dtype(np.float32)))
    maps = lambda m: list(modules(m, (AbstractLinear, AbstractExpertLinear)))
    new = [
        _adapted(linear, names[path], stored, folder / WEIGHTS) if path in names else linear
        for path, linear in maps(model)
    ]
    head = model.head and _head(model.head, stored, folder / WEIGHTS)
    if unused := sorted(stored.tensors.keys() - stored.used):
        raise ValueError(
            f"{folder / WEIGHTS} has {len(unused)} tensors that the model has no place for: {', '.join(unused[:5])}."
        )
    result = eqx.tree_at(lambda m: [linear for _, linear in maps(m)], model, new)
    result = with_head(result, head) if head else result
    place = jax.tree.leaves(model)[0].sharding
    if isinstance(place, NamedSharding) and isinstance(place.mesh, Mesh):
        result = jax.device_put(result, shardings(result, family.partition_rules, place.mesh))
    return result


def _head(head: AbstractHead, stored: "_Stored", file: pathlib.Path) -> AbstractHead:
    """Return a head with the weights that are stored for it, in float32.

    Raises:
        ValueError: a tensor has another shape than the head's.
    """

    def own(path: Any, array: Any) -> Any:
        if (tensor := stored.tensors.get(name := OWN.format(head.tensors[path_name(path)]))) is None:
            return array
        if tensor.shape != array.shape:
            raise ValueError(f"{file} has a {name} of shape {tensor.shape}; that of the model's head is {array.shape}.")
        stored.used.add(name)
        return jnp.asarray(tensor.part((), np.dtype(np.float32)))

    return jax.tree_util.tree_map_with_path(own, head)


class _Stored:
    """The adapters in a folder, by transformers' names. `used` has the names of the tensors that were asked for."""

    def __init__(self, config: dict[str, Any], tensors: Iterable[convert.tensors.Tensor], family: Family):
        self.config, self.family = config, family
        ours = {theirs: part for part, theirs in family.renamed_by_peft.items()}
        self.tensors = {replaced(tensor.name, ours): tensor for tensor in tensors}
        self.used: set[str] = set()
        self.wrapped = {target.rpartition(".")[2] for target in config.get("target_parameters") or ()}

    def of_linear(self, name: str, key: str | None = None) -> Pair | None:
        """Return a module's adapter, or None. Patterns in the config are matched with `key`, or else the name."""
        both = [TENSOR.format(name, letter) for letter in "AB"]
        if not self.tensors.keys() >= set(both):
            return None
        self.used.update(both)
        a, b = (self.tensors[each].part((), np.dtype(np.float32)) for each in both)
        return Pair(a, b, scale_of(self.config, key or name))

    def of_experts(self, name: str, experts: int) -> Pair | None:
        """Return the adapters of a map of all experts of a layer, or None."""
        module, parameter, part = expert_place(name, self.family)
        stem, _, kind = name.rpartition(".")
        each = [self.of_linear(f"{stem}.{expert}.{kind}") for expert in range(experts)]  # as in transformers 4
        if all(each):
            a, b, scales = zip(*each, strict=True)
            return Pair(np.stack(a), np.stack(b), scales[0])
        if parameter not in self.wrapped:
            return None
        whole = self.of_linear(wrapper(module, parameter, self.wrapped), f"{module}.{parameter}")
        return whole and part_of(whole, part, experts, self.family.experts_swapped_in_peft)


def _adapted(linear: Any, names: np.ndarray, stored: _Stored, file: pathlib.Path) -> Any:
    """Return a linear map, or a stack of them, with the adapters that are stored by its names, if there are any.

    Raises:
        ValueError: naming the file and the module, if an adapter is of other sizes.
    """
    has_experts = isinstance(linear, AbstractExpertLinear)
    find = functools.partial(stored.of_experts, experts=linear.shape[-3]) if has_experts else stored.of_linear
    found = [(at, pair) for at, name in np.ndenumerate(names) if (pair := find(name))]
    if not found:
        return linear
    *rest, out_features, in_features = linear.shape
    rank, scale = max(pair.a.shape[-2] for _, pair in found), found[0][1].scale
    a, b = np.zeros((*rest, rank, in_features), np.float32), np.zeros((*rest, out_features, rank), np.float32)
    for at, pair in found:  # zeros stay where a layer has a lower rank, or no adapter
        r = pair.a.shape[-2]
        if (pair.a.shape[-1], pair.b.shape[-2]) != (in_features, out_features):
            raise ValueError(
                f"{file} has an adapter of {pair.a.shape[-1]} to {pair.b.shape[-2]} features for {names[at]}; the "
                f"model has {in_features} to {out_features} there."
            )
        a[at][..., :r, :], b[at][..., :r] = pair.a, pair.b * np.float32(pair.scale / scale)
    make = functools.partial(LoRAExpertLinear if has_experts else LoRALinear, scale=scale)
    stacked = len(linear.shape) > (3 if has_experts else 2)
    return (eqx.filter_vmap(make) if stacked else make)(linear, jnp.asarray(a), jnp.asarray(b))


def _read_config(path: pathlib.Path) -> dict[str, Any]:
    config = convert.files.read_json(path)
    for key, value in config.items():
        known = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": INITIAL}.get(key)
        if (known and value not in known) or (not known and value and key not in READ | NOT_THE_MODEL):
            raise ValueError(f"{path} says {key}={value!r}, which is not implemented.")
    return config


def scale_of(config: dict[str, Any], name: str) -> float:
    """Return the factor by which PEFT multiplies an adapter of this name."""

    def of(patterns: str, default: str) -> float:
        matches = (value for key, value in (config.get(patterns) or {}).items() if re.match(rf"(.*\.)?({key})$", name))
        return float(next(matches, config[default]))

    rank, alpha = of("rank_pattern", "r"), of("alpha_pattern", "lora_alpha")
    return alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)


# ======================================================================================================================
# Names, and the adapters of experts.
# ======================================================================================================================


def module_names(model: AbstractModel) -> dict[str, np.ndarray]:
    """Return path of a linear map -> its names in transformers, one for each layer of a stack.

    The names are those of checkpoints, except for the parts in the family's `names_in_transformers`. Names of experts
    have no number. A map that is no module in transformers is left out.
    """
    family = family_of(model)
    plain = skeleton(family, model.config, ("vision",) if has_vision(model) else ())

    def named(tensor: str) -> str:
        tensor = published_name(tensor, model, family)
        return replaced(tensor, family.names_in_transformers).removesuffix(".weight")

    experts, found = {path for path, _ in modules(plain, AbstractExpertLinear)}, {}
    for p in parameters(plain, family):
        path, names = p.path.removesuffix(".weight"), p.names
        if path in experts and names.ndim > p.array.ndim - 3:  # the checkpoint has a tensor for each expert
            names = np.vectorize(lambda name: re.sub(r"\.0(\.\w+\.weight)$", r"\1", name), [object])(names[..., 0])
        if path in experts or names.flat[0].endswith(".weight"):
            found[path] = np.vectorize(named, [object])(names)
    return found


def replaced(name: str, parts: Mapping[str, str]) -> str:
    """Return a name with other parts in place of some."""
    for part, other in parts.items():
        name = name.replace(part, other)
    return name


def fan_in_fan_out(model: AbstractModel) -> bool:
    """Whether transformers stores the model's matrices as (in, out)."""
    plain = skeleton(family_of(model), model.config)
    return any(p.transposed and p.array.ndim - p.names.ndim == 2 for p in parameters(plain, family_of(model)))


def expert_place(name: str, family: Family) -> tuple[str, str, int | None]:
    """Return an experts' map's module and parameter in transformers, and its part of that: 0 gate, 1 up, None all.

    Raises:
        ValueError: if the family's `experts_in_transformers` does not have the map.
    """
    for end, (parameter, part) in family.experts_in_transformers.items():
        if name.endswith(f".{end}"):
            module, _, parameter = (name.removesuffix(end) + parameter).rpartition(".")
            return module, parameter, part
    raise ValueError(f"experts_in_transformers of {family.name} does not say where transformers keeps {name}.")


def wrapper(module: str, parameter: str, wrapped: set[str]) -> str:
    """Return the module that has a parameter's adapter in PEFT: if both are adapted, down_proj's wraps the other's."""
    return f"{module}.base_layer" if parameter != "down_proj" and "down_proj" in wrapped else module


def fused(parts: dict[int | None, Pair], swap: bool) -> Pair:
    """Make PEFT's two tensors for the experts of a layer, from the adapters of a parameter or of its two parts.

    The adapters of gate and up, of rank r each, become one of rank 2 r:

        a = [a_gate]    b = [b_gate    0 ]
            [ a_up ]        [  0     b_up]
    """
    pairs = [pair for _, pair in sorted(parts.items(), key=lambda item: item[0] or 0)]
    a, b, scale = np.concatenate([pair.a for pair in pairs], axis=1), pairs[0].b, pairs[0].scale
    if None not in parts:
        zeros = np.zeros_like(b)
        rows = [[p.b if part == row else zeros for part, p in sorted(parts.items())] for row in (0, 1)]
        b = np.concatenate([np.concatenate(row, axis=2) for row in rows], axis=1)
    if swap:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    return Pair(a.reshape(-1, a.shape[2]), b.transpose(1, 2, 0).reshape(b.shape[1], -1), scale)


def part_of(whole: Pair, part: int | None, experts: int, swap: bool) -> Pair | None:
    """Extract the adapter of a part from PEFT's two tensors: the inverse of `fused`.

    If one half of the ranks is for gate and the other for up, only the part's half is kept. Returns None if PEFT's
    adapter acts only on the other part.
    """
    a = whole.a.reshape(experts, -1, whole.a.shape[1])
    b = whole.b.reshape(len(whole.b), -1, experts).transpose(2, 0, 1)
    if swap:
        a, b = b.swapaxes(1, 2), a.swapaxes(1, 2)
    if part is None:
        return Pair(a, b, whole.scale)
    (gate, up), half = np.split(b, 2, axis=1), a.shape[1] // 2
    if a.shape[1] % 2 == 0 and not gate[..., half:].any() and not up[..., :half].any():
        a, gate, up = np.split(a, 2, axis=1)[part], gate[..., :half], up[..., half:]
    mine, other = (gate, up) if part == 0 else (up, gate)
    return Pair(a, mine, whole.scale) if mine.any() or not other.any() else None
