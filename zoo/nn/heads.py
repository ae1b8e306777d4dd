"""Heads that stand in the place of a model's output embeddings, and give a result for each text, not for each token.

    model = zoo.load("qwen3-embedding-0.6b", head="embedding")
    model(tokens)  # [batch, embed]

A head is a part of the contract (`zoo.nn.model.AbstractModel.head`), so every family takes every head.
`zoo.surgery.with_head` puts a new one on a model; `zoo.weights.heads` reads and writes their files.
"""

import abc
from collections.abc import Mapping
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from zoo.nn.layers import AbstractLinear, Linear


Kind = Literal["embedding", "classification", "reward"]
Pooling = Literal["lasttoken", "mean", "cls"]
Activation = Literal["Identity", "Tanh"]


class AbstractHead(eqx.Module):
    """Computes a result for each text from the features of its tokens."""

    pad: eqx.AbstractVar[int | None]
    """The id of padding, which counts as no text's token; None: only segments say what is padding."""

    kind: ClassVar[Kind]
    bare: ClassVar[bool]
    """Whether files with this head name the model's tensors without the family's beginning, such as `model.`."""

    @property
    @abc.abstractmethod
    def tensors(self) -> Mapping[str, str]:
        """Path of each parameter, from the head -> name of its tensor, after the folder of its file and a slash."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], member: Bool[Array, "batch texts seq"]
    ) -> Float[Array, "batch texts ..."]:
        """Computes the results of texts, whose tokens are those where `member` holds.

        The result of a text without tokens means nothing, but is finite.
        """

    def members(
        self, tokens: Int[Array, "batch seq"], segments: Int[Array, "batch seq"] | None, texts: int = 1
    ) -> Bool[Array, "batch texts seq"]:
        """Returns which tokens belong to each of up to `texts` texts that are packed into a row.

        Those of text n have the segment n + 1. None: a row is one text. Tokens that are `pad` belong to no text.
        """
        numbers = jnp.ones(tokens.shape, jnp.int32) if segments is None else segments
        numbers = numbers if self.pad is None else jnp.where(tokens == self.pad, 0, numbers)
        return numbers[:, None] == jnp.arange(1, texts + 1)[None, :, None]


def pool(
    x: Float[Array, "batch seq embed"], member: Bool[Array, "batch texts seq"], how: Pooling
) -> Float[Array, "batch texts embed"]:
    """Returns one vector for each text: that of its last token, of its first ("cls"), or the mean of all.

    Sums are in float32, and rounded once.
    """
    places = jnp.arange(x.shape[1])[None, None]
    if how == "lasttoken":
        member = member & (places == jnp.max(jnp.where(member, places, -1), axis=-1, keepdims=True))
    elif how == "cls":
        member = member & (places == jnp.min(jnp.where(member, places, x.shape[1]), axis=-1, keepdims=True))
    weights = member.astype(jnp.float32)
    weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1)
    sums = jnp.einsum("bts,bse->bte", weights, x.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST)
    return sums.astype(x.dtype)


class Dense(eqx.Module):
    """A linear map of a text's vector, and an activation."""

    linear: Linear
    activation: Activation = eqx.field(static=True)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        x = self.linear(x)
        return jnp.tanh(x) if self.activation == "Tanh" else x


class EmbeddingHead(AbstractHead):
    """Pools a text's features into its embedding, which may pass linear maps and be normalised: [batch, texts, width].

    Embeddings are float32. These are the modules of sentence-transformers behind its `Transformer`.
    """

    dense: tuple[Dense, ...] = ()
    pooling: Pooling = eqx.field(static=True, default="lasttoken")
    normalize: bool = eqx.field(static=True, default=True)
    pad: int | None = eqx.field(static=True, default=None)
    kind: ClassVar[Kind] = "embedding"
    bare: ClassVar[bool] = True

    @property
    def tensors(self) -> Mapping[str, str]:
        fields = [(n, f) for n, each in enumerate(self.dense) for f in ("weight", "bias")]
        return {f"dense.{n}.linear.{field}": f"{n + 2}_Dense/linear.{field}" for n, field in fields}

    def __call__(
        self, x: Float[Array, "batch seq embed"], member: Bool[Array, "batch texts seq"]
    ) -> Float[Array, "batch texts width"]:
        x = pool(x, member, self.pooling)
        for dense in self.dense:
            x = dense(x)
        x = x.astype(jnp.float32)
        return normalized(x) if self.normalize else x


def normalized(x: Float[Array, "*batch width"]) -> Float[Array, "*batch width"]:
    """Returns vectors of length 1. That of zeros stays as it is."""
    return x / jnp.maximum(jnp.sqrt(jnp.maximum(jnp.sum(x * x, axis=-1, keepdims=True), 1e-24)), 1e-12)


class ClassificationHead(AbstractHead):
    """Computes logits of labels from the features of a text's last token: [batch, texts, labels].

    It is transformers' ForSequenceClassification. Probabilities are the softmax of the logits; or, if a text has
    `several` labels, the sigmoid of each.
    """

    score: AbstractLinear
    labels: tuple[str, ...] = eqx.field(static=True)
    pad: int | None = eqx.field(static=True)
    several: bool = eqx.field(static=True)
    kind: ClassVar[Kind] = "classification"
    bare: ClassVar[bool] = False

    def __init__(
        self, hidden_size: int, labels: tuple[str, ...], pad: int | None, *, several: bool = False, key: PRNGKeyArray
    ):
        self.score = Linear(hidden_size, len(labels), key=key)
        self.labels, self.pad, self.several = labels, pad, several

    @property
    def tensors(self) -> Mapping[str, str]:
        return {"score.weight": "score.weight"}

    def __call__(
        self, x: Float[Array, "batch seq embed"], member: Bool[Array, "batch texts seq"]
    ) -> Float[Array, "batch texts labels"]:
        return self.score(pool(x, member, "lasttoken"))


class RewardHead(AbstractHead):
    """Computes a reward, a number without bounds, from the features of a text's last token: [batch, texts].

    Its files are those of transformers' ForSequenceClassification with one label.
    """

    score: AbstractLinear
    pad: int | None = eqx.field(static=True)
    kind: ClassVar[Kind] = "reward"
    bare: ClassVar[bool] = False

    def __init__(self, hidden_size: int, pad: int | None, *, key: PRNGKeyArray):
        self.score = Linear(hidden_size, 1, key=key)
        self.pad = pad

    @property
    def tensors(self) -> Mapping[str, str]:
        return {"score.weight": "score.weight"}

    def __call__(
        self, x: Float[Array, "batch seq embed"], member: Bool[Array, "batch texts seq"]
    ) -> Float[Array, "batch texts"]:
        return self.score(pool(x, member, "lasttoken"))[..., 0]
