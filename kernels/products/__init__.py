"""Products of one input with several matrices, such as those of queries, keys and values."""

import jax
from jaxtyping import Array, Float

from kernels import dispatch
from kernels.backends.device import device
from kernels.stacked import Stacked


FEW_ROWS = 64  # up to this number of rows, reading a matrix takes most of the time of a product with it


def apart(y: Float[Array, "*batch out"]) -> Float[Array, "*batch out"]:
    """Keeps the product y of few rows apart from what is done with it, on a GPU.

    Otherwise the sum with a bias, or a GELU, becomes a part of cuBLAS's product, and XLA copies the layer's matrix out
    of the stack.
    """
    few = device().platform == "gpu" and y.size <= FEW_ROWS * y.shape[-1]
    return jax.lax.optimization_barrier(y) if few else y


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
