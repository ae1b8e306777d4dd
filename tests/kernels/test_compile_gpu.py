"""The GPU's attention kernels at the shapes of real models, compiled for an H200: see tests/kernels/gpu.py.

The memory they may take is what they take, rounded up: a matrix of [seq, seq], or keys and values repeated for each
query head, would be more.
"""

import jax
import jax.numpy as jnp

import kernels
from kernels import Causal, Mask, sliding
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
    backward: tuple[str, ...] = (),
) -> Case:
    """One sequence, forward, and with kernels named in `backward` both ways."""
    v_dim = v_dim or dim
    q, k, v = array(1, seq, heads, dim), array(1, seq, kv_heads, dim), array(1, seq, kv_heads, v_dim)
    arguments = q, k, v, array(heads, dtype=jnp.float32) if sinks else None

    def forward(q, k, v, sinks):
        more = dict(scale=dim**-0.5, mask=mask, softcap=softcap, implementation="triton")
        return kernels.attention(q, k, v, sinks=sinks, **more)

    def both(d_out, *arguments):
        return jax.vjp(forward, *arguments)[1](d_out)

    function, arguments = (both, (array(1, seq, heads, v_dim), *arguments)) if backward else (forward, arguments)
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
) -> Case:
    """One token in each row. It is no matter of matrix products: 16 rows of each are of the older kind."""

    def function(q, k, v, positions, sinks):
        more = dict(scale=dim**-0.5, mask=mask, implementation="triton")
        return kernels.decode_attention(q, k, v, q_positions=positions, sinks=sinks, **more)

    cache, positions = array(batch, kv_seq, kv_heads, dim), array(batch, dtype=jnp.int32)
    sinks = array(heads, dtype=jnp.float32) if sinks else None
    return Case(function, (array(batch, heads, dim), cache, cache, positions, sinks), (), 2 * 10**6)


LLAMA_8B = dict(heads=32, kv_heads=8, dim=128)
GEMMA_3_27B = dict(heads=32, kv_heads=16, dim=128)
GEMMA_2_9B = dict(heads=16, kv_heads=8, dim=256, softcap=50.0)
DEEPSEEK_V3 = dict(heads=128, kv_heads=128, dim=192, v_dim=128, seq=4096)
GPT_OSS = dict(heads=64, kv_heads=8, dim=64, sinks=True)
BACKWARD, OF_WIDE_HEADS = ("attention_dkv", "attention_dq"), ("attention_dk", "attention_dv", "attention_dq")
CASES = {
    "Llama 3 8B, forward": attention(**LLAMA_8B, megabytes=175),
    "Llama 3 8B": attention(**LLAMA_8B, megabytes=245, backward=BACKWARD),
    "Gemma 3 27B, local": attention(**GEMMA_3_27B, megabytes=280, backward=BACKWARD, mask=sliding(1024)),
    "Gemma 3 27B, global": attention(**GEMMA_3_27B, megabytes=280, backward=BACKWARD),
    "Gemma 2 9B, global": attention(**GEMMA_2_9B, megabytes=280, backward=OF_WIDE_HEADS),
    "DeepSeek V3": attention(**DEEPSEEK_V3, megabytes=840, backward=BACKWARD),
    "gpt-oss, local": attention(**GPT_OSS, megabytes=230, backward=BACKWARD, mask=sliding(128)),
    "gpt-oss, global": attention(**GPT_OSS, megabytes=230, backward=BACKWARD),
    "Llama 3 8B, decode": decode(**LLAMA_8B),
    "gpt-oss, local, decode": decode(**GPT_OSS, mask=sliding(128)),
    "gpt-oss, global, decode": decode(**GPT_OSS),
}


@needs_compiler
def test_on_an_h200():
    assert complaints(__file__) == []
