"""Training steps compiled for an H200 add floats in a fixed order, and read no array needlessly."""

import dataclasses
import re

import jax

import kernels
import zoo
from tests.kernels.gpu import needs_compiler
from train.base.chips import fleet
from train.planning import ahead, breakdown, hlo
from train.state.mesh import abstract_model
from zoo import registry
from zoo.mesh import make_mesh


FLOAT = r"(?:bf16|f16|f32|f64)"
SGD = dataclasses.replace(ahead.USUAL, optimizer="sgd")


@needs_compiler
def test_floats_are_added_in_a_fixed_order(tmp_path):
    """The step has no scatter of floats, no atomic addition of floats in any kernel, and no loop that replaces one.

    Counts of tokens do use these, because integers have the same sum in any order. No layer's experts are copied out of
    those of all layers.
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
        abstract_model(config, registry.family_of(config), mesh), mesh, batch=2, seq=512, remat="none", microbatches=1,
        optimization=SGD,
    )  # fmt: skip
    options = {"xla_dump_to": str(tmp_path), "xla_dump_emitter_re": ".*ptx.*", "xla_gpu_enable_triton_gemm": False}
    with jax.set_mesh(mesh), kernels.prefer("triton"):  # cuDNN's backward pass of attention has no fixed order
        text = step.function.lower(*step.arguments).compile(options).as_text()
    assert " scatter(" in text and not re.findall(rf"= {FLOAT}\[.*? (?:scatter|select-and-scatter)\(.*", text)
    ptx = "\n".join(file.read_text() for file in tmp_path.glob("*.ptx"))
    assert all(name in ptx for name in ("ragged_dot_dx", "ragged_dot_dw", "attention_dkv"))
    assert re.findall(r"\b(?:atom|red)\.", ptx)  # the counts' atomic additions
    assert not re.findall(rf"\b(?:atom|red)\.[\w.:]*(?:{FLOAT}|cas)[\w.]*", ptx)
    assert not re.findall(r"= bf16\[1,16,(?:128,256|256,128)\]\S* dynamic-slice\(", text)  # of a layer's experts


@needs_compiler
def test_cudnn_gets_values_as_a_product_made_them():
    """Queries, keys and values are marked only if a number is not finite. Marking them before cuDNN would take one pass
    over each, in every layer.
    """
    config = dataclasses.replace(
        zoo.config("llama3.2-3b"),
        num_hidden_layers=2,
        hidden_size=256,
        intermediate_size=512,
        num_attention_heads=2,
        num_key_value_heads=1,
        vocab_size=1024,
    )
    mesh = make_mesh(devices=fleet("h200:1")[1])
    step = ahead.training(
        abstract_model(config, registry.family_of(config), mesh), mesh, batch=1, seq=256, remat="dots", microbatches=1,
        optimization=SGD,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        text = step.function.lower(*step.arguments).compile().as_text()
    computations = dict(hlo.parse(text))
    program = {}
    program |= {name: breakdown.Computation(lines, program) for name, lines in computations.items()}
    forward = re.compile(r" conditional\(.*op_name=\"[^\"]*/jvp\(\)/while/body/")
    ((body, call),) = [(c, i) for c in program.values() for i in c.instructions if forward.search(i.line)]
    values = body.named[body.named[call.operands[1]].operands[-1]]
    assert values.shape == (1, 256, 1, 128)
    while values.op in ("bitcast", "get-tuple-element"):
        values = body.named[values.operands[0]]
    assert "__cublas" in "\n".join(each.line for each, _ in body.inside(values))
