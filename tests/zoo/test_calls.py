"""Calls of a model outside of compiled functions, and the errors for wrong calls."""

import jax
import jax.numpy as jnp
import pytest

from tests.close import close
from tests.zoo.programs import MODEL, POSITIONS, TOKENS, forward


@pytest.fixture
def compiled():
    """Returns the compilations so far, each by its seconds."""
    found = []
    listener = lambda event, seconds, **_: found.append(seconds) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listener)
    yield found
    jax.monitoring.unregister_event_duration_listener(listener)


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3-window-head"])
def test_nothing_compiles_twice(load, compiled, name):
    """Layers before the scan, and layers in it, are compiled once each, with a cache and without."""
    model = load(name)
    logits = model(TOKENS)
    close(logits, forward(model, TOKENS), terms=MODEL)
    cache = model.init_cache(*TOKENS.shape, jnp.float32)
    decoded = model.decode(TOKENS, cache, positions=POSITIONS)[0]
    assert compiled
    close(decoded, logits, terms=MODEL)
    others = TOKENS[::-1]
    compiled.clear()
    model(others)
    model.decode(others, cache, positions=POSITIONS)
    assert compiled == []


def test_jit_of_a_model(load):
    model = load("qwen3-tied")
    with pytest.raises(TypeError, match=r"equinox\.filter_jit\(model\)"):
        jax.jit(model)(TOKENS)
    assert jax.jit(lambda model, tokens: model(tokens)).eval_shape(model, TOKENS).shape == (*TOKENS.shape, 64)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (TOKENS[0], r"have the shape \(40,\); tokens\[None\]"),
        (TOKENS[None], r"have the shape \(1, 2, 40\)"),
        (TOKENS.astype(float), "integer token ids; these are float32"),
        (TOKENS + 1000, "Token 10.. is outside of the model's vocabulary of 64"),
        (-1 - TOKENS, "Token -6. is outside"),
        ([[1, 2]], "not a list, such as jnp.array"),
        ("text", "not a str, .* zoo.generate takes texts"),
    ],
)
@pytest.mark.parametrize("name", ["qwen3-tied", "gpt3"])
def test_wrong_tokens(load, untyped, name, tokens, message):
    with pytest.raises(ValueError, match=message) as info:
        load(name)(tokens)
    assert "\n" not in str(info.value)
