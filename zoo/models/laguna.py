"""Laguna XS.2 and XS-2.1 (poolside, 2026): mixtures of small experts, and attention whose output has a gate.

Three of four layers have a sliding window, and more query heads than the others. Rotary positions turn whole heads
there. In full attention they turn half of each head, by another base, and are scaled by YaRN. The gate is the softplus
of one number for each head. The first layer is dense. The experts' scores are sigmoids of logits, which may be capped,
and a bias that affects only which experts are chosen evens their load. One more expert gets every token.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import scaled
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.fields import fill_layers
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Linear,
    RMSNorm,
    project,
    recomputed,
    swiglu,
)
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import Rotary, YarnScaling
from zoo.nn.routing import BiasedRouter, rebalance
from zoo.nn.stack import Caches, Reports, Stack


FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary positions of a kind of layers."""

    rope_theta: float
    partial_rotary_factor: float = 1.0  # the part of each head that turns
    rope_type: Literal["default", "yarn"] = "default"
    factor: float | None = None  # this and the next ones belong to YaRN
    original_max_position_embeddings: int | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None

    @property
    def scaling(self) -> YarnScaling | None:
        """The scaling of the frequencies, if there is one.

        Raises:
            ValueError: if YaRN lacks a number, or there are some without YaRN.
        """
        if self.rope_type == "default":
            if self != Rope(self.rope_theta, self.partial_rotary_factor):
                raise ValueError('rope_parameters has numbers of YaRN in a rope of the rope_type "default".')
            return None
        factor, original = self.factor, self.original_max_position_embeddings
        if factor is None or original is None:
            raise ValueError("rope_parameters needs factor and original_max_position_embeddings for YaRN.")
        return YarnScaling(factor, original, self.beta_fast, self.beta_slow, self.attention_factor)


@dataclasses.dataclass(frozen=True)
class Ropes:
    """The rotary positions of both kinds of layers."""

    full_attention: Rope = Rope(500_000.0, 0.5)
    sliding_attention: Rope = Rope(10_000.0)


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP in dense layers
    moe_intermediate_size: int  # width of each expert
    shared_expert_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    num_experts: int = 256
    max_position_embeddings: int = 131_072
    num_attention_heads_per_layer: tuple[int, ...] = ()  # (): num_attention_heads
    head_dim: int = 128
    layer_types: tuple[Literal["full_attention", "sliding_attention"], ...] = ()  # (): all are full
    mlp_layer_types: tuple[Literal["dense", "sparse"], ...] = ()  # (): all but the first are sparse
    sliding_window: int = 512
    rope_parameters: Ropes = Ropes()
    gating: Literal["per-head", "per-element"] = "per-head"
    num_experts_per_tok: int = 8
    moe_routed_scaling_factor: float = 1.0
    moe_router_logit_softcapping: float = 0.0  # 0: logits are not capped
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self):
        fill_layers(self, "num_attention_heads_per_layer", lambda _: self.num_attention_heads)
        fill_layers(self, "layer_types", lambda _: FULL)
        fill_layers(self, "mlp_layer_types", lambda n: "sparse" if n else "dense")
        for heads in self.num_attention_heads_per_layer:
            if heads < 1 or heads % self.num_key_value_heads:
                raise ValueError(
                    f"num_attention_heads_per_layer has {heads}, which is no multiple of num_key_value_heads="
                    f"{self.num_key_value_heads}."
                )
        for kind in {*self.layer_types}:
            self.rotary(kind)  # refuses what gives no angles

    def rotary(self, kind: str) -> Rotary:
        """Returns the rotary positions of layers of this kind.

        Raises:
            ValueError: if their numbers give no angles.
        """
        rope = self.rope_parameters.full_attention if kind == FULL else self.rope_parameters.sliding_attention
        if (part := rope.partial_rotary_factor) > 1:
            raise ValueError(f"partial_rotary_factor={part}; at most 1, the whole head, can turn.")
        return Rotary(int(self.head_dim * part), rope.rope_theta, rope.scaling)

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def attention_products(self, layer: int, seq: int) -> float:
        heads = self.num_attention_heads_per_layer[layer]
        return heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
XS: dict[str, Any] = dict(
    num_attention_heads_per_layer=(48, 64, 64, 64) * 10, layer_types=(FULL, *(SLIDING,) * 3) * 10,
    moe_routed_scaling_factor=2.5,
)
YARN_2   = Rope(500_000.0, 0.5, "yarn", 64.0, 4096, beta_fast=64.0, attention_factor=1.4158883083359672)
YARN_2_1 = Rope(500_000.0, 0.5, "yarn", 32.0, 8192, beta_fast=64.0, attention_factor=1.3465735902799727)
#                       vocab  hidden   mlp expert shared layers heads kv experts positions
LAGUNA_XS_2   = Config(100352,   2048, 8192,   512,   512,    40,   48, 8,    256,   262144,
                       rope_parameters=Ropes(YARN_2), **XS)
LAGUNA_XS_2_1 = Config(100352,   2048, 8192,   512,   512,    40,   48, 8,    256,   262144,
                       rope_parameters=Ropes(YARN_2_1), **XS)

CONFIGS = {
    "laguna-xs-2":   Released(LAGUNA_XS_2,   "poolside/Laguna-XS.2"),
    "laguna-xs-2.1": Released(LAGUNA_XS_2_1, "poolside/Laguna-XS-2.1"),
}
# fmt: on


@recomputed
def softplus(x: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
    """Computes log(1 + exp(x)) in float32, and rounds once."""
    return jax.nn.softplus(x.astype(jnp.float32)).astype(x.dtype)


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    g_proj: AbstractLinear  # a gate of each head, or of each of its features
    o_proj: AbstractLinear
    q_norm: RMSNorm
    k_norm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, g, o) = config, jax.random.split(key, 5)
        self.head_dim = c.head_dim
        self.rotary = c.rotary(c.layer_types[layer])
        self.window = c.window(layer)
        heads = c.num_attention_heads_per_layer[layer]
        queries, keys = heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.g_proj = Linear(c.hidden_size, heads if c.gating == "per-head" else queries, key=g)
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
        y = scaled(y, softplus(self.g_proj(x)).reshape(*y.shape[:3], -1))
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
    shared_expert: MLP
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared) = config, jax.random.split(key, 3)
        each = lambda *sizes, key: ExpertLinear(c.num_experts, *sizes, key=key)
        self.config = c
        self.gate = BiasedRouter(c.hidden_size, c.num_experts, key=gate)
        self.experts = MLP(each, c.hidden_size, c.moe_intermediate_size, key=experts)
        self.shared_expert = MLP(Linear, c.hidden_size, c.shared_expert_intermediate_size, key=shared)

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        if cap := c.moe_router_logit_softcapping:
            logits = cap * jnp.tanh(logits / cap)
        scores, weights, chosen = self.gate.choose(logits, c.num_experts_per_tok, "sigmoid")
        weights = c.moe_routed_scaling_factor * weights / jnp.sum(weights, axis=-1, keepdims=True)
        y = moe.dispatch(self.experts, x, chosen, weights.astype(x.dtype), lambda experts: experts.down_proj)
        routing = moe.Routing.of(logits, scores / jnp.sum(scores, axis=-1, keepdims=True), chosen, segments)
        return moe.with_shared(y, self.shared_expert(x)), routing


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        sparse = c.mlp_layer_types[layer] == "sparse"
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer, key=attention)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c, key=mlp) if sparse else MLP(Linear, c.hidden_size, c.intermediate_size, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
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
        kinds = list(zip(c.layer_types, c.num_attention_heads_per_layer, c.mlp_layer_types, strict=True))
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), kinds, key=layers)
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


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Drops keys of released files that repeat others. A `gating` of true is one gate for each head.

    Raises:
        ValueError: if such a key says something else than those that it repeats.
    """
    out, original = dict(hub), "original_max_position_embeddings"
    if out.get("gating") is True:
        out["gating"] = "per-head"
    ropes, mlps, gates = out.get("rope_parameters"), out.get("mlp_layer_types"), out.get("gating_types")
    if ropes is not None and original in ropes:
        ropes = out["rope_parameters"] = {key: value for key, value in ropes.items() if key != original}
        out[f"rope_parameters.{original}"] = hub["rope_parameters"][original]
    full = (ropes or {}).get(FULL)
    full = full if isinstance(full, Mapping) else {}
    gate = str(out.get("gating") or "per-head")
    repeated = {
        "partial_rotary_factor": full.get("partial_rotary_factor", 1.0 if ropes else 0.5),
        f"rope_parameters.{original}": full.get(original),
        "mlp_only_layers": [n for n, kind in enumerate(mlps) if kind == "dense"] if isinstance(mlps, list) else [0],
        "gating_types": [gate.replace("-", "_")] * len(gates) if isinstance(gates, list) else [],
    }
    for key, value in repeated.items():
        if (stated := out.pop(key, None)) not in (None, value):
            raise ValueError(f"{key}={stated!r:.200} contradicts what other keys say, {value!r:.200}.")
    return out


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Leaves out the numbers of YaRN where there is none."""
    kept = lambda rope: {
        k: v for k, v in rope.items() if v is not None and (rope["rope_type"] == "yarn" or "beta" not in k)
    }
    return hub | {"rope_parameters": {kind: kept(rope) for kind, rope in hub["rope_parameters"].items()}}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Laguna XS",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("laguna",),
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
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "*.gate.e_score_correction_bias.value": "model.{}.experts.e_score_correction_bias",
        "*.experts.*.weight": "model.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    implied={
        "architectures": ["LagunaForCausalLM"],
        "model_type": "laguna",
        "decoder_sparse_step": 1,
        "hidden_act": OneOf(["silu", "swish"]),
        "moe_apply_router_weight_on_input": False,
        "norm_topk_prob": True,
    },
    standard_form=standard_form,
    published_form=published_form,
    renamed_by_peft={".shared_expert.": ".shared_experts."},
    rebalance=rebalance,
)
