"""The state of a training run: parameters, the optimizer's arrays, and the number of steps.

Also the choice of trained arrays in a model (all, all but frozen ones, or adapters), and the sharding of each array.
"""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from kernels.mesh import EXPERT, REPLICA
from train.base.options import Group, OptionGroup, option
from train.state.mesh import abstract_model, axes_of, check_mesh, replicated, without_replicas
from train.state.offload import host
from train.state.remat import StepOptions
from zoo import lora
from zoo.nn.heads import AbstractHead
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.quantized import quantize_training
from zoo.registry import family_of
from zoo.surgery import cast, path_name, shardings
from zoo.weights.checkpoint import skeleton


T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lora(OptionGroup):
    """Options for adapters: small matrices beside the model's own, which are then not trained."""

    help_group: ClassVar[Group] = Group.MODEL

    rank: int = 0
    """Rank of the adapters; 8 to 64 is usual. 0: no adapters, and every weight is trained."""
    alpha: float = option(0.0, rare=True)
    """Scale of the adapters: their output is multiplied by alpha / rank. 0: twice the rank."""
    where: str = option(lora.LAYERS, rare=True)
    """Pattern of the paths of the linear maps that get adapters, such as *.[qv]_proj for queries and values. The
    default is all linear maps of the layers, experts' too."""

    def identity(self) -> dict[str, Any]:
        """Returns the values that must not change while a run lasts."""
        return {"rank": self.rank, "scale (alpha / rank)": self.alpha / max(self.rank, 1), "where": self.where}


@dataclasses.dataclass(frozen=True, kw_only=True)
class StateOptions(OptionGroup):
    """Options for how the state is kept between steps."""

    help_group: ClassVar[Group] = Group.STEP

    weights_dtype: Literal["float32", "bfloat16"] = option("float32", rare=True)
    """Data type in which trained weights are kept between steps, at 4 or 2 bytes each. bfloat16: an update is computed
    in float32 and rounded to one of the two nearest numbers at random, so that the mean is exact. The random bits
    depend on the number of the step alone. Not for adapters. See docs/optimizers.md."""
    offload: Literal["none", "optimizer"] = option("none", rare=True, identity=False)
    """Arrays that are kept in the memory of the devices' host between steps. none: nothing. optimizer: the optimizer's
    arrays, and the weights if they are float32; while a step runs, a device has a copy of the weights in
    --compute-dtype. Losses are the same, except for XLA's rounding of last places. A step is longer by the time in
    which these bytes cross the bus, both ways. See docs/optimizers.md."""

    def needs_copy(self, compute_dtype: str) -> bool:
        """Whether a step needs a copy of the weights on its devices.

        It does if the weights are in the host's memory, or in another data type than `compute_dtype`.
        """
        return self.weights_dtype != compute_dtype or (self.offload == "optimizer" and self.weights_dtype == "float32")


@dataclasses.dataclass(frozen=True)
class Trained:
    """The trained part of a model: all of it, all but frozen weights, or adapters."""

    name: str  # name, in the options, of the model that the run begins with
    config: AbstractConfig
    abstract: Any  # shapes, dtypes and shardings of `make()`
    make: Callable[[], Any]
    parameters: int = 0  # of the whole model, without adapters
    frozen: Any = None  # the rest of the model (`zoo.lora.split`, `split_frozen`); None: there is no rest
    adapters: bool = False  # whether only adapters are trained


def prepare(
    load: Callable[[], Any],
    name: str,
    config: AbstractConfig,
    mesh: Mesh,
    step: StepOptions,
    kept: StateOptions,
    *,
    freeze: Sequence[str] = (),
    adapters: bool = False,
    parts: Sequence[str] = (),
    head: AbstractHead | None = None,
) -> Trained:
    """Prepares the model that `load()` returns for training: splits off its frozen weights, and quantizes for --matmul.

    With `adapters`, its adapters and its head are trained; otherwise all of its weights but those that match `freeze`.

    Args:
        head: the model's, or one like it.

    Raises:
        ValueError: the mesh does not divide the model, or --freeze or --weights-dtype does not fit it.
    """
    family, shape = family_of(config), dict(batch=step.batch // step.microbatches, seq_len=step.seq_len)
    check_mesh(mesh, skeleton(family, config, parts), family, **shape)
    prepared = lambda model: model if step.matmul == "float" else quantize_training(model, step.matmul)
    abstract = abstract_model(config, family, mesh, parts, head)
    count = sum(array.size for array in jax.tree.leaves(abstract))
    if adapters:
        if freeze:
            raise ValueError("--freeze is of no use to adapters, which are all that is trained: see --lora.where.")
        if kept.weights_dtype != "float32":
            raise ValueError(
                f"--weights-dtype {kept.weights_dtype} is of no use to adapters, which are small: leave it out. The "
                "weights under them are in --compute-dtype, or as --quantize says."
            )
        model, frozen = lora.split(prepared(load()))
        return Trained(name, config, model, lambda: model, count, frozen, adapters=True)
    abstract = prepared(abstract)
    if not freeze:
        return Trained(name, config, abstract, lambda: prepared(load()), count)
    # Trained weights are loaded again when they are needed; otherwise the run would hold its first weights all along.
    part = lambda which: split_frozen(prepared(load()), freeze)[which]
    return Trained(name, config, split_frozen(abstract, freeze)[0], lambda: part(0), count, part(1))


class TrainState(eqx.Module):
    """A pytree of arrays. A checkpoint holds it and the position in the data, and a run resumes from these alone."""

    step: Int[Array, ""]  # number of updates made so far
    model: Any  # its floating point arrays are in --weights-dtype, not in --compute-dtype
    opt_state: Any


def init_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    kept: StateOptions = StateOptions(),
) -> TrainState:
    """Makes the state before the first step. Copies `model`, whose buffers may belong to a memory-mapped file."""
    abstract = abstract_state(model, optimizer, kept)
    places = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return jax.jit(lambda model: _new(model, optimizer, kept.weights_dtype), out_shardings=places)(model)


def abstract_state(
    model: Any,
    optimizer: optax.GradientTransformation,
    kept: StateOptions = StateOptions(),
) -> TrainState:
    """Returns the shapes, dtypes and shardings of `init_state(model, optimizer)`, into which a checkpoint is restored.

    Parameters lie where `model` has them, and the optimizer's arrays for a parameter lie beside it. Both are also split
    over the replicas, each of which updates its part (ZeRO-1, arXiv:1910.02054); a step gathers parameters when they
    are cast (`gathered`). optax decides which arrays belong to a parameter. All other arrays, such as numbers of steps,
    are copied to every device.

    Args:
        model: arrays, or `jax.ShapeDtypeStruct` with shardings.
        kept: with --offload, arrays that are float32 in any model, such as biases of routers, stay on the devices.

    Raises:
        ValueError: the devices can't use the memory of their host.
    """
    shapes = jax.eval_shape(lambda model: _new(model, optimizer, kept.weights_dtype), model)
    away = host if kept.offload == "optimizer" else lambda place: place
    first = jax.tree.leaves(model)[0].sharding
    everywhere = NamedSharding(first.mesh, P()) if isinstance(first, NamedSharding) else first
    at = lambda array, place: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=place)
    is_masked = lambda node: isinstance(node, optax.MaskedNode)  # stands for a parameter of another optimizer
    opt_state = optax.tree_map_params(
        optimizer,
        lambda array, parameter: (
            array if is_masked(array) else at(array, away(moment_sharding(parameter, array.shape)))
        ),
        shapes.opt_state,
        eqx.filter(model, _is_trained),
        transform_non_params=lambda array: at(array, everywhere),
        is_leaf=is_masked,
    )
    low = jax.eval_shape(lambda model: cast(model, jnp.bfloat16), shapes.model)

    def parameter(array: Any, low: Any, given: Any) -> jax.ShapeDtypeStruct:
        place = moment_sharding(given, array.shape) if _is_trained(array) else given.sharding
        return at(array, place if array.dtype == low.dtype else away(place))

    parameters = jax.tree.map(parameter, shapes.model, low, model)
    parts = lambda state: (state.step, state.model, state.opt_state)
    return eqx.tree_at(parts, shapes, (at(shapes.step, everywhere), parameters, opt_state))


def whole(parameters: T) -> T:
    """Gathers parameters over the replicas. They stay where they are if there is one replica."""
    return jax.device_put(parameters, jax.tree.map(lambda a: replicated(a.sharding), parameters))


def gathered(parameters: T, places: Any) -> T:
    """Gathers parameters over the replicas, in a function that is traced, and in the dtype that they have now.

    `places` are their shardings in the state; None: there are no replicas. With the last sharding alone XLA might
    gather them before a cast.
    """
    if places is None:
        return parameters

    def one(array: Array, place: Sharding) -> Array:
        if not isinstance(place, NamedSharding) or replicated(place) == place:
            return array
        split, everywhere = (NamedSharding(place.mesh, spec) for spec in (place.spec, without_replicas(place.spec)))
        constrain = jax.lax.with_sharding_constraint
        return constrain(constrain(array, split), everywhere)

    return jax.tree.map(one, parameters, places)


def moment_sharding(parameter: Any, shape: tuple[int, ...]) -> Sharding:
    """Returns the sharding of a state's array of this shape for a parameter: itself, a moment, or Adafactor's sums.

    Adafactor's sums lack one axis, over which they are summed. The array is split as the parameter is. The remaining
    mesh axes are "replica" and those that split the missing axis: each splits the first of the array's axes that it
    divides. Experts that devices split are split further first: then the gradients of a layer are summed over replicas
    by a reduce-scatter. If a replica updated its own layers, each replica would get the sums of all layers.
    """
    place, size = parameter.sharding, parameter.shape
    if not isinstance(place, NamedSharding):
        return place
    # The axis that is summed over, or one past the last if all axes are there. If two axes fit, either will do.
    missing = next((i for i in range(len(size) + 1) if shape == size[:i] + size[i + 1 :]), None)
    if missing is None:  # optax's stand-in for an array that it does not need
        return NamedSharding(place.mesh, P())
    split = [*place.spec, *[None] * (len(size) - len(place.spec))]
    over = axes_of(split.pop(missing)) if missing < len(size) else ()
    of_experts = lambda i: place.mesh.shape.get(EXPERT, 1) > 1 and axes_of(split[i]) == (EXPERT,)
    order = sorted(range(len(shape)), key=lambda i: not of_experts(i))
    for axis in (*over, REPLICA):
        devices = place.mesh.shape.get(axis, 1)
        for i in order:
            parts = math.prod(place.mesh.shape[a] for a in axes_of(split[i]))
            if devices > 1 and shape[i] % (parts * devices) == 0:
                split[i] = (*axes_of(split[i]), axis)
                break
    return NamedSharding(place.mesh, P(*split))


def _is_trained(leaf: Any) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _new(model: Any, optimizer: optax.GradientTransformation, weights_dtype: str) -> TrainState:
    own = lambda a: jnp.array(a, jnp.float32 if _is_trained(a) else a.dtype, copy=True)
    model = jax.tree.map(own, model)
    opt_state = optimizer.init(eqx.filter(model, _is_trained))  # from float32 weights, whatever --weights-dtype is
    return TrainState(jnp.zeros((), jnp.int32), cast(model, weights_dtype), opt_state)


def split_frozen(model: T, patterns: Sequence[str]) -> tuple[T, T]:
    """Splits a model into a trained and a frozen part; each has None in place of the other's arrays.

    Frozen weights get no gradients, and the optimizer keeps no arrays for them. They stay in the data type of their
    checkpoint, so that they are exported with the bits that were loaded.

    Args:
        patterns: patterns, for `fnmatch`, of the paths of frozen arrays.

    Raises:
        ValueError: a pattern matches nothing, or together they match everything.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            raise ValueError(f"--freeze {pattern} matches none of the model's weights, which are {', '.join(paths)}.")
    is_trained = lambda path, _: not any(fnmatch.fnmatch(path_name(path), pattern) for pattern in patterns)
    chosen = jax.tree_util.tree_map_with_path(is_trained, model)
    if not any(jax.tree.leaves(chosen)):
        raise ValueError(f"--freeze {' '.join(patterns)} leaves nothing to train.")
    return eqx.partition(model, chosen)


def add_adapters(model: AbstractModel, options: Lora, mesh: Mesh, *, seed: int) -> AbstractModel:
    """Returns the model with new adapters, placed on the mesh."""
    model = lora.add(model, rank=options.rank, alpha=options.alpha, where=options.where, key=jax.random.key(seed))
    return jax.device_put(model, shardings(model, family_of(model).partition_rules, mesh))
