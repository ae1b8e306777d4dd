"""Attention in blocks (FlashAttention-2, arXiv:2307.08691) in plain JAX, for whatever XLA compiles for.

For each block of queries there is a loop over the blocks of keys that it may see: once forward, and once backward from
no more than the output and, per query and head, the logarithm of the softmax's denominator. All that grows with
seq * kv_seq is one bool for each pair of blocks.

The order of axes follows XLA's products on CPU. They are fastest on matrices that lie together, so blocks are sorted by
head first; and half as fast where the left side is summed over its rows. Hence the backward pass has its logits as
[keys, queries]: three of its products use them, and only for dq does anything (the keys) have to be transposed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.reference import LOWEST, Tokens, by_head, by_token, finite, poison, visible


BLOCK = 128  # tokens at most; on CPU, blocks of 64 and of 256 both take longer


class Formula(NamedTuple):
    """The arguments that are no arrays."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None


class Blocks(NamedTuple):
    """A sequence in blocks of one size. The last begins early enough to fit, so that nothing needs to be padded."""

    length: int
    size: int

    @classmethod
    def of(cls, length: int) -> "Blocks":
        count = -(-length // BLOCK)
        multiple_of_8 = -(-length // (8 * count)) * 8
        return cls(length, min(length, multiple_of_8))

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    def start(self, i: Int[Array, "..."]) -> Int[Array, "..."]:
        return jnp.minimum(i * self.size, self.length - self.size)

    def fresh(self, i: Int[Array, ""]) -> Bool[Array, " size"]:
        """Which tokens of block `i` are in no earlier block."""
        return self.start(i) + jnp.arange(self.size) >= i * self.size

    def take(self, x: Array, i: Int[Array, ""], axis: int = 1) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start(i), self.size, axis)

    def put(self, x: Array, i: Int[Array, ""], block: Array, axis: int = 1) -> Array:
        return lax.dynamic_update_slice_in_dim(x, block, self.start(i), axis)

    def add(self, x: Array, i: Int[Array, ""], block: Array, axis: int = 1) -> Array:
        return self.put(x, i, self.take(x, i, axis) + block, axis)

    def extremes(self, x: Int[Array, "#batch length"]) -> tuple[Int[Array, "#batch count"], Int[Array, "#batch count"]]:
        """The least and the greatest value in each block."""
        blocks = x[:, self.start(jnp.arange(self.count))[:, None] + jnp.arange(self.size)[None, :]]
        return blocks.min(axis=2), blocks.max(axis=2)


def refusal(q: Float[Array, "batch seq heads dim"], *_: object, **__: object) -> str | None:
    """Why this implementation cannot take these arguments of `attention`, or None if it can."""
    return "it computes in float32, and q is float64" if q.dtype == jnp.float64 else None


@functools.partial(jax.jit, static_argnames=("scale", "causal", "window", "softcap"))  # outside jit too, compile once
def attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    causal: bool,
    window: int | None,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
) -> Float[Array, "batch seq heads v_dim"]:
    """`kernels.attention`, in blocks."""
    return _attention(Formula(scale, causal, window, softcap), q, k, v, sinks, q_tokens, kv_tokens)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    formula: Formula, q: Array, k: Array, v: Array, sinks: Array | None, q_tokens: Tokens, kv_tokens: Tokens
) -> Array:
    return _forward(formula, q, k, v, sinks, q_tokens, kv_tokens)[0]


def _forward(
    formula: Formula, q: Array, k: Array, v: Array, sinks: Array | None, q_tokens: Tokens, kv_tokens: Tokens
) -> tuple[Array, tuple]:
    """The output, and what `_backward` needs. Logits are [batch, kv_heads, queries of the group's heads, keys]."""
    (batch, seq, heads, _), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    q_blocks, kv_blocks, group = Blocks.of(seq), Blocks.of(kv_seq), heads // kv_heads
    rows = (batch, kv_heads, group * q_blocks.size)
    first, end = visible_blocks(formula, q_blocks, q_tokens, kv_blocks, kv_tokens)
    kv_poison = poison(k) + poison(v)

    # A running softmax begins with the sink. No sink is one of LOWEST: it weighs nothing as soon as anything is seen.
    begin = jnp.full(heads, LOWEST, jnp.float32) if sinks is None else jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    begin = jnp.broadcast_to(jnp.repeat(begin, q_blocks.size).reshape(1, kv_heads, -1, 1), (*rows, 1))

    def query_block(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        q_i = q_blocks.take(q, i)
        q_i = by_head(q_i + poison(q_i), kv_heads)
        q_tokens_i = jax.tree.map(lambda x: jnp.tile(q_blocks.take(x, i), group)[:, None, :, None], q_tokens)

        def key_block(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = state
            k_j = by_head(kv_blocks.take(k, j) + kv_blocks.take(kv_poison, j), kv_heads)
            v_j = by_head(finite(kv_blocks.take(v, j)), kv_heads)
            kv_tokens_j = jax.tree.map(lambda x: kv_blocks.take(x, j)[:, None, None, :], kv_tokens)

            seen = visible(q_tokens_i, kv_tokens_j, causal=formula.causal, window=formula.window)
            seen &= kv_blocks.fresh(j)[None, None, None, :]
            logits = jnp.where(seen, _logits(formula, "bnqd,bnkd->bnqk", q_i, k_j), -jnp.inf)
            new_top = jnp.maximum(top, logits.max(axis=-1, keepdims=True))
            weights = jnp.exp(logits - new_top)
            fade = jnp.exp(top - new_top)
            total = total * fade + weights.sum(axis=-1, keepdims=True)
            out = out * fade + _product("bnqk,bnkd->bnqd", weights.astype(v.dtype), v_j)
            return new_top, total, out

        state = begin, jnp.ones_like(begin), _zeros(*rows, v_dim)
        top, total, out_i = lax.fori_loop(first[i], end[i], key_block, state)
        out, lse = results
        out = q_blocks.put(out, i, by_token(out_i / total, heads))
        lse = q_blocks.put(lse, i, by_token(top + jnp.log(total), heads))
        return out, lse

    results = _zeros(batch, seq, heads, v_dim), _zeros(batch, seq, heads, 1)
    out, lse = lax.fori_loop(0, q_blocks.count, query_block, results)
    # The output is kept in float32: rounded to bfloat16, it would be most of the error of dq and dk.
    return out.astype(q.dtype), (q, k, v, sinks, q_tokens, kv_tokens, out, lse)


def _backward(formula: Formula, residuals: tuple, d_out: Array) -> tuple:
    """The gradients of `_attention`'s arrays. Logits are [batch, kv_heads, keys, queries of the group's heads].

    It needs no `poison`: where a query sees something that is not finite, its `lse` is NaN.
    """
    q, k, v, sinks, q_tokens, kv_tokens, out, lse = residuals
    (batch, seq, heads, dim), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    q_blocks, kv_blocks, group = Blocks.of(seq), Blocks.of(kv_seq), heads // kv_heads
    first, end = visible_blocks(formula, q_blocks, q_tokens, kv_blocks, kv_tokens)
    delta = jnp.sum(out * d_out.astype(jnp.float32), axis=-1, keepdims=True)
    k_transposed = by_head(finite(k), kv_heads).swapaxes(2, 3)  # not in the loop, where XLA would undo it

    def query_block(i: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        q_i, d_out_i = by_head(finite(q_blocks.take(q, i)), kv_heads), by_head(q_blocks.take(d_out, i), kv_heads)
        lse_i, delta_i = (by_head(q_blocks.take(x, i), kv_heads).swapaxes(2, 3) for x in (lse, delta))
        q_tokens_i = jax.tree.map(lambda x: jnp.tile(q_blocks.take(x, i), group)[:, None, None, :], q_tokens)
        fresh_i = jnp.tile(q_blocks.fresh(i), group)[None, None, None, :]

        def key_block(j: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_i, dk, dv = gradients
            k_j, v_j = (by_head(finite(kv_blocks.take(x, j)), kv_heads) for x in (k, v))
            kv_tokens_j = jax.tree.map(lambda x: kv_blocks.take(x, j)[:, None, :, None], kv_tokens)

            seen = visible(q_tokens_i, kv_tokens_j, causal=formula.causal, window=formula.window)
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
    dk, dv = (x.swapaxes(1, 2) for x in (dk, dv))
    d_sinks = None
    if sinks is not None:
        sink_weights = jnp.exp(sinks.astype(jnp.float32)[None, None, :, None] - lse)
        d_sinks = -jnp.sum(sink_weights * delta, axis=(0, 1, 3)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None, None


_attention.defvjp(_forward, _backward)


def visible_blocks(
    formula: Formula, q_blocks: Blocks, q_tokens: Tokens, kv_blocks: Blocks, kv_tokens: Tokens
) -> tuple[Int[Array, " count"], Int[Array, " count"]]:
    """For each block of queries the first block of keys that it may see in some row of the batch, and the end of these.

    Judged by the extremes of positions and segments within blocks; so there may be blocks in between that nobody sees.
    """
    least_and_most = lambda q, kv: (
        [x[:, :, None] for x in q_blocks.extremes(q)],
        [x[:, None, :] for x in kv_blocks.extremes(kv)],
    )
    (q_least, q_most), (kv_least, kv_most) = least_and_most(q_tokens.positions, kv_tokens.positions)
    seen = jnp.ones((1, q_blocks.count, kv_blocks.count), bool)
    if formula.causal:
        seen &= kv_least <= q_most
    if formula.window is not None:
        seen &= q_least - kv_most < formula.window
    if q_tokens.segments is not None and kv_tokens.segments is not None:
        (q_least, q_most), (kv_least, kv_most) = least_and_most(q_tokens.segments, kv_tokens.segments)
        seen &= (kv_least <= q_most) & (q_least <= kv_most)
    seen = seen.any(axis=0)
    first = jnp.argmax(seen, axis=1)
    return first, jnp.where(seen.any(axis=1), kv_blocks.count - jnp.argmax(seen[:, ::-1], axis=1), first)


def _logits(formula: Formula, subscripts: str, x: Array, y: Array) -> Array:
    logits = formula.scale * _product(subscripts, x, y)
    return logits if formula.softcap is None else formula.softcap * jnp.tanh(logits / formula.softcap)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _zeros(*shape: int) -> Array:
    return jnp.zeros(shape, jnp.float32)
