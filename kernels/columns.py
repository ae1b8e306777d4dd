"""Arrays of vectors that XLA for TPUs stores with their slots last.

A TPU's memory has tiles whose rows are 128 numbers. Vectors [..., slots, heads, dim] whose `dim` is no multiple of 128
would fill their last tile only in part. Where `slots` is a multiple of 128, XLA therefore stores them as [..., heads,
dim, slots]: a slot is a column. So are the scales of a cache in 8 bits, [..., slots, heads]. These are heads of 64
features (gpt-oss, Llama 3.2 1B) and latents (576, DeepSeek).

A kernel has to ask for such an array in this order of axes: in any other XLA copies the array for it.
"""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Shaped


LANES = 128  # numbers in a row of a register


def are_columns(shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether an array [layers, rows, slots, *heads, dim] is stored by a TPU as [layers, rows, *heads, dim, slots].

    The conditions are the compiler's: tiles of 8 x 128 have to be full, in 8 bits of 32 x 128. Scales, which have no
    axis of features, may leave one in part.
    """
    slots, dim = shape[2], shape[-1]
    whole = dim % 32 == 0 if jnp.dtype(dtype).itemsize == 1 else dim % 8 == 0 or len(shape) == 4
    return slots % LANES == 0 and dim % LANES != 0 and whole


def as_columns(x: Shaped[Array, "layers rows slots *heads dim"]) -> Shaped[Array, "layers rows heads dim slots"]:
    """Puts the slots last, which is how the array is stored. Without heads there is one."""
    x = x if x.ndim == 5 else x[:, :, :, None]
    return x.transpose(0, 1, 3, 4, 2)
