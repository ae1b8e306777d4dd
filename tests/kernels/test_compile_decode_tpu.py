"""decode_attention compiles for every TPU: without spilling, and without a copy of the cache."""

import jax
import jax.numpy as jnp
import pytest

from kernels import Causal, Stacked, Tokens, decode_attention, decode_attention_tpu, sliding
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


def case(batch, heads, kv_heads, slots, dim, mask, v_dim=None, sinks=False, queries=1):
    """The second layer of a cache of three; with `v_dim` its values are so many of the first features of its keys."""

    def function(q, k, v, positions, sinks):
        options = dict(scale=dim**-0.5, mask=mask, sinks=sinks, implementation="tpu")
        of_layer = lambda x: Stacked(x.reshape(3, batch, slots, kv_heads, dim), jnp.array(1))
        return decode_attention(q, of_layer(k), v_dim or of_layer(v), Tokens(positions), **options)

    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    cache = shape(3, batch, slots, *([] if v_dim else [kv_heads]), dim)  # latents have no heads
    positions, sinks = shape(batch, queries, dtype=jnp.int32), shape(heads, dtype=jnp.float32) if sinks else None
    most = 3 * batch * slots * kv_heads * dim + 1  # no logits of all heads, and nothing of the cache in a wider dtype
    q = shape(batch, queries, heads, dim)
    return Case(function, (q, cache, None if v_dim else cache, positions, sinks), most)


CASES = {
    "decode, Llama 8B": case(16, 32, 8, 8192, 128, Causal()),
    "decode, Gemma 3 27B, local": case(16, 32, 16, 1024, 128, sliding(1024)),
    "decode, sinks": case(16, 32, 4, 4096, 128, Causal(), sinks=True),
    "decode, DeepSeek V3": case(8, 128, 1, 8192, 576, Causal(), v_dim=512),
    "decode, Llama 8B, 5 queries": case(16, 32, 8, 8192, 128, Causal(), queries=5),
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
