"""Kimi Linear (arXiv:2510.26692): three layers of Kimi Delta Attention to one of latent attention without positions.

Kimi Delta Attention is a gated delta rule (arXiv:2412.06464) in which each channel of a key decays by its own rate. Its
state does not grow with the text, and it tells the order of tokens, so latent attention turns nothing. Experts are
chosen as in DeepSeek V3, by sigmoids and a bias that evens their load.

Where transformers and the released modeling_kimi.py differ, this follows the one that rounds less: `beta` is a sigmoid
in float32, as there, and the softplus of the decay is exact for large negative numbers, too. Experts outside of the
chosen groups are never chosen, as in transformers; released models have one group.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import AbstractCache
from zoo.nn.delta import GatedDelta
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Conv1d,
    Embedding,
    ExpertLinear,
    Float32,
    Linear,
    RMSNorm,
    project,
    recomputed,
    swiglu,
)
from zoo.nn.mixer import AbstractMixer
from zoo.nn.mla import AbstractLatentConfig, LatentAttention
from zoo.nn.model import AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.recurrent import RecurrentCache
from zoo.nn.routing import BiasedRouter, rebalance
from zoo.nn.stack import Caches, Reports, Stack


Kind = Literal["linear_attention", "full_attention"]


@dataclasses.dataclass(frozen=True)
class LinearAttention:
    """The linear_attn_config of config.json. Layers are counted from 1."""

    full_attn_layers: tuple[int, ...]
    kda_layers: tuple[int, ...]
    head_dim: int = 128
    num_heads: int = 32
    short_conv_kernel_size: int = 4

    @property
    def delta(self) -> GatedDelta:
        """The recurrence of these layers."""
        heads, dim = self.num_heads, self.head_dim
        return GatedDelta(heads, heads, dim, dim, self.short_conv_kernel_size)


@dataclasses.dataclass(frozen=True)
class Config(AbstractLatentConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP in the first layers
    moe_intermediate_size: int  # width of each expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # unused: every head has its own keys and values
    num_experts: int
    model_max_length: int
    linear_attn_config: LinearAttention
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64  # features of a key that all heads share; nothing rotates them
    v_head_dim: int = 128
    num_shared_experts: int = 1
    num_experts_per_token: int = 8
    num_expert_group: int = 1
    topk_group: int = 1
    moe_renormalize: bool = True
    routed_scaling_factor: float = 2.446
    first_k_dense_replace: int = 1
    rms_norm_eps: float = 1e-5

    def __post_init__(self):
        each, rest = divmod(self.num_experts, self.num_expert_group)
        enough = self.topk_group <= self.num_expert_group and self.num_experts_per_token <= self.topk_group * each
        if rest or each < 2 or not enough:
            raise ValueError(
                f"{self.num_experts_per_token} of {self.num_experts} experts cannot be chosen from topk_group "
                f"{self.topk_group} of num_expert_group {self.num_expert_group} groups."
            )
        named = sorted(self.linear_attn_config.full_attn_layers + self.linear_attn_config.kda_layers)
        if named != [*range(1, self.num_hidden_layers + 1)]:
            raise ValueError(
                "linear_attn_config needs each layer from 1 to num_hidden_layers="
                f"{self.num_hidden_layers} once in its full_attn_layers or kda_layers."
            )

    def attention_products(self, layer: int, seq: int) -> float:
        if self.layers[layer] == "linear_attention":
            return self.linear_attn_config.delta.products
        return self.num_attention_heads * (self.head_dim + self.v_head_dim) * causal_keys(seq)

    @property
    def layers(self) -> tuple[Kind, ...]:
        linear, numbers = self.linear_attn_config.kda_layers, range(1, self.num_hidden_layers + 1)
        return tuple("linear_attention" if n in linear else "full_attention" for n in numbers)

    @property
    def max_position_embeddings(self) -> int:
        return self.model_max_length

    @property
    def num_experts_per_tok(self) -> int:
        return self.num_experts_per_token


# fmt: off
FULL = (4, 8, 12, 16, 20, 24, 27)
LAYERS = LinearAttention(FULL, tuple(n for n in range(1, 28) if n not in FULL))
#                        vocab  hidden   mlp  expert  layers  heads  kv  experts  positions
KIMI_LINEAR_48B = Config(163840,  2304, 9216,   1024,     27,    32, 32,     256,   1048576, LAYERS)

CONFIGS = {
    "kimi-linear-48b-a3b":      Released(KIMI_LINEAR_48B, "moonshotai/Kimi-Linear-48B-A3B-Instruct"),
    "kimi-linear-48b-a3b-base": Released(KIMI_LINEAR_48B, "moonshotai/Kimi-Linear-48B-A3B-Base"),
}
# fmt: on


class GatedRMSNorm(eqx.Module):
    """Root mean square norm (arXiv:1910.07467) times sigmoid(gate), in float32 to the end."""

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)

    def __init__(self, dim: int, eps: float):
        self.weight, self.eps = jnp.ones(dim), eps

    @recomputed
    def __call__(self, x: Float[Array, "*batch dim"], gate: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y * jnp.broadcast_to(self.weight.astype(jnp.float32), x.shape)
        return (y * jax.nn.sigmoid(gate.astype(jnp.float32))).astype(x.dtype)


class DeltaAttention(AbstractMixer):
    """Kimi Delta Attention (section 3): a delta rule with a decay for each channel of the keys."""

    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    q_conv1d: Conv1d
    k_conv1d: Conv1d
    v_conv1d: Conv1d
    A_log: Float32  # [1, 1, heads, 1]: how fast a head decays
    f_a_proj: AbstractLinear  # f_b_proj(f_a_proj(x)) + dt_bias: how much of that each channel does now
    f_b_proj: AbstractLinear
    dt_bias: Float32
    b_proj: AbstractLinear  # how strongly each head writes
    g_a_proj: AbstractLinear  # g_b_proj(g_a_proj(x)): the gates of the outputs
    g_b_proj: AbstractLinear
    o_norm: GatedRMSNorm
    o_proj: AbstractLinear
    delta: GatedDelta = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        keys, d, delta = jax.random.split(key, 14), config.hidden_size, config.linear_attn_config.delta
        heads, dim, channels = delta.key_heads, delta.key_dim, delta.keys  # as many as those of the values
        self.delta = delta
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, channels, key=key) for key in keys[:3])
        self.q_conv1d, self.k_conv1d, self.v_conv1d = (Conv1d(channels, delta.width, key=key) for key in keys[3:6])
        rate, step, f_a, f_b, b, g_a, g_b, o = keys[6:]
        self.A_log = Float32(jnp.log(jax.random.uniform(rate, (1, 1, heads, 1), minval=1.0, maxval=16.0)))
        self.f_a_proj = Linear(d, dim, key=f_a)
        self.f_b_proj = Linear(dim, channels, key=f_b)
        # softplus(dt_bias) is between 0.001 and 0.1, evenly by its logarithm, as in Mamba (arXiv:2312.00752).
        steps = jnp.exp(jax.random.uniform(step, (channels,), minval=jnp.log(1e-3), maxval=jnp.log(0.1)))
        self.dt_bias = Float32(steps + jnp.log(-jnp.expm1(-steps)))
        self.b_proj = Linear(d, heads, key=b)
        self.g_a_proj = Linear(d, dim, key=g_a)
        self.g_b_proj = Linear(dim, channels, key=g_b)
        self.o_norm = GatedRMSNorm(dim, config.rms_norm_eps)
        self.o_proj = Linear(channels, d, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: RecurrentCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], RecurrentCache | None]:
        delta, flat = self.delta, lambda y: y.reshape(*y.shape[:2], -1)
        heads = lambda y: y.reshape(*y.shape[:2], delta.key_heads, -1)
        # One convolution for all, whose channels lie by heads: so "tensor" splits them as it splits the projections.
        qkv = jnp.concatenate([heads(y) for y in project(x, self.q_proj, self.k_proj, self.v_proj)], axis=-1)
        convs = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        by_head = [conv.weight.reshape(delta.key_heads, delta.key_dim, -1) for conv in convs]
        conv = jnp.concatenate(by_head, axis=1).reshape(-1, delta.width)
        bias = self.dt_bias.value.reshape(1, 1, delta.key_heads, -1)
        decay = log_decay(heads(self.f_b_proj(self.f_a_proj(x))), bias, self.A_log.value)
        beta = jax.nn.sigmoid(self.b_proj(x).astype(jnp.float32))
        split = lambda qkv: jnp.split(heads(qkv), 3, axis=-1)
        y, cache = delta(flat(qkv), decay, beta, cache, at, conv=conv, split=split)
        return self.o_proj(flat(self.o_norm(y, heads(self.g_b_proj(self.g_a_proj(x)))))), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> RecurrentCache:
        return self.delta.init_cache(layers, batch, dtype)


@recomputed
def log_decay(
    x: Float[Array, "batch seq heads dim"], bias: Float[Array, "1 1 heads dim"], rate: Float[Array, "1 1 heads 1"]
) -> Float[Array, "batch seq heads dim"]:
    """Computes -exp(rate) * softplus(x + bias), in float32."""
    return -jnp.exp(rate) * jax.nn.softplus(x.astype(jnp.float32) + bias)


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, hidden: int, width: int, *, key: PRNGKeyArray):
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = Linear(hidden, width, key=gate)
        self.up_proj = Linear(hidden, width, key=up)
        self.down_proj = Linear(width, hidden, key=down)

    def __call__(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Experts(eqx.Module):
    w1: AbstractExpertLinear  # gate
    w2: AbstractExpertLinear  # down
    w3: AbstractExpertLinear  # up

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, down, up) = config, jax.random.split(key, 3)
        self.w1 = ExpertLinear(c.num_experts, c.hidden_size, c.moe_intermediate_size, key=gate)
        self.w2 = ExpertLinear(c.num_experts, c.moe_intermediate_size, c.hidden_size, key=down)
        self.w3 = ExpertLinear(c.num_experts, c.hidden_size, c.moe_intermediate_size, key=up)

    def __call__(self, x: Float[Array, "rows embed"], sizes: Int[Array, " experts"]) -> Float[Array, "rows embed"]:
        return self.w2(swiglu(x, self.w1, self.w3, sizes), sizes)


class MoE(eqx.Module):
    gate: BiasedRouter
    experts: Experts
    shared_experts: MLP  # all of them as one wide MLP
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared) = config, jax.random.split(key, 3)
        self.config = c
        self.gate = BiasedRouter(c.hidden_size, c.num_experts, key=gate)
        self.experts = Experts(c, key=experts)
        self.shared_experts = MLP(c.hidden_size, c.num_shared_experts * c.moe_intermediate_size, key=shared)

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        normalise = 1e-20 if c.moe_renormalize else None  # so that the weights add up to 1
        scores, weights, chosen = self.gate.choose(
            logits,
            c.num_experts_per_token,
            "sigmoid",
            groups=c.num_expert_group,
            kept=c.topk_group,
            normalise=normalise,
        )
        weights = (c.routed_scaling_factor * weights).astype(x.dtype)
        y = moe.dispatch(self.experts, x, chosen, weights, lambda experts: experts.w2)
        routing = moe.Routing.of(logits, scores / jnp.sum(scores, axis=-1, keepdims=True), chosen, segments)
        return moe.with_shared(y, self.shared_experts(x)), routing


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: AbstractMixer  # a DeltaAttention, or a LatentAttention
    post_attention_layernorm: RMSNorm
    mlp: MLP | None  # a layer has this one
    block_sparse_moe: MoE | None  # or this one
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, kind: Kind, dense: bool, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if kind == "linear_attention":
            self.self_attn = DeltaAttention(c, key=attention)
        else:
            self.self_attn = LatentAttention(c, q_rank=None, rotary=None, scale=c.head_dim**-0.5, key=attention)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, c.intermediate_size, key=mlp) if dense else None
        self.block_sparse_moe = None if dense else MoE(c, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y, routing = self.post_attention_layernorm(x), None
        if self.mlp is not None:
            y = self.mlp(y)
        if self.block_sparse_moe is not None:
            y, routing = self.block_sparse_moe(y, at.segments)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.self_attn.init_cache(layers, batch, length, dtype)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        kinds = [(kind, n < c.first_k_dense_replace) for n, kind in enumerate(c.layers)]
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, *kinds[n], key=key), kinds, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.lm_head(x)


# The key of linear_attn_config for each kind of layer, and for each size that transformers 5 writes outside of it.
KINDS: dict[Kind, str] = {"full_attention": "full_attn_layers", "linear_attention": "kda_layers"}
LINEAR = {
    "linear_head_dim": "head_dim",
    "linear_num_heads": "num_heads",
    "linear_conv_kernel_dim": "short_conv_kernel_size",
}


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Bring the keys that transformers 5 writes into the Hub's form, and drop sizes that no layer has.

    transformers writes what is in linear_attn_config, and which layers are dense, as keys of their own.

    Raises:
        ValueError: if these contradict the Hub's keys beside them, or if other layers than the first are dense.
    """
    hub = {key: value for key, value in hub.items() if key not in ("head_dim", "qk_head_dim", "rope_theta")}
    linear = {name: hub.pop(key) for key, name in LINEAR.items() if hub.get(key) is not None}
    if isinstance(kinds := hub.get("layer_types"), list):
        linear |= {name: [n for n, k in enumerate(kinds, 1) if k == kind] for kind, name in KINDS.items()}
        del hub["layer_types"]
    nested = hub.get("linear_attn_config") or {}
    if linear and isinstance(nested, Mapping):
        if differing := [name for name in linear.keys() & nested.keys() if linear[name] != nested[name]]:
            raise ValueError(f"it says {sorted(differing)[0]} twice, in linear_attn_config and outside of it.")
        hub["linear_attn_config"] = linear | dict(nested)
    if isinstance(kinds := hub.get("mlp_layer_types"), list):
        dense = kinds.count("dense")
        layers = hub.get("num_hidden_layers")
        if kinds != ["dense"] * dense + ["sparse"] * (len(kinds) - dense) or len(kinds) != layers:
            raise ValueError(f"mlp_layer_types needs {layers} layers, of which the first are dense, the others sparse.")
        if hub.setdefault("first_k_dense_replace", dense) != dense:
            raise ValueError("first_k_dense_replace and mlp_layer_types differ.")
        del hub["mlp_layer_types"]
    return hub


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Kimi Linear",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("kimi_linear",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.w2": P("expert", "fsdp", "tensor"),
        "*.experts.*": P("expert", "tensor", "fsdp"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*_a_proj*": P(None, "fsdp"),
        "*_proj": P("tensor", "fsdp"),
        "*.gate.*": P(),
        "*_conv1d.weight": P(),
        "*.A_log.value": P(),
        "*.dt_bias.value": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "*.experts.*.weight": "model.{}.experts.{expert}.{}.weight",
        "*.value": "model.{}",
        "*": "model.{}",
    },
    # transformers writes a first dense layer as if it had experts.
    aliases={
        f"model.layers.0.block_sparse_moe.{name}": f"model.layers.0.mlp.{name}"
        for name in ("gate_proj.", "up_proj.", "down_proj.")
    },
    implied={
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "hidden_act": OneOf(["silu", "swish"]),
        "attention_bias": False,
        "mla_use_nope": True,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "q_lora_rank": None,
        "tie_word_embeddings": False,
        "use_grouped_topk": True,
    },
    standard_form=standard_form,
    names_in_transformers={  # in adapters of PEFT
        ".block_sparse_moe.": ".mlp.",
        ".f_a_proj.": ".forget_gate.f_a_proj.",
        ".f_b_proj.": ".forget_gate.f_b_proj.",
    },
    experts_in_transformers={
        "experts.w1": ("experts.gate_up_proj", 0),
        "experts.w3": ("experts.gate_up_proj", 1),
        "experts.w2": ("experts.down_proj", None),
    },
    rebalance=rebalance,
)
