"""Rows sorted by the groups that they choose, as in mixtures of experts: signature and meaning."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from kernels import dispatch
from kernels.sort_rows.shared import Sorted
from kernels.sums import sum_of_uses


def sort_rows(
    x: Float[Array, "tokens dim"],
    chosen: Int[Array, "tokens choices"],
    groups: int,
    *,
    implementation: str | None = None,
) -> Sorted:
    """Copies each row once for each of the groups that it chooses, from 0 to `groups` - 1, sorted by group.

    This is what `kernels.ragged_dot` takes. The gradient of a row is the sum of those of its copies, in float32.

    `implementation` is one of

    - "reference": plain JAX.
    - "triton": one kernel for up to 256 pairs, for NVIDIA GPUs. On a CPU it is interpreted.

    None chooses by rank (`kernels.dispatch`): "triton" on GPUs for few pairs, else "reference".

    Raises:
        ValueError: the implementation asked for cannot take the arguments.
    """
    return _sort_rows(x, chosen, groups, implementation)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _sort_rows(x: Array, chosen: Array, groups: int, implementation: str | None) -> Sorted:
    return dispatch.run("sort_rows", implementation, x, chosen, groups)


def _forward(x: Array, chosen: Array, groups: int, implementation: str | None) -> tuple[Sorted, Array]:
    result = _sort_rows(x, chosen, groups, implementation)
    return result, result.place


def _backward(_: int, __: str | None, place: Array, gradient: Any) -> tuple[Array, None]:
    return sum_of_uses(gradient.rows, place), None


_sort_rows.defvjp(_forward, _backward)
