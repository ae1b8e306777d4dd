"""Writing of a few new tokens into a cache that is stored by head, for TPUs, in Pallas.

XLA's own scatter wants an array's slots before its heads and features. Where a TPU stores the heads first
(`kernels.by_head`), XLA copies the array for it, to the other order and back: all layers of a cache, at every token.
The kernel reads and writes only the slots around each new one, which are columns or rows. For the many tokens of a
prompt the copies are less work, and XLA makes them.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels.backends.device import device, elsewhere
from kernels.by_head import LANES, are_by_head, are_columns, by_head
from kernels.cache_write import reference


PLATFORMS = ("tpu",)
RANK = 2

STRIP = 32  # features, or slots that are rows, that are processed at a time
DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)


def refusal(
    stores: tuple[Array, ...], new: tuple[Array, ...], layer: Array, row: Array | np.ndarray, slot: Array
) -> str | None:
    """Returns why this implementation cannot take these arguments of `cache_write`, or None if it can."""
    del layer, row
    if slot.size > LANES:
        return f"it writes up to {LANES} tokens, and these are {slot.size}"
    if not all(x.size for x in (*stores, *new)):
        return "it needs a token, a slot and a feature at least"
    for store in stores:
        if store.dtype not in DTYPES:
            return f"it writes float32, bfloat16 and int8, and the cache is {store.dtype}"
        if device().platform == "tpu" and not are_by_head(store.shape, store.dtype):
            return f"a TPU does not store {store.shape[2]} slots of {store.shape[3:]} numbers by head"
    return elsewhere("tpu")


@reference.derived
def cache_write(
    stores: tuple[Shaped[Array, "layers rows slots ..."], ...],
    new: tuple[Shaped[Array, "batch seq ..."], ...],
    layer: Int[Array, ""],
    row: Int[Array, "batch _"],
    slot: Int[Array, "batch seq"],
) -> tuple[Shaped[Array, "layers rows slots ..."], ...]:
    """Computes `kernels.cache_write` in Pallas for TPUs."""
    return _cache_write(stores, new, layer, row, slot)


@jax.jit  # so that calls outside jit compile once, too
def _cache_write(stores: tuple[Array, ...], new: tuple[Array, ...], layer: Array, row: Array, slot: Array) -> Any:
    row, slot = (x.reshape(-1).astype(jnp.int32) for x in jnp.broadcast_arrays(row, slot))
    return tuple(_write(store, x, layer, row, slot) for store, x in zip(stores, new, strict=True))


def _write(
    store: Shaped[Array, "layers rows slots *heads dim"],
    new: Shaped[Array, "batch seq *heads dim"],
    layer: Int[Array, ""],
    row: Int[Array, " tokens"],
    slot: Int[Array, " tokens"],
) -> Shaped[Array, "layers rows slots *heads dim"]:
    """Writes tokens into one array. `places` has the layer, the row, the block and the slot therein of each."""
    columns, (_, rows, slots, *_) = are_columns(store.shape[-1]), store.shape
    together = min(LANES if columns else STRIP, slots)  # slots that are read and written at a time
    blocks = pl.cdiv(slots, together)
    kept = (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots)
    # Tokens of one block have to be neighbours, since it is read before the first and written after the last of them. A
    # token that is dropped joins the last block that is written, or the first one of all.
    block = jnp.where(kept, row * blocks + slot // together, -1)
    block = jnp.where(kept, block, jnp.maximum(block.max(), 0))
    order = jnp.argsort(block)
    at = jnp.where(kept, slot % together, -1)
    places = jnp.stack([jnp.broadcast_to(layer, block.shape), block // blocks, block % blocks, at])[:, order]

    view = by_head(store)
    heads, *features = view.shape[2:4] if columns else (view.shape[2], view.shape[4])
    vectors = new.astype(store.dtype).astype(jnp.float32).reshape(1, 1, len(order), *store.shape[3:])[:, :, order]
    if columns:
        unused = -len(order) % together
        vectors = by_head(jnp.pad(vectors, [(0, 0), (0, 0), (0, unused)] + [(0, 0)] * (store.ndim - 3)))[0, 0]
        of_vectors = pl.BlockSpec((heads, *features, together), lambda t, places: (0, 0, t // together))
        of_block = pl.BlockSpec(
            (None, None, heads, *features, together),
            lambda t, places: (places[0, t], places[1, t], 0, 0, places[2, t]),
        )
    else:
        vectors = vectors.reshape(len(order), heads, 1, *features)
        of_vectors = pl.BlockSpec((None, heads, 1, *features), lambda t, places: (t, 0, 0, 0))
        of_block = pl.BlockSpec(
            (None, None, heads, together, *features),
            lambda t, places: (places[0, t], places[1, t], 0, places[2, t], 0),
        )
    written = pl.pallas_call(
        functools.partial(_kernel, _column_in if columns else _row_in),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1, grid=(len(order),), in_specs=[of_vectors, of_block], out_specs=of_block
        ),
        out_shape=jax.ShapeDtypeStruct(view.shape, view.dtype),
        input_output_aliases={2: 0},
        name="cache_write",
        interpret=device().platform == "cpu",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=pl.CostEstimate(
            flops=0,
            transcendentals=0,
            bytes_accessed=2 * len(order) * math.prod(store.shape[3:]) * together * store.dtype.itemsize,
        ),
    )(places, vectors, view)
    return written.transpose(0, 1, *((4, 2, 3) if columns else (3, 2, 4))).reshape(store.shape)


def _kernel(put: Callable[..., None], places: Any, vectors: Any, old: Any, new: Any) -> None:
    """Writes one token into a block, and keeps the block's other slots."""
    t = pl.program_id(0)
    before = jnp.maximum(t - 1, 0)
    entered = (t == 0) | (places[1, t] != places[1, before]) | (places[2, t] != places[2, before])

    @pl.when(entered)
    def begin() -> None:
        new[...] = old[...]

    put(t, places[3, t], vectors, new)


def _column_in(t: Array, column: Array, vectors: Any, new: Any) -> None:
    """Turns the token's column to where it belongs, and takes the other columns from the block."""
    heads, dim, together = new.shape
    rows = STRIP if dim % STRIP == 0 else dim

    def strip(n: Any, _: None) -> None:
        at = n // (dim // rows), pl.ds(pl.multiple_of(n % (dim // rows) * rows, rows), rows)
        turned = pltpu.roll(vectors[at], (column - t) % together, axis=1)
        new[at] = _mixed(lax.broadcasted_iota(jnp.int32, (rows, together), 1) == column, turned, new[at])

    lax.fori_loop(0, heads * (dim // rows), strip, None)


def _row_in(_: Array, row: Array, vectors: Any, new: Any) -> None:
    """Puts the token's row where it belongs, and takes the other rows from the block."""

    def of_head(n: Any, _: None) -> None:
        here = lax.broadcasted_iota(jnp.int32, new.shape[1:], 0) == row
        new[n] = _mixed(here, jnp.broadcast_to(vectors[n], new.shape[1:]), new[n])

    lax.fori_loop(0, len(new), of_head, None)


def _mixed(here: Bool[Array, "rows columns"], x: Float[Array, "rows columns"], old: Array) -> Array:
    """Takes the numbers that are `here` from `x`, and the others from `old`, in the dtype of `old`."""
    mixed = jnp.where(here, x, old.astype(jnp.float32))
    return (mixed.astype(jnp.int32) if old.dtype == jnp.int8 else mixed).astype(old.dtype)
