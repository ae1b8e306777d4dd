"""Attention of one query or a few in each row of a batch over a cache, for NVIDIA GPUs, in Pallas-Triton.

This is flash-decoding. It takes as long as reading the cache takes. So one program serves all queries and query heads
of a key/value head, as the rows of one product, and the blocks with visible keys are distributed over as many programs
as fill the GPU. Blocks beyond a row's length, or outside its window, are not read, and no layer of the cache is copied:
programs get the array of all layers. Each program returns the mean of its values and the log-sum-exp of its logits. A
second kernel merges these.

The cache is not cleaned of NaN in a pass of its own. Keys and values that no query sees are not loaded: within a block,
too, zeros take their place. A key or value that is seen and not finite makes a logit or a sum that is not finite, which
then becomes NaN.

For a cache in 8 bits the integers are multiplied without their scales. The keys' scales multiply the logits, and the
values' scales the weights: one number for each key in place of one for each feature.

A cache that lies in pages is read in blocks that divide a page. A program loads the page's number, 4 bytes, before the
block.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float

from kernels.attention.reference import LOWEST, by_head
from kernels.attention.shared import Formula
from kernels.attention.triton import Block, capped, product, row_of, to_log2
from kernels.backends import blocks
from kernels.backends.device import elsewhere
from kernels.backends.triton import SMALLEST, addressable, dot, exp2, inside, launch, load, pieces, store
from kernels.decode_attention.reference import with_gradient
from kernels.masks import Mask, Schedule, block_classes
from kernels.stacked import Stacked
from kernels.tokens import Tokens


PLATFORMS = ("gpu",)
RANK = 2

_Softmax = tuple[Array, Array, list[Array]]  # of each row: maximum, denominator, and weighted sum of values, in pieces
MERGED = 16  # splits that the second kernel merges at a time
WIDTHS = (64, 128, 256, 576)  # features of a head for which there are block sizes; 576 is DeepSeek's latent cache


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Stacked,
    v: Stacked | None,
    *,
    v_dim: int,
    scale: float,
    **_: object,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `decode_attention`, or None if it can."""
    if q.dtype == jnp.float64:
        return "it computes in float32, and q is float64"
    dim = q.shape[3]
    if dim % SMALLEST or v_dim % SMALLEST or max(dim, v_dim) > WIDTHS[-1]:
        return f"its heads have multiples of {SMALLEST} features, {WIDTHS[-1]} at most, and these {dim} and {v_dim}"
    if not q.size or not k.shape[1]:
        return "it needs a query, a key and a feature at least"
    if k.table is not None and k.stack.shape[2] % SMALLEST:
        return f"pages have multiples of {SMALLEST} slots, and these {k.stack.shape[2]}"
    if scale <= 0:
        return f"it needs a scale above 0, and this is {scale}"
    if k.scale is not None and q.dtype == jnp.float16:
        return "weights times the scales of a cache in 8 bits may be too small for float16"
    return elsewhere("gpu")


# Jitted, so that calls outside jit compile once, too.
@with_gradient
@functools.partial(jax.jit, static_argnames=("v_dim", "scale", "mask", "softcap"))
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
    """Computes `kernels.decode_attention` in Triton. Its gradient is the reference's."""
    (batch, seq, heads, dim), (_, kv_seq, kv_heads, _) = q.shape, k.shape
    width = next(width for width in WIDTHS if width >= max(dim, v_dim))
    row_dtype = k.stack.dtype if q.dtype.itemsize == 2 else q.dtype
    size = blocks.sizes(__name__, "decode", row_dtype, f"d{width}")
    kv_size = size["kv"] if k.table is None else math.gcd(size["kv"], k.stack.shape[2])
    group = heads // kv_heads
    rows = min(max(SMALLEST, pl.next_power_of_2(seq * group)), size["rows"])
    programs = kv_heads * pl.cdiv(seq * group, rows)
    splits = min(pl.cdiv(size["programs"], batch * programs), pl.cdiv(kv_seq, kv_size))
    of_rows = jax.tree.map(lambda ids: jnp.tile(ids, group), q_tokens)
    out, lse = launch(
        functools.partial(_kernel, Formula(scale, mask, softcap), kv_size, rows, v_dim, seq > 1),
        by_head(q, kv_heads),  # one that is not finite makes its products NaN or infinite
        *(None if x is None else addressable(x) for x in (k, v)),
        *(of_rows, kv_tokens),
        Schedule.of(block_classes(mask, q_tokens, kv_tokens, seq, kv_size)),
        name="decode_attention",
        grid=(programs, splits, batch),
        results=(
            jax.ShapeDtypeStruct((batch, splits, kv_heads, seq * group, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, kv_heads, seq * group), jnp.float32),
        ),
        warps=size["warps"],
        stages=size["stages"],
        cost=pl.CostEstimate(
            flops=2 * batch * seq * heads * kv_seq * (dim + v_dim),
            transcendentals=batch * seq * heads * kv_seq,
            bytes_accessed=batch * kv_seq * kv_heads * (dim + (0 if v is None else v_dim)) * k.stack.dtype.itemsize,
        ),
    )
    if sinks is not None:
        sinks = jnp.maximum(sinks.astype(jnp.float32), LOWEST)
        sinks = jnp.repeat(sinks, seq).reshape(1, 1, kv_heads, seq * group)  # in the order of `by_head`
    return _merge(out, lse, sinks, seq, q.dtype)


def _merge(
    out: Float[Array, "batch splits kv_heads rows v_dim"],
    lse: Float[Array, "batch splits kv_heads rows"],
    sinks: Float[Array, "1 1 kv_heads rows"] | None,
    seq: int,
    dtype: DTypeLike,
) -> Float[Array, "batch seq heads v_dim"]:
    """Weights the means of the splits by a softmax of their log-sum-exps, in one kernel, where XLA takes two or three.

    A sink is one more log-sum-exp, of values that are zero.
    """
    batch, _, kv_heads, rows, v_dim = out.shape
    return launch(
        _merge_kernel,
        out,
        lse,
        sinks,
        name="decode_attention_merge",
        grid=(rows, kv_heads, batch),
        results=jax.ShapeDtypeStruct((batch, seq, kv_heads * rows // seq, v_dim), dtype),
        warps=4,
        stages=2,
        cost=pl.CostEstimate(flops=2 * out.size, transcendentals=lse.size, bytes_accessed=4 * (out.size + lse.size)),
    )


def _merge_kernel(out_ref: Any, lse_ref: Any, sinks_ref: Any, merged_ref: Any) -> None:
    """Merges the splits of one row: of a token and a head."""
    row, kv_head, batch = (pl.program_id(axis) for axis in range(3))
    (_, splits, _, _, v_dim), size = out_ref.shape, min(MERGED, pl.next_power_of_2(out_ref.shape[1]))
    of_v = pieces(v_dim)

    def step(n: Array, state: _Softmax) -> _Softmax:
        top, total, sums = state
        these, exist = pl.ds(n * size, size), inside(n * size, size, splits)
        lse = load(lse_ref.at[batch, these, kv_head, row], exist, LOWEST)
        new_top = jnp.maximum(top, lse.max())
        weights, fade = jnp.exp(lse - new_top), jnp.exp(top - new_top)
        weights = weights if exist is None else jnp.where(exist, weights, 0)
        column = None if exist is None else exist[:, None]
        means = [load(out_ref.at[batch, these, kv_head, row, piece], column) for piece in of_v]
        sums = [fade * s + (weights[:, None] * m).sum(axis=0) for s, m in zip(sums, means, strict=True)]
        return new_top, fade * total + weights.sum(), sums

    nothing = jnp.float32(LOWEST), jnp.float32(0), [jnp.zeros(piece.size, jnp.float32) for piece in of_v]
    top, total, sums = lax.fori_loop(0, pl.cdiv(splits, size), step, nothing)
    if sinks_ref is not None:
        sink = sinks_ref[0, 0, kv_head, row]
        new_top = jnp.maximum(top, sink)
        fade = jnp.exp(top - new_top)
        total, sums = fade * total + jnp.exp(sink - new_top), [fade * s for s in sums]
    seq = merged_ref.shape[1]
    token, head = row % seq, kv_head * (out_ref.shape[3] // seq) + row // seq
    for piece, s in zip(of_v, sums, strict=True):
        store(merged_ref.at[batch, token, head, piece], (s / total).astype(merged_ref.dtype))


def _kernel(
    formula: Formula,
    kv_size: int,
    rows: int,
    v_dim: int,
    several: bool,
    q_ref: Any,
    k_ref: Stacked,
    v_ref: Stacked | None,
    q_tokens_ref: Tokens,
    kv_tokens_ref: Tokens,
    schedule: Schedule,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    """Visits a share of the blocks of one row of the batch, for some of the queries and heads of a key/value head.

    `v_ref` is None if the values are the first features of the keys. `several` says whether the rows belong to several
    queries, which see different keys.
    """
    split, batch = pl.program_id(1), pl.program_id(2)
    (all_rows, dim), kv_seq = q_ref.shape[2:], k_ref.shape[1]
    parts = pl.cdiv(all_rows, rows)
    kv_head, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
    these = pl.ds(part * rows, rows)
    exist = inside(part * rows, rows, all_rows)
    column = None if exist is None else exist[:, None]
    starts = [sum(k_ref.parts[:part]) for part in range(len(k_ref.parts))] or [0]
    k_parts = [pieces(width, start) for width, start in zip(k_ref.parts or [dim], starts, strict=True)]
    of_v = pieces(v_dim)
    q = [[load(q_ref.at[batch, kv_head, these, piece], column) for piece in part] for part in k_parts]
    row = row_of(schedule.order, batch)

    vectors = functools.partial(_vectors, kv_head, q_ref.dtype)
    scale_of = functools.partial(_scale_of, kv_head)
    seen_of = functools.partial(_seen, formula.mask, q_tokens_ref, kv_tokens_ref, batch, these, exist)

    def step(masked: bool, n: Array, state: _Softmax) -> _Softmax:
        number, seen = schedule.order[row, 0, n], None
        kv_block, place = Block.of(batch, number, kv_size, kv_seq), _place(k_ref, batch, number, kv_size)
        if masked:  # keys that are not seen are not loaded
            seen = jnp.broadcast_to(seen_of(kv_block), (rows, kv_size))
            kv_block = kv_block._replace(exist=seen.astype(jnp.int32).max(axis=0) > 0)
        v_scale = None
        k = [vectors(k_ref, place, kv_block.rows, part) for part in k_parts]
        loaded = v_ref is None and k_parts[0][: len(of_v)] == of_v
        v = k[0][: len(of_v)] if loaded else vectors(v_ref or k_ref, place, kv_block.rows, of_v)
        logits = [product(of_part, keys) for of_part, keys in zip(q, k, strict=True)]
        if k_ref.parts:
            logits = [x * scale_of(k_ref, place, kv_block.exist, part)[None, :] for part, x in enumerate(logits)]
            v_scale = scale_of(v_ref or k_ref, place, kv_block.exist, 0)
        x = functools.reduce(jnp.add, logits)
        x = capped(formula, jnp.where(jnp.abs(x) == jnp.inf, jnp.nan, x))
        if seen is not None:
            if several:  # a value that is not finite has to affect the queries that see it, and no others
                x, numbers = _spoilt(x, v if v_scale is None else [v_scale])
                v, v_scale = (numbers, None) if v_scale is None else (v, numbers[0])
            x = jnp.where(seen, x, -jnp.inf)
        return _accumulate(formula, state, x, v, v_scale)

    met, splits = schedule.met[row, 0], pl.num_programs(1)
    begin, end = lax.div(met * split, splits), lax.div(met * (split + 1), splits)
    middle = jnp.clip(schedule.full[row, 0], begin, end)
    zeros = [jnp.zeros((rows, piece.size), jnp.float32) for piece in of_v]
    state = jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), zeros
    state = lax.fori_loop(begin, middle, functools.partial(step, False), state)
    top, total, out = lax.fori_loop(middle, end, functools.partial(step, True), state)

    # A value that is not finite makes its feature of the sum not finite; this spreads NaN to all features.
    total += 0 * functools.reduce(jnp.add, [o.sum(axis=1) for o in out])
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    for piece, o in zip(of_v, out, strict=True):
        store(out_ref.at[batch, split, kv_head, these, piece], o / total[:, None], column)
    lse = jnp.where(nothing, LOWEST, math.log(2) * (top + jnp.log2(total)))
    store(lse_ref.at[batch, split, kv_head, these], lse, exist)


_Place = tuple[Any, Any]  # a row of the batch or a page, and the slots there


def _place(ref: Stacked, batch: Array, number: Array, size: int) -> _Place:
    """Returns where a block of a row's slots lies in a cache, which may have the row's pages in any order."""
    if ref.table is None:
        return batch, pl.ds(number * size, size)
    of_page = ref.stack.shape[2] // size
    return ref.table[batch, lax.div(number, of_page)], pl.ds(lax.rem(number, of_page) * size, size)


def _vectors(
    kv_head: Array, dtype: Any, ref: Stacked, place: _Place, rows: Array | None, pieces: list[Any]
) -> list[Array]:
    """Loads a block of keys or values of a head, in pieces of their features. `rows`: which of them; None for all."""
    at = lambda piece: ref.stack.at[ref.layer[...], *place, kv_head, piece]
    return [load(at(piece), rows).astype(dtype) for piece in pieces]


def _scale_of(kv_head: Array, ref: Stacked, place: _Place, exist: Array | None, part: int) -> Float[Array, " kv"]:
    """Loads the scales of a block of keys or values, of one part of their features. `exist`: as `rows` above."""
    return load(ref.scale.at[ref.layer[...], *place, kv_head * len(ref.parts) + part], exist)


def _seen(
    mask: Mask, q_tokens: Tokens, kv_tokens: Tokens, batch: Array, these: Any, exist: Array | None, block: Block
) -> Bool[Array, "rows kv"]:
    """Returns which keys of a block each of `these` rows sees. `exist`: the rows that are queries; None for all."""
    at = lambda ref: load(ref.at[row_of(ref, batch), these], exist)[:, None]
    seen = mask.visible(jax.tree.map(at, q_tokens), jax.tree.map(lambda x: x[None, :], block.ids(kv_tokens)))
    seen = seen if block.exist is None else seen & block.exist[None, :]
    return seen if exist is None else seen & exist[:, None]


def _accumulate(
    formula: Formula, state: _Softmax, x: Float[Array, "rows kv"], v: list[Array], v_scale: Array | None
) -> _Softmax:
    """Adds keys with these logits, and their values in pieces of features, to the softmax so far."""
    top, total, out = state
    new_top = jnp.maximum(top, to_log2(formula) * x.max(axis=1))
    weights = exp2(x, to_log2(formula), less=new_top[:, None])
    fade = jnp.exp2(top - new_top)
    total = total * fade + weights.sum(axis=1)
    weights = weights if v_scale is None else weights * v_scale[None, :]
    out = [o * fade[:, None] + dot(weights.astype(p.dtype), p) for o, p in zip(out, v, strict=True)]
    return new_top, total, out


def _spoilt(x: Float[Array, "rows kv"], numbers: list[Array]) -> tuple[Float[Array, "rows kv"], list[Array]]:
    """Makes the logits NaN of keys whose numbers, a value's features or its scale, are not all finite.

    Returns the logits, and the numbers with zeros for those that are not finite.
    """
    is_finite = [jnp.abs(p.astype(jnp.float32)) < jnp.inf for p in numbers]
    spoilt = [jnp.where(each, 0.0, 1.0) for each in is_finite]
    spoilt = functools.reduce(jnp.maximum, [each.max(axis=1) if each.ndim > 1 else each for each in spoilt])
    x = jnp.where(spoilt[None, :] > 0, jnp.nan, x)
    return x, [jnp.where(each, p, jnp.zeros_like(p)) for each, p in zip(is_finite, numbers, strict=True)]
