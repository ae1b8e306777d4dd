"""The largest logits of each query and head, against all logits at once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels import Causal, Full, Tokens, Window
from kernels.attention import logits
from tests.close import close


@pytest.mark.parametrize("mask", [Causal(), Causal() & Window(5), Full()], ids=str)
def test_in_blocks(mask, monkeypatch):
    """Blocks, the last of which overlaps the one before it, grouped heads, documents, and a gradient beside it."""
    monkeypatch.setattr(logits, "BLOCK", 16)
    random = np.random.RandomState(0)
    q, k, v = (jnp.asarray(random.randn(2, 40, heads, 8), jnp.float32) for heads in (4, 2, 2))
    segments = np.repeat([[1, 2, 0], [3, 3, 3]], [9, 26, 5], axis=1)

    def attend(q):
        with logits.recorded() as found:
            y = kernels.attention(q, k, v, Tokens(segments=jnp.asarray(segments)), scale=0.5, mask=mask, softcap=2.0)
        return jnp.sum(y**2), found

    (_, (found,)), gradient = jax.jit(jax.value_and_grad(attend, has_aux=True))(q)
    every = 0.5 * np.einsum("bqhd,bkhd->bqhk", q, np.repeat(k, 2, axis=2))
    at = (Tokens(jnp.arange(40).reshape(shape)) for shape in ((1, -1, 1), (1, 1, -1)))
    seen = np.asarray(mask.visible(*at)) & (segments[:, :, None] == segments[:, None, :])
    close(found, np.where(seen[:, :, None, :], every, -np.inf).max(-1), terms=32)
    assert np.isfinite(gradient).all()


def test_one_block_and_two():
    """The first 512 queries see the same keys in one block as in two, which 513 take."""
    random = np.random.RandomState(0)
    q, k = (jnp.asarray(random.randn(1, 513, 1, 8), jnp.float32) for _ in range(2))

    @jax.jit
    def largest(q, k):
        with logits.recorded() as found:
            kernels.attention(q, k, k, scale=0.5, mask=Causal())
        return found[0]

    one, two = largest(q[:, :512], k[:, :512]), largest(q, k)
    np.testing.assert_allclose(two[:, :512], one, rtol=8 * np.finfo(np.float32).eps, atol=1e-6)
    last = 0.5 * np.max(np.asarray(q[0, -1, 0], np.float64) @ np.asarray(k[0, :, 0], np.float64).T)
    np.testing.assert_allclose(two[0, -1, 0], last, rtol=8 * np.finfo(np.float32).eps)


def test_nothing_is_recorded_without_being_asked_for(monkeypatch):
    monkeypatch.setattr(logits, "_largest", None)
    q = jnp.ones((1, 4, 1, 8))
    assert kernels.attention(q, q, q, scale=1.0).shape == q.shape
