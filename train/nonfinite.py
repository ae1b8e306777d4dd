"""Which steps change the model: what is not finite, or a spike, changes nothing. Decided in the compiled step.

It compares its loss and its gradients' norm with `Limits`, so every process decides alike, and no step waits for it.
Such a step counts, and its batch is used up. `train.offending` does the rest.
"""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float

from train.state import TrainState


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
