"""Masks equal plain numpy, and the class of a block is true of every pair in it."""

import functools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels import Around, Causal, Chunk, Full, Spans, Window, sliding
from kernels.masks import FULL, PARTIAL, SKIP, Segments, block_classes
from kernels.tokens import Tokens
from tests.kernels.oracle import sees


Q = dict(positions=[0, 1, 5, 9, -1], segments=[1, 1, 2, 2, 0], spans=[-1, 3, 3, 8, -1])
KV = dict(positions=[0, 2, 5, 8, 2**31 - 1, 4], segments=[1, 2, 2, 2, 0, 1], spans=[-1, 3, 8, 8, -1, 3])
q, kv = ({name: np.asarray(ids, np.int64) for name, ids in tokens.items()} for tokens in (Q, KV))
p, r = q["positions"][:, None], kv["positions"][None, :]
SAME_SEGMENT = q["segments"][:, None] == kv["segments"][None, :]
SAME_SPAN = (q["spans"][:, None] == kv["spans"][None, :]) & (q["spans"][:, None] >= 0)


@pytest.mark.parametrize(
    "mask, expected",
    [
        (Full(), np.ones((5, 6), bool)),
        (Causal(), r <= p),
        (Window(4), p - r < 4),
        (Around(4), abs(p - r) < 4),
        (sliding(None), r <= p),
        (sliding(4), (r <= p) & (p - r < 4)),
        (Chunk(3), p // 3 == r // 3),
        (Segments(), SAME_SEGMENT),
        (Spans(), SAME_SPAN),
        ((sliding(2) | Spans()) & Segments(), (((r <= p) & (p - r < 2)) | SAME_SPAN) & SAME_SEGMENT),
    ],
    ids=str,
)
def test_who_sees_whom(mask, expected):
    rows = Tokens(**{name: ids.astype(np.int32)[:, None] for name, ids in q.items()})
    columns = Tokens(**{name: ids.astype(np.int32)[None, :] for name, ids in kv.items()})
    assert np.array_equal(jax.jit(mask.visible)(rows, columns), expected)
    assert np.array_equal(sees(mask, rows, columns), expected), "nor is the oracle of attention right"


MASKS = [
    Full(), Causal(), Window(7), Around(7), Chunk(5), Segments(), Spans(), sliding(7), Causal() & Chunk(5) & Segments(),
    (sliding(7) | Spans()) & Segments(), Spans() | Segments(), (Causal() | Spans()) & (Chunk(20) | Window(3)),
]  # fmt: skip


def runs(low, high):
    """Generates integers that mostly stay the same for a while, or count up."""
    run = st.tuples(st.integers(low, high), st.integers(1, 20), st.integers(0, 1))
    count = lambda first, length, step: [min(first + step * i, high + 20) for i in range(length)]
    return st.lists(run, min_size=1, max_size=8).map(lambda each: [i for r in each for i in count(*r)])


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
    # Lengths and block sizes, pairwise. Each combination is one program, with all masks in it.
    lengths_and_sizes=st.sampled_from([(1, 33, (7, 5)), (50, 40, (7, 5)), (50, 33, (16, 20)), (1, 40, (16, 20))]),
    ids=st.tuples(*[runs(-1, 30), runs(0, 2), runs(-2, 1)] * 2),
)
def test_what_is_said_of_a_block_is_true_of_every_pair(lengths_and_sizes, ids):
    seq, kv_seq, sizes = lengths_and_sizes
    take = lambda ids, length: np.resize(ids, length).astype(np.int32)[None]
    q = Tokens(*(take(each, seq) for each in ids[:3]))
    kv = Tokens(*(take(each, kv_seq) for each in ids[3:]))
    for seen, classes in zip(*jax.device_get(_seen_and_classes(q, kv, *sizes)), strict=True):
        for (i, j), found in np.ndenumerate(classes[0]):
            rows, columns = (slice(n * size, (n + 1) * size) for n, size in zip((i, j), sizes, strict=True))
            block = seen[rows, columns]
            assert found != SKIP or not block.any()
            assert found != FULL or (block.all() and block.shape[1] == sizes[1])


@functools.partial(jax.jit, static_argnums=(2, 3))
def _seen_and_classes(q, kv, q_block, kv_block):
    row, column = jax.tree.map(lambda x: x[0, :, None], q), jax.tree.map(lambda x: x[0, None, :], kv)
    return [mask.visible(row, column) for mask in MASKS], [block_classes(m, q, kv, q_block, kv_block) for m in MASKS]


def classes(mask, seq):
    """Returns the classes of one sequence's blocks of 32 tokens."""
    tokens = Tokens(np.arange(seq, dtype=np.int32)[None])
    return jax.jit(lambda tokens: block_classes(mask, tokens, tokens, 32, 32))(tokens)[0].tolist()


def test_blocks_of_plain_sequences_are_told_apart_exactly():
    found = lambda mask: classes(mask, 96)
    assert found(Causal()) == [[PARTIAL, SKIP, SKIP], [FULL, PARTIAL, SKIP], [FULL, FULL, PARTIAL]]
    assert found(sliding(33)) == [[PARTIAL, SKIP, SKIP], [PARTIAL, PARTIAL, SKIP], [SKIP, PARTIAL, PARTIAL]]
    assert found(Chunk(32)) == [[FULL, SKIP, SKIP], [SKIP, FULL, SKIP], [SKIP, SKIP, FULL]]
    assert found(Causal() & Chunk(64)) == [[PARTIAL, SKIP, SKIP], [FULL, PARTIAL, SKIP], [SKIP, SKIP, PARTIAL]]


def test_a_last_block_that_is_not_whole_is_never_full():
    assert classes(Full(), 40) == [[FULL, PARTIAL], [FULL, PARTIAL]]
