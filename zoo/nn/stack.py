"""Runs a model's layers, most of them under `lax.scan`, so that a deep model compiles as fast as a shallow one."""

import abc
import dataclasses
import functools
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
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kernels import Tokens, counted, mesh
from kernels.stacked import Stacked
from zoo.nn.cache import AbstractCache
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear
from zoo.nn.pipeline import pipeline


LAYER_INPUT = "layer_input"  # names what each layer reads, for the policies of `jax.checkpoint`
FEW = 4  # a further scan must spare as many blocks: to compile it costs time, too


def split_tokens(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
    """Splits sequences, and the tokens of each, over the devices of the mesh in scope (`jax.set_mesh`).

    With specs of weights alone the compiler chooses where the batch lies, and silently replicates it.
    """
    return jax.lax.with_sharding_constraint(x, mesh.tokens_spec(x.shape)) if mesh.free() else x


def spread_tokens(x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
    """Splits tokens over "tensor" too, as they are kept between layers.

    This is sequence parallelism (arXiv:2205.05198): without it every device along "tensor" keeps a copy. Traffic is
    unchanged: the all-reduce after a layer becomes a reduce-scatter, with an all-gather before the next layer. Where
    "context" splits sequences already, this does nothing more: XLA would gather them whole to split them both ways. Nor
    does it with stages: in a pipeline it makes XLA for TPUs abort (libtpu 0.0.51).
    """
    stages = mesh.split(mesh.STAGE) * mesh.manual(mesh.STAGE)
    if mesh.split(mesh.TENSOR) == 1 or mesh.split(mesh.CONTEXT) > 1 or stages > 1:
        return split_tokens(x)
    batch, _ = mesh.tokens_spec(x.shape)
    return jax.lax.with_sharding_constraint(x, P(batch, mesh.splitting(x.shape[1], mesh.TENSOR)))


Report = eqx.Module | Array | None
"""A layer's report on its tokens, such as a router's `zoo.nn.moe.Routing`: sums over tokens, for losses and metrics.
Most layers report None."""
Caches = tuple[tuple[AbstractCache, ...], ...]
"""A cache for each block of a stack's `head`, `period` and `tail`."""
Reports = tuple[tuple[Report, ...], ...]
"""The reports of the same blocks, those of a period's layers stacked."""


Remat = Callable[..., Callable]
"""Wraps a layer, so that the backward pass computes it again: `jax.checkpoint`, or that with a policy."""


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

    A pattern without a period is several such runs, one scan after another, whose blocks follow each other in `period`.
    In MEMEMEM*EMEMEMEME, ME repeats three times, and EM four times: between them M* is a run that does not repeat.
    """

    head: tuple[AbstractBlock, ...]
    period: tuple[AbstractBlock, ...]
    tail: tuple[AbstractBlock, ...]
    num_layers: int = eqx.field(static=True)
    runs: tuple[tuple[int, int], ...] = eqx.field(static=True)  # of each its period, and how often that is repeated
    remat: Remat | None = eqx.field(static=True)  # see `zoo.surgery.with_remat`

    def __init__(self, make: Callable[..., AbstractBlock], kinds: Sequence[Any], *, key: PRNGKeyArray):
        """`make(n, key=key)` builds layer n, which is of the kind `kinds[n]`."""
        self.num_layers, self.remat = len(kinds), None
        start, self.runs = self.plan(kinds)
        keys = jax.random.split(key, len(kinds))
        stacked = lambda n: eqx.filter_vmap(lambda k: make(n[0], key=k))(keys[n.start : n.stop : n.step])
        self.head = tuple(make(n, key=keys[n]) for n in range(start))
        scans = [(layers, len(blocks)) for blocks, layers in self.scans()]
        self.period = tuple(stacked(layers[j::period]) for layers, period in scans for j in range(period))
        self.tail = tuple(make(n, key=keys[n]) for n in range(scans[-1][0].stop, len(kinds)))

    @staticmethod
    def plan(kinds: Sequence[Any]) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Finds how many layers are before the first run, and `runs`.

        The run that spares the most blocks is chosen first; then, before it and behind it, others that spare `FEW`.
        """
        numbers, found, parts = {}, [], [(0, len(kinds), 0)]
        kind = np.array([numbers.setdefault(k, len(numbers)) for k in kinds])
        while parts:
            start, end, least = parts.pop()
            spared, first, period = _repetition(kind[start:end])
            if spared >= least:
                first, last = start + first, start + first + period + spared
                found.append((first, period, last))
                parts += [(start, first, FEW), (last, end, FEW)]
        runs, at = [], min(found)[0]
        for first, period, last in sorted(found):
            runs += [(first - at, 1)] * (first > at) + [(period, (last - first) // period)]
            at = last
        return min(found)[0], tuple(runs)

    def scans(self) -> Iterator[tuple[range, range]]:
        """Yields, for each run, the indices of its blocks in `period`, and the numbers of its layers."""
        block, layer = 0, len(self.head)
        for period, repeats in self.runs:
            yield range(block, block + period), range(layer, layer + period * repeats)
            block, layer = block + period, layer + period * repeats

    def with_remat(self, remat: Remat | None) -> "Stack":
        """This stack, whose layers `remat` wraps one by one."""
        new = object.__new__(Stack)
        for field in dataclasses.fields(self):
            object.__setattr__(new, field.name, remat if field.name == "remat" else getattr(self, field.name))
        return new

    def layer_numbers(self, part: str, j: int) -> range:
        """Returns the numbers of the layers that `head[j]`, `period[j]` or `tail[j]` holds."""
        if part == "period":
            return next(layers[j - blocks.start :: len(blocks)] for blocks, layers in self.scans() if j in blocks)
        first = 0 if part == "head" else self.num_layers - len(self.tail)
        return range(first + j, first + j + 1)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        cache: Caches | None = None,
        at: Tokens = Tokens(),  # noqa: B008 (a value)
        after: Sequence[Float[Array, "batch seq embed"]] = (),
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        """Runs every layer. Returns `x`, the new cache (None without one), and the layers' reports.

        `cache` is from `init_cache`, or None. `after` is what is added to the features after each of the first layers
        (DeepStack, arXiv:2406.04334). A model gives these layers kinds of their own, so that none of them is in a run
        that repeats. Where the mesh in scope has stages, each has its part of the periods of a run whose repeats they
        divide, and the sequences go through them as `zoo.nn.pipeline` says. Each stage runs all other layers on its
        share of the sequences.

        Raises:
            ValueError: for a cache where there are stages, or for more in `after` than there are layers before the
                first run that repeats.
        """
        # Outside a compiled function the scan would be traced and compiled at every call.
        run = Stack._run if isinstance(x, Tracer) else _compiled
        return run(self, x, cache, at, tuple(after))

    def _run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: Caches | None,
        at: Tokens,
        after: tuple[Float[Array, "batch seq embed"], ...],
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        if cache is not None and mesh.split(mesh.STAGE) > 1:
            raise ValueError("There is no pipeline for decoding: use a mesh without stage, such as tensor=8, for that.")
        runs = zip(self.scans(), self.runs, strict=True)
        scans = [(blocks, layers.start, repeats) for (blocks, layers), (_, repeats) in runs]
        alone = next((start for _, start, repeats in scans if repeats > 1), self.num_layers)
        if len(after) > alone:
            raise ValueError(f"{len(after)} layers are followed by something, and {alone} stand by themselves.")
        if at.positions is None and at.segments is not None and at.rotary is None:
            at = at._replace(rotary=counted(at.segments))  # once, and not in every layer

        remat = functools.partial(self.remat, prevent_cse=True) if self.remat and cache is None else None
        none = lambda blocks: (None,) * len(blocks)
        caches: Any = cache or (none(self.head), none(self.period), none(self.tail))
        head, period, tail = caches
        x, head, first = _run_blocks(self.head, x, head, at, remat, after)
        written, middle = (), ()
        for blocks, start, repeats in scans:
            of = slice(blocks.start, blocks.stop)
            if cache is None:
                x, reports = _scan(self.period[of], repeats, x, at, remat, after[start:])
            else:
                x, new, reports = _scan_with_caches(self.period[of], repeats, x, period[of], at, after[start:])
                written += new
            middle += reports
        x, tail, last = _run_blocks(self.tail, x, tail, at, remat, after[self.num_layers - len(self.tail) :])
        return split_tokens(x), (head, written, tail) if cache else None, (first, middle, last)

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


def _run_layer(
    block: AbstractBlock, cache: AbstractCache | None, at: Tokens, x: Float[Array, "batch seq embed"]
) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report]:
    """Runs one layer, with its tokens split over the mesh in scope."""
    x = checkpoint_name(spread_tokens(x), LAYER_INPUT)
    x, cache, report = block(split_tokens(x), cache, at)
    return spread_tokens(x), cache, report


def _run_blocks(
    blocks: Sequence[AbstractBlock],
    x: Float[Array, "batch seq embed"],
    caches: Sequence[AbstractCache | None],
    at: Tokens,
    remat: Remat | None,
    after: Sequence[Float[Array, "batch seq embed"]],
) -> tuple[Float[Array, "batch seq embed"], tuple[Any, ...], tuple[Report, ...]]:
    """Runs layers one by one, each within `remat`, and adds `after[n]` to the features after layer n.

    Returns `x`, the new caches, and the layers' reports.
    """
    new, reports = [], []
    for n, (block, cache) in enumerate(zip(blocks, caches, strict=True)):
        layer = functools.partial(_run_layer, block, cache, at)
        x, cache, report = remat(layer)(x) if remat else layer(x)
        x = spread_tokens(x + after[n]) if n < len(after) else x
        new.append(cache)
        reports.append(report)
    return x, tuple(new), tuple(reports)


def _scan(
    period: tuple[AbstractBlock, ...],
    repeats: int,
    x: Float[Array, "batch seq embed"],
    at: Tokens,
    remat: Remat | None,
    after: Sequence[Float[Array, "batch seq embed"]],
) -> tuple[Float[Array, "batch seq embed"], tuple[Report, ...]]:
    """Runs a period `repeats` times, with other weights each time. Stages of the mesh share the repeats, if they can.

    Returns `x`, and the stacked reports of each of the period's layers.
    """
    arrays, static = eqx.partition(period, eqx.is_array)
    # XLA must not merge what is computed again with the forward pass, nor do it for all layers at once. In a scan of
    # one layer it cannot, and to prevent it would only hold back the compiler.
    if remat and repeats > 1 and len(period) == 1:
        remat = functools.partial(remat, prevent_cse=False)

    def periods(arrays: Any, x: Array, at: Tokens) -> tuple[Array, tuple[Report, ...]]:
        def one(x: Array, arrays: Any) -> tuple[Array, tuple[Report, ...]]:
            x, _, reports = _run_blocks(eqx.combine(arrays, static), x, (None,) * len(period), at, remat, after)
            return x, reports

        return jax.lax.scan(one, x, arrays)

    stages = mesh.split(mesh.STAGE)
    if stages > 1 and repeats % stages == 0:
        return pipeline(periods, arrays, x, at)
    return periods(arrays, x, at)


def _scan_with_caches(
    period: tuple[AbstractBlock, ...],
    repeats: int,
    x: Float[Array, "batch seq embed"],
    caches: tuple[AbstractCache, ...],
    at: Tokens,
    after: Sequence[Float[Array, "batch seq embed"]],
) -> tuple[Float[Array, "batch seq embed"], tuple[AbstractCache, ...], tuple[Report, ...]]:
    """Runs a period `repeats` times, as `_scan` does, with caches that hold the layers of all repeats.

    Caches are in the carry, where XLA writes them in place. As scanned inputs and outputs they would be copied whole at
    every step.
    """
    arrays, static = eqx.partition(period, eqx.is_array)
    whole, sliced = eqx.partition(arrays, _read_in_place(arrays))

    def one(carry: Any, slices: Any) -> tuple[Any, tuple[Report, ...]]:
        (x, caches), (layer, arrays) = carry, slices
        caches = tuple(eqx.tree_at(lambda c: c.layer, cache, layer) for cache in caches)
        layers = jax.tree.map(lambda stack: Stacked(stack, layer), whole)
        blocks = eqx.combine(layers, arrays, static, is_leaf=lambda node: isinstance(node, Stacked))
        x, caches, reports = _run_blocks(blocks, x, caches, at, None, after)
        return (x, caches), reports

    (x, caches), reports = jax.lax.scan(one, (x, caches), (jnp.arange(repeats), sliced))
    return x, caches, reports


def _repetition(kinds: Int[np.ndarray, " layers"]) -> tuple[int, int, int]:
    """Finds the run that spares the most blocks, then the first, then of the shortest period.

    Returns how many it spares, its first layer, and its period. The time grows with layers times blocks of the run.
    """
    n, best, period = len(kinds), (0, 0, -len(kinds)), 0
    while (period := period + 1) <= min(n // 2, n - best[0]):  # longer ones can't spare as many
        breaks = np.flatnonzero(kinds[:-period] != kinds[period:])
        edges = np.concatenate([[-1], breaks, [n - period]])
        spared = (np.diff(edges) - 1) // period * period
        i = int(np.argmax(spared))
        if spared[i]:
            best = max(best, (int(spared[i]), -int(edges[i] + 1), -period))
    return best[0], -best[1], -best[2]


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
