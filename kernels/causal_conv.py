"""A short causal convolution of each channel by itself, as in Mamba (arXiv:2312.00752) and Qwen3-Next."""

import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int

from kernels.mesh import BATCH, CONTEXT, TENSOR, free, split, splitting
from kernels.tokens import Tokens, padding, refuse_branches


@functools.partial(jax.checkpoint, prevent_cse=False)  # or the backward pass would keep its inputs in float32
def causal_conv(
    x: Float[Array, "batch seq channels"],
    weight: Float[Array, "channels width"],
    at: Tokens = Tokens(),  # noqa: B008 (a value)
    *,
    tail: Float[Array, "batch before channels"] | None = None,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch before channels"]]:
    """Sums, for each token, its own and the `width` - 1 earlier inputs of its document, times the channel's weights.

    The last column of `weight` is for the token's own input. Inputs before the row's first are those of `tail`, or
    zeros. Sums are in float32. Padding (segment 0, or a position below 0) counts as zeros. Padding must be at the end
    of a row, or, without a tail, at its beginning. Tokens that are split over a mesh must be in order: each device gets
    the last inputs of the device before it.

    Returns the sums in the dtype of x, and the new tail: the last `width` - 1 inputs that are not padding.

    Raises:
        ValueError: both a tail and segments are given: a tail belongs to one document. Or there are branches.
    """
    refuse_branches(at)
    if tail is not None and at.segments is not None:
        raise ValueError("A tail is of one document a row: leave segments out where there is one, or the tail.")
    before, blank = weight.shape[1] - 1, padding(at, x.shape[:2])
    x = jnp.where(blank[..., None], 0, x)
    tail = jnp.zeros((len(x), before, x.shape[2]), x.dtype) if tail is None else tail.astype(x.dtype)
    if not (seq := splitting(x.shape[1], CONTEXT)) or x.shape[1] // split(CONTEXT) < before:
        return _convolved(x, weight, at.segments, blank, tail)
    batch, channels = splitting(len(x), *BATCH), splitting(x.shape[2], TENSOR)
    return jax.shard_map(
        functools.partial(_convolved, devices=split(CONTEXT)),
        axis_names=set(free()),
        in_specs=(P(batch, seq, channels), P(channels), P(batch, seq), P(batch, seq), P(batch, None, channels)),
        out_specs=(P(batch, seq, channels), P(batch, None, channels)),
        check_vma=False,
    )(x, weight, at.segments, blank, tail)


def _convolved(
    x: Float[Array, "batch seq channels"],
    weight: Float[Array, "channels width"],
    segments: Int[Array, "batch seq"] | None,
    blank: Bool[Array, "batch seq"],
    tail: Float[Array, "batch before channels"],
    devices: int = 1,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch before channels"]]:
    """Returns the sums and the new tail. With several devices along `CONTEXT`, each has its part of the row."""
    seq, before = x.shape[1], tail.shape[1]
    inputs, first = jnp.concatenate([tail, x], axis=1), 0  # the first input's index in the row, tail included
    read = jnp.max(jnp.where(blank, 0, jnp.arange(1, seq + 1)), axis=1, keepdims=True)
    if segments is not None:
        segments = jnp.pad(segments, ((0, 0), (before, 0)))
    if devices > 1:
        # The previous device's last inputs take the place of the row's tail.
        first = jax.lax.axis_index(CONTEXT) * seq
        read = jax.lax.pmax(jnp.where(read > 0, first + read, 0), CONTEXT)
        left = lambda a: jax.lax.ppermute(a[:, seq:], CONTEXT, [(n, n + 1) for n in range(devices - 1)])
        inputs = inputs.at[:, :before].set(jnp.where(first == 0, tail, left(inputs)))
        segments = None if segments is None else segments.at[:, :before].set(left(segments))

    @functools.partial(jax.checkpoint, prevent_cse=False)  # or each term is kept in float32
    def sums(inputs: Array, weight: Array) -> Array:
        total = jnp.zeros(x.shape, jnp.float32)
        for back in range(before + 1):
            part = slice(before - back, before - back + seq)
            earlier = inputs[:, part].astype(jnp.float32)
            if segments is not None and back:
                earlier = jnp.where((segments[:, part] == segments[:, before:])[..., None], earlier, 0)
            total = total + earlier * weight[None, None, :, before - back].astype(jnp.float32)
        return total.astype(x.dtype)

    last = read + jnp.arange(before)[None] - first
    new = jnp.take_along_axis(inputs, jnp.clip(last, 0, seq + before - 1)[..., None], axis=1)
    if devices > 1:
        own = (last < seq + before) & (last >= jnp.where(first == 0, 0, before))
        new = jax.lax.psum(jnp.where(own[..., None], new, 0), CONTEXT)
    return sums(inputs, weight), new
