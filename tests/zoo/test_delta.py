"""The gated delta rule of layers against its recurrence in float64, with documents packed into a row."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels import Tokens
from tests.close import close
from zoo.nn.delta import GatedDelta


DELTA = GatedDelta(key_heads=2, value_heads=4, key_dim=5, value_dim=6, width=3)


def recurrence(qkv, decay, beta, conv):
    """Returns the outputs [tokens, heads, features] of a document, whose channels are queries, keys, values."""
    inputs = np.concatenate([np.zeros((DELTA.width - 1, DELTA.channels)), qkv])
    state, group = np.zeros((4, 5, 6)), DELTA.value_heads // DELTA.key_heads
    for t in range(len(qkv)):
        now = np.sum(inputs[t : t + DELTA.width] * conv.T, axis=0)
        q, k, v = np.split(now / (1 + np.exp(-now)), [DELTA.keys, 2 * DELTA.keys])
        q, k = (np.repeat(a.reshape(2, 5), group, axis=0) for a in (q, k))
        q, k = (a / np.sqrt(np.sum(a**2, axis=1, keepdims=True) + 1e-6) for a in (q, k))
        state = state * np.exp(decay[t])[:, None, None]
        written = beta[t][:, None] * (v.reshape(4, 6) - np.einsum("hkv,hk->hv", state, k))
        state = state + k[..., None] * written[:, None]
        yield np.einsum("hkv,hk->hv", state, q) / np.sqrt(5)


def split(qkv):
    q, k, v = jnp.split(qkv, [DELTA.keys, 2 * DELTA.keys], axis=-1)
    return [y.reshape(1, -1, heads, y.shape[-1] // heads) for y, heads in ((q, 2), (k, 2), (v, 4))]


def test_documents_are_the_recurrence():
    random, lengths = np.random.RandomState(3), (9, 1, 11)  # and three tokens of padding
    qkv, conv = random.standard_normal((24, DELTA.channels)), random.standard_normal((DELTA.channels, DELTA.width))
    decay, beta = -random.uniform(0.01, 1, (24, 4)), random.uniform(size=(24, 4))
    at = Tokens(segments=jnp.asarray(np.repeat([1, 2, 3, 0], [*lengths, 3])[None]))
    run = jax.jit(lambda *inputs: DELTA(*(a[None] for a in inputs), None, at, conv=jnp.float32(conv), split=split)[0])
    ours = run(*map(jnp.float32, (qkv, decay, beta)))
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        here = slice(start, start + length)
        close(ours[0, here], np.stack([*recurrence(qkv[here], decay[here], beta[here], conv)]), terms=300)
