"""Granite 4.1 (IBM, 2026): Llama's decoder with four multipliers, in the places of muP (arXiv:2203.03466).

They scale the embeddings, what attention and the MLP add, the scores of attention in place of 1 / sqrt(head_dim), and,
as a divisor, the logits. Granite 3 has the same architecture; Granite 4.0, with recurrences and experts, is
zoo/models/granite4.py.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu, times
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
    num_key_value_heads: int = 0  # 0, or null in config.json: num_attention_heads
    max_position_embeddings: int = 2048
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values


# fmt: off
GRANITE: dict[str, Any] = dict(
    embedding_multiplier=12.0, residual_multiplier=0.22, rope_theta=10_000_000.0, rms_norm_eps=1e-5,
)
SMALL: dict[str, Any] = GRANITE | dict(attention_multiplier=1 / 64, logits_scaling=10.0, tie_word_embeddings=True)
LARGE: dict[str, Any] = GRANITE | dict(attention_multiplier=1 / 128, logits_scaling=16.0)
#                       vocab  hidden    mlp  layers  heads  kv  positions
GRANITE4_1_3B = Config(100352,   2560,  8192,     40,    40,  8,    131072, **SMALL)
GRANITE4_1_8B = Config(100352,   4096, 12800,     40,    32,  8,    131072, **LARGE)

CONFIGS = {
    "granite4.1-3b": Released(GRANITE4_1_3B, "ibm-granite/granite-4.1-3b"),
    "granite4.1-8b": Released(GRANITE4_1_8B, "ibm-granite/granite-4.1-8b"),
}
# fmt: on


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    scale: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        self.scale = c.attention_multiplier
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotary(q, at), self.rotary(k, at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.scale)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP
    residual_multiplier: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)
        self.residual_multiplier = config.residual_multiplier

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + times(y, self.residual_multiplier)
        y = self.mlp(self.post_attention_layernorm(x))
        return x + times(y, self.residual_multiplier), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return KV.init(layers, batch, length, heads, a.head_dim, dtype)


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
        self.layers = Stack(lambda n, *, key: Block(c, key=key), ["full"] * c.num_hidden_layers, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = times(self.embed_tokens(tokens), self.config.embedding_multiplier)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        logits = self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)
        return times(logits, 1 / self.config.logits_scaling)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Granite 4.1",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("granite",),
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
        "architectures": ["GraniteForCausalLM"],
        "model_type": "granite",
        "hidden_act": OneOf(["silu", "swish"]),
    },
)
