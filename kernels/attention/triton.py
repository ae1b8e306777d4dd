"""FlashAttention-2 (arXiv:2307.08691) for NVIDIA GPUs, forward and backward, in Pallas-Triton.

One program computes one block of queries of one head, and loops over the blocks of keys that it has to visit. XLA lists
these beforehand, from the mask: first those that every query of the block sees in full, which need no mask, then those
that have to be masked token by token. So a window, a chunk, a document or an image costs only its visible blocks. The
backward pass has two kernels. Programs of the one for dk and dv hold a block of keys and loop over the queries of the
group's heads; the other is for dq. Both recompute the weights from `lse`.

The softmax is in powers of two: exp(scale * s) is exp2(c * s) with c = scale * log2(e), so after one multiply-add,
which subtracts the running maximum, it is one instruction. Arrays are read as they are in memory, without a transposed
or padded copy: a head of 192 features is a block of 128 and one of 64. Tokens beyond the end are masked, which costs
nothing if the block size divides the length.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float

from kernels.attention import shared
from kernels.attention.reference import LOWEST
from kernels.attention.shared import Formula
from kernels.backends import blocks
from kernels.backends.device import elsewhere
from kernels.backends.triton import SMALLEST, dot, exp2, inside, launch, load, pieces, store
from kernels.masks import Mask, Schedule, block_classes
from kernels.tokens import Tokens


PLATFORMS = ("gpu",)
RANK = 2

WIDTHS = (64, 128, 192, 256)  # features of a head for which there are block sizes


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    **_: object,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `attention`, or None if it can."""
    if q.dtype == jnp.float64:
        return "it computes in float32, and q is float64"
    dim, v_dim = q.shape[3], v.shape[3]
    if max(dim, v_dim) > WIDTHS[-1]:
        return f"its heads have at most {WIDTHS[-1]} features, and these {dim} and {v_dim}"
    if not q.size or not v.size:
        return "it needs a query, a key and a feature at least"
    if scale <= 0:
        return f"it needs a scale above 0, and this is {scale}"
    return elsewhere("gpu")


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
    """Computes `kernels.attention` in Triton."""
    formula = Formula(scale, mask, softcap)
    return shared.attention(FLASH, formula, q, k, v, sinks, q_tokens, kv_tokens)


class Block(NamedTuple):
    """A block of neighbouring tokens of one row of the batch, within a kernel."""

    batch: Array
    tokens: Any  # a slice
    exist: Bool[Array, " size"] | None  # which tokens are not beyond the end; None: all

    @classmethod
    def of(cls, batch: Array, index: Array, size: int, length: int) -> "Block":
        return cls(batch, pl.ds(index * size, size), inside(index * size, size, length))

    @property
    def rows(self) -> Bool[Array, "size 1"] | None:
        return None if self.exist is None else self.exist[:, None]

    def vectors(self, ref: Any, head: ArrayLike) -> list[Array]:
        """Loads the tokens' vectors, in pieces of [tokens, power of two]."""
        return [load(ref.at[self.batch, self.tokens, head, piece], self.rows) for piece in pieces(ref.shape[3])]

    def put_vectors(self, ref: Any, head: ArrayLike, values: list[Array]) -> None:
        for piece, value in zip(pieces(ref.shape[3]), values, strict=True):
            store(ref.at[self.batch, self.tokens, head, piece], value.astype(ref.dtype), self.rows)

    def numbers(self, ref: Any, head: ArrayLike, other: ArrayLike = 0) -> Float[Array, " size"]:
        return load(ref.at[self.batch, head, self.tokens], self.exist, other)

    def ids(self, refs: Tokens) -> Tokens:
        return jax.tree.map(lambda ref: load(ref.at[row_of(ref, self.batch), self.tokens], self.exist), refs)


def forward(
    formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
    """Implements `shared.Flash.forward`, with results in float32."""
    (batch, seq, heads, dim), v_dim = q.shape, v.shape[3]
    size = _sizes("forward", q, v)
    schedule = Schedule.of(block_classes(formula.mask, q_tokens, kv_tokens, size["q"], size["kv"]))
    return launch(
        functools.partial(_forward_kernel, formula, size),
        *(q, k, v, q_tokens, kv_tokens, schedule),
        name="attention_forward",
        grid=(heads, pl.cdiv(seq, size["q"]), batch),
        results=(
            jax.ShapeDtypeStruct((batch, seq, heads, v_dim), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, seq), jnp.float32),
        ),
        warps=size["warps"],
        stages=size["stages"],
        cost=_cost(q, k, v, products=dim + v_dim),
    )


def _forward_kernel(
    formula: Formula,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_tokens_ref: Tokens,
    kv_tokens_ref: Tokens,
    schedule: Schedule,
    out_ref: Any,
    lse_ref: Any,
) -> None:
    head, i, batch = pl.program_id(0), _last_first(1), pl.program_id(2)
    seq, heads, kv_seq, kv_heads = *q_ref.shape[1:3], *k_ref.shape[1:3]
    kv_head = lax.div(head, heads // kv_heads)
    q_block = Block.of(batch, i, size["q"], seq)
    q, q_tokens = q_block.vectors(q_ref, head), _column(q_block.ids(q_tokens_ref))
    row = row_of(schedule.order, batch)

    def step(masked: bool, n: Array, state: tuple[Array, Array, list[Array]]) -> tuple[Array, Array, list[Array]]:
        top, total, out = state
        kv_block = Block.of(batch, schedule.order[row, i, n], size["kv"], kv_seq if masked else size["kv"])
        x = capped(formula, product(q, kv_block.vectors(k_ref, kv_head)))
        if masked:
            x = jnp.where(_seen(formula, q_tokens, kv_block, kv_tokens_ref), x, -jnp.inf)
        new_top = jnp.maximum(top, to_log2(formula) * x.max(axis=1))
        weights = exp2(x, to_log2(formula), less=new_top[:, None])
        fade = jnp.exp2(top - new_top)
        total = total * fade + weights.sum(axis=1)
        v = kv_block.vectors(v_ref, kv_head)
        out = [o * fade[:, None] + dot(weights.astype(p.dtype), p) for o, p in zip(out, v, strict=True)]
        return new_top, total, out

    zeros = [jnp.zeros((size["q"], piece.size), jnp.float32) for piece in pieces(out_ref.shape[3])]
    state = jnp.full(size["q"], LOWEST, jnp.float32), jnp.zeros(size["q"], jnp.float32), zeros
    full, met = schedule.full[row, i], schedule.met[row, i]
    state = lax.fori_loop(0, full, functools.partial(step, False), state)
    top, total, out = lax.fori_loop(full, met, functools.partial(step, True), state)

    nothing = total == 0
    total = jnp.where(nothing, 1, total)
    q_block.put_vectors(out_ref, head, [o / total[:, None] for o in out])
    lse = jnp.where(nothing, LOWEST, top + jnp.log2(total))
    store(lse_ref.at[batch, head, q_block.tokens], lse, q_block.exist)


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
    """Implements `shared.Flash.backward`, with gradients in the dtype of q."""
    delta = shared.delta_of(out, d_out)
    (batch, seq, heads, dim), (_, kv_seq, kv_heads, v_dim) = q.shape, v.shape
    operands = q, k, v, q_tokens, kv_tokens, lse, delta, d_out.astype(q.dtype)
    like = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype)

    # For the widest heads, a program's registers hold only one of these two gradients.
    apart = {"dk": (like(k), None), "dv": (None, like(v))}
    together = {"dkv": (like(k), like(v))}
    found = []
    for kernel, results in (apart if _width(q, v) == WIDTHS[-1] else together).items():
        size = _sizes(kernel, q, v)
        classes = block_classes(formula.mask, q_tokens, kv_tokens, size["q"], size["kv"])
        found += launch(
            functools.partial(_dkv_kernel, formula, size),
            *operands,
            Schedule.of(classes.swapaxes(1, 2)),
            name=f"attention_{kernel}",
            grid=(kv_heads, pl.cdiv(kv_seq, size["kv"]), batch),
            results=results,
            warps=size["warps"],
            stages=size["stages"],
            cost=_cost(q, k, v, products=2 * (dim + v_dim)),
        )
    dk, dv = (x for x in found if x is not None)

    size = _sizes("dq", q, v)
    classes = block_classes(formula.mask, q_tokens, kv_tokens, size["q"], size["kv"])
    dq = launch(
        functools.partial(_dq_kernel, formula, size),
        *operands,
        Schedule.of(classes),
        name="attention_dq",
        grid=(heads, pl.cdiv(seq, size["q"]), batch),
        results=like(q),
        warps=size["warps"],
        stages=size["stages"],
        cost=_cost(q, k, v, products=2 * dim + v_dim),
    )
    return dq, dk, dv


FLASH = shared.Flash(forward, backward, features=SMALLEST, base_2=True)


def _dkv_kernel(
    formula: Formula,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_tokens_ref: Tokens,
    kv_tokens_ref: Tokens,
    lse_ref: Any,
    delta_ref: Any,
    d_out_ref: Any,
    schedule: Schedule,
    dk_ref: Any,
    dv_ref: Any,
) -> None:
    """Sums up dk, dv or both (None: left out). Logits are [keys, queries], left operands of products, in registers."""
    kv_head, j, batch = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    seq, heads, kv_seq, kv_heads = *q_ref.shape[1:3], *k_ref.shape[1:3]
    group = heads // kv_heads
    kv_block = Block.of(batch, j, size["kv"], kv_seq)
    k, v = kv_block.vectors(k_ref, kv_head), kv_block.vectors(v_ref, kv_head)
    kv_tokens = _column(kv_block.ids(kv_tokens_ref))
    row = row_of(schedule.order, batch)

    def step(masked: bool, n: Array, state: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        dk, dv = state
        head = kv_head * group + lax.rem(n, group)
        q_block = Block.of(batch, schedule.order[row, j, lax.div(n, group)], size["q"], seq)
        q, d_out = q_block.vectors(q_ref, head), q_block.vectors(d_out_ref, head)
        # A query beyond the end gets weights of 0 from an infinite log-sum-exp.
        lse, delta = q_block.numbers(lse_ref, head, jnp.inf)[None, :], q_block.numbers(delta_ref, head)[None, :]
        x = capped(formula, product(k, q))
        # Loads ids after the product, here and in dq: they take registers, and the compiler keeps the order.
        seen = formula.mask.visible(_line(q_block.ids(q_tokens_ref)), kv_tokens) if masked else None
        weights, slopes = _weights_and_slopes(formula, x, lse, seen)
        dv = [a + dot(weights.astype(p.dtype), p) for a, p in zip(dv, d_out, strict=False)]
        d_x = _times(slopes, product(v, d_out, less=delta), masked)
        dk = [a + dot(d_x.astype(p.dtype), p) for a, p in zip(dk, q, strict=False)]
        return dk, dv

    zeros = lambda vectors, result: [] if result is None else [jnp.zeros(x.shape, jnp.float32) for x in vectors]
    state = zeros(k, dk_ref), zeros(v, dv_ref)
    full, met = group * schedule.full[row, j], group * schedule.met[row, j]
    state = lax.fori_loop(0, full, functools.partial(step, False), state)
    dk, dv = lax.fori_loop(full, met, functools.partial(step, True), state)
    if dk:
        kv_block.put_vectors(dk_ref, kv_head, [formula.scale * x for x in dk])
    if dv:
        kv_block.put_vectors(dv_ref, kv_head, dv)


def _dq_kernel(
    formula: Formula,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    q_tokens_ref: Tokens,
    kv_tokens_ref: Tokens,
    lse_ref: Any,
    delta_ref: Any,
    d_out_ref: Any,
    schedule: Schedule,
    dq_ref: Any,
) -> None:
    head, i, batch = pl.program_id(0), _last_first(1), pl.program_id(2)
    seq, heads, kv_seq, kv_heads = *q_ref.shape[1:3], *k_ref.shape[1:3]
    kv_head = lax.div(head, heads // kv_heads)
    q_block = Block.of(batch, i, size["q"], seq)
    q, d_out = q_block.vectors(q_ref, head), q_block.vectors(d_out_ref, head)
    lse, delta = q_block.numbers(lse_ref, head)[:, None], q_block.numbers(delta_ref, head)[:, None]
    q_tokens = _column(q_block.ids(q_tokens_ref))
    row = row_of(schedule.order, batch)

    def step(masked: bool, n: Array, dq: list[Array]) -> list[Array]:
        kv_block = Block.of(batch, schedule.order[row, i, n], size["kv"], kv_seq if masked else size["kv"])
        k, v = kv_block.vectors(k_ref, kv_head), kv_block.vectors(v_ref, kv_head)
        x, d_weights = capped(formula, product(q, k)), product(d_out, v, less=delta)
        seen = _seen(formula, q_tokens, kv_block, kv_tokens_ref) if masked else None
        _, slopes = _weights_and_slopes(formula, x, lse, seen)
        d_x = _times(slopes, d_weights, masked)
        return [a + dot(d_x.astype(p.dtype), p) for a, p in zip(dq, k, strict=True)]

    full, met = schedule.full[row, i], schedule.met[row, i]
    dq = [jnp.zeros(x.shape, jnp.float32) for x in q]
    dq = lax.fori_loop(0, full, functools.partial(step, False), dq)
    dq = lax.fori_loop(full, met, functools.partial(step, True), dq)
    q_block.put_vectors(dq_ref, head, [formula.scale * x for x in dq])


def capped(formula: Formula, products: Float[Array, "rows columns"]) -> Float[Array, "rows columns"]:
    """Returns the logits without their positive factor, which is in `to_log2`: q @ k, or with a softcap its tanh."""
    if formula.softcap is None:
        return products
    # tanh(z) = 1 - 2 / (exp(2 z) + 1): two special instructions, where CUDA's tanh takes a branch and twenty others.
    factor = 2 * math.log2(math.e) * formula.scale / formula.softcap
    return 1 - 2 / (exp2(products, factor, less=jnp.zeros_like(products)) + 1)


def to_log2(formula: Formula) -> float:
    """Returns the factor that turns `capped` into logits of a softmax in powers of two."""
    return math.log2(math.e) * (formula.scale if formula.softcap is None else formula.softcap)


def _weights_and_slopes(
    formula: Formula,
    x: Float[Array, "rows columns"],
    lse: Float[Array, "..."],
    seen: Bool[Array, "rows columns"] | None,
) -> tuple[Float[Array, "rows columns"], Float[Array, "rows columns"]]:
    """Returns the softmax of logits given as `capped`, and slopes for their gradients.

    The gradients of `scale` * q @ k are the slopes times (the gradients of the weights - delta).
    """
    weights = exp2(x, to_log2(formula), less=lse)
    if seen is not None:
        weights = jnp.where(seen, weights, 0)
    return weights, weights if formula.softcap is None else weights * (1 - jnp.square(x))


def _times(slopes: Float[Array, "rows columns"], d_weights: Float[Array, "rows columns"], masked: bool) -> Array:
    """Multiplies the two. With `masked`, a slope of zero (a key that is not seen) gives zero even times a NaN."""
    return jnp.where(slopes == 0, 0, slopes * d_weights) if masked else slopes * d_weights


def product(x: list[Array], y: list[Array], less: Float[Array, "..."] | None = None) -> Float[Array, "rows columns"]:
    """Multiplies each vector of x with each of y, both in pieces. Sums start at -less, so subtracting costs nothing."""
    products = [dot(a, b, over=(1, 1)) for a, b in zip(x, y, strict=True)]
    return functools.reduce(
        jnp.add, products if less is None else [jnp.broadcast_to(-less, products[0].shape), *products]
    )


def _seen(formula: Formula, q_tokens: Tokens, kv_block: Block, kv_tokens_ref: Tokens) -> Bool[Array, "queries keys"]:
    seen = formula.mask.visible(q_tokens, _line(kv_block.ids(kv_tokens_ref)))
    return seen if kv_block.exist is None else seen & kv_block.exist[None, :]


def _column(tokens: Tokens) -> Tokens:
    return jax.tree.map(lambda x: x[:, None], tokens)


def _line(tokens: Tokens) -> Tokens:
    return jax.tree.map(lambda x: x[None, :], tokens)


def row_of(ref: Any, batch: Array) -> Array:
    """Returns the index of a batch row in an array that may have one row for all."""
    return jnp.minimum(batch, ref.shape[0] - 1)


def _last_first(axis: int) -> Array:
    """Counts an axis of the grid from its end: under a causal mask the last queries take longest, and start first."""
    return pl.num_programs(axis) - 1 - pl.program_id(axis)


def _width(q: Array, v: Array) -> int:
    return next(width for width in WIDTHS if width >= max(q.shape[3], v.shape[3]))


def _sizes(kernel: str, q: Array, v: Array) -> dict[str, int]:
    return blocks.sizes(__name__, kernel, q.dtype, f"d{_width(q, v)}")


def _cost(q: Array, k: Array, v: Array, products: int) -> pl.CostEstimate:
    """Estimates the cost of `products` multiplications for each query and key, as if every query saw every key."""
    pairs = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[1]
    return pl.CostEstimate(
        flops=2 * pairs * products,
        transcendentals=pairs,
        bytes_accessed=(2 * q.size + k.size + v.size) * q.dtype.itemsize,
    )
