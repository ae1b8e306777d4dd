"""Defines products with a matrix in few bits: it is dequantised, and multiplied."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.coded import Coded


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def coded_matmul(x: Float[Array, "*batch in"], w: Coded) -> Float[Array, "*batch out"]:
    """Computes `kernels.coded_matmul` in plain JAX."""
    return jnp.einsum("...i,oi->...o", x, w.read())
