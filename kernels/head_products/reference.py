"""Defines `kernels.head_products` in plain JAX."""

from jaxtyping import Array, Float

from kernels.invariant import product
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
    return product("bshn,hnr->bshr", x[..., :size], w) if to_latent else product("bshr,hvr->bshv", x, w)
