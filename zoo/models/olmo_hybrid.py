"""Olmo Hybrid (Ai2, 2026): three layers of gated delta rule (arXiv:2412.06464) to one of Olmo 3's full attention.

A delta rule may write twice of what is lacking, so that its state can also turn around: eigenvalues of A_t (1 - beta_t
k_t k_t^T) reach from -1 to 1 (arXiv:2411.12537). Its layers have norms before it and before the MLP. Layers with
attention have norms after both, and one over all heads' queries and keys together. The released models have no rotary
positions: attention sees the order of the tokens by what the recurrences have left in them.
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

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV
from zoo.nn.delta import AbstractDeltaConfig, GatedDelta
from zoo.nn.layers import AbstractLinear, Conv1d, Embedding, Float32RMSNorm, GatedRMSNorm, Linear, project, swiglu
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractModel, Family, OneOf, Released
from zoo.nn.recurrent import RecurrentCache
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractDeltaConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 0  # 0, or null in config.json: num_attention_heads
    max_position_embeddings: int = 65_536
    layer_types: tuple[Literal["linear_attention", "full_attention"], ...] = ()  # (): every fourth has attention
    linear_num_key_heads: int = 0  # 0, or null in config.json: num_attention_heads
    linear_num_value_heads: int = 0  # 0, or null in config.json: num_attention_heads
    linear_key_head_dim: int = 0  # 0, or null in config.json: three quarters of hidden_size / linear_num_key_heads
    linear_value_head_dim: int = 0  # 0, or null in config.json: 2 * linear_key_head_dim
    linear_conv_kernel_dim: int = 4
    linear_allow_neg_eigval: bool = True
    linear_a_log_min: float = 0.0  # of random weights: exp(A_log) is between these
    linear_a_log_max: float = 16.0
    linear_dt_min: float = 0.001  # of random weights: softplus(dt_bias) is between these, and at least the floor
    linear_dt_max: float = 0.1
    linear_dt_init_floor: float = 1e-4
    rope_theta: float | None = 10_000.0  # None: no rotary positions
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False

    def __post_init__(self) -> None:
        # Fill in what follows from other fields, so that equivalent configs compare equal.
        c, fill = self, lambda name, value: object.__setattr__(self, name, getattr(self, name) or value)
        fill("num_key_value_heads", c.num_attention_heads)
        fill("linear_num_key_heads", c.num_attention_heads)
        fill("linear_num_value_heads", c.num_attention_heads)
        fill("linear_key_head_dim", int(0.75 * c.hidden_size / c.linear_num_key_heads))
        fill("linear_value_head_dim", 2 * c.linear_key_head_dim)
        if not c.layer_types and c.num_hidden_layers < 4:  # the last one has attention
            fill("layer_types", (*("linear_attention",) * (c.num_hidden_layers - 1), "full_attention"))
        super().__post_init__()

    @property
    def full_attention_interval(self) -> int:
        return 4

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads


# fmt: off
#                        vocab hidden    mlp layers heads  kv positions
OLMO_HYBRID_7B = Config(100352, 3840, 11008,    32,   30, 30,    65536, rope_theta=None)

CONFIGS = {
    "olmo-hybrid-7b":              Released(OLMO_HYBRID_7B, "allenai/Olmo-Hybrid-7B"),
    "olmo-hybrid-7b-instruct-dpo": Released(OLMO_HYBRID_7B, "allenai/Olmo-Hybrid-Instruct-DPO-7B"),
}
# fmt: on


class Attention(AbstractMixer):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: Float32RMSNorm
    k_norm: Float32RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)  # None: no positions

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = None if c.rope_theta is None else Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = Float32RMSNorm(queries, c.rms_norm_eps)
        self.k_norm = Float32RMSNorm(keys, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q, k, v = heads(self.q_norm(q)), heads(self.k_norm(k)), heads(v)
        if self.rotary is not None:
            q, k = (self.rotary(y.astype(jnp.float32), at).astype(y.dtype) for y in (q, k))
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return KV.init(layers, batch, length, self.k_proj.shape[-2] // self.head_dim, self.head_dim, dtype)


class GatedDeltaNet(AbstractMixer):
    """A gated delta rule (arXiv:2412.06464). Value heads share key heads in groups of neighbours."""

    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    g_proj: AbstractLinear  # the gates of the outputs
    a_proj: AbstractLinear  # how much each head decays
    b_proj: AbstractLinear  # how strongly each head writes
    q_conv1d: Conv1d
    k_conv1d: Conv1d
    v_conv1d: Conv1d
    dt_bias: Float[Array, " v_heads"]
    A_log: Float[Array, " v_heads"]
    o_norm: GatedRMSNorm
    o_proj: AbstractLinear
    delta: GatedDelta = eqx.field(static=True)
    strongest: float = eqx.field(static=True)  # the largest rate of writing

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, d, delta, keys = config, config.hidden_size, config.delta, jax.random.split(key, 12)
        self.delta = delta
        self.strongest = 2.0 if c.linear_allow_neg_eigval else 1.0
        sizes = delta.keys, delta.keys, delta.values
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, n, key=k) for n, k in zip(sizes, keys[:3], strict=True))
        convs = (Conv1d(n, delta.width, key=k) for n, k in zip(sizes, keys[3:6], strict=True))
        self.q_conv1d, self.k_conv1d, self.v_conv1d = convs
        gate, a, b, o, rate, step = keys[6:]
        self.g_proj = Linear(d, delta.values, key=gate)
        self.a_proj = Linear(d, delta.value_heads, key=a)
        self.b_proj = Linear(d, delta.value_heads, key=b)
        self.o_proj = Linear(delta.values, d, key=o)
        self.o_norm = GatedRMSNorm(delta.value_dim, 1e-5)  # whatever rms_norm_eps is
        each = (delta.value_heads,)
        self.A_log = jnp.log(jax.random.uniform(rate, each, minval=c.linear_a_log_min, maxval=c.linear_a_log_max))
        least, most = jnp.log(c.linear_dt_min), jnp.log(c.linear_dt_max)
        steps = jnp.maximum(jnp.exp(jax.random.uniform(step, each, minval=least, maxval=most)), c.linear_dt_init_floor)
        self.dt_bias = steps + jnp.log(-jnp.expm1(-steps))

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: RecurrentCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], RecurrentCache | None]:
        d, flat = self.delta, lambda y: y.reshape(*y.shape[:2], -1)
        groups = lambda y: y.reshape(*y.shape[:2], d.key_heads, -1)
        # One convolution for all, whose channels lie by heads: so "tensor" splits them as it splits the projections.
        qkv = jnp.concatenate([groups(y) for y in project(x, self.q_proj, self.k_proj, self.v_proj)], axis=-1)
        convs = [c.weight.reshape(d.key_heads, -1, d.width) for c in (self.q_conv1d, self.k_conv1d, self.v_conv1d)]
        conv = jnp.concatenate(convs, axis=1).reshape(-1, d.width)

        def split(qkv: Float[Array, "batch seq channels"]) -> tuple[Float[Array, "batch seq _ _"], ...]:
            """Splits the channels into queries, keys and values by heads."""
            q, k, v = jnp.split(groups(qkv), [d.key_dim, 2 * d.key_dim], axis=-1)
            return q, k, v.reshape(*v.shape[:2], d.value_heads, -1)

        a = self.a_proj(x).astype(jnp.float32)
        per_head = lambda p: jnp.broadcast_to(p.astype(jnp.float32), a.shape)
        decay = -jnp.exp(per_head(self.A_log)) * jax.nn.softplus(a + per_head(self.dt_bias))
        beta = self.strongest * jax.nn.sigmoid(self.b_proj(x))
        y, cache = d(flat(qkv), decay, beta, cache, at, conv=conv, split=split)
        return self.o_proj(flat(self.o_norm(y, self.g_proj(x).reshape(y.shape)))), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> RecurrentCache:
        return self.delta.init_cache(layers, batch, dtype)


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


class RecurrentBlock(AbstractDecoderBlock):
    """A layer with a gated delta rule, and norms before it and before the MLP."""

    input_layernorm: Float32RMSNorm
    linear_attn: GatedDeltaNet
    post_attention_layernorm: Float32RMSNorm
    mlp: MLP
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        mixer, mlp = jax.random.split(key)
        self.input_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.linear_attn = GatedDeltaNet(config, key=mixer)
        self.post_attention_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: RecurrentCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], RecurrentCache | None, None]:
        y, cache = self.linear_attn(self.input_layernorm(x), cache, at)
        x = x + y
        return x + self.mlp(self.post_attention_layernorm(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> RecurrentCache:
        return self.linear_attn.init_cache(layers, batch, length, dtype)


class AttentionBlock(AbstractDecoderBlock):
    """A layer with attention, and norms after it and after the MLP."""

    self_attn: Attention
    post_attention_layernorm: Float32RMSNorm
    mlp: MLP
    post_feedforward_layernorm: Float32RMSNorm

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        mixer, mlp = jax.random.split(key)
        self.self_attn = Attention(config, key=mixer)
        self.post_attention_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)
        self.post_feedforward_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None, None]:
        y, cache = self.self_attn(x, cache, at)
        x = x + self.post_attention_layernorm(y)
        return x + self.post_feedforward_layernorm(self.mlp(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return self.self_attn.init_cache(layers, batch, length, dtype)


BLOCKS = {"linear_attention": RecurrentBlock, "full_attention": AttentionBlock}


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
        self.layers = Stack(lambda n, *, key: BLOCKS[c.layer_types[n]](c, key=key), c.layer_types, key=layers)
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
    """Moves a `rope_theta` of null, by which a model has no rotary positions, out of `rope_parameters`."""
    rope = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    if "rope_theta" in rope and rope["rope_theta"] is None:
        return {k: v for k, v in hub.items() if k not in ("rope_scaling", "rope_parameters")} | {"rope_theta": None}
    return dict(hub)


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """States no rotary positions as the released files do, in `rope_parameters`."""
    if hub["rope_theta"] is None:
        del hub["rope_theta"], hub["rope_scaling"]
        hub["rope_parameters"] = {"rope_theta": None}
    return hub


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Olmo Hybrid",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("olmo_hybrid",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.o_proj": P("fsdp", "tensor"),
        "*.down_proj": P("fsdp", "tensor"),
        "*_proj": P("tensor", "fsdp"),
        "*_conv1d.weight": P(),
        "*.dt_bias": P(),
        "*.A_log": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={"lm_head.*": "lm_head.{}", "*": "model.{}"},
    # Older names of the norms, which transformers 5.23 still writes: the second one in layers of both kinds.
    aliases={
        "*.attention_layer_norm.weight": "{}.input_layernorm.weight",
        "*.feedforward_layer_norm.weight": "{}.post_attention_layernorm.weight",
    },
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "hidden_act": OneOf(["silu", "swish"]),
    },
    standard_form=standard_form,
    published_form=published_form,
)
