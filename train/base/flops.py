"""FLOPs of a training step, counted from the matrix products that a model's config implies, and of a chip."""

import functools
import math
from typing import Any, NamedTuple

import jax

from train.base.chips import chip_of
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Embedding
from zoo.nn.model import AbstractConfig, AbstractMixtureConfig
from zoo.nn.stack import Stack
from zoo.registry import family_of
from zoo.surgery import modules, path_name
from zoo.weights.checkpoint import skeleton


class Products(NamedTuple):
    """Multiply-adds of one token's forward pass, by part of the model."""

    layers: float  # with the layers' weights; in a mixture of experts only with the experts that a token is routed to
    head: float  # with the output head's weights
    attention: float  # scores, and weighted sums of values


class Weights(NamedTuple):
    """The weights of a model's matrix products: their paths and multiply-adds."""

    layers: dict[str, float]  # path of an array -> multiply-adds of a token
    head: str  # path of the output head, which may be the embedding
    below: frozenset[str]  # first parts of the paths of layers and of embeddings


@functools.lru_cache
def weights_of(config: AbstractConfig) -> Weights:
    """Lists the weights that a token is multiplied with. Experts count by the share that a token is routed to."""
    c, layers = config, {}
    chosen = c.num_experts_per_tok if isinstance(c, AbstractMixtureConfig) else 0
    is_linear = lambda m: isinstance(m, AbstractLinear | AbstractExpertLinear)
    model = skeleton(family_of(c), c)
    for name, stack in modules(model, Stack):
        for path, m in jax.tree_util.tree_leaves_with_path(stack, is_leaf=is_linear):
            router = not is_linear(m) and len(m.shape) - path_name(path).startswith("period") == 2
            if is_linear(m) or router:
                share = chosen / m.shape[-3] if isinstance(m, AbstractExpertLinear) else 1
                layers[f"{name}.{path_name(path)}{'' if router else '.weight'}"] = math.prod(m.shape) * share
    embeddings = [path for path, _ in modules(model, Embedding)]
    heads = [path for path, _ in modules(model, AbstractLinear) if path == "lm_head"]
    below = frozenset(path.split(".")[0] for path in (*layers, *embeddings))
    return Weights(layers, f"{[*heads, *embeddings][0]}.weight", below)


@functools.lru_cache
def products_per_token(config: AbstractConfig, seq: int) -> Products:
    """Counts the multiply-adds of a token: the average over a causal sequence of `seq` tokens."""
    attention = sum(config.attention_products(n, seq) for n in range(config.num_hidden_layers))
    return Products(
        float(sum(weights_of(config).layers.values())), float(config.vocab_size * config.hidden_size), attention
    )


def flops_per_token(
    config: AbstractConfig, seq: int, *, frozen: bool = False, trained: Any = None, headed: bool = False
) -> float:
    """Counts the floating point operations of training on one token, in sequences of `seq`, as MFU does.

    Every weight of a matrix product counts 6: 2 forward and 4 backward. The head and routers count, embedding look-ups
    do not. In a mixture of experts, only the experts that a token is routed to count. Every multiply-add of causal
    attention counts 6, too. There a token sees half of its sequence on average, or less through a window or in a chunk.
    Remat's recomputation does not count.

    Args:
        frozen: only adapters are trained. Adapters do not count, and each weight counts 4, as it has no gradient.
        trained: the weights that --freeze leaves to be trained, a tree like the model, with None for all others. A
            frozen weight counts 4; or 2 if nothing before it is trained, so that no gradient passes through it. All
            layers are treated as one in this.
        headed: a head of few weights stands in the place of the output head, and does not count.
    """
    p = products_per_token(config, seq)
    p = p._replace(head=0.0) if headed else p
    if trained is None:
        return (4.0 if frozen else 6.0) * (p.layers + p.head) + 6.0 * p.attention
    weights, paths = weights_of(config), {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
    own = sum(products for path, products in weights.layers.items() if path in paths) + p.head * (weights.head in paths)
    through_head = paths != {weights.head} or weights.head.split(".")[0] in weights.below
    through_layers = any(path.split(".")[0] in weights.below for path in paths)
    # Each product of attention has two in the backward pass.
    back = p.head * through_head + (p.layers + 2 * p.attention) * through_layers
    return 2.0 * (p.layers + p.head + p.attention + own + back)


def peak_flops() -> float | None:
    """Returns the bfloat16 peak of all devices together, in operations a second; None if it is not known."""
    chip = chip_of(jax.devices()[0].device_kind)
    return chip and chip.flops * jax.device_count()
