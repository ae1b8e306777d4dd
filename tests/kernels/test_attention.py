"""kernels.attention: every implementation against a formula in float64 numpy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kernels
from kernels import Causal, Chunk, Full, Spans, Tokens, sliding
from kernels.masks import Segments
from kernels.mesh import split_attention
from tests.close import as_exact, close
from tests.kernels.oracle import SCALE, TERMS, arrays, errors, oracle, packed, parted, run, tokens


IMPLEMENTATIONS = ["reference", "xla", "triton", "tpu"]  # the latter two are interpreted


SINKS = np.array([1.0, -2.0, 5.0, -np.inf], np.float32)
# Two images in the first row and one in the second, longer than a chunk and across the edges of blocks.
IMAGES = np.stack([np.repeat([-1, 4, -1, 7], [50, 60, 50, 100]), np.repeat([-1, 0, -1], [3, 200, 57])]).astype(np.int32)
# "everything" is compiled once for each implementation, and shared by all tests down to those of NaN.
SEQ, KV_SEQ, WINDOW = 140, 150, 20
EVERYTHING = dict(seq=SEQ, kv_seq=KV_SEQ, v_dim=32), dict(mask=sliding(WINDOW), softcap=4.0)
DOCUMENTS = packed([50, 1, 60, 39], [10, 90, 50])
DOCUMENTS |= {name: DOCUMENTS[name][:, :SEQ] for name in ("q_positions", "q_segments")}
# Pairwise choices: softcap and sinks in all four ways; documents, a window, keys longer than queries; heads that share
# keys by two, all and none; values as wide as keys, narrower and wider.
CASES = {
    "full, with logits whose exponential overflows": (
        dict(seq=130, kv_seq=270, heads=5, kv_heads=1, dim=48, v_dim=16, size=10),
        dict(mask=Full()),
    ),
    "chunks and images": (
        dict(seq=260, kv_heads=4),
        dict(mask=(Causal() & Chunk(48)) | Spans(), sinks=SINKS, q_spans=IMAGES, kv_spans=IMAGES),
    ),
    "packed": (dict(seq=200), dict(softcap=4.0, **packed([128, 1, 64, 7], [10, 150, 40]))),
    "branches": (
        dict(seq=260, kv_heads=4),
        dict(mask=sliding(60), **parted([(140, 30, 1, 40), (9,), (10, 0, 20), (10,)], [(30, 80, 140), (10,)])),
    ),
    "everything": (EVERYTHING[0], dict(**EVERYTHING[1], sinks=SINKS, **DOCUMENTS)),
}
# "packed" is for bfloat16. test_attention_tpu.py covers a TPU's chunks and images.
IN_FLOAT32 = [
    pytest.param(case, implementation, marks=() if case == "everything" else pytest.mark.thorough)
    for case in CASES
    for implementation in IMPLEMENTATIONS
    if case != "packed" and (case, implementation) != ("chunks and images", "tpu")
]


@functools.cache
def arguments_and_expected(case, dtype):
    shapes, options = CASES[case]
    x = arrays(**shapes, dtype=dtype)
    return x, options, oracle(*x, **options)


@pytest.mark.parametrize("case, implementation", IN_FLOAT32)
def test_float32_equals_the_oracle(case, implementation):
    x, options, expected = arguments_and_expected(case, jnp.float32)
    close(run(implementation, *x, **options), expected, terms=TERMS)


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["triton", "tpu"])
def test_logits_of_10_000(implementation):
    """The log-sum-exp, in the softmax's powers of two, is rounded only once between forward and backward."""
    shapes, options = CASES["full, with logits whose exponential overflows"]
    q, k, v, d_out = arrays(**shapes | dict(size=3000))
    greatest = SCALE * np.einsum("bshd,btd->bhst", q, k[:, :, 0]).max(axis=-1)
    out, _, _, dv = errors(run(implementation, q, k, v, d_out, **options), oracle(q, k, v, d_out, **options))
    # A logit is rounded by at most 2^-24 of it, and so a weight, by as much of itself.
    assert np.mean(greatest) > 1e4 and out < 1e-5 and dv < 2**-24 * np.mean(greatest)


@functools.cache
def in_bfloat16(implementation):
    x, options, expected = arguments_and_expected("packed", jnp.bfloat16)
    return run(implementation, *x, **options), expected


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_bfloat16_is_as_exact_as_the_reference(implementation):
    (ours, exact), (theirs, _) = in_bfloat16(implementation), in_bfloat16("reference")
    as_exact(ours, theirs, exact)


def test_tokens_in_order_need_no_positions():
    """Positions of packed documents count from 0, and the masks can derive them from indices and segments."""
    (q, k, v, _), options = arrays(seq=20), packed([7, 1, 9, 3], [0, 4, 12, 4])
    segments = jnp.asarray(options["q_segments"])
    assert np.array_equal(kernels.counted(segments), options["q_positions"])

    @jax.jit
    def with_and_without(q, k, v, positions):
        pairs = []
        for mask in (Causal(), sliding(5), Causal() & Chunk(4)):
            attend = functools.partial(kernels.attention, q, k, v, scale=SCALE, mask=mask, implementation="reference")
            pairs.append((attend(Tokens(positions, segments)), attend(Tokens(segments=segments))))
        return pairs

    for expected, actual in with_and_without(q, k, v, options["q_positions"]):
        close(actual, expected, terms=TERMS)


def test_tokens_in_order_over_the_context():
    """Output and gradients equal one device's, also for documents and images that span devices. All devices compute
    equally many pairs of tokens, wherever in the row their own tokens are.
    """
    seq, devices = 24, 3
    spans = np.tile(np.repeat([-1, 2, -1], [6, 6, 12]), (2, 1))
    where = {name: ids for name, ids in packed([7, 17, 0], [1, 20, 3]).items() if "segments" in name}
    options = dict(mask=Causal() | Spans(), sinks=SINKS, q_spans=spans, kv_spans=spans, **where)
    mesh = jax.make_mesh((devices,), ("context",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:devices])

    def pairs(q, k, v, *, q_tokens, kv_tokens, **_):
        seen = kv_tokens.positions <= q_tokens.positions[0, :, None]
        return jnp.full(q.shape, jnp.sum(seen), jnp.float32)

    x, order = arrays(seq=seq), Tokens(np.arange(seq)[None])
    split = functools.partial(split_attention, pairs, sinks=None, q_tokens=order, kv_tokens=order)
    with jax.set_mesh(mesh):
        close(run("reference", *x, **options), oracle(*x, **options), terms=TERMS)
        as_it_is, balanced = (jax.jit(functools.partial(split, grows=grows))(*x[:3]) for grows in (False, True))
    assert np.unique(as_it_is).tolist() == [36, 100, 164] and np.unique(balanced).tolist() == [100]


def runs_of(values, length):
    """Generates two rows of integers that change now and then, like segments and positions, but in no order."""
    runs = st.lists(st.tuples(values, st.integers(1, 60)), min_size=1, max_size=12)
    row = runs.map(lambda runs: np.resize(np.repeat(*zip(*runs, strict=True)), length))
    return st.tuples(row, row).map(np.stack)


@pytest.mark.thorough
@settings(derandomize=True, deadline=None, max_examples=10)
@given(
    q_positions=runs_of(st.integers(0, 2 * WINDOW), SEQ),
    kv_positions=runs_of(st.integers(0, 2 * WINDOW), KV_SEQ),
    q_segments=runs_of(st.integers(-1, 1), SEQ),
    kv_segments=runs_of(st.integers(-1, 1), KV_SEQ),
    sinks=st.permutations([-np.inf, -3.0, 0.0, 20.0]),
)
def test_any_positions_segments_and_sinks(sinks, **where):
    shapes, options = EVERYTHING
    x, options = arrays(**shapes), dict(**options, sinks=np.float32(sinks), **tokens(*where.values()))
    expected = oracle(*x, **options)
    for implementation in IMPLEMENTATIONS:
        close(run(implementation, *x, **options), expected, terms=TERMS)


def in_both_rows(*ids):
    return tokens(*[np.tile(x, (2, 1)) for x in ids])


def everything(implementation, *x, **where):
    """Returns output and gradients, in numpy."""
    return jax.device_get(run(implementation, *x, **EVERYTHING[1], sinks=SINKS, **where))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_nothing_yields_zeros(implementation):
    where = in_both_rows(np.arange(SEQ), np.arange(KV_SEQ) + 30, np.zeros(SEQ), np.repeat([0, 7], [120, 30]))
    out, (dq, dk, dv, d_sinks) = everything(implementation, *arrays(**EVERYTHING[0]), **where)
    assert not out[:, :30].any() and out[:, 30:].all()
    assert not dq[:, :30].any() and not dk[:, 120:].any() and not dv[:, 120:].any()
    assert all(np.isfinite(g).all() for g in (dq, dk, dv, d_sinks))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_garbage_touches_only_those_who_see_it(implementation):
    """Garbage from token 70 on, where d_out is 0, reaches only queries that see it, and keys that those see."""
    *qkv, d_out = arrays(**EVERYTHING[0])
    for x in qkv:
        x[:, 70:] = 1
    d_out[:, 70:] = 0
    where = in_both_rows(np.arange(SEQ), np.arange(KV_SEQ), np.zeros(SEQ), np.zeros(KV_SEQ))
    seen = 70 - (WINDOW - 1)
    clean_out, clean_gradients = everything(implementation, *qkv, d_out, **where)
    for spoilt, garbage in itertools.product(range(3), [np.nan, np.inf, -np.inf]):
        dirty = [x.copy() for x in qkv]
        dirty[spoilt][:, 70:, :, 0] = garbage
        out, gradients = everything(implementation, *dirty, d_out, **where)
        close(out[:, :70], clean_out[:, :70], terms=TERMS)
        for actual, expected, end in zip(gradients[:3], clean_gradients, (70, seen, seen), strict=False):
            close(actual[:, :end], expected[:, :end], terms=TERMS)
        assert np.isnan(out[:, 70:]).all()


def test_the_choice_of_implementation():
    def loops(*args, **kwargs):
        return "while" in str(jax.make_jaxpr(functools.partial(kernels.attention, scale=SCALE, **kwargs))(*args))

    long, short, decode = arrays(seq=300)[:3], arrays(seq=100)[:3], arrays(seq=1, kv_seq=300)[:3]
    assert loops(*long) and not loops(*short) and loops(*decode)
    assert loops(*decode, implementation="xla") and not loops(*long, implementation="reference")
    with jax.enable_x64(True):
        assert not loops(*arrays(seq=300, dtype=jnp.float64)[:3])


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = arrays(dtype=jnp.float64)
        close(run(None, *x), oracle(*x), terms=TERMS, dtype=np.float64)
        with pytest.raises(ValueError, match=r"'xla'\): it computes in float32, and q is float64.*reference: can"):
            run("xla", *x)


def test_contradictions_are_refused():
    q, k, v, _ = map(jnp.asarray, arrays(seq=4))
    attention = functools.partial(kernels.attention, scale=SCALE)
    with pytest.raises(ValueError, match=r"no such implementation.*reference: can; xla: can"):
        attention(q, k, v, implementation="cuda")
    with pytest.raises(ValueError, match="one dtype, not float32, float32 and bfloat16"):
        attention(q, k, v.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"query heads \(4\) must be a multiple of the key/value heads \(3\)"):
        attention(q, k[:, :, [0, 1, 1]], v[:, :, [0, 1, 1]])
    with pytest.raises(ValueError, match="Segments of one side alone"):
        attention(q, k, v, Tokens(segments=jnp.zeros((2, 4), jnp.int32)), Tokens())
    with pytest.raises(ValueError, match=r"Window\(0\) hides every key"):
        sliding(0)
    with pytest.raises(ValueError, match=r"Spans go with a mask that has Spans\(\)"):
        attention(q, k, v, mask=Causal() | Spans())
    with pytest.raises(ValueError, match=r"The mask has Segments\(\), and there are none"):
        attention(q, k, v, mask=Causal() & Segments())
