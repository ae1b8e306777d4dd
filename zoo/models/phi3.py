"""Phi-3.5 mini (arXiv:2404.14219), Phi-4 (arXiv:2412.08905) and Phi-4 mini (arXiv:2503.01743): Llama's decoder.

One matrix makes queries, keys and values, and another one the gate and the input of the MLP. The mini models' rotary
positions are stretched by LongRoPE, and turn three quarters of each head in Phi-4 mini. The configuration allows a
sliding window on all layers; that of the released mini models is longer than their context, and so none.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.clip import AbstractScalableAttention
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, silu_times
from zoo.nn.model import AbstractConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import LongRopeScaling, Rotary
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0, or null in config.json: num_attention_heads
    vocab_size: int = 32_064
    max_position_embeddings: int = 4096
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    sliding_window: int | None = None
    rope_theta: float = 10_000.0
    rope_scaling: LongRopeScaling | None = None
    partial_rotary_factor: float = 1.0
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self):
        # Fill in what follows from other fields, so that equivalent configs compare equal.
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "num_key_value_heads", self.num_key_value_heads or self.num_attention_heads)

    @property
    def cache_limit(self) -> int | None:
        """The original context: in longer texts all tokens have the frequencies of `long_factor`."""
        return self.rope_scaling and self.rope_scaling.original_max_position_embeddings

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        shorter = self.sliding_window is not None and self.sliding_window < self.max_position_embeddings
        return self.sliding_window if shorter else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
LONG: dict[str, Any] = dict(factor=32.0, original_max_position_embeddings=4096)
float32 = lambda *numbers: tuple(np.array(numbers, np.float32).tolist())  # the file has such numbers
LONG_ROPE_3_5 = LongRopeScaling(
    short_factor=float32(
        1.0, 1.02, 1.03, 1.03, 1.05, 1.05, 1.05, 1.05, 1.05, 1.0699999, 1.0999999, 1.1099999, 1.1599998, 1.1599998,
        1.1699998, 1.2899998, 1.3399998, 1.6799998, 1.7899998, 1.8199998, 1.8499998, 1.8799998, 1.9099997, 1.9399997,
        1.9899997, 2.0199997, 2.0199997, 2.0199997, 2.0199997, 2.0199997, 2.0199997, 2.0299997, 2.0299997, 2.0299997,
        2.0299997, 2.0299997, 2.0299997, 2.0299997, 2.0299997, 2.0299997, 2.0799997, 2.0899997, 2.1899996, 2.2199996,
        2.5899994, 2.7299995, 2.7499995, 2.8399994,
    ),
    long_factor=float32(
        1.08, 1.11, 1.14, 1.34, 1.5899999, 1.6, 1.62, 2.6200001, 3.23, 3.23, 4.79, 7.4, 7.7000003, 9.09, 12.2, 17.67,
        24.460001, 28.570002, 30.420002, 30.840002, 32.590004, 32.930004, 42.320004, 44.960003, 50.340004, 50.450005,
        57.550003, 57.930004, 58.210003, 60.140003, 62.610004, 62.620003, 62.710003, 63.140003, 63.140003, 63.770004,
        63.930004, 63.960003, 63.97, 64.03, 64.07, 64.08, 64.12, 64.41, 64.48, 64.51, 64.53, 64.84,
    ),
    **LONG,
)
LONG_ROPE_4 = LongRopeScaling(
    short_factor=(1.0,) * 48,
    long_factor=(
        1.0, 1.118320672, 1.250641126, 1.398617824, 1.564103225, 1.74916897, 1.956131817, 2.187582649, 2.446418898,
        2.735880826, 3.059592084, 3.421605075, 3.826451687, 4.279200023, 4.785517845, 5.351743533, 5.984965424,
        6.693110555, 7.485043894, 8.370679318, 9.36110372, 10.4687158, 11.70738129, 13.09260651, 14.64173252,
        16.37415215, 18.31155283, 20.47818807, 22.90118105, 25.61086418, 28.64115884, 32.03, 32.1, 32.13, 32.23,
        32.6, 32.61, 32.64, 32.66, 32.7, 32.71, 32.93, 32.97, 33.28, 33.49, 33.5, 44.16, 47.77,
    ),
    **LONG,
)
PHI3_5: dict[str, Any] = dict(sliding_window=262_144, rope_scaling=LONG_ROPE_3_5)
PHI4: dict[str, Any] = dict(
    sliding_window=262_144, rope_scaling=LONG_ROPE_4, partial_rotary_factor=0.75, tie_word_embeddings=True
)
#                    hidden    mlp  layers  heads  kv   vocab  positions
PHI3_5_MINI = Config(  3072,  8192,     32,    32, 32,  32064,    131072, **PHI3_5)
PHI4_14B    = Config(  5120, 17920,     40,    40, 10, 100352,     16384, rope_theta=250_000.0)
PHI4_MINI   = Config(  3072,  8192,     32,    24,  8, 200064,    131072, **PHI4)

CONFIGS = {
    "phi3.5-mini":         Released(PHI3_5_MINI, "microsoft/Phi-3.5-mini-instruct"),
    "phi4-14b":            Released(PHI4_14B,    "microsoft/phi-4"),
    "phi4-mini":           Released(PHI4_MINI,   "microsoft/Phi-4-mini-instruct"),
    "phi4-mini-reasoning": Released(PHI4_MINI,   "microsoft/Phi-4-mini-reasoning"),
}
# fmt: on


class Attention(AbstractScalableAttention):
    qkv_proj: AbstractLinear  # the queries of all heads, then the keys, then the values
    o_proj: AbstractLinear
    heads: int = eqx.field(static=True)
    kv_heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (qkv, o) = config, jax.random.split(key)
        self.heads, self.kv_heads, self.head_dim = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        self.rotary = Rotary(int(c.head_dim * c.partial_rotary_factor), c.rope_theta, c.rope_scaling)
        self.window = c.window(0)  # of all layers
        self.qkv_proj = Linear(c.hidden_size, (self.heads + 2 * self.kv_heads) * c.head_dim, key=qkv)
        self.o_proj = Linear(self.heads * c.head_dim, c.hidden_size, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        qkv = self.qkv_proj(x).reshape(*x.shape[:2], -1, self.head_dim)
        q, k, v = jnp.split(qkv, [self.heads, self.heads + self.kv_heads], axis=2)
        q, k = self.rotary(q, at), self.rotary(k, at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=kernels.sliding(self.window))
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def row_factors(self, factor: Float[Array, " heads"]) -> dict[str, Float[Array, " rows"]]:
        keys = jnp.ones(self.kv_heads)  # stay, where several heads read each, as values do in any case
        of_heads = [factor, keys] if self.kv_heads < self.heads else [jnp.sqrt(factor)] * 2
        return {"qkv_proj": jnp.repeat(jnp.concatenate([*of_heads, keys]), self.head_dim)}


class MLP(eqx.Module):
    gate_up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate_up, down) = config, jax.random.split(key)
        self.gate_up_proj = Linear(c.hidden_size, 2 * c.intermediate_size, key=gate_up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(silu_times(*jnp.split(self.gate_up_proj(x), 2, axis=-1)))


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        a = self.self_attn
        return init_kv(layers, batch, length, a.kv_heads, a.head_dim, dtype, window=a.window)


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
        self.layers = Stack(lambda n, *, key: Block(c, key=key), ["full"] * c.num_hidden_layers, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x, cache, reports = self.layers(self.embed_tokens(tokens), cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """States the original context, by default 4096, and calls LongRoPE by that name in place of "su" or "yarn"."""
    hub = dict(hub)
    hub.setdefault("original_max_position_embeddings", 4096)
    for key in hub.keys() & {"rope_scaling", "rope_parameters"}:
        if scaling := hub[key]:
            kinds = {name: "longrope" for name in ("rope_type", "type") if scaling.get(name) in ("su", "yarn")}
            hub[key] = {**scaling, **kinds}
    return hub


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """States the original context beside `rope_scaling`, where alone transformers reads it."""
    if scaling := hub["rope_scaling"]:
        hub["original_max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    return hub


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Phi-3.5, Phi-4",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("phi3",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.qkv_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate_up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={"lm_head.*": "lm_head.{}", "*": "model.{}"},
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "hidden_act": OneOf(["silu", "swish"]),
        "attention_bias": False,
        "mlp_bias": False,
        "lm_head_bias": False,
        "full_attn_mod": 1,
        "interpolate_factor": 1,
    },
    standard_form=standard_form,
    published_form=published_form,
)
