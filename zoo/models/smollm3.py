"""SmolLM3 (Hugging Face, 2025): Llama's decoder, in which every fourth layer has no positions (NoPE, arXiv:2501.18795).

A layer without rotary positions knows the order of tokens by its causal mask alone. The configuration also allows
biases, and a sliding window on the layers without positions, or on those that `layer_types` names; the released model
uses neither.
"""

import dataclasses
from typing import Literal

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.fields import fill_layers
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu
from zoo.nn.model import AbstractConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32_768
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    rope_theta: float = 2_000_000.0
    rope_scaling: RopeScaling | None = None
    no_rope_layer_interval: int = 4
    no_rope_layers: tuple[int, ...] = ()  # 0: no rotary positions; (): 0 at each no_rope_layer_interval-th
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = None  # set to None unless use_sliding_window
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): slides without rotary

    def __post_init__(self):
        # Fill in the lists as transformers does, so that equivalent configs compare equal.
        layers, window = range(self.num_hidden_layers), self.sliding_window if self.use_sliding_window else None
        rotary = self.no_rope_layers or tuple(int((n + 1) % self.no_rope_layer_interval > 0) for n in layers)
        if len(rotary) < len(layers):
            raise ValueError(f"no_rope_layers has {len(rotary)} entries, but num_hidden_layers is {len(layers)}.")
        slides = lambda n: window is not None and not rotary[n]
        fill_layers(self, "layer_types", lambda n: "sliding_attention" if slides(n) else "full_attention")
        if window is None and "sliding_attention" in self.layer_types:
            raise ValueError("layer_types has sliding_attention, which needs use_sliding_window and a sliding_window.")
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "no_rope_layers", rotary)
        object.__setattr__(self, "sliding_window", window)

    def rotates(self, layer: int) -> bool:
        """Whether this layer has rotary positions."""
        return self.no_rope_layers[layer] != 0

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
#                    vocab  hidden    mlp  layers  heads  kv  positions
SMOLLM3_3B = Config(128256,   2048, 11008,     36,    16,  4,     65536, rope_theta=5_000_000.0)

CONFIGS = {
    "smollm3-3b":      Released(SMOLLM3_3B, "HuggingFaceTB/SmolLM3-3B"),
    "smollm3-3b-base": Released(SMOLLM3_3B, "HuggingFaceTB/SmolLM3-3B-Base"),
}
# fmt: on


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)  # None: this layer has no positions
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling) if c.rotates(layer) else None
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        if self.rotary is not None:
            q, k = self.rotary(q, at), self.rotary(k, at)
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
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=c.mlp_bias, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=c.mlp_bias, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, key=attention)
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
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window)


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
        kinds = [(c.rotates(n), c.window(n)) for n in range(c.num_hidden_layers)]
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), kinds, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="SmolLM3",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("smollm3",),
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
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_act": OneOf(["silu", "swish"]),
    },
)
