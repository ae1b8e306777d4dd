"""Layers of a model: what a layer is, and how a few of them run one after the other."""

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels import Tokens, mesh
from zoo.nn.cache import AbstractCache


LAYER_INPUT = "layer_input"  # the name of each layer's input, for the policies of `jax.checkpoint`


def split_tokens(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
    """Splits sequences, and the tokens of each, over the devices of the mesh in scope (`jax.set_mesh`).

    With specs of weights alone the compiler chooses where the batch lies, and silently replicates it.
    """
    return jax.lax.with_sharding_constraint(x, mesh.tokens_spec(x.shape)) if mesh.free() else x


def spread_tokens(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
    """Splits tokens over "tensor" too, as they are kept between layers.

    This is sequence parallelism (arXiv:2205.05198): without it every device along "tensor" keeps a copy. Traffic is
    unchanged: the all-reduce after a layer becomes a reduce-scatter, with an all-gather before the next layer.

    Tokens are not spread over "tensor" in two cases. Where "context" splits them already, XLA would gather whole
    sequences to split them both ways. Where the mesh has stages, spreading makes XLA for TPUs abort (libtpu 0.0.51).
    """
    has_stages = mesh.split(mesh.STAGE) > 1 or mesh.manual(mesh.STAGE) > 1  # the latter within a pipeline
    if mesh.split(mesh.TENSOR) == 1 or mesh.split(mesh.CONTEXT) > 1 or has_stages:
        return split_tokens(x)
    batch, _ = mesh.tokens_spec(x.shape)
    return jax.lax.with_sharding_constraint(x, P(batch, mesh.splitting(x.shape[1], mesh.TENSOR)))


Report = eqx.Module | Array | None
"""A layer's report on its tokens, such as a router's `zoo.nn.moe.Routing`: sums over tokens, for losses and metrics, or
a `zoo.nn.pipeline.Largest`. Most layers report None."""

Remat = Callable[..., Callable]
"""Wraps a layer, so that the backward pass computes it again: `jax.checkpoint`, or that with a policy. Like
`jax.checkpoint`, it takes `prevent_cse`."""


class AbstractBlock(eqx.Module):
    """One layer: `x, _, report = block(x, None, at)`. A layer of an encoder has no cache.

    In a stack's `period`, one block holds several layers of one kind, their arrays stacked along a new first axis.
    """

    ordered: ClassVar[bool] = False
    """Whether the tokens of a row must be in order, as a recurrence or a convolution needs them. Attention does not
    need that: masks compare positions, so training may give the tokens of a row to devices in any order."""

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report]:
        """Returns the new features, the new cache (None without one), and the layer's report of these tokens."""


class AbstractDecoderBlock(AbstractBlock):
    """A layer with a cache: `x, cache, report = block(x, cache, at)`."""

    @abc.abstractmethod
    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        """Makes an empty cache for positions 0 to `length` - 1, of so many layers like this one."""


Shared = Mapping[str, Any]
"""Trees of arrays by name, such as keys and values, which layers hand on to later layers within one call."""


class AbstractSharingBlock(AbstractBlock):
    """A layer that reads more than features: an input that it alone gets, and what earlier layers hand on to it.

    Gemma 4's layers do: each gets a vector of its own for every token, and the last ones read the keys and values of
    earlier layers. A layer that hands something on needs a kind of its own, so that it is in no run that repeats.
    """

    @abc.abstractmethod
    def run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
        own_input: Float[Array, "batch seq dim"] | None,
        shared: Shared,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report, Shared]:
        """Returns what a block does, and what this layer hands on to later ones.

        Args:
            x: features.
            cache: the layer's. None: these tokens are all there is.
            at: where the tokens stand.
            own_input: this layer's part of the stack's `own_inputs`; None: the stack was given none.
            shared: what earlier layers have handed on in this call.
        """

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report]:
        return self.run(x, cache, at, None, {})[:3]


def run_block(
    block: AbstractBlock,
    x: Float[Array, "batch seq embed"],
    cache: AbstractCache | None,
    at: Tokens,
    own_input: Float[Array, "batch seq dim"] | None,
    shared: Shared,
) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report, Shared]:
    """Runs a layer of either kind, as `AbstractSharingBlock.run` does. Other layers hand nothing on."""
    if isinstance(block, AbstractSharingBlock):
        return block.run(x, cache, at, own_input, shared)
    return *block(x, cache, at), {}


def _run_layer(
    block: AbstractBlock,
    cache: AbstractCache | None,
    at: Tokens,
    own_input: Float[Array, "batch seq dim"] | None,
    shared: Shared,
    x: Float[Array, "batch seq embed"],
) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report, Shared]:
    """Runs one layer, with its tokens split over the mesh in scope.

    Between layers tokens are spread over "tensor" too, so what `remat` keeps by the name `LAYER_INPUT` is spread. The
    layer gets them gathered along "tensor", over which it splits its own heads and features.
    """
    x = checkpoint_name(spread_tokens(x), LAYER_INPUT)
    x, cache, report, handed_on = run_block(block, split_tokens(x), cache, at, own_input, shared)
    return spread_tokens(x), cache, report, handed_on


def run_blocks(
    blocks: Sequence[AbstractBlock],
    x: Float[Array, "batch seq embed"],
    caches: Sequence[AbstractCache | None],
    at: Tokens,
    own_inputs: Float[Array, "layers batch seq dim"] | None,
    shared: Shared,
    remat: Remat | None,
    after: Sequence[Float[Array, "batch seq embed"]],
) -> tuple[Float[Array, "batch seq embed"], tuple[Any, ...], tuple[Report, ...], Shared]:
    """Runs blocks one by one, each within `remat`, and adds `after[n]` to the features after `blocks[n]`.

    Returns `x`, the new caches, the blocks' reports, and what they hand on to later layers.
    """
    new, reports, handed_on = [], [], {}
    for n, (block, cache) in enumerate(zip(blocks, caches, strict=True)):
        own_input = None if own_inputs is None else own_inputs[n]
        layer = functools.partial(_run_layer, block, cache, at, own_input, {**shared, **handed_on})
        x, cache, report, by_layer = remat(layer)(x) if remat else layer(x)
        x = spread_tokens(x + after[n]) if n < len(after) else x
        new.append(cache)
        reports.append(report)
        handed_on.update(by_layer)
    return x, tuple(new), tuple(reports), handed_on
