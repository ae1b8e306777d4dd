"""One token of the gated delta rule for each row of a batch, over a cache of states, for NVIDIA GPUs, in Pallas-Triton.

It takes as long as reading and writing the states takes. A program reads some columns of one head's state once, keeps
them in registers, and writes them once: all sums are along the other axis.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from kernels.backends.device import elsewhere
from kernels.backends.triton import Side, launch, load, load_block, store, store_block
from kernels.stacked import Slots


PLATFORMS = ("gpu",)
RANK = 2

ELEMENTS = 4096  # of a program's block of the state: 32 for each thread
WARPS = 4
WIDEST = 512  # features of a key: with more of them, a block would have rows of less than 32 bytes


def refusal(q: Array, k: Array, v: Array, *_: object, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_step`, or None if it can."""
    if v.dtype == jnp.float64:
        return "it computes in float32, and v is float64"
    if k.shape[3] > WIDEST:
        return f"its keys have at most {WIDEST} features, and these {k.shape[3]}"
    if not k.size or not v.size:
        return "it needs a row, a head and a feature at least"
    return elsewhere("gpu")


@functools.partial(jax.jit, static_argnames=("scale", "erase"))  # so that calls outside jit compile once, too
def delta_step(
    q: Float[Array, "batch 1 heads dim"],
    k: Float[Array, "batch 1 heads dim"],
    v: Float[Array, "batch 1 v_heads v_dim"],
    decay: Float[Array, "batch 1 v_heads"] | Float[Array, "batch 1 v_heads dim"],
    beta: Float[Array, "batch 1 v_heads"],
    restart: Bool[Array, "batch 1"],
    state: Slots,
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch 1 v_heads v_dim"], Slots]:
    """Computes `kernels.delta_rule` for the only token of each row."""
    del restart
    (batch, _, heads, v_dim), dim = v.shape, k.shape[3]
    columns = min(ELEMENTS // pl.next_power_of_2(dim), pl.next_power_of_2(v_dim))
    token = tuple(x[:, 0] for x in (q, k, v, decay if decay.ndim == 4 else decay[..., None], beta))
    out, stack = launch(
        functools.partial(_kernel, scale, erase, columns),
        *token,
        state,
        name="delta_step",
        grid=(pl.cdiv(v_dim, columns), heads, batch),
        results=(jax.ShapeDtypeStruct((batch, heads, v_dim), v.dtype), jax.typeof(state.stack)),
        warps=WARPS,
        stages=1,
        cost=pl.CostEstimate(
            flops=7 * batch * heads * dim * v_dim,
            transcendentals=token[3].size,
            bytes_accessed=2 * batch * heads * dim * v_dim * 4,
        ),
        in_place={len(token): 1},
    )
    return out[:, None], dataclasses.replace(state, stack=stack)


def _kernel(
    scale: float,
    erase: bool,
    columns: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    decay_ref: Any,
    beta_ref: Any,
    state_ref: Slots,
    out_ref: Any,
    stack_ref: Any,
) -> None:
    """Computes some columns of a head's next state, and the outputs that the query reads from them."""
    head, row, (dim, v_dim) = pl.program_id(1), pl.program_id(2), stack_ref.shape[-2:]
    of_keys = Side.of(jnp.int32(0), pl.next_power_of_2(dim), dim)
    of_values = Side.of(pl.program_id(0), columns, v_dim)
    key_head = lax.div(head, v_ref.shape[1] // k_ref.shape[1])

    def vector(ref: Any, head: Array, side: Side) -> Array:
        return load(ref.at[row, head, side.indices], side.own).astype(jnp.float32)

    layer, before, after = state_ref.layer[...], state_ref.before[row], state_ref.after[row]
    state = load_block(state_ref.stack, of_keys, of_values, layer, row, jnp.maximum(before, 0), head)
    log = decay_ref[row, head, 0] if decay_ref.shape[2] == 1 else vector(decay_ref, head, of_keys)[:, None]
    state = jnp.where(before < 0, 0.0, state) * jnp.exp(log.astype(jnp.float32))
    key, value = vector(k_ref, key_head, of_keys)[:, None], vector(v_ref, head, of_values)
    held = jnp.sum(state * key, axis=0) if erase else 0.0
    written = beta_ref[row, head].astype(jnp.float32) * (value - held)
    state += key * written[None, :]
    out = scale * jnp.sum(state * vector(q_ref, key_head, of_keys)[:, None], axis=0)
    store(out_ref.at[row, head, of_values.indices], out.astype(out_ref.dtype), of_values.own)
    store_block(stack_ref, state, of_keys, of_values, layer, row, after, head)
