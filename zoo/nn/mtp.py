"""Multi-token prediction (arXiv:2412.19437, section 2.2): a module of a model that predicts the token after the next.

Losses learn from it, and drafts of speculative decoding come from it.
"""

import abc

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock, Report
from zoo.nn.cache import AbstractCache
from zoo.nn.layers import AbstractLinear, Embedding, Linear, OffsetRMSNorm, RMSNorm
from zoo.nn.model import AbstractModel


class AbstractMTP(eqx.Module):
    """The module: `y, cache, report = mtp(x, embedding(following), cache, at)`, then `model.unembed(y)`."""

    @abc.abstractmethod
    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        following: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report]:
        """Features that the model's `unembed` turns into logits of the token after the next, the new cache, and what
        the module's layer reports of these tokens.

        Args:
            x: features of each token, from the model's `hidden`.
            following: the embedding of the token after each.
            cache: from `init_cache`. None: these tokens are all there is.
            at: where the tokens stand.
        """

    @abc.abstractmethod
    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        """An empty cache for positions 0 to `length` - 1 of each row."""


class AbstractOneLayerMTP(AbstractMTP):
    """A module of one layer: `norm(block(fc([pre_fc_norm_embedding(following), pre_fc_norm_hidden(x)])))`.

    `x` is from `Model.hidden`, so it is normed, as in vLLM and SGLang.
    """

    pre_fc_norm_embedding: eqx.AbstractVar[OffsetRMSNorm]
    pre_fc_norm_hidden: eqx.AbstractVar[OffsetRMSNorm]
    fc: eqx.AbstractVar[AbstractLinear]
    block: eqx.AbstractVar[AbstractDecoderBlock]
    norm: eqx.AbstractVar[OffsetRMSNorm]

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        following: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report]:
        y = jnp.concatenate([self.pre_fc_norm_embedding(following), self.pre_fc_norm_hidden(x)], axis=-1)
        y, cache, report = self.block(self.fc(y), cache, at)
        return self.norm(y), cache, report

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.block.init_cache(1, batch, length, dtype)


class NextNMTP(AbstractMTP):
    """A module of one layer, as in DeepSeek V3: `norm(block(eh_proj([enorm(following), hnorm(x)])))`.

    `x` is from `Model.hidden`, so it is normed. The paper leaves that open; vLLM, SGLang and transformers agree on it.
    """

    enorm: RMSNorm
    hnorm: RMSNorm
    eh_proj: AbstractLinear
    block: AbstractDecoderBlock
    norm: RMSNorm  # shared_head.norm in checkpoints

    def __init__(self, hidden: int, eps: float, block: AbstractDecoderBlock, *, key: PRNGKeyArray):
        self.enorm = RMSNorm(hidden, eps)
        self.hnorm = RMSNorm(hidden, eps)
        self.eh_proj = Linear(2 * hidden, hidden, key=key)
        self.block = block
        self.norm = RMSNorm(hidden, eps)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        following: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report]:
        y = jnp.concatenate([self.enorm(following), self.hnorm(x)], axis=-1)
        y, cache, report = self.block(self.eh_proj(y), cache, at)
        return self.norm(y), cache, report

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.block.init_cache(1, batch, length, dtype)


class AbstractMTPModel(AbstractModel):
    """A model that has the module if it is made with the part "mtp"."""

    mtp: eqx.AbstractVar[AbstractMTP | None]


def module_of(model: AbstractModel) -> tuple[AbstractMTP, Embedding]:
    """The model's module, and the embedding that both share.

    Raises:
        ValueError: if the model has none.
    """
    if not isinstance(model, AbstractMTPModel) or model.mtp is None:
        raise ValueError(
            'The model has no module for the token after the next: load a model whose FAMILY.parts has "mtp", with '
            'parts=("mtp",).'
        )
    return model.mtp, model.embed_tokens
