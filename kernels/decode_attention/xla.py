"""Attention of one query or a few in each row of a batch over a cache, in plain JAX, for every platform.

It loops over blocks of slots, from the first that any row sees to the last, and reads each from the array of all layers
(flash-decoding without the split). So a step's time depends on the longest row's length, not on the cache's, and only
one block of the cache is copied at a time. Where a cache lies in pages, a block is some whole pages of each row.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels.attention.reference import LOWEST, by_head, by_token, finite, poison
from kernels.attention.xla import Blocks, visible_blocks
from kernels.decode_attention.reference import with_gradient
from kernels.masks import Mask
from kernels.stacked import Stacked
from kernels.tokens import Tokens


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 3

BLOCK = 512  # most slots of a block: a loop's step costs a GPU a dozen launches


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
    (_, seq, heads, _), (batch, kv_seq, kv_heads, _) = q.shape, k.shape
    slots = None if k.table is None else k.stack.shape[2]  # of a page
    blocks, group = _blocks(kv_seq, slots), heads // kv_heads
    rows = (batch, kv_heads, group * seq)
    (first,), (end,) = visible_blocks(mask, Blocks(seq, seq), q_tokens, blocks, kv_tokens)
    q_rows = by_head(q + poison(q), kv_heads)
    q_ids = jax.tree.map(lambda x: jnp.tile(x, group)[:, None, :, None], q_tokens)

    def take(x: Stacked, j: Array) -> Array:
        start, zero = blocks.start(j).astype(jnp.int32), jnp.zeros((), jnp.int32)
        if slots is not None:
            numbers = lax.dynamic_slice_in_dim(x.table, start // slots, blocks.size // slots, axis=1)
            return by_head(x.pages(numbers), kv_heads)

        def of_block(stack: Any) -> Any:
            sizes = (1, batch, blocks.size, *stack.shape[3:])
            return lax.dynamic_slice(stack, (x.layer, zero, start, *[zero] * (stack.ndim - 3)), sizes)[0]

        return by_head(x.widened(of_block(x.stack), None if x.scale is None else of_block(x.scale)), kv_heads)

    def step(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, out = state
        k_j = take(k, j)
        v_j = k_j[..., :v_dim] if v is None else take(v, j)
        ids = jax.tree.map(lambda x: blocks.take(x, j)[:, None, None, :], kv_tokens)
        seen = mask.visible(q_ids, ids) & blocks.fresh(j)[None, None, None, :]
        x = scale * _product("bnqd,bnkd->bnqk", q_rows, finite(k_j))
        x = x if softcap is None else softcap * jnp.tanh(x / softcap)
        spoilt = (poison(k_j) + poison(v_j)).astype(jnp.float32).swapaxes(2, 3)
        x = jnp.where(seen, x + spoilt, -jnp.inf)
        new_top = jnp.maximum(top, x.max(axis=-1, keepdims=True))
        fade, weights = jnp.exp(top - new_top), jnp.exp(x - new_top)
        total = total * fade + weights.sum(axis=-1, keepdims=True)
        out = out * fade + _product("bnqk,bnkd->bnqd", weights.astype(q.dtype), finite(v_j))
        return new_top, total, out

    # Starts from the sink, or from a logit of LOWEST, whose weight becomes 0 as soon as a key is seen.
    sinks = jnp.full(heads, LOWEST, jnp.float32) if sinks is None else jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    top = jnp.broadcast_to(jnp.repeat(sinks, seq).reshape(1, kv_heads, -1, 1), (*rows, 1))
    state = top, jnp.ones((*rows, 1), jnp.float32), jnp.zeros((*rows, v_dim), jnp.float32)
    _, total, out = lax.fori_loop(first, end, step, state)
    return by_token(out / total, heads).astype(q.dtype)


def _blocks(length: int, slots: int | None) -> Blocks:
    """Cuts a row's slots into blocks of at most `BLOCK`; of whole pages, if pages have so many `slots`."""
    if slots is None:
        return Blocks.of(length, BLOCK)
    pages = length // slots
    count = -(-pages // max(1, BLOCK // slots))
    return Blocks(length, -(-pages // count) * slots)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)
