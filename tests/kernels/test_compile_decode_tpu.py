"""decode_attention compiles for every TPU: without spilling, and without a copy of the cache."""

import jax
import jax.numpy as jnp
import pytest

from kernels import Causal, Tokens, decode_attention, decode_attention_tpu, sliding
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


def case(batch, heads, kv_heads, slots, dim, mask, v_dim=None, sinks=False):
    def function(q, k, v, positions, sinks):
        options = dict(scale=dim**-0.5, mask=mask, sinks=sinks, implementation="tpu")
        return decode_attention(q, k, v, Tokens(positions), **options)

    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    cache = lambda dim: shape(batch, slots, kv_heads, dim)
    positions, sinks = shape(batch, dtype=jnp.int32), shape(heads, dtype=jnp.float32) if sinks else None
    most = batch * slots * kv_heads * dim + 1  # no logits of all heads, and nothing of the cache in a wider dtype
    return Case(function, (shape(batch, heads, dim), cache(dim), cache(v_dim or dim), positions, sinks), most)


CASES = {
    "decode, Llama 8B": case(16, 32, 8, 8192, 128, Causal()),
    "decode, Gemma 3 27B, local": case(16, 32, 16, 1024, 128, sliding(1024)),
    "decode, sinks": case(16, 32, 4, 4096, 128, Causal(), sinks=True),
    "decode, DeepSeek V3": case(8, 128, 1, 8192, 576, Causal(), v_dim=512),
}


def test_a_cache_that_would_be_copied_is_refused():
    """Which these would be, as the compiler says: 268 MB of temporary memory for gpt-oss, in place of 50 kB."""
    flat = decode_attention_tpu._lies_flat
    assert flat(8, 128, 128) and flat(4, 128, 128) and flat(16, 256, 256) and flat(1, 576, 512)
    assert not flat(8, 64, 64) and not flat(12, 128, 128) and not flat(4, 256, 256)


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
