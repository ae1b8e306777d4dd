"""Gemma 3 (arXiv:2503.19786): Gemma 2 with an RMSNorm over each head's queries and keys, and no soft-capping.

Each block has four norms: before and after attention, and before and after the MLP. Five of six layers have a sliding
window and a rotary base of their own. Models of 4B and more take images: each becomes 256 tokens, which see each other
both ways. The vision tower is SigLIP's. It is an optional part: loaded without parts=("vision",), the model is the text
model alone, and saved as one. EmbeddingGemma is an encoder, in which all tokens see each other both ways.
"""

import dataclasses
import math
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
from zoo.nn.fields import fill_layers, typed
from zoo.nn.layers import AbstractLinear, Embedding, Linear, OffsetRMSNorm, geglu, project
from zoo.nn.model import AbstractVisionModel, Family, Images, Released, causal_keys
from zoo.nn.rope import LinearScaling, RopeScaling, Rotary
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVision, AbstractVisionConfig, AbstractVisionKeys, Nested, by_parts
from zoo.vision.processors.gemma3 import Gemma3
from zoo.vision.towers import siglip


@dataclasses.dataclass(frozen=True)
class VisionConfig(AbstractVisionKeys):
    """The keys of a multimodal config.json beside its `text_config`."""

    tower: siglip.Config
    mm_tokens_per_image: int = 256
    image_token_index: int = 262_144
    boi_token_index: int = 255_999
    eoi_token_index: int = 256_000

    def __post_init__(self):
        tokens, patches_per_side = self.mm_tokens_per_image, self.tower.side
        tokens_per_side = math.isqrt(max(tokens, 0))
        if tokens < 1 or tokens_per_side**2 != tokens or patches_per_side % tokens_per_side:
            raise ValueError(
                f"mm_tokens_per_image={tokens} is not the square of a divisor of {patches_per_side}, the number of "
                "patches along an image's side."
            )


@dataclasses.dataclass(frozen=True)
class Config(AbstractVisionConfig):
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int = 8
    num_key_value_heads: int = 4
    head_dim: int = 256
    query_pre_attn_scalar: int = 256
    vocab_size: int = 262_208
    max_position_embeddings: int = 131_072
    sliding_window: int | None = 4096
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): every sixth is full
    rope_theta: float = 1_000_000.0  # of full attention, as is rope_scaling
    rope_scaling: RopeScaling | None = None
    rope_local_base_freq: float = 10_000.0  # of sliding attention
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = True
    attention_bias: bool = False
    use_bidirectional_attention: bool = False  # an encoder, EmbeddingGemma: half of sliding_window lies on either side
    vision: VisionConfig | None = None

    def __post_init__(self):
        fill_layers(self, "layer_types", lambda n: "sliding_attention" if (n + 1) % 6 else "full_attention")

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own.

        In an encoder it is the most on either side, and None is all of the text.
        """
        window = self.sliding_window if self.layer_types[layer] == "sliding_attention" else None
        return window // 2 + 1 if window and self.use_bidirectional_attention else window

    def attention_products(self, layer: int, seq: int) -> float:
        sides = 2 if self.use_bidirectional_attention else 1
        keys = sides * causal_keys(seq, self.window(layer))
        return self.num_attention_heads * 2 * self.head_dim * keys  # 2: scores, values


# fmt: off
TEXT: dict[str, Any] = dict(sliding_window=512)
ENCODER: dict[str, Any] = TEXT | dict(use_bidirectional_attention=True)
SIGLIP = siglip.Config(1152, 4304, 27, 16, image_size=896, patch_size=14)
VISION: dict[str, Any] = dict(sliding_window=1024, rope_scaling=LinearScaling(8.0), vision=VisionConfig(SIGLIP))
#                   hidden    mlp  layers  heads  kv  head scalar   vocab  positions
GEMMA3_270M = Config(  640,  2048,     18,     4,  1,  256,   256, 262144,  32768, **TEXT)
GEMMA3_1B   = Config( 1152,  6912,     26,     4,  1,  256,   256, 262144,  32768, **TEXT)
EMBED_300M  = Config(  768,  1152,     24,     3,  1,  256,   256, 262144,   2048, **ENCODER)
GEMMA3_4B   = Config( 2560, 10240,     34,     8,  4,  256,   256, 262208, 131072, **VISION)
GEMMA3_12B  = Config( 3840, 15360,     48,    16,  8,  256,   256, 262208, 131072, **VISION)
GEMMA3_27B  = Config( 5376, 21504,     62,    32, 16,  128,   168, 262208, 131072, **VISION)  # 168: 5376 / 32 heads

CONFIGS = {
    "gemma3-270m":    Released(GEMMA3_270M, "google/gemma-3-270m"),
    "gemma3-270m-it": Released(GEMMA3_270M, "google/gemma-3-270m-it"),
    "gemma3-1b":      Released(GEMMA3_1B,   "google/gemma-3-1b-pt"),
    "gemma3-1b-it":   Released(GEMMA3_1B,   "google/gemma-3-1b-it"),
    "gemma3-4b":      Released(GEMMA3_4B,   "google/gemma-3-4b-pt"),
    "gemma3-4b-it":   Released(GEMMA3_4B,   "google/gemma-3-4b-it"),
    "gemma3-12b":     Released(GEMMA3_12B,  "google/gemma-3-12b-pt"),
    "gemma3-12b-it":  Released(GEMMA3_12B,  "google/gemma-3-12b-it"),
    "gemma3-27b":     Released(GEMMA3_27B,  "google/gemma-3-27b-pt"),
    "gemma3-27b-it":  Released(GEMMA3_27B,  "google/gemma-3-27b-it"),
    "embeddinggemma-300m": Released(EMBED_300M, "google/embeddinggemma-300m"),
}
# fmt: on


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    q_norm: OffsetRMSNorm
    k_norm: OffsetRMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: Rotary = eqx.field(static=True)
    scale: float = eqx.field(static=True)
    window: int | None = eqx.field(static=True)
    bidirectional: bool = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        slides = c.layer_types[layer] == "sliding_attention"
        base, scaling = (c.rope_local_base_freq, None) if slides else (c.rope_theta, c.rope_scaling)
        self.rotary = Rotary(c.head_dim, base, scaling)
        self.scale = c.query_pre_attn_scalar**-0.5
        self.window = c.window(layer)
        self.bidirectional = c.use_bidirectional_attention
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, bias=c.attention_bias, key=q)
        self.k_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=k)
        self.v_proj = Linear(c.hidden_size, keys, bias=c.attention_bias, key=v)
        self.o_proj = Linear(queries, c.hidden_size, bias=c.attention_bias, key=o)
        self.q_norm = OffsetRMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = OffsetRMSNorm(c.head_dim, c.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q = self.rotary(self.q_norm(q), at)
        k = self.rotary(self.k_norm(k), at)
        k_at = at  # where the keys stand
        if cache is not None:
            if self.bidirectional:
                raise ValueError("An encoder sees later tokens, and has no cache: it does not generate.")
            cache, k, v, k_at = cache.update(k, v, at)
        mask = kernels.sliding(self.window)
        if self.bidirectional:
            mask = kernels.Full() if self.window is None else kernels.Around(self.window)
        elif at.spans is not None:  # an image's tokens see each other both ways; a window limits only how far back
            both = kernels.Causal() | kernels.Spans()
            mask = both if self.window is None else both & kernels.Window(self.window)
        y = kernels.attention(q, k, v, at, k_at, scale=self.scale, mask=mask)
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
        return self.down_proj(geglu(*project(x, self.gate_proj, self.up_proj)))


class Block(AbstractDecoderBlock):
    input_layernorm: OffsetRMSNorm
    self_attn: Attention
    post_attention_layernorm: OffsetRMSNorm
    pre_feedforward_layernorm: OffsetRMSNorm
    mlp: MLP
    post_feedforward_layernorm: OffsetRMSNorm

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, layer, key=attention)
        self.post_attention_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)
        self.post_feedforward_layernorm = OffsetRMSNorm(config.hidden_size, config.rms_norm_eps)

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


class Projector(eqx.Module):
    """Turns each square of neighbouring patches into one token: their mean, normalised and projected."""

    mm_soft_emb_norm: OffsetRMSNorm
    mm_input_projection: AbstractLinear
    tokens_per_side: int = eqx.field(static=True)  # of an image

    def __init__(self, config: VisionConfig, hidden_size: int, *, key: PRNGKeyArray):
        self.mm_soft_emb_norm = OffsetRMSNorm(config.tower.hidden_size, config.tower.layer_norm_eps)
        self.mm_input_projection = Linear(config.tower.hidden_size, hidden_size, key=key)
        self.tokens_per_side = math.isqrt(config.mm_tokens_per_image)

    def __call__(self, x: Float[Array, "images patches dim"]) -> Float[Array, "images tokens embed"]:
        images, patches, dim = x.shape
        side = self.tokens_per_side
        pool = math.isqrt(patches) // side  # patches along the side of a square
        squares = x.reshape(images, side, pool, side, pool, dim).astype(jnp.float32)
        x = jnp.mean(squares, axis=(2, 4)).astype(x.dtype).reshape(images, -1, dim)
        return self.mm_input_projection(self.mm_soft_emb_norm(x))


class Vision(AbstractVision):
    tower: siglip.Tower
    projector: Projector
    processor: ClassVar[type[Gemma3]] = Gemma3

    def __init__(self, config: VisionConfig, hidden_size: int, *, key: PRNGKeyArray):
        tower, projector = jax.random.split(key)
        self.tower = siglip.Tower(config.tower, key=tower)
        self.projector = Projector(config, hidden_size, key=projector)

    def __call__(
        self, patches: Float[Array, "images patches pixels"], grids: Int[Array, "images 2"]
    ) -> Float[Array, "images tokens embed"]:
        return self.projector(self.tower(patches))


class Model(AbstractVisionModel):
    embed_tokens: Embedding
    layers: Stack
    norm: OffsetRMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    vision: Vision | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, layers, head, vision) = by_parts(config, parts), jax.random.split(key, 4)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), c.layer_types, key=layers)
        self.norm = OffsetRMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.vision = None if c.vision is None else Vision(c.vision, c.hidden_size, key=vision)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed_text(tokens, images)
        # The factor is rounded to x's dtype, as in the reference: sqrt(5376) is 73.5 in bfloat16.
        x = x * jnp.asarray(self.config.hidden_size**0.5, x.dtype)
        if images is not None:  # features of images are not scaled
            assert self.vision is not None, "`hidden` refuses images where there is no tower"
            x = images.splice(x, self.vision(jnp.asarray(images.patches), jnp.asarray(images.grids)))
            at = at._replace(spans=images.image)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


NESTED = Nested(
    VisionConfig,
    names={"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3"},
    outside=("tie_word_embeddings", "dtype", "torch_dtype", "bos_token_id", "eos_token_id", "pad_token_id"),
)


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested config.json (with a `text_config`), and bring newer and older keys into one form.

    `sliding_window_pattern` becomes `layer_types`. `rope_parameters`, in which transformers 5 keeps both ropes, becomes
    `rope_theta` and `rope_scaling` of full attention, and `rope_local_base_freq` of sliding attention.

    Raises:
        ValueError: if `sliding_window_pattern`, or `num_hidden_layers` beside it, is no number of layers; if ropes are
            given in both forms, in an incomplete one, or with a key in the wrong place; if the rope of sliding
            attention is scaled; or from `Nested.flat`.
    """
    # In a nested file, only the outer tie_word_embeddings counts, and without it embeddings are tied. One within
    # text_config is ignored.
    absent = {"tie_word_embeddings": True} if "text_config" in hub else {}
    hub = NESTED.flat(absent | dict(hub))
    every = hub.pop("sliding_window_pattern", None)
    if every is not None and not (type(every) is int and every > 0):
        raise ValueError(f"sliding_window_pattern={every!r} is no number of layers.")
    if every and not hub.get("layer_types"):
        layers = hub.get("num_hidden_layers")
        layers = range(1, typed("num_hidden_layers", layers, int, f"num_hidden_layers={layers!r}") + 1)
        hub["layer_types"] = ["sliding_attention" if n % every else "full_attention" for n in layers]
    older = hub.get("rope_scaling") or {}
    if "rope_type" not in older and "type" in older:
        raise ValueError(f"rope_scaling={older!r} needs a rope_type; a type alone is not read.")
    if older and hub.get("rope_parameters"):
        raise ValueError(f"config.json says rope_scaling={older!r} beside rope_parameters: give one of the two.")
    if "original_max_position_embeddings" in hub:
        raise ValueError("original_max_position_embeddings belongs in the rope_scaling of full attention.")
    match hub.pop("rope_parameters", None):
        case None:
            return hub
        case {
            "full_attention": {"rope_theta": theta, **scaling},
            "sliding_attention": {"rope_theta": local, "rope_type": "default", **local_scaling},
            **others,
        } if not local_scaling and not others:
            return hub | dict(rope_theta=theta, rope_scaling=scaling, rope_local_base_freq=local)
        case parameters:
            raise ValueError(
                f"config.json says rope_parameters={parameters!r}; gemma3 needs a rope_theta for full_attention, and "
                'nothing but a rope_theta and the rope_type "default" for sliding_attention, whose rope it does not '
                "scale."
            )


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Gemma 3",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("gemma3", "gemma3_text"),
    partition_rules={
        **{f"vision.tower.{path}": spec for path, spec in siglip.PARTITION_RULES.items()},
        "vision.projector.mm_input_projection": P("tensor", "fsdp"),
        "embed_tokens": P("tensor", "fsdp"),
        "lm_head": P("tensor", "fsdp"),
        "layers.*.[qkv]_proj": P("tensor", "fsdp"),
        "layers.*.o_proj": P("fsdp", "tensor"),
        "layers.*.gate_proj": P("tensor", "fsdp"),
        "layers.*.up_proj": P("tensor", "fsdp"),
        "layers.*.down_proj": P("fsdp", "tensor"),
        "*norm.weight": P(),
    },
    checkpoint_names={
        "vision.tower.layers.*": "vision_tower.vision_model.encoder.layers.{}",
        "vision.tower.post_layernorm.*": "vision_tower.vision_model.post_layernorm.{}",
        "vision.tower.*": "vision_tower.vision_model.embeddings.{}",
        # ^T: the last two axes are swapped.
        "vision.projector.mm_input_projection.weight": "multi_modal_projector.mm_input_projection_weight^T",
        "vision.projector.*": "multi_modal_projector.{}",
        "lm_head.*": "lm_head.{}",
        "*": "model.{}",
    },
    # In files with a vision tower, the text model's names begin otherwise.
    beginnings={"vision": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}},
    # Other beginnings in such files -> those that `checkpoint_names` gives: of transformers 4.52 and 5.
    aliases={
        "model.language_model.": "model.",
        "model.multi_modal_projector.": "multi_modal_projector.",
        "model.vision_tower.vision_model.": "vision_tower.vision_model.",
        "model.vision_tower.": "vision_tower.vision_model.",
        "vision_tower.vision_model.": "vision_tower.vision_model.",
        "vision_tower.": "vision_tower.vision_model.",
    },
    # A copy of another tensor, to which it must be equal; and what only the part "vision" needs (None).
    redundant={"lm_head.weight": "model.embed_tokens.weight", "vision_tower.*": None, "multi_modal_projector.*": None},
    names_in_transformers={  # in adapters of PEFT
        "language_model.model.": "model.language_model.",
        "language_model.lm_head": "lm_head",
        "vision_tower.vision_model.": "model.vision_tower.",
    },
    parts={"vision": "SigLIP's vision tower, so that the model takes images"},
    implied={
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
    standard_form=standard_form,
    published_form=NESTED.nested,
)
