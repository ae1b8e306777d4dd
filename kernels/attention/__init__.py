"""Attention of all queries of a batch over all keys, forward and backward: the signature and its meaning."""

import functools
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from kernels import dispatch
from kernels.attention import logits
from kernels.attention.entry import cast, check, complete, over_cache
from kernels.masks import Causal, Chunk, Full, Mask, Window
from kernels.mesh import split_attention
from kernels.stacked import Stacked, read
from kernels.tokens import Tokens


FEW = 16  # most queries of a row for which `attention` over a cache calls `decode_attention`
QKV = "attention_qkv"  # the name of queries, keys and values, for policies of jax.checkpoint
ALL_PAIRS = "all_pairs"  # the scope, in a compiled program, of attention in which every query sees every key


def attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"] | Stacked,
    v: Float[Array, "batch kv_seq kv_heads v_dim"] | Stacked | int,
    at: Tokens = Tokens(),  # noqa: B008 (a value)
    kv: Tokens | None = None,
    *,
    scale: float,
    mask: Mask = Causal(),  # noqa: B008 (a value)
    softcap: float | None = None,
    sinks: Float[Array, " heads"] | None = None,
    implementation: str | None = None,
) -> Float[Array, "batch seq heads v_dim"]:
    """Averages, for each query, the values of the keys it sees, weighted by the softmax of `scale * q @ k`.

    Query heads share key/value heads in groups of `heads / kv_heads` neighbours. A query sees the keys that `mask` lets
    it see, such as `Causal() & Window(1024)`, and, where there are segments or branches, only those of its own segment,
    and of its own branch or the trunk.

    `v` may be a number n: then the values are the first n features of the keys, as in latent attention. `k` and `v` may
    be layers of a cache, `kernels.stacked.Stacked`.

    `at` holds the positions, segments, spans and branches of the queries, and `kv` those of the keys (None: the same
    tokens); see `Tokens`. A query that sees no key yields zeros and gets zero gradients.

    `softcap` turns each logit x into `softcap * tanh(x / softcap)` (Gemma 2, arXiv:2408.00118). `sinks` are one more
    logit per head, which takes its share of the softmax and has no value (gpt-oss, arXiv:2508.10925).

    The softmax is in float32, and products of narrower dtypes accumulate in float32. A NaN or an infinity in q, k or v
    becomes NaN in every query that sees it, and affects no other: masked keys and padding may hold anything.

    `implementation` is one of

    - "reference": computes all logits at once. It has every derivative, and computes float64 in float64.
    - "xla": works in blocks of 128 tokens, in plain JAX. This and all that follow make no [seq, kv_seq] buffer, skip
      blocks that no query sees, and have first derivatives only, in reverse mode.
    - "tpu": a Pallas kernel for TPUs. "triton": one for NVIDIA GPUs. On a CPU both are interpreted.
    - "cudnn": NVIDIA's own kernel. It takes rows whose positions are indices, also of packed documents, and has no
      softcap. Its gradients are not deterministic.
    - "mosaic": a kernel for Hopper GPUs. Experimental: compiled, and never yet run on one.

    None chooses by rank (`kernels.dispatch`): "cudnn", "triton" or "tpu" on their devices if they take the arguments,
    else "xla", and "reference" for at most 128 tokens. Up to `FEW` queries over a layer of a cache go to
    `decode_attention`.

    Raises:
        ValueError: arguments contradict one another, or the implementation asked for cannot take them.
    """
    if implementation is None and isinstance(k, Stacked) and q.shape[1] <= FEW:
        kv = at if kv is None else kv
        return over_cache(q, k, v, at, kv, scale=scale, mask=mask, softcap=softcap, sinks=sinks, implementation=None)
    check(q, k, v)
    q = checkpoint_name(q, QKV)
    keys: Array = checkpoint_name(read(k), QKV)
    values: Array = keys[..., :v] if isinstance(v, int) else checkpoint_name(read(v), QKV)
    q_tokens, kv_tokens = cast(at, q.shape[1], mask), cast(at if kv is None else kv, keys.shape[1], mask)
    scope = jax.named_scope(ALL_PAIRS if isinstance(mask, Full) else "some_pairs")
    mask = complete(mask, q_tokens, kv_tokens)
    first = "reference" if max(q.shape[1], keys.shape[1]) <= 128 else None
    attend = functools.partial(
        dispatch.run, "attention", implementation, first=first, scale=scale, mask=mask, softcap=softcap
    )
    grows = Causal in mask and Window not in mask and Chunk not in mask
    tokens: Any = dict(q_tokens=q_tokens, kv_tokens=kv_tokens, grows=grows)
    with scope:
        logits.record(q, keys, scale=scale, mask=mask, **tokens)
        return split_attention(attend, q, keys, values, sinks=sinks, **tokens)
