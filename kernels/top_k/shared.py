"""The parts that `top_k` implementations share: the form of their result, and scores of logits."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.sums import pick


Score = Literal["softmax", "sigmoid"]


class Best(NamedTuple):
    """The best options of rows, the best one first."""

    scores: Float[Array, "*rows options"]  # of all options
    values: Float[Array, "*rows k"]  # the scores of the best, or their shares of the sum
    indices: Int[Array, "*rows k"]


def scores_of(logits: Float[Array, "*rows options"], score: Score | None) -> Float[Array, "*rows options"]:
    """Returns the scores of logits, in float32; None: the logits."""
    match score:
        case None:
            return logits
        case "softmax":
            return jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        case "sigmoid":
            return jax.nn.sigmoid(logits.astype(jnp.float32))


def best(scores: Float[Array, "*rows options"], indices: Int[Array, "*rows k"], normalise: float | None) -> Best:
    """Returns the result for options with these indices."""
    return Best(scores, normalised(pick(scores, indices), normalise), indices)


def normalised(values: Float[Array, "*rows k"], normalise: float | None) -> Float[Array, "*rows k"]:
    """Divides the values by their sum plus `normalise`; None: returns them."""
    return values if normalise is None else values / (jnp.sum(values, axis=-1, keepdims=True) + normalise)
