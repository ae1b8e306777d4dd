"""Groups of rows times a matrix each, in plain JAX, for whatever XLA compiles for.

The rows are cut into tiles of one group each, and a loop multiplies one tile after the other with its group's matrix.
It has as many rounds as there are tiles at run time: at most tokens / size + groups, and none for an empty group. No
buffer grows with the groups, except the gradient of `w`.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Int8


def tile_size(tokens: int, groups: int) -> int:
    """The power of two that holds a group of mean size, from 8 to 128.

    More rows would often be in vain, as they are another group's; fewer read each matrix more often.
    """
    mean = -(-tokens // groups)
    power_of_2 = 1 << (mean - 1).bit_length()
    return min(tokens, max(8, min(power_of_2, 128)))


class Tiles(NamedTuple):
    """Sorted rows, cut where a group ends and after `size` rows at most. What follows the first `count` is unused."""

    tokens: int
    size: int
    count: Int[Array, ""]
    group: Int[Array, " tiles"]
    first: Int[Array, " tiles"]  # its first row
    end: Int[Array, " tiles"]  # the row after its last

    @classmethod
    def of(cls, group_sizes: Int[Array, " groups"], tokens: int) -> "Tiles":
        groups = len(group_sizes)
        size = tile_size(tokens, groups)
        ends = jnp.minimum(jnp.cumsum(group_sizes), tokens)
        starts = jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]])
        counts = (ends - starts + size - 1) // size
        most = -(-tokens // size) + min(groups, tokens)
        group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), counts, total_repeat_length=most)
        ordinal = jnp.arange(most, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[group]
        first = starts[group] + size * ordinal
        return cls(tokens, size, jnp.cumsum(counts)[-1], group, first, jnp.minimum(first + size, ends[group]))

    def start(self, i: Int[Array, ""]) -> Int[Array, ""]:
        """Where to read and write tile `i`: early enough that `size` rows fit, so that nothing needs to be padded."""
        return jnp.minimum(self.first[i], self.tokens - self.size)

    def own(self, i: Int[Array, ""]) -> Bool[Array, "size 1"]:
        """Which of the `size` rows from there on are the tile's."""
        rows = self.start(i) + jnp.arange(self.size, dtype=jnp.int32)
        return ((rows >= self.first[i]) & (rows < self.end[i]))[:, None]

    def take(self, x: Float[Array, "tokens dim"], i: Int[Array, ""]) -> Float[Array, "size dim"]:
        return lax.dynamic_slice_in_dim(x, self.start(i), self.size)

    def put(
        self, x: Float[Array, "tokens dim"], i: Int[Array, ""], tile: Float[Array, "size dim"]
    ) -> Float[Array, "tokens dim"]:
        return lax.dynamic_update_slice_in_dim(x, jnp.where(self.own(i), tile, self.take(x, i)), self.start(i), axis=0)


Matrices = Float[Array, "groups out in"] | Int8[Array, "groups out in"]


def refusal(x: Float[Array, "tokens in"], w: Matrices, _: Int[Array, " groups"]) -> str | None:
    """Why this implementation cannot take these arguments of `ragged_dot`, or None if it can."""
    if x.dtype == jnp.float64:
        return "it computes in float32, and x is float64"
    return None if len(x) and len(w) else "it needs a row and a group at least"


@jax.jit  # outside jit too, compile once
def ragged_dot(
    x: Float[Array, "tokens in"], w: Matrices, group_sizes: Int[Array, " groups"]
) -> Float[Array, "tokens out"]:
    """`kernels.ragged_dot`, in tiles."""
    return _ragged_dot(x, w, group_sizes)


@jax.custom_vjp
def _ragged_dot(x: Array, w: Array, group_sizes: Array) -> Array:
    return _times_matrices(x, w, group_sizes, axis=2)


def _forward(x: Array, w: Array, group_sizes: Array) -> tuple[Array, tuple[Array, Array, Array]]:
    return _ragged_dot(x, w, group_sizes), (x, w, group_sizes)


def _backward(residuals: tuple[Array, Array, Array], d_out: Array) -> tuple[Array, Array | None, None]:
    x, w, group_sizes = residuals
    dx = _times_matrices(d_out, w, group_sizes, axis=1)
    if w.dtype == jnp.int8:
        return dx, None, None
    tiles = Tiles.of(group_sizes, len(x))

    def add_tile(i: Array, dw: Array) -> Array:
        # Both sides are masked: zero times a neighbour's NaN would be NaN.
        x_i, d_out_i = (jnp.where(tiles.own(i), tiles.take(side, i), 0) for side in (x, d_out))
        dw_i = dw[tiles.group[i]] + _product(d_out_i, x_i, axes=(0, 0))
        return lax.dynamic_update_index_in_dim(dw, dw_i, tiles.group[i], axis=0)

    dw = lax.fori_loop(0, tiles.count, add_tile, jnp.zeros(w.shape, jnp.float32))
    return dx, dw.astype(w.dtype), None


_ragged_dot.defvjp(_forward, _backward)


def _times_matrices(x: Array, w: Array, group_sizes: Array, axis: int) -> Array:
    """For each row the product with its group's matrix, summed over that axis of `w`; zeros for rows of no group."""
    tiles = Tiles.of(group_sizes, len(x))

    def put_tile(i: Array, out: Array) -> Array:
        # The barrier makes w depend on i. Else jax 0.10 on CPU converts all of a bfloat16 w to float32 before the loop.
        w_i, group = lax.optimization_barrier((w, tiles.group[i]))
        return tiles.put(out, i, _product(tiles.take(x, i), w_i[group].astype(x.dtype), axes=(1, axis - 1)))

    # In float32, since jax 0.10 on CPU updates a slice of a bfloat16 array by way of all of it.
    out = jnp.zeros((len(x), w.shape[3 - axis]), jnp.float32)
    return lax.fori_loop(0, tiles.count, put_tile, out).astype(x.dtype)


def _product(x: Array, y: Array, axes: tuple[int, int]) -> Array:
    """The product summed over those axes, without a transposed copy."""
    return lax.dot_general(x, y, (((axes[0],), (axes[1],)), ((), ())), preferred_element_type=jnp.float32)
