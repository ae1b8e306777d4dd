"""Sorts rows by the groups that they choose, for NVIDIA GPUs, in Pallas-Triton: one kernel for a step of decoding.

One program serves one pair of a row and a choice. It finds the pair's place by comparing the pair with all others, and
copies the row there. Each program also counts the pairs of its share of the groups.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels.backends.device import elsewhere
from kernels.backends.triton import Side, launch, load, store
from kernels.sort_rows.shared import Sorted
from kernels.tiles import FEW


PLATFORMS = ("gpu",)
RANK = 2

WARPS = 4
BLOCK = 2048  # features that a program copies at a time: 16 for each thread


def refusal(x: Float[Array, "tokens dim"], chosen: Int[Array, "tokens choices"], _: int) -> str | None:
    """Returns why this implementation cannot take these arguments of `sort_rows`, or None if it can."""
    if chosen.size > FEW:
        return f"it compares each pair with all others, which is for {FEW} pairs at most, not {chosen.size}"
    if not x.size or not chosen.size:
        return "it needs a row, a feature and a choice at least"
    return elsewhere("gpu")


@functools.partial(jax.jit, static_argnums=2)  # so that calls outside jit compile once, too
def sort_rows(x: Float[Array, "tokens dim"], chosen: Int[Array, "tokens choices"], groups: int) -> Sorted:
    """Computes `kernels.sort_rows`."""
    pairs, dim = chosen.size, x.shape[1]
    whole = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)
    rows, order, place, sizes = launch(
        functools.partial(_kernel, chosen.shape[1]),
        x,
        chosen.reshape(-1).astype(jnp.int32),
        name="sort_rows",
        grid=(pairs,),
        results=(jax.ShapeDtypeStruct((pairs, dim), x.dtype), whole(pairs), whole(pairs), whole(groups)),
        warps=WARPS,
        stages=1,
        cost=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * pairs * dim * x.dtype.itemsize),
    )
    return Sorted(rows, order, place.reshape(chosen.shape), sizes)


def _kernel(
    choices: int, x_ref: Any, chosen_ref: Any, rows_ref: Any, order_ref: Any, place_ref: Any, sizes_ref: Any
) -> None:
    (_, dim), (pairs,), (groups,), pair = x_ref.shape, chosen_ref.shape, sizes_ref.shape, pl.program_id(0)
    all_pairs = Side.of(jnp.int32(0), pl.next_power_of_2(pairs), pairs)
    others = load(chosen_ref.at[all_pairs.indices], all_pairs.own, groups)  # beyond the pairs: beyond the groups
    mine, number = chosen_ref[pair], jnp.arange(len(others), dtype=jnp.int32)
    before = (others < mine) | ((others == mine) & (number < pair))
    place = jnp.sum(before.astype(jnp.int32))
    order_ref[place] = pair
    place_ref[pair] = place

    counted = Side.of(pair, pl.next_power_of_2(pl.cdiv(groups, pairs)), groups)
    group = counted.indices.start + jnp.arange(counted.indices.size, dtype=jnp.int32)
    sizes = jnp.sum((others[:, None] == group[None]).astype(jnp.int32), axis=0)
    store(sizes_ref.at[counted.indices], sizes, group < groups)

    block = min(BLOCK, pl.next_power_of_2(dim))
    for step in range(pl.cdiv(dim, block)):
        features = Side.of(jnp.int32(step), block, dim)
        row = load(x_ref.at[lax.div(pair, choices), features.indices], features.own)
        store(rows_ref.at[place, features.indices], row, features.own)
