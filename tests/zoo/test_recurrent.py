"""The cache of recurrent layers: calls of any length, rows that end and restart, and tokens that are rolled back."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels import Tokens
from tests.close import close
from zoo.nn.recurrent import RecurrentCache, recur


HEADS, DIM, WIDTH, SEQ = 2, 4, 3, 12
RANDOM = np.random.RandomState(0)
WEIGHT = RANDOM.standard_normal((HEADS * DIM, WIDTH)).astype(np.float32)
X = RANDOM.standard_normal((2, SEQ, HEADS * DIM)).astype(np.float32)


def step(x, state, tail, at):
    """Applies a convolution, and then the delta rule with keys, values and decay from its output."""
    x, tail = kernels.causal_conv(x, jnp.asarray(WEIGHT), at, tail=tail)
    x = x.reshape(*x.shape[:2], HEADS, DIM)
    decay, beta = -jnp.abs(x[..., 0]), jax.nn.sigmoid(x[..., 1])
    k = x / jnp.linalg.norm(x, axis=-1, keepdims=True)
    y, state = kernels.delta_rule(k, k, x, decay, beta, at, scale=1.0, state=state, implementation="reference")
    return y, state, tail


@eqx.filter_jit
def empty(more=0):
    cache = RecurrentCache.init(3, 2, (HEADS, DIM, DIM), (WIDTH - 1, HEADS * DIM), jnp.float32).widened(more)
    return eqx.tree_at(lambda c: c.layer, cache, jnp.array(1))


@eqx.filter_jit
def call(cache, x, positions):
    return recur(step, x, cache, Tokens(positions))


def read(cache, *calls, rows=X):
    """Returns outputs by row and position, from the last call that read each. Padding tokens are NaN."""
    out = np.full((2, SEQ, HEADS, DIM), np.nan, np.float32)
    for positions in map(np.array, calls):
        x = np.where((positions < 0)[..., None], np.nan, np.take_along_axis(rows, positions[..., None], axis=1))
        y, cache = call(cache, x.astype(np.float32), positions)
        for row, index in zip(*np.nonzero(positions >= 0), strict=True):
            out[row, positions[row, index]] = np.asarray(y)[row, index]
    return out, cache


@pytest.fixture(scope="module")
def whole():
    return np.asarray(jax.jit(lambda x: recur(step, x, None, Tokens())[0])(X))


@pytest.mark.parametrize("more", [0, 3])
def test_calls_of_any_length(whole, more):
    """Calls may be token by token, right-padded, in chunks, or with a row that pauses."""
    chunks = ([*range(7)], [*range(5), -1, -1]), ([7, 8], [5, 6]), ([9], [-1]), ([10], [7]), ([11, -1], [8, 9])
    out, cache = read(empty(more), *chunks)
    close(out[0], whole[0], terms=200)
    close(out[1, :10], whole[1, :10], terms=200)
    assert not np.any(np.asarray(cache.state)[0]) and not np.any(np.asarray(cache.tail)[2])  # of other layers
    if not more:
        left, _ = read(empty(), ([-1, -1, 0, 1, 2, 3, 4], [*range(7)]))
        close(left[:, :5], whole[:, :5], terms=200)


def test_tokens_taken_back(whole):
    """A cache rolls back as many tokens as it is widened by: new calls do not depend on the tokens rolled back."""
    wrong = X[:, ::-1].copy()
    wrong[:, :5] = X[:, :5]
    _, cache = read(empty(3), ([*range(5)], [*range(5)]), ([5, 6, 7], [5, 6, 7]), rows=wrong)
    out, _ = read(cache, ([5, 6, 7], [5, -1, -1]), ([7], [6]), ([8, 9, 10], [6, 7, 8]))
    close(out[0, 5:11], whole[0, 5:11], terms=200)
    close(out[1, 5:9], whole[1, 5:9], terms=200)


@pytest.mark.parametrize("padding", [-1, -2])
def test_padding_keeps_every_state(padding):
    """A call in which a row is padding alone leaves all of its states, also those for tokens to be taken back."""
    _, cache = read(empty(3), [range(3)] * 2, [range(3, 6)] * 2)
    _, new = call(cache, np.full_like(X[:, :2], np.nan), np.full((2, 2), padding))
    jax.tree.map(np.testing.assert_array_equal, new, cache)


def test_a_row_begins_again(whole):
    _, cache = read(empty(), ([*range(7)], [*range(7)]))
    out, _ = read(cache, ([*range(7)], [-1] * 7), ([7], [7]))
    close(out[0, :8], whole[0, :8], terms=200)
    close(out[1, 7], whole[1, 7], terms=200)


def test_packed_documents_are_refused():
    with pytest.raises(ValueError, match="one document a row"):
        recur(step, jnp.asarray(X), empty(), Tokens(segments=jnp.ones((2, SEQ), jnp.int32)))
