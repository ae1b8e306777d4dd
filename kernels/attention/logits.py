"""The largest attention logits, which are recorded beside the attention where somebody asks for them (`recorded`).

Implementations of `kernels.attention` keep no logits. What they keep, the log-sum-exp, is only a bound: it exceeds the
largest logit by up to the log of the number of keys. So the products of queries and keys are computed once more, in
blocks.
"""

import contextlib
import contextvars
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from kernels.attention.reference import by_head, by_token
from kernels.attention.xla import Blocks, visible_blocks
from kernels.masks import Mask
from kernels.mesh import split_attention
from kernels.tokens import Tokens


BLOCK = 512  # most tokens of a block: few turns of the loops, and 32 MiB of logits for a row of 32 heads

_recorded = contextvars.ContextVar[list[Float[Array, "batch seq heads"]] | None]("recorded", default=None)


@contextlib.contextmanager
def recorded() -> Iterator[list[Float[Array, "batch seq heads"]]]:
    """Collects the largest logit of each query and head, of each call of `kernels.attention` traced within it.

    Logits are those before a softcap, and without sinks; a query that sees no key has -inf. They have no gradient.
    Calls of few queries over a cache are not recorded.
    """
    found: list[Float[Array, "batch seq heads"]] = []
    token = _recorded.set(found)
    try:
        yield found
    finally:
        _recorded.reset(token)


def record(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    *,
    scale: float,
    mask: Mask,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    grows: bool,
) -> None:
    """Records the largest logits of a call of `kernels.attention`, if this is within `recorded`."""
    if (found := _recorded.get()) is None:
        return
    q, k = lax.stop_gradient((q, k))
    largest = functools.partial(_largest, scale=scale, mask=mask)
    tokens: Any = dict(q_tokens=q_tokens, kv_tokens=kv_tokens, grows=grows)
    found.append(split_attention(largest, q, k, None, sinks=None, **tokens)[..., 0])


@functools.partial(jax.jit, static_argnames=("scale", "mask"))
def _largest(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: None,
    *,
    scale: float,
    mask: Mask,
    sinks: None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads 1"]:
    """Computes each query's largest logit in float32, in blocks, skipping those that no query sees."""
    (batch, seq, heads, _), (_, kv_seq, kv_heads, _) = q.shape, k.shape
    q_blocks, kv_blocks, group = Blocks.of(seq, BLOCK), Blocks.of(kv_seq, BLOCK), heads // kv_heads
    first, end = visible_blocks(mask, q_blocks, q_tokens, kv_blocks, kv_tokens)

    def query_block(i: Array, out: Array) -> Array:
        q_i = by_head(q_blocks.take(q, i), kv_heads)
        q_tokens_i = jax.tree.map(lambda x: jnp.tile(q_blocks.take(x, i), group)[:, None, :, None], q_tokens)

        def key_block(j: Array, top: Array) -> Array:
            k_j = by_head(kv_blocks.take(k, j), kv_heads)
            kv_tokens_j = jax.tree.map(lambda x: kv_blocks.take(x, j)[:, None, None, :], kv_tokens)
            logits = scale * jnp.einsum("bnqd,bnkd->bnqk", q_i, k_j, preferred_element_type=jnp.float32)
            seen = mask.visible(q_tokens_i, kv_tokens_j)
            return jnp.maximum(top, jnp.where(seen, logits, -jnp.inf).max(axis=-1, keepdims=True))

        none = jnp.full((batch, kv_heads, group * q_blocks.size, 1), -jnp.inf, jnp.float32)
        return q_blocks.put(out, i, by_token(lax.fori_loop(first[i], end[i], key_block, none), heads))

    return lax.fori_loop(0, q_blocks.count, query_block, jnp.full((batch, seq, heads, 1), -jnp.inf, jnp.float32))
