"""Attention in blocks (FlashAttention-2, arXiv:2307.08691) as plain JAX loops, for any device that XLA compiles for.

For each block of queries, a loop over those blocks of keys that it may see; once forward, and once more backward from
nothing but the output and the logarithm of each softmax's denominator. So no buffer grows with seq * kv_seq.

The order of axes is what XLA's CPU products do fast. They take matrices sorted by head, with the summed axis last on
the left; therefore the backward pass has its logits as [keys, queries], and only the keys need to be transposed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels.reference import LOWEST, Tokens, by_head, by_token, finite, poison, visible


BLOCK = 128  # tokens at most; on CPU, 64 and 256 are both slower


class Formula(NamedTuple):
    """The arguments that are no arrays."""

    scale: float
    causal: bool
    window: int | None
    softcap: float | None


class Blocks(NamedTuple):
    """A sequence cut into blocks of one size. The last one starts early enough to fit, so nothing is ever padded."""

    length: int
    size: int

    @classmethod
    def of(cls, length: int) -> "Blocks":
        count = -(-length // BLOCK)
        return cls(length, min(length, -(-length // count // 8) * 8))

    @property
    def count(self) -> int:
        return -(-self.length // self.size)

    def start(self, i: Int[Array, "..."]) -> Int[Array, "..."]:
        return jnp.minimum(i * self.size, self.length - self.size)

    def new(self, i: Int[Array, ""]) -> Bool[Array, " size"]:
        """Which tokens of block `i` are in no earlier block."""
        return self.start(i) + jnp.arange(self.size) >= i * self.size

    def take(self, x: Array, i: Int[Array, ""], axis: int = 1) -> Array:
        return lax.dynamic_slice_in_dim(x, self.start(i), self.size, axis)

    def put(self, x: Array, i: Int[Array, ""], block: Array, axis: int = 1) -> Array:
        return lax.dynamic_update_slice_in_dim(x, block.astype(x.dtype), self.start(i), axis)

    def add(self, x: Array, i: Int[Array, ""], block: Array, axis: int = 1) -> Array:
        return self.put(x, i, self.take(x, i, axis) + block, axis)

    def extremes(self, x: Int[Array, "#batch length"]) -> tuple[Int[Array, "#batch count"], Int[Array, "#batch count"]]:
        """The least and the greatest of each block."""
        blocks = x[:, self.start(jnp.arange(self.count))[:, None] + jnp.arange(self.size)[None]]
        return blocks.min(axis=2), blocks.max(axis=2)


def refusal(q: Float[Array, "batch seq heads dim"], *args: object, **kwargs: object) -> str | None:
    """Why this implementation cannot take these arguments of `attention`, or None if it can."""
    return "it computes in float32, and q is float64" if q.dtype == jnp.float64 else None


@functools.partial(jax.jit, static_argnames=("scale", "causal", "window", "softcap"))  # so eager loops compile once
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
    (batch, seq, heads, _), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    q_blocks, kv_blocks = Blocks.of(seq), Blocks.of(kv_seq)
    group, rows = heads // kv_heads, q_blocks.size * heads // kv_heads
    first, end = visible_blocks(formula, q_blocks, q_tokens, kv_blocks, kv_tokens)
    kv_poison = poison(k) + poison(v)

    # The running softmax starts from the sink. No sink is one of LOWEST: it weighs nothing beside anything seen.
    start = jnp.full(heads, LOWEST) if sinks is None else jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    start = jnp.broadcast_to(jnp.repeat(start, q_blocks.size).reshape(1, kv_heads, rows, 1), (batch, kv_heads, rows, 1))

    def query_block(i: Array, results: tuple[Array, Array]) -> tuple[Array, Array]:
        q_i = q_blocks.take(q, i)
        q_i = by_head(q_i + poison(q_i), kv_heads)
        q_tokens_i = jax.tree.map(lambda x: jnp.tile(q_blocks.take(x, i), group)[:, None, :, None], q_tokens)

        def kv_block(j: Array, state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            top, total, out = state
            k_j = by_head(kv_blocks.take(k, j) + kv_blocks.take(kv_poison, j), kv_heads)
            v_j = by_head(finite(kv_blocks.take(v, j)), kv_heads)
            kv_tokens_j = jax.tree.map(lambda x: kv_blocks.take(x, j)[:, None, None, :], kv_tokens)

            logits = _logits(formula, "bnqd,bnkd->bnqk", q_i, k_j)
            seen = visible(q_tokens_i, kv_tokens_j, causal=formula.causal, window=formula.window)
            logits = jnp.where(seen & kv_blocks.new(j)[None, None, None, :], logits, -jnp.inf)
            new_top = jnp.maximum(top, logits.max(axis=-1, keepdims=True))
            weights = jnp.exp(logits - new_top)
            fade = jnp.exp(top - new_top)
            out = out * fade + _product("bnqk,bnkd->bnqd", weights.astype(v.dtype), v_j)
            return new_top, total * fade + weights.sum(axis=-1, keepdims=True), out

        state = (start, jnp.ones_like(start), jnp.zeros((batch, kv_heads, rows, v_dim)))
        top, total, out_i = lax.fori_loop(first[i], end[i], kv_block, state)
        out, lse = results
        out = q_blocks.put(out, i, by_token(out_i / total, heads))
        return out, q_blocks.put(lse, i, by_token(top + jnp.log(total), heads))

    results = jnp.zeros((batch, seq, heads, v_dim)), jnp.zeros((batch, seq, heads, 1))
    out, lse = lax.fori_loop(0, q_blocks.count, query_block, results)
    return out.astype(q.dtype), (q, k, v, sinks, q_tokens, kv_tokens, out, lse)


def _backward(formula: Formula, residuals: tuple, d_out: Array) -> tuple:
    q, k, v, sinks, q_tokens, kv_tokens, out, lse = residuals
    (batch, seq, heads, dim), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    q_blocks, kv_blocks = Blocks.of(seq), Blocks.of(kv_seq)
    group, rows = heads // kv_heads, q_blocks.size * heads // kv_heads
    first, end = visible_blocks(formula, q_blocks, q_tokens, kv_blocks, kv_tokens)
    delta = jnp.sum(out * d_out.astype(jnp.float32), axis=-1, keepdims=True)

    k_transposed = by_head(finite(k), kv_heads).swapaxes(2, 3)  # here: XLA would fold it into the product in the loop

    # Nothing needs poison here: whoever sees a NaN has one in `lse`.
    def query_block(i: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        q_i, d_out_i = (by_head(finite(q_blocks.take(x, i)), kv_heads) for x in (q, d_out))
        lse_i, delta_i = (by_head(q_blocks.take(x, i), kv_heads).swapaxes(2, 3) for x in (lse, delta))
        q_tokens_i = jax.tree.map(lambda x: jnp.tile(q_blocks.take(x, i), group)[:, None, None, :], q_tokens)
        new_i = jnp.tile(q_blocks.new(i), group)[None, None, None, :]

        def kv_block(j: Array, gradients: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            dq_i, dk, dv = gradients
            k_j, v_j = (by_head(finite(kv_blocks.take(x, j)), kv_heads) for x in (k, v))
            kv_tokens_j = jax.tree.map(lambda x: kv_blocks.take(x, j)[:, None, :, None], kv_tokens)

            logits = _logits(formula, "bnkd,bnqd->bnkq", k_j, q_i)
            seen = visible(q_tokens_i, kv_tokens_j, causal=formula.causal, window=formula.window)
            seen &= kv_blocks.new(j)[None, None, :, None] & new_i
            weights = jnp.where(seen, jnp.exp(logits - lse_i), 0)
            d_weights = _product("bnkd,bnqd->bnkq", v_j, d_out_i)
            d_logits = jnp.where(seen, formula.scale * weights * (d_weights - delta_i), 0)
            if formula.softcap is not None:
                d_logits *= 1 - jnp.square(logits / formula.softcap)
            weights, d_logits = weights.astype(q.dtype), d_logits.astype(q.dtype)
            dq_i += _product("bndk,bnkq->bndq", kv_blocks.take(k_transposed, j, axis=3), d_logits)
            dk = kv_blocks.add(dk, j, _product("bnkq,bnqd->bnkd", d_logits, q_i), axis=2)
            dv = kv_blocks.add(dv, j, _product("bnkq,bnqd->bnkd", weights, d_out_i), axis=2)
            return dq_i, dk, dv

        dq, dk, dv = gradients
        dq_i, dk, dv = lax.fori_loop(first[i], end[i], kv_block, (jnp.zeros((batch, kv_heads, dim, rows)), dk, dv))
        return q_blocks.add(dq, i, by_token(dq_i.swapaxes(2, 3), heads)), dk, dv

    gradients = [(batch, seq, heads, dim), (batch, kv_heads, kv_seq, dim), (batch, kv_heads, kv_seq, v_dim)]
    dq, dk, dv = lax.fori_loop(0, q_blocks.count, query_block, tuple(map(jnp.zeros, gradients)))
    d_sinks = None
    if sinks is not None:
        d_sinks = -jnp.sum(jnp.exp(sinks.astype(jnp.float32)[None, None, :, None] - lse) * delta, axis=(0, 1, 3))
        d_sinks = d_sinks.astype(sinks.dtype)
    return dq.astype(q.dtype), dk.swapaxes(1, 2).astype(k.dtype), dv.swapaxes(1, 2).astype(v.dtype), d_sinks, None, None


_attention.defvjp(_forward, _backward)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _logits(formula: Formula, subscripts: str, x: Array, y: Array) -> Array:
    logits = formula.scale * _product(subscripts, x, y)
    return logits if formula.softcap is None else formula.softcap * jnp.tanh(logits / formula.softcap)


def visible_blocks(
    formula: Formula, q_blocks: Blocks, q_tokens: Tokens, kv_blocks: Blocks, kv_tokens: Tokens
) -> tuple[Int[Array, " q_blocks"], Int[Array, " q_blocks"]]:
    """For each block of queries, the first block of keys that it may see in any row of the batch, and the end.

    Judged by the extremes of positions and segments in each block, so some blocks in between may be seen by nobody.
    """
    q_low, q_high = (x[:, :, None] for x in q_blocks.extremes(q_tokens.positions))
    kv_low, kv_high = (x[:, None, :] for x in kv_blocks.extremes(kv_tokens.positions))
    seen = jnp.ones((1, q_blocks.count, kv_blocks.count), bool)
    if formula.causal:
        seen &= q_high >= kv_low
    if formula.window is not None:
        seen &= q_low - kv_high < formula.window
    if q_tokens.segments is not None and kv_tokens.segments is not None:
        q_low, q_high = (x[:, :, None] for x in q_blocks.extremes(q_tokens.segments))
        kv_low, kv_high = (x[:, None, :] for x in kv_blocks.extremes(kv_tokens.segments))
        seen &= (q_low <= kv_high) & (kv_low <= q_high)
    seen = seen.any(axis=0)
    first = jnp.argmax(seen, axis=1)
    return first, jnp.where(seen.any(axis=1), kv_blocks.count - jnp.argmax(seen[:, ::-1], axis=1), first)
