"""Granite 4.0: Mamba-2 layers (arXiv:2405.21060) with an attention layer in every ten, or attention in all.

The hybrids have no positions: attention sees the order of the tokens by what the recurrences have left in them. Four
multipliers, of the embeddings, of what each layer adds, of the attention's scores and of the logits, are in the places
of muP (arXiv:2203.03466). All layers have a gated MLP; in the mixtures it is shared by all tokens, beside experts whose
weights are the softmax over the chosen logits.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.delta_rule.shared import state_products
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, AbstractCache
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.fields import fill_layers
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Linear,
    RMSNorm,
    project,
    silu_times,
    times,
)
from zoo.nn.mamba2 import Mamba2
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of each expert
    shared_intermediate_size: int  # width of the MLP for all tokens
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0, or null in config.json: num_attention_heads
    max_position_embeddings: int = 2048
    num_local_experts: int = 0
    num_experts_per_tok: int = 0
    layer_types: tuple[Literal["mamba", "attention"], ...] = ()  # (): all "mamba"
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0
    attention_multiplier: float = 1.0
    logits_scaling: float = 1.0
    mamba_n_heads: int = 128
    mamba_d_head: int = 0  # 0, or "auto" in config.json: mamba_expand * hidden_size / mamba_n_heads
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_chunk_size: int = 256  # unused: how some kernels cut a row, which changes no result
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: tuple[float, ...] = (0.0, math.inf)
    position_embedding_type: Literal["rope", "nope"] | None = None  # None: "nope"
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self):
        # Fill in what follows from other fields, so that equivalent configs compare equal.
        c, inner = self, self.mamba_expand * self.hidden_size
        object.__setattr__(self, "head_dim", c.head_dim or c.hidden_size // c.num_attention_heads)
        object.__setattr__(self, "num_key_value_heads", c.num_key_value_heads or c.num_attention_heads)
        object.__setattr__(self, "mamba_d_head", c.mamba_d_head or inner // c.mamba_n_heads)
        fill_layers(self, "layer_types", lambda _: "mamba")
        if len(c.time_step_limit) != 2:
            raise ValueError(f"time_step_limit is {list(c.time_step_limit)}; it needs the least and the largest step.")
        # Where no layer is Mamba, what the file says of it means nothing, and does not fit in granite-4.0-micro's.
        if "mamba" in c.layer_types and c.mamba_n_heads * c.mamba_d_head != inner:
            raise ValueError(
                f"mamba_n_heads={c.mamba_n_heads} times mamba_d_head={c.mamba_d_head} is not mamba_expand="
                f"{c.mamba_expand} times hidden_size={c.hidden_size}."
            )

    def attention_products(self, layer: int, seq: int) -> float:
        if self.layer_types[layer] == "attention":
            return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values
        return float(self.mamba_n_heads * state_products(self.mamba_d_state, self.mamba_d_head, erase=False))


# fmt: off
HYBRID = (*("mamba",) * 5, "attention", *("mamba",) * 4) * 4
H: dict[str, Any] = dict(
    layer_types=HYBRID, position_embedding_type="nope", embedding_multiplier=12.0, residual_multiplier=0.22,
    mamba_d_state=128, rms_norm_eps=1e-5, tie_word_embeddings=True,
)
H_MICRO: dict[str, Any] = H | dict(mamba_n_heads=64, attention_multiplier=1 / 64, logits_scaling=8.0)
H_TINY: dict[str, Any] = H | dict(mamba_n_heads=48, attention_multiplier=1 / 128, logits_scaling=6.0)
H_SMALL: dict[str, Any] = H | dict(mamba_n_heads=128, attention_multiplier=1 / 128, logits_scaling=16.0)
MICRO: dict[str, Any] = H | dict(
    layer_types=("attention",) * 40, position_embedding_type="rope", rope_theta=1e7, attention_multiplier=1 / 64,
    logits_scaling=10.0, mamba_n_heads=128, mamba_d_head=32, mamba_d_state=256,
)
#                         vocab hidden expert  mlp layers heads kv positions experts chosen
GRANITE4_MICRO   = Config(100352, 2560, 8192, 8192,    40,   40, 8,   131072,      0,     0, **MICRO)
GRANITE4_H_MICRO = Config(100352, 2048, 8192, 8192,    40,   32, 8,   131072,      0,     0, **H_MICRO)
GRANITE4_H_TINY  = Config(100352, 1536,  512, 1024,    40,   12, 4,   131072,     64,     6, **H_TINY)
GRANITE4_H_SMALL = Config(100352, 4096,  768, 1536,    40,   32, 8,   131072,     72,    10, **H_SMALL)

CONFIGS = {
    "granite4-micro":   Released(GRANITE4_MICRO,   "ibm-granite/granite-4.0-micro"),
    "granite4-h-micro": Released(GRANITE4_H_MICRO, "ibm-granite/granite-4.0-h-micro"),
    "granite4-h-tiny":  Released(GRANITE4_H_TINY,  "ibm-granite/granite-4.0-h-tiny"),
    "granite4-h-small": Released(GRANITE4_H_SMALL, "ibm-granite/granite-4.0-h-small"),
}
# fmt: on


class Attention(AbstractGroupedAttention, AbstractMixer):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.scale = c.attention_multiplier
        rotates = c.position_embedding_type == "rope"
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling) if rotates else None
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
        if self.rotary is not None:
            q, k = self.rotary(q, at), self.rotary(k, at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.scale)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return KV.init(layers, batch, length, self.k_proj.shape[-2] // self.head_dim, self.head_dim, dtype)


class MLP(eqx.Module):
    input_linear: AbstractLinear  # rows: first all of gate, then all of up
    output_linear: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (into, out) = config, jax.random.split(key)
        self.input_linear = Linear(c.hidden_size, 2 * c.shared_intermediate_size, key=into)
        self.output_linear = Linear(c.shared_intermediate_size, c.hidden_size, key=out)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.output_linear(silu_times(*jnp.split(self.input_linear(x), 2, axis=-1)))


class Experts(eqx.Module):
    input_linear: AbstractExpertLinear  # rows: first all of gate, then all of up
    output_linear: AbstractExpertLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (into, out) = config, jax.random.split(key)
        self.input_linear = ExpertLinear(c.num_local_experts, c.hidden_size, 2 * c.intermediate_size, key=into)
        self.output_linear = ExpertLinear(c.num_local_experts, c.intermediate_size, c.hidden_size, key=out)

    def __call__(self, x: Float[Array, "rows embed"], sizes: Int[Array, " experts"]) -> Float[Array, "rows embed"]:
        return self.output_linear(silu_times(*moe.split_gate_up(self.input_linear(x, sizes))), sizes)


class MoE(eqx.Module):
    router: Router
    experts: Experts
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        router, experts = jax.random.split(key)
        self.router = Router(config.hidden_size, config.num_local_experts, key=router)
        self.experts = Experts(config, key=experts)
        self.top_k = config.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.router(x)
        _, best, chosen = moe.choose(logits, self.top_k)
        weights = jax.nn.softmax(best.astype(jnp.float32), axis=-1).astype(x.dtype)
        y = moe.dispatch(self.experts, x, chosen, weights, lambda experts: experts.output_linear)
        probability = jax.nn.softmax(logits.astype(jnp.float32), axis=-1)
        return y, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    mamba: Mamba2 | None  # a layer has this mixer
    self_attn: Attention | None  # or this one
    post_attention_layernorm: RMSNorm
    shared_mlp: MLP
    block_sparse_moe: MoE | None
    residual_multiplier: float = eqx.field(static=True)
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, (mixer, mlp, experts) = config, jax.random.split(key, 3)
        self.residual_multiplier = c.residual_multiplier
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, key=mixer) if kind == "attention" else None
        self.mamba = None
        if kind == "mamba":
            self.mamba = Mamba2(
                c.hidden_size,
                heads=c.mamba_n_heads,
                head_dim=c.mamba_d_head,
                groups=c.mamba_n_groups,
                state_size=c.mamba_d_state,
                width=c.mamba_d_conv,
                time_step_limit=c.time_step_limit,
                eps=c.rms_norm_eps,
                bias=c.mamba_proj_bias,
                conv_bias=c.mamba_conv_bias,
                key=mixer,
            )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.shared_mlp = MLP(c, key=mlp)
        self.block_sparse_moe = MoE(c, key=experts) if c.num_local_experts else None

    @property
    def mixer(self) -> AbstractMixer:
        mixer = self.mamba or self.self_attn
        assert mixer is not None
        return mixer

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, moe.Routing | None]:
        y, cache = self.mixer(self.input_layernorm(x), cache, at)
        x = x + times(y, self.residual_multiplier)
        normed, routing = self.post_attention_layernorm(x), None
        y = self.shared_mlp(normed)
        if self.block_sparse_moe is not None:
            chosen, routing = self.block_sparse_moe(normed, at.segments)
            y = moe.with_shared(chosen, y)
        return x + times(y, self.residual_multiplier), cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.mixer.init_cache(layers, batch, length, dtype)


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
        self.layers = Stack(lambda n, *, key: Block(c, c.layer_types[n], key=key), c.layer_types, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = times(self.embed_tokens(tokens), self.config.embedding_multiplier)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        logits = self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)
        return logits / self.config.logits_scaling


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Names kinds of layers as the released files do, and leaves out what means nothing: no experts, an "auto" size."""
    older = {"linear_attention": "mamba", "full_attention": "attention"}
    hub = {"num_local_experts": 8, "num_experts_per_tok": 2} | dict(hub)
    if isinstance(kinds := hub.get("layer_types"), list):
        hub["layer_types"] = [older.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if hub["num_local_experts"] == 0:
        del hub["num_local_experts"], hub["num_experts_per_tok"]
    if hub.get("mamba_d_head") == "auto":
        del hub["mamba_d_head"]
    return hub


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Granite 4.0",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("granitemoehybrid",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.in_proj": P("tensor", "fsdp"),
        "layers.*.out_proj": P("fsdp", "tensor"),
        "layers.*.mamba.*": P(),
        "layers.*.router.weight": P(),
        "layers.*.experts.input_linear": P("expert", "tensor", "fsdp"),
        "layers.*.experts.output_linear": P("expert", "fsdp", "tensor"),
        "layers.*.input_linear": P("tensor", "fsdp"),
        "layers.*.output_linear": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "*.router.weight": "model.{}.router.layer.weight",
        "*.experts.*": "model.{}.{}",
        "*": "model.{}",
    },
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_act": OneOf(["silu", "swish"]),
        "init_method": "mup",
        "normalization_function": "rmsnorm",
    },
    standard_form=standard_form,
    experts_in_transformers={
        "input_linear": ("experts.gate_up_proj", None),
        "output_linear": ("experts.down_proj", None),
    },
)
