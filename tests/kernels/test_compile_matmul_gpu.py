"""The quantised matrix products compile for an H200: they use its tensor cores, spill nothing, and make no copies."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels import Stacked
from kernels.quantized_matmul import triton, xla
from kernels.quantized_matmul.shared import Formula
from tests.kernels.gpu import Case, complaints, mesh_of, needs_compiler
from train.base.chips import fleet
from train.planning import breakdown
from train.state.remat import REMAT
from zoo.nn.layers import RMSNorm


MB = 1 << 20


def case(dtype, granularity, rows, ins, outs, *, activations=False, hgmma=("matmul_weight_only",), temporary=0):
    """Returns a case of a product with an already quantised matrix."""
    formula = Formula(dtype, granularity, activations, "float")
    shapes = {"channel": (outs,), "block": (-(-outs // 128), -(-ins // 128))}
    arrays = [((rows, ins), jnp.bfloat16), ((outs, ins), dtype), (shapes[granularity], jnp.float32)]
    function = lambda x, w, scale: triton.quantized_matmul(x, w, scale, formula=formula)
    return Case(function, tuple(jax.ShapeDtypeStruct(*a) for a in arrays), hgmma, temporary)


def step(dtype, rows, ins, outs, temporary):
    """Returns forward and backward of a training step whose three products are all quantised by blocks."""
    formula = Formula(dtype, "block", True, "quantized")

    def function(x, w, d_out):
        out, gradient = jax.vjp(lambda x, w: triton.quantized_matmul(x, w, None, formula=formula), x, w)
        return out, gradient(d_out)

    shapes = (rows, ins), (outs, ins), (rows, outs)
    arguments = tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    return Case(function, arguments, ("matmul_both",), temporary)


def together(rows, ins, *outs, card="h200", temporary=0):
    """Returns a case of products of a few rows with several matrices, of the second layer of stacks of three."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def function(x, stacks):
        return kernels.products(x, *(Stacked(stack, jnp.array(1)) for stack in stacks), implementation="triton")

    return Case(function, (array(rows, ins), [array(3, out, ins) for out in outs]), (), temporary, card)


def by_head(heads, nope, v, features, *, to_latent, rows=8, latent=512, card="h200"):
    """Returns a case of latent attention's products by head, with the second layer's matrix of a stack of three."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    part = (0, nope) if to_latent else (nope, v)

    def function(x, stack):
        matrix = Stacked(stack, jnp.array(1))
        return kernels.head_products(x, matrix, *part, to_latent=to_latent, implementation="triton")

    x = array(rows, 1, heads, features if to_latent else latent)
    return Case(function, (x, array(3, heads * (nope + v), latent)), (), 1_000, card)


def silu(gate, up):
    return jax.nn.silu(gate) * up


def gelu(gate, up):
    return jax.nn.gelu(gate, approximate=True) * up


def gated(rows, ins, outs, experts=None, *, formula=silu, card="h200", temporary=0):
    """Returns a case of a gated MLP's hidden layer, or of experts', with the second layer's matrices of three."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def function(x, gate, up, sizes):
        matrices = (Stacked(stack, jnp.array(1)) for stack in (gate, up))
        return kernels.gated_products(x, *matrices, formula, sizes, implementation="triton")

    matrix = array(3, *([experts] if experts else []), outs, ins)
    sizes = jax.ShapeDtypeStruct((experts,), jnp.int32) if experts else None
    return Case(function, (array(rows, ins), matrix, matrix, sizes), (), temporary, card)


def normed(*arrays, rows=8, card="h200"):
    """Returns a case of norms of arrays (features, of which are normed), by the second layer of stacks of three."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def function(xs, stacks):
        norms = [eqx.tree_at(lambda m: m.weight, RMSNorm(1, 1e-6), Stacked(stack, jnp.array(1))) for stack in stacks]
        return kernels.rms_norms(*zip(xs, norms, strict=True), implementation="triton")

    xs, stacks = [array(rows, 1, all) for all, _ in arrays], [array(3, some) for _, some in arrays]
    return Case(function, (xs, stacks), (), 1_000, card)  # the numbers of layers


def written(*shape, rows=8, heads=8, dim=128):
    """Returns a case of one token's keys and values of each row, written into caches of three layers."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    vectors, numbers = array(jnp.bfloat16, rows, 1, heads, dim), array(jnp.int32, rows, 1)

    def function(k, v, row, slot):
        stores = [jnp.zeros((3, *shape, heads, dim), jnp.bfloat16)] * 2
        return kernels.cache_write(tuple(stores), (k, v), jnp.array(1), row, slot, implementation="triton")

    return Case(function, (vectors, vectors, numbers, numbers), (), 1_000)  # the numbers of layer, rows and slots


BOTH = dict(activations=True, hgmma=("matmul_both",))
SCALED = dict(activations=True, hgmma=("matmul_scaled",))
FP8 = jnp.float8_e4m3fn
CASES = {
    # Memory beside arguments and result: the rows in 8 bits, and scales.
    "fp8, block, 4096 x 7168 x 4096": case(FP8, "block", 4096, 7168, 4096, **BOTH, temporary=32 * MB),
    "fp8, block, 8192 x 8192 x 8192": case(FP8, "block", 8192, 8192, 8192, **BOTH, temporary=72 * MB),
    "fp8, block, decode": case(FP8, "block", 16, 4096, 14336, **BOTH, temporary=MB),
    "fp8, block, training": step(FP8, 4096, 4096, 14336, temporary=320 * MB),
    "int8, block, prefill": case(jnp.int8, "block", 4096, 4096, 4096, **BOTH, temporary=20 * MB),
    # The sums in int32, of 470 MB, are never written.
    "int8, channel, forward": case(jnp.int8, "channel", 8192, 4096, 14336, **SCALED, temporary=34 * MB),
    "int8, channel, edges": case(jnp.int8, "channel", 1000, 2880, 2880, **SCALED, temporary=4 * MB),
    "fp8, channel, forward": case(FP8, "channel", 8192, 4096, 14336, **SCALED, temporary=34 * MB),
    "fp8, channel, edges": case(FP8, "channel", 1000, 2880, 2880, **SCALED, temporary=4 * MB),
    "fp8, block, edges": case(FP8, "block", 1000, 2880, 2880, **BOTH, temporary=4 * MB),
    "weights only, fp8, block, decode": case(FP8, "block", 16, 4096, 14336, hgmma=()),
    "weights only, int8, channel, decode": case(jnp.int8, "channel", 16, 4096, 14336, hgmma=()),
    "weights only, int8, channel, 64 rows": case(jnp.int8, "channel", 64, 4096, 4096),
    "weights only, int8, channel, prefill": case(jnp.int8, "channel", 4096, 4096, 14336),
    "weights only, fp8, block, prefill": case(FP8, "block", 4096, 4096, 14336),
    "weights only, int8, channel, edges": case(jnp.int8, "channel", 1000, 2880, 2880),
    "weights only, fp8, block, edges": case(FP8, "block", 100, 2880, 2880),
    "together, q, k and v of Qwen3 8B": together(8, 4096, 4096, 1024, 1024),
    "together, gate and up of Qwen3 8B": together(16, 4096, 12288, 12288),
    "together, edges": together(1, 2880, 4096, 520, 40),
    "together, gate and up, an A100": together(16, 4096, 12288, 12288, card="a100"),
    "together, gate and up, an RTX 4090": together(16, 4096, 12288, 12288, card="4090"),
    "gated, Qwen3 8B": gated(16, 4096, 12288),
    "gated, the shared expert of DeepSeek V3": gated(8, 7168, 2048),
    "gated, Gemma 3 12B": gated(8, 3840, 15360, formula=gelu),
    "gated, edges": gated(1, 2880, 2900),
    "gated, an A100": gated(16, 4096, 12288, card="a100"),
    "gated, an RTX 4090": gated(16, 4096, 12288, formula=gelu, card="4090"),
    "gated, experts of DeepSeek V3": gated(64, 7168, 2048, 256),
    "gated, experts of Qwen3 30B A3B": gated(256, 2048, 768, 128),
    "gated, experts of Mixtral, an RTX 4090": gated(16, 4096, 14336, 8, card="4090"),
    "by head, to latents, DeepSeek V3": by_head(128, 128, 128, 192, to_latent=True),
    "by head, from latents, DeepSeek V3": by_head(128, 128, 128, 192, to_latent=False, rows=16),
    "by head, to latents, GLM-4.7-Flash": by_head(20, 192, 256, 256, to_latent=True),
    "by head, from latents, an RTX 4090": by_head(20, 192, 256, 256, to_latent=False, card="4090"),
    "norms of the latents of DeepSeek V3": normed((1536, 1536), (576, 512)),
    "norms of the residual, Gemma 4 26B, an RTX 4090": normed((2816, 2816), (2816, 2816), rows=16, card="4090"),
    "norms, the widest": normed((16384, 16384), (8191, 8191)),
    "keys and values written": written(8, 8192),
}


@needs_compiler
def test_gpu():
    assert not complaints(__file__)


@needs_compiler
@pytest.mark.parametrize("granularity, shape", [("tensor", ()), ("channel", (8192,))])
@pytest.mark.parametrize("dtype, call", [(FP8, "__cublas$lt$matmul$f8"), (jnp.int8, "__cublas$lt$matmul")])
def test_xla_hands_eight_bits_to_cublaslt(dtype, call, granularity, shape):
    """XLA gives 8-bit products to cuBLASLt, unless it prefers a Triton kernel of its own after measuring both."""
    mesh = mesh_of("h200")
    formula = Formula(dtype, granularity, True, "float")
    arguments = [((4096, 4096), jnp.bfloat16), ((8192, 4096), dtype), (shape, jnp.float32)]
    arguments = [jax.ShapeDtypeStruct(*a, sharding=NamedSharding(mesh, P())) for a in arguments]
    with jax.set_mesh(mesh):
        product = jax.jit(lambda x, w, scale: xla.quantized_matmul(x, w, scale, formula=formula))
        compiled = product.lower(*arguments).compile({"xla_gpu_enable_triton_gemm": False})
    assert f'custom_call_target="{call}"' in compiled.as_text()
    assert "s8[4096,4096]" in compiled.as_text() or dtype == FP8


@needs_compiler
def test_on_a_mesh_matrices_are_gathered_in_eight_bits():
    """Forward and backward pass of a product in float8 multiply in float8, after gathering the matrix in float8."""
    mesh = Mesh(np.array(fleet("h200:2")[1]), ("fsdp",))
    on = lambda shape, *spec: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))
    x, w, d_out = on((2, 1024, 1024), "fsdp"), on((4096, 1024), None, "fsdp"), on((2, 1024, 4096), "fsdp")

    def step(x, w, d_out):
        out, gradient = jax.vjp(lambda x, w: kernels.fp8_matmul(x, w, activations=True, gradients="quantized"), x, w)
        return out, gradient(d_out)

    with jax.set_mesh(mesh):
        places = (d_out.sharding, (x.sharding, w.sharding))
        compiled = jax.jit(step, out_shardings=places).lower(x, w, d_out).compile({"xla_gpu_enable_triton_gemm": False})
    text = compiled.as_text()
    gathered = [line for line in text.splitlines() if re.search(r" all-gather(-start)?\(", line)]
    assert gathered and not any("bf16[" in line for line in gathered)
    calls = re.findall(r'custom_call_target="([^"]*(?:cublas|triton)[^"]*)"', text)
    assert sorted(calls) == ["__cublas$lt$matmul$f8", "__cublas$lt$matmul$f8", "__gpu$xla.gpu.triton"]


@needs_compiler
def test_training_in_fp8_quantises_in_few_passes(tmp_path):
    """Every product is cuBLASLt's float8 product, and layers move at most 1.1 times their bytes in bfloat16.

    Each gradient is read once for its scale, and once more to be written in 8 bits in both layouts.
    """
    mesh, moved = mesh_of("h200"), {}
    for low in (False, True):
        product = lambda x, w: kernels.fp8_matmul(x, w, activations=True, gradients="quantized", implementation="xla")
        multiply = product if low else lambda x, w: jnp.einsum("...i,oi->...o", x, w)

        def layer(x, w, multiply=multiply):
            gate, up, down = w
            return x + multiply(jax.nn.silu(multiply(x, gate)) * multiply(x, up), down), None

        def step(x, w, layer=layer):
            return jax.grad(lambda w: jnp.sum(jax.lax.scan(REMAT["dots"](layer), x, w)[0].astype(jnp.float32) ** 2))(w)

        shapes = (2048, 1024), ((3, 4096, 1024), (3, 4096, 1024), (3, 1024, 4096))
        abstract = lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P()))
        arguments = jax.tree.map(abstract, shapes, is_leaf=lambda node: isinstance(node[0], int))
        with jax.set_mesh(mesh):
            options = {"xla_dump_to": str(tmp_path / str(low)), "xla_gpu_enable_triton_gemm": False}
            jax.jit(step).lower(*arguments).compile(options)
        (file,) = (tmp_path / str(low)).glob("*.jit_step*after_optimizations.txt")
        text = file.read_text()
        moved[low] = sum(kernel.bytes * kernel.times for kernel in breakdown.kernels(text))
    assert {*re.findall(r'custom_call_target="(__cublas[^"]*)"', text)} == {"__cublas$lt$matmul$f8"}
    assert moved[True] < 1.1 * moved[False], moved
