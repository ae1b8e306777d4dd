"""Mistral Small 4: DeepSeek's latent attention and shared experts, for long texts, with a softmax over all experts.

Queries grow with their position, as those of Ministral 3, in all of their features. Every layer of Mistral Small 4 has
experts. It takes images; here it is its text model.
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

from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import LatentKV
from zoo.nn.fields import text_config
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, swiglu
from zoo.nn.mla import AbstractLatentConfig, LatentAttention
from zoo.nn.model import AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import InterleavedRotary, YarnScaling, coordinates
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractLatentConfig):
    vocab_size: int = 131_072
    hidden_size: int = 4096
    intermediate_size: int = 12_288  # of dense layers
    moe_intermediate_size: int = 2048
    num_hidden_layers: int = 36
    num_attention_heads: int = 32
    num_key_value_heads: int = 32  # unused: every head has its own keys and values
    n_routed_experts: int = 128
    num_experts_per_tok: int = 4
    max_position_embeddings: int = 1_048_576
    q_lora_rank: int | None = 1024
    kv_lora_rank: int = 256
    qk_nope_head_dim: int = 64
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_shared_experts: int = 1
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    rope_theta: float = 10_000.0
    rope_scaling: YarnScaling = YarnScaling(128.0, 8192, mscale=1.0, mscale_all_dim=1.0)
    llama_4_scaling_beta: float | None = 0.1  # in rope_parameters: the growth of queries; None: they do not grow
    rms_norm_eps: float = 1e-6

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


MISTRAL_SMALL_4 = Config()  # the defaults of transformers, which files may leave out

CONFIGS = {"mistral-small-4": Released(MISTRAL_SMALL_4, "mistralai/Mistral-Small-4-119B-2603")}


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
    shared_experts: MLP  # all of them as one wide MLP
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared) = config, jax.random.split(key, 3)
        self.config = c
        self.gate = Router(c.hidden_size, c.n_routed_experts, key=gate)
        self.experts = moe.GatedExperts(c.n_routed_experts, c.hidden_size, c.moe_intermediate_size, key=experts)
        self.shared_experts = MLP(c.hidden_size, c.n_shared_experts * c.moe_intermediate_size, key=shared)

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        normalise = 1e-20 if c.norm_topk_prob else None  # so that the weights add up to 1
        scores, weights, chosen = moe.choose(
            logits, c.num_experts_per_tok, "softmax", groups=c.n_group, kept=c.topk_group, normalise=normalise
        )
        weights = (c.routed_scaling_factor * weights).astype(x.dtype)
        y = moe.dispatch(self.experts, x, chosen, weights, lambda experts: experts.down_proj)
        return moe.with_shared(y, self.shared_experts(x)), moe.Routing.of(logits, scores, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: LatentAttention
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        self.config = c
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = LatentAttention(
            c,
            q_rank=c.q_lora_rank,
            rotary=InterleavedRotary(c.qk_rope_head_dim, c.rope_theta, c.rope_scaling),
            scale=c.head_dim**-0.5 * c.rope_scaling.yarn_mscale(c.rope_scaling.mscale_all_dim or 0) ** 2,
            key=attention,
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c, key=mlp) if kind == "moe" else MLP(c.hidden_size, c.intermediate_size, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: LatentKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], LatentKV | None, moe.Routing | None]:
        y = self.input_layernorm(x)
        q, c_kv, k_pe = self.self_attn.projected(y)
        y, cache = self.self_attn.attend(self.grown(q, at), c_kv, k_pe, cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + y, cache, routing

    def grown(self, q: Float[Array, "batch seq features"], at: Tokens) -> Float[Array, "batch seq features"]:
        """Scales queries up at each multiple of the original context, so that a softmax over more keys stays sharp.

        It is Llama 4's temperature tuning (after arXiv:2501.19399), in every layer.
        """
        beta, original = self.config.llama_4_scaling_beta, self.config.rope_scaling.original_max_position_embeddings
        if beta is None:
            return q
        times = jnp.maximum(coordinates(at, q.shape[1]), 0) // original
        factor = 1 + beta * jnp.log1p(times.astype(jnp.float32))
        return q * factor.astype(q.dtype)[:, :, None]

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> LatentKV:
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
        kinds = ["dense" if n < c.first_k_dense_replace else "moe" for n in range(c.num_hidden_layers)]
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, kinds[n], key=key), kinds, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x, cache, reports = self.layers(self.embed_tokens(tokens), cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.lm_head(x)


# Keys beside `text_config`: those of the tower, which is not implemented, and those that count more than the text
# model's own.
SIGHT = (
    "architectures", "model_type", "vision_config", "image_token_index", "image_token_id", "spatial_merge_size",
    "multimodal_projector_bias", "projector_hidden_act", "vision_feature_layer",
)  # fmt: skip
OUTSIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id")
# Files without rope_parameters mean those of Mistral Small 4.
ROPE = dataclasses.asdict(MISTRAL_SMALL_4.rope_scaling) | dict(rope_type="yarn", llama_4_scaling_beta=0.1)


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested config.json (with a `text_config`), and take what is not YaRN's out of its rope.

    Drop sizes that transformers writes and that follow from others, and replace null as it does.

    Raises:
        ValueError: if the rope turns other features than `qk_rope_head_dim` says, or from `text_config`.
    """
    text = dict(hub)
    if "text_config" in text:
        outer = {key: text.pop(key) for key in OUTSIDE if key in text}
        text = text_config(text, SIGHT) | outer
    nope, rotated = (text.get(f"qk_{part}_head_dim") or 64 for part in ("nope", "rope"))
    head = nope + rotated if type(nope) is type(rotated) is int else 0  # others are refused later
    text = {key: value for key, value in text.items() if key not in ("head_dim", "qk_head_dim") or value != head}
    text |= {key: False for key in ("norm_topk_prob", "rope_interleave") if text.get(key, True) is None}
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    rope = text.get(key)
    if rope is None:
        rope = ROPE
    if isinstance(rope, Mapping):
        share = rope.get("partial_rotary_factor")
        if head > 0 and share not in (None, rotated / head):
            raise ValueError(
                f"config.json says partial_rotary_factor={share!r:.200}, but qk_rope_head_dim={rotated} of {head} turn."
            )
        own = ("llama_4_scaling_beta", "max_position_embeddings", "partial_rotary_factor")
        text[key] = {name: value for name, value in rope.items() if name not in own}
        text["llama_4_scaling_beta"] = rope.get("llama_4_scaling_beta")
    return text


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `standard_form`, of a text model."""
    rope = {key: value for key, value in hub.pop("rope_scaling").items() if value is not None}
    if (beta := hub.pop("llama_4_scaling_beta")) is not None:
        rope["llama_4_scaling_beta"] = beta
    return hub | {"rope_parameters": rope | {"rope_theta": hub.pop("rope_theta")}}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Mistral Small 4",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("mistral4", "mistral3/mistral4"),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.gate_up_proj": P("expert", "tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*_a_proj*": P(None, "fsdp"),
        "*_proj": P("tensor", "fsdp"),
        "*.gate.weight": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "*.experts.*.weight": "model.{}.experts.{}",
        "*": "model.{}",
    },
    # Beginnings in files with a tower, and in those of transformers 5.
    aliases={
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    redundant={  # of the tower
        "vision_tower.*": None,
        "multi_modal_projector.*": None,
        "model.vision_tower.*": None,
        "model.multi_modal_projector.*": None,
    },
    implied={
        "architectures": ["Mistral4ForCausalLM"],
        "model_type": "mistral4",
        "hidden_act": OneOf(["silu", "swish"]),
        "attention_bias": False,
        "mlp_bias": False,
        "rope_interleave": True,
        "tie_word_embeddings": False,
    },
    standard_form=standard_form,
    published_form=published_form,
)
