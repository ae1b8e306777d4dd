"""Attention whose bits, for a query, depend on the keys that it sees and on nothing else, in plain JAX.

Keys are taken in blocks of `BLOCK` positions that begin at multiples of `BLOCK`, and blocks are added in order. So it
does not matter in which slots of a cache keys lie, how many of them there are, or how many queries come at a time. A
block that a query does not see changes no bit of its sums. (Where segments pack documents into rows, blocks are of
indices.)
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from kernels import invariant
from kernels.attention.reference import LOWEST, by_head, by_token, finite, poison
from kernels.attention.xla import Blocks, visible_blocks
from kernels.masks import Mask
from kernels.tokens import Tokens, given


PLATFORMS = ()  # chosen by name alone
RANK = 0

BLOCK = 64  # positions
NEVER = jnp.iinfo(jnp.int32).max  # the position of a slot that was never written


def refusal(q: Float[Array, "batch seq heads dim"], *_: object, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `attention`, or None if it can."""
    return "it computes in float32, and q is float64" if q.dtype == jnp.float64 else invariant.refusal()


def attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.attention`, without a gradient."""
    seq = q.shape[1]
    if seq == 1 and q.shape[2] == k.shape[2]:  # XLA multiplies a single row in another way
        q, q_tokens = jax.tree.map(lambda x: jnp.repeat(x, 2, axis=1), (q, q_tokens))
    in_order = kv_tokens.in_order or kv_tokens.segments is not None
    return _attention(q, k, v, scale, mask, softcap, sinks, q_tokens, kv_tokens, in_order)[:, :seq]


@functools.partial(jax.jit, static_argnums=(3, 4, 5, 9))  # so that calls outside jit compile once, too
def _attention(
    q: Array,
    k: Array,
    v: Array,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Array | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    in_order: bool,
) -> Float[Array, "batch seq heads v_dim"]:
    (batch, seq, heads, _), (kv_heads, v_dim) = q.shape, v.shape[2:]
    group, keys = heads // kv_heads, _Keys(k, v, kv_tokens, in_order)
    q_rows = invariant.wide(by_head(q, kv_heads))
    q_ids = jax.tree.map(lambda x: jnp.tile(x, group)[:, None, :, None], q_tokens)

    def step(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, sum_of_weights, out = state
        k_j, v_j, ids, there = keys.block(j)
        k_j, v_j = (invariant.wide(by_head(y, kv_heads)) for y in (k_j, v_j))
        seen = mask.visible(q_ids, jax.tree.map(lambda x: x[:, None, None, :], ids)) & there[:, None, None, :]
        x = scale * jnp.einsum("bnqd,bnkd->bnqk", q_rows, k_j)
        x = jnp.where(jnp.isfinite(x), x, jnp.nan)
        x = x if softcap is None else softcap * jnp.tanh(x / softcap)
        x = jnp.where(seen, x + poison(v_j).swapaxes(2, 3), -jnp.inf)
        new_top = jnp.maximum(top, x.max(axis=-1, keepdims=True))
        fade, weights = invariant.exp(top - new_top), invariant.exp(x - new_top)
        # Without the barrier a product and a sum may become one instruction, which rounds once.
        faded = lax.optimization_barrier((sum_of_weights * fade, out * fade))
        sum_of_weights = faded[0] + invariant.halved(weights)
        out = faded[1] + jnp.einsum("bnqk,bnkd->bnqd", weights, finite(v_j))
        return new_top, sum_of_weights, out

    # Starts from the sink, or from a logit of LOWEST, whose weight becomes 0 as soon as a key is seen.
    sinks = jnp.full(heads, LOWEST, jnp.float32) if sinks is None else jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    rows = (batch, kv_heads, group * seq)
    top = jnp.broadcast_to(jnp.repeat(sinks, seq).reshape(1, kv_heads, -1, 1), (*rows, 1))
    state = top, jnp.ones((*rows, 1), jnp.float32), jnp.zeros((*rows, v_dim), jnp.float32)
    _, sum_of_weights, out = lax.fori_loop(*keys.blocks(mask, q_tokens, seq), step, state)
    return by_token(out / sum_of_weights, heads).astype(q.dtype)


class _Keys:
    """Keys and values that are looked up by blocks of positions."""

    def __init__(self, k: Array, v: Array, tokens: Tokens, in_order: bool):
        self.k, self.v, self.tokens, self.length, self.in_order = k, v, tokens, k.shape[1], in_order
        if self.in_order:
            padding = (0, -self.length % BLOCK)
            self.k, self.v = (jnp.pad(x, ((0, 0), padding, (0, 0), (0, 0))) for x in (k, v))
            self.tokens = jax.tree.map(lambda x: jnp.pad(x, ((0, 0), padding), mode="edge"), tokens)
        else:
            positions = jnp.broadcast_to(given(tokens.positions), k.shape[:2])
            self.positions = jnp.where(positions < 0, NEVER, positions)
            self.order = jnp.argsort(self.positions, axis=1)
            self.sorted = jnp.take_along_axis(self.positions, self.order, axis=1)

    def blocks(self, mask: Mask, q_tokens: Tokens, seq: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
        """Returns the first block that a query may see, and the one after the last."""
        if self.in_order:
            (first,), (end,) = visible_blocks(
                mask, Blocks(seq, seq), q_tokens, Blocks(self.k.shape[1], BLOCK), self.tokens
            )
            return first, end
        last = jnp.max(jnp.where(self.positions == NEVER, -1, self.positions))
        return jnp.min(self.positions) // BLOCK, last // BLOCK + 1

    def block(self, j: Int[Array, ""]) -> tuple[Array, Array, Tokens, Array]:
        """Returns keys, values and tokens of a block, and which of them there are."""
        within = jnp.arange(BLOCK, dtype=jnp.int32)
        if self.in_order:
            take = lambda x: lax.dynamic_slice_in_dim(x, j * BLOCK, BLOCK, axis=1)
            there = (j * BLOCK + within < self.length)[None]
            return take(self.k), take(self.v), jax.tree.map(take, self.tokens), there
        wanted = j * BLOCK + within
        at = jax.vmap(lambda each: jnp.searchsorted(each, wanted))(self.sorted)
        at = jnp.minimum(at, self.length - 1)
        there = jnp.take_along_axis(self.sorted, at, axis=1) == wanted[None]
        slots = jnp.take_along_axis(self.order, at, axis=1)
        take = lambda x: jnp.take_along_axis(x, jnp.expand_dims(slots, range(2, x.ndim)), axis=1)
        ids = jax.tree.map(lambda x: take(jnp.broadcast_to(x, self.positions.shape)), self.tokens)
        return take(self.k), take(self.v), ids, there
