"""Grouped matrix products (each group of rows times its matrix), for NVIDIA GPUs, in Pallas-Triton.

XLA cuts the rows beforehand into tiles of one group each, of at most `rows` rows. One program multiplies one tile by
one block of its group's matrix, block by block along the features that are summed over. The rows without a group are
one more group at the end: its tiles sum nothing, and store zeros. The grid has room for the largest possible number of
tiles; tiles left over have no rows to store.

For the gradient of the matrices, one program computes one block of one group's matrix, and loops over the group's rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels.backends import blocks, triton
from kernels.backends.device import elsewhere
from kernels.backends.dot8 import dot8
from kernels.backends.triton import Listed, Side, Sought, load_block, span, store_block
from kernels.coded import Coded
from kernels.coded_matmul import triton as coded_triton
from kernels.ragged_dot import shared
from kernels.ragged_dot.shared import Matrices, Rows
from kernels.stacked import Stacked
from kernels.tiles import mean_rows, spans


PLATFORMS = ("gpu",)
RANK = 2

BAND = 8  # tiles of rows that are multiplied by the same columns at about the same time
SHALLOW = 1024  # up to this many terms of a sum, small programs are better: one multiplies while another stores


def refusal(x: Rows, w: Matrices, _: Int[Array, " groups"]) -> str | None:
    """Returns why this implementation cannot take these arguments of `ragged_dot`, or None if it can."""
    for name, side in (("x", x), ("w", w)):
        if side.dtype.itemsize == 1 and 2**31 < side.size <= 2**32:
            return f"Pallas-Triton would address {name}, of 2 to 4 GB in 8 bits, by too few bits"
    least = (8, 9) if x.dtype == jnp.float8_e4m3fn else (8, 0)  # earlier NVIDIA GPUs have no float8
    return elsewhere("gpu", least) or shared.refusal(x, w)


@jax.jit  # so that calls outside jit compile once, too
def ragged_dot(x: Rows, w: Matrices, group_sizes: Int[Array, " groups"]) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` in Triton."""
    return shared.ragged_dot(shared.Kernels(_rows_times_matrices, _sums_of_products), x, w, group_sizes)


def _rows_times_matrices(x: Array, w: Matrices, group_sizes: Array, axis: int) -> Array:
    if isinstance(w, Coded):
        if axis == 2 and coded_triton.refusal(x, w) is None:
            return coded_triton.grouped(x, w, group_sizes)
        w = w.read()
    (tokens, depth), groups, columns = x.shape, w.shape[0], w.shape[3 - axis]
    rows = mean_rows(tokens, groups, least=triton.SMALLEST, most=128)
    shape_class = f"rows{rows}" if rows < 128 else "shallow" if depth <= SHALLOW else "deep"
    sizes = blocks.sizes(__name__, "int8" if w.dtype == jnp.int8 else "matrices", x.dtype, shape_class)
    tiles = triton.tiles(group_sizes, tokens, sizes["rows"])

    # Programs start along the grid's first axis, then along its second. So a band of rows takes one block of columns
    # after another: both sides of the products that run at a time are a few megabytes, and stay in the L2 cache.
    band = min(BAND, tiles.most)
    return triton.launch(
        functools.partial(_rows_times_matrices_kernel, sizes, axis),
        tiles,
        x,
        triton.addressable(w),
        name="ragged_dot_out" if axis == 2 else "ragged_dot_dx",
        grid=(band, pl.cdiv(columns, sizes["columns"]), pl.cdiv(tiles.most, band)),
        results=jax.ShapeDtypeStruct((tokens, columns), shared.result_dtype(x)),
        warps=sizes["warps"],
        stages=sizes["stages"],
        cost=pl.CostEstimate(
            flops=2 * tokens * depth * columns,
            bytes_accessed=(x.size + tokens * columns) * x.dtype.itemsize + w.size * w.dtype.itemsize,
            transcendentals=0,
        ),
    )


def _rows_times_matrices_kernel(
    sizes: dict[str, int],
    axis: int,
    tiles: Listed | Sought,
    x_ref: Any,
    w_ref: Stacked,
    out_ref: Any,
) -> None:
    (_, depth), (_, columns), (groups, _, _) = x_ref.shape, out_ref.shape, w_ref.shape
    w_stack_ref, layer = w_ref.stack, w_ref.layer[...]
    tile = tiles.tile(pl.program_id(2) * pl.num_programs(0) + pl.program_id(0))  # the last band may have too few
    row = span(tile.first, sizes["rows"], tile.end)
    column = Side.of(pl.program_id(1), sizes["columns"], columns)

    dot = dot8 if x_ref.dtype.itemsize == 1 else functools.partial(triton.dot, over=(1, axis - 1))

    def add(step: Array, out: Array) -> Array:
        inner = Side.of(step, sizes["depth"], depth)
        x = load_block(x_ref, row, inner)
        w = load_block(w_stack_ref, *((column, inner) if axis == 2 else (inner, column)), layer, tile.group)
        return out + dot(x, w.astype(x.dtype))

    steps = pl.cdiv(depth, sizes["depth"]) * (tile.group < groups).astype(jnp.int32)
    sums = jnp.int32 if x_ref.dtype == jnp.int8 else jnp.float32
    out = lax.fori_loop(0, steps, add, jnp.zeros((sizes["rows"], sizes["columns"]), sums))
    store_block(out_ref, out, row, column)


def _sums_of_products(d_out: Array, x: Array, group_sizes: Array) -> Array:
    (tokens, outs), (_, ins), groups = d_out.shape, x.shape, len(group_sizes)
    shape_class = "shallow" if tokens <= SHALLOW * groups else "deep"
    sizes = blocks.sizes(__name__, "sums", x.dtype, shape_class)
    return triton.launch(
        functools.partial(_sums_of_products_kernel, sizes),
        *spans(group_sizes, tokens),
        d_out,
        x,
        name="ragged_dot_dw",
        grid=(pl.cdiv(ins, sizes["in"]), pl.cdiv(outs, sizes["out"]), groups),
        results=jax.ShapeDtypeStruct((groups, outs, ins), x.dtype),
        warps=sizes["warps"],
        stages=sizes["stages"],
        cost=pl.CostEstimate(
            flops=2 * tokens * outs * ins,
            bytes_accessed=(d_out.size + x.size + groups * outs * ins) * x.dtype.itemsize,
            transcendentals=0,
        ),
    )


def _sums_of_products_kernel(
    sizes: dict[str, int], start_ref: Any, end_ref: Any, d_out_ref: Any, x_ref: Any, dw_ref: Any
) -> None:
    (_, outs), (_, ins), group = d_out_ref.shape, x_ref.shape, pl.program_id(2)
    start, end = start_ref[group], end_ref[group]
    out, in_ = Side.of(pl.program_id(1), sizes["out"], outs), Side.of(pl.program_id(0), sizes["in"], ins)

    def add(step: Array, dw: Array) -> Array:
        # Both sides are masked beyond the group: zero times a neighbour's NaN would be NaN.
        row = span(start + step * sizes["rows"], sizes["rows"], end)
        return dw + triton.dot(load_block(d_out_ref, row, out), load_block(x_ref, row, in_), over=(0, 0))

    dw = jnp.zeros((sizes["out"], sizes["in"]), jnp.float32)
    steps = (end - start + sizes["rows"] - 1) // sizes["rows"]
    dw = lax.fori_loop(0, steps, add, dw)
    store_block(dw_ref, dw, out, in_, group)
