"""Defines `kernels.decode_attention` as attention over the whole cache, and the gradient of all implementations."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, Float

from kernels.attention.reference import attention
from kernels.masks import Mask
from kernels.stacked import Stacked
from kernels.tokens import Tokens


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 4


def decode_attention(
    q: Float[Array, "batch seq heads dim"],
    k: Stacked,
    v: Stacked | None,
    *,
    v_dim: int,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.decode_attention` as `attention` over the whole cache."""
    keys = k.read()
    values = keys[..., :v_dim] if v is None else v.read()
    return attention(
        q, keys, values, scale=scale, mask=mask, softcap=softcap, sinks=sinks, q_tokens=q_tokens, kv_tokens=kv_tokens
    )


def with_gradient(implementation: Callable[..., Array]) -> Callable[..., Array]:
    """Gives an implementation of `decode_attention` the gradient of the formula above, which reads every slot.

    The gradient need not be fast, because nobody trains by decoding.
    """

    @functools.wraps(implementation)
    def decode(q: Any, k: Any, v: Any, *, sinks: Any, q_tokens: Tokens, kv_tokens: Tokens, **options: Any) -> Array:
        def by(function: Callable[..., Array], *arrays: Any) -> Array:
            q, k, v, sinks, q_tokens, kv_tokens = arrays
            return function(q, k, v, sinks=sinks, q_tokens=q_tokens, kv_tokens=kv_tokens, **options)

        def backward(arrays: tuple, d_out: Array) -> tuple:
            *given, q_tokens, kv_tokens = arrays
            formula = lambda *given: by(decode_attention, *given, q_tokens, kv_tokens)
            return *jax.vjp(formula, *given)[1](d_out), None, None

        run = jax.custom_vjp(functools.partial(by, implementation))
        run.defvjp(lambda *arrays: (by(implementation, *arrays), arrays), backward)
        return run(q, k, v, sinks, q_tokens, kv_tokens)

    return decode
