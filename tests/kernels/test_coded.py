"""Products with matrices in few bits: every implementation against float64 numpy, with weights read bit by bit."""

from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kernels
from kernels import Coded, Stacked
from kernels.coded import TABLES
from kernels.coded_matmul import tpu
from tests.close import close


QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all of this file's time
# Of each format: the blocks of a row, and the columns in one. Triton loads words of 32 bits, but bytes for nf4 here. A
# TPU has the four groups' scales together, but for int4.
SHAPES = {"float8": (3, 128), "mxfp4": (3, 32), "nvfp4": (6, 16), "int4": (8, 32), "nf4": (3, 4)}
SIZES = np.array([4, 0, 3, 2], np.int32)  # of 11 rows, two of which have no group


def coded(code, dtype: Any = np.float32, groups=4, out=70):
    """Returns matrices in the second layer of a stack, and what they stand for in float64.

    "nvfp4" is the code of MXFP4 with float32 scales.
    """
    rng, (blocks, width), format = np.random.default_rng(0), SHAPES[code], code
    code = "mxfp4" if format == "nvfp4" else code
    shape = 2, groups, out, blocks * width
    if code == "float8":
        values = rng.normal(size=shape).astype(ml_dtypes.float8_e4m3fn)
        numbers, scale = values.astype(np.float64), rng.uniform(0.5, 1, (*shape[:3], blocks)).astype(np.float32)
    else:
        values = rng.integers(0, 256, (*shape[:3], shape[3] // 2)).astype(np.uint8)
        numbers = TABLES[code].astype(np.float64)[np.stack([values >> 4, values & 15], axis=-1).reshape(shape)]
        scale = rng.uniform(0.5, 1, (*shape[:3], blocks)).astype(np.float32 if format == "nvfp4" else dtype)
    factors = scale.astype(np.float64)
    scale = scale.view(np.uint32) if format in ("float8", "nvfp4") else scale
    if format == "mxfp4":
        scale = rng.integers(120, 128, scale.shape).astype(np.uint8)
        factors = 2.0 ** (scale - 127.0)
    weights = (numbers * factors.repeat(width, axis=-1)).astype(np.float32).astype(dtype).astype(np.float64)
    layer = lambda a: Stacked(jnp.asarray(a), jnp.int32(1))
    return Coded(layer(values), layer(scale), code, np.dtype(dtype)), weights[1]


@pytest.mark.parametrize(
    "implementation, code",
    [
        pytest.param(implementation, code, marks=() if code in ("mxfp4", "nf4") else pytest.mark.thorough)
        for implementation in ("reference", "xla", "triton", "tpu")
        for code in SHAPES
        if code != "nvfp4" or implementation in ("triton", "tpu")
    ],
)
def test_groups(implementation, code, monkeypatch):
    """Each row is multiplied by its group's matrix, a layer of a stack; its gradient is that of the weights."""
    monkeypatch.setattr(tpu, "STRIP", 16)  # several in a block, as on a TPU
    w, weights = coded(code)
    random = np.random.default_rng(1)
    x, d_out = (random.normal(size=(11, n)).astype(np.float32) for n in (weights.shape[2], weights.shape[1]))

    @jax.jit
    def both(x, w, d_out):
        out, gradient = jax.vjp(
            lambda x: kernels.ragged_dot(x, w, jnp.asarray(SIZES), implementation=implementation), x
        )
        return out, *gradient(d_out)

    out, dx = both.lower(x, w, d_out).compile(QUICK)(x, w, d_out)
    group = np.repeat(np.arange(4), SIZES)
    want = np.einsum("ti,toi->to", x[:9], weights[group]), np.einsum("to,toi->ti", d_out[:9], weights[group])
    for got, one in zip((out, dx), want, strict=True):
        assert not np.any(got[9:])
        close(got[:9], one, terms=200)


@pytest.mark.thorough
@pytest.mark.parametrize("code", ["float8", "mxfp4"])
@pytest.mark.parametrize("implementation", ["reference", "triton", "tpu"])
def test_one_matrix_in_bfloat16(implementation, code):
    """Weights are rounded to bfloat16 before they are multiplied, as if they had been read so."""
    w, weights = coded(code, ml_dtypes.bfloat16, groups=1)
    alone = lambda a: Stacked(a.stack[:, 0], a.layer)
    w = Coded(alone(w.values), alone(w.scale), code, w.dtype)
    np.testing.assert_array_equal(np.asarray(jax.jit(w.read)(), np.float64), weights[0])
    x = np.random.default_rng(1).normal(size=(2, 3, w.shape[1])).astype(ml_dtypes.bfloat16)
    product = jax.jit(lambda x, w: kernels.coded_matmul(x, w, implementation=implementation))
    out = product.lower(x, w).compile(QUICK)(x, w)
    want = x.astype(np.float64) @ weights[0].T
    close(out, want, terms=3)


def test_refusals():
    w, _ = coded("nf4", groups=1)
    w = Coded(w.values.read()[0], w.scale.read()[0], w.code, w.dtype)
    with pytest.raises(ValueError, match="w is rounded to float32, and x is bfloat16"):
        kernels.coded_matmul(jnp.ones((2, 12), jnp.bfloat16), w)
    with pytest.raises(ValueError, match=r"have 8 features, and w, \(out, in\), takes 12"):
        kernels.coded_matmul(jnp.ones((2, 8)), w)
    with pytest.raises(ValueError, match="it takes up to 64 rows for a matrix, and x has 65 for 1"):
        kernels.coded_matmul(jnp.ones((65, 12)), w, implementation="triton")
