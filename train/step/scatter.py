"""Sums of a layer's gradients over devices, where replicas split the state: each device gets the part that it updates.

XLA by itself sums them over the replicas by an all-reduce, of which each replica then takes a slice. That sends twice
the bytes of a reduce-scatter.
"""

import dataclasses
import functools
import math
from typing import Any, TypeVar

import equinox as eqx
import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Shaped

from kernels import Tokens, mesh
from kernels.stacked import Stacked
from train.state.mesh import axes_of, without_replicas
from zoo.nn.block import AbstractBlock, AbstractSharingBlock, Report, Shared, run_block
from zoo.nn.cache import AbstractCache
from zoo.nn.stack import Stack


M = TypeVar("M")


class Scattered(AbstractSharingBlock):
    """A layer whose gradients are reduce-scattered in its backward pass."""

    block: AbstractBlock
    specs: tuple[P, ...] = eqx.field(static=True)  # of the gradients of the block's arrays, in their order

    def run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: AbstractCache | None,
        at: Tokens,
        own: Float[Array, "batch seq dim"] | None,
        shared: Shared,
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, Report, Shared]:
        def one(array: Array | Stacked, spec: P) -> Array | Stacked:
            if isinstance(array, Stacked):
                return dataclasses.replace(array, own=_scattered(array.own, spec))
            return _scattered(array, spec) if eqx.is_inexact_array(array) and array.ndim > 1 else array

        arrays, tree = jax.tree.flatten(self.block, is_leaf=lambda node: isinstance(node, Stacked))
        block = jax.tree.unflatten(tree, map(one, arrays, self.specs))
        return run_block(block, x, cache, at, own, shared)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _scattered(array: Shaped[Array, "..."], spec: P) -> Shaped[Array, "..."]:
    """Returns the array. Its gradient is summed within each replica, and then over them, each by a reduce-scatter.

    In one sum over all devices, each would send its whole gradient between nodes, and not only its part.
    """
    return array


def _backward(spec: P, _: None, gradient: Array) -> tuple[Array]:
    constrain = jax.lax.with_sharding_constraint
    return (constrain(constrain(gradient, without_replicas(spec)), spec),)


_scattered.defvjp(lambda array, spec: (array, None), _backward)


def scattered(model: M, places: Any) -> M:
    """Returns a model whose layers' gradients are reduce-scattered over the replicas, if there are any.

    Vectors are left out: a reduce-scatter of so few bytes saves no time. With stages XLA sums gradients by itself.

    Args:
        places: the shardings of the model's arrays in the state; something else for arrays that are not trained. None:
            there are no replicas.
    """
    if places is None or mesh.split(mesh.REPLICA) == 1 or mesh.split(mesh.STAGE) > 1:
        return model

    def of_block(block: AbstractBlock, of_state: Any, repeats: bool) -> Scattered:
        specs = map(_spec, jax.tree.leaves(of_state))
        return Scattered(block, tuple(map(_of_layer, specs, jax.tree.leaves(block)) if repeats else specs))

    def of_stack(stack: Any, of_state: Any) -> Any:
        if not isinstance(stack, Stack):
            return stack
        in_state = {id(block): of for (_, block), (_, of) in zip(stack.blocks(), of_state.blocks(), strict=True)}
        repeats = set(map(id, stack.period))
        return stack.map_blocks(lambda _, block: of_block(block, in_state[id(block)], id(block) in repeats))

    return jax.tree.map(of_stack, model, places, is_leaf=lambda node: isinstance(node, Stack))


def _spec(place: Any) -> P:
    return place.spec if isinstance(place, NamedSharding) else P()


def _of_layer(spec: P, array: Shaped[Array, "layers ..."]) -> P:
    """Returns the spec of the gradient of one layer, from that of the array of all layers.

    Where replicas split the layers, they split the first axis of a layer's gradient that they divide.
    """
    layers, *split = [*spec, *(None,) * (array.ndim - len(spec))]
    if mesh.REPLICA in axes_of(layers):
        for i, entry in enumerate(split):
            over = *axes_of(entry), mesh.REPLICA
            if array.shape[i + 1] % math.prod(map(mesh.split, over)) == 0:
                split[i] = over
                break
    return P(*split)


def as_in_state(gradients: M, places: Any) -> M:
    """Places gradients as the state has their parameters, if there are replicas: XLA would rather move the moments."""
    if places is None or mesh.split(mesh.REPLICA) == 1:
        return gradients
    is_none = lambda node: node is None  # in the place of an array that is not a float
    place = lambda g, place: None if g is None else jax.lax.with_sharding_constraint(g, _spec(place))
    return jax.tree.map(place, gradients, places, is_leaf=is_none)
