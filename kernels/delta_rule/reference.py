"""Defines `kernels.delta_rule` as its recurrence, one token after the other."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def delta_rule(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq heads dim"],
    v: Float[Array, "batch seq v_heads v_dim"],
    decay: Float[Array, "batch seq v_heads"] | Float[Array, "batch seq v_heads dim"],
    beta: Float[Array, "batch seq v_heads"],
    restart: Bool[Array, "batch seq"],
    state: Float[Array, "batch v_heads dim v_dim"],
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch seq v_heads v_dim"], Float[Array, "batch v_heads dim v_dim"]]:
    """Computes `kernels.delta_rule` in the state's dtype, float32 or float64."""
    dtype, exact, group = v.dtype, state.dtype, v.shape[2] // k.shape[2]
    decay = decay if decay.ndim == 4 else decay[..., None]

    def token(state: Array, now: tuple[Array, ...]) -> tuple[Array, Array]:
        q, k, v, decay, beta, restart = now
        q, k = (jnp.repeat(x.astype(exact), group, axis=1) for x in (q, k))
        state = jnp.where(restart[:, None, None, None], 0, state) * jnp.exp(decay.astype(exact))[..., None]
        held = jnp.einsum("bhdv,bhd->bhv", state, k) if erase else jnp.zeros((), exact)
        written = beta.astype(exact)[..., None] * (v.astype(exact) - held)
        state = state + k[..., None] * written[:, :, None]
        return state, scale * jnp.einsum("bhdv,bhd->bhv", state, q)

    by_token = lambda x: jnp.moveaxis(x, 1, 0)
    state, out = jax.lax.scan(token, state, tuple(map(by_token, (q, k, v, decay, beta, restart))))
    return jnp.moveaxis(out, 0, 1).astype(dtype), state
