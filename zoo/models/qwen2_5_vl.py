"""Qwen2.5-VL (arXiv:2502.13923): Qwen2.5's decoder, which sees images.

Features of images are turned by three rotary coordinates: where the image begins, row and column. Each turns a section
of a head's frequencies. Images keep their shape, and take as many tokens as it has. Without its tower, the part
"vision", it is the text model, and saved as one. Videos are not implemented.

Files come in two forms. The released ones have the text model's keys beside `vision_config`; transformers writes them
into `text_config`, as `zoo.save` does.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import equinox as eqx
import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractDecoderBlock
from zoo.nn.cache import KV, WindowKV, init_kv
from zoo.nn.clip import AbstractGroupedAttention
from zoo.nn.fields import fill_layers, part_config, text_config
from zoo.nn.layers import AbstractLinear, Embedding, Linear, RMSNorm, project, swiglu
from zoo.nn.model import AbstractVisionModel, Family, Images, OneOf, causal_keys
from zoo.nn.rope import AbstractRotary, RopeScaling, coordinates, rotated
from zoo.nn.stack import Caches, Reports, Stack
from zoo.vision.model import AbstractVisionConfig, AbstractVisionKeys, by_parts
from zoo.vision.towers import qwen2_5_vl
from zoo.vision.towers.qwen3_vl import with_coordinates


@dataclasses.dataclass(frozen=True)
class VisionConfig(AbstractVisionKeys):
    """The keys of a config.json about images; `tower` is its `vision_config`."""

    tower: qwen2_5_vl.Config = qwen2_5_vl.Config()
    image_token_id: int = 151_655
    video_token_id: int = 151_656
    vision_start_token_id: int = 151_652
    vision_end_token_id: int = 151_653
    vision_token_id: int = 151_654  # nothing reads it


@dataclasses.dataclass(frozen=True)
class Config(AbstractVisionConfig):
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = 8
    max_position_embeddings: int = 32_768
    max_window_layers: int = 80
    rope_theta: float = 1_000_000.0
    rope_scaling: RopeScaling | None = None
    mrope_section: tuple[int, ...] = (16, 24, 24)  # how many of the frequencies turn by each coordinate
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    use_sliding_window: bool = False
    sliding_window: int | None = 4096  # set to None unless use_sliding_window
    layer_types: tuple[Literal["sliding_attention", "full_attention"], ...] = ()  # (): by max_window_layers
    vision: VisionConfig | None = None

    def __post_init__(self):
        # Normalise as transformers does, so that equivalent configs compare equal.
        window = self.sliding_window if self.use_sliding_window else None
        slides = lambda n: window is not None and n >= self.max_window_layers
        object.__setattr__(self, "sliding_window", window)
        fill_layers(self, "layer_types", lambda n: "sliding_attention" if slides(n) else "full_attention")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size={self.hidden_size} is no multiple of num_attention_heads={self.num_attention_heads}."
            )
        if self.vision is not None and (width := self.vision.tower.out_hidden_size) != self.hidden_size:
            raise ValueError(
                f"vision_config has out_hidden_size={width}, but the text model's hidden_size is {self.hidden_size}."
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    def window(self, layer: int) -> int | None:
        """Returns the most positions that a token attends to, its own included. None: all up to its own."""
        return self.sliding_window if self.layer_types[layer] == "sliding_attention" else None

    def attention_products(self, layer: int, seq: int) -> float:
        return self.num_attention_heads * 2 * self.head_dim * causal_keys(seq, self.window(layer))  # 2: scores, values


@dataclasses.dataclass(frozen=True)
class SectionedRotary(AbstractRotary):
    """`Rotary` where tokens may have coordinates of several axes, each of which turns a section of the frequencies.

    Qwen2-VL (arXiv:2409.12191) began with it. In Qwen3-VL the axes take turns instead (`MultiAxisRotary`).
    """

    sections: tuple[int, ...] = ()

    def __post_init__(self):
        super().__post_init__()
        if min(self.sections, default=0) < 0 or 2 * sum(self.sections) != self.dim:
            raise ValueError(
                f"mrope_section={list(self.sections)} does not add up to half the features of a head, of which there "
                f"are {self.dim}."
            )

    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        if at.rotary is not None and at.rotary.ndim == 3:
            axes = np.repeat(np.arange(len(self.sections)) % 3, self.sections)
            return rotated(x, *self.turns(at.rotary[..., axes]))
        return rotated(x, *self.turns(coordinates(at, x.shape[1])))


class Attention(AbstractGroupedAttention):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    head_dim: int = eqx.field(static=True)
    rotary: SectionedRotary = eqx.field(static=True)
    window: int | None = eqx.field(static=True)

    def __init__(self, config: Config, layer: int, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        self.head_dim = c.head_dim
        self.rotary = SectionedRotary(c.head_dim, c.rope_theta, c.rope_scaling, c.mrope_section)
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


class Model(AbstractVisionModel):
    embed_tokens: Embedding
    layers: Stack
    norm: RMSNorm
    lm_head: AbstractLinear | None  # None: tied to embed_tokens
    vision: qwen2_5_vl.Tower | None
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray, parts: Sequence[str] = ()):
        """Initialise random weights, in float32, with these of `FAMILY.parts`; (): the text model alone."""
        c, (embed, layers, head, tower) = by_parts(config, parts), jax.random.split(key, 4)
        self.config = c
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, key=embed)
        self.layers = Stack(lambda n, *, key: Block(c, n, key=key), c.layer_types, key=layers)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = None if c.tie_word_embeddings else Linear(c.hidden_size, c.vocab_size, key=head)
        self.vision = None if c.vision is None else qwen2_5_vl.Tower(c.vision.tower, key=tower)

    def forward(
        self, tokens: Int[Array, "batch seq"], cache: Caches | None, at: Tokens, images: Images | None = None
    ) -> tuple[Float[Array, "batch seq embed"], Caches | None, Reports]:
        x = self.embed(tokens, images)
        merge = None if self.vision is None else self.vision.config.spatial_merge_size
        at, cache, delta = with_coordinates(at, x, images, merge, cache)
        x, cache, reports = self.layers(x, cache, at)
        return self.norm(x), None if cache is None else (*cache, *delta), reports

    def unembed(self, x: Float[Array, "*batch embed"]) -> Float[Array, "*batch vocab"]:
        return self.embed_tokens.attend(x) if self.lm_head is None else self.lm_head(x)


IDS = tuple(field.name for field in dataclasses.fields(VisionConfig) if field.name != "tower")
BESIDE = {"architectures", "model_type", "tie_word_embeddings", "vision_config", *IDS}  # read by `standard_form`
# Keys of the text model that are written beside text_config.
OUTSIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")
ROPES = {"rope_parameters", "rope_scaling", "rope_theta"}


def standard_form(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Brings a config.json of any form into the flat one, of the text model's keys with `vision` beside them.

    Raises:
        ValueError: for what `vision_config` says and the tower does not know, or what is beside text_config.
    """
    text: dict[str, Any] = dict(hub)
    if hub.get("model_type") == "qwen2_5_vl":
        inner: Mapping[str, Any] = hub.get("text_config") or {}
        # Keys in both places: transformers reads those of text_config.
        repeated = {*inner, *(ROPES if ROPES & inner.keys() else ())} - {"model_type", "tie_word_embeddings"}
        outer = {key: value for key, value in hub.items() if key not in repeated}
        text = text_config(outer, BESIDE) if inner else {key: hub[key] for key in hub if key not in BESIDE}
        text = {key: value for key, value in text.items() if key not in IDS} | {"model_type": "qwen2_5_vl_text"}
        text["tie_word_embeddings"] = hub.get("tie_word_embeddings") or inner.get("tie_word_embeddings") or False
        if (stated := hub.get("vision_config")) is not None:
            implied = qwen2_5_vl.Config.implied | {"model_type": OneOf(["qwen2_5_vl", "qwen2_5_vl_vision"])}
            tower = part_config(qwen2_5_vl.Config, stated, implied, "vision_config")
            text["vision"] = part_config(VisionConfig, {key: hub.get(key) for key in IDS} | {"tower": tower}, {}, "It")
    if "mrope_section" in text:
        raise ValueError("mrope_section stands in rope_scaling, and not beside it.")
    key = "rope_scaling" if text.get("rope_scaling") else "rope_parameters"
    if rope := dict(text.get(key) or {}):
        if (sections := rope.pop("mrope_section", None)) is not None:
            text["mrope_section"] = sections
        if rope.get("rope_type", rope.get("type")) == "mrope":
            rope["rope_type"] = "default"
        text[key] = rope
    return text


def published_form(hub: dict[str, Any]) -> dict[str, Any]:
    """Inverts `standard_form`, into the form with a `text_config` for a model with a tower."""
    vision, sections = hub.pop("vision"), hub.pop("mrope_section")
    hub["rope_scaling"] = {"rope_type": "default"} | (hub["rope_scaling"] or {}) | {"mrope_section": sections}
    if vision is None:
        return hub
    outer = {key: hub.pop(key) for key in OUTSIDE if key in hub}
    hub.pop("architectures")
    tower = {"model_type": "qwen2_5_vl", "hidden_act": "silu"} | vision.pop("tower")
    names = {"architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl"}
    return names | outer | vision | {"text_config": hub, "vision_config": tower}


FAMILY = Family(  # zoo/nn/model.py explains the fields
    title="Qwen2.5-VL",
    Config=Config,
    Model=Model,
    configs={},  # the released models are read from their repositories
    model_types=("qwen2_5_vl", "qwen2_5_vl_text"),
    partition_rules={
        **{f"vision.{path}": spec for path, spec in qwen2_5_vl.PARTITION_RULES.items()},
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
        "vision.patch_embed.*": "visual.patch_embed.proj.{}",
        "vision.merger.fc1.*": "visual.merger.mlp.0.{}",
        "vision.merger.fc2.*": "visual.merger.mlp.2.{}",
        "vision.*": "visual.{}",
        "lm_head.*": "lm_head.{}",
        "*": "model.{}",
    },
    aliases={"model.visual.": "visual.", "model.language_model.": "model."},  # as newer files of transformers have them
    redundant={"lm_head.weight": "model.embed_tokens.weight", "visual.*": None},
    parts={"vision": "its vision tower, so that the model takes images"},
    implied={
        "architectures": ["Qwen2_5_VLTextModel"],
        "model_type": "qwen2_5_vl_text",
        "hidden_act": OneOf(["silu", "swish"]),
    },
    standard_form=standard_form,
    published_form=published_form,
)
