"""Next-token cross-entropy that never holds the logits of a whole batch, and computes none of them twice."""

import math
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from zoo.stack import BATCH_AXES


def cross_entropy(
    unembed: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq vocab"]],
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Int[Array, "batch seq"],
    *,
    chunk: int,
    z_loss: float = 0.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Cross-entropy in nats, summed over the targets whose `mask` is not 0. The others count for nothing, even if NaN.

    `unembed` maps hidden states to logits: a model's `unembed`. It is called for about `chunk` tokens at a time on each
    device, the same positions of every sequence. Under differentiation the gradients of a chunk are computed right
    after its logits, so a scan over the chunks keeps only their sum, and the backward pass has only to scale it.

    Returns the sum to minimise, to which every target also adds `z_loss * log(Z)**2` (Z: the sum of the exponentials
    of its logits; PaLM, arXiv:2204.02311, section 5), and two sums to look at, with no gradient: `loss`, without that
    term, and `correct`, the number of targets whose logit is the largest.
    """
    batch, seq, _ = x.shape
    mesh = jax.sharding.get_abstract_mesh()
    axes = tuple(axis for axis in BATCH_AXES if axis in mesh.axis_names)
    shards = math.prod(mesh.shape[axis] for axis in axes)
    size = min(seq, -(-chunk * shards // batch))  # positions of one chunk
    count = -(-seq // size)

    def split(a: Array) -> Array:
        """[batch, seq, ...] -> [count, shards, batch of the shard, size, ...]"""
        a = jnp.pad(a, ((0, 0), (0, count * size - seq), *((0, 0),) * (a.ndim - 2)))
        return jnp.moveaxis(a.reshape(shards, batch // shards, count, size, *a.shape[2:]), 2, 0)

    def zero(shape: tuple[int, ...]) -> Float[Array, "shards ..."]:
        """A running sum for every shard, so that the shards' gradients are added up once, and not for every chunk."""
        zeros = jnp.zeros((shards, *shape), jnp.float32)
        return jax.lax.with_sharding_constraint(zeros, P(axes, *[P.UNCONSTRAINED] * len(shape))) if axes else zeros

    # What `unembed` uses becomes an argument, and nothing else of the model: the rest would get gradients of zeros.
    head, weights = jax.closure_convert(lambda x: unembed(x), split(x)[0, 0])

    @eqx.filter_custom_vjp
    def sums(differentiable: Any, targets: Array, mask: Array) -> Float[Array, "3"]:
        xs, weights = differentiable

        def one(x: Array, targets: Array, mask: Array) -> Array:
            return _sums_and_gradient(head(x, *weights), targets, mask, z_loss)[0]

        add = lambda total, chunk: (total + jax.vmap(one)(*chunk), None)
        return jnp.sum(jax.lax.scan(add, zero((3,)), (xs, targets, mask))[0], axis=0)

    @sums.def_fwd
    def forward(perturbed: Any, differentiable: Any, targets: Array, mask: Array) -> tuple[Float[Array, "3"], Any]:
        xs, weights = differentiable
        trained, frozen = eqx.partition(weights, perturbed[1])

        def one(x: Array, targets: Array, mask: Array) -> tuple[Any, Array]:
            x = jnp.where(mask[..., None], x, 0)  # or a NaN where nothing counts would reach the weights' gradients
            logits, pull_back = jax.vjp(lambda x, trained: head(x, *eqx.combine(trained, frozen)), x, trained)
            total, gradient = _sums_and_gradient(logits, targets, mask, z_loss)
            dx, dw = pull_back(gradient)
            return (total, dw), dx

        def add(total: Any, chunk: Any) -> tuple[Any, Array]:
            more, dx = jax.vmap(one)(*chunk)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more), dx

        zeros = (zero((3,)), jax.tree.map(lambda w: zero(w.shape), trained))
        total, dxs = jax.lax.scan(add, zeros, (xs, targets, mask))
        total, dw = jax.tree.map(lambda a: jnp.sum(a, axis=0), total)
        return total, (dxs, dw)

    @sums.def_bwd
    def backward(gradients: Any, cotangent: Float[Array, "3"], _: Any, differentiable: Any, *labels: Array) -> Any:
        scale = lambda g, primal: None if g is None else (g * cotangent[0].astype(g.dtype)).astype(primal.dtype)
        return jax.tree.map(scale, gradients, differentiable, is_leaf=lambda g: g is None)

    minimised, loss, correct = sums((split(x), weights), split(targets), split(mask != 0))
    return minimised, {"loss": loss, "correct": correct}


def _sums_and_gradient(
    logits: Float[Array, "batch size vocab"],
    targets: Int[Array, "batch size"],
    mask: Bool[Array, "batch size"],
    z_loss: float,
) -> tuple[Float[Array, "3"], Float[Array, "batch size vocab"]]:
    """The sums of one chunk (to minimise, loss, correct), and the gradient of the first by the logits."""
    dtype, logits = logits.dtype, logits.astype(jnp.float32)
    # A comparison, not an index: it fuses with what is around it, and works on a vocabulary split over devices.
    is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
    target = jnp.sum(jnp.where(is_target, logits, 0), axis=-1)
    log_z = jax.nn.logsumexp(logits, axis=-1)
    loss = log_z - target
    correct = (target >= jnp.max(logits, axis=-1)).astype(jnp.float32)
    sums = jnp.stack([loss + z_loss * jnp.square(log_z), loss, correct])
    gradient = jnp.exp(logits - log_z[..., None]) * (1 + 2 * z_loss * log_z)[..., None] - is_target.astype(jnp.float32)
    return (
        jnp.sum(jnp.where(mask, sums, 0), axis=(1, 2)),
        jnp.where(mask[..., None], gradient, 0).astype(dtype),
    )
