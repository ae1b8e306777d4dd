"""Products with matrices in few bits compile for an H200: they spill nothing, and read the matrices as they are."""

import jax
import jax.numpy as jnp
import numpy as np

from kernels.coded import TABLES, Code, Coded
from kernels.coded_matmul import triton
from kernels.stacked import Stacked
from tests.kernels.gpu import Case, complaints, needs_compiler


def case(code: Code, rows: int, groups: int, ins: int, outs: int, block: int, *, layers: int = 3, card="h200"):
    """Returns a case of a layer of a stack."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    four = code in TABLES
    values = array(jnp.uint8 if four else jnp.float8_e4m3fn, layers, groups, outs, ins // 2 if four else ins)
    kind = dict(mxfp4=jnp.uint8, float8=jnp.uint32).get(code, jnp.bfloat16)
    scale = array(kind, layers, groups, outs, ins // block)

    def function(x, values, scale, layer, sizes):
        stacked = Coded(Stacked(values, layer), Stacked(scale, layer), code, np.dtype(jnp.bfloat16))
        return triton.grouped(x, stacked, sizes)

    arguments = (array(jnp.bfloat16, rows, ins), values, scale, array(jnp.int32), array(jnp.int32, groups))
    return Case(
        function, arguments, (), temporary=rows * ins * 4 + (64 << 10), card=card
    )  # the rows by phases, and tiles


CASES = {
    "float8, Qwen3 8B": case("float8", 8, 1, 4096, 12288, 128),
    "float8, Qwen3 30B-A3B, 64 rows": case("float8", 512, 128, 2048, 1536, 128),
    "nf4, Qwen3 8B": case("nf4", 8, 1, 4096, 12288, 64),
    "nf4, 64 rows": case("nf4", 64, 1, 4096, 12288, 64),
    "int4, Kimi K2": case("int4", 64, 384, 7168, 2048, 32),
    "mxfp4, gpt-oss 20B": case("mxfp4", 32, 32, 2880, 5760, 32, layers=12),
    "mxfp4, 64 rows": case("mxfp4", 2048, 32, 2880, 2880, 32),
    "mxfp4, 32 rows, an RTX 4090": case("mxfp4", 1024, 32, 2880, 2880, 32, card="4090"),
    "mxfp4, 64 rows, an RTX 4090": case("mxfp4", 2048, 32, 2880, 2880, 32, card="4090"),
    "float8, 64 rows, an RTX 4090": case("float8", 64, 1, 4096, 12288, 128, card="4090"),
}


@needs_compiler
def test_gpu():
    assert not complaints(__file__)
