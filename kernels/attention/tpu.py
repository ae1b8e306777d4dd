"""FlashAttention-2 (arXiv:2307.08691) for TPUs, forward and backward, in Pallas.

A step of a kernel takes a block of keys and a block of queries, with all the heads that share those keys. XLA lists
beforehand, from the mask, the pairs of blocks in which any query sees any key. The grid has as many steps as the list,
so all other pairs are neither loaded nor visited. A pair in which every query sees every key is not masked.

Within a step the queries come in strips, each of one head. Logits are [keys, queries]. So a number for each query (its
largest logit, its position) is a row, which a TPU broadcasts over a matrix for free; a column would need the scarce
cross-lane unit. The output is [features, queries] until its last step. A row of ones is appended to the values, so the
sum of the weights is one more row of the output. The softmax is in powers of two.

The matrix units work a strip ahead: they multiply one strip's logits, which wait in VMEM, while the vector units
process those of the previous strip. This also keeps the compiler from holding a block's logits in registers: there are
64 registers, and one strip would take 128.

The gradients have two kernels, one for dq and one for dk and dv. Each holds its sums in VMEM and writes them once. One
kernel for all three would save two products of seven, but would add to one of the sums in HBM at every step.
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

from kernels.attention import shared
from kernels.attention.reference import LOWEST
from kernels.attention.shared import Formula
from kernels.backends import blocks
from kernels.backends.device import device, elsewhere
from kernels.masks import FULL, PARTIAL, SKIP, Mask, block_classes
from kernels.tokens import Tokens, given


PLATFORMS = ("tpu",)
RANK = 2

LOG2_E = math.log2(math.e)
SUBLANES, LANES = 8, 128  # of a register
FIRST, LAST = 4, 8  # flags of a block's first and last step; the two bits below hold SKIP, PARTIAL or FULL
MOST_BLOCKS = 1 << 13  # most blocks of queries, and of keys, that fit into the bits above
ONES = 16  # rows of ones below the values: one would do, but bfloat16 has its rows in groups of 16
VMEM = 48 << 20  # bytes that a kernel may take; every TPU has at least 64 MiB
SMEM = 256 << 10  # most bytes of the list of steps: this compiles for every TPU, and is enough for 128k tokens
MOST_FEATURES = 8192  # features of all query heads that share a key/value head: more would not fit VMEM


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    **_: object,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `attention`, or None if it can."""
    if why := elsewhere("tpu"):
        return why
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        return f"it computes in float32 and bfloat16, and q is {q.dtype}"
    if not q.size or not v.size:
        return "it needs a query, a key and a feature at least"
    group, width = q.shape[2] // k.shape[2], -(-max(q.shape[3], v.shape[3]) // LANES) * LANES
    if group * width > MOST_FEATURES:
        return f"{group} query heads of {width} features share a key/value head, and VMEM has room for {MOST_FEATURES}"
    rows = max(len(given(q_tokens.positions)), len(given(kv_tokens.positions)))
    for kernel in ("forward", "dq", "dkv"):
        cut = Cut.of(kernel, q, k)
        if 4 * rows * cut.q_blocks * cut.kv_blocks > SMEM:
            return f"the list of its blocks does not fit: {rows} rows of {q.shape[1]} queries and {k.shape[1]} keys"
    return None


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
    """Computes `kernels.attention` in Pallas for TPUs."""
    formula = Formula(scale, mask, softcap)
    return shared.attention(shared.Flash(forward, backward, base_2=True), formula, q, k, v, sinks, q_tokens, kv_tokens)


class Cut(NamedTuple):
    """The cut of queries and keys into blocks, with methods that bring arrays into a kernel's order: head, then token.

    Reordering is free for a model whose arrays have that order in memory. The last block is padded with zeros.
    """

    seq: int
    kv_seq: int
    group: int  # query heads that share a key/value head
    q: int  # tokens in a block of queries
    kv: int  # tokens in a block of keys
    strip: int  # queries of one head that are processed at a time

    @classmethod
    def of(cls, kernel: str, q: Array, k: Array) -> "Cut":
        (seq, heads, dim), (kv_seq, kv_heads) = q.shape[1:], k.shape[1:3]
        sizes = blocks.sizes(__name__, kernel, q.dtype, f"d{-(-dim // 64) * 64}")
        group, strip = heads // kv_heads, sizes["strip"]
        up = lambda length, unit: -(-length // unit) * unit
        q_block = min(sizes["q"], max(sizes["rows"] // group, strip) // strip * strip, up(seq, strip))
        return cls(seq, kv_seq, group, q_block, min(sizes["kv"], up(kv_seq, LANES)), strip)

    @property
    def q_blocks(self) -> int:
        return -(-self.seq // self.q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_seq // self.kv)

    @property
    def parts(self) -> int:
        """Returns the number of strips of one head in a block."""
        return self.q // self.strip

    @property
    def strips(self) -> int:
        """Returns the number of strips in a block."""
        return self.group * self.parts

    def queries(self, x: Float[Array, "batch seq heads dim"]) -> Float[Array, "batch kv_heads group strips strip dim"]:
        x = _pad(x, 1, self.q_blocks * self.q).swapaxes(1, 2)
        return x.reshape(len(x), -1, self.group, self.q_blocks * self.parts, self.strip, x.shape[3])

    def from_queries(
        self, x: Float[Array, "batch kv_heads group strips strip dim"]
    ) -> Float[Array, "batch seq heads dim"]:
        return x.reshape(len(x), -1, self.q_blocks * self.q, x.shape[5]).swapaxes(1, 2)[:, : self.seq]

    def rows(self, x: Float[Array, "batch heads seq"]) -> Float[Array, "batch kv_heads group strips 1 strip"]:
        return self.queries(x.swapaxes(1, 2)[..., None]).swapaxes(4, 5)

    def from_rows(self, x: Float[Array, "batch kv_heads group strips 1 strip"]) -> Float[Array, "batch heads seq"]:
        return self.from_queries(x.swapaxes(4, 5))[..., 0].swapaxes(1, 2)

    def keys(self, x: Float[Array, "batch kv_seq kv_heads dim"]) -> Float[Array, "batch kv_heads blocks kv dim"]:
        x = _pad(x, 1, self.kv_blocks * self.kv).swapaxes(1, 2)
        return x.reshape(*x.shape[:2], self.kv_blocks, self.kv, x.shape[3])

    def from_keys(self, x: Float[Array, "batch kv_heads blocks kv dim"]) -> Float[Array, "batch kv_seq kv_heads dim"]:
        return x.reshape(*x.shape[:2], -1, x.shape[4]).swapaxes(1, 2)[:, : self.kv_seq]

    def q_tokens(self, x: Tokens) -> Tokens:
        """Returns each array as (batch or 1, 1, 1, strips, 1, strip)."""
        return jax.tree.map(lambda x: _pad(x, 1, self.q_blocks * self.q).reshape(len(x), 1, 1, -1, 1, self.strip), x)

    def kv_tokens(self, x: Tokens) -> Tokens:
        """Returns each array as (batch or 1, 1, blocks, pieces, 1, piece)."""
        shape = (1, self.kv_blocks, -1, 1, min(self.kv, LANES))
        return jax.tree.map(lambda x: _pad(x, 1, self.kv_blocks * self.kv).reshape(len(x), *shape), x)


class Strip(NamedTuple):
    """The index of a strip in a block of queries: which head of the group, and which part of the tokens."""

    head: Any
    part: Any


# masked(x, i, fill) returns `x`, [keys, queries of strip i], with `fill` where the query does not see the key.
Masked = Callable[[Array, Strip, float], Array]


class Step(NamedTuple):
    """One step of a kernel: a block of keys, and one of queries with all heads of the group."""

    bits: Int[Array, ""]  # packed by `schedule`
    formula: Formula
    cut: Cut
    q_tokens: Any  # Refs (1, parts, 1, strip)
    kv_tokens: Any  # Refs (pieces, 1, piece)
    seen: Any  # a Ref (parts, kv, strip), with 1 where the query sees the key

    def when(self, flag: int) -> Callable:
        return pl.when(self.bits & flag != 0)

    def strip(self, n: Any) -> Strip:
        return Strip(lax.div(n, jnp.int32(self.cut.parts)), lax.rem(n, jnp.int32(self.cut.parts)))

    def for_each_strip(self, body: Callable[[Strip], None]) -> Callable[[], None]:
        return lambda: lax.fori_loop(0, self.cut.strips, lambda n, _: body(self.strip(n)), None)

    def work(self, multiply: Callable[[Strip, Masked], None], add: Callable[[Strip, Masked], None]) -> None:
        """Calls `multiply(i, masked)` for each strip i, and one strip later `add(i, masked)`, which uses its results.

        Calls neither if no query sees any key.
        """

        def all_strips(masked: Masked) -> None:
            def both(n: Any, _: None) -> None:
                add(self.strip(n), masked)
                multiply(self.strip(n + 1), masked)

            first, last = jnp.int32(0), jnp.int32(self.cut.strips - 1)
            multiply(self.strip(first), masked)
            lax.fori_loop(first, last, both, None)
            add(self.strip(last), masked)

        @pl.when(self.bits & 3 == FULL)
        def _() -> None:
            all_strips(lambda x, i, fill: x)

        @pl.when(self.bits & 3 == PARTIAL)
        def _() -> None:
            self._look()
            all_strips(lambda x, i, fill: jnp.where(self.seen[i.part] != 0, x, fill))

    def _look(self) -> None:
        """Fills `seen` from the mask, once for all heads."""
        cut, pieces = self.cut, len(self.kv_tokens.positions)
        first = (self.bits >> 4 & MOST_BLOCKS - 1) * cut.kv

        def look(n: Any, _: None) -> None:
            part, piece = n // pieces, n % pieces
            q = jax.tree.map(lambda x: x[0, part], self.q_tokens)
            kv = jax.tree.map(lambda x: jnp.broadcast_to(x[piece], (cut.strip, x.shape[2])).T, self.kv_tokens)
            seen = self.formula.mask.visible(q, kv)
            start = pl.multiple_of(piece * len(seen), len(seen))
            if cut.kv_seq % cut.kv:
                seen &= first + start + lax.broadcasted_iota(jnp.int32, seen.shape, 0) < cut.kv_seq
            self.seen[part, pl.ds(start, len(seen)), :] = seen.astype(jnp.int32)

        lax.fori_loop(0, cut.parts * pieces, look, None)


def forward(formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens) -> tuple[Array, Array]:
    """Implements `shared.Flash.forward`, with the output in float32."""
    cut, (dim, v_dim) = Cut.of("forward", q, k), (q.shape[3], v.shape[3])
    queries = cut.queries(q)
    v_and_ones = jnp.pad(cut.keys(v).swapaxes(3, 4), ((0, 0),) * 3 + ((0, ONES), (0, 0)), constant_values=1)
    out, lse = _launch(
        _forward_kernel,
        "forward",
        (formula, cut, q_tokens, kv_tokens),
        q_side=(queries,),
        kv_side=(cut.keys(k), v_and_ones),
        results=[((*queries.shape[:5], v_dim), jnp.float32), ((*queries.shape[:4], 1, cut.strip), jnp.float32)],
        scratch=[
            (cut.group, cut.parts, 1, cut.strip),
            (cut.group, cut.parts, v_dim + ONES, cut.strip),
            (SUBLANES, cut.strip),
            (cut.kv, cut.strip),
        ],
        depth=dim + v_dim,
    )
    return cut.from_queries(out), cut.from_rows(lse)


def _forward_kernel(
    step: Step, q: Any, k: Any, v_and_ones: Any, out: Any, lse: Any, top: Any, total: Any, peak: Any, logits: Any
) -> None:
    """Adds one block. `top`: each query's largest logit so far. `peak`: that of the next strip, by key index mod 8."""
    v_dim = out.shape[3]

    @step.when(FIRST)
    def _() -> None:
        top[...] = jnp.full_like(top, LOWEST)
        total[...] = jnp.zeros_like(total)

    def multiply(i: Strip, masked: Masked) -> None:
        x = masked(_logits(step.formula, k[...], q[i]), i, -jnp.inf)
        logits[...] = x
        peak[...] = x.reshape(-1, *peak.shape).max(axis=0)

    def add(i: Strip, _: Masked) -> None:
        before = top[i]
        top[i] = jnp.maximum(before, peak[...].max(axis=0, keepdims=True))
        weights = jnp.exp2(logits[...] - top[i]).astype(v_and_ones.dtype)
        total[i] = total[i] * jnp.exp2(before - top[i]) + dot(v_and_ones[...], weights, 1, 0)

    step.work(multiply, add)

    @step.when(LAST)
    @step.for_each_strip
    def _(i: Strip) -> None:
        weight = total[*i, v_dim : v_dim + 1, :]
        out[i] = (total[*i, :v_dim, :] / jnp.where(weight == 0, 1, weight)).T
        lse[i] = jnp.where(weight == 0, LOWEST, top[i] + jnp.log2(weight))


def backward(
    formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens,
    lse: Array, out: Array, d_out: Array,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Implements `shared.Flash.backward`, with the gradients in q's dtype."""
    delta = shared.delta_of(out, d_out)
    dim, v_dim = q.shape[3], v.shape[3]

    cut = Cut.of("dq", q, k)
    queries, keys, values = cut.queries(q), cut.keys(k), cut.keys(v)
    (dq,) = _launch(
        _dq_kernel,
        "dq",
        (formula, cut, q_tokens, kv_tokens),
        q_side=(queries, cut.queries(d_out), cut.rows(lse), cut.rows(delta)),
        kv_side=(keys, values, keys.swapaxes(3, 4)),
        results=[(queries.shape, q.dtype)],
        scratch=[(cut.group, cut.parts, dim, cut.strip), (cut.kv, cut.strip), (cut.kv, cut.strip)],
        depth=2 * dim + v_dim,
    )
    dq = cut.from_queries(dq)

    cut = Cut.of("dkv", q, k)
    queries, keys, values = cut.queries(q), cut.keys(k), cut.keys(v)
    dk, dv = _launch(
        _dkv_kernel,
        "dkv",
        (formula, cut, q_tokens, kv_tokens),
        q_side=(queries, cut.queries(d_out), cut.rows(lse), cut.rows(delta)),
        kv_side=(keys, values),
        results=[(keys.shape, q.dtype), (values.shape, q.dtype)],
        scratch=[(cut.kv, dim), (cut.kv, v_dim), (cut.kv, cut.strip), (cut.kv, cut.strip)],
        depth=2 * dim + 2 * v_dim,
    )
    return dq, cut.from_keys(dk), cut.from_keys(dv)


def _dq_kernel(
    step: Step, q: Any, d_out: Any, lse: Any, delta: Any, k: Any, v: Any, k_transposed: Any, dq: Any,
    total: Any, logits: Any, d_weights: Any,
) -> None:  # fmt: skip
    @step.when(FIRST)
    def _() -> None:
        total[...] = jnp.zeros_like(total)

    multiply, weigh = _both(step.formula, q, d_out, lse, delta, k, v, logits, d_weights)

    def add(i: Strip, masked: Masked) -> None:
        _, slopes = weigh(i, masked)
        total[i] += dot(k_transposed[...], slopes, 1, 0)

    step.work(multiply, add)

    @step.when(LAST)
    @step.for_each_strip
    def _(i: Strip) -> None:
        dq[i] = (step.formula.scale * total[i]).T.astype(dq.dtype)


def _dkv_kernel(
    step: Step, q: Any, d_out: Any, lse: Any, delta: Any, k: Any, v: Any, dk: Any, dv: Any,
    k_total: Any, v_total: Any, logits: Any, d_weights: Any,
) -> None:  # fmt: skip
    @step.when(FIRST)
    def _() -> None:
        k_total[...] = jnp.zeros_like(k_total)
        v_total[...] = jnp.zeros_like(v_total)

    multiply, weigh = _both(step.formula, q, d_out, lse, delta, k, v, logits, d_weights)

    def add(i: Strip, masked: Masked) -> None:
        weights, slopes = weigh(i, masked)
        v_total[...] += dot(weights, d_out[i], 1, 0)
        k_total[...] += dot(slopes, q[i], 1, 0)

    step.work(multiply, add)

    @step.when(LAST)
    def _() -> None:
        dk[...] = (step.formula.scale * k_total[...]).astype(dk.dtype)
        dv[...] = v_total[...].astype(dv.dtype)


def _both(
    formula: Formula, q: Any, d_out: Any, lse: Any, delta: Any, k: Any, v: Any, logits: Any, d_weights: Any
) -> tuple[Callable[[Strip, Masked], None], Callable[[Strip, Masked], tuple[Array, Array]]]:
    """Returns `multiply` and `weigh`, which the kernel of dq and that of dk and dv share."""

    def multiply(i: Strip, _: Masked) -> None:
        logits[...] = _logits(formula, k[...], q[i])
        d_weights[...] = dot(v[...], d_out[i], 1, 1)

    def weigh(i: Strip, masked: Masked) -> tuple[Array, Array]:
        """Returns the weights, and the gradients of the logits without the factor `scale`."""
        weights = masked(jnp.exp2(logits[...] - lse[i]), i, 0.0)
        slopes = weights * (d_weights[...] - delta[i])
        if formula.softcap is not None:
            slopes *= 1 - jnp.square(logits[...] / (formula.softcap * LOG2_E))
        return weights.astype(q.dtype), masked(slopes, i, 0.0).astype(q.dtype)

    return multiply, weigh


def _logits(
    formula: Formula, k: Float[Array, "keys dim"], q: Float[Array, "queries dim"]
) -> Float[Array, "keys queries"]:
    """Returns the logits of a softmax in powers of two."""
    x = dot(k, q, 1, 1)
    if formula.softcap is None:
        return x * (formula.scale * LOG2_E)
    return formula.softcap * LOG2_E * jnp.tanh(x * (formula.scale / formula.softcap))


def dot(x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """Multiplies two matrices, summing over these axes in float32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    axes = (((x_axis,), (y_axis,)), ((), ()))
    return lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def _launch(
    kernel: Callable[..., None],
    name: str,
    on: tuple[Formula, Cut, Tokens, Tokens],
    q_side: tuple[Array, ...],
    kv_side: tuple[Array, ...],
    results: list[tuple[tuple[int, ...], Any]],
    scratch: list[tuple[int, ...]],
    depth: int,
) -> list[Array] | tuple[Array, ...]:
    """Runs `kernel(step, *q_side, *kv_side, *results, *scratch)` for each step, with Refs of one block of each array.

    The arrays are in the order that `Cut` gives them. `results` lists shapes and dtypes; blocks of a result are blocks
    of keys for "dkv", else of queries. `scratch` lists shapes in float32. `depth` is the number of features multiplied
    for each logit.
    """
    formula, cut, q_tokens, kv_tokens = on
    by_key = name == "dkv"
    classes = block_classes(formula.mask, q_tokens, kv_tokens, cut.q, cut.kv)
    steps, count = schedule(classes, by_key)
    sides = (cut.q_tokens(q_tokens), *q_side), (cut.kv_tokens(kv_tokens), *kv_side)
    out_shape = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in results]
    step_of = lambda steps, b, s: steps[jnp.minimum(b, len(classes) - 1), s]  # there may be one list for all rows

    def of_queries(x: Any) -> pl.BlockSpec:
        def index(b: Any, h: Any, s: Any, steps: Any) -> tuple[Any, ...]:
            row, head = jnp.minimum(b, x.shape[0] - 1), jnp.minimum(h, x.shape[1] - 1)
            return row, head, 0, step_of(steps, b, s) // (16 * MOST_BLOCKS), 0, 0

        return pl.BlockSpec((None, None, x.shape[2], cut.parts, *x.shape[4:]), index)

    def of_keys(x: Any) -> pl.BlockSpec:
        def index(b: Any, h: Any, s: Any, steps: Any) -> tuple[Any, ...]:
            row, head = jnp.minimum(b, x.shape[0] - 1), jnp.minimum(h, x.shape[1] - 1)
            return row, head, step_of(steps, b, s) >> 4 & MOST_BLOCKS - 1, *(0,) * (x.ndim - 3)

        return pl.BlockSpec((None, None, None, *x.shape[3:]), index)

    def run(steps: Any, q_side: Any, kv_side: Any, *results_and_scratch: Any) -> None:
        *rest, seen = results_and_scratch
        bits = step_of(steps, pl.program_id(0), pl.program_id(2))
        kernel(Step(bits, formula, cut, q_side[0], kv_side[0], seen), *q_side[1:], *kv_side[1:], *rest)

    (batch, kv_heads), pairs = q_side[0].shape[:2], cut.group * cut.seq * cut.kv_seq // 2  # as if causal
    return pl.pallas_call(
        run,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, count),
            in_specs=[jax.tree.map(of_queries, sides[0]), jax.tree.map(of_keys, sides[1])],
            out_specs=[of_keys(x) if by_key else of_queries(x) for x in out_shape],
            scratch_shapes=[
                *[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
                pltpu.VMEM((cut.parts, cut.kv, cut.strip), jnp.int32),
            ],
        ),
        out_shape=out_shape,
        name=f"attention_{name}",
        interpret=device().platform == "cpu",
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * batch * kv_heads * pairs * depth,
            transcendentals=batch * kv_heads * pairs,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((sides, out_shape))),
        ),
    )(steps, *sides)


def schedule(
    classes: Int8[Array, "rows q_blocks kv_blocks"], by_key: bool
) -> tuple[Int[Array, "rows length"], Int[Array, ""]]:
    """Lists the pairs of blocks to visit, sorted by block of queries or of keys. Also returns the longest row's count.

    A pair is packed into 32 bits: the block of queries, the block of keys, whether it is the first or the last pair of
    its block on the sorted side, and its class. A block without any visible pair has one step of class SKIP, so that
    its result is written. Shorter rows repeat their last pair as steps of class SKIP without flags, which load nothing.
    """
    rows = len(classes)
    q, kv = (jnp.arange(blocks, dtype=jnp.int32) for blocks in classes.shape[1:])
    steps = (q[None, :, None] * MOST_BLOCKS + kv[None, None, :]) * 16 + classes.astype(jnp.int32)
    if by_key:
        steps = steps.swapaxes(1, 2)
    seen = steps & 3 != SKIP
    visited = seen.at[:, :, 0].set(seen[:, :, 0] | ~seen.any(axis=2))
    ordinal = jnp.cumsum(visited, axis=2, dtype=jnp.int32)
    steps |= jnp.where(ordinal == 1, FIRST, 0) | jnp.where(ordinal == ordinal[:, :, -1:], LAST, 0)

    steps, visited = steps.reshape(rows, -1), visited.reshape(rows, -1)
    count = visited.sum(axis=1, dtype=jnp.int32)[:, None]
    index = jnp.broadcast_to(jnp.arange(steps.shape[1]), steps.shape)
    order = jnp.argsort(~visited, axis=1)
    order = jnp.take_along_axis(order, jnp.minimum(index, count - 1), axis=1)
    steps = jnp.take_along_axis(steps, order, axis=1)
    return jnp.where(index < count, steps, steps & -16), count.max()


def _pad(x: Array, axis: int, length: int) -> Array:
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths)
