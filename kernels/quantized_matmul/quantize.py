"""Quantises float arrays to int8 or float8, with a scale for each group of values, and dequantises them.

The formula is written once, here, for weights and activations in all implementations of the quantised matrix product.
"""

from typing import Literal, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float8e4m3fn, Float8e5m2, Int8, Num, UInt

from kernels.stacked import read


BLOCK = 128  # the side of a block, and the length of a piece of a row
MX = 32  # the length of a piece in MXFP8
# The largest magnitude of a value. Of the two formats of float8 (arXiv:2209.05433) e4m3fn is the more precise, and e5m2
# the one with the wider range.
LARGEST = {jnp.dtype(jnp.int8): 127, jnp.dtype(jnp.float8_e4m3fn): 448, jnp.dtype(jnp.float8_e5m2): 57344}

Granularity = Literal["tensor", "channel", "block", "piece", "mx"]
Values = Int8[Array, "*shape"] | Float8e4m3fn[Array, "*shape"] | Float8e5m2[Array, "*shape"]


class Quantized(NamedTuple):
    """A quantised array: `values` times `scale`. The shape of the scale says which values share one.

    For values (*rows, in) the scale is () if all share one, (*rows,) if the values of a row do, and
    (*rows, ceil(in / 128)) or (*rows, ceil(in / 32)) if 128 or 32 neighbours in a row do. For (out, in) it may also be
    (ceil(out / 128), ceil(in / 128)), for blocks of 128 x 128.
    """

    values: Values  # the matrix of a product may also be `Stacked`
    scale: Float[Array, "..."]

    @property
    def by_pieces(self) -> bool:
        """Whether the scale changes along a row."""
        return self.scale.ndim == self.values.ndim

    @property
    def is_mx(self) -> bool:
        """Whether this is a matrix in MXFP8: each row has scales of its own, where 128 rows share those of blocks."""
        return self.by_pieces and len(self.scale) == len(self.values) > 1


def quantize(
    x: Float[Array, "*shape"],
    dtype: DTypeLike,
    granularity: Granularity,
    largest: Float[Array, "..."] | None = None,
) -> Quantized:
    """Quantises `x` to int8, float8_e4m3fn or float8_e5m2.

    `granularity` says which values share a scale: the whole "tensor", each "channel" (a row, along the last axis), each
    "block" of 128 x 128 in the last two axes, each "piece" of 128 neighbours in a row, or, as in MXFP8, 32 neighbours
    ("mx"). Blocks and pieces at the edges may be smaller. `largest` is the result of `largest_magnitudes`, if it is
    known already.

    The scale of a group is its largest magnitude / the dtype's largest magnitude (127, 448 or 57344), in float32, or in
    float64 if x is. Values are x * (1 / scale), rounded to the nearest, ties to even. If the scale would be 0, or below
    the smallest normal number, it is 1, and all values of the group are 0. A NaN or an infinity makes the scale NaN,
    and with it the whole group: nothing ever saturates. "mx" takes the smallest power of two that is not below this
    scale (Open Compute Project, Microscaling Formats, version 1.0; rounded up as in arXiv:2506.08027), which
    float8_e8m0fnu holds.
    """
    exact, limit = exact_dtype(x), LARGEST[jnp.dtype(dtype)]
    largest = largest_magnitudes(x, granularity) if largest is None else largest
    # Multiplies by reciprocals, as XLA would rewrite divisions; zoo/quantized.py computes the same bits in numpy.
    scale = largest.astype(exact) * (1 / limit)
    taken = power_of_two(scale) if granularity == "mx" else scale
    scale = jnp.where(jnp.isfinite(scale), jnp.where(scale < jnp.finfo(exact).tiny, 1, taken), jnp.nan)
    values = x.astype(exact) * spread(1 / scale, x.shape)
    return Quantized((jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), scale)


def power_of_two(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns the smallest powers of two that are not below normal positive numbers."""
    kind = jnp.finfo(x.dtype)
    bits, fraction = lax.bitcast_convert_type(x, f"uint{kind.bits}"), (1 << kind.nmant) - 1
    return lax.bitcast_convert_type((bits + fraction) >> kind.nmant << kind.nmant, x.dtype)


def exact_dtype(x: Float[Array, "*shape"]) -> DTypeLike:
    """Returns the dtype of scales and sums: float32, or float64 if x is."""
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


def dequantize(x: Quantized) -> Float[Array, "*shape"]:
    """Returns values times scale, in the dtype of the scale."""
    return read(x.values).astype(x.scale.dtype) * spread(x.scale, x.values.shape)


def spread(scale: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Broadcasts a scale to values of this shape. Axes along which all values share a scale may stay of length 1."""
    if scale.ndim < len(shape):
        return scale.reshape(scale.shape + (1,) * (len(shape) - scale.ndim))
    for axis, length in enumerate(shape):
        if scale.shape[axis] != length:
            size = BLOCK if scale.shape[axis] == -(-length // BLOCK) else MX
            scale = lax.slice_in_dim(jnp.repeat(scale, size, axis=axis), 0, length, axis=axis)
    return scale


def whole_pieces(values: Num[Array, "*rows in"], size: int = BLOCK) -> Num[Array, "*rows padded"]:
    """Pads rows with zeros to a multiple of `size`: the last piece becomes whole, and products do not change."""
    return jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, -values.shape[-1] % size)])


def largest_magnitudes(x: Float[Array, "*shape"], granularity: Granularity) -> Float[Array, "..."]:
    """Returns each group's largest magnitude, which is not finite if any value is not.

    Floats without their signs are in the order of their bits, read as integers, and NaNs come last. A maximum of floats
    may miss NaNs (XLA's does on CPUs). Replacing NaNs by `jnp.where` would take a constant of the shape of `x`, which
    `jax.grad` moves out of a scan: every layer would read the constant.
    """
    bits = 8 * x.dtype.itemsize
    magnitudes = lax.bitcast_convert_type(x, f"uint{bits}") & ((1 << bits - 1) - 1)
    return lax.bitcast_convert_type(_largest(magnitudes, granularity), x.dtype)


def _largest(magnitudes: UInt[Array, "*shape"], granularity: Granularity) -> UInt[Array, "..."]:
    if granularity == "tensor":
        return magnitudes.max(initial=0)
    if granularity == "channel":
        return magnitudes.max(axis=-1, initial=0)
    kept, size = magnitudes.ndim - (2 if granularity == "block" else 1), MX if granularity == "mx" else BLOCK
    counts = [-(-length // size) for length in magnitudes.shape[kept:]]
    edges = [(0, n * size - length) for n, length in zip(counts, magnitudes.shape[kept:], strict=True)]
    cut = [side for n in counts for side in (n, size)]
    blocks = jnp.pad(magnitudes, [(0, 0)] * kept + edges).reshape(*magnitudes.shape[:kept], *cut)
    return blocks.max(axis=tuple(range(kept + 1, blocks.ndim, 2)), initial=0)
