"""Tests of the Pallas-Triton attention kernels alone; test_attention.py tests what all implementations share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels import Causal, Full, Mask, sliding
from kernels.attention.triton import Schedule
from kernels.backends.triton import pieces
from kernels.masks import block_classes
from kernels.tokens import Tokens
from tests.close import as_exact, close
from tests.kernels.oracle import QUICK, SCALE, arrays, oracle, packed, run


POSITIONS = np.array([5, 250, 299], np.int32)


def test_widths_are_cut_into_powers_of_two():
    cut = {width: [(piece.start, piece.size) for piece in pieces(width)] for width in (64, 80, 192, 576)}
    assert cut == {
        64: [(0, 64)],
        80: [(0, 64), (64, 16)],
        192: [(0, 128), (128, 64)],
        576: [(0, 512), (512, 64)],
    }


@pytest.mark.thorough
def test_heads_in_pieces():
    """196 features are split into 128, 64 and 16, with padding. Such wide heads have separate dk and dv kernels."""
    x = arrays(batch=2, seq=70, heads=4, kv_heads=2, dim=196, v_dim=80, size=1)
    sinks = np.linspace(-3, 3, 4, dtype=np.float32)
    options = dict(mask=sliding(30), softcap=4.0, sinks=sinks, **packed([30, 1, 39], [10, 50, 10]))
    close(run("triton", *x, **options), oracle(*x, **options), terms=600)


@pytest.mark.parametrize(
    "mask, full, met",
    [
        (Full(), [5, 5, 5], [6, 6, 6]),  # the last block of keys is not full
        (Causal(), [0, 2, 4], [2, 4, 6]),
        (sliding(96), [0, 1, 1], [2, 4, 5]),
    ],
)
def test_blocks_are_met_if_seen_and_first_those_seen_in_full(mask: Mask, full, met):
    tokens = Tokens(np.arange(190, dtype=np.int32)[None])
    classes = jax.jit(lambda tokens: block_classes(mask, tokens, tokens, 64, 32))(tokens)
    schedule, classes = jax.device_get((jax.jit(Schedule.of)(classes), classes))
    assert schedule.full.tolist() == [full] and schedule.met.tolist() == [met]
    for row, of_row in zip(schedule.order[0], classes[0], strict=True):
        assert sorted(row.tolist()) == list(range(6)) and (np.diff(of_row[row].astype(int)) <= 0).all()


@functools.partial(jax.jit, static_argnames=("mask", "softcap", "implementation"), compiler_options=QUICK)
def decode(q, k, v, *, q_positions=None, implementation="triton", **options):
    at = Tokens(None if q_positions is None else q_positions[:, None])
    return kernels.decode_attention(q[:, None], k, v, at, scale=SCALE, implementation=implementation, **options)[:, 0]


def cache(heads, kv_heads, dim, v_dim, dtype=jnp.float32):
    """Returns one query in each of three rows, and a cache with room for 300 keys; the rows have 6, 251 and 300."""
    shapes = dict(batch=3, seq=1, kv_seq=300, heads=heads, kv_heads=kv_heads, dim=dim, v_dim=v_dim)
    return arrays(**shapes, dtype=dtype, size=2)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "shapes, options",
    [
        # 6 + 251 + 300 keys in blocks of 32. There are more programs than some of these rows have blocks.
        (dict(heads=8, kv_heads=2, dim=64, v_dim=64), dict(mask=Causal())),
        (dict(heads=6, kv_heads=6, dim=80, v_dim=96), dict(mask=sliding(40), softcap=4.0, sinks=np.float32(range(6)))),
        # A latent cache such as DeepSeek's: one key for all heads, which are too many for one program.
        (dict(heads=20, kv_heads=1, dim=144, v_dim=128), dict(mask=Causal(), sinks=np.full(20, -np.inf, np.float32))),
    ],
)
def test_decode_merges_what_its_programs_have_found(shapes, options):
    q, k, v, d_out = cache(**shapes)
    expected, _ = oracle(q, k, v, d_out, q_positions=POSITIONS[:, None], **options)
    out = decode(q[:, 0], k, v, q_positions=POSITIONS, **options)
    close(out, expected[:, 0], terms=600)


def test_decode_in_bfloat16_is_as_exact_as_the_reference():
    q, k, v, d_out = cache(heads=8, kv_heads=2, dim=64, v_dim=64, dtype=jnp.bfloat16)
    expected, _ = oracle(q, k, v, d_out, q_positions=POSITIONS[:, None])
    ours = decode(q[:, 0], k, v, q_positions=POSITIONS)
    theirs = decode(q[:, 0], k, v, q_positions=POSITIONS, implementation="reference")
    as_exact(ours, theirs, expected[:, 0])


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_decode_loads_no_garbage(garbage):
    """Keys beyond a row's length may hold anything. Garbage that is seen spoils its whole head, and nothing else."""
    q, k, v, _ = cache(heads=8, kv_heads=2, dim=64, v_dim=64)
    q, beyond = q[:, 0], np.arange(300)[None, :] > POSITIONS[:, None]
    clean = np.asarray(decode(q, k, v, q_positions=POSITIONS))
    dirty_k, dirty_v = spoilt(k, garbage, beyond), spoilt(v, garbage, beyond)
    np.testing.assert_array_equal(decode(q, dirty_k, dirty_v, q_positions=POSITIONS), clean)
    of_head = np.zeros(clean.shape, bool)
    of_head[1, :4] = True
    one, heads = (1, 100, 0), (1, slice(0, 4))
    for x, where in [(k, one), (v, one), (q, heads)]:
        arguments = [spoilt(x, garbage, where) if x is each else each for each in (q, k, v)]
        out = np.asarray(decode(*arguments, q_positions=POSITIONS))
        np.testing.assert_array_equal(np.isnan(out), of_head)
        np.testing.assert_array_equal(out[~of_head], clean[~of_head])


def spoilt(x, garbage, where):
    """Returns a copy with garbage in the fourth feature at these places."""
    x = x.copy()
    x[..., 3][where] = garbage
    return x


def test_a_row_that_sees_nothing_yields_zeros():
    q, k, v, _ = cache(heads=8, kv_heads=2, dim=64, v_dim=64)
    out = np.asarray(decode(q[:, 0], k, v, q_positions=np.array([-1, 0, 1], np.int32)))
    assert not out[0].any()
    close(out[1], np.repeat(v[1, 0], 4, axis=0), terms=10)


def test_what_it_refuses():
    given = lambda **shapes: map(jnp.asarray, arrays(seq=4, **shapes)[:3])
    with pytest.raises(ValueError, match=r"at most 256 features, and these 272 and 16"):
        kernels.attention(*given(dim=272, v_dim=16), scale=SCALE, implementation="triton")
    q, k, v = given(dim=24)
    with pytest.raises(ValueError, match=r"multiples of 16 features, 576 at most, and these 24 and 24"):
        decode(q[:, 0], k, v)
    with pytest.raises(ValueError, match=r"a scale above 0, and this is -1.0"):
        kernels.attention(*given(), scale=-1.0, implementation="triton")
