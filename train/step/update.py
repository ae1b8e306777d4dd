"""The optimizer's update of a step, and the skipping of steps that are not finite, or a spike.

The compiled step decides: it compares its loss and its gradients' norm with `Limits`. So every process decides alike,
and no step waits for a decision. A skipped step counts as a step, and its batch is used up. `train.run.offending` does
the rest.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from train.state import offload
from train.state.rounding import rounded_like
from train.state.state import TrainState
from zoo.surgery import cast


class Limits(NamedTuple):
    """The largest loss, and the largest gradients' norm, with which a step changes the model."""

    loss: Float[Array | np.ndarray, ""] | np.float32
    norm: Float[Array | np.ndarray, ""] | np.float32


class PerGradient(eqx.Module):
    """A marker in place of `Limits`: the step also reports, for each gradient array, whether it is finite."""


Check = Limits | PerGradient | None


def check_step(
    loss: Float[Array, ""], norm: Float[Array, ""], gradients: Any, limits: Check
) -> tuple[Bool[Array, ""], dict[str, Array]]:
    """Decides whether to apply the update, and returns the flags to log.

    The flags are "finite", with `Limits` also "spike", and for `PerGradient` also "finite_gradients".
    """
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if isinstance(limits, Limits):
        spike = finite & ((loss > limits.loss) | (norm > limits.norm))
        return finite & ~spike, {"finite": finite, "spike": spike}
    if isinstance(limits, PerGradient):
        each = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)])
        return finite, {"finite": finite, "finite_gradients": each}
    return finite, {"finite": finite}


def skipped(state: TrainState, gradients: Any = None) -> TrainState:
    """Skips an update: advances the step and the schedule, and leaves the model and the moments as they are."""
    counts = lambda node: isinstance(node, optax.ScaleByScheduleState)
    later = lambda node: node._replace(count=node.count + 1) if counts(node) else node
    return TrainState(state.step + 1, state.model, jax.tree.map(later, state.opt_state, is_leaf=counts))


@jax.named_scope("optimizer")
def updated(
    state: TrainState,
    gradients: Any,
    norm: Float[Array, ""],
    fine: Bool[Array, ""],
    *,
    optimizer: optax.GradientTransformation,
    rebalance: Callable[[Any], Any],
    clip: Callable[[Any], Any] = lambda parameters: parameters,
) -> TrainState:
    """Returns the state after a step: updated by the gradients if the step is `fine`, or else `skipped`.

    Args:
        norm: the global norm of the gradients.
        rebalance: is called with the updated model, and returns a model with other routers' biases.
        clip: is called with the updated parameters, in float32, and returns others.
    """
    transform = optax.with_extra_args_support(optimizer)

    def update(state: TrainState, gradients: Any) -> TrainState:
        parameters, fixed = eqx.partition(state.model, eqx.is_inexact_array)
        exact = cast(parameters, jnp.float32)
        updates, opt_state = transform.update(cast(gradients, jnp.float32), state.opt_state, exact, norm=norm)
        new = rounded_like(parameters, clip(optax.apply_updates(exact, updates)), state.step)
        return TrainState(state.step + 1, eqx.combine(new, fixed), opt_state)

    def balanced(state: TrainState, gradients: Any) -> TrainState:
        new = update(state, gradients)
        return TrainState(new.step, rebalance(new.model), new.opt_state)

    if not any(map(offload.is_moved, jax.tree.leaves(state))):
        # A branch, since for a choice between two results XLA would keep copies of the donated state.
        return jax.lax.cond(fine, balanced, skipped, state, gradients)
    choose = lambda new, old: new if new is old else jnp.where(fine, new, old)
    step = functools.partial(update, gradients=gradients)
    new = offload.streamed_update(step, state, choose, skipped(state), norm)
    return TrainState(new.step, jax.tree.map(choose, rebalance(new.model), new.model), new.opt_state)
