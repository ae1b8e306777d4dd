"""Products with a quantised matrix in plain JAX, for every platform that XLA compiles for.

XLA has products of two int8 or two float8: on NVIDIA GPUs they become cuBLASLt's, on TPUs the matrix unit's. A scale
that is the same along a whole row can be applied to the sum, so one product is enough. Scales that change along a row
cannot: then a loop adds up the scaled products of pieces of 128 features. XLA has a product of MXFP8 for Blackwell;
elsewhere dequantised values are multiplied.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels.backends.device import device
from kernels.mesh import free, split_tokens, splits_tokens_alone
from kernels.quantized_matmul import shared
from kernels.quantized_matmul.quantize import BLOCK, MX, Quantized, dequantize, spread, whole_pieces
from kernels.quantized_matmul.shared import INT32_TERMS, Formula, Kernels, Matrix
from kernels.stacked import read


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 3

HAS_FLOAT8 = (8, 9)  # the compute capability of the first GPUs that multiply float8
ALIGNED = 16  # cuBLASLt multiplies float8 of sides that are multiples of this
BLACKWELL = (10, 0)  # the compute capability of the first GPUs that multiply MXFP8


def refusal(x: Float[Array, "*batch in"], w: Matrix, _: Array | None, *, formula: Formula) -> str | None:
    """Returns why this implementation cannot take these arguments of `quantized_matmul`, or None if it can."""
    return shared.refusal(x, w)


@functools.partial(jax.jit, static_argnames="formula")  # so that calls outside jit compile once, too
def quantized_matmul(
    x: Float[Array, "*batch in"], w: Matrix, scale: Array | None, *, formula: Formula
) -> Float[Array, "*batch out"]:
    """Computes `kernels.int8_matmul` or `kernels.fp8_matmul` by XLA."""
    return shared.quantized_matmul(Kernels(_weight_only, both), formula, x, w, scale)


def _weight_only(x: Array, w: Quantized, dtype: DTypeLike) -> Array:
    if w.by_pieces:
        return _product(x, dequantize(w).astype(x.dtype)).astype(dtype)
    out = _product(x, read(w.values).astype(x.dtype))  # the cast is exact: bfloat16 holds every int8 and float8
    return (out * _per_column(w.scale, out.ndim)).astype(dtype)


def both(x: Quantized, w: Quantized, dtype: DTypeLike) -> Array:
    """Multiplies two quantised sides."""
    if _takes_scales(x, w, dtype):
        # On a mesh XLA would gather the matrix in `dtype`, and then multiply in it.
        multiply = functools.partial(_with_scales, dtype)
        return split_tokens(multiply, x, w) if splits_tokens_alone(x.values.shape) else multiply(x, w)
    if not w.by_pieces:
        pieces = [slice(i, i + INT32_TERMS) for i in range(0, x.values.shape[-1], INT32_TERMS)]
        # XLA scales in a separate kernel. float8 products reach it in bfloat16, in half the bytes of float32.
        narrow = dtype if dtype == jnp.bfloat16 and x.values.dtype != jnp.int8 and len(pieces) == 1 else jnp.float32
        products = [_product(x.values[..., piece], w.values[:, piece], narrow) for piece in pieces]
        out = functools.reduce(jnp.add, products).astype(jnp.float32)
        return (out * spread(x.scale, out.shape) * _per_column(w.scale, out.ndim)).astype(dtype)

    if w.is_mx:
        return _mx(x, w, dtype)
    x_values, w_values = (whole_pieces(side.values) for side in (x, w))

    def add_piece(i: Array, out: Array) -> Array:
        x_i, w_i = (lax.dynamic_slice_in_dim(side, i * BLOCK, BLOCK, axis=-1) for side in (x_values, w_values))
        x_scale, w_scale = (lax.dynamic_index_in_dim(side.scale, i, axis=-1, keepdims=False) for side in (x, w))
        w_scale = jnp.repeat(w_scale, BLOCK)[: out.shape[-1]]
        return out + _product(x_i, w_i) * (spread(x_scale, out.shape) * _per_column(w_scale, out.ndim))

    out = jnp.zeros((*x.values.shape[:-1], len(w.values)), jnp.float32)
    return lax.fori_loop(0, x_values.shape[-1] // BLOCK, add_piece, out).astype(dtype)


def _takes_scales(x: Quantized, w: Quantized, dtype: DTypeLike) -> bool:
    """Whether cuBLASLt's product takes the scales, too: those of whole tensors in float8, of sides it need not pad."""
    sides = (x.values.size // x.values.shape[-1], *w.values.shape)
    capability = device().capability
    return (
        x.values.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
        and dtype == jnp.bfloat16
        and x.scale.ndim == w.scale.ndim == 0
        and capability is not None
        and capability >= HAS_FLOAT8
        and all(side % ALIGNED == 0 for side in sides)
    )


def _with_scales(dtype: DTypeLike, x: Quantized, w: Quantized) -> Array:
    """Writes the product so that XLA hands the scales to cuBLASLt, in float32, together with the values in 8 bits."""
    rows, matrix = (side.values.astype(dtype) * side.scale.astype(dtype) for side in (x, w))
    return _product(rows, matrix, dtype, lax.Precision.HIGHEST)


def _mx(x: Quantized, w: Quantized, dtype: DTypeLike) -> Array:
    if (device().capability or (0, 0)) < BLACKWELL:
        held = jnp.float32 if dtype == jnp.float32 else jnp.bfloat16  # bfloat16 holds the numbers of MXFP8, too
        rows, matrix = (dequantize(side).astype(held) for side in (x, w))
        return _product(rows, matrix).astype(dtype)
    one_batch = lambda side: side.reshape(1, -1, side.shape[-1])
    values = [one_batch(whole_pieces(side.values, MX)) for side in (x, w)]
    scales = [one_batch(side.scale.astype(jnp.float8_e8m0fnu)) for side in (x, w)]
    if scales[0].shape[-1] % math.prod(free().values()):
        # The product would be split between values that share a scale, and then JAX multiplies by wrong scales.
        whole = P(P.UNCONSTRAINED, P.UNCONSTRAINED, None)
        values, scales = jax.tree.map(lambda side: lax.with_sharding_constraint(side, whole), (values, scales))
    out = jax.nn.scaled_matmul(*values, *scales, preferred_element_type=dtype)
    return out.reshape(*x.values.shape[:-1], -1)


def _product(
    x: Array, w: Array, dtype: DTypeLike = jnp.float32, precision: lax.Precision | None = None
) -> Float[Array, "*batch out"]:
    """Multiplies, summing over the last axes. float8 accumulates in full float32, which cuBLASLt needs to be told."""
    integers = x.dtype == jnp.int8
    if x.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2):
        precision = lax.Precision.HIGHEST
    out = lax.dot_general(
        x, w, (((x.ndim - 1,), (1,)), ((), ())), precision=precision,
        preferred_element_type=jnp.int32 if integers else dtype,
    )  # fmt: skip
    return out.astype(dtype)


def _per_column(scale: Float[Array, "..."], ndim: int) -> Float[Array, "..."]:
    """Broadcasts the scale of each column, or of all, to an array with `ndim` axes."""
    return scale.reshape((1,) * (ndim - scale.ndim) + scale.shape)
