"""Attention over a cache whose bits do not depend on the other rows: it reads the layer, as "reference" does."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import invariant
from kernels.attention.invariant import attention
from kernels.stacked import Stacked


PLATFORMS = ()  # chosen by name alone
RANK = 0


def refusal(q: Float[Array, "batch seq heads dim"], *_: object, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `decode_attention`, or None if it can."""
    return "it computes in float32, and q is float64" if q.dtype == jnp.float64 else invariant.refusal()


def decode_attention(
    q: Float[Array, "batch seq heads dim"], k: Stacked, v: Stacked | None, *, v_dim: int, **options: Any
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.decode_attention`, without a gradient."""
    keys = k.read()
    return attention(q, keys, keys[..., :v_dim] if v is None else v.read(), **options)
