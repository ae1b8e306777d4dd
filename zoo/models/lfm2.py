"""LFM2 and LFM2.5 (Liquid AI, arXiv:2511.23404): gated short convolutions, and grouped-query attention in a few layers.

Most layers see three tokens alone, their own among them, through a convolution between two gates. Layers with attention
stand between them without a fixed period; queries and keys have a norm of each head. All layers have a gated MLP.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, AbstractCache
from zoo.nn.fields import fill_layers
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractConfig, AbstractModel, Family, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.short_conv import ShortConv
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # from which the `width` of the MLP follows
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    max_position_embeddings: int = 128_000
    full_attn_idxs: tuple[int, ...] | None = None  # the layers with attention, if layer_types is (); None: all
    layer_types: tuple[Literal["conv", "full_attention"], ...] = ()  # (): by full_attn_idxs
    conv_L_cache: int = 3  # tokens that a convolution sees, its own among them
    conv_bias: bool = False
    block_auto_adjust_ff_dim: bool = True
    block_ffn_dim_multiplier: float | None = 1.0
    block_multiple_of: int = 256
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True

    def __post_init__(self):
        # Fill in what follows from other fields, so that equivalent configs compare equal.
        attention = range(self.num_hidden_layers) if self.full_attn_idxs is None else self.full_attn_idxs
        fill_layers(self, "layer_types", lambda n: "full_attention" if n in attention else "conv")
        object.__setattr__(self, "full_attn_idxs", None)
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        if not 1 <= (self.block_ffn_dim_multiplier or 1.0) * self.intermediate_size < 2**31:
            raise ValueError(f"block_ffn_dim_multiplier={self.block_ffn_dim_multiplier} makes no width of an MLP.")

    @property
    def width(self) -> int:
        """The width of the MLP: `intermediate_size`, or two thirds of it, multiplied and rounded up."""
        if not self.block_auto_adjust_ff_dim:
            return self.intermediate_size
        width, multiple = int(2 * self.intermediate_size / 3), self.block_multiple_of
        if self.block_ffn_dim_multiplier is None:
            return width
        return -(-int(self.block_ffn_dim_multiplier * width) // multiple) * multiple

    def attention_products(self, layer: int, seq: int) -> float:
        if self.layer_types[layer] == "conv":
            return float(self.conv_L_cache * self.hidden_size)
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq)  # 2: scores, values


# fmt: off
FEW: dict[str, Any] = dict(full_attn_idxs=(2, 5, 8, 10, 12, 14))
LARGE: dict[str, Any] = dict(full_attn_idxs=(2, 5, 9, 13, 17, 21, 24, 27), block_auto_adjust_ff_dim=False)
#                  vocab hidden mlp*3/2 layers heads kv positions
LFM2_350M = Config(65536,  1024,   6656,    16,   16, 8,   128000, **FEW)
LFM2_700M = Config(65536,  1536,  10240,    16,   24, 8,   128000, **FEW)
LFM2_1_2B = Config(65536,  2048,  12288,    16,   32, 8,   128000, **FEW)
LFM2_2_6B = Config(65536,  2048,  10752,    30,   32, 8,   128000, **LARGE)  # its MLP is as wide as this says

CONFIGS = {
    "lfm2-350m":            Released(LFM2_350M, "LiquidAI/LFM2-350M"),
    "lfm2-700m":            Released(LFM2_700M, "LiquidAI/LFM2-700M"),
    "lfm2-1.2b":            Released(LFM2_1_2B, "LiquidAI/LFM2-1.2B"),
    "lfm2-2.6b":            Released(LFM2_2_6B, "LiquidAI/LFM2-2.6B"),
    "lfm2-2.6b-exp":        Released(LFM2_2_6B, "LiquidAI/LFM2-2.6B-Exp"),
    "lfm2.5-350m":          Released(LFM2_350M, "LiquidAI/LFM2.5-350M"),
    "lfm2.5-350m-base":     Released(LFM2_350M, "LiquidAI/LFM2.5-350M-Base"),
    "lfm2.5-1.2b":          Released(LFM2_1_2B, "LiquidAI/LFM2.5-1.2B-Instruct"),
    "lfm2.5-1.2b-base":     Released(LFM2_1_2B, "LiquidAI/LFM2.5-1.2B-Base"),
    "lfm2.5-1.2b-thinking": Released(LFM2_1_2B, "LiquidAI/LFM2.5-1.2B-Thinking"),
}
# fmt: on


class Attention(AbstractMixer):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    out_proj: AbstractLinear
    q_layernorm: RMSNorm
    k_layernorm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, out) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, key=q)
        self.k_proj = Linear(c.hidden_size, keys, key=k)
        self.v_proj = Linear(c.hidden_size, keys, key=v)
        self.out_proj = Linear(queries, c.hidden_size, key=out)
        self.q_layernorm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_layernorm = RMSNorm(c.head_dim, c.norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q = self.rotary(self.q_layernorm(q), at)
        k = self.rotary(self.k_layernorm(k), at)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5)
        return self.out_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV:
        return KV.init(layers, batch, length, self.k_proj.shape[-2] // self.head_dim, self.head_dim, dtype)


class MLP(eqx.Module):
    w1: AbstractLinear  # gate
    w2: AbstractLinear  # down
    w3: AbstractLinear  # up

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, down, up) = config, jax.random.split(key, 3)
        self.w1 = Linear(c.hidden_size, c.width, key=gate)
        self.w2 = Linear(c.width, c.hidden_size, key=down)
        self.w3 = Linear(c.hidden_size, c.width, key=up)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.w2(swiglu(x, self.w1, self.w3))


class Block(AbstractDecoderBlock):
    operator_norm: RMSNorm
    conv: ShortConv | None  # a layer has this mixer
    self_attn: Attention | None  # or this one
    ffn_norm: RMSNorm
    feed_forward: MLP
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, (mixer, mlp) = config, jax.random.split(key)
        self.operator_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.conv = ShortConv(c.hidden_size, c.conv_L_cache, bias=c.conv_bias, key=mixer) if kind == "conv" else None
        self.self_attn = Attention(c, key=mixer) if kind == "full_attention" else None
        self.ffn_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.feed_forward = MLP(c, key=mlp)

    @property
    def mixer(self) -> AbstractMixer:
        mixer = self.conv or self.self_attn
        assert mixer is not None
        return mixer

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, None]:
        y, cache = self.mixer(self.operator_norm(x), cache, at)
        x = x + y
        return x + self.feed_forward(self.ffn_norm(x)), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        return self.mixer.init_cache(layers, batch, length, dtype)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    embedding_norm: RMSNorm  # of the last features, whatever its name
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, c.layer_types[n], key=key), c.layer_types, key=layers)
        self.embedding_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.embedding_norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


# Keys of the released files that win over the fields' own names, and keys that repeat a field.
ALIASES = {"block_ff_dim": "intermediate_size", "tie_embedding": "tie_word_embeddings"}
REPEATED = {
    "block_dim": "hidden_size",
    "block_norm_eps": "norm_eps",
    "conv_dim": "hidden_size",
    "conv_dim_out": "hidden_size",
    "num_heads": "num_attention_heads",
    "theta": "rope_theta",
}


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Reads the released files' other names of fields.

    Raises:
        ValueError: if a key differs from the field that it repeats.
    """
    hub = {key: value for key, value in hub.items() if value is not None or key not in ALIASES | REPEATED}
    rope = hub.get("rope_scaling") or hub.get("rope_parameters") or {}
    stated = {"norm_eps": Config.norm_eps, "rope_theta": Config.rope_theta} | hub | rope
    for key, field in REPEATED.items():
        if key in hub and (value := hub.pop(key)) != stated.get(field):
            raise ValueError(f"it says {key}={value!r:.200}, but {field}={stated.get(field)!r:.200}.")
    named = {field: hub.pop(key) for key, field in ALIASES.items() if key in hub}
    return hub | named


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Adds the released files' other names of fields, which other libraries read."""
    return hub | {key: hub[field] for key, field in (ALIASES | REPEATED).items()}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="LFM2, LFM2.5",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("lfm2",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.out_proj": P("fsdp", "tensor"),
        "*_proj": P("tensor", "fsdp"),
        "*.w[13]": P("tensor", "fsdp"),
        "*.w2": P("fsdp", "tensor"),
        "*.conv.conv.*": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={"lm_head.*": "lm_head.{}", "*": "model.{}"},
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "block_use_swiglu": True,
        "use_pos_enc": True,
    },
    standard_form=standard_form,
    published_form=published_form,
)
