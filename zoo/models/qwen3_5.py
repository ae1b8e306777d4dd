"""Qwen3.5, 3.6 and 3.8: gated delta rules (arXiv:2412.06464) and, in every fourth layer, attention.

A linear layer keeps a matrix for each head in place of keys and values, so its cost and its memory do not grow with the
text. Attention has a gate for each of its outputs, and rotary positions turn a quarter of each head. All norms but the
one within the linear layers store their distance from one. Larger models are mixtures: each layer has a router, narrow
experts, and one gated expert for all tokens. Every release has a module that predicts one more token, the part "mtp",
and Qwen3-VL's tower without DeepStack, the part "vision". Attention turns features of images by three rotary
coordinates, which the frequencies of each head share in turn. Without the tower it is the text model, and saved as one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
    AbstractLinear,
    Conv1d,
    Embedding,
    Float32,
    GatedRMSNorm,
    Linear,
    OffsetRMSNorm,
    project,
    swiglu,
)
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractMixtureConfig, AbstractVisionModel, Family, Images, OneOf, Released
from zoo.nn.mtp import AbstractMTPModel, AbstractOneLayerMTP
from zoo.nn.recurrent import RecurrentCache
from zoo.nn.rope import MultiAxisRotary, RopeScaling
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVisionConfig, by_parts
from zoo.vision.towers import qwen3_vl


# config.json's model_type of a dense model and of a mixture, and what transformers calls each without and with a tower.
ARCHITECTURES = {
    "qwen3_5_text": ("Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration"),
    "qwen3_5_moe_text": ("Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration"),
}
# Sizes that only a mixture has.
MIXTURE = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")


@dataclasses.dataclass(frozen=True)
class Config(AbstractDeltaConfig, AbstractMixtureConfig, AbstractVisionConfig):
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    linear_num_value_heads: int = 32
    max_position_embeddings: int = 32_768
    intermediate_size: int = 0  # of a dense model's MLP; 0 in a mixture
    num_experts: int = 0  # 0, and the next three too: a dense model
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0
    shared_expert_intermediate_size: int = 0
    head_dim: int = 256
    linear_num_key_heads: int = 16
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] = ()  # (): by full_attention_interval
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = 0.25
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mtp_num_hidden_layers: int = 1
    vision: qwen3_vl.VisionConfig | None = None
    model_type: str = ""  # this and the next: those of a dense model or of a mixture
    architectures: tuple[str, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        kind = self.model_type or tuple(ARCHITECTURES)[self.num_experts > 0]
        if kind not in ARCHITECTURES or self.architectures not in ((), ARCHITECTURES[kind][:1]):
            known = "; ".join(f"{kind} with {text}" for kind, (text, _) in ARCHITECTURES.items())
            raise ValueError(
                f"model_type={kind!r} with architectures={list(self.architectures)} is not implemented: {known}."
            )
        object.__setattr__(self, "model_type", kind)
        object.__setattr__(self, "architectures", ARCHITECTURES[kind][:1])
        for name in ("intermediate_size", *MIXTURE):
            needed = (kind == "qwen3_5_moe_text") == (name in MIXTURE)
            if (getattr(self, name) > 0) != needed:
                raise ValueError(f"{name}={getattr(self, name)}, which {kind} {'needs' if needed else 'has not'}.")
        if self.vision is not None:
            self.vision.check(self.hidden_size)
            if deep := self.vision.tower.deepstack_visual_indexes:
                raise ValueError(f"vision_config has deepstack_visual_indexes={list(deep)}, but the text takes none.")


# fmt: off
#                        hidden   mlp  depth  heads
TINY  = qwen3_vl.Config(   768,  3072,    12,    12, deepstack_visual_indexes=())
SMALL = qwen3_vl.Config(  1024,  4096,    24,    16, deepstack_visual_indexes=())
LARGE = qwen3_vl.Config(  1152,  4304,    27,    16, deepstack_visual_indexes=())
VISION = qwen3_vl.VisionConfig(  # what a silent config.json means
    LARGE, mrope_section=(11, 11, 10), image_token_id=248_056, video_token_id=248_057, vision_start_token_id=248_053,
    vision_end_token_id=248_054,
)
vision_of = lambda tower, width: dataclasses.replace(VISION, tower=dataclasses.replace(tower, out_hidden_size=width))
QWEN: dict[str, Any] = dict(rope_theta=1e7)
TIED: dict[str, Any] = QWEN | dict(tie_word_embeddings=True)
MOE_35B: dict[str, Any] = QWEN | dict(
    num_experts=256, num_experts_per_tok=8, moe_intermediate_size=512, shared_expert_intermediate_size=512
)
MOE_122B: dict[str, Any] = MOE_35B | dict(moe_intermediate_size=1024, shared_expert_intermediate_size=1024)
MOE_397B: dict[str, Any] = MOE_122B | dict(num_experts=512, num_experts_per_tok=10)
#                     vocab hidden layers heads kv states positions   mlp
QWEN3_5_0_8B = Config(248320, 1024,    24,    8, 2,   16,   262144,  3584, vision=vision_of(TINY,  1024), **TIED)
QWEN3_5_2B   = Config(248320, 2048,    24,    8, 2,   16,   262144,  6144, vision=vision_of(SMALL, 2048), **TIED)
QWEN3_5_4B   = Config(248320, 2560,    32,   16, 4,   32,   262144,  9216, vision=vision_of(SMALL, 2560), **TIED)
QWEN3_5_9B   = Config(248320, 4096,    32,   16, 4,   32,   262144, 12288, vision=vision_of(LARGE, 4096), **QWEN)
QWEN3_5_27B  = Config(248320, 5120,    64,   24, 4,   48,   262144, 17408, vision=vision_of(LARGE, 5120), **QWEN)
QWEN3_5_35B  = Config(248320, 2048,    40,   16, 2,   32,   262144,     0, vision=vision_of(LARGE, 2048), **MOE_35B)
QWEN3_5_122B = Config(248320, 3072,    48,   32, 2,   64,   262144,     0, vision=vision_of(LARGE, 3072), **MOE_122B)
QWEN3_5_397B = Config(248320, 4096,    60,   32, 2,   64,   262144,     0, vision=vision_of(LARGE, 4096), **MOE_397B)

# The Hub's names of each size, with the same numbers: released, base, and in fp8. A zoo name is one in lower case.
CONFIGS = {
    name.lower(): Released(config, f"Qwen/{name}")
    for config, *names in (
        (QWEN3_5_0_8B, "Qwen3.5-0.8B",      "Qwen3.5-0.8B-Base"),
        (QWEN3_5_2B,   "Qwen3.5-2B",        "Qwen3.5-2B-Base"),
        (QWEN3_5_4B,   "Qwen3.5-4B",        "Qwen3.5-4B-Base"),
        (QWEN3_5_9B,   "Qwen3.5-9B",        "Qwen3.5-9B-Base"),
        (QWEN3_5_27B,  "Qwen3.5-27B",       "Qwen3.5-27B-FP8"),
        (QWEN3_5_35B,  "Qwen3.5-35B-A3B",   "Qwen3.5-35B-A3B-Base", "Qwen3.5-35B-A3B-FP8"),
        (QWEN3_5_122B, "Qwen3.5-122B-A10B", "Qwen3.5-122B-A10B-FP8"),
        (QWEN3_5_397B, "Qwen3.5-397B-A17B", "Qwen3.5-397B-A17B-FP8"),
        (QWEN3_5_27B,  "Qwen3.6-27B",       "Qwen3.6-27B-FP8"),
        (QWEN3_5_35B,  "Qwen3.6-35B-A3B",   "Qwen3.6-35B-A3B-FP8"),
        (QWEN3_5_27B,  "Qwen3.8-27B",       "Qwen3.8-27B-FP8"),
    )
    for name in names
}
# fmt: on


class Attention(AbstractMixer):
    """Attention, each output of which is multiplied by the sigmoid of its gate. `q_proj` gives queries and gates."""

    q_proj: AbstractLinear  # rows: of each head, first those of its queries, then those of its gates
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: OffsetRMSNorm
    k_norm: OffsetRMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: MultiAxisRotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        turned, sections = int(c.partial_rotary_factor * c.head_dim), c.vision.mrope_section if c.vision else ()
        self.rotary = MultiAxisRotary(turned, c.rope_theta, c.rope_scaling, sections)
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
        heads = lambda y, dim: y.reshape(*y.shape[:2], -1, dim)
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, gate = jnp.split(heads(q, 2 * self.head_dim), 2, axis=-1)
        q = self.rotary(self.q_norm(q), at)
        k = self.rotary(self.k_norm(heads(k, self.head_dim)), at)
        v = heads(v, self.head_dim)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5) * jax.nn.sigmoid(gate)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return KV.init(layers, batch, length, self.k_proj.shape[-2] // self.head_dim, self.head_dim, dtype)


class GatedDeltaNet(AbstractMixer):
    """Linear attention: short convolutions, a gated delta rule, a norm with a gate (arXiv:2412.06464, section 3)."""

    in_proj_qkv: AbstractLinear  # rows: all queries', all keys', all values'
    in_proj_z: AbstractLinear  # the norm's gate
    in_proj_b: AbstractLinear  # how much is written
    in_proj_a: AbstractLinear  # how much is kept
    conv1d: Conv1d
    dt_bias: Float[Array, " v_heads"]
    A_log: Float32
    norm: GatedRMSNorm
    out_proj: AbstractLinear
    delta: GatedDelta = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, delta, (qkv, z, b, a, conv, decay, out) = config, config.delta, jax.random.split(key, 7)
        self.delta = delta
        self.in_proj_qkv = Linear(c.hidden_size, delta.channels, key=qkv)
        self.in_proj_z = Linear(c.hidden_size, delta.values, key=z)
        self.in_proj_b = Linear(c.hidden_size, delta.value_heads, key=b)
        self.in_proj_a = Linear(c.hidden_size, delta.value_heads, key=a)
        self.conv1d = Conv1d(delta.channels, delta.width, key=conv)
        self.dt_bias = jnp.ones(delta.value_heads)
        self.A_log = Float32(jnp.log(jax.random.uniform(decay, (delta.value_heads,), minval=0.01, maxval=16)))
        self.norm = GatedRMSNorm(delta.value_dim, c.rms_norm_eps)
        self.out_proj = Linear(delta.values, c.hidden_size, key=out)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: RecurrentCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], RecurrentCache | None]:
        qkv, z, b, a = project(x, self.in_proj_qkv, self.in_proj_z, self.in_proj_b, self.in_proj_a)
        a = a.astype(jnp.float32)
        rate = jax.nn.softplus(a + jnp.broadcast_to(self.dt_bias.astype(jnp.float32), a.shape))
        decay = -jnp.broadcast_to(jnp.exp(self.A_log.value), a.shape) * rate
        beta, conv = jax.nn.sigmoid(b), self.conv1d.weight[:, 0]
        y, cache = self.delta(qkv, decay, beta, cache, at, conv=conv, split=self.split)
        y = self.norm(y, z.reshape(y.shape))
        return self.out_proj(y.reshape(*y.shape[:2], -1)), cache

    def split(self, qkv: Float[Array, "batch seq channels"]) -> tuple[Float[Array, "batch seq _ _"], ...]:
        """Splits the channels into queries, keys and values by heads."""
        # Over "tensor" each device has an equal share of the channels, which is not that of its heads. So XLA permutes
        # them between devices: with tensor=4 and twice as many values as keys, 5/8 of this array arrives at each
        # (compiled for CPUs by jax 0.10.2), beside the sum of outputs that attention and MLP have too.
        d, heads = self.delta, lambda y, count: y.reshape(*y.shape[:2], count, -1)
        q, k, v = jnp.split(qkv, [d.keys, 2 * d.keys], axis=-1)
        return heads(q, d.key_heads), heads(k, d.key_heads), heads(v, d.value_heads)

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> RecurrentCache:
        return self.delta.init_cache(layers, batch, dtype)


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, hidden: int, width: int, *, key: PRNGKeyArray):
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = Linear(hidden, width, key=gate)
        self.up_proj = Linear(hidden, width, key=up)
        self.down_proj = Linear(width, hidden, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class MoE(eqx.Module):
    gate: Router
    experts: moe.GatedExperts
    shared_expert: MLP
    shared_expert_gate: Router  # of the one expert that all tokens go to
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared, shared_gate) = config, jax.random.split(key, 4)
        self.gate = Router(c.hidden_size, c.num_experts, key=gate)
        self.experts = moe.GatedExperts(c.num_experts, c.hidden_size, c.moe_intermediate_size, key=experts)
        self.shared_expert = MLP(c.hidden_size, c.shared_expert_intermediate_size, key=shared)
        self.shared_expert_gate = Router(c.hidden_size, 1, key=shared_gate)
        self.top_k = c.num_experts_per_tok

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.gate(x)
        probability, weights, chosen = moe.choose(logits, self.top_k, "softmax", normalise=0.0)
        y = moe.dispatch(self.experts, x, chosen, weights.astype(x.dtype), lambda experts: experts.down_proj)
        y = y + scaled(self.shared_expert(x), jax.nn.sigmoid(self.shared_expert_gate(x)))
        return y, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: OffsetRMSNorm
    linear_attn: GatedDeltaNet | None  # a layer has this mixer
    self_attn: Attention | None  # or this one
    post_attention_layernorm: OffsetRMSNorm
    mlp: MLP | MoE
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, (mixer, mlp) = config, jax.random.split(key)
        self.input_layernorm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(c, key=mixer) if kind == "linear_attention" else None
        self.self_attn = Attention(c, key=mixer) if kind == "full_attention" else None
        self.post_attention_layernorm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c, key=mlp) if c.num_experts else MLP(c.hidden_size, c.intermediate_size, key=mlp)

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
    """Multi-token prediction, by a layer with attention. transformers leaves it out."""

    pre_fc_norm_embedding: OffsetRMSNorm
    pre_fc_norm_hidden: OffsetRMSNorm
    fc: AbstractLinear
    layers: tuple[Block]
    norm: OffsetRMSNorm

    def __init__(self, config: Config, *, keys: Sequence[PRNGKeyArray]):
        c, (project, block) = config, keys
        self.pre_fc_norm_embedding = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_fc_norm_hidden = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.fc = Linear(2 * c.hidden_size, c.hidden_size, key=project)
        self.layers = (Block(c, "full_attention", key=block),)
        self.norm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)

    @property
    def block(self) -> Block:
        return self.layers[0]


class Model(AbstractMTPModel, AbstractVisionModel):
    embed_tokens: Embedding
    layers: Stack
    norm: OffsetRMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    mtp: MTP | None
    vision: qwen3_vl.Tower | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, layers, head, *mtp) = by_parts(config, parts), jax.random.split(key, 5)
        if "mtp" in parts and c.mtp_num_hidden_layers != 1:
            raise ValueError(f"The part mtp needs mtp_num_hidden_layers=1, not {c.mtp_num_hidden_layers}.")
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, c.layer_types[n], key=key), c.layer_types, key=layers)
        self.norm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.mtp = MTP(c, keys=mtp) if "mtp" in parts else None
        tower = jax.random.fold_in(key, 1)
        self.vision = None if c.vision is None else qwen3_vl.Tower(c.vision.tower, key=tower)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed(tokens, images)
        merge = None if self.vision is None else self.vision.config.spatial_merge_size
        at, cache, delta = qwen3_vl.with_coordinates(at, x, images, merge, cache)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), None if cache is None else (*cache, *delta), reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Brings a config.json of either form into the flat one, as `qwen3_vl.flat` does."""
    if "text_config" in hub:  # and beside it a key that changes nothing
        hub = {key: value for key, value in hub.items() if key != "language_model_only"}
    return qwen3_vl.flat(hub, VISION)


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Inverts `standard_form` for a model with a tower; a text model's keys stay as they are."""
    if hub["vision"] is not None:
        rope = {"rope_theta": hub.pop("rope_theta")} | (hub.pop("rope_scaling") or {})
        hub["rope_parameters"] = rope | {"partial_rotary_factor": hub.pop("partial_rotary_factor")}
    return qwen3_vl.nested(hub, "rope_parameters", ARCHITECTURES[hub["model_type"]][1])


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Qwen3.5, Qwen3.6, Qwen3.8",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"),
    partition_rules={
        **{f"vision.{path}": spec for path, spec in qwen3_vl.PARTITION_RULES.items()},
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.gate_up_proj": P("expert", "tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*.out_proj": P("fsdp", "tensor"),
        "*.in_proj_*": P("tensor", "fsdp"),
        "*_proj": P("tensor", "fsdp"),
        "mtp.fc": P("tensor", "fsdp"),
        "*.conv1d.weight": P("tensor", None, None),
        "*.dt_bias": P(),
        "*.A_log.*": P(),
        "*gate.weight": P(),
        "*norm*.weight": P(),
    },
    checkpoint_names={
        **qwen3_vl.CHECKPOINT_NAMES,
        "lm_head.*": "lm_head.{}",
        "mtp.*.experts.*.weight": "mtp.{}.experts.{}",
        "mtp.*": "mtp.{}",
        "*.experts.*.weight": "model.{}.experts.{}",
        "*.A_log.value": "model.{}.A_log",
        "*": "model.{}",
    },
    beginnings=qwen3_vl.BEGINNINGS,
    aliases=qwen3_vl.ALIASES,
    fp8_blocks=["*_proj.weight", "*.in_proj_qkv.weight", "*.in_proj_z.weight"],
    redundant={"lm_head.weight": "model.embed_tokens.weight", "model.visual.*": None, "mtp.*": None},
    # The files in FP8 have experts one by one, Qwen3.5's those of MTP; and transformers writes all of them so.
    fused={
        ".experts.gate_up_proj": (".experts.{}.gate_proj.weight", ".experts.{}.up_proj.weight"),
        ".experts.down_proj": (".experts.{}.down_proj.weight",),
    },
    implied={
        "attn_output_gate": True,
        "hidden_act": OneOf(["silu", "swish"]),
        "mamba_ssm_dtype": "float32",
        "mlp_only_layers": [],
        "mtp_use_dedicated_embeddings": False,
        "output_gate_type": "swish",  # of the linear layers' norm; attention's gate is a sigmoid whatever this says
    },
    standard_form=standard_form,
    published_form=published_form,
    parts={
        "mtp": "a module that predicts the token after the next (multi-token prediction)",
        "vision": "its vision tower, so that the model takes images and videos",
    },
)
