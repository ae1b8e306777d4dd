"""EXPERIMENTAL: FlashAttention for Hopper GPUs (arXiv:2307.08691, arXiv:2407.08608), in Pallas Mosaic GPU.

It compiles for an H200, and has never yet run on one: no speed is known. Its numbers are tested in JAX's interpreter of
such kernels, on a CPU (tests/kernels/test_mosaic.py). The interpreter completes every product at once. So only
reasoning shows that no product's registers or shared memory are overwritten while the product still reads them.

A program has three warpgroups: one copies blocks to shared memory, through ring buffers, and the other two multiply.
XLA lists beforehand, from the mask, the blocks that a program has to visit: first those that are seen in full, then
those that have to be masked position by position. Packed documents need a causal mask, and tokens that are neighbours.
XLA lists the first token of each query's document, or the last token of each key's. Blocks that are masked then take
one more comparison.

In the forward kernel, each of the two has 64 queries, and both go through the same blocks of keys. They take turns: one
multiplies while the other computes its softmax. The backward pass has two kernels. The one for dq has the same form,
without turns. In the one for dk and dv, both warpgroups have the same block of keys. One computes the weights, passes
them on through shared memory, and sums up dv; the other sums up dk. So each does two of the four products, and holds
one of the two sums, which at 256 features fills half of its registers.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float, Int, Shaped

from kernels import dispatch
from kernels.attention import shared
from kernels.attention.reference import LOWEST
from kernels.attention.shared import Formula
from kernels.backends import blocks, mosaic
from kernels.backends.mosaic import ROWS, Ring
from kernels.masks import And, Causal, Mask, Schedule, Segments, Spans, block_classes
from kernels.tokens import Tokens, each_in_one_piece, first_of_document, last_of_document


PLATFORMS = ()  # chosen only by name, until a GPU has shown that this is faster than "triton"
RANK = 1

LOG2_E = math.log2(math.e)
WIDEST = 256  # most features of a head
LENGTH = 128  # every block size divides it


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None = None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    **_: object,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `attention`, or None if it can."""
    seq, kv_seq, dim, v_dim = q.shape[1], k.shape[1], q.shape[3], v.shape[3]
    if Spans in mask or _of_indices(mask) is None:
        return f"it has no spans, and segments only with a causal mask, and the mask is {mask}"
    if not (q_tokens.in_order and kv_tokens.in_order):
        return "it takes positions that are indices"
    if dim % ROWS or v_dim % ROWS or max(dim, v_dim) > WIDEST:
        return f"its heads have multiples of {ROWS} features, {WIDEST} at most, and these {dim} and {v_dim}"
    if Segments in mask and seq != kv_seq:
        return f"it needs as many queries as keys in documents, and these are {seq} and {kv_seq}"
    if Segments in mask and softcap is not None and max(dim, v_dim) > WIDEST - ROWS:
        return f"its registers do not hold documents beside a softcap for {max(dim, v_dim)} features"
    if seq % LENGTH or kv_seq % LENGTH:
        return f"its sequences have multiples of {LENGTH} tokens, and these {seq} and {kv_seq}"
    if not q.size or not v.size:
        return "it needs a query, a key and a feature at least"
    if scale <= 0:
        return f"it needs a scale above 0, and this is {scale}"
    return mosaic.refusal(q.dtype)


@functools.partial(jax.jit, static_argnames=("scale", "mask", "softcap"))  # so that calls outside jit compile once, too
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
    """Computes `kernels.attention` in Mosaic GPU."""
    formula = Formula(scale, mask, softcap)
    kernels = shared.Flash(forward, backward, base_2=True)
    if q_tokens.segments is not None:
        other = dispatch.first(
            "attention", ("triton", "xla"), q, k, v, scale=scale, mask=mask, softcap=softcap, sinks=sinks,
            q_tokens=q_tokens, kv_tokens=kv_tokens,
        ).FLASH  # fmt: skip
        kernels = shared.where(lambda q, k, v, *tokens: each_in_one_piece(*tokens[:2]), kernels, other)
    return shared.attention(kernels, formula, q, k, v, sinks, q_tokens, kv_tokens)


def forward(
    formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
    """Implements `shared.Flash.forward`, with results in float32."""
    (batch, seq, heads, dim), v_dim = q.shape, v.shape[3]
    size = _sizes("forward", q, v)
    schedule = Schedule.of(block_classes(formula.mask, q_tokens, kv_tokens, 2 * ROWS, size["kv"]))
    ring = functools.partial(Ring.of, size["slots"])
    return mosaic.launch(
        functools.partial(_forward_kernel, formula),
        *(q, k, v, schedule, _first(q_tokens)),
        name="attention_forward",
        grid={"head": heads, "block": seq // (2 * ROWS), "batch": batch},
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
    first_ref: Any,
    out_ref: Any,
    lse_ref: Any,
    *,
    q_smem: Any,
    q_ready: Any,
    keys: Ring,
    values: Ring,
    turn: Any,
) -> None:
    head, i, batch, me = _place()
    schedule = _of_row(schedule, batch)
    kv_head, kv_size, to_log2 = _kv_head(head, q_ref, k_ref), keys.buffers[0].shape[1], _to_log2(formula)

    @mosaic.copying
    def _() -> None:
        _copy_keys_and_values(schedule, i, (batch, kv_head), k_ref, v_ref, keys, values)

    @mosaic.multiplying
    def _() -> None:
        start = (2 * i + me) * ROWS
        queries = pl.ds(start, ROWS)
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_smem.at[me], q_ready.at[me])
        plgpu.barrier_wait(q_ready.at[me])

        # Turns: a warpgroup waits at turn[me] for its turn, and passes it on by arriving at the other's barrier.
        # Warpgroup 1 grants the first turn, and 0 waits for the last. Both take the same number of steps, so each
        # barrier has as many waits as arrivals; and they alternate, so no second arrival comes before the first's wait.
        pl.when(me == 1)(lambda: plgpu.barrier_arrive(turn.at[0]))
        plgpu.barrier_wait(turn.at[me])
        pass_on = lambda: plgpu.barrier_arrive(turn.at[1 - me])

        def loop(out: Any) -> tuple[Array, Array, Array]:
            def step(n: Array, state: tuple[Array, Array]) -> tuple[Array, Array]:
                top, total = state
                (k,) = keys.take(n)
                # This warpgroup's turn began at the end of the previous step, whose last product may still run.
                # Products end in order, so that one has ended when this one has. Only then release its values.
                x = _capped(formula, _product(q_smem.at[me], k.T, meanwhile=pass_on))
                values.release(n - 1)
                keys.release(n)
                x = _masked(
                    formula, n < schedule.full[i], x, -jnp.inf, start, schedule.order[i, n] * kv_size, first_ref
                )
                new_top = jnp.maximum(top, to_log2 * x.max(axis=1))
                weights = jnp.exp2(to_log2 * x - _along(new_top, x.shape, 0))
                fade = jnp.exp2(top - new_top)
                total = total * fade + weights.sum(axis=1)
                out[...] = out[...] * _along(fade, out.shape, 0)
                weights = weights.astype(v_ref.dtype)
                (v,) = values.take(n)
                plgpu.barrier_wait(turn.at[me])
                plgpu.wgmma(out, weights, v)
                return new_top, total

            row = lambda value: plgpu.layout_cast(jnp.full(ROWS, value, jnp.float32), plgpu.Layout.WGMMA.reduce(1))
            top, total = lax.fori_loop(0, schedule.met[i], step, (row(LOWEST), row(0)))
            return top, total, out[...]  # waits for the last product

        top, total, out = pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((ROWS, v_ref.shape[3])))
        pass_on()
        pl.when(me == 0)(lambda: plgpu.barrier_wait(turn.at[0]))

        nothing = total == 0
        total = jnp.where(nothing, 1.0, total)
        _store(out_ref.at[batch, queries, head], out / _along(total, out.shape, 0))
        _store(lse_ref.at[batch, head, queries], jnp.where(nothing, LOWEST, top + jnp.log2(total)))


def backward(
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    lse: Float[Array, "batch heads seq"],
    out: Float[Array, "batch seq heads v_dim"],
    d_out: Float[Array, "batch seq heads v_dim"],
) -> tuple[Array, Array, Array]:
    """Implements `shared.Flash.backward`, with results in float32."""
    delta = shared.delta_of(out, d_out)
    operands = formula, q, k, v, d_out.astype(q.dtype), lse, delta, q_tokens, kv_tokens
    return dq(*operands), *dkv(*operands)


def dkv(
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
    """Computes the gradients of keys and values."""
    (batch, _, _, dim), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    size = _sizes("dkv", q, v)
    classes = block_classes(formula.mask, q_tokens, kv_tokens, size["q"], size["kv"])
    ring = functools.partial(Ring.of, size["slots"])
    return mosaic.launch(
        functools.partial(_dkv_kernel, formula),
        *(q, k, v, d_out, lse, delta, Schedule.of(classes.swapaxes(1, 2)), _last(q_tokens)),
        name="attention_dkv",
        grid={"head": kv_heads, "block": kv_seq // size["kv"], "batch": batch},
        results=(_result(k.shape), _result(v.shape)),
        scratch=dict(
            k_smem=plgpu.SMEM((size["kv"], dim), k.dtype),
            v_smem=plgpu.SMEM((size["kv"], v_dim), v.dtype),
            kv_ready=plgpu.Barrier(num_arrivals=2),
            queries=ring(((size["q"], dim), q.dtype), ((size["q"],), lse.dtype)),
            gradients=ring(((size["q"], v_dim), q.dtype), ((size["q"],), delta.dtype)),
            weights=_Handover.of(size["kv"], size["q"]),
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
    last_ref: Any,
    dk_ref: Any,
    dv_ref: Any,
    *,
    k_smem: Any,
    v_smem: Any,
    kv_ready: Any,
    queries: Ring,
    gradients: Ring,
    weights: "_Handover",
) -> None:
    """Sums up dk and dv. Logits are [keys, queries], so that weights are the left operands of products.

    On Hopper only the left operand of a product may be in registers.
    """
    kv_head, j, batch = (lax.axis_index(name) for name in ("head", "block", "batch"))
    schedule = _of_row(schedule, batch)
    group, q_size, (kv_size, _) = q_ref.shape[2] // k_ref.shape[2], queries.buffers[0].shape[1], k_smem.shape
    full, steps = group * schedule.full[j], group * schedule.met[j]
    keys = (batch, pl.ds(j * kv_size, kv_size), kv_head)

    def block(n: Array) -> tuple[Array, Array]:
        """Returns the head and the first query of step n."""
        head = kv_head * group + lax.rem(n, jnp.int32(group))
        return head, schedule.order[j, lax.div(n, jnp.int32(group))] * q_size

    def masked(n: Array, x: Array) -> Array:
        return _masked(formula, n < full, x, 0.0, block(n)[1], j * kv_size, last_ref, queries_along=1)

    @mosaic.copying
    def _() -> None:
        # Two arrivals at kv_ready, one for each copy; both other warpgroups wait for it once.
        plgpu.copy_gmem_to_smem(k_ref.at[keys], k_smem, kv_ready)
        plgpu.copy_gmem_to_smem(v_ref.at[keys], v_smem, kv_ready)

        @pl.loop(0, steps)
        def _(n: Array) -> None:
            head, start = block(n)
            rows = pl.ds(start, q_size)
            queries.fill(n, q_ref.at[batch, rows, head], lse_ref.at[batch, head, rows])
            gradients.fill(n, d_out_ref.at[batch, rows, head], delta_ref.at[batch, head, rows])

    @functools.partial(mosaic.multiplying, only=0)
    def _() -> None:
        plgpu.barrier_wait(kv_ready)
        loop = functools.partial(_sum_dv, formula, steps, masked, k_smem, queries, gradients, weights)
        _store(dv_ref.at[keys], pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((kv_size, v_ref.shape[3]))))

    @functools.partial(mosaic.multiplying, only=1)
    def _() -> None:
        plgpu.barrier_wait(kv_ready)
        loop = functools.partial(_sum_dk, steps, masked, v_smem, queries, gradients, weights)
        dk = pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((kv_size, q_ref.shape[3])))
        _store(dk_ref.at[keys], formula.scale * dk)


class _Handover(NamedTuple):
    """A buffer in shared memory, through which warpgroup 0 passes each step's weights on to warpgroup 1.

    In each step warpgroup 0 writes them and arrives at `ready`, for which 1 waits. Then 1 reads them and arrives at
    `free`. From its second step on, 0 waits for that before it writes again. So neither is more than a step ahead.
    """

    buffer: Any
    free: Any
    ready: Any

    @classmethod
    def of(cls, rows: int, columns: int) -> "_Handover":
        """Returns the buffer and barriers to allocate."""
        return cls(plgpu.SMEM((rows, columns), jnp.float32), plgpu.Barrier(), plgpu.Barrier())

    def put(self, n: Array, weights: Float[Array, "rows columns"]) -> None:
        """Writes the weights of step n."""
        pl.when(n > 0)(lambda: plgpu.barrier_wait(self.free))
        self.buffer[...] = weights
        plgpu.barrier_arrive(self.ready)

    def take(self) -> Float[Array, "rows columns"]:
        """Waits for a step's weights, and reads them."""
        plgpu.barrier_wait(self.ready)
        return plgpu.load(self.buffer, layout=plgpu.Layout.WGMMA)

    def release(self) -> None:
        """Ends the use of a step's weights."""
        plgpu.barrier_arrive(self.free)


def _sum_dv(
    formula: Formula,
    steps: Array,
    masked: Callable[[Array, Array], Array],
    k_smem: Any,
    queries: Ring,
    gradients: Ring,
    weights: _Handover,
    dv: Any,
) -> Float[Array, "rows v_dim"]:
    """Computes each step's weights, passes them on, and sums up dv: the work of warpgroup 0 in `_dkv_kernel`."""

    @pl.loop(0, steps)
    def _(n: Array) -> None:
        q, lse = queries.take(n)
        x = _capped(formula, _product(k_smem, q.T))
        lse = plgpu.load(lse, layout=plgpu.Layout.WGMMA.reduce(0))
        queries.release(n)
        values = masked(n, jnp.exp2(_to_log2(formula) * x - _along(lse, x.shape, 1)))
        slopes = values if formula.softcap is None else values * (1 - x * x)
        values = values.astype(k_smem.dtype)
        weights.put(n, slopes)
        d_out, _ = gradients.take(n)
        plgpu.wgmma(dv, values, d_out)
        plgpu.wgmma_wait(0)
        gradients.release(n)

    return dv[...]


def _sum_dk(
    steps: Array,
    masked: Callable[[Array, Array], Array],
    v_smem: Any,
    queries: Ring,
    gradients: Ring,
    weights: _Handover,
    dk: Any,
) -> Float[Array, "rows dim"]:
    """Sums up dk, without the logits' scale, from each step's weights: the work of warpgroup 1 in `_dkv_kernel`."""

    @pl.loop(0, steps)
    def _(n: Array) -> None:
        d_out, delta = gradients.take(n)
        d_x = _product(v_smem, d_out.T)
        delta = plgpu.load(delta, layout=plgpu.Layout.WGMMA.reduce(0))
        gradients.release(n)
        d_x = weights.take() * (d_x - _along(delta, d_x.shape, 1))
        weights.release()
        d_x = masked(n, d_x).astype(v_smem.dtype)
        q, _ = queries.take(n)
        plgpu.wgmma(dk, d_x, q)
        plgpu.wgmma_wait(0)
        queries.release(n)

    return dk[...]


def dq(
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
    """Computes the gradient of queries."""
    (batch, seq, heads, dim), v_dim = q.shape, v.shape[3]
    size = _sizes("dq", q, v)
    classes = block_classes(formula.mask, q_tokens, kv_tokens, 2 * ROWS, size["kv"])
    return mosaic.launch(
        functools.partial(_dq_kernel, formula),
        *(q, k, v, d_out, lse, delta, Schedule.of(classes), _first(q_tokens)),
        name="attention_dq",
        grid={"head": heads, "block": seq // (2 * ROWS), "batch": batch},
        results=_result(q.shape),
        scratch=dict(
            q_smem=plgpu.SMEM((2, ROWS, dim), q.dtype),
            d_out_smem=plgpu.SMEM((2, ROWS, v_dim), q.dtype),
            ready=plgpu.Barrier(num_arrivals=2, num_barriers=2),
            keys=Ring.of(size["key_slots"], ((size["kv"], dim), k.dtype)),
            values=Ring.of(size["value_slots"], ((size["kv"], v_dim), v.dtype)),
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
    first_ref: Any,
    dq_ref: Any,
    *,
    q_smem: Any,
    d_out_smem: Any,
    ready: Any,
    keys: Ring,
    values: Ring,
) -> None:
    head, i, batch, me = _place()
    schedule = _of_row(schedule, batch)
    kv_head, kv_size = _kv_head(head, q_ref, k_ref), keys.buffers[0].shape[1]

    @mosaic.copying
    def _() -> None:
        _copy_keys_and_values(schedule, i, (batch, kv_head), k_ref, v_ref, keys, values)

    @mosaic.multiplying
    def _() -> None:
        start = (2 * i + me) * ROWS
        queries = pl.ds(start, ROWS)
        # Two arrivals at ready[me], one for each copy.
        plgpu.copy_gmem_to_smem(q_ref.at[batch, queries, head], q_smem.at[me], ready.at[me])
        plgpu.copy_gmem_to_smem(d_out_ref.at[batch, queries, head], d_out_smem.at[me], ready.at[me])
        plgpu.barrier_wait(ready.at[me])
        lse, delta = (
            plgpu.load(ref.at[batch, head, queries], layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            for ref in (lse_ref, delta_ref)
        )

        def loop(dq: Any) -> Array:
            @pl.loop(0, schedule.met[i])
            def _(n: Array) -> None:
                (k,) = keys.take(n)
                mine = _anew(me)
                x = _capped(formula, _product(q_smem.at[mine], k.T))
                weights = jnp.exp2(_to_log2(formula) * x - _along(lse, x.shape, 0))
                if formula.softcap is not None:
                    weights *= 1 - x * x
                (v,) = values.take(n)
                d_x = _product(d_out_smem.at[mine], v.T)
                values.release(n)
                d_x = weights * (d_x - _along(delta, d_x.shape, 0))
                start = (2 * _anew(i) + mine) * ROWS
                d_x = _masked(formula, n < schedule.full[i], d_x, 0.0, start, schedule.order[i, n] * kv_size, first_ref)
                plgpu.wgmma(dq, d_x.astype(q_ref.dtype), k)
                plgpu.wgmma_wait(0)
                keys.release(n)

            return dq[...]

        dq = formula.scale * pl.run_scoped(loop, plgpu.WGMMAAccumulatorRef((ROWS, q_ref.shape[3])))
        _store(dq_ref.at[batch, pl.ds((2 * _anew(i) + _anew(me)) * ROWS, ROWS), head], dq)


def _copy_keys_and_values(
    schedule: Schedule, i: Array, place: tuple[Array, Array], k_ref: Any, v_ref: Any, keys: Ring, values: Ring
) -> None:
    (batch, kv_head), size = place, keys.buffers[0].shape[1]

    @pl.loop(0, schedule.met[i])
    def _(n: Array) -> None:
        block = (batch, pl.ds(schedule.order[i, n] * size, size), kv_head)
        keys.fill(n, k_ref.at[block])
        values.fill(n, v_ref.at[block])


def _product(x: Any, y: Any, meanwhile: Callable[[], None] = lambda: None) -> Float[Array, "rows columns"]:
    """Computes x @ y, both in shared memory. Calls `meanwhile` while the product runs, then waits for all products."""

    def product(result: Any) -> Array:
        plgpu.wgmma(result, x, y)
        meanwhile()
        return result[...]

    return pl.run_scoped(product, plgpu.WGMMAAccumulatorRef((x.shape[0], y.shape[1])))


def _capped(formula: Formula, product: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Returns the logits without their positive factor, which is in `_to_log2`: q @ k, or with a softcap its tanh."""
    if formula.softcap is None:
        return product
    # tanh(z) = 1 - 2 / (exp(2 z) + 1): two special instructions
    return 1 - 2 / (jnp.exp2(product * (2 * LOG2_E * formula.scale / formula.softcap)) + 1)


def _to_log2(formula: Formula) -> float:
    """Returns the factor that turns `_capped` into logits of a softmax in powers of two."""
    return LOG2_E * (formula.scale if formula.softcap is None else formula.softcap)


def _masked(
    formula: Formula,
    whole: Bool[Array, ""],
    x: Float[Array, "rows columns"],
    other: float,
    q_start: Array,
    kv_start: Array,
    ends: Any,
    queries_along: int = 0,
) -> Float[Array, "rows columns"]:
    """Replaces `x` by `other` where a query does not see a key. Does nothing if the `whole` block is seen.

    `ends` is None without documents. If queries are rows, it holds the first token of each query's document; if keys
    are rows, the last token of each key's document.
    """

    def mask(x: Array) -> Array:
        index = lambda axis: plgpu.broadcasted_iota(jnp.int32, x.shape, axis, layout=plgpu.Layout.WGMMA)
        q, kv = index(queries_along) + q_start, index(1 - queries_along) + _anew(kv_start)
        seen = _of_indices(formula.mask).visible(Tokens(q), Tokens(kv))
        if ends is not None:
            rows = pl.ds(_anew(kv_start if queries_along else q_start), x.shape[0])
            rows = ends.at[0 if ends.shape[0] == 1 else lax.axis_index("batch"), rows]
            end = _along(plgpu.load(rows, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False), x.shape, 0)
            seen &= q <= end if queries_along else end <= kv
        return jnp.where(seen, x, other)

    return lax.cond(whole, lambda x: x, mask, x)


def _of_indices(mask: Mask) -> Any:
    """Returns the mask without its segments, for indices; None if the segments need more than one comparison."""

    def causal(mask: Mask) -> bool:
        return mask == Causal() or (isinstance(mask, And) and (causal(mask.a) or causal(mask.b)))

    match mask:
        case And(inner, Segments()) if Segments not in inner:
            return inner if causal(inner) else None
        case _:
            return None if Segments in mask else mask


def _first(tokens: Tokens) -> Int[Array, "batch seq"] | None:
    return None if tokens.segments is None else first_of_document(tokens.segments)


def _last(tokens: Tokens) -> Int[Array, "batch seq"] | None:
    return None if tokens.segments is None else last_of_document(tokens.segments)


def _of_row(schedule: Any, batch: Array) -> Schedule:
    """Returns the schedule of one row of the batch; the arrays hold one for each row, or one for all."""
    return jax.tree.map(lambda ref: ref.at[0 if ref.shape[0] == 1 else batch], schedule)


def _anew(x: Int[Array, ""]) -> Int[Array, ""]:
    """Returns the same number, and hides from the compiler that it is the same.

    Otherwise the compiler would compute all that depends on the number once, before a loop, and run out of registers.
    """
    return lax.optimization_barrier(x)


def _along(x: Shaped[Array, " length"], shape: tuple[int, ...], axis: int) -> Shaped[Array, "rows columns"]:
    return lax.broadcast_in_dim(x, shape, (axis,))


def _place() -> tuple[Array, Array, Array, Array]:
    """Returns the program's head, its block of queries, its row of the batch, and the warpgroup.

    Blocks count from the last queries, which take longest under a causal mask, and so start first.
    """
    block = lax.axis_size("block") - 1 - lax.axis_index("block")
    return lax.axis_index("head"), block, lax.axis_index("batch"), lax.axis_index("warpgroup")


def _kv_head(head: Array, q_ref: Any, k_ref: Any) -> Array:
    return lax.div(head, jnp.int32(q_ref.shape[2] // k_ref.shape[2]))


def _store(ref: Any, value: Array) -> None:
    """Writes from registers to global memory: four neighbouring threads write a whole sector of 32 bytes."""
    ref[...] = value


def _result(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _sizes(kernel: str, q: Array, v: Array) -> dict[str, int]:
    return blocks.sizes(__name__, kernel, q.dtype, f"d{max(q.shape[3], v.shape[3])}")


def _cost(q: Array, k: Array, v: Array, products: int) -> pl.CostEstimate:
    """Estimates the cost of `products` multiplications for each query and key, as if every query saw every key."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    return pl.CostEstimate(
        flops=2 * pairs * products,
        transcendentals=pairs,
        bytes_accessed=(2 * q.size + k.size + v.size) * q.dtype.itemsize,
    )
