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
from jaxtyping import Array, Float, Int, Key, Num, Shaped

from kernels.backends.compile_options import compile_options
from train.state.offload import to_device
from train.state.state import TrainState
from train.step.microbatches import per, split, summed
from train.step.neftune import noisy
from train.step.router import mean_of_layers, router_loss, routings_of
from train.step.update import Check, check_step, updated
from zoo.lora import joined
from zoo.nn.model import AbstractModel
from zoo.nn.stack import Reports
from zoo.surgery import cast, with_remat


Batch = Mapping[str, Shaped[Array, "batch ..."]]
Remat = Callable[..., Callable] | None
Scalars = dict[str, Float[Array, ""]]
Losses = tuple[Float[Array, ""], Num[Array, ""], Scalars, Reports]  # total, count, sums, reports


@runtime_checkable
class Objective(Protocol):
    """A function that training minimises: total / count. Both are sums over rows, so microbatches' sums add up."""

    def __call__(
        self, model: AbstractModel, batch: Batch, reference: Any = None, means: Scalars | None = None
    ) -> Losses:
        """Returns the total, the count, sums to report ("loss" among them), and the reports of the model's layers.

        Args:
            reference: another model, which is not trained.
            means: if `batch` is only a part of the step's batch, the whole batch's sums divided by its count.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything about a training step that is fixed when it is compiled."""

    optimizer: optax.GradientTransformation
    schedule: optax.Schedule  # the optimizer's learning rate, to report it
    compute_dtype: DTypeLike
    """The dtype of the forward and backward pass. Sums of gradients and the update are float32."""
    objective: Objective
    remat: Remat = None
    """One of `train.state.remat.REMAT`."""
    microbatches: int = 1
    """The number of parts in which the batch is computed, to save memory. The update is the same."""
    router_balance: float = 0.0
    router_z: float = 0.0
    """Weights of the load-balancing loss and of the router z-loss of a mixture of experts (see `zoo.nn.moe.Routing`),
    each a mean over the layers."""
    rebalance: Callable[[Any, Any], Any] | None = None
    """Makes a new model from the updated one and its routers' reports, such as `zoo.nn.routing.rebalance`."""
    neftune: float = 0.0
    """The alpha of `train.step.neftune`, whose noise depends on the number of the step and on the row alone."""


def train_step(
    recipe: Recipe, state: TrainState, batch: Batch, frozen: Any = None, reference: Any = None, limits: Check = None
) -> tuple[TrainState, dict[str, Array]]:
    """Updates the model once, by the gradients of its objective over a batch.

    Args:
        batch: see `train.data.packing`; it may have more arrays that the objective reads.
        frozen: weights that are not trained, beside those in `state.model`, such as the base of adapters. Quantised
            weights keep their dtypes. None: every floating point array is trained.
        reference, limits: see `Objective` and `Limits`.

    Returns the new state, and the metrics: the objective's sums over its count, "grad_norm" (before clipping),
    "learning_rate", "tokens" (without padding), "targets", and the flags of `check_step`. A mixture of experts also has
    "balance", the mean of its layers' `Routing.imbalance`, which is 1 if all experts are used alike. A bad step changes
    only the number of the step and the place in the schedule.
    """
    parameters, fixed = eqx.partition(state.model, eqx.is_inexact_array)
    parameters = cast(to_device(parameters), recipe.compute_dtype)
    tokens = jnp.sum(batch["segments"] != 0)

    def losses(parameters: Any, part: Batch, keys: Key[Array, " batch"], means: Scalars | None = None) -> Losses:
        model = joined(eqx.combine(parameters, fixed), cast(frozen, recipe.compute_dtype))
        model = noisy(model, part["segments"], alpha=recipe.neftune, keys=keys) if recipe.neftune else model
        return recipe.objective(with_remat(model, recipe.remat), part, reference, means)

    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), state.step), len(batch["tokens"]))
    gradients, means, reports = mean_gradients(recipe, losses, parameters, batch, keys, tokens)
    norm = optax.tree.norm(cast(gradients, jnp.float32))

    good, flags = check_step(means["loss"], norm, gradients, limits)
    metrics = means | {
        "grad_norm": norm,
        "learning_rate": recipe.schedule(state.step),
        "tokens": tokens,
        "targets": jnp.sum(batch["loss_mask"] != 0),
        **flags,
    }
    if routings := routings_of(reports):
        metrics["balance"] = mean_of_layers([routing.imbalance() for routing in routings])
    balanced = lambda model: recipe.rebalance(model, reports) if recipe.rebalance else model
    return updated(state, gradients, norm, good, optimizer=recipe.optimizer, rebalance=balanced), metrics


def mean_gradients(
    recipe: Recipe,
    losses: Callable[..., Losses],
    parameters: Any,
    batch: Batch,
    keys: Key[Array, " batch"],
    tokens: Int[Array, ""],
) -> tuple[Any, Scalars, Reports]:
    """Computes the gradients of the mean loss over a batch, one microbatch after another.

    Args:
        losses: the objective as a function of the parameters, a part of the batch, its keys, and the batch's means.
        keys: random numbers for each row.
        tokens: the number of the batch's tokens, without padding.

    Returns the gradients, the means of the objective's sums, and the reports of the layers. Gradients of several parts
    are float32.
    """

    def look(part: tuple[Batch, Any]) -> tuple[Scalars, list[Array]]:
        _, _, sums, reports = losses(parameters, *part)
        return sums, [routing.load for routing in routings_of(reports) if recipe.router_balance]

    def loss(
        parameters: Any, part: Batch, keys: Any, count: Any = None, means: Any = None, loads: Sequence[Array] = ()
    ) -> tuple[Array, tuple[Scalars, Any]]:
        """Computes a part's share of the loss, given `count`, `means` and experts' `loads` of the whole batch."""
        total, own, sums, reports = losses(parameters, part, keys, means)
        count = own if count is None else count
        if (recipe.router_balance or recipe.router_z) and routings_of(reports):
            routers = router_loss(reports, tokens, loads, balance=recipe.router_balance, z=recipe.router_z)
            total += routers * count.astype(jnp.float32)
        return per(count, total), (per(count, sums), reports)

    parts, whole = split((batch, keys), recipe.microbatches), ()
    if recipe.microbatches > 1:
        # XLA runs only the used operations of these passes: in the first pass the count, and nothing of the second
        # unless the objective reads means (as kto does), or the router's balance reads loads.
        count = losses(parameters, batch, keys)[1]
        sums, loads = jax.lax.map(look, parts)
        whole = count, *jax.tree.map(lambda a: jnp.sum(a, axis=0), (per(count, sums), loads))

    def gradients_of(part: tuple[Batch, Any]) -> tuple[Any, tuple[Scalars, Any]]:
        gradients, others = jax.grad(loss, has_aux=True)(parameters, *part, *whole)
        # Sums over parts are in float32. The gradients of a single part keep their dtype, in half the bytes.
        return gradients if recipe.microbatches == 1 else cast(gradients, jnp.float32), cast(others, jnp.float32)

    gradients, (means, reports) = summed(gradients_of, parts)
    return gradients, means, reports


def jit_train_step(state: TrainState, recipe: Recipe) -> Callable[..., tuple[TrainState, dict]]:
    """Compiles `train_step(recipe, state, batch, frozen, reference, limits)` as a function of the last five.

    The step donates its state: the new state is written over it. The new state has the shardings of `state`.
    """
    places = jax.tree.map(lambda array: array.sharding, state)
    compiled: Any = dict(out_shardings=(places, None), compiler_options=compile_options("train"))
    return jax.jit(functools.partial(train_step, recipe), donate_argnums=0, **compiled)
