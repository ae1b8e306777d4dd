"""The delta rule compiles for GPUs: its scans use tensor cores and spill nothing, and its memory is linear in the
tokens.

Most cases are the two kernels alone, since XLA makes some eighty more kernels of the code around them.
"""

import functools
import itertools
import re

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels import Slots, Tokens
from kernels.delta_rule import triton as delta_rule_triton
from kernels.delta_rule.shared import CHUNK, Formula, Parts
from kernels.delta_step import triton as delta_step_triton
from tests.kernels.gpu import Case, complaints, mesh_of, needs_compiler
from train.planning import breakdown


KERNELS = "delta_rule_forward", "delta_rule_backward"
FUSED = "pairs", "forward", "backward", "values", "keys"


def array(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def scans(of, dim, v_dim, *, card="h200", erase=True, precision=jax.lax.Precision.HIGH):
    """Returns a case with the two kernels of an implementation."""
    chunks = 4, 1, 2, CHUNK
    parts = Parts(
        query=array(*chunks, dim), pairs=array(*chunks, CHUNK), alone=array(*chunks, v_dim),
        less=array(*chunks, dim) if erase else None, key=array(*chunks, dim), fade=array(4, 1, 2, dim, 1),
    )  # fmt: skip

    def both(parts, state, d_out):
        formula = Formula(0.1, erase, precision)
        forward = of.forward(formula, parts, state, keep=True)
        return forward, of.backward(formula, parts, d_out, state)

    return Case(both, (parts, array(1, 2, dim, v_dim), array(*chunks, v_dim)), KERNELS, 16 << 20, card)


def whole(seq, heads, dim):
    """Returns forward and backward of a row of packed documents. A [seq, seq] matrix per head exceeds the limit."""
    of_tokens = lambda *more: array(1, seq, heads, *more, dtype=jnp.bfloat16)
    state, segments = array(1, heads, dim, dim), array(1, seq, dtype=jnp.int32)

    def both(segments, gradients, *given):
        def run(*given):
            options = dict(scale=dim**-0.5, implementation="triton")
            return kernels.delta_rule(*given[:-1], Tokens(segments=segments), state=given[-1], **options)

        out, gradient = jax.vjp(run, *given)
        return out, gradient(gradients)

    q = of_tokens(dim)
    temporary = 20 * seq * heads * dim * 4  # arrays of float32 like q
    return Case(both, (segments, (q, state), q, q, q, of_tokens(), of_tokens(), state), KERNELS, temporary)


def row(
    dim, v_dim, *, heads=16, v_heads=32, channels=False, card="h200", implementation=None, backward=True, erase=True
):
    """Returns a row of 8,192 tokens, forward and backward, from its first state to its last one, with a decay for each
    head or each of its channels.
    """
    implementation = implementation or ("triton_channels" if channels else "triton_fused")
    seq = 8192
    of_tokens = lambda *more: array(1, seq, *more, dtype=jnp.bfloat16)
    v, numbers, state = of_tokens(v_heads, v_dim), array(1, seq, v_heads), array(1, v_heads, dim, v_dim)
    decay = array(1, seq, v_heads, dim) if channels else numbers

    def both(gradients, *given):
        options = dict(scale=dim**-0.5, implementation=implementation, erase=erase)
        run = lambda *x: kernels.delta_rule(*x[:-1], state=x[-1], **options)
        if not backward:
            return run(*given)
        out, gradient = jax.vjp(run, *given)
        return out, gradient(gradients)

    k, matrices = of_tokens(heads, dim), 2 * seq * v_heads * CHUNK  # bytes of one of [tokens, tokens] a chunk
    wide, v_wide = (1 << (width - 1).bit_length() for width in (dim, v_dim))
    states = 2 * v_heads * seq // CHUNK * wide * v_wide
    temporary = 2 * states + 4 * matrices + 5 * 2 * seq * v_heads * v_wide
    name = "delta_rule_channels_" if channels else "delta_rule_fused_" if erase else "delta_rule_fused_additive_"
    fused = tuple(name + kernel for kernel in FUSED)
    return Case(both, ((v, state), k, k, v, decay, numbers, state), fused, temporary, card)


def step(dim, v_dim, *, decays=1, erase=True, card="h200"):
    """Returns a step with one token in each of four rows, on a cache of two layers with three slots a row. No matrices
    are multiplied, and no array beside the cache is as large as a state.
    """
    heads, rows = 8, array(4, dtype=jnp.int32)
    cache = array(2, 4, 3, heads, dim, v_dim)
    of_token = lambda *more: array(4, 1, heads, *more)
    decay = of_token() if decays == 1 else of_token(decays)

    def one(cache, layer, before, after, *given):
        state = Slots(cache, layer, before, after)
        return delta_step_triton.delta_step(*given, jnp.zeros((4, 1), bool), state, scale=0.1, erase=erase)

    given = of_token(dim), of_token(dim), of_token(v_dim), decay, of_token()
    return Case(one, (cache, array(dtype=jnp.int32), rows, rows, *given), (), 1 << 16, card)


triton = functools.partial(scans, delta_rule_triton)
CASES = {
    "Qwen3-Next, one token": step(128, 128),
    "Kimi Linear, one token": step(128, 128, decays=128),
    "Nemotron-H, one token": step(128, 64, erase=False),
    "RTX 4090, one token": step(128, 128, card="4090"),
    "Qwen3-Next, packed": whole(4096, 2, 128),
    "Qwen3-Next, Kimi Linear": triton(128, 128),
    "Qwen3.5": row(128, 128),
    "B200, Qwen3.5": row(128, 128, card="b200"),
    "Qwen3.5, over the context": row(128, 256),
    "Olmo Hybrid": row(96, 192, heads=30, v_heads=30),
    "Nemotron 3 Nano": row(128, 64, heads=8, v_heads=64, erase=False),
    "Kimi Linear": row(128, 128, heads=32, channels=True),
    "B200, Kimi Linear": row(128, 128, heads=32, channels=True, card="b200"),
    "Kimi Linear, over the context": row(128, 256, heads=32, channels=True),
    "Nemotron-H": triton(128, 64, erase=False),
    "RTX 4090": triton(128, 128, card="4090"),
    "RTX 4090, D256": triton(256, 128, card="4090"),
    "RTX 4090, float32, D256": triton(256, 128, card="4090", precision=jax.lax.Precision.HIGHEST),
}


@needs_compiler
def test_gpu():
    """Only the kernels that XLA itself makes around ours may spill."""
    assert [complaint for complaint in complaints(__file__) if "fusion spills" not in complaint] == []


def program(case):
    """Returns the text of a case's compiled program, and the bytes that it moves."""
    mesh = mesh_of(case.card)
    on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        text = jax.jit(case.function).lower(*jax.tree.map(on_mesh, case.arguments)).compile().as_text()
    return text, sum(kernel.bytes * kernel.times for kernel in breakdown.kernels(text))


@needs_compiler
def test_bytes_of_the_fused_kernels():
    """Forward and backward of 8,192 tokens move at most these bytes. No large array is in float32, but decays of
    channels and their gradients, which only our kernels touch.
    """
    for name, most in {"Qwen3.5": 2.5e9, "Nemotron 3 Nano": 2.0e9, "Kimi Linear": 3.5e9}.items():
        text, moved = program(CASES[name])
        ours = [kernel.bytes for kernel in breakdown.kernels(text) if kernel.kind == breakdown.RECURRENCE]
        assert len(ours) == len(FUSED) and moved < most, (name, moved)
        large = {*re.findall(r"f32\[1,(?:8192,\d+|\d+,8192),(?:64|128)\]", text)}
        if name == "Kimi Linear":
            assert large == {"f32[1,8192,32,128]"} and moved - sum(ours) < 1e7
        else:
            assert not large


if __name__ == "__main__":
    models = {
        "Qwen3.5-35B-A3B": functools.partial(row, 128, 128),
        "Nemotron 3 Nano": functools.partial(row, 128, 64, heads=8, v_heads=64, erase=False),
        "Kimi Linear": functools.partial(row, 128, 128, heads=32, channels=True),
    }
    for model, name, backward in itertools.product(models, ("triton", None), (False, True)):
        text, moved = program(models[model](implementation=name, backward=backward))
        flops = sum(kernel.flops * kernel.times for kernel in breakdown.kernels(text))
        which = "forward and backward" if backward else "forward"
        print(f"{model}, {which}, {name or 'fused'}: {moved / 1e9:.2f} GB, {flops / 1e9:.0f} GFLOP")
