"""Products with a quantised matrix for TPUs: one Pallas kernel, for float rows and for quantised ones.

One program multiplies a block of rows by a block of columns, over a part of the features. The sum stays in VMEM until
all parts are added, and is then scaled and stored. Scales by blocks have to be applied earlier: 128 features are
multiplied at a time, and their product is scaled before it is added. A block is processed in strips of columns, so that
intermediate results fit the registers.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels.backends import blocks
from kernels.backends.device import device, elsewhere
from kernels.quantized_matmul import shared
from kernels.quantized_matmul.quantize import BLOCK, Quantized, whole_pieces
from kernels.quantized_matmul.shared import INT32_TERMS, Formula, Kernels, Matrix
from kernels.stacked import Stacked, read


PLATFORMS = ("tpu",)
RANK = 2

STRIP = 256  # columns of a strip, and features that are multiplied at a time if they share a scale
HAS_FLOAT8 = "TPU7x"  # the kind of device whose matrix unit multiplies float8; others get bfloat16


def refusal(x: Float[Array, "*batch in"], w: Matrix, _: Array | None, *, formula: Formula) -> str | None:
    """Returns why this implementation cannot take these arguments of `quantized_matmul`, or None if it can."""
    if formula.granularity == "mx":
        return "it has no scales for 32 neighbours"
    refusal = elsewhere("tpu") or shared.refusal(x, w)
    both = formula.activations or formula.gradients == "quantized"
    if refusal is None and formula.dtype == jnp.int8 and both and formula.granularity != "block":
        terms = max(x.size // x.shape[-1], *w.shape)
        return f"it sums up int8 in int32, which {terms} terms may overflow" if terms > INT32_TERMS else None
    return refusal


@functools.partial(jax.jit, static_argnames="formula")  # so that calls outside jit compile once, too
def quantized_matmul(
    x: Float[Array, "*batch in"], w: Matrix, scale: Array | None, *, formula: Formula
) -> Float[Array, "*batch out"]:
    """Computes `kernels.int8_matmul` or `kernels.fp8_matmul` on a TPU's matrix unit."""
    return shared.quantized_matmul(Kernels(_weight_only, _both), formula, x, w, scale)


def _weight_only(x: Array, w: Quantized, dtype: DTypeLike) -> Array:
    return _product("weight_only", x, None, w, dtype)


def _both(x: Quantized, w: Quantized, dtype: DTypeLike) -> Array:
    return _product("both", x.values, x.scale, w, dtype)


def _product(name: str, x: Array, x_scale: Array | None, w: Quantized, dtype: DTypeLike) -> Array:
    batch, columns = x.shape[:-1], w.values.shape[0]
    x = whole_pieces(x.reshape(-1, x.shape[-1]))
    rows, features = x.shape
    w_values = Stacked.of(w.values if w.values.shape[1] == features else whole_pieces(read(w.values)))
    sizes = blocks.sizes(__name__, name, x.dtype, "blocks" if w.by_pieces else "*")
    row_block, column_block = min(sizes["rows"], rows), min(sizes["columns"], columns)
    depth = next(size for size in range(sizes["depth"], 0, -BLOCK) if features % size == 0)
    strip = STRIP if column_block % STRIP == 0 else column_block
    steps, pieces = features // depth, depth // BLOCK

    # The scales that a step reads have to be contiguous: those of w are [step, pieces of the step, columns], those of x
    # [step, rows, pieces of the step]. Scales that do not change along a row are one piece, which all steps read.
    if w.by_pieces:
        at = lambda step: step
        w_scale = jnp.repeat(w.scale.T, BLOCK, axis=1)[:, :columns].reshape(steps, pieces, columns)
        by_step = lambda scale: scale.reshape(rows, steps, pieces).swapaxes(0, 1)
    else:
        at, pieces = lambda step: 0, 1
        w_scale = jnp.broadcast_to(w.scale, columns)[None, None, :]
        by_step = lambda scale: jnp.broadcast_to(scale.reshape(-1, 1), (rows, 1))[None]
    operands = [x, w_values.stack, w_scale]
    specs = [
        pl.BlockSpec((row_block, depth), lambda i, j, step, _: (i, step)),
        pl.BlockSpec((None, column_block, depth), lambda i, j, step, layer: (layer[0], j, step)),
        pl.BlockSpec((None, pieces, column_block), lambda i, j, step, _: (at(step), 0, j)),
    ]
    if x_scale is not None:
        operands.append(by_step(x_scale))
        specs.append(pl.BlockSpec((None, row_block, pieces), lambda i, j, step, _: (at(step), i, 0)))

    integers = x.dtype == jnp.int8 and not w.by_pieces
    out = pl.pallas_call(
        functools.partial(_kernel, w.by_pieces, strip),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(pl.cdiv(rows, row_block), pl.cdiv(columns, column_block), steps),
            in_specs=specs,
            out_specs=pl.BlockSpec((row_block, column_block), lambda i, j, step, _: (i, j)),
            scratch_shapes=[
                pltpu.VMEM((row_block, column_block), jnp.int32 if integers else jnp.float32),
                pltpu.VMEM((row_block, strip), jnp.float32),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((rows, columns), dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * features * columns,
            bytes_accessed=x.nbytes + columns * features + rows * columns * jnp.dtype(dtype).itemsize,
            transcendentals=0,
        ),
        interpret=device().platform == "cpu",
        name=f"matmul_{name}",
    )(w_values.layer[None], *operands)
    return out.reshape(*batch, columns)


def _kernel(by_pieces: bool, strip: int, _: Any, x_ref: Any, w_ref: Any, w_scale_ref: Any, *others: Any) -> None:
    *x_scale_ref, out_ref, sum_ref, row_scale_ref = others  # float rows have no scale
    depth, columns = x_ref.shape[1], out_ref.shape[1]
    part = STRIP if depth % STRIP == 0 and not by_pieces else BLOCK

    def set_scale(i: int | Array) -> None:
        """Writes the scale of each row for piece `i`, broadcast over a strip, to VMEM, to save registers."""
        for ref in x_scale_ref:
            this = lax.broadcasted_iota(jnp.int32, ref.shape, 1) == i
            scale = jnp.sum(jnp.where(this, ref[...], 0), axis=1, keepdims=True)
            row_scale_ref[...] = jnp.broadcast_to(scale, row_scale_ref.shape)

    def scaled(product: Array, i: int | Array, columns: Any) -> Array:
        product = product.astype(jnp.float32) * w_scale_ref[pl.ds(i, 1), columns]
        return product * row_scale_ref[...] if x_scale_ref else product

    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @_for_each(part, of=depth)
    def _(i: Array, features: Any) -> None:
        if by_pieces:
            set_scale(i)

        @_for_each(strip, of=columns)
        def _(_: Array, columns: Any) -> None:
            product = _dot(x_ref[:, features], w_ref[columns, features])
            sum_ref[:, columns] += scaled(product, i, columns) if by_pieces else product

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _() -> None:
        if not by_pieces:
            set_scale(0)

        @_for_each(strip, of=columns)
        def _(_: Array, columns: Any) -> None:
            out = sum_ref[:, columns]
            out_ref[:, columns] = (out if by_pieces else scaled(out, 0, columns)).astype(out_ref.dtype)


def _for_each(size: int, *, of: int) -> Callable[[Callable[[Array, Any], None]], None]:
    """Decorates a function, and calls it with the index and the slice of each part of `size`, up to `of`."""

    def loop(body: Callable[[Array, Any], None]) -> None:
        pl.loop(0, of // size)(lambda i: body(i, pl.ds(pl.multiple_of(i * size, size), size)))

    return loop


def _dot(x: Array, w: Array) -> Array:
    """Multiplies, summing over the last axes. Casts to bfloat16 lose nothing: it holds every int8 and float8."""
    float8 = x.dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2)
    if float8 and device().kind != HAS_FLOAT8:
        x = x.astype(jnp.bfloat16)
    if x.dtype.itemsize > 1:
        w = w.astype(x.dtype)
    return lax.dot_general(
        x, w, (((1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT,
        preferred_element_type=jnp.int32 if x.dtype == jnp.int8 else jnp.float32,
    )  # fmt: skip
