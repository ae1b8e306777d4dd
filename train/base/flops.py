"""FLOPs of a training step, counted from the matrix products that a model's config implies, and of a chip."""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend.core import jaxprs_in_params
from jaxtyping import Array

import kernels
from train.base.chips import chip_of
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Embedding
from zoo.nn.model import AbstractConfig, AbstractMixtureConfig, AbstractModel, Images, require_vision
from zoo.nn.stack import Stack
from zoo.registry import family_of
from zoo.surgery import modules, path_name
from zoo.vision.model import AbstractVisionConfig
from zoo.weights.checkpoint import skeleton


class Products(NamedTuple):
    """Multiply-adds of the forward pass of one token, or of one image through the tower, by part of the model."""

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


@functools.lru_cache
def products_of_image(config: AbstractConfig, patches: int) -> Products:
    """Counts the multiply-adds of the vision tower for an image of so many patches, or as many as the tower fixes.

    It counts the products of a traced forward pass with the image and without it. All pairs of patches count, also in
    towers some of whose layers see windows of them.
    """
    assert isinstance(config, AbstractVisionConfig) and config.vision is not None, "the model has its tower"
    patches = config.vision.tower.patches or patches
    model = require_vision(skeleton(family_of(config), config, ("vision",)))
    pixels = jax.ShapeDtypeStruct((1, patches, config.vision.tower.pixels), jnp.float32)

    def hidden(model: AbstractModel, pixels: Array | None) -> Array:
        token = jnp.zeros((1, 1), int)
        images = None if pixels is None else Images(pixels, jnp.ones((1, 2), int), token, token)
        return model.hidden(token, images=images)[0]

    with kernels.prefer("reference"):  # whose attention is two products
        seeing, blind = (_products_in(jax.make_jaxpr(hidden)(model, each).jaxpr) for each in (pixels, None))
    return Products(seeing[0] - blind[0], 0.0, seeing[1] - blind[1])


def _products_in(jaxpr: Any) -> tuple[float, float]:
    """Counts the multiply-adds of a traced function: of products without batch axes, and of those with some."""
    plain = batched = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            (contracted, _), (batch, _) = equation.params["dimension_numbers"]
            terms = math.prod(equation.invars[0].aval.shape[axis] for axis in contracted)
            products = math.prod(equation.outvars[0].aval.shape) * terms
            plain, batched = (plain, batched + products) if batch else (plain + products, batched)
        times = equation.params["length"] if equation.primitive.name == "scan" else 1
        for inner in jaxprs_in_params(equation.params):
            more_plain, more_batched = _products_in(inner)
            plain, batched = plain + times * more_plain, batched + times * more_batched
    return plain, batched


def flops_per_token(
    config: AbstractConfig,
    seq: int,
    *,
    frozen: bool = False,
    trained: Any = None,
    headed: bool = False,
    images: int = 0,
    patches: int = 0,
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
        images: number of images in a sequence, all of whose tokens share the vision tower's operations. The tower is
            trained, or with `frozen` has neither adapters nor gradients. It is not counted with `trained`.
        patches: number of patches of each image, for towers that do not fix it.
    """
    p = products_per_token(config, seq)
    p = p._replace(head=0.0) if headed else p
    if trained is None:
        tower = images * sum(products_of_image(config, patches)) / seq if images else 0.0
        return (4.0 if frozen else 6.0) * (p.layers + p.head) + 6.0 * p.attention + (2.0 if frozen else 6.0) * tower
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
