"""The part that implementations of products with a matrix in int8 or float8 share: rounding, and derivatives.

An implementation brings two products: float rows times a quantised matrix, and both sides quantised. This module
decides what is quantised when, and has the derivatives. Rounding has no useful derivative, so gradients pass straight
through it (the straight-through estimator, arXiv:1308.3432).
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from kernels.quantized_matmul.quantize import Quantized, dequantize, exact_dtype, largest_magnitudes, quantize
from kernels.stacked import Stacked, read


Granularity = Literal["tensor", "channel", "block", "mx"]
Gradients = Literal["float", "quantized"]
Matrix = Shaped[Array, "out in"] | Stacked
SAVED = "matmul"  # the name of the results, for policies of jax.checkpoint
INT32_TERMS = 1 << 17  # the sum of this many products of two int8 fits an int32


class Formula(NamedTuple):
    """The arguments that are not arrays."""

    dtype: DTypeLike  # int8 or float8_e4m3fn
    granularity: Granularity
    activations: bool
    gradients: Gradients

    @property
    def of_rows(self) -> Literal["tensor", "channel", "piece", "mx"]:
        """Returns which values of a row share a scale."""
        return "piece" if self.granularity == "block" else self.granularity

    @property
    def gradients_by_tensor(self) -> bool:
        """Whether the backward pass has a scale for each whole tensor."""
        return self.dtype == jnp.float8_e4m3fn and self.granularity in ("tensor", "channel")

    @property
    def gradient_dtype(self) -> DTypeLike:
        return jnp.float8_e5m2 if self.gradients_by_tensor else self.dtype


class Kernels(NamedTuple):
    """The two products of an implementation. Both sum over the last axes and return the dtype asked for.

    `weight_only(x, w, dtype)` multiplies float rows (*batch, in) by a `Quantized` matrix (out, in), whose values may be
    `Stacked`.
    `both(x, w, dtype)` multiplies two `Quantized`, whose scales have one granularity; if the matrix has scales by
    blocks, the rows have them by pieces.
    """

    weight_only: Callable[[Array, Quantized, DTypeLike], Array]
    both: Callable[[Quantized, Quantized, DTypeLike], Array]


class Residuals(NamedTuple):
    """The arrays that the backward pass gets. It quantises both sides again, as they are or transposed.

    The largest magnitudes of their groups are named, so that policies of `jax.checkpoint` keep them: they take few
    bytes, and computing them again would read both sides once more.
    """

    x: Array
    w: Matrix
    scale: Array | None
    largest_x: Array | None  # None: float rows
    largest_w: Array | None  # None: `w` is quantised already


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def quantized_matmul(
    kernels: Kernels, formula: Formula, x: Array, w: Matrix, scale: Array | None
) -> Float[Array, "*batch out"]:
    """Computes `int8_matmul` or `fp8_matmul` with these kernels."""
    return _forward(kernels, formula, x, w, scale)[0]


def _forward(kernels: Kernels, formula: Formula, x: Array, w: Matrix, scale: Array | None) -> tuple[Array, Residuals]:
    largest = lambda side, granularity: checkpoint_name(largest_magnitudes(side, granularity), SAVED)
    largest_w = None if scale is not None else largest(read(w), formula.granularity)
    if not formula.activations:
        out = kernels.weight_only(x, _matrix(formula, w, scale, largest_w), x.dtype)
        return out, Residuals(x, w, scale, None, largest_w)
    largest_x = largest(x, formula.of_rows)
    rows = quantize(x, formula.dtype, formula.of_rows, largest_x)
    out = kernels.both(rows, _matrix(formula, read(w), scale, largest_w), x.dtype)
    return out, Residuals(x, w, scale, largest_x, largest_w)


def _backward(
    kernels: Kernels, formula: Formula, residuals: Residuals, d_out: Array
) -> tuple[Array, Array | None, None]:
    x, w, scale, largest_x, largest_w = residuals
    w = read(w)
    matrix = _matrix(formula, w, scale, largest_w)
    rows = lambda side: side.reshape(-1, side.shape[-1])
    exact = exact_dtype(x)

    if formula.gradients == "float":
        meant = dequantize(matrix).astype(x.dtype)
        dx = jnp.einsum("...o,oi->...i", d_out, meant, preferred_element_type=exact).astype(x.dtype)
        if scale is not None:
            return dx, None, None
        dw = jnp.einsum("to,ti->oi", rows(d_out), rows(x), preferred_element_type=exact)
        return dx, dw.astype(w.dtype), None

    of_rows, of_matrices = formula.of_rows, formula.granularity
    largest_d_out = None
    if formula.gradients_by_tensor:
        of_rows = of_matrices = "tensor"
        whole = lambda largest: None if largest is None else largest_magnitudes(largest, "tensor")
        largest_x, largest_w, largest_d_out = whole(largest_x), whole(largest_w), whole(d_out)
    else:
        largest_x = largest_w = None  # a transpose has other groups
    if formula.granularity in ("channel", "mx"):
        transposed = quantize((w if scale is None else dequantize(matrix)).T, formula.dtype, of_matrices, largest_w)
    else:
        transposed = Quantized(matrix.values.T, matrix.scale.T)
    dx = kernels.both(quantize(d_out, formula.gradient_dtype, of_rows, largest_d_out), transposed, x.dtype)
    if scale is not None:
        return dx, None, None
    d_out_rows = quantize(rows(d_out).T, formula.gradient_dtype, of_rows, largest_d_out)
    return dx, kernels.both(d_out_rows, quantize(rows(x).T, formula.dtype, of_matrices, largest_x), w.dtype), None


quantized_matmul.defvjp(_forward, _backward)


def refusal(x: Float[Array, "*batch in"], w: Matrix) -> str | None:
    """Returns why no implementation but the reference can take these arguments, or None."""
    if x.dtype == jnp.float64:
        return "it computes in float32, and x is float64"
    return None if x.size and w.size else "it needs a row, a feature and an output at least"


def _matrix(formula: Formula, w: Matrix, scale: Array | None, largest: Array | None) -> Quantized:
    if scale is None:
        return quantize(read(w), formula.dtype, formula.granularity, largest)
    values: Any = w
    return Quantized(values, scale)
