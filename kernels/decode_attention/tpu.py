"""Attention of one query or a few in each row of the batch over a cache, for TPUs, in Pallas.

Reading the cache takes nearly all the time, so each block is read once, and only if a query sees a key of it. Blocks
come from the array of all layers, so no layer is copied. XLA lists beforehand, from the mask, each row's blocks of
slots with a key that a query sees. The grid has as many steps as the longest list; a shorter one repeats its last
block, which loads nothing. Softmax and output are accumulated from block to block (FlashAttention, arXiv:2205.14135),
starting with the sink.

The heads of a slot are neighbouring rows in memory, and a TPU is slow at picking one head from each slot. So every
query head is multiplied by the keys of all heads, as one matrix of [slots * kv_heads, dim], and a mask keeps only its
own head's. The matrix unit has to load each key anyway, and has time for more queries than there are.

Two or four heads of 256 features lie in memory as [slots, 2, heads, 128]: a slot has the first 128 features of all
heads, then the others. There a row is a piece of a key. Logits are made of all pieces, each turned by as many columns
as it lies behind the first, in whose columns the logits stay.

For a cache in 8 bits the integers are multiplied without their scales. The keys' scales multiply the logits, and the
values' scales the weights.

Where a cache lies in pages, a block is a page, and the numbers of the rows' pages are prefetched with the schedule.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.layout import Layout, with_layout_constraint
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Shaped

from kernels.attention.reference import LOWEST, poison
from kernels.attention.shared import Formula
from kernels.attention.tpu import LANES, VMEM, dot
from kernels.backends import blocks
from kernels.backends.device import device, elsewhere
from kernels.by_head import fill_tiles
from kernels.decode_attention.reference import with_gradient
from kernels.masks import Mask, Schedule, block_classes
from kernels.stacked import Stacked
from kernels.tokens import Tokens


PLATFORMS = ("tpu",)
RANK = 2

ROWS = 128  # most rows of queries and heads at a time, unless one query has more heads
STRIP = 32  # keys or values that `_clean` processes at a time


def refusal(
    q: Float[Array, "batch seq heads dim"], k: Stacked, v: Stacked | None, *, v_dim: int, **_: object
) -> str | None:
    """Returns why this implementation cannot take these arguments of `decode_attention`, or None if it can."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 and bfloat16, and q is {q.dtype}"
    if not q.size or not k.shape[1]:
        return "it needs a query, a key and a feature at least"
    widths = (k.shape[3], k.shape[3] if v is None else v_dim)
    if device().platform == "tpu" and not _lies_flat(k.shape[2], *widths, k.stack.dtype.itemsize):
        return f"XLA would copy a cache of {k.shape[2]} heads with {widths[0]} and {widths[1]} features to flatten it"
    columns = k.stack.shape[2] * k.shape[2] * _pieces_of(k, v_dim)
    if device().platform == "tpu" and k.table is not None and columns % LANES:
        return f"Mosaic takes no block of {columns} positions, as a page of {k.stack.shape[2]} slots has"
    if device().platform == "tpu" and _pieces_of(k, v_dim) > 1 and columns % LANES:
        return f"Mosaic turns registers of {LANES} positions, and {columns} of the cache do not fill these"
    return elsewhere("tpu")


def _lies_flat(kv_heads: int, dim: int, v_dim: int, itemsize: int) -> bool:
    """Whether [slots, kv_heads, dim] is stored as the rows of keys, or of pieces of keys, that the kernel reads.

    The conditions are the compiler's, which has tiles of 8 x 128. It pads none for 2 or 4 heads, or in 8 bits for 4.
    """
    whole = dim % LANES == 0 and v_dim % LANES == 0 and fill_tiles(kv_heads, itemsize)
    if itemsize == 1:
        return whole and dim == v_dim
    return kv_heads == 1 or (whole and (kv_heads % 8 == 0 or dim == v_dim))


def _pieces_of(k: Stacked, v_dim: int) -> int:
    """Returns the number of rows that a key has in memory. One row is whole keys of any width, if no tile is split."""
    kv_heads, dim = k.shape[2:]
    split = kv_heads in (2, 4) or (k.stack.dtype.itemsize == 1 and kv_heads % 8 == 0)
    return dim // LANES if split and dim == v_dim and dim % LANES == 0 else 1


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

    queries = min(seq, max(1, ROWS // heads))
    parts, rows = pl.cdiv(seq, queries), queries * heads
    by_part = functools.partial(_in_parts, queries, parts)

    pieces = _pieces_of(k, v_dim)
    columns = size * pieces * kv_heads  # a block's columns of logits: one for each piece of each key of each head
    few = LANES if columns % LANES == 0 else columns  # columns at a time, so that their logits stay in registers
    flat = functools.partial(_flat, pieces)
    values = [] if v is None else [v]
    # A row that sees no block loads one all the same, so every number has to be a page's.
    table = None if k.table is None else jnp.clip(k.table, 0, k.stack.shape[1] - 1)
    places = jnp.stack([k.layer, *(x.layer for x in values)]), table
    kv_ids = jax.tree.map(lambda x: jnp.repeat(x, pieces * kv_heads, axis=1)[:, None, :], kv_tokens)
    q_ids = jax.tree.map(lambda x: by_part(jnp.broadcast_to(x[:, :, None, None], (*x.shape, heads, 1))), q_tokens)
    head_of_column, head_of_row = _kv_heads(pieces, kv_heads, heads, size, queries)
    sink = jnp.full(heads, LOWEST, jnp.float32) if sinks is None else jnp.maximum(sinks.astype(jnp.float32), LOWEST)
    wide = lambda x: jnp.broadcast_to(x, (rows, LANES))

    of_part = lambda width: pl.BlockSpec((None, None, rows, width), lambda b, i, j, *_: (b, i, 0, 0))
    of_q_ids = lambda x: pl.BlockSpec((None, None, rows, 1), lambda b, i, j, *_: (row_of(b, x), i, 0, 0))
    of_keys = lambda n, width: pl.BlockSpec(
        (None, None, columns, width // pieces),
        lambda b, i, j, s, places: (places[0][n], *place_of(b, block_of(b, j, s), places[1]), 0),
    )
    of_scale = lambda x: pl.BlockSpec((None, len(x.parts), columns), lambda b, i, j, s, _: (b, 0, block_of(b, j, s)))
    of_ids = lambda x: pl.BlockSpec((None, 1, columns), lambda b, i, j, s, _: (row_of(b, x), 0, block_of(b, j, s)))
    of_all = lambda *shape: pl.BlockSpec(shape, lambda b, i, j, *_: (0, 0))
    scaled = [] if k.scale is None else [k, *values]
    longest = jnp.maximum(schedule.met.max(), 1)  # the grid's steps for a row
    arrays, specs = zip(
        (by_part(q + poison(q)), of_part(dim)),
        (q_ids, jax.tree.map(of_q_ids, q_ids)),
        (flat(k), of_keys(0, dim)),
        ([flat(x) for x in values], [of_keys(1, v_dim) for _ in values]),
        ([_scale_of(pieces, x) for x in scaled], [of_scale(x) for x in scaled]),
        (kv_ids, jax.tree.map(of_ids, kv_ids)),
        (head_of_column, of_all(1, columns)),
        (wide(head_of_row), of_all(rows, LANES)),
        (wide(jnp.tile(sink, queries)[:, None]), of_all(rows, LANES)),
        strict=True,
    )
    out = pl.pallas_call(
        functools.partial(
            _kernel, Formula(scale, mask, softcap), kv_seq * pieces * kv_heads, pieces, kv_heads, k.parts
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(batch, parts, longest),
            in_specs=specs,
            out_specs=of_part(v_dim),
            scratch_shapes=[
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, LANES), jnp.float32),
                pltpu.VMEM((rows, v_dim), jnp.float32),
                pltpu.VMEM((few, dim // pieces), q.dtype),
                [pltpu.VMEM((few, v_dim // pieces), q.dtype) for _ in values],
                pltpu.VMEM((few, LANES), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((batch, parts, rows, v_dim), q.dtype),
        name="decode_attention",
        interpret=device().platform == "cpu",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=cost(q, k, v, v_dim, parts),
    )(schedule, places, *arrays)
    return out.reshape(batch, parts * queries, heads, v_dim)[:, :seq]


def _in_parts(queries: int, parts: int, x: Shaped[Array, "batch seq heads ..."]) -> Shaped[Array, "batch parts rows _"]:
    """Splits queries into parts, whose rows are their queries' heads. The last part is padded.

    There is only one part, unless queries are many.
    """
    x = jnp.pad(x, [(0, 0), (0, queries * parts - x.shape[1])] + [(0, 0)] * (x.ndim - 2), mode="edge")
    return x.reshape(x.shape[0], parts, queries * x.shape[2], -1)


def _flat(pieces: int, x: Stacked) -> Shaped[Array, "layers rows columns width"]:
    """Returns the stack with a row for each piece of each head's vector, in the order in which they are stored."""
    layers, rows, slots, heads, dim = x.stack.shape
    split = x.stack.reshape(layers, rows, slots, heads, pieces, dim // pieces)
    if pieces > 1 and device().platform == "tpu":  # otherwise XLA orders 8-bit numbers by slots, and copies them twice
        split = with_layout_constraint(split, Layout((0, 1, 2, 4, 3, 5)))
    return split.swapaxes(3, 4).reshape(layers, rows, slots * pieces * heads, dim // pieces)


def _kv_heads(
    pieces: int, kv_heads: int, heads: int, slots: int, queries: int
) -> tuple[Int[Array, "1 columns"], Int[Array, "rows 1"]]:
    """Returns the key/value head of each column, and of each row. A column of a further piece has none: -1."""
    of_slot = jnp.pad(jnp.arange(kv_heads, dtype=jnp.int32), (0, (pieces - 1) * kv_heads), constant_values=-1)
    of_columns = jnp.tile(of_slot, slots)[None]
    of_rows = jnp.tile(jnp.repeat(jnp.arange(kv_heads, dtype=jnp.int32), heads // kv_heads), queries)[:, None]
    return of_columns, of_rows


def cost(q: Array, k: Stacked, v: Stacked | None, v_dim: int, parts: int) -> pl.CostEstimate:
    """Estimates the cost, with the whole cache read once for each part."""
    (_, seq, heads, dim), (batch, kv_seq, kv_heads, _) = q.shape, k.shape
    pairs = batch * seq * heads * kv_seq * kv_heads
    features = batch * parts * kv_seq * kv_heads * (dim + (0 if v is None else v_dim))
    return pl.CostEstimate(
        flops=2 * pairs * (dim + v_dim), transcendentals=pairs, bytes_accessed=features * k.stack.dtype.itemsize
    )


def row_of(b: Any, x: Any) -> Any:
    """Returns the row of an array that is row b's; the array may have one row for the whole batch."""
    return jnp.minimum(b, x.shape[0] - 1)


def block_of(b: Any, j: Any, schedule: Any) -> Any:
    """Returns the j-th block that row b visits, or its last one again."""
    at = row_of(b, schedule.met)
    return schedule.order[at, jnp.clip(j, 0, jnp.maximum(schedule.met[at] - 1, 0))]


def place_of(b: Any, block: Any, table: Any) -> tuple[Any, Any]:
    """Returns where a block of row b lies: the row or the page, and which of its blocks."""
    return (b, block) if table is None else (table[b, block], 0)


def _scale_of(pieces: int, x: Stacked) -> Float[Array, "batch parts columns"]:
    """Returns a layer's scales, one for each part of each column. XLA copies them: 4 bytes for, mostly, 128."""
    if x.table is None:
        of_layer = lax.dynamic_index_in_dim(x.scale, x.layer, keepdims=False)
    else:
        of_layer = x.scale.at[x.layer, x.table].get(mode="clip")
    of_slots = jnp.repeat(of_layer.reshape(*x.shape[:2], 1, -1), pieces, axis=2)
    return of_slots.reshape(x.shape[0], -1, len(x.parts)).swapaxes(1, 2)


def _kernel(
    formula: Formula,
    all_columns: int,
    pieces: int,
    kv_heads: int,
    k_parts: tuple[int, ...],
    schedule: Any,
    places: Any,
    q_ref: Any,
    q_ids: Any,
    k_ref: Any,
    v_refs: list[Any],
    scale_refs: list[Any],
    kv_ids: Any,
    head_of_column: Any,
    head_of_row: Any,
    sinks_ref: Any,
    out_ref: Any,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
    finite_k_ref: Any,
    finite_v_refs: list[Any],
    changed_ref: Any,
) -> None:
    """Visits one block of slots of one row of the batch, for the queries of one part.

    `top` and `total` are the maximum and the denominator of each head's softmax so far, repeated over a register's
    width, and `sum` the weighted sum of values. The last scratch arrays are for `few` keys: keys and values with zeros
    for numbers that are not finite, and the count of these zeros in each lane. If the values are the first features of
    the keys, `v_refs` and `finite_v_refs` are empty. In 8 bits only scales may be not finite. With several pieces a row
    of keys and values is one of them.
    """
    del places  # used to choose the blocks
    b, j, columns, few = pl.program_id(0), pl.program_id(2), len(k_ref), len(changed_ref)
    finite_v_ref = (*finite_v_refs, finite_k_ref)[0]

    @pl.when(j == 0)
    def begin() -> None:
        top_ref[...] = sinks_ref[...]
        total_ref[...] = jnp.ones_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(i: Any, _: None) -> None:
        at = pl.ds(pl.multiple_of(i * few, few), few)
        if scale_refs:
            _widen(k_ref, i * few, finite_k_ref)
            for v_ref in v_refs:
                _widen(v_ref, i * few, finite_v_ref)
            v_scale = scale_refs[-1][:1, at]
            if pieces == 1:
                x = _scaled_product(formula.scale, k_parts, q_ref, finite_k_ref, scale_refs[0], at, v_scale)
            else:
                k_scale = formula.scale * scale_refs[0][:1, at] + 0 * v_scale
                x = k_scale * _product_of_pieces(pieces, kv_heads, q_ref, finite_k_ref)
        else:
            v_scale = None
            changed_ref[...] = jnp.zeros_like(changed_ref)
            _clean(k_ref, i * few, finite_k_ref, changed_ref)
            for v_ref in v_refs:
                _clean(v_ref, i * few, finite_v_ref, changed_ref)
            # Sums by a product with ones, because its result is a row and not a column.
            spoilt = dot(jnp.ones((1, LANES), q_ref.dtype), changed_ref[...].astype(q_ref.dtype), 1, 1)
            spoilt = sum(_turned(spoilt, -n * kv_heads) for n in range(pieces))
            x = formula.scale * _product_of_pieces(pieces, kv_heads, q_ref, finite_k_ref)
            x = jnp.where(spoilt > 0, jnp.nan, x)
        if formula.softcap is not None:
            x = formula.softcap * jnp.tanh(x / formula.softcap)
        query = jax.tree.map(lambda x: x[...], q_ids)
        seen = formula.mask.visible(query, jax.tree.map(lambda x: x[:, at], kv_ids))
        start = schedule.order[row_of(b, schedule.order), j] * columns + i * few
        seen &= start + lax.broadcasted_iota(jnp.int32, (1, few), 1) < all_columns
        seen &= head_of_row[:, :1] == head_of_column[:, at]
        x = jnp.where(seen, x, -jnp.inf)
        _accumulate(x, finite_v_ref, v_scale, pieces, kv_heads, top_ref, total_ref, sum_ref)

    steps = jnp.where(j < schedule.met[row_of(b, schedule.met)], columns // few, 0)
    lax.fori_loop(0, steps, add, None)

    @pl.when(j == pl.num_programs(2) - 1)
    def store() -> None:
        out_ref[...] = (sum_ref[...] / total_ref[:, :1]).astype(out_ref.dtype)


def _turned(x: Float[Array, "rows few"], columns: int) -> Float[Array, "rows few"]:
    """Turns columns to the right."""
    return pltpu.roll(x, columns % x.shape[1], axis=1) if columns else x


def _product_of_pieces(pieces: int, kv_heads: int, q_ref: Any, k_ref: Any) -> Float[Array, "rows few"]:
    """Multiplies queries and keys. The logits stand in the columns of the keys' first pieces."""
    width = q_ref.shape[1] // pieces
    of_piece = lambda n: dot(q_ref[:, pl.ds(n * width, width)], k_ref[...], 1, 1)
    return sum((_turned(of_piece(n), -n * kv_heads) for n in range(1, pieces)), of_piece(0))


def _scaled_product(
    scale: float, parts: tuple[int, ...], q_ref: Any, k_ref: Any, scales_ref: Any, at: Any, v_scale: Array
) -> Float[Array, "rows few"]:
    """Multiplies queries and keys in 8 bits. Each part of a key's features has its scale, in the columns `at`."""
    x: Any = 0.0
    first = 0
    for part, width in enumerate(parts):
        features = pl.ds(first, width)
        # A value's scale that is not finite makes its logits NaN: it affects only queries that see it.
        k_scale = scale * scales_ref[part : part + 1, at] + 0 * v_scale
        x += k_scale * dot(q_ref[:, features], k_ref[:, features], 1, 1)
        first += width
    return x


def _accumulate(
    x: Float[Array, "rows few"],
    v_ref: Any,
    v_scale: Array | None,
    pieces: int,
    kv_heads: int,
    top_ref: Any,
    total_ref: Any,
    sum_ref: Any,
) -> None:
    """Adds keys with these logits, and their values, to the softmax and the sum so far."""
    top = top_ref[...]
    new_top = jnp.maximum(top, x.max(axis=1, keepdims=True))
    fade, weights = jnp.exp(top - new_top), jnp.exp(x - new_top[:, :1])
    top_ref[...] = new_top
    total_ref[...] = total_ref[...] * fade + weights.sum(axis=1, keepdims=True)
    if v_scale is not None:
        weights *= jnp.where(jnp.abs(v_scale) < jnp.inf, v_scale, 0)
    for n, piece in enumerate(_pieces(sum_ref)):
        # Either a piece of the values has columns of its own, or all pieces are in one row.
        of_piece, features = (_turned(weights, n * kv_heads), slice(None)) if pieces > 1 else (weights, piece)
        new = dot(of_piece.astype(v_ref.dtype), v_ref[:, features], 1, 0)
        sum_ref[:, piece] = sum_ref[:, piece] * fade[:, : piece.size] + new


def _clean(ref: Any, first: Any, finite_ref: Any, changed_ref: Any) -> None:
    """Replaces NaN and infinities by zeros, in rows from `first` on, and adds the number of changes to `changed`.

    It processes a strip at a time, in pieces: whole rows of the widest keys would not fit the registers.
    """
    all_rows = len(finite_ref)
    rows = STRIP if all_rows % STRIP == 0 else all_rows

    def strip(n: Any, _: None) -> None:
        own = pl.ds(pl.multiple_of(n * rows, rows), rows)
        for piece in _pieces(ref):
            # TPUs have isfinite for float32 only.
            x = ref[pl.ds(pl.multiple_of(first + n * rows, rows), rows), piece].astype(jnp.float32)
            is_finite = jnp.isfinite(x)
            finite_ref[own, piece] = jnp.where(is_finite, x, 0).astype(finite_ref.dtype)
            changed_ref[own, : piece.size] += jnp.where(is_finite, 0.0, 1.0)

    lax.fori_loop(0, all_rows // rows, strip, None)


def _widen(ref: Any, first: Any, copy_ref: Any) -> None:
    """Copies rows from `first` on from 8 bits to the dtype that is multiplied, a strip at a time."""
    all_rows = len(copy_ref)
    rows = STRIP if all_rows % STRIP == 0 else all_rows

    def strip(n: Any, _: None) -> None:
        own = pl.ds(pl.multiple_of(n * rows, rows), rows)
        copy_ref[own] = ref[pl.ds(pl.multiple_of(first + n * rows, rows), rows)].astype(copy_ref.dtype)

    lax.fori_loop(0, all_rows // rows, strip, None)


def _pieces(ref: Any) -> list[Any]:
    """Cuts a row into slices of a register's width."""
    width = ref.shape[1]
    return [pl.ds(at, min(LANES, width - at)) for at in range(0, width, LANES)]


def block_size(k: Stacked, v_dim: int) -> int:
    """Returns the number of slots whose keys and values have the table's number of bytes; all slots, if few."""
    sizes = blocks.sizes(__name__, "decode", k.stack.dtype, "*")
    slot = k.shape[2] * (k.shape[3] + v_dim) * k.stack.dtype.itemsize
    whole = lambda slots: max(1, slots // sizes["unit"]) * sizes["unit"]
    return min(whole(sizes["bytes"] // slot), whole(k.shape[1]) if k.shape[1] > sizes["unit"] else k.shape[1])
