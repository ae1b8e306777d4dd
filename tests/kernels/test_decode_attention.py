"""kernels.decode_attention: every implementation against a formula in float64 numpy, on caches of ragged length."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels import Causal, Chunk, Tokens, sliding
from tests.kernels.oracle import QUICK, SCALE, arrays, oracle


SINKS = np.array([1.0, -2.0, 5.0, -np.inf], np.float32)
DECODES = {
    "causal": (dict(seq=1, kv_seq=150, kv_heads=1), {}),
    "all": (dict(seq=1, kv_seq=200, v_dim=32), dict(mask=sliding(50), softcap=4.0, sinks=jnp.asarray(SINKS))),
    "chunks, of which one is empty yet": (dict(seq=1, kv_seq=90, kv_heads=4, dim=64), dict(mask=Causal() & Chunk(64))),
    "latents, wider than a register": (dict(seq=1, kv_seq=96, kv_heads=1, dim=160, v_dim=144, size=1), {}),
}


@pytest.mark.parametrize(
    "case, implementation",
    # The reference's decode is its attention, and test_attention_triton.py has more of Triton's.
    [("all", "reference"), ("all", "triton"), ("chunks, of which one is empty yet", "triton")]
    + [(case, "tpu") for case in DECODES],
)
def test_decode_of_a_ragged_cache(case, implementation):
    """One row is at its first position, another in the middle. Later slots hold garbage, which reaches nobody."""
    shapes, options = DECODES[case]
    *qkv, d_out = arrays(**shapes)
    positions = np.array([[0], [67]])
    later = np.arange(shapes["kv_seq"])[None] > positions
    expected, _ = oracle(*qkv, d_out, q_positions=positions, **options)
    q, k, v = qkv
    k[later], v[later] = np.nan, np.inf
    decode = functools.partial(kernels.decode_attention, scale=SCALE, implementation=implementation, **options)
    decode = jax.jit(decode, compiler_options=QUICK)
    out = decode(q[:, 0], k, v, Tokens(positions[:, 0]))
    assert np.linalg.norm(out - expected[:, 0]) < 1e-5 * np.linalg.norm(expected)
    v[1, 67] = np.nan  # which is seen now
    out = np.asarray(decode(q[:, 0], k, v, Tokens(positions[:, 0])))
    assert np.isnan(out[1]).all() and np.isfinite(out[0]).all()
