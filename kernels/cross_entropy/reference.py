"""Defines `kernels.cross_entropy` in plain JAX, with the logits of all tokens at once."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def cross_entropy(
    unembed: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq vocab"]],
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    chunk: int,
    z_loss: float,
) -> Float[Array, "3"]:
    """Computes `kernels.cross_entropy` with the logits of all tokens at once, in float32, or in float64 if x is."""
    del chunk  # here all tokens are one chunk
    logits = unembed(jnp.where(mask[..., None], x, 0))
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    targets = jnp.where(mask, targets, 0)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    correct = (jnp.argmax(logits, axis=-1) == targets).astype(logits.dtype)
    sums = jnp.stack([loss + z_loss * jnp.square(log_z), loss, correct])
    return jnp.sum(jnp.where(mask[None], sums, 0), axis=(1, 2))
