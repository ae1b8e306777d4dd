"""Qwen2.5, the dense models (arXiv:2412.15115): Llama's decoder with biases on the query, key and value projections.

Models of these sizes are for code (arXiv:2409.12186), for mathematics (arXiv:2409.12122), or reason before they answer:
QwQ, and those into which DeepSeek R1 is distilled (arXiv:2501.12948).

Small models tie their embeddings. The configuration allows a sliding window on the layers from `max_window_layers` on,
or on those named in `layer_types`; the released models set `use_sliding_window` to false.
"""

import dataclasses
from typing import Any, Literal

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
    num_key_value_heads: int = 32
    max_position_embeddings: int = 32_768
    max_window_layers: int = 28
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096  # set to None unless use_sliding_window
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): by max_window_layers

    def __post_init__(self):
        # Normalise as transformers does, so that equivalent configs compare equal.
        window = self.sliding_window if self.use_sliding_window else None
        slides = lambda n: window is not None and n >= self.max_window_layers
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "sliding_window", window)
        fill_layers(self, "layer_types", lambda n: "sliding_attention" if slides(n) else "full_attention")

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
QWEN: dict[str, Any] = dict(rope_theta=1_000_000.0)
TIED: dict[str, Any] = QWEN | dict(tie_word_embeddings=True)
LARGE: dict[str, Any] = QWEN | dict(rms_norm_eps=1e-5)  # of the base models, not of the instruct models
#                      vocab  hidden    mlp  layers  heads  kv  positions  max_window_layers
QWEN2_5_0_5B = Config(151936,    896,  4864,     24,    14,  2,     32768,    24, **TIED)
QWEN2_5_1_5B = Config(151936,   1536,  8960,     28,    12,  2,    131072,    28, **TIED)
QWEN2_5_3B   = Config(151936,   2048, 11008,     36,    16,  2,     32768,    36, **TIED)
QWEN2_5_7B   = Config(152064,   3584, 18944,     28,    28,  4,    131072,    28, **QWEN)
QWEN2_5_14B  = Config(152064,   5120, 13824,     48,    40,  8,    131072,    48, **LARGE)
QWEN2_5_32B  = Config(152064,   5120, 27648,     64,    40,  8,    131072,    64, **LARGE)
QWEN2_5_72B  = Config(152064,   8192, 29568,     80,    64,  8,    131072,    80, **LARGE)
instruct = lambda size: dataclasses.replace(size, max_position_embeddings=32_768, rms_norm_eps=1e-6)
coder = lambda size: dataclasses.replace(size, max_position_embeddings=32_768)
math = lambda size: dataclasses.replace(size, max_position_embeddings=4096, rope_theta=10_000.0)
# R1's small ones are distilled into the models for mathematics; 14B and 32B into the general models.
R1_DISTILL_1_5B = dataclasses.replace(QWEN2_5_1_5B, rope_theta=10_000.0, tie_word_embeddings=False)
R1_DISTILL_7B   = dataclasses.replace(QWEN2_5_7B, rope_theta=10_000.0)

CONFIGS = {
    "qwen2.5-0.5b":                  Released(QWEN2_5_0_5B,           "Qwen/Qwen2.5-0.5B"),
    "qwen2.5-0.5b-instruct":         Released(instruct(QWEN2_5_0_5B), "Qwen/Qwen2.5-0.5B-Instruct"),
    "qwen2.5-1.5b":                  Released(QWEN2_5_1_5B,           "Qwen/Qwen2.5-1.5B"),
    "qwen2.5-1.5b-instruct":         Released(instruct(QWEN2_5_1_5B), "Qwen/Qwen2.5-1.5B-Instruct"),
    "qwen2.5-3b":                    Released(QWEN2_5_3B,             "Qwen/Qwen2.5-3B"),
    "qwen2.5-3b-instruct":           Released(instruct(QWEN2_5_3B),   "Qwen/Qwen2.5-3B-Instruct"),
    "qwen2.5-7b":                    Released(QWEN2_5_7B,             "Qwen/Qwen2.5-7B"),
    "qwen2.5-7b-instruct":           Released(instruct(QWEN2_5_7B),   "Qwen/Qwen2.5-7B-Instruct"),
    "qwen2.5-14b":                   Released(QWEN2_5_14B,            "Qwen/Qwen2.5-14B"),
    "qwen2.5-14b-instruct":          Released(instruct(QWEN2_5_14B),  "Qwen/Qwen2.5-14B-Instruct"),
    "qwen2.5-32b":                   Released(QWEN2_5_32B,            "Qwen/Qwen2.5-32B"),
    "qwen2.5-32b-instruct":          Released(instruct(QWEN2_5_32B),  "Qwen/Qwen2.5-32B-Instruct"),
    "qwen2.5-72b":                   Released(QWEN2_5_72B,            "Qwen/Qwen2.5-72B"),
    "qwen2.5-72b-instruct":          Released(instruct(QWEN2_5_72B),  "Qwen/Qwen2.5-72B-Instruct"),
    "qwen2.5-coder-0.5b":            Released(coder(QWEN2_5_0_5B),    "Qwen/Qwen2.5-Coder-0.5B"),
    "qwen2.5-coder-0.5b-instruct":   Released(coder(QWEN2_5_0_5B),    "Qwen/Qwen2.5-Coder-0.5B-Instruct"),
    "qwen2.5-coder-1.5b":            Released(coder(QWEN2_5_1_5B),    "Qwen/Qwen2.5-Coder-1.5B"),
    "qwen2.5-coder-1.5b-instruct":   Released(coder(QWEN2_5_1_5B),    "Qwen/Qwen2.5-Coder-1.5B-Instruct"),
    "qwen2.5-coder-3b":              Released(coder(QWEN2_5_3B),      "Qwen/Qwen2.5-Coder-3B"),
    "qwen2.5-coder-3b-instruct":     Released(coder(QWEN2_5_3B),      "Qwen/Qwen2.5-Coder-3B-Instruct"),
    "qwen2.5-coder-7b":              Released(coder(QWEN2_5_7B),      "Qwen/Qwen2.5-Coder-7B"),
    "qwen2.5-coder-7b-instruct":     Released(coder(QWEN2_5_7B),      "Qwen/Qwen2.5-Coder-7B-Instruct"),
    "qwen2.5-coder-14b":             Released(coder(QWEN2_5_14B),     "Qwen/Qwen2.5-Coder-14B"),
    "qwen2.5-coder-32b":             Released(coder(QWEN2_5_32B),     "Qwen/Qwen2.5-Coder-32B"),
    "qwen2.5-math-1.5b":             Released(math(QWEN2_5_1_5B),     "Qwen/Qwen2.5-Math-1.5B"),
    "qwen2.5-math-1.5b-instruct":    Released(math(QWEN2_5_1_5B),     "Qwen/Qwen2.5-Math-1.5B-Instruct"),
    "qwen2.5-math-7b":               Released(math(QWEN2_5_7B),       "Qwen/Qwen2.5-Math-7B"),
    "qwen2.5-math-7b-instruct":      Released(math(QWEN2_5_7B),       "Qwen/Qwen2.5-Math-7B-Instruct"),
    "qwen2.5-math-72b":              Released(math(QWEN2_5_72B),      "Qwen/Qwen2.5-Math-72B"),
    "qwq-32b":                       Released(QWEN2_5_32B,            "Qwen/QwQ-32B"),
    "deepseek-r1-distill-qwen-1.5b": Released(R1_DISTILL_1_5B,        "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B"),
    "deepseek-r1-distill-qwen-7b":   Released(R1_DISTILL_7B,          "deepseek-ai/DeepSeek-R1-Distill-Qwen-7B"),
    "deepseek-r1-distill-qwen-14b":  Released(QWEN2_5_14B,            "deepseek-ai/DeepSeek-R1-Distill-Qwen-14B"),
    "deepseek-r1-distill-qwen-32b":  Released(QWEN2_5_32B,            "deepseek-ai/DeepSeek-R1-Distill-Qwen-32B"),
}
# fmt: on


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=True, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=True, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=True, key=v)
        self.o_proj = Linear(queries, c.hidden_size, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
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
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, key=down)

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
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), c.layer_types, key=layers)
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
    title="Qwen2.5, QwQ; R1-Distill-Qwen",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("qwen2",),
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
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": OneOf(["silu", "swish"]),
        "use_mrope": False,
    },
)
