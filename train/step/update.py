"""The optimizer's update of a step, and which steps change the model: what is not finite, or a spike, changes nothing.

The compiled step decides: it compares its loss and its gradients' norm with `Limits`, so every process decides alike,
and no step waits for it. Such a step counts, and its batch is used up. `train.run.offending` does the rest.
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
    """The largest loss and gradients' norm with which a step changes the model."""

    loss: Float[Array | np.ndarray, ""] | np.float32
    norm: Float[Array | np.ndarray, ""] | np.float32


class EveryGradient(eqx.Module):
    """Stands for limits, and asks the step to say of every gradient whether it is finite."""


Asked = Limits | EveryGradient | None


def judged(
    loss: Float[Array, ""], norm: Float[Array, ""], gradients: Any, limits: Asked
) -> tuple[Bool[Array, ""], dict[str, Array]]:
    """Whether a step may change the model; and what to say of it: "finite", with limits "spike", and
    "finite_gradients" for `EveryGradient`."""
    finite = jnp.isfinite(loss) & jnp.isfinite(norm)
    if isinstance(limits, Limits):
        spike = finite & ((loss > limits.loss) | (norm > limits.norm))
        return finite & ~spike, {"finite": finite, "spike": spike}
    if isinstance(limits, EveryGradient):
        each = jnp.stack([jnp.isfinite(g).all() for g in jax.tree.leaves(gradients)])
        return finite, {"finite": finite, "finite_gradients": each}
    return finite, {"finite": finite}


def passed_over(state: TrainState, gradients: Any = None) -> TrainState:
    """The state after a step that changes nothing but the number of the step, and its place in the schedule."""
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
