"""Products with matrices in few bits for TPUs, in Pallas: weights become numbers in VMEM.

As in `kernels.ragged_dot`, rows are cut into tiles where a group ends and where a block of rows ends, and a block is
visited once for each of its tiles. One program dequantises a block of its group's matrix, strip by strip, and then
multiplies the tile by it. A strip's scales are spread over their weights by a product with zeros and ones, which is
exact. Values and scales are each taken in the layout in which XLA keeps them: otherwise it would copy all of them. The
scales of all groups may lie together there, and are then read together.
"""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from kernels.backends import blocks
from kernels.backends.device import device, elsewhere
from kernels.coded import TABLES, Code, Coded, factors
from kernels.coded_matmul import shared
from kernels.stacked import Stacked
from kernels.tiles import Tiles, spans, with_rest


PLATFORMS = ("tpu",)
RANK = 2

VMEM = 64 << 20  # bytes that a kernel may take; the default of 16 MiB is not a TPU's own limit
LANES = 128  # the width of a TPU's registers
STRIP = CHUNK = 128  # outputs, and stored numbers of each, that are dequantised at a time


def refusal(x: Float[Array, "*batch in"], w: Coded) -> str | None:
    """Returns why this implementation cannot take these arguments of `coded_matmul`, or None if it can."""
    why = elsewhere("tpu") or shared.refusal(x, w)
    if why is None and x.dtype == jnp.float16:
        return "a TPU does not compute in float16"
    return why


@jax.jit  # so that calls outside jit compile once, too
def coded_matmul(x: Float[Array, "*batch in"], w: Coded) -> Float[Array, "*batch out"]:
    """Computes `kernels.coded_matmul` in Pallas for TPUs."""
    return shared.product(grouped, x, w)


def grouped(x: Float[Array, "tokens in"], w: Coded, group_sizes: Int[Array, " groups"]) -> Float[Array, "tokens out"]:
    """Implements `shared.Grouped`."""
    (tokens, features), (groups, columns, _) = x.shape, w.shape
    values, scale = (Stacked.of(a) for a in (w.values, w.scale))
    stored = values.shape[-1]
    sizes = blocks.sizes(__name__, "matrices", x.dtype, "*")
    rows, column_block = min(sizes["rows"], pl.cdiv(tokens, 16) * 16), min(sizes["columns"], columns)
    tiles = Tiles.of(with_rest(group_sizes, tokens), tokens, rows, aligned=True)
    # Tiles of rows without a group name the blocks that are in memory already, so nothing is loaded for them.
    source = jnp.minimum(tiles.first, jnp.maximum(spans(group_sizes, tokens)[1][-1] - 1, 0)) // rows

    turned = tuple(_lies_transposed(columns, side.shape[-1], side.dtype.itemsize) for side in (values, scale))
    count, strip = scale.shape[-1], _strip(column_block)
    together = turned[1] and _lie_together(groups, count, scale.dtype)
    strips = column_block // strip if together else 1
    whole = lambda which, length: (length, column_block) if turned[which] else (column_block, length)

    def of_group(which: int) -> pl.BlockSpec:
        def block(j: Array, i: Array, group: Any, *scalars: Any) -> tuple[Any, ...]:
            layer = scalars[which - 2][0]
            return layer, jnp.minimum(group[i], groups - 1), *((0, j) if turned[which] else (j, 0))

        return pl.BlockSpec((None, None, *whole(which, (values, scale)[which].shape[-1])), block)

    def of_all_groups(n: int) -> pl.BlockSpec:  # for the tiles of all groups, the n-th strip of a block
        most = pl.cdiv(columns, strip) - 1
        strip_of = lambda j: jnp.minimum(j * strips + n, most)
        return pl.BlockSpec((1, count, groups, strip), lambda j, i, *scalars: (scalars[-1][0], 0, 0, strip_of(j)))

    in_order = lambda stack, which: stack.swapaxes(2, 3) if turned[which] else stack
    scales = scale.stack.transpose(0, 3, 1, 2) if together else in_order(scale.stack, 1)

    return pl.pallas_call(
        functools.partial(_kernel, w.code, groups, turned),
        out_shape=jax.ShapeDtypeStruct((tokens, columns), x.dtype),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=6,
            grid=(pl.cdiv(columns, column_block), tiles.count),
            in_specs=[
                pl.BlockSpec((w.packed, rows, stored), lambda j, i, group, first, end, source, *_: (0, source[i], 0)),
                of_group(0),
                [of_all_groups(n) if together else of_group(1) for n in range(strips)],
            ],
            out_specs=pl.BlockSpec((rows, column_block), lambda j, i, group, first, *_: (first[i] // rows, j)),
            scratch_shapes=[
                pltpu.VMEM((w.packed, *whole(0, stored)), x.dtype),
                [pltpu.VMEM((count, column_block), jnp.float32)] if together else [],
            ],
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=VMEM),
        cost_estimate=pl.CostEstimate(
            flops=2 * tokens * features * columns,
            bytes_accessed=(x.size + tokens * columns) * x.dtype.itemsize + w.values.size + scale.size,
            transcendentals=0,
        ),
        interpret=device().platform == "cpu",
        name="coded_matmul",
    )(
        tiles.group, tiles.first, tiles.end, source, values.layer[None], scale.layer[None],
        x.reshape(tokens, stored, w.packed).transpose(2, 0, 1),
        _in_memory(in_order(values.stack, 0)),
        [_in_memory(scales)] * strips,
    )  # fmt: skip


def _kernel(
    code: Code,
    groups: int,
    turned: tuple[bool, ...],
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    source_ref: Any,
    values_layer_ref: Any,
    scale_layer_ref: Any,
    x_ref: Any,
    values_ref: Any,
    scale_refs: list[Any],
    out_ref: Any,
    weights_ref: Any,
    factors_refs: list[Any],
) -> None:
    del source_ref, values_layer_ref, scale_layer_ref  # only the block specs use them
    i, (rows, columns), (_, _, stored) = pl.program_id(1), out_ref.shape, x_ref.shape
    strip, count = _strip(columns), (*factors_refs, *scale_refs)[0].shape[0 if turned[1] else 1]

    def own() -> Array:
        row = first_ref[i] // rows * rows + lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
        return (row >= first_ref[i]) & (row < end_ref[i])

    @pl.when(group_ref[i] < groups)
    def _() -> None:
        for n, factors_ref in itertools.product(range(len(scale_refs)), factors_refs):
            factors_ref[:, pl.ds(n * strip, strip)] = _factors_of(scale_refs[n], group_ref[i])

        @pl.loop(0, columns // strip)
        def _(n: Array) -> None:
            outs = pl.ds(pl.multiple_of(n * strip, strip), strip)
            if factors_refs:
                scale = factors_refs[0][:, outs]
            else:
                scale = factors(scale_refs[0][:, outs] if turned[1] else scale_refs[0][outs, :])
            for start in range(0, stored, CHUNK):
                size = min(CHUNK, stored - start)
                at = (pl.ds(start, size), outs) if turned[0] else (outs, pl.ds(start, size))
                ones = _ones(count, start, size, stored // count)
                spread = _spread(scale, ones, turned, exact=scale_refs[0].dtype.itemsize == 4)
                for phase, numbers in enumerate(_numbers(values_ref[at], code)):
                    weights_ref[phase, *at] = (numbers * spread).astype(weights_ref.dtype)

        products = [_product(x_ref[phase], weights_ref[phase], 0 if turned[0] else 1) for phase in range(len(x_ref))]
        out_ref[...] = jnp.where(own(), functools.reduce(jnp.add, products).astype(out_ref.dtype), out_ref[...])

    @pl.when(group_ref[i] >= groups)
    def _() -> None:
        out_ref[...] = jnp.where(own(), jnp.zeros_like(out_ref), out_ref[...])


def _in_memory(stack: Array) -> Array:
    """Keeps XLA from copying a whole stack into fast memory for a kernel that reads one layer."""
    return stack if device().platform == "cpu" else pltpu.with_memory_space_constraint(stack, pltpu.HBM)


def _lies_transposed(outs: int, size: int, itemsize: int) -> bool:
    """Whether XLA stores such arrays with `outs` innermost, because the other way they would take more registers."""
    whole = lambda length, part: pl.cdiv(length, part) * part
    padded = lambda rows, columns: whole(rows, 32 // itemsize) * whole(columns, LANES)
    return padded(size, outs) < padded(outs, size)


def _lie_together(groups: int, size: int, dtype: DTypeLike) -> bool:
    """Whether XLA stores scales [groups, outs, size] as [size, groups, outs], in which groups fill more of a register.

    A block then has the scales of all groups, which are read once for each call.
    """
    a_word = 4 // jnp.dtype(dtype).itemsize
    padded = lambda length: length if length in (a_word, 4) else pl.cdiv(length, 8) * 8
    known = groups > 1 and groups % a_word == 0 and dtype != jnp.float16
    return known and padded(groups) * size < padded(size) * groups


def _factors_of(scale_ref: Any, group: Any) -> Float[Array, "blocks outs"]:
    """Returns the scales of one of the groups that lie together, as `factors` does.

    Registers have rows of words of 32 bits, so the scales of a few neighbouring groups are one word.
    """
    bits = 8 * scale_ref.dtype.itemsize
    words, a_word = scale_ref.bitcast(jnp.uint32), 32 // bits
    _, count, rows, outs = words.shape
    words, word = words.reshape(count * rows, outs), jnp.zeros((count, outs), jnp.uint32)
    for row in range(rows):  # Mosaic needs to know the first row of a load with a stride
        word = jnp.where(group // a_word == row, words[pl.ds(row, count, stride=rows), :], word)
    own = word >> (group % a_word * bits).astype(jnp.uint32) & jnp.uint32(2**bits - 1)
    return lax.bitcast_convert_type(own << {8: 23, 16: 16, 32: 0}[bits], jnp.float32)


def _strip(columns: int) -> int:
    return STRIP if columns % STRIP == 0 else columns


def _ones(count: int, start: int, size: int, block: int) -> Float[Array, "blocks size"]:
    """Returns ones where one of `size` values, from `start` on, is in a block, and zeros elsewhere."""
    of_block = lax.broadcasted_iota(jnp.int32, (count, size), 0)
    of_value = (start + lax.broadcasted_iota(jnp.int32, (count, size), 1)) // block
    return (of_block == of_value).astype(jnp.float32)


def _spread(scale: Array, ones: Array, turned: tuple[bool, ...], *, exact: bool) -> Float[Array, "..."]:
    """Repeats the scales of a strip over their values. Those that need not be `exact` fit bfloat16."""
    sides = [(scale, 0 if turned[1] else 1), (ones, 0)]
    (x, x_axis), (y, y_axis) = sides[::-1] if turned[0] else sides
    narrow = lambda side: side if exact else side.astype(jnp.bfloat16)
    return lax.dot_general(
        narrow(x), narrow(y), (((x_axis,), (y_axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if exact else None, preferred_element_type=jnp.float32,
    )  # fmt: skip


def _numbers(values: Array, code: Code) -> list[Float[Array, "..."]]:
    """Returns the numbers of each phase."""
    if code not in TABLES:
        return [values.astype(jnp.bfloat16).astype(jnp.float32)]
    values = values.astype(jnp.int32)
    return [_looked_up(codes, code) for codes in (values >> 4, values & 15)]


def _looked_up(codes: Int[Array, "..."], code: Code) -> Float[Array, "..."]:
    """Returns the numbers of codes of four bits: by arithmetic, or by choosing one of two for each bit."""
    if code == "int4":
        return (codes - 8).astype(jnp.float32)
    if code == "mxfp4":  # the magnitude is piecewise linear and convex in the code's lower bits
        lower = (codes & 7).astype(jnp.float32)
        magnitude = jnp.maximum(jnp.maximum(0.5 * lower, lower - 2), 2 * lower - 8)
        return jnp.where(codes > 7, -magnitude, magnitude)
    numbers: list[Any] = [float(number) for number in TABLES[code]]
    for bit in range(4):
        isset = (codes >> bit & 1) == 1
        numbers = [jnp.where(isset, high, low) for low, high in zip(numbers[::2], numbers[1::2], strict=True)]
    return numbers[0]


def _product(x: Array, weights: Array, axis: int) -> Array:
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else None
    return lax.dot_general(
        x, weights, (((1,), (axis,)), ((), ())), precision=precision, preferred_element_type=jnp.float32
    )
