"""Attention of one query or a few in each row of the batch over a cache that is stored by head, for TPUs, in Pallas.

XLA stores heads of 64 features, and latents, as [heads, dim, slots], and some numbers of heads of 128 features as
[heads, slots, dim] (`kernels.by_head`). So keys and values are read in this order, in place, and each head's are
together. A step takes some slots of one head: the queries that share the head are multiplied by its keys, and their
weights by its values. All else is as in "tpu": the schedule of blocks, the softmax that is accumulated from block to
block, integers in 8 bits that are multiplied without their scales, and pages.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Shaped

from kernels.attention.reference import LOWEST, poison
from kernels.attention.shared import Formula
from kernels.attention.tpu import LANES, VMEM, dot
from kernels.backends.device import device, elsewhere
from kernels.by_head import are_by_head, are_columns, by_head
from kernels.decode_attention.reference import with_gradient
from kernels.decode_attention.tpu import ROWS, STRIP, block_of, block_size, cost, place_of, row_of
from kernels.masks import Mask, Schedule, block_classes
from kernels.stacked import Stacked
from kernels.tokens import Tokens


PLATFORMS = ("tpu",)
RANK = 1

MOST = 512  # slots at a time


def refusal(
    q: Float[Array, "batch seq heads dim"], k: Stacked, v: Stacked | None, *, v_dim: int, **_: object
) -> str | None:
    """Returns why this implementation cannot take these arguments of `decode_attention`, or None if it can."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 and bfloat16, and q is {q.dtype}"
    if not q.size or not k.shape[1]:
        return "it needs a query, a key and a feature at least"
    for x in (k, v):
        if x is not None and device().platform == "tpu" and not are_by_head(x.stack.shape, x.stack.dtype):
            slots, *heads_of = x.stack.shape[2:]
            return "a TPU does not store {} slots of {} heads with {} features by head".format(slots, *heads_of)
    if k.scale is not None and not are_columns(k.scale.shape[3]):
        return f"a TPU does not store {k.scale.shape[3]} scales of a slot by head"
    if v is not None and are_columns(k.shape[3]) != are_columns(v_dim):
        return f"it takes keys and values in one order, and these have {k.shape[3]} and {v_dim} features"
    return elsewhere("tpu")


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
    """Computes `kernels.decode_attention` in Pallas for TPUs."""
    (batch, seq, heads, dim), (_, kv_seq, kv_heads, _) = q.shape, k.shape
    size = block_size(k, 0 if v is None else v_dim) if k.table is None else k.stack.shape[2]
    schedule = Schedule.of(block_classes(mask, q_tokens, kv_tokens, seq, size)[:, 0])

    group = heads // kv_heads
    queries = min(seq, max(1, ROWS // group))
    parts, rows = pl.cdiv(seq, queries), queries * group  # of a head
    few = math.gcd(size, min(MOST, LANES * max(1, ROWS // rows)))  # slots at a time, so that logits stay in registers
    by_part = functools.partial(_in_parts, kv_heads, queries, parts)

    values = [] if v is None else [v]
    scaled = [] if k.scale is None else [k, *values]
    # A row that sees no block loads one all the same, so every number has to be a page's.
    table = None if k.table is None else jnp.clip(k.table, 0, k.stack.shape[1] - 1)
    places = jnp.stack([k.layer, *(x.layer for x in values)]), table
    kv_ids = jax.tree.map(lambda x: x[:, None, :], kv_tokens)
    of_query = lambda x: jnp.broadcast_to(x[:, :, None, None], (*x.shape, heads, 1))
    q_ids = jax.tree.map(lambda x: by_part(of_query(x))[:, :, 0], q_tokens)
    sink = jnp.full(heads, LOWEST, jnp.float32) if sinks is None else jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    sink = _in_parts(kv_heads, queries, 1, jnp.broadcast_to(sink[:, None], (1, queries, heads, LANES)))[0, 0]

    of_part = lambda width: pl.BlockSpec((None, None, kv_heads, rows, width), lambda b, i, j, *_: (b, i, 0, 0, 0))
    of_q_ids = lambda x: pl.BlockSpec((None, None, rows, 1), lambda b, i, j, *_: (row_of(b, x), i, 0, 0))
    of_ids = lambda x: pl.BlockSpec((None, 1, size), lambda b, i, j, s, _: (row_of(b, x), 0, block_of(b, j, s)))

    columns = are_columns(dim)

    def of_slots(n: int, x: Shaped[Array, "layers rows slots *heads dim"]) -> pl.BlockSpec:
        def where(b: Any, i: Any, j: Any, s: Any, places: Any) -> tuple[Any, ...]:
            row, block = place_of(b, block_of(b, j, s), places[1])
            return places[0][n], row, 0, *_ordered(are_columns(x.shape[-1]), 0, block)

        heads = x.shape[3] if x.ndim == 5 else 1
        return pl.BlockSpec((None, None, heads, *_ordered(are_columns(x.shape[-1]), x.shape[-1], size)), where)

    stacks = [x.stack for x in (k, *values)]
    scales = [x.scale for x in scaled]
    arrays, specs = zip(
        (by_part(q + poison(q)), of_part(dim)),
        (q_ids, jax.tree.map(of_q_ids, q_ids)),
        (by_head(stacks[0]), of_slots(0, stacks[0])),
        ([by_head(x) for x in stacks[1:]], [of_slots(1, x) for x in stacks[1:]]),
        ([by_head(x) for x in scales], [of_slots(n, x) for n, x in enumerate(scales)]),
        (kv_ids, jax.tree.map(of_ids, kv_ids)),
        (sink, pl.BlockSpec((kv_heads, rows, LANES), lambda b, i, j, *_: (0, 0, 0))),
        strict=True,
    )
    out = pl.pallas_call(
        functools.partial(_kernel, Formula(scale, mask, softcap), kv_seq, columns, few, k.parts),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, parts, jnp.maximum(schedule.met.max(), 1)),  # as many steps as the longest row has blocks
            in_specs=specs,
            out_specs=of_part(v_dim),
            scratch_shapes=[
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, LANES), jnp.float32),
                pltpu.VMEM((kv_heads, rows, v_dim), jnp.float32),
                [pltpu.VMEM(_ordered(columns, dim, few), q.dtype) for _ in scaled[:1]],
                pltpu.VMEM(_ordered(columns, v_dim, few), q.dtype),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, parts, kv_heads, rows, v_dim), q.dtype),
        name="decode_attention",
        interpret=device().platform == "cpu",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=cost(q, k, v, v_dim, parts),
    )(schedule, places, *arrays)
    out = out.reshape(batch, parts, kv_heads, queries, group, v_dim).transpose(0, 1, 3, 2, 4, 5)
    return out.reshape(batch, parts * queries, heads, v_dim)[:, :seq]


def _in_parts(
    kv_heads: int, queries: int, parts: int, x: Shaped[Array, "batch seq heads ..."]
) -> Shaped[Array, "batch parts kv_heads rows _"]:
    """Splits queries into parts. A key/value head's rows are the queries' heads that share it. Padding is last."""
    x = jnp.pad(x, [(0, 0), (0, queries * parts - x.shape[1])] + [(0, 0)] * (x.ndim - 2), mode="edge")
    x = x.reshape(x.shape[0], parts, queries, kv_heads, x.shape[2] // kv_heads, -1).swapaxes(2, 3)
    return x.reshape(*x.shape[:3], -1, x.shape[5])


def _ordered(columns: bool, features: Any, slots: Any) -> tuple[Any, Any]:
    """Returns what is for features and what is for slots in the order of a head's axes."""
    return (features, slots) if columns else (slots, features)


def _kernel(
    formula: Formula,
    kv_seq: int,
    columns: bool,
    few: int,
    k_parts: tuple[int, ...],
    schedule: Any,
    places: Any,
    q_ref: Any,
    q_ids: Any,
    k_ref: Any,
    v_refs: list[Any],
    scale_refs: list[Any],
    kv_ids: Any,
    sinks_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    wide_k_refs: list[Any],
    finite_v_ref: Any,
) -> None:
    """Visits one block of slots of one row of the batch, for the queries of one part, one head after the other.

    `top` and `total` are the maximum and the denominator of each row's softmax so far, repeated over a register's
    width, and `sum` the weighted sum of values. `finite_v` are a few values, with zeros for numbers that are not
    finite; `wide_k` are as many keys that were in 8 bits. If the values are the first features of the keys, `v_refs` is
    empty.
    """
    del places  # used to choose the blocks
    b, j, kv_heads, v_dim = pl.program_id(0), pl.program_id(2), len(k_ref), out_ref.shape[-1]
    axis = 0 if columns else 1  # that of features, of a head
    size, v_ref = k_ref.shape[2 - axis], (*v_refs, k_ref)[0]
    part_of = functools.partial(_ordered, columns)

    @pl.when(j == 0)
    def begin() -> None:
        top_ref[...] = sinks_ref[...]
        total_ref[...] = jnp.ones_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(n: Any, _: None) -> None:
        head, first = n % kv_heads, pl.multiple_of(n // kv_heads * few, few)
        at = pl.ds(first, few)
        _clean(axis, v_ref.at[head], first, finite_v_ref)
        if scale_refs:
            (wide_k_ref,) = wide_k_refs
            _clean(axis, k_ref.at[head], first, wide_k_ref)
            scale_of = lambda ref, number: ref[0, pl.ds(number, 1), at]
            v_scale = scale_of(scale_refs[-1], head if v_refs else head * len(k_parts))
            x, cut = jnp.zeros((q_ref.shape[1], few), jnp.float32), 0
            for part, width in enumerate(k_parts):
                features = pl.ds(cut, width)
                product = dot(q_ref[head, :, features], wide_k_ref[part_of(features, slice(None))], 1, axis)
                x += formula.scale * scale_of(scale_refs[0], head * len(k_parts) + part) * product
                cut += width
            x += 0 * v_scale
            v_scale = jnp.where(jnp.abs(v_scale) < jnp.inf, v_scale, 0)
        else:
            # A value that is not finite makes the sum of its small parts not finite. No other sum is too large.
            small = jnp.full((1, v_dim), 2.0**-20, q_ref.dtype)
            spoilt = 0 * dot(small, v_ref[head, *part_of(pl.ds(0, v_dim), at)], 1, axis)
            x, v_scale = formula.scale * dot(q_ref[head], k_ref[head, *part_of(slice(None), at)], 1, axis) + spoilt, 1
        x = jnp.where(jnp.abs(x) < jnp.inf, x, jnp.nan)  # of a key or a value that is not finite
        if formula.softcap is not None:
            x = formula.softcap * jnp.tanh(x / formula.softcap)
        query = jax.tree.map(lambda x: x[...], q_ids)
        seen = formula.mask.visible(query, jax.tree.map(lambda x: x[:, at], kv_ids))
        start = schedule.order[row_of(b, schedule.order), j] * size + first
        seen &= start + lax.broadcasted_iota(jnp.int32, (1, few), 1) < kv_seq
        x = jnp.where(seen, x, -jnp.inf)
        top = top_ref[head]
        new_top = jnp.maximum(top, x.max(axis=1, keepdims=True))
        fade, weights = jnp.exp(top - new_top), jnp.exp(x - new_top[:, :1])
        top_ref[head] = new_top
        total_ref[head] = total_ref[head] * fade + weights.sum(axis=1, keepdims=True)
        weights = (weights * v_scale).astype(finite_v_ref.dtype)
        for cut in range(0, v_dim, LANES):
            piece = pl.ds(cut, min(LANES, v_dim - cut))
            new = dot(weights, finite_v_ref[part_of(piece, slice(None))], 1, 1 - axis)
            sum_ref[head, :, piece] = sum_ref[head, :, piece] * fade[:, : piece.size] + new

    steps = jnp.where(j < schedule.met[row_of(b, schedule.met)], kv_heads * (size // few), 0)
    lax.fori_loop(0, steps, add, None)

    @pl.when(j == pl.num_programs(2) - 1)
    def store() -> None:
        out_ref[...] = (sum_ref[...] / total_ref[:, :, :1]).astype(out_ref.dtype)


def _clean(axis: int, ref: Any, first: Any, copy_ref: Any) -> None:
    """Copies slots of a head from `first` on, in the dtype that is multiplied, with zeros for what is not finite.

    It processes a strip at a time: all of latents would not fit the registers.
    """
    all_rows, width = copy_ref.shape
    rows = STRIP if all_rows % STRIP == 0 else all_rows

    def strip(n: Any, _: None) -> None:
        own = pl.ds(pl.multiple_of(n * rows, rows), rows)
        of_rows = pl.ds(pl.multiple_of(first + n * rows, rows), rows)
        x = (ref[own, pl.ds(first, width)] if axis == 0 else ref[of_rows, pl.ds(0, width)]).astype(jnp.float32)
        copy_ref[own, :] = jnp.where(jnp.abs(x) < jnp.inf, x, 0).astype(copy_ref.dtype)

    lax.fori_loop(0, all_rows // rows, strip, None)
