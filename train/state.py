"""What a training step takes and returns: float32 parameters, the optimizer's state, and how many steps made them."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
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

    Parameters stay where `model` has them, and what the optimizer keeps for each lies beside it. `model` may itself be
    made of `jax.ShapeDtypeStruct` with shardings.
    """
    shapes = jax.eval_shape(lambda model: _new(model, optimizer), model)
    all_places = jax.tree.map(lambda array: array.sharding, model)
    trained_places = jax.tree.map(lambda _, place: place, eqx.filter(model, _is_trained), all_places)
    first = jax.tree.leaves(all_places)[0]
    everywhere = NamedSharding(first.mesh, P()) if isinstance(first, NamedSharding) else first

    # What looks like the model, or like what is trained of it, lies as that does: the parameters, and their moments.
    known = {jax.tree.structure(tree): tree for tree in (all_places, trained_places)}
    structure = jax.tree.structure
    places = jax.tree.map(
        lambda part: known.get(structure(part), everywhere), shapes, is_leaf=lambda part: structure(part) in known
    )
    return jax.tree.map(lambda s, p: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=p), shapes, places)


def _is_trained(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _new(model: Any, optimizer: optax.GradientTransformation) -> TrainState:
    own = lambda a: jnp.array(a, jnp.float32 if _is_trained(a) else a.dtype, copy=True)
    model = jax.tree.map(own, model)
    return TrainState(jnp.zeros((), jnp.int32), model, optimizer.init(eqx.filter(model, _is_trained)))
