"""GLM-4.5 (arXiv:2508.06471), 4.6 and 4.7: grouped-query attention and DeepSeek V3's mixtures of experts.

Rotary positions turn half of each head. Queries, keys and values have biases, and the large models norm the heads of
queries and keys. The first layers are dense. The experts' scores are sigmoids, and a bias that affects only which
experts are chosen evens their load. A module predicts one more token.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

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
from zoo.nn.cache import KV
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
from zoo.nn.model import AbstractMixtureConfig, Family, OneOf, Released, causal_keys
from zoo.nn.mtp import AbstractMTPModel, NextNMTP
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.routing import BiasedRouter, rebalance
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP in dense layers
    moe_intermediate_size: int  # width of each expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    n_routed_experts: int = 128
    max_position_embeddings: int = 131_072
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 1
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 0.5
    rms_norm_eps: float = 1e-5
    attention_bias: bool = False  # of queries, keys and values
    use_qk_norm: bool = False
    tie_word_embeddings: bool = False
    num_nextn_predict_layers: int = 1

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        each, rest = divmod(self.n_routed_experts, self.n_group)
        enough = self.topk_group <= self.n_group and self.num_experts_per_tok <= self.topk_group * each
        if rest or each < 2 or not enough:
            raise ValueError(
                f"{self.num_experts_per_tok} of {self.n_routed_experts} experts cannot be chosen from topk_group "
                f"{self.topk_group} of n_group {self.n_group} groups."
            )

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values

    mtp_layer = property(lambda self: self.num_hidden_layers if self.num_nextn_predict_layers else None)


# fmt: off
GLM: dict[str, Any] = dict(head_dim=128, rope_theta=1e6, attention_bias=True)
LARGE: dict[str, Any] = GLM | dict(use_qk_norm=True, routed_scaling_factor=2.5, first_k_dense_replace=3)
#                   vocab  hidden    mlp expert layers heads kv experts positions
GLM_4_5     = Config(151552, 5120, 12288,  1536,    92,   96, 8,    160,   131072, **LARGE)
GLM_4_5_AIR = Config(151552, 4096, 10944,  1408,    46,   96, 8,    128,   131072, **GLM)
GLM_4_6     = Config(151552, 5120, 12288,  1536,    92,   96, 8,    160,   202752, **LARGE)

CONFIGS = {
    "glm4.5":      Released(GLM_4_5,     "zai-org/GLM-4.5"),
    "glm4.5-base": Released(GLM_4_5,     "zai-org/GLM-4.5-Base"),
    "glm4.5-air":  Released(GLM_4_5_AIR, "zai-org/GLM-4.5-Air"),
    "glm4.6":      Released(GLM_4_6,     "zai-org/GLM-4.6"),
    "glm4.7":      Released(GLM_4_6,     "zai-org/GLM-4.7"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: RMSNorm | None  # with use_qk_norm
    k_norm: RMSNorm | None
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(int(c.head_dim * c.partial_rotary_factor), c.rope_theta, c.rope_scaling)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, key=o)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.use_qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps) if c.use_qk_norm else None

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rotary(q, at), self.rotary(k, at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class MLP(eqx.Module):
    """One gated MLP for all rows; or one for each expert, where expert i takes the next `sizes[i]` rows."""

    gate_proj: AbstractLinear | AbstractExpertLinear
    up_proj: AbstractLinear | AbstractExpertLinear
    down_proj: AbstractLinear | AbstractExpertLinear

    def __init__(self, linear: Callable[..., Any], hidden: int, width: int, *, key: PRNGKeyArray):
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = linear(hidden, width, key=gate)
        self.up_proj = linear(hidden, width, key=up)
        self.down_proj = linear(width, hidden, key=down)

    def __call__(self, x: Float[Array, "*rows embed"], *sizes: Int[Array, " experts"]) -> Float[Array, "*rows embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj, *sizes), *sizes)


class MoE(eqx.Module):
    gate: BiasedRouter
    experts: MLP  # one MLP for each expert
    shared_experts: MLP  # all of them as one wide MLP
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared) = config, jax.random.split(key, 3)
        each = lambda *sizes, key: ExpertLinear(c.n_routed_experts, *sizes, key=key)
        self.config = c
        self.gate = BiasedRouter(c.hidden_size, c.n_routed_experts, key=gate)
        self.experts = MLP(each, c.hidden_size, c.moe_intermediate_size, key=experts)
        self.shared_experts = MLP(Linear, c.hidden_size, c.n_shared_experts * c.moe_intermediate_size, key=shared)

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        normalise = 1e-20 if c.norm_topk_prob else None  # so that the weights add up to 1
        scores, weights, chosen = self.gate.choose(
            logits, c.num_experts_per_tok, "sigmoid", groups=c.n_group, kept=c.topk_group, normalise=normalise
        )
        weights = (c.routed_scaling_factor * weights).astype(x.dtype)
        y = moe.dispatch(self.experts, x, chosen, weights, lambda experts: experts.down_proj)
        routing = moe.Routing.of(logits, scores / jnp.sum(scores, axis=-1, keepdims=True), chosen, segments)
        return moe.with_shared(y, self.shared_experts(x)), routing


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, key=attention)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c, key=mlp) if kind == "moe" else MLP(Linear, c.hidden_size, c.intermediate_size, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return KV.init(layers, batch, length, heads, a.head_dim, dtype)


class Model(AbstractMTPModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    mtp: NextNMTP | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): none."""
        c, (embed, layers, head, project, block) = config, jax.random.split(key, 5)
        if "mtp" in parts and c.num_nextn_predict_layers != 1:
            raise ValueError(f"The part mtp needs num_nextn_predict_layers=1, not {c.num_nextn_predict_layers}.")
        kinds = ["dense" if n < c.first_k_dense_replace else "moe" for n in range(c.num_hidden_layers)]
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, kinds[n], key=key), kinds, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.mtp = None
        if "mtp" in parts:
            self.mtp = NextNMTP(c.hidden_size, c.rms_norm_eps, Block(c, "moe", key=block), key=project)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="GLM-4.5, GLM-4.6, GLM-4.7",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("glm4_moe",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.experts.*": P("expert", "tensor", "fsdp"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*_proj": P("tensor", "fsdp"),
        "*.gate.*": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={  # MTP is stored like one more layer
        "lm_head.*": "lm_head.{}",
        "mtp.block.*.experts.*.weight": "model.layers.{config.mtp_layer}.{}.experts.{expert}.{}.weight",
        "mtp.block.*_bias.value": "model.layers.{config.mtp_layer}.{}_bias",
        "mtp.block.*": "model.layers.{config.mtp_layer}.{}",
        "mtp.norm.*": "model.layers.{config.mtp_layer}.shared_head.norm.{}",
        "mtp.*": "model.layers.{config.mtp_layer}.{}",
        "*.experts.*.weight": "model.{}.experts.{expert}.{}.weight",
        "*_bias.value": "model.{}_bias",
        "*": "model.{}",
    },
    redundant={"model.layers.{config.mtp_layer}.*": None},  # MTP: all of it, or its copies of embedding and head
    implied={
        "architectures": ["Glm4MoeForCausalLM"],
        "model_type": "glm4_moe",
        "hidden_act": OneOf(["silu", "swish"]),
    },
    parts={"mtp": "a module that predicts the token after the next (multi-token prediction)"},
    rebalance=rebalance,
)
