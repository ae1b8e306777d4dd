"""One pure training step, and the loss alone for evaluation."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.ad_checkpoint import checkpoint_policies
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

import kernels
from kernels import mesh
from kernels.matmul import SAVED
from train.mesh import balanced
from train.state import TrainState
from zoo.moe import Routing
from zoo.stack import LAYER_INPUT
from zoo.surgery import cast


Batch = Mapping[str, Int[Array, "batch seq"]]

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


def train_step(
    state: TrainState,
    batch: Batch,
    *,
    optimizer: optax.GradientTransformation,
    schedule: optax.Schedule,
    compute_dtype: DTypeLike,
    remat: Callable[[Callable], Callable] | None = None,
    microbatches: int = 1,
    chunk: int = 2048,
    z_loss: float = 0.0,
    router_balance: float = 0.0,
    router_z: float = 0.0,
    mtp_weight: float = 0.0,
    rebalance: Callable[[Any, Any], Any] | None = None,
) -> tuple[TrainState, dict[str, Array]]:
    """One update from the mean loss of a batch's targets.

    Args:
        batch: "tokens", "targets", "loss_mask", "segments" (0: padding) and "positions", each [batch, seq] of integers.
        schedule: the optimizer's learning rate, to report it.
        compute_dtype: of the forward and backward pass. Parameters, sums of gradients and the update are float32.
        remat: one of `REMAT`.
        microbatches: parts the batch is worked through in, one after another, to save memory. The update is the same:
            every part's gradient weighs as much as it has targets.
        chunk, z_loss: see `kernels.cross_entropy`.
        router_balance, router_z, mtp_weight: see `loss_sums`.
        rebalance: makes a new model of the updated one and of what its routers did with the batch, such as
            `zoo.deepseek3.rebalance`.

    Returns the new state, and the metrics "loss" (mean cross-entropy of a target, in nats), "accuracy" (fraction of
    targets whose logit is the largest), "grad_norm" (before clipping), "learning_rate", "tokens" (not padding),
    "targets" and "finite"; for a mixture of experts "balance" (the mean of its layers' load-balancing losses, 1 where
    all experts are used alike); and with `mtp_weight` "mtp_loss" (a target's, as "loss" is). Where "finite" is False,
    because the loss or a gradient is not, the state is the old one.
    """
    parameters, fixed = eqx.partition(state.model, eqx.is_inexact_array)
    targets = jnp.sum(batch["loss_mask"] != 0)

    def loss(low: Any, part: Batch) -> tuple[Array, tuple[dict[str, Array], Any]]:
        total, (sums, reports) = loss_sums(
            eqx.combine(low, fixed), part, remat=remat, chunk=chunk, z_loss=z_loss,
            router_balance=router_balance, router_z=router_z, mtp_weight=mtp_weight,
        )  # fmt: skip
        # Divided by the targets of the whole batch, so that the parts' gradients only need adding up.
        mean = lambda s: s / jnp.maximum(targets, 1).astype(s.dtype)
        return mean(total), (jax.tree.map(mean, sums), reports)

    def gradients_of(part: Batch) -> tuple[Any, tuple[dict[str, Array], Any]]:
        return cast(jax.grad(loss, has_aux=True)(cast(parameters, compute_dtype), part), jnp.float32)

    # The sum starts from the first part: from zeros it would cost one more buffer of the size of the model.
    parts = _split(batch, microbatches)
    first, rest = ({name: a[index] for name, a in parts.items()} for index in (0, slice(1, None)))
    add = lambda total, part: (jax.tree.map(jnp.add, total, gradients_of(part)), None)
    gradients, sums = gradients_of(first)
    if microbatches > 1:
        (gradients, sums), _ = jax.lax.scan(add, (gradients, sums), rest)
    means, reports = sums

    def update(state: TrainState, gradients: Any) -> TrainState:
        updates, opt_state = optimizer.update(gradients, state.opt_state, parameters)
        model = eqx.combine(optax.apply_updates(parameters, updates), fixed)
        model = rebalance(model, reports) if rebalance else model
        return TrainState(state.step + 1, model, opt_state)

    norm = optax.tree.norm(gradients)
    finite = jnp.isfinite(means["loss"]) & jnp.isfinite(norm)
    metrics = {
        "loss": means["loss"],
        "accuracy": means["correct"],
        "grad_norm": norm,
        "learning_rate": schedule(state.step),
        "tokens": jnp.sum(batch["segments"] != 0),
        "targets": targets,
        "finite": finite,
    }
    if mtp_weight:
        metrics["mtp_loss"] = means["mtp_loss"]
    if routings := routings_of(reports):
        metrics["balance"] = mean_of_layers([routing.balance_loss() for routing in routings])
    # Not a choice between two results, for which XLA would keep copies of the donated state.
    return jax.lax.cond(finite, update, lambda state, _: state, state, gradients), metrics


def jit_train_step(state: TrainState, **options: Any) -> Callable[[TrainState, Batch], tuple[TrainState, dict]]:
    """`train_step(state, batch)` with these options, compiled.

    The state that goes in is used up: the new one is written over it, and lies on the devices where `state` does.
    """
    places = jax.tree.map(lambda array: array.sharding, state)
    return jax.jit(functools.partial(train_step, **options), donate_argnums=0, out_shardings=(places, None))


def loss_sums(
    model: Any,
    batch: Batch,
    *,
    remat: Callable[[Callable], Callable] | None = None,
    chunk: int = 2048,
    z_loss: float = 0.0,
    router_balance: float = 0.0,
    router_z: float = 0.0,
    mtp_weight: float = 0.0,
) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Any]]:
    """`kernels.cross_entropy` of a model on a batch; and what the model's layers reported.

    Every target also adds the mean, over the layers of a mixture of experts, of `router_balance` times the load-
    balancing loss and `router_z` times the router z-loss (see `zoo.moe.Routing`). With `mtp_weight`, every target whose
    next token is a target of the same document adds so much of the cross-entropy of that one, as `model.further`
    predicts it (multi-token prediction, arXiv:2412.19437, section 2.2); its sum is "mtp_loss".
    """
    targets, mask, segments = batch["targets"], batch["loss_mask"] != 0, batch["segments"]
    where = dict(positions=batch["positions"], segments=segments)
    x, reports = model.hidden(batch["tokens"], **where, remat=remat)
    cross_entropy = functools.partial(kernels.cross_entropy, model.unembed, chunk=chunk)
    total, sums = cross_entropy(x, targets, batch["loss_mask"], z_loss=z_loss)
    if mtp_weight:
        y, routing = model.further(x, targets, **where)
        seq, parts = targets.shape[1], mesh.split(mesh.SEQUENCE)
        order = balanced(seq, parts) if parts > 1 else np.arange(seq)  # as put_batch has put the tokens
        after = lambda a: jnp.pad(a[:, np.argsort(order)][:, 1:], ((0, 0), (0, 1)))[:, order]
        both = mask & after(mask) & (segments == after(segments))
        more, further = cross_entropy(y, after(targets), both.astype(jnp.int32))
        total += mtp_weight * more
        reports, sums = (reports, routing), sums | {"mtp_loss": further["loss"]}
    if (router_balance or router_z) and (routings := routings_of(reports)):
        layers = [router_balance * r.balance_loss() + router_z * r.z_loss() for r in routings]
        total += mean_of_layers(layers) * jnp.sum(mask.astype(jnp.float32))
    return total, (sums, reports)


def routings_of(reports: Any) -> list[Routing]:
    """What routers did, of all that a model's layers reported: one for each entry of the `Stack` that has a router."""
    is_routing = lambda report: isinstance(report, Routing)
    return [report for report in jax.tree.leaves(reports, is_leaf=is_routing) if is_routing(report)]


def mean_of_layers(values: list[Float[Array, "*layers"]]) -> Float[Array, ""]:
    return jnp.mean(jnp.concatenate([value.reshape(-1) for value in values]))


def _split(batch: Batch, parts: int) -> dict[str, Int[Array, "parts part seq"]]:
    """[batch, seq] -> [parts, batch / parts, seq]. Every part takes rows from all over, so from every device."""
    size = len(batch["tokens"])
    if size % parts:
        raise ValueError(f"A batch of {size} sequences can't be split into {parts} microbatches of one size.")
    return {name: a.reshape(size // parts, parts, -1).swapaxes(0, 1) for name, a in batch.items()}
