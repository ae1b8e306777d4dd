"""MiniMax M2, M2.1, M2.5 and M2.7: experts chosen as in DeepSeek V3, attention with norms of whole projections.

The queries of all heads have one norm together, and so have the keys. Rotary positions turn half of each head. The
experts' scores are sigmoids, and a bias that affects only which experts are chosen evens their load. There is no shared
expert and no dense layer. The weights are published in fp8, those of routers in float32. The files announce modules for
further tokens, but do not have them.
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
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.routing import BiasedFloat32Router, rebalance
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of each expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    max_position_embeddings: int = 196_608
    head_dim: int = 128
    num_local_experts: int = 256
    num_experts_per_tok: int = 8
    rope_theta: float = 5_000_000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 1.0  # rotary_dim / head_dim
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values


# fmt: off
M2: dict[str, Any] = dict(partial_rotary_factor=0.5)
#                      vocab  hidden expert  layers  heads  kv  positions
MINIMAX_M2   = Config(200064,   3072,  1536,     62,    48,  8,    196608, **M2)
MINIMAX_M2_7 = Config(200064,   3072,  1536,     62,    48,  8,    204800, **M2)

CONFIGS = {
    "minimax-m2":   Released(MINIMAX_M2,   "MiniMaxAI/MiniMax-M2"),
    "minimax-m2.1": Released(MINIMAX_M2,   "MiniMaxAI/MiniMax-M2.1"),
    "minimax-m2.5": Released(MINIMAX_M2,   "MiniMaxAI/MiniMax-M2.5"),
    "minimax-m2.7": Released(MINIMAX_M2_7, "MiniMaxAI/MiniMax-M2.7"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: RMSNorm  # of all heads together
    k_norm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(int(c.head_dim * c.partial_rotary_factor), c.rope_theta, c.rope_scaling)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, key=q)
        self.k_proj = Linear(c.hidden_size, keys, key=k)
        self.v_proj = Linear(c.hidden_size, keys, key=v)
        self.o_proj = Linear(queries, c.hidden_size, key=o)
        self.q_norm = RMSNorm(queries, c.rms_norm_eps)
        self.k_norm = RMSNorm(keys, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q = self.rotary(heads(self.q_norm(q)), at)
        k = self.rotary(heads(self.k_norm(k)), at)
        v = heads(v)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
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
    gate: BiasedFloat32Router
    experts: Experts
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        gate, experts = jax.random.split(key)
        self.gate = BiasedFloat32Router(config.hidden_size, config.num_local_experts, key=gate)
        self.experts = Experts(config, key=experts)
        self.top_k = config.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.gate(x)
        scores, weights, chosen = self.gate.choose(logits, self.top_k, "sigmoid", normalise=0.0)
        y = moe.dispatch(self.experts, x, chosen, weights.astype(x.dtype), lambda experts: experts.w2)
        return y, moe.Routing.of(logits, scores / jnp.sum(scores, axis=-1, keepdims=True), chosen, segments)


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
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, moe.Routing]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y, routing = self.block_sparse_moe(self.post_attention_layernorm(x), at.segments)
        return x + y, cache, routing

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


# Keys of config.json about what no repository has: modules for further tokens, and dense layers.
UNREAD = {"mlp_intermediate_size", "mtp_transformer_layers", "num_mtp_modules", "use_mtp"}


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Drop `UNREAD` keys and the kinds of layers, and turn `rotary_dim` into `partial_rotary_factor`.

    Raises:
        ValueError: if a layer has another kind of attention than 1, which is plain attention.
    """
    out = {key: value for key, value in hub.items() if key not in UNREAD}
    kinds = out.pop("attn_type_list", None)
    if kinds is not None and (not isinstance(kinds, list) or any(kind != 1 for kind in kinds)):
        raise ValueError(f"attn_type_list={kinds!r:.200}; only plain attention, 1, is implemented.")
    rotary, head = out.get("rotary_dim"), out.get("head_dim", 128)
    if isinstance(rotary, int) and isinstance(head, int) and head > 0:
        del out["rotary_dim"]
        out.setdefault("partial_rotary_factor", rotary / head)
    return out


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Turn `partial_rotary_factor` into `rotary_dim`."""
    return hub | {"rotary_dim": int(hub["head_dim"] * hub.pop("partial_rotary_factor"))}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="MiniMax M2",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("minimax_m2",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate.*": P(),
        "layers.*.experts.w[13]": P("expert", "tensor", "fsdp"),
        "layers.*.experts.w2": P("expert", "fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "layers.*.gate.weight.value": "model.layers.{}.gate.weight",
        "layers.*.gate.e_score_correction_bias.value": "model.layers.{}.e_score_correction_bias",
        "layers.*.experts.*.weight": "model.layers.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    fp8_blocks=["layers.*_proj.weight", "layers.*.experts.*.weight"],
    implied={
        "architectures": ["MiniMaxM2ForCausalLM"],
        "model_type": "minimax_m2",
        "hidden_act": OneOf(["silu", "swish"]),
        "layernorm_full_attention_beta": 1.0,
        "layernorm_linear_attention_beta": 1.0,
        "layernorm_mlp_beta": 1.0,
        "qk_norm_type": "per_layer",
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "shared_moe_mode": "sigmoid",
        "sliding_window": None,
        "use_qk_norm": True,
        "use_routing_bias": True,
    },
    standard_form=standard_form,
    published_form=published_form,
    experts_in_transformers={
        "block_sparse_moe.experts.w1": ("mlp.experts.gate_up_proj", 0),
        "block_sparse_moe.experts.w3": ("mlp.experts.gate_up_proj", 1),
        "block_sparse_moe.experts.w2": ("mlp.experts.down_proj", None),
    },
    rebalance=rebalance,
)
