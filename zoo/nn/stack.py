"""Runs a model's layers, most of them under `lax.scan`, so that a deep model compiles as fast as a shallow one."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import numpy as np
from jax.core import Tracer
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kernels import Tokens, counted, mesh
from zoo.nn.block import AbstractBlock, AbstractDecoderBlock, Remat, Report, run_blocks, split_tokens
from zoo.nn.cache import AbstractCache
from zoo.nn.scan import Apart, scan, scan_with_caches


CACHED = 2**25  # bytes of all layers: on a CPU fewer lie in its caches, from where they are copied in no time
MIN_SCAN_SAVING = 4  # the layers that a further scan must save compiling, since the scan itself takes time to compile


Caches = tuple[tuple[AbstractCache, ...], ...]
"""A cache for each block of a stack's `head`, `period` and `tail`: in `period` one for all layers of a block."""

Reports = tuple[tuple[Report, ...], ...]
"""The reports of the same blocks: in `period` those of a block's layers, stacked."""


class Stack(eqx.Module):
    """A model's layers.

    Layers of one kind have the same structure. A run is a row of layers whose kinds repeat: (period, repeats) is how
    many layers repeat, and how often. 48 layers that are all alike are the run (1, 48); five local layers and a global
    one, eight times over, are the run (6, 8). A run is one scan, whose body runs one whole period. So each kind keeps
    its own class, static fields (a window, a rope base) and size of cache.

    `head` and `tail` are the layers before the first run and after the last one. `period` has a block for each layer of
    a run's period: in a run that starts at layer h, block j holds layers h + j, h + j + period, ..., with their arrays
    stacked along a new first axis.

    Where one run is not enough there are several, whose blocks follow each other in `period`. MEMEMEM*EMEMEMEME is
    ME ME ME, M*, EM EM EM EM and E: the runs (2, 3), (2, 1) and (2, 4), and a tail of one layer. If no kind repeats,
    all n layers are the run (n, 1).
    """

    head: tuple[AbstractBlock, ...]
    period: tuple[AbstractBlock, ...]
    tail: tuple[AbstractBlock, ...]
    num_layers: int = eqx.field(static=True)
    runs: tuple[tuple[int, int], ...] = eqx.field(static=True)  # (period, repeats) of each
    remat: Remat | None = eqx.field(static=True)  # see `zoo.surgery.with_remat`

    def __init__(self, make: Callable[..., AbstractBlock], kinds: Sequence[Any], *, key: PRNGKeyArray):
        """Initialises layers with random weights.

        Args:
            make: `make(n, key=key)` builds layer n. For a block of several layers it is called with the first one's
                number, under `vmap` over their keys.
            kinds: the kind of each layer, hashable; at least one. Layers of equal kinds differ only in their arrays.
            key: is split over the layers.
        """
        self.num_layers, self.remat = len(kinds), None
        start, self.runs = self.plan(kinds)
        keys = jax.random.split(key, len(kinds))

        def stacked(numbers: range) -> AbstractBlock:
            of_layers = keys[numbers.start : numbers.stop : numbers.step]
            return eqx.filter_vmap(lambda key: make(numbers[0], key=key))(of_layers)

        self.head = tuple(make(n, key=keys[n]) for n in range(start))
        scans = list(self.scans())
        end = scans[-1][0].stop
        self.period = tuple(
            stacked(layers[j :: len(blocks)]) for layers, blocks, _ in scans for j in range(len(blocks))
        )
        self.tail = tuple(make(n, key=keys[n]) for n in range(end, len(kinds)))

    @staticmethod
    def plan(kinds: Sequence[Any]) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Finds the number of layers before the first run, and `runs`.

        A run saves compiling all of its layers but one period. The run that saves the most is chosen first; then,
        before and after it, others that save at least `MIN_SCAN_SAVING`. Layers between two runs become a run that does
        not repeat.
        """
        numbers, found, parts = {}, [], [(0, len(kinds), 0)]
        kind = np.array([numbers.setdefault(k, len(numbers)) for k in kinds])
        while parts:
            start, end, least = parts.pop()
            saved, offset, period = _repetition(kind[start:end])
            if saved >= least:
                first = start + offset
                stop = first + period + saved
                found.append((first, period, stop))
                parts += [(start, first, MIN_SCAN_SAVING), (stop, end, MIN_SCAN_SAVING)]
        found.sort()
        before, runs = found[0][0], []
        done = before
        for first, period, stop in found:
            if first > done:
                runs.append((first - done, 1))
            runs.append((period, (stop - first) // period))
            done = stop
        return before, tuple(runs)

    def scans(self) -> Iterator[tuple[range, range, int]]:
        """Yields, for each run, the numbers of its layers, the indices of its blocks in `period`, and its repeats."""
        layer, block = len(self.head), 0
        for period, repeats in self.runs:
            yield range(layer, layer + period * repeats), range(block, block + period), repeats
            layer, block = layer + period * repeats, block + period

    def with_remat(self, remat: Remat | None) -> "Stack":
        """Returns this stack, whose layers `remat` wraps one by one where there is no cache."""
        return self._replaced(remat=remat)

    def apart(self) -> "Stack":
        """Returns this stack for decoding, with each layer's arrays by themselves (`apart`)."""
        split = lambda a: Apart(tuple(_view(a, n) for n in range(len(a)))) if eqx.is_array(a) else a
        return self._replaced(period=jax.tree.map(split, self.period))

    def map_blocks(self, fn: Callable[[range, AbstractBlock], AbstractBlock]) -> "Stack":
        """Returns this stack with `fn(numbers of its layers, block)` in the place of each block."""
        new = [fn(numbers, block) for numbers, block in self.blocks()]
        start, end = len(self.head), len(self.head) + len(self.period)
        return self._replaced(head=tuple(new[:start]), period=tuple(new[start:end]), tail=tuple(new[end:]))

    def _replaced(self, **fields: Any) -> "Stack":
        # `dataclasses.replace` would call `__init__`, which makes weights; `eqx.tree_at` can't replace a static field.
        new = object.__new__(Stack)
        for field in dataclasses.fields(self):
            object.__setattr__(new, field.name, fields.get(field.name, getattr(self, field.name)))
        return new

    def __len__(self) -> int:
        """The number of layers."""
        return self.num_layers

    def __getitem__(self, n: int) -> AbstractBlock:
        """Returns a copy of layer n, with arrays of its own; -1 is the last one. Raises IndexError if there is none."""
        block, index = self.place(n)
        return block if index is None else jax.tree.map(lambda a: a[index], block)

    def with_layer(self, n: int, layer: AbstractBlock) -> "Stack":
        """Returns this stack with the arrays of `layer`, which is a changed `self[n]`, in the place of layer n's.

        Raises:
            IndexError: there is no layer n.
            ValueError: modules, static fields, shapes or dtypes differ from those of layer n, with which it shares a
                scan.
        """
        block, index = self.place(n)
        described = lambda tree: (jax.tree.structure(tree), [(a.shape, a.dtype) for a in jax.tree.leaves(tree)])
        if described(layer) != described(eqx.filter_eval_shape(self.__getitem__, n)):
            raise ValueError(f"The new layer {n} has other modules, static fields, shapes or dtypes than the old one.")
        new = layer if index is None else jax.tree.map(lambda a, own: a.at[index].set(own), block, layer)
        return self.map_blocks(lambda _, each: new if each is block else each)

    def place(self, n: int) -> tuple[AbstractBlock, int | None]:
        """Finds layer n: the block that holds it, and its index in the block's arrays; None: the block is the layer.

        Raises:
            IndexError: there is no layer n.
        """
        n = range(self.num_layers)[n]
        layers, block = next((layers, block) for layers, block in self.blocks() if n in layers)
        return block, layers.index(n) if any(block is stacked for stacked in self.period) else None

    def layer_numbers(self, part: str, j: int) -> range:
        """Returns the numbers of the layers that `head[j]`, `period[j]` or `tail[j]` holds."""
        if part == "period":
            layers, blocks = next((layers, blocks) for layers, blocks, _ in self.scans() if j in blocks)
            return layers[j - blocks.start :: len(blocks)]
        first = 0 if part == "head" else self.num_layers - len(self.tail)
        return range(first + j, first + j + 1)

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        cache: Caches | None = None,
        at: Tokens = Tokens(),  # noqa: B008 (a value)
        after: Sequence[Float[Array, "batch seq embed"]] = (),
        own_inputs: Float[Array, "layers batch seq dim"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        """Runs every layer. Returns `x`, the new cache (None without one), and the layers' reports.

        Where the mesh in scope has stages and their number divides a run's repeats, each stage runs an equal share of
        the repeats, and the sequences go through the stages as `zoo.nn.pipeline` says. All other layers run on every
        stage, each for its share of the sequences.

        Args:
            x: features.
            cache: from `init_cache`; None: these tokens are all there is. With a cache, `remat` is ignored.
            at: where the tokens stand.
            after: is added to the features after each of the first layers (DeepStack, arXiv:2406.04334). A model gives
                these layers kinds of their own, so that none of them is in a run that repeats.
            own_inputs: an input for each layer, for layers that are an `AbstractSharingBlock`.

        Raises:
            ValueError: for a cache where there are stages; if `after` has more entries than there are layers before the
                first run that repeats; if a layer in such a run hands something on, of which there would be several; or
                if layers that are split over stages have `own_inputs`, or are handed something.
        """
        # Where `x` is no tracer nothing compiles this call, and its scans would be traced and compiled every time.
        run = Stack._run if isinstance(x, Tracer) else _compiled
        return run(self, x, cache, at, tuple(after), own_inputs)

    def _run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: Caches | None,
        at: Tokens,
        after: tuple[Float[Array, "batch seq embed"], ...],
        own_inputs: Float[Array, "layers batch seq dim"] | None,
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        if cache is not None and mesh.split(mesh.STAGE) > 1:
            raise ValueError("There is no pipeline for decoding: use a mesh without stage, such as tensor=8, for that.")
        scans = list(self.scans())
        alone = next((layers.start for layers, _, repeats in scans if repeats > 1), self.num_layers)
        if len(after) > alone:
            raise ValueError(f"`after` has {len(after)} entries, but only {alone} layers precede those that repeat.")
        if at.positions is None and at.segments is not None and at.rotary is None:
            at = at._replace(rotary=counted(at.segments))  # counted once here, and not again in every layer

        remat = functools.partial(self.remat, prevent_cse=True) if self.remat and cache is None else None
        none = lambda blocks: (None,) * len(blocks)
        caches: Any = (none(self.head), none(self.period), none(self.tail)) if cache is None else cache
        head_cache, period_cache, tail_cache = caches
        inputs_of = lambda layers: None if own_inputs is None else own_inputs[layers.start : layers.stop]
        own = inputs_of(range(len(self.head)))
        x, head_cache, head_reports, shared = run_blocks(self.head, x, head_cache, at, own, {}, remat, after)
        written, period_reports = (), ()
        for layers, blocks, repeats in scans:
            period, own, added = self.period[blocks.start : blocks.stop], inputs_of(layers), after[layers.start :]
            if cache is None:
                x, reports, handed_on = scan(period, repeats, x, at, own, shared, remat, added)
            else:
                old = period_cache[blocks.start : blocks.stop]
                x, new, reports, handed_on = scan_with_caches(period, repeats, x, old, at, own, shared, added)
                written += new
            period_reports += reports
            shared = {**shared, **handed_on}
        last = range(self.num_layers - len(self.tail), self.num_layers)
        own, added = inputs_of(last), after[last.start :]
        x, tail_cache, tail_reports, _ = run_blocks(self.tail, x, tail_cache, at, own, shared, remat, added)
        new_cache = None if cache is None else (head_cache, written, tail_cache)
        return split_tokens(x), new_cache, (head_reports, period_reports, tail_reports)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Caches:
        """Makes empty caches for positions 0 to `length` - 1, one for each block.

        Raises:
            TypeError: if a block is not a decoder's.
        """
        caches = []
        for layers, block in self.blocks():
            if not isinstance(block, AbstractDecoderBlock):
                raise TypeError(f"A {type(block).__name__} is no decoder's block, and so has no cache.")
            caches.append(block.init_cache(len(layers), batch, length, dtype))
        start, end = len(self.head), len(self.head) + len(self.period)
        return tuple(caches[:start]), tuple(caches[start:end]), tuple(caches[end:])

    def blocks(self) -> Iterator[tuple[range, AbstractBlock]]:
        """Yields each block of `head`, `period` and `tail`, in this order, after the numbers of its layers."""
        for part, blocks in (("head", self.head), ("period", self.period), ("tail", self.tail)):
            for j, block in enumerate(blocks):
                yield self.layer_numbers(part, j), block


def _repetition(kinds: Int[np.ndarray, " layers"]) -> tuple[int, int, int]:
    """Finds the run that saves the most; of those that save equally much the first, and then the shortest period.

    Returns how many layers it saves compiling, its first layer, and its period: (0, 0, layers) if nothing repeats. The
    time grows with the number of layers times the number of those that are left to compile.
    """
    n, period = len(kinds), 0
    best = (0, 0, -n)  # (saved, -first, -period): the largest counts
    while (period := period + 1) <= min(n // 2, n - best[0]):  # period p takes 2 p layers, and saves at most n - p
        breaks = np.flatnonzero(kinds[:-period] != kinds[period:])
        edges = np.concatenate([[-1], breaks, [n - period]])
        saved = (np.diff(edges) - 1) // period * period
        i = int(np.argmax(saved))
        if saved[i]:
            best = max(best, (int(saved[i]), -int(edges[i] + 1), -period))
    return best[0], -best[1], -best[2]


T = TypeVar("T")


def apart(model: T) -> T:
    """Returns a model whose decoding on a CPU copies no weights, or elsewhere the model itself.

    A scan takes each layer's weights out of the array of all layers. On a CPU that is a copy, which takes longer than
    the product with a few rows: half of a step of Qwen3-0.6B in float32. Here each layer's weights are arrays of their
    own, views of the old ones, and the layers are compiled one by one. Such a model runs with a cache only.
    """
    stacks = filter(_is_stack, jax.tree.leaves(model, is_leaf=_is_stack))
    arrays = [a for stack in stacks for a in jax.tree.leaves(eqx.filter(stack.period, eqx.is_array))]
    on_one_cpu = lambda a: [device.platform for device in a.devices()] == ["cpu"]
    if sum(a.nbytes for a in arrays) < CACHED or not all(map(on_one_cpu, arrays)):
        return model
    return jax.tree.map(lambda node: node.apart() if _is_stack(node) else node, model, is_leaf=_is_stack)


def _is_stack(node: Any) -> bool:
    return isinstance(node, Stack)


def _view(a: Array, n: int) -> Array:
    """Returns `a[n]` of an array of a CPU, which shares its memory where that is aligned."""
    return jax.device_put(np.asarray(a)[n], next(iter(a.devices())))


_compiled = eqx.filter_jit(Stack._run)
