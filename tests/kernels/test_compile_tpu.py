"""attention compiles for every TPU at real models' shapes: without spilling, and without logits or a mask in memory."""

import jax
import jax.numpy as jnp
import pytest

from kernels import Causal, attention, sliding
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


SEQ = 8192  # more than any of these has heads * features, so that no other array is as large as the logits of a head


def case(heads, kv_heads, dim, v_dim=None, *, mask=None, softcap=None, sinks=False, backward=True):
    """Forward, and backward too, of one row.

    Arrays come and go by head, as the kernels have them. XLA compiles some transpositions for minutes, and a model's
    are its own affair.
    """
    options = dict(scale=dim**-0.5, mask=mask or Causal(), softcap=softcap, implementation="tpu")

    def by_head(q, k, v, sinks):
        q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
        return attention(q, k, v, sinks=sinks, **options).swapaxes(1, 2)

    def function(q, k, v, sinks, d_out):
        out, gradient = jax.vjp(by_head, q, k, v, sinks)
        return (out, gradient(d_out)) if backward else out

    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    of_heads = lambda heads, dim: shape(1, heads, SEQ, dim)
    q, k, v = of_heads(heads, dim), of_heads(kv_heads, dim), of_heads(kv_heads, v_dim or dim)
    sinks = shape(heads, dtype=jnp.float32) if sinks else None
    return Case(function, (q, k, v, sinks, of_heads(heads, v_dim or dim)), SEQ * SEQ)


CASES = {
    "Llama 8B, forward": case(32, 8, 128, backward=False),
    "Llama 8B": case(32, 8, 128),
    "Gemma 3 27B, local": case(32, 16, 128, mask=sliding(1024)),
    "Gemma 3 27B, global": case(32, 16, 128),
    "Gemma 2 9B": case(16, 8, 256, softcap=50.0),
    "DeepSeek V3": case(16, 16, 192, 128),  # an eighth of its heads
    "gpt-oss, local": case(64, 8, 64, mask=sliding(128), sinks=True),
    "gpt-oss, global": case(64, 8, 64, sinks=True),
}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
