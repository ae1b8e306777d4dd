"""attention at models' shapes whose kernels are not free of spills on every TPU yet, so that no test holds them.

    python -m tests.kernels.tpu v6e attention_tpu_cases

On a v6e the forward kernel has 8 spill slots, whatever the size of its blocks, and that of dk and dv has one for heads
of 256 features. On a v5e there are none.
"""

import jax
import jax.numpy as jnp

from kernels import Causal, attention, sliding
from tests.kernels.tpu import Case


SEQ = 4096


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
    # In tiles of 128 features; the logits have SEQ * SEQ for each head.
    limit = max(2 * SEQ * SEQ, 4 * SEQ * heads * 128) + 1
    return Case(function, (q, k, v, sinks, of_heads(heads, v_dim or dim)), limit)


CASES = {
    "Llama 8B, forward": case(32, 8, 128, backward=False),
    "Llama 8B": case(32, 8, 128),
    "Gemma 3 27B, local": case(32, 16, 128, mask=sliding(1024)),
    "Gemma 3 27B, global": case(32, 16, 128),
    "Gemma 2 9B": case(16, 8, 256, softcap=50.0),
}
