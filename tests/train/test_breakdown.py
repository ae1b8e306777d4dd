"""A step by kind: FLOPs, bytes and runs of the kernels in programs whose counts are known."""
# ruff: noqa: E501 (lines of HLO are long)

import jax
import jax.numpy as jnp
import pytest

from kernels.attention import ALL_PAIRS
from kernels.delta_rule.shared import fused_products
from train.base.chips import CHIPS
from train.planning import breakdown
from train.planning.ahead import Program, compile_ahead
from train.planning.breakdown import Kernel, kernels
from zoo.mesh import make_mesh


def test_a_loop_of_products():
    """Six products in a loop are counted, and then the optimizer, which is recognised by its scope."""
    place = jax.NamedSharding(make_mesh("fsdp=1", jax.devices()[:1]), jax.P())
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=place)

    def step(weights, x):
        y = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]
        with jax.named_scope("optimizer"):
            return weights - 0.1 * jnp.sum(y)

    program = Program(jax.jit(step), (array(6, 64, 64), array(32, 64)), {})
    found = breakdown.parts(compile_ahead(program, place.mesh).kernels, CHIPS["h200"])
    assert list(found) == [kind for kind in breakdown.ORDER if kind in found]
    products = found[breakdown.PRODUCTS]
    assert (products.flops, products.kernels) == (6 * 2 * 32 * 64 * 64, 6)
    assert 6 * 4 * (32 * 64 + 64 * 64 + 32 * 64) <= products.bytes <= 6 * 4 * (2 * 32 * 64 + 6 * 64 * 64)
    assert found[breakdown.OPTIMIZER].bytes == pytest.approx(2 * 4 * 6 * 64 * 64, rel=0.01)
    assert found[breakdown.OPTIMIZER].flops == 0


TEXT = """HloModule jit_step

%update (a: bf16[4,8,64], b: bf16[8,64], n: s32[]) -> bf16[4,8,64] {
  %a = bf16[4,8,64]{2,1,0} parameter(0)
  %b = bf16[8,64]{1,0} parameter(1)
  %n = s32[] parameter(2)
  %zero = s32[] constant(0)
  %same = bf16[1,8,64]{2,1,0} bitcast(%b)
  ROOT %new = bf16[4,8,64]{2,1,0} dynamic-update-slice(%a, %same, %n, %zero, %zero)
}

%slice (p0: f32[4,8,64], p1: s32[]) -> bf16[8,64] {
  %p0 = f32[4,8,64]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %none = s32[] constant(0)
  %part = f32[1,8,64]{2,1,0} dynamic-slice(%p0, %p1, %none, %none), dynamic_slice_sizes={1,8,64}
  %flat = f32[8,64]{1,0} bitcast(%part)
  ROOT %low = bf16[8,64]{1,0} convert(%flat)
}

%summed (q0: f32[4,8,64], q1: s32[], q2: bf16[8,64]) -> bf16[8,64] {
  %q0 = f32[4,8,64]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  %q2 = bf16[8,64]{1,0} parameter(2)
  %read = bf16[8,64]{1,0} fusion(%q0, %q1), kind=kLoop, calls=%slice
  ROOT %sum = bf16[8,64]{1,0} add(%read, %q2)
}

%scattered (t: f32[100,64], i: s32[8,1], u: f32[8,64]) -> f32[100,64] {
  %t = f32[100,64]{1,0} parameter(0)
  %i = s32[8,1]{1,0} parameter(1)
  %u = f32[8,64]{1,0} parameter(2)
  ROOT %all = f32[100,64]{1,0} scatter(%t, %i, %u), to_apply=%add
}

%body (p: (s32[], f32[4,8,64], bf16[4,8,64], bf16[4,16,8,64])) -> (s32[], f32[4,8,64], bf16[4,8,64], bf16[4,16,8,64]) {
  %p = (s32[], f32[4,8,64]{2,1,0}, bf16[4,8,64]{2,1,0}, bf16[4,16,8,64]{3,2,1,0}) parameter(0)
  %cut = bf16[8,64]{1,0} fusion(%p#1, %p#0), kind=kLoop, calls=%slice
  %put = bf16[4,8,64]{2,1,0} fusion(%p#2, %cut, %p#0), kind=kLoop, calls=%update
  %rows = bf16[8,16]{1,0} custom-call(%cut, %p#3), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/ragged_dot_out/pallas_call"}
  ROOT %r = (s32[], f32[4,8,64]{2,1,0}, bf16[4,8,64]{2,1,0}, bf16[4,16,8,64]{3,2,1,0}) tuple(%n, %p#1, %put, %p#3)
}

%wrapped (w: f32[1000]) -> f32[1000] {
  %w = f32[1000]{0} parameter(0)
  ROOT %copied = f32[1000]{0} copy(%w)
}

%moves (m: f32[1000]) -> f32[1000] {
  %m = f32[1000]{0} parameter(0)
  %once = f32[1000]{0} negate(%m)
  ROOT %twice = f32[1000]{0} copy(%once)
}

%learn (l: f32[1000]) -> f32[1000] {
  %l = f32[1000]{0} parameter(0)
  ROOT %less = f32[1000]{0} negate(%l), metadata={op_name="jit(step)/cond/branch_1_fun/optimizer/neg"}
}

ENTRY %main (q: bf16[2,32,4,16], k: bf16[2,32,2,16], v: bf16[2,32,2,16]) -> s32[] {
  %q = bf16[2,32,4,16]{3,2,1,0} parameter(0)
  %k = bf16[2,32,2,16]{3,2,1,0} parameter(1)
  %v = bf16[2,32,2,16]{3,2,1,0} parameter(2)
  %f = f32[1000]{0} parameter(3)
  %nothing = bf16[] constant(0)
  %one = s32[] constant(1)
  %low = bf16[8,64]{1,0} parameter(9)
  %ids = s32[8,1]{1,0} parameter(10)
  %zeros = bf16[4,8,64]{2,1,0} broadcast(%nothing), dimensions={}
  %while = (s32[], f32[4,8,64]{2,1,0}, bf16[4,8,64]{2,1,0}, bf16[4,16,8,64]{3,2,1,0}) while(%t), condition=%c, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %more = bf16[8,64]{1,0} fusion(%while#1, %one, %low), kind=kLoop, calls=%summed
  %out = (f32[2,32,4,16]{3,2,1,0}, f32[2,4,32]{2,1,0}) custom-call(%q, %k, %v), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/attention_forward/pallas_call"}
  %dkv = (bf16[2,32,2,16]{3,2,1,0}, bf16[2,32,2,16]{3,2,1,0}) custom-call(%q, %k, %v, %out#1), custom_call_target="mosaic_gpu_v2", metadata={op_name="jit(step)/attention_dkv/pallas_call"}
  %library = bf16[2,32,4,16]{3,1,2,0} custom-call(%q, %k, %v), custom_call_target="__cudnn$fmhaSoftmaxBackward", backend_config={"cudnn_fmha_backend_config":{"intermediate_tensor_shape":{"element_type":"BF16","dimensions":["2","4","32","32"]}}}
  %stated = bf16[2,4,32,16]{3,2,1,0:T(8,128)S(1)} custom-call(%q), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/attention_dq/pallas_call"}, backend_config={"custom_call_config":{"cost_estimate":{"bytes_accessed":"7","flops":"1000"}}}
  %chunks = f32[3,2,4,16,64]{4,3,2,1,0} custom-call(%alone, %erased, %keys, %fade, %state), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/delta_rule_forward/pallas_call"}
  %fused = (bf16[2,128,4,32]{3,2,1,0}, f32[2,4,32,32]{3,2,1,0}) custom-call(%keys_of_tokens, %values, %decays, %first), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/delta_rule_fused_forward/pallas_call"}
  %keys_of_tokens = bf16[2,128,2,32]{3,2,1,0} parameter(16)
  %values = bf16[2,128,4,32]{3,2,1,0} parameter(17)
  %decays = f32[2,4,128]{2,1,0} parameter(18)
  %first = f32[2,4,32,32]{3,2,1,0} parameter(19)
  %alone = f32[3,2,4,16,64]{4,3,2,1,0} parameter(11)
  %erased = f32[3,2,4,64,32]{4,3,2,1,0} parameter(12)
  %keys = f32[3,2,4,32,64]{4,3,2,1,0} parameter(13)
  %fade = f32[3,2,4,1,32]{4,3,2,1,0} parameter(14)
  %state = f32[2,4,16,32]{3,2,1,0} parameter(15)
  %product = (bf16[64,2]{1,0}, s8[4096]{0}) custom-call(%x, %y), custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["0"],"rhs_contracting_dimensions":["1"]}}}
  %x = bf16[8,64]{1,0} parameter(4)
  %y = bf16[2,8]{1,0} parameter(5)
  %few = (bf16[2,64]{1,0}, bf16[2,16]{1,0}) custom-call(%y, %wide, %narrow), custom_call_target="__gpu$xla.gpu.triton", metadata={op_name="jit(step)/products/pallas_call"}
  %wide = bf16[64,8]{1,0} parameter(20)
  %narrow = bf16[16,8]{1,0} parameter(21)
  %far = bf16[8,16,32]{2,1,0} convolution(%a, %b), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0io->0bf
  %a = bf16[8,16,4]{2,1,0} parameter(6)
  %b = bf16[8,4,32]{2,1,0} parameter(7)
  %table = f32[100,64]{1,0} fusion(%table, %ids, %new), kind=kInput, calls=%scattered
  %new = f32[8,64]{1,0} parameter(8)
  %start = ((f32[1000]{0}), f32[1000]{0}, u32[]) async-start(%f), calls=%wrapped
  %done = f32[1000]{0} async-done(%start)
  %begun = ((bf16[4,8,64]{2,1,0}, bf16[8,64]{1,0}, s32[]), bf16[4,8,64]{2,1,0}, u32[]) fusion-start(%zeros, %low, %one), kind=kLoop, calls=%update
  %ended = bf16[4,8,64]{2,1,0} fusion-done(%begun)
  %either = f32[1000]{0} conditional(%true, %f, %f), branch_computations={%moves, %learn}
  %asked = f32[1000]{0} conditional(%true, %f, %f), true_computation=%learn, false_computation=%moves
  %gathered = f32[4000]{0} all-gather(%f), replica_groups={{0,1,2,3}}, dimensions={0}
}
"""


def test_every_kind_of_kernel():
    found = kernels(TEXT, seen=0.5)
    part, layer, head = 8 * 64, 16 * 8 * 64, 2 * 32 * 2 * 16
    pairs, tokens = 2 * 4 * 32 * 32 * 16, 3 * 2 * 4 * 64  # tokens of all heads
    known = [
        Kernel(breakdown.COPIES, 0, 2 + 2 * 4 * part, 1),  # the zeros
        Kernel(breakdown.COPIES, 0, 4 * part + 4 + 2 * part, 4),  # of four layers, one is read and rounded
        Kernel(breakdown.COPIES, 0, 2 * part + 4 + 2 * part, 4),  # and one is written in place
        Kernel(breakdown.GROUPED, 2 * 8 * 64 * 16, 2 * (part + layer + 8 * 16), 4, 0.45),
        Kernel(breakdown.ELEMENTWISE, 0, 4 * part + 4 + 2 * 2 * part, 1),
        Kernel(breakdown.FORWARD, 2 * pairs, 2 * 4 * head + 4 * (2 * head + 2 * 4 * 32), 1, 0.40),
        Kernel(breakdown.BACKWARD, 4 * pairs, 2 * 6 * head + 4 * 2 * 4 * 32, 1, 0.44),
        Kernel(breakdown.BACKWARD, 5 * pairs, 2 * 6 * head, 1, 0.54),
        Kernel(breakdown.BACKWARD, 500, 2 * 2 * head, 1, 0.39),  # the result stays in fast memory
        Kernel(breakdown.RECURRENCE, 2 * tokens * 2 * 32 * 16, 4 * (tokens * (2 * 16 + 2 * 32) + 8 * (3 + 16) * 32), 1),
        Kernel(
            breakdown.RECURRENCE,
            2 * 1024 * fused_products("forward", 32, 32, erase=True),
            2 * 32 * (512 + 2 * 1024) + 4 * (1024 + 2 * 8 * 32 * 32),
            1,
        ),
        Kernel(breakdown.PRODUCTS, 2 * 64 * 2 * 8, 2 * (8 * 64 + 2 * 8 + 64 * 2), 1),
        Kernel(breakdown.PRODUCTS, 2 * 2 * 8 * (64 + 16), 2 * (2 + 64 + 16) * 8 + 2 * 2 * (64 + 16), 1),
        Kernel(breakdown.PRODUCTS, 2 * 8 * 16 * 32 * 4, 2 * 8 * (16 * 4 + 4 * 32 + 16 * 32), 1),
        Kernel(breakdown.SCATTERS, 0, 3 * 4 * part + 4 * 8, 1),
        Kernel(breakdown.ASIDE, 0, 8000, 1),  # started here, and awaited later
        Kernel(breakdown.ASIDE, 0, 2 * part + 4 + 2 * part, 1),
        Kernel(breakdown.OPTIMIZER, 0, 8000, 1),  # the branch for true, though the other one moves more there
        Kernel(breakdown.OPTIMIZER, 0, 8000, 1),
    ]
    assert [tuple(kernel) for kernel in found] == [tuple(kernel) for kernel in known]


def test_a_kernel_outside_of_a_loop_reads_one_layer():
    """The layer's number follows the array of all, and scales follow the number. A layer's state is written in place.
    What a kernel takes twice, here the number, counts once.
    """
    text = """HloModule jit_step
ENTRY %main (q: bf16[2,64]) -> (bf16[2,64], f32[4,2,8]) {
  %q = bf16[2,64]{1,0} parameter(0)
  %all = s8[4,100,64]{2,1,0} parameter(1)
  %n = s32[] parameter(2)
  %scales = f32[4,100]{1,0} parameter(3)
  %states = f32[4,2,8]{2,1,0} parameter(4)
  ROOT %c = (bf16[2,64]{1,0}, f32[4,2,8]{2,1,0}) custom-call(%q, %all, %n, %scales, /*index=4*/%states, %n), custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (4, {})}
}
"""
    (found,) = kernels(text)
    assert found.bytes == 2 * 2 * 64 + 100 * 64 + 4 + 4 * 100 + 4 * 2 * 8 + 2 * 2 * 64 + 4 * 2 * 8


@pytest.mark.parametrize(
    ("tokens", "heads", "window", "labels"),
    [
        ("8,1", "64", "size=64 pad=63_63 rhs_reversal=1", "b0f_i0o->b0f"),
        ("2,4,1", "1,64", "size=1x64 pad=0_0x63_63 rhs_reversal=0x1", "b01f_i01o->b01f"),
    ],
)
def test_windows_of_padding_are_not_counted(tokens, heads, window, labels):
    """A TPU's product for 8 tokens and 64 heads is a window, and only one of a result's terms is no padding."""
    text = f"""HloModule jit_step
ENTRY %main (a: f32[8]) -> f32[8] {{
  %a = bf16[{tokens},256]{{2,1,0}} parameter(0)
  %b = bf16[256,{heads},128]{{2,1,0}} parameter(1)
  ROOT %c = bf16[{tokens[:-1]}64,128]{{2,1,0}} convolution(%a, %b), window={{{window}}}, dim_labels={labels}
}}
"""
    (found,) = kernels(text)
    assert found.flops == 2 * 8 * 64 * 128 * 256


def test_an_encoder_computes_all_pairs():
    """A kernel in the scope of full attention computes all pairs, where another one computes half of them."""
    forward = lambda text: next(k.flops for k in kernels(text, seen=0.5) if k.kind == breakdown.FORWARD)
    whole = TEXT.replace("jit(step)/attention_forward/", f"jit(step)/{ALL_PAIRS}/attention_forward/")
    assert forward(whole) == 2 * forward(TEXT)


def test_rows_without_tokens_are_not_counted():
    count = lambda **more: {k.kind: (k.flops, k.bytes) for k in kernels(TEXT, **more)}
    whole, half = count(), count(filled=0.5)
    flops, moved = whole[breakdown.GROUPED]
    assert half == whole | {breakdown.GROUPED: (flops / 2, moved - 2 * 8 * 64 / 2)}  # half of the rows are not read


def test_seconds():
    chip = CHIPS["h200"]
    assert Kernel(breakdown.PRODUCTS, 702e12, 1.0, 1).seconds(chip) == pytest.approx(1, rel=0.01)
    assert Kernel(breakdown.FORWARD, 395.6e12, 1.0, 1, 0.4).seconds(chip) == pytest.approx(1)
    assert Kernel(breakdown.COPIES, 0.0, 4.2e12, 1).seconds(chip) == pytest.approx(1)
    twice = breakdown.parts([Kernel(breakdown.COPIES, 0.0, 4.2e12, 2), Kernel(breakdown.COPIES, 0.0, 4.2e12, 1)], chip)
    assert twice == {breakdown.COPIES: pytest.approx((0, 12.6e12, 3, 3))}
