"""decode_attention compiles for every TPU: without spilling, and without a copy of the cache."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from kernels import Causal, Stacked, Tokens, decode_attention, sliding
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


def case(
    batch, heads, kv_heads, slots, dim, mask, v_dim=None, sinks=False, queries=1, int8=False, implementation="tpu"
):
    """Returns a case on the second layer of a cache of three. Values are the keys' first `v_dim` features, if given."""
    parts = () if not int8 else (v_dim, dim - v_dim) if v_dim else (dim,)

    def function(q, k, v, positions, sinks):
        options: Any = dict(scale=dim**-0.5, mask=mask, sinks=sinks, implementation=implementation)
        vectors = lambda x: x.reshape(3, batch, slots, kv_heads, dim)
        numbers = lambda x: Stacked(vectors(x[0]), jnp.array(1), x[1], parts, q.dtype)
        of_layer = numbers if int8 else lambda x: Stacked(vectors(x), jnp.array(1))
        return decode_attention(q, of_layer(k), v_dim or of_layer(v), Tokens(positions), **options)

    shape = lambda *dims, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(dims, dtype)
    of_vectors = (3, batch, slots, *([] if v_dim else [kv_heads]))  # latents have no heads
    cache = shape(*of_vectors, dim, dtype=jnp.int8 if int8 else jnp.bfloat16)
    if int8:
        cache = cache, shape(3, batch, slots, kv_heads * len(parts), dtype=jnp.float32)
    positions, sinks = shape(batch, queries, dtype=jnp.int32), shape(heads, dtype=jnp.float32) if sinks else None
    most = 3 * batch * slots * kv_heads * dim + 1  # neither all heads' logits, nor a part of the cache in a wider dtype
    q = shape(batch, queries, heads, dim)
    of_layer = most // 3 * (1 if int8 else 2)
    return Case(function, (q, cache, None if v_dim else cache, positions, sinks), most, temporary=of_layer)


by_head = functools.partial(case, implementation="tpu_heads")
CASES = {
    "decode, Llama 8B": case(16, 32, 8, 8192, 128, Causal()),
    "decode, Gemma 3 27B, local": case(16, 32, 16, 1024, 128, sliding(1024)),
    "decode, sinks": case(16, 32, 4, 4096, 128, Causal(), sinks=True),
    "decode, Gemma 3 4B": case(16, 8, 4, 8192, 256, Causal()),
    "decode, Qwen3.5, 2 heads of 256": case(16, 16, 2, 8192, 256, Causal()),
    "decode, Llama 8B, int8": case(16, 32, 8, 8192, 128, Causal(), int8=True),
    "decode, Gemma 3 4B, int8": case(16, 8, 4, 8192, 256, Causal(), int8=True),
    "decode, Gemma 3 12B, int8": case(16, 16, 8, 8192, 256, Causal(), int8=True),
    "decode, Llama 8B, 5 queries": case(16, 32, 8, 8192, 128, Causal(), queries=5),
    "columns, gpt-oss, local": by_head(16, 64, 8, 128, 64, sliding(128), sinks=True),
    "columns, gpt-oss": by_head(16, 64, 8, 8192, 64, Causal(), sinks=True),
    "columns, gpt-oss, int8": by_head(16, 64, 8, 8192, 64, Causal(), sinks=True, int8=True),
    "columns, Llama 1B, 5 queries": by_head(16, 32, 8, 8192, 64, Causal(), queries=5),
    "columns, Phi-2, 32 heads of 80": by_head(16, 32, 32, 2048, 80, Causal()),
    "by head, Phi-4, 10 heads of 128": by_head(16, 40, 10, 8192, 128, Causal()),
    "by head, OLMo Hybrid, 5 queries": by_head(16, 30, 30, 8192, 128, Causal(), queries=5),
    "by head, Gemma 3 1B, int8": by_head(16, 4, 1, 8192, 256, Causal(), int8=True),
    "by head, Qwen2.5 3B, int8": by_head(16, 16, 2, 8192, 128, Causal(), int8=True),
    "columns, DeepSeek V3": by_head(8, 128, 1, 8192, 576, Causal(), v_dim=512),
    "columns, DeepSeek V3, int8": by_head(8, 128, 1, 8192, 576, Causal(), v_dim=512, int8=True),
}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
