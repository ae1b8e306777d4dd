"""Defines `kernels.top_k` in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.stacked import Stacked, read
from kernels.sums import largest
from kernels.top_k.shared import Best, Score, best, normalised, scores_of


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def top_k(
    logits: Float[Array, "*rows options"],
    bias: Float[Array, " options"] | Stacked | None,
    *,
    k: int,
    score: Score | None,
    groups: int,
    kept: int,
    normalise: float | None,
) -> Best:
    """Computes `kernels.top_k`."""
    scores = scores_of(logits, score)
    if bias is None and groups == 1:
        values, indices = largest(scores, k)
        return Best(scores, normalised(values, normalise), indices)
    ranked = scores if bias is None else scores + jnp.broadcast_to(read(bias), scores.shape)
    if groups > 1:
        by_group = ranked.reshape(*ranked.shape[:-1], groups, -1)
        groups_kept = largest(jnp.sum(largest(by_group, 2)[0], axis=-1), kept)[1]
        is_kept = jnp.any(jax.nn.one_hot(groups_kept, groups, dtype=bool), axis=-2)
        ranked = jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(ranked.shape)
    return best(scores, largest(ranked, k)[1], normalise)
