"""Splits a recurrence over the devices of a mesh: its sequences, its heads, and the tokens of a sequence.

The effect of a device's tokens is linear in the state S before them. The state after them is F S + B. Their outputs are
those from a state of zeros, plus Q S. So all devices compute F, B, Q and the outputs from zeros at once, and exchange F
and B. Each device then composes those of the devices before it, which gives the state before its own tokens.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from kernels.mesh import BATCH, CONTEXT, TENSOR, free, splitting
from kernels.stacked import Slots


def split_recurrence(
    run: Callable[..., tuple[Array, Any]],
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq heads dim"],
    v: Float[Array, "batch seq v_heads v_dim"],
    decay: Float[Array, "batch seq v_heads *dim"],
    beta: Float[Array, "batch seq v_heads"],
    begins: Bool[Array, "batch seq"],
    state: Float[Array, "batch v_heads dim v_dim"] | Slots,
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch seq v_heads v_dim"], Float[Array, "batch v_heads dim v_dim"] | Slots]:
    """Runs a recurrence on each device, with the device's share of the sequences, of the heads and of the tokens.

    Devices along `CONTEXT` have consecutive tokens, in the order of the row. An axis of the mesh that does not divide
    the sequences, the tokens or the query/key heads leaves them whole.
    """
    run = functools.partial(run, scale=scale, erase=erase)
    given: tuple[Any, ...] = (q, k, v, decay, beta, begins, state)
    if not (axes := free()):
        return run(*given)
    batch, seq, heads = splitting(len(v), *BATCH), splitting(v.shape[1], CONTEXT), splitting(k.shape[2], TENSOR)
    if seq:
        effect = functools.partial(_of_any_state, run) if erase else functools.partial(_of_decay, run, scale)
        run = functools.partial(_composed, effect)
    tokens, of_state = P(batch, seq, heads), P(batch, heads)
    if isinstance(state, Slots):
        of_state = Slots(P(None, batch, None, heads), P(), P(batch), P(batch))
    local: Callable[..., Any] = jax.shard_map(
        run,
        axis_names=set(axes),
        in_specs=(tokens, tokens, tokens, tokens, tokens, P(batch, seq), of_state),
        out_specs=(tokens, of_state),
        check_vma=False,
    )
    return local(*given)


Effect = tuple[
    Float[Array, "batch seq v_heads v_dim"],  # the outputs from a state of zeros
    Float[Array, "batch seq v_heads dim"],  # Q
    Float[Array, "batch v_heads dim v_dim+dim"],  # B and F, beside one another: one array to exchange
]
"""The effect of a device's tokens on the outputs and the state."""


def _composed(effect: Callable[..., Effect], *tokens: Array) -> tuple[Array, Array]:
    """Returns the outputs of a device's tokens, and the state after the tokens of all devices along `CONTEXT`."""
    state = tokens[-1]
    out, queries, left = effect(*tokens[:-1], jnp.zeros_like(state))

    def after(state: Array, left: Array) -> tuple[Array, Array]:
        added, kept = jnp.split(left, [state.shape[-1]], axis=-1)
        return jnp.matmul(kept, state, precision="highest") + added, state

    last, starts = jax.lax.scan(after, state, jax.lax.all_gather(left, CONTEXT))
    start = starts[jax.lax.axis_index(CONTEXT)]
    more = jnp.einsum("bshd,bhdv->bshv", queries.astype(state.dtype), start)
    return (out.astype(state.dtype) + more).astype(out.dtype), last


def _of_any_state(run: Callable[..., tuple[Array, Array]], *tokens: Array) -> Effect:
    """Appends an identity to the state, and zeros to the values, so that one run also yields F and Q.

    Both get `dim` more columns. If the values have `dim` columns, as in most models, the run takes 1.8 times the
    operations of one without them. Two runs, one for the state alone and one from that state, would take as many, but
    one after the other, and each would need an implementation of its own.
    """
    q, k, v, decay, beta, begins, state = tokens
    identity = jnp.broadcast_to(jnp.eye(k.shape[3], dtype=state.dtype), (*state.shape[:3], k.shape[3]))
    wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3])))
    out, left = run(q, k, wide, decay, beta, begins, jnp.concatenate([state, identity], axis=-1))
    out, queries = jnp.split(out, [v.shape[3]], axis=-1)
    return out, queries, left


def _of_decay(run: Callable[..., tuple[Array, Array]], scale: float, *tokens: Array) -> Effect:
    """Computes the effect if nothing is erased: then the state only decays, so F and Q follow from the decays."""
    q, _, v, decay, _, begins, state = tokens
    out, added = run(*tokens)
    decay = decay.astype(state.dtype) if decay.ndim == 4 else decay.astype(state.dtype)[..., None]
    kept = jnp.where((jnp.cumsum(begins, axis=1) == 0)[..., None, None], jnp.exp(jnp.cumsum(decay, axis=1)), 0)
    queries = scale * jnp.repeat(q.astype(state.dtype), v.shape[2] // q.shape[2], axis=2) * kept
    return out, queries, jnp.concatenate([added, kept[:, -1, :, :, None] * jnp.eye(q.shape[3])[None, None]], axis=-1)
