"""MiMo V2 Flash (arXiv:2601.02780): mixtures of experts, and attention that mostly has a short window.

The first layer and every sixth have full attention. The others see 128 positions back, and have sinks: each head has a
learned logit that takes part in the softmax and adds no value. The two kinds differ in their number of heads of keys,
and in the base of their rotary positions, which turn a third of each head. Values are narrower than keys, and scaled.
The first layer is dense. The experts' scores are sigmoids, and a bias that affects only which experts are chosen evens
their load. Routers stay in float32. Released files hold three modules for further tokens, which are not read.
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

import kernels
from kernels import Tokens
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.fields import fill_layers
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Linear,
    RMSNorm,
    project,
    swiglu,
    times,
)
from zoo.nn.model import AbstractMixtureConfig, AbstractModel, Family, OneOf, Released, causal_keys
from zoo.nn.rope import Rotary
from zoo.nn.routing import BiasedFloat32Router, rebalance
from zoo.nn.stack import Caches, Reports, Stack


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int  # width of the MLP in dense layers
    moe_intermediate_size: int  # width of each expert
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 4  # of full attention
    swa_num_key_value_heads: int = 0  # of sliding windows; 0, or null in config.json: twice as many
    n_routed_experts: int = 256
    max_position_embeddings: int = 131_072
    head_dim: int = 192  # of queries and keys
    v_head_dim: int = 128
    hybrid_layer_pattern: tuple[Literal[0, 1], ...] = ()  # 1: a sliding window; (): in all but the first and each sixth
    moe_layer_freq: tuple[Literal[0, 1], ...] = ()  # 1: experts; (): in all but the first
    sliding_window_size: int = 128  # the most positions before its own that a token attends to
    num_experts_per_tok: int = 8
    n_group: int = 1
    topk_group: int = 1
    norm_topk_prob: bool = True
    routed_scaling_factor: float = 1.0
    rope_theta: float = 5_000_000.0  # of full attention
    swa_rope_theta: float = 10_000.0
    partial_rotary_factor: float = 0.334
    attention_value_scale: float | None = 0.707
    layernorm_epsilon: float = 1e-5
    attention_bias: bool = False  # of queries, keys and values
    tie_word_embeddings: bool = False

    def __post_init__(self):
        # Fill in what follows from other fields, so that equivalent configs compare equal.
        heads = self.swa_num_key_value_heads or 2 * self.num_key_value_heads
        object.__setattr__(self, "swa_num_key_value_heads", heads)
        scale = 1.0 if self.attention_value_scale is None else self.attention_value_scale
        object.__setattr__(self, "attention_value_scale", scale)
        fill_layers(self, "hybrid_layer_pattern", lambda n: int(n % 6 != 5 and n > 0))
        fill_layers(self, "moe_layer_freq", lambda n: int(n > 0))
        if self.num_attention_heads % self.swa_num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={self.num_attention_heads} is no multiple of swa_num_key_value_heads="
                f"{self.swa_num_key_value_heads}."
            )
        each, rest = divmod(self.n_routed_experts, self.n_group)
        enough = self.topk_group <= self.n_group and self.num_experts_per_tok <= self.topk_group * each
        if rest or each < 2 or not enough:
            raise ValueError(
                f"{self.num_experts_per_tok} of {self.n_routed_experts} experts cannot be chosen from topk_group "
                f"{self.topk_group} of n_group {self.n_group} groups."
            )

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return 1 + self.sliding_window_size if self.hybrid_layer_pattern[layer] else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * (self.head_dim + self.v_head_dim) * causal_keys(seq, self.window(layer))


# fmt: off
#                       vocab  hidden    mlp expert layers heads kv
MIMO_V2_FLASH = Config(152576,   4096, 16384,  2048,    48,   64, 4, max_position_embeddings=262_144)

CONFIGS = {
    "mimo-v2-flash": Released(MIMO_V2_FLASH, "XiaomiMiMo/MiMo-V2-Flash"),
}
# fmt: on


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    attention_sink_bias: Float[Array, " heads"] | None  # with a sliding window
    head_dim: int = eqx.field(static=True)
    v_head_dim: int = eqx.field(static=True)
    value_scale: float = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        slides, heads = c.hybrid_layer_pattern[layer] == 1, c.num_attention_heads
        kv_heads = c.swa_num_key_value_heads if slides else c.num_key_value_heads
        self.head_dim, self.v_head_dim = c.head_dim, c.v_head_dim
        self.value_scale = c.attention_value_scale or 1.0
        self.rotary = Rotary(int(c.head_dim * c.partial_rotary_factor), c.swa_rope_theta if slides else c.rope_theta)
        self.window = c.window(layer)
        self.q_proj = Linear(c.hidden_size, heads * c.head_dim, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, kv_heads * c.head_dim, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, kv_heads * c.v_head_dim, bias=c.attention_bias, key=v)
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size, key=o)
        self.attention_sink_bias = jnp.zeros(heads) if slides else None

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y, dim: y.reshape(*y.shape[:2], -1, dim)
        q, k, v = project(x, self.q_proj, self.k_proj, self.v_proj)
        q = self.rotary(heads(q, self.head_dim), at)
        k = self.rotary(heads(k, self.head_dim), at)
        v = heads(v, self.v_head_dim)
        v = times(v, self.value_scale)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        mask, sinks = kernels.sliding(self.window), self.attention_sink_bias
        y = kernels.attention(q, k, v, at, k_at, scale=self.head_dim**-0.5, mask=mask, sinks=sinks)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache


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
    gate: BiasedFloat32Router
    experts: MLP  # one MLP for each expert
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, experts) = config, jax.random.split(key)
        each = lambda *sizes, key: ExpertLinear(c.n_routed_experts, *sizes, key=key)
        self.config = c
        self.gate = BiasedFloat32Router(c.hidden_size, c.n_routed_experts, key=gate)
        self.experts = MLP(each, c.hidden_size, c.moe_intermediate_size, key=experts)

    def __call__(
        self, x: Float[Array, "batch seq embed"], segments: Int[Array, "batch seq"] | None
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        c, logits = self.config, self.gate(x)
        normalise = 1e-20 if c.norm_topk_prob else None  # so that the weights add up to 1
        scores, weights, chosen = self.gate.choose(
            logits, c.num_experts_per_tok, "sigmoid", groups=c.n_group, kept=c.topk_group, normalise=normalise
        )
        weights = (c.routed_scaling_factor * weights).astype(x.dtype)
        y = moe.dispatch(self.experts, x, chosen, weights, lambda experts: experts.down_proj)
        return y, moe.Routing.of(logits, scores / jnp.sum(scores, axis=-1, keepdims=True), chosen, segments)


class Block(AbstractDecoderBlock):
    input_layernorm: RMSNorm
    self_attn: Attention
    post_attention_layernorm: RMSNorm
    mlp: MLP | MoE

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        sparse = c.moe_layer_freq[layer] == 1
        self.input_layernorm = RMSNorm(c.hidden_size, c.layernorm_epsilon)
        self.self_attn = Attention(c, layer, key=attention)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.layernorm_epsilon)
        self.mlp = MoE(c, key=mlp) if sparse else MLP(Linear, c.hidden_size, c.intermediate_size, key=mlp)

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
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window, v_dim=a.v_head_dim)


class Model(AbstractModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (embed, layers, head) = config, jax.random.split(key, 3)
        kinds = list(zip(c.hybrid_layer_pattern, c.moe_layer_freq, strict=True))
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), kinds, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.layernorm_epsilon)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_tokens(tokens)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


# Key of the released file -> another key that repeats it there.
REPEATED = {
    "num_attention_heads": "swa_num_attention_heads",
    "head_dim": "swa_head_dim",
    "v_head_dim": "swa_v_head_dim",
    "sliding_window_size": "attention_chunk_size",
}
# Key of the released file -> transformers' key, and its words for 0 and 1.
KINDS = {
    "hybrid_layer_pattern": ("layer_types", ("full_attention", "sliding_attention")),
    "moe_layer_freq": ("mlp_layer_types", ("dense", "sparse")),
}


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Brings the keys of transformers 5 into the form of the released file, and drops keys that repeat others.

    A window is `sliding_window_size` positions and the token's own, as in transformers and SGLang. `sliding_window` is
    a copy of that number in the released file, and one more in transformers' own.

    Raises:
        ValueError: if two keys contradict each other, or one has a value that neither form has.
    """
    out = dict(hub)
    # Another key, the key of the released file, and its value by the other one.
    found = [(other, key, out.pop(other)) for key, other in REPEATED.items() if out.get(other) is not None]
    for key, (other, words) in KINDS.items():
        if (stated := out.pop(other, None)) is not None:
            if not isinstance(stated, list) or not all(word in words for word in stated):
                raise ValueError(f"{other}={stated!r:.200} needs one of {' and '.join(words)} for each layer.")
            found.append((other, key, [words.index(word) for word in stated]))
    if (eps := out.pop("rms_norm_eps", None)) is not None:
        found.append(("rms_norm_eps", "layernorm_epsilon", eps))
    match out.pop("rope_parameters", None):
        case None:
            pass
        case {
            "full_attention": {"rope_type": "default", "rope_theta": theta, **full},
            "sliding_attention": {"rope_type": "default", "rope_theta": local, **sliding},
            **others,
        } if full == sliding and full.keys() <= {"partial_rotary_factor"} and not others:
            stated = dict(rope_theta=theta, swa_rope_theta=local) | full
            found += [("rope_parameters", key, value) for key, value in stated.items()]
        case stated:
            raise ValueError(
                f"rope_parameters={stated!r:.300}; mimo_v2_flash needs a rope_theta and one partial_rotary_factor in "
                'full_attention and sliding_attention, both of the rope_type "default".'
            )
    window, size = out.pop("sliding_window", None), out.get("sliding_window_size")
    if size is None and window is not None:
        out["sliding_window_size"] = window - 1 if isinstance(window, int) else window
    elif window is not None and not (isinstance(size, int) and window in (size, size + 1)):
        raise ValueError(f"sliding_window={window!r:.200} contradicts sliding_window_size={size!r:.200}.")
    for other, key, value in found:
        if out.get(key) not in (None, value):
            raise ValueError(f"{other} says {key}={value!r:.200}, which contradicts {key}={out[key]!r:.200}.")
        out[key] = value
    return out


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Adds the keys that repeat others in the released file, and those by which transformers calls its others."""
    full = dict(rope_type="default", rope_theta=hub["rope_theta"], partial_rotary_factor=hub["partial_rotary_factor"])
    repeated = {other: hub[key] for key, other in REPEATED.items()}
    kinds = {other: [words[n] for n in hub[key]] for key, (other, words) in KINDS.items()}
    ropes = dict(full_attention=full, sliding_attention=full | dict(rope_theta=hub["swa_rope_theta"]))
    window = hub["sliding_window_size"]  # which transformers takes in place of its own sliding_window
    others = dict(sliding_window=window, rms_norm_eps=hub["layernorm_epsilon"], rope_parameters=ropes)
    return hub | repeated | kinds | others


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="MiMo V2 Flash",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("mimo_v2_flash",),
    partition_rules={
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.experts.*": P("expert", "tensor", "fsdp"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*_proj": P("tensor", "fsdp"),
        "*.attention_sink_bias": P(),
        "*.gate.*": P(),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "lm_head.*": "lm_head.{}",
        "*.gate.*.value": "model.{}.gate.{}",
        "*.experts.*.weight": "model.{}.experts.{expert}.{}.weight",
        "*": "model.{}",
    },
    redundant={"model.mtp.*": None},  # modules for further tokens
    fp8_blocks=["layers.*_proj.weight"],
    implied={
        "architectures": ["MiMoV2FlashForCausalLM"],
        "model_type": "mimo_v2_flash",
        "add_full_attention_sink_bias": False,
        "add_swa_attention_sink_bias": True,
        "attention_projection_layout": "split",  # V2.5 has one matrix for queries, keys and values
        "hidden_act": OneOf(["silu", "swish"]),
        "n_shared_experts": None,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    },
    standard_form=standard_form,
    published_form=published_form,
    rebalance=rebalance,
)
