"""attention compiles for every TPU at real models' shapes: without spilling, and without logits or a mask in memory."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from kernels import Causal, Tokens, attention, sliding
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


SEQ = 8192  # more than any heads * features here, so that no other array is as large as a head's logits


def case(
    heads, kv_heads, dim, v_dim=None, *, mask=None, softcap=None, sinks=False, packed=False, backward=True, chips=()
):
    """Returns a case with one row: forward, and also backward by default.

    `packed` is the use in training: the row has documents with their own segments and positions. `chips` are the
    targets, by default all.

    Arrays are laid out by head, like the kernels'. XLA takes minutes to compile some transpositions, and a model's
    transpositions are not tested here.
    """
    options = dict(scale=dim**-0.5, mask=mask or Causal(), softcap=softcap, implementation="tpu")

    def function(q, k, v, sinks, positions, segments, d_out):
        at = Tokens(positions, segments)

        def by_head(q, k, v, sinks):
            q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
            return attention(q, k, v, at, sinks=sinks, **options).swapaxes(1, 2)

        out, gradient = jax.vjp(by_head, q, k, v, sinks)
        return (out, gradient(d_out)) if backward else out

    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    of_heads = lambda heads, dim: shape(1, heads, SEQ, dim)
    q, k, v = of_heads(heads, dim), of_heads(kv_heads, dim), of_heads(kv_heads, v_dim or dim)
    sinks = shape(heads, dtype=jnp.float32) if sinks else None
    ids = shape(1, SEQ, dtype=jnp.int32) if packed else None
    return Case(function, (q, k, v, sinks, ids, ids, of_heads(heads, v_dim or dim)), SEQ * SEQ, chips or tuple(CHIPS))


SHAPES = {
    "Llama 8B, forward": ((32, 8, 128), dict(backward=False)),
    "Llama 8B": ((32, 8, 128), {}),
    "Gemma 3 27B, local": ((32, 16, 128), dict(mask=sliding(1024))),
    "Gemma 3 27B, global": ((32, 16, 128), {}),
    "Gemma 2 9B": ((16, 8, 256), dict(softcap=50.0)),
    "DeepSeek V3": ((16, 16, 192, 128), {}),  # an eighth of its heads
    "gpt-oss, local": ((64, 8, 64), dict(mask=sliding(128), sinks=True)),
    "gpt-oss, global": ((64, 8, 64), dict(sinks=True)),
}
# Pairs: each shape as in training on each chip, and without documents on one of the chips in turn.
CASES = {f"{name}, packed": case(*dims, **options, packed=True) for name, (dims, options) in SHAPES.items()} | {
    name: case(*dims, **options, chips=(chip,))
    for chip, (name, (dims, options)) in zip(itertools.cycle(CHIPS), SHAPES.items(), strict=False)
}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
