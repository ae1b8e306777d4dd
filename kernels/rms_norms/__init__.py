"""Root mean square norms of several arrays, and of a sum that has a norm in it: signatures and meaning."""

from jaxtyping import Array, Float

from kernels import dispatch
from kernels.rms_norms.shared import Chain, Norm, features


def rms_norms(
    *pairs: tuple[Float[Array, "*batch _"], Norm], implementation: str | None = None
) -> tuple[Float[Array, "*batch _"], ...]:
    """Computes `norm(x)` for each pair `(x, norm)`. Of an x with more features than the norm, the first ones are normed.

    `implementation` is one of

    - "reference": each norm by itself.
    - "triton": for NVIDIA GPUs, up to 16 rows in 16 bits: one kernel for all norms. If weights are layers of stacks,
      `kernels.stacked.Stacked`, no layer is copied.
    - "invariant": as "reference", with bits that do not depend on the number of rows.

    None chooses "triton" on a GPU, and "reference" for what it refuses.

    Raises:
        ValueError: arrays have different rows, or fewer features than the norm, or the implementation asked for cannot take
            these arguments.
    """
    rows = {x.shape[:-1] for x, _ in pairs}
    for x, norm in pairs:
        if len(rows) > 1 or features(norm) > x.shape[-1]:
            raise ValueError(
                f"A norm of {features(norm)} features cannot take an array of the shape {x.shape}: all arrays must have "
                "the same rows, and as many features as the norm at least."
            )
    chains = tuple(Chain(x, norm) for x, norm in pairs)
    return tuple(normed for (normed,) in dispatch.run("rms_norms", implementation, chains))


def add_and_norm(
    x: Float[Array, "*batch features"],
    y: Float[Array, "*batch features"],
    norm: Norm,
    then: Norm,
    *,
    implementation: str | None = None,
) -> tuple[Float[Array, "*batch features"], Float[Array, "*batch features"]]:
    """Computes the sum `x + norm(y)` and its norm, `then(x + norm(y))`, as in blocks with norms around their parts.

    `implementation` is as in `rms_norms`: "triton" takes one kernel for both results.

    Raises:
        ValueError: the norms have not the features of x, or the implementation asked for cannot take these arguments.
    """
    if not features(norm) == features(then) == x.shape[-1]:
        raise ValueError(f"Norms of {features(norm)} and {features(then)} features cannot take rows of {x.shape[-1]}.")
    ((total, normed),) = dispatch.run("rms_norms", implementation, (Chain(y, norm, x, then),))
    return total, normed
