"""LFM2-8B-A1B and LFM2.5-8B-A1B (Liquid AI, arXiv:2511.23404): LFM2 with experts in all layers but the first.

Gated short convolutions stand beside grouped-query attention, as in LFM2. The experts' scores are sigmoids in the dtype
of the tokens, and a bias that affects only which experts are chosen evens their load.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, AbstractCache
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Float32,
    Linear,
    RMSNorm,
    project,
    swiglu,
)
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.routing import AbstractBiasedRouter, rebalance
from zoo.nn.short_conv import ShortConv
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP in dense layers
    moe_intermediate_size: int  # width of each expert
    num_hidden_layers: int
    num_attention_heads: int
    layer_types: tuple[Literal["conv", "full_attention"], ...]
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128_000
    num_experts: int = 32
    num_experts_per_tok: int = 4
    num_dense_layers: int = 2  # the first layers
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    conv_L_cache: int = 3  # tokens that a convolution sees, its own among them
    conv_bias: bool = False
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        if (count := len(self.layer_types)) != self.num_hidden_layers:
            raise ValueError(f"layer_types has {count} entries, but num_hidden_layers is {self.num_hidden_layers}.")
        if self.num_experts < 2:
            raise ValueError("num_experts=1: there are no experts to choose from.")

    def attention_products(self, layer: int, seq: int) -> float:
        if self.layer_types[layer] == "conv":
            return float(self.conv_L_cache * self.hidden_size)
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values


# fmt: off
ATTENTION = 2, 6, 10, 14, 18, 21
LAYERS: Any = tuple("full_attention" if n in ATTENTION else "conv" for n in range(24))
#                        vocab hidden   mlp expert layers heads
LFM2_8B_A1B   = Config( 65536,  2048, 7168,  1792,    24,   32, LAYERS)
LFM2_5_8B_A1B = Config(128000,  2048, 7168,  1792,    24,   32, LAYERS, rope_theta=5_000_000.0)

CONFIGS = {
    "lfm2-8b-a1b":   Released(LFM2_8B_A1B,   "LiquidAI/LFM2-8B-A1B"),
    "lfm2.5-8b-a1b": Released(LFM2_5_8B_A1B, "LiquidAI/LFM2.5-8B-A1B"),
}
# fmt: on


class Attention(AbstractMixer):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    out_proj: AbstractLinear
    q_layernorm: RMSNorm
    k_layernorm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, out) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, key=q)
        self.k_proj = Linear(c.hidden_size, keys, key=k)
        self.v_proj = Linear(c.hidden_size, keys, key=v)
        self.out_proj = Linear(queries, c.hidden_size, key=out)
        self.q_layernorm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_layernorm = RMSNorm(c.head_dim, c.norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q = self.rotary(self.q_layernorm(q), at)
        k = self.rotary(self.k_layernorm(k), at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
        return self.out_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return KV.init(layers, batch, length, self.k_proj.shape[-2] // self.head_dim, self.head_dim, dtype)


class MLP(eqx.Module):
    """One gated MLP for all rows; or one for each expert, where expert i takes the next `sizes[i]` rows."""

    w1: AbstractLinear | AbstractExpertLinear  # gate
    w2: AbstractLinear | AbstractExpertLinear  # down
    w3: AbstractLinear | AbstractExpertLinear  # up

    def __init__(self, linear: Callable[..., Any], hidden: int, width: int, *, key: PRNGKeyArray):
        gate, down, up = jax.random.split(key, 3)
        self.w1 = linear(hidden, width, key=gate)
        self.w2 = linear(width, hidden, key=down)
        self.w3 = linear(hidden, width, key=up)

    def __call__(self, x: Float[Array, "*rows embed"], *sizes: Int[Array, " experts"]) -> Float[Array, "*rows embed"]:
        return self.w2(swiglu(x, self.w1, self.w3, *sizes), *sizes)


class Router(AbstractBiasedRouter):
    """`AbstractBiasedRouter` in the dtype of the tokens."""

    weight: Float[Array, "experts embed"]
    e_score_correction_bias: Float32

    def __init__(self, hidden: int, experts: int, *, key: PRNGKeyArray):
        self.weight = 0.02 * jax.random.truncated_normal(key, -3, 3, (experts, hidden))
        self.e_score_correction_bias = Float32(jnp.zeros(experts))

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch experts"]:
        return jnp.einsum("...d,ed->...e", x, self.weight)


class MoE(eqx.Module):
    gate: Router
    experts: MLP  # one MLP for each expert
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts) = config, jax.random.split(key)
        each = lambda *sizes, key: ExpertLinear(c.num_experts, *sizes, key=key)
        self.config = c
        self.gate = Router(c.hidden_size, c.num_experts, key=gate)
        self.experts = MLP(each, c.hidden_size, c.moe_intermediate_size, key=experts)

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        scores = jax.nn.sigmoid(logits).astype(jnp.float32)
        normalise = 1e-6 if c.norm_topk_prob else None  # so that the weights add up to 1
        _, weights, chosen = self.gate.choose(scores, c.num_experts_per_tok, normalise=normalise)
        weights = (c.routed_scaling_factor * weights).astype(x.dtype)
        y = moe.dispatch(self.experts, x, chosen, weights, lambda experts: experts.w2)
        return y, moe.Routing.of(logits, scores / jnp.sum(scores, axis=-1, keepdims=True), chosen, segments)


class Block(AbstractDecoderBlock):
    operator_norm: RMSNorm
    conv: ShortConv | None  # a layer has this mixer
    self_attn: Attention | None  # or this one
    ffn_norm: RMSNorm
    feed_forward: MLP | MoE
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, kind: str, dense: bool, *, key: PRNGKeyArray):
        c, (mixer, mlp) = config, jax.random.split(key)
        self.operator_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.conv = ShortConv(c.hidden_size, c.conv_L_cache, bias=c.conv_bias, key=mixer) if kind == "conv" else None
        self.self_attn = Attention(c, key=mixer) if kind == "full_attention" else None
        self.ffn_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.feed_forward = MLP(Linear, c.hidden_size, c.intermediate_size, key=mlp) if dense else MoE(c, key=mlp)

    @property
    def mixer(self) -> AbstractMixer:
        mixer = self.conv or self.self_attn
        assert mixer is not None
        return mixer

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, moe.Routing | None]:
        y, cache = self.mixer(self.operator_norm(x), cache, at)
        x = x + y
        y, mlp = self.ffn_norm(x), self.feed_forward
        y, routing = mlp(y, at.segments) if isinstance(mlp, MoE) else (mlp(y), None)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.mixer.init_cache(layers, batch, length, dtype)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    embedding_norm: RMSNorm  # of the last features, whatever its name
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        kinds = [(kind, n < c.num_dense_layers) for n, kind in enumerate(c.layer_types)]
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, *kinds[n], key=key), kinds, key=layers)
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.embedding_norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="LFM2-MoE, LFM2.5-MoE",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("lfm2_moe",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.out_proj": P("fsdp", "tensor"),
        "*_proj": P("tensor", "fsdp"),
        "*.experts.w[13]": P("expert", "tensor", "fsdp"),
        "*.experts.w2": P("expert", "fsdp", "tensor"),
        "*.w[13]": P("tensor", "fsdp"),
        "*.w2": P("fsdp", "tensor"),
        "*.gate.*": P(),
        "*.conv.conv.*": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "*.gate.e_score_correction_bias.value": "model.{}.expert_bias",
        "*.experts.*.weight": "model.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={"architectures": ["Lfm2MoeForCausalLM"], "model_type": "lfm2_moe", "use_expert_bias": True},
    experts_in_transformers={
        "experts.w1": ("experts.gate_up_proj", 0),
        "experts.w3": ("experts.gate_up_proj", 1),
        "experts.w2": ("experts.down_proj", None),
    },
    rebalance=rebalance,
)
