"""`kernels.prefer("invariant")`: a row's logits have the same bits in any batch, in chunks of any size and in pages."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from tests.zoo.programs import thorough
from zoo.generation.engine import Engine
from zoo.generation.sampling import Sampling
from zoo.nn.cache import init_cache


TOKENS = np.random.RandomState(3).randint(0, 64, (8, 70)).astype(np.int32)  # longer than a block of attention
CHUNKS = [[69, 1], [7, 17, 1, 1, 44], [33, 33, 1, 1, 1, 1]]

# Called within the preference alone: functions that JAX compiles by keys that hold it.
forward = eqx.filter_jit(lambda model, tokens: model(tokens))
features = eqx.filter_jit(lambda model, tokens: model.hidden(tokens)[0])
decode = eqx.filter_jit(lambda model, tokens, cache, positions: model.decode(tokens, cache, positions=positions))


def in_chunks(model, tokens, sizes, length=70, dtype=None):
    """Returns the logits of tokens that are read in chunks of these sizes, with a cache of `length` positions."""
    cache, logits = init_cache(model, len(tokens), length, dtype), []
    for end, size in zip(np.cumsum(sizes), sizes, strict=True):
        positions = jnp.broadcast_to(jnp.arange(end - size, end), (len(tokens), size))
        some, cache = decode(model, tokens[:, end - size : end], cache, positions)
        logits.append(np.asarray(some, np.float32))
    return np.concatenate(logits, axis=1)


@pytest.mark.parametrize(
    "name, dtype",
    [
        ("qwen3-window-head", "bfloat16"),
        *(thorough("qwen3-window-head", "float32"), thorough("qwen3", "float32"), thorough("gemma3", "bfloat16")),
        *(thorough(name, "bfloat16") for name in ("deepseek3", "qwen3_5", "nemotron_h")),
    ],
)
def test_a_row_has_the_same_bits_in_any_batch_and_chunk(load, name, dtype):
    model = load(name, dtype=dtype)
    with kernels.prefer("invariant"):
        whole = np.asarray(forward(model, TOKENS), np.float32)
        for rows in (1, 3):
            np.testing.assert_array_equal(np.asarray(forward(model, TOKENS[:rows]), np.float32), whole[:rows])
        for rows, sizes in zip((1, 3, 8), CHUNKS, strict=True):
            np.testing.assert_array_equal(in_chunks(model, TOKENS[:rows], sizes), whole[:rows])
    if dtype == "float32":
        plain = np.asarray(forward(model, TOKENS[:3]))
        np.testing.assert_allclose(whole[:3], plain, atol=1e-3)  # of logits of about 10


@pytest.mark.parametrize("name", [thorough("qwen3"), thorough("qwen3-window-head"), thorough("deepseek3")])
def test_caches_in_8_bits(load, name):
    model = load(name, dtype="bfloat16")
    with kernels.prefer("invariant"):
        whole = in_chunks(model, TOKENS, [70], dtype="int8")
        for rows, sizes in zip((1, 3, 8), CHUNKS, strict=True):
            np.testing.assert_array_equal(in_chunks(model, TOKENS[:rows], sizes, 90, "int8"), whole[:rows])


@pytest.mark.parametrize("name", [thorough("qwen3-window-head"), thorough("deepseek3"), thorough("qwen3_5")])
def test_the_engine_has_the_bits_of_one_pass(load, name):
    """Texts in pages, read in chunks while other rows draw, have the features of the same texts in one pass."""
    model = load(name, dtype="bfloat16")
    with kernels.prefer("invariant"):
        engine = Engine(model, batch=3, max_tokens=60, stride=4, page=4, chunk=16, record=["hidden"])
        prompts = [TOKENS[n, : 9 * n + 5].tolist() for n in range(5)]
        completions = [engine.submit(prompt, Sampling(max_new_tokens=6))[0] for prompt in prompts]
        while not engine.idle:
            engine.step()
        for completion in completions:
            text = np.array([completion.prompt + completion.tokens])
            expected = np.asarray(features(model, text), np.float32)[0]
            got = np.asarray(completion.records["hidden"], np.float32)
            np.testing.assert_array_equal(got, expected[: len(got)])


def test_what_is_not_invariant_is_refused():
    with kernels.prefer("invariant"):
        with pytest.raises(ValueError, match="no such implementation"):
            kernels.int8_matmul(jnp.ones((2, 8)), jnp.ones((4, 8)))
        with pytest.raises(ValueError, match="cannot serve a router with a softmax"):
            kernels.softmax(jnp.ones((2, 8)))
        with pytest.raises(ValueError, match="float64"), jax.enable_x64(True):
            q = jnp.ones((1, 2, 1, 8), jnp.float64)
            kernels.attention(q, q, q, scale=1.0)


@pytest.mark.parametrize("dim", [1, 5, 64, 96])
def test_sums(dim):
    x = np.random.RandomState(0).randn(100, dim).astype(np.float32)
    with kernels.prefer("invariant"):
        many = np.asarray(jax.jit(kernels.total)(x))
        np.testing.assert_array_equal(np.asarray(jax.jit(kernels.total)(x[7:8])), many[7:8])
    np.testing.assert_allclose(many, x.sum(axis=-1, keepdims=True), rtol=1e-4, atol=1e-5)


def test_a_single_row_is_multiplied_as_several_are():
    random = np.random.RandomState(0)
    x, w = (jnp.asarray(random.randn(rows, 256), jnp.float32) for rows in (3, 300))
    product = jax.jit(lambda x: kernels.product("...i,oi->...o", x, w))
    with kernels.prefer("invariant"):
        many = np.asarray(product(x))
        np.testing.assert_array_equal(np.asarray(product(x[1])), many[1])
        np.testing.assert_array_equal(np.asarray(product(x[2:, None])), many[2:, None])


@pytest.mark.parametrize("name", ["qwen3-window-head", "deepseek3", thorough("qwen3_5"), thorough("nemotron_h")])
def test_products_have_factors_in_float32(load, name):
    """Some CPUs multiply few rows of bfloat16 by other instructions than many rows; of float32 none is known to."""
    model = load(name, dtype="bfloat16")
    with kernels.prefer("invariant"):
        cache, positions = init_cache(model, 1, 8, None), jnp.zeros((1, 1), jnp.int32)
        programs = forward.lower(model, TOKENS[:1, :1]), decode.lower(model, TOKENS[:1, :1], cache, positions)
    products = [line for program in programs for line in program.as_text().splitlines() if "dot_general" in line]
    assert len(products) > 20
    assert [line for line in products if "bf16" in line.split(" : ")[-1].split(" -> ")[0]] == []
