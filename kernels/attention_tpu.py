"""FlashAttention-2 (arXiv:2307.08691) for TPUs, forward and backward, in Pallas.

A step of a kernel takes a block of keys and a block of queries, with all the heads that share those keys. The mask says
beforehand which pairs of blocks anybody sees; XLA lists these, the grid has as many steps as the list, and what nobody
sees is neither loaded nor visited. Where all see all, the mask is not looked at.

Within a step the queries come in strips, each of one head. Logits lie as [keys, queries]: whatever belongs to a query
(its greatest logit, its position) is then a row, which a TPU spreads over a matrix for nothing, while a column costs the
scarce cross-lane unit. The output is [features, queries] until it is done. The values bring a row of ones with them, so
that the sum of the weights is one more row of the output. The softmax is in powers of two.

The matrix units (products) and the vector units (exponentials) work at the same time, on two strips: while the weights
of one are computed from its logits, those of the next are multiplied. Logits wait in VMEM, piece by piece, each in the
place of the one just used up. It also keeps the compiler from holding a block of them in registers, of which there are
64, and a block would take 256.

The gradients have two kernels, one for dq and one for dk and dv. Each holds its sums in VMEM and writes them once; one
kernel for all three would spare two products of seven, but have to add to one of the sums in HBM at every step.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int, Int8

from kernels import blocks, flash
from kernels.device import device, elsewhere
from kernels.flash import Formula
from kernels.masks import FULL, PARTIAL, SKIP, Mask, Tokens, block_classes
from kernels.reference import LOWEST


LOG2_E = math.log2(math.e)
SUBLANES = 8  # rows of a register
FIRST, LAST = 4, 8  # steps of a block; beside SKIP, PARTIAL and FULL in a step's lowest bits
INDEX_BITS = 13  # of a block's index in a step, above these
ONES = 16  # rows of ones below the values: one would do, but rows come by 16 in bfloat16
VMEM = 48 << 20  # bytes that a kernel may take; every TPU has at least 64 MiB
SMEM = 256 << 10  # bytes that the list of steps may take; every TPU has 1 MiB
MOST_HEADS = 64  # that share a key/value head, for VMEM's sake


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    **_: object,
) -> str | None:
    """Why this implementation cannot take these arguments of `attention`, or None if it can."""
    if why := elsewhere("tpu"):
        return why
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 and bfloat16, and q is {q.dtype}"
    if not q.size or not v.size:
        return "it needs a query, a key and a feature at least"
    if q.shape[2] > MOST_HEADS * k.shape[2]:
        return f"at most {MOST_HEADS} query heads may share a key/value head, not {q.shape[2] // k.shape[2]}"
    rows = max(len(q_tokens.positions), len(kv_tokens.positions))
    for kernel in ("forward", "dq", "dkv"):
        cut = Cut.of(kernel, q, k)
        if 4 * rows * cut.q_blocks * cut.kv_blocks > SMEM:
            return f"the list of its blocks does not fit: {rows} rows of {q.shape[1]} queries and {k.shape[1]} keys"
    return None


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
    """`kernels.attention`, in Pallas for TPUs."""
    formula = Formula(scale, mask, softcap)
    return flash.attention(flash.Flash(forward, backward), formula, q, k, v, sinks, q_tokens, kv_tokens)


class Cut(NamedTuple):
    """How a kernel cuts queries and keys into blocks, and brings what belongs to them into an order of blocks.

    All arrays become (batch, kv_heads, blocks, ...), and a kernel is given what follows. Tokens that only fill the last
    block are zeros.
    """

    seq: int
    kv_seq: int
    kv_heads: int
    group: int  # query heads that share a key/value head
    q: int  # tokens in a block of queries
    kv: int  # and in one of keys
    strip: int  # queries at a time, of one head
    piece: int  # keys at a time

    @classmethod
    def of(cls, kernel: str, q: Array, k: Array) -> "Cut":
        (seq, heads, dim), (kv_seq, kv_heads) = q.shape[1:], k.shape[1:3]
        sizes = blocks.sizes("attention_tpu", kernel, q.dtype, f"d{dim}")
        strip, piece, group = sizes["strip"], sizes["piece"], heads // kv_heads
        whole = lambda most, length, unit: max(unit, min(most, -(-length // unit) * unit) // unit * unit)
        q_block = whole(min(sizes["q"], sizes["rows"] // group), seq, strip)
        return cls(seq, kv_seq, kv_heads, group, q_block, whole(sizes["kv"], kv_seq, piece), strip, piece)

    @property
    def q_blocks(self) -> int:
        return -(-self.seq // self.q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_seq // self.kv)

    @property
    def strips(self) -> int:
        return self.group * self.q // self.strip

    def queries(self, x: Float[Array, "batch seq heads dim"]) -> Float[Array, "batch kv_heads blocks strips strip dim"]:
        x = _pad(x, 1, self.q_blocks * self.q)
        x = x.reshape(len(x), self.q_blocks, self.q, self.kv_heads, self.group, -1).transpose(0, 3, 1, 4, 2, 5)
        return x.reshape(*x.shape[:3], self.strips, self.strip, -1)

    def from_queries(
        self, x: Float[Array, "batch kv_heads blocks strips strip dim"]
    ) -> Float[Array, "batch seq heads dim"]:
        x = x.reshape(*x.shape[:3], self.group, self.q, -1).transpose(0, 2, 4, 1, 3, 5)
        return x.reshape(len(x), self.q_blocks * self.q, self.kv_heads * self.group, -1)[:, : self.seq]

    def keys(self, x: Float[Array, "batch kv_seq kv_heads dim"]) -> Float[Array, "batch kv_heads blocks kv dim"]:
        x = _pad(x, 1, self.kv_blocks * self.kv)
        return x.reshape(len(x), self.kv_blocks, self.kv, self.kv_heads, -1).transpose(0, 3, 1, 2, 4)

    def from_keys(self, x: Float[Array, "batch kv_heads blocks kv dim"]) -> Float[Array, "batch kv_seq kv_heads dim"]:
        x = x.transpose(0, 2, 3, 1, 4)
        return x.reshape(len(x), self.kv_blocks * self.kv, self.kv_heads, -1)[:, : self.kv_seq]

    def rows(self, x: Float[Array, "batch heads seq"]) -> Float[Array, "batch kv_heads blocks strips 1 strip"]:
        return self.queries(x.swapaxes(1, 2)[..., None]).swapaxes(4, 5)

    def tokens(self, x: Tokens, block: int, part: int) -> Tokens:
        """Of (batch or 1, tokens), each array as (batch or 1, 1, blocks, parts of a block, 1, part)."""
        cut = lambda x: _pad(x, 1, -(-x.shape[1] // block) * block).reshape(len(x), 1, -1, block // part, 1, part)
        return jax.tree.map(cut, x)


def forward(formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens) -> tuple[Array, Array]:
    """`flash.Flash.forward`, with the output in float32."""
    cut, (dim, v_dim) = Cut.of("forward", q, k), (q.shape[3], v.shape[3])
    ones_below = jnp.pad(cut.keys(v).swapaxes(3, 4), ((0, 0),) * 3 + ((0, ONES), (0, 0)), constant_values=1)
    out, lse = _launch(
        _forward_kernel,
        "forward",
        (formula, cut, q_tokens, kv_tokens),
        q_side=(cut.queries(q),),
        kv_side=(cut.keys(k), ones_below),
        results=[((cut.strips, cut.strip, v_dim), jnp.float32), ((cut.strips, 1, cut.strip), jnp.float32)],
        scratch=[
            ((cut.strips, 1, cut.strip), jnp.float32),
            ((cut.strips, v_dim + ONES, cut.strip), jnp.float32),
            ((SUBLANES, cut.strip), jnp.float32),
            ((cut.kv, cut.strip), jnp.float32),
            ((cut.kv, cut.strip), q.dtype),
        ],
        depth=dim + v_dim,
    )
    return cut.from_queries(out), cut.from_queries(lse.swapaxes(4, 5))[..., 0].swapaxes(1, 2)


def _forward_kernel(
    step: "Step", q: Any, k: Any, v_and_ones: Any, out: Any, lse: Any,
    top: Any, total: Any, peak: Any, logits: Any, weights: Any,
) -> None:  # fmt: skip
    """`top` is each query's greatest logit so far; `peak` is that of the strip ahead, for every eighth key."""
    v_dim = out.shape[2]

    @step.when(FIRST)
    def _() -> None:
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)
        peak[...] = jnp.full_like(peak, LOWEST)

    def multiply(i: Any, keys: Any, masked: Masked) -> None:
        x = masked(_logits(step.formula, k[keys, :], q[i]), i, keys, -jnp.inf)
        logits[keys, :] = x
        peak[...] = jnp.maximum(peak[...], x.reshape(-1, *peak.shape).max(axis=0))

    def begin(i: Any) -> Array:
        before = top[i]
        top[i] = jnp.maximum(before, peak[...].max(axis=0, keepdims=True))
        peak[...] = jnp.full_like(peak, LOWEST)
        return jnp.exp2(before - top[i])

    def weigh(i: Any, keys: Any, masked: Masked) -> None:
        weights[keys, :] = jnp.exp2(logits[keys, :] - top[i]).astype(weights.dtype)

    def add(i: Any, fade: Array) -> None:
        total[i] = total[i] * fade + _dot(v_and_ones[...], weights[...], 1, 0)

    step.for_each_strip(multiply, begin, weigh, add)

    @step.when(LAST)
    def _() -> None:
        def write(i: Any, _: None) -> None:
            weight = total[i, v_dim : v_dim + 1, :]
            out[i] = (total[i, :v_dim, :] / jnp.where(weight == 0, 1, weight)).T
            lse[i] = jnp.where(weight == 0, LOWEST, (top[i] + jnp.log2(weight)) / LOG2_E)

        lax.fori_loop(0, len(out), write, None)


def backward(
    formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens,
    lse: Array, delta: Array, d_out: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """`flash.Flash.backward`, with the gradients in q's dtype."""
    dim, v_dim = q.shape[3], v.shape[3]
    lse = jnp.maximum(lse * LOG2_E, LOWEST)  # in powers of two, and finite, which LOWEST * LOG2_E is not

    cut = Cut.of("dq", q, k)
    (dq,) = _launch(
        _dq_kernel,
        "dq",
        (formula, cut, q_tokens, kv_tokens),
        q_side=(*map(cut.queries, (q, d_out)), *map(cut.rows, (lse, delta))),
        kv_side=(cut.keys(k), cut.keys(v), cut.keys(k).swapaxes(3, 4)),
        results=[((cut.strips, cut.strip, dim), q.dtype)],
        scratch=[
            ((cut.strips, dim, cut.strip), jnp.float32),
            *[((cut.kv, cut.strip), dtype) for dtype in (jnp.float32, jnp.float32, q.dtype)],
        ],
        depth=2 * dim + v_dim,
    )
    dq = cut.from_queries(dq)

    cut = Cut.of("dkv", q, k)
    dk, dv = _launch(
        _dkv_kernel,
        "dkv",
        (formula, cut, q_tokens, kv_tokens),
        q_side=(*map(cut.queries, (q, d_out)), *map(cut.rows, (lse, delta))),
        kv_side=(cut.keys(k), cut.keys(v)),
        results=[((cut.kv, dim), q.dtype), ((cut.kv, v_dim), q.dtype)],
        scratch=[
            ((cut.kv, dim), jnp.float32),
            ((cut.kv, v_dim), jnp.float32),
            *[((cut.kv, cut.strip), dtype) for dtype in (jnp.float32, jnp.float32, q.dtype, q.dtype)],
        ],
        depth=2 * dim + 2 * v_dim,
    )
    return dq, cut.from_keys(dk), cut.from_keys(dv)


def _dq_kernel(
    step: "Step", q: Any, d_out: Any, lse: Any, delta: Any, k: Any, v: Any, k_transposed: Any, dq: Any,
    total: Any, logits: Any, d_weights: Any, d_logits: Any,
) -> None:  # fmt: skip
    @step.when(FIRST)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    def weigh(i: Any, keys: Any, masked: Masked) -> None:
        _, slope = _weights(step.formula, logits[keys, :], d_weights[keys, :], lse[i], delta[i], i, keys, masked)
        d_logits[keys, :] = slope.astype(d_logits.dtype)

    def add(i: Any, _: None) -> None:
        total[i] += _dot(k_transposed[...], d_logits[...], 1, 0)

    step.for_each_strip(_multiplier(step.formula, q, k, v, d_out, logits, d_weights), lambda i: None, weigh, add)

    @step.when(LAST)
    def _() -> None:
        def write(i: Any, _: None) -> None:
            dq[i] = (step.formula.scale * total[i]).T.astype(dq.dtype)

        lax.fori_loop(0, len(dq), write, None)


def _dkv_kernel(
    step: "Step", q: Any, d_out: Any, lse: Any, delta: Any, k: Any, v: Any, dk: Any, dv: Any,
    k_total: Any, v_total: Any, logits: Any, d_weights: Any, weights: Any, d_logits: Any,
) -> None:  # fmt: skip
    @step.when(FIRST)
    def _() -> None:
        k_total[...] = jnp.zeros_like(k_total)
        v_total[...] = jnp.zeros_like(v_total)

    def weigh(i: Any, keys: Any, masked: Masked) -> None:
        w, slope = _weights(step.formula, logits[keys, :], d_weights[keys, :], lse[i], delta[i], i, keys, masked)
        weights[keys, :] = w.astype(weights.dtype)
        d_logits[keys, :] = slope.astype(d_logits.dtype)

    def add(i: Any, _: None) -> None:
        k_total[...] += _dot(d_logits[...], q[i], 1, 0)
        v_total[...] += _dot(weights[...], d_out[i], 1, 0)

    step.for_each_strip(_multiplier(step.formula, q, k, v, d_out, logits, d_weights), lambda i: None, weigh, add)

    @step.when(LAST)
    def _() -> None:
        dk[...] = (step.formula.scale * k_total[...]).astype(dk.dtype)
        dv[...] = v_total[...].astype(dv.dtype)


def _multiplier(formula: Formula, q: Any, k: Any, v: Any, d_out: Any, logits: Any, d_weights: Any) -> Callable:
    """What both kernels of the gradients multiply ahead."""

    def multiply(i: Any, keys: Any, masked: Masked) -> None:
        logits[keys, :] = _logits(formula, k[keys, :], q[i])
        d_weights[keys, :] = _dot(v[keys, :], d_out[i], 1, 1)

    return multiply


def _weights(
    formula: Formula, logits: Array, d_weights: Array, lse: Array, delta: Array, i: Any, keys: Any, masked: "Masked"
) -> tuple[Array, Array]:
    """The weights, and the gradients of the logits, but for the scale."""
    weights = masked(jnp.exp2(logits - lse), i, keys, 0.0)
    slope = weights * (d_weights - delta)
    if formula.softcap is not None:
        slope *= 1 - jnp.square(logits / (formula.softcap * LOG2_E))
    return weights, masked(slope, i, keys, 0.0)


# masked(x, i, keys, fill): `x`, a value for each of these keys and of the queries of strip i, and `fill` where unseen.
Masked = Callable[[Array, Any, Any, float], Array]


class Step(NamedTuple):
    """One step of a kernel: a block of keys, and one of queries with all heads of the group."""

    bits: Int[Array, ""]  # as `_steps` packs them
    formula: Formula
    cut: Cut
    q_tokens: Any  # Refs (parts, 1, strip)
    kv_tokens: Any  # Refs (pieces, 1, piece)
    seen: Any  # a Ref (parts, kv, strip), for 1 where the query sees the key

    def when(self, flag: int) -> Callable:
        return pl.when(self.bits & flag != 0)

    def for_each_strip(self, multiply: Callable, begin: Callable, weigh: Callable, add: Callable) -> None:
        """For each strip i of queries, unless nobody sees anything,

        - `multiply(i, keys, masked)` for each piece of the keys, during the strip before,
        - `state = begin(i)`,
        - `weigh(i, keys, masked)` for each piece, which uses up what `multiply` left for it, and
        - `add(i, state)`.
        """
        cut = self.cut
        pieces = [pl.ds(start, cut.piece) for start in range(0, cut.kv, cut.piece)]

        def all_strips(masked: Masked) -> None:
            def strip(i: Any, is_last: bool) -> None:
                state = begin(i)
                for keys in pieces:
                    weigh(i, keys, masked)
                    if not is_last:
                        multiply(i + 1, keys, masked)
                add(i, state)

            for keys in pieces:
                multiply(0, keys, masked)
            lax.fori_loop(0, cut.strips - 1, lambda i, _: strip(i, is_last=False), None)
            strip(cut.strips - 1, is_last=True)

        @pl.when(self.bits & 3 == FULL)
        def _() -> None:
            all_strips(lambda x, i, keys, fill: x)

        @pl.when(self.bits & 3 == PARTIAL)
        def _() -> None:
            self._look()
            all_strips(lambda x, i, keys, fill: jnp.where(self.seen[i % len(self.seen), keys, :] != 0, x, fill))

    def _look(self) -> None:
        """Fills `seen`, for all heads at once."""
        cut = self.cut
        start = (self.bits >> 4 & (1 << INDEX_BITS) - 1) * cut.kv

        def part(i: Any, _: None) -> None:
            def piece(j: Any, _: None) -> None:
                q = jax.tree.map(lambda x: x[i], self.q_tokens)
                kv = jax.tree.map(lambda x: jnp.broadcast_to(x[j], (cut.strip, cut.piece)).T, self.kv_tokens)
                keys = pl.ds(pl.multiple_of(j * cut.piece, cut.piece), cut.piece)
                seen = self.formula.mask.visible(q, kv)
                if cut.kv_seq % cut.kv:
                    index = start + j * cut.piece + lax.broadcasted_iota(jnp.int32, seen.shape, 0)
                    seen &= index < cut.kv_seq
                self.seen[i, keys, :] = seen.astype(jnp.int32)

            lax.fori_loop(0, cut.kv // cut.piece, piece, None)

        lax.fori_loop(0, len(self.seen), part, None)


def _steps(
    classes: Int8[Array, "rows q_blocks kv_blocks"], by_key: bool
) -> tuple[Int[Array, "rows length"], Int[Array, ""]]:
    """The pairs of blocks to visit, sorted by block of queries, or of keys, and how many these are in the longest row.

    Each is packed into 32 bits: the block of queries, that of keys, whether it is the first or the last of its block of
    the sorted side, and its class. A block that no other sees has one step of class SKIP, so that its result is
    written. Shorter rows repeat their last pair, which loads nothing, as a step of class SKIP without flags.
    """
    rows, q_blocks, kv_blocks = classes.shape
    pairs = jnp.arange(q_blocks)[:, None] << INDEX_BITS | jnp.arange(kv_blocks)[None, :]
    steps = (pairs << 4)[None] | classes.astype(jnp.int32)
    if by_key:
        steps = steps.swapaxes(1, 2)
    seen = steps & 3 != SKIP
    visited = seen.at[:, :, 0].set(seen[:, :, 0] | ~seen.any(axis=2))
    ordinal = jnp.cumsum(visited, axis=2, dtype=jnp.int32)
    steps |= jnp.where(ordinal == 1, FIRST, 0) | jnp.where(ordinal == ordinal[:, :, -1:], LAST, 0)

    steps, visited = steps.reshape(rows, -1), visited.reshape(rows, -1)
    order = jnp.argsort(~visited, axis=1)
    count = visited.sum(axis=1, dtype=jnp.int32)[:, None]
    index = jnp.arange(steps.shape[1])[None, :]
    steps = jnp.take_along_axis(steps, jnp.take_along_axis(order, jnp.minimum(index, count - 1), axis=1), axis=1)
    return jnp.where(index < count, steps, steps & -16), count.max()


def _launch(
    kernel: Callable[..., None],
    name: str,
    on: tuple[Formula, Cut, Tokens, Tokens],
    q_side: tuple[Array, ...],
    kv_side: tuple[Array, ...],
    results: list[tuple[tuple[int, ...], Any]],
    scratch: list[tuple[tuple[int, ...], Any]],
    depth: int,
) -> list[Array]:
    """Runs `kernel(step, *q_side, *kv_side, *results, *scratch)` for each step, with Refs of one block of each array.

    The arrays are (batch, kv_heads, blocks, ...). So are the results, given without these axes; those of "dkv" have
    blocks of keys, and the others blocks of queries. `depth` is how many features are multiplied for each logit.
    """
    formula, cut, q_tokens, kv_tokens = on
    by_key = name == "dkv"
    classes = block_classes(formula.mask, q_tokens, kv_tokens, cut.q, cut.kv)
    steps, count = _steps(classes, by_key)
    batch = len(q_side[0])
    of_query, of_key = INDEX_BITS + 4, 4

    def spec(shift: int, x: Any) -> pl.BlockSpec:
        def index(b: Any, h: Any, s: Any, steps: Any) -> tuple[Any, ...]:
            block = steps[jnp.minimum(b, len(classes) - 1), s] >> shift & (1 << INDEX_BITS) - 1
            first = (jnp.minimum(i, size - 1) for i, size in zip((b, h), x.shape, strict=False))
            return (*first, block, *(0,) * (x.ndim - 3))

        return pl.BlockSpec((None, None, None, *x.shape[3:]), index)

    q_side = (cut.tokens(q_tokens, cut.q, cut.strip), *q_side)
    kv_side = (cut.tokens(kv_tokens, cut.kv, cut.piece), *kv_side)
    axes = (batch, cut.kv_heads, cut.kv_blocks if by_key else cut.q_blocks)
    out_shape = [jax.ShapeDtypeStruct((*axes, *shape), dtype) for shape, dtype in results]
    scratch = [((cut.q // cut.strip, cut.kv, cut.strip), jnp.int32), *scratch]

    def run(steps: Any, q_side: Any, kv_side: Any, *rest: Any) -> None:
        bits = steps[jnp.minimum(pl.program_id(0), len(classes) - 1), pl.program_id(2)]
        *results, seen = rest[: len(out_shape) + 1]
        step = Step(bits, formula, cut, q_side[0], kv_side[0], seen)
        kernel(step, *q_side[1:], *kv_side[1:], *results, *rest[len(out_shape) + 1 :])

    pairs = batch * cut.kv_heads * cut.group * cut.seq * cut.kv_seq // 2  # as if causal
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, cut.kv_heads, count),
            in_specs=[
                jax.tree.map(functools.partial(spec, of_query), q_side),
                jax.tree.map(functools.partial(spec, of_key), kv_side),
            ],
            out_specs=jax.tree.map(functools.partial(spec, of_key if by_key else of_query), out_shape),
            scratch_shapes=[pltpu.VMEM(shape, dtype) for shape, dtype in scratch],
        ),
        out_shape=out_shape,
        name=f"attention_{name}",
        interpret=device().platform == "cpu",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * pairs * depth,
            transcendentals=pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((q_side, kv_side, out_shape))),
        ),
    )(steps, q_side, kv_side)


def _logits(
    formula: Formula, k: Float[Array, "keys dim"], q: Float[Array, "queries dim"]
) -> Float[Array, "keys queries"]:
    """In powers of two."""
    x = _dot(k, q, 1, 1)
    if formula.softcap is None:
        return x * (formula.scale * LOG2_E)
    return formula.softcap * LOG2_E * jnp.tanh(x * (formula.scale / formula.softcap))


def _dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """The product summed over those axes."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def _pad(x: Array, axis: int, length: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)
