"""One pure training step, and the loss alone for evaluation."""

import functools
import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_policies
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, Shaped

import kernels
from kernels import mesh
from kernels.matmul import SAVED
from train.mesh import balanced
from train.neftune import noisy
from train.state import TrainState
from zoo.lora import joined
from zoo.nn.moe import Routing
from zoo.nn.stack import LAYER_INPUT
from zoo.surgery import cast


T = TypeVar("T")
Batch = Mapping[str, Shaped[Array, "batch seq ..."]]
# objective(model, batch, others, remat=...): the sum to minimise; sums to report, "loss" among them; and what the
# model's layers reported. In two passes it also takes `whole`: see `train_step`.
Objective = Callable[..., tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Any]]]

# What the backward pass keeps of each layer, from most memory to least: a function around the body of the layers' scan.
# In a scan nothing can be merged with the forward pass anyway, so `prevent_cse` would only hold back the compiler.
REMAT: dict[str, Callable[[Callable], Callable] | None] = {
    "none": None,
    # The results of matrix products with weights; attention and what is elementwise is computed again.
    "dots": functools.partial(
        jax.checkpoint,
        policy=checkpoint_policies.save_from_both_policies(
            checkpoint_policies.dots_with_no_batch_dims_saveable, checkpoint_policies.save_only_these_names(SAVED)
        ),
        prevent_cse=False,
    ),
    # The layer's input only: one more forward pass, a third more work.
    "full": functools.partial(jax.checkpoint, prevent_cse=False),
    # The same, kept in the host's memory: nothing grows with the depth of the model but what crosses PCIe.
    "offload": functools.partial(
        jax.checkpoint,
        policy=checkpoint_policies.save_and_offload_only_these_names(
            names_which_can_be_saved=[],
            names_which_can_be_offloaded=[LAYER_INPUT],
            offload_src="device",
            offload_dst="pinned_host",
        ),
        prevent_cse=False,
    ),
}


def targets_of(batch: Batch) -> Int[Array, ""]:
    """How many of a batch's tokens are to be learnt."""
    return jnp.sum(batch["loss_mask"] != 0)


def cross_entropy(
    model: Any,
    batch: Batch,
    others: None = None,
    *,
    remat: Callable[[Callable], Callable] | None = None,
    chunk: int = 2048,
    z_loss: float = 0.0,
    mtp_weight: float = 0.0,
) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Any]]:
    """The objective of language models: `kernels.cross_entropy` (`chunk`, `z_loss`) of a batch's targets.

    The sums are "loss", in nats, and "accuracy", the number of targets whose logit is the largest. With `mtp_weight`,
    every target whose next token is a target of the same document adds so much of the cross-entropy of that one, as
    `model.further` predicts it (multi-token prediction, arXiv:2412.19437, section 2.2); its sum is "mtp_loss".
    """
    targets, mask, segments = batch["targets"], batch["loss_mask"] != 0, batch["segments"]
    where = dict(positions=batch["positions"], segments=segments)
    x, reports = model.hidden(batch["tokens"], **where, remat=remat)
    losses = functools.partial(kernels.cross_entropy, model.unembed, chunk=chunk)
    total, sums = losses(x, targets, batch["loss_mask"], z_loss=z_loss)
    sums = {"loss": sums["loss"], "accuracy": sums["correct"]}
    if mtp_weight:
        y, routing = model.further(x, targets, **where)
        seq, parts = targets.shape[1], mesh.split(mesh.CONTEXT)
        order = balanced(seq, parts) if parts > 1 else np.arange(seq)  # as put_batch has put the tokens
        after = lambda a: jnp.pad(a[:, np.argsort(order)][:, 1:], ((0, 0), (0, 1)))[:, order]
        both = mask & after(mask) & (segments == after(segments))
        more, further = losses(y, after(targets), both.astype(jnp.int32))
        total += mtp_weight * more
        reports, sums = (reports, routing), sums | {"mtp_loss": further["loss"]}
    return total, (sums, reports)


def train_step(
    state: TrainState,
    batch: Batch,
    frozen: Any = None,
    others: Any = None,
    *,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    compute_dtype: DTypeLike,
    objective: Objective = cross_entropy,
    count: Callable[[Batch], Int[Array, ""]] = targets_of,
    remat: Callable[[Callable], Callable] | None = None,
    microbatches: int = 1,
    two_passes: bool = False,
    router_balance: float = 0.0,
    router_z: float = 0.0,
    rebalance: Callable[[Any, Any], Any] | None = None,
    neftune: float = 0.0,
) -> tuple[TrainState, dict[str, Array]]:
    """One update from the mean of a batch's losses.

    Args:
        batch: "tokens", "targets", "loss_mask", "segments" (0: padding) and "positions", each [batch, seq] of integers,
            and what else `objective` wants.
        frozen: what `zoo.lora.split` has taken from the model, if that has adapters; it is not trained, and keeps its
            dtypes. None: every floating point array is trained.
        others: arrays that `objective` gets beside the model, such as another model.
        schedule: the optimizer's learning rate, to report it.
        compute_dtype: of the forward and backward pass. Parameters, sums of gradients and the update are float32.
        objective, count: what to minimise, and by how many its sums are divided.
        remat: one of `REMAT`.
        microbatches: parts the batch is worked through in, one after another, to save memory. The update is the same:
            every part's gradient weighs as much as `count` finds in it.
        two_passes: the objective takes `whole`, the means of its own sums over all of a batch that is worked through in
            parts, for which there is one more forward pass; None means that it is given all of the batch.
        router_balance, router_z: what, in a mixture of experts, the mean over the layers of the load-balancing loss and
            of the router z-loss (see `zoo.nn.moe.Routing`) weigh beside the objective. The former depends on the load
            of all of the batch, so in microbatches it, too, takes one more forward pass.
        rebalance: makes a new model of the updated one and of what its routers did with the batch, such as
            `zoo.deepseek3.rebalance`.
        neftune: the alpha of `train.neftune.noisy`, whose noise depends on the number of the step and on the row alone.

    Returns the new state, and the metrics: the means of the objective's sums, "grad_norm" (before clipping),
    "learning_rate", "tokens" (not padding), "targets" and "finite"; for a mixture of experts "balance" (the mean of its
    layers' `Routing.imbalance`, 1 where all experts are used alike). Where "finite" is False, because the loss or a
    gradient is not, the state is the old one.
    """
    parameters, fixed = eqx.partition(state.model, eqx.is_inexact_array)
    n = jnp.maximum(count(batch), 1).astype(jnp.float32)
    tokens = jnp.sum(batch["segments"] != 0)

    def loss(
        low: Any, part: Batch, keys: Key[Array, " batch"], means: Any = None, loads: Sequence[Array] = ()
    ) -> tuple[Array, tuple[dict[str, Array], Any]]:
        """A part's share of the loss, given the batch's `means` and the `loads` of experts that `looked` finds."""
        model = joined(eqx.combine(low, fixed), frozen)
        model = noisy(model, part["segments"], alpha=neftune, keys=keys) if neftune else model
        whole = {"whole": means} if two_passes else {}
        total, (sums, reports) = objective(model, part, others, remat=remat, **whole)
        if (router_balance or router_z) and (routings := routings_of(reports)):
            routings = [r.share_of(tokens, load) for r, load in itertools.zip_longest(routings, loads)]
            layers = [router_balance * r.balance_loss() + router_z * r.z_loss() for r in routings]
            total += mean_of_layers(layers) * count(batch).astype(jnp.float32)
        # Divided by the count of the whole batch, so that the parts' gradients only need adding up.
        mean = lambda s: s / n.astype(s.dtype)
        return mean(total), (jax.tree.map(mean, sums), reports)

    def looked(low: Any, *part: Any) -> tuple[Any, list[Array]]:
        means, reports = loss(low, *part)[1]
        return means if two_passes else {}, [routing.load for routing in routings_of(reports) if router_balance]

    def gradients_of(low: Any, *part: Any) -> tuple[Any, tuple[dict[str, Array], Any]]:
        return cast(jax.grad(loss, has_aux=True)(low, *part, *whole), jnp.float32)

    def over_parts(function: Callable[..., T]) -> T:
        """The sum. It starts from the first part: from zeros it would cost one more buffer of the size of the model."""
        of = lambda part: function(cast(parameters, compute_dtype), *part)
        first, rest = (jax.tree.map(operator.itemgetter(index), parts) for index in (0, slice(1, None)))
        add = lambda total, part: (jax.tree.map(jnp.add, total, of(part)), None)
        return jax.lax.scan(add, of(first), rest)[0] if microbatches > 1 else of(first)

    keys = jax.random.split(jax.random.fold_in(jax.random.key(0), state.step), len(batch["tokens"]))
    parts = _split((batch, keys), microbatches)
    whole = over_parts(looked) if microbatches > 1 and (two_passes or router_balance) else ()
    gradients, (means, reports) = over_parts(gradients_of)

    def update(state: TrainState, gradients: Any) -> TrainState:
        updates, opt_state = optimizer.update(gradients, state.opt_state, parameters)
        model = eqx.combine(optax.apply_updates(parameters, updates), fixed)
        model = rebalance(model, reports) if rebalance else model
        return TrainState(state.step + 1, model, opt_state)

    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
    metrics = means | {
        "grad_norm": norm,
        "learning_rate": schedule(state.step),
        "tokens": tokens,
        "targets": targets_of(batch),
        "finite": finite,
    }
    if routings := routings_of(reports):
        metrics["balance"] = mean_of_layers([routing.imbalance() for routing in routings])
    # Not a choice between two results, for which XLA would keep copies of the donated state.
    return jax.lax.cond(finite, update, lambda state, _: state, state, gradients), metrics


def jit_train_step(state: TrainState, **options: Any) -> Callable[..., tuple[TrainState, dict]]:
    """`train_step(state, batch, frozen, others)` with these options, compiled.

    The state that goes in is used up: the new one is written over it, and lies on the devices where `state` does.
    """
    places = jax.tree.map(lambda array: array.sharding, state)
    return jax.jit(functools.partial(train_step, **options), donate_argnums=0, out_shardings=(places, None))


def routings_of(reports: Any) -> list[Routing]:
    """What routers did, of all that a model's layers reported: one for each entry of the `Stack` that has a router."""
    is_routing = lambda report: isinstance(report, Routing)
    return [report for report in jax.tree.leaves(reports, is_leaf=is_routing) if is_routing(report)]


def mean_of_layers(values: list[Float[Array, "*layers"]]) -> Float[Array, ""]:
    return jnp.mean(jnp.concatenate([value.reshape(-1) for value in values]))


def _split(rows: T, parts: int) -> T:
    """[batch, ...] -> [parts, batch / parts, ...]. Every part takes rows from all over, so from every device."""
    size = len(jax.tree.leaves(rows)[0])
    if size % parts:
        raise ValueError(f"A batch of {size} sequences can't be split into {parts} microbatches of one size.")
    return jax.tree.map(lambda a: a.reshape(size // parts, parts, *a.shape[1:]).swapaxes(0, 1), rows)
