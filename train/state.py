"""The state of a training run: parameters, the optimizer's arrays, the number of steps; and where each lies."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from kernels.mesh import REPLICA
from train import freeze
from train.mesh import abstract_model, check_mesh
from train.offload import host
from train.remat import StepOptions
from zoo import lora
from zoo.checkpoint import skeleton
from zoo.nn.model import AbstractConfig
from zoo.quantized import quantize_training
from zoo.registry import family_of
from zoo.surgery import cast


@dataclasses.dataclass(frozen=True)
class Trained:
    """What is trained: a model, or adapters of one."""

    name: str  # of the model that the run begins with, as in the options
    config: AbstractConfig
    abstract: Any  # shapes, dtypes and shardings of `make()`
    make: Callable[[], Any]
    frozen: Any = None  # all else of the model (`zoo.lora.split`, `train.freeze.split`); None: there is nothing else
    adapters: bool = False  # whether adapters are what is trained


def to_train(
    load: Callable[[], Any],
    o: StepOptions,
    name: str,
    config: AbstractConfig,
    mesh: Mesh,
    *,
    adapters: bool = False,
    parts: Sequence[str] = (),
) -> Trained:
    """What `load()` loads, as what is trained: its adapters, or all of its weights but those of --freeze.

    Raises:
        ValueError: the mesh does not divide the model, or --freeze or --weights-dtype does not fit it.
    """
    family, shape = family_of(config), dict(batch=o.batch // o.microbatches, seq_len=o.seq_len)
    check_mesh(mesh, skeleton(family, config, parts), family, **shape)
    prepared = lambda model: model if o.matmul == "float" else quantize_training(model, o.matmul)
    if adapters:
        if o.freeze:
            raise ValueError("--freeze is of no use to adapters, which are all that is trained: see --lora.where.")
        if o.weights_dtype != "float32":
            raise ValueError(
                f"--weights-dtype {o.weights_dtype} is of no use to adapters, which are small: leave it out. The "
                "weights under them are in --compute-dtype, or as --quantize says."
            )
        model, frozen = lora.split(prepared(load()))
        return Trained(name, config, model, lambda: model, frozen, adapters=True)
    abstract = prepared(abstract_model(config, family, mesh, parts))
    if not o.freeze:
        return Trained(name, config, abstract, lambda: prepared(load()))
    # What is to be trained is loaded again when it is needed: the run would hold its first weights all along.
    part = lambda which: freeze.split(prepared(load()), o.freeze)[which]
    return Trained(name, config, freeze.split(abstract, o.freeze)[0], lambda: part(0), part(1))


class TrainState(eqx.Module):
    """A pytree of arrays. A checkpoint holds it and the position in the data, and a run resumes from these alone."""

    step: Int[Array, ""]  # updates made so far
    model: Any  # its floating point arrays as --weights-dtype says, whatever they are computed in
    opt_state: Any


def init_state(
    model: Any, optimizer: optax.GradientTransformation, *, weights_dtype: str = "float32", offload: str = "none"
) -> TrainState:
    """Makes the state before the first step. It copies `model`, whose buffers may be a memory-mapped file's."""
    abstract = abstract_state(model, optimizer, weights_dtype=weights_dtype, offload=offload)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda model: _new(model, optimizer, weights_dtype), out_shardings=places)(model)


def abstract_state(
    model: Any, optimizer: optax.GradientTransformation, *, weights_dtype: str = "float32", offload: str = "none"
) -> TrainState:
    """Returns the shapes, dtypes and shardings of `init_state(model, optimizer)`, into which a checkpoint is restored.

    Parameters stay where `model` has them. The optimizer's arrays for a parameter lie beside it, and are also split
    over the replicas, each of which updates its part (ZeRO-1, arXiv:1910.02054). optax says which arrays these are. All
    others, such as numbers of steps, are copied to every device.

    Args:
        model: arrays, or `jax.ShapeDtypeStruct` with shardings.
        weights_dtype, offload: see `WeightsOptions` and `OffloadOptions`. What stays in float32 in any model, such as
            biases of routers, stays on the devices too.

    Raises:
        ValueError: the devices can't use the memory of their host.
    """
    shapes = jax.eval_shape(lambda model: _new(model, optimizer, weights_dtype), model)
    away = host if offload == "optimizer" else lambda place: place
    first = jax.tree.leaves(model)[0].sharding
    everywhere = NamedSharding(first.mesh, P()) if isinstance(first, NamedSharding) else first
    at = lambda array, place: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # stands for a parameter of another optimizer
    opt_state = optax.tree_map_params(
        optimizer,
        lambda array, parameter: array if is_masked(array) else at(array, away(beside(parameter, array.shape))),
        shapes.opt_state,
        eqx.filter(model, _is_trained),
        transform_non_params=lambda array: at(array, everywhere),
        is_leaf=is_masked,
    )
    low = jax.eval_shape(lambda model: cast(model, jnp.bfloat16), shapes.model)
    parameters = jax.tree.map(
        lambda array, low, given: at(array, given.sharding if array.dtype == low.dtype else away(given.sharding)),
        shapes.model,
        low,
        model,
    )
    parts = lambda state: (state.step, state.model, state.opt_state)
    return eqx.tree_at(parts, shapes, (at(shapes.step, everywhere), parameters, opt_state))


def beside(parameter: Any, shape: tuple[int, ...]) -> Sharding:
    """Where an optimizer keeps an array of this shape for a parameter: moments, or Adafactor's sums over one axis.

    It is split as the parameter is. Mesh axes that are left, which are "replica" and those that split the axis summed
    over, split the first of its own axes that they divide.
    """
    place, size = parameter.sharding, parameter.shape
    if not isinstance(place, NamedSharding):
        return place
    # The axis that is summed over; all axes are there if it is one past the last. Where two fit, either will do.
    missing = next((i for i in range(len(size) + 1) if shape == size[:i] + size[i + 1 :]), None)
    if missing is None:  # optax's stand-in for an array that it does not need
        return NamedSharding(place.mesh, P())
    split = [*place.spec, *[None] * (len(size) - len(place.spec))]
    over = _axes(split.pop(missing)) if missing < len(size) else ()
    for axis in (*over, REPLICA):
        devices = place.mesh.shape.get(axis, 1)
        for i, length in enumerate(shape):
            parts = math.prod(place.mesh.shape[a] for a in _axes(split[i]))
            if devices > 1 and length % (parts * devices) == 0:
                split[i] = (*_axes(split[i]), axis)
                break
    return NamedSharding(place.mesh, P(*split))


def _axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else entry or ()


def _is_trained(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _new(model: Any, optimizer: optax.GradientTransformation, weights_dtype: str) -> TrainState:
    own = lambda a: jnp.array(a, jnp.float32 if _is_trained(a) else a.dtype, copy=True)
    model = jax.tree.map(own, model)
    opt_state = optimizer.init(eqx.filter(model, _is_trained))  # of float32, whatever the weights are
    return TrainState(jnp.zeros((), jnp.int32), cast(model, weights_dtype), opt_state)
