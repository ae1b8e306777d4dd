"""Gated short convolutions and their cache: calls of any length, rows that end and restart, tokens that are taken back,
padding where there are biases.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from kernels import Tokens
from tests.close import close
from tests.zoo.programs import noise
from zoo.nn.short_conv import ConvCache, ShortConv


HIDDEN, WIDTH, SEQ = 6, 4, 12
CONV = noise(lambda: ShortConv(HIDDEN, WIDTH, bias=True, key=jax.random.key(0)))
X = np.random.RandomState(0).standard_normal((2, SEQ, HIDDEN)).astype(np.float32)


@eqx.filter_jit
def empty(more=0):
    cache = CONV.init_cache(3, 2, SEQ, jnp.float32).widened(more)
    return eqx.tree_at(lambda c: c.layer, cache, jnp.array(1))


@eqx.filter_jit
def call(x, cache, positions=None, segments=None):
    return CONV(x, cache, Tokens(positions, segments))


def read(cache, *calls, rows=X):
    """Returns outputs by row and position, from the last call that read each."""
    out = np.full(X.shape, np.nan, np.float32)
    for positions in map(np.array, calls):
        y, cache = call(np.take_along_axis(rows, positions[..., None], axis=1), cache, positions)
        for row, index in zip(*np.nonzero(positions >= 0), strict=True):
            out[row, positions[row, index]] = np.asarray(y)[row, index]
    return out, cache


@pytest.fixture(scope="module")
def whole():
    return np.asarray(call(X, None)[0])


def test_formula(whole):
    """The outputs are those of a plain loop over the tokens."""
    b, c, u = np.split(X @ np.asarray(CONV.in_proj.weight).T + np.asarray(CONV.in_proj.bias), 3, axis=-1)
    taps, bias = np.asarray(CONV.conv.weight)[:, 0], np.asarray(CONV.conv.bias)
    sums = [sum(taps[:, -1 - i] * (b * u)[:, t - i] for i in range(min(WIDTH, t + 1))) for t in range(SEQ)]
    y = c * (np.stack(sums, axis=1) + bias)
    close(whole, y @ np.asarray(CONV.out_proj.weight).T + np.asarray(CONV.out_proj.bias), terms=200)


@pytest.mark.parametrize("more", [0, 3])
def test_calls_of_any_length(whole, more):
    """Calls may be token by token, right-padded, in chunks, or with a row that pauses."""
    chunks = ([*range(7)], [*range(5), -1, -1]), ([7, 8], [5, 6]), ([9], [-1]), ([10], [7]), ([11, -1], [8, 9])
    out, cache = read(empty(more), *chunks)
    close(out[0], whole[0], terms=200)
    close(out[1, :10], whole[1, :10], terms=200)
    assert not np.any(np.asarray(cache.inputs)[[0, 2]])  # of other layers
    assert cache.inputs.shape == (3, 2, WIDTH - 1 + more, HIDDEN)


def test_padding_does_not_leak(whole):
    """Padding on either side changes no token, though biases make numbers of it."""
    left, _ = read(empty(), ([-1, -1, 0, 1, 2, 3, 4], [*range(7)]), ([5], [7]))
    close(left[:, :5], whole[:, :5], terms=200)
    close(left[0, 5], whole[0, 5], terms=200)
    segments = np.array([[0] * 3 + [1] * 7 + [0] * 2, [1] * 5 + [2] * 7])
    row = np.stack([np.concatenate([X[0, -3:], X[0, :7], X[0, -2:]]), np.concatenate([X[1, :5], X[1, :7]])])
    y = np.asarray(call(row, None, None, segments)[0])
    close(y[0, 3:10], whole[0, :7], terms=200)
    close(y[1, :5], whole[1, :5], terms=200)
    close(y[1, 5:], whole[1, :7], terms=200)


def test_tokens_taken_back(whole):
    """A cache rolls back as many tokens as it is widened by: new calls do not depend on the tokens rolled back."""
    wrong = X[:, ::-1].copy()
    wrong[:, :5] = X[:, :5]
    _, cache = read(empty(3), ([*range(5)], [*range(5)]), ([5, 6, 7], [5, 6, 7]), rows=wrong)
    out, _ = read(cache, ([5, 6, 7], [5, -1, -1]), ([7], [6]), ([8, 9, 10], [6, 7, 8]))
    close(out[0, 5:11], whole[0, 5:11], terms=200)
    close(out[1, 5:9], whole[1, 5:9], terms=200)


def test_a_row_begins_again(whole):
    _, cache = read(empty(), ([*range(7)], [*range(7)]))
    out, _ = read(cache, ([*range(7)], [-1] * 7), ([7], [7]))
    close(out[0, :8], whole[0, :8], terms=200)
    close(out[1, 7], whole[1, 7], terms=200)


def test_packed_documents_are_refused():
    with pytest.raises(ValueError, match="one document a row"):
        call(X, empty(), None, np.ones((2, SEQ), np.int32))


def test_places_on_a_mesh():
    """Rows are split over the batch's axes, and channels over "tensor". A cache in 8 bits is the same."""
    cache = ConvCache.init(2, 4, 3, 6, jnp.bfloat16)
    assert cache.partition_specs({"fsdp": 2, "tensor": 2}).inputs == P(None, ("fsdp",), None, ("tensor",))
    assert cache.in_int8() is cache
