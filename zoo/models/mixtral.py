"""Mixtral 8x7B and 8x22B (arXiv:2401.04088): Mistral's decoder with a mixture of eight experts as its MLP.

The router sends each token to two experts. Their outputs are weighted by the softmax over all of the router's logits,
rescaled so that the two weights sum to one. The configuration allows a sliding window; no released model uses one.
"""

import dataclasses

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Linear,
    RMSNorm,
    project,
    swiglu,
)
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131_072
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    num_local_experts: int = 8
    num_experts_per_tok: int = 2
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    sliding_window: int | None = None
    tie_word_embeddings: bool = False

    def __post_init__(self):
        if not self.head_dim:
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
#                               vocab  hidden    mlp  layers  heads  kv  positions
MIXTRAL_8X7B           = Config(32000,   4096, 14336,     32,    32,  8,     32768)
MIXTRAL_8X22B          = Config(32000,   6144, 16384,     56,    48,  8,     65536)
MIXTRAL_8X22B_INSTRUCT = Config(32768,   6144, 16384,     56,    48,  8,     65536)

CONFIGS = {
    "mixtral-8x7b":           Released(MIXTRAL_8X7B,           "mistralai/Mixtral-8x7B-v0.1"),
    "mixtral-8x7b-instruct":  Released(MIXTRAL_8X7B,           "mistralai/Mixtral-8x7B-Instruct-v0.1"),
    "mixtral-8x22b":          Released(MIXTRAL_8X22B,          "mistralai/Mixtral-8x22B-v0.1"),
    "mixtral-8x22b-instruct": Released(MIXTRAL_8X22B_INSTRUCT, "mistralai/Mixtral-8x22B-Instruct-v0.1"),
}
# fmt: on


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        self.window = c.sliding_window
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, key=q)
        self.k_proj = Linear(c.hidden_size, keys, key=k)
        self.v_proj = Linear(c.hidden_size, keys, key=v)
        self.o_proj = Linear(queries, c.hidden_size, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotary(q, at), self.rotary(k, at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=kernels.sliding(self.window))
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class Experts(eqx.Module):
    w1: AbstractExpertLinear  # gate
    w2: AbstractExpertLinear  # down
    w3: AbstractExpertLinear  # up

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, down, up) = config, jax.random.split(key, 3)
        self.w1 = ExpertLinear(c.num_local_experts, c.hidden_size, c.intermediate_size, key=gate)
        self.w2 = ExpertLinear(c.num_local_experts, c.intermediate_size, c.hidden_size, key=down)
        self.w3 = ExpertLinear(c.num_local_experts, c.hidden_size, c.intermediate_size, key=up)

    def __call__(self, x: Float[Array, "rows embed"], sizes: Int[Array, " experts"]) -> Float[Array, "rows embed"]:
        return self.w2(swiglu(x, self.w1, self.w3, sizes), sizes)


class MoE(eqx.Module):
    gate: Router
    experts: Experts
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        gate, experts = jax.random.split(key)
        self.gate = Router(config.hidden_size, config.num_local_experts, key=gate)
        self.experts = Experts(config, key=experts)
        self.top_k = config.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.gate(x)
        probability, weights, chosen = moe.choose(logits, self.top_k, "softmax", normalise=0.0)
        y = moe.dispatch(self.experts, x, chosen, weights.astype(x.dtype), lambda experts: experts.w2)
        return y, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    block_sparse_moe: MoE

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, experts = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.block_sparse_moe = MoE(config, key=experts)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, moe.Routing]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y, routing = self.block_sparse_moe(self.post_attention_layernorm(x), at.segments)
        return x + y, cache, routing

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
        self.layers = Stack(lambda n, *, key: Block(c, key=key), ["moe"] * c.num_hidden_layers, key=layers)
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
    title="Mixtral",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("mixtral",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate.weight": P(),
        "layers.*.experts.w[13]": P("expert", "tensor", "fsdp"),
        "layers.*.experts.w2": P("expert", "fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "layers.*.experts.*.weight": "model.layers.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    implied={
        "architectures": ["MixtralForCausalLM"],
        "model_type": "mixtral",
        "hidden_act": OneOf(["silu", "swish"]),
    },
    experts_in_transformers={
        "block_sparse_moe.experts.w1": ("mlp.experts.gate_up_proj", 0),
        "block_sparse_moe.experts.w3": ("mlp.experts.gate_up_proj", 1),
        "block_sparse_moe.experts.w2": ("mlp.experts.down_proj", None),
    },
)
