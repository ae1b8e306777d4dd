"""The Mosaic GPU kernels at the shapes of real models, compiled for an H200 without a GPU.

XLA does not report on these kernels. Mosaic GPU writes reports itself if environment variables ask for them.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from kernels import sliding
from kernels.attention import mosaic as attention_mosaic
from kernels.masks import Segments
from kernels.ragged_dot import mosaic as ragged_dot_mosaic
from kernels.tokens import Tokens
from tests.kernels import gpu


CAUSAL = sliding(None)
FORWARD, BACKWARD = {"attention_forward"}, {"attention_forward", "attention_dkv", "attention_dq"}
RAGGED_DOT = {"ragged_dot_out", "ragged_dot_dx", "ragged_dot_dw"}


def attention(*, heads, kv_heads, dim, v_dim=None, seq=8192, mask=CAUSAL, softcap=None, gradients=False, packed=False):
    """Returns a function and its arguments: forward, or also backward, of one sequence or of packed documents."""
    array = lambda heads, dim: jax.ShapeDtypeStruct((1, seq, heads, dim), jnp.bfloat16)
    v_dim = v_dim or dim
    indices = np.arange(seq, dtype=np.int32)[None]

    def forward(q, k, v, *segments):
        tokens = Tokens(indices, *segments)
        options = dict(scale=dim**-0.5, mask=mask & Segments() if packed else mask, softcap=softcap, sinks=None)
        options |= dict(q_tokens=tokens, kv_tokens=tokens)
        assert attention_mosaic.refusal(q, k, v, **options) is None
        return attention_mosaic.attention(q, k, v, **options)

    arguments = array(heads, dim), array(kv_heads, dim), array(kv_heads, v_dim)
    segments = (jax.ShapeDtypeStruct((1, seq), jnp.int32),) if packed else ()
    if not gradients:
        return forward, (*arguments, *segments), FORWARD
    both = lambda q, k, v, d_out, *segments: jax.vjp(lambda *x: forward(*x, *segments), q, k, v)[1](d_out)
    return both, (*arguments, array(heads, v_dim), *segments), BACKWARD


def ragged_dot(*, tokens, groups, out, in_):
    """Returns a function and its arguments: forward and backward."""
    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)

    def gradients(x, w, sizes, d_out):
        assert ragged_dot_mosaic.refusal(x, w, sizes) is None
        out, vjp = jax.vjp(lambda x, w: ragged_dot_mosaic.ragged_dot(x, w, sizes), x, w)
        return out, vjp(d_out)

    sizes = jax.ShapeDtypeStruct((groups,), jnp.int32)
    return gradients, (array(tokens, in_), array(groups, out, in_), sizes, array(tokens, out)), RAGGED_DOT


CASES = {
    "Llama 3 8B": attention(heads=32, kv_heads=8, dim=128),
    "Gemma 3 27B local": attention(heads=32, kv_heads=16, dim=128, mask=sliding(1024)),
    "Gemma 3 12B": attention(heads=16, kv_heads=8, dim=256, gradients=True, packed=True),
    "Gemma 2 9B": attention(heads=16, kv_heads=8, dim=256, softcap=50.0, gradients=True),
    "DeepSeek V3": attention(heads=128, kv_heads=128, dim=192, v_dim=128, seq=4096, gradients=True, packed=True),
    "Mixtral 8x7B": ragged_dot(tokens=16384, groups=8, out=14336, in_=4096),
    "Qwen3 30B A3B": ragged_dot(tokens=65536, groups=128, out=2048, in_=768),
}


@gpu.needs_compiler
@pytest.mark.parametrize("case", CASES)
def test_no_register_is_spilled_and_all_products_are_hoppers(case, tmp_path, monkeypatch):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    monkeypatch.setenv("MOSAIC_GPU_DUMP_PTX", "1")
    function, arguments, expected = CASES[case]
    mesh = gpu.mesh_of("h200")
    on_mesh = lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        jax.jit(function).lower(*jax.tree.map(on_mesh, arguments)).compile()

    name = lambda file: re.match(r"(\w+)_\d+\.", file.name)[1]  # the numbers depend on the writer, so they differ
    kernels = {name(file): next(iter(gpu.kernels_of(file, "9.0").values())) for file in tmp_path.glob("*.ptx")}
    for file in tmp_path.glob("*.resources.txt"):
        kernels[name(file)]["shared"] = int(re.search(r"smem_scratch_bytes=(\d+)", file.read_text())[1])
    print(case, kernels)
    assert kernels.keys() == expected
    for found in kernels.values():
        assert not found["spilled"] and not found["serialized"] and found["HGMMA"] and not found["HMMA"]
        assert 0 < found["shared"] <= 227 * 1024
