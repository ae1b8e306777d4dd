"""The Mosaic GPU kernels' numbers, interpreted on a CPU, with barriers, copies and warpgroups; and on a Hopper GPU.

JAX's interpreter supports neither products whose left side is in registers, nor stores into a product's sum. Here both
are done at once, as reads and writes of plain arrays. So the interpreter never meets a product that is still running.

    python -m tests.kernels.test_mosaic    # on a Hopper GPU, without the interpreter; a test does so if there is one
"""

import functools
import os
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import Causal, Chunk, Full, Spans, Window, dispatch
from kernels.attention import mosaic as attention_mosaic
from kernels.attention import xla
from kernels.attention.shared import Formula
from kernels.backends import blocks, mosaic
from kernels.backends.device import Device
from kernels.masks import Segments
from kernels.ragged_dot import mosaic as ragged_dot_mosaic
from kernels.ragged_dot import reference
from kernels.tokens import Tokens
from tests.close import close
from tests.kernels import oracle


ATTENTION = {
    "causal, shared heads": dict(mask=Causal(), kv_heads=1),
    "window, softcap, sinks, documents": dict(
        mask=Causal() & Window(70),
        softcap=5.0,
        sinks=[0.5, -np.inf],
        batch=2,
        documents=[[0, 100, 3, 140, 13], [128, 64, 64, 0, 0]],
    ),
    "chunks, long keys, wide values": dict(mask=Causal() & Chunk(100), kv_seq=384, v_dim=128),
}
GROUPS = [70, 0, 130, 37]  # 300 rows in all: the remaining ones belong to no group


@pytest.fixture
def interpreter(monkeypatch):
    if jax.__version_info__ < (0, 12):
        pytest.skip("JAX's interpreter of Mosaic GPU kernels needs jax 0.12 or newer")

    def store(total, value):
        plgpu.store(total, value, optimized=False)

    def wgmma(total, x, y):
        x, y = (side if isinstance(side, jax.Array) else side[...] for side in (x, y))
        plgpu.commit_smem()  # a product reads like a copy, and this call models it
        store(total, total[...] + jnp.matmul(x, y, preferred_element_type=jnp.float32))

    monkeypatch.setattr(plgpu, "wgmma", wgmma)
    # The same program has Triton's kernels for split documents, which cannot be interpreted beside these.
    monkeypatch.setattr(dispatch, "first", lambda *_, **__: xla)
    kind_of_sum = type(plgpu.ACC((64, 64)).get_ref_aval())
    monkeypatch.setattr(kind_of_sum, "_setitem", lambda self, total, index, value: store(total, value))

    def interpreted(**options):
        # Reads beyond an array's end, which copies may do, return NaN.
        return plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(out_of_bounds_reads="uninitialized", **options))

    return interpreted


@pytest.mark.parametrize("case", ATTENTION)
def test_attention(case, interpreter):
    with interpreter():
        check_attention(**ATTENTION[case])


def test_ragged_dot(interpreter):
    with interpreter():
        check_ragged_dot()


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkv"])
def test_attention_has_no_races(kernel, interpreter):
    """A single program has no races. The interpreter confuses two programs' registers, and reports a race."""
    seq, kv_seq = (256, 64) if kernel == "dkv" else (128, 384)
    shapes = dict(batch=1, seq=seq, kv_seq=kv_seq, heads=1, kv_heads=1, dim=64)
    q, k, v, d_out = map(jnp.asarray, oracle.arrays(**shapes, dtype=jnp.bfloat16))
    tokens, formula, zeros = (indices(q), indices(k)), Formula(oracle.SCALE, Full(), None), jnp.zeros((1, 1, seq))
    with interpreter(detect_races=True):  # raises if it finds a race
        if kernel == "forward":
            result = jax.jit(lambda: attention_mosaic.forward(formula, q, k, v, *tokens))()
        else:
            run = getattr(attention_mosaic, kernel)
            result = jax.jit(lambda: run(formula, q, k, v, d_out, zeros, zeros, *tokens))()
        jax.block_until_ready(result)


@pytest.mark.parametrize("kernel", ["matrices", "sums"])
def test_ragged_dot_has_no_races(kernel, interpreter, monkeypatch):
    """A single program has no races. With several, the interpreter would report false ones, as in attention."""
    monkeypatch.setitem(blocks.table("kernels.ragged_dot.mosaic")[kernel]["cpu"]["*"]["*"], "programs", 1)
    x, d_out, sizes = jnp.ones((400, 128), jnp.bfloat16), jnp.ones((400, 128), jnp.bfloat16), jnp.asarray([70, 320])
    with interpreter(detect_races=True):
        if kernel == "matrices":
            w = jnp.ones((2, 128, 128), jnp.bfloat16)
            result = jax.jit(lambda: ragged_dot_mosaic.rows_times_matrices(x, w, sizes, axis=2))()
        else:
            result = jax.jit(lambda: ragged_dot_mosaic.sums_of_products(d_out, x, sizes))()
        jax.block_until_ready(result)


def test_what_is_refused():
    q = jnp.zeros((1, 128, 2, 64), jnp.bfloat16)
    tokens = dict(q_tokens=indices(q), kv_tokens=indices(q))
    given = Tokens(jnp.arange(128)[None])

    def reason(x=q, **changes):
        return attention_mosaic.refusal(x, x, x, **dict(scale=1.0, mask=Causal()) | tokens | changes) or ""

    assert "cannot be interpreted" in reason()
    packed = indices(q)._replace(segments=jnp.ones((1, 128), jnp.int32))
    in_documents = functools.partial(reason, q_tokens=packed, kv_tokens=packed)
    assert "segments only with a causal mask" in in_documents(mask=Full() & Segments())
    assert "cannot be interpreted" in in_documents(mask=Causal() & Window(8) & Segments())
    assert "no spans" in reason(mask=Causal() | Spans())
    assert "indices" in reason(q_tokens=given)
    assert "multiples of 64 features" in reason(q[..., :40])
    assert "multiples of 128 tokens" in reason(q[:, :100])
    assert "a scale above 0, and this is -1.0" in reason(scale=-1.0)
    x, w, sizes = jnp.zeros((8, 64), jnp.bfloat16), jnp.zeros((2, 64, 64), jnp.bfloat16), jnp.zeros(2, jnp.int32)
    assert "cannot be interpreted" in (ragged_dot_mosaic.refusal(x, w, sizes) or "")
    assert "int8" in (ragged_dot_mosaic.refusal(x, w.astype(jnp.int8), sizes) or "")
    assert "multiples of 64" in (ragged_dot_mosaic.refusal(x, w[:, :40], sizes) or "")


def test_on_a_hopper_gpu():
    tool = shutil.which("nvidia-smi")
    found = subprocess.run([tool, "-L"], capture_output=True, text=True).stdout if tool else ""
    if Device("gpu", found).capability != mosaic.HOPPER:
        pytest.skip("no Hopper GPU here")
    environment = {**os.environ, "JAX_PLATFORMS": "cuda"}
    subprocess.run([sys.executable, "-m", "tests.kernels.test_mosaic"], env=environment, check=True)


def check_attention(*, mask, softcap=None, sinks=None, documents=None, **shapes):
    arrays = oracle.arrays(**dict(batch=1, seq=256, heads=2, dim=64, dtype=jnp.bfloat16) | shapes)
    arrays = [jnp.asarray(x) for x in arrays]
    sinks = None if sinks is None else jnp.asarray(sinks, jnp.float32)

    ids = None if documents is None else oracle.packed(*documents)["q_segments"]

    def attention(q, k, v, sinks):
        return attention_mosaic.attention(
            q, k, v, scale=oracle.SCALE, mask=mask if ids is None else mask & Segments(), softcap=softcap, sinks=sinks,
            q_tokens=indices(q)._replace(segments=ids), kv_tokens=indices(k)._replace(segments=ids),
        )  # fmt: skip

    out, gradient = jax.vjp(attention, *arrays[:3], sinks)
    gradients = [g for g in gradient(arrays[3]) if g is not None]
    expected = oracle.oracle(
        *arrays,
        mask=mask,
        softcap=softcap,
        sinks=sinks,
        **({} if ids is None else dict(q_segments=ids, kv_segments=ids)),
    )
    close((out, gradients), expected, terms=4, dtype=jnp.bfloat16)


def check_ragged_dot():
    """Checks numbers, also with NaN in the rows of no group, which share a block with the last group's rows."""
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.bfloat16)
    x, w, d_out, sizes = array(300, 128), array(len(GROUPS), 192, 128), array(300, 192), jnp.asarray(GROUPS, jnp.int32)
    exact, vjp = jax.vjp(lambda x, w: reference.ragged_dot(x, w, sizes), *(a.astype(jnp.float32) for a in (x, w)))
    expected = exact, *vjp(d_out.astype(jnp.float32))

    spoilt = lambda a: a.at[sum(GROUPS) :].set(jnp.nan)
    out, vjp = jax.vjp(lambda x, w: ragged_dot_mosaic.ragged_dot(x, w, sizes), spoilt(x), w)
    for actual, true in zip((out, *vjp(spoilt(d_out))), expected, strict=True):
        close(actual, true, terms=4)


def indices(x):
    return Tokens(np.arange(x.shape[1], dtype=np.int32)[None])


if __name__ == "__main__":
    for case in ATTENTION.values():
        check_attention(**case)
    check_ragged_dot()
    print("The Mosaic GPU kernels are right on this GPU.")
