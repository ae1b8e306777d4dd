"""Attention by NVIDIA's cuDNN, which XLA calls: the fastest implementation, for the arguments that cuDNN takes.

Positions must be indices; a row is one sequence, or documents packed one after another. cuDNN has no softcap, chunks or
spans. The module binds the primitives beneath `jax.nn.dot_product_attention`. That function has no documents, and
rounds the log-sum-exp, which sinks need, to the dtype of q.

For cuDNN each document is a sequence, given by its length and by its start among the tokens of all rows. A program is
compiled for a fixed number of documents, `DOCUMENTS` times the rows. The effect of a NaN, masked or not, is documented
nowhere. So a program also has another implementation. It serves if there are more documents, if the tokens of one are
not neighbours, or if a number is not finite: a `lax.cond` decides at run time.

cuDNN's backward kernel is not deterministic: it sums the gradient of queries in whatever order its blocks end.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn
from jax._src.lib import cuda_versions
from jaxtyping import Array, Bool, Float, Int

from kernels import dispatch
from kernels.attention import shared
from kernels.attention.shared import Formula
from kernels.backends.device import device
from kernels.masks import And, Causal, Full, Mask, Segments, Window
from kernels.tokens import Tokens, each_in_one_piece, first_of_document


PLATFORMS = ("gpu",)
RANK = 1

DOCUMENTS = 64  # most in a row, on average: each takes float32[heads, seq] while a kernel runs, and idle GPU blocks
WIDEST = 256  # most features of a head
MULTIPLE = 16  # a head's features are padded with zeros to a multiple of this; cuDNN needs 8, Triton 16
HOPPER = (9, 0)  # its compute capability


def refusal(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `attention`, or None if it can."""
    here = device()
    kind, capability = here.kind, here.capability or (0, 0)
    (seq, dim), (kv_seq, v_dim) = q.shape[1::2], v.shape[1::2]
    packed, widest = q_tokens.segments is not None, WIDEST if capability >= HOPPER else WIDEST // 2
    reasons = {
        f"it is for NVIDIA GPUs, and this is a {kind}": here.capability is None,
        f"it is for GPUs of compute capability 8.0 and newer, and this is a {kind}": capability < (8, 0),
        f"it takes float16 and bfloat16, not {q.dtype}": q.dtype not in (jnp.float16, jnp.bfloat16),
        "it has no softcap": softcap is not None,
        f"it has no mask {mask}": _static(mask) is None,
        "it takes positions that are indices": not (q_tokens.in_order and kv_tokens.in_order),
        "it needs as many queries as keys": mask != Full() and seq != kv_seq,
        "it needs keys and values of one head size": dim != v_dim,
        f"its heads have at most {widest} features here, and these {dim}": dim > widest,
        f"it takes packed documents on Hopper and newer GPUs, and this is a {kind}": packed and capability < HOPPER,
        "it takes fewer than 2^31 numbers of packed documents": packed and q.size >= 2**31,
        "it needs a query, a key and a feature at least": not q.size or not v.size,
    }
    reason = next((reason for reason, applies in reasons.items() if applies), None)
    return reason or _refusal_of_version(seq, kv_seq, dim, packed)


def attention(
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"],
    v: Float[Array, "batch kv_seq kv_heads v_dim"],
    *,
    scale: float,
    mask: Mask,
    softcap: float | None,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
) -> Float[Array, "batch seq heads v_dim"]:
    """Computes `kernels.attention` by cuDNN."""
    formula = Formula(scale, mask, softcap)
    other = dispatch.first(
        "attention", ("triton", "xla"), q, k, v, scale=scale, mask=mask, softcap=softcap, sinks=sinks,
        q_tokens=q_tokens, kv_tokens=kv_tokens,
    ).FLASH  # fmt: skip
    # `computable` lets only finite arrays through, so cuDNN's need no marks, which would read the arrays once more.
    as_they_are = lambda q, k, v: (q, k, v)
    own = shared.Flash(forward, backward, features=MULTIPLE, marked=as_they_are)
    kernels = shared.where(computable, own, other)
    return shared.attention(kernels, formula, q, k, v, sinks, q_tokens, kv_tokens)


def forward(
    formula: Formula, q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens
) -> tuple[Float[Array, "batch seq heads v_dim"], Float[Array, "batch heads seq"]]:
    """Implements `shared.Flash.forward`, in the dtype of q, for finite arrays."""
    documents = Documents.of(q_tokens.segments, q)
    out, lse = _call(cudnn._dot_product_attention_fwd_p, documents, formula, q, k, v, is_training=True)
    return out, lse if documents is None else documents.of_tokens(lse)


def backward(
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    lse: Float[Array, "batch heads seq"],
    out: Float[Array, "batch seq heads v_dim"],
    d_out: Float[Array, "batch seq heads v_dim"],
) -> tuple[Array, Array, Array]:
    """Implements `shared.Flash.backward`, in the dtype of q, for finite arrays."""
    documents = Documents.of(q_tokens.segments, q)
    statistics = lse if documents is None else documents.of_documents(lse)
    of_backward = statistics, out.astype(q.dtype), d_out.astype(q.dtype)
    dq, dk, dv = _call(cudnn._dot_product_attention_bwd_p, documents, formula, q, k, v, *of_backward)
    return dq, dk, dv


class Documents:
    """The starts and lengths of all rows' documents, and the mapping between arrays by document and by token."""

    def __init__(self, segments: Int[Array, "batch seq"], q: Float[Array, "batch seq heads dim"]):
        (self.batch, self.seq), tokens = segments.shape, segments.size
        self.position = jnp.arange(self.seq)[None] - first_of_document(segments)
        first = (self.position == 0).reshape(-1)
        self.number = (jnp.cumsum(first) - 1).reshape(segments.shape)
        count = self.batch * DOCUMENTS
        self.start = jnp.nonzero(first, size=count, fill_value=tokens)[0].astype(jnp.int32)
        self.length = jnp.append(self.start[1:], tokens) - self.start

    @classmethod
    def of(cls, segments: Int[Array, "batch seq"] | None, q: Float[Array, "batch seq heads dim"]) -> "Documents | None":
        return None if segments is None else cls(segments, q)

    def lengths(self) -> Int[Array, "batch documents"]:
        return self.length.reshape(self.batch, -1)

    def offsets(self, x: Float[Array, "batch seq heads dim"]) -> Int[Array, "batch ends"]:
        """Returns the offset of each document in `x`, in numbers from the start of the first row."""
        starts = jnp.pad(self.start, (0, self.batch), constant_values=self.batch * self.seq)
        return (starts * (x.shape[2] * x.shape[3])).reshape(self.batch, -1)

    def of_tokens(self, x: Float[Array, "documents heads seq"]) -> Float[Array, "batch heads seq"]:
        return x[self.number, :, self.position].swapaxes(1, 2)

    def of_documents(self, x: Float[Array, "batch heads seq"]) -> Float[Array, "documents heads seq"]:
        """Inverts `of_tokens`. Numbers after a document's last token are meaningless."""
        tokens = jnp.minimum(self.start[:, None] + jnp.arange(self.seq)[None], self.batch * self.seq - 1)
        return x.swapaxes(1, 2).reshape(-1, x.shape[1])[tokens].swapaxes(1, 2)


def _call(
    primitive: Any,
    documents: Documents | None,
    formula: Formula,
    q: Array,
    k: Array,
    v: Array,
    *of_backward: Array,
    **of_forward: Any,
) -> Any:
    """Calls cuDNN. Empty arrays stand for arguments that the call does not use."""
    causal, window = _static(formula.mask) or (False, None)
    none = jnp.zeros(0, q.dtype)
    if documents is None:
        where, kind = (none,) * 4, cudnn.MaskType.CAUSAL if causal else cudnn.MaskType.NO_MASK
    else:
        where = documents.lengths(), documents.lengths(), documents.offsets(q), documents.offsets(k)
        kind = cudnn.MaskType.PADDING_CAUSAL if causal else cudnn.MaskType.PADDING
    newer = dict(score_mod_name=None, score_mod_jaxpr=None) if jax.__version_info__ >= (0, 12) else {}
    return primitive.bind(
        *(q, k, v, none, *where, none, none, *of_backward),
        scale=formula.scale, seed=42, dropout_rate=0.0, variadic_args=(False, False), mask_type=kind,
        layout=cudnn.AttentionLayout.BTNH.value, sliding_window_length=window, **newer, **of_forward,
    )  # fmt: skip


def computable(
    q: Array, k: Array, v: Array, q_tokens: Tokens, kv_tokens: Tokens, *of_backward: Array
) -> Bool[Array, ""]:
    """Whether cuDNN can take these arguments of a kernel of `shared.Flash`: all numbers finite, and few documents.

    In the backward pass q, k and v have been made finite; lse is NaN for a query that sees a number that was not.
    """
    known = lambda x: jnp.all(jnp.isfinite(jnp.sum(x, axis=-1, dtype=jnp.float32)))  # the fastest way to tell
    if of_backward:
        lse, _, d_out = of_backward
        numbers = jnp.all(jnp.isfinite(lse)) & known(d_out)
    else:
        numbers = known(q) & known(k) & known(v)
    return numbers if q_tokens.segments is None else numbers & _few_in_order(q_tokens, kv_tokens)


def _few_in_order(q_tokens: Tokens, kv_tokens: Tokens) -> Bool[Array, ""]:
    """Whether cuDNN's packed layout can express these documents: few enough, and each in one piece."""
    segments: Any = q_tokens.segments
    count = len(segments) + jnp.sum(segments[:, 1:] != segments[:, :-1])
    return each_in_one_piece(q_tokens, kv_tokens) & (count <= len(segments) * DOCUMENTS)


def _static(mask: Mask) -> tuple[bool, int | None] | None:
    """Returns whether the mask is causal, and its window; None for masks that cuDNN does not have."""
    match mask:
        case And(inner, Segments()):
            return _static(inner)
        case Full():
            return False, None
        case Causal():
            return True, None
        case And(Causal(), Window(size)):
            return True, size
        case _:
            return None


def _refusal_of_version(seq: int, kv_seq: int, dim: int, packed: bool) -> str | None:
    """Returns why the installed cuDNN is wrong for these lengths and heads, by its release notes, or None.

    A program that is compiled for GPUs elsewhere passes, because their cuDNN's version is unknown.
    """
    version = cudnn_version()
    if version is None:
        return "JAX finds no cuDNN" if jax.default_backend() == "gpu" else None
    name = f"cuDNN {version // 10_000}.{version // 100 % 100}.{version % 100}"
    if packed and version < 90_600:
        return f"it needs cuDNN 9.6 or newer for packed documents, and this is {name}"
    if kv_seq % 128 and version < 91_501:
        return f"{name} may read beyond keys whose number, here {kv_seq}, is no multiple of 128; 9.15.1 does not"
    if dim > 128 and 91_100 <= version < 91_300:
        return f"{name} is wrong about gradients of heads of more than 128 features"
    return None


@functools.cache
def cudnn_version() -> int | None:
    """Returns cuDNN's version, such as 91501 for 9.15.1, or None if JAX finds no cuDNN."""
    try:
        return cuda_versions and cuda_versions.cudnn_get_version()
    except RuntimeError:
        return None
