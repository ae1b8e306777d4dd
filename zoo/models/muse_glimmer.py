"""Muse Glimmer 30B (Meta, 2026), which takes images: gated attention, without positions where it has no window.

Three of four layers have rotary positions and a sliding window. The others, counted from the last layer, have no
positions and see all tokens before a token. Embeddings, queries and keys are normed without weights. Norms before and
after attention and the MLP are scaled by 1 + weight; those after have a smaller epsilon. Each channel that attention
returns is multiplied by a sigmoid of the layer's input (arXiv:2505.06708). Logits are scaled, and capped by
cap * tanh(logits / cap). To the text model a token of an image is like others: it sees those before it. The vision
tower is an optional part: loaded without parts=("vision",), the model is the text model alone, and saved as one.
"""

import dataclasses
from collections.abc import Mapping, Sequence
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
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.fields import fill_layers
from zoo.nn.layers import (
    AbstractLinear,
    Embedding,
    Float32RMSNorm,
    Linear,
    OffsetRMSNorm,
    erf_gelu,
    project,
    rms_normalized,
    swiglu,
    times,
)
from zoo.nn.model import AbstractVisionModel, Family, Images, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVision, AbstractVisionConfig, AbstractVisionKeys, Nested, by_parts
from zoo.vision.processors.muse_glimmer import MuseGlimmer
from zoo.vision.towers import muse_glimmer as towers


@dataclasses.dataclass(frozen=True)
class VisionConfig(AbstractVisionKeys):
    """The keys of a multimodal config.json beside its `text_config`."""

    tower: towers.Config = towers.Config()
    image_token_id: int = 200_092
    video_token_id: int = 200_091
    out_hidden_size: int = 6144  # width of the tower's features
    projector_hidden_size: int = 4096

    def __post_init__(self):
        if self.out_hidden_size != self.tower.features:
            raise ValueError(
                f"config.json has out_hidden_size={self.out_hidden_size}, but the tower's features have "
                f"{self.tower.features}."
            )


@dataclasses.dataclass(frozen=True)
class Config(AbstractVisionConfig):
    vocab_size: int = 202_048
    hidden_size: int = 6656
    intermediate_size: int = 19_968
    num_hidden_layers: int = 52
    num_attention_heads: int = 32
    num_key_value_heads: int = 2
    head_dim: int = 128
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 2048
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): full at each 4th from the last
    layer_rope_theta: tuple[float, ...] = ()  # 0: no rotary positions; (): 0 at each 4th from the last
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_scale_factor: float = 3.87  # on queries, beside 1 / sqrt(head_dim)
    output_multiplier: float = 0.19611613513818404  # on logits, before the cap
    final_logit_softcapping: float = 20.0
    rms_norm_eps: float = 1e-5
    post_norm_eps: float = 1e-8  # of the norms after attention and the MLP
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    vision: VisionConfig | None = None

    def __post_init__(self):
        is_full = lambda n: (self.num_hidden_layers - 1 - n) % 4 == 0
        fill_layers(self, "layer_types", lambda n: "full_attention" if is_full(n) else "sliding_attention")
        fill_layers(self, "layer_rope_theta", lambda n: 0.0 if is_full(n) else self.rope_theta)
        if self.sliding_window is None and "sliding_attention" in self.layer_types:
            raise ValueError("layer_types has sliding_attention, which needs a sliding_window.")
        if others := set(self.layer_rope_theta) - {0.0, self.rope_theta}:
            raise ValueError(f"layer_rope_theta has {min(others)}, but only 0 and rope_theta are implemented.")

    def rotates(self, layer: int) -> bool:
        """Whether this layer has rotary positions."""
        return self.layer_rope_theta[layer] != 0

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
#                          vocab  hidden    mlp  layers  heads  kv
MUSE_GLIMMER_30B = Config(202048,   6656, 19968,     52,    32,  2, rope_theta=500_000.0, vision=VisionConfig())

CONFIGS = {"muse-glimmer-30b": Released(MUSE_GLIMMER_30B, "meta-models/Muse-Glimmer-30B")}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    gate_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    rotary: Rotary | None = eqx.field(static=True)  # None: this layer has no positions
    qk_scale_factor: float = eqx.field(static=True)
    norm_eps: float = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, gate, o) = config, jax.random.split(key, 5)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling) if c.rotates(layer) else None
        self.qk_scale_factor = c.qk_scale_factor
        self.norm_eps = c.rms_norm_eps
        self.window = c.window(layer)
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.gate_proj = Linear(c.hidden_size, queries, key=gate)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v, gate = project(x, self.q_proj, self.k_proj, self.v_proj, self.gate_proj)
        q = rms_normalized(heads(q), self.norm_eps)
        k = rms_normalized(heads(k), self.norm_eps)
        if self.rotary is not None:
            q, k = self.rotary(q, at), self.rotary(k, at)
        v = heads(v)
        k_at = at  # where the keys stand
        if cache is not None:
            cache, k, v, k_at = cache.update(k, v, at)
        scale = self.qk_scale_factor * self.head_dim**-0.5
        y = kernels.attention(q, k, v, at, k_at, scale=scale, mask=kernels.sliding(self.window))
        y = y.reshape(*y.shape[:2], -1) * jax.nn.sigmoid(gate)
        return self.o_proj(y), cache


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
        return self.down_proj(swiglu(*project(x, self.gate_proj, self.up_proj)))


class Block(AbstractDecoderBlock):
    input_layernorm: OffsetRMSNorm
    self_attn: Attention
    post_attention_layernorm: OffsetRMSNorm
    pre_feedforward_layernorm: OffsetRMSNorm
    mlp: MLP
    post_feedforward_layernorm: OffsetRMSNorm

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (attention, mlp) = config, jax.random.split(key)
        self.input_layernorm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = Attention(c, layer, key=attention)
        self.post_attention_layernorm = OffsetRMSNorm(c.hidden_size, c.post_norm_eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c, key=mlp)
        self.post_feedforward_layernorm = OffsetRMSNorm(c.hidden_size, c.post_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None, None]:
        y, cache = self.self_attn(self.input_layernorm(x), cache, at)
        x = x + self.post_attention_layernorm(y)
        y = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(y), cache, None

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> KV | WindowKV:
        a = self.self_attn
        heads = a.k_proj.shape[-2] // a.head_dim  # the shape is (out, in), or (layers, out, in) in a stack
        return init_kv(layers, batch, length, heads, a.head_dim, dtype, window=a.window)


class Adapter(eqx.Module):
    fc1: AbstractLinear
    fc2: AbstractLinear

    def __init__(self, config: VisionConfig, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        self.fc1 = Linear(c.out_hidden_size, c.projector_hidden_size, key=fc1)
        self.fc2 = Linear(c.projector_hidden_size, c.projector_hidden_size, key=fc2)

    def __call__(self, x: Float[Array, "pictures tokens dim"]) -> Float[Array, "pictures tokens width"]:
        return erf_gelu(self.fc2(erf_gelu(self.fc1(x))))


class Vision(AbstractVision):
    tower: towers.Tower
    adapter: Adapter
    projection: AbstractLinear
    processor: ClassVar[type[MuseGlimmer]] = MuseGlimmer

    def __init__(self, config: VisionConfig, hidden_size: int, *, key: PRNGKeyArray):
        tower, adapter, projection = jax.random.split(key, 3)
        self.tower = towers.Tower(config.tower, key=tower)
        self.adapter = Adapter(config, key=adapter)
        self.projection = Linear(config.projector_hidden_size, hidden_size, key=projection)

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], grids: Int[Array, "pictures 2"]
    ) -> Float[Array, "pictures tokens embed"]:
        return self.projection(self.adapter(self.tower(patches, grids)))


class Model(AbstractVisionModel):
    embed_tokens: Embedding
    layers: Stack
    norm: Float32RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    vision: Vision | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, layers, head, vision) = by_parts(config, parts), jax.random.split(key, 4)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        kinds = [(c.rotates(n), c.window(n)) for n in range(c.num_hidden_layers)]
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), kinds, key=layers)
        self.norm = Float32RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.vision = None if c.vision is None else Vision(c.vision, c.hidden_size, key=vision)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = rms_normalized(self.embed(tokens, images), self.config.rms_norm_eps)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        logits = self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)
        cap = self.config.final_logit_softcapping
        return cap * jnp.tanh(times(logits, self.config.output_multiplier) / cap)


NESTED = Nested(
    VisionConfig,
    names={"architectures": ["MuseGlimmerForConditionalGeneration"], "model_type": "muse_glimmer"},
    outside=("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version"),
    projector={"projector_hidden_act": "gelu"},
)


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested config.json (with a `text_config`), whose own `tie_word_embeddings` does not count there.

    Raises:
        ValueError: from `Nested.flat`.
    """
    return NESTED.flat({"tie_word_embeddings": False, **hub} if "text_config" in hub else hub)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Muse Glimmer",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("muse_glimmer", "muse_glimmer_text"),
    partition_rules={
        **{f"vision.tower.{path}": spec for path, spec in towers.PARTITION_RULES.items()},
        "vision.adapter.fc1": P("tensor", "fsdp"),
        "vision.adapter.fc2": P("fsdp", "tensor"),
        "vision.projection": P("tensor", "fsdp"),
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate_proj": P("tensor", "fsdp"),  # of attention too
        "layers.*.up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={"vision.*": "model.vision_{}", "lm_head.*": "lm_head.{}", "*": "model.{}"},
    # In files with a vision tower, the text model's names begin otherwise.
    beginnings={"vision": {"model.vision_": "model.vision_", "model.": "model.language_model."}},
    aliases={"model.language_model.": "model."},  # the release's names
    # A copy of another tensor, to which it must be equal; and what only the part "vision" needs (None).
    redundant={"lm_head.weight": "model.embed_tokens.weight", "model.vision_*": None},
    parts={"vision": "the vision tower, so that the model takes images"},
    implied={
        "architectures": ["MuseGlimmerTextModel"],
        "model_type": "muse_glimmer_text",
        "hidden_activation": OneOf(["silu", "swish"]),
    },
    standard_form=standard_form,
    published_form=NESTED.nested,
)
