"""Products of one input with several matrices, such as those of queries, keys and values."""

import jax
import jax.numpy as jnp
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


def product(x: Float[Array, "*batch in"], w: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """Computes `x @ w.T`. On a CPU a w of more rows than columns has its gradient computed the other way round."""
    widens = w.shape[0] > w.shape[1] and x.dtype == w.dtype
    return _widened(x, w) if widens and device().platform == "cpu" else jnp.einsum("...i,oi->...o", x, w)


@jax.custom_vjp
def _widened(x: Float[Array, "*batch in"], w: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """Computes `x @ w.T` for a w of more rows than columns, with a gradient of w for a CPU.

    That gradient is a product of x and y's gradient. XLA transposes its first factor for it, in one loop with what
    makes the factor. JAX would put y's gradient first: the larger one, whose loop is the derivative of the activation
    behind y, read in strides. So x comes first, and the result is transposed.
    """
    return jnp.einsum("...i,oi->...o", x, w)


def _widened_backward(of: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, w = of
    return jnp.einsum("...o,oi->...i", gradient, w), jnp.einsum("...i,...o->io", x, gradient).T


_widened.defvjp(lambda x, w: (jnp.einsum("...i,oi->...o", x, w), (x, w)), _widened_backward)


def products(
    x: Float[Array, "*batch in"], *matrices: Float[Array, "_ in"] | Stacked, implementation: str | None = None
) -> tuple[Float[Array, "*batch _"], ...]:
    """Multiplies `x` by the transpose of each matrix, (out, in), and returns as many results.

    Sums are in float32 if `x` has 16 bits, and rounded to its dtype.

    `implementation` is one of

    - "reference": one product for each matrix, by XLA.
    - "triton": for NVIDIA GPUs, up to 16 rows in 16 bits: one kernel for all products, which reads the matrices where
      they are. If they are layers of stacks, `kernels.stacked.Stacked`, no layer is copied.

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
