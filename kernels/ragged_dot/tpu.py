"""Grouped matrix products (each group of rows times its matrix), for TPUs, in Pallas.

A TPU loads and stores whole blocks of rows only, and a block may hold rows of several groups. So the rows are cut into
tiles where a group ends and where a block ends. A block is visited once for each of its tiles, one right after another,
and each visit changes only its tile's rows. XLA computes the order of tiles beforehand, and the grid has as many steps
as there are tiles at run time. The rows without a group are one more group at the end, whose tiles load and multiply
nothing, and store zeros.

The gradient of the matrices keeps the sum over a group's tiles, and stores it after the last. A group without rows has
one tile, which stores its zeros.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from kernels.backends import blocks
from kernels.backends.device import device, elsewhere
from kernels.coded import Coded
from kernels.coded_matmul import tpu as coded_tpu
from kernels.quantized_matmul.quantize import LARGEST
from kernels.ragged_dot import shared
from kernels.ragged_dot.shared import Matrices, Rows
from kernels.stacked import Stacked, read
from kernels.tiles import Tiles, mean_rows, spans, with_rest


PLATFORMS = ("tpu",)
RANK = 2

VMEM = 48 << 20  # bytes that a kernel may take; the default of 16 MiB is not a TPU's own limit
LANES = 128  # the width of a TPU's registers


def refusal(x: Rows, w: Matrices, _: Int[Array, " groups"]) -> str | None:
    """Returns why this implementation cannot take these arguments of `ragged_dot`, or None if it can."""
    why = elsewhere("tpu") or shared.refusal(x, w)
    if why is not None:
        return why
    if x.dtype == jnp.float16:
        return "a TPU does not compute in float16"
    most = _sizes("matrices", x, w.shape[0])["depth"]
    if any(length > most and length % LANES for length in w.shape[1:]):
        return f"it takes matrices of up to {most} features, or of a multiple of {LANES}, and w is {w.shape}"
    return None


@jax.jit  # so that calls outside jit compile once, too
def ragged_dot(x: Rows, w: Matrices, group_sizes: Int[Array, " groups"]) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` in Pallas for TPUs. Sides in 8 bits are cast to bfloat16, without rounding."""
    if x.dtype in LARGEST and not isinstance(w, Coded):
        w = w if w.dtype == jnp.int8 else read(w).astype(jnp.bfloat16)
        return ragged_dot(x.astype(jnp.bfloat16), w, group_sizes).astype(jnp.float32)
    return shared.ragged_dot(shared.Kernels(_rows_times_matrices, _sums_of_products), x, w, group_sizes)


def _rows_times_matrices(x: Array, w: Matrices, group_sizes: Array, axis: int) -> Array:
    if isinstance(w, Coded):
        if axis == 2 and coded_tpu.refusal(x, w) is None:
            return coded_tpu.grouped(x, w, group_sizes)
        w = w.read()
    w = Stacked.of(w)
    if _lies_transposed(*w.shape[1:]):
        return _rows_times_matrices(x, Stacked(w.stack.swapaxes(2, 3), w.layer), group_sizes, axis=3 - axis)
    (tokens, depth), groups, columns = x.shape, w.shape[0], w.shape[3 - axis]
    sizes = _sizes("matrices", x, groups)
    rows = _whole(tokens, sizes["piece"], sizes["rows"])
    column_block, depth_block = min(sizes["columns"], columns), _depth_block(sizes, depth)
    last = depth // depth_block - 1
    tiles = Tiles.of(with_rest(group_sizes, tokens), tokens, rows, aligned=True)
    _, ends = spans(group_sizes, tokens)

    # Tiles of rows without a group name the blocks that are in memory already, so nothing is loaded for them.
    source = jnp.minimum(tiles.first, jnp.maximum(ends[-1] - 1, 0)) // rows
    step = lambda k, group: jnp.where(group < groups, k, last)
    x_block = lambda j, i, k, group, first, end, source, layer: (source[i], step(k, group[i]))

    def w_block(j: Array, i: Array, k: Array, group: Any, *scalars: Any) -> tuple[Array, Array, Array, Array]:
        row, column = (j, step(k, group[i])) if axis == 2 else (step(k, group[i]), j)
        *_, layer = scalars
        return layer[0], jnp.minimum(group[i], groups - 1), row, column

    w_shape = (column_block, depth_block)
    return pl.pallas_call(
        functools.partial(_rows_times_matrices_kernel, sizes, groups, axis),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(columns, column_block), tiles.count, last + 1),
            in_specs=[
                pl.BlockSpec((rows, depth_block), x_block),
                pl.BlockSpec((None, None, *(w_shape if axis == 2 else w_shape[::-1])), w_block),
            ],
            out_specs=pl.BlockSpec((rows, column_block), lambda j, i, k, group, first, *_: (first[i] // rows, j)),
            scratch_shapes=[pltpu.VMEM((rows, column_block), jnp.float32)],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * depth * columns,
            bytes_accessed=(x.size + tokens * columns) * x.dtype.itemsize + w.size * w.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=device().platform == "cpu",
        name="ragged_dot_nt" if axis == 2 else "ragged_dot_nn",  # BLAS's names: the second side transposed, or not
    )(tiles.group, tiles.first, tiles.end, source, w.layer[None], x, w.stack)


def _rows_times_matrices_kernel(
    sizes: dict[str, int],
    groups: int,
    axis: int,
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    source_ref: Any,
    layer_ref: Any,
    x_ref: Any,
    w_ref: Any,
    out_ref: Any,
    sum_ref: Any,
) -> None:
    del source_ref, layer_ref  # only the block specs use them
    i, k, piece = pl.program_id(1), pl.program_id(2), sizes["piece"]

    def multiply(start: Array, own: Callable[..., Array]) -> None:
        rows = pl.ds(start, piece)

        @pl.when(k == 0)
        def begin() -> None:
            sum_ref[rows, :] = jnp.zeros((piece, sum_ref.shape[1]), jnp.float32)

        @pl.when(group_ref[i] < groups)
        def add() -> None:
            for column in _slices(sum_ref.shape[1], sizes["pass"]):
                for inner in _slices(x_ref.shape[1], sizes["pass"]):
                    x, w = x_ref[rows, inner], w_ref[(column, inner) if axis == 2 else (inner, column)]
                    sum_ref[rows, column] += _product(x, w.astype(x.dtype), axes=(1, axis - 1))

        @pl.when(k == pl.num_programs(2) - 1)
        def store() -> None:
            out = jnp.where(own(start, piece), sum_ref[rows, :], out_ref[rows, :].astype(jnp.float32))
            out_ref[rows, :] = out.astype(out_ref.dtype)

    _for_pieces(multiply, piece, len(out_ref), first_ref[i], end_ref[i])


def _sums_of_products(d_out: Array, x: Array, group_sizes: Array) -> Array:
    if _lies_transposed(d_out.shape[1], x.shape[1]):
        return _sums_of_products(x, d_out, group_sizes).swapaxes(1, 2)
    (tokens, outs), (_, ins), groups = d_out.shape, x.shape, len(group_sizes)
    sizes = _sizes("sums", x, groups)
    rows, out_block = _whole(tokens, sizes["piece"], sizes["rows"]), _whole(outs, sizes["pass"], sizes["out"])
    in_block = min(sizes["in"], ins)
    tiles = Tiles.of(group_sizes, tokens, rows, aligned=True, empty=True)
    row_block = lambda first: jnp.minimum(first, tokens - 1) // rows  # a group without rows may start after the last
    return pl.pallas_call(
        functools.partial(_sums_of_products_kernel, sizes),
        out_shape=jax.ShapeDtypeStruct((groups, outs, ins), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=5,
            grid=(pl.cdiv(outs, out_block), pl.cdiv(ins, in_block), tiles.count),
            in_specs=[
                pl.BlockSpec((rows, out_block), lambda j, k, i, group, first, *_: (row_block(first[i]), j)),
                pl.BlockSpec((rows, in_block), lambda j, k, i, group, first, *_: (row_block(first[i]), k)),
            ],
            out_specs=pl.BlockSpec((None, out_block, in_block), lambda j, k, i, group, *_: (group[i], j, k)),
            scratch_shapes=[
                pltpu.VMEM((sizes["piece"], out_block), x.dtype),
                pltpu.VMEM((sizes["piece"], in_block), x.dtype),
                pltpu.VMEM((out_block, in_block), jnp.float32),
            ],
        ),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * outs * ins,
            bytes_accessed=(d_out.size + x.size + groups * outs * ins) * x.dtype.itemsize,
            transcendentals=0,
        ),
        interpret=device().platform == "cpu",
        name="ragged_dot_tn",
    )(tiles.group, tiles.first, tiles.end, *spans(group_sizes, tokens), d_out, x)


def _sums_of_products_kernel(
    sizes: dict[str, int],
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    group_start_ref: Any,
    group_end_ref: Any,
    d_out_ref: Any,
    x_ref: Any,
    dw_ref: Any,
    own_d_out_ref: Any,
    own_x_ref: Any,
    sum_ref: Any,
) -> None:
    i, piece = pl.program_id(2), sizes["piece"]
    group, first, end = group_ref[i], first_ref[i], end_ref[i]

    @pl.when(first == group_start_ref[group])
    def begin() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def add(d_out: Any, x: Any) -> None:
        def to(j: Array, _: None) -> None:
            out = pl.ds(pl.multiple_of(j * sizes["pass"], sizes["pass"]), sizes["pass"])
            sum_ref[out, :] += _product(d_out[:, out], x[...], axes=(0, 0))

        lax.fori_loop(0, d_out.shape[1] // sizes["pass"], to, None)

    def multiply(start: Array, own: Callable[..., Array]) -> None:
        block_start = first // len(x_ref) * len(x_ref)
        whole = (block_start + start >= first) & (block_start + start + piece <= end)

        @pl.when(whole)
        def add_all() -> None:
            rows = pl.ds(start, piece)
            add(d_out_ref.at[rows], x_ref.at[rows])

        @pl.when(jnp.logical_not(whole))
        def add_own() -> None:
            # Both sides are masked: zero times a neighbour's NaN would be NaN. So few rows at a time fit the registers.
            few = min(piece, 32)

            def mask(j: Array, _: None) -> None:
                at = pl.multiple_of(j * few, few)
                for ref, own_ref in ((d_out_ref, own_d_out_ref), (x_ref, own_x_ref)):
                    own_ref[pl.ds(at, few), :] = jnp.where(own(start + at, few), ref[pl.ds(start + at, few), :], 0)

            lax.fori_loop(0, piece // few, mask, None)
            add(own_d_out_ref, own_x_ref)

    _for_pieces(multiply, piece, len(x_ref), first, end)

    @pl.when(end == group_end_ref[group])
    def store() -> None:
        dw_ref[...] = sum_ref[...].astype(dw_ref.dtype)


def _lies_transposed(outs: int, ins: int) -> bool:
    """Whether XLA stores such matrices with `outs` innermost, because `outs` fills whole registers and `ins` does not.

    A kernel takes the matrices in that layout: otherwise XLA would copy all of them, there and back.
    """
    return ins % LANES > 0 and outs % LANES == 0


def _sizes(kernel: str, x: Array, groups: int) -> dict[str, int]:
    """Returns the table's sizes, with pieces cut to the rows of a group of mean size."""
    sizes = blocks.sizes(__name__, kernel, x.dtype, "*")
    return {**sizes, "piece": mean_rows(len(x), groups, least=16, most=sizes["piece"])}


def _whole(length: int, part: int, most: int) -> int:
    """Returns the size of a block of whole parts: `most`, or less if the axis is shorter."""
    return min(pl.cdiv(length, part) * part, most)


def _depth_block(sizes: dict[str, int], length: int) -> int:
    """Returns the number of features to sum over at once, which divides the axis: NaN may lie beyond its end."""
    if length <= sizes["depth"]:
        return length
    return max(size for size in range(LANES, sizes["depth"] + 1, LANES) if length % size == 0)


def _for_pieces(do: Callable[..., None], piece: int, block: int, first: Array, end: Array) -> None:
    """Calls `do(start, own)` for each piece of a block that has rows of the tile; `start` is the piece's first row.

    The tile has the rows from `first` up to `end`. `own(start, size)` says which of `size` rows from `start` on are
    the tile's; `start` counts within the block.
    """
    block_start = first // block * block

    def own(start: Array, size: int) -> Bool[Array, "size 1"]:
        rows = block_start + start + lax.broadcasted_iota(jnp.int32, (size, 1), 0)
        return (rows >= first) & (rows < end)

    def step(i: Array, _: None) -> None:
        do(pl.multiple_of(i * piece, piece), own)

    lax.fori_loop((first - block_start) // piece, (end - block_start + piece - 1) // piece, step, None)


def _slices(length: int, size: int) -> list[slice]:
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """Multiplies, summing over these axes."""
    dimensions = (((axes[0],), (axes[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(x, y, dimensions, precision=precision, preferred_element_type=jnp.float32)
