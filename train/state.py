"""What a training step takes and returns: float32 parameters, the optimizer's state, and how many steps made them."""

import math
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int


class TrainState(eqx.Module):
    """A pytree of arrays. With the position in the data beside it, it is all that a run goes on from."""

    step: Int[Array, ""]  # updates made so far
    model: Any  # its floating point arrays in float32, whatever they are computed in
    opt_state: Any


def init_state(model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The state before the first step. It owns its buffers: those of `model` may be a memory-mapped file's."""
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(model, optimizer))
    return jax.jit(lambda model: _new(model, optimizer), out_shardings=places)(model)


def abstract_state(model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    """The shapes, dtypes and shardings of `init_state(model, optimizer)`, for which a checkpoint is restored.

    Parameters stay where `model` has them. What the optimizer keeps for each lies beside it, and is split over the
    replicas too, of which each updates its part (ZeRO-1, arXiv:1910.02054). `model` may itself be made of
    `jax.ShapeDtypeStruct` with shardings.
    """
    shapes = jax.eval_shape(lambda model: _new(model, optimizer), model)
    places = jax.tree.map(lambda array: array.sharding, model)
    moments = jax.tree.map(_over_replicas, eqx.filter(model, _is_trained), places)
    first = jax.tree.leaves(places)[0]
    everywhere = NamedSharding(first.mesh, P()) if isinstance(first, NamedSharding) else first

    # What looks like the trained part of the model are moments of it.
    are_moments = lambda part: jax.tree.structure(part) == jax.tree.structure(moments)
    of_optimizer = jax.tree.map(
        lambda part: moments if are_moments(part) else everywhere, shapes.opt_state, is_leaf=are_moments
    )
    parts = lambda state: (state.step, state.model, state.opt_state)
    places = eqx.tree_at(parts, shapes, (everywhere, places, of_optimizer))
    return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)


def _over_replicas(array: Any, place: Sharding) -> Sharding:
    """`place`, with the first axis that can be split over the replicas too."""
    if isinstance(place, NamedSharding) and (replicas := place.mesh.shape.get("replica", 1)) > 1:
        for i, size in enumerate(array.shape):
            axes = place.spec[i] or ()
            axes = (axes,) if isinstance(axes, str) else axes
            if size % (replicas * math.prod(place.mesh.shape[axis] for axis in axes)) == 0:
                return NamedSharding(place.mesh, P(*place.spec[:i], (*axes, "replica"), *place.spec[i + 1 :]))
    return place


def _is_trained(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _new(model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    own = lambda a: jnp.array(a, jnp.float32 if _is_trained(a) else a.dtype, copy=True)
    model = jax.tree.map(own, model)
    return TrainState(jnp.zeros((), jnp.int32), model, optimizer.init(eqx.filter(model, _is_trained)))
