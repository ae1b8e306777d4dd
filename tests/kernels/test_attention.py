"""kernels.attention: both implementations against a formula in float64 numpy, and what "xla" promises beyond it."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels import Causal, Chunk, Full, Spans, attention_xla, sliding
from kernels.masks import Segments, Tokens
from tests.kernels.oracle import QUICK, SCALE, arrays, errors, oracle, packed, run, tokens


IMPLEMENTATIONS = ["reference", "xla", "triton", "tpu"]  # the latter two are interpreted


SINKS = np.array([1.0, -2.0, 5.0, -np.inf], np.float32)
# Two images in the first row and one in the second, longer than a chunk and across the edges of blocks.
IMAGES = np.stack([np.repeat([-1, 4, -1, 7], [50, 60, 50, 100]), np.repeat([-1, 0, -1], [3, 200, 57])]).astype(np.int32)
# "everything" is compiled once for each implementation, and serves all tests down to those of NaN.
SEQ, KV_SEQ, WINDOW = 140, 150, 20
EVERYTHING = dict(seq=SEQ, kv_seq=KV_SEQ, v_dim=32), dict(mask=sliding(WINDOW), softcap=4.0)
DOCUMENTS = packed([50, 1, 60, 39], [10, 90, 50])
DOCUMENTS |= {name: DOCUMENTS[name][:, :SEQ] for name in ("q_positions", "q_segments")}
# Each with and without: softcap and sinks in all four ways; documents, a window, keys longer than queries; and
# heads that share keys by two, all and none; values as wide as keys, narrower and wider.
CASES = {
    "causal": (dict(seq=300), dict(sinks=SINKS)),
    "full, with logits whose exponential overflows": (
        dict(seq=130, kv_seq=270, heads=5, kv_heads=1, dim=48, v_dim=16, size=10),
        dict(mask=Full()),
    ),
    "chunks and images": (
        dict(seq=260, kv_heads=4),
        dict(mask=(Causal() & Chunk(48)) | Spans(), softcap=4.0, q_spans=IMAGES, kv_spans=IMAGES),
    ),
    "packed": (dict(seq=300, v_dim=32), dict(softcap=4.0, sinks=SINKS, **packed([128, 1, 130, 41], [10, 250, 40]))),
    "everything": (EVERYTHING[0], dict(**EVERYTHING[1], sinks=SINKS, **DOCUMENTS)),
}
# "packed" is for bfloat16: in float32 "everything" stands for it. test_attention_tpu.py has a TPU's chunks and images.
IN_FLOAT32 = [
    (case, implementation)
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
    assert np.max(errors(run(implementation, *x, **options), expected)) < 1e-5


@functools.cache
def errors_in_bfloat16(implementation):
    x, options, expected = arguments_and_expected("packed", jnp.bfloat16)
    return errors(run(implementation, *x, **options), expected)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS[1:])
def test_bfloat16_is_as_exact_as_the_reference(implementation):
    out, *gradients = errors_in_bfloat16(implementation)
    theirs = errors_in_bfloat16("reference")
    assert out < 4e-3 and np.max(gradients) < 1e-2
    assert all(a < 1.5 * b for a, b in zip([out, *gradients[:3]], theirs[:4], strict=True))


def runs_of(values, length):
    """Two rows of integers that change now and then, as segments and positions do, but in no order."""
    runs = st.lists(st.tuples(values, st.integers(1, 60)), min_size=1, max_size=12)
    row = runs.map(lambda runs: np.resize(np.repeat(*zip(*runs, strict=True)), length))
    return st.tuples(row, row).map(np.stack)


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
        assert np.max(errors(run(implementation, *x, **options), expected)) < 1e-5


def in_both_rows(*ids):
    return tokens(*[np.tile(x, (2, 1)) for x in ids])


def everything(implementation, *x, **where):
    """Output and gradients, in numpy."""
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
    """Tokens from 70 on hold garbage, and no gradient comes from there. Who sees it sees no key before `seen`."""
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
        np.testing.assert_allclose(out[:, :70], clean_out[:, :70], rtol=1e-6)
        for actual, expected, end in zip(gradients[:3], clean_gradients, (70, seen, seen), strict=False):
            np.testing.assert_allclose(actual[:, :end], expected[:, :end], rtol=1e-6)
        assert np.isnan(out[:, 70:]).all()


def test_memory_is_linear_in_the_sequence():
    """Forward and backward, with everything that could tempt one to build a mask."""

    def temporaries(seq, implementation):
        x = [jax.ShapeDtypeStruct((1, seq, 2, 32), jnp.float32)] * 3
        ids = [jax.ShapeDtypeStruct((1, seq), jnp.int32)] * 4

        def loss(q, k, v, *ids):
            where = dict(zip(("q_positions", "kv_positions", "q_segments", "kv_segments"), ids, strict=True))
            return kernels.attention(
                q, k, v, scale=SCALE, mask=sliding(99), implementation=implementation, **where
            ).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*x, *ids).compile(QUICK).memory_analysis().temp_size_in_bytes

    assert temporaries(4096, "reference") > 4096 * 4096 * 4  # so this test can fail
    once, twice = temporaries(4096, "xla"), temporaries(8192, "xla")
    assert twice < 2.1 * once
    assert twice < 8192 * 8192 * 4 / 10


def test_inside_a_sharded_scanned_rematerialised_model():
    """The batch stays split over eight devices, nothing is gathered, and the numbers are the reference's."""
    q, k, v, _ = arrays(batch=8, seq=160, dim=8)
    segments = np.repeat([[1, 2, 0]], 8, axis=0).repeat([70, 60, 30], axis=1).astype(np.int32)

    def loss(q, k, v, segments, implementation):
        def layer(x, scale):
            x = kernels.attention(
                x, k * scale, v, scale=SCALE, q_segments=segments, kv_segments=segments, implementation=implementation
            )
            return x, None

        return jnp.square(jax.lax.scan(jax.checkpoint(layer), q, jnp.array([1.0, 2.0]))[0]).sum()

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))
    gradient = lambda implementation, **options: jax.jit(
        jax.grad(functools.partial(loss, implementation=implementation), (0, 1, 2)), compiler_options=QUICK, **options
    )
    compiled = gradient("xla", in_shardings=split).lower(q, k, v, segments).compile()
    actual = compiled(*jax.device_put((q, k, v, segments), split))
    expected = gradient("reference")(q, k, v, segments)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.sharding.is_equivalent_to(split, 4)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(
    "options, blocks",
    [
        (dict(mask=Full()), 16),
        (dict(), 4 + 3 + 2 + 1),
        (dict(mask=sliding(128)), 4 + 3),
        (dict(mask=Causal() & Chunk(256)), 1 + 2 + 1 + 2),
        (dict(mask=Full() & Segments(), **packed([256, 128, 128])), 4 + 1 + 1),
        (dict(mask=Causal() & Segments(), **packed([256, 128, 128])), 3 + 1 + 1),
    ],
)
def test_blocks_that_nobody_sees_are_skipped(options, blocks):
    sequence = attention_xla.Blocks.of(4 * attention_xla.BLOCK)
    indices = np.arange(sequence.length)[None]
    q, kv = (Tokens(options.get(f"{side}_positions", indices), options.get(f"{side}_segments")) for side in ("q", "kv"))
    visible_blocks = jax.jit(attention_xla.visible_blocks, static_argnums=(0, 1, 3))
    first, end = visible_blocks(options.get("mask", Causal()), sequence, q, sequence, kv)
    assert (end - first).sum() == blocks


def test_the_choice_of_implementation():
    def loops(*args, **kwargs):
        return "while" in str(jax.make_jaxpr(functools.partial(kernels.attention, scale=SCALE, **kwargs))(*args))

    long, short, decode = arrays(seq=300)[:3], arrays(seq=100)[:3], arrays(seq=1, kv_seq=300)[:3]
    assert loops(*long) and not loops(*short) and not loops(*decode)
    assert loops(*decode, implementation="xla") and not loops(*long, implementation="reference")
    with jax.enable_x64(True):
        assert not loops(*arrays(seq=300, dtype=jnp.float64)[:3])


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x = arrays(dtype=jnp.float64)
        assert np.max(errors(run(None, *x), oracle(*x))) < 1e-13
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
    with pytest.raises(ValueError, match="give q_segments and kv_segments, or neither"):
        attention(q, k, v, q_segments=jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(ValueError, match=r"Window\(0\) hides every key"):
        sliding(0)
    with pytest.raises(ValueError, match=r"Spans go with a mask that has Spans\(\)"):
        attention(q, k, v, mask=Causal() | Spans())
    with pytest.raises(ValueError, match=r"The mask has Segments\(\), and there are none"):
        attention(q, k, v, mask=Causal() & Segments())


DECODES = {
    "causal": (dict(seq=1, kv_seq=150, kv_heads=1), {}),
    "all": (dict(seq=1, kv_seq=200, v_dim=32), dict(mask=sliding(50), softcap=4.0, sinks=jnp.asarray(SINKS))),
    "chunks, of which one is empty yet": (dict(seq=1, kv_seq=90, kv_heads=4, dim=64), dict(mask=Causal() & Chunk(64))),
    "latents, wider than a register": (dict(seq=1, kv_seq=96, kv_heads=1, dim=160, v_dim=144, size=1), {}),
}


@pytest.mark.parametrize(
    "case, implementation",
    # The reference's decode is its attention, and test_attention_triton.py has more of Triton's.
    [("all", "reference"), ("all", "triton"), ("chunks, of which one is empty yet", "triton")]
    + [(case, "tpu") for case in DECODES],
)
def test_decode_of_a_ragged_cache(case, implementation):
    """One row is at its first position, another in the middle. Later slots hold garbage, which reaches nobody."""
    shapes, options = DECODES[case]
    *qkv, d_out = arrays(**shapes)
    positions = np.array([[0], [67]])
    later = np.arange(shapes["kv_seq"])[None] > positions
    expected, _ = oracle(*qkv, d_out, q_positions=positions, **options)
    q, k, v = qkv
    k[later], v[later] = np.nan, np.inf
    decode = functools.partial(kernels.decode_attention, scale=SCALE, implementation=implementation, **options)
    decode = jax.jit(decode, compiler_options=QUICK)
    out = decode(q[:, 0], k, v, q_positions=positions[:, 0])
    assert np.linalg.norm(out - expected[:, 0]) < 1e-5 * np.linalg.norm(expected)
    v[1, 67] = np.nan  # which is seen now
    out = np.asarray(decode(q[:, 0], k, v, q_positions=positions[:, 0]))
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()
