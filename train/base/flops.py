"""Counts the FLOPs of a training step, by the products that a model's config implies, and those of a chip."""

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

    layers: float  # with the layers' weights; of a mixture's experts only those that a token goes to
    head: float  # with the output head's weights
    attention: float  # scores, and weighted sums of values


class Weights(NamedTuple):
    """Where the weights of a model's matrix products are."""

    layers: dict[str, float]  # path of an array -> multiply-adds of a token
    head: str  # path of the output head, which may be the embedding
    below: frozenset[str]  # what paths of layers and of embeddings begin with


@functools.lru_cache
def weights_of(config: AbstractConfig) -> Weights:
    """The weights that a token is multiplied with; of a mixture's experts the share that it goes to."""
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
    """Counts the multiply-adds of a token, on average over a causal sequence of `seq` tokens."""
    attention = sum(config.attention_products(n, seq) for n in range(config.num_hidden_layers))
    return Products(
        float(sum(weights_of(config).layers.values())), float(config.vocab_size * config.hidden_size), attention
    )


def flops_per_token(config: AbstractConfig, seq: int, *, frozen: bool = False, trained: Any = None) -> float:
    """Counts the floating point operations of training on one token, in sequences of `seq`, as MFU does.

    They are 6 for every weight of a matrix product, 2 forward and 4 backward. The head and routers count, embedding
    look-ups do not; of a mixture's experts those count that a token goes to. And they are 6 for every multiply-add of
    causal attention, in which a token sees half of its sequence on average, or less through a window or in a chunk.
    What remat computes again does not count.

    Args:
        frozen: only adapters are trained, which are not counted: each weight has no gradient, and counts 4.
        trained: what --freeze leaves to be trained, a tree as the model, with None for all else. A frozen weight counts
            4; or 2 if nothing is trained before it, so that nothing is sent back through it. Layers are taken together.
    """
    p = products_per_token(config, seq)
    if trained is None:
        return (4.0 if frozen else 6.0) * (p.layers + p.head) + 6.0 * p.attention
    weights, paths = weights_of(config), {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
    own = sum(products for path, products in weights.layers.items() if path in paths) + p.head * (weights.head in paths)
    through_head = paths != {weights.head} or weights.head.split(".")[0] in weights.below
    through_layers = any(path.split(".")[0] in weights.below for path in paths)
    back = p.head * through_head + (p.layers + 2 * p.attention) * through_layers  # two products for each of attention
    return 2.0 * (p.layers + p.head + p.attention + own + back)


def peak_flops() -> float | None:
    """Returns the bfloat16 peak of all devices together, in operations a second; None if it is not known."""
    chip = chip_of(jax.devices()[0].device_kind)
    return chip and chip.flops * jax.device_count()
