"""Plans: collectives read from compiled programs, bytes, refusals and the search on 8 fake CPU devices; topologies."""

import dataclasses
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
import zoo
from tests import hurry
from tests.close import close
from tests.train.conftest import devices
from tests.zoo import tiny
from tests.zoo.programs import MODEL, noise
from train import grpo
from train import plan as script
from train.base.chips import CHIPS, chip_of, fleet, ring_rate, size_of, slice_of, slowest_link, target
from train.data.prompts import Prompt
from train.methods import on_policy
from train.methods.texts import Text, packed, rows_of
from train.planning import ahead, breakdown, fit, hlo, planner, sampling
from train.planning.ahead import Compiled, Pieces, Program, Rows, TooLarge, compile_ahead, training
from train.planning.breakdown import Part
from train.planning.planner import Options, suggestion
from train.run import defaults
from train.state.mesh import abstract_model, put_batch
from train.state.remat import StepOptions
from train.state.state import Lora, StateOptions, Trained
from zoo.generation import decoding, engine
from zoo.mesh import make_mesh
from zoo.models import qwen3
from zoo.surgery import cast, with_remat
from zoo.weights.checkpoint import skeleton


TINY = Options.of(model="tiny", topology="v6e:2x4", batch=8, seq=64)
needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
needs_cuda = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed"
)


@pytest.fixture(scope="module")
def config():
    return zoo.config("tiny")


@pytest.fixture(scope="module")
def made(config):
    return script.plan(TINY, config, CHIPS["v6e"], jax.devices())


def small(memory):
    """Returns a chip with `memory` bytes."""
    return CHIPS["v6e"]._replace(memory=memory)


# ------------------------------------------------------------------------------------------------------- collectives


def test_collectives_of_a_loop():
    """Six layers are each gathered over fsdp, and their products added up over tensor."""
    mesh = make_mesh("fsdp=4,tensor=2")
    place = lambda *axes: NamedSharding(mesh, P(*axes))
    weights = jax.ShapeDtypeStruct((6, 64, 32), jnp.float32, sharding=place(None, "tensor", "fsdp"))
    x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=place("fsdp"))

    def layers(x, weights):
        def layer(x, w):
            w = jax.lax.with_sharding_constraint(w, P("tensor", None))
            y = jax.lax.with_sharding_constraint(x @ w.T, P("fsdp", "tensor"))
            return jax.lax.with_sharding_constraint(jnp.tanh(y) @ w, P("fsdp")), None

        return jax.lax.scan(layer, x, weights)[0]

    compiled = compile_ahead(Program(jax.jit(layers), (x, weights), {}), mesh)
    assert hlo.by_axis(compiled.collectives, mesh.shape) == {
        ("all-gather", "fsdp"): 6 * 32 * 32 * 4 * 3 / 4,
        ("all-reduce", "tensor"): 6 * 2 * 2 * 32 * 4 / 2,
    }
    assert compiled.arguments == ahead.device_bytes((x, weights)) and compiled.seconds > 0


TEXT = """HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (p: bf16[8,128]) -> bf16[1,128] {
  %all-reduce.1 = bf16[8,128]{1,0:T(8,128)} all-reduce(%p), replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
}

%condition (p: (s32[])) -> pred[] {
  %p = (s32[]) parameter(0)
  %constant.1 = s32[] constant(5)
  ROOT %lt = pred[] compare(%p#0, %constant.1), direction=LT
}

%body (p: (s32[])) -> (s32[]) {
  %p = (s32[]) parameter(0)
  %fusion = bf16[1,128] fusion(%x), kind=kCustom, calls=%all-reduce-scatter.1
  %start = (bf16[16]{0}, bf16[32]{0}) all-gather-start(%y), replica_groups=[4,2]<=[8], dimensions={0}
  %done = bf16[32]{0} all-gather-done(%start)
  %one = s32[] constant(1)
  %next = s32[] add(%p#0, %one)
  ROOT %t = (s32[]) tuple(%next)
}

%unrolled (q: (s32[])) -> (s32[]) {
  %q = (s32[]) parameter(0)
  %twice = f32[20]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
  %two = s32[]{:T(128)} constant(2)
  %counter = s32[] get-tuple-element(%q), index=0
  %after = s32[]{:T(128)} add(%counter, %two)
  ROOT %u = (s32[]) tuple(%after)
}

%offloaded (p: f32[2]) -> f32[16] {
  ROOT %gathered = f32[16]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}
}

%unknown (p: (s32[])) -> pred[] {
  ROOT %lt = pred[] compare(%p#0, %p#1), direction=LT
}

%learn (p: f32[6]) -> f32[24] {
  ROOT %four = f32[24]{0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}
}

%rare (p: (s32[])) -> (s32[]) {
  %permute = f32[10]{0} collective-permute(%z), source_target_pairs={{0,1},{1,0}}
}

ENTRY %main (p: s32[]) -> s32[] {
  %while.1 = (s32[]) while(%t), condition=%condition, body=%body
  %while.2 = (s32[]) while(%t), condition=%unknown, body=%rare
  %while.3 = (s32[]) while(%t), condition=%unknown, body=%rare, backend_config={"known_trip_count":{"n":"3"}}
  %while.4 = (s32[]) while(%t), condition=%condition, body=%unrolled
  %all-to-all = s8[64]{0} all-to-all(%w), replica_groups=mesh['fsdp'=4,'tensor'=2] {'fsdp'}, dimensions={0}
  %moved = s8[64]{0} all-to-all(%w), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, dimensions={0}
  %scatter = f32[4]{0} reduce-scatter(%v), replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %sparse = f32[16]{0} custom-call(%p), custom_call_target="SparseCore", called_computations={%offloaded}
  %while.5 = (s32[]) while(%t), condition=%unknown, body=%rare, metadata={op_name="jit(step)/further_rounds/while"}
  %asked = f32[24]{0} conditional(%true, %f, %f), true_computation=%learn, false_computation=%other
  %alone = f32[4]{0} all-reduce(%v), replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}, to_apply=%add
}
"""


def test_every_notation():
    found = hlo.collectives(TEXT, 8)
    assert {(c.kind, c.group, c.sent, c.times) for c in found} == {
        ("reduce-scatter", (0, 2, 4, 6), 2 * 8 * 128 * 3 / 4, 5),  # a TPU's form of one
        ("all-gather", (0, 1), 2 * 32 / 2, 5),
        ("collective-permute", (0, 1), 40, 4),  # once, where the number is unknown, three times, and not of overflow
        ("collective-permute", (0, 1), 80, 3),  # the counter is 0, 2 and 4
        ("all-to-all", (0, 2, 4, 6), 64 * 3 / 4, 1),
        ("all-gather", (0, 2, 4, 6), 24 * 4 * 3 / 4, 1),  # in a branch
        ("reduce-scatter", (0, 2, 4, 6), 4 * 4 * 3, 1),
        ("all-reduce", (0,), 0, 1),
        ("all-gather", tuple(range(8)), 4 * 16 * 7 / 8, 1),  # by a SparseCore
    }
    assert hlo.by_axis(found, {"fsdp": 4, "tensor": 2}) == {
        ("reduce-scatter", "fsdp"): 5 * 2 * 8 * 128 * 3 / 4 + 48,
        ("all-gather", "tensor"): 5 * 32,
        ("collective-permute", "tensor"): 4 * 40 + 3 * 80,
        ("all-to-all", "fsdp"): 2 * 48,  # in two notations
        ("all-gather", "fsdp"): 72,
        ("all-gather", "fsdp,tensor"): 56,
    }


LOOPS = """HloModule jit_step

%forward (p: (s32[], bf16[4,8], f32[4,2], f32[3], f32[4,16])) -> (s32[], bf16[4,8], f32[4,2], f32[3], f32[4,16]) {
  %p = (s32[], bf16[4,8], f32[4,2], f32[3], f32[4,16]) parameter(0)
  %weights = f32[3]{0} get-tuple-element(%p), index=3
  ROOT %t = (s32[], bf16[4,8], f32[4,2], f32[3], f32[4,16]) tuple(%next, %kept, %offloaded, %weights, %unread)
}

%backward (q: (s32[], bf16[4,8], f32[4,2], f32[3])) -> (s32[], bf16[4,8], f32[4,2], f32[3]) {
  %q = (s32[], bf16[4,8], f32[4,2], f32[3]) parameter(0)
  ROOT %u = (s32[], bf16[4,8], f32[4,2], f32[3]) tuple(%q#0, %q#1, %q#2, %gradient)
}

ENTRY %main (p: s32[]) -> s32[] {
  %while.1 = (s32[], bf16[4,8]{1,0}, f32[4,2]{1,0:S(5)}, f32[3]{0}, f32[4,16]) while(%t1), condition=%c, body=%forward
  %kept.1 = bf16[4,8]{1,0} get-tuple-element(%while.1), index=1
  %kept.2 = f32[4,8]{1,0} fusion(%kept.1), kind=kLoop, calls=%convert
  %tuple = (s32[], f32[4,8], f32[4,2], f32[3]) tuple(%zero, %kept.2, %while.1#2, /*index=3*/%while.1#3)
  %while.2 = (s32[], f32[4,8]{1,0}, f32[4,2]{1,0:S(5)}, f32[3]{0}) while(%tuple), condition=%c, body=%backward
}
"""


def test_activations_are_what_one_loop_leaves_to_another():
    """Activations exclude arrays that a loop passes on, arrays in the host's memory, and arrays that nobody reads."""
    assert hlo.activations(LOOPS) == 2 * 4 * 8


# -------------------------------------------------------------------------------------------------- bytes and bounds


def test_bytes_by_kind(config, made):
    whole = abstract_model(config, planner.family_of(config), made.mesh)
    assert made.kinds["parameters"] == ahead.device_bytes(whole)
    assert made.kinds["optimizer"] == pytest.approx(2 * made.kinds["parameters"], rel=0.01)
    assert made.kinds["batch"] == 4 * 8 * 64 * 4 // 8  # rows in order need no positions
    step = 4  # the number of the step
    assert made.compiled.arguments == sum(made.kinds.values()) + step
    assert (
        made.needed
        == made.compiled.arguments + made.compiled.temporaries + made.compiled.results - made.compiled.reused
    )
    assert made.compiled.reused > 0.9 * made.kinds["parameters"]  # the new state reuses the old one's memory
    assert made.compiled.activations == config.num_hidden_layers * 64 * config.hidden_size * 2  # one row's layer inputs
    assert made.compiled.activations < made.compiled.temporaries


def wide(text, devices):
    """Returns the mesh, and the step of a model whose parts are larger than the arrays gathered from them."""
    config = qwen3.Config(
        vocab_size=2048, hidden_size=256, intermediate_size=1024, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=8, head_dim=32, max_position_embeddings=256, max_window_layers=8,
    )  # fmt: skip
    mesh = make_mesh(text, devices)
    model = abstract_model(config, qwen3.FAMILY, mesh)
    return mesh, training(model, mesh, batch=16, seq=256, remat="full", microbatches=1)


def compiled(mesh, program):
    """Compiles with users' options, because hurry.py's also change the arrays that one loop leaves to another."""
    with pytest.MonkeyPatch.context() as patch:
        as_users = {name: True for name in ["xla_cpu_use_fusion_emitters"] if name in hurry.FLAGS}
        compile = jax.stages.Lowered.compile
        patch.setattr(jax.stages.Lowered, "compile", lambda self, options: compile(self, options | as_users))
        return compile_ahead(program, mesh)


@pytest.mark.parametrize(
    ("text", "of_tokens"),
    [
        ("replica=2,fsdp=2,tensor=2", 2),
        ("fsdp=8", 1),
        ("context=4,tensor=2", 2 * 5 / 4),  # tokens have positions
    ],
)
def test_no_argument_is_replicated_in_silence(text, of_tokens):
    """Each of eight devices has an eighth of everything, except tokens over tensor."""
    sizes = lambda mesh, program: {kind: ahead.device_bytes(tree) for kind, tree in program.kinds.items()}
    whole, parts = sizes(*wide("fsdp=1", jax.devices()[:1])), sizes(*wide(text, jax.devices()))
    for kind in ("parameters", "optimizer"):
        assert parts[kind] == pytest.approx(whole[kind] / 8, rel=0.01)  # norms are not split
    assert parts["batch"] == whole["batch"] * of_tokens / 8


@pytest.mark.thorough
def test_no_activation_is_replicated_in_silence():
    """Each of eight devices has an eighth of the activations, unless both heads and sequences are split."""
    whole = compiled(*wide("fsdp=1", jax.devices()[:1]))
    for text, times in ("replica=2,fsdp=2,tensor=2", 1), ("context=4,tensor=2", 2):
        split = compiled(*wide(text, jax.devices()))
        assert split.activations == pytest.approx(whole.activations * times / 8, rel=0.01)
        assert split.temporaries < 1.65 * whole.temporaries / 8  # with what one product gathers; 1.63 without YNNPACK


@pytest.mark.thorough
def test_gradients_are_scattered_over_replicas(tmp_path):
    """A step sends weights over the replicas once, and gradients once, both in bfloat16. Only those of vectors, and
    scalars, are summed by all-reduces.
    """
    mesh = make_mesh("replica=2,fsdp=4")
    config = dataclasses.replace(
        zoo.config("qwen3-30b-a3b"), vocab_size=512, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2, moe_intermediate_size=32,
    )  # fmt: skip
    model = abstract_model(config, planner.family_of(config), mesh)
    step = training(model, mesh, batch=8, seq=48, remat="none", microbatches=1)
    least = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)  # a program that is kept would not be dumped
    with jax.set_mesh(mesh):
        options = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
        step.function.lower(*step.arguments).compile(options)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    (file,) = tmp_path.glob("*train_step*after_spmd-partitioning*")  # before what XLA does for CPUs alone
    sent = hlo.by_axis(hlo.collectives(with_reduce_scatters(file.read_text()), 8), mesh.shape)
    layers = 4 * (2 * 64 * 64 + 2 * 32 * 64 + 8 * 3 * 32 * 64)
    router = 4 * 8 * 64  # which each device of a replica has whole; its gradient is scattered over all devices at once
    own = (layers + 2 * 512 * 64) / 4  # numbers of a device of the matrices that fsdp splits
    assert sent["all-gather", "replica"] == pytest.approx(2 * (own + router) / 2, rel=0.01)  # norms
    assert sent["reduce-scatter", "replica"] / 2 == 2 * own / 2
    summed = sum(size for (kind, axes), size in sent.items() if kind == "all-reduce" and "replica" in axes)
    assert summed < 0.1 * own


def with_reduce_scatters(text):
    """Returns a program in which an all-reduce is called a reduce-scatter if nothing but slices of it is used.

    XLA makes reduce-scatters of them for GPUs and TPUs alone. Their bytes are those of the whole result.
    """
    lines, users, returned = text.splitlines(), {}, {}
    for name, body in hlo.parse(text):
        returned |= {hlo.INSTRUCTION.match(line)[1]: name for line in body if line.lstrip().startswith("ROOT ")}
        for match in filter(None, map(hlo.INSTRUCTION.match, body)):
            called = re.findall(r"to_apply=%([\w.-]+)", match.string) if match[3] == "call" else []
            for operand in hlo.names(match[4]) + called:  # a computation's users are its calls
                users.setdefault(operand, []).append(match)

    def is_sliced(name):
        after = users.get(name, []) or users.get(returned.get(name), [])
        passed = ("copy", "reshape", "bitcast", "call")
        return bool(after) and all(u[3] == "dynamic-slice" or (u[3] in passed and is_sliced(u[1])) for u in after)

    for n, line in enumerate(lines):
        match = hlo.INSTRUCTION.match(line)
        if match and match[3] == "all-reduce" and is_sliced(match[1]):
            lines[n] = line.replace(" all-reduce(", " reduce-scatter(")
    return "\n".join(lines)


def test_bounds(config, made, monkeypatch):
    monkeypatch.setattr(planner, "compile_ahead", refuse(2.0, 1.0))
    none = script.plan(TINY.changed(remat="none"), config, CHIPS["v6e"], jax.devices())
    assert set(made.bounds) == {"compute", "HBM", "interconnect"} and min(made.bounds.values()) > 0
    assert none.bounds["compute"] == pytest.approx(none.flops * 8 * 64 / 8 / 918e12)
    assert (
        1.1 < made.bounds["compute"] / none.bounds["compute"] < 4 / 3
    )  # the layers' forward pass again, not the head's
    slowest = max(made.bounds.values())
    assert made.tokens_per_second == pytest.approx(8 * 64 / slowest)
    assert made.mfu == pytest.approx(made.flops * 8 * 64 / (8 * 918e12 * slowest))
    assert made.parts["matrix products"].flops == pytest.approx(made.bounds["compute"] * 918e12, rel=0.1)
    kernels, sent = sum(part.seconds for part in made.parts.values()), made.bounds["interconnect"]
    assert made.seconds == (max(kernels, sent), kernels + sent) and made.seconds[0] > slowest
    rows = list(script.breakdown(made).columns[0].cells)
    assert rows[: len(made.parts)] == list(made.parts)
    assert rows[-1].startswith("with what is started ahead beside kernels, MFU ")
    copies = {breakdown.ASIDE: Part(0.0, 8.0, 2.0, 1), breakdown.PRODUCTS: Part(8.0, 8.0, sent + 1, 1)}
    monkeypatch.setattr(planner, "parts", lambda *_: copies)
    assert made.seconds == pytest.approx((sent + 1, 2 * sent + 3))  # copies that start ahead take no extra time


def test_decoding(config, made):
    trained, made = made, script.plan(TINY.changed(decode=True), config, CHIPS["v6e"], jax.devices())
    model = skeleton(planner.family_of(config), config)
    weights = sum(2 * a.size for a in jax.tree.leaves(model))
    assert made.kinds["parameters"] == pytest.approx(weights / 8, rel=0.1)  # norms are not split
    c = config
    # Keys and values of four bytes: the devices here are CPUs, which hold 16 bits in float32.
    cache = 2 * 4 * c.num_hidden_layers * 8 * 64 * c.num_key_value_heads * c.head_dim
    assert made.kinds["cache"] == pytest.approx(cache / 8, rel=0.1)
    assert made.compiled and made.compiled.reused >= 0.9 * made.kinds["cache"]
    assert made.flops == pytest.approx(trained.flops / 3)


def test_decoding_in_pages(config, monkeypatch):
    """Eight times as many rows take the same memory, if they have as many tokens together."""
    monkeypatch.setattr(planner, "compile_ahead", refuse(2.0, 1.0))
    plan = lambda devices, **changes: script.plan(
        TINY.changed(**changes), config, CHIPS["v6e"], jax.devices()[:devices]
    )
    dense, paged = (plan(1, decode=True, **of) for of in (dict(batch=8), dict(batch=64, cache_tokens=8 * 64)))
    assert paged.kinds["cache"] == pytest.approx(dense.kinds["cache"], rel=0.05)
    with pytest.raises(ValueError, match="A mesh that splits rows has no pages"):
        plan(8, decode=True, cache_tokens=512)
    with pytest.raises(ValueError, match="--cache-tokens 512 is of decoding"):
        plan(1, cache_tokens=512)


def test_adapters(config, monkeypatch):
    """Frozen weights take two bytes or fewer, only adapters have moments, and there are fewer products."""
    monkeypatch.setattr(planner, "compile_ahead", refuse(2.0, 1.0))

    def planned(**changes):
        return script.plan(TINY.changed(**changes), config, CHIPS["v6e"], jax.devices())

    whole, adapted = planned(), planned(lora=Lora(rank=4))
    rounded = planned(lora=Lora(rank=4), quantize="nf4")
    adapters = adapted.kinds["optimizer"] / 2  # equal to the number of either moment
    assert 0 < adapters < 0.25 * whole.kinds["parameters"]
    assert adapted.kinds["parameters"] - adapters == pytest.approx(whole.kinds["parameters"] / 2, rel=0.02)
    assert rounded.kinds["parameters"] < 0.8 * adapted.kinds["parameters"]
    assert rounded.kinds["optimizer"] == adapted.kinds["optimizer"]
    muon, sgd = planned(optimizer="muon"), planned(optimizer="sgd", moments="bfloat16")
    assert 0.5 < muon.kinds["optimizer"] / whole.kinds["optimizer"] < 1
    assert sgd.kinds["optimizer"] == pytest.approx(whole.kinds["optimizer"] / 4, rel=0.01)
    assert muon.gradients == whole.gradients == pytest.approx(whole.kinds["optimizer"] / 2, rel=0.01)
    assert 0.6 < adapted.flops / whole.flops < 0.8 and 0.6 < adapted.bounds["compute"] / whole.bounds["compute"] < 0.8
    assert planned(decode=True, quantize="int8").kinds["parameters"] < planned(decode=True).kinds["parameters"]
    with pytest.raises(ValueError, match=r"--quantize nf4 .* needs --lora\.rank or --decode"):
        planned(quantize="nf4")
    with pytest.raises(ValueError, match=r"leave out --lora\.rank"):
        planned(decode=True, lora=Lora(rank=4))


# ---------------------------------------------------------------------------------------------------------- methods


@pytest.mark.thorough
def test_preferences(config, monkeypatch):
    """The reference takes two bytes a parameter, or none with adapters, and one more forward pass."""
    monkeypatch.setattr(planner, "compile_ahead", refuse(2.0, 1.0))
    planned = lambda **changes: script.plan(TINY.changed(**changes), config, CHIPS["v6e"], jax.devices())
    whole, pairs, rewarded = planned(), planned(method="dpo"), planned(method="grpo", kl=0.1)
    assert pairs.kinds["reference"] == rewarded.kinds["reference"] == whole.kinds["parameters"] / 2
    assert "reference" not in planned(method="dpo", lora=Lora(rank=4)).kinds | planned(method="grpo").kinds
    assert (
        pairs.bounds["compute"] == rewarded.bounds["compute"] == pytest.approx(1.25 * whole.bounds["compute"], rel=0.02)
    )
    assert rewarded.kinds["batch"] == whole.kinds["batch"] * 6 / 4  # plus advantages and old
    with pytest.raises(ValueError, match="--decode plans no training: leave out --method dpo"):
        planned(method="dpo", decode=True)
    with pytest.raises(ValueError, match="leave out --images or --method grpo"):
        planned(method="grpo", images=1)
    with pytest.raises(ValueError, match="--seq-len 100000 exceeds the model's"):
        planned(method="dpo", seq=100_000)


@pytest.mark.thorough
def test_distillation(config, monkeypatch):
    """A teacher of the student's size takes two bytes a parameter, and one more forward pass; on policy it samples."""
    monkeypatch.setattr(planner, "compile_ahead", refuse(2.0, 1.0))
    planned = lambda **changes: script.plan(TINY.changed(**changes), config, CHIPS["v6e"], jax.devices())
    whole, taught = planned(), planned(method="distill", teacher="tiny")
    assert taught.kinds["reference"] == whole.kinds["parameters"] / 2
    assert taught.bounds["compute"] == pytest.approx(1.25 * whole.bounds["compute"], rel=0.02)
    assert not TINY.changed(method="distill").samples and TINY.changed(method="distill", max_new_tokens=9).samples
    own = dict(method="distill", teacher="tiny", seq=63, max_new_tokens=24, batch=32, microbatches=2)
    made, tokenizer = planned(**own), zoo.tokenizer("tiny")
    makes = on_policy.Rows(tokenizer, 2048, [""], [None], None, False, rows_of(32, 16), 63, 40, 2)
    rows, _ = makes.batch([on_policy.Question(Prompt([7] * 40, {}), 0, [], [])] * 32, [[9] * 24] * 32)
    assert (made.rows.count, made.rows.length) == rows["tokens"].shape == (16, 128) and not made.rows.branches
    assert made.tokens == (rows["segments"] != 0).sum() == 32 * 63
    names = put_batch(rows, made.mesh).keys()
    assert script.step(made.options, config, planner.family_of(config), made.mesh).kinds["batch"].keys() == names
    for changes in ({"method": "distill"}, {"teacher": "tiny"}):
        with pytest.raises(ValueError, match="--method distill needs a --teacher"):
            planned(**changes)


@pytest.mark.thorough
def test_heads(config, monkeypatch):
    """A head saves the work of the output embeddings, and a reward model lies beside GRPO's updates and samples."""
    monkeypatch.setattr(planner, "compile_ahead", refuse(2.0, 1.0))
    planned = lambda **changes: script.plan(TINY.changed(**changes), config, CHIPS["v6e"], jax.devices())
    whole, judged = planned(), planned(method="grpo", judge="tiny")
    products = fit.products_per_token(config, TINY.seq)
    layers = 4 * (products.layers + products.attention)  # forward, backward and again
    less = layers / (layers + 3 * products.head)
    for method in ("reward", "classify", "embed"):
        made = planned(method=method, microbatches=2 if method == "embed" else 1, batch=16)
        assert made.bounds["compute"] == pytest.approx(2 * less * whole.bounds["compute"], rel=1e-3), method
        assert made.kinds["parameters"] == pytest.approx(whole.kinds["parameters"], rel=1e-2)
        adapted = planned(method=method, lora=Lora(rank=4))
        assert adapted.kinds["optimizer"] < made.kinds["optimizer"] / 4
    assert judged.kinds[planner.JUDGE] == pytest.approx(whole.kinds["parameters"] / 2, rel=2e-3)
    for changes, said in (
        (dict(method="dpo", judge="tiny"), "--judge tiny rewards completions: it needs --method grpo"),
        (dict(method="embed", images=1), "--images: --method embed reads texts alone"),
    ):
        with pytest.raises(ValueError, match=said):
            planned(**changes)


@pytest.mark.parametrize(("new", "batch", "branches"), [(24, 20, True), (60, 20, False), (24, 2, False)])
def test_an_update_of_completions(config, new, batch, branches):
    """Its rows are those that `train.grpo` packs, with the prompts of groups once where that saves enough."""
    o = TINY.changed(method="grpo", batch=batch, seq=63, max_new_tokens=new, group=8, mesh="fsdp=2")
    mesh = make_mesh("fsdp=2", jax.devices()[:2])
    family, made = planner.family_of(config), []
    counting = dataclasses.replace(family, Model=lambda *a, **k: made.append(a) or family.Model(*a, **k))
    planned = script.step(o, config, counting, mesh)
    assert len(made) == 1, "the model's shapes are made once"
    begun = lambda n: [7 + n // 8] * (64 - new)
    texts = [Text([*begun(n), *range(new)], [None] * (64 - new) + [-1.0] * new, 1.0) for n in range(batch)]
    rows = put_batch(packed(texts, 2, zoo.tokenizer("tiny"), branches=True), mesh)
    assert ("branches" in rows) == planned.rows.branches == branches
    shapes = lambda batch: {name: (a.shape, a.dtype, a.sharding) for name, a in batch.items()}
    assert shapes(planned.kinds["batch"]) == shapes(rows)
    segments, branch = (np.array(rows.get(name, rows["segments"])) for name in ("segments", "branches"))
    beginnings = ((branch == 0) & (segments != 0)).sum() // (63 - new)
    pieces = ((beginnings, 0, 63 - new), (batch, 63 - new, 63)) if branches else ((batch, 0, 63),)
    assert planned.rows.pieces == pieces and planned.rows.tokens == (segments != 0).sum()
    before = np.tril(np.ones(2 * segments.shape[1:], bool))
    same = lambda ids: ids[:, :, None] == ids[:, None]
    seen = before & same(segments) & (segments != 0)[..., None]
    seen &= (branch == 0)[:, None] | same(branch) if branches else True
    assert planned.seen == pytest.approx(seen.sum() / seen.size, rel=0.03)
    pairs = seen.sum() / planned.rows.tokens  # of a token, for whose head attention takes two products
    of_attention = 2 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    average = planned.rows.mean(lambda seq: fit.products_per_token(config, seq).attention)
    assert average == pytest.approx(of_attention, rel=0.05)


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["auto", "int8"])
def test_rollouts(config, monkeypatch, cache):
    """The planned programs have the shapes of a rollout's. Arrays that they do not read lie beside them."""
    o = dataclasses.replace(
        TINY, method="grpo", seq=63, max_new_tokens=24, rollout_batch=20, group=4, mesh="fsdp=1", cache_dtype=cache
    )
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    update = script.step(o, config, planner.family_of(config), mesh)
    planned = sampling.sampling(
        config, mesh, update, seq=o.seq, prompt=o.prompt, new=o.new, rows=o.rollout_batch, group=o.group, turns=1,
        cache_dtype=cache,
    )  # fmt: skip
    shapes = lambda tree: [(a.shape, a.dtype) for a in jax.tree.leaves(tree)]
    *_, state, _ = planned.advance.arguments
    model, *reading, drawn = planned.prefill.arguments

    class Read(Exception):
        pass

    def read(inputs, state):
        raise Read(shapes((inputs[1:], state)))

    monkeypatch.setattr(engine, "read", read)
    monkeypatch.setattr(engine, "init_state", lambda *a, begin=engine.init_state: seen.append(begin(*a)) or seen[-1])
    make = lambda: cast(planner.family_of(config).Model(config, key=jax.random.key(0)), jnp.bfloat16)
    seen, real = [], noise(make)
    drawing = zoo.Engine(real, batch=20, max_tokens=64 + 24, cache_dtype=None if cache == "auto" else cache)
    for _ in range(8):
        drawing.submit([1] * 40, zoo.Sampling(max_new_tokens=24), samples=4)
    with pytest.raises(Read) as found:
        drawing.step()
    assert found.value.args[0] == shapes((reading, drawn)) and shapes(drawn) == shapes(state) == shapes(seen)
    assert shapes(model) == shapes(real) and planned.beside == sum(
        ahead.device_bytes(part) for part in (update.arguments[0], update.arguments[2])
    )


COUNTED = Compiled(1000, 0, 0, 0, 0, 0, [], [], 0.0)


def counted(program, mesh):
    """Stands in for `compile_ahead`: each program needs its arguments."""
    return COUNTED._replace(arguments=ahead.device_bytes(program.arguments))


@pytest.mark.thorough
def test_conversations(config, monkeypatch):
    """A row has a prompt and all of its turns, each turn has its tokens, and pages hold them. Of what is not drawn only
    the prompt is shared.
    """
    monkeypatch.setattr(planner, "compile_ahead", counted)
    o = TINY.changed(method="grpo", seq=511, batch=16, mesh="fsdp=1", rollout_batch=8, group=4)
    planned = lambda **changes: script.plan(o.changed(**changes), config, CHIPS["v6e"], jax.devices()[:1])
    one, four, short = planned(max_new_tokens=100), planned(max_new_tokens=100, turns=4), planned(turns=4)
    assert (one.options.new, four.options.new, short.options.new) == (100, 400, 252)
    assert (one.sampling.most, four.sampling.most) == (512 + 100, 512)
    assert four.sampling.layout.slots == 64 and four.sampling.layout.count == 2 * 8 * 512 / 64
    assert (one.sampling.steps, four.sampling.steps) == (2 * 100, 2 * 400)
    assert four.sampling.bounds["HBM"] < one.sampling.bounds["HBM"], "rows are emptier while more is drawn"
    assert one.sampling.prompts / (412 / 4) == pytest.approx(four.sampling.prompts / (28 / 4 + 3 * 28))
    told, random = planned(turns=4, prompt_tokens=200), np.random.RandomState(0)
    for made, prompt in ((short, 65), (told, 200)):
        between = (260 - prompt) // 3
        old = [*[None] * prompt, *([-1.0] * 63 + [None] * between) * 3, *[-1.0] * 63]
        texts = [Text([n // 4] * prompt + random.randint(9, 63, 512 - prompt).tolist(), old, 1.0) for n in range(16)]
        rows = packed(texts, 1, zoo.tokenizer("tiny"), branches=True)
        assert (1, made.rows.length) == rows["tokens"].shape and made.rows.branches == ("branches" in rows)
        assert made.rows.tokens == (rows["segments"] != 0).sum()
    assert short.rows.pieces == ((16, 0, 511),) and told.rows.pieces == ((4, 0, 199), (16, 199, 511))
    s = four.sampling
    assert s.seconds == s.prompts + s.steps * max(s.bounds.values()) and s.copying == 0
    for changes in ({"turns": 2}, {"one_step_off": True}):
        with pytest.raises(ValueError, match="they need --method grpo"):
            planned(method="dpo", **changes)
    with pytest.raises(ValueError, match="--prompt-tokens 9 is of conversations: add --turns"):
        planned(prompt_tokens=9)
    with pytest.raises(ValueError, match="--prompt-tokens 261: replies leave 260 of --seq 511 to a prompt"):
        planned(turns=4, prompt_tokens=261)


@pytest.mark.thorough
def test_one_step_off(config, monkeypatch, capsys):
    """Beside an update, sampling needs a copy of the weights and all else at once; on other devices it has its own."""
    monkeypatch.setattr(planner, "compile_ahead", counted)
    o = TINY.changed(method="grpo", batch=8, mesh="fsdp=4", rollout_batch=8, judge="tiny")
    planned = lambda devices=4, **changes: script.plan(
        o.changed(**changes), config, CHIPS["v6e"], jax.devices()[:devices]
    )
    in_turn, beside = planned(), planned(one_step_off=True)
    apart = planned(8, one_step_off=True, sampling_mesh="fsdp=4")
    weights = in_turn.kinds["parameters"] / 2  # in bfloat16
    judge, batch = in_turn.kinds[planner.JUDGE], in_turn.kinds["batch"]
    assert beside.sampling.needed == in_turn.sampling.needed + batch
    held = sum(in_turn.kinds[kind] for kind in ("parameters", "optimizer"))
    assert apart.sampling.needed == pytest.approx(in_turn.sampling.needed - held, abs=4)  # the step's number
    assert apart.sampling.needed == pytest.approx(weights + judge + apart.sampling.caches, rel=0.05)
    assert apart.updating == in_turn.updating - judge and planner.JUDGE not in apart.kinds
    assert apart.sampling.copying == weights / CHIPS["v6e"].link
    adapted, both = (planned(lora=Lora(rank=4), one_step_off=ahead) for ahead in (False, True))
    assert both.sampling.needed == adapted.sampling.needed + batch, "frozen weights are not copied"
    monkeypatch.setattr(rich.get_console(), "width", 300)
    monkeypatch.setattr(script, "breakdown", lambda made: "")
    script.report(apart, config)
    said = " ".join(capsys.readouterr().out.split())
    assert "and sampling, on other devices" in said and "one beside the other, a step takes at least" in said
    for mesh in ("fsdp=-1", "fsdp=8"):
        with pytest.raises(ValueError, match="has to take some of the 8 devices"):
            planned(8, one_step_off=True, sampling_mesh=mesh)
    with pytest.raises(ValueError, match="add --one-step-off"):
        planned(8, sampling_mesh="fsdp=4")


@pytest.mark.thorough
def test_memory_of_a_run(tmp_path, monkeypatch):
    """A run holds the bytes that are planned while it samples, and its program is the one that was compiled."""
    tiny.write(tmp_path / "model", "qwen3", eos_token_id=63)
    tiny.write_tokenizer(tmp_path / "model")
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the quick brown fox"}) + "\n")
    own = dict(model=str(tmp_path / "model"), mesh="fsdp=1", group=4, max_new_tokens=24, rollout_batch=8)
    programs, found, advance = [], {}, decoding.advance
    monkeypatch.setattr(planner, "compile_ahead", lambda *of: programs.append(compile_ahead(*of)) or programs[-1])
    o = Options.of(**own, topology="v6e:1x1", method="grpo", batch=1, seq=55, optimizer="adamw")
    made = script.plan(o, zoo.config(tmp_path / "model"), CHIPS["v6e"], jax.devices()[:1])
    decode = programs[1]

    def spy(inputs, state, steps, top, enough):
        if not found:
            found["bytes"] = sum(a.nbytes for a in jax.live_arrays()) - before
            parts = [eqx.partition(each, lambda x: isinstance(x, jax.Array | np.ndarray)) for each in (inputs, state)]
            (inputs_, rest), (state_, others) = parts
            whole = lambda i, s, e: advance.__wrapped__(eqx.combine(i, rest), eqx.combine(s, others), steps, top, e)
            compiled = jax.jit(whole, donate_argnums=1).lower(inputs_, state_, enough).compile()
            found["memory"] = compiled.memory_analysis()
        return advance(inputs, state, steps, top, enough)

    monkeypatch.setattr(decoding, "advance", spy)
    devices(monkeypatch, 1)
    before = sum(a.nbytes for a in jax.live_arrays())
    run = dict(
        data=str(tmp_path / "prompts.jsonl"),
        reward=("regex:.*a",),
        prompts=2,
        seq_len=55,
        steps=1,
        sample_every="never",
    )
    grpo.main(grpo.GRPOOptions.of(**own, **run, compute_dtype="bfloat16", out=tmp_path / "run"))
    assert found["memory"].argument_size_in_bytes == pytest.approx(decode.arguments, rel=0.01)
    assert found["memory"].temp_size_in_bytes == pytest.approx(decode.temporaries, rel=0.05)
    beside = made.sampling.needed - max(program.needed for program in programs[1:])
    assert found["bytes"] == pytest.approx(beside + decode.arguments, rel=0.02)


@pytest.mark.thorough
def test_sampling_beside_adapters(config):
    """Update and sampling share frozen weights. A device needs the larger memory of the two."""
    o = TINY.changed(method="grpo", lora=Lora(rank=4), rollout_batch=8)
    few, many = (script.plan(o.changed(rollout_batch=n), config, CHIPS["v6e"], jax.devices()) for n in (8, 4096))
    assert few.sampling.needed < few.needed == few.compiled.needed < many.sampling.needed == many.needed
    too_many = dataclasses.replace(many, available=many.needed - 1, compiled=None)
    assert suggestion(too_many, config).startswith("--rollout-batch 2048")


# ------------------------------------------------------------------------------------------------- what does not fit


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("message", "needed"),
    [
        (
            "RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on HBM, the total memory required for HLO "
            "temporaries (149.06G) exceeds available HBM (31.24G).",
            149.06,
        ),
        ("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 31.60G of 31.24G hbm.", 31.60),
    ],
)
def test_the_compiler_refuses(config, monkeypatch, message, needed):
    def fail(*_):
        raise jax.errors.JaxRuntimeError(message)

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    made = script.plan(TINY, config, CHIPS["v6e"], jax.devices())
    assert made.compiled is None and (made.needed, made.available) == (needed * 2**30, 31.24 * 2**30)


def test_other_errors_are_not_about_memory(config, monkeypatch):
    def fail(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: 3.00G and 4.00G are different numbers")

    monkeypatch.setattr(jax.stages.Lowered, "compile", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="different numbers"):
        script.plan(TINY, config, CHIPS["v6e"], jax.devices())


def test_larger_than_the_fleet(config):
    with pytest.raises(
        ValueError, match=r"tiny is larger than the fleet: its state takes .* at least [\d,]+ such devices"
    ):
        script.plan(TINY, config, small(1000), jax.devices())


def refuse(needed, available):
    """Returns a compiler that finds the program too large."""

    def compile_ahead(*_):
        raise TooLarge(needed, available)

    return compile_ahead


def test_suggestions_take_away_what_is_missing(config, monkeypatch):
    def refused(o, needed, available):
        monkeypatch.setattr(planner, "compile_ahead", refuse(needed, available))
        return script.plan(o, config, CHIPS["v6e"], jax.devices())

    o = TINY.changed(remat="none", batch=32)
    made = refused(o, 2.0, 1.0)
    state = sum(made.kinds.values())
    ours = lambda remat: planner.held(made.kinds, made.gradients, config, made.mesh, o.changed(remat=remat), made.rows)
    assert state < ours("offload") < ours("full") < ours("dots") < ours("none")
    for remat in ("dots", "full", "offload"):
        available = 1e9 * ours(remat) / ours("none") + 1
        assert suggestion(refused(o, 1e9, available), config).startswith(f"--remat {remat}, with which")
    most = o.changed(remat="offload")
    assert suggestion(refused(most, state + 8e6, state + 6e6), config).startswith("--batch 24")
    alone = most.changed(batch=8)
    assert re.match("a larger fsdp over at least 16 devices", suggestion(refused(alone, 2e9, 1e9), config))
    state = sum(refused(alone, 2.0, 1.0).kinds.values())
    too_small = script.plan(alone, config, small(state - 1), jax.devices())
    assert too_small.compiled is None and too_small.needed == state
    assert suggestion(too_small, config).startswith("a larger fsdp over at least 9 devices")
    replicas = alone.changed(mesh="replica=2,fsdp=4")
    assert suggestion(refused(replicas, 1e9 + 10, 1e9), config).startswith("fsdp=8 instead of replica=2")


def test_remat_before_more_devices(monkeypatch):
    """Remat is suggested first for Llama 3.1 8B on a v6e-8. libtpu needs 180.3 GB without remat, with more activations
    than in our estimate, and 28.8 GB with full remat, which fits.
    """
    monkeypatch.setattr(planner, "compile_ahead", refuse(180.3e9, 33.54e9))
    o = Options.of(model="llama3.1-8b", topology="v6e-8", batch=16, seq=8192, remat="none")
    made = script.plan(o, zoo.config("llama3.1-8b"), CHIPS["v6e"], jax.devices())
    assert suggestion(made, zoo.config("llama3.1-8b")).startswith("--remat full, with which a device needs about 27.")


@pytest.mark.parametrize(
    ("cloud", "ours"),
    [
        ("v6e-1", "v6e:1x1"),
        ("v6e-8", "v6e:2x4"),
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-256", "v5e:16x16"),
        ("v5p-8", "v5p:2x2x1"),  # TensorCores, two a chip
        ("v5p-128", "v5p:4x4x4"),
        ("v4-64", "v4:2x4x4"),
        ("v5p-1536", "v5p-1536"),  # the name has several shapes
        ("v6e:2x4", "v6e:2x4"),
        ("a100-40gb:8", "a100-40gb:8"),
    ],
)
def test_slices_as_google_cloud_names_them(cloud, ours):
    assert slice_of(cloud) == ours


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("v5p-1536", "no topology 'v5p-1536': write a TPU .* as Google Cloud names it"),
        ("v9:2x2", "no topology 'v9:2x2': write a TPU"),
        ("v6e", "no topology 'v6e'"),
        ("v6e:8", "no topology 'v6e:8'"),
        ("h200:2x4", "no topology 'h200:2x4'"),
    ],
)
def test_unknown_topologies(text, sentence):
    with pytest.raises(ValueError, match=sentence):
        fleet(text)


@pytest.mark.parametrize(
    ("text", "package", "extra"), [("v6e:2x4", "libtpu", "tpu"), ("h200:8", "jax_cuda13_plugin", "compile")]
)
def test_what_to_install(text, package, extra, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=rf"install {package}: pip install -e '\.\[{extra}\]'"):
        fleet(text)


@pytest.mark.parametrize(
    ("changes", "error", "sentence"),
    [
        (dict(model="llama3.1-70b"), ValueError, r"70b is larger than the fleet: its state takes .* GB, and v6e:2x4"),
        (
            dict(model="llama3.1-70b", mesh="replica=8", decode=True),
            ValueError,
            r"a device holds 141\.11 GB of parameters and .* GB of",
        ),
        (dict(batch=3), ValueError, "3 sequences of a step can't be split by fsdp = 8"),
        (dict(mesh="fsdp=3"), ValueError, "needs 3 devices; there are 8"),
        (dict(), ImportError, "install libtpu"),
    ],
)
def test_what_cannot_fit_needs_no_compiler(changes, error, sentence, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(error, match=sentence):
        script.main(TINY.changed(**changes))


def test_devices_of_a_topology():
    sizes = {"v6e:2x4": 8, "tpu7x:2x2x2": 16, "v5p-128": 64, "h200:16": 16, "4090:2": 2}
    assert {text: size_of(text)[1] for text in sizes} == sizes


def test_a_mesh_that_does_not_divide(config):
    with pytest.raises(ValueError, match="3 sequences of a step can't be split"):
        script.plan(TINY.changed(batch=3), config, CHIPS["v6e"], jax.devices())


def test_chips():
    assert chip_of("TPU v5 lite") is CHIPS["v5e"] and chip_of("TPU v5p") is CHIPS["v5p"] and chip_of("cpu") is None
    device = lambda host: type("Device", (), {"process_index": host})
    assert slowest_link(CHIPS["h200"], [device(0), device(0)]) == 450e9
    assert slowest_link(CHIPS["h200"], [device(0), device(1)]) == 50e9
    assert (
        slowest_link(CHIPS["v6e"], [device(0), device(1)]) == ring_rate(CHIPS["v6e"], [device(0), device(1)]) == 400e9
    )
    for hosts, rate in ([0, 1], 50e9), ([0, 0, 1, 1], 100e9), ([0, 0, 1], 50e9), (8 * [0, 1], 400e9), (2 * [0], 450e9):
        assert ring_rate(CHIPS["h200"], map(device, hosts)) == rate
    assert all(chip_of(chip.kind) is chip for chip in CHIPS.values())
    assert chip_of("NVIDIA L40S") is None and chip_of("NVIDIA H200 MIG 1g.18gb") is None
    for name, major, shared in ("t4", "7 minor: 5", 65536), ("4090", "8 minor: 9", 101376), ("a100", "8", 166912):
        assert f"major: {major} feature_extension: NONE" in target(CHIPS[name])
        assert f"shared_memory_per_block_optin: {shared}\n" in target(CHIPS[name])


@pytest.mark.skipif(importlib.util.find_spec("jax_cuda13_plugin") is None, reason="jax-cuda13-plugin is not installed")
def test_cards_without_a_network():
    with pytest.raises(ValueError, match="No network between hosts is published for l4: 'l4:16' can have 8 at most"):
        fleet("l4:16")


# ----------------------------------------------------------------------------------------------------- search, report


@pytest.mark.thorough
def test_candidates(config, made):
    found = script.candidates(TINY, config, CHIPS["v6e"], jax.devices())
    assert {o.batch for o in found} == {4, 8, 16, 32} and {o.remat for o in found} == set(planner.REMATS)
    assert {o.microbatches for o in found} == {1, 2, 4} and found[0].microbatches == 1
    assert {o.mesh for o in found} >= {
        "fsdp=-1",
        "replica=8,fsdp=-1",
        "replica=2,tensor=2,fsdp=-1",
        "context=2,fsdp=-1",
        "replica=2,context=2,fsdp=-1",
        "stage=4,fsdp=-1",
    }
    assert not any("expert" in o.mesh or "tensor=4" in o.mesh for o in found)  # the model has no experts, and six heads
    # With memory for the split state only, nothing is replicated.
    state = sum(made.kinds.values())
    tight = script.candidates(TINY.changed(seq=1), config, small(1.8 * state), jax.devices())
    assert {o.mesh for o in tight} == {"fsdp=-1", "tensor=2,fsdp=-1", "stage=2,fsdp=-1", "stage=4,fsdp=-1"}
    decoded = script.candidates(TINY.changed(decode=True), config, CHIPS["v6e"], jax.devices())
    assert decoded and not any("stage" in o.mesh or o.microbatches > 1 for o in decoded)


@dataclasses.dataclass(frozen=True)
class Device:
    """A GPU that is not there."""

    id: int
    process_index: int
    platform: str = "gpu"
    device_kind: str = "H100"


def test_candidates_on_nodes():
    """Between nodes the network is slow, but for rings of all devices of a node, which share its ports."""
    config, sizes = (
        zoo.config("qwen3-30b-a3b"),
        ("fsdp=64", "replica=8,fsdp=8", "replica=8,expert=8", "fsdp=8,expert=8"),
    )
    devices, across = [Device(n, n // 8) for n in range(64)], [Device(n, n % 8) for n in range(64)]
    o = Options.of(model="qwen3-30b-a3b", topology="h100:64", batch=256, seq=4096)
    model = skeleton(planner.family_of(config), config)

    def seconds(text, devices=devices, **changes):
        held, changed = {"parameters": 5_000_000_000}, o.changed(**changes)
        rows = Rows(changed.batch, changed.seq, (Pieces(changed.batch, 0, changed.seq),))
        return planner._seconds(changed, rows, held, model, CHIPS["h100"], make_mesh(text, devices))

    whole, near, *of_experts = map(seconds, sizes)
    assert whole < near < min(of_experts)
    assert near < seconds(sizes[1], across)  # where weights are gathered between nodes, by one port for each device
    assert of_experts[0] < of_experts[1]  # whose dense weights are gathered between nodes
    assert seconds(sizes[1], microbatches=4) > near and seconds(sizes[1], batch=1024) < 4 * near


def test_stages_wait_for_each_other(config, monkeypatch):
    """Four layers on two stages take two rounds: with 4 microbatches these are 8 turns, and one of waiting."""
    monkeypatch.setattr(planner, "compile_ahead", refuse(2.0, 1.0))
    together, staged = (
        script.plan(TINY.changed(mesh=mesh, batch=16), config, CHIPS["v6e"], jax.devices())
        for mesh in ("fsdp=8", "stage=2,fsdp=4")
    )
    assert staged.bounds["compute"] / together.bounds["compute"] == pytest.approx(9 / 8)


def test_the_command(made, monkeypatch, capsys):
    monkeypatch.setattr(script, "fleet", lambda text: (CHIPS["v6e"], jax.devices()))
    monkeypatch.setattr(script, "plan", lambda o, *_: dataclasses.replace(made, options=o))
    script.main(TINY.changed(search=True))
    out = capsys.readouterr().out
    assert "Compiling the step of tiny for v6e:2x4, fsdp=-1: 10 seconds to" in " ".join(out.split("tiny on")[0].split())
    assert "3 of 3 that are searched" in out
    for words in (
        "Ranked",
        "fits",
        "parameters",
        "optimizer",
        "activations",
        "all-gather over fsdp",
        "so MFU is",
        "bounds",
    ):
        assert words in out, words
    assert len(re.findall(r"│ +(4|8|16|32), (1|2|4) +│", out)) == 4  # the given one, and the best of three meshes


def test_the_report_of_what_does_not_fit(config, monkeypatch, capsys):
    monkeypatch.setattr(script, "fleet", lambda text: (CHIPS["v6e"], jax.devices()))
    monkeypatch.setattr(planner, "compile_ahead", refuse(40e9, 30e9))
    script.main(TINY)
    out = capsys.readouterr().out
    assert "does not fit" in out and "40.00 GB of 30.00 GB" in out and "To fit, try" in out and "so MFU is" not in out


# --------------------------------------------------------------------------------------------------------- topologies


def run(*options):
    """Runs the command in a process of its own, because libtpu can't leave one."""
    root = pathlib.Path(script.__file__).parents[1]
    command = [sys.executable, "-m", "train.plan", *options]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "COLUMNS": "120"}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)


@needs_libtpu
def test_a_tpu():
    """The real TPU compiler compiles the step, with the layers' inputs in the host's memory."""
    done = run("tiny", "--topology", "v6e:2x2", "--batch", "8", "--seq", "128", "--remat", "offload")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fits" in done.stdout and "and of its host" in done.stdout and "over fsdp" in done.stdout


@needs_libtpu
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("llama3.1-405b", "--topology", "v6e:2x2"), "llama3.1-405b is larger than the fleet"),
        (("tiny", "--topology", "v6e:3x3"), "libtpu knows no slice 'v6e:3x3'"),
    ],
)
def test_refusals_before_compiling(options, sentence):
    done = run(*options, "--batch", "4", "--seq", "128")
    assert done.returncode == 1 and sentence in done.stderr and "Traceback" not in done.stderr


@needs_cuda
def test_a_gpu():
    done = run("tiny", "--topology", "h200:16", "--batch", "16", "--seq", "128")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "fits" in done.stdout and "GB of 151.40 GB" in done.stdout


@pytest.mark.thorough
def test_offload_trains_alike(config):
    """Offloading gives the same gradients on a CPU, whose memory is the host's anyway."""
    family = planner.family_of(config)
    model = noise(lambda: family.Model(config, key=jax.random.key(0)), 0.02)
    tokens = jnp.asarray(np.arange(64).reshape(2, 32) % config.vocab_size)
    loss = lambda model, remat: jnp.mean(with_remat(model, remat).hidden(tokens)[0] ** 2)
    full, offload = (jax.jit(jax.grad(loss), static_argnums=1)(model, ahead.remat_of(r)) for r in ("full", "offload"))
    close(full, offload, terms=2 * MODEL)


# --------------------------------------------------------------------------------------------------------- --remat auto


def test_remat_auto(config, monkeypatch, capsys):
    """The fastest choice that fits is taken, from saving all products to small microbatches. If none fits, it is the
    one that needs the least. If the memory is unknown, as on a CPU, it is the usual one.
    """
    o = StepOptions(remat="auto", batch=32, seq_len=64, compute_dtype="bfloat16")
    mesh = make_mesh("fsdp=2", jax.devices()[:2])
    model = abstract_model(config, planner.family_of(config), mesh)
    held = ahead.device_bytes(model)

    def chosen(available, o=o, frozen=False):
        monkeypatch.setattr(defaults, "device_bytes", lambda: available)
        o = defaults.resolve_remat(
            o,
            StateOptions(),
            Trained("tiny", config, model, lambda: None, frozen=model if frozen else None),
            mesh,
            model,
        )
        return o.remat, o.microbatches

    assert chosen(None) == ("dots", 1) and "not known" in capsys.readouterr().out
    assert chosen(1e12) == ("dots", 1) and "the fastest." in capsys.readouterr().out
    assert chosen(1e12, o.changed(microbatches=4)) == ("dots", 4)
    assert chosen(1.0, o.changed(remat="full", microbatches=4)) == ("full", 4)
    capsys.readouterr()
    assert chosen(1.0)[1] == 16 and "nothing is estimated to fit" in " ".join(capsys.readouterr().out.split())
    ways = fit.candidates(o, StateOptions(), Trained("tiny", config, model, lambda: None), mesh, held)
    assert {way.microbatches for way in ways} == {1, 2, 4, 8, 16} and {way.remat for way in ways} == {
        *fit.REMATS[1:],
        "attention_out=keep,mlp_gate=keep,mlp_up=keep",
        "attention_out=keep,mlp_gate=keep,mlp_up=keep,attention_qkv=keep",
    }
    sizes = {way[:2]: way.needed for way in ways}
    assert sizes["dots", 1] > sizes["attention", 1] > sizes["full", 1] > sizes["offload", 1] > held
    adapters = Trained("tiny", config, [], lambda: None, frozen=model, adapters=True)  # without size
    adapted = {way[:2]: way.needed for way in fit.candidates(o, StateOptions(), adapters, mesh, held)}
    results = fit.saved_bytes(config, mesh, rows=32, seq=64, remat="dots") - fit.saved_bytes(
        config, mesh, rows=32, seq=64, remat="full"
    )
    assert adapted["dots", 1] - adapted["full", 1] == pytest.approx(2 * results)
    for way in ways:  # with just enough memory for each, the choice needs no more, and is not slower
        remat, parts = chosen(way.needed / fit.MARGIN + 1)
        other = next(each for each in ways if each[:2] == (remat, parts))
        assert other.needed <= way.needed + 1 and other.work <= way.work
    assert f"{ways[0]}, the fastest, needs about" in " ".join(capsys.readouterr().out.split())


@pytest.mark.thorough
def test_states_are_kept():
    """Qwen3.5 keeps 32 states of 128 x 128 in 30 layers for each of 64 chunks, beside what other layers keep.

    Where the fused kernels compute them, they are in bfloat16.
    """
    config, mesh = zoo.config("qwen3.5-35b-a3b"), make_mesh("fsdp=1", jax.devices()[:1])
    keeps = lambda remat: fit.saved_bytes(config, mesh, rows=1, seq=64 * 64, remat=remat)
    products = 2 * 64 * 64 * fit.products_per_token(config, 64 * 64).layers / config.hidden_size
    assert keeps("dots") - keeps("full") == pytest.approx(products + 4 * 64 * 30 * 32 * 128 * 128)
    with kernels.prefer("triton_fused"):
        of_states = fit.bytes_by_name.__wrapped__(config)["delta_states"]
    assert of_states * 64 == 2 * 30 * 32 * 128 * 128
