"""Finds out from quantization_config in config.json how a checkpoint stores quantised weights.

`METHODS` has a function for each quant_method, which returns layouts. A `Layout` holds the suffixes of the names of the
tensors that store one weight, and the class that dequantises them.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from convert.dequantize import FLOATS, NVFP4_COLUMNS, Awq, Blocks, Bnb4, Bnb8, Gptq, Nvfp4, PackedIntegers
from convert.packed import BF16, E4M3, Fp8Blocks, Mxfp4, Packed, Scaled
from convert.tensors import Tensor


INTEGERS = np.dtype(np.int8), np.dtype(np.uint8), np.dtype(np.int32)


@dataclass(frozen=True)
class Layout:
    """The names of the tensors that store one weight: the weight's name without `stands_for`, plus a suffix for each.

    A tensor whose name ends with `codes` holds codes if its dtype is in `dtypes`. Without `dtypes` it holds codes if
    the checkpoint also has the first of its `parts`.
    """

    make: Callable[..., Scaled]
    codes: str
    dtypes: tuple[np.dtype, ...]
    parts: Mapping[str, str]  # argument of `make` -> suffix of its tensor's name
    optional: Mapping[str, str] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()  # suffixes not read: they quantise activations and caches, or repeat a shape
    stands_for: str = ".weight"


FP8_BLOCKS = Layout(Fp8Blocks, "", (E4M3,), {"scales": "_scale_inv"}, stands_for="")
FP8_WHOLE = Layout(
    functools.partial(Blocks, group_size=None), ".weight", (E4M3,), {"scales": ".weight_scale_inv"},
    dropped=(".activation_scale",),
)  # fmt: skip
MXFP4 = Layout(Mxfp4, "_blocks", INTEGERS, {"scales": "_scales"}, stands_for="")
SCALE = {"scales": ".weight_scale"}
ZEROS = {"zeros": ".weight_zero_point", "groups": ".weight_g_idx"}
ACTIVATIONS = tuple(
    f".{of}_{what}" for of in ("input", "output", "k", "v") for what in ("scale", "zero_point", "global_scale")
)
BYTES = (INTEGERS[1],)
NVFP4 = Layout(
    functools.partial(Nvfp4, divides=True), ".weight_packed", BYTES, SCALE | {"whole": ".weight_global_scale"},
    dropped=ACTIVATIONS,
)  # fmt: skip
MODELOPT_FP8 = Layout(functools.partial(Blocks, group_size=None), ".weight", (E4M3,), SCALE, dropped=ACTIVATIONS)
MODELOPT_NVFP4 = Layout(
    functools.partial(Nvfp4, divides=False), ".weight", BYTES, SCALE | {"whole": ".weight_scale_2"},
    dropped=ACTIVATIONS,
)  # fmt: skip


def layouts(stored: Mapping[str, Any] | None) -> list[Layout]:
    """Returns the layouts of a checkpoint with this quantization_config (None: config.json has none).

    Raises:
        ValueError: the quantization is not supported; the message names the key and value.
    """
    stored = stored or {"quant_method": "mxfp4"}
    method = stored.get("quant_method")
    if method is None and any(_is(stored, f"load_in_{bits}bit") for bits in (4, 8)):
        method = "bitsandbytes"  # files of transformers before 4.36
    if method not in METHODS:
        raise ValueError(f"the quant_method {method!r} is not read; those that are: {', '.join(METHODS)}")
    return METHODS[method](stored)


def unpack(tensors: Mapping[str, Tensor], stored: Mapping[str, Any] | None = None) -> dict[str, Tensor | Packed]:
    """Joins the tensors that together store one weight into one `Scaled`, by the quantization_config `stored`.

    A weight's default dtype is that of the largest tensor that is not quantised.

    Raises:
        ValueError: a tensor has no scales, scales have no tensor, or tensors do not fit together; the message names
            them.
    """
    rest, packed, found = dict(tensors), {}, layouts(stored)
    for layout in found:
        for name in _codes(layout, tensors):
            whole = _joined(layout, name, rest)
            packed[whole.name] = whole
        rest = {name: tensor for name, tensor in rest.items() if not name.endswith(layout.dropped)}
    for layout in found:
        for name, tensor in rest.items():
            if name.endswith((*layout.parts.values(), *layout.optional.values())):
                raise ValueError(f"{name} in {tensor.file} scales nothing; the checkpoint lacks its quantised tensor.")
    for name in rest.keys() & packed.keys():
        raise ValueError(f"{name} is in {rest[name].file}, and quantised in {packed[name].file}; remove one.")
    plain = max((t for t in rest.values() if t.dtype in FLOATS), key=lambda t: t.nbytes, default=None)
    dtype = plain.dtype if plain else BF16
    return rest | {name: replace(whole, dtype=dtype) for name, whole in packed.items()}


def _codes(layout: Layout, tensors: Mapping[str, Tensor]) -> list[str]:
    """Returns the names of the tensors that hold codes of a layout."""
    first = next(iter(layout.parts.values()))
    return [
        name
        for name, tensor in tensors.items()
        if name.endswith(layout.codes)
        and (tensor.dtype in layout.dtypes if layout.dtypes else name.removesuffix(layout.codes) + first in tensors)
    ]


def _joined(layout: Layout, name: str, rest: dict[str, Tensor]) -> Scaled:
    """Takes the codes `name` and the other tensors of one weight out of `rest`, and joins them.

    Raises:
        ValueError: a tensor is missing, or they do not fit together; the message names them.
    """
    base, given = name.removesuffix(layout.codes), {"codes": rest.pop(name)}
    for part, end in {**layout.parts, **layout.optional}.items():
        if (tensor := rest.pop(base + end, None)) is not None:
            given[part] = tensor
        elif part in layout.parts:
            raise ValueError(f"{name} in {given['codes'].file} has no {part}; the checkpoint lacks {base + end}.")
    whole = layout.make(name=base + layout.stands_for, **given)
    if not whole.fits:
        kinds = " and ".join(f"{t.name} in {t.file}, {t.dtype}{list(t.shape)}," for t in whole.tensors)
        raise ValueError(f"{kinds} do not fit; the files are damaged.")
    return whole


def _is(stored: Mapping[str, Any], key: str) -> bool:
    return bool(stored.get(key, stored.get(f"_{key}")))


def _only(stored: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """Returns `stored[key]`, or `default` where it is absent or null; refuses values that are not allowed."""
    value = stored.get(key)
    value = default if value is None else value
    value = value.lower() if isinstance(value, str) else value
    if value not in allowed:
        raise ValueError(f"{key} {value!r} is not read; what is: {', '.join(map(repr, allowed))}")
    return value


def _fp8(stored: Mapping[str, Any]) -> list[Layout]:
    _only(stored, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    if stored.get("activation_scheme") == "static":
        _only(stored, "weight_block_size", (None,))
        return [FP8_WHOLE]
    _only(stored, "weight_block_size", ([128, 128],))
    return [FP8_BLOCKS, MXFP4]


def _bitsandbytes(stored: Mapping[str, Any]) -> list[Layout]:
    if _is(stored, "load_in_8bit"):
        parts, optional = {"scales": ".SCB"}, {"layout": ".weight_format"}
        return [Layout(Bnb8, ".weight", (np.dtype(np.int8),), parts, optional)]
    kind = _only(stored, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    ends = {"scales": "absmax", "table": "quant_map", "state": f"quant_state.bitsandbytes__{kind}"}
    nested = {"nested_scales": "nested_absmax", "nested_table": "nested_quant_map"}
    parts, optional = ({part: f".weight.{end}" for part, end in all.items()} for all in (ends, nested))
    return [Layout(Bnb4, ".weight", (), parts, optional)]


def _group_size(stored: Mapping[str, Any], default: Any = None) -> int | None:
    """Returns the number of columns in a group; None (-1 in the file) means that one group has all columns."""
    size = stored.get("group_size", default)
    if size in (-1, None):
        return None
    if type(size) is not int or size < 1:
        raise ValueError(f"group_size {size!r} is no number of columns")
    return size


PARTS = {"scales": ".scales", "zeros": ".qzeros"}


def _awq(stored: Mapping[str, Any]) -> list[Layout]:
    _only(stored, "version" if "version" in stored else "format", ("gemm",), "gemm")
    _only(stored, "backend", ("auto", "autoawq"), "auto")
    _only(stored, "zero_point", (True,), True)
    bits = _only(stored, "w_bit" if "w_bit" in stored else "bits", (4,), 4)
    make = functools.partial(Awq, bits=bits, version=2, group_size=_group_size(stored, 128))
    return [Layout(make, ".qweight", INTEGERS, PARTS)]


def _gptq(stored: Mapping[str, Any]) -> list[Layout]:
    bits = _only(stored, "bits", (2, 4, 8))
    name = "checkpoint_format" if "checkpoint_format" in stored else "format"
    version = 1 if _only(stored, name, ("gptq", "gptq_v2"), "gptq") == "gptq" else 2
    _only(stored, "pack_dtype", ("int32",), "int32")
    _only(stored, "is_marlin_format", (False,), False)
    _only(stored, "dynamic", ({},), {})
    make = functools.partial(Gptq, bits=bits, version=version, group_size=_group_size(stored, 128))
    return [Layout(make, ".qweight", INTEGERS, PARTS, {"groups": ".g_idx"})]


def _compressed_tensors(stored: Mapping[str, Any]) -> list[Layout]:
    formats = "naive-quantized", "int-quantized", "float-quantized", "pack-quantized", "nvfp4-pack-quantized"
    form = _only(stored, "format", formats)
    _only(stored, "transform_config", ({},), {})
    if sparse := stored.get("sparsity_config"):
        _only(sparse, "format", ("dense",), "dense")
    groups = stored.get("config_groups") or {}
    weights = [group["weights"] for group in groups.values() if group.get("weights")]
    for group in groups.values():
        _only(group, "format", (form,), form)
    types, bits, strategies = ("int", "float"), (8,), ("tensor", "channel", "token", "group", "block")
    if form == "pack-quantized":
        types, bits = ("int",), (2, 4, 8)
    elif form == "nvfp4-pack-quantized":
        types, bits, strategies = ("float",), (4,), ("tensor_group",)
    for each in weights:
        _only(each, "type", types, "int")
        _only(each, "num_bits", bits, 8)
        _only(each, "strategy", strategies, "tensor")
    keys = "num_bits", "strategy", "group_size", "block_structure"
    kinds = {str([each.get(key) for key in keys]) for each in weights}
    if len(kinds) != 1:
        raise ValueError(f"config_groups with {len(kinds)} ways to store weights are not read; one is")
    one = weights[0]
    if form == "nvfp4-pack-quantized":
        _only(one, "group_size", (NVFP4_COLUMNS,))
        return [NVFP4]
    size = _group_size(one) if one.get("strategy") == "group" else None
    if form == "pack-quantized":
        make = functools.partial(PackedIntegers, bits=one.get("num_bits", 8), group_size=size)
        return [Layout(make, ".weight_packed", INTEGERS, SCALE, ZEROS, (*ACTIVATIONS, ".weight_shape"))]
    height, size = one["block_structure"] if one.get("strategy") == "block" else (None, size)
    make = functools.partial(Blocks, group_size=size, block_rows=height)
    return [Layout(make, ".weight", (E4M3, np.dtype(np.int8)), SCALE, ZEROS, ACTIVATIONS)]


def _modelopt(stored: Mapping[str, Any]) -> list[Layout]:
    algorithms = "fp8", "nvfp4", "w4a16_nvfp4", "nvfp4_w4a16"  # the last two do not quantise activations
    mixed = _only(stored, "quant_algo", (*algorithms, "mixed_precision")) == "mixed_precision"
    for each in stored["quantized_layers"].values() if mixed else [stored]:
        _only(each, "quant_algo", algorithms)
        _only(each, "group_size", (NVFP4_COLUMNS,), NVFP4_COLUMNS)
    return [MODELOPT_FP8, MODELOPT_NVFP4]


METHODS: dict[str, Callable[[Mapping[str, Any]], list[Layout]]] = {
    "fp8": _fp8,
    "mxfp4": lambda _: [FP8_BLOCKS, MXFP4],
    "bitsandbytes": _bitsandbytes,
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
