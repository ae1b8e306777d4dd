"""Arrays of vectors that XLA for TPUs stores with their heads before their slots.

A TPU's memory has tiles of 8 rows of 128 numbers, in 8 bits of 32 rows, and XLA orders the axes of an array [...,
slots, heads, dim] so that tiles are full. Two orders have each head's vectors together:

- [..., heads, dim, slots], a slot is a column: where `dim` is no multiple of 128, as of heads of 64 features (gpt-oss,
  Llama 3.2 1B) and of latents (576, DeepSeek). So are the scales of a cache in 8 bits, [..., slots, heads].
- [..., heads, slots, dim], a slot is a row: where `dim` is a multiple of 128, and the heads of a slot fill no tiles, as
  10 heads (Phi-4) and 30 (OLMo Hybrid) do not, nor one or two in 8 bits.

Both need slots in a multiple of 128, which zoo's caches have on TPUs. A kernel has to ask for such an array in this
order of axes: in any other XLA copies the array for it.
"""

import math

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped


LANES = 128  # numbers in a row of a register


def are_by_head(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether a TPU stores an array [layers, rows, slots, *heads, dim] in the order of `by_head`.

    The conditions are the compiler's. Scales, which have no axis of features, may leave a tile in part.
    """
    (_, _, slots, *heads, dim), itemsize = shape, jnp.dtype(dtype).itemsize
    if slots % LANES:
        return False
    if dim % LANES == 0:
        return not fill_tiles(math.prod(heads), itemsize)
    return dim % 32 == 0 if itemsize == 1 else dim % 8 == 0 or not heads


def fill_tiles(heads: int, itemsize: int) -> bool:
    """Whether XLA has tiles that the heads of one slot fill, with a multiple of 128 features each."""
    return heads % 8 == 0 or heads == 4 or (heads in (1, 2) and itemsize > 1)


def by_head(x: Shaped[Array, "layers rows slots *heads dim"]) -> Shaped[Array, "layers rows heads _ _"]:
    """Puts the heads before the slots, and, unless features fill rows, the slots last. Without heads there is one."""
    x = x if x.ndim == 5 else x[:, :, :, None]
    return x.transpose(0, 1, 3, *((4, 2) if are_columns(x.shape[4]) else (2, 4)))


def are_columns(dim: int) -> bool:
    """Whether `by_head` has slots as columns."""
    return dim % LANES > 0
