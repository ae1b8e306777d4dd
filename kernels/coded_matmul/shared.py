"""The part that kernels for products with a matrix in few bits share: which rows they take, and derivatives.

A kernel multiplies rows that are sorted by group, each by its group's matrix, as `kernels.ragged_dot` does. A plain
product has one group. Weights that are packed into a stored number are the phases of it: the first weights of all
numbers are multiplied by the features in their places, then the second ones, and so on, and the products are added. So
no kernel has to bring weights into order.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.coded import Coded
from kernels.stacked import Stacked


MOST_ROWS = 64  # a group's mean: beyond, it is faster to dequantise a matrix once than for each few rows

# `grouped(x, w, group_sizes)` multiplies rows (tokens, in) by matrices (groups, out, in).
Grouped = Callable[[Array, Coded, Array], Array]


def refusal(x: Float[Array, "*batch in"], w: Coded) -> str | None:
    """Returns why a kernel should not take these rows and this matrix, or these groups' matrices, or None."""
    if x.dtype == jnp.float64:
        return "it computes in float32, and x is float64"
    if not x.size or not w.size:
        return "it needs a row, a feature and an output at least"
    rows, groups = x.size // x.shape[-1], math.prod(w.shape[:-2])
    if rows > MOST_ROWS * groups:
        return f"it takes up to {MOST_ROWS} rows for a matrix, and x has {rows} for {groups}"
    return None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(grouped: Grouped, x: Float[Array, "*batch in"], w: Coded) -> Float[Array, "*batch out"]:
    """Computes `kernels.coded_matmul` by such a kernel."""
    rows = x.reshape(-1, x.shape[-1])
    with_group = lambda a: Stacked(a.stack[:, None], a.layer) if isinstance(a, Stacked) else a[None]
    one = Coded(with_group(w.values), with_group(w.scale), w.code, w.dtype)
    return grouped(rows, one, jnp.full(1, len(rows), jnp.int32)).reshape(*x.shape[:-1], w.shape[0])


def _forward(grouped: Grouped, x: Array, w: Coded) -> tuple[Array, Coded]:
    return product(grouped, x, w), w


def _backward(_: Grouped, w: Coded, d_out: Array) -> tuple[Array, None]:
    return jnp.einsum("...o,oi->...i", d_out, w.read()), None


product.defvjp(_forward, _backward)


def by_phases(x: Float[Array, "tokens in"], count: int) -> Float[Array, "tokens in"]:
    """Moves the features of each phase together."""
    return x.reshape(len(x), -1, count).swapaxes(1, 2).reshape(x.shape)
