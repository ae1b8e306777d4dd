"""Olmo 2 (arXiv:2501.00656): Llama's decoder, with norms after attention and the MLP and none before them.

Queries and keys have an RMSNorm too, over all heads of a token together. Rotary positions are applied in float32.
"""

import dataclasses
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV
from zoo.nn.layers import AbstractLinear, Embedding, Float32RMSNorm, Linear, project, swiglu
from zoo.nn.model import AbstractConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0, or null in config.json: num_attention_heads
    vocab_size: int = 50_304
    max_position_embeddings: int = 2048
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self):
        # Fill in what follows from other fields, so that equivalent configs compare equal.
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values


# fmt: off
OLMO: dict[str, Any] = dict(rope_theta=500_000.0, rms_norm_eps=1e-6)
#                  hidden    mlp  layers  heads  kv   vocab  positions
OLMO2_7B  = Config(  4096, 11008,     32,    32, 32, 100352,      4096, **OLMO)
OLMO2_13B = Config(  5120, 13824,     40,    40, 40, 100352,      4096, **OLMO)

CONFIGS = {
    "olmo2-7b":           Released(OLMO2_7B,  "allenai/OLMo-2-1124-7B"),
    "olmo2-7b-instruct":  Released(OLMO2_7B,  "allenai/OLMo-2-1124-7B-Instruct"),
    "olmo2-13b":          Released(OLMO2_13B, "allenai/OLMo-2-1124-13B"),
    "olmo2-13b-instruct": Released(OLMO2_13B, "allenai/OLMo-2-1124-13B-Instruct"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: Float32RMSNorm
    k_norm: Float32RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = Float32RMSNorm(queries, c.rms_norm_eps)
        self.k_norm = Float32RMSNorm(keys, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        rotated = lambda y: self.rotary(heads(y).astype(jnp.float32), at).astype(x.dtype)
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = rotated(self.q_norm(q)), rotated(self.k_norm(k)), heads(v)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
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
    self_attn: Attention
    post_attention_layernorm: Float32RMSNorm
    mlp: MLP
    post_feedforward_layernorm: Float32RMSNorm

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)
        self.post_feedforward_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, None]:
        y, cache = self.self_attn(x, cache, at)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return KV.init(layers, batch, length, heads, a.head_dim, dtype)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    norm: Float32RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, key=key), ["full"] * c.num_hidden_layers, key=layers)
        self.norm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
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
    title="Olmo 2",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("olmo2",),
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
        "architectures": ["Olmo2ForCausalLM"],
        "model_type": "olmo2",
        "hidden_act": OneOf(["silu", "swish"]),
    },
)
