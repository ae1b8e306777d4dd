"""The gated delta rule in bfloat16 for NVIDIA GPUs, fused in five Pallas-Triton kernels.

`kernels.delta_rule.shared` has the derivation in chunks. Here the arrays between the kernels are those of a chunk's
tokens in bfloat16. In a chunk let S be the state before it, e_i = exp(G_i) the decay up to token i, D_ij the decay from
token j to token i, 0 for i < j, and r_i the decay from token i to the end. With matrices of a token a row:

    M = (1 + tril(beta_i D_ij k_i . k_j, -1))^-1        P_ij = scale D_ij q_i . k_j
    W = V - e K S        V' = M (beta W)        out = scale e Q S + P V'        S' = e_last S + K^T (r V')

1. `pairs` computes M and P, for all chunks at once.
2. `forward` loops over the chunks with columns of a head's state in registers.
3. `backward` does the same from the last chunk on, with the gradient of the state.
4. `values` computes V' again, and from it the gradients of M, P and beta, for all chunks at once.
5. `keys` sums the gradients of q and k over the heads of a group, and computes those of G.

Where nothing is erased, V' is beta V, and M is left out. A document that begins is a decay to exactly 0, so it needs no
mask.
"""

import functools
import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import pallas as pl
from jaxtyping import Array, Bool, Float

from kernels.backends.triton import SMALLEST, dot, load, store
from kernels.delta_rule import fused
from kernels.delta_rule.fused import LOG2_E, RESTART, STRONGEST, array, power, product, rows_of, unfit
from kernels.delta_rule.shared import BLOCK, CHUNK, OUT, STATES, fused_products


PLATFORMS = ("gpu",)
RANK = 1


def refusal(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, restart: Array, state: Array, *, scale: float, erase: bool
) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_rule`, or None if it can."""
    if decay.ndim == 4:
        return "it has one decay for a head, and here each channel has its own"
    return unfit(q, k, v)


@functools.partial(jax.jit, static_argnames=("scale", "erase"))  # so that calls outside jit compile once, too
def delta_rule(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq heads dim"],
    v: Float[Array, "batch seq v_heads v_dim"],
    decay: Float[Array, "batch seq v_heads"],
    beta: Float[Array, "batch seq v_heads"],
    restart: Bool[Array, "batch seq"],
    state: Float[Array, "batch v_heads dim v_dim"],
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch seq v_heads v_dim"], Float[Array, "batch v_heads dim v_dim"]]:
    """Computes `kernels.delta_rule`. Zeros fill the last chunk, and fill vectors up to a power of two. They change no
    state.
    """
    seq, (dim, v_dim) = v.shape[1], state.shape[2:]
    fill = -seq % CHUNK
    more, v_more = (max(SMALLEST, pl.next_power_of_2(width)) - width for width in (dim, v_dim))
    vectors = lambda x, more: jnp.pad(x, ((0, 0), (0, fill), (0, 0), (0, more)))
    numbers = lambda x: jnp.pad(x.astype(jnp.float32), ((0, 0), (0, fill), (0, 0))).swapaxes(1, 2)
    decay = jnp.where(restart[..., None], RESTART, jnp.maximum(decay.astype(jnp.float32), STRONGEST))
    given = vectors(q, more), vectors(k, more), vectors(v, v_more), numbers(decay), numbers(beta)
    out, last = _delta_rule(scale, erase, *given, jnp.pad(state, ((0, 0), (0, 0), (0, more), (0, v_more))))
    return out[:, :seq, :, :v_dim], last[:, :, :dim, :v_dim]


class _Chunks(NamedTuple):
    """The arrays of all chunks that the kernels after `pairs` read."""

    q: Float[Array, "batch seq heads dim"]
    k: Float[Array, "batch seq heads dim"]
    v: Float[Array, "batch seq v_heads v_dim"]
    total: Float[Array, "batch v_heads seq"]  # the binary logarithm of the decay since before the chunk
    beta: Float[Array, "batch v_heads seq"]
    inverse: Float[Array, "batch v_heads seq tokens"] | None  # M - 1: M's diagonal is not rounded. None: no erasing
    pairs: Float[Array, "batch v_heads seq tokens"]  # P


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _delta_rule(scale: float, erase: bool, *given: Array) -> tuple[Array, Array]:
    out, last, *_ = _run(scale, erase, given, keep=False)
    return out, last


def _forward(scale: float, erase: bool, *given: Array) -> tuple[tuple[Array, Array], tuple[_Chunks, Array]]:
    out, last, states, chunks = _run(scale, erase, given, keep=True)
    return (checkpoint_name(out, OUT), last), (chunks, checkpoint_name(states, STATES))


def _run(scale: float, erase: bool, given: tuple[Array, ...], keep: bool) -> tuple[Array, Array, Array | None, _Chunks]:
    """Returns the outputs, the last state, the states before the chunks if `keep` (else None), and the chunks."""
    q, k, v, decay, beta, state = given
    total = LOG2_E * lax.cumsum(_by_chunk(decay), axis=3).reshape(decay.shape)
    matrices = array(q, *beta.shape, CHUNK)
    run = _runner(scale, erase, k, v)
    inverse, pairs = run("pairs", _pairs_kernel, (q, k, total, beta), (matrices if erase else None, matrices))
    chunks = _Chunks(q, k, v, total, beta, inverse, pairs)
    batch, heads, *matrix = state.shape
    states = array(q, batch, heads, v.shape[1] // CHUNK, *matrix) if keep else None
    results = array(v), array(state), states
    return *run("forward", _forward_kernel, (*chunks, state), results), chunks


def _backward(
    scale: float, erase: bool, residuals: tuple[_Chunks, Array], gradients: tuple[Array, Array]
) -> tuple[Array, ...]:
    (chunks, states), (d_out, d_last) = residuals, gradients
    q, k, v, total, beta, inverse, pairs = chunks
    run = _runner(scale, erase, k, v)
    d_written, d_v, d_states, d_first = run(
        "backward",
        _backward_kernel,
        (q, k, total, beta, inverse, pairs, d_out, d_last),
        (array(v), array(v), array(states), array(d_last)),
    )
    written, d_pairs, d_own, d_keys, d_beta = run(
        "values",
        _values_kernel,
        (k, v, total, beta, inverse, d_out, d_written, states if erase else None),
        (array(v), array(pairs), array(beta), array(pairs) if erase else None, array(beta)),
    )
    parts = k.shape[3] // fused.sizes(__name__, "keys", k, v)["dim"]
    d_q, d_k, *sums = run(
        "keys",
        _keys_kernel,
        (q, k, total, d_out, written, d_v if erase else None, d_pairs, d_own, d_keys, states, d_states),
        (array(q), array(k), *[array(beta, parts, *beta.shape)] * 2, array(beta, parts, *states.shape[:3])),
    )
    d_total, d_until, d_fade = (x.sum(axis=0) for x in sums)
    # A decay is in the totals of its token and those after it, and it decays what tokens before it leave to the chunk's
    # end. The latter are summed by themselves, because their difference from the sum of all would have fewer digits.
    d_decay = lax.cumsum(_by_chunk(d_total), axis=3, reverse=True) + d_fade[..., None]
    d_decay += lax.cumsum(jnp.pad(_by_chunk(d_until)[..., :-1], ((0, 0), (0, 0), (0, 0), (1, 0))), axis=3)
    return d_q, d_k, d_v, d_decay.reshape(beta.shape), d_beta, d_first


_delta_rule.defvjp(_forward, _backward)


def _runner(scale: float, erase: bool, k: Array, v: Array) -> Callable[..., Any]:
    products = functools.partial(fused_products, erase=erase)
    return functools.partial(fused.run, __name__, f"fused{'' if erase else '_additive'}", products, scale, k, v)


def _by_chunk(x: Float[Array, "batch v_heads seq"]) -> Float[Array, "batch v_heads chunks tokens"]:
    return x.reshape(*x.shape[:2], -1, CHUNK)


def _pairs_kernel(
    scale: float,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    total_ref: Any,
    beta_ref: Any,
    inverse_ref: Any,
    pairs_ref: Any,
) -> None:
    """Writes P and M. It inverts blocks of `BLOCK` tokens on the diagonal row by row, and then the others from them."""
    chunk, head, batch = (pl.program_id(axis) for axis in range(3))
    kv_head, of_head = lax.div(head, beta_ref.shape[1] // k_ref.shape[2]), (batch, head)
    rows = rows_of(chunk)
    total = load(total_ref.at[*of_head, rows])
    products = dot(load(q_ref.at[batch, rows, kv_head]), load(k_ref.at[batch, rows, kv_head]), over=(1, 1))
    store(pairs_ref.at[*of_head, rows], (scale * products * _decays(total, total)).astype(pairs_ref.dtype))

    if inverse_ref is None:
        return

    n, token = CHUNK // BLOCK, jnp.arange(BLOCK, dtype=jnp.int32)
    parts = [pl.ds(chunk * CHUNK + i * BLOCK, BLOCK) for i in range(n)]
    keys = [load(k_ref.at[batch, part, kv_head]) for part in parts]
    totals, betas = ([load(ref.at[*of_head, part]) for part in parts] for ref in (total_ref, beta_ref))
    later, eye = token[:, None] > token[None, :], (token[:, None] == token[None, :]).astype(jnp.float32)
    lower = {}
    for i, j in itertools.combinations_with_replacement(range(n), 2):
        decays = _decays(totals[j], totals[i]) if i == j else power(totals[j][:, None] - totals[i][None, :])
        lower[j, i] = betas[j][:, None] * dot(keys[j], keys[i], over=(1, 1)) * decays

    def solve(row: Array, found: list[Array]) -> list[Array]:
        here = token[:, None] == row
        of_row = [jnp.sum(jnp.where(here & later, lower[i, i], 0), axis=0) for i in range(n)]
        new = [jnp.sum(x[:, None] * f, axis=0) for x, f in zip(of_row, found, strict=True)]
        return [jnp.where(here, f - x[None, :], f) for x, f in zip(new, found, strict=True)]

    found = dict(zip(((i, i) for i in range(n)), lax.fori_loop(1, BLOCK, solve, [eye] * n), strict=True))
    for apart in range(1, n):
        for j in range(n - apart):
            i = j + apart
            total = functools.reduce(jnp.add, [product(lower[i, m], found[m, j]) for m in range(j, i)])
            found[i, j] = -product(found[i, i], total)
    for i in range(n):
        for j in range(n):
            block = found[i, j] if i > j else found[i, i] - eye if i == j else jnp.zeros_like(eye)
            store(inverse_ref.at[*of_head, parts[i], pl.ds(j * BLOCK, BLOCK)], block.astype(inverse_ref.dtype))


def _forward_kernel(
    scale: float,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    v_ref: Any,
    total_ref: Any,
    beta_ref: Any,
    inverse_ref: Any,
    pairs_ref: Any,
    first_ref: Any,
    out_ref: Any,
    last_ref: Any,
    states_ref: Any,
) -> None:
    part, head, batch = (pl.program_id(axis) for axis in range(3))
    kv_head, of_head = lax.div(head, v_ref.shape[2] // k_ref.shape[2]), (batch, head)
    columns = pl.ds(part * size["v"], size["v"])

    def step(chunk: Array, state: Array) -> Array:
        rows, before = rows_of(chunk), state.astype(k_ref.dtype)
        if states_ref is not None:
            store(states_ref.at[*of_head, chunk, :, columns], before)
        q, k = load(q_ref.at[batch, rows, kv_head]), load(k_ref.at[batch, rows, kv_head])
        since, until, whole = _fades(total_ref, of_head, chunk)
        written = load(v_ref.at[batch, rows, head, columns]).astype(jnp.float32)
        if inverse_ref is not None:
            written -= since * dot(k, before)
        written *= load(beta_ref.at[*of_head, rows])[:, None]
        if inverse_ref is not None:
            written += dot(load(inverse_ref.at[*of_head, rows]), written.astype(k.dtype))
        out = (scale * since) * dot(q, before) + dot(load(pairs_ref.at[*of_head, rows]), written.astype(k.dtype))
        store(out_ref.at[batch, rows, head, columns], out.astype(out_ref.dtype))
        return whole * state + dot(k, (until * written).astype(k.dtype), over=(0, 0))

    chunks = total_ref.shape[2] // CHUNK
    store(last_ref.at[*of_head, :, columns], lax.fori_loop(0, chunks, step, load(first_ref.at[*of_head, :, columns])))


def _backward_kernel(
    scale: float,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    total_ref: Any,
    beta_ref: Any,
    inverse_ref: Any,
    pairs_ref: Any,
    d_out_ref: Any,
    d_last_ref: Any,
    d_written_ref: Any,
    d_v_ref: Any,
    d_states_ref: Any,
    d_first_ref: Any,
) -> None:
    part, head, batch = (pl.program_id(axis) for axis in range(3))
    kv_head, of_head = lax.div(head, d_out_ref.shape[2] // k_ref.shape[2]), (batch, head)
    columns, chunks = pl.ds(part * size["v"], size["v"]), total_ref.shape[2] // CHUNK

    def step(n: Array, d_state: Array) -> Array:
        chunk = chunks - 1 - n
        rows, after = rows_of(chunk), d_state.astype(k_ref.dtype)
        store(d_states_ref.at[*of_head, chunk, :, columns], after)
        q, k = load(q_ref.at[batch, rows, kv_head]), load(k_ref.at[batch, rows, kv_head])
        d_out = load(d_out_ref.at[batch, rows, head, columns])
        since, until, whole = _fades(total_ref, of_head, chunk)
        d_written = until * dot(k, after) + dot(load(pairs_ref.at[*of_head, rows]), d_out, over=(0, 0))
        rounded = d_written.astype(k.dtype)
        store(d_written_ref.at[batch, rows, head, columns], rounded)
        if inverse_ref is not None:
            d_written += dot(load(inverse_ref.at[*of_head, rows]), rounded, over=(0, 0))
        d_v = load(beta_ref.at[*of_head, rows])[:, None] * d_written
        store(d_v_ref.at[batch, rows, head, columns], d_v.astype(d_v_ref.dtype))
        d_state *= whole
        if inverse_ref is not None:
            d_state -= dot(k, (since * d_v).astype(k.dtype), over=(0, 0))
        return d_state + dot(q, ((scale * since) * d_out.astype(jnp.float32)).astype(q.dtype), over=(0, 0))

    d_state = lax.fori_loop(0, chunks, step, load(d_last_ref.at[*of_head, :, columns]))
    store(d_first_ref.at[*of_head, :, columns], d_state)


def _values_kernel(
    scale: float,
    size: dict[str, int],
    k_ref: Any,
    v_ref: Any,
    total_ref: Any,
    beta_ref: Any,
    inverse_ref: Any,
    d_out_ref: Any,
    d_written_ref: Any,
    states_ref: Any,
    written_ref: Any,
    d_pairs_ref: Any,
    d_own_ref: Any,
    d_keys_ref: Any,
    d_beta_ref: Any,
) -> None:
    """Writes the gradients of Q K^T, its diagonal by itself, and of K K^T, below the diagonal."""
    chunk, head, batch = (pl.program_id(axis) for axis in range(3))
    kv_head, of_head = lax.div(head, v_ref.shape[2] // k_ref.shape[2]), (batch, head)
    rows = rows_of(chunk)
    total, beta = load(total_ref.at[*of_head, rows]), load(beta_ref.at[*of_head, rows])
    d_pairs, d_inverse = (jnp.zeros((CHUNK, CHUNK), jnp.float32) for _ in range(2))
    d_beta = jnp.zeros(CHUNK, jnp.float32)
    if inverse_ref is not None:
        k, inverse = load(k_ref.at[batch, rows, kv_head]), load(inverse_ref.at[*of_head, rows])
        since = power(total)[:, None]
    for start in range(0, v_ref.shape[3], size["v"]):
        columns = pl.ds(start, size["v"])
        written = load(v_ref.at[batch, rows, head, columns]).astype(jnp.float32)
        d_written = load(d_written_ref.at[batch, rows, head, columns])
        if inverse_ref is None:
            d_beta += jnp.sum(d_written.astype(jnp.float32) * written, axis=1)
            written *= beta[:, None]
        else:
            written -= since * dot(k, load(states_ref.at[*of_head, chunk, :, columns]))
            d_inverse += dot(d_written, written.astype(k.dtype), over=(1, 1))
            written *= beta[:, None]
            written += dot(inverse, written.astype(k.dtype))
        written = written.astype(written_ref.dtype)
        store(written_ref.at[batch, rows, head, columns], written)
        d_pairs += dot(load(d_out_ref.at[batch, rows, head, columns]), written, over=(1, 1))
    token = jnp.arange(CHUNK, dtype=jnp.int32)
    same, later = token[:, None] == token[None, :], token[:, None] > token[None, :]
    store(d_own_ref.at[*of_head, rows], scale * jnp.sum(jnp.where(same, d_pairs, 0), axis=1))
    decays = jnp.where(later, _decays(total, total), 0)
    store(d_pairs_ref.at[*of_head, rows], (scale * d_pairs * decays).astype(d_pairs_ref.dtype))
    if inverse_ref is None:
        store(d_beta_ref.at[*of_head, rows], d_beta)
        return
    # M's gradient is d_inverse times beta, of its columns. That of the matrix that it inverts is -M^T dM M^T.
    d_beta += jnp.sum((inverse.astype(jnp.float32) + same.astype(jnp.float32)) * d_inverse, axis=0)
    d_inverse *= beta[None, :]
    d_inverse += dot(inverse, d_inverse.astype(k.dtype), over=(0, 0))
    d_inverse += dot(d_inverse.astype(k.dtype), inverse, over=(1, 1))
    d_keys = -d_inverse * decays
    store(d_beta_ref.at[*of_head, rows], d_beta + jnp.sum(d_keys * dot(k, k, over=(1, 1)), axis=1))
    store(d_keys_ref.at[*of_head, rows], (d_keys * beta[:, None]).astype(d_keys_ref.dtype))


def _keys_kernel(
    scale: float,
    size: dict[str, int],
    q_ref: Any,
    k_ref: Any,
    total_ref: Any,
    d_out_ref: Any,
    written_ref: Any,
    d_v_ref: Any,
    d_pairs_ref: Any,
    d_own_ref: Any,
    d_keys_ref: Any,
    states_ref: Any,
    d_states_ref: Any,
    d_q_ref: Any,
    d_k_ref: Any,
    d_total_ref: Any,
    d_until_ref: Any,
    d_fade_ref: Any,
) -> None:
    """Writes the gradients of some features of q and k, and their share of those of the decays, by what they decay."""
    part, chunk, which = (pl.program_id(axis) for axis in range(3))
    batch, kv_head = lax.div(which, k_ref.shape[2]), lax.rem(which, k_ref.shape[2])
    rows, features = rows_of(chunk), pl.ds(part * size["dim"], size["dim"])
    q, k = load(q_ref.at[batch, rows, kv_head, features]), load(k_ref.at[batch, rows, kv_head, features])
    group = d_out_ref.shape[2] // k_ref.shape[2]

    def of_head(n: Array, sums: tuple[Array, Array]) -> tuple[Array, Array]:
        d_q, d_k = sums
        head = kv_head * group + n
        since, until, whole = _fades(total_ref, (batch, head), chunk)
        vectors = lambda ref: load(ref.at[batch, rows, head])
        state, d_state = (load(ref.at[batch, head, chunk, features]) for ref in (states_ref, d_states_ref))
        d_pairs = load(d_pairs_ref.at[batch, head, rows])
        # As a later token, which decays what is before it; as an earlier one; and as one before the chunk's end.
        of_query = (scale * since) * dot(vectors(d_out_ref), state, over=(1, 1)) + dot(d_pairs, k)
        earlier, later = dot(d_pairs, q, over=(0, 0)), jnp.zeros_like(d_k)
        if d_keys_ref is not None:
            d_keys = load(d_keys_ref.at[batch, head, rows])
            later = dot(d_keys, k) - since * dot(vectors(d_v_ref), state, over=(1, 1))
            earlier += dot(d_keys, k, over=(0, 0))
        left = until * dot(vectors(written_ref), d_state, over=(1, 1))
        dots = lambda x, y: jnp.sum(x.astype(jnp.float32) * y, axis=1)
        store(d_total_ref.at[part, batch, head, rows], dots(q, of_query) + dots(k, later) - dots(k, earlier))
        store(d_until_ref.at[part, batch, head, rows], dots(k, left))
        d_fade_ref[part, batch, head, chunk] = whole * jnp.sum(dots(state, d_state.astype(jnp.float32)))
        own = load(d_own_ref.at[batch, head, rows])[:, None]
        return d_q + of_query + own * k.astype(jnp.float32), d_k + later + earlier + left + own * q.astype(jnp.float32)

    zeros = jnp.zeros((CHUNK, size["dim"]), jnp.float32)
    d_q, d_k = lax.fori_loop(0, group, of_head, (zeros, zeros))
    store(d_q_ref.at[batch, rows, kv_head, features], d_q.astype(d_q_ref.dtype))
    store(d_k_ref.at[batch, rows, kv_head, features], d_k.astype(d_k_ref.dtype))


def _fades(total_ref: Any, of_head: tuple[Array, Array], chunk: Array) -> tuple[Array, Array, Array]:
    """Returns the decays of a chunk from before it to each token, from each token to its end, and over all of it."""
    total, last = load(total_ref.at[*of_head, rows_of(chunk)]), total_ref[*of_head, chunk * CHUNK + CHUNK - 1]
    return power(total)[:, None], power(last - total)[:, None], jnp.exp2(last)


def _decays(total: Float[Array, " rows"], earlier: Float[Array, " columns"]) -> Float[Array, "rows columns"]:
    """Returns the decays of pairs of the same tokens, with 0 for those in which the second is later."""
    token = jnp.arange(len(total), dtype=jnp.int32)
    difference = total[:, None] - earlier[None, :]
    return jnp.where(token[:, None] >= token[None, :], power(difference), 0)
