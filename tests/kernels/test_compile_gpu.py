"""The GPU's attention kernels at the shapes of real models, compiled for an H200: see tests/kernels/gpu.py.

The memory limits are the present use, rounded up: a matrix of [seq, seq], or keys and values repeated for each query
head, would exceed them.
"""

from typing import Any

import jax
import jax.numpy as jnp

import kernels
from kernels import Causal, Mask, Spans, Stacked, Tokens, sliding
from tests.kernels.gpu import Case, complaints, needs_compiler


def array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def attention(
    *,
    megabytes: int,
    heads: int,
    kv_heads: int,
    dim: int,
    v_dim: int | None = None,
    seq: int = 8192,
    mask: Mask = Causal(),  # noqa: B008 (a value)
    softcap: float | None = None,
    sinks: bool = False,
    packed: bool = False,
    images: bool = False,
    backward: tuple[str, ...] = (),
) -> Case:
    """Returns a case with two sequences: forward, or also backward if `backward` names kernels.

    `packed` is the use in training: each sequence has documents with their own segments and positions. `images` adds
    spans.
    """
    v_dim = v_dim or dim
    q, k, v = array(2, seq, heads, dim), array(2, seq, kv_heads, dim), array(2, seq, kv_heads, v_dim)
    ids = array(2, seq, dtype=jnp.int32) if packed else None
    arguments = q, k, v, array(heads, dtype=jnp.float32) if sinks else None, ids, ids

    def forward(q, k, v, sinks, positions, segments):
        more = dict(scale=dim**-0.5, mask=mask, softcap=softcap, implementation="triton")
        at = Tokens(positions, segments, segments if images else None)
        return kernels.attention(q, k, v, at, sinks=sinks, **more)

    def both(d_out, q, k, v, sinks, *ids):
        return jax.vjp(lambda *inputs: forward(*inputs, *ids), q, k, v, sinks)[1](d_out)

    function, arguments = (both, (array(2, seq, heads, v_dim), *arguments)) if backward else (forward, arguments)
    return Case(function, arguments, ("attention_forward", *backward), megabytes * 10**6)


def decode(
    *,
    heads: int,
    kv_heads: int,
    dim: int,
    batch: int = 32,
    kv_seq: int = 8192,
    mask: Mask = Causal(),  # noqa: B008 (a value)
    sinks: bool = False,
    v_dim: int | None = None,
    queries: int = 1,
    int8: bool = False,
    megabytes: int = 2,
) -> Case:
    """Returns a case with one token or a few in each row, on the second layer of a three-layer cache that is not
    copied.

    With `v_dim` the values are the first `v_dim` features of the keys. Matrix instructions do not matter: for 16 rows
    they are of the older kind.
    """

    def function(q, k, v, positions, sinks):
        more = dict(scale=dim**-0.5, mask=mask, implementation="triton")
        of_layer = lambda x: Stacked(x[0], jnp.array(1), x[1], parts, q.dtype) if int8 else Stacked(x, jnp.array(1))
        return kernels.decode_attention(q, of_layer(k), v_dim or of_layer(v), Tokens(positions), sinks=sinks, **more)

    of_cache, parts = (3, batch, kv_seq, kv_heads), (v_dim, dim - v_dim) if v_dim else (dim,)
    cache, positions = array(*of_cache, dim), array(batch, queries, dtype=jnp.int32)
    if int8:
        cache = array(*of_cache, dim, dtype=jnp.int8), array(*of_cache[:3], kv_heads * len(parts), dtype=jnp.float32)
    arguments = (array(batch, queries, heads, dim), cache, None if v_dim else cache, positions)
    return Case(function, (*arguments, array(heads, dtype=jnp.float32) if sinks else None), (), megabytes * 10**6)


LLAMA_8B: dict[str, Any] = dict(heads=32, kv_heads=8, dim=128)
GEMMA_3_27B = dict(heads=32, kv_heads=16, dim=128)
GEMMA_2_9B = dict(heads=16, kv_heads=8, dim=256, softcap=50.0)
DEEPSEEK_V3 = dict(heads=128, kv_heads=128, dim=192, v_dim=128, seq=4096)
GPT_OSS: dict[str, Any] = dict(heads=64, kv_heads=8, dim=64, sinks=True)
BACKWARD, OF_WIDE_HEADS = ("attention_dkv", "attention_dq"), ("attention_dk", "attention_dv", "attention_dq")
ATTENTION = {
    "Llama 3 8B, forward": dict(**LLAMA_8B, megabytes=350),
    "Llama 3 8B": dict(**LLAMA_8B, megabytes=490, backward=BACKWARD),
    "Gemma 3 27B, local": dict(**GEMMA_3_27B, megabytes=560, backward=BACKWARD, mask=sliding(1024)),
    "Gemma 3 27B, global": dict(**GEMMA_3_27B, megabytes=560, backward=BACKWARD),
    "Gemma 3 27B, local, images": dict(**GEMMA_3_27B, megabytes=420, mask=sliding(1024) | Spans(), images=True),
    "Gemma 2 9B, global": dict(**GEMMA_2_9B, megabytes=560, backward=OF_WIDE_HEADS),
    "DeepSeek V3": dict(**DEEPSEEK_V3, megabytes=1680, backward=BACKWARD),
    "gpt-oss, local": dict(**GPT_OSS, megabytes=460, backward=BACKWARD, mask=sliding(128)),
    "gpt-oss, global": dict(**GPT_OSS, megabytes=460, backward=BACKWARD),
}
# All shapes as in training. Without documents: one of each kind of mask, of heads and of logits.
ALONE = ("Llama 3 8B, forward", "Llama 3 8B", "Gemma 2 9B, global", "DeepSeek V3", "gpt-oss, local")
CASES = {
    **{name: attention(**ATTENTION[name]) for name in ALONE},
    **{f"{name}, packed": attention(**shapes, packed=True) for name, shapes in ATTENTION.items()},
    "Llama 3 8B, decode": decode(**LLAMA_8B),
    "gpt-oss, local, decode": decode(**GPT_OSS, mask=sliding(128)),
    "gpt-oss, global, decode": decode(**GPT_OSS),
    "DeepSeek V3, decode": decode(heads=128, kv_heads=1, dim=576, v_dim=512, megabytes=32),
    "Llama 3 8B, decode, int8": decode(**LLAMA_8B, int8=True),
    "DeepSeek V3, decode, int8": decode(heads=128, kv_heads=1, dim=576, v_dim=512, int8=True, megabytes=32),
    "gpt-oss, decode, int8, 8 queries": decode(**GPT_OSS, queries=8, int8=True, megabytes=9),
    "Llama 3 8B, decode, 16 queries": decode(**LLAMA_8B, queries=16, megabytes=18),
    "gpt-oss, decode, 8 queries": decode(**GPT_OSS, queries=8, megabytes=9),
    "Gemma 2 9B, decode, 16 queries": decode(heads=16, kv_heads=8, dim=256, queries=16, megabytes=26),
}


@needs_compiler
def test_on_an_h200():
    assert complaints(__file__) == []
