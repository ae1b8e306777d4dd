"""Fast operations on arrays: one signature each, several implementations, all tested against `kernels.reference`.

This package knows no model and imports jax and jaxtyping alone.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import attention_xla, reference


__all__ = ["attention"]


class Implementation(NamedTuple):
    """One way to compute an operation. Both functions take the same arguments."""

    run: Callable[..., Array]
    refusal: Callable[..., str | None]  # why it cannot take these arguments; None if it can


# One more implementation is a module and a row here, and its place in `preference` below.
ATTENTION = {
    "reference": Implementation(reference.attention, lambda *args, **kwargs: None),
    "xla": Implementation(attention_xla.attention, attention_xla.refusal),
}


def attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    q_positions: Int[Array, "batch seq"] | None = None,
    kv_positions: Int[Array, "batch kv_seq"] | None = None,
    q_segments: Int[Array, "batch seq"] | None = None,
    kv_segments: Int[Array, "batch kv_seq"] | None = None,
    causal: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch seq heads v_dim"]:
    """For each query, the mean of the values it sees, weighted by the softmax of `scale * q @ k`.

    Query heads share key/value heads in groups of `heads / kv_heads` neighbours. A query sees a key if

    - `causal` is False, or the key's position is not after its own, and
    - `window` is None, or its own position is less than `window` after the key's, and
    - there are no segments, or both have the same segment id.

    A token's position is its index, unless given: in packed documents positions may restart, and in a decode
    `q_positions` say how far it has come. A query that sees nothing yields zeros and gets zero gradients.

    `softcap` turns each logit x into `softcap * tanh(x / softcap)` (Gemma 2, arXiv:2408.00118). `sinks` are one more
    logit per head, which takes its share of the softmax and has no value (gpt-oss, arXiv:2508.10925).

    The softmax is in float32, and products of narrower dtypes accumulate in float32. A NaN or an infinity in q, k or v
    becomes NaN in every query that sees it, and touches no other: masked keys and padding may hold anything.

    `implementation` is "xla" (in blocks of 128 tokens: never a [seq, kv_seq] buffer, and no work for blocks that no
    row of the batch sees; first derivatives only, in reverse mode) or "reference" (all at once; every derivative, and
    float64 in float64). None means "reference" for a single query, as in a decode, for at most 128 tokens, and for
    what "xla" refuses; otherwise "xla".

    Raises ValueError where arguments contradict one another, or the implementation asked for cannot take them.
    """
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {v.dtype}: cast them first.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"The query heads ({q.shape[2]}) must be a multiple of the key/value heads ({k.shape[2]}).")
    if (q_segments is None) != (kv_segments is None):
        raise ValueError("Segments of one side alone mean nothing: give both q_segments and kv_segments, or neither.")
    if window is not None and window < 1:
        raise ValueError(f"window={window} hides every key: give 1 or more, or None for no window.")

    arguments = dict(
        scale=scale,
        q_tokens=_tokens(q, q_positions, q_segments),
        kv_tokens=_tokens(k, kv_positions, kv_segments),
        causal=causal,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    refusals = {name: each.refusal(q, k, v, **arguments) for name, each in ATTENTION.items()}
    able = [name for name, refusal in refusals.items() if refusal is None]
    if implementation is None:
        one_block = max(q.shape[1], k.shape[1]) <= attention_xla.BLOCK
        preference = ("reference", "xla") if q.shape[1] == 1 or one_block else ("xla", "reference")
        implementation = next(name for name in preference if name in able)
    if implementation not in able:
        reason = refusals.get(implementation, "no such implementation")
        raise ValueError(f"attention(implementation={implementation!r}): {reason}. These can do it: {', '.join(able)}.")
    return ATTENTION[implementation].run(q, k, v, **arguments)


def _tokens(
    x: Float[Array, "batch seq heads dim"],
    positions: Int[Array, "batch seq"] | None,
    segments: Int[Array, "batch seq"] | None,
) -> reference.Tokens:
    indices = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return reference.Tokens(indices if positions is None else positions.astype(jnp.int32), segments)
