"""The parts that `top_k` implementations share: the form of their result, and scores of logits."""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.invariant import softmax


Score = Literal["softmax", "sigmoid"]


class Best(NamedTuple):
    """The best options of rows, the best one first."""

    scores: Float[Array, "*rows options"]  # of all options
    values: Float[Array, "*rows k"]  # the scores of the best
    indices: Int[Array, "*rows k"]


def scores_of(logits: Float[Array, "*rows options"], score: Score | None) -> Float[Array, "*rows options"]:
    """Returns the scores of logits, in float32; None: the logits."""
    match score:
        case None:
            return logits
        case "softmax":
            return softmax(logits.astype(jnp.float32))
        case "sigmoid":
            return jax.nn.sigmoid(logits.astype(jnp.float32))
