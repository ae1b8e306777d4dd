"""One training step: the gradients of an objective over a batch, and the optimizer's update."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Num, Shaped

from kernels.backends.compile_options import compile_options
from train.state.offload import to_device
from train.state.state import TrainState, gathered
from train.step.clip import clipped, logit_metrics, recorded
from train.step.microbatches import per, split, summed
from train.step.router import router_loss, router_metrics, routings_of
from train.step.scatter import as_in_state, scattered
from train.step.update import Check, check_step, updated
from zoo.lora import combine
from zoo.nn.model import AbstractModel
from zoo.nn.stack import Reports
from zoo.surgery import cast, with_remat


Batch = Mapping[str, Shaped[Array, "batch ..."]]
Remat = Callable[..., Callable] | None
Scalars = dict[str, Float[Array, ""]]
Losses = tuple[Float[Array, ""], Num[Array, ""], Scalars, Reports]  # total, count, sums, reports


@runtime_checkable
class Objective(Protocol):
    """A function that gives the loss to minimise, as total / count.

    Each of the two is a sum over the batch's rows, so those of microbatches add up.
    """

    def __call__(
        self, model: AbstractModel, batch: Batch, reference: Any = None, means: Scalars | None = None
    ) -> Losses:
        """Returns the total, the count, sums to report ("loss" among them), and the reports of the model's layers.

        Args:
            reference: another model, which is not trained.
            means: the sums of the step's whole batch divided by its count, if `batch` is a part of it. None: `batch` is
                whole, or the means are about to be computed from its parts.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training step that is fixed when it is compiled."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule  # that within `optimizer`; here it is only read for the metrics
    compute_dtype: DTypeLike
    """The dtype of the forward and backward pass. Sums of gradients and the update are float32."""
    objective: Objective
    remat: Remat = None
    """One of `train.state.remat.REMAT`."""
    microbatches: int = 1
    """The number of parts in which the batch is computed, to save memory. The update is the same up to rounding."""
    router_balance: float = 0.0
    """Weight of a mixture's load-balancing loss, a mean over the layers (see `zoo.nn.moe.Routing`)."""
    router_sequence: float = 0.0
    """Weight of a mixture's sequence-wise balance loss, a mean over the layers."""
    router_z: float = 0.0
    """Weight of a mixture's router z-loss, a mean over the layers."""
    rebalance: Callable[[Any, Any], Any] | None = None
    """Makes a new model from the updated one and its routers' reports, such as `zoo.nn.routing.rebalance`."""
    qk_clip: float = 0.0
    """Largest attention logit of a head without QK-clip (see `train.step.clip`); 0: logits are not recorded."""


def train_step(
    recipe: Recipe,
    state: TrainState,
    batch: Batch,
    frozen: Any = None,
    reference: Any = None,
    limits: Check = None,
    *,
    places: Any = None,
) -> tuple[TrainState, dict[str, Array]]:
    """Updates the model once, by the gradients of its objective over a batch.

    Args:
        batch: arrays of `train.data.packing`: "tokens", "targets", "loss_mask" and "segments", where 0 is padding; and
            those that the objective reads beside them.
        frozen: the untrained weights, such as the base of adapters, which are held outside `state.model` and joined
            with it. Quantised weights keep their dtypes. None: there are none.
        reference: see `Objective`.
        limits: of the loss and of the gradients' norm (`train.step.update.Limits`). None: both only have to be finite.
        places: the shardings of the state's model. None: there are no replicas.

    Returns the new state, and the metrics: the objective's sums divided by its count, without the routers' losses,
    "grad_norm" (before clipping), "learning_rate", "tokens" (without padding), "targets", and the flags of
    `check_step`. A mixture of experts also has "balance", the mean of its layers' `Routing.imbalance`, which is 1 if
    all experts are used alike; QK-clip has "attention_logit", the largest of all heads before the update.

    A step that `check_step` rejects is skipped: only the number of the step and the place in the schedule change.
    """
    model = gathered(cast(to_device(state.model), recipe.compute_dtype), places)
    parameters, rest = eqx.partition(model, eqx.is_inexact_array)
    tokens = jnp.sum(batch["segments"] != 0)

    def evaluate(parameters: Any, part: Batch, means: Scalars | None = None) -> Losses:
        model = combine(eqx.combine(parameters, rest), cast(frozen, recipe.compute_dtype))
        model = scattered(model, combine(places, frozen))
        model = recorded(model) if recipe.qk_clip else model
        return recipe.objective(with_remat(model, recipe.remat), part, reference, means)

    gradients, means, reports = mean_gradients(recipe, evaluate, parameters, batch, tokens)
    gradients = as_in_state(gradients, places)
    norm = optax.tree.norm(cast(gradients, jnp.float32))

    good, flags = check_step(means["loss"], norm, gradients, limits)
    metrics = means | {
        "grad_norm": norm,
        "learning_rate": recipe.schedule(state.step),
        "tokens": tokens,
        "targets": jnp.sum(batch["loss_mask"] != 0),
        **flags,
    }
    metrics |= router_metrics(reports) | logit_metrics(reports)
    rebalance = lambda model: recipe.rebalance(model, reports) if recipe.rebalance else model
    clip = lambda parameters: clipped(parameters, reports, recipe.qk_clip) if recipe.qk_clip else parameters
    state = updated(state, gradients, norm, good, optimizer=recipe.optimizer, rebalance=rebalance, clip=clip)
    return state, metrics


def mean_gradients(
    recipe: Recipe, evaluate: Callable[..., Losses], parameters: Any, batch: Batch, tokens: Int[Array, ""]
) -> tuple[Any, Scalars, Reports]:
    """Computes the gradients of the mean loss over a batch, one microbatch after another.

    Args:
        evaluate: the objective as a function of the parameters, a part of the batch, and the batch's means.
        tokens: the number of the batch's tokens, without padding.

    Returns the gradients, the means of the objective's sums, and the reports of the layers. With more than one
    microbatch the gradients are float32.
    """

    def sums_and_loads(part: Batch) -> tuple[Scalars, list[Array]]:
        _, _, sums, reports = evaluate(parameters, part)
        return sums, [routing.load for routing in routings_of(reports)] if recipe.router_balance else []

    def share_of_loss(
        parameters: Any, part: Batch, count: Any = None, means: Any = None, loads: Sequence[Array] = ()
    ) -> tuple[Array, tuple[Scalars, Any]]:
        """Computes a part's share of the loss.

        `count`, `means` and the experts' `loads` are of the whole batch; without them the part is the whole batch.
        """
        total, own, sums, reports = evaluate(parameters, part, means)
        count = own if count is None else count
        weights = dict(balance=recipe.router_balance, sequence=recipe.router_sequence, z=recipe.router_z)
        if any(weights.values()) and routings_of(reports):
            routers = router_loss(reports, tokens, loads, **weights)
            total += routers * count.astype(jnp.float32)  # which is divided by the count, too
        return per(count, total), (per(count, sums), reports)

    parts = split(batch, recipe.microbatches)
    of_whole_batch = ()
    if recipe.microbatches > 1:
        # XLA leaves out what is not used: of the first line all but the count, and of the second everything, unless
        # the objective reads means (as kto does) or the router's balance reads loads.
        count = evaluate(parameters, batch)[1]
        sums, loads = jax.lax.map(sums_and_loads, parts)
        means, loads = jax.tree.map(lambda a: jnp.sum(a, axis=0), (per(count, sums), loads))
        of_whole_batch = count, means, loads

    def gradients_of(part: Batch) -> tuple[Any, tuple[Scalars, Any]]:
        gradients, others = jax.grad(share_of_loss, has_aux=True)(parameters, part, *of_whole_batch)
        if recipe.microbatches > 1:  # the gradients of a single part keep their dtype, in half the bytes
            gradients = cast(gradients, jnp.float32)
        return gradients, cast(others, jnp.float32)

    gradients, (means, reports) = summed(gradients_of, parts)
    return gradients, means, reports


def jit_train_step(state: TrainState, recipe: Recipe) -> Callable[..., tuple[TrainState, dict]]:
    """Compiles `train_step` with a recipe, as a function of (state, batch, frozen, reference, limits).

    The step donates its state: the new state is written over it, and the old one cannot be used again. The new state
    has the shardings of `state`, of which nothing else is read.
    """
    places = jax.tree.map(lambda array: array.sharding, state)
    options: Any = dict(out_shardings=(places, None), compiler_options=compile_options("train"))
    return jax.jit(functools.partial(train_step, recipe, places=places.model), donate_argnums=0, **options)
