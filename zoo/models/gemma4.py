"""Gemma 4 (https://ai.google.dev/gemma/docs/core): Gemma 3 with other heads in global layers than in local ones.

Local layers have a sliding window. Global ones have heads twice as wide, of which a quarter turns with the position,
and in the large models keys that are values, too. Queries, keys and values are normalised, and not scaled.

E2B and E4B have embeddings for each layer: a token has a vector of its own in every one of them. Their last layers have
no keys and values of their own, but read those of the last layer of their kind that has. In 26B-A4B each layer has a
mixture of experts beside its MLP.

All take images, which keep their shape. Loaded without parts=("vision",), a model is the text model alone, and saved as
one. The towers of E2B, E4B and 12B that take sound are not implemented: their tensors are left out.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import pick, scaled, spread
from zoo.nn import moe
from zoo.nn.block import AbstractDecoderBlock, AbstractSharingBlock, Shared
from zoo.nn.cache import KV, NoCache, WindowKV, init_kv
from zoo.nn.fields import fill_layers
from zoo.nn.layers import (
    AbstractExpertLinear,
    AbstractLinear,
    Embedding,
    ExpertLinear,
    Float32RMSNorm,
    Linear,
    geglu,
    gelu_times,
    project,
    rms_normalized,
    times,
)
from zoo.nn.model import AbstractMixtureConfig, AbstractVisionModel, Family, Images, OneOf, Released, causal_keys
from zoo.nn.rope import ProportionalRotary, Rotary
from zoo.nn.routing import Router
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVisionConfig, by_parts
from zoo.vision.towers import gemma4 as towers


SLIDING, FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class SlidingRope:
    rope_theta: float = 10_000.0
    rope_type: Literal["default"] = "default"


@dataclasses.dataclass(frozen=True)
class FullRope:
    rope_theta: float = 1_000_000.0
    partial_rotary_factor: float = 0.25
    rope_type: Literal["proportional"] = "proportional"


@dataclasses.dataclass(frozen=True)
class Ropes:
    """The rotary positions of each kind of layer."""

    sliding_attention: SlidingRope = SlidingRope()
    full_attention: FullRope = FullRope()


@dataclasses.dataclass(frozen=True)
class Config(AbstractMixtureConfig, AbstractVisionConfig):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    num_global_key_value_heads: int | None = None  # of full attention with attention_k_eq_v; None: num_key_value_heads
    max_position_embeddings: int = 131_072
    sliding_window: int = 512
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): as `usual_kinds` says
    head_dim: int = 256
    global_head_dim: int = 512  # of full attention
    attention_k_eq_v: bool = False  # whether the values of full attention are its keys, before norm and rope
    num_kv_shared_layers: int = 0  # the last layers, which read the keys and values of earlier ones
    use_double_wide_mlp: bool = False  # of these layers
    hidden_size_per_layer_input: int = 256  # 0: there are no embeddings for each layer
    enable_moe_block: bool = False
    num_experts: int = 0
    top_k_experts: int = 0
    moe_intermediate_size: int = 0  # width of each expert
    vocab_size: int = 262_144
    vocab_size_per_layer_input: int = 262_144
    rope_parameters: Ropes = Ropes()
    rms_norm_eps: float = 1e-6
    final_logit_softcapping: float | None = None
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: Literal["vision"] | None = None  # whether an image's tokens see each other both ways
    vision: towers.VisionConfig | towers.UnifiedVisionConfig | None = None

    def __post_init__(self):
        fill_layers(self, "layer_types", lambda n: towers.usual_kinds(self.num_hidden_layers)[n])
        c = self
        if c.layer_types[-1] != FULL:
            raise ValueError("layer_types ends with sliding_attention, for which transformers takes full_attention.")
        own = c.layer_types[: max(c.num_hidden_layers - c.num_kv_shared_layers, 0)]
        if not set(own) >= set(c.layer_types):
            raise ValueError(
                f"num_kv_shared_layers={c.num_kv_shared_layers} leaves no layer with keys and values of each kind."
            )
        if c.num_attention_heads % c.kv_heads(FULL):
            raise ValueError(
                f"num_attention_heads={c.num_attention_heads} is no multiple of num_global_key_value_heads="
                f"{c.kv_heads(FULL)}."
            )
        if c.enable_moe_block and not (c.num_experts and c.top_k_experts and c.moe_intermediate_size):
            raise ValueError("enable_moe_block needs num_experts, top_k_experts and moe_intermediate_size.")

    @property
    def num_experts_per_tok(self) -> int:
        return self.top_k_experts

    def head_size(self, kind: str) -> int:
        """Returns the features of a head in layers of this kind."""
        return self.head_dim if kind == SLIDING else self.global_head_dim

    def kv_heads(self, kind: str) -> int:
        """Returns the number of heads of keys and values in layers of this kind."""
        own = self.num_global_key_value_heads if kind == FULL and self.attention_k_eq_v else None
        return own or self.num_key_value_heads

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def reads_shared(self, layer: int) -> bool:
        """Whether a layer reads the keys and values of an earlier one."""
        return layer >= self.num_hidden_layers - self.num_kv_shared_layers

    def is_shared(self, layer: int) -> bool:
        """Whether later layers read the keys and values of this one, the last of its kind that has some."""
        own = self.layer_types[: self.num_hidden_layers - self.num_kv_shared_layers]
        return self.num_kv_shared_layers > 0 and layer < len(own) and self.layer_types[layer] not in own[layer + 1 :]

    @property
    def unused_values(self) -> str:
        """Ends the pattern of the names of values that are not needed: released layers with shared keys hold some."""
        return "*" if self.num_kv_shared_layers else "nothing"

    def attention_products(self, layer: int, seq: int) -> float:
        head = self.head_size(self.layer_types[layer])
        return self.num_attention_heads * 2 * head * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
FIVE_OF_SIX, FOUR_OF_FIVE = (*(SLIDING,) * 5, FULL), (*(SLIDING,) * 4, FULL)
SMALL_TOWER = towers.Config(use_clipped_linears=True, global_head_dim=64)
LARGE_TOWER = towers.Config(1152, 4304, 27, 16, 16, 72, standardize=True, global_head_dim=72)
SMALL: dict[str, Any] = dict(final_logit_softcapping=30.0, vision=towers.VisionConfig(tower=SMALL_TOWER))
E2B: dict[str, Any] = SMALL | dict(layer_types=FOUR_OF_FIVE * 7, num_kv_shared_layers=20, use_double_wide_mlp=True)
E4B: dict[str, Any] = SMALL | dict(layer_types=FIVE_OF_SIX * 7, num_kv_shared_layers=18)
LARGE: dict[str, Any] = dict(
    attention_k_eq_v=True, hidden_size_per_layer_input=0, final_logit_softcapping=30.0,
    use_bidirectional_attention="vision", vision=towers.VisionConfig(tower=LARGE_TOWER),
)
A4B: dict[str, Any] = LARGE | dict(enable_moe_block=True, num_experts=128, top_k_experts=8, moe_intermediate_size=704)
UNIFIED: dict[str, Any] = LARGE | dict(vision=towers.UnifiedVisionConfig(tower=towers.EmbedderConfig()))
#                       hidden    mlp  layers heads  kv  global kv  positions window
GEMMA4_E2B     = Config(  1536,  6144,     35,    8,  1,      None,    131072,   512, **E2B)
GEMMA4_E4B     = Config(  2560, 10240,     42,    8,  2,      None,    131072,   512, **E4B)
GEMMA4_12B     = Config(  3840, 15360,     48,   16,  8,         1,    262144,  1024, **UNIFIED)
GEMMA4_26B_A4B = Config(  2816,  2112,     30,   16,  8,         2,    262144,  1024, **A4B)
GEMMA4_31B     = Config(  5376, 21504,     60,   32, 16,         4,    262144,  1024, **LARGE)

CONFIGS = {
    "gemma4-e2b":      Released(GEMMA4_E2B,     "google/gemma-4-E2B"),
    "gemma4-e2b-it":   Released(GEMMA4_E2B,     "google/gemma-4-E2B-it"),
    "gemma4-e4b":      Released(GEMMA4_E4B,     "google/gemma-4-E4B"),
    "gemma4-e4b-it":   Released(GEMMA4_E4B,     "google/gemma-4-E4B-it"),
    "gemma4-12b":      Released(GEMMA4_12B,     "google/gemma-4-12B"),
    "gemma4-12b-it":   Released(GEMMA4_12B,     "google/gemma-4-12B-it"),
    "gemma4-26b":      Released(GEMMA4_26B_A4B, "google/gemma-4-26B-A4B"),
    "gemma4-26b-it":   Released(GEMMA4_26B_A4B, "google/gemma-4-26B-A4B-it"),
    "gemma4-31b":      Released(GEMMA4_31B,     "google/gemma-4-31B"),
    "gemma4-31b-it":   Released(GEMMA4_31B,     "google/gemma-4-31B-it"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear | None  # None: keys and values are those of an earlier layer
    v_proj: AbstractLinear | None  # None: values are the keys, before norm and rope
    o_proj: AbstractLinear
    q_norm: Float32RMSNorm
    k_norm: Float32RMSNorm | None
    kind: str = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    rotary: Rotary | ProportionalRotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    is_shared: bool = eqx.field(static=True)  # whether later layers read its keys and values
    eps: float = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.kind = c.layer_types[layer]
        self.head_dim = c.head_size(self.kind)
        local, full = c.rope_parameters.sliding_attention, c.rope_parameters.full_attention
        turning = int(full.partial_rotary_factor * self.head_dim // 2)
        self.rotary = (
            Rotary(self.head_dim, local.rope_theta)
            if self.kind == SLIDING
            else ProportionalRotary(self.head_dim, full.rope_theta, turning=turning)
        )
        self.window = c.window(layer)
        self.is_shared = c.is_shared(layer)
        self.eps = c.rms_norm_eps
        queries, keys = c.num_attention_heads * self.head_dim, c.kv_heads(self.kind) * self.head_dim
        project = lambda outputs, key: Linear(c.hidden_size, outputs, bias=c.attention_bias, key=key)
        has_own = not c.reads_shared(layer)
        self.q_proj = project(queries, q)
        self.k_proj = project(keys, k) if has_own else None
        self.v_proj = project(keys, v) if has_own and not (c.attention_k_eq_v and self.kind == FULL) else None
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = Float32RMSNorm(self.head_dim, c.rms_norm_eps)
        self.k_norm = Float32RMSNorm(self.head_dim, c.rms_norm_eps) if has_own else None

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | NoCache | None, at: Tokens, shared: Shared
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | NoCache | None, Shared]:
        if self.window is None:  # global layers are causal in images, too
            at = at._replace(spans=None)
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        own = [each for each in (self.k_proj, self.v_proj) if each is not None]
        q, *kv = map(heads, project(x, self.q_proj, *own))
        q = self.rotary(self.q_norm(q), at)
        if self.k_norm is None:
            k, v, k_at = shared[self.kind]
        else:
            k, v = kv[0], kv[-1]  # without v_proj they are the same
            k, v = self.rotary(self.k_norm(k), at), rms_normalized(v, self.eps)
            k_at = at  # where the keys stand
            if isinstance(cache, KV | WindowKV):
                cache, k, v, k_at = cache.update(k, v, at)
        mask = kernels.sliding(self.window)
        if at.spans is not None:  # an image's tokens see each other both ways; the window limits only how far back
            assert self.window is not None
            mask = (kernels.Causal() | kernels.Spans()) & kernels.Window(self.window)
        y = kernels.attention(q, k, v, at, k_at, scale=1.0, mask=mask)
        return self.o_proj(y.reshape(*y.shape[:2], -1)), cache, {self.kind: (k, v, k_at)} if self.is_shared else {}


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, embed: int, width: int, *, key: PRNGKeyArray):
        gate, up, down = jax.random.split(key, 3)
        self.gate_proj = Linear(embed, width, key=gate)
        self.up_proj = Linear(embed, width, key=up)
        self.down_proj = Linear(width, embed, key=down)

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq embed"]:
        return self.down_proj(geglu(x, self.gate_proj, self.up_proj))


class ScaledRouter(eqx.Module):
    """Logits of the experts for normalised tokens, and a factor on each expert's weight."""

    proj: Router
    scale: Float[Array, " embed"]
    per_expert_scale: Float[Array, " experts"]
    eps: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        self.proj = Router(config.hidden_size, config.num_experts, key=key)
        self.scale = jnp.ones(config.hidden_size)
        self.per_expert_scale = jnp.ones(config.num_experts)
        self.eps = config.rms_norm_eps

    def __call__(self, x: Float[Array, "batch seq embed"]) -> Float[Array, "batch seq experts"]:
        return self.proj(times(scaled(rms_normalized(x, self.eps), self.scale), x.shape[-1] ** -0.5))


class Experts(eqx.Module):
    gate_up_proj: AbstractExpertLinear  # rows: first all of gate, then all of up
    down_proj: AbstractExpertLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate_up, down) = config, jax.random.split(key)
        self.gate_up_proj = ExpertLinear(c.num_experts, c.hidden_size, 2 * c.moe_intermediate_size, key=gate_up)
        self.down_proj = ExpertLinear(c.num_experts, c.moe_intermediate_size, c.hidden_size, key=down)

    def __call__(self, x: Float[Array, "rows embed"], sizes: Int[Array, " experts"]) -> Float[Array, "rows embed"]:
        gate, up = moe.split_gate_up(self.gate_up_proj(x, sizes))
        return self.down_proj(gelu_times(gate, up), sizes)


class MoE(eqx.Module):
    """A mixture of experts beside the MLP, with norms of its own. Its router gets the features before any norm."""

    router: ScaledRouter
    experts: Experts
    post_feedforward_layernorm_1: Float32RMSNorm  # of the MLP's output
    pre_feedforward_layernorm_2: Float32RMSNorm
    post_feedforward_layernorm_2: Float32RMSNorm
    top_k: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        router, experts = jax.random.split(key)
        self.router = ScaledRouter(config, key=router)
        self.experts = Experts(config, key=experts)
        self.post_feedforward_layernorm_1 = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm_2 = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_feedforward_layernorm_2 = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.top_k = config.top_k_experts

    def __call__(
        self,
        x: Float[Array, "batch seq embed"],
        normed: Float[Array, "batch seq embed"],
        of_mlp: Float[Array, "batch seq embed"],
        segments: Int[Array, "batch seq"] | None,
    ) -> tuple[Float[Array, "batch seq embed"], moe.Routing]:
        logits = self.router(x)
        probability, weights, chosen = moe.choose(logits, self.top_k, "softmax")
        factors = pick(spread(self.router.per_expert_scale.astype(jnp.float32), probability.shape), chosen)
        weights = (factors * weights / jnp.sum(weights, axis=-1, keepdims=True)).astype(x.dtype)
        y = moe.dispatch(self.experts, normed, chosen, weights, lambda experts: experts.down_proj)
        y = self.post_feedforward_layernorm_1(of_mlp) + self.post_feedforward_layernorm_2(y)
        return y, moe.Routing.of(logits, probability, chosen, segments)


class PerLayerInput(eqx.Module):
    """Adds a token's vector for this layer to its features, gated by them."""

    per_layer_input_gate: AbstractLinear
    per_layer_projection: AbstractLinear
    post_per_layer_input_norm: Float32RMSNorm

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, projection) = config, jax.random.split(key)
        self.per_layer_input_gate = Linear(c.hidden_size, c.hidden_size_per_layer_input, key=gate)
        self.per_layer_projection = Linear(c.hidden_size_per_layer_input, c.hidden_size, key=projection)
        self.post_per_layer_input_norm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], vectors: Float[Array, "batch seq dim"]
    ) -> Float[Array, "batch seq embed"]:
        y = self.per_layer_projection(gelu_times(self.per_layer_input_gate(x), vectors))
        return x + self.post_per_layer_input_norm(y)


class Block(AbstractSharingBlock, AbstractDecoderBlock):
    input_layernorm: Float32RMSNorm
    self_attn: Attention
    post_attention_layernorm: Float32RMSNorm
    pre_feedforward_layernorm: Float32RMSNorm
    mlp: MLP
    mixture: MoE | None
    post_feedforward_layernorm: Float32RMSNorm
    per_layer: PerLayerInput | None
    layer_scalar: Float[Array, " 1"]  # not trained

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (attention, mlp, experts, per_layer) = config, jax.random.split(key, 4)
        width = c.intermediate_size * (2 if c.use_double_wide_mlp and c.reads_shared(layer) else 1)
        self.input_layernorm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer, key=attention)
        self.post_attention_layernorm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.pre_feedforward_layernorm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c.hidden_size, width, key=mlp)
        self.mixture = MoE(c, key=experts) if c.enable_moe_block else None
        self.post_feedforward_layernorm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.per_layer = PerLayerInput(c, key=per_layer) if c.hidden_size_per_layer_input else None
        self.layer_scalar = jnp.ones(1)

    def run(
        self,
        x: Float[Array, "batch seq embed"],
        cache: KV | WindowKV | NoCache | None,
        at: Tokens,
        own_input: Float[Array, "batch seq dim"] | None,
        shared: Shared,
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | NoCache | None, moe.Routing | None, Shared]:
        y, cache, handed_on = self.self_attn(self.input_layernorm(x), cache, at, shared)
        x = x + self.post_attention_layernorm(y)
        if self.mixture is None:
            y, routing = self.mlp(self.pre_feedforward_layernorm(x)), None
        else:
            for_mlp, for_experts = kernels.rms_norms(
                (x, self.pre_feedforward_layernorm), (x, self.mixture.pre_feedforward_layernorm_2)
            )
            y, routing = self.mixture(x, for_experts, self.mlp(for_mlp), at.segments)
        x = x + self.post_feedforward_layernorm(y)
        if self.per_layer is not None:
            assert own_input is not None, "the model has embeddings for each layer"
            x = self.per_layer(x, own_input)
        return x * jnp.broadcast_to(jax.lax.stop_gradient(self.layer_scalar), x.shape), cache, routing, handed_on

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV | NoCache:
        a = self.self_attn
        if a.k_proj is None:
            return NoCache(jnp.array(0, jnp.int32))
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window)


class PerLayerEmbedding(eqx.Module):
    """The vectors of tokens for each layer: of the token itself, from a table, plus a projection of its embedding."""

    embed_tokens_per_layer: Embedding  # [vocab, layers * dim]
    per_layer_model_projection: AbstractLinear
    per_layer_projection_norm: Float32RMSNorm
    dim: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (table, projection) = config, jax.random.split(key)
        self.dim = c.hidden_size_per_layer_input
        features = c.num_hidden_layers * self.dim
        self.embed_tokens_per_layer = Embedding(c.vocab_size_per_layer_input, features, key=table)
        self.per_layer_model_projection = Linear(c.hidden_size, features, key=projection)
        self.per_layer_projection_norm = Float32RMSNorm(self.dim, c.rms_norm_eps)

    def __call__(
        self, tokens: Int[Array, "batch seq"], x: Float[Array, "batch seq embed"]
    ) -> Float[Array, "layers batch seq dim"]:
        by_layer = lambda y: y.reshape(*y.shape[:2], -1, self.dim)
        # The factor is rounded to the table's dtype, as in the reference.
        of_tokens = by_layer(self.embed_tokens_per_layer(tokens)) * self.dim**0.5
        projected = by_layer(times(self.per_layer_model_projection(x), x.shape[-1] ** -0.5))
        return jnp.moveaxis(times(self.per_layer_projection_norm(projected) + of_tokens, 2**-0.5), 2, 0)


class Model(AbstractVisionModel):
    embed_tokens: Embedding
    per_layer: PerLayerEmbedding | None
    layers: Stack
    norm: Float32RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    vision: towers.Vision | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, per_layer, layers, head, vision) = by_parts(config, parts), jax.random.split(key, 5)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.per_layer = PerLayerEmbedding(c, key=per_layer) if c.hidden_size_per_layer_input else None
        kinds = [(c.layer_types[n], c.reads_shared(n), c.is_shared(n)) for n in range(c.num_hidden_layers)]
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), kinds, key=layers)
        self.norm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.vision = None if c.vision is None else towers.Vision(c.vision, c.hidden_size, key=vision)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_text(tokens, images)
        # The factor is rounded to x's dtype, as in the reference: sqrt(5376) is 73.5 in bfloat16.
        x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        if images is not None:  # features of images are not scaled
            assert self.vision is not None, "`hidden` refuses images where there is no tower"
            x = images.splice(x, self.vision(jnp.asarray(images.patches), jnp.asarray(images.grids)))
            tokens = jnp.where(images.image < 0, tokens, 0)  # the id of padding
            if self.config.use_bidirectional_attention:
                at = at._replace(spans=images.image)
        own_inputs = None if self.per_layer is None else self.per_layer(tokens, x)
        x, cache, reports = self.layers(x, cache, at, own_inputs=own_inputs)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        logits = self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)
        cap = self.config.final_logit_softcapping
        return logits if cap is None else cap * jnp.tanh(logits / cap)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Gemma 4",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("gemma4", "gemma4_text", "gemma4_unified", "gemma4_unified_text"),
    partition_rules={
        **{f"vision.{path}": spec for path, spec in towers.PARTITION_RULES.items()},
        "*embed_tokens*": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "*.router.*": P(),
        "*.experts.gate_up_proj": P("expert", "tensor", "fsdp"),
        "*.experts.down_proj": P("expert", "fsdp", "tensor"),
        "*.down_proj": P("fsdp", "tensor"),
        "*.o_proj": P("fsdp", "tensor"),
        "*.per_layer_projection": P("fsdp", "tensor"),
        "*.per_layer_input_gate": P("tensor", "fsdp"),
        "*.per_layer_model_projection": P("tensor", "fsdp"),
        "*_proj": P("tensor", "fsdp"),
        "*.layer_scalar": P(),
        "*norm*.weight": P(),
    },
    checkpoint_names={
        **towers.CHECKPOINT_NAMES,
        "lm_head.*": "lm_head.{}",
        "per_layer.*": "model.{}",
        "layers.*.per_layer.*": "model.layers.{}.{}",
        "layers.*.mixture.experts.*.weight": "model.layers.{}.experts.{}",
        "layers.*.mixture.*": "model.layers.{}.{}",
        "*": "model.{}",
    },
    beginnings=towers.BEGINNINGS,
    # A copy of another tensor, to which it must be equal; and what layers hold that read another one's keys and values.
    redundant={
        "lm_head.weight": "model.embed_tokens.weight",
        "model.layers.*.self_attn.k_proj.*": None,
        "model.layers.*.self_attn.k_norm.*": None,
        "model.layers.*.self_attn.v_proj.{config.unused_values}": None,
        **towers.REDUNDANT,
    },
    parts={"vision": "its vision tower, so that the model takes images"},
    implied={
        "architectures": OneOf([["Gemma4ForCausalLM"], ["Gemma4UnifiedForCausalLM"]]),
        "model_type": OneOf(["gemma4_text", "gemma4_unified_text"]),
        "hidden_activation": "gelu_pytorch_tanh",
    },
    standard_form=towers.flat,
    published_form=towers.nested,
)
