"""Grouped products whose bits, for a row, do not depend on the other rows.

They are those of "xla" for rows in float32, whose tiles have at least two rows wherever the rows are two: XLA
multiplies more than one row in one way, whatever their number.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import invariant
from kernels.ragged_dot import shared, xla
from kernels.ragged_dot.shared import Matrices, Rows


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(x: Rows, w: Matrices, _: Int[Array, " groups"]) -> str | None:
    """Returns why this implementation cannot take these arguments of `ragged_dot`, or None if it can."""
    return invariant.refusal() or shared.refusal(x, w)


def ragged_dot(x: Rows, w: Matrices, group_sizes: Int[Array, " groups"]) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot`."""
    rows = jnp.pad(x, ((0, int(len(x) == 1)), (0, 0)))
    # Sums of products of 8 bits are exact.
    rows = rows if shared.result_dtype(x) != x.dtype else invariant.wide(rows)
    return xla.ragged_dot(rows, w, group_sizes)[: len(x)].astype(shared.result_dtype(x))
