"""Captured activations equal those of a forward pass by hand, for every kind of block."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo.programs import MODEL, TOKENS, forward
from zoo import surgery


def test_equal_to_a_pass_by_hand(load):
    """Layers before, in and after the scan; a part of a layer; a module outside of all layers."""
    model = load("qwen3-window-head")
    assert model.layers.head and model.layers.period and model.layers.tail is not None
    look = zoo.capture(model, "layers.*", "layers.[1-3].mlp", "norm", "layers.6.self_attn.q_norm")
    logits, found = eqx.filter_jit(look)(TOKENS)
    close(logits, forward(model, TOKENS), terms=MODEL)
    assert {*found} == {*(f"layers.{n}" for n in range(7)), *(f"layers.{n}.mlp" for n in (1, 2, 3)), "norm",
                        "layers.6.self_attn.q_norm"}  # fmt: skip

    @jax.jit
    def by_hand(model, tokens):
        x, features, mlps = model.embed_tokens(tokens), [], []
        for layer in model.layers:
            y, _ = layer.self_attn(layer.input_layernorm(x), None, Tokens())
            x = x + y
            mlps.append(layer.mlp(layer.post_attention_layernorm(x)))
            x = x + mlps[-1]
            features.append(x)
        return features, mlps, model.norm(x)

    features, mlps, norm = by_hand(model, TOKENS)
    close([found[f"layers.{n}"] for n in range(7)], features, terms=MODEL)
    close([found[f"layers.{n}.mlp"] for n in (1, 2, 3)], mlps[1:4], terms=MODEL)
    close(found["norm"], norm, terms=MODEL)
    assert found["layers.6.self_attn.q_norm"].shape == (2, 40, 4, 16)


@pytest.mark.thorough
def test_gradients(load):
    """Activations have gradients, also of layers under remat whose routers report."""
    model = load("mixtral")

    @eqx.filter_jit
    def run(model, tokens):
        def of_scale(scale):
            scaled = eqx.tree_at(lambda m: m.embed_tokens.weight, model, model.embed_tokens.weight * scale)
            logits, found = zoo.capture(surgery.with_remat(scaled, jax.checkpoint), "layers.*", "norm")(tokens)
            return sum(jnp.abs(x).sum() for x in found.values()), (logits, found)

        return jax.grad(of_scale, has_aux=True)(jnp.float32(1))

    gradient, (logits, found) = run(model, TOKENS)
    close(logits, forward(model, TOKENS), terms=MODEL)
    assert len(found) == len(model.layers) + 1
    assert np.isfinite(gradient) and gradient


@pytest.mark.thorough
def test_blocks_that_share(load):
    """Blocks that hand on keys and values to later ones, and have an input of their own."""
    model = load("gemma4-shared")
    last = f"layers.{len(model.layers) - 1}"
    logits, found = eqx.filter_jit(zoo.capture(model, "layers.*", "norm"))(TOKENS)
    close(logits, forward(model, TOKENS), terms=MODEL)
    assert len(found) == len(model.layers) + 1
    close(model.norm(found[last]), found["norm"], terms=MODEL)


def test_what_is_refused(load):
    model = load("qwen3")
    with pytest.raises(ValueError, match=r"^No module's path matches 'layers.\*.w1': print\(model\) has the names"):
        zoo.capture(model, "norm", "layers.*.w1")
    with pytest.raises(ValueError, match=r"No module's path matches 'layers\.3'"):
        zoo.capture(model, "layers.3")  # it has three layers
    with jax.set_mesh(zoo.make_mesh("stage=2,fsdp=4")), pytest.raises(ValueError, match="A pipeline returns no activ"):
        zoo.capture(model, "norm")(TOKENS)
