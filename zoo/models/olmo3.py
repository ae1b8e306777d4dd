"""Olmo 3 (Ai2, 2025): Olmo 2, in which three of four layers have a sliding window.

Norms come after attention and the MLP, and none before them; queries and keys have an RMSNorm over all heads of a token
together. Positions are scaled by YaRN in the layers with full attention alone. They are applied in float32.
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
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.fields import fill_layers
from zoo.nn.layers import AbstractLinear, Embedding, Float32RMSNorm, Linear, project, swiglu
from zoo.nn.model import AbstractConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary, YarnScaling
from zoo.nn.stack import Caches, Reports, Stack


THETA = 500_000.0  # of sliding layers in transformers 5.23, whatever `rope_theta` an older file has


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0, or null in config.json: num_attention_heads
    vocab_size: int = 50_304
    max_position_embeddings: int = 2048
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    sliding_window: int | None = 4096
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): every fourth is full
    rope_theta: float = THETA
    rope_scaling: RopeScaling | None = None  # of full attention
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self):
        # Fill in what follows from other fields, so that equivalent configs compare equal.
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)
        fill_layers(self, "layer_types", lambda n: "sliding_attention" if (n + 1) % 4 else "full_attention")
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise ValueError("layer_types has sliding_attention, which needs a sliding_window.")

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
YARN = YarnScaling(8.0, 8192, attention_factor=1.2079441541679836)  # 0.1 ln 8 + 1
OLMO: dict[str, Any] = dict(rope_scaling=YARN, rms_norm_eps=1e-6)
#                  hidden    mlp  layers  heads  kv   vocab  positions
OLMO3_7B  = Config(  4096, 11008,     32,    32, 32, 100278,     65536, **OLMO)
OLMO3_32B = Config(  5120, 27648,     64,    40,  8, 100278,     65536, **OLMO)

CONFIGS = {
    "olmo3-7b":             Released(OLMO3_7B,  "allenai/Olmo-3-1025-7B"),
    "olmo3-7b-instruct":    Released(OLMO3_7B,  "allenai/Olmo-3-7B-Instruct"),
    "olmo3-32b":            Released(OLMO3_32B, "allenai/Olmo-3-1125-32B"),
    "olmo3.1-32b-instruct": Released(OLMO3_32B, "allenai/Olmo-3.1-32B-Instruct"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: Float32RMSNorm
    k_norm: Float32RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        slides = c.layer_types[layer] == "sliding_attention"
        self.rotary = Rotary(c.head_dim, c.rope_theta, None if slides else c.rope_scaling)
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = Float32RMSNorm(queries, c.rms_norm_eps)
        self.k_norm = Float32RMSNorm(keys, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        rotated = lambda y: self.rotary(heads(y).astype(jnp.float32), at).astype(x.dtype)
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = rotated(self.q_norm(q)), rotated(self.k_norm(k)), heads(v)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=kernels.sliding(self.window))
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
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Block(AbstractDecoderBlock):
    self_attn: Attention
    post_attention_layernorm: Float32RMSNorm
    mlp: MLP
    post_feedforward_layernorm: Float32RMSNorm

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.self_attn = Attention(config, layer, key=attention)
        self.post_attention_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)
        self.post_feedforward_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, None]:
        y, cache = self.self_attn(x, cache, at)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    norm: Float32RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), c.layer_types, key=layers)
        self.norm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
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
    """Brings `rope_parameters`, in which transformers 5 keeps the ropes of both kinds of layers, into the older form:
    `rope_theta` of all layers, and `rope_scaling` of full attention.

    Raises:
        ValueError: if ropes are given in both forms, in an incomplete one, or with a key in the wrong place; if they
            have two bases; or if that of sliding attention is scaled.
    """
    hub = dict(hub)
    older = hub.get("rope_scaling") or {}
    if "rope_type" not in older and "type" in older:
        raise ValueError(f"rope_scaling={older!r} needs a rope_type; a type alone is not read.")
    if older and hub.get("rope_parameters"):
        raise ValueError(f"config.json says rope_scaling={older!r} beside rope_parameters: give one of the two.")
    if "original_max_position_embeddings" in hub:
        raise ValueError("original_max_position_embeddings belongs in the rope_scaling of full attention.")
    match hub.pop("rope_parameters", None):
        case None:
            return hub
        case {
            "full_attention": {"rope_theta": theta, **scaling},
            "sliding_attention": {"rope_theta": local, "rope_type": "default", **local_scaling},
            **others,
        } if local == theta and not local_scaling and not others:
            return hub | dict(rope_theta=theta, rope_scaling=scaling)
        case parameters:
            raise ValueError(
                f"rope_parameters={parameters!r}; olmo3 needs one rope_theta, in full_attention and sliding_attention, "
                'and for the latter nothing else but the rope_type "default".'
            )


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Keeps the older form, in which models are published, unless transformers would misread its `rope_theta`."""
    if hub["rope_theta"] == THETA:
        return hub
    theta, scaling = hub.pop("rope_theta"), hub.pop("rope_scaling") or {"rope_type": "default"}
    local = {"rope_type": "default", "rope_theta": theta}
    return hub | dict(rope_parameters=dict(full_attention=scaling | dict(rope_theta=theta), sliding_attention=local))


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Olmo 3, Olmo 3.1",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("olmo3",),
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
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={
        "architectures": ["Olmo3ForCausalLM"],
        "model_type": "olmo3",
        "hidden_act": OneOf(["silu", "swish"]),
    },
    standard_form=standard_form,
    published_form=published_form,
)
