"""Mistral 7B (arXiv:2310.06825) and Nemo: Llama's decoder; in the first release every layer has a sliding window.

From v0.2 on there is no window and the rotary base is 1,000,000. v0.3 has a larger vocabulary, and Nemo, a model of
12 billion parameters, a still larger one; its heads together are narrower than the residual stream. The text model of
Mistral Small 3 is one of these, too; with its vision tower it is of `zoo.models.mistral3`.
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
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.clip import AbstractGroupedAttention
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
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131_072
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    sliding_window: int | None = 4096
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
V1: dict[str, Any] = dict(rms_norm_eps=1e-5)
V2: dict[str, Any] = V1 | dict(sliding_window=None, rope_theta=1_000_000.0)
#                         vocab  hidden    mlp  layers  heads  kv  positions
MISTRAL_7B_V0_1 = Config( 32000,   4096, 14336,     32,    32,  8,  32768, **V1)
MISTRAL_7B_V0_2 = Config( 32000,   4096, 14336,     32,    32,  8,  32768, **V2)  # its base is not on the Hub
MISTRAL_7B_V0_3 = Config( 32768,   4096, 14336,     32,    32,  8,  32768, **V2)
MISTRAL_NEMO    = Config(131072,   5120, 14336,     40,    32,  8, 131072, head_dim=128, **V2)

CONFIGS = {
    "mistral-7b-v0.1":          Released(MISTRAL_7B_V0_1, "mistralai/Mistral-7B-v0.1"),
    "mistral-7b-v0.1-instruct": Released(MISTRAL_7B_V0_1, "mistralai/Mistral-7B-Instruct-v0.1"),
    "mistral-7b-v0.2-instruct": Released(MISTRAL_7B_V0_2, "mistralai/Mistral-7B-Instruct-v0.2"),
    "mistral-7b-v0.3":          Released(MISTRAL_7B_V0_3, "mistralai/Mistral-7B-v0.3"),
    "mistral-7b-v0.3-instruct": Released(MISTRAL_7B_V0_3, "mistralai/Mistral-7B-Instruct-v0.3"),
    "mistral-nemo-12b":         Released(MISTRAL_NEMO,    "mistralai/Mistral-Nemo-Instruct-2407"),
    "mistral-nemo-12b-base":    Released(MISTRAL_NEMO,    "mistralai/Mistral-Nemo-Base-2407"),
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

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
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
        self.layers = Stack(lambda n, *, key: Block(c, key=key), [c.sliding_window] * c.num_hidden_layers, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x, cache, reports = self.layers(self.embed_tokens(tokens), cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Mistral 7B, Nemo",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("mistral",),
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
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_act": OneOf(["silu", "swish"]),
    },
)
