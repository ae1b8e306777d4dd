"""One pure training step, and the loss alone for evaluation."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_policies
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from train.loss import cross_entropy
from train.state import TrainState


T = TypeVar("T")
Batch = Mapping[str, Int[Array, "batch seq"]]

# What the backward pass keeps of each layer, from most memory to least: a function around the body of the layers' scan.
# In a scan nothing can be merged with the forward pass anyway, so `prevent_cse` would only hold back the compiler.
REMAT: dict[str, Callable[[Callable], Callable] | None] = {
    "none": None,
    # The results of matrix products with weights; attention and what is elementwise is computed again.
    "dots": functools.partial(
        jax.checkpoint, policy=checkpoint_policies.dots_with_no_batch_dims_saveable, prevent_cse=False
    ),
    # The layer's input only: one more forward pass, a third more work.
    "full": functools.partial(jax.checkpoint, prevent_cse=False),
}


def cast(tree: T, dtype: DTypeLike) -> T:
    """`tree` with its floating point arrays in `dtype`."""
    return jax.tree.map(lambda a: a.astype(dtype) if eqx.is_inexact_array(a) else a, tree)


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
) -> tuple[TrainState, dict[str, Array]]:
    """One update from the mean loss of a batch's targets.

    Args:
        batch: "tokens", "targets", "loss_mask", "segments" (0: padding) and "positions", each [batch, seq] of integers.
        schedule: the optimizer's learning rate, to report it.
        compute_dtype: of the forward and backward pass. Parameters, sums of gradients and the update are float32.
        remat: one of `REMAT`.
        microbatches: parts the batch is worked through in, one after another, to save memory. The update is the same:
            every part's gradient weighs as much as it has targets.
        chunk, z_loss: see `train.loss.cross_entropy`.

    Returns the new state, and the metrics "loss" (mean cross-entropy of a target, in nats), "accuracy" (fraction of
    targets whose logit is the largest), "grad_norm" (before clipping), "learning_rate", "tokens" (not padding),
    "targets" and "finite". Where that is False, because the loss or a gradient is not finite, the state is the old one.
    """
    parameters, fixed = eqx.partition(state.model, eqx.is_inexact_array)
    targets = jnp.sum(batch["loss_mask"] != 0)

    def loss(low: Any, part: Batch) -> tuple[Array, dict[str, Array]]:
        sums = loss_sums(eqx.combine(low, fixed), part, remat=remat, chunk=chunk, z_loss=z_loss)
        # Divided by the targets of the whole batch, so that the parts' gradients only need adding up.
        return jax.tree.map(lambda s: s / jnp.maximum(targets, 1).astype(s.dtype), sums)

    def gradients_of(part: Batch) -> tuple[Any, dict[str, Array]]:
        return cast(jax.grad(loss, has_aux=True)(cast(parameters, compute_dtype), part), jnp.float32)

    # The sum starts from the first part: from zeros it would cost one more buffer of the size of the model.
    parts = _split(batch, microbatches)
    first, rest = ({name: a[index] for name, a in parts.items()} for index in (0, slice(1, None)))
    add = lambda total, part: (jax.tree.map(jnp.add, total, gradients_of(part)), None)
    gradients, means = gradients_of(first)
    if microbatches > 1:
        (gradients, means), _ = jax.lax.scan(add, (gradients, means), rest)

    def update(state: TrainState, gradients: Any) -> TrainState:
        updates, opt_state = optimizer.update(gradients, state.opt_state, parameters)
        model = eqx.combine(optax.apply_updates(parameters, updates), fixed)
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
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """`train.loss.cross_entropy` of a model on a batch."""
    x, _ = model.hidden(batch["tokens"], positions=batch["positions"], segments=batch["segments"], remat=remat)
    return cross_entropy(model.unembed, x, batch["targets"], batch["loss_mask"], chunk=chunk, z_loss=z_loss)


def _split(batch: Batch, parts: int) -> dict[str, Int[Array, "parts part seq"]]:
    """[batch, seq] -> [parts, batch / parts, seq]. Every part takes rows from all over, so from every device."""
    size = len(batch["tokens"])
    if size % parts:
        raise ValueError(f"A batch of {size} sequences can't be split into {parts} microbatches of one size.")
    return {name: a.reshape(size // parts, parts, -1).swapaxes(0, 1) for name, a in batch.items()}
