"""The training step of a mixture, compiled for an H200, adds no floats in an order that differs from run to run."""

import dataclasses
import re

import jax

import kernels
import zoo
from tests.kernels.gpu import needs_compiler
from train.plan import ahead
from train.plan.chips import fleet
from zoo import registry
from zoo.mesh import make_mesh


FLOAT = r"(?:bf16|f16|f32|f64)"


@needs_compiler
def test_floats_are_added_in_a_fixed_order(tmp_path):
    """No scatter of floats, and no atomic addition of them in any kernel, nor a loop that stands for one.

    Counts of tokens are added so: they are integers, of which the sum is the same in any order.
    """
    config = dataclasses.replace(
        zoo.config("qwen3-30b-a3b"),
        num_hidden_layers=2,
        hidden_size=256,
        num_attention_heads=4,
        num_key_value_heads=2,
        moe_intermediate_size=128,
        num_experts=16,
        num_experts_per_tok=2,
        vocab_size=2048,
    )
    mesh = make_mesh(devices=fleet("h200:1")[1])
    step = ahead.training(
        config, registry.family_of(config), mesh, batch=2, seq=512, remat="none", microbatches=1, optimizer="sgd"
    )
    options = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": ".*ptx.*", "xla_gpu_enable_triton_gemm": False}
    with jax.set_mesh(mesh), kernels.prefer("triton"):  # cuDNN's backward pass of attention has no fixed order
        text = step.function.lower(*step.arguments).compile(options).as_text()
    assert " scatter(" in text and not re.findall(rf"= {FLOAT}\[.*? (?:scatter|select-and-scatter)\(.*", text)
    ptx = "\n".join(file.read_text() for file in tmp_path.glob("*.ptx"))
    assert all(name in ptx for name in ("ragged_dot_dx", "ragged_dot_dw", "attention_dkv"))
    assert re.findall(r"\b(?:atom|red)\.", ptx)  # those of the counts
    assert not re.findall(rf"\b(?:atom|red)\.[\w.:]*(?:{FLOAT}|cas)[\w.]*", ptx)
