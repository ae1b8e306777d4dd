"""The definition of attention in float64 numpy, and helpers to call `kernels.attention` and to measure its error.

All but `run` is numpy: outside of jit, every JAX operation on a new shape compiles a program of its own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels.masks import And, Around, Branches, Causal, Chunk, Full, Mask, Or, Segments, Spans, Window
from kernels.tokens import Tokens


SCALE = 0.3
# Roundings in sums over 150 tokens, and over 16 features whose sum, a logit of up to about 25, is an exponent; in
# gradients there are as many again.
TERMS = 2 * (150 + 16 * 25)
QUICK = {"xla_backend_optimization_level": 0}  # compiling takes nearly all of these tests' time; this halves it

thorough = lambda *case: pytest.param(*case, marks=pytest.mark.thorough)


def oracle(q, k, v, d_out, *, mask: Mask | None = None, softcap=None, sinks=None, **tokens):
    """Computes the output and the gradients of q, k, v and sinks in float64, with one logit matrix per head."""
    q, k, v, d_out = (np.asarray(x, np.float64) for x in (q, k, v, d_out))
    (batch, seq, heads, _), (kv_seq, kv_heads) = q.shape, k.shape[1:3]
    k, v = (np.repeat(x, heads // kv_heads, axis=2) for x in (k, v))
    q_tokens, kv_tokens = (
        Tokens(
            tokens.get(f"{side}_positions", np.arange(length)[None]),
            tokens.get(f"{side}_segments"),
            tokens.get(f"{side}_spans"),
            branches=tokens.get(f"{side}_branches"),
        )
        for side, length in (("q", seq), ("kv", kv_seq))
    )
    mask = Causal() if mask is None else mask
    mask = mask & Segments() if "q_segments" in tokens else mask
    mask = mask & Branches() if "q_branches" in tokens else mask
    row, column = (lambda x: x[:, :, None]), (lambda x: x[:, None, :])
    seen = sees(mask, jax.tree.map(row, q_tokens), jax.tree.map(column, kv_tokens))
    seen = np.broadcast_to(seen, (batch, seq, kv_seq))[:, None]

    # Heads are an outer axis, so that products are `@`, which is many times faster than einsum.
    q, k, v, d_out = (np.ascontiguousarray(x.swapaxes(1, 2)) for x in (q, k, v, d_out))
    x = SCALE * (q @ k.swapaxes(2, 3))
    logits = x if softcap is None else softcap * np.tanh(x / softcap)
    sink = np.full(heads, -np.inf) if sinks is None else np.asarray(sinks, np.float64)
    sink = np.broadcast_to(sink[None, :, None, None], (batch, heads, seq, 1))
    logits_and_sink = np.concatenate([np.where(seen, logits, -np.inf), sink], axis=-1)
    top = logits_and_sink.max(axis=-1, keepdims=True)
    weights = np.exp(logits_and_sink - np.where(np.isinf(top), 0, top))
    weights /= np.maximum(weights.sum(axis=-1, keepdims=True), 1e-300)
    sink_weight, weights = weights[..., -1], weights[..., :-1]

    out = weights @ v
    d_weights = d_out @ v.swapaxes(2, 3)
    delta = (weights * d_weights).sum(axis=-1)
    d_x = weights * (d_weights - delta[..., None])
    if softcap is not None:
        d_x *= 1 - np.tanh(x / softcap) ** 2
    shared = lambda x: x.reshape(batch, kv_heads, -1, kv_seq, x.shape[-1]).sum(axis=2)
    dq, dk = SCALE * (d_x @ k), shared(SCALE * (d_x.swapaxes(2, 3) @ q))
    dv = shared(weights.swapaxes(2, 3) @ d_out)
    out, *gradients = (x.swapaxes(1, 2) for x in (out, dq, dk, dv))
    if sinks is not None:
        gradients.append(-(sink_weight * delta).sum(axis=(0, 2)))
    return out, gradients


def sees(mask: Mask, q: Tokens, kv: Tokens) -> np.ndarray:
    """Returns whether the query sees the key, for tokens whose arrays broadcast against each other."""
    match mask:
        case And(a, b):
            return sees(a, q, kv) & sees(b, q, kv)
        case Or(a, b):
            return sees(a, q, kv) | sees(b, q, kv)
        case Full():
            return np.ones(np.broadcast_shapes(q.positions.shape, kv.positions.shape), bool)
        case Causal():
            return kv.positions <= q.positions
        case Window(size):
            return q.positions - kv.positions < size
        case Around(size):
            return (q.positions - size < kv.positions) & (kv.positions - size < q.positions)  # without an overflow
        case Chunk(size):
            return q.positions // size == kv.positions // size
        case Segments():
            return q.segments == kv.segments
        case Branches():
            return (kv.branches == 0) | (q.branches == kv.branches)
        case Spans():
            return (q.spans == kv.spans) & (q.spans >= 0)
    raise AssertionError(f"{mask} is not defined here.")


def arrays(batch=2, seq=150, heads=4, dim=16, kv_seq=None, kv_heads=2, v_dim=None, dtype=jnp.float32, size=3):
    """Returns q, k, v and the gradient of the output. Logits are about 4, so that the softmax is far from uniform."""
    rng = np.random.default_rng(0)
    shapes = [(seq, heads, dim), (kv_seq or seq, kv_heads, dim), (kv_seq or seq, kv_heads, v_dim or dim)]
    shapes.append((seq, heads, v_dim or dim))
    q, k, v, d_out = (rng.normal(size=(batch, *shape)) for shape in shapes)
    return [x.astype(dtype) for x in (size * q, k, v, d_out)]


def run(implementation, q, k, v, d_out, *, sinks=None, **options):
    """Returns the output and the gradients of q, k, v and sinks."""
    static = {name: options.pop(name) for name in ("mask", "softcap") if name in options}
    return _run(implementation, tuple(static.items()), q, k, v, d_out, sinks, options)


@functools.partial(jax.jit, static_argnums=(0, 1), compiler_options=QUICK)
def _run(implementation, static, q, k, v, d_out, sinks, tokens):
    def attention(arguments):
        *qkv, sinks = arguments
        at, kv = (stands(tokens, side) for side in ("q", "kv"))
        return kernels.attention(*qkv, at, kv, scale=SCALE, sinks=sinks, **dict(static), implementation=implementation)

    out, gradient = jax.vjp(attention, (q, k, v, sinks))
    return out, [g for g in gradient(d_out)[0] if g is not None]


def stands(tokens, side):
    """Returns the tokens of one side, "q" or "kv", from arrays such as q_positions and kv_segments."""
    return Tokens(**{ids: tokens.get(f"{side}_{ids}") for ids in ("positions", "segments", "spans", "branches")})


def errors(actual, expected):
    """Returns the relative errors, in the Frobenius norm, of the output and of each gradient."""
    (out, gradients), (true_out, true_gradients) = actual, expected
    relative = lambda x, true: np.linalg.norm(np.asarray(x, np.float64) - true) / max(np.linalg.norm(true), 1e-30)
    return list(map(relative, [out, *gradients], [true_out, *true_gradients]))


def tokens(q_positions, kv_positions, q_segments, kv_segments):
    names = ("q_positions", "kv_positions", "q_segments", "kv_segments")
    values = (q_positions, kv_positions, q_segments, kv_segments)
    return {name: np.atleast_2d(x).astype(np.int32) for name, x in zip(names, values, strict=True)}


def packed(*rows):
    """Returns tokens of rows of documents of these lengths; positions restart. The last is padding, segment 0."""
    segments = [np.repeat([*range(1, len(lengths)), 0], lengths) for lengths in rows]
    positions = [np.concatenate([np.arange(n) for n in lengths]) for lengths in rows]
    return tokens(positions, positions, segments, segments)


def parted(*rows):
    """Returns tokens of rows of documents, each of a trunk and branches of these lengths. The last is padding."""
    pieces = [[piece for document in row for piece in document] for row in rows]
    segments = [np.repeat([*range(1, len(row)), 0], [sum(document) for document in row]) for row in rows]
    branches = [
        np.repeat([n for document in row for n in range(len(document))], lengths)
        for row, lengths in zip(rows, pieces, strict=True)
    ]
    starts = lambda trunk, *rest: [np.arange(trunk), *(np.arange(trunk, trunk + n) for n in rest)]
    positions = [np.concatenate([part for document in row for part in starts(*document)]) for row in rows]
    ids = np.stack(branches).astype(np.int32)
    return tokens(positions, positions, segments, segments) | dict(q_branches=ids, kv_branches=ids)
