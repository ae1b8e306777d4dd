"""gpt-oss 20B and 120B (arXiv:2508.10925): mixtures of experts with biases everywhere and attention sinks.

Layers alternate between a sliding window of 128 positions and full attention. YaRN extends the 4,096 positions of the
first training 32-fold. Each head has a sink: a learned logit that takes part in the softmax and adds no value. The
router chooses the four experts with the largest logits, weighted by the softmax over those four. Gate and up projection
of an expert are one matrix with alternating rows, and its SwiGLU is clamped. The released files store the experts in
MXFP4.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import spread
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Float32RMSNorm,
    Linear,
    project,
    recomputed,
)
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import Rotary, YarnScaling
from zoo.nn.stack import Caches, Reports, Stack


YARN = YarnScaling(32.0, 4096, truncate=False)
KINDS = ("sliding_attention", "full_attention")


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131_072
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    head_dim: int = 64
    rope_theta: float = 150_000.0
    rope_scaling: YarnScaling = YARN
    rms_norm_eps: float = 1e-5
    layer_types: tuple[str, ...] = ()  # one of KINDS for each layer; (): alternating
    sliding_window: int | None = 128
    swiglu_alpha: float = 1.702
    swiglu_limit: float = 7.0
    tie_word_embeddings: bool = False

    def __post_init__(self):
        types = self.layer_types or tuple(KINDS[n % 2] for n in range(self.num_hidden_layers))
        object.__setattr__(self, "layer_types", types)
        if len(types) != self.num_hidden_layers or set(types) - set(KINDS):
            raise ValueError(f"layer_types needs one of {' and '.join(KINDS)} for each layer, not {list(types)}.")

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
#                      vocab  hidden   mlp  layers  heads  kv  positions  experts
GPT_OSS_20B  = Config(201088,   2880, 2880,     24,    64,  8,    131072,      32)
GPT_OSS_120B = Config(201088,   2880, 2880,     36,    64,  8,    131072,     128)

CONFIGS = {
    "gpt-oss-20b":  Released(GPT_OSS_20B,  "openai/gpt-oss-20b"),
    "gpt-oss-120b": Released(GPT_OSS_120B, "openai/gpt-oss-120b"),
}
# fmt: on


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    sinks: Float[Array, " heads"]
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=True, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=True, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=True, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=True, key=o)
        self.sinks = jnp.zeros(c.num_attention_heads)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotary(q, at), self.rotary(k, at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        mask = kernels.sliding(self.window)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=mask, sinks=self.sinks)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class Router(eqx.Module):
    """Logits of all experts. Not a `Linear`, so that LoRA and quantization leave it alone."""

    weight: Float[Array, "experts embed"]
    bias: Float[Array, " experts"]

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        shape = (config.num_local_experts, config.hidden_size)
        self.weight = 0.02 * jax.random.truncated_normal(key, -3, 3, shape)
        self.bias = jnp.zeros(config.num_local_experts)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch experts"]:
        logits = kernels.apart(jnp.einsum("...d,ed->...e", x, self.weight))
        return logits + spread(self.bias, logits.shape)


class Experts(eqx.Module):
    gate_up_proj: AbstractExpertLinear  # rows: gate, up, gate, up, ...
    down_proj: AbstractExpertLinear
    alpha: float = eqx.field(static=True)
    limit: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate_up, down) = config, jax.random.split(key)
        experts, width = c.num_local_experts, c.intermediate_size
        self.gate_up_proj = ExpertLinear(experts, c.hidden_size, 2 * width, bias=True, key=gate_up)
        self.down_proj = ExpertLinear(experts, width, c.hidden_size, bias=True, key=down)
        self.alpha, self.limit = c.swiglu_alpha, c.swiglu_limit

    def __call__(self, x: Float[Array, "rows embed"], sizes: Int[Array, " experts"]) -> Float[Array, "rows embed"]:
        return self.down_proj(self.gated(self.gate_up_proj(x, sizes)), sizes)

    @recomputed
    def gated(self, y: Float[Array, "rows twice"]) -> Float[Array, "rows width"]:
        gate = jnp.minimum(y[:, 0::2], self.limit)
        up = jnp.clip(y[:, 1::2], -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


class MLP(eqx.Module):
    router: Router
    experts: Experts
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        router, experts = jax.random.split(key)
        self.router = Router(config, key=router)
        self.experts = Experts(config, key=experts)
        self.top_k = config.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.router(x)
        _, best, chosen = moe.choose(logits, self.top_k)
        y = moe.dispatch(self.experts, x, chosen, jax.nn.softmax(best, axis=-1), lambda experts: experts.down_proj)
        probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        return y, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: Float32RMSNorm
    self_attn: Attention
    post_attention_layernorm: Float32RMSNorm
    mlp: MLP

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, key=attention)
        self.post_attention_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, moe.Routing]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y, routing = self.mlp(self.post_attention_layernorm(x), at.segments)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window)


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
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), c.layer_types, key=layers)
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


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Drop two keys of released files that repeat others. One that says otherwise stays, and is skipped."""
    rope = hub.get("rope_parameters") or hub.get("rope_scaling") or {}
    repeats = {
        "experts_per_token": hub.get("num_experts_per_tok"),
        "initial_context_length": rope.get("original_max_position_embeddings"),
    }
    return {key: value for key, value in hub.items() if key not in repeats or value != repeats[key]}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="gpt-oss",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("gpt_oss",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.sinks": P(),
        "layers.*.router.*": P(),
        "layers.*.experts.gate_up_proj": P("expert", "tensor", "fsdp"),
        "layers.*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "layers.*.experts.*.weight": "model.layers.{}.experts.{}^T",  # ^T: the last two axes are swapped
        "layers.*.experts.*.bias": "model.layers.{}.experts.{}_bias",
        "*": "model.{}",
    },
    mxfp4=["layers.*.experts.*.weight"],
    implied={
        "architectures": ["GptOssForCausalLM"],
        "model_type": "gpt_oss",
        "hidden_act": OneOf(["silu", "swish"]),
        "attention_bias": True,
    },
    standard_form=standard_form,
)
