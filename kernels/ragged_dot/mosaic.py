"""EXPERIMENTAL: grouped matrix products (each group of rows times its matrix), for Hopper GPUs, in Pallas Mosaic GPU.

It compiles for an H200, and has never yet run on one: no speed is known. Its numbers are tested in JAX's interpreter of
such kernels, on a CPU, where products complete at once (tests/kernels/test_mosaic.py).

There are as many programs as the GPU has multiprocessors. They divide the blocks of the result among themselves, 128
rows by 256 columns each. A program has three warpgroups. One copies blocks of both sides to shared memory, through a
ring buffer, and runs ahead into the program's next block. The other two multiply 64 rows each, and store results while
they go on. If a side has to be transposed, the product instruction does that.

For the output and the gradient of the rows, XLA cuts the rows beforehand into tiles of one group each. The rows without
a group are one more group at the end, whose tiles sum nothing. For the gradient of the matrices, a block belongs to one
group and sums over its rows. Rows of neighbouring groups that come with the first or the last copy are overwritten by
zeros.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from kernels.backends import blocks, mosaic
from kernels.backends.mosaic import ROWS, Ring
from kernels.coded import Coded
from kernels.ragged_dot import shared
from kernels.ragged_dot.shared import Matrices, Rows
from kernels.stacked import Stacked
from kernels.tiles import Tiles, spans, with_rest


PLATFORMS = ()  # chosen only by name, until a GPU has shown that this is faster than "triton"
RANK = 1

BAND = 8  # tiles that visit the same block of columns one after another, so that both sides stay in the L2 cache
WIDTH = 64  # columns that are stored at a time


def refusal(x: Rows, w: Matrices, _: Int[Array, " groups"]) -> str | None:
    """Returns why this implementation cannot take these arguments of `ragged_dot`, or None if it can."""
    if w.dtype != x.dtype or isinstance(w, Coded):
        return f"it multiplies matrices of one dtype, not {x.dtype} by {w.code if isinstance(w, Coded) else w.dtype}"
    if w.shape[1] % WIDTH or w.shape[2] % WIDTH:
        return f"its matrices have multiples of {WIDTH} rows and columns, not {w.shape[1]} and {w.shape[2]}"
    return mosaic.refusal(x.dtype) or shared.refusal(x, w)


@jax.jit  # so that calls outside jit compile once, too
def ragged_dot(
    x: Float[Array, "tokens in"], w: Matrices, group_sizes: Int[Array, " groups"]
) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` in Mosaic GPU."""
    return shared.ragged_dot(shared.Kernels(rows_times_matrices, sums_of_products), x, w, group_sizes)


def rows_times_matrices(x: Array, w: Array | Stacked, group_sizes: Array, axis: int) -> Array:
    """Implements `shared.Kernels.rows_times_matrices`."""
    (tokens, depth), columns, w = x.shape, w.shape[3 - axis], Stacked.of(w)
    size = blocks.sizes(__name__, "matrices", x.dtype, "*")
    tiles = Tiles.of(with_rest(group_sizes, tokens), tokens, 2 * ROWS, aligned=True)
    w_block = (size["columns"], size["depth"]) if axis == 2 else (size["depth"], size["columns"])
    return mosaic.launch(
        functools.partial(_rows_times_matrices_kernel, axis),
        *(tiles.count[None], tiles.group, tiles.first, tiles.end, w.layer[None], x, w.stack),
        name="ragged_dot_out" if axis == 2 else "ragged_dot_dx",
        grid={"program": size["programs"]},
        results=jax.ShapeDtypeStruct((tokens, columns), x.dtype),
        scratch=dict(
            ring=Ring.of(size["slots"], ((2 * ROWS, size["depth"]), x.dtype), (w_block, w.dtype)),
            whole=plgpu.SMEM((2, size["columns"] // WIDTH, ROWS, WIDTH), x.dtype),
            part=plgpu.SMEM((2, ROWS, WIDTH), x.dtype),
        ),
        cost=_cost(tokens, depth * columns, bytes_accessed=(x.size + tokens * columns + w.size) * x.dtype.itemsize),
    )


def _rows_times_matrices_kernel(
    axis: int,
    count_ref: Any,
    group_ref: Any,
    first_ref: Any,
    end_ref: Any,
    layer_ref: Any,
    x_ref: Any,
    w_ref: Any,
    out_ref: Any,
    *,
    ring: Ring,
    whole: Any,
    part: Any,
) -> None:
    me, depth_size, column_size = lax.axis_index("warpgroup"), ring.buffers[0].shape[2], ring.buffers[1].shape[3 - axis]
    column_blocks = pl.cdiv(out_ref.shape[1], column_size)
    total = pl.cdiv(count_ref[0], BAND) * BAND * column_blocks

    def block(item: Array) -> tuple[Array, Array, Array, Array, Array]:
        """Returns an item's group, first row, end of rows, first column, and number of steps."""
        band, item = _divide(item, BAND * column_blocks)
        column, row = _divide(item, BAND)
        tile = band * BAND + row
        used, tile = tile < count_ref[0], jnp.minimum(tile, group_ref.shape[0] - 1)
        # The last band is filled up with tiles without rows.
        group, first, end = group_ref[tile], first_ref[tile], jnp.where(used, end_ref[tile], 0)
        steps = jnp.where((first < end) & (group < w_ref.shape[1]), x_ref.shape[1] // depth_size, 0)
        return group, first, end, column * column_size, steps

    @mosaic.copying
    def _() -> None:
        def copy(item: Array, done: Array) -> Array:
            group, first, _end, column, steps = block(item)
            columns = pl.ds(column, column_size)

            @pl.loop(0, steps)
            def _(n: Array) -> None:
                rows, inner = pl.ds(_down(first, 2 * ROWS), 2 * ROWS), pl.ds(n * depth_size, depth_size)
                matrix = w_ref.at[layer_ref[0], group]
                w = matrix.at[columns, inner] if axis == 2 else matrix.at[inner, columns]
                ring.fill(done + n, x_ref.at[rows, inner], w)

            return done + steps

        _share(total, copy)

    @mosaic.multiplying
    def _() -> None:
        def multiply(item: Array, done: Array) -> Array:
            _group, first, end, column, steps = block(item)

            def loop(out: Any) -> Array:
                @pl.loop(0, steps)
                def _(n: Array) -> None:
                    x, w = ring.take(done + n)
                    plgpu.wgmma(out, x.at[pl.ds(me * ROWS, ROWS)], w.T if axis == 2 else w)
                    plgpu.wgmma_wait(0)
                    ring.release(done + n)

                return out[...]

            out = pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((ROWS, column_size))).astype(out_ref.dtype)
            row = _down(first, 2 * ROWS) + me * ROWS
            first, end = jnp.maximum(first - row, 0), jnp.minimum(end - row, ROWS)

            @pl.when(end - first == ROWS)
            def _() -> None:
                _store(whole.at[me], out, out_ref, row, column)

            @pl.when((end - first > 0) & (end - first < ROWS))
            def _() -> None:
                _store_part(part.at[me], out, out_ref, row, column, first, end)

            return done + steps

        _share(total, multiply)
        plgpu.wait_smem_to_gmem(0)


def sums_of_products(d_out: Array, x: Array, group_sizes: Array) -> Array:
    """Implements `shared.Kernels.sums_of_products`."""
    (tokens, outs), (_, ins), groups = d_out.shape, x.shape, len(group_sizes)
    size = blocks.sizes(__name__, "sums", x.dtype, "*")
    return mosaic.launch(
        _sums_of_products_kernel,
        *(*spans(group_sizes, tokens), d_out, x),
        name="ragged_dot_dw",
        grid={"program": size["programs"]},
        results=jax.ShapeDtypeStruct((groups, outs, ins), x.dtype),
        scratch=dict(
            ring=Ring.of(
                size["slots"], ((size["rows"], 2 * ROWS), d_out.dtype), ((size["rows"], size["columns"]), x.dtype)
            ),
            cleared=plgpu.Barrier(num_arrivals=2),
            whole=plgpu.SMEM((2, size["columns"] // WIDTH, ROWS, WIDTH), x.dtype),
        ),
        cost=_cost(tokens, outs * ins, bytes_accessed=(d_out.size + x.size + groups * outs * ins) * x.dtype.itemsize),
    )


def _sums_of_products_kernel(
    start_ref: Any,
    end_ref: Any,
    d_out_ref: Any,
    x_ref: Any,
    dw_ref: Any,
    *,
    ring: Ring,
    cleared: Any,
    whole: Any,
) -> None:
    me = lax.axis_index("warpgroup")
    (_, rows, _), (_, _, column_size) = (buffer.shape for buffer in ring.buffers)
    groups, outs, ins = dw_ref.shape
    row_blocks, column_blocks = pl.cdiv(outs, 2 * ROWS), pl.cdiv(ins, column_size)
    total = groups * row_blocks * column_blocks

    def block(item: Array) -> tuple[Array, Array, Array, Array]:
        """Returns an item's group, first row, first column, and number of steps."""
        group, item = _divide(item, row_blocks * column_blocks)
        row, column = _divide(item, column_blocks)
        start, end = start_ref[group], end_ref[group]
        steps = jnp.where(start < end, pl.cdiv(end - _down(start, rows), rows), 0)
        return group, row * 2 * ROWS, column * column_size, steps

    @mosaic.copying
    def _() -> None:
        def copy(item: Array, done: Array) -> Array:
            group, row, column, steps = block(item)

            @pl.loop(0, steps)
            def _(n: Array) -> None:
                inner = pl.ds(_down(start_ref[group], rows) + n * rows, rows)
                ring.fill(
                    done + n, d_out_ref.at[inner, pl.ds(row, 2 * ROWS)], x_ref.at[inner, pl.ds(column, column_size)]
                )

            return done + steps

        _share(total, copy)

    @mosaic.multiplying
    def _() -> None:
        def multiply(item: Array, done: Array) -> Array:
            group, row, column, steps = block(item)
            start, end = start_ref[group], end_ref[group]

            def loop(dw: Any) -> Array:
                @pl.loop(0, steps)
                def _(n: Array) -> None:
                    d_out, x = ring.take(done + n)
                    d_out = d_out.at[:, pl.ds(me * ROWS, ROWS)]

                    base = _down(start, rows) + n * rows

                    @pl.when((base < start) | (base + rows > end))
                    def _() -> None:
                        # Both sides are cleared: zero times a neighbour's NaN would be NaN. Each warpgroup clears its
                        # own rows of the product and half of the columns, and waits for the other's half. Both come
                        # here in the same steps, and `cleared` completes once for each of these.
                        half = column_size // 2
                        for side in (d_out, x.at[:, pl.ds(me * half, half)]):
                            _clear(side, start - base, end - base)
                        plgpu.commit_smem()
                        plgpu.barrier_arrive(cleared)
                        plgpu.barrier_wait(cleared)

                    plgpu.wgmma(dw, d_out.T, x)
                    plgpu.wgmma_wait(0)
                    ring.release(done + n)

                return dw[...]

            dw = pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((ROWS, column_size))).astype(dw_ref.dtype)
            row += me * ROWS
            pl.when(row < outs)(lambda: _store(whole.at[me], dw, dw_ref.at[group], row, column))
            return done + steps

        _share(total, multiply)
        plgpu.wait_smem_to_gmem(0)


def _share(total: Array | int, body: Callable[[Array, Array], Array]) -> None:
    """Calls `body(item, done)` for this program's share of the items. `done`: the ring's steps so far."""
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    lax.fori_loop(
        0,
        lax.div(total - program + programs - 1, programs),
        lambda i, done: body(program + i * programs, done),
        jnp.int32(0),
    )


def _clear(ref: Any, first: Array, end: Array) -> None:
    """Overwrites all rows with zeros except those from `first` up to `end`."""
    row = plgpu.broadcasted_iota(jnp.int32, ref.shape, 0, layout=plgpu.Layout.WGMMA)
    ref[...] = jnp.where((row >= first) & (row < end), ref[...], jnp.zeros((), ref.dtype))


def _store(slots: Any, block: Array, ref: Any, row: Array, column: Array) -> None:
    """Copies the block through shared memory, after waiting until the previous block's copies have read theirs."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    for i in range(slots.shape[0]):
        slots[i] = block[:, i * WIDTH : (i + 1) * WIDTH]
    plgpu.commit_smem()
    for i in range(slots.shape[0]):
        columns = pl.ds(column + i * WIDTH, WIDTH)
        pl.when(columns.start < ref.shape[1])(
            lambda i=i, columns=columns: plgpu.copy_smem_to_gmem(slots.at[i], ref.at[pl.ds(row, ROWS), columns])
        )


def _store_part(slot: Any, block: Array, ref: Any, row: Array, column: Array, first: Array, end: Array) -> None:
    """Copies only the block's rows from `first` up to `end`, which are fewer than all.

    The size of a copy is fixed in the program. So the rows are copied in powers of two that add up to their number.
    """
    count = end - first
    for i in range(block.shape[1] // WIDTH):
        columns, start = pl.ds(column + i * WIDTH, WIDTH), first
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slot[...] = block[:, i * WIDTH : (i + 1) * WIDTH]  # untiled: it may be cut at any row
        plgpu.commit_smem()
        for size in (32, 16, 8, 4, 2, 1):

            @pl.when((count & size != 0) & (columns.start < ref.shape[1]))
            def _(size: int = size, columns: Any = columns, start: Array = start) -> None:
                plgpu.copy_smem_to_gmem(slot.at[pl.ds(start, size)], ref.at[pl.ds(row + start, size), columns])

            start += count & size


def _down(x: Array, multiple: int) -> Array:
    """Rounds down to a multiple. Copies to shared memory have to start at a multiple of 8."""
    return lax.div(x, jnp.int32(multiple)) * multiple


def _divide(x: Array, by: int) -> tuple[Array, Array]:
    return lax.div(x, jnp.int32(by)), lax.rem(x, jnp.int32(by))


def _cost(rows: int, size: int, bytes_accessed: int) -> pl.CostEstimate:
    return pl.CostEstimate(flops=2 * rows * size, bytes_accessed=bytes_accessed, transcendentals=0)
