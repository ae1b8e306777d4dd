"""Sums and products of rows whose bits do not depend on the other rows, within `kernels.prefer("invariant")`.

XLA chooses by the shapes of whole arrays how it adds numbers up. On a CPU it multiplies a single row in another way
than several rows, and sums few rows of features in another order than many. A CPU that multiplies numbers of bfloat16
by instructions of its own takes different ones for few rows and for many. Here a single row gets a second one beside
it, factors are in float32, and sums are written out, so that XLA has nothing to choose. Outside of
`prefer("invariant")` these are the plain functions of JAX; only on a CPU a product may have its weight's gradient
computed the other way round.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import dispatch
from kernels.backends.device import device


def refusal() -> str | None:
    """Returns why no bits are promised on this device, or None if they are."""
    here = device()
    return None if here.platform == "cpu" else f"its bits are promised on CPUs alone, and this is a {here.kind}"


def invariant() -> bool:
    """Whether this is within `prefer("invariant")`.

    Raises:
        ValueError: it is, and the device is no CPU.
    """
    if not dispatch.prefers(dispatch.INVARIANT):
        return False
    if (reason := refusal()) is not None:
        raise ValueError(f"kernels.prefer({dispatch.INVARIANT!r}): {reason}. Leave the preference out.")
    return True


def product(subscripts: str, x: Float[Array, "..."], w: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes `jnp.einsum(subscripts, x, w)` of rows x with weights w, whose common axes are the last ones of x."""
    of_x, of_w = subscripts.split("->")[0].split(",")
    axes = x.ndim - len(set(of_x) & set(of_w))  # of rows
    if not invariant():
        widens = subscripts == "...i,oi->...o" and w.shape[0] > w.shape[1] and x.dtype == w.dtype
        return _widened(x, w) if widens and device().platform == "cpu" else jnp.einsum(subscripts, x, w)
    rows, named = math.prod(x.shape[:axes]), 1 if "..." in of_x else axes
    # All rows along one axis, so that XLA has the same product of two matrices for any shape; and two of them at least.
    x_rows = x.reshape(rows, *(1,) * (named - 1), *x.shape[axes:])
    x_rows = jnp.pad(x_rows, ((0, int(rows == 1)), *[(0, 0)] * (x_rows.ndim - 1)))
    # The barriers keep XLA from multiplying the row that is used alone.
    out = jnp.einsum(subscripts, *(wide(jax.lax.optimization_barrier(factor)) for factor in (x_rows, w)))
    out = jax.lax.optimization_barrier(out.astype(jnp.result_type(x, w)))
    return out[:rows].reshape(*x.shape[:axes], *out.shape[named:])


def wide(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns x in float32, of which a CPU multiplies few and many rows in one way. (float64 stays.)"""
    return x if x.dtype == jnp.float64 else x.astype(jnp.float32)


@jax.custom_vjp
def _widened(x: Float[Array, "*batch in"], w: Float[Array, "out in"]) -> Float[Array, "*batch out"]:
    """Computes x @ w.T for a w of more rows than columns, with a gradient of w for a CPU.

    That gradient is a product of x and y's gradient. XLA transposes its first factor for it, in one loop with what
    makes the factor. JAX would put y's gradient first: the larger one, whose loop is the derivative of the activation
    behind y, read in strides. So x comes first, and the result is transposed.
    """
    return jnp.einsum("...i,oi->...o", x, w)


def _widened_backward(of: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, w = of
    return jnp.einsum("...o,oi->...i", gradient, w), jnp.einsum("...i,...o->io", x, gradient).T


_widened.defvjp(lambda x, w: (jnp.einsum("...i,oi->...o", x, w), (x, w)), _widened_backward)


def total(x: Float[Array, "*shape"], axis: int = -1) -> Float[Array, "*sums"]:
    """Computes `jnp.sum(x, axis, keepdims=True)`."""
    if not invariant():
        return jnp.sum(x, axis=axis, keepdims=True)
    return jnp.moveaxis(halved(jnp.moveaxis(x, axis, -1)), -1, axis)


def halved(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch 1"]:
    """Sums the last axis by adding its second half to its first one, until one number is left."""
    dim = x.shape[-1]
    # Without the barrier a product in x and the first sum may become one instruction, which rounds once.
    x = jax.lax.optimization_barrier(x)
    x = jnp.pad(x, (*[(0, 0)] * (x.ndim - 1), (0, (1 << (dim - 1).bit_length()) - dim)))
    while (half := x.shape[-1] // 2) > 0:
        x = x[..., :half] + x[..., half:]
    return x


def mean(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch 1"]:
    """Computes `jnp.mean(x, axis=-1, keepdims=True)`."""
    return total(x) / x.shape[-1] if invariant() else jnp.mean(x, axis=-1, keepdims=True)


def softmax(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Computes `jax.nn.softmax(x, axis=-1)`, as routers of mixtures do.

    Raises:
        ValueError: within `prefer("invariant")`, for which no form of it has equal bits on a CPU yet.
    """
    if invariant():
        raise ValueError(
            'kernels.prefer("invariant") cannot serve a router with a softmax: its bits would depend on the batch. '
            "Leave the preference out."
        )
    return jax.nn.softmax(x, axis=-1)


def exp(x: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Computes `jnp.exp(x)`, kept apart from what comes before and after it."""
    return jax.lax.optimization_barrier(jnp.exp(jax.lax.optimization_barrier(x)))
