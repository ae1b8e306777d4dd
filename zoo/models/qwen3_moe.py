"""Qwen3's mixtures of experts (arXiv:2505.09388), Qwen3-Coder included: Qwen3's decoder with a router in every layer.

The router sends each token to 8 of 128 or 160 narrow experts. Their weights are the softmax over all of the router's
logits, rescaled under `norm_topk_prob` so that the eight sum to one. The configuration allows dense layers among the
others, and a sliding window in every layer; no released model uses either.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import equinox as eqx
import jax
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Linear,
    RMSNorm,
    project,
    swiglu,
)
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP in dense layers
    moe_intermediate_size: int  # width of each expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 4
    max_position_embeddings: int = 32_768
    rope_theta: float = 10_000.0
    max_window_layers: int = 0  # unused: a sliding window is in every layer, as in transformers
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    num_experts: int = 128
    num_experts_per_tok: int = 8
    norm_topk_prob: bool = False
    decoder_sparse_step: int = 1
    mlp_only_layers: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096  # set to None unless use_sliding_window

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        object.__setattr__(self, "sliding_window", self.sliding_window if self.use_sliding_window else None)

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values

    def sparse(self, layer: int) -> bool:
        """Whether this layer has experts."""
        return layer not in self.mlp_only_layers and (layer + 1) % self.decoder_sparse_step == 0


# fmt: off
QWEN3: dict[str, Any] = dict(head_dim=128, norm_topk_prob=True, sliding_window=None)
CODER: dict[str, Any] = QWEN3 | dict(num_experts=160)
#                           vocab hidden   mlp expert layers heads kv positions  theta max_window_layers
QWEN3_30B        = Config(151936,  2048,  6144,   768,    48,   32,  4,    40960,   1e6, 48, **QWEN3)
QWEN3_30B_BASE   = Config(151936,  2048,  6144,   768,    48,   32,  4,    32768,   1e6, 48, **QWEN3)
QWEN3_30B_2507   = Config(151936,  2048,  6144,   768,    48,   32,  4,   262144,   1e7, 48, **QWEN3)
QWEN3_235B       = Config(151936,  4096, 12288,  1536,    94,   64,  4,    40960,   1e6, 94, **QWEN3)
QWEN3_235B_2507  = Config(151936,  4096, 12288,  1536,    94,   64,  4,   262144,   5e6, 94, **QWEN3)
QWEN3_CODER_480B = Config(151936,  6144,  8192,  2560,    62,   96,  8,   262144,   1e7, 62, **CODER)

CONFIGS = {
    "qwen3-30b-a3b":                 Released(QWEN3_30B,        "Qwen/Qwen3-30B-A3B"),
    "qwen3-30b-a3b-base":            Released(QWEN3_30B_BASE,   "Qwen/Qwen3-30B-A3B-Base"),
    "qwen3-30b-a3b-instruct-2507":   Released(QWEN3_30B_2507,   "Qwen/Qwen3-30B-A3B-Instruct-2507"),
    "qwen3-30b-a3b-thinking-2507":   Released(QWEN3_30B_2507,   "Qwen/Qwen3-30B-A3B-Thinking-2507"),
    "qwen3-235b-a22b":               Released(QWEN3_235B,       "Qwen/Qwen3-235B-A22B"),
    "qwen3-235b-a22b-instruct-2507": Released(QWEN3_235B_2507,  "Qwen/Qwen3-235B-A22B-Instruct-2507"),
    "qwen3-235b-a22b-thinking-2507": Released(QWEN3_235B_2507,  "Qwen/Qwen3-235B-A22B-Thinking-2507"),
    "qwen3-coder-480b-a35b":         Released(QWEN3_CODER_480B, "Qwen/Qwen3-Coder-480B-A35B-Instruct"),
    "qwen3-coder-480b-a35b-fp8":     Released(QWEN3_CODER_480B, "Qwen/Qwen3-Coder-480B-A35B-Instruct-FP8"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: RMSNorm
    k_norm: RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q = self.rotary(self.q_norm(q), at)
        k = self.rotary(self.k_norm(k), at)
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


class Experts(eqx.Module):
    gate_proj: AbstractExpertLinear
    up_proj: AbstractExpertLinear
    down_proj: AbstractExpertLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = ExpertLinear(c.num_experts, c.hidden_size, c.moe_intermediate_size, key=gate)
        self.up_proj = ExpertLinear(c.num_experts, c.hidden_size, c.moe_intermediate_size, key=up)
        self.down_proj = ExpertLinear(c.num_experts, c.moe_intermediate_size, c.hidden_size, key=down)

    def __call__(self, x: Float[Array, "rows embed"], sizes: Int[Array, " experts"]) -> Float[Array, "rows embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj, sizes), sizes)


class MoE(eqx.Module):
    gate: Router
    experts: Experts
    top_k: int = eqx.field(static=True)
    rescale: bool = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        gate, experts = jax.random.split(key)
        self.gate = Router(config.hidden_size, config.num_experts, key=gate)
        self.experts = Experts(config, key=experts)
        self.top_k = config.num_experts_per_tok
        self.rescale = config.norm_topk_prob

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.gate(x)
        probability, weights, chosen = moe.choose(
            logits, self.top_k, "softmax", normalise=0.0 if self.rescale else None
        )
        y = moe.dispatch(self.experts, x, chosen, weights.astype(x.dtype), lambda experts: experts.down_proj)
        return y, moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MoE | MLP

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, key=attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MoE(config, key=mlp) if config.sparse(layer) else MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + y, cache, routing

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
        kinds = [(c.window(n), c.sparse(n)) for n in range(c.num_hidden_layers)]
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


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Rename `num_local_experts`, as transformers 5 writes it, to `num_experts`."""
    return {"num_experts" if key == "num_local_experts" else key: value for key, value in hub.items()}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Qwen3-MoE, Qwen3-Coder",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("qwen3_moe",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate.weight": P(),
        "layers.*.experts.gate_proj": P("expert", "tensor", "fsdp"),
        "layers.*.experts.up_proj": P("expert", "tensor", "fsdp"),
        "layers.*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "layers.*.gate_proj": P("tensor", "fsdp"),
        "layers.*.up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "layers.*.experts.*.weight": "model.layers.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    fp8_blocks=["layers.*_proj.weight"],
    implied={
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": OneOf(["silu", "swish"]),
        "qkv_bias": False,
        "use_qk_norm": True,
        "shared_expert_intermediate_size": 0,
    },
    standard_form=standard_form,
)
