"""Operations at the sizes of real models, as data: `benchmarks.kernels` measures them, and `benchmarks.tune` uses them.

The most important come first, because a run that is out of time skips the end. Nothing here depends on JAX or torch;
`in_jax` and `in_torch` build the arrays and programs of a case.
"""

import abc
import dataclasses
from typing import Any, ClassVar, Self

import numpy as np


TOKENS = 16_384  # tokens in a batch for attention, whatever the sequence length


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(abc.ABC):
    """One operation at one size.

    Among its `passes`, "forward" computes the output, and "all" runs forward and backward in one program. The others
    compute only gradients, from the residuals of a forward pass. `in_jax` and `in_torch` name the opponents.
    """

    name: str
    sets: int = 1  # sets of arguments, used in turn: enough to miss the L2 cache, and to make a launch long enough

    operation: ClassVar[str]  # of `kernels`
    passes: ClassVar[tuple[str, ...]] = ("forward",)
    in_jax: ClassVar[tuple[str, ...]] = ()
    in_torch: ClassVar[tuple[str, ...]] = ()

    @abc.abstractmethod
    def flops(self, which: str) -> float:
        """Returns the useful floating point operations of a pass; masked pairs do not count."""

    def bytes(self) -> float | None:
        """Returns the bytes that must be read, if memory bounds the time; otherwise None."""
        return None

    @abc.abstractmethod
    def tiny(self) -> Self:
        """Returns the same case at a size for a CPU that interprets kernels."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dense(Case):
    """A bfloat16 matrix product, whose rate the others are compared with."""

    size: int = 8192
    operation = "matmul"
    in_jax = ("jnp",)
    in_torch = ("torch",)

    def flops(self, which: str) -> float:
        return 2.0 * self.size**3

    def tiny(self) -> Self:
        return dataclasses.replace(self, size=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Attention(Case):
    seq: int = 8192
    batch: int = 0  # 0: TOKENS / seq
    heads: int = 16
    kv_heads: int = 0  # 0: equal to heads
    dim: int = 128
    v_dim: int = 0  # 0: equal to dim
    causal: bool = True
    window: int = 0
    chunk: int = 0
    documents: int = 0  # documents of equal length, packed into each sequence
    positions: bool = False  # whether positions are given; they restart in each document
    softcap: float = 0.0
    sinks: bool = False
    dtype: str = "bfloat16"
    operation = "attention"
    passes = ("forward", "backward")

    def __post_init__(self):
        for name, value in (("batch", TOKENS // self.seq), ("kv_heads", self.heads), ("v_dim", self.dim)):
            object.__setattr__(self, name, getattr(self, name) or value)

    @property
    def in_jax(self) -> tuple[str, ...]:
        plain = not (self.chunk or self.documents or self.softcap or self.sinks or self.v_dim != self.dim)
        return ("jax.nn cudnn",) if plain and self.dtype == "bfloat16" else ()

    @property
    def in_torch(self) -> tuple[str, ...]:
        if self.window or self.chunk or self.documents or self.softcap:
            return () if self.sinks else ("torch flex",)
        return () if self.sinks else ("torch cudnn", "torch flash")

    def pairs(self, block: int = 1) -> int:
        """Returns the visible pairs of query and key for one head of one sequence, or all pairs in blocks with any."""
        if not self.causal:
            return self.seq**2
        query, first = np.arange(self.seq), np.zeros(self.seq, int)
        if self.window:
            first = np.maximum(first, query - self.window + 1)
        for length in (self.chunk, self.seq // self.documents if self.documents else 0):
            first = np.maximum(first, query // length * length) if length else first
        first_blocks = first.reshape(-1, block).min(axis=1) // block
        return int((np.arange(len(first_blocks)) - first_blocks + 1).sum()) * block**2

    def flops(self, which: str) -> float:
        products = 2.0 * self.batch * self.heads * self.pairs() * (self.dim + self.v_dim)
        return products if which == "forward" else 2.5 * products

    def tiny(self) -> Self:
        group = self.heads // self.kv_heads
        return dataclasses.replace(
            self, batch=2, seq=64, heads=2 * group, kv_heads=2, dim=16, v_dim=16, window=self.window and 24,
            chunk=self.chunk and 16, documents=self.documents and 2,
        )  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode(Case):
    """One token of each sequence, over a full cache. If `ragged`, each cache has any length from 1/32 of full on."""

    batch: int = 16
    kv_seq: int = 32_768
    heads: int = 32
    kv_heads: int = 8
    dim: int = 128
    ragged: bool = False
    operation = "decode_attention"
    in_torch = ("torch SDPA",)

    def lengths(self) -> np.ndarray:
        lengths = np.random.default_rng(0).integers(self.kv_seq // 32, self.kv_seq + 1, self.batch)
        return (lengths if self.ragged else np.full(self.batch, self.kv_seq)).astype(np.int32)

    def flops(self, which: str) -> float:
        return 4.0 * self.heads * self.dim * self.lengths().sum()

    def bytes(self) -> float:
        return 2.0 * 2 * self.kv_heads * self.dim * self.lengths().sum()

    def tiny(self) -> Self:
        return dataclasses.replace(self, batch=2, kv_seq=64, heads=4, kv_heads=2, dim=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouped(Case):
    """Rows times their expert's matrix. Routers choose experts evenly or, if `skewed`, as 1, 1/2, 1/3, ..."""

    rows: int
    groups: int
    ins: int
    outs: int
    skewed: bool = False
    int8: bool = False  # whether the matrices are int8
    operation = "ragged_dot"
    in_jax = ("lax.ragged_dot",)
    in_torch = ("torch grouped_mm",)

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward",) if self.int8 else ("forward", "dx", "dw")

    def group_sizes(self) -> np.ndarray:
        weights = 1 / np.arange(1, self.groups + 1) if self.skewed else np.ones(self.groups)
        return np.random.default_rng(0).multinomial(self.rows, weights / weights.sum()).astype(np.int32)

    def flops(self, which: str) -> float:
        return (6.0 if which == "all" else 2.0) * self.rows * self.ins * self.outs

    def tiny(self) -> Self:
        return dataclasses.replace(self, rows=64, groups=4, ins=32, outs=16)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts(Grouped):
    """An expert's SwiGLU, from `ins` to `outs` and back, on sorted rows: three products."""

    @property
    def passes(self) -> tuple[str, ...]:
        return ("all",)

    def flops(self, which: str) -> float:
        return 3 * super().flops(which)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gated(Grouped):
    """The hidden layer of a SwiGLU for a few rows, as in decoding: of one MLP, or of several experts."""

    groups: int = 0  # 0: one MLP for all rows
    operation = "gated_products"
    in_jax = ("two products",)
    in_torch = ()

    @property
    def passes(self) -> tuple[str, ...]:
        return ("forward",)

    def flops(self, which: str) -> float:
        return 2 * super().flops(which)

    def bytes(self) -> float | None:
        read = np.count_nonzero(self.group_sizes()) if self.groups else 1
        return 4.0 * read * self.ins * self.outs

    def tiny(self) -> Self:
        groups = min(self.groups, 4)
        return dataclasses.replace(self, rows=8, groups=groups, ins=32, outs=16, sets=min(self.sets, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized(Case):
    """A product with an 8-bit matrix. With `training`, it is quantised on the fly, like gradients."""

    dtype: str  # "int8" or "fp8"
    granularity: str
    rows: int = 8192
    ins: int = 8192
    outs: int = 8192
    training: bool = False
    operation = "quantized_matmul"
    in_jax = ("bf16 matmul",)

    @property
    def passes(self) -> tuple[str, ...]:
        return ("all",) if self.training else ("forward",)

    @property
    def activations(self) -> bool:
        """Whether the rows are quantised, too. Few rows are not, since reading the matrix takes most of the time."""
        return self.rows > 64

    @property
    def in_torch(self) -> tuple[str, ...]:
        if self.training or not self.activations:
            return ()
        return ("torch scaled_mm",) if self.dtype == "fp8" else ("torch int_mm",)

    def flops(self, which: str) -> float:
        return (6.0 if which == "all" else 2.0) * self.rows * self.ins * self.outs

    def bytes(self) -> float | None:
        return None if self.activations else 1.0 * self.ins * self.outs

    def tiny(self) -> Self:
        return dataclasses.replace(self, rows=min(self.rows, 80), ins=128, outs=128, sets=min(self.sets, 2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CrossEntropy(Case):
    batch: int = 8
    seq: int = 4096
    embed: int = 2048
    vocab: int = 151_936
    operation = "cross_entropy"
    passes = ("all",)
    in_jax = ("whole logits",)

    def logits_bytes(self) -> float:
        """Returns the bytes of the logits in float32, the dtype of their softmax."""
        return 4.0 * self.batch * self.seq * self.vocab

    def flops(self, which: str) -> float:
        return 6.0 * self.batch * self.seq * self.embed * self.vocab

    def tiny(self) -> Self:
        return dataclasses.replace(self, batch=2, seq=64, embed=16, vocab=96)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeltaRule(Case):
    """The recurrence of a layer that keeps a state for each head, over whole sequences."""

    seq: int = 8192
    batch: int = 1
    heads: int = 16  # heads of queries and keys
    v_heads: int = 32
    dim: int = 128
    v_dim: int = 128
    by_channel: bool = False  # each channel of the keys has a decay of its own
    erase: bool = True
    operation = "delta_rule"
    passes = ("forward", "backward")

    @property
    def in_torch(self) -> tuple[str, ...]:
        return ("torch fla",) if self.erase else ("torch mamba_ssm",)

    def flops(self, which: str) -> float:
        """Returns the operations of the recurrence, token by token; computing by chunks takes up to twice as many."""
        from kernels.delta_rule.shared import state_products  # imports JAX

        forward = 2.0 * self.batch * self.seq * self.v_heads * state_products(self.dim, self.v_dim, erase=self.erase)
        return forward if which == "forward" else 2 * forward

    def tiny(self) -> Self:
        group = min(self.v_heads // self.heads, 2)
        return dataclasses.replace(self, batch=2, seq=80, heads=2, v_heads=2 * group, dim=16, v_dim=16)


QWEN3_30B: dict[str, Any] = dict(groups=128, ins=2048, outs=768)

CASES: tuple[Case, ...] = (
    Dense(name="bf16 matmul 8192^3"),
    Attention(name="causal D128 T8k"),
    Attention(name="causal D256 T8k", heads=8, dim=256),
    Attention(name="causal D64 T8k", heads=32, dim=64),
    Grouped(name="Qwen3-30B-A3B up", rows=65_536, **QWEN3_30B),
    Experts(name="Qwen3-30B-A3B experts", rows=32_768, **QWEN3_30B),
    Quantized(name="fp8 blocks 8192^3", dtype="fp8", granularity="block"),
    CrossEntropy(name="cross-entropy of 152k words, 32k tokens"),
    Decode(name="decode Llama 3 8B, 16 x 32k"),
    Gated(name="gate and up of Qwen3-8B, 8 rows", rows=8, ins=4096, outs=12_288, sets=4),
    Gated(name="gate and up of Qwen3-30B-A3B, 64 rows", rows=64, sets=2, **QWEN3_30B),
    DeltaRule(name="states of Qwen3.5-35B-A3B T8k"),
    DeltaRule(name="states of Kimi Linear T8k", heads=32, by_channel=True),
    DeltaRule(name="states of Nemotron 3 Nano T8k", heads=8, v_heads=64, v_dim=64, erase=False),
    # Cases that add something to the plain causal one: the targets compare their costs with it.
    Attention(name="sinks D128 T8k", sinks=True),
    Attention(name="softcap D128 T8k", softcap=50.0),
    Attention(name="8 documents D128 T8k", documents=8),
    Attention(name="8 documents with positions D128 T8k", documents=8, positions=True),
    Attention(name="window 1024 D128 T8k", window=1024),
    Decode(name="decode Llama 3 8B, 16 ragged", ragged=True),
    Attention(name="full D128 T8k", causal=False),
    Attention(name="Llama 3 8B T4k", seq=4096, heads=32, kv_heads=8),
    Attention(name="Gemma 3 27B local T8k", heads=32, kv_heads=16, window=1024),
    Attention(name="gpt-oss local T4k", seq=4096, heads=64, kv_heads=8, dim=64, window=128, sinks=True),
    Attention(name="gpt-oss global T4k", seq=4096, heads=64, kv_heads=8, dim=64, sinks=True),
    Attention(name="DeepSeek V3 T4k", seq=4096, batch=1, heads=128, dim=192, v_dim=128),
    Attention(name="Gemma 2 9B T4k", seq=4096, heads=16, kv_heads=8, dim=256, softcap=50.0),
    Attention(name="Llama 4 chunks T16k", seq=16_384, heads=40, kv_heads=8, chunk=8192),
    Grouped(name="Qwen3-30B-A3B up, skewed", rows=65_536, skewed=True, **QWEN3_30B),
    Grouped(name="Qwen3-30B-A3B down", rows=65_536, groups=128, ins=768, outs=2048),
    Grouped(name="Mixtral 8x7B up", rows=16_384, groups=8, ins=4096, outs=14_336),
    Grouped(name="gpt-oss-120b", rows=32_768, groups=128, ins=2880, outs=2880),
    Grouped(name="DeepSeek V3 up", rows=65_536, groups=256, ins=7168, outs=2048),
    Grouped(name="Qwen3-30B-A3B up, int8, 64 tokens", rows=512, int8=True, **QWEN3_30B),
    Grouped(name="DeepSeek V3 up, int8, 256 tokens", rows=2048, groups=256, ins=7168, outs=2048, int8=True),
    Gated(name="gate and up of DeepSeek V3's shared expert, 8 rows", rows=8, ins=7168, outs=2048, sets=16),
    Gated(name="gate and up of DeepSeek V3, 64 rows", rows=64, groups=256, ins=7168, outs=2048),
    Quantized(name="fp8 tensor 8192^3", dtype="fp8", granularity="tensor"),
    Quantized(name="fp8 channels 8192^3", dtype="fp8", granularity="channel"),
    Quantized(name="int8 channels 8192^3", dtype="int8", granularity="channel"),
    Quantized(name="int8 blocks 8192^3", dtype="int8", granularity="block"),
    Quantized(name="fp8 blocks 4096^3", dtype="fp8", granularity="block", rows=4096, ins=4096, outs=4096, sets=4),
    Quantized(name="int8 matrix, 16 rows", dtype="int8", granularity="channel", rows=16, sets=8),
    Quantized(name="fp8 blocks matrix, 16 rows", dtype="fp8", granularity="block", rows=16, sets=8),
    Quantized(name="int8 matrix, 1 row", dtype="int8", granularity="channel", rows=1, ins=4096, outs=4096, sets=16),
    Quantized(name="fp8 tensor 8192^3, training", dtype="fp8", granularity="tensor", training=True),
    Quantized(name="int8 channels 8192^3, training", dtype="int8", granularity="channel", training=True),
    Attention(name="causal D128 T2k, float32", seq=2048, batch=1, dtype="float32"),
    *(
        Attention(name=f"causal D{dim} T{seq // 1024}k", seq=seq, heads=2048 // dim, dim=dim)
        for dim in (128, 64, 256)
        for seq in (2048, 4096, 16_384)
    ),
)
