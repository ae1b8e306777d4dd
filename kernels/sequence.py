"""What operations that read a row from its first token to its last ask of `Tokens`."""

import jax.numpy as jnp
from jaxtyping import Array, Bool

from kernels.masks import Tokens


def padding(at: Tokens, shape: tuple[int, ...]) -> Bool[Array, "batch seq"]:
    """Whether each of the tokens, [batch, seq], is padding: of segment 0, or at a position below 0."""
    none = jnp.zeros(shape, bool)
    if at.segments is not None:
        none |= at.segments == 0
    return none if at.positions is None else none | (jnp.asarray(at.positions) < 0)


def begins(at: Tokens, shape: tuple[int, ...]) -> Bool[Array, "batch seq"]:
    """Whether each of the tokens, [batch, seq], is the first of a document that follows another one in its row."""
    if at.segments is None:
        return jnp.zeros(shape, bool)
    changes = at.segments[:, 1:] != at.segments[:, :-1]
    return jnp.pad(changes, ((0, 0), (1, 0))) & (at.segments != 0)
