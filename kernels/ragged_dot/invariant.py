"""Grouped products whose bits, for a row, do not depend on the other rows.

They are those of "xla", whose tiles have at least two rows wherever the rows are two: XLA multiplies more than one row
in one way, whatever their number.
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
    return xla.ragged_dot(jnp.pad(x, ((0, int(len(x) == 1)), (0, 0))), w, group_sizes)[: len(x)]
