"""LFM3 (Liquid AI): LFM2's gated short convolutions, over seven tokens, and attention with and without a window.

Attention layers of both kinds have rotary positions of their own: with a window whole heads turn, and without one the
half of their frequencies that is fast. Each head's output is multiplied by the sigmoid of a gate. Norms come before and
after the convolution or the attention, and before and after the MLP.
"""

import dataclasses
from typing import ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import scaled
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, AbstractCache, WindowKV, init_kv
from zoo.nn.fields import fill_layers
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu
from zoo.nn.mixer import AbstractMixer
from zoo.nn.model import AbstractConfig, AbstractModel, Family, Released, causal_keys
from zoo.nn.rope import ProportionalRotary
from zoo.nn.short_conv import ShortConv
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary positions of one kind of layer."""

    rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 1.0  # the part of the frequencies that turn, the fastest ones
    rope_type: Literal["default", "proportional"] = "default"


@dataclasses.dataclass(frozen=True)
class Ropes:
    """The rotary positions of each kind of layer."""

    sliding_attention: Rope
    full_attention: Rope


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 4
    max_position_embeddings: int = 128_000
    layer_types: tuple[Literal["conv", "sliding_attention", "full_attention"], ...] = ()  # (): in fours
    conv_L_cache: int = 7  # tokens that a convolution sees, its own among them
    conv_bias: bool = False
    head_dim: int = 128
    sliding_window: int | None = 256
    rope_parameters: Ropes = Ropes(Rope(10_000.0), Rope(1_000_000.0, 0.5, "proportional"))
    use_sandwich_norm: bool = True
    use_attention_gate: bool = True
    norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention_bias: bool = False

    def __post_init__(self):
        fours = "sliding_attention", "conv", "full_attention", "conv"
        fill_layers(self, "layer_types", lambda n: fours[n % 4] if n else "conv")
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise ValueError("layer_types has sliding_attention, which needs a sliding_window.")
        for rope in (self.rope_parameters.sliding_attention, self.rope_parameters.full_attention):
            turns = rope.partial_rotary_factor
            if turns > 1 or (rope.rope_type == "default" and turns != 1):
                raise ValueError(
                    f"partial_rotary_factor={turns} of a rope that is {rope.rope_type!r}: it has no such part."
                )

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        if self.layer_types[layer] == "conv":
            return float(self.conv_L_cache * self.hidden_size)
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
#                   vocab hidden   mlp  layers  heads  kv  positions
LFM3_1_7B = Config(128000,  2048, 7680,     24,    16,  4,    128000)

CONFIGS = {"lfm3-1.7b": Released(LFM3_1_7B, "LiquidAI/LFM3-1.7B")}
# fmt: on


class Attention(AbstractMixer):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    gate_proj: AbstractLinear | None  # a gate of each head, with use_attention_gate
    q_norm: RMSNorm
    k_norm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: ProportionalRotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o, gate) = config, jax.random.split(key, 5)
        slides = c.layer_types[layer] == "sliding_attention"
        rope = c.rope_parameters.sliding_attention if slides else c.rope_parameters.full_attention
        turning = int(rope.partial_rotary_factor * c.head_dim // 2)
        self.head_dim = c.head_dim
        self.rotary = ProportionalRotary(c.head_dim, rope.rope_theta, turning=turning)
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.gate_proj = Linear(c.hidden_size, c.num_attention_heads, key=gate) if c.use_attention_gate else None
        self.q_norm = RMSNorm(c.head_dim, c.norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        rotated = lambda y: self.rotary(y.astype(jnp.float32), at).astype(x.dtype)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = rotated(self.q_norm(q)), rotated(self.k_norm(k))
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=kernels.sliding(self.window))
        y = y if self.gate_proj is None else scaled(y, jax.nn.sigmoid(self.gate_proj(x))[..., None])
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        heads = self.k_proj.shape[-2] // self.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, self.head_dim, dtype, window=self.window)


class MLP(eqx.Module):
    w1: AbstractLinear  # gate
    w2: AbstractLinear  # down
    w3: AbstractLinear  # up

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, down, up) = config, jax.random.split(key, 3)
        self.w1 = Linear(c.hidden_size, c.intermediate_size, key=gate)
        self.w2 = Linear(c.intermediate_size, c.hidden_size, key=down)
        self.w3 = Linear(c.hidden_size, c.intermediate_size, key=up)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.w2(swiglu(x, self.w1, self.w3))


class Block(AbstractDecoderBlock):
    operator_norm: RMSNorm
    conv: ShortConv | None  # a layer has this mixer
    self_attn: Attention | None  # or this one
    post_operator_norm: RMSNorm | None  # with use_sandwich_norm
    ffn_norm: RMSNorm
    feed_forward: MLP
    post_ffn_norm: RMSNorm | None  # with use_sandwich_norm
    ordered: ClassVar[bool] = True

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (mixer, mlp) = config, jax.random.split(key)
        convolves = c.layer_types[layer] == "conv"
        self.operator_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.conv = ShortConv(c.hidden_size, c.conv_L_cache, bias=c.conv_bias, key=mixer) if convolves else None
        self.self_attn = None if convolves else Attention(c, layer, key=mixer)
        self.post_operator_norm = RMSNorm(c.hidden_size, c.norm_eps) if c.use_sandwich_norm else None
        self.ffn_norm = RMSNorm(c.hidden_size, c.norm_eps)
        self.feed_forward = MLP(c, key=mlp)
        self.post_ffn_norm = RMSNorm(c.hidden_size, c.norm_eps) if c.use_sandwich_norm else None

    @property
    def mixer(self) -> AbstractMixer:
        mixer = self.conv or self.self_attn
        assert mixer is not None
        return mixer

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None, None]:
        y, cache = self.mixer(self.operator_norm(x), cache, at)
        x = x + (y if self.post_operator_norm is None else self.post_operator_norm(y))
        y = self.feed_forward(self.ffn_norm(x))
        return x + (y if self.post_ffn_norm is None else self.post_ffn_norm(y)), cache, None

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
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), c.layer_types, key=layers)
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


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="LFM3",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("lfm3",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.out_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*_proj": P("tensor", "fsdp"),
        "*.w[13]": P("tensor", "fsdp"),
        "*.w2": P("fsdp", "tensor"),
        "*.conv.conv.*": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={"lm_head.*": "lm_head.{}", "*": "model.{}"},
    redundant={"lm_head.weight": "model.embed_tokens.weight"},
    implied={"architectures": ["Lfm3ForCausalLM"], "model_type": "lfm3"},
    names_in_transformers={".self_attn.gate_proj.": ".self_attn.g_proj."},  # in adapters of PEFT
)
