"""The optimizer of a run and its learning rate schedules: optax, put together for language models."""

import dataclasses
import functools
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
    """Makes `optax.contrib.scale_by_muon` for arrays [..., out, in], whose matrices devices share (`_shared`)."""
    beta = 0.95

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        count = optax.safe_increment(state.count)
        momenta = optax.tree.update_moment(updates, state.mu, beta, 1)
        later = optax.tree.bias_correction(momenta, beta, optax.safe_increment(count))
        now = optax.tree.bias_correction(updates, beta, count)
        directions = jax.tree.map(lambda m, g: beta * m + (1 - beta) * g, later, now)  # Nesterov's
        function = functools.partial(_orthogonalized, coefficients=state.ns_coeffs)
        share = lambda path, a: _shared(function, a, stacked=is_stacked(path))
        updates = jax.tree_util.tree_map_with_path(share, directions)
        return updates, state._replace(count=count, mu=momenta)

    return optax.GradientTransformation(optax.contrib.scale_by_muon().init, update)


def _orthogonalized(
    x: Float[Array, "*matrices out in"], coefficients: Float[Array, "3"]
) -> Float[Array, "*matrices out in"]:
    """Computes approximately the nearest orthogonal matrices, by five steps of Newton and Schulz's iteration."""
    if x.shape[-2] > x.shape[-1]:
        return _orthogonalized(x.mT, coefficients).mT
    x /= jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) + 1e-8
    first, third, fifth = coefficients
    for _ in range(5):
        square = x @ x.mT
        x = first * x + (third * square + fifth * square @ square) @ x
    return x


def _shared(
    function: Callable[[Array], Array], stack: Float[Array, "*matrices out in"], *, stacked: bool
) -> Float[Array, "*matrices out in"]:
    """Maps matrices so that no two devices compute the same product, and none holds many whole matrices.

    Devices whose matrices are others, such as those of different stages, work on their own (`_owners`). The rest of the
    mesh's axes split matrices, so devices along them have parts of the same ones. They share these in turns:
    all-to-alls bring each device one whole matrix, or its share of a layer's experts if that is more, and take the
    results back. Matrices of zeros fill up the last turn. Along "tensor" devices share matrices only if there is one
    for each device; otherwise they split the products of a matrix.

    Args:
        stacked: whether the first axis is that of layers. An axis of experts may follow.
    """
    *lead, rows, columns = stack.shape
    if not lead:
        return function(stack)
    size = lambda axes: math.prod(map(mesh.split, axes))
    layers, experts = lead[0] if stacked else 1, math.prod(lead[stacked:])
    of_layers, of_experts = _owners(layers, experts)
    parts = size(of_layers), size(of_experts)
    layers, experts = layers // parts[0], experts // parts[1]  # of each owner
    left = lambda axes: tuple(axis for axis in axes if axis not in of_layers + of_experts)
    tensor = (mesh.TENSOR,) if size(left(mesh.free())) <= layers * experts else ()
    groups = [axes for axes in (left(mesh.PARAMETERS), left((mesh.REPLICA,)), tensor) if size(axes) > 1]
    shares = [size(axes) for axes in groups]
    each = max(1, experts // math.prod(shares))
    turns = math.ceil(layers * experts / (math.prod(shares) * each))
    missing = turns * math.prod(shares) * each - layers * experts
    # Axes move from a matrix to the front group by group, as XLA moves the axes of two dimensions at once badly.
    places = [
        P(of_layers, of_experts, *groups[:n], *[None] * (len(groups) - n + 1), *[P.UNCONSTRAINED] * 2)
        for n in range(len(groups) + 1)
    ]

    def turn(x: Array) -> Array:
        constrained = lambda x, place: jax.lax.with_sharding_constraint(x, place) if groups else x
        x = functools.reduce(constrained, places, x)
        return functools.reduce(constrained, reversed(places), function(x))

    a = stack.reshape(parts[0], layers, parts[1], experts, rows, columns).swapaxes(1, 2)
    a = jnp.pad(a.reshape(*parts, -1, rows, columns), [(0, 0), (0, 0), (0, missing), (0, 0), (0, 0)])
    a = jnp.moveaxis(a.reshape(*parts, turns, *shares, each, rows, columns), 2, 0)
    a = jnp.moveaxis(jax.lax.map(turn, a), 0, 2).reshape(*parts, -1, rows, columns)[:, :, : layers * experts]
    return a.reshape(*parts, layers, experts, rows, columns).swapaxes(1, 2).reshape(stack.shape)


def _owners(layers: int, experts: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the axes of the mesh that split the layers, and those that split the experts, of a state's array.

    Replicas are placed as by `train.state.state.moment_sharding`: experts that are split already come before layers.
    """
    of_layers, of_experts = mesh.splitting(layers, mesh.STAGE), mesh.splitting(experts, mesh.EXPERT)
    more_layers = mesh.splitting(layers, *of_layers, mesh.REPLICA)
    more_experts = mesh.splitting(experts, *of_experts, mesh.REPLICA)
    if more_experts != of_experts and (of_experts or more_layers == of_layers):
        return of_layers, more_experts
    return more_layers, of_experts


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
