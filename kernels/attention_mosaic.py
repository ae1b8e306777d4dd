"""EXPERIMENTAL: FlashAttention (arXiv:2307.08691, arXiv:2407.08608) for Hopper GPUs, in Pallas Mosaic GPU.

Compiled for an H200, and never yet run on one: no speed is known. What is known of its numbers comes from JAX's
interpreter of such kernels, on a CPU, where products are done at once: so not that no register or block in shared
memory is reused while a product still reads it.

Every block of threads has three warpgroups. One only copies blocks from global to shared memory, through rings of
slots (`Ring`), and leaves its registers to the other two, which multiply. Which blocks these are is listed beforehand,
by XLA, from the mask: first those that are seen in full, then those where each position has to be looked at.

Forward, each of the two has 64 queries and goes through the blocks of keys. They take turns: one multiplies while the
other one is at its softmax. Backward there are two kernels. That for dq has the same form. In that for dk and dv the
two share one block of keys: the first computes the weights, hands them over through shared memory and sums up dv, the
second one dk. So each does two of the four products and holds only one of the two sums, which at 256 features fills
half of its registers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int, Int8

from kernels import blocks, flash
from kernels.device import device
from kernels.flash import Formula
from kernels.masks import FULL, SKIP, Mask, Segments, Spans, Tokens, block_classes
from kernels.reference import LOWEST


ROWS = 64  # of a product of one warpgroup, and of what it does not split
WIDTHS = (64, 128, 192, 256)  # of heads, for which there are sizes of blocks
COPIER = 2  # the warpgroup after the two that multiply
LOG2_E = math.log2(math.e)


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    **_: object,
) -> str | None:
    """Why this implementation cannot take these arguments of `attention`, or None if it can."""
    multiple = 128
    reasons = {
        "it takes bfloat16 and float16, not {q.dtype}": q.dtype not in (jnp.bfloat16, jnp.float16),
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


@functools.partial(jax.jit, static_argnames=("scale", "mask", "softcap"))  # outside jit too, compile once
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
    """`kernels.attention`, in Mosaic GPU."""
    formula = Formula(scale, mask, softcap)
    return flash.attention(flash.Flash(forward, backward), formula, q, k, v, sinks, q_tokens, kv_tokens)


class Schedule(NamedTuple):
    """For each block of one side, the blocks of the other that it meets: first those that all of it sees in full."""

    order: Int[Array, "blocks others"]
    full: Int[Array, " blocks"]  # how many these are
    met: Int[Array, " blocks"]  # and how many with those that have to be masked

    @classmethod
    def of(cls, classes: Int8[Array, "blocks others"]) -> "Schedule":
        order = jnp.argsort(classes, axis=1, descending=True).astype(jnp.int32)
        count = lambda chosen: chosen.sum(axis=1, dtype=jnp.int32)
        return cls(order, count(classes == FULL), count(classes != SKIP))


class Ring(NamedTuple):
    """Slots in shared memory that one warpgroup fills by copies and others read: step n uses slot n % slots of each.

    There are two barriers for each slot. `ready` completes when all copies into it have arrived: each buffer's counts
    as one arrival. `free` completes when each reader has arrived, once for each step, after it is done with the slot.
    The copier waits for it before it fills the slot again, so from the second round on. In every other wait or arrival
    step n is the n // slots-th of its slot: none is skipped, so no phase is missed.
    """

    buffers: tuple[Any, ...]
    ready: Any
    free: Any

    @classmethod
    def of(cls, slots: int, readers: int, *blocks: tuple[tuple[int, ...], Any]) -> "Ring":
        """The types to allocate, for blocks of these shapes and dtypes."""
        buffers = tuple(plgpu.SMEM((slots, *shape), dtype) for shape, dtype in blocks)
        ready = plgpu.Barrier(num_arrivals=len(blocks), num_barriers=slots)
        return cls(buffers, ready, plgpu.Barrier(num_arrivals=readers, num_barriers=slots))

    def _slot(self, n: Array) -> Array:
        return lax.rem(n, jnp.int32(self.buffers[0].shape[0]))

    def fill(self, n: Array, *sources: Any) -> None:
        slot = self._slot(n)
        pl.when(n >= self.buffers[0].shape[0])(lambda: plgpu.barrier_wait(self.free.at[slot]))
        for source, buffer in zip(sources, self.buffers, strict=True):
            plgpu.copy_gmem_to_smem(source, buffer.at[slot], self.ready.at[slot])

    def take(self, n: Array) -> list[Any]:
        """Waits for step n's blocks."""
        slot = self._slot(n)
        plgpu.barrier_wait(self.ready.at[slot])
        return [buffer.at[slot] for buffer in self.buffers]

    def release(self, n: Array) -> None:
        """Ends this reader's use of step n's slot. There is no step before 0."""
        plgpu.barrier_arrive(self.free.at[self._slot(n)], predicate=n >= 0)


def forward(
    formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
    """`flash.Flash.forward`, in float32."""
    (batch, seq, heads, dim), v_dim = q.shape, v.shape[3]
    size = _sizes("forward", q, v)
    schedule = Schedule.of(block_classes(formula.mask, q_tokens, kv_tokens, 2 * ROWS, size["kv"])[0])
    ring = functools.partial(Ring.of, size["slots"], 2)
    return _launch(
        functools.partial(_forward_kernel, formula),
        *(q, k, v, schedule),
        name="attention_forward",
        grid=(heads, seq // (2 * ROWS), batch),
        results=(_result((batch, seq, heads, v_dim)), _result((batch, heads, seq))),
        scratch=dict(
            q_smem=plgpu.SMEM((2, ROWS, dim), q.dtype),
            q_ready=plgpu.Barrier(num_barriers=2),
            keys=ring(((size["kv"], dim), k.dtype)),
            values=ring(((size["kv"], v_dim), v.dtype)),
            turn=plgpu.Barrier(num_barriers=2),
        ),
        cost=_cost(q, k, v, products=dim + v_dim),
    )


def _forward_kernel(
    formula: Formula,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    schedule: Schedule,
    out_ref: Any,
    lse_ref: Any,
    *,
    q_smem: Any,
    q_ready: Any,
    keys: Ring,
    values: Ring,
    turn: Any,
) -> None:
    head, i, batch, me = _last_first("head"), _last_first("block"), lax.axis_index("batch"), lax.axis_index("warpgroup")
    kv_head, kv_size = _kv_head(head, q_ref, k_ref), keys.buffers[0].shape[1]
    to_log2 = _to_log2(formula)

    @_warpgroup(me == COPIER, registers=24)
    def _() -> None:
        @pl.loop(0, schedule.met[i])
        def _(n: Array) -> None:
            block = (batch, pl.ds(schedule.order[i, n] * kv_size, kv_size), kv_head)
            keys.fill(n, k_ref.at[block])
            values.fill(n, v_ref.at[block])

    @_warpgroup(me != COPIER, registers=240)
    def _() -> None:
        start = (2 * i + me) * ROWS
        queries = pl.ds(start, ROWS)
        seen = lambda n: _seen(formula, (ROWS, kv_size), start, schedule.order[i, n] * kv_size)
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_smem.at[me], q_ready.at[me])
        plgpu.barrier_wait(q_ready.at[me])

        # Whose turn it is multiplies: waits at turn[me], and passes on by an arrival at turn[1 - me]. Warpgroup 1
        # grants the first turn; from then on they alternate, since both take as many steps. So of each barrier no
        # arrival comes before the one before it was waited for, and what is left is the last, which 0 waits for.
        pl.when(me == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        plgpu.barrier_wait(turn.at[me])

        def loop(out: Any) -> tuple[Array, Array, Array]:
            def step(n: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                top, total = state
                (k,) = keys.take(n)

                x = _product(q_smem.at[me], k.T, lambda: plgpu.barrier_arrive(turn.at[1 - me]))
                x = _capped(formula, x)
                values.release(n - 1)
                keys.release(n)
                x = _masked(n < schedule.full[i], x, -jnp.inf, lambda: seen(n))
                new_top = jnp.maximum(top, to_log2 * x.max(axis=1))
                weights = jnp.exp2(to_log2 * x - _along(new_top, x.shape, 0))
                fade = jnp.exp2(top - new_top)
                total = total * fade + weights.sum(axis=1)
                out[...] = out[...] * _along(fade, out.shape, 0)
                weights = weights.astype(v_ref.dtype)
                (v,) = values.take(n)
                plgpu.barrier_wait(turn.at[me])
                plgpu.wgmma(out, weights, v)  # goes on while the next step's logits are issued
                return new_top, total

            row = lambda value: plgpu.layout_cast(jnp.full(ROWS, value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            top, total = lax.fori_loop(0, schedule.met[i], step, (row(LOWEST), row(0)))
            return top, total, out[...]

        top, total, out = pl.run_scoped(loop, plgpu.ACC((ROWS, v_ref.shape[3])))
        plgpu.barrier_arrive(turn.at[1 - me])
        pl.when(me == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

        nothing = total == 0
        total = jnp.where(nothing, 1.0, total)
        _store(out_ref.at[batch, queries, head], out / _along(total, out.shape, 0))
        _store(lse_ref.at[batch, head, queries], jnp.where(nothing, LOWEST, (top + jnp.log2(total)) / LOG2_E))


def backward(
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    lse: Float[Array, "batch heads seq"],
    delta: Float[Array, "batch heads seq"],
    d_out: Float[Array, "batch seq heads v_dim"],
) -> tuple[Array, Array, Array]:
    """`flash.Flash.backward`, in float32."""
    operands = formula, q, k, v, d_out.astype(q.dtype), LOG2_E * lse, delta, q_tokens, kv_tokens
    return _dq(*operands), *_dkv(*operands)


def _dkv(
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    lse: Array,
    delta: Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> tuple[Array, Array]:
    (batch, _, _, dim), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    size = _sizes("dkv", q, v)
    # With a softcap two blocks of logits are in registers at a time, not one.
    q_size = size["q"] if formula.softcap is None else min(size["q"], ROWS)
    classes = block_classes(formula.mask, q_tokens, kv_tokens, q_size, size["kv"])[0]
    ring = functools.partial(Ring.of, size["slots"], 2)
    return _launch(
        functools.partial(_dkv_kernel, formula),
        *(q, k, v, d_out, lse, delta, Schedule.of(classes.T)),
        name="attention_dkv",
        grid=(kv_heads, kv_seq // size["kv"], batch),
        results=(_result(k.shape), _result(v.shape)),
        scratch=dict(
            k_smem=plgpu.SMEM((size["kv"], dim), k.dtype),
            v_smem=plgpu.SMEM((size["kv"], v_dim), v.dtype),
            kv_ready=plgpu.Barrier(num_arrivals=2),
            queries=ring(((q_size, dim), q.dtype), ((q_size,), lse.dtype)),
            gradients=ring(((q_size, v_dim), q.dtype), ((q_size,), delta.dtype)),
            weights=plgpu.SMEM((size["kv"], q_size), jnp.float32),
            weights_ready=plgpu.Barrier(),
            weights_free=plgpu.Barrier(),
        ),
        cost=_cost(q, k, v, products=2 * (dim + v_dim)),
    )


def _dkv_kernel(
    formula: Formula,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    schedule: Schedule,
    dk_ref: Any,
    dv_ref: Any,
    *,
    k_smem: Any,
    v_smem: Any,
    kv_ready: Any,
    queries: Ring,
    gradients: Ring,
    weights: Any,
    weights_ready: Any,
    weights_free: Any,
) -> None:
    """Its logits are [keys, queries]: so the weights are where Hopper wants a product's left side, in registers."""
    kv_head, j, batch, me = (lax.axis_index(name) for name in ("head", "block", "batch", "warpgroup"))
    group = q_ref.shape[2] // k_ref.shape[2]
    q_size, (kv_size, _) = queries.buffers[0].shape[1], k_smem.shape
    full, met = group * schedule.full[j], group * schedule.met[j]
    keys = (batch, pl.ds(j * kv_size, kv_size), kv_head)
    q_start = lambda n: schedule.order[j, lax.div(n, jnp.int32(group))] * q_size

    def seen(n: Array) -> Array:
        shape = (q_size, kv_size)
        return _seen(formula, weights.shape, q_start(n), j * kv_size, queries_along=1)

    @_warpgroup(me == COPIER, registers=24)
    def _() -> None:
        plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem, kv_ready)
        plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem, kv_ready)

        @pl.loop(0, met)
        def _(n: Array) -> None:
            head, block = kv_head * group + lax.rem(n, jnp.int32(group)), pl.ds(q_start(n), q_size)
            queries.fill(n, q_ref.at[batch, block, head], lse_ref.at[batch, head, block])
            gradients.fill(n, d_out_ref.at[batch, block, head], delta_ref.at[batch, head, block])

    @_warpgroup(me == 0, registers=240)
    def _() -> None:
        plgpu.barrier_wait(kv_ready)

        def loop(dv: Any) -> Array:
            @pl.loop(0, met)
            def _(n: Array) -> None:
                q, lse = queries.take(n)

                x = _capped(formula, _product(k_smem, q.T))
                lse = plgpu.load(lse, layout=plgpu.Layout.WGMMA.reduce(0))
                queries.release(n)
                values = jnp.exp2(_to_log2(formula) * x - _along(lse, x.shape, 1))
                values = _masked(n < full, values, 0, lambda: seen(n))
                handed = values if formula.softcap is None else values * (1 - x * x)
                values = values.astype(q_ref.dtype)
                pl.when(n > 0)(lambda: plgpu.barrier_wait(weights_free))
                weights[...] = handed
                plgpu.barrier_arrive(weights_ready)
                d_out, _ = gradients.take(n)
                plgpu.wgmma(dv, values, d_out)
                plgpu.wgmma_wait(0)
                gradients.release(n)

            return dv[...]

        _store(dv_ref.at[keys], pl.run_scoped(loop, plgpu.ACC((kv_size, v_ref.shape[3]))))

    @_warpgroup(me == 1, registers=240)
    def _() -> None:
        plgpu.barrier_wait(kv_ready)

        def loop(dk: Any) -> Array:
            @pl.loop(0, met)
            def _(n: Array) -> None:
                d_out, delta = gradients.take(n)

                d_weights = _product(v_smem, d_out.T)
                delta = plgpu.load(delta, layout=plgpu.Layout.WGMMA.reduce(0))
                gradients.release(n)
                plgpu.barrier_wait(weights_ready)
                d_x = plgpu.load(weights, layout=plgpu.Layout.WGMMA) * (d_weights - _along(delta, d_weights.shape, 1))
                plgpu.barrier_arrive(weights_free)
                d_x = _masked(n < full, d_x, 0, lambda: seen(n))
                d_x = d_x.astype(q_ref.dtype)
                q, _ = queries.take(n)
                plgpu.wgmma(dk, d_x, q)
                plgpu.wgmma_wait(0)
                queries.release(n)

            return dk[...]

        _store(dk_ref.at[keys], formula.scale * pl.run_scoped(loop, plgpu.ACC((kv_size, q_ref.shape[3]))))


def _dq(
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    d_out: Array,
    lse: Array,
    delta: Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Array:
    (batch, seq, heads, dim), v_dim = q.shape, v.shape[3]
    size = _sizes("dq", q, v)
    classes = block_classes(formula.mask, q_tokens, kv_tokens, 2 * ROWS, size["kv"])[0]
    return _launch(
        functools.partial(_dq_kernel, formula),
        *(q, k, v, d_out, lse, delta, Schedule.of(classes)),
        name="attention_dq",
        grid=(heads, seq // (2 * ROWS), batch),
        results=_result(q.shape),
        scratch=dict(
            q_smem=plgpu.SMEM((2, ROWS, dim), q.dtype),
            d_out_smem=plgpu.SMEM((2, ROWS, v_dim), q.dtype),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            keys=Ring.of(size["key_slots"], 2, ((size["kv"], dim), k.dtype)),
            values=Ring.of(size["value_slots"], 2, ((size["kv"], v_dim), v.dtype)),
        ),
        cost=_cost(q, k, v, products=2 * dim + v_dim),
    )


def _dq_kernel(
    formula: Formula,
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    d_out_ref: Any,
    lse_ref: Any,
    delta_ref: Any,
    schedule: Schedule,
    dq_ref: Any,
    *,
    q_smem: Any,
    d_out_smem: Any,
    ready: Any,
    keys: Ring,
    values: Ring,
) -> None:
    head, i, batch, me = _last_first("head"), _last_first("block"), lax.axis_index("batch"), lax.axis_index("warpgroup")
    kv_head, kv_size = _kv_head(head, q_ref, k_ref), keys.buffers[0].shape[1]

    @_warpgroup(me == COPIER, registers=24)
    def _() -> None:
        @pl.loop(0, schedule.met[i])
        def _(n: Array) -> None:
            block = (batch, pl.ds(schedule.order[i, n] * kv_size, kv_size), kv_head)
            keys.fill(n, k_ref.at[block])
            values.fill(n, v_ref.at[block])

    @_warpgroup(me != COPIER, registers=240)
    def _() -> None:
        start = (2 * i + me) * ROWS
        queries = pl.ds(start, ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_smem.at[me], ready.at[me])
        plgpu.copy_gmem_to_smem(d_out_ref.at[batch, queries, head], d_out_smem.at[me], ready.at[me])
        number = lambda ref: plgpu.load(
            ref.at[batch, head, queries], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False
        )
        lse, delta = number(lse_ref), number(delta_ref)
        plgpu.barrier_wait(ready.at[me])

        def seen(n, i, me):
            return _seen(formula, (ROWS, kv_size), (2 * i + me) * ROWS, schedule.order[i, n] * kv_size)

        def loop(dq: Any) -> Array:
            @pl.loop(0, schedule.met[i])
            def _(n: Array) -> None:
                (k,) = keys.take(n)

                row, mine = lax.optimization_barrier((i, me))
                x = _capped(formula, _product(q_smem.at[mine], k.T))
                weights = jnp.exp2(_to_log2(formula) * x - _along(lse, x.shape, 0))
                if formula.softcap is not None:
                    weights *= 1 - x * x
                (v,) = values.take(n)
                d_weights = _product(d_out_smem.at[mine], v.T)
                values.release(n)
                d_x = weights * (d_weights - _along(delta, x.shape, 0))
                d_x = _masked(n < schedule.full[i], d_x, 0, lambda: seen(n, row, mine))
                d_x = d_x.astype(q_ref.dtype)
                plgpu.wgmma(dq, d_x, k)
                plgpu.wgmma_wait(0)
                keys.release(n)

            return dq[...]

        dq = formula.scale * pl.run_scoped(loop, plgpu.ACC((ROWS, q_ref.shape[3])))
        row, mine = lax.optimization_barrier((i, me))
        _store(dq_ref.at[batch, pl.ds((2 * row + mine) * ROWS, ROWS), head], dq)


def _launch(
    kernel: Callable[..., None],
    *operands: Any,
    name: str,
    grid: tuple[int, int, int],
    results: Any,
    scratch: dict[str, Any],
    cost: pl.CostEstimate,
) -> Any:
    return plgpu.kernel(
        kernel,
        out_type=results,
        scratch_types=scratch,
        grid=grid,
        grid_names=("head", "block", "batch"),  # the first runs fastest
        num_threads=3,
        thread_name="warpgroup",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
        cost_estimate=cost,
    )(*operands)


def _warpgroup(condition: Array, registers: int) -> Callable[[Callable[[], None]], None]:
    """Runs the function in warpgroups for which the condition holds, with so many registers for each thread."""

    def run(function: Callable[[], None]) -> None:
        @pl.when(condition)
        def _() -> None:
            plgpu.set_max_registers(registers, action="increase" if registers > 168 else "decrease")
            function()

    return run


def _product(x: Any, y: Any, issued: Callable[[], None] = lambda: None) -> Float[Array, "rows columns"]:
    """x @ y, both in shared memory. `issued` is called while it is under way; then all products are waited for."""

    def product(result: Any) -> Array:
        plgpu.wgmma(result, x, y)
        issued()
        return result[...]

    return pl.run_scoped(product, plgpu.ACC((x.shape[0], y.shape[1])))


def _capped(formula: Formula, product: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """The logits but for a positive factor, which `_to_log2` includes: q @ k, or with a softcap its tanh."""
    if formula.softcap is None:
        return product
    # tanh(z) = 1 - 2 / (exp(2 z) + 1): two special instructions
    return 1 - 2 / (jnp.exp2(product * (2 * LOG2_E * formula.scale / formula.softcap)) + 1)


def _to_log2(formula: Formula) -> float:
    """What turns `_capped` into logits of a softmax in powers of two."""
    return LOG2_E * (formula.scale if formula.softcap is None else formula.softcap)


def _seen(formula: Formula, shape: tuple[int, int], q_start: Array, kv_start: Array, queries_along: int = 0) -> Array:
    """Which pairs of the block see each other."""
    iota = lambda axis: plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=plgpu.Layout.WGMMA)
    kv_start = lax.optimization_barrier(kv_start)
    q, kv = iota(queries_along) + q_start, iota(1 - queries_along) + kv_start
    return formula.mask.visible(Tokens(q), Tokens(kv))


def _masked(whole: Array, x: Float[Array, "rows columns"], other: float, seen: Callable[[], Array]) -> Array:
    """`x`, with `other` where it is not seen, unless the whole block is."""
    return lax.cond(whole, lambda x: x, lambda x: jnp.where(seen(), x, other), x)


def _along(x: Float[Array, " length"], shape: tuple[int, ...], axis: int) -> Float[Array, "rows columns"]:
    return lax.broadcast_in_dim(x, shape, (axis,))


def _kv_head(head: Array, q_ref: Any, k_ref: Any) -> Array:
    return lax.div(head, jnp.int32(q_ref.shape[2] // k_ref.shape[2]))


def _last_first(axis: str) -> Array:
    """The index along an axis of the grid, from its end: under a causal mask the last queries take longest."""
    return lax.axis_size(axis) - 1 - lax.axis_index(axis)


def _store(ref: Any, value: Array) -> None:
    """From registers to global memory: four neighbouring threads write a whole sector of 32 bytes."""
    plgpu.store(ref, value, optimized=False)


def _result(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _sizes(kernel: str, q: Array, v: Array) -> dict[str, int]:
    return blocks.sizes("attention_mosaic", kernel, q.dtype, f"d{max(q.shape[3], v.shape[3])}")


def _cost(q: Array, k: Array, v: Array, products: int) -> pl.CostEstimate:
    """Of so many multiplications for each query and key, if all see all."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    return pl.CostEstimate(
        flops=2 * pairs * products,
        transcendentals=pairs,
        bytes_accessed=(2 * q.size + k.size + v.size) * q.dtype.itemsize,
    )
