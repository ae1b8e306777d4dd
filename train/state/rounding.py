"""Weights that are kept in bfloat16, and rounded stochastically after each update: --weights-dtype bfloat16.

An update is most often smaller than half a unit of a weight's last place, which is 0.2 to 0.4 % of the weight. Rounding
to the nearest number would leave the weight where it is. Rounding up or down at random, with chances that make the mean
exact, moves it on average as far as it should (arXiv:1502.02551, arXiv:2010.06192).

The random bits are a hash of a number's place: some ten operations in the update's own loop over the weights. The
generator of `jax.random` takes about eighty, which is longer than the loop waits for memory.
"""

import math
import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Int, UInt32

from zoo.surgery import path_name


def hashed(x: UInt32[Array, "*shape"]) -> UInt32[Array, "*shape"]:
    """Mixes the bits of each number: the last steps of MurmurHash3 (https://github.com/aappleby/smhasher).

    Different numbers stay different, and each bit of the result depends on all bits of the number.
    """
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def places(shape: tuple[int, ...]) -> UInt32[Array, "*shape"]:
    """Returns each number's place in an array of this shape, modulo 2^32. It does not depend on the mesh."""
    place = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        step = jnp.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        place += lax.broadcasted_iota(jnp.uint32, shape, axis) * step
    return place


def stochastic(values: Float[Array, "*shape"], seed: UInt32[Array, ""]) -> BFloat16[Array, "*shape"]:
    """Rounds float32 values to bfloat16, up or down at random so that the mean of many roundings is the value.

    A value that bfloat16 can represent stays as it is. The random bits follow from the seed and the value's place.
    """
    # bfloat16 is the upper half of float32. Adding a random lower half carries into it with the right probability.
    lower = hashed(places(values.shape) + seed) >> 16
    bits = lax.bitcast_convert_type(values, jnp.uint32) + lower
    upper = lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), upper, values.astype(jnp.bfloat16))


def rounded_like(old: Any, new: Any, step: Int[Array, ""]) -> Any:
    """Rounds new float32 weights to the data types of the old ones; to bfloat16 by `stochastic`.

    An array's seed follows from the number of the step and the array's path.
    """

    def one(path: Any, old: Array, new: Array) -> Array:
        if old.dtype != jnp.bfloat16:
            return new.astype(old.dtype)
        name = jnp.uint32(zlib.crc32(path_name(path).encode()))
        return stochastic(new, hashed(hashed(name) ^ step.astype(jnp.uint32)))

    return jax.tree_util.tree_map_with_path(one, old, new)
