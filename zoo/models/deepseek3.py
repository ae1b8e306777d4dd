"""DeepSeek V3 (arXiv:2412.19437), R1 (arXiv:2501.12948), Kimi K2 to K2.7 (arXiv:2507.20534) and GLM-4.7-Flash.

Latent attention and shared experts as in V2. The experts' scores are sigmoids. A bias that affects only which experts
are chosen evens their load, where other families need a loss. All but Kimi K2 have a module that predicts one more
token. V3, R1 and K2 are published in fp8. From K2 Thinking on, Kimi's experts are published in four bits, which
zoo.load(..., quantize="stored") keeps in memory, too. K2.5 and later see; here they are their text models.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import LatentKV
from zoo.nn.fields import text_config
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Embedding, ExpertLinear, Linear, RMSNorm, swiglu
from zoo.nn.mla import AbstractLatentConfig, LatentAttention
from zoo.nn.model import Family, OneOf, Released, causal_keys
from zoo.nn.mtp import AbstractMTPModel, NextNMTP
from zoo.nn.rope import InterleavedRotary, YarnScaling
from zoo.nn.routing import BiasedRouter, rebalance
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractLatentConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # unused: every head has its own keys and values
    n_routed_experts: int
    max_position_embeddings: int
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_shared_experts: int = 1
    num_experts_per_tok: int = 8
    n_group: int = 8
    topk_group: int = 4
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 2.5
    first_k_dense_replace: int = 3
    rope_theta: float = 10_000.0
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: float = 1e-6
    num_nextn_predict_layers: int = 1

    def __post_init__(self):
        each, rest = divmod(self.n_routed_experts, self.n_group)
        enough = self.topk_group <= self.n_group and self.num_experts_per_tok <= self.topk_group * each
        if rest or each < 2 or not enough:
            raise ValueError(
                f"{self.num_experts_per_tok} of {self.n_routed_experts} experts cannot be chosen from topk_group "
                f"{self.topk_group} of n_group {self.n_group} groups."
            )

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * (self.head_dim + self.v_head_dim) * causal_keys(seq)

    mtp_layer = property(lambda self: self.num_hidden_layers if self.num_nextn_predict_layers else None)


# fmt: off
V3: dict[str, Any] = dict(rope_scaling=YarnScaling(40.0, 4096, mscale=1.0, mscale_all_dim=1.0))
K2: dict[str, Any] = dict(
    first_k_dense_replace=1, n_group=1, topk_group=1, routed_scaling_factor=2.827, num_nextn_predict_layers=0,
    rope_theta=50_000.0, rope_scaling=YarnScaling(32.0, 4096, 1.0, 1.0, mscale=1.0, mscale_all_dim=1.0),
)
K2_0905: dict[str, Any] = K2 | dict(rope_scaling=dataclasses.replace(K2["rope_scaling"], factor=64.0))
THINKING: dict[str, Any] = K2 | dict(rope_scaling=dataclasses.replace(K2["rope_scaling"], factor=64.0, beta_fast=32.0))
K2_5: dict[str, Any] = THINKING | dict(rms_norm_eps=1e-5)
FLASH: dict[str, Any] = dict(  # transformers' defaults for glm4_moe_lite, too
    q_lora_rank=768, qk_nope_head_dim=192, v_head_dim=256, num_experts_per_tok=4, n_group=1, topk_group=1,
    routed_scaling_factor=1.8, first_k_dense_replace=1, rms_norm_eps=1e-5,
)
#                          vocab  hidden    mlp  expert  layers  heads   kv  experts  positions
DEEPSEEK_V3      = Config(129280,   7168, 18432,   2048,     61,   128, 128,    256,    163840, **V3)
KIMI_K2          = Config(163840,   7168, 18432,   2048,     61,    64,  64,    384,    131072, **K2)
KIMI_K2_0905     = Config(163840,   7168, 18432,   2048,     61,    64,  64,    384,    262144, **K2_0905)
KIMI_K2_THINKING = Config(163840,   7168, 18432,   2048,     61,    64,  64,    384,    262144, **THINKING)
KIMI_K2_5        = Config(163840,   7168, 18432,   2048,     61,    64,  64,    384,    262144, **K2_5)
GLM_FLASH        = Config(154880,   2048, 10240,   1536,     47,    20,  20,     64,    202752, **FLASH, rope_theta=1e6)

CONFIGS = {
    "deepseek-v3":            Released(DEEPSEEK_V3,      "deepseek-ai/DeepSeek-V3"),
    "deepseek-v3-base":       Released(DEEPSEEK_V3,      "deepseek-ai/DeepSeek-V3-Base"),
    "deepseek-v3-0324":       Released(DEEPSEEK_V3,      "deepseek-ai/DeepSeek-V3-0324"),
    "deepseek-v3.1":          Released(DEEPSEEK_V3,      "deepseek-ai/DeepSeek-V3.1"),
    "deepseek-v3.1-terminus": Released(DEEPSEEK_V3,      "deepseek-ai/DeepSeek-V3.1-Terminus"),
    "deepseek-r1":            Released(DEEPSEEK_V3,      "deepseek-ai/DeepSeek-R1"),
    "deepseek-r1-0528":       Released(DEEPSEEK_V3,      "deepseek-ai/DeepSeek-R1-0528"),
    "kimi-k2":                Released(KIMI_K2,          "moonshotai/Kimi-K2-Instruct"),
    "kimi-k2-base":           Released(KIMI_K2,          "moonshotai/Kimi-K2-Base"),
    "kimi-k2-0905":           Released(KIMI_K2_0905,     "moonshotai/Kimi-K2-Instruct-0905"),
    "kimi-k2-thinking":       Released(KIMI_K2_THINKING, "moonshotai/Kimi-K2-Thinking"),
    "kimi-k2.5":              Released(KIMI_K2_5,        "moonshotai/Kimi-K2.5"),
    "kimi-k2.6":              Released(KIMI_K2_5,        "moonshotai/Kimi-K2.6"),
    "kimi-k2.7-code":         Released(KIMI_K2_5,        "moonshotai/Kimi-K2.7-Code"),
    "glm4.7-flash":           Released(GLM_FLASH,        "zai-org/GLM-4.7-Flash"),
}
# fmt: on


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
    self_attn: LatentAttention
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        yarn = c.rope_scaling
        mscale = yarn.yarn_mscale(yarn.mscale_all_dim or 0) if yarn else 1.0
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = LatentAttention(
            c,
            q_rank=c.q_lora_rank,
            rotary=InterleavedRotary(c.qk_rope_head_dim, c.rope_theta, yarn),
            scale=c.head_dim**-0.5 * mscale**2,
            key=attention,
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c, key=mlp) if kind == "moe" else MLP(Linear, c.hidden_size, c.intermediate_size, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: LatentKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], LatentKV | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + y, cache, routing

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> LatentKV:
        return self.self_attn.init_cache(layers, batch, length, dtype)


class Model(AbstractMTPModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear
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
        self.lm_head = Linear(c.hidden_size, c.vocab_size, key=head)
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
        return self.lm_head(x)


# Keys beside `text_config` from K2.5 on: those of the tower, which is not implemented, and those that count more than
# the text model's own.
SIGHT = (
    "architectures", "model_type", "vision_config", "ignore_index", "media_placeholder_token_id",
    "use_unified_vision_chunk", "video_placeholder", "image_token_id", "video_token_id", "vision_start_token_id",
    "vision_end_token_id", "projection_hidden_size", "projection_layer_norm_eps",
)  # fmt: skip
OUTSIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
UNUSED: dict[str, Any] = dict(add_cross_attention=False, pruned_heads={})  # what transformers 4 wrote for every model


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Drop two sizes that transformers 5 writes and that follow from others, and replace null as it does.

    From K2.5 on Kimi's keys are in a `text_config`. GLM-4.7-Flash has other defaults, and in transformers
    `mlp_layer_types` in place of `first_k_dense_replace`.

    Raises:
        ValueError: if `mlp_layer_types` is no list of all layers, the dense ones first, or from `text_config`.
    """
    if "text_config" in hub:
        outer = {key: hub[key] for key in OUTSIDE if key in hub}
        hub = text_config({key: value for key, value in hub.items() if key not in outer}, SIGHT) | outer
        hub = {key: value for key, value in hub.items() if key not in UNUSED or value != UNUSED[key]}
    null, rotary = dict(norm_topk_prob=False, rope_interleave=False), hub.get("qk_rope_head_dim", 64)
    if hub.get("model_type") == "glm4_moe_lite":
        hub = FLASH | {key: value for key, value in hub.items() if value is not None or key == "q_lora_rank"}
        if (kinds := hub.pop("mlp_layer_types", None)) is not None:
            dense = kinds.count("dense") if isinstance(kinds, list) else 0
            layers = hub.get("num_hidden_layers")
            if not isinstance(layers, int) or kinds != ["dense"] * dense + ["sparse"] * (layers - dense):
                raise ValueError(f"mlp_layer_types={kinds!r:.200} does not list all layers, the dense ones first.")
            hub["first_k_dense_replace"] = dense
    return {
        key: null[key] if key in null and value is None else value
        for key, value in hub.items()
        if key != "qk_head_dim" and (key, value) != ("head_dim", rotary)
    }


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Add `mlp_layer_types` to GLM-4.7-Flash's keys, as transformers needs it."""
    if hub["model_type"] == "glm4_moe_lite":
        dense = hub["first_k_dense_replace"]
        hub["mlp_layer_types"] = ["dense" if n < dense else "sparse" for n in range(hub["num_hidden_layers"])]
    return hub


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="DeepSeek V3, R1; Kimi K2 to K2.7; GLM-4.7-Flash",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("deepseek_v3", "kimi_k2", "kimi_k25", "glm4_moe_lite"),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.experts.*": P("expert", "tensor", "fsdp"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*_a_proj*": P(None, "fsdp"),
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
    fp8_blocks=["*.self_attn.*_proj*.weight", "*.mlp.*_proj.weight"],
    aliases={"language_model.model.": "model.", "language_model.lm_head.": "lm_head."},  # of Kimi K2.5 and later
    redundant={
        "vision_tower.*": None,
        "mm_projector.*": None,
        "model.layers.*.self_attn.rotary_emb.inv_freq": None,
        "model.layers.{config.mtp_layer}.*": None,  # MTP: all of it, or its copies of embedding and head
    },
    implied={
        "architectures": OneOf([["DeepseekV3ForCausalLM"], ["Glm4MoeLiteForCausalLM"]]),
        "model_type": OneOf(["deepseek_v3", "kimi_k2", "glm4_moe_lite"]),
        "hidden_act": OneOf(["silu", "swish"]),
        "attention_bias": False,
        "moe_layer_freq": 1,
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
    },
    standard_form=standard_form,
    published_form=published_form,
    parts={"mtp": "a module that predicts the token after the next (multi-token prediction)"},
    rebalance=rebalance,
)
