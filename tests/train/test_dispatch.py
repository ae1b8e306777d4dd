"""The kernels that serve attention in a training step on packed rows, traced for a GPU that is not at hand."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

import kernels
from train.step.language import cross_entropy
from zoo import registry, surgery
from zoo.weights.checkpoint import skeleton


H200 = AbstractMesh((1,), ("device",), abstract_device=AbstractDevice("NVIDIA H200", None, "cuda"))
BATCH = ("tokens", "targets", "loss_mask", "segments", "positions")
# The implementation by default, and with "mosaic" preferred, which needs jax 0.11.2.
SERVED = {
    "llama3.1-8b": ("cudnn", "mosaic"),
    "qwen3-8b": ("cudnn", "mosaic"),
    "qwen3-30b-a3b": ("cudnn", "mosaic"),
    "gemma2-9b": ("triton", "triton"),
    "gemma3-12b": ("cudnn", "mosaic"),
    "gpt-oss-20b": ("cudnn", "mosaic"),
    "deepseek-v3": ("triton", "mosaic"),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", SERVED)
def test_attention_in_a_training_step_on_an_h200(name):
    config = registry.CONFIGS[name]
    few: dict[str, Any] = {"num_hidden_layers": 2}
    if "layer_types" in {field.name for field in dataclasses.fields(config)}:
        few["layer_types"] = ()
    model = skeleton(registry.family_of(config), dataclasses.replace(config, **few))
    batch = {key: jax.ShapeDtypeStruct((2, 4096), jnp.int32) for key in BATCH}

    def served():
        with jax.sharding.use_abstract_mesh(H200):
            choices = kernels.explain(
                lambda *args: cross_entropy(surgery.cast(args[0], jnp.bfloat16), args[1]), model, batch
            )
        return {choice.implementation for choice in choices if choice.operation == "attention"}

    default, preferred = SERVED[name]
    assert served() == {default}
    if jax.__version_info__ >= (0, 11, 2):
        with kernels.prefer("mosaic"):
            assert served() == {preferred}
