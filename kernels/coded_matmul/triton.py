"""Products with matrices in few bits for NVIDIA GPUs, in Pallas-Triton: weights become numbers in registers.

XLA cuts the rows beforehand into tiles of one group each, as for `kernels.ragged_dot`. One program multiplies one tile
by one block of its group's matrix. The numbers of four bits are looked up in a table of 16, which stays in the L1
cache. Where rows allow it, codes are loaded as words of 32 bits. The matrix is the left operand, which Hopper's tensor
cores take from registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int, Shaped

from kernels.backends import blocks, triton
from kernels.backends.device import elsewhere
from kernels.backends.triton import Listed, Side, Sought, load_block, span, store_block
from kernels.coded import TABLES, Coded, factors
from kernels.coded_matmul import shared
from kernels.stacked import Stacked
from kernels.tiles import mean_rows


PLATFORMS = ("gpu",)
RANK = 2

BAND = 8  # tiles of rows that are multiplied by the same columns at about the same time
WORD = 4  # bytes
SHIFTS = {1: (4, 0), WORD: (4, 0, 12, 8, 20, 16, 28, 24)}  # of each weight, by the bytes of a number; the lowest first


def refusal(x: Float[Array, "*batch in"], w: Coded) -> str | None:
    """Returns why this implementation cannot take these arguments of `coded_matmul`, or None if it can."""
    least = (8, 9) if w.code == "float8" else (8, 0)  # earlier NVIDIA GPUs have no float8
    if why := elsewhere("gpu", least) or shared.refusal(x, w):
        return why
    block = w.shape[-1] // w.scale.shape[-1]
    return f"it takes blocks of a power of two, and these have {block} weights" if block & (block - 1) else None


@jax.jit  # so that calls outside jit compile once, too
def coded_matmul(x: Float[Array, "*batch in"], w: Coded) -> Float[Array, "*batch out"]:
    """Computes `kernels.coded_matmul` in Triton."""
    return shared.product(grouped, x, w)


def grouped(x: Float[Array, "tokens in"], w: Coded, group_sizes: Int[Array, " groups"]) -> Float[Array, "tokens out"]:
    """Implements `shared.Grouped`."""
    (tokens, features), (groups, columns, _) = x.shape, w.shape
    values, scale = (Stacked.of(a) for a in (w.values, w.scale))
    block = values.shape[-1] // scale.shape[-1]
    if w.code in TABLES and block % WORD == 0:
        words = values.stack.reshape(*values.stack.shape[:-1], -1, WORD)  # XLA makes no copy
        values, block = Stacked(lax.bitcast_convert_type(words, jnp.uint32), values.layer), block // WORD
    shifts = SHIFTS[values.dtype.itemsize] if w.code in TABLES else (None,)
    rows = mean_rows(tokens, groups, least=triton.SMALLEST, most=shared.MOST_ROWS)
    sizes = dict(blocks.sizes(__name__, w.code if w.code == "float8" else "table", x.dtype, f"rows{rows}"))
    sizes["depth"] = max(sizes["depth"], block)
    tiles = triton.tiles(group_sizes, tokens, sizes["rows"])
    band = min(BAND, tiles.most)
    return triton.launch(
        functools.partial(_kernel, sizes, sizes["depth"] // block, shifts),
        tiles,
        shared.by_phases(x, len(shifts)),
        triton.addressable(values),
        scale,
        jnp.asarray(TABLES.get(w.code, np.zeros(16, np.float32))),
        name="coded_matmul",
        grid=(band, pl.cdiv(columns, sizes["columns"]), pl.cdiv(tiles.most, band)),
        results=jax.ShapeDtypeStruct((tokens, columns), x.dtype),
        warps=sizes["warps"],
        stages=sizes["stages"],
        cost=pl.CostEstimate(
            flops=2 * tokens * features * columns,
            bytes_accessed=(x.size + tokens * columns) * x.dtype.itemsize + w.values.size + scale.size,
            transcendentals=0,
        ),
    )


def _kernel(
    sizes: dict[str, int],
    blocks: int,
    shifts: tuple[int | None, ...],
    tiles: Listed | Sought,
    x_ref: Any,
    values_ref: Stacked,
    scale_ref: Stacked,
    table_ref: Any,
    out_ref: Any,
) -> None:
    depth, columns = values_ref.shape[-1], out_ref.shape[1]
    layers, groups = (values_ref.layer[...], scale_ref.layer[...]), values_ref.stack.shape[1]
    tile = tiles.tile(pl.program_id(2) * pl.num_programs(0) + pl.program_id(0))  # the last band may have too few
    row = span(tile.first, sizes["rows"], tile.end)
    column = Side.of(pl.program_id(1), sizes["columns"], columns)

    def add(step: Array, out: Array) -> Array:
        piece = Side.of(step, sizes["depth"], depth)
        values = load_block(values_ref.stack, column, piece, layers[0], tile.group)
        by_block = Side.of(step, blocks, scale_ref.stack.shape[-1])
        scale = factors(load_block(scale_ref.stack, column, by_block, layers[1], tile.group))
        scale = jnp.broadcast_to(scale[:, :, None], (*scale.shape, sizes["depth"] // blocks)).reshape(values.shape)
        for phase, shift in enumerate(shifts):
            numbers = values.astype(jnp.float32) if shift is None else _looked_up(table_ref, values >> shift)
            features = pl.ds(phase * depth + piece.indices.start, sizes["depth"])
            x = load_block(x_ref, row, Side(features, piece.own))
            out += triton.dot((numbers * scale).astype(x.dtype), x, over=(1, 1))
        return out

    steps = pl.cdiv(depth, sizes["depth"]) * (tile.group < groups).astype(jnp.int32)
    out = lax.fori_loop(0, steps, add, jnp.zeros((sizes["columns"], sizes["rows"]), jnp.float32))
    store_block(out_ref, out.T, row, column)


def _looked_up(table_ref: Any, codes: Shaped[Array, "columns depth"]) -> Float[Array, "columns depth"]:
    return triton.load(table_ref.at[(codes & 15).astype(jnp.int32)])
