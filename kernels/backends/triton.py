"""Helpers for the Pallas-Triton kernels: launching, and loading, storing and multiplying blocks.

JAX has deprecated Pallas-Triton since 0.11, so only the files named triton.py and dot8.py use it. Triton computes on
blocks whose sides are powers of two, and multiplies blocks of at least 16 rows and columns. Kernels get whole arrays
and cut blocks from them; elements of a block beyond the array's end are masked.
"""

import dataclasses
import struct
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels.backends.device import device
from kernels.stacked import Stacked
from kernels.tiles import FEW, Tile, Tiles, with_rest


warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

SMALLEST = 16  # the shortest side of a block that Triton multiplies


def launch(
    kernel: Callable[..., None],
    *operands: Any,
    name: str,
    grid: tuple[int, ...],
    results: Any,
    warps: int,
    stages: int,
    cost: pl.CostEstimate,
    in_place: Mapping[int, int] = {},
) -> Any:
    """Runs `kernel(*operands, *results)`, which gets Refs of whole arrays, once for each index of the grid.

    `operands` are arrays in any pytrees, `results` a pytree of `jax.ShapeDtypeStruct`. The grid's first axis runs
    fastest. `stages` is the number of steps of a loop whose loads are in flight at once. `in_place` maps each operand
    that is overwritten to its result, both by index among all arrays. On a CPU the kernel is interpreted.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=results,
        name=name,
        interpret=device().platform == "cpu",
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        cost_estimate=cost,
        input_output_aliases=dict(in_place),
    )(*operands)


def addressable(x: Shaped[Array, "..."] | Stacked) -> Stacked:
    """Copies the layer out of a stack that Pallas-Triton would address with too few bits: 2 to 4 GB, in 8 bits."""
    x = Stacked.of(x)
    if x.stack.dtype.itemsize > 1 or not 2**31 < x.stack.size <= 2**32:
        return x
    one = lambda stack: None if stack is None else jax.lax.dynamic_slice_in_dim(stack, x.layer, 1)
    return dataclasses.replace(x, stack=one(x.stack), layer=jnp.zeros((), jnp.int32), scale=one(x.scale))


def pieces(width: int, start: int = 0) -> list[Any]:
    """Splits a width, a multiple of 16, into powers of two: 192 becomes 128 and 64, where padding would take 256."""
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return [pl.ds(start + sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def inside(start: Array, size: int, length: int) -> Bool[Array, " size"] | None:
    """Returns which indices of a block from `start` on are below `length`, or None if `size` divides `length`."""
    return None if length % size == 0 else start + jnp.arange(size, dtype=jnp.int32) < length


def load(ref: Any, mask: Bool[Array, "..."] | None = None, other: ArrayLike = 0) -> Array:
    """Loads a block, with `other` where the mask is False; the mask broadcasts to the block."""
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=other)


def store(ref: Any, value: Array, mask: Bool[Array, "..."] | None = None) -> None:
    plt.store(ref, value, mask=mask)


class Side(NamedTuple):
    """The rows or the columns of a block of a matrix: their indices, and which of them are valid (None: all)."""

    indices: pl.Slice
    own: Bool[Array, " size"] | None

    @classmethod
    def of(cls, i: Array, size: int, length: int) -> "Side":
        """Returns block `i` of an axis of that length."""
        return cls(pl.ds(i * size, size), inside(i * size, size, length))


def span(start: Array, size: int, end: Array) -> Side:
    """Returns `size` rows from `start` on, of which those before `end` are valid."""
    return Side(pl.ds(start, size), start + jnp.arange(size, dtype=jnp.int32) < end)


class Listed(NamedTuple):
    """Tiles of many rows, computed by XLA in a dozen kernels."""

    group: Any
    first: Any
    end: Any

    @property
    def most(self) -> int:
        """The number of tiles, with those that may have no rows."""
        return self.group.shape[0]

    def tile(self, n: Array) -> Tile:
        """Returns a tile in a kernel. Beyond the last one, which hardly ever has rows, it is the last one."""
        n = jnp.minimum(n, self.most - 1)
        return Tile(self.group[n], self.first[n], self.end[n])


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sought:
    """Tiles of few rows. Each program finds its own by the sizes of all groups, so no other kernel has to run first."""

    sizes: Any
    tokens: int = dataclasses.field(metadata=dict(static=True))
    rows: int = dataclasses.field(metadata=dict(static=True))

    @property
    def most(self) -> int:
        """The largest possible number of tiles: each but the last of a group is full, and all have a row."""
        return min(self.tokens, self.sizes.shape[0] + 1 + self.tokens // self.rows)

    def tile(self, n: Array) -> Tile:
        """Returns a tile in a kernel. One beyond the last has no rows."""
        (groups,) = self.sizes.shape
        group = jnp.arange(pl.next_power_of_2(groups + 1), dtype=jnp.int32)
        sizes = load(self.sizes.at[Side.of(jnp.int32(0), len(group), groups).indices], group < groups)
        return Tile.nth(n, jnp.where(group == groups, self.tokens, sizes), self.tokens, self.rows)


def tiles(group_sizes: Int[Array, " groups"], tokens: int, rows: int) -> Listed | Sought:
    """Cuts sorted rows into tiles of `rows` rows at most. Those that belong to no group are one more, at the end."""
    if tokens <= FEW:
        return Sought(group_sizes, tokens, rows)
    found = Tiles.of(with_rest(group_sizes, tokens), tokens, rows)
    return Listed(found.group, found.first, found.end)


def load_block(ref: Any, rows: Side, columns: Side, *matrix: Array) -> Array:
    """Loads a block of a matrix, or of one of several matrices, with zeros where it is not valid."""
    zero = jnp.zeros((), ref.dtype)  # a plain 0 does not become float8
    return load(ref.at[*matrix, rows.indices, columns.indices], _own(rows, columns), zero)


def store_block(ref: Any, block: Array, rows: Side, columns: Side, *matrix: Array) -> None:
    store(ref.at[*matrix, rows.indices, columns.indices], block.astype(ref.dtype), _own(rows, columns))


def _own(rows: Side, columns: Side) -> Bool[Array, "..."] | None:
    if rows.own is None:
        return None if columns.own is None else columns.own[None, :]
    return rows.own[:, None] if columns.own is None else rows.own[:, None] & columns.own[None, :]


def dot(x: Float[Array, "..."], y: Float[Array, "..."], over: tuple[int, int] = (1, 0)) -> Float[Array, "rows columns"]:
    """Multiplies two matrices, summing over these axes in float32, and never in TF32."""
    return lax.dot_general(
        x, y, (((over[0],), (over[1],)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def exp2(x: Float[Array, "*shape"], factor: float, less: Float[Array, "..."]) -> Float[Array, "*shape"]:
    """Computes 2 ** (factor * x - less) in two instructions of the GPU; with jnp.exp2 it would be six."""
    less = jnp.broadcast_to(less, x.shape)
    if device().platform == "cpu":
        return jnp.exp2(factor * x - less)
    as_hex = struct.pack(">f", factor).hex()
    [power] = plt.elementwise_inline_asm(
        f"{{ .reg .f32 t; fma.rn.f32 t, $1, 0f{as_hex}, $2; ex2.approx.ftz.f32 $0, t; }}",
        args=[x, -less],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )
    return power
