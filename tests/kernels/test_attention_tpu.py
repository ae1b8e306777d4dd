"""Tests of the TPU's attention kernels alone; test_attention.py tests the properties that all implementations share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

import kernels
from kernels import Causal, Chunk, Full, Spans, sliding
from kernels.attention import tpu
from kernels.attention.tpu import FIRST, LAST, MOST_BLOCKS
from kernels.masks import FULL, PARTIAL, SKIP, block_classes
from kernels.tokens import Tokens
from tests.close import close
from tests.kernels.oracle import SCALE, TERMS, arrays, oracle, packed, run


# The second row's image fills a block.
IMAGES = np.repeat([-1, 4, -1, 7], [10, 20, 44, 26]), np.repeat([3, -1], [66, 34])


@pytest.mark.thorough
def test_without_races():
    """The kernels have no races in an interpreter that moves blocks as a TPU does and fills memory with NaN.

    Rows have documents, images and chunks. Three heads share a key, which is wider than a value. In some blocks all
    pairs see each other, in some a few, and in some none, so that one row has more steps than the other.
    """
    x = arrays(seq=100, heads=3, kv_heads=1, dim=24, v_dim=16)
    options = dict(mask=(Causal() & Chunk(48)) | Spans(), softcap=4.0, sinks=np.float32([1, -np.inf, 3]))
    spans = np.stack(IMAGES).astype(np.int32)
    options |= dict(q_spans=spans, kv_spans=spans, **packed([60, 4, 36], [98, 2]))
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        actual = jax.block_until_ready(run("tpu", *x, **options))
    close(actual, oracle(*x, **options), terms=TERMS)
    assert interpreter.races is not None and not interpreter.races.races_found


def steps(mask, seq, block, by_key=False, **ids):
    """Returns the steps: (block of queries, block of keys, class, first of its block?, last of its block?)."""
    tokens = Tokens(np.arange(seq, dtype=np.int32)[None], **ids)
    bits, count = jax.jit(lambda x: tpu.schedule(block_classes(mask, x, x, block, block), by_key))(tokens)
    split = lambda x: (x // 16 // MOST_BLOCKS, x // 16 % MOST_BLOCKS, x & 3, x & FIRST > 0, x & LAST > 0)
    return [[split(x) for x in row[:count]] for row in np.asarray(bits).tolist()]


def test_steps_are_the_pairs_that_anybody_sees():
    yes, no = True, False
    assert steps(Causal(), 96, 32) == [
        [
            (0, 0, PARTIAL, yes, yes),
            (1, 0, FULL, yes, no),
            (1, 1, PARTIAL, no, yes),
            (2, 0, FULL, yes, no),
            (2, 1, FULL, no, no),
            (2, 2, PARTIAL, no, yes),
        ]
    ]
    assert steps(sliding(32), 96, 32, by_key=True) == [
        [
            (0, 0, PARTIAL, yes, no),
            (1, 0, PARTIAL, no, yes),
            (1, 1, PARTIAL, yes, no),
            (2, 1, PARTIAL, no, yes),
            (2, 2, PARTIAL, yes, yes),
        ]
    ]


def test_blocks_that_nobody_sees_have_a_step_and_short_rows_idle():
    in_no_span = np.array([[-1] * 64, [0] * 64])
    assert steps(Spans(), 64, 32, spans=in_no_span) == [
        [(0, 0, SKIP, True, True), (1, 0, SKIP, True, True), *[(1, 0, SKIP, False, False)] * 2],
        [(i, j, FULL, j == 0, j == 1) for i in range(2) for j in range(2)],
    ]


def test_what_it_refuses():
    reason = lambda q, k: next(
        c for c in kernels.explain(kernels.attention, q, k, k, scale=SCALE, mask=Full(), implementation="xla")
    ).others["tpu"]
    x = lambda seq, heads, dtype=jnp.bfloat16: jax.ShapeDtypeStruct((1, seq, heads, 128), dtype)
    assert reason(x(200, 64), x(200, 1)) is None
    assert reason(x(200, 65), x(200, 1)) == (
        "65 query heads of 128 features share a key/value head, and VMEM has room for 8192"
    )
    assert reason(x(200, 1, jnp.float16), x(200, 1, jnp.float16)) == (
        "it computes in float32 and bfloat16, and q is float16"
    )
    assert reason(x(1 << 15, 1), x(1 << 15, 1)) == (
        "the list of its blocks does not fit: 1 rows of 32768 queries and 32768 keys"
    )
