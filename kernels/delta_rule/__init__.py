"""The gated delta rule, a recurrence over tokens, forward and backward: the signature and its meaning."""

import functools
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from kernels import dispatch
from kernels.delta_rule.split import split_recurrence
from kernels.stacked import Slots
from kernels.tokens import Tokens, begins, padding


def delta_rule(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq heads dim"],
    v: Float[Array, "batch seq v_heads v_dim"],
    decay: Float[Array, "batch seq v_heads"] | Float[Array, "batch seq v_heads dim"],
    beta: Float[Array, "batch seq v_heads"],
    at: Tokens = Tokens(),  # noqa: B008 (a value)
    *,
    scale: float,
    state: Float[Array, "batch v_heads dim v_dim"] | Slots | None = None,
    erase: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch seq v_heads v_dim"], Float[Array, "batch v_heads dim v_dim"] | Slots]:
    """Runs the gated delta rule (arXiv:2412.06464), a recurrence over tokens with a matrix as the state of each head:

        S_t = A_t S_{t-1} + beta_t k_t (v_t - (A_t S_{t-1})^T k_t)^T,        out_t = scale * S_t^T q_t

    `decay` is the logarithm of A_t, at most 0: one number for each head (Qwen3-Next), or one for each channel of its
    keys, which makes A_t diagonal (Kimi Linear, arXiv:2510.26692). Without `erase` nothing is subtracted from v_t, and
    the recurrence is that of Mamba-2 (arXiv:2405.21060). Value heads share query/key heads in groups of
    `v_heads / heads` neighbours.

    The first state is `state`, or zeros. The state is reset to zeros where a segment of `at` begins, so that packed
    documents do not see each other; tokens of a row must be in order. Padding (segment 0, or a position below 0)
    neither decays the state nor writes to it, and may hold anything.

    Returns the outputs in the dtype of v, and the state after the last token, in float32. If the state is given in a
    cache, `kernels.stacked.Slots`, it is returned in the cache. One token is then a decode step: on a GPU or a TPU a
    kernel reads the state once and writes it in place. A decode step has no derivatives.

    `implementation` is one of

    - "reference": one token after the other. It has every derivative, and computes float64 in float64.
    - "xla": chunks of 64 tokens, in plain JAX. Its memory grows with the tokens, and holds a state for each chunk. This
      and all that follow have first derivatives only, in reverse mode.
    - "tpu": the same, with a scan over the chunks in Pallas for TPUs. "triton": with a scan for NVIDIA GPUs. On a CPU
      both are interpreted.
    - "triton_fused": the same in five kernels for NVIDIA's Hopper and Blackwell GPUs, for q, k and v in bfloat16 and
      one decay a head. Products are in bfloat16, with sums and states in float32. "triton_channels": the same for a
      decay of each channel.

    None chooses by rank (`kernels.dispatch`): the kernels for GPUs or "tpu" on their devices if they take the
    arguments, else "xla", and "reference" for at most 16 tokens and for float64. The decode step is an operation of
    its own, "delta_step".

    Raises:
        ValueError: arguments contradict one another, or the implementation asked for cannot take them.
    """
    if v.shape[2] % k.shape[2]:
        raise ValueError(f"The value heads ({v.shape[2]}) must be a multiple of the query/key heads ({k.shape[2]}).")
    if isinstance(state, Slots) and (implementation is not None or v.shape[1] > 1):
        options: Any = dict(scale=scale, erase=erase, implementation=implementation)
        out, last = delta_rule(q, k, v, decay, beta, at, state=state.read(), **options)
        assert not isinstance(last, Slots)
        return out, state.write(last)
    exact = jnp.float64 if v.dtype == jnp.float64 else jnp.float32
    if state is None:
        state = jnp.zeros((len(v), v.shape[2], k.shape[3], v.shape[3]), exact)
    blank = padding(at, v.shape[:2])
    q, k, v, decay, beta = (jnp.where(jnp.expand_dims(blank, range(2, x.ndim)), 0, x) for x in (q, k, v, decay, beta))
    if isinstance(state, Slots):
        run = functools.partial(dispatch.run, "delta_step", None)
    else:
        first, state = "reference" if v.shape[1] <= 16 else None, state.astype(exact)
        run = functools.partial(dispatch.run, "delta_rule", implementation, first=first)
    given = q, k, v, decay, beta, begins(at, v.shape[:2]), state
    return split_recurrence(run, *given, scale=scale, erase=erase)
