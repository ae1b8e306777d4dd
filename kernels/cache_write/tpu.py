"""Writing of a few new tokens into a cache whose slots are columns, for TPUs, in Pallas.

XLA's own scatter wants an array's slots before its features. Where a TPU stores the slots last (`kernels.columns`), XLA
copies the array for it, to the other order and back: all layers of a cache, at every token. The kernel reads and writes
only the columns around each new one. For the many tokens of a prompt the copies are less work, and XLA makes them.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Int, Shaped

from kernels.backends.device import device, elsewhere
from kernels.cache_write import reference
from kernels.columns import LANES, are_columns, as_columns


PLATFORMS = ("tpu",)
RANK = 2

STRIP = 32  # features that are processed at a time
DTYPES = (jnp.float32, jnp.bfloat16, jnp.int8)


def refusal(stores: tuple[Array, ...], new: tuple[Array, ...], layer: Array, row: Array, slot: Array) -> str | None:
    """Returns why this implementation cannot take these arguments of `cache_write`, or None if it can."""
    del layer, row
    if slot.size > LANES:
        return f"it writes up to {LANES} tokens, and these are {slot.size}"
    if not all(x.size for x in (*stores, *new)):
        return "it needs a token, a slot and a feature at least"
    for store in stores:
        if store.dtype not in DTYPES:
            return f"it writes float32, bfloat16 and int8, and the cache is {store.dtype}"
        if device().platform == "tpu" and not are_columns(store.shape, store.dtype):
            return f"a TPU does not store {store.shape[2]} slots of {store.shape[-1]} features as columns"
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
    _, rows, slots, *_ = stores[0].shape
    together = min(LANES, slots)  # columns that are read and written at a time
    blocks = pl.cdiv(slots, together)
    row, slot = (x.reshape(-1).astype(jnp.int32) for x in jnp.broadcast_arrays(row, slot))
    kept = (row >= 0) & (row < rows) & (slot >= 0) & (slot < slots)
    # Tokens of one block have to be neighbours, since it is read before the first and written after the last of them. A
    # token that is dropped joins the last block that is written, or the first one of all.
    block = jnp.where(kept, row * blocks + slot // together, -1)
    block = jnp.where(kept, block, jnp.maximum(block.max(), 0))
    order = jnp.argsort(block)
    column = jnp.where(kept, slot % together, -1)
    places = jnp.stack([jnp.broadcast_to(layer, block.shape), block // blocks, block % blocks, column])[:, order]
    return tuple(_write(store, x, places, order, together) for store, x in zip(stores, new, strict=True))


def _write(
    store: Shaped[Array, "layers rows slots *heads dim"],
    new: Shaped[Array, "batch seq *heads dim"],
    places: Int[Array, "4 tokens"],
    order: Int[Array, " tokens"],
    together: int,
) -> Shaped[Array, "layers rows slots *heads dim"]:
    """Writes tokens in this order into one array. `places` has the layer, the row, the block and the column of each."""
    vectors = new.astype(store.dtype).astype(jnp.float32).reshape(1, 1, len(order), *store.shape[3:])[:, :, order]
    unused = -len(order) % together
    vectors = jnp.pad(vectors, [(0, 0), (0, 0), (0, unused)] + [(0, 0)] * (store.ndim - 3))
    view, vectors = as_columns(store), as_columns(vectors)[0, 0]
    of_block = pl.BlockSpec(
        (None, None, *view.shape[2:4], together), lambda t, places: (places[0, t], places[1, t], 0, 0, places[2, t])
    )
    of_vectors = pl.BlockSpec((*view.shape[2:4], together), lambda t, places: (0, 0, t // together))
    written = pl.pallas_call(
        _kernel,
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
            bytes_accessed=2 * len(order) * math.prod(view.shape[2:4]) * together * store.dtype.itemsize,
        ),
    )(places, vectors, view)
    return written.transpose(0, 1, 4, 2, 3).reshape(store.shape)


def _kernel(places: Any, vectors: Any, old: Any, new: Any) -> None:
    """Writes one token: turns its column to where it belongs, and takes the other columns from the block."""
    t = pl.program_id(0)
    before = jnp.maximum(t - 1, 0)
    entered = (t == 0) | (places[1, t] != places[1, before]) | (places[2, t] != places[2, before])
    heads, dim, together = new.shape
    rows = STRIP if dim % STRIP == 0 else dim

    @pl.when(entered)
    def begin() -> None:
        new[...] = old[...]

    def strip(n: Any, _: None) -> None:
        at = n // (dim // rows), pl.ds(pl.multiple_of(n % (dim // rows) * rows, rows), rows)
        turned = pltpu.roll(vectors[at], (places[3, t] - t) % together, axis=1)
        here = lax.broadcasted_iota(jnp.int32, (rows, together), 1) == places[3, t]
        mixed = jnp.where(here, turned, new[at].astype(jnp.float32))
        new[at] = (mixed.astype(jnp.int32) if new.dtype == jnp.int8 else mixed).astype(new.dtype)

    lax.fori_loop(0, heads * (dim // rows), strip, None)
