"""Fast operations on arrays: one signature each, several implementations, all tested against `kernels.reference`.

Under a mesh (`jax.set_mesh`) whose axes have the names in `kernels.mesh`, each device computes its share.

This package knows no model, and imports only jax, numpy and jaxtyping.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from kernels import dispatch, quantize
from kernels.causal_conv import causal_conv
from kernels.device import device
from kernels.dispatch import explain, prefer
from kernels.masks import Causal, Chunk, Full, Mask, Segments, Spans, Tokens, Window, counted, sliding
from kernels.matmul import SAVED, fp8_matmul, int8_matmul
from kernels.mesh import split_attention
from kernels.recurrence import split_recurrence
from kernels.sequence import begins, padding
from kernels.stacked import Slots, Stacked, read


__all__ = [
    "FEW",
    "Causal",
    "Chunk",
    "Full",
    "Mask",
    "Slots",
    "Spans",
    "Stacked",
    "Tokens",
    "Window",
    "attention",
    "causal_conv",
    "counted",
    "cross_entropy",
    "decode_attention",
    "delta_rule",
    "explain",
    "fp8_matmul",
    "int8_matmul",
    "prefer",
    "ragged_dot",
    "sliding",
]


FEW = 16  # most queries of a row that `attention` takes as steps of a decode


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
    it see, such as `Causal() & Window(1024)`, and, where there are segments, only those of its own segment.

    `v` may be a number: then the values are so many of the first features of the keys, as those of latent attention
    are. `k` and `v` may be layers of a cache, `kernels.stacked.Stacked`.

    `at` has the positions, segments and spans of the queries' tokens, and `kv` those of the keys' (None: they are the
    same tokens): see `Tokens`. A query that sees no key yields zeros and gets zero gradients.

    `softcap` turns each logit x into `softcap * tanh(x / softcap)` (Gemma 2, arXiv:2408.00118). `sinks` are one more
    logit per head, which takes its share of the softmax and has no value (gpt-oss, arXiv:2508.10925).

    The softmax is in float32, and products of narrower dtypes accumulate in float32. A NaN or an infinity in q, k or v
    becomes NaN in every query that sees it, and affects no other: masked keys and padding may hold anything.

    `implementation` is one of

    - "reference": computes all logits at once. It has every derivative, and computes float64 in float64.
    - "xla": works in blocks of 128 tokens, in plain JAX. It and all below make no [seq, kv_seq] buffer, skip blocks
      that no query sees, and have first derivatives only, in reverse mode.
    - "tpu": a Pallas kernel for TPUs. "triton": one for NVIDIA GPUs. On a CPU both are interpreted.
    - "cudnn": NVIDIA's own kernel, for the calls that it can express: rows in order, also of packed documents, without
      softcap. Its gradients are not deterministic.
    - "mosaic": a kernel for Hopper GPUs. Experimental: compiled, and never yet run on one.

    None chooses by the tables of `kernels.dispatch`: "cudnn", "triton" or "tpu" on their devices if they can, else
    "xla", and "reference" for at most 128 tokens. Up to `FEW` queries over a layer of a cache go to `decode_attention`.

    Raises:
        ValueError: where arguments contradict one another, or the implementation asked for cannot take them.
    """
    if implementation is None and isinstance(k, Stacked) and q.shape[1] <= FEW:
        kv = at if kv is None else kv
        return decode_attention(q, k, v, at, kv, scale=scale, mask=mask, softcap=softcap, sinks=sinks)
    _check(q, k, v)
    k = read(k)
    v = k[..., :v] if isinstance(v, int) else read(v)
    q_tokens, kv_tokens = _tokens(at, q.shape[1], mask), _tokens(at if kv is None else kv, k.shape[1], mask)
    mask = _complete(mask, q_tokens, kv_tokens)
    first = "reference" if max(q.shape[1], k.shape[1]) <= 128 else None
    attend = functools.partial(
        dispatch.run, "attention", implementation, first=first, scale=scale, mask=mask, softcap=softcap
    )
    grows = Causal in mask and Window not in mask and Chunk not in mask
    return split_attention(attend, q, k, v, sinks=sinks, q_tokens=q_tokens, kv_tokens=kv_tokens, grows=grows)


def decode_attention(
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
    """Computes `attention` of one query or a few in each row of the batch, over a cache.

    Each row fills the cache to its own length, and with a causal mask sees no further than its positions: later slots
    may hold anything. With `kv` None, the index of a slot is its position. All else is as in `attention`.

    Where k and v are layers of a cache, `kernels.stacked.Stacked`, all implementations but "reference" read in place
    what the queries see of them, also in 8 bits.

    `implementation` is "reference" (reads every slot of the cache, has every derivative), "xla", "tpu" or "triton"
    (read only blocks with a key that is seen, "xla" those up to the longest row's last; they have first derivatives
    only, in reverse mode, which read every slot). None chooses as `attention` does.

    Raises:
        ValueError: as `attention` does.
    """
    _check(q, k, v)
    of_v, v_dim = (None, v) if isinstance(v, int) else (Stacked.of(v), v.shape[3])
    q_tokens = _tokens(at, q.shape[1], mask)
    kv_tokens = _tokens(Tokens() if kv is None else kv, k.shape[1], mask)
    mask = _complete(mask, q_tokens, kv_tokens)
    # On a CPU, a loop over blocks is slower than one product for few slots, and in narrow dtypes.
    at_once = device().platform == "cpu" and (k.shape[1] <= 128 or q.dtype != jnp.float32)
    options = dict(first="reference" if at_once else None, v_dim=v_dim, scale=scale, softcap=softcap)
    attend = functools.partial(dispatch.run, "decode_attention", implementation, mask=mask, **options)
    return split_attention(attend, q, Stacked.of(k), of_v, sinks=sinks, q_tokens=q_tokens, kv_tokens=kv_tokens)


def delta_rule(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch seq heads dim"],
    v: Float[Array, "batch seq v_heads v_dim"],
    decay: Float[Array, "batch seq v_heads"] | Float[Array, "batch seq v_heads dim"],
    beta: Float[Array, "batch seq v_heads"],
    at: Tokens = Tokens(),  # noqa: B008 (a value)
    *,
    scale: float,
    state: Float[Array, "batch v_heads dim v_dim"] | Slots | None = None,
    erase: bool = True,
    implementation: str | None = None,
) -> tuple[Float[Array, "batch seq v_heads v_dim"], Float[Array, "batch v_heads dim v_dim"] | Slots]:
    """Runs the gated delta rule (arXiv:2412.06464), a recurrence over tokens with a matrix as the state of each head:

        S_t = A_t S_{t-1} + beta_t k_t (v_t - (A_t S_{t-1})^T k_t)^T,        out_t = scale * S_t^T q_t

    `decay` is the logarithm of A_t, at most 0: a number for a head (Qwen3-Next), or one for each channel of its keys,
    and A_t is diagonal (Kimi Linear, arXiv:2510.26692). Without `erase` nothing is subtracted from v_t, and the
    recurrence is that of Mamba-2 (arXiv:2405.21060). Value heads share query/key heads in groups of `v_heads / heads`
    neighbours.

    The state begins as `state`, or as zeros. It begins anew where the segment of `at` does, so that packed documents do
    not see each other; tokens of a row must be in order. Padding (segment 0, or a position below 0) neither decays the
    state nor writes to it, and may hold anything.

    Returns the outputs in the dtype of v, and the state after the last token, in float32. Where the state lies in a
    cache, `kernels.stacked.Slots`, so does what is returned. One token then is the step of a decode: on a GPU or a TPU
    a kernel reads the state once and writes it in place. That step has no derivatives.

    `implementation` is one of

    - "reference": one token after the other. It has every derivative, and computes float64 in float64.
    - "xla": chunks of 64 tokens, in plain JAX. Its memory grows with the tokens, and has a state for each chunk. It and
      all below have first derivatives only, in reverse mode.
    - "tpu": the same, with Pallas kernels for TPUs that go through the chunks. "triton": with some for NVIDIA GPUs. On
      a CPU both are interpreted.

    None chooses by the tables of `kernels.dispatch`: "triton" or "tpu" on their devices if they can, else "xla", and
    "reference" for at most 16 tokens and for float64. For the step of a decode the tables have "delta_step".

    Raises:
        ValueError: where arguments contradict one another, or the implementation asked for cannot take them.
    """
    if v.shape[2] % k.shape[2]:
        raise ValueError(f"The value heads ({v.shape[2]}) must be a multiple of the query/key heads ({k.shape[2]}).")
    if isinstance(state, Slots) and (implementation is not None or v.shape[1] > 1):
        options: Any = dict(scale=scale, erase=erase, implementation=implementation)
        out, last = delta_rule(q, k, v, decay, beta, at, state=state.read(), **options)
        assert not isinstance(last, Slots)
        return out, state.write(last)
    exact = jnp.float64 if v.dtype == jnp.float64 else jnp.float32
    if state is None:
        state = jnp.zeros((len(v), v.shape[2], k.shape[3], v.shape[3]), exact)
    blank = padding(at, v.shape[:2])
    q, k, v, decay, beta = (jnp.where(jnp.expand_dims(blank, range(2, x.ndim)), 0, x) for x in (q, k, v, decay, beta))
    if isinstance(state, Slots):
        run = functools.partial(dispatch.run, "delta_step", None)
    else:
        first, state = "reference" if v.shape[1] <= 16 else None, state.astype(exact)
        run = functools.partial(dispatch.run, "delta_rule", implementation, first=first)
    given = q, k, v, decay, beta, begins(at, v.shape[:2]), state
    return split_recurrence(run, *given, scale=scale, erase=erase)


def cross_entropy(
    unembed: Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq vocab"]],
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    mask: Int[Array, "batch seq"],
    *,
    chunk: int = 2048,
    z_loss: float = 0.0,
    implementation: str | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Sums the cross-entropy, in nats, of the targets whose `mask` is not 0. The others count for nothing, even if NaN.

    `unembed` maps features to logits: the product with a matrix, and whatever else a model does there, such as a
    softcap. Arrays that it closes over get their gradients.

    Returns the sum to minimise, to which every target also adds `z_loss * log(Z)**2` (Z: the sum of the exponentials
    of its logits; PaLM, arXiv:2204.02311, section 5), and two sums for metrics, without gradients: `loss`, without that
    term, and `correct`, the number of targets whose logit is the largest.

    `implementation` is one of

    - "xla": calls `unembed` for about `chunk` tokens at a time on each device, the same positions of every sequence.
      It computes gradients in the same pass, so no product is computed twice. It has first derivatives only, in
      reverse mode.
    - "reference": computes the logits of all tokens at once. It has every derivative, and computes float64 in float64.

    None means "xla", and "reference" for what that refuses.

    Raises:
        ValueError: where the implementation asked for cannot take these arguments.
    """
    minimised, loss, correct = dispatch.run(
        "cross_entropy", implementation, unembed, x, targets, mask != 0,
        chunk=chunk, z_loss=z_loss,
    )  # fmt: skip
    return minimised, {"loss": jax.lax.stop_gradient(loss), "correct": jax.lax.stop_gradient(correct)}


def ragged_dot(
    x: Float[Array, "tokens in"] | Int8[Array, "tokens in"],
    w: Float[Array, "groups out in"] | Int8[Array, "groups out in"] | Stacked,
    group_sizes: Int[Array, " groups"],
    *,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """Multiplies each row of `x` by the transpose of its group's matrix, which is (out, in) like a Linear's.

    Rows are sorted by group: the first `group_sizes[0]` belong to group 0, the next `group_sizes[1]` to group 1, and so
    on. This is the product of dropless mixture-of-experts layers (MegaBlocks, arXiv:2211.15841). Groups may be empty.
    Rows beyond the last group yield zeros, get zero gradients and may hold anything. Groups that would go beyond the
    last row end there.

    Narrower dtypes accumulate in float32. A NaN in a row stays in the row, and in the gradient of its group's matrix;
    a NaN in a group's matrix stays in the group's rows. `w` may be int8: then its tiles are cast to the dtype of `x`
    as they are multiplied, and there is no gradient of `w`. It may be a layer of a stack, which is not copied
    (`kernels.stacked`). Both may be int8, or both float8_e4m3fn: then the output is float32, and has no gradient; "tpu"
    multiplies them in bfloat16, to which it rounds the sums.

    `implementation` is one of

    - "reference": multiplies every row by every matrix. It has every derivative, and computes float64 in float64.
    - "xla": works in tiles of at most 128 rows, in plain JAX. Its work and memory, and those of all below, grow with
      tokens, not with groups * tokens. All have first derivatives only, in reverse mode.
    - "tpu": Pallas kernels for TPUs. "triton": for NVIDIA GPUs. On a CPU both are interpreted.
    - "mosaic": kernels for Hopper GPUs. Experimental: compiled, and never yet run on one.

    None chooses by the tables of `kernels.dispatch`: "triton" or "tpu" on their devices, else "xla", and "reference"
    for what it refuses.

    Raises:
        ValueError: where arguments contradict one another, or the implementation asked for cannot take them.
    """
    if w.dtype not in (x.dtype, jnp.int8):
        raise ValueError(f"x and w must have one dtype, not {x.dtype} and {w.dtype}: cast them first.")
    if x.shape[1] != w.shape[2]:
        raise ValueError(f"The rows of x have {x.shape[1]} features, and w, (groups, out, in), takes {w.shape[2]}.")
    if len(group_sizes) != w.shape[0]:
        raise ValueError(f"w has {w.shape[0]} groups: group_sizes must have one size for each, not {len(group_sizes)}.")
    out = dispatch.run("ragged_dot", implementation, x, w, group_sizes.astype(jnp.int32))
    return checkpoint_name(out, SAVED)


def rounded_ragged_dot(
    x: Float[Array, "tokens in"],
    w: Float[Array, "groups out in"],
    group_sizes: Int[Array, " groups"],
    dtype: DTypeLike,
    implementation: str | None = None,
) -> Float[Array, "tokens out"]:
    """Computes `ragged_dot` of `x` and `w` rounded to int8 or float8_e4m3fn, each row of both with a scale of its own.

    `kernels.quantize.quantize` says how. The gradients are those of `ragged_dot`, in the dtype of `x`: they pass
    straight through the rounding (arXiv:1308.3432), and multiply what was not rounded.

    Raises:
        ValueError: as `ragged_dot` does.
    """
    if w.dtype != x.dtype:
        raise ValueError(f"x and w must have one dtype, not {x.dtype} and {w.dtype}: cast them first.")
    return checkpoint_name(_rounded(x, w, group_sizes.astype(jnp.int32), dtype, implementation), SAVED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _rounded(x: Array, w: Array, group_sizes: Array, dtype: DTypeLike, implementation: str | None) -> Array:
    rows, matrices = (quantize.quantize(side, dtype, "channel") for side in (x, w))
    sums = dispatch.run("ragged_dot", implementation, rows.values, matrices.values, group_sizes)
    out = sums.astype(rows.scale.dtype) * rows.scale[:, None]
    out *= jnp.repeat(matrices.scale, group_sizes, axis=0, total_repeat_length=len(x))
    in_a_group = jnp.arange(len(x)) < jnp.sum(group_sizes)
    return jnp.where(in_a_group[:, None], out, 0).astype(x.dtype)  # no scale that is NaN reaches other rows


def _rounded_forward(
    x: Array, w: Array, group_sizes: Array, dtype: DTypeLike, implementation: str | None
) -> tuple[Array, tuple[Array, Array, Array]]:
    return _rounded(x, w, group_sizes, dtype, implementation), (x, w, group_sizes)


def _rounded_backward(
    _: DTypeLike, implementation: str | None, residuals: tuple[Array, Array, Array], d_out: Array
) -> tuple[Array, Array, None]:
    x, w, group_sizes = residuals
    product = lambda x, w: ragged_dot(x, w, group_sizes, implementation=implementation)
    return *jax.vjp(product, x, w)[1](d_out), None


_rounded.defvjp(_rounded_forward, _rounded_backward)


def _check(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"] | Stacked,
    v: Float[Array, "batch kv_seq kv_heads v_dim"] | Stacked | int,
) -> None:
    of_v = k.dtype if isinstance(v, int) else v.dtype
    if not q.dtype == k.dtype == of_v:
        raise ValueError(f"q, k and v must have one dtype, not {q.dtype}, {k.dtype} and {of_v}: cast them first.")
    if isinstance(v, int) and not 0 < v <= k.shape[3]:
        raise ValueError(f"The values cannot be the first {v} features of keys that have {k.shape[3]}.")
    if isinstance(v, int) and isinstance(k, Stacked) and k.scale is not None and v != k.parts[0]:
        raise ValueError(f"The values cannot be the first {v} features of keys whose first scale is of {k.parts[0]}.")
    if q.shape[2] % k.shape[2]:
        raise ValueError(f"The query heads ({q.shape[2]}) must be a multiple of the key/value heads ({k.shape[2]}).")


def _tokens(at: Tokens, length: int, mask: Mask) -> Tokens:
    """Casts the ids to int32 and fills in positions, as masks expect them."""
    segments, spans = (None if ids is None else ids.astype(jnp.int32) for ids in (at.segments, at.spans))
    if at.positions is None and segments is not None and Chunk in mask:
        return Tokens(counted(segments), segments, spans)  # chunks, unlike windows, count from a document's start
    if at.positions is None:
        indices: Any = np.arange(length, dtype=np.int32)[None]  # numpy: that is how Tokens.in_order knows them
        return Tokens(indices, segments, spans)
    # A slot never written has the greatest int32 as its position: its distance to less than -1 would wrap around.
    return Tokens(jnp.maximum(at.positions.astype(jnp.int32), -1), segments, spans)


def _complete(mask: Mask, q: Tokens, kv: Tokens) -> Mask:
    """Adds `Segments()` to the mask where there are segments, and checks that mask and ids fit together."""
    for name, ids, of_keys in (("segments", q.segments, kv.segments), ("spans", q.spans, kv.spans)):
        if (ids is None) != (of_keys is None):
            raise ValueError(
                f"{name.title()} of one side alone mean nothing: both `at` and `kv` have them, or neither."
            )
    if (q.spans is not None) != (Spans in mask):
        raise ValueError("Spans go with a mask that has Spans(), such as Causal() | Spans(): give both, or neither.")
    if q.segments is None and Segments in mask:
        raise ValueError("The mask has Segments(), and there are none: give Tokens(segments=...).")
    return mask if q.segments is None or Segments in mask else mask & Segments()
