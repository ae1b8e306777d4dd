"""The gated delta rule in chunks of tokens: within a chunk it is matrix products, and a scan hands the state on.

Let S be the state before a chunk, G_i the sum of the chunk's log decays up to token i, and D_ij = exp(G_i - G_j), by
which what token j wrote has decayed at token i. What token i writes, u_i, depends on what was written before it:

    u_i = beta_i (v_i - exp(G_i) S^T k_i - sum_{j<i} D_ij (k_i . k_j) u_j)

These are linear equations with a lower triangular matrix, so U = U' - W S, where a triangular solve gives U' and W of
all chunks at once (the UT transform of arXiv:2406.06484, section 3, with the decays of arXiv:2412.06464, section 3.3).
The scan then has three products a chunk.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


CHUNK = 64  # tokens
BLOCK = 16  # tokens: in pairs of such blocks a decay of each channel is split into two factors, neither above 1


def refusal(_: Array, __: Array, v: Array, *___: object, **____: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_rule`, or None if it can."""
    return "it computes in float32, and v is float64" if v.dtype == jnp.float64 else None


def delta_rule(
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
    """Computes `kernels.delta_rule` by chunks, in float32. Derivatives keep a state a chunk, and recompute the rest."""
    dtype, seq, group = v.dtype, v.shape[1], v.shape[2] // k.shape[2]

    def chunks(x: Array) -> Array:
        """[batch, seq, heads, ...] -> [chunks, batch, heads, CHUNK, ...], padded by zeros, which change no state."""
        x = jnp.pad(x, ((0, 0), (0, -seq % CHUNK)) + ((0, 0),) * (x.ndim - 2))
        x = x.reshape(len(x), -1, CHUNK, *x.shape[2:])
        return jnp.moveaxis(x, (1, 3), (0, 2)).astype(jnp.float32)

    heads = lambda x: jnp.repeat(x, group, axis=2)
    prepare = jax.checkpoint(functools.partial(_prepare, scale=scale, erase=erase))
    parts = prepare(*map(chunks, (heads(q), heads(k), v, decay, beta[..., None], restart[..., None, None])))

    def step(state: Array, chunk: tuple[Array, ...]) -> tuple[Array, Array]:
        query, pairs, alone, less, key, fade = chunk
        written = alone - less @ state if erase else alone
        out = query @ state + pairs @ written
        return fade * state + key.swapaxes(-1, -2) @ written, out

    state, out = jax.lax.scan(step, state, parts)
    out = jnp.moveaxis(out, (0, 2), (1, 3)).reshape(len(v), -1, *v.shape[2:])
    return out[:, :seq].astype(dtype), state


def _prepare(
    q: Array, k: Array, v: Array, decay: Array, beta: Array, restart: Array, *, scale: float, erase: bool
) -> tuple[Array, ...]:
    """What the scan needs of each chunk: how queries see the state, and each other's tokens; what is written if the
    state is zero, and what less for each state; the keys and the decay with which the state is left."""
    begun = jnp.cumsum(restart, axis=-2)  # how many documents have begun in the chunk
    decay = jnp.where(restart > 0, 0, decay if decay.ndim == 5 else decay[..., None])
    total = jnp.cumsum(decay, axis=-2)  # log of the decay since before the chunk
    same = begun == begun.swapaxes(-1, -2)
    end = total[..., -1:, :]
    before = jnp.where(begun == 0, jnp.exp(total), 0)
    key = k * jnp.where(begun == begun[..., -1:, :], jnp.exp(end - total), 0)
    fade = jnp.where(begun[..., -1:, :] == 0, jnp.exp(end), 0).swapaxes(-1, -2)
    pairs = jnp.where(same, scale * _decayed(q, k, total), 0)
    if not erase:
        return scale * q * before, pairs, beta * v, jnp.zeros(len(v)), key, fade
    matrix = jnp.where(same, beta * jnp.tril(_decayed(k, k, total), -1), 0)
    sides = jnp.concatenate([beta * v, beta * k * before], axis=-1)
    # Its diagonal of ones is not stored.
    solved = jax.lax.linalg.triangular_solve(matrix, sides, left_side=True, lower=True, unit_diagonal=True)
    alone, less = jnp.split(solved, [v.shape[-1]], axis=-1)
    return scale * q * before, pairs, alone, less, key, fade


def _decayed(
    x: Float[Array, "*chunks tokens dim"],
    k: Float[Array, "*chunks tokens dim"],
    total: Float[Array, "*chunks tokens dim_or_1"],
) -> Float[Array, "*chunks tokens tokens"]:
    """The products of x_i and k_j, with what each channel has decayed by from j to i; 0 for i < j.

    No exponential is taken of a sum of decays with its sign turned, which would overflow where decays are strong.
    """
    token = np.arange(CHUNK)
    if total.shape[-1] == 1:  # one decay for all channels
        return (x @ k.swapaxes(-1, -2)) * _exp(total - total.swapaxes(-1, -2), token[:, None] >= token)
    total = jnp.broadcast_to(total, k.shape)
    blocks = lambda a: a.reshape(*a.shape[:-2], -1, BLOCK, a.shape[-1])
    xs, ks, sums, place = blocks(x), blocks(k), blocks(total), np.arange(BLOCK)
    # Of two tokens in one block, each channel by itself.
    apart = _exp(sums[..., :, None, :] - sums[..., None, :, :], (place[:, None] >= place)[..., None])
    near = jnp.sum(xs[..., :, None, :] * ks[..., None, :, :] * apart, axis=-1)
    # Of a token and those in earlier blocks: the decay since its block began, times that before.
    start, block = sums[..., :1, :], token // BLOCK
    earlier = np.arange(CHUNK // BLOCK)[:, None] > block
    late = xs * jnp.exp(sums - start)
    early = k[..., None, :, :] * _exp(start - total[..., None, :, :], earlier[..., None])
    far = (late @ early.swapaxes(-1, -2)).reshape(*x.shape[:-1], CHUNK)
    near = jnp.tile(near.reshape(*x.shape[:-1], BLOCK), CHUNK // BLOCK)
    return jnp.where(np.broadcast_to(block[:, None] == block, far.shape), near, far)


def _exp(x: Float[Array, "..."], where: Bool[np.ndarray, "..."]) -> Float[Array, "..."]:
    """exp(x), and 0 elsewhere, where it might overflow."""
    return jnp.exp(jnp.where(np.broadcast_to(where, x.shape), x, -jnp.inf))
