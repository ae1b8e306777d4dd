"""Facts of each architecture of llama.cpp: its keys of metadata and names of tensors, and those of the Hub.

Every key that begins with the architecture's name is read, or is in `WITHOUT_INFLUENCE`; every tensor has a name on the
Hub, or says something of config.json. Others are refused. Sources: conversion/*.py (what is written) and
src/models/*.cpp (what is computed) of github.com/ggml-org/llama.cpp.
"""

import functools
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.gguf.container import FLOATS, Alternating, Heads, Opened, Rows, Stored, plain, short, values
from convert.packed import Packed
from convert.tensors import Tensor


# Keys that change no number of the model: what other programs ask for.
WITHOUT_INFLUENCE = ("pooling_type", "tensor_data_layout", "rope.scaling.finetuned")
# Keys that change nothing if they have one of these values, of architectures that do not read them.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "expert_shared_count": (0,),
    "expert_shared_feed_forward_length": (0,),
    "expert_group_count": (0, 1),
    "expert_group_used_count": (0, 1),
    "expert_gating_func": (1,),  # softmax
    "expert_weights_scale": (0, 1),
    "leading_dense_block_count": (0,),
    "nextn_predict_layers": (0,),
    "rope.scaling.yarn_log_multiplier": (0,),
    "attention.sliding_window": (0,),
}
FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
STATED = FREQUENCIES, LONG, SHORT
SIZES = {  # config.json's keys that most architectures have
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_gate"}  # config.json's key -> a module that has a bias then


@dataclass(frozen=True)
class Content:
    """The source of config.json: a file that was opened, or one that is yet to be written."""

    path: pathlib.Path
    metadata: Mapping[str, Any]
    shapes: Mapping[str, tuple[int, ...]]
    """Those of all tensors."""
    vectors: Mapping[str, np.ndarray]
    """The values of those tensors that state a scaling of rotary positions."""
    dtype: np.dtype = FLOATS["F32"]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))


def described(opened: Opened) -> Content:
    """Returns what config.json follows from."""
    shapes = {name: stored.shape for name, stored in opened.tensors.items()}
    vectors = {name: values(opened.tensors[name]) for name in STATED if name in shapes}
    return Content(opened.path, opened.metadata, shapes, vectors, opened.dtype)


class Keys:
    """The keys of an architecture's metadata, of which each is taken once."""

    def __init__(self, content: Content):
        self.content, self.prefix = content, f"{content.architecture}."
        self._rest = {key.removeprefix(self.prefix): value for key, value in content.metadata.items()
                      if key.startswith(self.prefix)}  # fmt: skip

    def take(self, key: str, default: Any = None) -> Any:
        """Return a key's value, or the default if the file has no such key."""
        value = self._rest.pop(key, default)
        return value.tolist() if isinstance(value, np.ndarray) else value

    def need(self, key: str, *allowed: Any) -> None:
        """Take a key, which may be absent, and otherwise must have one of these values.

        Raises:
            ValueError: it has another one.
        """
        value = self.take(key)
        if value is not None and value not in allowed:
            raise self.refusal(key, value, f"; what is read: {' and '.join(map(repr, allowed))}")

    def refusal(self, key: str, value: Any, why: str) -> ValueError:
        return ValueError(f"{self.content.path} says {self.prefix}{key}={value!r:.200}, which is not implemented{why}.")

    def end(self) -> None:
        """Raise ValueError if a key was not taken that may change what the model computes."""
        for key, value in self._rest.items():
            if key not in WITHOUT_INFLUENCE and value not in NEUTRAL.get(key, ()):
                raise self.refusal(key, value, "")


Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp as the family of one model_type."""

    name: str
    """general.architecture."""
    model_type: str
    kind: str
    """The class of transformers, for `architectures` in config.json."""
    keys: Mapping[str, str]
    """Key of the metadata, without the architecture's name -> key of config.json with the same value."""
    modules: Mapping[str, str]
    """Module of the file -> module on the Hub; those in layers without their beginnings."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json that every such model has."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values of config.json where the file does not have the key."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """Module that holds all experts -> module of one, with {expert}."""
    biases: Mapping[str, str] = field(default_factory=lambda: BIASES)
    """Key of config.json -> a module of the file that has a bias if the key is true."""
    interleaved: bool = False
    """Whether queries and keys have interleaved pairs, and the file's rows are ordered so."""
    shift: float = 0.0
    """The number that the file's norms have been raised by."""
    states_head: bool = True
    """Whether config.json has the key head_dim."""
    ties: bool = True
    """Whether config.json has the key tie_word_embeddings."""
    read: Callable[[Keys, Config], Config] = lambda keys, config: {}
    """Makes further keys of config.json of those that are left, and of those made before."""
    write: Callable[[Config], Config] = lambda config: {}
    """Makes further keys of the metadata, of config.json."""
    whole: Mapping[str, str] = field(default_factory=lambda: WHOLE)
    """Modules outside of layers."""
    bare: tuple[str, ...] = ()
    """Modules whose only tensor has no name of a parameter on the Hub."""
    squeezed: tuple[str, ...] = ()
    """Modules whose weight has an axis of length 1 between its two on the Hub."""
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Module on the Hub with the rows of modules of the file in turn, of all experts (`Alternating`)."""
    split: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """Module on the Hub with the rows of two modules of the file, head by head (`Heads`)."""
    dropped: tuple[str, ...] = ()
    """Tensors whose content follows from others, as patterns."""
    layers: str = "model.layers.{}."
    """The beginning of a layer's names on the Hub."""

    @property
    def names(self) -> dict[str, str]:
        """Returns the modules of a whole model and of a layer `{}`, by the file's names."""
        return {**self.whole, **{f"blk.{{}}.{ours}": self.layers + theirs for ours, theirs in self.modules.items()}}


# ======================================================================================================================
# Reading
# ======================================================================================================================


def of(opened: Opened | Content) -> Architecture:
    """Returns the architecture of a file.

    Raises:
        ValueError: it is not implemented; the message names those that are.
    """
    name, experts = opened.architecture, bool(opened.metadata.get(f"{opened.architecture}.expert_count"))
    found = [each for each in ARCHITECTURES if each.name == name]
    found = [each for each in found if bool(each.experts) == experts or len(found) == 1]
    if not found:
        known = ", ".join(sorted({each.name for each in ARCHITECTURES}))
        raise ValueError(f"{opened.path} has the architecture {name!r}; read are {known}.")
    return found[0]


def config_json(content: Content) -> Config:
    """Makes config.json of the metadata and of the tensors' names and shapes.

    Raises:
        ValueError: a key is missing, unknown or has a value that is not implemented; the message names it.
    """
    kind, keys = of(content), Keys(content)
    config: Config = {"model_type": kind.model_type, "architectures": [kind.kind], **kind.implied, **kind.defaults}
    for key, name in kind.keys.items():
        if (value := keys.take(key)) is not None:
            # Some files state a number for each layer.
            config[name] = value[0] if isinstance(value, list) and value == value[:1] * len(value) != [] else value
    for name in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
        if not isinstance(config.get(name), int) or config[name] < 1:
            raise ValueError(f"{content.path} lacks {keys.prefix}{_inverse(kind.keys)[name]}, or it is no number.")
    if config["num_hidden_layers"] > len(content.shapes):  # lists for so many layers could take all memory
        raise ValueError(
            f"{content.path} says {keys.prefix}block_count={config['num_hidden_layers']}, but has only "
            f"{len(content.shapes)} tensors."
        )
    if (embedding := content.shapes.get("token_embd.weight")) is None or len(embedding) != 2:
        raise ValueError(f"{content.path} has no matrix token_embd.weight; other parts of a model are not read alone.")
    config["vocab_size"] = embedding[0]
    keys.need("vocab_size", embedding[0])
    if kind.ties:
        config["tie_word_embeddings"] = "output.weight" not in content.shapes
    config |= {key: f"blk.0.{module}.bias" in content.shapes for key, module in kind.biases.items()}
    config |= kind.read(keys, config)
    if kind.states_head:
        config |= _head(keys, config)
    else:
        head = config["hidden_size"] // config["num_attention_heads"]
        keys.need("attention.key_length", head)
        keys.need("attention.value_length", head)
        keys.need("rope.dimension_count", head)
    config |= _scaling(keys, config)
    keys.end()
    ends = {"bos_token_id": "bos_token_id", "eos_token_id": "eos_token_id", "padding_token_id": "pad_token_id"}
    said = {name: content.metadata.get(f"tokenizer.ggml.{key}") for key, name in ends.items()}
    return config | {name: id for name, id in said.items() if id is not None} | {"torch_dtype": content.dtype.name}


def _head_of(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _head(keys: Keys, config: Config) -> Config:
    turned = keys.take("rope.dimension_count")
    head = keys.take("attention.key_length", turned or config["hidden_size"] // config["num_attention_heads"])
    keys.need("attention.value_length", head)
    if turned not in (None, head):
        raise keys.refusal("rope.dimension_count", turned, f": heads have {head} features")
    return {"head_dim": head}


def _scaling(keys: Keys, config: Config) -> Config:
    """Makes `rope_scaling`, unless `config` has one already."""
    kind, vectors = keys.take("rope.scaling.type", "none"), keys.content.vectors
    factor, original = keys.take("rope.scaling.factor"), keys.take("rope.scaling.original_context_length")
    if "rope_scaling" in config:
        return {}
    stated: Config
    if FREQUENCIES in vectors:
        if kind != "none":
            raise keys.refusal("rope.scaling.type", kind, f" beside {FREQUENCIES}")
        stated = _llama3(vectors[FREQUENCIES], config)
    elif kind == "none" or (kind == "linear" and factor in (None, 0, 1)):
        return {"rope_scaling": None}
    elif kind == "linear":
        stated = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn":
        names = {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow", "yarn_attn_factor": "attention_factor"}
        given = {name: keys.take(f"rope.scaling.{key}") for key, name in names.items()}
        keys.need("rope.scaling.yarn_ext_factor", 1.0)
        stated = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        stated |= {name: value for name, value in given.items() if value is not None}
    else:
        raise keys.refusal("rope.scaling.type", kind, "")
    return {"rope_scaling": stated}


def _llama3(found: np.ndarray, config: Config) -> Config:
    """Finds the parameters of Llama 3's scaling by which these divisors of the frequencies follow.

    Divisors that follow from none are stated as LongRoPE's, which take any.
    """
    head = _head_of(config)
    factor = short(float(found.max()))
    if len(found) != head // 2:
        raise ValueError(f"{FREQUENCIES} has {len(found)} divisors, where heads have {head} features.")
    for original in [8192, *(2**n for n in range(4, 21))]:
        said = dict(
            rope_type="llama3", factor=factor, low_freq_factor=1.0, high_freq_factor=4.0,
            original_max_position_embeddings=original,
        )  # fmt: skip
        made = frequencies(said, config["rope_theta"], head)
        if np.allclose(made, found, rtol=1e-5, atol=0):
            return said
    divisors, positions = [short(x) for x in found.tolist()], config["max_position_embeddings"]
    return dict(
        rope_type="longrope", short_factor=divisors, long_factor=divisors, factor=1.0, attention_factor=1.0,
        original_max_position_embeddings=positions,
    )  # fmt: skip


def frequencies(scaling: Config, theta: float, head: int) -> np.ndarray:
    """Returns the divisors of the frequencies of a head in Llama 3's scaling, float32 [head / 2].

    Source: `generate_extra_tensors` in conversion/llama.py of github.com/ggml-org/llama.cpp.
    """
    lengths = 2 * math.pi * theta ** (np.arange(0, head, 2) / head)
    factor, low, high = (scaling[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
    original = scaling["original_max_position_embeddings"]
    smooth = (original / lengths - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    divisors = np.where(lengths < original / high, 1, np.where(lengths > original / low, factor, between))
    return divisors.astype(np.float32)


def tensors(opened: Opened) -> dict[str, Tensor | Packed]:
    """Returns the tensors under their names on the Hub, in its order of rows. Values are read later.

    Raises:
        ValueError: the architecture is not implemented or has no such tensor; the message names it.
    """
    kind, out = of(opened), {}
    config, names = config_json(described(opened)), kind.names
    parts = {part for several in (*kind.joined.values(), *kind.split.values()) for part in several}
    for name, stored in opened.tensors.items():
        if name in STATED or any(re.fullmatch(pattern, name) for pattern in kind.dropped):
            continue
        layer, module, parameter = _parts(name)
        if experts := kind.experts.get(module) if layer is not None and parameter in ("weight", "bias") else None:
            out |= _experts(stored, kind.layers.format(layer) + experts, parameter, opened.dtype)
            continue
        if layer is not None and module in parts:
            continue  # `_together` has them
        hub = names.get(module if layer is None else f"blk.{{}}.{module}")
        if hub is None or parameter not in ("weight", "bias"):
            raise ValueError(f"{opened.path} has the tensor {name}, which {kind.name} does not have; it is not read.")
        hub = hub.format(layer) if module in kind.bare else f"{hub.format(layer)}.{parameter}"
        sizes = (stored.shape[0], 1, stored.shape[1]) if module in kind.squeezed else stored.shape
        turned = kind.interleaved and module in ("attn_q", "attn_k")
        shift = -kind.shift if module.endswith("norm") else 0.0
        if turned or shift:
            head = _head_of(config) if turned else 0
            out[hub] = Rows(
                name=hub, dtype=opened.dtype, stored=stored, sizes=stored.shape, interleaved=head, shift=shift
            )
        else:
            out[hub] = plain(stored, hub, sizes, opened.dtype)
    return out | _together(kind, opened)


def _together(kind: Architecture, opened: Opened) -> dict[str, Tensor | Packed]:
    """Returns the tensors of the Hub that several tensors of the file make, or one with its axes swapped.

    Raises:
        ValueError: some of these are missing; the message names them.
    """
    out: dict[str, Tensor | Packed] = {}

    def rows(layer: int, modules: tuple[str, ...], parameter: str, name: str) -> tuple[Rows, ...]:
        named = [f"blk.{layer}.{module}.{parameter}" for module in modules]
        missing = [each for each in named if each not in opened.tensors]
        if 0 < len(missing) < len(named):
            raise ValueError(f"{opened.path} lacks {missing[0]}, without which {name} is not whole.")
        stored = [opened.tensors[each] for each in named if not missing]
        return tuple(Rows(name=name, stored=each, sizes=each.shape) for each in stored)

    for layer in sorted({layer for name in opened.tensors if (layer := _parts(name)[0]) is not None}):
        for hub, modules in kind.joined.items():
            for parameter, end in ("weight", ""), ("bias", "_bias"):
                name = kind.layers.format(layer) + hub + end
                if found := rows(layer, modules, parameter, name):
                    out[name] = Alternating(name=name, dtype=opened.dtype, parts=found)
        for hub, modules in kind.split.items():
            name = f"{kind.layers.format(layer)}{hub}.weight"
            if found := rows(layer, modules, "weight", name):
                out[name] = Heads(name=name, dtype=opened.dtype, swapped=found[0], plain=found[1])
    return out


def _parts(name: str) -> tuple[int | None, str, str]:
    """Splits a name: layer or None, module, parameter."""
    body, _, parameter = name.rpartition(".")
    if match := re.fullmatch(r"blk\.(\d+)\.(.+)", body):
        return int(match[1]), match[2], parameter
    return None, body, parameter


def _experts(stored: Stored, name: str, parameter: str, dtype: np.dtype) -> dict[str, Tensor | Packed]:
    """Returns each expert's matrix or bias of a tensor of all of them."""
    out, (count, *shape) = {}, stored.shape
    height, (_, width) = math.prod(shape[:-1]), stored.rows.shape
    for n in range(count):
        own = f"{name.format(expert=n)}.{parameter}"
        offset = stored.rows.offset + n * height * width
        rows = replace(stored.rows, shape=(height, width), offset=offset)
        out[own] = plain(Stored(stored.name, tuple(shape), stored.kind, rows), own, tuple(shape), dtype)
    return out


# ======================================================================================================================
# Writing
# ======================================================================================================================


def for_config(config: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a model with this config.json is written as.

    Raises:
        ValueError: there is none; the message names those model_types that have one.
    """
    kinds = {each.model_type: each for each in ARCHITECTURES}
    kinds |= {other: kinds[kind] for other, kind in ALIKE.items()}
    if (found := kinds.get(config["model_type"])) is None:
        raise ValueError(
            f"A model of the type {config['model_type']!r} is not written to GGUF; those that are: {', '.join(kinds)}."
        )
    return found


def metadata(kind: Architecture, config: Mapping[str, Any]) -> dict[str, Any]:
    """Makes the metadata of the architecture, of config.json as `zoo.config.write` writes it."""
    out = {key: config[name] for key, name in kind.keys.items() if config.get(name) is not None}
    out["vocab_size"] = config["vocab_size"]
    head = _head_of(config)
    if kind.states_head:
        out |= {"attention.key_length": head, "attention.value_length": head}
    out["rope.dimension_count"] = head
    scaling = config.get("rope_scaling") or {}
    match scaling.get("rope_type"):
        case "linear":
            out |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
        case "yarn":
            out |= {
                "rope.scaling.type": "yarn",
                "rope.scaling.factor": float(scaling["factor"]),
                "rope.scaling.original_context_length": scaling["original_max_position_embeddings"],
            }
            for name, key in {
                "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow", "attention_factor": "yarn_attn_factor"
            }.items():  # fmt: skip
                if scaling.get(name) is not None:
                    out[f"rope.scaling.{key}"] = float(scaling[name])
        case "llama3" | "longrope" | None:
            pass  # in tensors
        case other:
            raise ValueError(f"llama.cpp has no rope scaling {other!r}.")
    return {f"{kind.name}.{key}": value for key, value in (out | kind.write(dict(config))).items()}


Made = tuple[str, tuple[int, ...], Callable[[slice], np.ndarray]]
"""A tensor to write: its name, its shape, and a function that makes some of its rows (experts), in float32."""


def made(kind: Architecture, config: Mapping[str, Any], hub: Mapping[str, Any]) -> Iterable[Made]:
    """Yields the tensors of a file, made of those of a checkpoint (name -> shape, `part(index, dtype)`).

    Raises:
        ValueError: the architecture has no place for a tensor; the message names it.
    """
    scaling = config.get("rope_scaling") or {}
    head = _head_of(config)
    fixed = {}
    if scaling.get("rope_type") == "llama3":
        fixed[FREQUENCIES] = frequencies(scaling, config["rope_theta"], head)
    elif scaling.get("rope_type") == "longrope":
        fixed = {LONG: scaling["long_factor"], SHORT: scaling["short_factor"]}
    for name, divisors in fixed.items():
        array = np.array(divisors, np.float32)
        yield name, array.shape, lambda rows, array=array: array[rows]
    modules, used = _inverse(kind.names), set()
    for name, tensor in hub.items():
        if name in used:
            continue
        if several := _apart(kind, config, name, tensor):
            yield from several
            continue
        body, _, parameter = name.rpartition(".")
        layer, general = _general(body, kind.layers)
        if (own := _general(name, kind.layers))[1] in modules:  # a module without a parameter's name
            (layer, general), parameter = own, "weight"
        if (module := modules.get(general)) is not None:
            ours = f"{module.format(layer)}.{parameter}"
            turned = kind.interleaved and module.endswith((".attn_q", ".attn_k"))
            shift = kind.shift if module.endswith("norm") else 0.0
            if ours.endswith(tuple(f".{each}.weight" for each in kind.squeezed)):
                flat = lambda rows, tensor=tensor: tensor.part((rows,), np.dtype(np.float32))[:, 0]
                yield ours, (tensor.shape[0], tensor.shape[2]), flat
            else:
                yield ours, tensor.shape, _part(tensor, head if turned else 0, shift)
            continue
        for ours, theirs in kind.experts.items():
            if general == kind.layers + theirs.format(expert=0):
                each = kind.layers.format(layer) + theirs + f".{parameter}"
                count = next(n for n in range(len(hub) + 1) if each.format(expert=n) not in hub)
                all_of = [hub[each.format(expert=n)] for n in range(count)]
                used |= {each.format(expert=n) for n in range(count)}
                stack = lambda rows, all_of=all_of: np.stack(
                    [one.part((), np.dtype(np.float32)) for one in all_of[rows]]
                )
                yield f"blk.{layer}.{ours}.{parameter}", (count, *tensor.shape), stack
                break
        else:
            raise ValueError(f"{name} has no place in a GGUF file of {kind.name}.")


def _apart(kind: Architecture, config: Mapping[str, Any], name: str, tensor: Any) -> list[Made]:
    """Returns the tensors of the file that one of the Hub makes, in the way of `_together`; none if it makes itself."""
    layer, general = _general(name, kind.layers)
    for hub, modules in kind.joined.items():
        for parameter, end in ("weight", ""), ("bias", "_bias"):
            if general == kind.layers + hub + end:
                return _in_turn([f"blk.{layer}.{module}.{parameter}" for module in modules], tensor)
    for hub, modules in kind.split.items():
        if general == f"{kind.layers}{hub}.weight":
            names = [f"blk.{layer}.{module}.weight" for module in modules]
            return _by_head(names, tensor, config["num_attention_heads"], config["qk_nope_head_dim"])
    return []


def _in_turn(names: Sequence[str], tensor: Any) -> list[Made]:
    """Returns the tensors whose rows are in turn a tensor's last axis, `Alternating`'s inverse."""
    (experts, *columns, rows), count = tensor.shape, len(names)
    shape = (experts, rows // count, *columns)

    def part(n: int, taken: slice) -> np.ndarray:
        return np.ascontiguousarray(np.moveaxis(tensor.part((taken,), np.dtype(np.float32)), -1, 1)[:, n::count])

    return [(name, shape, functools.partial(part, n)) for n, name in enumerate(names)]


def _by_head(names: Sequence[str], tensor: Any, heads: int, keys: int) -> list[Made]:
    """Returns the tensors of a head's first rows, swapped, and of its others, `Heads`' inverse."""
    height, latent = tensor.shape[0] // heads, tensor.shape[1]

    def some(taken: slice) -> np.ndarray:
        rows = slice(taken.start * height, taken.stop * height)
        return tensor.part((rows,), np.dtype(np.float32)).reshape(-1, height, latent)

    swapped = lambda taken: np.ascontiguousarray(some(taken)[:, :keys].swapaxes(1, 2))
    plain = lambda taken: np.ascontiguousarray(some(taken)[:, keys:])
    return [(names[0], (heads, latent, keys), swapped), (names[1], (heads, height - keys, latent), plain)]


def _part(tensor: Any, head: int, shift: float) -> Callable[[slice], np.ndarray]:
    def rows(taken: slice) -> np.ndarray:
        if not head:
            made = tensor.part((taken,), np.dtype(np.float32))
            return made + np.float32(shift) if shift else made
        whole = range(tensor.shape[0])[taken]
        low, high = whole.start // head * head, -(-whole.stop // head) * head
        read = tensor.part((slice(low, high),), np.dtype(np.float32))
        pairs = read.reshape(-1, 2, head // 2, *read.shape[1:]).swapaxes(1, 2).reshape(read.shape)
        return pairs[whole.start - low : whole.stop - low]

    return rows


def _general(body: str, layers: str) -> tuple[str, str]:
    """Splits a module's name on the Hub: its layer, and the name with {} in its place."""
    before, after = layers.split("{}")
    if match := re.fullmatch(re.escape(before) + r"(\d+)" + re.escape(after) + "(.+)", body):
        return match[1], layers + match[2]
    return "", body


def _inverse(names: Mapping[str, str]) -> dict[str, str]:
    return {theirs: ours for ours, theirs in names.items()}


# ======================================================================================================================
# Architectures
# ======================================================================================================================


def _window_by_pattern(period: int) -> Callable[[Keys, Config], Config]:
    """Reads which layers slide: all but each `period`-th, unless the file says it of each."""

    def read(keys: Keys, config: Config) -> Config:
        pattern = keys.take("attention.sliding_window_pattern")
        slides = lambda n: (n + 1) % period != 0
        if isinstance(pattern, list):
            if len(pattern) != config["num_hidden_layers"]:
                raise keys.refusal("attention.sliding_window_pattern", pattern, ": it needs one for each layer")
            slides = lambda n: bool(pattern[n])
        elif pattern not in (None, period):
            slides = lambda n: (n + 1) % pattern != 0
        layers = range(config["num_hidden_layers"])
        return {"layer_types": [f"{'sliding' if slides(n) else 'full'}_attention" for n in layers]}

    return read


def _pattern(config: Config, period: int) -> Config:
    """Makes the key that says which layers slide, unless it is all but each `period`-th, which llama.cpp takes."""
    slides = [kind == "sliding_attention" for kind in config["layer_types"]]
    usual = [(n + 1) % period != 0 for n in range(len(slides))]
    return {} if slides == usual else {"attention.sliding_window_pattern": slides}


def _gemma2(keys: Keys, config: Config) -> Config:
    scalar = _scalar(config, keys, layers=46)
    return _window_by_pattern(2)(keys, config) | scalar | {"hidden_act": "gelu_pytorch_tanh"}


def _scalar(config: Config, keys: Keys, layers: int) -> Config:
    """Follows llama.cpp: the square of what scores are divided by is the head's size, but in 27B hidden / heads."""
    large, heads = config["num_hidden_layers"] == layers, config["num_attention_heads"]
    return {"query_pre_attn_scalar": config["hidden_size"] // heads if large else
            keys.content.metadata.get(f"{keys.prefix}attention.key_length", 256)}  # fmt: skip


def _gemma3(keys: Keys, config: Config) -> Config:
    return _window_by_pattern(6)(keys, config) | _scalar(config, keys, layers=62)


def _phi3(keys: Keys, config: Config) -> Config:
    head, vectors = config["hidden_size"] // config["num_attention_heads"], keys.content.vectors
    turned = keys.take("rope.dimension_count", head)
    positions = config["max_position_embeddings"]
    original = keys.take("rope.scaling.original_context_length", positions)
    keys.need("rope.scaling.type", "none", "longrope")
    out = {
        "partial_rotary_factor": turned / head,
        "original_max_position_embeddings": original,
        "sliding_window": config.get("sliding_window") or None,
        "rope_scaling": None,
    }
    attention = keys.take("rope.scaling.attn_factor")
    if LONG in vectors:
        long, short_ = ([short(x) for x in vectors[name].tolist()] for name in (LONG, SHORT))
        out["rope_scaling"] = {"type": "longrope", "short_factor": short_, "long_factor": long}
        scale = positions / original
        follows = math.sqrt(1 + math.log(scale) / math.log(original)) if scale > 1 else 1.0
        if attention is not None and not math.isclose(attention, follows, rel_tol=1e-5):
            raise keys.refusal("rope.scaling.attn_factor", attention, f": {follows:.6g} follows from the lengths")
    elif attention not in (None, 1.0):
        raise keys.refusal("rope.scaling.attn_factor", attention, f" without {LONG}")
    return out


def _phi3_keys(config: Config) -> Config:
    head, scaling = config["hidden_size"] // config["num_attention_heads"], config.get("rope_scaling") or {}
    positions = config["max_position_embeddings"]
    original = scaling.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    out: Config = {
        "rope.dimension_count": round(head * config.get("partial_rotary_factor", 1.0)),
        "rope.scaling.original_context_length": original or positions,
        "attention.sliding_window": config.get("sliding_window") or 0,
    }
    if scaling:
        scale = positions / out["rope.scaling.original_context_length"]
        grown = math.sqrt(1 + math.log(scale) / math.log(positions / scale)) if scale > 1 else 1.0
        out["rope.scaling.attn_factor"] = grown
    return out


def _lfm2(keys: Keys, config: Config) -> Config:
    heads = keys.take("attention.head_count_kv")
    heads = heads if isinstance(heads, list) else [heads] * config["num_hidden_layers"]
    if len({*heads} - {0}) != 1 or len(heads) != config["num_hidden_layers"]:
        raise keys.refusal("attention.head_count_kv", heads, ": it needs one number, or 0, for each layer")
    return {
        "num_key_value_heads": max(heads),
        "layer_types": ["full_attention" if count else "conv" for count in heads],
        "block_auto_adjust_ff_dim": False,
    }


def _lfm2_keys(config: Config) -> Config:
    width = config["intermediate_size"]
    if config["block_auto_adjust_ff_dim"]:
        width = int(2 * width / 3)
        if (factor := config["block_ffn_dim_multiplier"]) is not None:
            width = -(-int(factor * width) // config["block_multiple_of"]) * config["block_multiple_of"]
    count = config["num_key_value_heads"]
    heads = [count if kind == "full_attention" else 0 for kind in config["layer_types"]]
    return {"feed_forward_length": width, "attention.head_count_kv": heads}


def _gpt_oss(keys: Keys, config: Config) -> Config:
    keys.need("expert_feed_forward_length", config["intermediate_size"])
    scaling = _scaling(keys, config)["rope_scaling"]  # in these models the ramp's ends are no whole numbers
    return _window_by_pattern(2)(keys, config) | {"rope_scaling": scaling and scaling | {"truncate": False}}


def _deepseek2(keys: Keys, config: Config) -> Config:
    heads, latent, turned = config["num_attention_heads"], config["kv_lora_rank"], keys.take("rope.dimension_count")
    keys.need("attention.head_count_kv", 1, heads)
    keys.need("expert_weights_norm", False)
    if (key := keys.take("attention.key_length_mla")) is None:  # files before March 2025 have kv_b_proj whole
        key, value = keys.take("attention.key_length"), keys.take("attention.value_length")
    else:
        value = keys.take("attention.value_length_mla")
        keys.need("attention.key_length", latent + (turned or 0))
        keys.need("attention.value_length", latent)
    if not isinstance(turned, int) or not isinstance(key, int):
        raise ValueError(f"{keys.content.path} lacks {keys.prefix}rope.dimension_count or the length of keys.")
    scaling, shared = _scaling(keys, config)["rope_scaling"], keys.take("rope.scaling.yarn_log_multiplier")
    if scaling and shared:  # the file has one number for both, which are equal in all releases
        scaling |= dict.fromkeys(("mscale", "mscale_all_dim"), short(10 * shared))
    return {
        "num_key_value_heads": heads, "qk_rope_head_dim": turned, "qk_nope_head_dim": key - turned,
        "v_head_dim": value, "q_lora_rank": config.get("q_lora_rank"), "rope_scaling": scaling,
        "topk_method": "group_limited_greedy" if config.get("n_group", 1) > 1 else "greedy",
    }  # fmt: skip


def _deepseek2_keys(config: Config) -> Config:
    latent, turned, scaling = config["kv_lora_rank"], config["qk_rope_head_dim"], config.get("rope_scaling") or {}
    out: Config = {
        "attention.head_count_kv": 1, "attention.key_length": latent + turned, "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + turned,
        "attention.value_length_mla": config["v_head_dim"], "rope.dimension_count": turned, "expert_gating_func": 1,
    }  # fmt: skip
    if scaling.get("mscale_all_dim"):
        out["rope.scaling.yarn_log_multiplier"] = 0.1 * scaling["mscale_all_dim"]
    return out


SILU = {"hidden_act": "silu"}
GELU = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
WINDOWLESS = SILU | {"use_sliding_window": False}
LLAMA = Architecture(
    "llama", "llama", "LlamaForCausalLM", SIZES, ATTENTION | MLP, SILU, {"rope_theta": 10_000.0}, interleaved=True,
    dropped=(r"blk\.\d+\.attn_rot_embd\.weight",),  # angles, in files of 2023
)  # fmt: skip
MIXTURE = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
ARCHITECTURES = (
    LLAMA,
    replace(
        LLAMA, model_type="mixtral", kind="MixtralForCausalLM", biases={},
        keys=SIZES | {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
        modules=ATTENTION | {"ffn_gate_inp": "block_sparse_moe.gate"},
        experts={
            f"ffn_{ours}_exps": f"block_sparse_moe.experts.{{expert}}.{theirs}"
            for ours, theirs in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
        },
    ),
    Architecture(
        "qwen2", "qwen2", "Qwen2ForCausalLM", SIZES, ATTENTION | MLP, WINDOWLESS, {"rope_theta": 10_000.0}, biases={},
    ),
    Architecture(
        "qwen3", "qwen3", "Qwen3ForCausalLM", SIZES, ATTENTION | MLP | QK_NORMS, WINDOWLESS, {"rope_theta": 10_000.0},
        biases={"attention_bias": "attn_q"},
    ),
    Architecture(
        "qwen3moe", "qwen3_moe", "Qwen3MoeForCausalLM",
        SIZES | MIXTURE | {"expert_feed_forward_length": "moe_intermediate_size"},
        ATTENTION | QK_NORMS | MLP | {"ffn_gate_inp": "mlp.gate"},
        # llama.cpp divides by the sum of the weights of a token's experts, whatever the file says.
        WINDOWLESS | {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
        {"rope_theta": 10_000.0}, biases={"attention_bias": "attn_q"},
        experts={f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
    ),
    Architecture(
        "gemma", "gemma", "GemmaForCausalLM", SIZES, ATTENTION | MLP, GELU | {"attention_bias": False},
        {"rope_theta": 10_000.0}, biases={}, shift=1.0,
    ),
    Architecture(
        "gemma2", "gemma2", "Gemma2ForCausalLM",
        SIZES | {
            "attn_logit_softcapping": "attn_logit_softcapping", "final_logit_softcapping": "final_logit_softcapping",
            "attention.sliding_window": "sliding_window",
        },
        ATTENTION | SANDWICH | MLP, GELU | {"attention_bias": False},
        {"rope_theta": 10_000.0, "sliding_window": 4096}, biases={}, shift=1.0, read=_gemma2,
        write=lambda config: _pattern(config, 2),
    ),
    Architecture(
        "gemma3", "gemma3_text", "Gemma3ForCausalLM",
        SIZES | {"attention.sliding_window": "sliding_window", "rope.freq_base_swa": "rope_local_base_freq"},
        ATTENTION | SANDWICH | QK_NORMS | MLP, {"hidden_activation": "gelu_pytorch_tanh"},
        {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0, "num_attention_heads": 8},
        biases={"attention_bias": "attn_q"}, shift=1.0, read=_gemma3, write=lambda config: _pattern(config, 6),
    ),
    Architecture(
        "phi3", "phi3", "Phi3ForCausalLM", SIZES | {"attention.sliding_window": "sliding_window"},
        {
            **{name: ATTENTION[name] for name in ("attn_norm", "attn_output", "ffn_norm")},
            "attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj",
        },
        SILU, {"rope_theta": 10_000.0}, biases={}, states_head=False, read=_phi3, write=_phi3_keys,
    ),
    Architecture(
        "smollm3", "smollm3", "SmolLM3ForCausalLM", SIZES, ATTENTION | MLP,
        WINDOWLESS | {"no_rope_layer_interval": 4}, {"rope_theta": 10_000.0}, interleaved=True,
    ),
    Architecture(
        "olmo2", "olmo2", "Olmo2ForCausalLM", SIZES,
        {
            **{name: ATTENTION[name] for name in ("attn_q", "attn_k", "attn_v", "attn_output")},
            "post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm",
            **QK_NORMS, **MLP,
        },
        SILU, {"rope_theta": 10_000.0}, biases={"attention_bias": "attn_q"},
    ),
    Architecture(
        "granite", "granite", "GraniteForCausalLM",
        SIZES | {
            "attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
            "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling",
        },
        ATTENTION | MLP, SILU, {"rope_theta": 10_000.0}, interleaved=True, states_head=False,
    ),
    Architecture(
        "lfm2", "lfm2", "Lfm2ForCausalLM",
        {
            **{key: name for key, name in SIZES.items() if not key.startswith("attention.")},
            "attention.head_count": "num_attention_heads", "attention.layer_norm_rms_epsilon": "norm_eps",
            "shortconv.l_cache": "conv_L_cache",
        },
        {
            "attn_norm": "operator_norm", "ffn_norm": "ffn_norm", "attn_q_norm": "self_attn.q_layernorm",
            "attn_k_norm": "self_attn.k_layernorm", "attn_output": "self_attn.out_proj",
            **{name: ATTENTION[name] for name in ("attn_q", "attn_k", "attn_v")},
            "ffn_gate": "feed_forward.w1", "ffn_down": "feed_forward.w2", "ffn_up": "feed_forward.w3",
            "shortconv.in_proj": "conv.in_proj", "shortconv.conv": "conv.conv", "shortconv.out_proj": "conv.out_proj",
        },
        {"conv_bias": False}, {"rope_theta": 1_000_000.0}, biases={}, read=_lfm2, write=_lfm2_keys,
        whole={"token_embd": "model.embed_tokens", "token_embd_norm": "model.embedding_norm", "output": "lm_head"},
        squeezed=("shortconv.conv",),
    ),
    Architecture(
        "gpt-oss", "gpt_oss", "GptOssForCausalLM",
        SIZES | {
            "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
            "attention.sliding_window": "sliding_window",
        },
        {
            **{name: theirs for name, theirs in ATTENTION.items() if name != "ffn_norm"},
            "post_attention_norm": "post_attention_layernorm", "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        SILU | {"attention_bias": True}, {"rope_theta": 150_000.0}, biases={}, read=_gpt_oss, bare=("attn_sinks",),
        write=lambda config: {"expert_feed_forward_length": config["intermediate_size"]} | _pattern(config, 2),
        joined={
            "mlp.experts.gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "mlp.experts.down_proj": ("ffn_down_exps",),
        },
    ),
    Architecture(
        "deepseek2", "deepseek_v2", "DeepseekV2ForCausalLM",
        {
            **{key: name for key, name in SIZES.items() if key != "attention.head_count_kv"},
            "attention.q_lora_rank": "q_lora_rank", "attention.kv_lora_rank": "kv_lora_rank",
            "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok",
            "expert_feed_forward_length": "moe_intermediate_size", "expert_shared_count": "n_shared_experts",
            "expert_weights_scale": "routed_scaling_factor", "leading_dense_block_count": "first_k_dense_replace",
            "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        },
        {
            **MLP, **{name: ATTENTION[name] for name in ("attn_norm", "attn_q", "attn_output", "ffn_norm")},
            "attn_q_a": "self_attn.q_a_proj", "attn_q_a_norm": "self_attn.q_a_layernorm",
            "attn_q_b": "self_attn.q_b_proj", "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
            "attn_kv_a_norm": "self_attn.kv_a_layernorm", "attn_kv_b": "self_attn.kv_b_proj",
            "ffn_gate_inp": "mlp.gate",
            **{f"ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
        },
        SILU | {"norm_topk_prob": False, "scoring_func": "softmax", "moe_layer_freq": 1}, {"rope_theta": 10_000.0},
        experts={f"ffn_{part}_exps": f"mlp.experts.{{expert}}.{part}_proj" for part in ("gate", "up", "down")},
        biases={}, states_head=False, read=_deepseek2, write=_deepseek2_keys,
        split={"self_attn.kv_b_proj": ("attn_k_b", "attn_v_b")},
    ),
)  # fmt: skip
ALIKE = {"mistral": "llama"}  # model_type -> the model_type that its architecture is read as
