"""The optimizer of a run and its learning rate schedules: optax, put together for language models."""

from collections.abc import Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from train.options import Options
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear
from zoo.surgery import path_name


def make_optimizer(
    o: Options, updates: int = 1, rewarm: Mapping[str, Any] | None = None
) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW and its learning rate, for a run that makes so many updates in a step; `rewarm` is for `rewarmed`."""
    steps, warmup, decay = (updates * n for n in (o.steps, o.warmup, o.decay))
    schedule = make_schedule(o.schedule, peak=o.lr, steps=steps, warmup=warmup, decay=decay)
    schedule = rewarmed(schedule, **rewarm) if rewarm else schedule
    return adamw(schedule, weight_decay=o.weight_decay, clip_norm=o.clip_norm), schedule


def make_schedule(
    kind: Literal["cosine", "wsd"], *, peak: float, steps: int, warmup: int, decay: int, final: float = 0.0
) -> optax.Schedule:
    """The learning rate of step 0, 1, ..., `steps` - 1: up to `peak` in a straight line, and down towards the end.

    Args:
        kind: "cosine" falls along half a cosine (arXiv:1608.03983) right after the warmup, and ignores `decay`; "wsd",
            for warmup, stable, decay (arXiv:2404.06395), stays at the peak until the last `decay` steps, then falls in
            a straight line.
        peak: learning rate after the warmup.
        steps, warmup, decay: numbers of optimizer steps; `warmup` and `decay` are parts of `steps`.
        final: where it falls to, as a fraction of `peak`: what the step after the last would have.

    Raises:
        ValueError: if warmup and decay do not fit.
    """
    decay = steps - warmup if kind == "cosine" else decay
    if warmup < 0 or decay < 0 or warmup + decay > steps:
        raise ValueError(f"A warmup of {warmup} and a decay of {decay} steps do not fit into {steps} steps.")
    # Step 0 already learns: a rate of 0 would throw its batch away.
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


def rewarmed(schedule: optax.Schedule, *, start: int, rate: float, steps: int) -> optax.Schedule:
    """`schedule` for a run that goes on at step `start`, where another schedule had come to `rate`.

    It moves from there to its own in a straight line, in so many steps: a jump would undo some of what was learnt.
    """

    def slowly(step: ArrayLike) -> Float[Array, ""]:
        part = jnp.clip((jnp.asarray(step, jnp.float32) + 1 - start) / steps, 0, 1)
        return rate + part * (schedule(step) - rate)

    return slowly


def adamw(
    schedule: optax.Schedule,
    *,
    weight_decay: float = 0.1,
    clip_norm: float = 1.0,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101) on gradients scaled down to a global norm of at most `clip_norm` (inf: as they are).

    `weight_decay`, times the learning rate, is taken off the matrices of linear maps only: not off norms and biases,
    whose size is their meaning, nor off embeddings, where it would shrink the vectors of rare tokens, which get no
    gradient to stand against it.
    """
    optimizer = optax.chain(
        optax.clip_by_global_norm(clip_norm),
        optax.adamw(schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=is_decayed),
    )

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):  # and raises floats to integers
            return optimizer.update(updates, state, params)

    return optax.GradientTransformation(optimizer.init, update)


def is_decayed(parameters: Any) -> Any:
    """`parameters` with True for each array that weight decay applies to, and False for the others."""
    linear = lambda module: isinstance(module, AbstractLinear | AbstractExpertLinear)

    def of(module: Any) -> Any:
        matrix = lambda path, _: linear(module) and path_name(path) != "bias"
        return jax.tree_util.tree_map_with_path(matrix, module)

    return jax.tree.map(of, parameters, is_leaf=linear)
