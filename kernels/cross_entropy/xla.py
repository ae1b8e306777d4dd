"""Cross-entropy in chunks of tokens: it never holds the logits of all tokens, and computes none of them twice."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kernels import mesh
from kernels.cross_entropy.chunks import Chunks


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 3


def refusal(_: Callable, x: Float[Array, "batch seq embed"], *__: object, **___: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `cross_entropy`, or None if it can."""
    return "it computes in float32, and x is float64" if x.dtype == jnp.float64 else None


def cross_entropy(
    unembed: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq vocab"]],
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Bool[Array, "batch seq"],
    *,
    chunk: int,
    z_loss: float,
) -> Float[Array, "3"]:
    """Computes `kernels.cross_entropy` in chunks of tokens.

    Under differentiation the gradients of a chunk are computed right after its logits, which are then dropped. The
    scan keeps the features' gradients and the sum of the weights', and the backward pass only scales them.
    """
    batch, seq, _ = x.shape
    axes = mesh.splitting(batch, *mesh.BATCH) + mesh.splitting(seq, mesh.CONTEXT)
    chunks = Chunks.of(batch, seq, chunk)
    shards, split = chunks.rows * chunks.parts, chunks.cut_by_shard

    def zero(shape: tuple[int, ...]) -> Float[Array, "shards ..."]:
        """Makes one running sum per shard, so that shards are added up once at the end, and not for every chunk."""
        zeros = jnp.zeros((shards, *shape), jnp.float32)
        spec = P(axes, *[P.UNCONSTRAINED] * len(shape))
        return jax.lax.with_sharding_constraint(zeros, spec) if mesh.free() else zeros

    # Only the arrays that `unembed` uses become arguments: other arrays of the model would get gradients of zeros.
    head, weights = jax.closure_convert(lambda x: unembed(x), split(x)[0, 0])

    @jax.custom_vjp
    def sums(xs: Array, weights: list[Array], targets: Array, mask: Array) -> Float[Array, "3"]:
        weights = [_whole(weight) for weight in weights]

        def one(x: Array, targets: Array, mask: Array) -> Array:
            return sums_and_gradient(head(x, *weights), targets, mask, z_loss)[0]

        add = lambda total, chunk: (total + jax.vmap(one)(*chunk), None)
        return jnp.sum(jax.lax.scan(add, zero((3,)), (xs, targets, mask))[0], axis=0)

    def forward(xs: Any, weights: list[Any], targets: Any, mask: Any) -> tuple[Float[Array, "3"], Any]:
        trained = [w.perturbed and jnp.issubdtype(w.value.dtype, jnp.inexact) for w in weights]
        values = [_whole(w.value) for w in weights]

        def one(x: Array, targets: Array, mask: Array) -> tuple[Any, Array]:
            def logits_of(x: Array, trained_weights: list[Array]) -> Array:
                rest = iter(trained_weights)
                return head(x, *(next(rest) if t else w for t, w in zip(trained, values, strict=True)))

            x = jnp.where(mask[..., None], x, 0)  # a NaN of a masked token would reach the weights' gradients
            logits, pull_back = jax.vjp(logits_of, x, [w for t, w in zip(trained, values, strict=True) if t])
            total, gradient = sums_and_gradient(logits, targets, mask, z_loss)
            dx, dw = pull_back(gradient)
            return (total, dw), dx

        def add(total: Any, chunk: Any) -> tuple[Any, Array]:
            more, dx = jax.vmap(one)(*chunk)
            return jax.tree.map(lambda a, b: a + b.astype(a.dtype), total, more), dx

        zeros = (zero((3,)), [zero(w.shape) for t, w in zip(trained, values, strict=True) if t])
        total, dxs = jax.lax.scan(add, zeros, (xs.value, targets.value, mask.value))
        total, dw = total
        rest = iter(dw)
        return jnp.sum(total, axis=0), (dxs, [next(rest) if t else None for t in trained])

    def backward(gradients: Any, cotangent: Any) -> Any:
        # The cotangent, such as 1 / targets, is not rounded: its rounding error would scale all gradients alike.
        scaled = lambda g, like: (g.astype(jnp.float32) * cotangent[0]).astype(like.dtype)
        dxs, dw = gradients
        dw = [None if g is None else _summed(scaled(g, w), axes) for g, w in zip(dw, weights, strict=True)]
        return scaled(dxs, dxs), dw, None, None

    sums.defvjp(forward, backward, symbolic_zeros=True)
    return sums(split(x), weights, split(targets), split(mask))


def _whole(weight: Array) -> Array:
    """Gathers all features of a weight once, before the scan, which would gather them for every chunk."""
    spec = P(*(P.UNCONSTRAINED,) * (weight.ndim - 1), None)
    return jax.lax.with_sharding_constraint(weight, spec) if mesh.free() and weight.ndim > 1 else weight


def _summed(gradients: Float[Array, "shards ..."], axes: tuple[str, ...]) -> Float[Array, "..."]:
    """Adds up the gradients of the shards, by reduce-scatters: each device gets the features that it has of the weight.

    The shards of a replica are added up first, so that replicas send each other no more than these features.
    """
    if not axes or gradients.ndim < 3:
        return jnp.sum(gradients, axis=0)
    shape, free = gradients.shape[1:], (P.UNCONSTRAINED,) * (gradients.ndim - 2)
    constrain = jax.lax.with_sharding_constraint
    add = lambda a, n: jax.lax.reduce(a, np.zeros((), a.dtype), jax.lax.add, n)  # `jnp.sum` would send float32
    by_axis = constrain(gradients.reshape(*map(mesh.split, axes), *shape), P(*axes, *free, None))
    within = tuple(n for n, axis in enumerate(axes) if axis != mesh.REPLICA)
    replicas = (mesh.REPLICA,) * (len(within) < len(axes))
    features = mesh.splitting(shape[-1], *mesh.PARAMETERS)
    return add(constrain(add(by_axis, within), P(*replicas, *free, features)), range(len(replicas)))


def sums_and_gradient(
    logits: Float[Array, "batch size vocab"],
    targets: Int[Array, "batch size"],
    mask: Bool[Array, "batch size"],
    z_loss: float,
) -> tuple[Float[Array, "3"], Float[Array, "batch size vocab"]]:
    """Returns the three sums of one chunk, and the gradient of the first with respect to the logits."""
    dtype, logits = logits.dtype, logits.astype(jnp.float32)
    # A comparison, not an index: XLA fuses it with its neighbours, and it works on a vocabulary split over devices.
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
