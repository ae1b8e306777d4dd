"""Defines `kernels.rms_norms` and `kernels.add_and_norm`: the norms' own formulas, one after the other."""

from jaxtyping import Array, Float

from kernels.rms_norms.shared import Chain, features


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def rms_norms(chains: tuple[Chain, ...]) -> tuple[tuple[Float[Array, "*batch _"], ...], ...]:
    """Computes, for each chain, the norm; with a residual, the sum and its norm."""
    return tuple(map(_of, chains))


def _of(chain: Chain) -> tuple[Array, ...]:
    y = chain.norm(chain.x[..., : features(chain.norm)])
    if chain.residual is None or chain.then is None:
        return (y,)
    total = chain.residual + y
    return total, chain.then(total)
