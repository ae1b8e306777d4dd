"""Defines products of one input with several matrices: each is a product by itself."""

from jaxtyping import Array, Float

from kernels.products import product
from kernels.stacked import Stacked, read


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def products(
    x: Float[Array, "*batch in"], matrices: tuple[Float[Array, "_ in"] | Stacked, ...]
) -> tuple[Float[Array, "*batch _"], ...]:
    """Computes `kernels.products` in plain JAX."""
    return tuple(product(x, read(w)) for w in matrices)
