"""What the Pallas-Triton kernels share: how they are launched, how they load blocks, and how they multiply them.

JAX has deprecated Pallas-Triton since 0.11, so only the modules named *_triton and this one know of it. Triton computes
on blocks whose sides are powers of two, and multiplies such as have at least 16 rows and columns. Kernels take whole
arrays, and cut their blocks themselves; what reaches over an array's end is masked.
"""

import struct
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from kernels.device import device


warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)

SMALLEST = 16  # the shortest side of a product


def launch(
    kernel: Callable[..., None],
    *operands: Any,
    name: str,
    grid: tuple[int, ...],
    results: Any,
    warps: int,
    stages: int,
    cost: pl.CostEstimate,
) -> Any:
    """Runs `kernel(*operands, *results)`, which gets Refs of whole arrays, once for each index of the grid.

    `operands` are arrays in any pytrees, `results` a pytree of `jax.ShapeDtypeStruct`. The grid's first axis runs
    fastest. `stages` is how many steps of a loop have their loads under way at once. On a CPU it is interpreted.
    """
    return pl.pallas_call(
        kernel,
        grid=grid,
        out_shape=results,
        name=name,
        interpret=device().platform == "cpu",
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=stages),
        cost_estimate=cost,
    )(*operands)


def pieces(width: int) -> list[Any]:
    """Slices of powers of two that make up the width, a multiple of 16: 192 is 128 and 64, where a padding took 256."""
    sizes = [1 << bit for bit in reversed(range(width.bit_length())) if width >> bit & 1]
    return [pl.ds(sum(sizes[:i]), size) for i, size in enumerate(sizes)]


def inside(start: Array, size: int, length: int) -> Bool[Array, " size"] | None:
    """Which indices of a block from `start` on are below `length`. None: all, since such blocks fill the length."""
    return None if length % size == 0 else start + jnp.arange(size, dtype=jnp.int32) < length


def load(ref: Any, mask: Bool[Array, "..."] | None = None, other: ArrayLike = 0) -> Array:
    """The block, with `other` where the mask, which broadcasts to it, is False."""
    return plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=other)


def store(ref: Any, value: Array, mask: Bool[Array, "..."] | None = None) -> None:
    plt.store(ref, value, mask=mask)


class Side(NamedTuple):
    """One side of a block of a matrix: its indices, and which of them are the block's. None: all of them."""

    indices: pl.Slice
    own: Bool[Array, " size"] | None

    @classmethod
    def of(cls, i: Array, size: int, length: int) -> "Side":
        """Block `i` of a whole axis."""
        return cls(pl.ds(i * size, size), inside(i * size, size, length))


def load_block(ref: Any, rows: Side, columns: Side, *matrix: Array) -> Array:
    """That block of a matrix, or of one of several, with zeros for what is not its own."""
    zero = jnp.zeros((), ref.dtype)  # a plain 0 is no float8
    return load(ref.at[*matrix, rows.indices, columns.indices], _own(rows, columns), zero)


def store_block(ref: Any, block: Array, rows: Side, columns: Side, *matrix: Array) -> None:
    store(ref.at[*matrix, rows.indices, columns.indices], block.astype(ref.dtype), _own(rows, columns))


def _own(rows: Side, columns: Side) -> Bool[Array, "..."] | None:
    if rows.own is None:
        return None if columns.own is None else columns.own[None, :]
    return rows.own[:, None] if columns.own is None else rows.own[:, None] & columns.own[None, :]


def dot(x: Float[Array, "..."], y: Float[Array, "..."], over: tuple[int, int] = (1, 0)) -> Float[Array, "rows columns"]:
    """The product of two matrices, summed in float32 over these axes of theirs. It never falls to TF32."""
    return lax.dot_general(
        x, y, (((over[0],), (over[1],)), ((), ())), precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def exp2(x: Float[Array, "*shape"], factor: float, less: Float[Array, "..."]) -> Float[Array, "*shape"]:
    """2 ** (factor * x - less), in two of the GPU's instructions. What jnp.exp2 makes of it takes six."""
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
