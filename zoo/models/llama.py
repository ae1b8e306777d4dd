"""Llama 2 (arXiv:2307.09288), 3, 3.1, 3.2 and 3.3 (arXiv:2407.21783).

The decoder that the other families vary: pre-norm, rotary positions, grouped-query attention, SwiGLU, and no biases in
the released sizes. From 3.1 on, rotary frequencies are scaled for 131,072 positions. 3.2's small models tie their
embeddings. Llama Guard 3 says whether a chat is safe. Other makers' models with this decoder are SmolLM2
(arXiv:2502.02737) and those into which DeepSeek R1 is distilled (arXiv:2501.12948).
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
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu
from zoo.nn.model import AbstractConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import Llama3Scaling, RopeScaling, Rotary
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
LLAMA2: dict[str, Any] = dict(rms_norm_eps=1e-5)
LLAMA3: dict[str, Any] = LLAMA2 | dict(rope_theta=500_000.0)
LLAMA3_1: dict[str, Any] = LLAMA3 | dict(rope_scaling=Llama3Scaling(8.0, 1.0, 4.0, 8192))
LLAMA3_2: dict[str, Any] = LLAMA3_1 | dict(rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192), tie_word_embeddings=True)
SMOLLM2: dict[str, Any] = LLAMA2 | dict(rope_theta=100_000.0, tie_word_embeddings=True)
SMOLLM2_LARGE: dict[str, Any] = SMOLLM2 | dict(rope_theta=130_000.0)
#                       vocab  hidden    mlp  layers  heads  kv  positions
LLAMA2_7B     = Config( 32000,   4096, 11008,     32,    32, 32,   4096, **LLAMA2)
LLAMA2_13B    = Config( 32000,   5120, 13824,     40,    40, 40,   4096, **LLAMA2)
LLAMA2_70B    = Config( 32000,   8192, 28672,     80,    64,  8,   4096, **LLAMA2)
LLAMA3_8B     = Config(128256,   4096, 14336,     32,    32,  8,   8192, **LLAMA3)
LLAMA3_70B    = Config(128256,   8192, 28672,     80,    64,  8,   8192, **LLAMA3)
LLAMA3_1_8B   = Config(128256,   4096, 14336,     32,    32,  8, 131072, **LLAMA3_1)
LLAMA3_1_70B  = Config(128256,   8192, 28672,     80,    64,  8, 131072, **LLAMA3_1)
LLAMA3_1_405B = Config(128256,  16384, 53248,    126,   128,  8, 131072, **LLAMA3_1)
LLAMA3_2_1B   = Config(128256,   2048,  8192,     16,    32,  8, 131072, **LLAMA3_2)
LLAMA3_2_3B   = Config(128256,   3072,  8192,     28,    24,  8, 131072, **LLAMA3_2)
SMOLLM2_135M  = Config( 49152,    576,  1536,     30,     9,  3,   8192, **SMOLLM2)
SMOLLM2_360M  = Config( 49152,    960,  2560,     32,    15,  5,   8192, **SMOLLM2)
SMOLLM2_1_7B  = Config( 49152,   2048,  8192,     24,    32, 32,   8192, **SMOLLM2_LARGE)

CONFIGS = {
    "llama2-7b":                     Released(LLAMA2_7B,     "meta-llama/Llama-2-7b-hf"),
    "llama2-7b-chat":                Released(LLAMA2_7B,     "meta-llama/Llama-2-7b-chat-hf"),
    "llama2-13b":                    Released(LLAMA2_13B,    "meta-llama/Llama-2-13b-hf"),
    "llama2-13b-chat":               Released(LLAMA2_13B,    "meta-llama/Llama-2-13b-chat-hf"),
    "llama2-70b":                    Released(LLAMA2_70B,    "meta-llama/Llama-2-70b-hf"),
    "llama2-70b-chat":               Released(LLAMA2_70B,    "meta-llama/Llama-2-70b-chat-hf"),
    "llama3-8b":                     Released(LLAMA3_8B,     "meta-llama/Meta-Llama-3-8B"),
    "llama3-8b-instruct":            Released(LLAMA3_8B,     "meta-llama/Meta-Llama-3-8B-Instruct"),
    "llama3-70b":                    Released(LLAMA3_70B,    "meta-llama/Meta-Llama-3-70B"),
    "llama3-70b-instruct":           Released(LLAMA3_70B,    "meta-llama/Meta-Llama-3-70B-Instruct"),
    "llama3.1-8b":                   Released(LLAMA3_1_8B,   "meta-llama/Llama-3.1-8B"),
    "llama3.1-8b-instruct":          Released(LLAMA3_1_8B,   "meta-llama/Llama-3.1-8B-Instruct"),
    "llama3.1-70b":                  Released(LLAMA3_1_70B,  "meta-llama/Llama-3.1-70B"),
    "llama3.1-70b-instruct":         Released(LLAMA3_1_70B,  "meta-llama/Llama-3.1-70B-Instruct"),
    "llama3.1-405b":                 Released(LLAMA3_1_405B, "meta-llama/Llama-3.1-405B"),
    "llama3.1-405b-instruct":        Released(LLAMA3_1_405B, "meta-llama/Llama-3.1-405B-Instruct"),
    "llama3.2-1b":                   Released(LLAMA3_2_1B,   "meta-llama/Llama-3.2-1B"),
    "llama3.2-1b-instruct":          Released(LLAMA3_2_1B,   "meta-llama/Llama-3.2-1B-Instruct"),
    "llama3.2-3b":                   Released(LLAMA3_2_3B,   "meta-llama/Llama-3.2-3B"),
    "llama3.2-3b-instruct":          Released(LLAMA3_2_3B,   "meta-llama/Llama-3.2-3B-Instruct"),
    "llama3.3-70b":                  Released(LLAMA3_1_70B,  "meta-llama/Llama-3.3-70B-Instruct"),  # has no base
    "llama-guard-3-1b":              Released(LLAMA3_2_1B,   "meta-llama/Llama-Guard-3-1B"),
    "llama-guard-3-8b":              Released(LLAMA3_1_8B,   "meta-llama/Llama-Guard-3-8B"),
    "deepseek-r1-distill-llama-8b":  Released(LLAMA3_1_8B,   "deepseek-ai/DeepSeek-R1-Distill-Llama-8B"),
    "deepseek-r1-distill-llama-70b": Released(LLAMA3_1_70B,  "deepseek-ai/DeepSeek-R1-Distill-Llama-70B"),
    "smollm2-135m":                  Released(SMOLLM2_135M,  "HuggingFaceTB/SmolLM2-135M"),
    "smollm2-135m-instruct":         Released(SMOLLM2_135M,  "HuggingFaceTB/SmolLM2-135M-Instruct"),
    "smollm2-360m":                  Released(SMOLLM2_360M,  "HuggingFaceTB/SmolLM2-360M"),
    "smollm2-360m-instruct":         Released(SMOLLM2_360M,  "HuggingFaceTB/SmolLM2-360M-Instruct"),
    "smollm2-1.7b":                  Released(SMOLLM2_1_7B,  "HuggingFaceTB/SmolLM2-1.7B"),
    "smollm2-1.7b-instruct":         Released(SMOLLM2_1_7B,  "HuggingFaceTB/SmolLM2-1.7B-Instruct"),
    "skywork-reward-llama-3.1-8b-v0.2": Released(LLAMA3_1_8B, "Skywork/Skywork-Reward-Llama-3.1-8B-v0.2"),
}
# fmt: on


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
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

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotary(q, at), self.rotary(k, at)
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

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        head_dim = self.self_attn.head_dim
        return KV.init(layers, batch, length, self.self_attn.k_proj.shape[-2] // head_dim, head_dim, dtype)


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
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2; R1-Distill-Llama",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("llama",),
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
    redundant={"model.layers.*.self_attn.rotary_emb.inv_freq": None, "lm_head.weight": "model.embed_tokens.weight"},
    implied={
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "rope_interleaved": False,
        "hidden_act": OneOf(["silu", "swish"]),
    },
)
