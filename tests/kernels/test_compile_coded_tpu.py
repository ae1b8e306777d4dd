"""Products with matrices in few bits compile for every TPU without spilling, and read the matrices as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels.coded import TABLES, Code, Coded
from kernels.coded_matmul import tpu
from kernels.stacked import Stacked
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


def case(code: Code, rows: int, groups: int, ins: int, outs: int, block: int):
    """Returns a case of a layer of a stack, in which no array is as large as its matrices in floats."""
    array = lambda dtype, *shape: jax.ShapeDtypeStruct(shape, dtype)
    four = code in TABLES
    values = array(jnp.uint8 if four else jnp.float8_e4m3fn, 3, groups, outs, ins // 2 if four else ins)
    kind = dict(mxfp4=jnp.uint8, float8=jnp.uint32).get(code, jnp.bfloat16)

    def function(x, values, scale, layer, sizes):
        stacked = Coded(Stacked(values, layer), Stacked(scale, layer), code, np.dtype(jnp.bfloat16))
        return tpu.grouped(x, stacked, sizes)

    scale, layer = array(kind, 3, groups, outs, ins // block), array(jnp.int32)
    arguments = (array(jnp.bfloat16, rows, ins), values, scale, layer, array(jnp.int32, groups))
    return Case(function, arguments, 3 * groups * outs * ins + 1)


CASES = {
    "coded, float8, Qwen3 8B": case("float8", 8, 1, 4096, 12288, 128),
    "coded, nf4, Qwen3 8B": case("nf4", 64, 1, 4096, 12288, 64),
    "coded, mxfp4, gpt-oss 20B up": case("mxfp4", 32, 32, 2880, 5760, 32),
    "coded, mxfp4, gpt-oss 20B down": case("mxfp4", 32, 32, 2880, 2880, 32),
    "coded, int4, Kimi K2": case("int4", 64, 16, 7168, 2048, 32),
}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
