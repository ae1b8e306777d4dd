"""kernels.attention: both implementations against a formula in float64 numpy, and what "xla" promises beyond it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels import attention_xla, reference


IMPLEMENTATIONS = ["xla", "reference"]
SCALE = 0.3
QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all of this file's time; so it takes half of it


def oracle(q, k, v, d_out, *, causal=True, window=None, softcap=None, sinks=None, **tokens):
    """Output and the gradients of q, k, v and sinks, in float64, one logit matrix per head."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    (batch, seq, heads, _), (kv_seq, kv_heads) = q.shape, k.shape[1:3]
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    q_positions = tokens.get("q_positions", np.arange(seq)[None])
    kv_positions = tokens.get("kv_positions", np.arange(kv_seq)[None])
    distance = np.asarray(q_positions)[:, :, None] - np.asarray(kv_positions)[:, None, :]
    seen = np.ones((batch, seq, kv_seq), bool)
    if causal:
        seen &= distance >= 0
    if window is not None:
        seen &= distance < window
    if "q_segments" in tokens:
        seen &= np.asarray(tokens["q_segments"])[:, :, None] == np.asarray(tokens["kv_segments"])[:, None, :]
    seen = seen[:, None]

    x = SCALE * np.einsum("bshd,bthd->bhst", q, k)
    logits = x if softcap is None else softcap * np.tanh(x / softcap)
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sink = np.broadcast_to(sink[None, :, None, None], (batch, heads, seq, 1))
    logits_and_sink = np.concatenate([np.where(seen, logits, -np.inf), sink], axis=-1)
    top = logits_and_sink.max(axis=-1, keepdims=True)
    weights = np.exp(logits_and_sink - np.where(np.isinf(top), 0, top))
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    sink_weight, weights = weights[..., -1], weights[..., :-1]

    out = np.einsum("bhst,bthd->bshd", weights, v)
    d_weights = np.einsum("bshd,bthd->bhst", d_out, v)
    delta = (weights * d_weights).sum(axis=-1)
    d_x = weights * (d_weights - delta[..., None])
    if softcap is not None:
        d_x *= 1 - np.tanh(x / softcap) ** 2
    share = lambda x: x.reshape(batch, kv_seq, kv_heads, -1, x.shape[-1]).sum(axis=3)
    dq = SCALE * np.einsum("bhst,bthd->bshd", d_x, k)
    dk = share(SCALE * np.einsum("bhst,bshd->bthd", d_x, q))
    dv = share(np.einsum("bhst,bshd->bthd", weights, d_out))
    gradients = [dq, dk, dv]
    if sinks is not None:
        gradients.append(-(sink_weight * delta).sum(axis=(0, 2)))
    return out, gradients


def arrays(batch=2, seq=150, heads=4, dim=16, kv_seq=None, kv_heads=2, v_dim=None, dtype=jnp.float32, size=3):
    """q, k, v and the gradient of the output: logits of about 4, so that the softmax has something to decide."""
    rng = np.random.default_rng(0)
    shapes = [(seq, heads, dim), (kv_seq or seq, kv_heads, dim), (kv_seq or seq, kv_heads, v_dim or dim)]
    shapes.append((seq, heads, v_dim or dim))
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(batch, *shape)), dtype) for shape in shapes)
    return size * q, k, v, d_out


def run(implementation, q, k, v, d_out, *, sinks=None, **options):
    """Output and the gradients of q, k, v and sinks."""
    static = {name: options.pop(name) for name in ("causal", "window", "softcap") if name in options}
    return _run(implementation, tuple(static.items()), q, k, v, d_out, sinks, options)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _run(implementation, static, q, k, v, d_out, sinks, tokens):
    def attention(arguments):
        *qkv, sinks = arguments
        return kernels.attention(
            *qkv, scale=SCALE, sinks=sinks, **dict(static), **tokens, implementation=implementation
        )

    out, gradient = jax.vjp(attention, (q, k, v, sinks))
    return out, [g for g in gradient(d_out)[0] if g is not None]


def errors(actual, expected):
    """The relative errors, in Frobenius norm, of the output and of each gradient."""
    (out, gradients), (true_out, true_gradients) = actual, expected
    relative = lambda x, true: np.linalg.norm(np.asarray(x, np.float64) - true) / max(np.linalg.norm(true), 1e-30)
    return list(map(relative, [out, *gradients], [true_out, *true_gradients]))


def tokens(q_positions, kv_positions, q_segments, kv_segments):
    names = ("q_positions", "kv_positions", "q_segments", "kv_segments")
    values = (q_positions, kv_positions, q_segments, kv_segments)
    return {name: jnp.asarray(np.atleast_2d(x), jnp.int32) for name, x in zip(names, values, strict=True)}


def packed(*rows):
    """Tokens of rows of documents of these lengths, with positions that restart; the last is padding, segment 0."""
    segments = [np.repeat([*range(1, len(lengths)), 0], lengths) for lengths in rows]
    positions = [np.concatenate([np.arange(n) for n in lengths]) for lengths in rows]
    return tokens(positions, positions, segments, segments)


SINKS = jnp.array([1.0, -2.0, 5.0, -jnp.inf])
DOCUMENTS = packed([128, 1, 130, 100, 41], [10, 350, 40])
CASES = {
    "causal": (dict(seq=300), {}),
    "full, with logits whose exponential overflows": (dict(seq=130, kv_seq=270, size=25), dict(causal=False)),
    "multi-query": (dict(seq=129, heads=5, kv_heads=1, dim=24, v_dim=16), {}),
    "window": (dict(seq=300, heads=2), dict(window=20)),
    "softcap and sinks": (dict(seq=136), dict(softcap=4.0, sinks=SINKS)),
    "packed": (dict(seq=400), DOCUMENTS),
    "all": (dict(seq=400, v_dim=8), dict(window=50, softcap=4.0, sinks=SINKS, **DOCUMENTS)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_float32_equals_the_oracle(case, implementation):
    shapes, options = CASES[case]
    x = arrays(**shapes)
    assert max(errors(run(implementation, *x, **options), oracle(*x, **options))) < 1e-5


@pytest.mark.parametrize("case", ["causal", "all"])
def test_bfloat16_is_as_exact_as_the_reference(case):
    shapes, options = CASES[case]
    x = arrays(**shapes, dtype=jnp.bfloat16)
    expected = oracle(*x, **options)
    out, *gradients = errors(run("xla", *x, **options), expected)
    theirs = errors(run("reference", *x, **options), expected)
    assert out < 4e-3 and max(gradients) < 1e-2
    assert all(a < 1.5 * b for a, b in zip([out, *gradients[:3]], theirs[:4], strict=True))


# From here to the NaN tests, shapes and options are the same, so that each implementation is compiled once.
SEQ, KV_SEQ = 140, 150


def runs_of(values, length):
    """Integers that change now and then, as segments and positions do, but in no order."""
    runs = st.lists(st.tuples(values, st.integers(1, 60)), min_size=1, max_size=12)
    return runs.map(lambda runs: np.resize(np.repeat(*zip(*runs, strict=True)), length))


@settings(derandomize=True, deadline=None, max_examples=20)
@given(
    q_positions=runs_of(st.integers(0, 9), SEQ),
    kv_positions=runs_of(st.integers(0, 9), KV_SEQ),
    q_segments=runs_of(st.integers(-1, 1), SEQ),
    kv_segments=runs_of(st.integers(-1, 1), KV_SEQ),
    sinks=st.lists(st.sampled_from([-np.inf, -3.0, 0.0, 20.0]), min_size=4, max_size=4),
)
def test_any_positions_segments_and_sinks(sinks, **where):
    x = arrays(batch=1, seq=SEQ, kv_seq=KV_SEQ)
    options = dict(sinks=jnp.array(sinks), window=5, **tokens(*where.values()))
    expected = oracle(*x, **options)
    for implementation in IMPLEMENTATIONS:
        assert max(errors(run(implementation, *x, **options), expected)) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_nothing_yields_zeros(implementation):
    x = arrays(batch=1, seq=SEQ, kv_seq=KV_SEQ)
    where = tokens(np.arange(SEQ), np.arange(KV_SEQ) + 30, np.zeros(SEQ), np.repeat([0, 7], [120, 30]))
    out, (dq, dk, dv, d_sinks) = run(implementation, *x, sinks=SINKS, window=5, **where)
    assert not out[:, :30].any() and out[:, 30:].all()
    assert not dq[:, :30].any() and not dk[:, 120:].any() and not dv[:, 120:].any()
    assert all(np.isfinite(g).all() for g in (dq, dk, dv, d_sinks))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spoilt", ["q", "k", "v"])
def test_garbage_touches_only_those_who_see_it(implementation, spoilt, garbage):
    """Tokens from 70 on hold garbage, and no gradient comes from there. With this window they see keys from 66 on."""
    *qkv, d_out = arrays(batch=1, seq=SEQ, kv_seq=KV_SEQ)
    d_out = d_out.at[:, 70:].set(0)
    where = tokens(np.arange(SEQ), np.arange(KV_SEQ), np.zeros(SEQ), np.zeros(KV_SEQ))
    clean = [x.at[:, 70:].set(1) for x in qkv]
    dirty = [x.at[:, 70:, :, 0].set(garbage) if name == spoilt else x for name, x in zip("qkv", clean, strict=True)]
    out, (dq, dk, dv, _) = run(implementation, *dirty, d_out, sinks=SINKS, window=5, **where)
    true_out, (true_dq, true_dk, true_dv, _) = run(implementation, *clean, d_out, sinks=SINKS, window=5, **where)
    for actual, expected, end in [(out, true_out, 70), (dq, true_dq, 70), (dk, true_dk, 66), (dv, true_dv, 66)]:
        np.testing.assert_allclose(actual[:, :end], expected[:, :end], rtol=1e-6)
    assert np.isnan(out[:, 70:]).all()


def test_memory_is_linear_in_the_sequence():
    """Forward and backward, with everything that could tempt one to build a mask."""

    def temporaries(seq, implementation):
        x = [jax.ShapeDtypeStruct((1, seq, 2, 32), jnp.float32)] * 3
        ids = [jax.ShapeDtypeStruct((1, seq), jnp.int32)] * 4

        def loss(q, k, v, *ids):
            where = dict(zip(("q_positions", "kv_positions", "q_segments", "kv_segments"), ids, strict=True))
            return kernels.attention(q, k, v, scale=SCALE, window=99, implementation=implementation, **where).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*x, *ids).compile(QUICK).memory_analysis().temp_size_in_bytes

    assert temporaries(4096, "reference") > 4096 * 4096 * 4  # so this test can fail
    once, twice = temporaries(4096, "xla"), temporaries(8192, "xla")
    assert twice < 2.1 * once
    assert twice < 8192 * 8192 * 4 / 10


def test_inside_a_sharded_scanned_rematerialised_model():
    """The batch stays split over eight devices, nothing is gathered, and the numbers are the reference's."""
    q, k, v, _ = arrays(batch=8, seq=160, dim=8)
    segments = jnp.asarray(np.repeat([[1, 2, 0]], 8, axis=0).repeat([70, 60, 30], axis=1), jnp.int32)

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
        (dict(causal=False), 16),
        (dict(), 4 + 3 + 2 + 1),
        (dict(window=128), 4 + 3),
        (dict(causal=False, **packed([256, 128, 128])), 4 + 1 + 1),
        (packed([256, 128, 128]), 3 + 1 + 1),
    ],
)
def test_blocks_that_nobody_sees_are_skipped(options, blocks):
    sequence = attention_xla.Blocks.of(4 * attention_xla.BLOCK)
    indices = jnp.arange(sequence.length)[None]
    q, kv = (
        reference.Tokens(options.get(f"{side}_positions", indices), options.get(f"{side}_segments"))
        for side in ("q", "kv")
    )
    formula = attention_xla.Formula(SCALE, options.get("causal", True), options.get("window"), softcap=None)
    visible_blocks = jax.jit(attention_xla.visible_blocks, static_argnums=(0, 1, 3))
    first, end = visible_blocks(formula, sequence, q, sequence, kv)
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
        assert max(errors(run(None, *x), oracle(*x))) < 1e-13
        with pytest.raises(ValueError, match=r"'xla'\): it computes in float32, and q is float64.*: reference\."):
            run("xla", *x)


def test_contradictions_are_refused():
    q, k, v, _ = arrays(seq=4)
    attention = functools.partial(kernels.attention, scale=SCALE)
    with pytest.raises(ValueError, match=r"no such implementation.*: reference, xla"):
        attention(q, k, v, implementation="cudnn")
    with pytest.raises(ValueError, match="one dtype, not float32, float32 and bfloat16"):
        attention(q, k, v.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"query heads \(4\) must be a multiple of the key/value heads \(3\)"):
        attention(q, k[:, :, [0, 1, 1]], v[:, :, [0, 1, 1]])
    with pytest.raises(ValueError, match="both q_segments and kv_segments"):
        attention(q, k, v, q_segments=jnp.zeros((2, 4), jnp.int32))
    with pytest.raises(ValueError, match="window=0 hides every key"):
        attention(q, k, v, window=0)
