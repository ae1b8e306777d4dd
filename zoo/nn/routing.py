"""Routers of mixtures of experts, and how their experts are chosen where that is more than a top-k.

A router is no `Linear`, so that LoRA and quantization leave it alone.
"""

import abc
import itertools
from typing import ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.backends.device import device
from kernels.top_k.shared import Best, Score
from zoo.nn.block import AbstractBlock, AbstractSharingBlock, Report, Shared
from zoo.nn.cache import AbstractCache
from zoo.nn.layers import AbstractExpertLinear, AbstractReadInPlace, Float32, recomputed
from zoo.nn.model import AbstractModel
from zoo.nn.moe import Routing, choose, given_experts
from zoo.nn.stack import Reports, Stack


M = TypeVar("M", bound=eqx.Module)
LOGITS = "router"  # the name of the logits, for policies of `jax.checkpoint`
A = TypeVar("A", bound=AbstractModel)


class Router(eqx.Module):
    """Logits of the experts, in the dtype of the tokens."""

    weight: Float[Array, "experts embed"]

    def __init__(self, hidden: int, experts: int, *, key: PRNGKeyArray):
        self.weight = _random(hidden, experts, key)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch experts"]:
        return checkpoint_name(jnp.einsum("...d,ed->...e", x, self.weight), LOGITS)


class Float32Router(eqx.Module):
    """Logits of the experts, in float32."""

    weight: Float[Array, "experts embed"]

    def __init__(self, hidden: int, experts: int, *, key: PRNGKeyArray):
        self.weight = _random(hidden, experts, key)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch experts"]:
        return _in_float32(x, self.weight)


class AbstractBiasedRouter(AbstractReadInPlace):
    """Logits of the experts, and a bias of each expert, which evens out their load without a loss.

    The bias is added to the scores by which experts are chosen, but not to their weights (DeepSeek V3,
    arXiv:2412.19437, section 2.1.2). It gets no gradient: `rebalance` moves it.
    """

    e_score_correction_bias: eqx.AbstractVar[Float32]
    in_place: ClassVar[tuple[str, ...]] = ("e_score_correction_bias",)

    @abc.abstractmethod
    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch experts"]: ...

    def choose(
        self,
        logits: Float[Array, "batch seq experts"],
        choices: int,
        score: Score | None = None,
        *,
        groups: int = 1,
        kept: int = 1,
        normalise: float | None = None,
    ) -> Best:
        """Chooses the experts with the highest biased scores among those of the best groups.

        The experts are divided into `groups` groups, of which some are kept: those whose two highest biased scores have
        the largest sum. Returns the scores of all experts, those of the chosen ones, and which these are. Scores are
        those of `kernels.top_k`, without the bias; `normalise` divides those of the chosen experts by their sum.
        """
        bias = self.e_score_correction_bias.value
        return choose(logits, choices, score, bias=bias, groups=groups, kept=kept, normalise=normalise)


class BiasedRouter(AbstractBiasedRouter):
    """`AbstractBiasedRouter` in float32, with a weight of the model's dtype."""

    weight: Float[Array, "experts embed"]
    e_score_correction_bias: Float32

    def __init__(self, hidden: int, experts: int, *, key: PRNGKeyArray):
        self.weight = _random(hidden, experts, key)
        self.e_score_correction_bias = Float32(jnp.zeros(experts))

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch experts"]:
        return _in_float32(x, self.weight)


class BiasedFloat32Router(AbstractBiasedRouter):
    """`AbstractBiasedRouter` in float32, with a weight that stays in it, whatever the model around it is cast to."""

    weight: Float32
    e_score_correction_bias: Float32

    def __init__(self, hidden: int, experts: int, *, key: PRNGKeyArray):
        self.weight = Float32(_random(hidden, experts, key))
        self.e_score_correction_bias = Float32(jnp.zeros(experts))

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch experts"]:
        return _in_float32(x, self.weight.value)


def experts_of(layers: Stack, reports: Reports) -> Int[Array, "batch seq layers choices"]:
    """Returns each token's experts in the layers that have some: first layers and likeliest experts first.

    Args:
        layers: the model's.
        reports: from `Model.hidden`, traced within `zoo.nn.moe.choices_of_each_token`.

    Raises:
        ValueError: no layer has experts.
    """
    found = {}
    for (numbers, _), report in zip(layers.blocks(), itertools.chain(*reports), strict=True):
        if isinstance(report, Routing) and report.chosen is not None:
            found |= dict(zip(numbers, report.chosen.reshape(-1, *report.chosen.shape[-3:]), strict=True))
    if not found:
        raise ValueError("The model has no experts.")
    return jnp.stack([found[layer] for layer in sorted(found)], axis=2)


def replayed(model: A, experts: Int[Array, "batch seq layers choices"]) -> A:
    """Returns a model that sends each token of a batch to these experts, in the form of `experts_of`.

    The routers still compute the weights of the experts, so gradients reach them. The module for the token after the
    next has its own choice. The model is for calls without caches, and not for a mesh with stages.
    """
    is_experts = lambda node: isinstance(node, AbstractExpertLinear)
    has_experts = lambda block: any(map(is_experts, jax.tree.leaves(block, is_leaf=is_experts)))
    layers = model.layers
    routed = sorted(n for numbers, block in layers.blocks() if has_experts(block) for n in numbers)

    def replace(numbers: range, block: AbstractBlock) -> AbstractBlock:
        if not has_experts(block):
            return block
        own = jnp.moveaxis(experts[:, :, np.array([routed.index(n) for n in numbers])], 2, 0)
        own = own if any(block is each for each in layers.period) else own[0]
        return _ReplayedSharing(block, own) if isinstance(block, AbstractSharingBlock) else _Replayed(block, own)

    return eqx.tree_at(lambda m: m.layers, model, layers.map_blocks(replace))


class _Replayed(AbstractBlock):
    """A layer whose tokens go to given experts."""

    block: AbstractBlock
    experts: Int[Array, "*layers batch seq choices"]

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report]:
        with given_experts(self.experts):
            return self.block(x, cache, at)


class _ReplayedSharing(AbstractSharingBlock):
    """A layer that hands something on, and whose tokens go to given experts."""

    block: AbstractSharingBlock
    experts: Int[Array, "*layers batch seq choices"]

    def run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
        own_input: Float[Array, "batch seq dim"] | None,
        shared: Shared,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report, Shared]:
        with given_experts(self.experts):
            return self.block.run(x, cache, at, own_input, shared)


def rebalance(model: M, reports: Reports, rate: float) -> M:
    """Moves the bias of each expert by `rate`: up if its load is below the mean, down if above (arXiv:2408.15664).

    Args:
        reports: those of a step, from `Model.hidden`, and after them the report of the module for the token after the
            next, if there is one. They hold the routers' loads, in the order of the routers in the model.
    """
    sought = lambda node: isinstance(node, AbstractBiasedRouter | Routing)
    find = lambda tree: filter(sought, jax.tree.leaves(tree, is_leaf=sought))
    biases = lambda model: [router.e_score_correction_bias.value for router in find(model)]
    signs = [jnp.sign(jnp.mean(r.load, axis=-1, keepdims=True) - r.load) for r in find(reports)]
    return eqx.tree_at(biases, model, [b + rate * sign for b, sign in zip(biases(model), signs, strict=True)])


def _random(hidden: int, experts: int, key: PRNGKeyArray) -> Float[Array, "experts embed"]:
    return 0.02 * jax.random.truncated_normal(key, -3, 3, (experts, hidden))


def _in_float32(
    x: Float[Array, "*batch embed"], weight: Float[Array, "experts embed"]
) -> Float[Array, "*batch experts"]:
    return checkpoint_name(_float32_product(x, weight), LOGITS)


@recomputed
def _float32_product(x: Array, weight: Array) -> Array:
    few = device().platform == "gpu" and x.size <= kernels.FEW_ROWS * x.shape[-1]
    if few and x.dtype == weight.dtype:  # the same sums in one kernel, without copies in float32
        return jnp.einsum("...d,ed->...e", x, weight, preferred_element_type=jnp.float32)
    return jnp.einsum("...d,ed->...e", x.astype(jnp.float32), weight.astype(jnp.float32))
