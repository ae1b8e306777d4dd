"""Weights that are kept in bfloat16, and rounded stochastically after each update: --weights-dtype bfloat16.

An update is most often smaller than half a unit of a weight's last place, which is 0.2 to 0.4 % of the weight. Rounding
to the nearest number would leave the weight where it is. Rounding up or down at random, with chances that make the mean
exact, moves it on average as far as it should (arXiv:1502.02551, arXiv:2010.06192).
"""

import zlib
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Int, Key

from zoo.surgery import path_name


def stochastic(values: Float[Array, "*shape"], key: Key[Array, ""]) -> BFloat16[Array, "*shape"]:
    """Rounds float32 values to bfloat16, up or down at random so that the mean of many roundings is the value.

    A value that bfloat16 can represent stays as it is. The bits are the same on any mesh.
    """
    # bfloat16 is the upper half of float32. Adding a random lower half carries into it with the right probability.
    lower = jax.random.bits(key, values.shape, jnp.uint16).astype(jnp.uint32)
    bits = jax.lax.bitcast_convert_type(values, jnp.uint32) + lower
    upper = jax.lax.bitcast_convert_type((bits >> 16).astype(jnp.uint16), jnp.bfloat16)
    return jnp.where(jnp.isfinite(values), upper, values.astype(jnp.bfloat16))


def rounded_like(old: Any, new: Any, step: Int[Array, ""]) -> Any:
    """Rounds new float32 weights to the data types of the old ones; to bfloat16 by `stochastic`.

    An array's random bits follow from the number of the step and the array's path.
    """
    root = jax.random.fold_in(jax.random.key(1), step)

    def one(path: Any, old: Array, new: Array) -> Array:
        if old.dtype != jnp.bfloat16:
            return new.astype(old.dtype)
        return stochastic(new, jax.random.fold_in(root, zlib.crc32(path_name(path).encode())))

    return jax.tree_util.tree_map_with_path(one, old, new)
