"""The gated delta rule with a decay for each channel, in bfloat16 for NVIDIA GPUs, fused in five Pallas-Triton kernels.

`kernels.delta_rule.triton_fused` has the five for one decay a head. Here the decay from token j to token i is a vector
D_ij, so it does not factor out of k_i . k_j. In a chunk let S be the state before it, e_i the decays up to token i, and
r_i those from token i to the end. With matrices of a token a row:

    M = (1 + L)^-1       L_ij = beta_i sum_c k_ic D_ijc k_jc for j < i        P_ij = scale sum_c q_ic D_ijc k_jc
    W = V - (e K) S      V' = M (beta W)        out = scale (e Q) S + P V'        S' = e_last S + (r K)^T V'

1. `pairs` computes M, P, e Q, e K and r K, for all chunks at once.
2. `forward` loops over the chunks with columns of a head's state in registers.
3. `backward` does the same from the last chunk on, with the gradient of the state.
4. `values` computes V' again, and from it the gradients of P and L, for all chunks at once.
5. `keys` computes from these the gradients of q, k and the decays.

Sums over channels with D are products of matrices, at six levels. At level n a chunk is cut into groups of 2^(n+1)
tokens. Tokens i and j are a pair of this level if i is in the second half of a group and j in its first half, so each
two tokens are a pair of one level. D_ij is the decay from j to the middle of the group, times that from the middle to
i. Neither factor is above 1, whatever the decays, and each is the power of a sum of decays between two tokens, which no
subtraction has robbed of digits. The levels also invert 1 + L: the inverse of its blocks of 2^n tokens and the pairs of
level n give that of blocks of 2^(n+1).

A document that begins is a decay to exactly 0, so it needs no mask.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float, Int

from kernels.backends.device import device
from kernels.backends.triton import SMALLEST, dot, load, store
from kernels.delta_rule import fused
from kernels.delta_rule.fused import LOG2_E, RESTART, STRONGEST, array, power, product, rows_of, unfit
from kernels.delta_rule.shared import CHUNK, LEVELS, OUT, STATES, channel_products


PLATFORMS = ("gpu",)
RANK = 0


def refusal(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, restart: Array, state: Array, *, scale: float, erase: bool
) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_rule`, or None if it can."""
    if decay.ndim == 3:
        return "it has a decay for each channel, and here a head has one"
    if not erase:
        return "it erases, and here nothing is erased"
    if k.shape[2] != v.shape[2]:
        return f"its value heads share no keys, and here {v.shape[2]} share {k.shape[2]}"
    return unfit(q, k, v)


@functools.partial(jax.jit, static_argnames=("scale", "erase"))  # so that calls outside jit compile once, too
def delta_rule(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq heads dim"],
    v: Float[Array, "batch seq heads v_dim"],
    decay: Float[Array, "batch seq heads dim"],
    beta: Float[Array, "batch seq heads"],
    restart: Bool[Array, "batch seq"],
    state: Float[Array, "batch heads dim v_dim"],
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads dim v_dim"]]:
    """Computes `kernels.delta_rule`, with erasing. Zeros fill the last chunk, and fill vectors up to a power of two.
    They change no state.
    """
    seq, (dim, v_dim) = v.shape[1], state.shape[2:]
    fill = -seq % CHUNK
    more, v_more = (max(SMALLEST, pl.next_power_of_2(width)) - width for width in (dim, v_dim))
    vectors = lambda x, more: jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, more)))
    beta = jnp.pad(beta.astype(jnp.float32), ((0, 0), (0, fill), (0, 0))).swapaxes(1, 2)
    begins = jnp.pad(restart.astype(jnp.int32), ((0, 0), (0, fill)))
    given = vectors(q, more), vectors(k, more), vectors(v, v_more), vectors(decay.astype(jnp.float32), more), beta
    out, last = _delta_rule(scale, *given, begins, jnp.pad(state, ((0, 0), (0, 0), (0, more), (0, v_more))))
    return out[:, :seq, :, :v_dim], last[:, :, :dim, :v_dim]


class _Chunks(NamedTuple):
    """The arrays of all chunks that `pairs` writes."""

    query: Float[Array, "batch seq heads dim"]  # scale e Q
    key: Float[Array, "batch seq heads dim"]  # e K
    left: Float[Array, "batch seq heads dim"]  # r K
    fade: Float[Array, "batch heads chunks dim"]  # the decays over all of a chunk
    inverse: Float[Array, "batch heads seq tokens"]  # M - 1: M's diagonal is not rounded
    pairs: Float[Array, "batch heads seq tokens"]  # P


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _delta_rule(scale: float, *given: Array) -> tuple[Array, Array]:
    out, last, *_ = _run(scale, given, keep=False)
    return out, last


def _forward(scale: float, *given: Array) -> tuple[tuple[Array, Array], tuple[tuple[Array, ...], _Chunks, Array]]:
    out, last, states, chunks = _run(scale, given, keep=True)
    return (checkpoint_name(out, OUT), last), (given, chunks, checkpoint_name(states, STATES))


def _run(scale: float, given: tuple[Array, ...], keep: bool) -> tuple[Array, Array, Array | None, _Chunks]:
    """Returns the outputs, the last state, the states before the chunks if `keep` (else None), and the chunks."""
    q, k, v, decay, beta, begins, state = given
    batch, heads, dim, v_dim = state.shape
    count = v.shape[1] // CHUNK
    run = _runner(scale, k, v)
    vectors, matrices = array(k, *decay.shape), array(k, *beta.shape, CHUNK)
    results = vectors, vectors, vectors, array(beta, batch, heads, count, dim), matrices, matrices
    chunks = _Chunks(*run("pairs", _pairs_kernel, (q, k, decay, begins, beta), results))
    results = array(v), array(state), array(v, batch, heads, count, dim, v_dim) if keep else None
    return *run("forward", _forward_kernel, (*chunks, v, beta, state), results), chunks


def _backward(
    scale: float, residuals: tuple[tuple[Array, ...], _Chunks, Array], gradients: tuple[Array, Array]
) -> tuple[Array | None, ...]:
    ((q, k, v, decay, beta, begins, _), chunks, states), (d_out, d_last) = residuals, gradients
    run = _runner(scale, k, v)
    d_written, d_v, d_states, d_first = run(
        "backward",
        _backward_kernel,
        (*chunks, beta, d_out, d_last),
        (array(v), array(v), array(states), array(d_last)),
    )
    written, d_pairs, d_own, d_lower, d_beta = run(
        "values",
        _values_kernel,
        (chunks.key, v, beta, chunks.inverse, d_out, d_written, states),
        (array(v), array(chunks.pairs), array(beta), array(chunks.inverse), array(beta)),
    )
    parts = k.shape[3] // fused.sizes(__name__, "keys", k, v)["dim"]
    d_q, d_k, d_decay, more = run(
        "keys",
        _keys_kernel,
        (q, k, decay, begins, beta, chunks.fade, d_out, written, d_v, d_pairs, d_own, d_lower, states, d_states),
        (array(q), array(k), array(decay), array(beta, parts, *beta.shape)),
    )
    return d_q, d_k, d_v, d_decay, d_beta + more.sum(axis=0), None, d_first


_delta_rule.defvjp(_forward, _backward)


def _runner(scale: float, k: Array, v: Array) -> Callable[..., Any]:
    return functools.partial(fused.run, __name__, "channels", channel_products, scale, k, v)


def _pairs_kernel(
    scale: float,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    decay_ref: Any,
    begins_ref: Any,
    beta_ref: Any,
    query_ref: Any,
    key_ref: Any,
    left_ref: Any,
    fade_ref: Any,
    inverse_ref: Any,
    pairs_ref: Any,
) -> None:
    chunk, head, batch = (pl.program_id(axis) for axis in range(3))
    of_head, rows, (row, column) = (batch, head), rows_of(chunk), _tokens()
    beta = load(beta_ref.at[*of_head, rows])[:, None]
    parts = k_ref.shape[3] // size["dim"]

    def vectors(part: Array) -> tuple[Any, Array, Array, Array]:
        features = pl.ds(part * size["dim"], size["dim"])
        q, k = (load(ref.at[batch, rows, head, features]).astype(jnp.float32) for ref in (q_ref, k_ref))
        return features, q, k, _logarithms(decay_ref, begins_ref, batch, rows, head, features)

    def of_states(part: Array, own: Array) -> Array:
        features, q, k, decay = vectors(part)
        since, until = (power(_sums(which, decay)) for which in (column <= row, column > row))
        for ref, x in ((query_ref, scale * since * q), (key_ref, since * k), (left_ref, until * k)):
            store(ref.at[batch, rows, head, features], x.astype(ref.dtype))
        store(fade_ref.at[*of_head, chunk, features], power(jnp.sum(decay, axis=0)))
        return own + jnp.sum(q * k, axis=1)

    own = lax.fori_loop(0, parts, of_states, jnp.zeros(CHUNK, jnp.float32))
    pairs = jnp.where(row == column, scale * own[:, None], 0)
    store(pairs_ref.at[*of_head, rows], pairs.astype(pairs_ref.dtype), row <= column)

    def merge(level: Array, inverse: Array) -> Array:
        def of_part(part: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
            _, q, k, decay = vectors(part)
            factor = power(_sums(_between(level), decay))
            keys = factor * k
            return sums[0] + product(factor * q, keys, over=(1, 1)), sums[1] + product(keys, keys, over=(1, 1))

        here, zeros = _paired(level), jnp.zeros((CHUNK, CHUNK), jnp.float32)
        of_queries, of_keys = lax.fori_loop(0, parts, of_part, (zeros, zeros))
        store(pairs_ref.at[*of_head, rows], (scale * of_queries).astype(pairs_ref.dtype), here)
        return inverse - product(inverse, product(jnp.where(here, beta * of_keys, 0), inverse))

    eye = jnp.where(row == column, 1.0, 0.0)
    inverse = lax.fori_loop(0, LEVELS, merge, eye) - eye
    store(inverse_ref.at[*of_head, rows], inverse.astype(inverse_ref.dtype))


def _forward_kernel(
    scale: float,
    size: dict[str, int],
    query_ref: Any,
    key_ref: Any,
    left_ref: Any,
    fade_ref: Any,
    inverse_ref: Any,
    pairs_ref: Any,
    v_ref: Any,
    beta_ref: Any,
    first_ref: Any,
    out_ref: Any,
    last_ref: Any,
    states_ref: Any,
) -> None:
    part, head, batch = (pl.program_id(axis) for axis in range(3))
    of_head, columns = (batch, head), pl.ds(part * size["v"], size["v"])

    def step(chunk: Array, state: Array) -> Array:
        rows, before = rows_of(chunk), state.astype(key_ref.dtype)
        if states_ref is not None:
            store(states_ref.at[*of_head, chunk, :, columns], before)
        query, key, left = (load(ref.at[batch, rows, head]) for ref in (query_ref, key_ref, left_ref))
        written = load(v_ref.at[batch, rows, head, columns]).astype(jnp.float32) - dot(key, before)
        written *= load(beta_ref.at[*of_head, rows])[:, None]
        written += dot(load(inverse_ref.at[*of_head, rows]), written.astype(key.dtype))
        # As e Q and r K are rounded, V' is not, or outputs would be less exact than with one decay a head.
        pairs, out = load(pairs_ref.at[*of_head, rows]), dot(query, before)
        state *= load(fade_ref.at[*of_head, chunk])[:, None]
        for piece in _halves(written):
            out += dot(pairs, piece)
            state += dot(left, piece, over=(0, 0))
        store(out_ref.at[batch, rows, head, columns], out.astype(out_ref.dtype))
        return state

    chunks = beta_ref.shape[2] // CHUNK
    store(last_ref.at[*of_head, :, columns], lax.fori_loop(0, chunks, step, load(first_ref.at[*of_head, :, columns])))


def _backward_kernel(
    scale: float,
    size: dict[str, int],
    query_ref: Any,
    key_ref: Any,
    left_ref: Any,
    fade_ref: Any,
    inverse_ref: Any,
    pairs_ref: Any,
    beta_ref: Any,
    d_out_ref: Any,
    d_last_ref: Any,
    d_written_ref: Any,
    d_v_ref: Any,
    d_states_ref: Any,
    d_first_ref: Any,
) -> None:
    part, head, batch = (pl.program_id(axis) for axis in range(3))
    of_head, columns, chunks = (batch, head), pl.ds(part * size["v"], size["v"]), beta_ref.shape[2] // CHUNK

    def step(n: Array, d_state: Array) -> Array:
        chunk = chunks - 1 - n
        rows, after = rows_of(chunk), d_state.astype(key_ref.dtype)
        store(d_states_ref.at[*of_head, chunk, :, columns], after)
        query, key, left = (load(ref.at[batch, rows, head]) for ref in (query_ref, key_ref, left_ref))
        d_out = load(d_out_ref.at[batch, rows, head, columns])
        d_written = dot(left, after) + dot(load(pairs_ref.at[*of_head, rows]), d_out, over=(0, 0))
        rounded = d_written.astype(key.dtype)
        store(d_written_ref.at[batch, rows, head, columns], rounded)
        d_written += dot(load(inverse_ref.at[*of_head, rows]), rounded, over=(0, 0))
        d_v = (load(beta_ref.at[*of_head, rows])[:, None] * d_written).astype(d_v_ref.dtype)
        store(d_v_ref.at[batch, rows, head, columns], d_v)
        d_state *= load(fade_ref.at[*of_head, chunk])[:, None]
        return d_state - dot(key, d_v, over=(0, 0)) + dot(query, d_out, over=(0, 0))

    d_state = lax.fori_loop(0, chunks, step, load(d_last_ref.at[*of_head, :, columns]))
    store(d_first_ref.at[*of_head, :, columns], d_state)


def _values_kernel(
    scale: float,
    size: dict[str, int],
    key_ref: Any,
    v_ref: Any,
    beta_ref: Any,
    inverse_ref: Any,
    d_out_ref: Any,
    d_written_ref: Any,
    states_ref: Any,
    written_ref: Any,
    d_pairs_ref: Any,
    d_own_ref: Any,
    d_lower_ref: Any,
    d_beta_ref: Any,
) -> None:
    """Writes the gradients of P, its diagonal by itself, and of L / beta. No kernel reads them above the diagonal."""
    chunk, head, batch = (pl.program_id(axis) for axis in range(3))
    of_head, rows, (row, column) = (batch, head), rows_of(chunk), _tokens()
    beta, inverse = load(beta_ref.at[*of_head, rows]), load(inverse_ref.at[*of_head, rows])
    key = load(key_ref.at[batch, rows, head])
    d_pairs, d_inverse = (jnp.zeros((CHUNK, CHUNK), jnp.float32) for _ in range(2))
    for start in range(0, v_ref.shape[3], size["v"]):
        columns = pl.ds(start, size["v"])
        written = load(v_ref.at[batch, rows, head, columns]).astype(jnp.float32)
        written -= dot(key, load(states_ref.at[*of_head, chunk, :, columns]))
        d_inverse += dot(load(d_written_ref.at[batch, rows, head, columns]), written.astype(key.dtype), over=(1, 1))
        written *= beta[:, None]
        written += dot(inverse, written.astype(key.dtype))
        written = written.astype(written_ref.dtype)
        store(written_ref.at[batch, rows, head, columns], written)
        d_pairs += dot(load(d_out_ref.at[batch, rows, head, columns]), written, over=(1, 1))
    same = row == column
    store(d_own_ref.at[*of_head, rows], scale * jnp.sum(jnp.where(same, d_pairs, 0), axis=1))
    store(d_pairs_ref.at[*of_head, rows], (scale * d_pairs).astype(d_pairs_ref.dtype))
    # M's gradient is d_inverse times beta, of its columns. That of the matrix that it inverts is -M^T dM M^T.
    d_beta = jnp.sum(jnp.where(same, 1, inverse.astype(jnp.float32)) * d_inverse, axis=0)
    store(d_beta_ref.at[*of_head, rows], d_beta)
    d_inverse *= beta[None, :]
    d_inverse += dot(inverse, d_inverse.astype(key.dtype), over=(0, 0))
    d_inverse += dot(d_inverse.astype(key.dtype), inverse, over=(1, 1))
    store(d_lower_ref.at[*of_head, rows], (-d_inverse).astype(d_lower_ref.dtype))


def _keys_kernel(
    scale: float,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    decay_ref: Any,
    begins_ref: Any,
    beta_ref: Any,
    fade_ref: Any,
    d_out_ref: Any,
    written_ref: Any,
    d_v_ref: Any,
    d_pairs_ref: Any,
    d_own_ref: Any,
    d_lower_ref: Any,
    states_ref: Any,
    d_states_ref: Any,
    d_q_ref: Any,
    d_k_ref: Any,
    d_decay_ref: Any,
    d_beta_ref: Any,
) -> None:
    """Writes the gradients of some features of q, k and the decays, and their share of that of beta."""
    part, chunk, which = (pl.program_id(axis) for axis in range(3))
    batch, head = lax.div(which, k_ref.shape[2]), lax.rem(which, k_ref.shape[2])
    of_head, rows, features, (row, column) = (
        (batch, head),
        rows_of(chunk),
        pl.ds(part * size["dim"], size["dim"]),
        _tokens(),
    )
    q, k = (load(ref.at[batch, rows, head, features]).astype(jnp.float32) for ref in (q_ref, k_ref))
    decay = _logarithms(decay_ref, begins_ref, batch, rows, head, features)
    beta, own = (load(ref.at[*of_head, rows])[:, None] for ref in (beta_ref, d_own_ref))

    def of_level(level: Array, sums: tuple[Array, ...]) -> tuple[Array, ...]:
        d_q, d_k, d_total, d_beta = sums
        factor = power(_sums(_between(level), decay))
        queries, keys, rates = (x.astype(q_ref.dtype) for x in (factor * q, factor * k, factor * beta * k))
        here, zero = _paired(level), jnp.zeros((), q_ref.dtype)
        d_pairs, d_lower = (load(ref.at[*of_head, rows], here, zero) for ref in (d_pairs_ref, d_lower_ref))
        of_query, of_key = dot(d_pairs, keys), dot(d_lower, keys)
        earlier = dot(d_pairs, queries, over=(0, 0)) + dot(d_lower, rates, over=(0, 0))
        # The factors are those that the products have seen: what two tokens add then cancels after both.
        seen = [x.astype(jnp.float32) for x in (queries, keys, rates)]
        d_total += seen[0] * of_query + seen[2] * of_key - seen[1] * earlier
        d_beta += jnp.sum(seen[1] * of_key, axis=1)
        return d_q + factor * of_query, d_k + factor * (beta * of_key + earlier), d_total, d_beta

    zeros = [jnp.zeros((CHUNK, size["dim"]), jnp.float32)] * 3
    d_q, d_k, d_total, d_beta = lax.fori_loop(0, LEVELS, of_level, (*zeros, jnp.zeros(CHUNK, jnp.float32)))
    store(d_beta_ref.at[part, *of_head, rows], d_beta)
    state, d_state = (load(ref.at[*of_head, chunk, features]) for ref in (states_ref, d_states_ref))
    reads = lambda ref, state: dot(load(ref.at[batch, rows, head]), state, over=(1, 1))
    since, until = (power(_sums(which, decay)) for which in (column <= row, column > row))
    of_query, of_key = scale * since * reads(d_out_ref, state), -since * reads(d_v_ref, state)
    left = until * reads(written_ref, d_state)
    d_q += of_query + own * k
    d_k += of_key + left + own * q
    store(d_q_ref.at[batch, rows, head, features], d_q.astype(d_q_ref.dtype))
    store(d_k_ref.at[batch, rows, head, features], d_k.astype(d_k_ref.dtype))
    # A decay is in the sums of its token and those after it, and it decays what tokens before it leave to the end.
    d_total += q * of_query + k * of_key
    fade = load(fade_ref.at[*of_head, chunk, features])
    fade *= jnp.sum(state.astype(jnp.float32) * d_state.astype(jnp.float32), axis=1)
    d_decay = _sums(column >= row, d_total) + _sums(column < row, k * left) + fade[None, :]
    given = load(decay_ref.at[batch, rows, head, features])
    held = (load(begins_ref.at[batch, rows])[:, None] > 0) | (given < STRONGEST)
    store(d_decay_ref.at[batch, rows, head, features], jnp.where(held, 0, d_decay))


def _tokens() -> tuple[Int[Array, "tokens 1"], Int[Array, "1 tokens"]]:
    """Returns the indices of a chunk's tokens, as those of a matrix's rows and of its columns."""
    token = jnp.arange(CHUNK, dtype=jnp.int32)
    return token[:, None], token[None, :]


def _paired(level: Array) -> Bool[Array, "tokens tokens"]:
    """Returns which tokens are in the second half of a group of this level, and which in the first half of the same."""
    row, column = _tokens()
    half, other = lax.shift_right_logical(row, level), lax.shift_right_logical(column, level)
    return ((half ^ 1) == other) & (row > column)


def _between(level: Array) -> Bool[Array, "tokens tokens"]:
    """Returns for each token which decays lie between it and the middle of its group of this level."""
    row, column = _tokens()
    half, other = lax.shift_right_logical(row, level), lax.shift_right_logical(column, level)
    return (half == other) & (((half & 1) == 1) ^ (column > row))


def _logarithms(
    decay_ref: Any, begins_ref: Any, batch: Array, rows: Any, head: Array, features: Any
) -> Float[Array, "tokens dim"]:
    """Returns the binary logarithms of a chunk's decays."""
    decay = jnp.maximum(load(decay_ref.at[batch, rows, head, features]), STRONGEST)
    return LOG2_E * jnp.where(load(begins_ref.at[batch, rows])[:, None] > 0, RESTART, decay)


def _sums(which: Bool[Array, "rows tokens"], x: Float[Array, "tokens dim"]) -> Float[Array, "rows dim"]:
    """Sums some tokens of x for each row."""
    high, low = _halves(x)
    return dot(which.astype(high.dtype), high) + dot(which.astype(low.dtype), low)


def _halves(x: Float[Array, "*shape"]) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Returns two numbers in bfloat16 whose sum has 16 bits of x."""
    high = x.astype(jnp.bfloat16)
    # On a CPU XLA would take x itself for a number that it has rounded and widens again.
    seen = lax.reduce_precision(x, 8, 7) if device().platform == "cpu" else high.astype(jnp.float32)
    return high, (x - seen).astype(jnp.bfloat16)
