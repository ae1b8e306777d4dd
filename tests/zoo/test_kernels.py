"""Models by every implementation of the kernels: the same logits, whoever computes them.

Compared is every pair of a kind of attention (latents, softcaps, sinks and windows, chunks) and an implementation, one
of each kind here and the others behind `slow`; the reference, which serves such short rows by default, is in
test_parity.py. That every implementation takes what every family asks for is in test_families.py.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from tests.zoo import tiny
from tests.zoo.programs import TOKENS, error, prefill_and_decode
from zoo.quantized import quantize


GOLDEN = tiny.golden()
slow = lambda *case: pytest.param(*case, marks=pytest.mark.slow)


def by(implementation, function, *args):
    """The result, and who served which call; compiled anew, since what another preference has compiled would serve."""
    compiled = eqx.filter_jit(lambda *args: function(*args))
    with kernels.prefer(implementation):
        calls = kernels.explain(compiled, *args)
        return compiled(*args), calls


@pytest.mark.parametrize(
    "name, implementation",
    [
        ("deepseek3", "tpu"),
        ("gemma2", "triton"),
        ("gpt_oss", "xla"),
        ("llama4", "xla"),
        slow("deepseek3", "triton"),
        slow("deepseek3", "xla"),
        slow("gemma2", "tpu"),
        slow("gemma2", "xla"),
        slow("gpt_oss", "tpu"),
        slow("gpt_oss", "triton"),
        slow("llama4", "tpu"),
        slow("llama4", "triton"),
    ],
)
def test_logits(load, name, implementation):
    logits, calls = by(implementation, prefill_and_decode, load(name), TOKENS)
    assert "attention" in {call.operation for call in calls if call.implementation == implementation}
    assert not [call for call in calls if call.others.get(implementation, "") is None], "another one served"
    assert error(logits, GOLDEN[name]) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name, implementation", [("gpt_oss", "tpu"), ("gemma2", "triton")])
def test_gradients(load, name, implementation):
    """Of a loss by every weight, with sinks, windows and experts in one, and softcaps in the other."""
    gradient = eqx.filter_grad(lambda model, tokens: jnp.mean(jnp.square(model(tokens))))
    expected, actual = (by(each, gradient, load(name), TOKENS)[0] for each in ("reference", implementation))
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs)


def test_int8_weights(load):
    forward, quantized = lambda model: model(TOKENS), quantize(load("qwen3_moe"), "int8")
    expected, _ = by("reference", forward, quantized)
    for implementation in ("xla", "triton", "tpu"):
        assert error(by(implementation, forward, quantized)[0], expected) < 1e-4
