"""Attention of one query or a few in each row of a batch over a cache, in plain JAX, for every platform.

It loops over blocks of slots, from the first that any row sees to the last, and reads each from the array of all layers
(flash-decoding without the split). So a step's time depends on the longest row's length, not on the cache's, and only
one block of the cache is copied at a time. Where a cache lies in pages, a block is some whole pages of each row.

On a CPU it takes a few rows at a time, and small blocks, which stay in its caches: 512 rows that see 560 slots of 4
heads take a seventh of the time that they take at once in blocks of 512 slots.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels.attention.reference import LOWEST, by_head, by_token, finite, poison
from kernels.attention.xla import Blocks, visible_blocks
from kernels.backends.device import device
from kernels.decode_attention.reference import with_gradient
from kernels.masks import Mask
from kernels.stacked import Stacked
from kernels.tokens import Tokens


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 3

BLOCK = 512  # most slots of a block: a loop's step costs a GPU a dozen launches
CPU_BLOCK = 64
CPU_BYTES = 2**20  # of the keys and values of a block, in float32: about a core's second cache


def refusal(q: Float[Array, "batch seq heads dim"], *_: object, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `decode_attention`, or None if it can."""
    return "it computes in float32, and q is float64" if q.dtype == jnp.float64 else None


# Jitted, so that calls outside jit compile once, too.
@with_gradient
@functools.partial(jax.jit, static_argnames=("v_dim", "scale", "mask", "softcap"))
def decode_attention(
    q: Float[Array, "batch seq heads dim"],
    k: Stacked,
    v: Stacked | None,
    *,
    v_dim: int,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.decode_attention` in blocks. Its gradient is the reference's."""
    formula = _Formula(v_dim, scale, mask, softcap)
    batch, count = len(q), _rows_together(len(q), k, v_dim)

    def rows(first: Array) -> Float[Array, "some seq heads v_dim"]:
        of_rows = lambda x: x if len(x) == 1 else lax.dynamic_slice_in_dim(x, first, count)
        queries, of_queries, of_slots = jax.tree.map(of_rows, (q, q_tokens, kv_tokens))
        return _rows(formula, queries, k, v, sinks, of_queries, of_slots, first)

    if count == batch:
        return rows(jnp.zeros((), jnp.int32))
    return lax.map(rows, jnp.arange(0, batch, count, jnp.int32)).reshape(*q.shape[:-1], v_dim)


class _Formula(NamedTuple):
    v_dim: int
    scale: float
    mask: Mask
    softcap: float | None


def _rows(
    formula: _Formula,
    q: Float[Array, "batch seq heads dim"],
    k: Stacked,
    v: Stacked | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    row: Int[Array, ""],
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes the attention of neighbouring rows, of which `row` is the first one in the cache."""
    v_dim, scale, mask, softcap = formula
    (batch, seq, heads, _), (_, kv_seq, kv_heads, _) = q.shape, k.shape
    slots = None if k.table is None else k.stack.shape[2]  # of a page
    blocks, group = _blocks(kv_seq, slots), heads // kv_heads
    rows = (batch, kv_heads, group * seq)
    (first,), (end,) = visible_blocks(mask, Blocks(seq, seq), q_tokens, blocks, kv_tokens)
    q_rows = by_head(q, kv_heads)
    q_ids = jax.tree.map(lambda x: jnp.tile(x, group)[:, None, :, None], q_tokens)

    def take(x: Stacked, j: Array) -> Array:
        start, zero = blocks.start(j).astype(jnp.int32), jnp.zeros((), jnp.int32)
        if slots is not None:
            numbers = lax.dynamic_slice(x.table, (row, start // slots), (batch, blocks.size // slots))
            return by_head(x.pages(numbers), kv_heads)

        def of_block(stack: Any) -> Any:
            sizes = (1, batch, blocks.size, *stack.shape[3:])
            return lax.dynamic_slice(stack, (x.layer, row, start, *[zero] * (stack.ndim - 3)), sizes)[0]

        return by_head(x.widened(of_block(x.stack), None if x.scale is None else of_block(x.scale)), kv_heads)

    def step(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = state
        k_j = take(k, j)
        v_j = k_j[..., :v_dim] if v is None else take(v, j)
        ids = jax.tree.map(lambda x: blocks.take(x, j)[:, None, None, :], kv_tokens)
        seen = mask.visible(q_ids, ids) & blocks.fresh(j)[None, None, None, :]
        x = scale * _product("bnqd,bnkd->bnqk", q_rows, k_j)
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)  # of a key that is not finite, which counts where it is seen
        x = x if softcap is None else softcap * jnp.tanh(x / softcap)
        if seq == 1:
            v_j = jnp.where(seen[:, :, :1].swapaxes(2, 3), v_j, 0)
        else:  # what only some queries see; summing each vector takes as long as the products
            x, v_j = x + poison(v_j).astype(jnp.float32).swapaxes(2, 3), finite(v_j)
        x = jnp.where(seen, x, -jnp.inf)
        new_top = jnp.maximum(top, x.max(axis=-1, keepdims=True))
        fade, weights = jnp.exp(top - new_top), jnp.exp(x - new_top)
        total = total * fade + weights.sum(axis=-1, keepdims=True)
        out = out * fade + _product("bnqk,bnkd->bnqd", weights.astype(q.dtype), v_j)
        return new_top, total, out

    # Starts from the sink, or from a logit of LOWEST, whose weight becomes 0 as soon as a key is seen.
    sinks = jnp.full(heads, LOWEST, jnp.float32) if sinks is None else jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    top = jnp.broadcast_to(jnp.repeat(sinks, seq).reshape(1, kv_heads, -1, 1), (*rows, 1))
    state = top, jnp.ones((*rows, 1), jnp.float32), jnp.zeros((*rows, v_dim), jnp.float32)
    _, total, out = lax.fori_loop(first, end, step, state)
    return by_token(out / total, heads).astype(q.dtype)


def _rows_together(batch: int, k: Stacked, v_dim: int) -> int:
    """Returns the number of rows that are taken at a time, of which there is a whole number in the batch."""
    if device().platform != "cpu":
        return batch
    *_, heads, dim = k.shape
    most = max(1, CPU_BYTES // (4 * CPU_BLOCK * heads * (dim + v_dim)))
    return next(count for count in range(min(batch, most), 0, -1) if batch % count == 0)


def _blocks(length: int, slots: int | None) -> Blocks:
    """Cuts a row's slots into blocks; of whole pages, if pages have so many `slots`."""
    most = CPU_BLOCK if device().platform == "cpu" else BLOCK
    if slots is None:
        return Blocks.of(length, most)
    pages = length // slots
    count = -(-pages // max(1, most // slots))
    return Blocks(length, -(-pages // count) * slots)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
