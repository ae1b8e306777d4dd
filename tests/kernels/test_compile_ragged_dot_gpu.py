"""The GPU's ragged_dot, compiled for an H200 at the shapes of real models, multiplies by wgmma and spills nothing."""

import functools

import jax
import jax.numpy as jnp

from kernels.ragged_dot import triton
from kernels.sort_rows import triton as sort_rows
from kernels.top_k import triton as top_k
from tests.kernels.experts import DECODE, EXPERTS, Product, fixed_matrices, training
from tests.kernels.gpu import Case, complaints, needs_compiler


OUT, DX, DW = "ragged_dot_out", "ragged_dot_dx", "ragged_dot_dw"


def case(product, *hgmma, step=training, w_dtype=jnp.bfloat16):
    """Returns a case whose limit of temporary memory has room for the schedule of tiles, but not for features."""
    return Case(step(triton.ragged_dot), product.arguments(w_dtype), hgmma, temporary=64 << 10)


def rounded(product, dtype):
    """Returns a case of the output for two sides in 8 bits."""
    x, w, sizes, _ = product.arguments(dtype)
    return Case(triton.ragged_dot, (x.update(dtype=dtype), w, sizes), (OUT,), temporary=64 << 10)


def sorted_rows(product, choices=8):
    """Returns a case of the rows that the product multiplies, of which each token chooses some groups."""
    array, tokens = jax.ShapeDtypeStruct, product.tokens // choices
    sort = lambda x, chosen: sort_rows.sort_rows(x, chosen, product.groups)
    given = array((tokens, product.ins), jnp.bfloat16), array((tokens, choices), jnp.int32)
    return Case(sort, given, (), temporary=1 << 10)


def best(options, k, dtype=jnp.float32, *, bias=False, score=None, groups=1, kept=1, normalise=1e-20):
    """Returns a case of a router's choice for 8 tokens."""
    find = functools.partial(top_k.top_k, k=k, score=score, groups=groups, kept=kept, normalise=normalise)
    logits, of_options = jax.ShapeDtypeStruct((8, 1, options), dtype), jax.ShapeDtypeStruct((options,), jnp.float32)
    return Case(find, (logits, of_options if bias else None), (), temporary=1 << 10)


CASES = {f"ragged_dot {name}": case(product, OUT, DX, DW) for name, product in EXPERTS.items()} | {
    "ragged_dot int8": case(EXPERTS["Qwen3 30B-A3B up"], OUT, DX, step=fixed_matrices, w_dtype=jnp.int8),
    "ragged_dot int8 by int8": rounded(EXPERTS["Qwen3 30B-A3B up"], jnp.int8),
    "ragged_dot fp8 by fp8": rounded(EXPERTS["Qwen3 30B-A3B up"], jnp.float8_e4m3fn),
    "ragged_dot decode": case(DECODE, DW),  # tiles of 16 rows are too small for HGMMA
    "ragged_dot decode, many experts": case(Product(512, 250, 2048, 512), DW),
    "sort_rows": sorted_rows(Product(128, 64, 2048, 768)),
    "sort_rows, many experts": sorted_rows(Product(512, 250, 2048, 512), choices=10),
    "sort_rows, one row": sorted_rows(Product(512, 10, 2048, 512), choices=10),
    "top_k, Qwen3 30B-A3B": best(128, 8, jnp.bfloat16, score="softmax"),
    "top_k, gpt-oss 20B": best(32, 4, jnp.bfloat16),
    "top_k, DeepSeek V3": best(256, 8, bias=True, score="sigmoid", groups=8, kept=4),
    "top_k, Kimi K2": best(384, 8, bias=True, score="sigmoid"),
    "top_k, as many options as one kernel takes": best(1024, 32, bias=True, score="softmax", groups=32, kept=16),
}


@needs_compiler
def test_gpu():
    assert not complaints(__file__)
