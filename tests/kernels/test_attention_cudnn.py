"""The calls to cuDNN, and the use of their results. cuDNN itself is replaced: `Library` computes the meaning of a call.

A call is XLA's custom call "__cudnn$fmhaSoftmax" or "...Backward". Arrays are [batch, seq, heads, features], a document
is given by the index of its first number and by its length, and softmax statistics are log-sum-exps, [documents, heads,
tokens of the document]. Results that a call leaves undefined are NaN here.
"""

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels import Causal, Chunk, Full, Mask, Tokens, sliding
from kernels.attention import cudnn
from kernels.masks import Segments
from tests.close import close
from tests.kernels import gpu
from tests.kernels.oracle import QUICK, SCALE, TERMS, arrays, oracle, packed
from train.base.chips import CHIPS, target


H200 = "NVIDIA H200"
SINKS = np.array([1.0, -2.0, 5.0, -np.inf], np.float32)
IN_ORDER = packed([30, 1, 60, 9], [10, 70, 20])["q_segments"]
OTHERS = {
    "more documents than cuDNN is told of": np.resize(np.arange(1, 51).repeat(2), (2, 100)),
    "a document in two pieces": np.resize([1, 2, 1], (2, 3)).repeat([30, 40, 30], axis=1),
}


class Library:
    """The primitive of a call: forward, or with three more arguments backward."""

    def bind(self, q, k, v, bias, q_lengths, kv_lengths, q_starts, kv_starts, pages, _, *of_backward, scale, **options):
        assert not bias.size and not pages.size and options["dropout_rate"] == 0 and options["variadic_args"] == (0, 0)
        (batch, seq, heads, dim), kv_seq, kv_heads = q.shape, *k.shape[1:3]
        kind = options["mask_type"].name
        if q_lengths.ndim == 1:
            assert kind in ("NO_MASK", "CAUSAL") and not q_lengths.size
            count = batch
            lengths, starts = jnp.full(batch, seq), jnp.arange(batch) * seq
            kv_lengths, kv_starts = jnp.full(batch, kv_seq), jnp.arange(batch) * kv_seq
        else:
            assert kind in ("PADDING", "PADDING_CAUSAL") and q_starts.shape == (batch, q_lengths.shape[1] + 1)
            count = q_lengths.size
            lengths, starts = q_lengths.reshape(-1), q_starts.reshape(-1)[:count] // (heads * dim)
            kv_lengths, kv_starts = kv_lengths.reshape(-1), kv_starts.reshape(-1)[:count] // (kv_heads * dim)
        rows, columns = starts[:, None] + jnp.arange(seq)[None], kv_starts[:, None] + jnp.arange(kv_seq)[None]
        exist, kv_exist = (jnp.arange(n)[None] < l[:, None] for n, l in ((seq, lengths), (kv_seq, kv_lengths)))
        take = lambda x, at: x.reshape(-1, *x.shape[2:]).astype(jnp.float32).at[at].get(mode="clip")
        group = lambda x: jnp.repeat(x, heads // kv_heads, axis=2)
        q_i, k_j, v_j = take(q, rows), group(take(k, columns)), group(take(v, columns))
        i, j = jnp.arange(seq)[None, None, :, None], jnp.arange(kv_seq)[None, None, None, :]
        seen = exist[:, None, :, None] & kv_exist[:, None, None, :]
        if kind.endswith("CAUSAL"):
            seen &= j <= i
        if options["sliding_window_length"] is not None:
            seen &= i - j < options["sliding_window_length"]
        x = jnp.where(seen, scale * jnp.einsum("bind,bjnd->bnij", q_i, k_j), -jnp.inf)

        def put(x, at, exist, like):
            index = jnp.where(exist, at, like.shape[0] * like.shape[1])
            whole = jnp.full((like.shape[0] * like.shape[1], *like.shape[2:]), jnp.nan, like.dtype)
            return whole.at[index].set(x.astype(like.dtype), mode="drop").reshape(like.shape)

        if not of_backward:
            lse = jax.nn.logsumexp(jnp.where(exist[:, None, :, None], x, 0), axis=-1)
            out = jnp.einsum("bnij,bjnd->bind", jnp.exp(x - lse[..., None]), v_j)
            return [put(out, rows, exist, q), jnp.where(exist[:, None], lse, jnp.nan)]
        lse, out, d_out = of_backward
        assert lse.shape == (count, heads, seq) and lse.dtype == jnp.float32
        out_i, d_out_i = (jnp.where(exist[..., None, None], take(a, rows), 0) for a in (out, d_out))
        weights = jnp.where(seen, jnp.exp(x - lse[..., None]), 0)
        delta = jnp.einsum("bind,bind->bni", out_i, d_out_i)
        d_x = scale * weights * (jnp.einsum("bind,bjnd->bnij", d_out_i, v_j) - delta[..., None])
        share = lambda x: x.reshape(*x.shape[:2], kv_heads, -1, x.shape[-1]).sum(axis=3)
        dk, dv = jnp.einsum("bnij,bind->bjnd", d_x, q_i), jnp.einsum("bnij,bind->bjnd", weights, d_out_i)
        return [
            put(jnp.einsum("bnij,bjnd->bind", d_x, k_j), rows, exist, q),
            put(share(dk), columns, kv_exist, k),
            put(share(dv), columns, kv_exist, v),
        ]


@pytest.fixture
def library(monkeypatch):
    monkeypatch.setattr(cudnn.cudnn, "_dot_product_attention_fwd_p", Library())
    monkeypatch.setattr(cudnn.cudnn, "_dot_product_attention_bwd_p", Library())
    monkeypatch.setattr(cudnn, "DOCUMENTS", 4)


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def run(mask, q, k, v, d_out, sinks, segments):
    indices: Any = lambda x: np.arange(x.shape[1], dtype=np.int32)[None]
    tokens = [Tokens(indices(x), segments) for x in (q, k)]
    attend = lambda q, k, v, sinks: cudnn.attention(
        q, k, v, scale=SCALE, mask=mask, softcap=None, sinks=sinks, q_tokens=tokens[0], kv_tokens=tokens[1]
    )
    out, vjp = jax.vjp(attend, q, k, v, sinks)
    return out, [g for g in vjp(d_out) if g is not None]


def check(mask, x, segments=None, sinks=None):
    ids = {} if segments is None else dict(q_segments=segments, kv_segments=segments)
    expected = oracle(*x, mask=mask, sinks=sinks, **ids)
    found = run(mask if segments is None else mask & Segments(), *x, sinks, segments)
    close(found, expected, terms=TERMS)


@pytest.mark.parametrize("mask", [Causal(), Full()])
def test_plain_rows(mask, library):
    """Plain rows are cuDNN's, beside "xla", since the heads are too wide for "triton"."""
    check(mask, arrays(batch=1, seq=40, kv_seq=40 if mask == Causal() else 50, dim=260))


@pytest.mark.thorough
def test_documents(library):
    """In a program with sinks, a window and shared heads, documents in order go to cuDNN, others to "triton"."""
    x = arrays(seq=100)
    for segments in (IN_ORDER, *OTHERS.values()):
        check(sliding(20), x, segments, SINKS)


computable = jax.jit(cudnn.computable)


def test_which_documents_are_cudnns(library):
    x, of = np.ones((2, 100, 2, 8), np.float32), lambda segments: Tokens(None, segments.astype(np.int32))
    assert computable(x, x, x, of(IN_ORDER), of(IN_ORDER))
    assert not any(computable(x, x, x, of(segments), of(segments)) for segments in OTHERS.values())
    assert not computable(x, x, x, of(IN_ORDER), of(np.ones((2, 100))))


def test_which_numbers_are_cudnns():
    q, lse, nowhere = np.ones((2, 100, 4, 16), np.float32), np.ones((2, 4, 100), np.float32), (Tokens(), Tokens())
    of = lambda *x: bool(computable(*x[:3], *nowhere, *x[3:]))
    for garbage in (np.nan, -np.inf):
        spoilt = q.copy()
        spoilt[1, 3, 2, 5] = garbage
        assert not of(spoilt, q, q) and not of(q, spoilt, q) and not of(q, q, spoilt)
        assert not of(q, q, q, lse, q, spoilt)
    of_nan = lse.copy()
    of_nan[1, 2, 3] = np.nan
    assert of(q, q, q) and of(q, q, q, lse, q, q) and not of(q, q, q, of_nan, q, q)


def test_a_nan_touches_only_those_who_see_it(library):
    """A NaN reaches only the 20 queries that see token 35 of the first row, from that token on, in the third document.

    With a NaN, all are computed by the other implementation. In it, as in all others, a NaN in the output's gradient
    also reaches the gradients of values that its query does not see.
    """
    x, mask = arrays(seq=100), sliding(20) & Segments()
    clean, gradients = run(mask, *x, SINKS, IN_ORDER)
    for name, spoilt in {"q": 0, "k": 1, "v": 2, "d_out": 3}.items():
        dirty = [a.copy() for a in x]
        of_key = name in "kv"
        dirty[spoilt][0, 35, 1 if of_key else 3, 0] = np.nan  # query heads 2 and 3 have kv head 1
        out, (*found, _) = run(mask, *dirty, SINKS, IN_ORDER)
        found = found[:2] if name == "d_out" else found
        queries, keys = np.zeros((2, 100, 4), bool), np.zeros((2, 100, 2), bool)
        queries[0, 35 : 55 if of_key else 36, 2 if of_key else 3 :] = True
        keys[0, 31 : 55 if of_key else 36, 1] = True  # keys that those queries see: the document starts at 31
        for actual, expected, nan in zip(
            (out, *found), (clean, *gradients), (queries & (name != "d_out"), queries, keys, keys), strict=False
        ):
            assert np.array_equal(np.isnan(actual), np.broadcast_to(nan[..., None], actual.shape))
            close(np.asarray(actual)[~nan], np.asarray(expected)[~nan], terms=TERMS)


def reason(
    monkeypatch, *, seq=512, dim=128, mask: Mask | None = None, version=None, packed=True, positions=None, kind=H200
):
    """Returns why cuDNN of this version would not serve on this GPU."""
    monkeypatch.setattr(cudnn, "cudnn_version", lambda: version)
    indices, ids = np.arange(seq, dtype=np.int32)[None], jnp.zeros((2, seq), jnp.int32)
    tokens = Tokens(ids if positions else indices, ids if packed else None)
    q, none = jnp.zeros((2, seq, 8, dim), jnp.bfloat16), dict(softcap=None, sinks=None)
    with jax.sharding.use_abstract_mesh(on(kind)):
        of = dict(scale=1.0, mask=mask or Causal(), q_tokens=tokens, kv_tokens=tokens)
        return cudnn.refusal(q, q, q, **of, **none) or "serves"


def on(kind):
    return AbstractMesh((1,), ("device",), abstract_device=AbstractDevice(kind, None, "cuda"))


def test_attention_of_packed_documents_is_cudnns():
    q, ids = jax.ShapeDtypeStruct((2, 512, 8, 128), jnp.bfloat16), jax.ShapeDtypeStruct((2, 512), jnp.int32)
    with jax.sharding.use_abstract_mesh(on(H200)):
        (choice,) = kernels.explain(functools.partial(kernels.attention, scale=1.0), q, q, q, Tokens(segments=ids))
    assert choice.implementation == "cudnn"


def test_what_is_refused(monkeypatch):
    why = functools.partial(reason, monkeypatch)
    assert why() == why(version=91501) == why(mask=sliding(64)) == why(kind="NVIDIA B200", seq=500) == "serves"
    assert "no mask" in why(mask=Causal() & Chunk(64), packed=False)
    assert "positions that are indices" in why(positions=True)
    assert "Hopper and newer" in why(kind="NVIDIA A100-SXM4-80GB") and why(kind="NVIDIA L4", packed=False) == "serves"
    assert "at most 128 features here, and these 256" in why(kind="NVIDIA L4", packed=False, dim=256)
    assert "needs cuDNN 9.6 or newer for packed documents, and this is cuDNN 9.5.1" in why(version=90501)
    assert why(version=90501, packed=False) == "serves"
    assert "9.15.0 may read beyond keys whose number, here 500" in why(version=91500, seq=500)
    assert why(version=91501, seq=500) == "serves"
    assert "9.11.0 is wrong about gradients" in why(version=91100, dim=256)
    assert why(version=91300, dim=256) == why(version=91100) == "serves"


@gpu.needs_compiler
def test_xla_compiles_both_for_an_h200():
    """XLA compiles cuDNN's calls, without the library, and Triton's kernels beside them, with no [seq, seq] array."""
    topology = topologies.get_topology_desc(platform="cuda", target_config=target(CHIPS["h200"]), topology="1x1x1")
    mesh = Mesh(np.array(topology.devices)[:1], ("device",))
    array = lambda *shape, dtype=jnp.bfloat16: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P()))

    def gradients(q, k, d_out, sinks, segments):
        attend = lambda q, k, v: kernels.attention(q, k, v, Tokens(segments=segments), scale=0.1, sinks=sinks)
        return jax.vjp(attend, q, k, k)[1](d_out)

    q, k = array(1, 4096, 8, 64), array(1, 4096, 2, 64)
    with jax.set_mesh(mesh):
        arguments = q, k, q, array(8, dtype=jnp.float32), array(1, 4096, dtype=jnp.int32)
        compiled = jax.jit(gradients).lower(*arguments).compile()
    text, memory = str(compiled.as_text()), compiled.memory_analysis()
    calls = set(re.findall(r"__cudnn\$fmha\w+", text))
    assert calls == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}
    assert "attention_dkv" in text
    assert memory is not None and memory.temp_size_in_bytes < 4096 * 4096 * 8 * 4 // 2
