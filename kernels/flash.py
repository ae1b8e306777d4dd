"""What every FlashAttention has in common around its two kernels: sinks, the gradients' bookkeeping, and NaN.

An implementation brings a forward kernel, which also yields for each query the logarithm of its softmax's denominator
(`lse`), and a backward kernel, which needs no more than that and `delta`, the product of output and its gradient
(FlashAttention-2, arXiv:2307.08691).

Sinks never reach a kernel. A sink only adds to the denominator: lse' = log(exp(lse) + exp(sink)), the output shrinks by
exp(lse - lse'), and the same backward kernel, given lse', yields the exact gradients; that of the sink is
-sum(exp(sink - lse') * delta).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.masks import Mask, Tokens
from kernels.reference import LOWEST, finite, poison


class Formula(NamedTuple):
    """The arguments of attention that are no arrays."""

    scale: float
    mask: Mask
    softcap: float | None


class Flash(NamedTuple):
    """The two kernels of an implementation; q is (batch, seq, heads, dim), lse and delta are (batch, heads, seq).

    `forward(formula, q, k, v, q_tokens, kv_tokens)` returns the output, in q's dtype or (twice the bytes, half the
    error of bfloat16's dq and dk) in float32, and lse, in float32: LOWEST and an output of zeros for a query that sees
    nothing, and both NaN for one that sees NaN. A key that is not finite comes as NaN in all its features, with a
    finite value; so the mask has to be applied to logits, before anything else.

    `backward(formula, q, k, v, q_tokens, kv_tokens, lse, delta, d_out)` returns the gradients of q, k and v. All of
    these are finite, but for lse, delta and d_out: so the mask has to be applied to the weights and to the logits'
    gradients.
    """

    forward: Callable[..., tuple[Array, Array]]
    backward: Callable[..., tuple[Array, Array, Array]]
    features: int = 1  # heads come with a multiple of so many: those of other sizes end with zeros


def attention(
    flash: Flash,
    formula: Formula,
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads v_dim"]:
    """`kernels.attention` by these kernels."""
    whole = lambda x: jnp.pad(x, [(0, 0)] * 3 + [(0, -x.shape[3] % flash.features)])
    out = _attention(flash, formula, whole(q), whole(k), whole(v), sinks, q_tokens, kv_tokens)
    return out[..., : v.shape[3]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(
    flash: Flash,
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Array:
    return _forward(flash, formula, q, k, v, sinks, q_tokens, kv_tokens)[0]


def _forward(
    flash: Flash,
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    sinks: Array | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> tuple[Array, tuple]:
    marked_k = jnp.where(jnp.isnan(poison(k) + poison(v)), jnp.nan, k)
    out, lse = flash.forward(formula, q + poison(q), marked_k, finite(v), q_tokens, kv_tokens)
    if sinks is not None:
        with_sink = jnp.logaddexp(lse, _column(sinks))
        share = jnp.exp(lse - with_sink).swapaxes(1, 2)[..., None]
        out = (out.astype(jnp.float32) * share).astype(out.dtype)
        lse = with_sink
    return out.astype(q.dtype), (q, k, v, sinks, q_tokens, kv_tokens, out, lse)


def _backward(flash: Flash, formula: Formula, residuals: tuple, d_out: Array) -> tuple:
    q, k, v, sinks, q_tokens, kv_tokens, out, lse = residuals
    delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), axis=-1).swapaxes(1, 2)
    dq, dk, dv = flash.backward(formula, *map(finite, (q, k, v)), q_tokens, kv_tokens, lse, delta, d_out)
    d_sinks = None
    if sinks is not None:
        d_sinks = -jnp.sum(jnp.exp(_column(sinks) - lse) * delta, axis=(0, 2)).astype(sinks.dtype)
    return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), d_sinks, None, None


_attention.defvjp(_forward, _backward)


def _column(sinks: Float[Array, " heads"]) -> Float[Array, "1 heads 1"]:
    return jnp.maximum(sinks.astype(jnp.float32), LOWEST)[None, :, None]
