"""Products of each head's features with its own part of a matrix, as in latent attention: signature and meaning."""

from jaxtyping import Array, Float

from kernels import dispatch
from kernels.stacked import Stacked


def head_products(
    x: Float[Array, "batch seq heads features"],
    matrix: Float[Array, "rows latent"] | Stacked,
    first: int,
    size: int,
    *,
    to_latent: bool,
    implementation: str | None = None,
) -> Float[Array, "batch seq heads _"]:
    """Multiplies each head's features by W, which are `size` rows of the matrix, from the head's row `first` on.

    The matrix, (heads * rows of a head, latent), maps latents to features of all heads.

    Args:
        x: with `to_latent` a head's first `size` features are multiplied; without it, all, which are latents.
        matrix: in the dtype of x. A layer of a stack (`kernels.stacked.Stacked`) is not copied by "triton".
        first: the number of a head's rows before W.
        size: the number of W's rows.
        to_latent: whether the results are `x W`, latents; else they are `W x`, `size` features of a head.
        implementation: is one of

            - "reference": plain JAX.
            - "triton": for NVIDIA GPUs, up to 16 rows in 16 bits: one kernel, which reads x and W where they are. Sums
              are in float32, and rounded once.

            None chooses "triton" on a GPU, and "reference" for what it refuses.

    Raises:
        ValueError: the implementation asked for cannot take these arguments.
    """
    return dispatch.run("head_products", implementation, x, matrix, first, size, to_latent=to_latent)
