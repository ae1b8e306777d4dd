"""Fast operations on arrays: one signature each, several implementations, all tested against `kernels.reference`.

This package knows no model and imports jax and jaxtyping alone.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from kernels import attention_xla, ragged_dot_xla, reference


__all__ = ["attention", "ragged_dot"]


class Implementation(NamedTuple):
    """One way to compute an operation. Both functions take the same arguments."""

    run: Callable[..., Array]
    refusal: Callable[..., str | None]  # why it cannot take these arguments; None if it can


# One more implementation is a module and a row here, and its place in the operation's `preference` below.
OPERATIONS = {
    "attention": {
        "reference": Implementation(reference.attention, lambda *args, **kwargs: None),
        "xla": Implementation(attention_xla.attention, attention_xla.refusal),
    },
    "ragged_dot": {
        "reference": Implementation(reference.ragged_dot, lambda *args, **kwargs: None),
        "xla": Implementation(ragged_dot_xla.ragged_dot, ragged_dot_xla.refusal),
    },
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
    one_block = max(q.shape[1], k.shape[1]) <= attention_xla.BLOCK
    preference = ("reference", "xla") if q.shape[1] == 1 or one_block else ("xla", "reference")
    return _run("attention", implementation, preference, q, k, v, **arguments)


def ragged_dot(
    x: Float[Array, "tokens in"],
    w: Float[Array, "groups out in"] | Int8[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
    *,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """Each row of `x`, sorted by group, times the transposed matrix of its group, which is (out, in) as a Linear's.

    The first `group_sizes[0]` rows belong to group 0, the next `group_sizes[1]` to group 1, and so on: the product of
    dropless mixture-of-experts layers (MegaBlocks, arXiv:2211.15841). Groups may be empty. Rows beyond the last group
    yield zeros, get zero gradients and may hold anything; groups end where the rows do.

    Narrower dtypes accumulate in float32. A NaN in a row stays in the row, and in the gradient of its group's matrix;
    a NaN in a group's matrix stays in the group's rows. `w` may be int8: then one matrix at a time is brought to the
    dtype of `x`, and there is no gradient of `w`.

    `implementation` is "xla" (in tiles of at most 128 rows: work and memory grow with tokens, not with groups * tokens;
    first derivatives only, in reverse mode) or "reference" (every row times every matrix; every derivative, and float64
    in float64). None means "xla", and "reference" for what it refuses.

    Raises ValueError where arguments contradict one another, or the implementation asked for cannot take them.
    """
    if w.dtype not in (x.dtype, jnp.int8):
        raise ValueError(f"x and w must have one dtype, not {x.dtype} and {w.dtype}: cast them first.")
    if x.shape[1] != w.shape[2]:
        raise ValueError(f"The rows of x have {x.shape[1]} features, and w, (groups, out, in), takes {w.shape[2]}.")
    if len(group_sizes) != len(w):
        raise ValueError(f"w has {len(w)} groups: group_sizes must have one size for each, not {len(group_sizes)}.")
    return _run("ragged_dot", implementation, ("xla", "reference"), x, w, group_sizes.astype(jnp.int32))


def _run(operation: str, implementation: str | None, preference: tuple[str, ...], *args: Any, **kwargs: Any) -> Array:
    """The result of the implementation asked for, or of the first in `preference` that can take these arguments."""
    refusals = {name: each.refusal(*args, **kwargs) for name, each in OPERATIONS[operation].items()}
    able = [name for name, refusal in refusals.items() if refusal is None]
    if implementation is None:
        implementation = next(name for name in preference if name in able)
    if implementation not in able:
        reason = refusals.get(implementation, "no such implementation")
        raise ValueError(
            f"{operation}(implementation={implementation!r}): {reason}. These can do it: {', '.join(able)}."
        )
    return OPERATIONS[operation][implementation].run(*args, **kwargs)


def _tokens(
    x: Float[Array, "batch seq heads dim"],
    positions: Int[Array, "batch seq"] | None,
    segments: Int[Array, "batch seq"] | None,
) -> reference.Tokens:
    indices = jnp.arange(x.shape[1], dtype=jnp.int32)[None]
    return reference.Tokens(indices if positions is None else positions.astype(jnp.int32), segments)
