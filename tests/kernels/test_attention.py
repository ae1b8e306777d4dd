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
from kernels import attention_xla


IMPLEMENTATIONS = ["xla", "reference"]
SCALE = 0.3


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


def arrays(batch=2, seq=150, heads=4, dim=16, kv_seq=None, kv_heads=2, v_dim=None, dtype=jnp.float32):
    """q, k, v and the gradient of the output: logits of about 5, so that the softmax has something to decide."""
    rng = np.random.default_rng(0)
    shapes = [(seq, heads, dim), (kv_seq or seq, kv_heads, dim), (kv_seq or seq, kv_heads, v_dim or dim)]
    shapes.append((seq, heads, v_dim or dim))
    q, k, v, d_out = (jnp.asarray(rng.normal(size=(batch, *shape)), dtype) for shape in shapes)
    return 3 * q, k, v, d_out


def run(implementation, q, k, v, d_out, *, sinks=None, **options):
    """Output and the gradients of q, k, v and sinks."""
    static = {name: options.pop(name) for name in ("causal", "window", "softcap") if name in options}
    return _run(implementation, tuple(static.items()), q, k, v, d_out, sinks, options)


# Compiling is nearly all of this file's time, and without LLVM's optimisations it takes half of it.
@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options={"xla_backend_optimization_level": 0})
def _run(implementation, static, q, k, v, d_out, sinks, tokens):
    def attention(arguments):
        *qkv, sinks = arguments
        return kernels.attention(
            *qkv, scale=SCALE, sinks=sinks, **dict(static), **tokens, implementation=implementation
        )

    out, gradient = jax.vjp(attention, (q, k, v, sinks))
    return out, [g for g in gradient(d_out)[0] if g is not None]


def error(actual, expected):
    """The largest of the relative errors, in Frobenius norm, of the output and of each gradient."""
    (out, gradients), (true_out, true_gradients) = actual, expected
    relative = lambda x, true: np.linalg.norm(np.asarray(x, np.float64) - true) / max(np.linalg.norm(true), 1e-30)
    return relative(out, true_out), max(map(relative, gradients, true_gradients))


def packed(*lengths):
    """Tokens of documents of these lengths, with positions that restart; the last is padding, segment 0."""
    segments = np.repeat([*range(1, len(lengths)), 0], lengths)
    positions = np.concatenate([np.arange(n) for n in lengths])
    return tokens(positions, positions, segments, segments)


def tokens(q_positions, kv_positions, q_segments, kv_segments):
    names = ("q_positions", "kv_positions", "q_segments", "kv_segments")
    values = (q_positions, kv_positions, q_segments, kv_segments)
    return {name: jnp.asarray(x, jnp.int32)[None] for name, x in zip(names, values, strict=True)}


SINKS = jnp.array([1.0, -2.0, 5.0, -jnp.inf])
DOCUMENTS = packed(128, 1, 130, 100, 41)
CASES = {
    "causal": (dict(seq=300), {}),
    "full": (dict(seq=130, kv_seq=270), dict(causal=False)),
    "multi-query": (dict(seq=129, heads=5, kv_heads=1, dim=24, v_dim=16), {}),
    "window": (dict(seq=300, heads=2), dict(window=20)),
    "softcap and sinks": (dict(seq=136), dict(softcap=4.0, sinks=SINKS)),
    "packed": (dict(batch=1, seq=400), DOCUMENTS),
    "all": (dict(batch=1, seq=400, v_dim=8), dict(window=50, softcap=4.0, sinks=SINKS, **DOCUMENTS)),
}


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("case", CASES)
def test_float32_equals_the_oracle(case, implementation):
    shapes, options = CASES[case]
    x = arrays(**shapes)
    assert max(error(run(implementation, *x, **options), oracle(*x, **options))) < 1e-5


@pytest.mark.parametrize("case", ["causal", "all"])
def test_bfloat16_is_as_exact_as_the_reference(case):
    shapes, options = CASES[case]
    x = arrays(**shapes, dtype=jnp.bfloat16)
    expected = oracle(*x, **options)
    out, gradients = error(run("xla", *x, **options), expected)
    reference_out, reference_gradients = error(run("reference", *x, **options), expected)
    assert out < min(4e-3, 1.5 * reference_out)
    assert gradients < min(1e-2, 1.5 * reference_gradients)


# From here to the NaN tests, shapes and options are the same, so that each implementation is compiled once.
SEQ, KV_SEQ = 140, 150


def runs_of(values, length):
    """Integers that change now and then, as segments and positions do, but in no order."""
    runs = st.lists(st.tuples(values, st.integers(1, 60)), min_size=1, max_size=12)
    return runs.map(lambda runs: np.resize(np.repeat(*zip(*runs, strict=True)), length))


@settings(derandomize=True, deadline=None, max_examples=25)
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
        assert max(error(run(implementation, *x, **options), expected)) < 1e-5


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_query_that_sees_nothing_yields_zeros(implementation):
    x = arrays(batch=1, seq=SEQ, kv_seq=KV_SEQ)
    where = tokens(np.arange(SEQ), np.arange(KV_SEQ) + 30, np.zeros(SEQ), np.repeat([0, 7], [100, 50]))
    out, (dq, dk, dv, d_sinks) = run(implementation, *x, sinks=SINKS, window=5, **where)
    assert not out[:, :30].any() and out[:, 30:].all()
    assert not dq[:, :30].any() and not dk[:, 100:].any() and not dv[:, 100:].any()
    assert all(np.isfinite(g).all() for g in (dq, dk, dv, d_sinks))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf])
def test_garbage_touches_only_those_who_see_it(implementation, garbage):
    """Queries 0 to 69 do not see keys from 70 on, which hold garbage; nor does anyone ask for the others' gradients."""
    *qkv, d_out = arrays(batch=1, seq=SEQ, kv_seq=KV_SEQ)
    d_out = d_out.at[:, 70:].set(0)
    where = tokens(np.arange(SEQ), np.arange(KV_SEQ), np.zeros(SEQ), np.zeros(KV_SEQ))
    zeroed = [x.at[:, 70:].set(0) for x in qkv]
    spoilt = [x.at[:, 70:, :, 0].set(garbage) for x in zeroed]
    out, (dq, dk, dv, _) = run(implementation, *spoilt, d_out, sinks=SINKS, window=5, **where)
    true_out, (true_dq, true_dk, true_dv, _) = run(implementation, *zeroed, d_out, sinks=SINKS, window=5, **where)
    for actual, expected in [(out, true_out), (dq, true_dq), (dk, true_dk), (dv, true_dv)]:
        np.testing.assert_allclose(actual[:, :70], expected[:, :70], rtol=1e-6)
    assert np.isnan(out[:, 70:]).all()
