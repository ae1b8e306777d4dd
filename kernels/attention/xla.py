"""Attention in blocks (FlashAttention-2, arXiv:2307.08691) in plain JAX, for every platform that XLA compiles for.

Each block of queries loops over the blocks of keys that it may see, once forward and once backward. The backward pass
needs only the output and the log-sum-exp of each query and head. Only a table with one bool for each pair of blocks
grows with seq * kv_seq.

The order of axes suits XLA's products on CPU. They are fastest on contiguous matrices, so blocks are sorted by head
first. Products that sum over the rows of the left operand are half as fast, so the backward pass has its logits as
[keys, queries]. Three of its products use the logits, and only dq needs a transposed operand, the keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.attention import shared
from kernels.attention.reference import LOWEST, by_head, by_token
from kernels.masks import Extent, Mask
from kernels.tokens import Tokens


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 3

BLOCK = 128  # most tokens of a block; on CPU, blocks of 64 and of 256 both take longer


class Blocks(NamedTuple):
    """A sequence cut into blocks of one size. The last overlaps the one before it, so that nothing needs padding."""

    length: int
    size: int

    @classmethod
    def of(cls, length: int, most: int = BLOCK) -> "Blocks":
        count = -(-length // most)
        multiple_of_8 = -(-length // (8 * count)) * 8
        return cls(length, min(length, multiple_of_8))

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    def start(self, i: Int[Array, "..."]) -> Int[Array, "..."]:
        return jnp.minimum(i * self.size, self.length - self.size)

    def fresh(self, i: Int[Array, ""]) -> Bool[Array, " size"]:
        """Returns which tokens of block `i` are in no earlier block."""
        return self.start(i) + jnp.arange(self.size) >= i * self.size

    def take(self, x: Array, i: Int[Array, ""], axis: int = 1) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start(i), self.size, axis)

    def put(self, x: Array, i: Int[Array, ""], block: Array, axis: int = 1) -> Array:
        return lax.dynamic_update_slice_in_dim(x, block, self.start(i), axis)

    def add(self, x: Array, i: Int[Array, ""], block: Array, axis: int = 1) -> Array:
        return self.put(x, i, self.take(x, i, axis) + block, axis)

    def extent(self, tokens: Tokens, axis: int) -> Extent:
        """Returns the blocks' extents, of (batch, length), as (batch, 1, count) or (batch, count, 1): 1 at `axis`."""
        of_block = self.start(jnp.arange(self.count))[:, None] + jnp.arange(self.size)[None, :]
        least = jax.tree.map(lambda x: jnp.expand_dims(x[:, of_block].min(axis=2), axis), tokens)
        most = jax.tree.map(lambda x: jnp.expand_dims(x[:, of_block].max(axis=2), axis), tokens)
        return Extent(least, most)


def refusal(q: Float[Array, "batch seq heads dim"], *_: object, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `attention`, or None if it can."""
    return "it computes in float32, and q is float64" if q.dtype == jnp.float64 else None


@functools.partial(jax.jit, static_argnames=("scale", "mask", "softcap"))  # so that calls outside jit compile once, too
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
    """Computes `kernels.attention` in blocks."""
    formula = shared.Formula(scale, mask, softcap)
    return shared.attention(FLASH, formula, q, k, v, sinks, q_tokens, kv_tokens)


def forward(
    formula: shared.Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
    """Implements `shared.Flash.forward` in float32. Logits: [batch, kv_heads, queries of the group's heads, keys]."""
    (batch, seq, heads, _), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    q_blocks, kv_blocks, group = Blocks.of(seq), Blocks.of(kv_seq), heads // kv_heads
    rows = (batch, kv_heads, group * q_blocks.size)
    first, end = visible_blocks(formula.mask, q_blocks, q_tokens, kv_blocks, kv_tokens)

    def query_block(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        q_i = by_head(q_blocks.take(q, i), kv_heads)
        q_tokens_i = jax.tree.map(lambda x: jnp.tile(q_blocks.take(x, i), group)[:, None, :, None], q_tokens)

        def key_block(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = state
            k_j, v_j = (by_head(kv_blocks.take(x, j), kv_heads) for x in (k, v))
            kv_tokens_j = jax.tree.map(lambda x: kv_blocks.take(x, j)[:, None, None, :], kv_tokens)

            seen = formula.mask.visible(q_tokens_i, kv_tokens_j)
            seen &= kv_blocks.fresh(j)[None, None, None, :]
            logits = jnp.where(seen, _logits(formula, "bnqd,bnkd->bnqk", q_i, k_j), -jnp.inf)
            new_top = jnp.maximum(top, logits.max(axis=-1, keepdims=True))
            weights = jnp.exp(logits - new_top)
            fade = jnp.exp(top - new_top)
            total = total * fade + weights.sum(axis=-1, keepdims=True)
            out = out * fade + _product("bnqk,bnkd->bnqd", weights.astype(v.dtype), v_j)
            return new_top, total, out

        # Starts from a logit of LOWEST with a value of zero, whose weight becomes 0 as soon as a key is seen.
        state = jnp.full((*rows, 1), LOWEST), jnp.ones((*rows, 1), jnp.float32), _zeros(*rows, v_dim)
        top, total, out_i = lax.fori_loop(first[i], end[i], key_block, state)
        out, lse = results
        out = q_blocks.put(out, i, by_token(out_i / total, heads))
        lse = q_blocks.put(lse, i, by_token(top + jnp.log(total), heads))
        return out, lse

    results = _zeros(batch, seq, heads, v_dim), _zeros(batch, seq, heads, 1)
    out, lse = lax.fori_loop(0, q_blocks.count, query_block, results)
    return out, lse[..., 0].swapaxes(1, 2)


def backward(
    formula: shared.Formula,
    q: Array,
    k: Array,
    v: Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    lse: Float[Array, "batch heads seq"],
    out: Float[Array, "batch seq heads v_dim"],
    d_out: Float[Array, "batch seq heads v_dim"],
) -> tuple[Array, Array, Array]:
    """Implements `shared.Flash.backward`. Logits are [batch, kv_heads, keys, queries of the group's heads]."""
    delta = shared.delta_of(out, d_out)
    (batch, seq, heads, dim), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    q_blocks, kv_blocks, group = Blocks.of(seq), Blocks.of(kv_seq), heads // kv_heads
    first, end = visible_blocks(formula.mask, q_blocks, q_tokens, kv_blocks, kv_tokens)
    lse, delta = (x.swapaxes(1, 2)[..., None] for x in (lse, delta))
    k_transposed = by_head(k, kv_heads).swapaxes(2, 3)  # before the loop: inside, XLA would undo it

    def query_block(i: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        q_i, d_out_i = by_head(q_blocks.take(q, i), kv_heads), by_head(q_blocks.take(d_out, i), kv_heads)
        lse_i, delta_i = (by_head(q_blocks.take(x, i), kv_heads).swapaxes(2, 3) for x in (lse, delta))
        q_tokens_i = jax.tree.map(lambda x: jnp.tile(q_blocks.take(x, i), group)[:, None, None, :], q_tokens)
        fresh_i = jnp.tile(q_blocks.fresh(i), group)[None, None, None, :]

        def key_block(j: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_i, dk, dv = gradients
            k_j, v_j = (by_head(kv_blocks.take(x, j), kv_heads) for x in (k, v))
            kv_tokens_j = jax.tree.map(lambda x: kv_blocks.take(x, j)[:, None, :, None], kv_tokens)

            seen = formula.mask.visible(q_tokens_i, kv_tokens_j)
            seen &= kv_blocks.fresh(j)[None, None, :, None] & fresh_i
            logits = _logits(formula, "bnkd,bnqd->bnkq", k_j, q_i)
            weights = jnp.where(seen, jnp.exp(logits - lse_i), 0)
            d_logits = weights * (_product("bnkd,bnqd->bnkq", v_j, d_out_i) - delta_i)
            if formula.softcap is not None:
                d_logits *= 1 - jnp.square(logits / formula.softcap)
            d_logits = jnp.where(seen, formula.scale * d_logits, 0).astype(q.dtype)
            dq_i += _product("bndk,bnkq->bndq", kv_blocks.take(k_transposed, j, axis=3), d_logits)
            dk = kv_blocks.add(dk, j, _product("bnkq,bnqd->bnkd", d_logits, q_i), axis=2)
            dv = kv_blocks.add(dv, j, _product("bnkq,bnqd->bnkd", weights.astype(v.dtype), d_out_i), axis=2)
            return dq_i, dk, dv

        dq, dk, dv = gradients
        dq_i = _zeros(batch, kv_heads, dim, group * q_blocks.size)
        dq_i, dk, dv = lax.fori_loop(first[i], end[i], key_block, (dq_i, dk, dv))
        return q_blocks.add(dq, i, by_token(dq_i.swapaxes(2, 3), heads)), dk, dv

    gradients = _zeros(*q.shape), _zeros(batch, kv_heads, kv_seq, dim), _zeros(batch, kv_heads, kv_seq, v_dim)
    dq, dk, dv = lax.fori_loop(0, q_blocks.count, query_block, gradients)
    return dq, dk.swapaxes(1, 2), dv.swapaxes(1, 2)


FLASH = shared.Flash(forward, backward)


def visible_blocks(
    mask: Mask, q_blocks: Blocks, q_tokens: Tokens, kv_blocks: Blocks, kv_tokens: Tokens
) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
    """Returns, for each block of queries, the range (first, end) of blocks of keys that it may see in any batch row.

    The range may include blocks that no query sees.
    """
    some, _ = mask.bounds(q_blocks.extent(q_tokens, axis=2), kv_blocks.extent(kv_tokens, axis=1))
    seen = some.any(axis=0)
    first = jnp.argmax(seen, axis=1)
    return first, jnp.where(seen.any(axis=1), kv_blocks.count - jnp.argmax(seen[:, ::-1], axis=1), first)


def _logits(formula: shared.Formula, subscripts: str, x: Array, y: Array) -> Array:
    logits = formula.scale * _product(subscripts, x, y)
    return logits if formula.softcap is None else formula.softcap * jnp.tanh(logits / formula.softcap)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _zeros(*shape: int) -> Array:
    return jnp.zeros(shape, jnp.float32)
