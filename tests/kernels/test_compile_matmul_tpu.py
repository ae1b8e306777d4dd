"""The quantised matrix products compile for every TPU without spilling, and do not grow."""

import jax
import jax.numpy as jnp
import pytest

from kernels.quantized_matmul import tpu
from kernels.quantized_matmul.shared import Formula
from tests.kernels.tpu import CHIPS, Case, complaints, needs_libtpu


def case(dtype, granularity, rows, ins, outs, *, activations):
    """Returns a case of a product with an already quantised matrix."""
    formula = Formula(dtype, granularity, activations, "float")
    shapes = {"tensor": (), "channel": (outs,), "block": (-(-outs // 128), -(-ins // 128))}
    arrays = [((rows, ins), jnp.bfloat16), ((outs, ins), dtype), (shapes[granularity], jnp.float32)]
    function = lambda x, w, scale: tpu.quantized_matmul(x, w, scale, formula=formula)
    return Case(function, tuple(jax.ShapeDtypeStruct(*a) for a in arrays), limit(rows, ins, outs))


def limit(rows, ins, outs):
    """Returns the limit of an array's elements. XLA may cut arrays into pieces of 128 so that they double."""
    return 1 + 2 * max(rows * ins, rows * outs, ins * outs)


FP8 = jnp.float8_e4m3fn
CASES = {
    "matmul int8, channel": case(jnp.int8, "channel", 4096, 4096, 14336, activations=True),
    "matmul int8, block": case(jnp.int8, "block", 4096, 7168, 4096, activations=True),
    "matmul fp8, tensor": case(FP8, "tensor", 4096, 4096, 4096, activations=True),
    "matmul fp8, block": case(FP8, "block", 4096, 4096, 2048, activations=True),
    "matmul int8, channel, weights only, decode": case(jnp.int8, "channel", 16, 4096, 14336, activations=False),
    "matmul int8, block, weights only, edges": case(jnp.int8, "block", 100, 2880, 2880, activations=False),
    "matmul fp8, block, weights only": case(FP8, "block", 4096, 4096, 4096, activations=False),
}


@needs_libtpu
@pytest.mark.parametrize("chip", CHIPS)
def test_tpu(chip):
    assert not complaints(chip, __file__)
