"""Runs a model's layers, most of them under one `lax.scan`, so that a deep model compiles as fast as a shallow one."""

import abc
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

from kernels import Tokens, counted, mesh
from kernels.stacked import Stacked
from zoo.nn.cache import AbstractCache
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear
from zoo.nn.pipeline import pipeline


LAYER_INPUT = "layer_input"  # names what each layer reads, for the policies of `jax.checkpoint`


def split_tokens(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
    """Splits sequences, and the tokens of each, over the devices of the mesh in scope (`jax.set_mesh`).

    With specs of weights alone the compiler chooses where the batch lies, and silently replicates it.
    """
    return jax.lax.with_sharding_constraint(x, mesh.tokens_spec(x.shape)) if mesh.free() else x


def spread_tokens(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
    """Splits tokens over "tensor" too, as they are kept between layers.

    This is sequence parallelism (arXiv:2205.05198): without it every device along "tensor" keeps a copy. Traffic is
    unchanged: the all-reduce after a layer becomes a reduce-scatter, with an all-gather before the next layer. Where
    "context" splits sequences already, this does nothing more: XLA would gather them whole to split them both ways.
    """
    if mesh.split(mesh.TENSOR) == 1 or mesh.split(mesh.CONTEXT) > 1:
        return split_tokens(x)
    batch, _ = mesh.tokens_spec(x.shape)
    return jax.lax.with_sharding_constraint(x, P(batch, mesh.splitting(x.shape[1], mesh.TENSOR)))


Report = eqx.Module | Array | None
"""What a layer says of the tokens that it has read, such as a router's `zoo.nn.moe.Routing`: sums over tokens, of which
losses and metrics are made. Most layers say nothing."""
Caches = tuple[tuple[AbstractCache, ...], ...]
"""A cache for each block of a stack's `head`, `period` and `tail`."""
Reports = tuple[tuple[Report, ...], ...]
"""The reports of the same blocks, those of a period's layers stacked."""


class AbstractBlock(eqx.Module):
    """One layer: `x, _, report = block(x, None, at)`. A layer of an encoder has no cache."""

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


class Stack(eqx.Module):
    """A model's layers.

    Layers of one kind have the same structure. After the first few, the kinds repeat with some period p: p = 1 if all
    are alike, p = 6 for five local layers and a global one. `period[j]` holds layers h + j, h + j + p, ..., with their
    arrays stacked along a new first axis, and the scan's body runs one whole period. So each kind keeps its own class,
    static fields (a window, a rope base) and size of cache. `head` and `tail` are the layers before and after the
    periods.
    """

    head: tuple[AbstractBlock, ...]
    period: tuple[AbstractBlock, ...]
    tail: tuple[AbstractBlock, ...]
    num_layers: int = eqx.field(static=True)
    remat: Callable[..., Callable] | None = eqx.field(static=True)  # see `zoo.surgery.with_remat`

    def __init__(self, make: Callable[..., AbstractBlock], kinds: Sequence[Any], *, key: PRNGKeyArray):
        """`make(n, key=key)` builds layer n, which is of the kind `kinds[n]`."""
        self.num_layers, self.remat = len(kinds), None
        start, period, end = self.plan(kinds)
        keys = jax.random.split(key, len(kinds))
        self.head = tuple(make(n, key=keys[n]) for n in range(start))
        self.period = tuple(
            eqx.filter_vmap(lambda k, n=n: make(n, key=k))(keys[n:end:period]) for n in range(start, start + period)
        )
        self.tail = tuple(make(n, key=keys[n]) for n in range(end, len(kinds)))

    @staticmethod
    def plan(kinds: Sequence[Any]) -> tuple[int, int, int]:
        """Finds the first periodic layer, the period, and the end of the periods that compile the fewest blocks."""
        n, numbers = len(kinds), {}
        kind = np.array([numbers.setdefault(k, len(numbers)) for k in kinds])
        best, period = (n, n, 0, n), 0  # how many blocks, then the first layer, the period, the end
        while (period := period + 1) <= best[0]:  # so the time grows with n times the number of blocks
            ends = np.arange(n, max(n - period, period - 1), -1)  # the tail is shorter than a period
            breaks = np.append(-1, np.flatnonzero(kind[:-period] != kind[period:]))
            after = (
                breaks[np.searchsorted(breaks, ends - period) - 1] + 1
            )  # where the last break before each end is over
            starts = after + (ends - after) % period
            blocks = starts + period + n - ends
            i = np.lexsort((starts, blocks))[0]
            best = min(best, (int(blocks[i]), int(starts[i]), period, int(ends[i])))
        return best[1:]

    @property
    def repeats(self) -> int:
        """How many periods there are."""
        return (self.num_layers - len(self.head) - len(self.tail)) // len(self.period)

    def with_remat(self, remat: Callable[..., Callable] | None) -> "Stack":
        """This stack, whose layers `remat` wraps one by one: `jax.checkpoint`, or that with a policy."""
        new = object.__new__(Stack)
        for field in dataclasses.fields(self):
            object.__setattr__(new, field.name, remat if field.name == "remat" else getattr(self, field.name))
        return new

    def layer_numbers(self, part: str, j: int) -> range:
        """Returns the numbers of the layers that `head[j]`, `period[j]` or `tail[j]` holds."""
        start, end = len(self.head), self.num_layers - len(self.tail)
        return {
            "head": range(j, j + 1),
            "period": range(start + j, end, len(self.period)),
            "tail": range(end + j, end + j + 1),
        }[part]

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        cache: Caches | None = None,
        at: Tokens = Tokens(),  # noqa: B008 (a value)
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        """Runs every layer. Returns `x`, the new cache (None without one), and the layers' reports.

        `cache` is from `init_cache`, or None. Where the mesh in scope has stages, each has its part of the periods, and
        the sequences go through them as `zoo.nn.pipeline` says.

        Raises:
            ValueError: for a cache where there are stages.
        """
        # Outside a compiled function the scan would be traced and compiled at every call.
        run = Stack._run if isinstance(x, Tracer) else _compiled
        return run(self, x, cache, at)

    def _run(
        self, x: Float[Array, "batch seq embed"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        if at.positions is None and at.segments is not None and at.rotary is None:
            at = at._replace(rotary=counted(at.segments))  # once, and not in every layer
        arrays, static = eqx.partition(self.period, eqx.is_array)
        none = lambda blocks: (None,) * len(blocks)
        staged = mesh.split(mesh.STAGE) > 1
        # With pipeline stages, spread_tokens makes XLA for TPUs abort (libtpu 0.0.51).
        between = split_tokens if staged else spread_tokens
        caches: Any = cache or (none(self.head), none(self.period), none(self.tail))
        head, period, tail = caches

        def run(
            blocks: Sequence[AbstractBlock],
            x: Array,
            caches: Sequence[AbstractCache | None],
            at: Tokens,
            in_scan: bool = False,
        ) -> tuple[Array, tuple, tuple[Report, ...]]:
            new, reports = [], []
            for block, layer_cache in zip(blocks, caches, strict=True):

                def layer(x: Array, block: AbstractBlock = block, cache: Any = layer_cache) -> tuple[Array, Any, Any]:
                    x = checkpoint_name(between(x), LAYER_INPUT)
                    x, cache, report = block(split_tokens(x), cache, at)
                    return between(x), cache, report

                # XLA must not merge what is computed again with the forward pass, nor do it for all layers at once. In
                # a scan of one layer it cannot, and to prevent it would only hold back the compiler.
                alone = in_scan and len(blocks) == 1
                wrapped = self.remat(layer, prevent_cse=not alone) if self.remat and layer_cache is None else layer
                x, layer_cache, report = wrapped(x)
                new.append(layer_cache)
                reports.append(report)
            return x, tuple(new), tuple(reports)

        def periods(arrays: Any, x: Array, at: Tokens) -> tuple[Array, Any]:
            def one(x: Array, arrays: Any) -> tuple[Array, tuple[Report, ...]]:
                x, _, reports = run(eqx.combine(arrays, static), x, none(self.period), at, in_scan=True)
                return x, reports

            return jax.lax.scan(one, x, arrays)

        # Caches are in the carry, where XLA writes them in place. As scanned inputs and outputs they would be copied
        # whole at every step.
        def cached_period(carry: Any, slices: Any) -> tuple[Any, tuple[Report, ...]]:
            (x, caches), (layer, arrays) = carry, slices
            caches = tuple(eqx.tree_at(lambda c: c.layer, cache, layer) for cache in caches)
            layers = jax.tree.map(lambda stack: Stacked(stack, layer), whole)
            blocks = eqx.combine(layers, arrays, static, is_leaf=lambda node: isinstance(node, Stacked))
            x, caches, reports = run(blocks, x, caches, at)
            return (x, caches), reports

        x, head, first = run(self.head, x, head, at)
        if cache is None:
            x, middle = pipeline(periods, arrays, x, at) if staged else periods(arrays, x, at)
        elif staged:
            raise ValueError("There is no pipeline for decoding: use a mesh without stage, such as tensor=8, for that.")
        else:
            whole, sliced = eqx.partition(arrays, _read_in_place(arrays))
            (x, period), middle = jax.lax.scan(cached_period, (x, period), (jnp.arange(self.repeats), sliced))
        x, tail, last = run(self.tail, x, tail, at)
        return split_tokens(x), (head, period, tail) if cache else None, (first, middle, last)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Caches:
        """Makes the caches of all layers: one for each entry of `head`, `period` and `tail`."""

        caches = []
        for layers, block in self.blocks():
            if not isinstance(block, AbstractDecoderBlock):
                raise TypeError(f"A {type(block).__name__} is no decoder's block, and so has no cache.")
            caches.append(block.init_cache(len(layers), batch, length, dtype))
        start, end = len(self.head), len(self.head) + len(self.period)
        return tuple(caches[:start]), tuple(caches[start:end]), tuple(caches[end:])

    def blocks(self) -> Iterator[tuple[range, AbstractBlock]]:
        """Yields each block of `head`, `period` and `tail`, in the order of `init_cache`, with its layers' numbers."""
        for part, blocks in (("head", self.head), ("period", self.period), ("tail", self.tail)):
            for j, block in enumerate(blocks):
                yield self.layer_numbers(part, j), block


def _read_in_place(blocks: Any) -> Any:
    """Tells of each array whether kernels read it in place: as an input of the scan, it would be copied for them."""
    reads = lambda m: isinstance(m, AbstractLinear | AbstractExpertLinear) and bool(m.in_place)

    def tell(node: Any) -> Any:
        if not reads(node):
            return False
        fields = lambda m: [getattr(m, name) for name in node.in_place]
        return eqx.tree_at(fields, jax.tree.map(lambda _: False, node), [True] * len(node.in_place))

    return jax.tree.map(tell, blocks, is_leaf=reads)


_compiled = eqx.filter_jit(Stack._run)
