"""Models by every implementation of the kernels: the same logits, whoever computes them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
import zoo
from tests.zoo import tiny
from zoo.quantized import quantize


GOLDEN = tiny.golden()
TOKENS = jnp.asarray(tiny.TOKENS)
# One of each family, with all that its attention and its experts have: windows, chunks, sinks, softcaps, latents.
MODELS = [
    "deepseek2", "deepseek3", "gemma", "gemma2", "gemma3", "gpt3", "gpt_oss", "llama", "llama4", "mistral", "mixtral",
    "qwen2-window-max", "qwen3-window-tail", "qwen3_moe",
]  # fmt: skip
OURS = ["reference", "xla", "triton", "tpu"]


@pytest.fixture(scope="module")
def model(request, tmp_path_factory):
    return zoo.load(tiny.write(tmp_path_factory.mktemp(request.param), request.param))


def prefill_and_decode(model, tokens):
    """The logits of all tokens but the last from a prefill, and of the last from a decode with the cache."""
    last = tokens.shape[1] - 1
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    cache = model.init_cache(len(tokens), tokens.shape[1], jnp.float32)
    prefill, cache = model.decode(tokens[:, :last], cache, positions=positions[:, :last])
    logits, _ = model.decode(tokens[:, last:], cache, positions=positions[:, last:])
    return jnp.concatenate([prefill, logits], axis=1)


@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize("model", MODELS, indirect=True)
def test_logits(request, model, implementation):
    name = request.node.callspec.params["model"]
    with kernels.prefer(implementation):
        calls = kernels.explain(prefill_and_decode, model, TOKENS)
        logits = eqx.filter_jit(prefill_and_decode)(model, TOKENS)
    # A decode may refuse heads of 8 features and latents of 24, which no released model has; nothing else.
    assert "attention" in {call.operation for call in calls if call.implementation == implementation}
    assert not [call for call in calls if call.others.get(implementation, "") is None], "another one served"
    error = np.abs(np.asarray(logits) - GOLDEN[name]).max() / np.abs(GOLDEN[name]).max()
    assert error < 1e-4


@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize("model", ["gpt_oss", "gemma2"], indirect=True)
def test_gradients(model, implementation):
    """Of a loss by every weight, with sinks, windows and experts in one, and softcaps in the other."""

    def loss(model, tokens):
        return jnp.mean(jnp.square(model(tokens)))

    gradient = eqx.filter_jit(eqx.filter_grad(loss))
    with kernels.prefer("reference"):
        expected = gradient(model, TOKENS)
    with kernels.prefer(implementation):
        actual = gradient(model, TOKENS)
    for ours, theirs in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs)


@pytest.mark.parametrize("implementation", OURS)
@pytest.mark.parametrize("model", ["qwen3_moe"], indirect=True)
def test_int8_weights(model, implementation):
    quantized = quantize(model, "int8")
    with kernels.prefer("reference"):
        expected = eqx.filter_jit(lambda m, t: m(t))(quantized, TOKENS)
    with kernels.prefer(implementation):
        actual = eqx.filter_jit(lambda m, t: m(t))(quantized, TOKENS)
    assert np.abs(actual - expected).max() < 1e-4 * np.abs(expected).max()
