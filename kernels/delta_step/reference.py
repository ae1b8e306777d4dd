"""Defines the decode step by the recurrence of `kernels.delta_rule`: it reads the states and writes them back."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from kernels.delta_rule.reference import delta_rule
from kernels.stacked import Slots


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def delta_step(
    q: Float[Array, "batch 1 heads dim"],
    k: Float[Array, "batch 1 heads dim"],
    v: Float[Array, "batch 1 v_heads v_dim"],
    decay: Float[Array, "batch 1 v_heads"] | Float[Array, "batch 1 v_heads dim"],
    beta: Float[Array, "batch 1 v_heads"],
    restart: Bool[Array, "batch 1"],
    state: Slots,
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch 1 v_heads v_dim"], Slots]:
    """Computes one token of `kernels.delta_rule`, from and to a cache."""
    exact = jnp.float64 if v.dtype == jnp.float64 else jnp.float32
    given = q, k, v, decay, beta, restart, state.read().astype(exact)
    out, last = delta_rule(*given, scale=scale, erase=erase)
    return out, state.write(last)
