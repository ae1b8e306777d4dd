"""Defines `kernels.rms_norms`: each norm by itself."""

from jaxtyping import Array, Float

from kernels.rms_norms.shared import Norm, features


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def rms_norms(pairs: tuple[tuple[Float[Array, "*batch _"], Norm], ...]) -> tuple[Float[Array, "*batch _"], ...]:
    """Computes `kernels.rms_norms`."""
    return tuple(norm(x[..., : features(norm)]) for x, norm in pairs)
