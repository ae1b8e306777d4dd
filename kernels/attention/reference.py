"""Defines `kernels.attention` in plain JAX: the formula in one piece, against which all implementations are tested.

Below it are definitions that the implementations share: the order of heads, and the treatment of NaN.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.masks import Mask
from kernels.tokens import Tokens


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4

# Means "no logit". exp(LOWEST - x) is 0 for any other x and, unlike -inf, it can be subtracted from itself.
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


def by_head(x: Float[Array, "batch seq heads dim"], kv_heads: int) -> Float[Array, "batch kv_heads rows dim"]:
    """Groups the rows of all query heads of each key/value head, so that one matrix product serves a whole group."""
    batch, seq, _, dim = x.shape
    return x.reshape(batch, seq, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4).reshape(batch, kv_heads, -1, dim)


def by_token(x: Float[Array, "batch kv_heads rows dim"], heads: int) -> Float[Array, "batch seq heads dim"]:
    """Inverts `by_head`."""
    batch, kv_heads, rows, dim = x.shape
    seq = rows * kv_heads // heads
    return x.reshape(batch, kv_heads, -1, seq, dim).transpose(0, 3, 1, 2, 4).reshape(batch, seq, heads, dim)


def finite(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Replaces NaN and infinities by zeros: a masked NaN would survive the product with its weight of zero."""
    return jnp.where(jnp.isfinite(x), x, 0)


def poison(x: Float[Array, "*shape dim"]) -> Float[Array, "*shape 1"]:
    """Returns NaN for each vector that `finite` changes, else 0; add it to the vector's logits before masking them."""
    total = x.sum(axis=-1, keepdims=True, dtype=jnp.float32)  # not finite if a term is not; the fastest way to tell
    return jnp.where(jnp.isfinite(total), 0, jnp.nan).astype(x.dtype)
