"""Defines `kernels.sort_rows` in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.sort_rows.shared import Sorted
from kernels.tiles import FEW


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def sort_rows(x: Float[Array, "tokens dim"], chosen: Int[Array, "tokens choices"], groups: int) -> Sorted:
    """Computes `kernels.sort_rows`."""
    flat, choices = chosen.reshape(-1), chosen.shape[1]
    if len(flat) > FEW:
        order = jnp.argsort(flat, stable=True)
        place, sizes = jnp.argsort(order), jnp.bincount(flat, length=groups)
    else:
        # Comparisons of all with all are three kernels on a GPU, where sorting and counting are ten.
        here = jnp.arange(len(flat))
        mine, other, at, of_other = flat[:, None], flat[None], here[:, None], here[None]
        place = jnp.sum((other < mine) | ((other == mine) & (of_other < at)), axis=1)
        order = jnp.sum(jnp.where(place[None] == at, of_other, 0), axis=1)
        sizes = jnp.sum(mine == jnp.arange(groups)[None], axis=0)
    rows = jnp.take(x, order // choices, axis=0, mode="fill", fill_value=0)
    return Sorted(rows, order, place.reshape(chosen.shape), sizes)
