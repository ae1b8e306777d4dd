"""Products of one input with several matrices, such as those of queries, keys and values."""

from jaxtyping import Array, Float

from kernels import dispatch
from kernels.stacked import Stacked


def products(
    x: Float[Array, "*batch in"], *matrices: Float[Array, "_ in"] | Stacked, implementation: str | None = None
) -> tuple[Float[Array, "*batch _"], ...]:
    """Multiplies `x` by the transpose of each matrix, (out, in), and returns as many results.

    Sums are in float32 if `x` has 16 bits, and rounded to its dtype.

    `implementation` is one of

    - "reference": one product for each matrix, by XLA.
    - "triton": for NVIDIA GPUs, up to 16 rows in 16 bits: one kernel for all products, which reads the matrices where
      they are. If they are layers of stacks, `kernels.stacked.Stacked`, no layer is copied.
    - "invariant": as "reference", with bits that do not depend on the number of rows.

    None chooses "triton" on a GPU, and "reference" for what it refuses.

    Raises:
        ValueError: a matrix has another dtype or number of features than `x`, or the implementation asked for cannot
            take these arguments.
    """
    for w in matrices:
        if w.dtype != x.dtype or w.shape[1] != x.shape[-1]:
            raise ValueError(
                f"A matrix, (out, in), has the shape {w.shape} in {w.dtype}, and x has rows of {x.shape[-1]} features "
                f"in {x.dtype}: dtype and features must be the same."
            )
    return dispatch.run("products", implementation, x, matrices)
