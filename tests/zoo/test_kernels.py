"""Models with every implementation of the kernels have the same logits.

test_families.py tests by `kernels.explain` that every implementation accepts every family's calls. tests/kernels tests
that each computes every kind of attention, of experts and of 8-bit weights. So here is one whole model with each
implementation. Behind `thorough` is each kind of attention once: latents, sinks and windows, chunks, softcaps. The
reference, which serves such short rows by default, is in test_parity.py.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, error, packed, prefill_and_decode
from zoo.surgery import path_name


GOLDEN = tiny.golden()


def by(implementation, function, *args):
    """Returns the result, and the served calls. Compiles anew, as another preference's program would be reused."""
    compiled = eqx.filter_jit(lambda *args: function(*args))
    with kernels.prefer(implementation):
        calls = kernels.explain(compiled, *args)
        return compiled(*args), calls


def assert_served(calls, implementation):
    assert "attention" in {call.operation for call in calls if call.implementation == implementation}
    assert not [call for call in calls if call.others.get(implementation, "") is None], "another one served"


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "triton", "tpu"])
def test_int8_weights(load, implementation):
    """Attention, experts and linear maps of this implementation give the logits of the dequantised numbers."""
    model, stored = load("qwen3_moe"), load("qwen3_moe", quantize="int8")
    arrays = {path_name(path): np.asarray(array) for path, array in jax.tree_util.tree_leaves_with_path(stored)}

    def meant(path, array):
        codes = arrays[path_name(path)]
        if codes.dtype != np.int8:
            return array
        scale = arrays[path_name(path).removesuffix("weight") + "scale"]
        return jnp.asarray(codes.astype(np.float32) * scale[..., None])

    expected = packed(jax.tree_util.tree_map_with_path(meant, model))[0]
    logits, calls = by(implementation, lambda model, tokens: model(tokens), stored, TOKENS)
    assert_served(calls, implementation)
    assert {"attention", "ragged_dot", "quantized_matmul"} <= {call.operation for call in calls}
    close(logits, expected, terms=MODEL)


@pytest.mark.thorough
@pytest.mark.parametrize("name, implementation", [("deepseek3", "tpu"), ("gpt_oss", "triton"), ("llama4", "xla")])
def test_logits(load, name, implementation):
    """Logits of a prefill and a decode step are right."""
    logits, calls = by(implementation, prefill_and_decode, load(name), TOKENS)
    assert_served(calls, implementation)
    assert error(logits, GOLDEN[name]) < 1e-4


@pytest.mark.thorough
@pytest.mark.parametrize("name, implementation", [("mixtral-window-new", "tpu"), ("gemma2", "triton")])
def test_gradients(load, name, implementation):
    """Logits, and gradients of a loss by every weight, are right, with windows and experts in one model, and softcaps
    in the other.
    """

    @eqx.filter_grad(has_aux=True)
    def gradient(model, tokens):
        logits = model(tokens)
        return jnp.mean(jnp.square(logits)), logits

    expected, _ = by("reference", gradient, load(name), TOKENS)
    actual, calls = by(implementation, gradient, load(name), TOKENS)
    assert_served(calls, implementation)
    assert error(actual[1], GOLDEN[name]) < 1e-4
    close(actual[0], expected[0], terms=2 * MODEL)
