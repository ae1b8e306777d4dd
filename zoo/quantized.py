"""Quantised linear maps: weights stored in 8 or 4 bits, or floats that are quantised only to be multiplied.

    model = quantize(model, "nf4")           # what zoo.load(quantize="nf4") does, tensor by tensor
    model = quantize_training(model, "fp8")  # weights stay floats and are trained

Both replace the linear maps of a model's layers from outside. Routers, norms, embeddings and the head stay as they are.
"""

import dataclasses
import functools
import math
import operator
from types import ModuleType
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

import kernels
import kernels.quantized_matmul.quantize
from convert.dequantize import NVFP4_COLUMNS
from convert.packed import BLOCK, PAIRS
from kernels.coded import TABLES, Code, Coded, dequantize
from kernels.quantized_matmul.quantize import LARGEST, MX
from kernels.stacked import read
from kernels.sums import spread
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, ExpertLinear, Linear, biased, on_first
from zoo.nn.model import AbstractModel
from zoo.surgery import map_linears, modules, path_name


M = TypeVar("M", bound=AbstractModel)
Format = Literal["int8", "fp8", "nf4", "int4"]
# Formats of checkpoints that `zoo.load(quantize="stored")` keeps.
Kept = Literal["int4", "fp8_blocks", "mxfp4", "nvfp4"]
STORED = {
    "int8": np.dtype(np.int8), "fp8": np.dtype(ml_dtypes.float8_e4m3fn), "nf4": np.dtype(np.uint8),
    "int4": np.dtype(np.uint8), "fp8_blocks": np.dtype(ml_dtypes.float8_e4m3fn), "mxfp4": np.dtype(np.uint8),
    "nvfp4": np.dtype(np.uint8),
}  # fmt: skip

# The kernels' names of the formats whose weights they dequantise as they multiply.
CODES: dict[str, Code] = {
    "fp8": "float8", "nf4": "nf4", "int4": "int4", "fp8_blocks": "float8", "mxfp4": "mxfp4", "nvfp4": "mxfp4",
}  # fmt: skip
FOUR_BITS = {format for format, code in CODES.items() if code in TABLES}
# The most neighbours of a row that share a scale, in int4 unless a checkpoint has others. In the other formats a row
# has one scale.
BLOCKS = {"nf4": 64, "int4": 32, "fp8_blocks": BLOCK, "mxfp4": 2 * PAIRS, "nvfp4": NVFP4_COLUMNS}


def quantize(model: M, format: Format) -> M:
    """Stores the weights of the decoder layers' linear maps, including experts', in a format: see `quantize_weight`."""
    for kind, quantized in ((AbstractLinear, QuantizedLinear), (AbstractExpertLinear, QuantizedExpertLinear)):
        if any(modules(model.layers, kind)):
            model = map_linears(model, functools.partial(quantized.of, format=format), "layers.*", kind=kind)
    return model


@dataclasses.dataclass(frozen=True)
class Holding:
    """A format of a checkpoint whose weights stay as they are, the dtype of scales, and the neighbours that share one.

    Both axes of a block of 128 x 128 in float8 may be longer than the matrix's, or end in the middle of a block. So a
    scale is kept for each row, and for as many neighbours as divide both 128 and the row.
    """

    format: Kept
    scale: np.dtype
    neighbours: int

    def sizes(self, columns: int) -> tuple[int, int]:
        """Returns how many numbers and how many scales a row of so many weights has."""
        return columns // (2 if self.format in FOUR_BITS else 1), columns // math.gcd(columns, self.neighbours)

    def zeros(self, linear: Any) -> Any:
        """Makes a linear map, or experts', of zeros in the format, of the shape of `linear` and with its bias."""
        (*rows, columns), bias = linear.shape, linear.bias
        stored, blocks = self.sizes(columns)
        weight, scales = jnp.zeros((*rows, stored), STORED[self.format]), jnp.zeros((*rows, blocks), self.scale)
        kind = QuantizedLinear if isinstance(linear, AbstractLinear) else QuantizedExpertLinear
        return kind(weight, scales, bias, self.format)


def quantize_training(model: M, dtype: Literal["int8", "fp8", "mxfp8"]) -> M:
    """Replaces the `Linear`s and `ExpertLinear`s of the decoder layers by ones of low precision, array by array.

    Experts have no products in MXFP8: with "mxfp8" theirs are as with "fp8".

    Raises:
        ValueError: dtype is "mxfp8", and a matrix has a side that is not a multiple of 32.
    """

    def low(path: Any, module: Any) -> Any:
        if type(module) is ExpertLinear:
            return LowPrecisionExpertLinear(module, "fp8" if dtype == "mxfp8" else dtype)
        if type(module) is not Linear:
            return module
        if dtype == "mxfp8" and any(width % MX for width in module.weight.shape[-2:]):
            *_, out, ins = module.weight.shape
            raise ValueError(
                f"--matmul mxfp8 takes matrices with sides in multiples of {MX}, and layers.{path_name(path)} is "
                f"{out} x {ins}. Take --matmul fp8."
            )
        return LowPrecisionLinear(module, dtype)

    is_linear = lambda m: type(m) in (Linear, ExpertLinear)
    layers = jax.tree_util.tree_map_with_path(low, model.layers, is_leaf=is_linear)
    return eqx.tree_at(lambda m: m.layers, model, layers)


def quantize_weight(weight: Float[Any, "*rows in"], format: Format, np: ModuleType = jnp) -> tuple[Any, Any]:
    """Quantises rows of weights: returns the values, and the scales in the weights' dtype.

    - "int8" and "fp8" (float8_e4m3fn): each row has a scale, its largest magnitude / the format's.
    - "nf4": a weight takes four bits, and a byte holds two, the first one in its upper half. Each block of 64
      neighbours in a row (or as many as divide both 64 and the row) has a scale, its largest magnitude.
    - "int4": like nf4, with integers from -8 to 7, whose codes are 8 more, and a scale for 32 neighbours: their largest
      magnitude / 7.5. Kimi's releases store experts so, and `zoo.load(quantize="stored")` takes them over.

    `np` is jax.numpy, or numpy if the host quantises as it reads.

    Raises:
        ValueError: the format has four bits, and rows have an odd length.
    """
    dtype, weight = weight.dtype, weight.astype(np.float32)
    if format not in TABLES and np is jnp:
        values, scale = kernels.quantized_matmul.quantize.quantize(weight, STORED[format], "channel")
        return values, scale.astype(dtype)
    if format not in TABLES:
        largest = np.max(np.abs(weight), axis=-1)
        scale = np.where(largest > 0, largest * np.float32(1 / LARGEST[STORED[format]]), np.float32(1))
        values = weight * (1 / scale)[..., None]
        return (np.rint(values) if format == "int8" else values).astype(STORED[format]), scale.astype(dtype)
    if weight.shape[-1] % 2:
        raise ValueError(f"Rows of {weight.shape[-1]} weights can't be stored in {format}, which puts two into a byte.")
    table = TABLES[format]
    blocks = weight.reshape(*weight.shape[:-1], -1, math.gcd(weight.shape[-1], BLOCKS[format]))
    largest = np.max(np.abs(blocks), axis=-1) / ((table[-1] - table[0]) / 2)
    scale = np.where(largest > 0, largest, np.float32(1)).astype(dtype)
    scaled = blocks / scale.astype(np.float32)[..., None]
    # A code is the number of the 15 midpoints that are below: in numpy ten times as fast as a binary search.
    above = ((scaled > middle).astype(np.uint8) for middle in (table[1:] + table[:-1]) / 2)
    codes = functools.reduce(operator.add, above).reshape(weight.shape)
    return codes[..., ::2] << 4 | codes[..., 1::2], scale


def dequantize_weight(
    values: Shaped[Array, "*rows stored"], scale: Float[Array, "..."], format: Format | Kept
) -> Float[Array, "..."]:
    """Computes the weights from values and scales, in the dtype of the scales."""
    if format not in FOUR_BITS:
        return values.astype(scale.dtype) * scale[..., None]
    return dequantize(values, scale, CODES[format], scale.dtype)


class QuantizedLinear(AbstractLinear):
    """A `Linear` whose weight is stored in few bits, and not trained."""

    weight: Shaped[Array, "out stored"]
    scale: Shaped[Array, " out"] | Shaped[Array, "out blocks"]
    bias: Float[Array, " out"] | None
    format: Format | Kept = eqx.field(static=True)
    in_place: ClassVar[tuple[str, ...]] = ("weight", "scale")

    @classmethod
    def of(cls, linear: Linear, format: Format) -> "QuantizedLinear":
        return cls(*quantize_weight(linear.weight, format), linear.bias, format)

    @property
    def shape(self) -> tuple[int, ...]:
        return shape(self.weight, self.format)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        if self.format in BLOCKS:
            y = kernels.coded_matmul(x, coded(self, x.dtype))
        else:
            matmul = kernels.int8_matmul if self.format == "int8" else kernels.fp8_matmul
            y = matmul(x, self.weight, read(self.scale))
        return y if self.bias is None else y + jnp.broadcast_to(self.bias, y.shape)

    def matrix(self, dtype: DTypeLike) -> Float[Array, "out in"]:
        if self.format in BLOCKS:
            return coded(self, dtype).read()
        return dequantize_weight(read(self.weight), read(self.scale), self.format).astype(dtype)

    def partition_specs(self, spec: P) -> "QuantizedLinear":
        return quantized_specs(self, spec)


class QuantizedExpertLinear(AbstractExpertLinear):
    """A `QuantizedLinear` for each expert."""

    weight: Shaped[Array, "experts out stored"]
    scale: Shaped[Array, "experts out"] | Shaped[Array, "experts out blocks"]
    bias: Float[Array, "experts out"] | None
    format: Format | Kept = eqx.field(static=True)
    in_place: ClassVar[tuple[str, ...]] = ("weight", "scale")

    @classmethod
    def of(cls, linear: ExpertLinear, format: Format) -> "QuantizedExpertLinear":
        return cls(*quantize_weight(linear.weight, format), linear.bias, format)

    @property
    def shape(self) -> tuple[int, ...]:
        return shape(self.weight, self.format)

    def __call__(self, x: Float[Array, "rows in"], group_sizes: Int[Array, " experts"]) -> Float[Array, "rows out"]:
        each = lambda values: jnp.repeat(values, group_sizes, axis=0, total_repeat_length=len(x)).astype(x.dtype)
        if self.format == "int8":
            y = kernels.ragged_dot(x, self.weight, group_sizes) * each(read(self.scale))
        else:
            y = kernels.ragged_dot(x, coded(self, x.dtype), group_sizes)
        return y if self.bias is None else y + each(self.bias)

    def part(self, axis: str) -> "QuantizedExpertLinear":
        scale, bias = read(self.scale), None if self.bias is None else on_first(self.bias, axis)
        if self.format in BLOCKS:  # the scales are not split: if a block is split, both devices take its scale
            devices, blocks = jax.lax.axis_size(axis), scale.shape[-1]
            scale = jnp.repeat(scale, devices // math.gcd(devices, blocks), axis=-1)
            size = scale.shape[-1] // devices
            scale = jax.lax.dynamic_slice_in_dim(scale, jax.lax.axis_index(axis) * size, size, axis=-1)
        return eqx.tree_at(lambda m: (m.scale, m.bias), self, (scale, bias), is_leaf=lambda x: x is None)

    def partition_specs(self, spec: P) -> "QuantizedExpertLinear":
        return quantized_specs(self, spec)


def shape(weight: Shaped[Array | np.ndarray, "..."], format: Format | Kept) -> tuple[int, ...]:
    """Returns the shape of the weight that is stored as `weight` in a format."""
    return (*weight.shape[:-1], 2 * weight.shape[-1]) if format in FOUR_BITS else weight.shape


def coded(linear: QuantizedLinear | QuantizedExpertLinear, dtype: DTypeLike) -> Coded:
    """Returns the weights for the kernels, which dequantise them to `dtype`. A row in "fp8" is one block."""
    scale = linear.scale if linear.format in BLOCKS else read(linear.scale)[..., None]
    return Coded(linear.weight, scale, CODES[linear.format], np.dtype(dtype))


def quantized_specs(linear: Any, spec: P) -> Any:
    """Replaces each array of a quantised linear map, or of experts', by its `PartitionSpec`; `spec` is the weight's."""
    rows = P(*spec[:-1])
    scale = P(*rows, None) if linear.format in BLOCKS else rows  # a row may have too few blocks to split them
    result = eqx.tree_at(lambda m: (m.weight, m.scale), linear, (spec, scale))
    return result if linear.bias is None else eqx.tree_at(lambda m: m.bias, result, rows)


class LowPrecisionLinear(AbstractLinear):
    """A `Linear` that trains in eight bits: its parameters are floats, which are quantised only to be multiplied.

    Weight and activations are quantised row by row. In "fp8" all three products of a training step have quantised
    operands, including gradients; in the backward pass each tensor has one scale. In "mxfp8" all three have scales for
    32 neighbours along the sum. In "int8" the backward pass multiplies floats.
    """

    weight: Float[Array, "out in"]
    bias: Float[Array, " out"] | None
    dtype: Literal["int8", "fp8", "mxfp8"] = eqx.field(static=True)

    def __init__(self, linear: Linear, dtype: Literal["int8", "fp8", "mxfp8"]):
        self.weight, self.bias, self.dtype = linear.weight, linear.bias, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        if self.dtype == "int8":
            y = kernels.int8_matmul(x, self.weight, activations=True)
        else:
            by = "mx" if self.dtype == "mxfp8" else "channel"
            y = kernels.fp8_matmul(x, self.weight, granularity=by, activations=True, gradients="quantized")
        return y if self.bias is None else y + spread(self.bias, y.shape)

    def matrix(self, dtype: DTypeLike) -> Float[Array, "out in"]:
        return self.weight.astype(dtype)

    def partition_specs(self, spec: P) -> "LowPrecisionLinear":
        quantized_specs = eqx.tree_at(lambda m: m.weight, self, spec)
        return quantized_specs if self.bias is None else eqx.tree_at(lambda m: m.bias, quantized_specs, P(*spec[:1]))


class LowPrecisionExpertLinear(AbstractExpertLinear):
    """A `LowPrecisionLinear` for each expert. The backward pass multiplies floats, in "fp8" too.

    If the mesh's axis "tensor" splits `in`, each device computes the scales of its own part.
    """

    weight: Float[Array, "experts out in"]
    bias: Float[Array, "experts out"] | None
    dtype: Literal["int8", "fp8"] = eqx.field(static=True)

    def __init__(self, linear: ExpertLinear, dtype: Literal["int8", "fp8"]):
        self.weight, self.bias, self.dtype = linear.weight, linear.bias, dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def __call__(self, x: Float[Array, "rows in"], group_sizes: Int[Array, " experts"]) -> Float[Array, "rows out"]:
        y = kernels.rounded_ragged_dot(x, self.weight, group_sizes, STORED[self.dtype])
        return biased(y, self.bias, group_sizes)

    def part(self, axis: str) -> "LowPrecisionExpertLinear":
        return self if self.bias is None else eqx.tree_at(lambda m: m.bias, self, on_first(self.bias, axis))

    def partition_specs(self, spec: P) -> "LowPrecisionExpertLinear":
        quantized_specs = eqx.tree_at(lambda m: m.weight, self, spec)
        return quantized_specs if self.bias is None else eqx.tree_at(lambda m: m.bias, quantized_specs, P(*spec[:2]))
