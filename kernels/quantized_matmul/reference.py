"""Defines products with a quantised matrix: dequantised values are multiplied, in float32."""

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels.quantized_matmul import shared
from kernels.quantized_matmul.quantize import Quantized, dequantize
from kernels.quantized_matmul.shared import Formula, Kernels, Matrix


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def quantized_matmul(
    x: Float[Array, "*batch in"], w: Matrix, scale: Array | None, *, formula: Formula
) -> Float[Array, "*batch out"]:
    """Computes `kernels.int8_matmul` or `kernels.fp8_matmul` in float32, or in float64 if x is."""
    return shared.quantized_matmul(Kernels(_weight_only, _both), formula, x, w, scale)


def _weight_only(x: Array, w: Quantized, dtype: DTypeLike) -> Array:
    return _product(x.astype(w.scale.dtype), dequantize(w)).astype(dtype)


def _both(x: Quantized, w: Quantized, dtype: DTypeLike) -> Array:
    return _product(dequantize(x), dequantize(w)).astype(dtype)


def _product(x: Array, w: Array) -> Array:
    return jnp.einsum("...i,oi->...o", x, w, precision=jax.lax.Precision.HIGHEST)
