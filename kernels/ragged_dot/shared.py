"""The part that `ragged_dot` implementations share: tiles of sorted rows, and derivatives.

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

from kernels.quantized_matmul.quantize import LARGEST
from kernels.quantized_matmul.shared import INT32_TERMS
from kernels.stacked import Stacked, gradient


Rows = Float[Array, "tokens in"] | Int8[Array, "tokens in"]
Matrices = Float[Array, "groups out in"] | Int8[Array, "groups out in"] | Stacked


class Kernels(NamedTuple):
    """The two kernels of an implementation.

    `rows_times_matrices(x, w, group_sizes, axis)` multiplies each row of x by its group's matrix, and sums over `axis`
    of w: 2 for the output, 1 for the gradient of the rows. Rows without a group give zeros.

    `sums_of_products(d_out, x, group_sizes)` returns [groups, out, in], in the dtype of x, with zeros for a group
    without rows.
    """

    rows_times_matrices: Callable[..., Array]
    sums_of_products: Callable[..., Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def ragged_dot(
    kernels: Kernels, x: Rows, w: Matrices, group_sizes: Int[Array, " groups"]
) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` with these kernels."""
    return kernels.rows_times_matrices(x, w, group_sizes, axis=2)


def _forward(
    kernels: Kernels, x: Array, w: Matrices, group_sizes: Array
) -> tuple[Array, tuple[Array, Matrices, Array]]:
    return ragged_dot(kernels, x, w, group_sizes), (x, w, group_sizes)


def _backward(
    kernels: Kernels, residuals: tuple[Array, Matrices, Array], d_out: Array
) -> tuple[Array, Matrices | None, None]:
    x, w, group_sizes = residuals
    dx = kernels.rows_times_matrices(d_out, w, group_sizes, axis=1)
    return dx, None if w.dtype == jnp.int8 else gradient(w, kernels.sums_of_products(d_out, x, group_sizes)), None


ragged_dot.defvjp(_forward, _backward)


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


def mean_rows(tokens: int, groups: int, *, least: int, most: int) -> int:
    """Returns the power of two, from `least` to `most`, that holds a group of mean size."""
    mean = -(-tokens // groups)
    return max(least, min(1 << (mean - 1).bit_length(), most))


def spans(group_sizes: Int[Array, " groups"], tokens: int) -> tuple[Int[Array, " groups"], Int[Array, " groups"]]:
    """Returns the start and the end of each group's rows. No group goes beyond the last row."""
    ends = jnp.minimum(jnp.cumsum(group_sizes), tokens)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def with_rest(group_sizes: Int[Array, " groups"], tokens: int) -> Int[Array, " groups+1"]:
    """Appends a group for the rows that belong to none."""
    return jnp.append(group_sizes, jnp.int32(tokens))  # as large as possible: `spans` ends it at the last row


class Tiles(NamedTuple):
    """Tiles of sorted rows: each has rows of one group, at most `size` of them.

    Only the first `count` tiles are used. Those after them belong to the last group, and have no rows.
    """

    size: int
    count: Int[Array, ""]
    group: Int[Array, " tiles"]
    first: Int[Array, " tiles"]  # the tile's first row
    end: Int[Array, " tiles"]  # the row after the tile's last

    @classmethod
    def of(
        cls, group_sizes: Int[Array, " groups"], tokens: int, size: int, *, aligned: bool = False, empty: bool = False
    ) -> "Tiles":
        """Cuts the rows into tiles.

        `aligned` tiles are also cut at the multiples of `size`, so that each lies within one block of rows. With
        `empty`, a group without rows has one tile, without rows.
        """
        starts, ends = spans(group_sizes, tokens)
        origins = starts // size * size if aligned else starts
        counts = jnp.where(ends > starts, (ends - origins + size - 1) // size, int(empty))
        groups = len(group_sizes)
        most = -(-tokens // size) + (groups if empty else min(groups, tokens))
        group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), counts, total_repeat_length=most)
        ordinal = jnp.arange(most, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[group]
        origin = origins[group] + size * ordinal
        first = jnp.clip(origin, starts[group], ends[group])
        return cls(size, jnp.cumsum(counts)[-1], group, first, jnp.minimum(origin + size, ends[group]))
