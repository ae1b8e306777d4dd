"""Checks of arguments, and attention over a cache, for the signatures of `attention` and `decode_attention`.

`attention` calls `over_cache` for few queries over a cache. It is here so that `attention` need not import
`decode_attention`.
"""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels import dispatch
from kernels.backends.device import device
from kernels.masks import Branches, Chunk, Mask, Segments, Spans
from kernels.mesh import split_attention
from kernels.stacked import Stacked
from kernels.tokens import Tokens, counted


def over_cache(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"] | Stacked,
    v: Float[Array, "batch kv_seq kv_heads v_dim"] | Stacked | int,
    at: Tokens,
    kv: Tokens,
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    implementation: str | None,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.decode_attention`; `kv` holds the positions of the cache's slots."""
    check(q, k, v)
    of_k, of_v, v_dim = Stacked.of(k), *((None, v) if isinstance(v, int) else (Stacked.of(v), v.shape[3]))
    dtype, on_cpu = q.dtype, device().platform == "cpu"
    if on_cpu and implementation is None and dtype.itemsize == 2:
        # A CPU multiplies 16 bits by widening them, which XLA would do for all slots at once.
        wide = lambda x: None if x is None else dataclasses.replace(x, wide=np.dtype(np.float32))
        q, of_k, of_v = q.astype(jnp.float32), wide(of_k), wide(of_v)
    q_tokens = cast(at, q.shape[1], mask)
    kv_tokens = cast(kv, k.shape[1], mask)
    mask = complete(mask, q_tokens, kv_tokens)
    at_once = on_cpu and k.shape[1] <= 64  # one block, and so no loop
    options = dict(first="reference" if at_once else None, v_dim=v_dim, scale=scale, softcap=softcap)
    attend = functools.partial(dispatch.run, "decode_attention", implementation, mask=mask, **options)
    out = split_attention(
        attend,
        q,
        of_k,  # pyright: ignore[reportArgumentType]  # a `Stacked`
        of_v,  # pyright: ignore[reportArgumentType]
        sinks=sinks,
        q_tokens=q_tokens,
        kv_tokens=kv_tokens,
    )
    return out.astype(dtype)


def check(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"] | Stacked,
    v: Float[Array, "batch kv_seq kv_heads v_dim"] | Stacked | int,
) -> None:
    """Raises a ValueError if q, k and v do not fit together."""
    of_v = k.dtype if isinstance(v, int) else v.dtype
    if not q.dtype == k.dtype == of_v:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {of_v}: cast them first.")
    if isinstance(v, int) and not 0 < v <= k.shape[3]:
        raise ValueError(f"The values cannot be the first {v} features of keys that have {k.shape[3]}.")
    if isinstance(v, int) and isinstance(k, Stacked) and k.scale is not None and v != k.parts[0]:
        raise ValueError(f"The values cannot be the first {v} features of keys whose first scale is of {k.parts[0]}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"The query heads ({q.shape[2]}) must be a multiple of the key/value heads ({k.shape[2]}).")


def cast(at: Tokens, length: int, mask: Mask) -> Tokens:
    """Casts the ids to int32 and fills in missing positions, as masks expect."""
    given = at.segments, at.spans, at.branches
    segments, spans, branches = (None if ids is None else ids.astype(jnp.int32) for ids in given)
    if at.positions is None and branches is not None:
        raise ValueError("Branches of one document have the same positions: give them, too.")
    if at.positions is None and segments is not None and Chunk in mask:
        return Tokens(counted(segments), segments, spans)  # chunks, unlike windows, count from a document's start
    if at.positions is None:
        indices: Any = np.arange(length, dtype=np.int32)[None]  # numpy, by which Tokens.in_order recognises indices
        return Tokens(indices, segments, spans)
    # A slot never written has the largest int32 as its position: its distance to one below -1 would overflow.
    return Tokens(jnp.maximum(at.positions.astype(jnp.int32), -1), segments, spans, branches=branches)


def complete(mask: Mask, q: Tokens, kv: Tokens) -> Mask:
    """Adds `Segments()` and `Branches()` to the mask if there are such ids, and checks that mask and ids agree."""
    for name in ("segments", "spans", "branches"):
        if (getattr(q, name) is None) != (getattr(kv, name) is None):
            raise ValueError(
                f"{name.title()} of one side alone mean nothing: both `at` and `kv` have them, or neither."
            )
    if (q.spans is not None) != (Spans in mask):
        raise ValueError("Spans go with a mask that has Spans(), such as Causal() | Spans(): give both, or neither.")
    if q.segments is None and Segments in mask:
        raise ValueError("The mask has Segments(), and there are none: give Tokens(segments=...).")
    if q.segments is not None and Segments not in mask:
        mask &= Segments()
    return mask if q.branches is None or Branches in mask else mask & Branches()
