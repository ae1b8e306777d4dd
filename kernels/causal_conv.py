"""A short causal convolution of each channel by itself, as in Mamba (arXiv:2312.00752) and Qwen3-Next."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels.masks import Tokens
from kernels.sequence import padding


@functools.partial(jax.checkpoint, prevent_cse=False)  # or the backward pass would keep its inputs in float32
def causal_conv(
    x: Float[Array, "batch seq channels"],
    weight: Float[Array, "channels width"],
    at: Tokens = Tokens(),  # noqa: B008 (a value)
    *,
    tail: Float[Array, "batch before channels"] | None = None,
) -> tuple[Float[Array, "batch seq channels"], Float[Array, "batch before channels"]]:
    """Sums, for each token, its own and the `width` - 1 earlier inputs of its document, times the channel's weights.

    The last column of `weight` is the token's own. Inputs before the row's first are those of `tail`, or zeros. Sums
    are in float32. Padding (segment 0, or a position below 0) counts as zeros; it stands at the end of a row, or at its
    beginning where there is no tail.

    Returns the sums in the dtype of x, and the new tail: the last `width` - 1 inputs that are not padding.

    Raises:
        ValueError: for a tail together with segments: it is of one document.
    """
    if tail is not None and at.segments is not None:
        raise ValueError("A tail is of one document a row: leave segments out where there is one, or the tail.")
    before, seq, blank = weight.shape[1] - 1, x.shape[1], padding(at, x.shape[:2])
    x = jnp.where(blank[..., None], 0, x)
    tail = jnp.zeros((len(x), before, x.shape[2]), x.dtype) if tail is None else tail.astype(x.dtype)
    inputs = jnp.concatenate([tail, x], axis=1)

    @functools.partial(jax.checkpoint, prevent_cse=False)  # or each term is kept in float32
    def sums(inputs: Array, weight: Array) -> Array:
        total = jnp.zeros(x.shape, jnp.float32)
        for back in range(before + 1):
            earlier = inputs[:, before - back : before - back + seq].astype(jnp.float32)
            if at.segments is not None and back:
                segments = jnp.pad(at.segments, ((0, 0), (back, 0)))[:, :seq]
                earlier = jnp.where((segments == at.segments)[..., None], earlier, 0)
            total = total + earlier * weight[None, None, :, before - back].astype(jnp.float32)
        return total.astype(x.dtype)

    read = jnp.max(jnp.where(blank, 0, jnp.arange(1, seq + 1)[None]), axis=1, keepdims=True)
    last = read + jnp.arange(before)[None]
    return sums(inputs, weight), jnp.take_along_axis(inputs, last[..., None], axis=1)
