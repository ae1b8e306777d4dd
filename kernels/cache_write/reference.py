"""Defines the writing of new tokens into a cache: a scatter into each array."""

from collections.abc import Callable

import jax
import numpy as np
from jaxtyping import Array, Int, Shaped


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def cache_write(
    stores: tuple[Shaped[Array, "layers rows slots ..."], ...],
    new: tuple[Shaped[Array, "batch seq ..."], ...],
    layer: Int[Array, ""],
    row: Int[Array | np.ndarray, "batch _"],
    slot: Int[Array, "batch seq"],
) -> tuple[Shaped[Array, "layers rows slots ..."], ...]:
    """Computes `kernels.cache_write` in plain JAX."""
    return tuple(store.at[layer, row, slot].set(x.astype(store.dtype)) for store, x in zip(stores, new, strict=True))


def derived(write: Callable[..., tuple[Array, ...]]) -> Callable[..., tuple[Array, ...]]:
    """Gives a kernel that computes `cache_write` the derivative of this one."""
    function = jax.custom_vjp(write)
    function.defvjp(lambda *arrays: (write(*arrays), arrays), lambda arrays, d: jax.vjp(cache_write, *arrays)[1](d))
    return function
