"""Gemma 3, the text models (arXiv:2503.19786): Gemma 2 with an RMSNorm over each head's queries and keys, and no caps.

Five of six layers have a sliding window and their own rotary base. From 4B on, checkpoints also hold a vision tower:
only their text model is read, and it is saved as a text model.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.config import text_config, typed
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.layers import AbstractLinear, Embedding, Linear, OffsetRMSNorm, geglu
from zoo.nn.model import AbstractConfig, AbstractModel, Family, causal_keys
from zoo.nn.rope import LinearScaling, RopeScaling, Rotary
from zoo.nn.stack import AbstractDecoderBlock, Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    query_pre_attn_scalar: int = 256
    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): every sixth is full
    rope_theta: float = 1_000_000.0  # of full attention, like rope_scaling
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float = 10_000.0  # of sliding attention
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False

    def __post_init__(self):
        layers = range(self.num_hidden_layers)
        kinds = self.layer_types or tuple("sliding_attention" if (n + 1) % 6 else "full_attention" for n in layers)
        object.__setattr__(self, "layer_types", kinds)
        if len(kinds) != len(layers):
            raise ValueError(f"layer_types has {len(kinds)} entries, but num_hidden_layers is {len(layers)}.")

    def window(self, layer: int) -> int | None:
        """How many positions, its own included, a token of this layer attends to; None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))


# fmt: off
TEXT: dict[str, Any] = dict(sliding_window=512)
VISION: dict[str, Any] = dict(sliding_window=1024, rope_scaling=LinearScaling(8.0))
#                          hidden    mlp  layers  heads  kv  head  query   vocab  positions
CONFIGS = {
    "gemma3-270m":    Config(  640,  2048,     18,     4,  1,  256,   256, 262144,  32768, **TEXT),
    "gemma3-270m-it": Config(  640,  2048,     18,     4,  1,  256,   256, 262144,  32768, **TEXT),
    "gemma3-1b":      Config( 1152,  6912,     26,     4,  1,  256,   256, 262144,  32768, **TEXT),
    "gemma3-1b-it":   Config( 1152,  6912,     26,     4,  1,  256,   256, 262144,  32768, **TEXT),
    "gemma3-4b":      Config( 2560, 10240,     34,     8,  4,  256,   256, 262208, 131072, **VISION),
    "gemma3-4b-it":   Config( 2560, 10240,     34,     8,  4,  256,   256, 262208, 131072, **VISION),
    "gemma3-12b":     Config( 3840, 15360,     48,    16,  8,  256,   256, 262208, 131072, **VISION),
    "gemma3-12b-it":  Config( 3840, 15360,     48,    16,  8,  256,   256, 262208, 131072, **VISION),
    "gemma3-27b":     Config( 5376, 21504,     62,    32, 16,  128,   168, 262208, 131072, **VISION),
    "gemma3-27b-it":  Config( 5376, 21504,     62,    32, 16,  128,   168, 262208, 131072, **VISION),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: OffsetRMSNorm
    k_norm: OffsetRMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        local = c.layer_types[layer] == "sliding_attention"
        base, scaling = (c.rope_local_base_freq, None) if local else (c.rope_theta, c.rope_scaling)
        self.rotary = Rotary(c.head_dim, base, scaling)
        self.scale = c.query_pre_attn_scalar**-0.5
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = OffsetRMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = OffsetRMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q = self.rotary(self.q_norm(heads(self.q_proj(x))), at)
        k = self.rotary(self.k_norm(heads(self.k_proj(x))), at)
        v, kv = heads(self.v_proj(x)), at
        if cache is not None:
            cache, k, v, kv = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, kv, scale=self.scale, mask=kernels.sliding(self.window))
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(geglu(self.gate_proj(x), self.up_proj(x)))


class Block(AbstractDecoderBlock):
    input_layernorm: OffsetRMSNorm
    self_attn: Attention
    post_attention_layernorm: OffsetRMSNorm
    pre_feedforward_layernorm: OffsetRMSNorm
    mlp: MLP
    post_feedforward_layernorm: OffsetRMSNorm

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, key=attention)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)
        self.post_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    norm: OffsetRMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), c.layer_types, key=layers)
        self.norm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def hidden(
        self,
        tokens: Int[Array, "batch seq"],
        cache: Caches | None = None,
        *,
        positions: Int[Array, "batch seq"] | None = None,
        segments: Int[Array, "batch seq"] | None = None,
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)  # rounded: sqrt(5376) is 73.5 in bfloat16
        x, cache, reports = self.layers(x, cache, Tokens(positions, segments))
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Caches:
        return self.layers.init_cache(batch, length, dtype)


# Keys that may stand beside text_config: they are about images, or repeat what text_config says.
BESIDE = {
    "architectures", "boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image", "model_type",
    "tie_word_embeddings", "vision_config",
}  # fmt: skip


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Take the text part of config.json, list the layers' types, and put the two ropes side by side.

    Raises:
        ValueError: if the rope of sliding attention is scaled, or one of the two is missing.
    """
    tied = hub.get("tie_word_embeddings", True)  # a multimodal file says it beside its text_config
    hub = text_config(hub, BESIDE) | dict(tie_word_embeddings=tied) if "text_config" in hub else dict(hub)
    scaling = hub.get("rope_scaling") or {}
    if ("rope_type" not in scaling and "type" in scaling) or (scaling and hub.get("rope_parameters")):
        raise ValueError(f"rope_scaling={scaling!r} needs a rope_type, and no rope_parameters beside it.")
    if "original_max_position_embeddings" in hub:
        raise ValueError("original_max_position_embeddings belongs in the rope_scaling of full attention.")
    every = hub.pop("sliding_window_pattern", None)
    if every is not None and not (type(every) is int and every > 0):
        raise ValueError(f"sliding_window_pattern={every!r} is no number of layers.")
    if every and not hub.get("layer_types"):
        layers = hub.get("num_hidden_layers")
        layers = range(1, typed("num_hidden_layers", layers, int, f"num_hidden_layers={layers!r}") + 1)
        hub["layer_types"] = ["sliding_attention" if n % every else "full_attention" for n in layers]
    match hub.pop("rope_parameters", None):
        case None:
            pass
        case {
            "full_attention": {"rope_theta": theta, **scaling},
            "sliding_attention": {"rope_theta": local, "rope_type": "default", **local_scaling},
            **others,
        } if not local_scaling and not others:
            hub |= dict(rope_theta=theta, rope_scaling=scaling, rope_local_base_freq=local)
        case parameters:
            raise ValueError(
                f"config.json says rope_parameters={parameters!r}; gemma3 needs a rope_theta for full_attention "
                "and one for sliding_attention, whose rope it does not scale."
            )
    return hub


FAMILY = Family(
    title="Gemma 3 (text)",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("gemma3", "gemma3_text"),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate_proj": P("tensor", "fsdp"),
        "layers.*.up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={"lm_head.*": "lm_head.{}", "*": "model.{}"},
    aliases={  # names in checkpoints with a vision tower: the first release's, and transformers 4.52's
        "language_model.model.": "model.",
        "language_model.lm_head.": "lm_head.",
        "model.language_model.": "model.",
    },
    redundant={
        "lm_head.weight": "model.embed_tokens.weight",
        "vision_tower.*": None,
        "multi_modal_projector.*": None,
        "model.vision_tower.*": None,
        "model.multi_modal_projector.*": None,
    },
    implied={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    standard_form=standard_form,
)
