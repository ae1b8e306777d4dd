"""How a step changes the state: the optimizer's update of all arrays at once, or of one after another."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from train import offload
from train.nonfinite import passed_over
from train.rounding import rounded_like
from train.state import TrainState
from zoo.surgery import cast


@jax.named_scope("optimizer")
def updated(
    state: TrainState,
    gradients: Any,
    norm: Float[Array, ""],
    fine: Bool[Array, ""],
    *,
    optimizer: optax.GradientTransformation,
    rebalance: Callable[[Any], Any],
) -> TrainState:
    """The state after a step: of the update by its gradients if the step is `fine`, or else `passed_over`.

    Args:
        norm: the global norm of the gradients.
        rebalance: is called with the updated model, and returns another.
    """
    transform = optax.with_extra_args_support(optimizer)

    def update(state: TrainState, gradients: Any) -> TrainState:
        parameters, fixed = eqx.partition(state.model, eqx.is_inexact_array)
        exact = cast(parameters, jnp.float32)
        updates, opt_state = transform.update(cast(gradients, jnp.float32), state.opt_state, exact, norm=norm)
        new = rounded_like(parameters, optax.apply_updates(exact, updates), state.step)
        return TrainState(state.step + 1, eqx.combine(new, fixed), opt_state)

    def balanced(state: TrainState, gradients: Any) -> TrainState:
        new = update(state, gradients)
        return TrainState(new.step, rebalance(new.model), new.opt_state)

    if not any(map(offload.is_moved, jax.tree.leaves(state))):
        # Not a choice between two results, for which XLA would keep copies of the donated state.
        return jax.lax.cond(fine, balanced, passed_over, state, gradients)
    choose = lambda new, old: new if new is old else jnp.where(fine, new, old)
    step = functools.partial(update, gradients=gradients)
    new = offload.updated_in_turn(step, state, choose, passed_over(state), norm)
    return TrainState(new.step, jax.tree.map(choose, rebalance(new.model), new.model), new.opt_state)
