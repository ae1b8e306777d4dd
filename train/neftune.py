"""NEFTune (arXiv:2310.05914): uniform noise on the embeddings of tokens while a model is fine-tuned."""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.nn.layers import Embedding
from zoo.surgery import modules


T = TypeVar("T")


class NoisyEmbedding(Embedding):
    """An `Embedding` whose vectors get noise between -1 and 1, times `size`; as an output head it has none."""

    size: Float[Array, "batch seq"]
    keys: Key[Array, " batch"]  # one for each sequence, so that its noise does not depend on those beside it

    def __init__(self, embedding: Embedding, size: Float[Array, "batch seq"], keys: Key[Array, " batch"]):
        self.weight, self.size, self.keys = embedding.weight, size, keys

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        x = super().__call__(tokens)
        noise = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:], minval=-1, maxval=1))(self.keys)
        noise *= self.size[..., None]
        return x + noise.astype(x.dtype)


def noisy(model: T, segments: Int[Array, "batch seq"], *, alpha: float, keys: Key[Array, " batch"]) -> T:
    """`model` with noise of up to alpha / sqrt(L d) on each of the d features of a token, whose document has L tokens.

    For the batch of these `segments` only, with a key for each of its rows. The paper's algorithm 1; its alphas are 5,
    10 and 15.
    """
    tokens = lambda m: next(modules(m, Embedding))[1]  # a second one, if there is one, is of positions
    lengths = jax.vmap(lambda row: jnp.bincount(row, length=row.size + 1)[row])(segments)
    size = alpha * jax.lax.rsqrt(lengths.astype(jnp.float32) * tokens(model).weight.shape[1])
    return eqx.tree_at(tokens, model, NoisyEmbedding(tokens(model), size, keys))
