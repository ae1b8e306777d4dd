"""Products with a quantised matrix for NVIDIA GPUs, in Pallas-Triton: of two quantised sides, or of float rows.

If both sides are quantised by blocks, one program computes one block of the output. It multiplies 128 features at a
time, scales the product by the scales of that piece of the rows and that block of the matrix, and adds it to a sum in
float32. This also makes float8 exact enough: the tensor cores alone would accumulate in fewer bits (DeepSeek-V3,
arXiv:2412.19437, section 3.3.2).

Two sides whose rows have one scale each add up in int32, or float8 in float32, 128 products after another as above. A
program scales its sums before it stores them, in the output's dtype; XLA would write all sums, and read them in a
second kernel to scale them. Whole tensors in float8, of gradients, are left to XLA, whose product takes their scales.

Float rows are multiplied by a matrix that stays 8 bits wide until it is in registers. So for a few rows, reading the
matrix takes half the time that bfloat16 takes. Hopper's tensor cores take only the left operand of a product from
registers. So the matrix is the left operand, and a program computes a block of the transposed output.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels.backends import blocks, triton
from kernels.backends.device import elsewhere
from kernels.backends.dot8 import dot8
from kernels.backends.triton import Side, load_block, store_block
from kernels.mesh import free, split_tokens, splits_tokens_alone
from kernels.quantized_matmul import shared, xla
from kernels.quantized_matmul.quantize import BLOCK, Quantized
from kernels.quantized_matmul.shared import INT32_TERMS, Formula, Kernels, Matrix
from kernels.stacked import Stacked


PLATFORMS = ("gpu",)
RANK = 2
MESH = True  # if its devices differ in tokens

BAND = 8  # blocks of rows that take the same columns at about the same time


def refusal(x: Float[Array, "*batch in"], w: Matrix, _: Array | None, *, formula: Formula) -> str | None:
    """Returns why this implementation cannot take these arguments of `quantized_matmul`, or None if it can."""
    both = formula.activations or formula.gradients == "quantized"
    if math.prod(free().values()) > 1:
        floats = formula.gradients == "float" or formula.gradients_by_tensor
        if not (formula.granularity == "channel" and formula.activations and floats):
            return "on a mesh it multiplies two sides by channel alone, whose backward pass is XLA's"
        if not splits_tokens_alone(x.shape):
            return "on a mesh each device must have its own tokens of rows [batch, seq, in], and no axis may be tensor"
    if formula.granularity == "mx":
        return "it has no scales for 32 neighbours"
    rows = x.size // x.shape[-1] if x.size else 0
    if both and formula.granularity != "block":
        if formula.dtype != jnp.int8 and formula.granularity != "channel":
            return f"it multiplies two sides in float8 by blocks or channels, not by {formula.granularity}"
        if formula.dtype == jnp.int8 and (terms := max(rows, *w.shape)) > INT32_TERMS:
            return f"it sums up int8 in int32, which {terms} terms may overflow"
    in_8_bits = {"w": w.size, "x": both * x.size, "the result": (formula.gradients == "quantized") * rows * w.shape[0]}
    for name, size in in_8_bits.items():
        if 2**31 < size <= 2**32:
            return f"Pallas-Triton would address {name}, of 2 to 4 GB in 8 bits, by too few bits"
    least = (8, 9) if formula.dtype == jnp.float8_e4m3fn else (8, 0)  # earlier NVIDIA GPUs have no float8
    return elsewhere("gpu", least) or shared.refusal(x, w)


@functools.partial(jax.jit, static_argnames="formula")  # so that calls outside jit compile once, too
def quantized_matmul(
    x: Float[Array, "*batch in"], w: Matrix, scale: Array | None, *, formula: Formula
) -> Float[Array, "*batch out"]:
    """Computes `kernels.int8_matmul` or `kernels.fp8_matmul` in Triton."""
    return shared.quantized_matmul(Kernels(_weight_only, _both), formula, x, w, scale)


def _both(x: Quantized, w: Quantized, dtype: DTypeLike) -> Array:
    if x.scale.ndim == 0 and x.values.dtype != jnp.int8:
        return xla.both(x, w, dtype)
    return split_tokens(functools.partial(_multiply, dtype), x, w)


def _multiply(dtype: DTypeLike, x: Quantized, w: Quantized) -> Array:
    x_values = x.values.reshape(-1, x.values.shape[-1])
    rows, columns = len(x_values), w.values.shape[0]
    size_class = "rows64" if rows <= 64 else "rows128"
    if w.by_pieces:
        sizes = blocks.sizes(__name__, "both", w.values.dtype, size_class)
        # x_scale is transposed, so that the scales that a program reads at a time are contiguous.
        x_scale = x.scale.reshape(rows, -1).T
        out = _launch("matmul_both", _both_kernel, sizes, dtype, x_values, x_scale, w=w)
    else:
        sizes = blocks.sizes(__name__, "scaled", w.values.dtype, size_class)
        x_scale = jnp.broadcast_to(x.scale.reshape(-1), rows)
        w = Quantized(w.values, jnp.broadcast_to(w.scale, columns))
        out = _launch("matmul_scaled", _scaled_kernel, sizes, dtype, x_values, x_scale, w=w)
    return out.reshape(*x.values.shape[:-1], columns)


def _both_kernel(
    sizes: dict[str, int], x_ref: Any, x_scale_ref: Any, w_ref: Stacked, w_scale_ref: Any, out_ref: Any
) -> None:
    row, column = _output_block(sizes, out_ref)
    layer = w_ref.layer[...]

    def add_piece(i: Array, out: Array) -> Array:
        piece = Side.of(i, BLOCK, x_ref.shape[1])
        x, w = load_block(x_ref, row, piece), load_block(w_ref.stack, column, piece, layer)
        product = dot8(x, w)
        x_scale = triton.load(x_scale_ref.at[i, row.indices], row.own)
        scale = x_scale * w_scale_ref[column.indices.start // BLOCK, i]
        return out + product.astype(jnp.float32) * scale[:, None]

    out = jnp.zeros((sizes["rows"], sizes["columns"]), jnp.float32)
    out = lax.fori_loop(0, w_scale_ref.shape[1], add_piece, out)
    store_block(out_ref, out, row, column)


def _scaled_kernel(
    sizes: dict[str, int], x_ref: Any, x_scale_ref: Any, w_ref: Stacked, w_scale_ref: Any, out_ref: Any
) -> None:
    row, _ = _output_block(sizes, out_ref)
    layer = w_ref.layer[...]
    # A product of float8 takes registers of its own, beside the sums. So it is one of half of the columns.
    exact, parts = (jnp.int32, 1) if x_ref.dtype == jnp.int8 else (jnp.float32, 2)
    width = sizes["columns"] // parts
    cut = [Side.of(pl.program_id(1) * parts + n, width, out_ref.shape[1]) for n in range(parts)]

    def add_piece(i: Array, out: tuple[Array, ...]) -> tuple[Array, ...]:
        piece = Side.of(i, BLOCK, x_ref.shape[1])
        x = load_block(x_ref, row, piece)
        w = (load_block(w_ref.stack, column, piece, layer) for column in cut)
        return tuple(out + dot8(x, w) for out, w in zip(out, w, strict=True))

    zeros = tuple(jnp.zeros((sizes["rows"], width), exact) for _ in cut)
    sums = lax.fori_loop(0, pl.cdiv(x_ref.shape[1], BLOCK), add_piece, zeros)
    x_scale = triton.load(x_scale_ref.at[row.indices], row.own)
    for out, column in zip(sums, cut, strict=True):
        w_scale = triton.load(w_scale_ref.at[column.indices], column.own)
        store_block(out_ref, out.astype(jnp.float32) * x_scale[:, None] * w_scale[None, :], row, column)


def _weight_only(x: Array, w: Quantized, dtype: DTypeLike) -> Array:
    rows = x.reshape(-1, x.shape[-1])
    w = Quantized(w.values, w.scale if w.by_pieces else jnp.broadcast_to(w.scale, w.values.shape[0]))
    fitting = max(triton.SMALLEST, min(1 << (len(rows) - 1).bit_length(), 128))
    sizes = blocks.sizes(__name__, "weight_only", x.dtype, f"rows{fitting}")
    out = _launch("matmul_weight_only", _weight_only_kernel, sizes, dtype, rows, w=w)
    return out.reshape(*x.shape[:-1], w.values.shape[0])


def _weight_only_kernel(sizes: dict[str, int], x_ref: Any, w_ref: Stacked, w_scale_ref: Any, out_ref: Any) -> None:
    row, column = _output_block(sizes, out_ref)
    layer = w_ref.layer[...]
    features, by_blocks = x_ref.shape[1], len(w_scale_ref.shape) == 2
    depth = BLOCK if by_blocks else sizes["depth"]

    def add(step: Array, out: Array) -> Array:
        piece = Side.of(step, depth, features)
        x, w = load_block(x_ref, row, piece), load_block(w_ref.stack, column, piece, layer)
        product = triton.dot(w.astype(x.dtype), x, over=(1, 1))
        return out + (product * w_scale_ref[column.indices.start // BLOCK, step] if by_blocks else product)

    out = jnp.zeros((sizes["columns"], sizes["rows"]), jnp.float32)
    out = lax.fori_loop(0, pl.cdiv(features, depth), add, out)
    if not by_blocks:
        out *= triton.load(w_scale_ref.at[column.indices], column.own)[:, None]
    store_block(out_ref, out.T, row, column)


def _launch(
    name: str,
    kernel: Callable[..., None],
    sizes: dict[str, int],
    dtype: DTypeLike,
    x: Array,
    *others: Array,
    w: Quantized,
) -> Array:
    """Runs one program for each block of the output."""
    (rows, depth), columns = x.shape, w.values.shape[0]
    # Programs start along the grid's first axis, then along its second. So a band of rows takes one block of columns
    # after another: both sides of the products that run at a time are a few megabytes, and stay in the L2 cache.
    row_blocks = pl.cdiv(rows, sizes["rows"])
    band = min(BAND, row_blocks)
    return triton.launch(
        functools.partial(kernel, sizes),
        x,
        *others,
        triton.addressable(w.values),
        w.scale,
        name=name,
        grid=(band, pl.cdiv(columns, sizes["columns"]), pl.cdiv(row_blocks, band)),
        results=jax.ShapeDtypeStruct((rows, columns), dtype),
        warps=sizes["warps"],
        stages=sizes["stages"],
        cost=pl.CostEstimate(
            flops=2 * rows * depth * columns,
            bytes_accessed=x.nbytes + columns * depth + rows * columns * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
    )


def _output_block(sizes: dict[str, int], out_ref: Any) -> tuple[Side, Side]:
    """Returns the rows and columns that a program computes. In the last band, all rows beyond the end are masked."""
    i = pl.program_id(2) * pl.num_programs(0) + pl.program_id(0)
    rows, columns = out_ref.shape
    return Side.of(i, sizes["rows"], rows), Side.of(pl.program_id(1), sizes["columns"], columns)
