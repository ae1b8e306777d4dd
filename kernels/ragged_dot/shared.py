"""The part that `ragged_dot` implementations share: derivatives.

An implementation brings two kernels. One multiplies rows by the matrix of their group: it computes the output and,
along the matrix's other axis, the gradient of the rows. The other computes the gradient of the matrices: over a group's
rows, it sums the outer products of each output's gradient and its input.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from kernels.coded import Coded
from kernels.quantized_matmul.quantize import LARGEST
from kernels.quantized_matmul.shared import INT32_TERMS
from kernels.stacked import Stacked, read, without_gradient


Rows = Float[Array, "tokens in"] | Int8[Array, "tokens in"]
Matrices = Float[Array, "groups out in"] | Int8[Array, "groups out in"] | Stacked | Coded


class Kernels(NamedTuple):
    """The two kernels of an implementation.

    `rows_times_matrices(x, w, group_sizes, axis)` multiplies each row of x by its group's matrix, and sums over `axis`
    of w: 2 for the output, 1 for the gradient of the rows. Rows without a group give zeros.

    `sums_of_products(d_out, x, group_sizes)` returns [groups, out, in], in the dtype of x, with zeros for a group
    without rows.
    """

    rows_times_matrices: Callable[..., Array]
    sums_of_products: Callable[..., Array]


def ragged_dot(
    kernels: Kernels, x: Rows, w: Matrices, group_sizes: Int[Array, " groups"]
) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` with these kernels."""
    trained = None if isinstance(w, Coded) or w.dtype == jnp.int8 else read(w)
    return _ragged_dot(kernels, x, without_gradient(w), trained, group_sizes)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ragged_dot(kernels: Kernels, x: Rows, w: Matrices, trained: Array | None, group_sizes: Array) -> Array:
    """Computes the product with `w`. The gradient is that of `trained`, which has the same numbers and is not read.

    So XLA never takes a layer's matrices out of a stack, and the gradient is one layer's.
    """
    return kernels.rows_times_matrices(x, w, group_sizes, axis=2)


def _forward(
    kernels: Kernels, x: Rows, w: Matrices, trained: Array | None, group_sizes: Array
) -> tuple[Array, tuple[Array, Matrices, Array]]:
    return _ragged_dot(kernels, x, w, trained, group_sizes), (x, w, group_sizes)


def _backward(
    kernels: Kernels, residuals: tuple[Array, Matrices, Array], d_out: Array
) -> tuple[Array, None, Array | None, None]:
    x, w, group_sizes = residuals
    dx = kernels.rows_times_matrices(d_out, w, group_sizes, axis=1)
    if isinstance(w, Coded) or w.dtype == jnp.int8:
        return dx, None, None, None
    return dx, None, kernels.sums_of_products(d_out, x, group_sizes), None


_ragged_dot.defvjp(_forward, _backward)


def refusal(x: Rows, w: Matrices) -> str | None:
    """Returns why no kernel can take these arguments of `ragged_dot`, or None."""
    if x.dtype == jnp.float64:
        return "it computes in float32, and x is float64"
    if x.dtype == jnp.int8 and x.shape[1] > INT32_TERMS:
        return f"it sums products of two int8 in int32, which holds {INT32_TERMS} of them, not {x.shape[1]}"
    return None if x.size and w.size else "it needs a row, a group and a feature at least"


def result_dtype(x: Rows) -> DTypeLike:
    """Returns the dtype of `ragged_dot`'s result: that of x, or float32 if x is in 8 bits."""
    return jnp.float32 if x.dtype in LARGEST else x.dtype
