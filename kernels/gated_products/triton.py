"""The hidden layer of a gated MLP for a few rows, for NVIDIA GPUs, in Pallas-Triton: two products and their formula.

A program computes a block of both products, and the formula's block of them. So the products are never written, and
one kernel starts where products and formula take two, or three in a mixture. As in `kernels.products`, the matrices
are the left operands, x is padded to 16 rows, and blocks are halved where there would be too few programs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels.backends import blocks
from kernels.backends.device import elsewhere
from kernels.backends.triton import SMALLEST, Side, Sought, dot, launch, load_block, span, store_block
from kernels.gated_products import Formula, reference
from kernels.stacked import Stacked
from kernels.tiles import FEW, mean_rows


PLATFORMS = ("gpu",)
RANK = 2


def refusal(
    x: Float[Array, "*batch in"],
    gate: Float[Array, "*groups out in"] | Stacked,
    up: Float[Array, "*groups out in"] | Stacked,
    formula: Formula,
    group_sizes: Int[Array, " groups"] | None,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `gated_products`, or None if it can."""
    if x.dtype.itemsize != 2:
        return f"it multiplies numbers of 16 bits, and x is {x.dtype}"
    if not x.size or not gate.size:
        return "it needs a row, a feature and an output at least"
    rows = x.size // x.shape[-1]
    if group_sizes is None and rows > SMALLEST:
        return f"it takes up to {SMALLEST} rows, and x has {rows}"
    if group_sizes is not None and (rows > FEW or mean_rows(rows, len(group_sizes), least=1, most=FEW) > SMALLEST):
        return f"it takes up to {FEW} rows in groups of {SMALLEST} on average, and x has {rows} in {len(group_sizes)}"
    return elsewhere("gpu")


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def gated_products(
    x: Float[Array, "*batch in"],
    gate: Float[Array, "*groups out in"] | Stacked,
    up: Float[Array, "*groups out in"] | Stacked,
    formula: Formula,
    group_sizes: Int[Array, " groups"] | None,
) -> Float[Array, "*batch out"]:
    """Computes `kernels.gated_products` in Triton."""
    return _gated_products(x, gate, up, formula, group_sizes)


def _backward(formula: Formula, given: Any, d_out: Array) -> Any:
    *arrays, group_sizes = given
    definition = lambda x, gate, up: reference.gated_products(x, gate, up, formula, group_sizes)
    return *jax.vjp(definition, *arrays)[1](d_out), None


gated_products.defvjp(
    lambda x, gate, up, formula, group_sizes: (
        gated_products(x, gate, up, formula, group_sizes),
        (x, gate, up, group_sizes),
    ),
    _backward,
)


@functools.partial(jax.jit, static_argnums=3)  # so that calls outside jit compile once, too
def _gated_products(
    x: Array, gate: Array | Stacked, up: Array | Stacked, formula: Formula, group_sizes: Array | None
) -> Array:
    rows, (outs, features) = x.reshape(-1, x.shape[-1]), gate.shape[-2:]
    sizes = blocks.sizes(__name__, "rows" if group_sizes is None else "groups", x.dtype, "*")
    columns = sizes["columns"]
    while columns > sizes["least_columns"] and pl.cdiv(outs, columns) < sizes["programs"]:
        columns //= 2
    tiles, read = None, 1  # matrices that are read, at most
    if group_sizes is not None:
        tiles = Sought(group_sizes, len(rows), SMALLEST)
        read = min(tiles.most, len(group_sizes))
    y = launch(
        functools.partial(_kernel, columns, sizes["depth"], formula),
        tiles,
        rows,
        Stacked.of(gate),
        Stacked.of(up),
        name="gated_products",
        grid=(pl.cdiv(outs, columns), 1 if tiles is None else tiles.most),
        results=jax.ShapeDtypeStruct((len(rows), outs), x.dtype),
        warps=sizes["warps"],
        stages=sizes["stages"],
        cost=pl.CostEstimate(
            flops=4 * rows.size * outs,
            bytes_accessed=(rows.size + 2 * read * features * outs + len(rows) * outs) * x.dtype.itemsize,
            transcendentals=len(rows) * outs,
        ),
    )
    return y.reshape(*x.shape[:-1], outs)


def _kernel(
    columns: int,
    step_depth: int,
    formula: Formula,
    tiles: Sought | None,
    x_ref: Any,
    gate_ref: Stacked,
    up_ref: Stacked,
    out_ref: Any,
) -> None:
    (rows, depth), outs = x_ref.shape, out_ref.shape[1]
    column, steps = Side.of(pl.program_id(0), columns, outs), pl.cdiv(depth, step_depth)
    if tiles is None:
        row, matrix = Side.of(jnp.int32(0), SMALLEST, rows), ()
    else:
        tile = tiles.tile(pl.program_id(1))
        row, matrix = span(tile.first, SMALLEST, tile.end), (tile.group,)
        steps *= (tile.group < gate_ref.shape[0]).astype(jnp.int32)  # rows without a group sum nothing

    def add(step: Array, sums: list[Array]) -> list[Array]:
        piece = Side.of(step, step_depth, depth)
        x = load_block(x_ref, row, piece)
        blocks = (load_block(w.stack, column, piece, w.layer[...], *matrix) for w in (gate_ref, up_ref))
        return [y + dot(w, x, (1, 1)) for y, w in zip(sums, blocks, strict=True)]

    ys = lax.fori_loop(0, steps, add, [jnp.zeros((columns, SMALLEST), jnp.float32)] * 2)
    rounded = [y.astype(x_ref.dtype).astype(jnp.float32) for y in ys]
    store_block(out_ref, formula(*rounded).T, row, column)
