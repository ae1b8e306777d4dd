"""Activations inside a model: `logits, found = zoo.capture(model, "layers.*.mlp")(tokens)`.

Modules are selected by their paths, so families need no code for this. Outputs leave the scan over layers in the place
of the layers' reports: they are ordinary results of a compiled function, and have gradients.
"""

import contextlib
import contextvars
import dataclasses
import fnmatch
import functools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
from jaxtyping import Array, Float, Int

from kernels import mesh
from zoo.nn.block import AbstractBlock, AbstractSharingBlock, Report
from zoo.nn.model import AbstractModel, Images
from zoo.nn.stack import Stack
from zoo.surgery import path_name


T = TypeVar("T")
Activations = dict[str, Any]  # path of a module -> its output

_found = contextvars.ContextVar[Activations]("found")  # of the model or block that is running


class Capture(eqx.Module):
    """A model that returns activations beside its result. It is compiled like a model, by `equinox.filter_jit`."""

    model: AbstractModel
    patterns: tuple[str, ...] = eqx.field(static=True)

    def __call__(
        self,
        tokens: Int[Array, "batch seq"],
        *,
        segments: Int[Array, "batch seq"] | None = None,
        images: Images | None = None,
    ) -> tuple[Float[Array, "batch ..."], Activations]:
        """Returns the model's result, and path -> output of each selected module, most of them [batch, seq, features].

        The output of a module that returns several values is the first of them. A module that is not called has none,
        and of one that is called several times it is the last one's.

        Raises:
            ValueError: if layers are split over stages, which return no activations.
        """
        if mesh.split(mesh.STAGE) > 1:
            raise ValueError("A pipeline returns no activations: use a mesh without stage, such as fsdp=8, for them.")
        with _recording() as found:
            result = self.model(tokens, segments=segments, images=images)
        return result, {path: output for path, output in found.items() if _matches(path, self.patterns)}


def capture(model: AbstractModel, *patterns: str) -> Capture:
    """Select modules whose outputs a call returns, too.

    Args:
        model: any model. It is not changed.
        patterns: patterns of paths, in which layers have their numbers: "norm", "layers.7" (the features after layer
            7), "layers.*.self_attn", "layers.[0-3].mlp.up_proj". `*` stands for one name, or a part of it. Layers that
            share a scan compute and hold the outputs of all of them, also where a pattern names one.

    Raises:
        ValueError: no module matches a pattern. Those of a tower for images are never selected.
    """
    stack = model.layers
    paths = list(filter(None, _modules(model)))
    paths += [
        _joined(f"layers.{n}", path) for numbers, block in stack.blocks() for path in _modules(block) for n in numbers
    ]
    for pattern in patterns:
        if not any(_matches(path, [pattern]) for path in paths):
            raise ValueError(f"No module's path matches {pattern!r}: print(model) has the names in them.")

    def recording_block(numbers: range, block: AbstractBlock) -> AbstractBlock:
        selected = lambda path: any(_matches(_joined(f"layers.{n}", path), patterns) for n in numbers)
        return _recorder(_block_recorder(type(block), selected("")), _with_recorders(block, selected), "")

    recording = _with_recorders(model, lambda path: _matches(path, patterns))
    recording = eqx.tree_at(lambda m: m.layers, recording, stack.map_blocks(recording_block))
    return Capture(_recorder(_model_recorder(type(model)), recording, ""), patterns)


def _matches(path: str, patterns: Sequence[str]) -> bool:
    """Whether a pattern has as many names between dots as the path, which match one by one."""
    names = path.split(".")
    each = (pattern.split(".") for pattern in patterns)
    return any(len(parts) == len(names) and all(map(fnmatch.fnmatchcase, names, parts)) for parts in each)


def _joined(*names: str) -> str:
    return ".".join(filter(None, names))


@contextlib.contextmanager
def _recording() -> Iterator[Activations]:
    """Within it, modules that record put their outputs into the dictionary that it yields."""
    token = _found.set({})
    try:
        yield _found.get()
    finally:
        _found.reset(token)


class _Recorded(eqx.Module):
    """The report of a block that records, and the outputs of its modules."""

    report: Report
    found: Activations


# ------------------------------------------------------------------------------------------------ modules that record
# They are of subclasses of their modules' classes, since other code asks for classes and attributes of modules.


def _children(tree: Any) -> tuple[list[tuple[str, Any]], Any]:
    """Returns the names and the values of the nodes right below a node, and its structure above them."""
    children, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    return [(path_name(path), child) for path, child in children], structure


def _modules(tree: Any, path: str = "") -> Iterator[str]:
    """Yields the path of every module, those within others too, but none of a stack."""
    if isinstance(tree, Stack):
        return
    if isinstance(tree, eqx.Module):
        yield path
    for name, child in _children(tree)[0]:
        if child is not tree:
            yield from _modules(child, _joined(path, name))


def _with_recorders(tree: T, selected: Callable[[str], bool], path: str = "") -> T:
    """Replaces the selected modules of a model or a block by ones that record, but not itself, and none of a stack."""
    children, structure = _children(tree)
    if isinstance(tree, Stack) or (children and children[0][1] is tree):  # the latter is an array
        return tree
    new = [_with_recorders(child, selected, _joined(path, name)) for name, child in children]
    tree = jax.tree.unflatten(structure, new)
    return _recorder(_module_recorder(type(tree)), tree, path) if path and selected(path) else tree


def _recorder(kind: Any, module: Any, path: str) -> Any:
    """Makes a module of the class `kind`, with all fields of `module`."""
    new = object.__new__(kind)
    for field in dataclasses.fields(module):
        object.__setattr__(new, field.name, getattr(module, field.name))
    object.__setattr__(new, "recorded_as", path)  # a field of those of `_module_recorder` alone
    return new


@functools.cache  # an equal class each time, so that a model is compiled once
def _module_recorder(kind: Any) -> Any:
    class Recorder(kind):
        recorded_as: str = eqx.field(static=True, kw_only=True)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            result = super().__call__(*args, **kwargs)
            _found.get()[self.recorded_as] = result[0] if isinstance(result, tuple) else result
            return result

    return _named_like(Recorder, kind)


@functools.cache
def _block_recorder(kind: Any, features: bool) -> Any:
    """Returns the class of a block whose report also has what its modules record and, if asked for, its features."""
    name = "run" if issubclass(kind, AbstractSharingBlock) else "__call__"

    def run(self: Any, *args: Any) -> Any:
        with _recording() as found:
            x, cache, report, *handed_on = getattr(kind, name)(self, *args)
        return x, cache, _Recorded(report, found | ({"": x} if features else {})), *handed_on

    return _named_like(types.new_class("Recorder", (kind,), exec_body=lambda body: body.update({name: run})), kind)


@functools.cache
def _model_recorder(kind: Any) -> Any:
    """Returns the class of a model that records what its layers do, under the numbers of the layers."""

    class Recorder(kind):
        def forward(self, *args: Any) -> Any:
            x, cache, reports = super().forward(*args)
            flat, structure = jax.tree.flatten(reports, is_leaf=lambda node: isinstance(node, _Recorded))
            for (numbers, block), recorded in zip(self.layers.blocks(), flat, strict=True):
                stacked = any(block is each for each in self.layers.period)
                for path, output in recorded.found.items():
                    for i, n in enumerate(numbers):
                        _found.get()[_joined(f"layers.{n}", path)] = output[i] if stacked else output
            return x, cache, jax.tree.unflatten(structure, [recorded.report for recorded in flat])

    return _named_like(Recorder, kind)


def _named_like(new: Any, kind: Any) -> Any:
    new.__name__, new.__qualname__, new.__module__ = kind.__name__, kind.__qualname__, kind.__module__
    return new
