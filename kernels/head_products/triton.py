"""Products of a few rows with each head's part of a matrix, for NVIDIA GPUs, in Pallas-Triton.

One program multiplies a head's features by a block of its part. cuBLAS needs the parts of all heads, and the features
that are multiplied, as arrays of their own: XLA copies half of the matrix for each of latent attention's two products.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels.backends.device import elsewhere
from kernels.backends.triton import SMALLEST, Side, dot, launch, load_block, store_block
from kernels.head_products import reference
from kernels.stacked import Stacked


PLATFORMS = ("gpu",)
RANK = 2

COLUMNS, DEPTH = 64, 128  # of a block: outputs, and the features that are summed in a step
WARPS, STAGES = 4, 3


def refusal(
    x: Float[Array, "batch seq heads features"],
    matrix: Float[Array, "rows latent"] | Stacked,
    first: int,
    size: int,
    *,
    to_latent: bool,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `head_products`, or None if it can."""
    if x.dtype.itemsize != 2 or matrix.dtype != x.dtype:
        return f"it multiplies numbers of 16 bits, and x is {x.dtype} and the matrix {matrix.dtype}"
    if not x.size or not size:
        return "it needs a row and a feature at least"
    if (rows := x.shape[0] * x.shape[1]) > SMALLEST:
        return f"it takes up to {SMALLEST} rows, and x has {rows}"
    return elsewhere("gpu")


def head_products(
    x: Float[Array, "batch seq heads features"],
    matrix: Float[Array, "rows latent"] | Stacked,
    first: int,
    size: int,
    *,
    to_latent: bool,
) -> Float[Array, "batch seq heads _"]:
    """Computes `kernels.head_products`."""
    return _differentiable(x, matrix, first, size, to_latent)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def _differentiable(x: Array, matrix: Array | Stacked, first: int, size: int, to_latent: bool) -> Array:
    return _products(x, matrix, first, size, to_latent)


def _backward(first: int, size: int, to_latent: bool, arrays: Any, gradient: Array) -> Any:
    formula = lambda x, matrix: reference.head_products(x, matrix, first, size, to_latent=to_latent)
    return jax.vjp(formula, *arrays)[1](gradient)


_differentiable.defvjp(lambda x, matrix, *rest: (_differentiable(x, matrix, *rest), (x, matrix)), _backward)


@functools.partial(jax.jit, static_argnums=(2, 3, 4))  # so that calls outside jit compile once, too
def _products(x: Array, matrix: Array | Stacked, first: int, size: int, to_latent: bool) -> Array:
    *batch, heads, features = x.shape
    rows, latent = x.size // (heads * features), matrix.shape[1]
    out = latent if to_latent else size
    y = launch(
        functools.partial(_kernel, first, size, to_latent, heads),
        x.reshape(rows, heads * features),
        Stacked.of(matrix),
        name="head_products",
        grid=(pl.cdiv(out, COLUMNS), heads),
        results=jax.ShapeDtypeStruct((rows, heads * out), x.dtype),
        warps=WARPS,
        stages=STAGES,
        cost=pl.CostEstimate(
            flops=2 * rows * heads * size * latent,
            bytes_accessed=(heads * size * latent + rows * heads * (size + latent)) * x.dtype.itemsize,
            transcendentals=0,
        ),
    )
    return y.reshape(*batch, heads, out)


def _kernel(first: int, size: int, to_latent: bool, heads: int, x_ref: Any, w_ref: Stacked, out_ref: Any) -> None:
    (rows, outs), (_, all_rows, latent) = out_ref.shape, w_ref.stack.shape
    (column, head), layer = (pl.program_id(0), pl.program_id(1)), w_ref.layer[...]
    row, outputs = Side.of(jnp.int32(0), SMALLEST, rows), Side.of(column, COLUMNS, outs // heads)

    def add(step: Array, y: Array) -> Array:
        summed = Side.of(step, DEPTH, size if to_latent else latent)
        of_head, features = (summed, outputs) if to_latent else (outputs, summed)
        x = load_block(x_ref, row, _from(head * (x_ref.shape[1] // heads), summed))
        w = load_block(w_ref.stack, _from(head * (all_rows // heads) + first, of_head), features, layer)
        return y + dot(x, w, (1, 0 if to_latent else 1))

    steps = pl.cdiv(size if to_latent else latent, DEPTH)
    y = lax.fori_loop(0, steps, add, jnp.zeros((SMALLEST, COLUMNS), jnp.float32))
    store_block(out_ref, y, row, _from(head * (outs // heads), outputs))


def _from(start: Array, side: Side) -> Side:
    """Returns a side whose indices count from `start` on."""
    return Side(pl.ds(start + side.indices.start, side.indices.size), side.own)
