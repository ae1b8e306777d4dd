"""Writing of a few new tokens into a cache, for NVIDIA GPUs, in Pallas-Triton: one kernel for keys and values.

XLA takes one kernel for each scatter. Here a program writes a part of one token's vectors into all arrays, in place.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jaxtyping import Array, Int, Shaped

from kernels.backends.device import elsewhere
from kernels.backends.triton import Side, launch, load, store
from kernels.cache_write import reference


PLATFORMS = ("gpu",)
RANK = 2

MOST_TOKENS = 16  # of a row: a prompt's are so many that a scatter of their own takes longer than its start
WIDTH = 1024  # numbers that a program writes: 16 bytes for each of 128 threads
WARPS = 4


def refusal(
    stores: tuple[Array, ...], new: tuple[Array, ...], layer: Array, row: Array | np.ndarray, slot: Array
) -> str | None:
    """Returns why this implementation cannot take these arguments of `cache_write`, or None if it can."""
    del layer, row
    if len(stores) == 1:
        return "XLA writes a single array, such as latents, in the kernel that computes what is written"
    if slot.shape[1] > MOST_TOKENS:
        return f"it writes up to {MOST_TOKENS} tokens of a row, and these are {slot.shape[1]}"
    if not all(x.size for x in (*stores, *new)):
        return "it needs a token, a slot and a feature at least"
    if any(store.dtype.itemsize == 1 and 2**31 < store.size <= 2**32 for store in stores):
        return "Pallas-Triton would address an array of 2 to 4 GB in 8 bits by too few bits"
    return elsewhere("gpu")


@reference.derived
def cache_write(
    stores: tuple[Shaped[Array, "layers rows slots ..."], ...],
    new: tuple[Shaped[Array, "batch seq ..."], ...],
    layer: Int[Array, ""],
    row: Int[Array | np.ndarray, "batch _"],
    slot: Int[Array, "batch seq"],
) -> tuple[Shaped[Array, "layers rows slots ..."], ...]:
    """Computes `kernels.cache_write` in Triton."""
    return _cache_write(stores, new, layer, row, slot)


@jax.jit  # so that calls outside jit compile once, too
def _cache_write(stores: tuple[Array, ...], new: tuple[Array, ...], layer: Array, row: Array, slot: Array) -> Any:
    flat = lambda x: x.reshape(*x.shape[:2], -1)
    whole = [store.reshape(*store.shape[:3], -1) for store in stores]
    widest, first = max(math.prod(x.shape[2:]) for x in new), len(stores) + 3
    written = launch(
        functools.partial(_kernel, len(stores)),
        *map(flat, new),
        layer,
        row,
        slot,
        *whole,
        name="cache_write",
        grid=(pl.cdiv(widest, WIDTH), slot.shape[1], len(slot)),
        results=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in whole],
        warps=WARPS,
        stages=1,
        cost=pl.CostEstimate(flops=0, bytes_accessed=2 * sum(x.nbytes for x in new), transcendentals=0),
        in_place={first + n: n for n in range(len(stores))},
    )
    return tuple(x.reshape(store.shape) for x, store in zip(written, stores, strict=True))


def _kernel(count: int, *refs: Any) -> None:
    """Writes a part of a token's vectors, unless its place is beyond the arrays."""
    new, (layer_ref, row_ref, slot_ref), written = refs[:count], refs[count : count + 3], refs[-count:]
    number, token, batch = (pl.program_id(axis) for axis in range(3))
    row, slot = row_ref[batch, jnp.minimum(token, row_ref.shape[1] - 1)], slot_ref[batch, token]
    _, rows, slots, _ = written[0].shape

    @pl.when((row < rows) & (slot < slots))
    def _() -> None:
        for new_ref, written_ref in zip(new, written, strict=True):
            part = Side.of(number, WIDTH, new_ref.shape[2])
            x = load(new_ref.at[batch, token, part.indices], part.own)
            place = written_ref.at[layer_ref[...], row, slot, part.indices]
            store(place, x.astype(written_ref.dtype), part.own)
