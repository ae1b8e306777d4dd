"""Attention of one query in each row of a batch, for NVIDIA GPUs, in Pallas-Triton (flash-decoding).

It takes as long as reading the cache takes. So one program serves all query heads of a key/value head, as the rows of
one product, and the blocks with visible keys are dealt out to as many programs as fill the GPU. Blocks beyond a row's
length, or outside its window, are not read. Each program returns the mean of its values and the log-sum-exp of its
logits. XLA merges these, and a sink is one more log-sum-exp to merge.

No pass over the cache cleans it of NaN. Keys and values that are not seen are not loaded: within a block too, zeros
take their place. One that is seen and not finite makes a logit or a sum that is not finite, which becomes NaN.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels import blocks
from kernels.attention_triton import Block, capped, product, row_of, to_log2
from kernels.device import elsewhere
from kernels.flash import Formula
from kernels.masks import Mask, Schedule, Tokens, block_classes
from kernels.reference import LOWEST, poison
from kernels.triton import SMALLEST, dot, exp2, inside, launch, load, pieces, store


WIDTHS = (64, 128, 256, 576)  # features of a head for which there are block sizes; 576 is DeepSeek's latent cache


def refusal(
    q: Float[Array, "batch heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    **_: object,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `decode_attention`, or None if it can."""
    if q.dtype == jnp.float64:
        return "it computes in float32, and q is float64"
    dim, v_dim = q.shape[2], v.shape[3]
    if dim % SMALLEST or v_dim % SMALLEST or max(dim, v_dim) > WIDTHS[-1]:
        return f"its heads have multiples of {SMALLEST} features, {WIDTHS[-1]} at most, and these {dim} and {v_dim}"
    if not q.size or not v.size:
        return "it needs a query, a key and a feature at least"
    if scale <= 0:
        return f"it needs a scale above 0, and this is {scale}"
    return elsewhere("gpu")


@functools.partial(jax.jit, static_argnames=("scale", "mask", "softcap"))  # so that calls outside jit compile once, too
def decode_attention(
    q: Float[Array, "batch heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch heads v_dim"]:
    """Computes `kernels.decode_attention` in Triton. It has no gradient."""
    (batch, heads, dim), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    width = next(width for width in WIDTHS if width >= max(dim, v_dim))
    size = blocks.sizes("decode_attention_triton", "decode", q.dtype, f"d{width}")
    rows = min(max(SMALLEST, pl.next_power_of_2(heads // kv_heads)), size["rows"])
    groups = kv_heads * pl.cdiv(heads // kv_heads, rows)
    splits = min(pl.cdiv(size["programs"], batch * groups), pl.cdiv(kv_seq, size["kv"]))
    out, lse = launch(
        functools.partial(_kernel, Formula(scale, mask, softcap), size["kv"], rows),
        *(q + poison(q), k, v, q_tokens, kv_tokens),
        Schedule.of(block_classes(mask, q_tokens, kv_tokens, 1, size["kv"])),
        name="decode_attention",
        grid=(groups, splits, batch),
        results=(
            jax.ShapeDtypeStruct((batch, splits, heads, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, splits, heads), jnp.float32),
        ),
        warps=size["warps"],
        stages=size["stages"],
        cost=pl.CostEstimate(
            flops=2 * batch * heads * kv_seq * (dim + v_dim),
            transcendentals=batch * heads * kv_seq,
            bytes_accessed=(k.size + v.size) * k.dtype.itemsize,
        ),
    )
    if sinks is not None:
        sinks = jnp.maximum(sinks.astype(jnp.float32), LOWEST)
        lse = jnp.concatenate([lse, jnp.broadcast_to(sinks, (batch, 1, heads))], axis=1)
    shares = jax.nn.softmax(lse, axis=1)[:, :splits, :, None]
    return jnp.sum(shares * out, axis=1).astype(q.dtype)


def _kernel(
    formula: Formula,
    kv_size: int,
    rows: int,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_tokens_ref: Tokens,
    kv_tokens_ref: Tokens,
    schedule: Schedule,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    split, batch = pl.program_id(1), pl.program_id(2)
    heads, kv_seq, kv_heads = q_ref.shape[1], *k_ref.shape[1:3]
    group = heads // kv_heads
    parts = pl.cdiv(group, rows)
    kv_head, part = lax.div(pl.program_id(0), parts), lax.rem(pl.program_id(0), parts)
    these = pl.ds(kv_head * group + part * rows, rows)
    exist = inside(part * rows, rows, group)
    column = None if exist is None else exist[:, None]
    q = [load(q_ref.at[batch, these, piece], column) for piece in pieces(q_ref.shape[2])]
    row = row_of(schedule.order, batch)

    def step(masked: bool, n: Array, state: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        top, total, out = state
        kv_block = Block.of(batch, schedule.order[row, 0, n], kv_size, kv_seq)
        seen = None
        if masked:
            q_token = jax.tree.map(lambda ref: ref[row_of(ref, batch), 0], q_tokens_ref)
            seen = formula.mask.visible(q_token, kv_block.ids(kv_tokens_ref))
            seen = seen if kv_block.exist is None else seen & kv_block.exist
            kv_block = kv_block._replace(exist=seen)  # so that keys that are not seen are not loaded
        x = product(q, kv_block.vectors(k_ref, kv_head))
        x = capped(formula, jnp.where(jnp.abs(x) == jnp.inf, jnp.nan, x))
        if seen is not None:
            x = jnp.where(seen[None, :], x, -jnp.inf)
        new_top = jnp.maximum(top, to_log2(formula) * x.max(axis=1))
        weights = exp2(x, to_log2(formula), less=new_top[:, None])
        fade = jnp.exp2(top - new_top)
        total = total * fade + weights.sum(axis=1)
        v = kv_block.vectors(v_ref, kv_head)
        out = [o * fade[:, None] + dot(weights.astype(p.dtype), p) for o, p in zip(out, v, strict=True)]
        return new_top, total, out

    met, splits = schedule.met[row, 0], pl.num_programs(1)
    begin, end = lax.div(met * split, splits), lax.div(met * (split + 1), splits)
    middle = jnp.clip(schedule.full[row, 0], begin, end)
    zeros = [jnp.zeros((rows, piece.size), jnp.float32) for piece in pieces(v_ref.shape[3])]
    state = jnp.full(rows, LOWEST, jnp.float32), jnp.zeros(rows, jnp.float32), zeros
    state = lax.fori_loop(begin, middle, functools.partial(step, False), state)
    top, total, out = lax.fori_loop(middle, end, functools.partial(step, True), state)

    # A value that is not finite makes its feature of the sum not finite; this spreads NaN to all features.
    total += 0 * functools.reduce(jnp.add, [o.sum(axis=1) for o in out])
    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    for piece, o in zip(pieces(v_ref.shape[3]), out, strict=True):
        store(out_ref.at[batch, split, these, piece], o / total[:, None], column)
    store(lse_ref.at[batch, split, these], jnp.where(nothing, LOWEST, math.log(2) * (top + jnp.log2(total))), exist)
