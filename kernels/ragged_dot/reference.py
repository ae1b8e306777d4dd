"""Defines `kernels.ragged_dot` in plain JAX: every row is multiplied by every matrix, and then masked."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int8

from kernels.coded import Coded
from kernels.quantized_matmul.quantize import LARGEST
from kernels.stacked import Stacked, read


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def ragged_dot(
    x: Float[Array, "tokens in"] | Int8[Array, "tokens in"],
    w: Float[Array, "groups out in"] | Int8[Array, "groups out in"] | Stacked | Coded,
    group_sizes: Int[Array, " groups"],
) -> Float[Array, "tokens out"]:
    """Computes `kernels.ragged_dot` as every row times every matrix, in float32, or in float64 if x is."""
    exact = jnp.float64 if x.dtype == jnp.float64 else jnp.float32
    x = x.astype(exact) if x.dtype in LARGEST else x
    w = w.read() if isinstance(w, Coded) else read(w)
    rows, ends = jnp.arange(x.shape[0], dtype=jnp.int32)[None, :], jnp.cumsum(group_sizes)[:, None]
    member = ((rows >= ends - group_sizes[:, None]) & (rows < ends))[:, :, None]
    # Masked both before and after the product, so that no NaN passes, forward or in the gradients.
    out = jnp.einsum("gti,goi->gto", jnp.where(member, x[None], 0), w.astype(x.dtype), preferred_element_type=exact)
    return jnp.where(member, out, 0).sum(axis=0).astype(x.dtype)
