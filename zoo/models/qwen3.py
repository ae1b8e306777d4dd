"""Qwen3, the dense models (arXiv:2505.09388): Llama's decoder with an RMSNorm over each head's queries and keys.

The head size is 128 in every model, so in some of them heads x head size differs from the width. The configuration
allows a sliding window on the layers from `max_window_layers` on, or on those named in `layer_types`; no released model
uses one.
"""

import dataclasses
from typing import Any, Literal

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.fields import fill_layers
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu
from zoo.nn.model import AbstractConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 32
    head_dim: int = 128
    max_position_embeddings: int = 32_768
    max_window_layers: int = 28
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096  # set to None unless use_sliding_window
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): by max_window_layers

    def __post_init__(self):
        # Normalise as transformers does, so that equivalent configs compare equal.
        window = self.sliding_window if self.use_sliding_window else None
        slides = lambda n: window is not None and n >= self.max_window_layers
        object.__setattr__(self, "sliding_window", window)
        fill_layers(self, "layer_types", lambda n: "sliding_attention" if slides(n) else "full_attention")

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
QWEN: dict[str, Any] = dict(rope_theta=1_000_000.0)
TIED: dict[str, Any] = QWEN | dict(tie_word_embeddings=True)
LONG: dict[str, Any] = TIED | dict(rope_theta=5_000_000.0)
base = lambda size: dataclasses.replace(size, max_position_embeddings=32_768)
#                       vocab  hidden    mlp  layers  heads  kv  head  positions  max_window_layers
QWEN3_0_6B    = Config(151936,   1024,  3072,     28,    16,  8,  128,     40960,    28, **TIED)
QWEN3_1_7B    = Config(151936,   2048,  6144,     28,    16,  8,  128,     40960,    28, **TIED)
QWEN3_4B      = Config(151936,   2560,  9728,     36,    32,  8,  128,     40960,    36, **TIED)
QWEN3_4B_2507 = Config(151936,   2560,  9728,     36,    32,  8,  128,    262144,    36, **LONG)
QWEN3_8B      = Config(151936,   4096, 12288,     36,    32,  8,  128,     40960,    36, **QWEN)
QWEN3_14B     = Config(151936,   5120, 17408,     40,    40,  8,  128,     40960,    40, **QWEN)
QWEN3_32B     = Config(151936,   5120, 25600,     64,    64,  8,  128,     40960,    64, **QWEN)
# For retrieval: texts are embedded with head="embedding" (the 8B has no output embeddings), or ranked by yes and no.
EMBED_0_6B    = Config(151669,   1024,  3072,     28,    16,  8,  128,     32768,    28, **TIED)
EMBED_4B      = Config(151665,   2560,  9728,     36,    32,  8,  128,     40960,    36, **TIED)
EMBED_8B      = Config(151665,   4096, 12288,     36,    32,  8,  128,     40960,    36, **QWEN)
RANK_0_6B     = Config(151669,   1024,  3072,     28,    16,  8,  128,     40960,    28, **TIED)
RANK_4B       = Config(151669,   2560,  9728,     36,    32,  8,  128,     40960,    36, **TIED)
RANK_8B       = Config(151669,   4096, 12288,     36,    32,  8,  128,     40960,    36, **QWEN)

CONFIGS = {
    "qwen3-0.6b":             Released(QWEN3_0_6B,       "Qwen/Qwen3-0.6B"),
    "qwen3-0.6b-base":        Released(base(QWEN3_0_6B), "Qwen/Qwen3-0.6B-Base"),
    "qwen3-1.7b":             Released(QWEN3_1_7B,       "Qwen/Qwen3-1.7B"),
    "qwen3-1.7b-base":        Released(base(QWEN3_1_7B), "Qwen/Qwen3-1.7B-Base"),
    "qwen3-4b":               Released(QWEN3_4B,         "Qwen/Qwen3-4B"),
    "qwen3-4b-base":          Released(base(QWEN3_4B),   "Qwen/Qwen3-4B-Base"),
    "qwen3-4b-instruct-2507": Released(QWEN3_4B_2507,    "Qwen/Qwen3-4B-Instruct-2507"),
    "qwen3-4b-thinking-2507": Released(QWEN3_4B_2507,    "Qwen/Qwen3-4B-Thinking-2507"),
    "qwen3-8b":               Released(QWEN3_8B,         "Qwen/Qwen3-8B"),
    "qwen3-8b-base":          Released(base(QWEN3_8B),   "Qwen/Qwen3-8B-Base"),
    "qwen3-14b":              Released(QWEN3_14B,        "Qwen/Qwen3-14B"),
    "qwen3-14b-base":         Released(base(QWEN3_14B),  "Qwen/Qwen3-14B-Base"),
    "qwen3-32b":              Released(QWEN3_32B,        "Qwen/Qwen3-32B"),
    "qwen3-embedding-0.6b":   Released(EMBED_0_6B,       "Qwen/Qwen3-Embedding-0.6B"),
    "qwen3-embedding-4b":     Released(EMBED_4B,         "Qwen/Qwen3-Embedding-4B"),
    "qwen3-embedding-8b":     Released(EMBED_8B,         "Qwen/Qwen3-Embedding-8B"),
    "qwen3-reranker-0.6b":    Released(RANK_0_6B,        "Qwen/Qwen3-Reranker-0.6B"),
    "qwen3-reranker-4b":      Released(RANK_4B,          "Qwen/Qwen3-Reranker-4B"),
    "qwen3-reranker-8b":      Released(RANK_8B,          "Qwen/Qwen3-Reranker-8B"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: RMSNorm
    k_norm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q = self.rotary(self.q_norm(q), at)
        k = self.rotary(self.k_norm(k), at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=kernels.sliding(self.window))
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, key=attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        windows = [c.window(n) for n in range(c.num_hidden_layers)]
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), windows, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Qwen3",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("qwen3",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate_proj": P("tensor", "fsdp"),
        "layers.*.up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={"lm_head.*": "lm_head.{}", "*": "model.{}"},
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": OneOf(["silu", "swish"]),
    },
)
