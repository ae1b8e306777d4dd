"""Mistral Small 3.1 and 3.2, Ministral 3 and Devstral Small 2: Mistral's decoder, which takes images.

An image keeps its shape, and four patches of it are a token. The vision tower is Pixtral's (arXiv:2410.07073). It is
an optional part: loaded without parts=("vision",), the model is the text model alone, and saved as one: that of Mistral
Small as one of `zoo.models.mistral`.
Ministral 3 and Devstral Small 2 are for long texts: they have YaRN, and scale their queries up beyond the original
context.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

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
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, erf_gelu, project, swiglu
from zoo.nn.model import AbstractVisionModel, Family, Images, OneOf, Released, causal_keys
from zoo.nn.rope import RopeScaling, Rotary, YarnScaling, coordinates
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVision, AbstractVisionConfig, AbstractVisionKeys, Nested, by_parts
from zoo.vision.processors.pixtral import Pixtral
from zoo.vision.towers import pixtral


@dataclasses.dataclass(frozen=True)
class QueryScaling:
    """Scale queries up at each multiple of the original context, so that the softmax over a longer one stays sharp.

    It is Llama 4's temperature tuning (after arXiv:2501.19399), in every layer.
    """

    beta: float
    original_max_position_embeddings: int

    def __call__(self, q: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        times = jnp.maximum(coordinates(at, q.shape[1]), 0) // self.original_max_position_embeddings
        factor = 1 + self.beta * jnp.log1p(times.astype(jnp.float32))
        return q * factor.astype(q.dtype)[:, :, None, None]


@dataclasses.dataclass(frozen=True)
class VisionConfig(AbstractVisionKeys):
    """The keys of a multimodal config.json beside its `text_config`."""

    tower: pixtral.Config
    image_token_index: int = 10
    spatial_merge_size: int = 2


@dataclasses.dataclass(frozen=True)
class Config(AbstractVisionConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    max_position_embeddings: int = 131_072
    head_dim: int = 0  # 0, or null in config.json: hidden_size / num_attention_heads
    sliding_window: int | None = 4096
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False  # where older files are silent, too, which transformers takes for the contrary
    llama_4_scaling_beta: float | None = None  # of Ministral 3, in its rope_parameters: see QueryScaling
    vision: VisionConfig | None = None

    def __post_init__(self):
        object.__setattr__(self, "head_dim", self.head_dim or self.hidden_size // self.num_attention_heads)
        if self.llama_4_scaling_beta is not None and not isinstance(self.rope_scaling, YarnScaling):
            raise ValueError("llama_4_scaling_beta needs the original_max_position_embeddings of a rope of type yarn.")

    @property
    def query_scaling(self) -> QueryScaling | None:
        """How queries grow with their position; None: they do not."""
        if self.llama_4_scaling_beta is None or not isinstance(self.rope_scaling, YarnScaling):
            return None
        return QueryScaling(self.llama_4_scaling_beta, self.rope_scaling.original_max_position_embeddings)

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


# fmt: off
TOWER = pixtral.Config(1024, 4096, 24, 16, image_size=1540, patch_size=14)
SMALL: dict[str, Any] = dict(
    head_dim=128, sliding_window=None, rope_theta=1e9, rms_norm_eps=1e-5, vision=VisionConfig(TOWER)
)
YARN = YarnScaling(16.0, 16384, mscale=1.0, mscale_all_dim=1.0)
LARGE: dict[str, Any] = SMALL | dict(rope_scaling=YARN, llama_4_scaling_beta=0.1)
MIDDLE: dict[str, Any] = LARGE | dict(rope_theta=1e6)
TINY: dict[str, Any] = MIDDLE | dict(tie_word_embeddings=True)
CODE: dict[str, Any] = LARGE | dict(
    rope_theta=1e8, rope_scaling=YarnScaling(48.0, 8192, mscale=1.0, mscale_all_dim=1.0)
)
#                            vocab  hidden    mlp  layers  heads  kv  positions
MISTRAL_SMALL_24B  = Config(131072,   5120, 32768,     40,    32,  8, 131072, **SMALL)
MINISTRAL3_3B      = Config(131072,   3072,  9216,     26,    32,  8, 262144, **TINY)
MINISTRAL3_8B      = Config(131072,   4096, 14336,     34,    32,  8, 262144, **MIDDLE)
MINISTRAL3_14B     = Config(131072,   5120, 16384,     40,    32,  8, 262144, **LARGE)
DEVSTRAL_SMALL_24B = Config(131072,   5120, 32768,     40,    32,  8, 393216, **CODE)

CONFIGS = {
    "mistral-small-3.1-24b":      Released(MISTRAL_SMALL_24B,  "mistralai/Mistral-Small-3.1-24B-Instruct-2503"),
    "mistral-small-3.1-24b-base": Released(MISTRAL_SMALL_24B,  "mistralai/Mistral-Small-3.1-24B-Base-2503"),
    "mistral-small-3.2-24b":      Released(MISTRAL_SMALL_24B,  "mistralai/Mistral-Small-3.2-24B-Instruct-2506"),
    "ministral3-3b-base":         Released(MINISTRAL3_3B,      "mistralai/Ministral-3-3B-Base-2512"),
    "ministral3-3b-instruct":     Released(MINISTRAL3_3B,      "mistralai/Ministral-3-3B-Instruct-2512"),
    "ministral3-3b-reasoning":    Released(MINISTRAL3_3B,      "mistralai/Ministral-3-3B-Reasoning-2512"),
    "ministral3-8b-base":         Released(MINISTRAL3_8B,      "mistralai/Ministral-3-8B-Base-2512"),
    "ministral3-8b-instruct":     Released(MINISTRAL3_8B,      "mistralai/Ministral-3-8B-Instruct-2512"),
    "ministral3-8b-reasoning":    Released(MINISTRAL3_8B,      "mistralai/Ministral-3-8B-Reasoning-2512"),
    "ministral3-14b-base":        Released(MINISTRAL3_14B,     "mistralai/Ministral-3-14B-Base-2512"),
    "ministral3-14b-instruct":    Released(MINISTRAL3_14B,     "mistralai/Ministral-3-14B-Instruct-2512"),
    "ministral3-14b-reasoning":   Released(MINISTRAL3_14B,     "mistralai/Ministral-3-14B-Reasoning-2512"),
    "devstral-small-2-24b":       Released(DEVSTRAL_SMALL_24B, "mistralai/Devstral-Small-2-24B-Instruct-2512"),
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
    query_scaling: QueryScaling | None = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = Rotary(c.head_dim, c.rope_theta, c.rope_scaling)
        self.window = c.sliding_window
        self.query_scaling = c.query_scaling
        queries, keys = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = Linear(c.hidden_size, queries, key=q)
        self.k_proj = Linear(c.hidden_size, keys, key=k)
        self.v_proj = Linear(c.hidden_size, keys, key=v)
        self.o_proj = Linear(queries, c.hidden_size, key=o)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: KV | WindowKV | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], KV | WindowKV | None]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q, k, v = map(heads, project(x, self.q_proj, self.k_proj, self.v_proj))
        q, k = self.rotary(q, at), self.rotary(k, at)
        if self.query_scaling is not None:
            q = self.query_scaling(q, at)
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

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
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


class Projector(eqx.Module):
    """Makes a square of neighbouring patches one token of the text model: normalised, merged and projected."""

    norm: RMSNorm
    merging_layer: AbstractLinear
    linear_1: AbstractLinear
    linear_2: AbstractLinear
    merged: int = eqx.field(static=True)  # patches to a token

    def __init__(self, config: Config, vision: VisionConfig, *, key: PRNGKeyArray):
        width, (merging, first, second) = vision.tower.hidden_size, jax.random.split(key, 3)
        self.merged = vision.spatial_merge_size**2
        self.norm = RMSNorm(width, config.rms_norm_eps)
        self.merging_layer = Linear(width * self.merged, width, key=merging)
        self.linear_1 = Linear(width, config.hidden_size, key=first)
        self.linear_2 = Linear(config.hidden_size, config.hidden_size, key=second)

    def __call__(self, x: Float[Array, "pictures patches dim"]) -> Float[Array, "pictures tokens embed"]:
        pictures, patches, dim = x.shape
        squares = self.norm(x).reshape(pictures, patches // self.merged, self.merged, dim)  # neighbours lie together
        x = self.merging_layer(jnp.swapaxes(squares, 2, 3).reshape(pictures, -1, dim * self.merged))
        return self.linear_2(erf_gelu(self.linear_1(x)))


class Vision(AbstractVision):
    tower: pixtral.Tower
    projector: Projector
    merge_size: int = eqx.field(static=True)
    processor: ClassVar[type[Pixtral]] = Pixtral

    def __init__(self, config: Config, vision: VisionConfig, *, key: PRNGKeyArray):
        tower, projector = jax.random.split(key)
        self.tower = pixtral.Tower(vision.tower, key=tower)
        self.projector = Projector(config, vision, key=projector)
        self.merge_size = vision.spatial_merge_size

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], grids: Int[Array, "pictures 2"]
    ) -> Float[Array, "pictures tokens embed"]:
        return self.projector(self.tower(patches, pixtral.places(grids, patches.shape[1], self.merge_size)))


class Model(AbstractVisionModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    vision: Vision | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, layers, head, vision) = by_parts(config, parts), jax.random.split(key, 4)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, key=key), [c.sliding_window] * c.num_hidden_layers, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.vision = None if c.vision is None else Vision(c, c.vision, key=vision)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x, cache, reports = self.layers(self.embed(tokens, images), cache, at)
        return self.norm(x), cache, reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


NESTED = Nested(
    VisionConfig,
    names={"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3"},
    outside=(
        "tie_word_embeddings", "dtype", "torch_dtype", "transformers_version", "bos_token_id", "eos_token_id",
        "pad_token_id",
    ),
    projector={"multimodal_projector_bias": False, "projector_hidden_act": "gelu", "vision_feature_layer": -1},
)  # fmt: skip
# Keys of Ministral 3 that mean something else than Mistral's where they are absent, and the rope of files without one.
ABSENT: dict[str, Any] = dict(head_dim=128, max_position_embeddings=262_144, rms_norm_eps=1e-5, sliding_window=None)
MINISTRAL_ROPE: dict[str, Any] = dict(
    rope_type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16_384, beta_fast=32.0,
    beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested config.json (with a `text_config`), and take `llama_4_scaling_beta` out of its rope.

    Raises:
        ValueError: from `Nested.flat`.
    """
    text = NESTED.flat(hub)
    if text.get("model_type") != "ministral3":
        return text
    text = ABSENT | text
    if not text.get("rope_scaling") and text.get("rope_parameters") is None:
        text["rope_parameters"] = MINISTRAL_ROPE  # a rope_theta beside it does not count
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    if isinstance(rope := text[key], Mapping):
        own = ("llama_4_scaling_beta", "max_position_embeddings")  # the second has no effect there
        text |= {key: {name: value for name, value in rope.items() if name not in own}}
        text["llama_4_scaling_beta"] = rope.get("llama_4_scaling_beta")
    return text


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `standard_form`."""
    if (beta := hub.pop("llama_4_scaling_beta")) is not None:
        scaling = {key: value for key, value in hub.pop("rope_scaling").items() if value is not None}
        hub["rope_parameters"] = scaling | dict(rope_theta=hub.pop("rope_theta"), llama_4_scaling_beta=beta)
        hub |= {"architectures": ["Ministral3ForCausalLM"], "model_type": "ministral3"}
    return NESTED.nested(hub)


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Mistral Small 3, Ministral 3, Devstral Small 2",
    Config=Config,
    Model=Model,
    configs=CONFIGS,
    model_types=("mistral3", "ministral3"),
    partition_rules={
        **{f"vision.tower.{path}": spec for path, spec in pixtral.PARTITION_RULES.items()},
        "vision.projector.merging_layer": P("tensor", "fsdp"),
        "vision.projector.linear_1": P("tensor", "fsdp"),
        "vision.projector.linear_2": P("fsdp", "tensor"),
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
        "vision.tower.layers.*": "vision_tower.transformer.layers.{}",
        "vision.tower.*": "vision_tower.{}",
        "vision.projector.merging_layer.*": "multi_modal_projector.patch_merger.merging_layer.{}",
        "vision.projector.*": "multi_modal_projector.{}",
        "lm_head.*": "lm_head.{}",
        "*": "model.{}",
    },
    # In files with a vision tower, the text model's names begin otherwise.
    beginnings={"vision": {"model.": "language_model.model.", "lm_head.": "language_model.lm_head."}},
    names_in_transformers={  # in adapters of PEFT
        "language_model.model.": "model.language_model.",
        "language_model.lm_head": "lm_head",
        "vision_tower.": "model.vision_tower.",
        "multi_modal_projector.": "model.multi_modal_projector.",
    },
    # Other beginnings in files with a vision tower -> those that `checkpoint_names` gives: of transformers 4.52 and 5.
    aliases={
        "model.language_model.": "model.",
        "model.vision_tower.": "vision_tower.",
        "model.multi_modal_projector.": "multi_modal_projector.",
    },
    # A copy of another tensor, to which it must be equal; and what only the part "vision" needs (None).
    redundant={"lm_head.weight": "model.embed_tokens.weight", "vision_tower.*": None, "multi_modal_projector.*": None},
    parts={"vision": "Pixtral's vision tower, so that the model takes images"},
    implied={
        "architectures": OneOf([["MistralForCausalLM"], ["Ministral3ForCausalLM"]]),
        "model_type": OneOf(["mistral", "ministral3"]),
        "hidden_act": OneOf(["silu", "swish"]),
    },
    standard_form=standard_form,
    published_form=published_form,
)
