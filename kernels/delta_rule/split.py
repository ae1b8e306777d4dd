"""Splits a recurrence over the devices of a mesh: its sequences, its heads, and the tokens of a sequence.

What a device's tokens do is linear in the state S that they begin with. They leave the state F S + B, and their outputs
are those of a state of zeros, plus Q S. So all devices compute F, B, Q and these outputs at once, exchange F and B, and
each composes those of the devices before it: that is the state which its own tokens begin with.
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

    Along `CONTEXT` devices have neighbouring tokens, in the order of the row. Axes of the mesh that do not divide the
    sequences, the tokens or the query/key heads leave them whole.
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
    Float[Array, "batch seq v_heads v_dim"],  # the outputs, where the state begins as zeros
    Float[Array, "batch seq v_heads dim"],  # Q
    Float[Array, "batch v_heads dim v_dim+dim"],  # B and F, beside one another: one array to exchange
]
"""What a device's tokens do."""


def _composed(effect: Callable[..., Effect], *tokens: Array) -> tuple[Array, Array]:
    """The outputs of a device's tokens, and the state after those of all devices along `CONTEXT`."""
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
    """One run gives all: values of zeros and a state of the identity, beside the others as further columns.

    They are `dim` columns more. With as many of values, as most models have, a run takes 1.8 times the operations of
    one without them. So would two runs, of the state alone and then from it, but one after the other, and with an
    implementation of their own each.
    """
    q, k, v, decay, beta, begins, state = tokens
    identity = jnp.broadcast_to(jnp.eye(k.shape[3], dtype=state.dtype), (*state.shape[:3], k.shape[3]))
    wide = jnp.pad(v, ((0, 0), (0, 0), (0, 0), (0, k.shape[3])))
    out, left = run(q, k, wide, decay, beta, begins, jnp.concatenate([state, identity], axis=-1))
    out, queries = jnp.split(out, [v.shape[3]], axis=-1)
    return out, queries, left


def _of_decay(run: Callable[..., tuple[Array, Array]], scale: float, *tokens: Array) -> Effect:
    """Where nothing is erased the state only decays."""
    q, _, v, decay, _, begins, state = tokens
    out, added = run(*tokens)
    decay = decay.astype(state.dtype) if decay.ndim == 4 else decay.astype(state.dtype)[..., None]
    kept = jnp.where((jnp.cumsum(begins, axis=1) == 0)[..., None, None], jnp.exp(jnp.cumsum(decay, axis=1)), 0)
    queries = scale * jnp.repeat(q.astype(state.dtype), v.shape[2] // q.shape[2], axis=2) * kept
    return out, queries, jnp.concatenate([added, kept[:, -1, :, :, None] * jnp.eye(q.shape[3])[None, None]], axis=-1)
