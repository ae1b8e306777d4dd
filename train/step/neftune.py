"""NEFTune (arXiv:2310.05914): uniform noise on the embeddings of tokens while a model is fine-tuned."""

from typing import TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from zoo.nn.layers import Embedding
from zoo.nn.model import AbstractModel


T = TypeVar("T", bound=AbstractModel)


class NoisyEmbedding(eqx.Module):
    """An `Embedding` with noise between -1 and 1, times `size`, on its vectors. As an output head it has no noise."""

    embedding: Embedding
    size: Float[Array, "batch seq"]
    keys: Key[Array, " batch"]  # one for each row, so that a row's noise does not depend on other rows

    def __call__(self, tokens: Int[Array, "batch seq"]) -> Float[Array, "batch seq embed"]:
        x = self.embedding(tokens)
        noise = jax.vmap(lambda key: jax.random.uniform(key, x.shape[1:], minval=-1, maxval=1))(self.keys)
        noise *= self.size[..., None]
        return x + noise.astype(x.dtype)

    def attend(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embedding.attend(x)


def noisy(model: T, segments: Int[Array, "batch seq"], *, alpha: float, keys: Key[Array, " batch"]) -> T:
    """Returns the model with noise of up to alpha / sqrt(L d) on each of the d features of a token.

    L is the number of tokens in the token's document. The returned model is for a batch with these `segments`. There is
    one key for each row. This is the paper's algorithm 1, whose alphas are 5, 10 and 15.
    """
    lengths = jax.vmap(lambda row: jnp.bincount(row, length=row.size + 1)[row])(segments)
    table = model.embed_tokens
    size = alpha * jax.lax.rsqrt(lengths.astype(jnp.float32) * table.weight.shape[1])
    return eqx.tree_at(lambda m: m.embed_tokens, model, NoisyEmbedding(table, size, keys))
