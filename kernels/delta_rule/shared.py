"""The delta rule in chunks, with its derivatives, except for the scan over the chunks: shared by the implementations.

Within a chunk of tokens the recurrence is matrix products, and a scan passes the state on. Let S be the state before a
chunk, G_i the sum of the chunk's log decays up to token i, and D_ij = exp(G_i - G_j) the decay from token j to token i.
Token i writes u_i, which depends on what earlier tokens wrote:

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j<i} D_ij (k_i . k_j) u_j)

These are linear equations with a lower triangular matrix, so U = U' - W S. The inverse of the matrix gives U' and W for
all chunks at once (the UT transform of arXiv:2406.06484, section 3, with the decays of arXiv:2412.06464, section 3.3).

An implementation brings two scans: one forward over the chunks, and one backward with the gradient of the state. The
forward pass keeps only the states before the chunks. The backward pass prepares the chunks again. All gradients, except
those that the scan passes on, are products for all chunks at once.
"""

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float


CHUNK = 64  # tokens
# The names, for policies of jax.checkpoint, of the outputs, and of the states before the chunks.
OUT, STATES = "delta_out", "delta_states"
LEVELS = CHUNK.bit_length() - 1  # the number of times that a chunk can be halved
BLOCK = 16  # tokens: between two such blocks a channel's decay is split into two factors, neither above 1


def state_products(dim: int, v_dim: int, *, erase: bool) -> int:
    """Counts the multiply-adds of one token with the state of one head, forward.

    With `erase` the key reads the state. Then the key writes to the state, and the query reads it. Any implementation
    needs these products, so a model's FLOPs count them. Chunks of `CHUNK` tokens compute up to twice as many, because
    their tokens also interact with one another.
    """
    return (2 + erase) * dim * v_dim


def scan_flops(matrices: Iterable[Sequence[int]], v_dim: int) -> int:
    """Counts the floating point operations of a scan by the shapes of the matrices that it multiplies.

    The matrices are `query`, `pairs`, `less` and `key` of all chunks, or some of them. Each of their numbers is
    multiplied with each feature of the values, in the forward pass and in the backward pass alike.
    """
    return 2 * v_dim * sum(map(math.prod, matrices))


def fused_products(kernel: str, dim: int, v_dim: int, *, erase: bool) -> int:
    """Counts the multiply-adds of one token of one head in a kernel of `kernels.delta_rule.triton_fused`.

    Those that invert a matrix from its blocks are left out.
    """
    counts = {
        "pairs": CHUNK * dim + erase * (CHUNK + BLOCK) // 2 * dim,
        "forward": state_products(dim, v_dim, erase=erase) + (1 + erase) * CHUNK * v_dim,
        "backward": state_products(dim, v_dim, erase=erase) + (1 + erase) * CHUNK * v_dim,
        "values": CHUNK * v_dim + erase * (dim * v_dim + 2 * CHUNK * v_dim + CHUNK * (2 * CHUNK + dim)),
        "keys": state_products(dim, v_dim, erase=erase) + (2 + 2 * erase) * CHUNK * dim,
    }
    return counts[kernel]


def channel_products(kernel: str, dim: int, v_dim: int) -> int:
    """Counts the multiply-adds of one token of one head in a kernel of `kernels.delta_rule.triton_channels`.

    A sum of decays is two products in bfloat16, and so are the products of what was written.
    """
    state, within = dim * v_dim, CHUNK * v_dim
    counts = {
        "pairs": CHUNK * dim * (4 + 4 * LEVELS) + LEVELS * 2 * CHUNK * CHUNK,
        "forward": 4 * state + 3 * within,
        "backward": 3 * state + 2 * within,
        "values": state + 3 * within + 2 * CHUNK * CHUNK,
        "keys": 3 * state + CHUNK * dim * (8 + 6 * LEVELS),
    }
    return counts[kernel]


class Parts(NamedTuple):
    """The arrays of all chunks that a scan needs, in float32.

    If S is the state before a chunk, then `written = alone - less @ S`, the outputs are `query @ S + pairs @ written`,
    and the state after the chunk is `fade * S + key.T @ written`.
    """

    query: Float[Array, "chunks batch heads tokens dim"]
    pairs: Float[Array, "chunks batch heads tokens tokens"]
    alone: Float[Array, "chunks batch heads tokens v_dim"]
    less: Float[Array, "chunks batch heads tokens dim"] | None  # None: nothing is erased
    key: Float[Array, "chunks batch heads tokens dim"]
    fade: Float[Array, "chunks batch heads dim_or_1 1"]


class Scan(NamedTuple):
    """The two passes of an implementation over `Parts`. States are [batch, heads, dim, v_dim].

    `forward(formula, parts, state, keep)` returns the outputs [chunks, batch, heads, tokens, v_dim], the last state,
    and if `keep` the states before each chunk (else None).

    `backward(formula, parts, d_out, d_state)` takes the gradients of the outputs and of the last state. It returns the
    gradients of `written` (shaped like the outputs), of the states after each chunk, and of the first state.

    `formula.precision` is HIGHEST if products have to be those of float32, and HIGH if the operation's inputs have
    16 bits: then TF32 on a GPU, or three products of bfloat16 on a TPU, adds little to the rounding of the result.
    """

    forward: Callable[..., tuple[Array, Array, Array | None]]
    backward: Callable[..., tuple[Array, Array, Array]]


class Formula(NamedTuple):
    """The arguments of the operation that are not arrays, and the precision of its products."""

    scale: float
    erase: bool
    precision: lax.Precision

    def dot(self, x: Float[Array, "*chunks m n"], y: Float[Array, "*chunks n k"]) -> Float[Array, "*chunks m k"]:
        return jnp.matmul(x, y, precision=self.precision)


def refusal(_: Array, __: Array, v: Array, *___: object, **____: object) -> str | None:
    """Returns why chunks cannot compute these arguments of `delta_rule`, or None if they can."""
    return "it computes in float32, and v is float64" if v.dtype == jnp.float64 else None


@functools.partial(jax.jit, static_argnames=("scan", "scale", "erase"))  # so that calls outside jit compile once, too
def delta_rule(
    scan: Scan,
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq heads dim"],
    v: Float[Array, "batch seq v_heads v_dim"],
    decay: Float[Array, "batch seq v_heads"] | Float[Array, "batch seq v_heads dim"],
    beta: Float[Array, "batch seq v_heads"],
    restart: Bool[Array, "batch seq"],
    state: Float[Array, "batch v_heads dim v_dim"],
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch seq v_heads v_dim"], Float[Array, "batch v_heads dim v_dim"]]:
    """Computes `kernels.delta_rule` with this scan."""
    precision = lax.Precision.HIGHEST if v.dtype == jnp.float32 else lax.Precision.HIGH
    return _delta_rule(scan, Formula(scale, erase, precision), (q, k, v, decay, beta), restart, state)


Given = tuple[Array, ...]  # q, k, v, decay and beta


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(scan: Scan, formula: Formula, given: Given, restart: Array, state: Array) -> tuple[Array, Array]:
    out, state, _ = scan.forward(formula, _prepare(formula, given, restart), state, keep=False)
    return _joined(out, given[2]), state


def _forward(
    scan: Scan, formula: Formula, given: Given, restart: Array, state: Array
) -> tuple[tuple[Array, Array], tuple[Given, Array, Array]]:
    out, state, states = scan.forward(formula, _prepare(formula, given, restart), state, keep=True)
    out = checkpoint_name(_joined(out, given[2]), OUT)
    return (out, state), (given, restart, checkpoint_name(states, STATES))


def _backward(
    scan: Scan, formula: Formula, residuals: tuple[Given, Array, Array], gradients: tuple[Array, Array]
) -> tuple[Given, None, Array]:
    given, restart, states = residuals
    # Without the barrier XLA might merge the two preparations, and keep the forward pass's in memory.
    given, restart = lax.optimization_barrier((given, restart))
    parts, pull = jax.vjp(lambda given: _prepare(formula, given, restart), given)
    d_out = _cut(gradients[0])
    d_written, d_states, d_state = scan.backward(formula, parts, d_out, gradients[1])
    dot = formula.dot
    written = parts.alone if parts.less is None else parts.alone - dot(parts.less, states)
    d_fade = jnp.sum(states * d_states, axis=-1, keepdims=True)
    d_parts = Parts(
        query=dot(d_out, turned(states)),
        pairs=dot(d_out, turned(written)),
        alone=d_written,
        less=None if parts.less is None else -dot(d_written, turned(states)),
        key=dot(written, turned(d_states)),
        fade=d_fade if parts.fade.shape[-2] > 1 else jnp.sum(d_fade, axis=-2, keepdims=True),
    )
    return *pull(d_parts), None, d_state


_delta_rule.defvjp(_forward, _backward)


def turned(x: Float[Array, "*chunks m n"]) -> Float[Array, "*chunks n m"]:
    return x.swapaxes(-1, -2)


def padded(x: Float[Array, "*chunks m n"], rows: int, columns: int) -> Float[Array, "*chunks {rows} {columns}"]:
    """Pads matrices with zeros to this size."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, rows - x.shape[-2]), (0, columns - x.shape[-1])])


def fade_row(parts: Parts, wide: int) -> Float[Array, "chunks batch heads 1 {wide}"]:
    """Returns `parts.fade` for each feature of the keys, padded with zeros to `wide`."""
    *chunks, _, dim = parts.key.shape
    return padded(jnp.broadcast_to(turned(parts.fade), (*chunks, 1, dim)), 1, wide)


def _cut(x: Float[Array, "batch seq heads *dim"]) -> Float[Array, "chunks batch heads tokens *dim"]:
    """Splits tokens into chunks, in float32. The last chunk is padded with zeros, which change no state."""
    x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % CHUNK)) + ((0, 0),) * (x.ndim - 2))
    x = x.reshape(len(x), -1, CHUNK, *x.shape[2:])
    return jnp.moveaxis(x, (1, 3), (0, 2)).astype(jnp.float32)


def _joined(out: Float[Array, "chunks batch heads tokens v_dim"], v: Array) -> Float[Array, "batch seq heads v_dim"]:
    """Inverts `_cut`, to the shape and the dtype of v."""
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(len(v), -1, *v.shape[2:])
    return out[:, : v.shape[1]].astype(v.dtype)


def _prepare(formula: Formula, given: Given, restart: Array) -> Parts:
    scale, dot = formula.scale, formula.dot
    q, k, v, decay, beta = given
    group = v.shape[2] // k.shape[2]
    q, k = (jnp.repeat(x.astype(jnp.float32), group, axis=2) for x in (q, k))  # a group's gradients add up in float32
    q, k, v, decay, beta = map(_cut, (q, k, v, decay if decay.ndim == 4 else decay[..., None], beta[..., None]))
    restart = _cut(restart[..., None, None].astype(jnp.float32))
    begun = jnp.cumsum(restart, axis=-2)  # the number of documents begun in the chunk
    total = _totals(jnp.where(restart > 0, 0, decay))  # log of the decay since before the chunk
    same = begun == begun.swapaxes(-1, -2)
    before = jnp.where(begun == 0, jnp.exp(sum(total)), 0)
    key = k * jnp.where(begun == begun[..., -1:, :], jnp.exp(_between(total, total[..., -1:, :])), 0)
    fade = before[..., -1:, :].swapaxes(-1, -2)
    pairs = jnp.where(same, scale * _decayed(dot, q, k, total), 0)
    if not formula.erase:
        return Parts(scale * q * before, pairs, beta * v, None, key, fade)
    matrix = inverse(jnp.where(same, beta * jnp.tril(_decayed(dot, k, k, total), -1), 0))
    return Parts(scale * q * before, pairs, dot(matrix, beta * v), dot(matrix, beta * k * before), key, fade)


def _totals(decay: Float[Array, "*chunks tokens dim_or_1"]) -> Float[Array, "2 *chunks tokens dim_or_1"]:
    """Sums the decays up to each token, as two numbers, so that `_between` loses no digits.

    A strong decay may be 1 between two tokens, and 1,000 since the start of the chunk, where float32 has three decimals
    fewer. So each decay is rounded to a multiple of a power of two. The first number sums the multiples, without any
    rounding error, and the second sums the remainders. The gradient is that of a plain sum.
    """
    largest = CHUNK * jnp.max(jnp.abs(lax.stop_gradient(decay)), axis=-2, keepdims=True)
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(largest, jnp.int32) & 0x7F800000, jnp.float32)
    unit = jnp.maximum(power, 2.0**-40) * 2.0**-22  # sums are below 2^24 units, which float32 counts
    coarse = lax.stop_gradient(jnp.round(decay / unit) * unit)
    return jnp.cumsum(jnp.stack([coarse, decay - coarse]), axis=-2)


def _between(earlier: Float[Array, "2 ..."], later: Float[Array, "2 ..."]) -> Float[Array, "..."]:
    """Subtracts two totals, and so returns the sum of the decays after one token up to another."""
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def _decayed(
    dot: Callable[[Array, Array], Array],
    x: Float[Array, "*chunks tokens dim"],
    k: Float[Array, "*chunks tokens dim"],
    total: Float[Array, "2 *chunks tokens dim_or_1"],
) -> Float[Array, "*chunks tokens tokens"]:
    """Returns the products of x_i and k_j, each channel decayed from token j to token i; 0 for i < j.

    No exponential of a negated sum of decays is computed, because strong decays would make it overflow.
    """
    token = np.arange(CHUNK)
    if total.shape[-1] == 1:  # one decay for all channels
        return dot(x, k.swapaxes(-1, -2)) * _exp(_between(total.swapaxes(-1, -2), total), token[:, None] >= token)
    blocks = lambda a: a.reshape(*a.shape[:-2], -1, BLOCK, a.shape[-1])
    xs, ks, totals, place = blocks(x), blocks(k), blocks(total), np.arange(BLOCK)
    start, block = totals[..., :1, :], token // BLOCK
    # Two tokens in one block: each channel by itself. Totals since the block's start are one number each. With two, XLA
    # writes the decays of all pairs to memory, and a step of Kimi Linear moves 8 % more bytes.
    sums = _between(start, totals)
    # Heads and blocks become one axis. On a CPU with AVX2 YNNPACK dies of sums of products with seven axes, one of them
    # of length 1, before jaxlib 0.11 (https://github.com/jax-ml/jax/issues/39257).
    xn, kn, since = (a.reshape(*a.shape[:-4], -1, *a.shape[-2:]) for a in (xs, ks, sums))
    apart = _exp(since[..., :, None, :] - since[..., None, :, :], (place[:, None] >= place)[..., None])
    near = jnp.sum(xn[..., :, None, :] * kn[..., None, :, :] * apart, axis=-1)
    # A token and one in an earlier block: the decay since the later block's start, times the decay before that.
    earlier = np.arange(CHUNK // BLOCK)[:, None] > block
    late = xs * jnp.exp(sums)
    early = k[..., None, :, :] * _exp(_between(total[..., None, :, :], start), earlier[..., None])
    far = dot(late, early.swapaxes(-1, -2)).reshape(*x.shape[:-1], CHUNK)
    near = jnp.tile(near.reshape(*x.shape[:-1], BLOCK), CHUNK // BLOCK)
    return jnp.where(np.broadcast_to(block[:, None] == block, far.shape), near, far)


def _exp(x: Float[Array, "..."], where: Bool[np.ndarray, "..."]) -> Float[Array, "..."]:
    """Returns exp(x) at `where`, and 0 elsewhere, where exp(x) might overflow."""
    return jnp.exp(jnp.where(np.broadcast_to(where, x.shape), x, -jnp.inf))


@jax.custom_vjp
def inverse(lower: Float[Array, "*chunks size size"]) -> Float[Array, "*chunks size size"]:
    """Inverts 1 + `lower`, which is zero on its diagonal and above; `size` is a power of two.

    Blocks on the diagonal, single elements at first, are merged in pairs: the inverse of [[A, 0], [C, B]] is
    [[1/A, 0], [-1/B C 1/A, 1/B]]. Here the elements of all these inverses are at most about the largest beta, of at
    most 2, since they belong to products of factors 1 - beta k k^T. A Neumann series would have powers of `lower`, with
    elements up to 1e17.
    """
    size, done = lower.shape[-1], jnp.ones((*lower.shape[:-1], 1, 1), lower.dtype)
    while (half := done.shape[-1]) < size:
        corners = [lower[..., i + half : i + 2 * half, i : i + half] for i in range(0, size, 2 * half)]
        first, second = done[..., ::2, :, :], done[..., 1::2, :, :]
        corner = -_times(second, _times(jnp.stack(corners, axis=-3), first))
        above = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
        done = jnp.concatenate([above, jnp.concatenate([corner, second], axis=-1)], axis=-2)
    return done[..., 0, :, :]


def _times(x: Float[Array, "*blocks size size"], y: Float[Array, "*blocks size size"]) -> Array:
    if x.shape[-1] < BLOCK:  # too small for instructions that multiply matrices
        return jnp.sum(x[..., :, :, None] * y[..., None, :, :], axis=-2)
    return jnp.matmul(x, y, precision="highest")


def _inverse_forward(lower: Array) -> tuple[Array, Array]:
    inverted = inverse(lower)
    return inverted, inverted


def _inverse_backward(inverted: Array, gradient: Array) -> tuple[Array]:
    dot = functools.partial(jnp.matmul, precision="highest")
    return (-dot(dot(turned(inverted), gradient), turned(inverted)),)


inverse.defvjp(_inverse_forward, _inverse_backward)
