"""Defines `kernels.head_products` in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.stacked import Stacked, read


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def head_products(
    x: Float[Array, "batch seq heads features"],
    matrix: Float[Array, "rows latent"] | Stacked,
    first: int,
    size: int,
    *,
    to_latent: bool,
) -> Float[Array, "batch seq heads _"]:
    """Computes `kernels.head_products`."""
    w = read(matrix).reshape(x.shape[2], -1, matrix.shape[1])[:, first : first + size]
    return jnp.einsum("bshn,hnr->bshr", x[..., :size], w) if to_latent else jnp.einsum("bshr,hvr->bshv", x, w)
