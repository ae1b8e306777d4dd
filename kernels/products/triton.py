"""Products of a few rows with several matrices, for NVIDIA GPUs, in Pallas-Triton: one kernel for all matrices.

It takes as long as reading the matrices takes, if enough of their bytes are on the way at a time: the H200's 4.8 TB/s
times some 0.8 microseconds are 4 MB, or 29 KB for each of its 132 multiprocessors. So a program loads blocks of a
matrix three steps ahead of its sums (24 or 48 KB), and blocks are halved where there would be too few programs. Sums
are not split over programs: that would take a second kernel to add them up.

The matrix is the left operand, whose 32 or 64 rows fill the tiles of tensor cores. x is padded to 16 rows.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels.backends import blocks
from kernels.backends.device import elsewhere
from kernels.backends.triton import SMALLEST, Side, dot, launch, load_block, store_block
from kernels.products import reference
from kernels.stacked import Stacked


PLATFORMS = ("gpu",)
RANK = 2

MOST_ROWS = SMALLEST  # more rows are another block for Triton, and cuBLAS's tiles suit them


def refusal(x: Float[Array, "*batch in"], matrices: tuple[Float[Array, "_ in"] | Stacked, ...]) -> str | None:
    """Returns why this implementation cannot take these arguments of `products`, or None if it can."""
    if x.dtype.itemsize != 2:
        return f"it multiplies numbers of 16 bits, and x is {x.dtype}"
    if not x.size or not all(w.size for w in matrices):
        return "it needs a row, a feature and an output at least"
    if (rows := x.size // x.shape[-1]) > MOST_ROWS:
        return f"it takes up to {MOST_ROWS} rows, and x has {rows}"
    return elsewhere("gpu")


@jax.custom_vjp
def products(
    x: Float[Array, "*batch in"], matrices: tuple[Float[Array, "_ in"] | Stacked, ...]
) -> tuple[Float[Array, "*batch _"], ...]:
    """Computes `kernels.products` in Triton."""
    return _products(x, matrices)


products.defvjp(
    lambda x, matrices: (products(x, matrices), (x, matrices)),
    lambda arrays, d_outs: jax.vjp(reference.products, *arrays)[1](d_outs),
)


@jax.jit  # so that calls outside jit compile once, too
def _products(x: Array, matrices: tuple[Array | Stacked, ...]) -> tuple[Array, ...]:
    rows = x.reshape(-1, x.shape[-1])
    outs = [w.shape[0] for w in matrices]
    sizes = blocks.sizes(__name__, "rows", x.dtype, "*")
    columns = sizes["columns"]
    while columns > sizes["least_columns"] and sum(pl.cdiv(out, columns) for out in outs) < sizes["programs"]:
        columns //= 2
    ys = launch(
        functools.partial(_kernel, columns, sizes["depth"], len(outs)),
        rows,
        *(Stacked.of(w) for w in matrices),
        name="products",
        grid=(sum(pl.cdiv(out, columns) for out in outs),),
        results=[jax.ShapeDtypeStruct((len(rows), out), x.dtype) for out in outs],
        warps=sizes["warps"],
        stages=sizes["stages"],
        cost=pl.CostEstimate(
            flops=2 * rows.size * sum(outs),
            bytes_accessed=(rows.size + (rows.shape[1] + len(rows)) * sum(outs)) * x.dtype.itemsize,
            transcendentals=0,
        ),
    )
    return tuple(y.reshape(*x.shape[:-1], -1) for y in ys)


def _kernel(columns: int, step_depth: int, count: int, x_ref: Any, *refs: Any) -> None:
    """Multiplies the rows by a block of one of the matrices."""
    (rows, depth), first = x_ref.shape, 0
    row = Side.of(jnp.int32(0), SMALLEST, rows)
    for w_ref, out_ref in zip(refs[:count], refs[count:], strict=True):
        number = pl.program_id(0) - first
        blocks_of_w = pl.cdiv(out_ref.shape[1], columns)
        first += blocks_of_w

        @pl.when((number >= 0) & (number < blocks_of_w))
        def _(w_ref: Stacked = w_ref, out_ref: Any = out_ref, number: Array = number) -> None:
            column, layer = Side.of(number, columns, out_ref.shape[1]), w_ref.layer[...]

            def add(step: Array, out: Array) -> Array:
                piece = Side.of(step, step_depth, depth)
                return out + dot(load_block(w_ref.stack, column, piece, layer), load_block(x_ref, row, piece), (1, 1))

            zeros = jnp.zeros((columns, SMALLEST), jnp.float32)
            out = lax.fori_loop(0, pl.cdiv(depth, step_depth), add, zeros)
            store_block(out_ref, out.T, row, column)
