"""Root mean square norms of several arrays, such as the two latents of an attention layer: signature and meaning."""

from jaxtyping import Array, Float

from kernels import dispatch
from kernels.rms_norms.shared import Norm, features


def rms_norms(
    *pairs: tuple[Float[Array, "*batch _"], Norm], implementation: str | None = None
) -> tuple[Float[Array, "*batch _"], ...]:
    """Computes `norm(x)` for each pair `(x, norm)`. Of an x with more features than its norm the first are normed.

    `implementation` is one of

    - "reference": each norm by itself.
    - "triton": for NVIDIA GPUs, up to 16 rows in 16 bits: one kernel for all norms. Weights that are layers of stacks,
      `kernels.stacked.Stacked`, are not copied.

    None chooses "triton" on a GPU, and "reference" for what it refuses.

    Raises:
        ValueError: arrays have different rows, or one has fewer features than its norm, or the implementation asked
            for cannot take these arguments.
    """
    for x, norm in pairs:
        if x.shape[:-1] != pairs[0][0].shape[:-1] or features(norm) > x.shape[-1]:
            raise ValueError(
                f"A norm of {features(norm)} features is given an array of the shape {x.shape}, beside one of the "
                f"shape {pairs[0][0].shape}: they must have the same rows, and at least as many features as the norm."
            )
    return dispatch.run("rms_norms", implementation, pairs)
