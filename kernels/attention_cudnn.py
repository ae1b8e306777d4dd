"""Attention by NVIDIA's cuDNN, through `jax.nn.dot_product_attention`: the fastest there is, for what it can express.

It takes plain sequences: every row full, positions that are indices, one head size. It has no softcap. Sinks could be
added to its output afterwards from the log-sum-exp, as `kernels.flash` does; but JAX's public function rounds the
log-sum-exp to the dtype of q (8 bits in bfloat16), and has no gradient for it. So sinks are refused.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from kernels.device import device
from kernels.masks import And, Causal, Full, Mask, Tokens, Window
from kernels.reference import finite, poison


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `attention`, or None if it can."""
    platform, kind = device()
    reasons = {
        f"it is for NVIDIA GPUs, and this is a {kind}": platform != "gpu",
        f"it takes float16 and bfloat16, not {q.dtype}": q.dtype not in (jnp.float16, jnp.bfloat16),
        "it has no softcap": softcap is not None,
        "JAX rounds the log-sum-exp that sinks need to the dtype of q": sinks is not None,
        f"it has no mask {mask}": _static(mask) is None,
        "it takes positions that are indices": not (q_tokens.in_order and kv_tokens.in_order),
        "it needs as many queries as keys": mask != Full() and q.shape[1] != k.shape[1],
        "it needs keys and values of one head size": k.shape[3] != v.shape[3],
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    return reason or _refusal_of_jax(q, k, v, scale, mask)


def attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.attention` by cuDNN."""
    causal, window = _static(mask) or (False, None)
    out = _cudnn(finite(q), finite(k), finite(v), scale, causal, window)
    return out + poison(q) + _seen_poison(k, v, q.shape[1], causal, window, q.shape[2])


def _cudnn(q: Array, k: Array, v: Array, scale: float, causal: bool, window: int | None) -> Array:
    last = None if window is None else (window - 1, 0)  # how many tokens it looks back, and ahead
    return jax.nn.dot_product_attention(
        q, k, v, scale=scale, is_causal=causal, local_window_size=last, implementation="cudnn"
    )


def _refusal_of_jax(q: Array, k: Array, v: Array, scale: float, mask: Mask) -> str | None:
    """Returns JAX's reason to refuse: cuDNN is missing, or cannot take such heads on this GPU."""
    try:
        jax.eval_shape(lambda q, k, v: _cudnn(q, k, v, scale, *(_static(mask) or (False, None))), q, k, v)
    except (RuntimeError, NotImplementedError) as error:
        return f"JAX says: {str(error).splitlines()[0].rstrip('.')}"
    return None


def _static(mask: Mask) -> tuple[bool, int | None] | None:
    """Returns whether the mask is causal, and its window; None for masks that cuDNN does not have."""
    match mask:
        case Full():
            return False, None
        case Causal():
            return True, None
        case And(Causal(), Window(size)):
            return True, size
        case _:
            return None


def _seen_poison(
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    seq: int,
    causal: bool,
    window: int | None,
    heads: int,
) -> Float[Array, "batch seq heads 1"]:
    """Returns NaN for each query that sees a key or a value that is not finite, else zero.

    The difference of two running counts of such keys says whether a window has any. cuDNN itself is given finite
    arrays, since what it makes of a masked NaN is documented nowhere.
    """
    spoilt = jnp.isnan(poison(k) + poison(v))[..., 0]
    before = jnp.pad(jnp.cumsum(spoilt, axis=1, dtype=jnp.int32), ((0, 0), (1, 0), (0, 0)))
    end = np.arange(1, seq + 1) if causal else np.full(seq, k.shape[1])
    start = np.zeros(seq, int) if window is None else np.maximum(end - window, 0)
    seen = jnp.repeat(before[:, end] > before[:, start], heads // k.shape[2], axis=2)
    return jnp.where(seen, jnp.nan, 0).astype(k.dtype)[..., None]
