"""Gradients in bfloat16: no family sums any of them over tokens in bfloat16, or scatters them."""

import math

import equinox as eqx
import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest

from tests.zoo.programs import MECHANISMS, POSITIONS, SEGMENTS, STACKS, TOKENS, by_mechanism
from zoo.nn.layers import Embedding, LayerNorm, Linear, erf_gelu, gelu, gelu_times
from zoo.surgery import cast, modules


def operations(jaxpr):
    """Yields all operations of a program, including those of loops and branches."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from operations(inner)


@pytest.mark.parametrize("name", by_mechanism(STACKS, MECHANISMS[:4]))
def test_nothing_is_summed_in_bfloat16_or_kept_in_float32(load, untyped, name):
    """The traced program is checked, so the result holds for any length. Matrix products sum in float32 on every
    device.

    Types are those of the same models in test_cache.py, and not checked again.
    """
    model = jax.eval_shape(lambda model: cast(model, jnp.bfloat16), load(name))

    def loss(model):
        x, _, _ = model.hidden(TOKENS, positions=POSITIONS, segments=SEGMENTS)
        return jnp.sum(model.unembed(x).astype(jnp.float32))

    # Kimi Linear's decays, one for each channel, would forget at other rates if rounded.
    exempt = {"scan keeps float32[2,2,40,4,8]"} if name.startswith("kimi_linear") else set()
    choices = getattr(model.config, "num_experts_per_tok", 0)  # gpt-oss has their softmax in its dtype
    found, width = set(), model.config.hidden_size
    for equation in operations(jax.make_jaxpr(jax.grad(loss, allow_int=True))(model).jaxpr):
        kind = equation.primitive.name
        # Results of a scan over layers with one more axis than those of a step are kept for the backward pass, by token
        # or by expert row. (XLA's attention also keeps weights.)
        results = zip(equation.outvars, equation.params["jaxpr"].out_avals, strict=True) if kind == "scan" else ()
        for kept in (whole for whole, once in results if whole.aval.shape != once.shape):
            _, rows, *_ = shape = (*kept.aval.shape, 1)
            of_tokens = shape[1:3] == TOKENS.shape or rows >= TOKENS.size
            if kept.aval.dtype == jnp.float32 and of_tokens and math.prod(shape[1:]) >= TOKENS.size * width:
                found.add(f"scan keeps {kept.aval}")
        if not kind.startswith(("scatter", "reduce_sum", "cumsum", "reduce_window_sum")):
            continue
        operand = equation.invars[0].aval
        if kind.startswith("scatter") and jnp.issubdtype(operand.dtype, jnp.floating):
            found.add(f"{kind} {operand} {equation.source_info.name_stack}")
        elif not kind.startswith("scatter") and operand.dtype == jnp.bfloat16:
            many = math.prod(operand.shape[axis] for axis in equation.params.get("axes", (-1,)))
            if many > max(choices, 1):
                found.add(f"{kind} of {many} of {operand}")
    assert not found - exempt


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gpt3", "gpt_oss"])
def test_long_text_that_repeats_itself(load, name):
    """Gradients of biases and embeddings equal, rounded once, the sums over tokens of each token's own gradient.

    The same model gets a copy of them for each token, so that nothing is summed. Parameters that multiply, such as
    norms, would round the copies' gradients before the sum; tests/kernels/test_sums.py tests these.
    """
    model, (batch, seq) = cast(load(name), jnp.bfloat16), (32, 60)
    text = np.random.RandomState(0).zipf(1.5, (batch, seq)) % 64
    text[:, ::2] = 5
    positions = jnp.broadcast_to(jnp.arange(seq), text.shape)
    weights = jnp.asarray(1 + np.random.RandomState(1).normal(size=(batch, seq, 1)), jnp.float32)
    embedding = lambda m: next(modules(m, Embedding))[1].weight
    biases = lambda m: [linear.bias for _, linear in modules(m, Linear) if linear.bias is not None]
    shared = lambda m: [embedding(m), *biases(m)]

    def loss(arrays, model, tokens):
        x, _, _ = eqx.tree_at(shared, model, arrays).hidden(tokens, positions=positions)
        return jnp.sum(x.astype(jnp.float32) * weights)

    def gradients(arrays, tokens):
        exact = {"xla_allow_excess_precision": False}  # otherwise fusions decide where to round
        arguments = arrays, model, jnp.asarray(tokens)
        found = jax.jit(jax.grad(loss)).lower(*arguments).compile(compiler_options=exact)(*arguments)
        return [np.asarray(a, np.float64) for a in found]

    arrays = [np.asarray(a) for a in shared(model)]
    copies = [arrays[0][text].reshape(batch * seq, -1)]
    for bias in arrays[1:]:  # of a stack of layers, or of one layer
        copies.append(np.broadcast_to(bias[..., None, None, :], (*bias.shape[:-1], batch, seq, bias.shape[-1])))
    table, *each = gradients([jnp.asarray(a) for a in copies], np.arange(batch * seq).reshape(batch, seq))
    want = [np.zeros(arrays[0].shape), *(a.sum(axis=(-3, -2)) for a in each)]
    np.add.at(want[0], text.reshape(-1), table)
    for got, exact in zip(gradients([jnp.asarray(a) for a in arrays], text), want, strict=True):
        once = np.linalg.norm(np.asarray(jnp.asarray(exact, jnp.bfloat16), np.float64) - exact)
        assert 0 < np.linalg.norm(got - exact) <= 1.2 * once


@pytest.mark.parametrize("of_gate", [False, True])
def test_norms_and_gelus_are_rounded_once(of_gate):
    """A layer norm, GELU and GEGLU in bfloat16 give the numbers of float64, rounded once, and so do their gradients."""
    norm = LayerNorm(48, 1e-6)
    numbers = np.random.default_rng(0).normal(1, 2, (3, 40, 48)).astype(jnp.bfloat16)
    x, up, d_out = jnp.asarray(numbers)
    weight, bias = x[0] + 0.5, x[1]
    norm = eqx.tree_at(lambda m: (m.weight, m.bias), norm, (weight, bias))

    def by_formula(x, up, weight, bias):
        centred = x - x.mean(-1, keepdims=True)
        normed = centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + 1e-6) * weight[None] + bias[None]
        gelu = lambda x: 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
        return (gelu(x) * up, gelu(x)) if of_gate else (normed, 0.5 * x * (1 + jax.scipy.special.erf(x / np.sqrt(2))))

    def ours(x, up, weight, bias):
        layer = eqx.tree_at(lambda m: (m.weight, m.bias), norm, (weight, bias))
        return (gelu_times(x, up), gelu(x)) if of_gate else (layer(x), erf_gelu(x))

    def run(both, *given):
        out, gradient = jax.vjp(both, *given)
        d, zero = d_out.astype(given[0].dtype), jnp.zeros_like(given[0])
        return out, gradient((d, zero)), gradient((zero, d))

    found = jax.jit(lambda *given: run(ours, *given))(x, up, weight, bias)
    with jax.enable_x64(True):
        exact = [jnp.asarray(np.asarray(a, np.float64)) for a in (x, up, weight, bias)]
        meant = jax.device_get(run(by_formula, *exact))
    assert all(a.dtype == jnp.bfloat16 for a in jax.tree.leaves(found))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(meant), strict=True):
        np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=2**-8, atol=1e-4)  # float32's, in GELU's tails
