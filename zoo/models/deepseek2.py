"""DeepSeek V2 and V2-Lite (arXiv:2405.04434).

Multi-head latent attention caches one vector per token for all heads, which is far smaller than their keys and values.
All layers but the first are mixtures of many small experts (arXiv:2401.06066), with shared experts that get every
token.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

from kernels import Tokens
from kernels.sums import pick
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import LatentKV
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Embedding, ExpertLinear, Linear, RMSNorm, swiglu
from zoo.nn.mla import AbstractLatentConfig, LatentAttention
from zoo.nn.model import AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import InterleavedRotary, YarnScaling
from zoo.nn.routing import Float32Router
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractLatentConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int  # unused: every head has its own keys and values
    n_routed_experts: int
    num_experts_per_tok: int
    max_position_embeddings: int
    q_lora_rank: int | None = 1536
    kv_lora_rank: int = 512
    qk_nope_head_dim: int = 128
    qk_rope_head_dim: int = 64
    v_head_dim: int = 128
    n_shared_experts: int = 2
    topk_method: Literal["greedy", "group_limited_greedy"] = "greedy"
    n_group: int = 1
    topk_group: int = 1
    routed_scaling_factor: float = 1.0
    first_k_dense_replace: int = 0
    rope_theta: float = 10_000.0
    rope_scaling: YarnScaling | None = None
    rms_norm_eps: float = 1e-6

    def __post_init__(self):
        each, rest = divmod(self.n_routed_experts, self.n_group)
        enough = self.topk_group <= self.n_group and self.num_experts_per_tok <= self.topk_group * each
        if self.topk_method == "group_limited_greedy" and (rest or not enough):
            raise ValueError(
                f"{self.num_experts_per_tok} of {self.n_routed_experts} experts cannot be chosen from topk_group "
                f"{self.topk_group} of n_group {self.n_group} groups."
            )

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * (self.head_dim + self.v_head_dim) * causal_keys(seq)


# fmt: off
V2: dict[str, Any] = dict(
    first_k_dense_replace=1, rope_scaling=YarnScaling(40.0, 4096, mscale=0.707, mscale_all_dim=0.707)
)
LITE: dict[str, Any] = V2 | dict(q_lora_rank=None)
FULL: dict[str, Any] = V2 | dict(
    topk_method="group_limited_greedy", n_group=8, topk_group=3, routed_scaling_factor=16.0
)
#                          vocab  hidden    mlp expert  layers  heads   kv experts top  positions
DEEPSEEK_V2_LITE = Config(102400,   2048, 10944,  1408,     27,    16,  16,    64,  6,    163840, **LITE)
DEEPSEEK_V2      = Config(102400,   5120, 12288,  1536,     60,   128, 128,   160,  6,    163840, **FULL)

CONFIGS = {
    "deepseek-v2-lite":      Released(DEEPSEEK_V2_LITE, "deepseek-ai/DeepSeek-V2-Lite"),
    "deepseek-v2-lite-chat": Released(DEEPSEEK_V2_LITE, "deepseek-ai/DeepSeek-V2-Lite-Chat"),
    "deepseek-v2":           Released(DEEPSEEK_V2,      "deepseek-ai/DeepSeek-V2"),
    "deepseek-v2-chat":      Released(DEEPSEEK_V2,      "deepseek-ai/DeepSeek-V2-Chat"),
}
# fmt: on


class MLP(eqx.Module):
    """One gated MLP for all rows; or one for each expert, where expert i takes the next `sizes[i]` rows."""

    gate_proj: AbstractLinear | AbstractExpertLinear
    up_proj: AbstractLinear | AbstractExpertLinear
    down_proj: AbstractLinear | AbstractExpertLinear

    def __init__(self, linear: Callable[..., Any], hidden: int, width: int, *, key: PRNGKeyArray):
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = linear(hidden, width, key=gate)
        self.up_proj = linear(hidden, width, key=up)
        self.down_proj = linear(width, hidden, key=down)

    def __call__(self, x: Float[Array, "*rows embed"], *sizes: Int[Array, " experts"]) -> Float[Array, "*rows embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj, *sizes), *sizes)


class MoE(eqx.Module):
    gate: Float32Router
    experts: MLP  # one MLP for each expert
    shared_experts: MLP  # all of them as one wide MLP
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts, shared) = config, jax.random.split(key, 3)
        each = lambda *sizes, key: ExpertLinear(c.n_routed_experts, *sizes, key=key)
        self.config = c
        self.gate = Float32Router(c.hidden_size, c.n_routed_experts, key=gate)
        self.experts = MLP(each, c.hidden_size, c.moe_intermediate_size, key=experts)
        self.shared_experts = MLP(Linear, c.hidden_size, c.n_shared_experts * c.moe_intermediate_size, key=shared)

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        scores = probability = jax.nn.softmax(logits, axis=-1)
        if c.topk_method == "group_limited_greedy":
            by_group = scores.reshape(*x.shape[:2], c.n_group, -1)
            best = moe.top_k(jnp.max(by_group, axis=-1), c.topk_group)[1]  # the best groups
            kept = jnp.any(jax.nn.one_hot(best, c.n_group, dtype=bool), axis=-2)
            scores = jnp.where(kept[..., None], by_group, 0).reshape(scores.shape)
        chosen = moe.choose(scores, c.num_experts_per_tok).indices
        weights = (c.routed_scaling_factor * pick(probability, chosen)).astype(x.dtype)
        y = moe.dispatch(self.experts, x, chosen, weights, lambda experts: experts.down_proj)
        return moe.with_shared(y, self.shared_experts(x)), moe.Routing.of(logits, probability, chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: LatentAttention
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        yarn = c.rope_scaling
        mscale = yarn.yarn_mscale(yarn.mscale_all_dim or 0) if yarn else 1.0
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = LatentAttention(
            c,
            q_rank=c.q_lora_rank,
            rotary=InterleavedRotary(c.qk_rope_head_dim, c.rope_theta, yarn),
            scale=c.head_dim**-0.5 * mscale**2,
            key=attention,
        )
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MoE(c, key=mlp) if kind == "moe" else MLP(Linear, c.hidden_size, c.intermediate_size, key=mlp)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: LatentKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], LatentKV | None, moe.Routing | None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + y
        y = self.post_attention_layernorm(x)
        y, routing = self.mlp(y, at.segments) if isinstance(self.mlp, MoE) else (self.mlp(y), None)
        return x + y, cache, routing

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
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.lm_head(x)


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Drop two sizes that transformers 5 writes: they follow from others."""
    rotary = hub.get("qk_rope_head_dim", 64)
    return {k: v for k, v in hub.items() if k != "qk_head_dim" and (k, v) != ("head_dim", rotary)}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="DeepSeek V2",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("deepseek_v2",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.experts.*": P("expert", "tensor", "fsdp"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*_a_proj*": P(None, "fsdp"),
        "*_proj": P("tensor", "fsdp"),
        "*.gate.weight": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "*.experts.*.weight": "model.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    implied={
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_act": OneOf(["silu", "swish"]),
        "attention_bias": False,
        "mlp_bias": False,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "scoring_func": "softmax",
        "tie_word_embeddings": False,
    },
    standard_form=standard_form,
)
