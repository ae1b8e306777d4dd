"""Products with a quantised matrix, as they are defined: dequantised values are multiplied, in float32."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels import matmul
from kernels.matmul import Formula, Kernels, Matrix
from kernels.quantize import Quantized, dequantize


def quantized_matmul(
    x: Float[Array, "*batch in"], w: Matrix, scale: Array | None, *, formula: Formula
) -> Float[Array, "*batch out"]:
    """Computes `kernels.int8_matmul` or `kernels.fp8_matmul` in float32, or in float64 if x is."""
    return matmul.quantized_matmul(Kernels(_weight_only, _both), formula, x, w, scale)


def _weight_only(x: Array, w: Quantized, dtype: DTypeLike) -> Array:
    return _product(x.astype(w.scale.dtype), dequantize(w)).astype(dtype)


def _both(x: Quantized, w: Quantized, dtype: DTypeLike) -> Array:
    return _product(dequantize(x), dequantize(w)).astype(dtype)


def _product(x: Array, w: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, w, precision=jax.lax.Precision.HIGHEST)
