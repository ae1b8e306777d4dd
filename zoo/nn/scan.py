"""Runs layers that repeat: under `lax.scan` in training and on TPUs, and where that would copy weights one by one."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels import Tokens, mesh
from kernels.attention import FEW
from kernels.backends.device import device
from kernels.stacked import Stacked
from zoo.nn.block import AbstractBlock, Remat, Report, Shared, run_blocks
from zoo.nn.cache import AbstractCache
from zoo.nn.layers import AbstractReadInPlace, ExpertLinear
from zoo.nn.pipeline import pipeline
from zoo.nn.programs import own_program


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Apart:
    """The arrays of a block's layers, each by itself, in the place of the array in which they are stacked."""

    layers: tuple[Any, ...]


def scan(
    period: tuple[AbstractBlock, ...],
    repeats: int,
    x: Float[Array, "batch seq embed"],
    at: Tokens,
    own_inputs: Float[Array, "layers batch seq dim"] | None,
    shared: Shared,
    remat: Remat | None,
    after: Sequence[Float[Array, "batch seq embed"]],
) -> tuple[Float[Array, "batch seq embed"], tuple[Report, ...], Shared]:
    """Runs a period `repeats` times, with other weights each time. Stages share the repeats if they divide them.

    Experts' weights are not copied out of those of all layers: each layer gets a reference (`Stacked`).

    Returns `x`, the stacked reports of each of the period's blocks, and what they hand on to later layers.
    """
    arrays, static = eqx.partition(period, eqx.is_array)
    # Where XLA eliminates common subexpressions, it may merge what the backward pass computes again with the forward
    # pass, or compute it for all layers at once. In a scan whose body is one layer it can do neither, and preventing it
    # would only hinder the compiler.
    if remat and repeats > 1 and len(period) == 1:
        remat = functools.partial(remat, prevent_cse=False)

    def run(weights: Any, rows: Array, rows_at: Tokens) -> tuple[Array, tuple[tuple[Report, ...], Shared]]:
        """Runs some of the repeats on some of the sequences. `pipeline` merges the reports of all sequences."""
        # Kernels read experts out of the stack. Its gradient would be of all layers in each, so `own` has the gradient.
        whole = jax.lax.stop_gradient(eqx.filter(weights, _read_in_place(weights, ExpertLinear)))

        def one(rows: Array, of_repeat: Any) -> tuple[Array, tuple[tuple[Report, ...], Shared]]:
            repeat, weights, own = of_repeat
            reference = lambda stack, array: array if stack is None else Stacked(stack, repeat, own=array)
            weights = jax.tree.map(reference, whole, weights, is_leaf=lambda node: node is None)
            blocks = eqx.combine(weights, static, is_leaf=_is_stacked)
            none = (None,) * len(blocks)
            rows, _, reports, handed_on = run_blocks(blocks, rows, none, rows_at, own, shared, remat, after)
            return rows, (reports, _once(handed_on, repeats))

        numbers = jnp.arange(len(jax.tree.leaves(weights)[0]))
        return jax.lax.scan(one, rows, (numbers, weights, _by_repeat(own_inputs, repeats)))

    stages = mesh.split(mesh.STAGE)
    if stages == 1 or repeats % stages:
        x, (reports, handed_on) = run(arrays, x, at)
        return x, reports, _of_one_repeat(handed_on)
    if own_inputs is not None or shared:
        raise ValueError(
            "There is no pipeline for layers that have inputs of their own, or read what earlier ones hand on, such as "
            "keys and values: use a mesh without stage."
        )
    x, (reports, _) = pipeline(run, arrays, x, at)
    return x, reports, {}


def scan_with_caches(
    period: tuple[AbstractBlock, ...],
    repeats: int,
    x: Float[Array, "batch seq embed"],
    caches: tuple[AbstractCache, ...],
    at: Tokens,
    own_inputs: Float[Array, "layers batch seq dim"] | None,
    shared: Shared,
    after: Sequence[Float[Array, "batch seq embed"]],
) -> tuple[Float[Array, "batch seq embed"], tuple[AbstractCache, ...], tuple[Report, ...], Shared]:
    """Runs a period `repeats` times, as `scan` does, with caches that hold the layers of all repeats.

    Caches are in the carry, where XLA writes them in place. As scanned inputs and outputs they would be copied whole at
    every step. Arrays that kernels read in place are not scanned either: each layer gets a reference to its part of the
    whole, `Stacked`, which a kernel reads without a copy.

    For a few tokens of each row a GPU has no loop. A layer's number is a constant then, so that no kernel cuts weights
    out of arrays. What is the same in all layers, such as rotary angles, is computed once. A mesh that splits the
    weights keeps the loop: each layer gathers its weights, beside which the starts of kernels take no time, and without
    a loop XLA gathers those of many layers ahead, into memory of their own.
    """
    if any(map(is_apart, jax.tree.leaves(period, is_leaf=is_apart))):
        return _run_apart(period, repeats, x, caches, at, own_inputs, shared, after)
    arrays, static = eqx.partition(period, eqx.is_array)
    whole, scanned = eqx.partition(arrays, _read_in_place(arrays, AbstractReadInPlace))

    def one(carry: Any, of_repeat: Any) -> tuple[Any, tuple[tuple[Report, ...], Shared]]:
        (x, caches), (repeat, sliced, own) = carry, of_repeat
        caches = tuple(eqx.tree_at(lambda c: c.layer, cache, repeat) for cache in caches)
        references = jax.tree.map(lambda stack: Stacked(stack, repeat), whole)
        blocks = eqx.combine(references, sliced, static, is_leaf=_is_stacked)
        x, caches, reports, handed_on = run_blocks(blocks, x, caches, at, own, shared, None, after)
        return (x, caches), (reports, _once(handed_on, repeats))

    of_repeats = (np.arange(repeats, dtype=np.int32), scanned, _by_repeat(own_inputs, repeats))
    gathers = any(mesh.split(axis) > 1 for axis in mesh.PARAMETERS)
    no_loop = device().platform == "gpu" and x.shape[1] <= FEW and not gathers
    (x, new), (reports, handed_on) = jax.lax.scan(one, (x, caches), of_repeats, unroll=no_loop)
    # The last layer's number would be copied into each donated cache, by a kernel of its own.
    new = tuple(eqx.tree_at(lambda c: c.layer, cache, old.layer) for cache, old in zip(new, caches, strict=True))
    return x, new, reports, _of_one_repeat(handed_on)


def _run_apart(
    period: tuple[AbstractBlock, ...],
    repeats: int,
    x: Float[Array, "batch seq embed"],
    caches: tuple[AbstractCache, ...],
    at: Tokens,
    own_inputs: Float[Array, "layers batch seq dim"] | None,
    shared: Shared,
    after: Sequence[Float[Array, "batch seq embed"]],
) -> tuple[Float[Array, "batch seq embed"], tuple[AbstractCache, ...], tuple[Report, ...], Shared]:
    """Runs a period `repeats` times, as `scan_with_caches` does, one layer after the other and without a scan."""
    reports, handed_on, own = [], {}, _by_repeat(own_inputs, repeats)
    for n in range(repeats):
        of_layer = lambda node, n=n: node.layers[n] if is_apart(node) else node
        blocks, static = eqx.partition(jax.tree.map(of_layer, period, is_leaf=is_apart), eqx.is_array)
        caches = tuple(eqx.tree_at(lambda c: c.layer, cache, jnp.asarray(n, jnp.int32)) for cache in caches)
        own_of_n = None if own is None else own[n]
        x, caches, of_blocks, by_blocks = _repeat(static)(blocks, x, caches, at, own_of_n, shared, after)
        reports.append(of_blocks)
        handed_on = _once(by_blocks, repeats)
    return x, caches, jax.tree.map(lambda *each: jnp.stack(each), *reports), handed_on


@functools.cache
def _repeat(static: Any) -> Callable[..., Any]:
    """Returns the function that runs a period of blocks with these static fields, as a program of its own."""

    @own_program
    def repeat(blocks: Any, x: Any, caches: Any, at: Any, own: Any, shared: Any, after: Any) -> Any:
        return run_blocks(eqx.combine(blocks, static), x, caches, at, own, shared, None, after)

    return repeat


def _by_repeat(
    own_inputs: Float[Array, "layers batch seq dim"] | None, repeats: int
) -> Float[Array, "repeats period batch seq dim"] | None:
    """Groups the inputs of a run's layers by repeat."""
    return None if own_inputs is None else own_inputs.reshape(repeats, -1, *own_inputs.shape[1:])


def _once(handed_on: Shared, repeats: int) -> Shared:
    """Returns what layers hand on. Raises ValueError if they repeat, since every repeat would hand it on."""
    if handed_on and repeats > 1:
        names = ", ".join(handed_on)
        raise ValueError(f"Layers hand on {names} and repeat: give those that hand it on a kind of their own.")
    return handed_on


def _of_one_repeat(handed_on: Shared) -> Shared:
    """Removes the axis of repeats, which has one."""
    return jax.tree.map(lambda a: a[0], handed_on)


def _read_in_place(blocks: Any, kind: type[AbstractReadInPlace]) -> Any:
    """Returns for each array whether kernels read it in place, as those of modules of this kind may do.

    As an input of a scan it would be copied for them.
    """
    reads = lambda m: isinstance(m, kind) and bool(m.in_place)

    def marked(node: Any) -> Any:
        if not reads(node):
            return False
        in_place_fields = lambda m: [getattr(m, name) for name in node.in_place]
        return eqx.tree_at(in_place_fields, jax.tree.map(lambda _: False, node), [True] * len(node.in_place))

    return jax.tree.map(marked, blocks, is_leaf=reads)


def _is_stacked(node: Any) -> bool:
    return isinstance(node, Stacked)


def is_apart(node: Any) -> bool:
    return isinstance(node, Apart)
