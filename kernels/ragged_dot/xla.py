"""Grouped matrix products (each group of rows times its matrix), in plain JAX, for every platform that XLA supports.

The rows are cut into tiles of one group each, and a loop multiplies one tile after another by its group's matrix. The
loop has as many rounds as there are tiles at run time: at most tokens / size + groups, and none for an empty group. No
buffer grows with the groups, except the gradient of `w`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels.coded import Coded
from kernels.ragged_dot import shared
from kernels.ragged_dot.shared import Matrices, Rows
from kernels.stacked import Stacked
from kernels.tiles import Tiles, mean_rows


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 3


def refusal(x: Rows, w: Matrices, _: Int[Array, " groups"]) -> str | None:
    """Returns why this implementation cannot take these arguments of `ragged_dot`, or None if it can."""
    return shared.refusal(x, w)


@jax.jit  # so that calls outside jit compile once, too
def ragged_dot(x: Rows, w: Matrices, group_sizes: Int[Array, " groups"]) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` in tiles."""
    return shared.ragged_dot(shared.Kernels(_rows_times_matrices, _sums_of_products), x, w, group_sizes)


def tile_size(tokens: int, groups: int) -> int:
    """Returns the power of two that holds a group of mean size, from 8 to 128.

    With more rows, work is wasted on rows of other groups; with fewer, each matrix is read more often.
    """
    return min(tokens, mean_rows(tokens, groups, least=8, most=128))


def _rows_times_matrices(x: Array, w: Matrices, group_sizes: Array, axis: int) -> Array:
    tiles = Tiles.of(group_sizes, len(x), tile_size(len(x), w.shape[0]))
    w = w if isinstance(w, Coded) else Stacked.of(w)

    def put_tile(i: Array, out: Array) -> Array:
        # Makes w depend on i: otherwise jax 0.10 on CPU converts all of a bfloat16 w to float32 before the loop.
        w_i, group = lax.optimization_barrier((w, tiles.group[i]))
        matrix = w_i.group(group) if isinstance(w_i, Coded) else w_i.stack[w_i.layer, group].astype(x.dtype)
        product = _product(_take(x, tiles, i), matrix, axes=(1, axis - 1))
        product = jnp.where(_own(tiles, i, len(x)), product, _take(out, tiles, i))
        return lax.dynamic_update_slice_in_dim(out, product, _start(tiles, i, len(x)), axis=0)

    # In float32: to update a slice of a bfloat16 array, jax 0.10 on CPU copies the whole array.
    out = jnp.zeros((len(x), w.shape[3 - axis]), jnp.float32)
    return lax.fori_loop(0, tiles.count, put_tile, out).astype(shared.result_dtype(x))


def _sums_of_products(d_out: Array, x: Array, group_sizes: Array) -> Array:
    groups = len(group_sizes)
    tiles = Tiles.of(group_sizes, len(x), tile_size(len(x), groups))

    def add_tile(i: Array, dw: Array) -> Array:
        # Both sides are masked: zero times a neighbour's NaN would be NaN.
        d_out_i, x_i = (jnp.where(_own(tiles, i, len(x)), _take(side, tiles, i), 0) for side in (d_out, x))
        dw_i = dw[tiles.group[i]] + _product(d_out_i, x_i, axes=(0, 0))
        return lax.dynamic_update_index_in_dim(dw, dw_i, tiles.group[i], axis=0)

    dw = jnp.zeros((groups, d_out.shape[1], x.shape[1]), jnp.float32)
    return lax.fori_loop(0, tiles.count, add_tile, dw).astype(x.dtype)


def _start(tiles: Tiles, i: Int[Array, ""], tokens: int) -> Int[Array, ""]:
    """Returns the first row to read and write for tile `i`: early enough that `size` rows fit, without padding."""
    return jnp.minimum(tiles.first[i], tokens - tiles.size)


def _own(tiles: Tiles, i: Int[Array, ""], tokens: int) -> Bool[Array, "size 1"]:
    """Returns which of the `size` rows from `_start` on are the tile's."""
    rows = _start(tiles, i, tokens) + jnp.arange(tiles.size, dtype=jnp.int32)
    return ((rows >= tiles.first[i]) & (rows < tiles.end[i]))[:, None]


def _take(x: Shaped[Array, "tokens dim"], tiles: Tiles, i: Int[Array, ""]) -> Shaped[Array, "size dim"]:
    return lax.dynamic_slice_in_dim(x, _start(tiles, i, len(x)), tiles.size)


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """Multiplies, summing over these axes, without a transposed copy."""
    sums = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    out = lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=sums)
    return out.astype(jnp.float32)
