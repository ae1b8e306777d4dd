"""Defines each operation in plain jax.numpy: the formula in one piece, against which everything else is tested.

Below are the definitions that all implementations share: the order of heads, and what a NaN becomes.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Int8

from kernels.masks import Mask, Tokens
from kernels.quantize import LARGEST
from kernels.stacked import Stacked, read


# Stands for "no logit". exp(LOWEST - x) is 0 for any other x and, unlike -inf, it can be subtracted from itself.
LOWEST = float(jnp.finfo(jnp.float32).min)


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
    """Computes `kernels.attention` with all the logits at once, in float32, or in float64 if q is."""
    (_, seq, heads, _), kv_heads = q.shape, k.shape[2]
    dtype, exact = q.dtype, jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    not_finite = by_head(poison(q), kv_heads) + by_head(poison(k) + poison(v), kv_heads).swapaxes(2, 3)
    q, k, v = (by_head(finite(x), kv_heads) for x in (q, k, v))

    logits = scale * jnp.einsum("bnqd,bnkd->bnqk", q, k, preferred_element_type=exact)
    if softcap is not None:
        logits = softcap * jnp.tanh(logits / softcap)
    row = lambda x: jnp.tile(x, heads // kv_heads)[:, None, :, None]
    column = lambda x: x[:, None, None, :]
    seen = mask.visible(jax.tree.map(row, q_tokens), jax.tree.map(column, kv_tokens))
    logits = jnp.where(seen, logits + not_finite.astype(exact), -jnp.inf)

    # Without sinks, a sink of LOWEST stands in: its weight is 0, except for a query that sees no key.
    sinks = jnp.full(heads, LOWEST, exact) if sinks is None else jnp.maximum(sinks.astype(exact), LOWEST)
    sinks = jnp.repeat(sinks, seq).reshape(1, kv_heads, -1, 1)
    top = jax.lax.stop_gradient(jnp.maximum(logits.max(axis=-1, keepdims=True), sinks))
    weights = jnp.exp(logits - top)
    weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(sinks - top))
    weights = jnp.where(seen, weights, 0).astype(dtype)
    return by_token(jnp.einsum("bnqk,bnkd->bnqd", weights, v, preferred_element_type=exact), heads).astype(dtype)


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
    """Computes `kernels.decode_attention` as `attention` over the whole cache."""
    keys = k.read()
    values = keys[..., :v_dim] if v is None else v.read()
    return attention(
        q, keys, values, scale=scale, mask=mask, softcap=softcap, sinks=sinks, q_tokens=q_tokens, kv_tokens=kv_tokens
    )


def with_gradient(implementation: Callable[..., Array]) -> Callable[..., Array]:
    """Gives an implementation of `decode_attention` the gradient of the formula above, which reads every slot.

    Nobody trains by decoding, so it only has to work.
    """

    @functools.wraps(implementation)
    def decode(q: Any, k: Any, v: Any, *, sinks: Any, q_tokens: Tokens, kv_tokens: Tokens, **options: Any) -> Array:
        def by(function: Callable[..., Array], *arrays: Any) -> Array:
            q, k, v, sinks, q_tokens, kv_tokens = arrays
            return function(q, k, v, sinks=sinks, q_tokens=q_tokens, kv_tokens=kv_tokens, **options)

        def backward(arrays: tuple, d_out: Array) -> tuple:
            *given, q_tokens, kv_tokens = arrays
            formula = lambda *given: by(decode_attention, *given, q_tokens, kv_tokens)
            return *jax.vjp(formula, *given)[1](d_out), None, None

        run = jax.custom_vjp(functools.partial(by, implementation))
        run.defvjp(lambda *arrays: (by(implementation, *arrays), arrays), backward)
        return run(q, k, v, sinks, q_tokens, kv_tokens)

    return decode


def ragged_dot(
    x: Float[Array, "tokens in"] | Int8[Array, "tokens in"],
    w: Float[Array, "groups out in"] | Int8[Array, "groups out in"] | Stacked,
    group_sizes: Int[Array, " groups"],
) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` as every row times every matrix, in float32, or in float64 if x is."""
    exact = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = x.astype(exact) if x.dtype in LARGEST else x
    rows, ends = jnp.arange(x.shape[0], dtype=jnp.int32)[None, :], jnp.cumsum(group_sizes)[:, None]
    member = ((rows >= ends - group_sizes[:, None]) & (rows < ends))[:, :, None]
    # Masked both before and after the product, so that no NaN passes, forward or in the gradients.
    out = jnp.einsum(
        "gti,goi->gto", jnp.where(member, x[None], 0), read(w).astype(x.dtype), preferred_element_type=exact
    )
    return jnp.where(member, out, 0).sum(axis=0).astype(x.dtype)


def cross_entropy(
    unembed: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq vocab"]],
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    chunk: int,
    z_loss: float,
) -> Float[Array, "3"]:
    """Computes `kernels.cross_entropy` with the logits of all tokens at once, in float32, or in float64 if x is."""
    del chunk  # here all tokens are one chunk
    logits = unembed(jnp.where(mask[..., None], x, 0))
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    targets = jnp.where(mask, targets, 0)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    correct = (jnp.argmax(logits, axis=-1) == targets).astype(logits.dtype)
    sums = jnp.stack([loss + z_loss * jnp.square(log_z), loss, correct])
    return jnp.sum(jnp.where(mask[None], sums, 0), axis=(1, 2))


def by_head(x: Float[Array, "batch seq heads dim"], kv_heads: int) -> Float[Array, "batch kv_heads rows dim"]:
    """Sorts by key/value head, each with the rows of all its query heads: one matrix product serves a whole group."""
    batch, seq, _, dim = x.shape
    return x.reshape(batch, seq, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)


def by_token(x: Float[Array, "batch kv_heads rows dim"], heads: int) -> Float[Array, "batch seq heads dim"]:
    """Inverts `by_head`."""
    batch, kv_heads, rows, dim = x.shape
    seq = rows * kv_heads // heads
    return x.reshape(batch, kv_heads, -1, seq, dim).transpose(0, 3, 1, 2, 4).reshape(batch, seq, heads, dim)


def finite(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replaces what is not finite by zeros: a masked NaN would survive the product with its weight of zero."""
    return jnp.where(jnp.isfinite(x), x, 0)


def poison(x: Float[Array, "*shape dim"]) -> Float[Array, "*shape 1"]:
    """Returns NaN for each vector that `finite` changes, else 0, to be added to its logits before they are masked."""
    total = x.sum(axis=-1, keepdims=True, dtype=jnp.float32)  # not finite if a term is not; the fastest way to tell
    return jnp.where(jnp.isfinite(total), 0, jnp.nan).astype(x.dtype)
