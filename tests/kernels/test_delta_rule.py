"""The gated delta rule and the short convolution, against float64: packed, padded, continued, split over a mesh."""

import itertools
import math

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import kernels
from kernels import Slots, Tokens, delta, delta_rule_tpu, delta_rule_triton, delta_rule_xla, delta_step_tpu


BATCH, SEQ, HEADS, DIM, V_HEADS, V_DIM = 2, 150, 2, 8, 4, 6  # SEQ: chunks of 64 do not divide it
SCALE = 0.3
# What `arrays` makes, and options of the operation.
KINDS = {
    "a head's decay": ({}, {}),
    "a channel's decay": (dict(channels=True), {}),
    "strong decays": (dict(channels=True, strength=40.0), {}),
    "no erasing": ({}, dict(erase=False)),
}


def oracle(q, k, v, decay, beta, segments=None, state=None, *, erase=True):
    """In float64, token by token; segments[b] of 0 are padding."""
    q, k, v, decay, beta = (np.asarray(x, np.float64) for x in (q, k, v, decay, beta))
    q, k = (np.repeat(x, v.shape[2] // k.shape[2], axis=2) for x in (q, k))
    decay = np.broadcast_to(decay if decay.ndim == 4 else decay[..., None], k.shape)
    states = np.zeros((len(v), v.shape[2], k.shape[3], v.shape[3])) if state is None else np.array(state, np.float64)
    out = np.zeros(v.shape)
    for b, h in np.ndindex(*states.shape[:2]):
        s, document = states[b, h], None
        for t in range(v.shape[1]):
            if segments is not None and segments[b, t] == 0:
                continue
            if segments is not None and document not in (None, segments[b, t]):
                s = np.zeros_like(s)
            document = None if segments is None else segments[b, t]
            s = np.exp(decay[b, t, h])[:, None] * s
            new = v[b, t, h] - (s.T @ k[b, t, h] if erase else 0)
            s = s + beta[b, t, h] * np.outer(k[b, t, h], new)
            out[b, t, h] = SCALE * s.T @ q[b, t, h]
        states[b, h] = s
    return out, states


def arrays(seed=0, *, channels=False, strength=1.0, seq=SEQ, dtype=np.float32):
    random = np.random.default_rng(seed)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    q, k = (unit(random.normal(size=(BATCH, seq, HEADS, DIM))) for _ in range(2))
    v = random.normal(size=(BATCH, seq, V_HEADS, V_DIM))
    decay = -strength * random.random((BATCH, seq, V_HEADS, *((DIM,) if channels else ()))) ** 4
    beta = random.random((BATCH, seq, V_HEADS))
    return tuple(jnp.asarray(x, dtype) for x in (q, k, v, decay, beta))


def error(ours, true):
    return np.linalg.norm(np.asarray(ours, np.float64) - true) / np.linalg.norm(true)


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


SEGMENTS = np.concatenate([np.repeat([[1, 2, 3, 0]], [40, 1, 100, 9], axis=1), np.repeat([[5, 4]], [64, 86], axis=1)])


def test_packed_documents_and_padding(kind):
    """Documents that begin within a chunk, at its edge, and after one token; padding that holds NaN."""
    of_arrays, options = kind
    given = arrays(**of_arrays)
    out, state = oracle(*given, SEGMENTS, **options)
    given = tuple(x.at[0, -9:].set(jnp.nan) for x in given)
    at = Tokens(segments=jnp.asarray(SEGMENTS))
    for implementation in ("reference", "xla"):
        ours, last = kernels.delta_rule(*given, at, scale=SCALE, implementation=implementation, **options)
        assert error(ours[0, :-9], out[0, :-9]) < 1e-5 and error(ours[1], out[1]) < 1e-5, implementation
        assert error(last, state) < 1e-5, implementation


def test_gradients(kind):
    of_arrays, options = kind
    given, at = arrays(**of_arrays), Tokens(segments=jnp.asarray(SEGMENTS))
    random = np.random.default_rng(1)
    start = jnp.asarray(random.normal(size=(BATCH, V_HEADS, DIM, V_DIM)), jnp.float32)
    d_out = jnp.asarray(random.normal(size=given[2].shape), jnp.float32), start[::-1]

    @jax.jit
    def gradients(given, start, d_out):
        def each(implementation):
            run = lambda *x: kernels.delta_rule(
                *x[:-1], at, scale=SCALE, state=x[-1], implementation=implementation, **options
            )
            return jax.vjp(run, *given, start)[1](d_out)

        return each("xla"), each("reference")

    ours, theirs = gradients(given, start, d_out)
    for name, a, b in zip(("q", "k", "v", "decay", "beta", "state"), ours, theirs, strict=True):
        assert np.all(np.isfinite(a)), name
        assert error(a, np.asarray(b, np.float64)) < 2e-5, name


def test_a_sequence_in_parts_is_the_whole():
    """Prefill of right-padded rows, then single tokens; a row that has ended is padding."""
    given = arrays()
    whole, _ = oracle(*given)
    cuts, state, outs = [0, 70, 71, 72, SEQ], None, []
    for start, end in itertools.pairwise(cuts):
        padded = lambda x, one: jnp.pad(x, one + ((0, 0),) * (x.ndim - 2), constant_values=9)
        part = [padded(x[:, start:end], ((0, 0), (0, 1))) for x in given]
        positions = jnp.where(jnp.arange(end - start + 1) < end - start, jnp.arange(start, end + 1), -1)[None]
        out, state = kernels.delta_rule(*part, Tokens(jnp.tile(positions, (BATCH, 1))), scale=SCALE, state=state)
        outs.append(out[:, :-1])
    assert error(jnp.concatenate(outs, axis=1), whole) < 1e-5


@pytest.mark.parametrize("implementation", ["reference", "triton", "tpu"])
def test_a_step_changes_its_slots_alone(kind, implementation, monkeypatch):
    """One row goes on from a slot and writes another, one begins anew whatever lies there, one rests."""
    of_arrays, options = kind
    if "channels" in of_arrays:  # the layout of states whose values fill a TPU's registers
        monkeypatch.setattr(delta_step_tpu, "LANES", V_DIM)
    token = tuple(jnp.concatenate([x, jnp.full_like(x[:1], jnp.nan)]) for x in arrays(**of_arrays, seq=1))
    random = np.random.default_rng(2)
    stack = random.normal(size=(2, BATCH + 1, 3, V_HEADS, DIM, V_DIM)).astype(np.float32)
    stack[1, 1] = np.nan
    state = Slots(jnp.asarray(stack), jnp.array(1), jnp.array([2, -1, 0]), jnp.array([0, 1, 0]))
    at = Tokens(jnp.array([[5], [0], [-1]]))
    with kernels.prefer(implementation):
        step = lambda *x: kernels.delta_rule(*x[:-1], at, state=x[-1], scale=SCALE, **options)
        assert kernels.explain(step, *token, state)[0][:2] == ("delta_step", implementation)
        out, after = step(*token, state)
    start = np.stack([stack[1, 0, 2], np.zeros_like(stack[1, 0, 0])])
    true, last = oracle(*(x[:BATCH] for x in token), state=start, **options)
    assert error(out[:BATCH], true) < 1e-6
    found = np.array(after.stack)
    assert error(found[1, 0, 0], last[0]) < 1e-6 and error(found[1, 1, 1], last[1]) < 1e-6
    found[1, 0, 0], found[1, 1, 1] = stack[1, 0, 0], stack[1, 1, 1]
    np.testing.assert_array_equal(found, stack)


def on_a_mesh(run, *arguments, **axes):
    """The results on one device, and on a mesh with these axes."""
    alone = jax.jit(run)(*arguments)
    devices = np.array(jax.devices()[: math.prod(axes.values())]).reshape(*axes.values())
    with jax.set_mesh(Mesh(devices, tuple(axes))):
        return jax.tree.leaves(jax.jit(lambda *x: run(*x))(*arguments)), jax.tree.leaves(alone)


def test_split_over_a_mesh():
    given, at = arrays(channels=True), Tokens(segments=jnp.asarray(SEGMENTS))
    split, alone = on_a_mesh(lambda *x: kernels.delta_rule(*x, at, scale=SCALE), *given, fsdp=2, tensor=2)
    for ours, one in zip(split, alone, strict=True):
        assert error(ours, np.asarray(one, np.float64)) < 1e-6
    stack = jnp.asarray(np.random.default_rng(1).normal(size=(2, BATCH, 2, V_HEADS, DIM, V_DIM)), jnp.float32)
    state = Slots(stack, jnp.array(1), jnp.array([0, -1]), jnp.array([1, 0]))
    token = tuple(x[:, :1] for x in given)
    with kernels.prefer("triton"):
        split, alone = on_a_mesh(lambda *x: kernels.delta_rule(*x, scale=SCALE, state=state), *token, fsdp=2, tensor=2)
    for ours, one in zip(split, alone, strict=True):
        assert error(ours, np.asarray(one, np.float64)) < 1e-6


# Over four devices of 38 tokens: a document begins with the second device and has one token; the next goes on through
# the third; in the other row one begins within the second.
ACROSS = np.concatenate([np.repeat([[1, 2, 3, 0]], [38, 1, 100, 13], axis=1), np.repeat([[5, 4]], [60, 92], axis=1)])


def test_tokens_split_over_the_context(kind):
    """The outputs, the last state, and all gradients are one device's."""
    of_arrays, options = kind
    given, at = arrays(**of_arrays, seq=ACROSS.shape[1]), Tokens(segments=jnp.asarray(ACROSS))
    random = np.random.default_rng(1)
    start = jnp.asarray(random.normal(size=(BATCH, V_HEADS, DIM, V_DIM)), jnp.float32)
    d_out = jnp.asarray(random.normal(size=given[2].shape), jnp.float32), start[::-1]

    def both(given, start, d_out):
        run = lambda *x: kernels.delta_rule(*x[:-1], at, scale=SCALE, state=x[-1], **options)
        out, pull = jax.vjp(run, *given, start)
        return out, pull(d_out)

    split, alone = on_a_mesh(both, given, start, d_out, context=4)
    for name, ours, one in zip(("out", "last", "q", "k", "v", "decay", "beta", "state"), split, alone, strict=True):
        assert error(ours, np.asarray(one, np.float64)) < 1e-5, name


def test_half_precision_is_rounded_once():
    """What is interpreted multiplies in TF32 or in halves, as a GPU or a TPU does: that adds little."""
    given = arrays(dtype=jnp.bfloat16)
    out, last = oracle(*given)
    for implementation in ("xla", "triton", "tpu"):
        ours, state = kernels.delta_rule(*given, scale=SCALE, implementation=implementation)
        assert ours.dtype == jnp.bfloat16 and state.dtype == jnp.float32
        assert error(ours, out) < 2e-3 and error(state, last) < 1e-3, implementation


@pytest.mark.parametrize("of", [delta_rule_triton, delta_rule_tpu])
def test_kernels_scan_as_plain_jax_does(of):
    """The rest of an implementation is the same for all: chunks, features that fill no block, erasing and not."""
    random = np.random.default_rng(6)
    array = lambda *shape: jnp.asarray(random.normal(size=shape) / 8, jnp.float32)
    of_chunks = lambda *shape: array(3, 2, 3, 64, *shape)
    parts = delta.Parts(
        query=of_chunks(DIM), pairs=of_chunks(64), alone=of_chunks(20), less=of_chunks(DIM), key=of_chunks(DIM),
        fade=jnp.abs(array(3, 2, 3, DIM, 1)),
    )  # fmt: skip
    state, d_state, d_out = array(2, 3, DIM, 20), array(2, 3, DIM, 20), of_chunks(20)
    formula = delta.Formula(1.0, True, jax.lax.Precision.HIGHEST)
    plain = parts._replace(less=None, fade=parts.fade[..., :1, :])

    @jax.jit
    def found(parts, plain):
        def both(of):
            yield of.forward(formula, parts, state, keep=True)
            yield of.backward(formula, parts, d_out, d_state)
            yield of.forward(formula, plain, state, keep=False)
            yield of.backward(formula, plain, d_out, d_state)

        return list(both(of)), list(both(delta_rule_xla))

    ours, theirs = found(parts, plain)
    for each, one in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert error(each, np.asarray(one, np.float64)) < 1e-5


def additions(jaxpr):
    """Of products and sums in a jaxpr, and of whole states; those in a loop as often as it runs."""
    total = 0
    for eqn in jaxpr.eqns:
        ins, out = [getattr(v.aval, "shape", ()) for v in eqn.invars], eqn.outvars[0].aval.shape
        if eqn.primitive.name == "dot_general":
            total += math.prod(out) * math.prod(ins[0][axis] for axis in eqn.params["dimension_numbers"][0][0])
        elif eqn.primitive.name == "reduce_sum":
            total += math.prod(ins[0])
        elif eqn.primitive.name == "add" and out[-2:] == (DIM, V_DIM):
            total += math.prod(out)
        turns = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += turns * sum(additions(inner) for inner in jax.extend.core.jaxprs_in_params(eqn.params))
    return total


@pytest.mark.parametrize("erase", [True, False])
def test_operations_are_those_that_are_counted(erase):
    """The reference's; those that chunks add; and a scan's, by its four matrices."""
    seq, tokens = 2 * delta.CHUNK, BATCH * V_HEADS * 2 * delta.CHUNK
    given, of = arrays(seq=seq), dict(scale=SCALE, erase=erase)
    count = lambda name: additions(
        jax.make_jaxpr(lambda *x: kernels.delta_rule(*x, implementation=name, **of))(*given).jaxpr
    )
    once = tokens * delta.state_products(DIM, V_DIM, erase=erase)
    assert count("reference") == once
    within = delta.CHUNK * (DIM + V_DIM) + erase * (delta.CHUNK * (2 * DIM + V_DIM) + (delta.CHUNK**2 - 1) // 3)
    to_states = 2 * BATCH * V_HEADS * DIM * V_DIM  # each of two chunks adds to the state that fades
    assert count("xla") == once + tokens * within + to_states
    matrices = [(tokens, DIM)] * (2 + erase) + [(tokens, delta.CHUNK)]  # query, key, less; pairs
    assert delta.scan_flops(matrices, V_DIM) == 2 * (once + tokens * delta.CHUNK * V_DIM)


def test_inverse():
    """As exact as float32 is: also of equal keys, where powers of the matrix are as large as 1e17."""
    random = np.random.default_rng(5)
    unit = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)
    keys = unit(random.normal(size=(64, 16)))
    alike = unit(keys[:1] + 0.01 * keys)
    weak, strong = (np.cumsum(-strength * random.random(64)) for strength in (1e-3, 5.0))
    cases = [
        (keys, weak),
        (np.tile(keys[:1], (64, 1)), 0 * weak),
        (alike, weak),
        (unit(keys[:, :2]), weak),
        (keys, strong),
    ]
    decayed = lambda k, total: k @ k.T * np.exp(np.minimum(total[:, None] - total, 0))
    lower = np.stack([np.tril(decayed(*case), -1) for case in cases]).astype(np.float32)
    true = np.linalg.inv(np.eye(64) + lower.astype(np.float64))
    solved = jax.lax.linalg.triangular_solve(
        jnp.asarray(lower), jnp.tile(jnp.eye(64), (len(lower), 1, 1)), left_side=True, lower=True, unit_diagonal=True
    )
    for ours, theirs, one in zip(delta.inverse(jnp.asarray(lower)), solved, true, strict=True):
        assert error(ours, one) < max(2e-7, error(theirs, one))


def test_bad_arguments():
    q, k, v, decay, beta = arrays(seq=4)
    with pytest.raises(ValueError, match=r"value heads \(3\) must be a multiple of the query/key heads \(2\)"):
        kernels.delta_rule(q, k, v[:, :, :3], decay[:, :, :3], beta[:, :, :3], scale=1.0)


def convolved(x, weight, segments=None, tail=None):
    x, weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    out, width = np.zeros(x.shape), weight.shape[1]
    for b, t in np.ndindex(*x.shape[:2]):
        for back in range(width):
            if t - back < 0:
                seen = 0 if tail is None else tail[b, width - 1 + t - back]
            else:
                seen = x[b, t - back] * (segments is None or segments[b, t - back] == segments[b, t])
            out[b, t] += weight[:, width - 1 - back] * seen
    return out


def test_convolution_of_packed_documents():
    random = np.random.default_rng(2)
    x, weight = random.normal(size=(BATCH, SEQ, 5)).astype(np.float32), random.normal(size=(5, 4)).astype(np.float32)
    ours, tail = kernels.causal_conv(jnp.asarray(x), jnp.asarray(weight), Tokens(segments=jnp.asarray(SEGMENTS)))
    true = convolved(x, weight, SEGMENTS)
    assert error(ours[0, :-9], true[0, :-9]) < 1e-6 and error(ours[1], true[1]) < 1e-6
    np.testing.assert_array_equal(tail, [x[0, -12:-9], x[1, -3:]])


def test_convolution_split_over_the_context():
    """With gradients. Padding begins on any device; the tail then lies on one or on two, or is mostly the one given."""
    random = np.random.default_rng(5)
    x, weight, before = (random.normal(size=n).astype(np.float32) for n in ((3, 16, 6), (6, 4), (3, 3, 6)))
    segments = np.repeat([[1, 2, 3, 0]], [4, 5, 4, 3], axis=1), np.repeat([[1, 2]], [6, 10], axis=1), np.ones((1, 16))
    segments = jnp.asarray(np.concatenate(segments), jnp.int32)
    positions = jnp.where(jnp.arange(16)[None] < jnp.array([[1], [9], [16]]), jnp.arange(16)[None], -1)

    def both(x, weight, before):
        run = lambda x, weight, before: (
            kernels.causal_conv(x, weight, Tokens(segments=segments)),
            kernels.causal_conv(x, weight, Tokens(positions), tail=before),
        )
        out, pull = jax.vjp(run, x, weight, before)
        return out, pull(jax.tree.map(jnp.cos, out))

    split, alone = on_a_mesh(both, x, weight, before, context=4)
    assert error(alone[0][0, :13], convolved(x, weight, np.asarray(segments))[0, :13]) < 1e-6
    for ours, one in zip(split, alone, strict=True):
        assert error(ours, np.asarray(one, np.float64)) < 1e-6


def test_convolution_in_parts_is_the_whole():
    random = np.random.default_rng(3)
    x, weight = (
        random.normal(size=(BATCH, 9, 5)).astype(np.float32),
        jnp.asarray(random.normal(size=(5, 4)), jnp.float32),
    )
    whole, weight = convolved(x, weight), jnp.asarray(weight)
    out, tail = kernels.causal_conv(
        jnp.asarray(x[:, :6]).at[1, 2:].set(7.0), weight,
        Tokens(jnp.array([[0, 1, 2, 3, 4, 5], [0, 1, -1, -1, -1, -1]])),
    )  # fmt: skip
    np.testing.assert_array_equal(tail[1], [np.zeros(5), x[1, 0], x[1, 1]])
    first, tail = kernels.causal_conv(jnp.asarray(np.stack([x[0, 6], x[1, 2]])[:, None]), weight, tail=tail)
    assert error(out[0], whole[0, :6]) < 1e-6 and error(first[:, 0], np.stack([whole[0, 6], whole[1, 2]])) < 1e-6
    same, kept = kernels.causal_conv(first, weight, Tokens(jnp.full((BATCH, 1), -1)), tail=tail)
    np.testing.assert_array_equal(kept, tail)
    with pytest.raises(ValueError, match="leave segments out"):
        kernels.causal_conv(same, weight, Tokens(segments=jnp.ones((BATCH, 1), int)), tail=tail)


@pytest.mark.live
@pytest.mark.parametrize("channels", [False, True])
def test_transformers_computes_the_same(channels):
    torch = pytest.importorskip("torch")
    from transformers.models.kimi_linear.modeling_kimi_linear import recurrent_kimi_delta_attention
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    given = arrays(channels=channels)
    given = tuple(jnp.repeat(x, V_HEADS // HEADS, axis=2) for x in given[:2]) + given[2:]  # Kimi's are as many
    start = np.random.default_rng(4).normal(size=(BATCH, V_HEADS, DIM, V_DIM)).astype(np.float32)
    ours, last = kernels.delta_rule(*given, scale=DIM**-0.5, state=jnp.asarray(start))
    theirs = recurrent_kimi_delta_attention if channels else torch_chunk_gated_delta_rule
    out, state = theirs(
        *(torch.from_numpy(np.array(x)) for x in given),
        initial_state=torch.from_numpy(start.copy()),
        output_final_state=True,
    )
    assert error(ours, out.numpy()) < 1e-5 and error(last, state.numpy()) < 1e-5
