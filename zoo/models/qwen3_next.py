"""Qwen3-Next: three layers of gated delta rule (arXiv:2412.06464) to one of attention, each with a mixture of experts.

A delta rule's state does not grow with the text: of 48 layers, 12 have keys and values to remember. The output of
attention is multiplied by a sigmoid gate, which q_proj computes beside the queries; rotary positions turn a quarter of
each head. Norms scale by 1 + weight, but for the one after the delta rule. Next to the chosen experts, every token goes
through a shared one, which has a sigmoid gate as well. A module predicts one more token; Qwen3-Coder-Next has none.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

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
from zoo.nn.cache import KV, AbstractCache
from zoo.nn.delta import AbstractDeltaConfig, GatedDelta
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Conv1d,
    Embedding,
    ExpertLinear,
    GatedRMSNorm,
    Linear,
    OffsetRMSNorm,
    project,
    swiglu,
)
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractMixtureConfig, Family, OneOf, Released
from zoo.nn.mtp import AbstractMTPModel, AbstractOneLayerMTP
from zoo.nn.recurrent import RecurrentCache
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractDeltaConfig, AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP in dense layers
    moe_intermediate_size: int  # width of each expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 2
    max_position_embeddings: int = 32_768
    rope_theta: float = 10_000.0
    head_dim: int = 256
    num_experts: int = 512
    num_experts_per_tok: int = 10
    shared_expert_intermediate_size: int = 512
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] = ()  # (): by full_attention_interval
    norm_topk_prob: bool = True
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


# fmt: off
#                       vocab hidden   mlp expert layers heads kv positions theta
QWEN3_NEXT_80B = Config(151936, 2048, 5120,   512,    48,   16, 2,   262144,  1e7)

CONFIGS = {
    "qwen3-next-80b-a3b":              Released(QWEN3_NEXT_80B, "Qwen/Qwen3-Next-80B-A3B-Instruct"),
    "qwen3-next-80b-a3b-fp8":          Released(QWEN3_NEXT_80B, "Qwen/Qwen3-Next-80B-A3B-Instruct-FP8"),
    "qwen3-next-80b-a3b-thinking":     Released(QWEN3_NEXT_80B, "Qwen/Qwen3-Next-80B-A3B-Thinking"),
    "qwen3-next-80b-a3b-thinking-fp8": Released(QWEN3_NEXT_80B, "Qwen/Qwen3-Next-80B-A3B-Thinking-FP8"),
    "qwen3-coder-next":                Released(QWEN3_NEXT_80B, "Qwen/Qwen3-Coder-Next"),
    "qwen3-coder-next-base":           Released(QWEN3_NEXT_80B, "Qwen/Qwen3-Coder-Next-Base"),
    "qwen3-coder-next-fp8":            Released(QWEN3_NEXT_80B, "Qwen/Qwen3-Coder-Next-FP8"),
}
# fmt: on


class Attention(AbstractMixer):
    q_proj: AbstractLinear  # for each head a query, then a gate
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: OffsetRMSNorm
    k_norm: OffsetRMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(int(c.head_dim * c.partial_rotary_factor), c.rope_theta, c.rope_scaling)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, 2 * queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = OffsetRMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = OffsetRMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = jnp.split(q.reshape(*x.shape[:2], -1, 2 * self.head_dim), 2, axis=-1)
        q = self.rotary(self.q_norm(q), at)
        k = self.rotary(self.k_norm(heads(k)), at)
        v = heads(v)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
        y = y * jax.nn.sigmoid(gate)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return KV.init(layers, batch, length, self.k_proj.shape[-2] // self.head_dim, self.head_dim, dtype)


class GatedDeltaNet(AbstractMixer):
    """A gated delta rule (arXiv:2412.06464). Value heads share key heads in groups of neighbours."""

    in_proj_qkvz: AbstractLinear  # for each key head its query, its key, and the values and output gates of its group
    in_proj_ba: AbstractLinear  # for each key head the write strengths of its group, then the decays
    conv1d: Conv1d  # of the queries of all heads, then the keys, then the values
    dt_bias: Float[Array, " v_heads"]
    A_log: Float[Array, " v_heads"]
    norm: GatedRMSNorm
    out_proj: AbstractLinear
    delta: GatedDelta = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, delta, (qkvz, ba, conv, decay, out) = config, config.delta, jax.random.split(key, 5)
        self.delta = delta
        self.in_proj_qkvz = Linear(c.hidden_size, delta.channels + delta.values, key=qkvz)
        self.in_proj_ba = Linear(c.hidden_size, 2 * delta.value_heads, key=ba)
        self.conv1d = Conv1d(delta.channels, delta.width, key=conv)
        self.dt_bias = jnp.ones(delta.value_heads)
        self.A_log = jnp.log(jax.random.uniform(decay, (delta.value_heads,), minval=0.01, maxval=16.0))
        self.norm = GatedRMSNorm(delta.value_dim, c.rms_norm_eps)
        self.out_proj = Linear(delta.values, c.hidden_size, key=out)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: RecurrentCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], RecurrentCache | None]:
        d, flat = self.delta, lambda y: y.reshape(*y.shape[:2], -1)
        qkvz, ba = map(self.groups, project(x, self.in_proj_qkvz, self.in_proj_ba))
        qkv, z = jnp.split(qkvz, [d.channels // d.key_heads], axis=-1)
        b, a = map(flat, jnp.split(ba, 2, axis=-1))
        per_head = lambda p: jnp.broadcast_to(p.astype(jnp.float32), a.shape)
        decay = -jnp.exp(per_head(self.A_log)) * jax.nn.softplus(a.astype(jnp.float32) + per_head(self.dt_bias))

        # The convolution's weights are put in the order of the projection, and not the tokens' channels in theirs.
        by_head = jnp.split(self.conv1d.weight[:, 0], [d.keys, 2 * d.keys])
        by_head = [w.reshape(d.key_heads, -1, d.width) for w in by_head]
        conv = jnp.concatenate(by_head, axis=1).reshape(-1, d.width)

        y, cache = d(flat(qkv), decay, jax.nn.sigmoid(b), cache, at, conv=conv, split=self.split)
        return self.out_proj(flat(self.norm(y, z.reshape(y.shape)))), cache

    def groups(self, y: Float[Array, "batch seq features"]) -> Float[Array, "batch seq k_heads group"]:
        return y.reshape(*y.shape[:2], self.delta.key_heads, -1)

    def split(self, qkv: Float[Array, "batch seq channels"]) -> tuple[Float[Array, "batch seq _ _"], ...]:
        """Splits the channels into queries, keys and values by heads."""
        q, k, v = jnp.split(self.groups(qkv), [self.delta.key_dim, 2 * self.delta.key_dim], axis=-1)
        return q, k, v.reshape(*v.shape[:2], self.delta.value_heads, -1)

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> RecurrentCache:
        return self.delta.init_cache(layers, batch, dtype)


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
    gate: Router
    experts: MLP  # one MLP for each expert
    shared_expert: MLP
    shared_expert_gate: Router
    top_k: int = eqx.field(static=True)
    rescale: bool = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared, shared_gate) = config, jax.random.split(key, 4)
        each = lambda *sizes, key: ExpertLinear(c.num_experts, *sizes, key=key)
        self.gate = Router(c.hidden_size, c.num_experts, key=gate)
        self.experts = MLP(each, c.hidden_size, c.moe_intermediate_size, key=experts)
        self.shared_expert = MLP(Linear, c.hidden_size, c.shared_expert_intermediate_size, key=shared)
        self.shared_expert_gate = Router(c.hidden_size, 1, key=shared_gate)
        self.top_k = c.num_experts_per_tok
        self.rescale = c.norm_topk_prob

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.gate(x)
        probability, weights, chosen = moe.choose(
            logits, self.top_k, "softmax", normalise=0.0 if self.rescale else None
        )
        y = moe.dispatch(self.experts, x, chosen, weights.astype(x.dtype), lambda experts: experts.down_proj)
        shared = scaled(self.shared_expert(x), jax.nn.sigmoid(self.shared_expert_gate(x)))
        return y + shared, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: OffsetRMSNorm
    linear_attn: GatedDeltaNet | None  # a layer has this mixer
    self_attn: Attention | None  # or this one
    post_attention_layernorm: OffsetRMSNorm
    mlp: MLP | MoE
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, kind: str, sparse: bool, *, key: PRNGKeyArray):
        c, (mixer, mlp) = config, jax.random.split(key)
        self.input_layernorm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(c, key=mixer) if kind == "linear_attention" else None
        self.self_attn = Attention(c, key=mixer) if kind == "full_attention" else None
        self.post_attention_layernorm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c, key=mlp) if sparse else MLP(Linear, c.hidden_size, c.intermediate_size, key=mlp)

    @property
    def mixer(self) -> AbstractMixer:
        mixer = self.linear_attn or self.self_attn
        assert mixer is not None
        return mixer

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, moe.Routing | None]:
        y, cache = self.mixer(self.input_layernorm(x), cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.mixer.init_cache(layers, batch, length, dtype)


class MTP(AbstractOneLayerMTP):
    """Multi-token prediction, by a layer with attention and experts. transformers drops the module."""

    pre_fc_norm_embedding: OffsetRMSNorm
    pre_fc_norm_hidden: OffsetRMSNorm
    fc: AbstractLinear
    block: Block
    norm: OffsetRMSNorm

    def __init__(self, config: Config, *, keys: Sequence[PRNGKeyArray]):
        c, (project, block) = config, keys
        self.pre_fc_norm_embedding = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.fc = Linear(2 * c.hidden_size, c.hidden_size, key=project)
        self.block = Block(c, "full_attention", True, key=block)
        self.norm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)


class Model(AbstractMTPModel):
    embed_tokens: Embedding
    layers: Stack
    norm: OffsetRMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    mtp: MTP | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): none."""
        c, (embed, layers, head, *mtp) = config, jax.random.split(key, 5)
        kinds = [(kind, c.sparse(n)) for n, kind in enumerate(c.layer_types)]
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, *kinds[n], key=key), kinds, key=layers)
        self.norm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.mtp = MTP(c, keys=mtp) if "mtp" in parts else None

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Qwen3-Next, Qwen3-Coder-Next",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("qwen3_next",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.experts.*": P("expert", "tensor", "fsdp"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*.out_proj": P("fsdp", "tensor"),
        "*.in_proj_*": P("tensor", "fsdp"),
        "*_proj": P("tensor", "fsdp"),
        "mtp.fc": P("tensor", "fsdp"),
        "*gate.weight": P(),
        "*.conv1d.weight": P(),
        "*.dt_bias": P(),
        "*.A_log": P(),
        "*norm*.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "mtp.block.*.experts.*.weight": "mtp.layers.0.{}.experts.{expert}.{}.weight",
        "mtp.block.*": "mtp.layers.0.{}",
        "mtp.*": "mtp.{}",
        "layers.*.experts.*.weight": "model.layers.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    fp8_blocks=["*_proj.weight", "*.in_proj_qkvz.weight"],
    redundant={"mtp.*": None},
    implied={
        "architectures": ["Qwen3NextForCausalLM"],
        "model_type": "qwen3_next",
        "hidden_act": OneOf(["silu", "swish"]),
        "use_sliding_window": False,
    },
    parts={"mtp": "a module that predicts the token after the next (multi-token prediction)"},
)
