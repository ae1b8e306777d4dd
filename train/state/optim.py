"""The optimizer of a run and its learning rate schedules: optax, put together for language models."""

import dataclasses
import math
from collections.abc import Callable, Hashable, Mapping
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
import optax
import optax.contrib
import rich
from jax.sharding import PartitionSpec as P
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float

from kernels import mesh
from train.base.options import Group, OptionGroup, option
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear
from zoo.nn.mtp import AbstractMTP
from zoo.surgery import is_stacked, path_name


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerOptions(OptionGroup):
    """Options for the optimizer and its learning rate."""

    help_group: ClassVar[Group] = Group.OPTIMIZER

    steps: int = option(0, group=Group.STEP)
    """Number of optimizer steps of the whole run. 0: the steps of --epochs."""
    lr: float = 0.0
    """Peak learning rate, reached after the warmup. 0: in inverse proportion to the model's width."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the learning rate falls after the warmup. cosine: along half a cosine. wsd: in a straight line over the last
    --decay steps."""
    warmup: int = -1
    """Number of steps over which the learning rate rises to --lr. -1: 3 % of --steps."""
    decay: int = option(-1, rare=True)
    """Number of steps over which wsd lowers the learning rate. -1: 20 % of --steps."""
    optimizer: Literal["adamw", "muon", "adafactor", "sgd"] = "adamw"
    """Algorithm that turns gradients into updates. muon: Muon for the matrices of the layers' linear maps, AdamW for
    all other parameters; its updates have AdamW's size, so --lr and --weight-decay mean the same. adafactor: without
    momentum. sgd: with a momentum of 0.9; it needs a far larger --lr. See docs/optimizers.md."""
    moments: Literal["float32", "bfloat16"] = option("float32", rare=True)
    """Data type in which the optimizer keeps its moments between steps, at 4 or 2 bytes each. Updates are computed in
    float32."""
    weight_decay: float = -1.0
    """Fraction of each linear map's matrix that every step subtracts, times the learning rate, with any optimizer.
    -1: 0.1, but 0 for adapters."""
    clip_norm: float = option(1.0, rare=True)
    """Largest global norm of the gradients; larger gradients are scaled down to it."""
    qk_clip: float = option(0.0, rare=True)
    """Largest attention logit of a head: where a step exceeds it, the head's queries and keys are scaled down after the
    update (QK-clip); 100 in Kimi K2. 0: without it. See docs/optimizers.md."""
    retired: ClassVar[Mapping[str, str]] = {
        "rewarm": "the learning rate jumps if the new schedule is above the old one; a new run from the exported model "
        "has a --warmup."
    }


def make_optimizer(options: OptimizerOptions, updates: int = 1) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """Makes the optimizer that the options name, and its learning rate schedule.

    Args:
        updates: the number of updates in one step of the run.

    Raises:
        ValueError: warmup and decay do not fit into the steps, or the optimizer has no moments to round.
    """
    steps, warmup, decay = (updates * n for n in (options.steps, options.warmup, options.decay))
    schedule = make_schedule(options.schedule, peak=options.lr, steps=steps, warmup=warmup, decay=decay)
    optimizer = OPTIMIZERS[options.optimizer](schedule, weight_decay=options.weight_decay, clip_norm=options.clip_norm)
    if options.moments == "float32":
        return optimizer, schedule
    if options.optimizer == "adafactor":
        raise ValueError("--moments bfloat16 is of no use to adafactor, which keeps no moments: leave it out.")
    return rounded(optimizer, options.moments), schedule


def report_jump(options: OptimizerOptions, schedule: optax.Schedule, updates: int, n: int, *, before: float) -> None:
    """Prints a line if the learning rate of a run that goes on at step `n` is above `before`, its checkpoint's."""
    now = rate_of(schedule, n * updates)
    if now > 1.01 * before and n < options.steps:
        rich.print(f"The learning rate rises from {before:.2g}, where the old schedule was, to {now:.2g} at once.")


def rate_of(schedule: optax.Schedule, update: int) -> float:
    """Returns the learning rate of an update, as a Python number."""
    return float(jnp.asarray(schedule(update)))


def make_schedule(
    kind: Literal["cosine", "wsd"], *, peak: float, steps: int, warmup: int, decay: int, final: float = 0.0
) -> optax.Schedule:
    """Makes the learning rate of steps 0, 1, ..., `steps` - 1: up to `peak` in a straight line, and down at the end.

    Args:
        kind: "cosine" falls along half a cosine (arXiv:1608.03983) right after the warmup, and ignores `decay`; "wsd",
            for warmup, stable, decay (arXiv:2404.06395), stays at the peak until the last `decay` steps, then falls in
            a straight line.
        peak: learning rate after the warmup.
        steps, warmup, decay: numbers of optimizer steps; `warmup` and `decay` are parts of `steps`.
        final: the learning rate at the end, as a fraction of `peak`. The step after the last would have it.

    Raises:
        ValueError: warmup and decay do not fit into the steps.
    """
    decay = steps - warmup if kind == "cosine" else decay
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(f"A warmup of {warmup} and a decay of {decay} steps do not fit into {steps} steps.")
    # Step 0 already learns, as a rate of 0 would waste its batch.
    up = optax.linear_schedule(peak / max(warmup, 1), peak, warmup - 1)
    if kind == "cosine":
        down = optax.cosine_decay_schedule(peak, max(decay, 1), alpha=final)
    else:
        down = optax.linear_schedule(peak, final * peak, decay, transition_begin=steps - decay - warmup)
    joined = optax.join_schedules([up, down], [warmup])

    def schedule(step: ArrayLike) -> Float[Array, ""]:
        with jax.numpy_dtype_promotion("standard"):  # optax divides integers by floats
            return jnp.asarray(joined(step), jnp.float32)

    return schedule


def adamw(
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """Makes AdamW (arXiv:1711.05101). It keeps two moments, each of the size of the parameters.

    `weight_decay` and `clip_norm` are as in `_optimizer`, for this and all other optimizers.
    """
    return _optimizer(optax.scale_by_adam(b1, b2, eps), schedule, weight_decay, clip_norm)


def muon(
    schedule: optax.Schedule, *, weight_decay: float = 0.1, clip_norm: float = 1.0
) -> optax.GradientTransformation:
    """Makes Muon (https://kellerjordan.github.io/posts/muon) for `matrices`, with AdamW for all other parameters.

    Muon replaces each matrix's momentum by approximately the nearest orthogonal matrix, and keeps one moment. Leading
    axes are layers and experts, each of which has its own matrix. Its updates are scaled to the root mean square of
    AdamW's, 0.2 (arXiv:2502.16982), so both use the same learning rate and weight decay. The first updates differ from
    Keller Jordan's code, since optax corrects the bias of both terms of Nesterov's momentum (docs/optimizers.md).
    """
    # The entries of an orthogonal matrix have a root mean square of 1 / sqrt(max(out, in)).
    scaled = optax.stateless(lambda updates, _: jax.tree.map(lambda m: 0.2 * max(m.shape[-2:]) ** 0.5 * m, updates))
    parts: dict[Hashable, optax.GradientTransformation] = {
        "muon": optax.chain(_orthogonal(), scaled),
        "adamw": optax.scale_by_adam(b1=0.9, b2=0.95),
    }
    labels = lambda parameters: jax.tree.map(lambda told: "muon" if told else "adamw", matrices(parameters))
    return _optimizer(optax.partition(parts, labels), schedule, weight_decay, clip_norm)


def _orthogonal() -> optax.GradientTransformation:
    """Makes `optax.contrib.scale_by_muon` for arrays [..., out, in].

    The layers of a stack are computed one after another, the experts of a layer together. optax would flatten the
    leading axes into one, and XLA would then gather the experts of all devices on each device.
    """
    one: Any = optax.contrib.scale_by_muon()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        def of_matrix(gradient: Array, momentum: Array) -> tuple[Array, Array]:
            direction, new = one.update(gradient, state._replace(mu=momentum))
            return direction, new.mu

        def of_array(path: Any, gradient: Array, momentum: Array) -> tuple[Array, Array]:
            function, stacked = of_matrix, is_stacked(path)
            for _ in gradient.shape[stacked:-2]:
                function = jax.vmap(function)
            return _by_layer(function, gradient, momentum) if stacked else function(gradient, momentum)

        both = jax.tree_util.tree_map_with_path(of_array, updates, state.mu)
        updates, momenta = jax.tree.transpose(jax.tree.structure(updates), None, both)
        return updates, state._replace(count=optax.safe_increment(state.count), mu=momenta)

    return optax.GradientTransformation(one.init, update)


def _by_layer(function: Callable[..., Any], *stacks: Float[Array, "layers ..."]) -> Any:
    """Maps the layers of a stack in turns of a layer for each device, so that a device gathers one layer's matrix.

    If stages or replicas split the layers (`train.state`), each computes its own layers. The axes that split matrices
    as "fsdp" does share the layers, too, if they divide their number: then no two devices compute the same products.
    """
    own = (mesh.STAGE, mesh.REPLICA)
    sharing = (mesh.FSDP, mesh.CONTEXT) if stacks[0].ndim > 3 else (mesh.FSDP, mesh.EXPERT, mesh.CONTEXT)
    axes = mesh.splitting(len(stacks[0]), *own, *sharing)
    if any(mesh.split(axis) > 1 and axis not in axes for axis in sharing):  # XLA splits an axis's parts further badly
        axes = mesh.splitting(len(stacks[0]), *own)
    devices = math.prod(map(mesh.split, axes))
    turns = [a.reshape(devices, -1, *a.shape[1:]).swapaxes(0, 1) for a in stacks]

    def turn(layers: list[Array]) -> Any:
        places = [P(axes, *[P.UNCONSTRAINED] * (a.ndim - 1)) for a in layers]
        return jax.vmap(function)(*(jax.lax.with_sharding_constraint(layers, places) if axes else layers))

    return jax.tree.map(lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]), jax.lax.map(turn, turns))


def adafactor(
    schedule: optax.Schedule, *, weight_decay: float = 0.1, clip_norm: float = 1.0
) -> optax.GradientTransformation:
    """Makes Adafactor (arXiv:1804.04235) without momentum. The learning rate is not multiplied by a weight's size.

    Instead of a second moment it keeps two sums: over the largest axis of an array, and over the second largest. An
    array whose second largest axis is below 128 has a full second moment. An update's root mean square is at most 1,
    over all layers of a stack together.
    """
    direction = optax.chain(optax.scale_by_factored_rms(), optax.clip_by_block_rms(1.0))
    return _optimizer(direction, schedule, weight_decay, clip_norm)


def sgd(schedule: optax.Schedule, *, weight_decay: float = 0.1, clip_norm: float = 1.0) -> optax.GradientTransformation:
    """Makes gradient descent with a momentum of 0.9, which is its only moment."""
    return _optimizer(optax.trace(decay=0.9), schedule, weight_decay, clip_norm)


OPTIMIZERS = {"adamw": adamw, "muon": muon, "adafactor": adafactor, "sgd": sgd}


def _optimizer(
    direction: optax.GradientTransformation, schedule: optax.Schedule, weight_decay: float, clip_norm: float
) -> optax.GradientTransformation:
    """Makes an optimizer: a parameter minus the learning rate times (`direction` + `weight_decay` times the parameter).

    Args:
        direction: gets gradients that are scaled down to a global norm of at most `clip_norm` (inf: as they are).
        weight_decay: for the matrices of linear maps only. Norms and biases are not decayed, since their size is their
            meaning. Nor are embeddings: decay would shrink the vectors of rare tokens, which get no gradient to counter
            it.
    """
    optimizer = optax.chain(
        _clipped(clip_norm),
        optax.chain(
            direction,
            optax.add_decayed_weights(weight_decay, is_decayed),
            optax.scale_by_learning_rate(schedule),
        ),
    )

    def update(updates: Any, state: Any, params: Any = None, **norm: Array) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integers
            return optimizer.update(updates, state, params, **norm)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _clipped(clip_norm: float) -> optax.GradientTransformationExtraArgs:
    """Makes an `optax.clip_by_global_norm` that accepts the gradients' `norm`, to save one pass over the gradients."""

    def update(updates: Any, state: Any, params: Any = None, *, norm: Array | None = None) -> tuple[Any, Any]:
        norm = optax.tree.norm(updates) if norm is None else norm
        clip = lambda g: jnp.where(norm < clip_norm, g, g / norm.astype(g.dtype) * clip_norm)
        return jax.tree.map(clip, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def rounded(optimizer: optax.GradientTransformation, dtype: DTypeLike) -> optax.GradientTransformation:
    """Wraps `optimizer` so that its moments are kept in `dtype` between steps; updates are computed in float32.

    Moments are rounded to the nearest number. In bfloat16 a moment then stops moving when it is within 8 % of its
    target, since a step moves it by at least 5 % of the way (b2 of AdamW, Muon's momentum), and half a unit of
    bfloat16's last place is at most 0.4 %. That changes an update by 4 % at most through AdamW's second moment, whose
    root is taken. A b2 of 0.999 would need stochastic rounding, since the moments could not fall.
    """
    cast = lambda state, dtype: optax.tree_map_params(optimizer, lambda moment: moment.astype(dtype), state)

    def update(updates: Any, state: Any, params: Any = None, **norm: Array) -> tuple[Any, Any]:
        updates, state = optax.with_extra_args_support(optimizer).update(
            updates, cast(state, jnp.float32), params, **norm
        )
        return updates, cast(state, dtype)

    return optax.GradientTransformationExtraArgs(lambda params: cast(optimizer.init(params), dtype), update)


def is_decayed(parameters: Any) -> Any:
    """Returns `parameters` with True for each array that weight decay applies to, and False for the others."""
    linear = lambda module: isinstance(module, AbstractLinear | AbstractExpertLinear)

    def of(module: Any) -> Any:
        matrix = lambda path, _: linear(module) and path_name(path) != "bias"
        return jax.tree_util.tree_map_with_path(matrix, module)

    return jax.tree.map(of, parameters, is_leaf=linear)


def matrices(parameters: Any) -> Any:
    """Returns `parameters` with True for each array of matrices of a layer's linear maps, and False for the others.

    Embeddings, the head, routers, norms and biases get False. Both matrices of an adapter get True. A module for the
    token after the next counts as a layer.
    """
    layer = lambda module: isinstance(module, AbstractBlock | AbstractMTP)
    return jax.tree.map(lambda m: is_decayed(m) if layer(m) else False, parameters, is_leaf=layer)
