"""Gemma 4's vision towers: an image of any shape becomes up to 280 tokens, one for each square of 48 x 48 pixels.

The tower of E2B, E4B, 26B-A4B and 31B is a transformer over the patches of an image, which all see each other. Learned
positions, and rotary ones of two axes, tell it where a patch is. 12B has no transformer: it projects the pixels of a
square (`Embedder`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import lookup
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import AbstractLinear, Float32RMSNorm, LayerNorm, Linear, gelu_times, rms_normalized
from zoo.nn.rope import AbstractRotary, rotated
from zoo.nn.stack import Stack
from zoo.vision.model import AbstractTowerConfig, AbstractVision, AbstractVisionKeys, Nested
from zoo.vision.processors.gemma4 import Gemma4


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary positions, of the column in one half of a head and of the row in the other."""

    rope_theta: float = 100.0
    rope_type: Literal["default", "axial"] = "default"  # the second, as transformers 5 writes it, means the first

    def __post_init__(self):
        object.__setattr__(self, "rope_type", "default")


@dataclasses.dataclass(frozen=True)
class Config(AbstractTowerConfig):
    """The `vision_config` of a config.json, of a tower."""

    implied: ClassVar[dict[str, Any]] = dict(
        model_type="gemma4_vision", hidden_activation="gelu_pytorch_tanh", attention_bias=False
    )
    patches: ClassVar[None] = None

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 16
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    patch_size: int = 16
    pooling_kernel_size: int = 3  # patches along the side of a square
    position_embedding_size: int = 10_240  # most rows, and most columns
    rope_parameters: Rope = Rope()
    rms_norm_eps: float = 1e-6
    use_clipped_linears: bool = False
    standardize: bool = False
    max_position_embeddings: int = 131_072  # nothing depends on it, nor on what follows
    global_head_dim: int | None = None
    default_output_length: int = 280

    def __post_init__(self):
        if self.num_key_value_heads != self.num_attention_heads or self.head_dim % 4:
            raise ValueError(
                f"vision_config has num_key_value_heads={self.num_key_value_heads}, and needs num_attention_heads="
                f"{self.num_attention_heads} of them, with a head_dim that is a multiple of 4 ({self.head_dim})."
            )

    @property
    def pixels(self) -> int:
        return 3 * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class EmbedderConfig(AbstractTowerConfig):
    """The `vision_config` of a config.json, without a tower."""

    implied: ClassVar[dict[str, Any]] = dict(model_type="gemma4_unified_vision")
    patches: ClassVar[None] = None

    mm_embed_dim: int = 3840
    mm_posemb_size: int = 1120  # most rows, and most columns
    output_proj_dims: int = 3840  # mm_embed_dim
    patch_size: int = 16
    pooling_kernel_size: int = 3  # patches along the side of a square
    model_patch_size: int = 0  # the pixels along it; 0: patch_size * pooling_kernel_size, the only value there is
    rms_norm_eps: float = 1e-6
    num_soft_tokens: int = 280  # nothing depends on it

    def __post_init__(self):
        side = self.patch_size * self.merge_size
        object.__setattr__(self, "model_patch_size", self.model_patch_size or side)
        if self.output_proj_dims != self.mm_embed_dim or self.model_patch_size != side:
            raise ValueError(
                f"vision_config has output_proj_dims={self.output_proj_dims} and model_patch_size="
                f"{self.model_patch_size}, and needs mm_embed_dim={self.mm_embed_dim} and patch_size={self.patch_size} "
                f"times pooling_kernel_size={self.merge_size}."
            )

    @property
    def merge_size(self) -> int:
        return self.pooling_kernel_size

    @property
    def pixels(self) -> int:
        return 3 * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class _VisionKeys(AbstractVisionKeys):
    """The keys of a multimodal config.json beside its `text_config`."""

    boi_token_id: int = 255_999
    image_token_id: int = 258_880
    eoi_token_id: int = 258_882
    video_token_id: int = 258_884


@dataclasses.dataclass(frozen=True)
class VisionConfig(_VisionKeys):
    """These keys of a model with a tower."""

    tower: Config
    vision_soft_tokens_per_image: int = 280  # nothing depends on it


@dataclasses.dataclass(frozen=True)
class UnifiedVisionConfig(_VisionKeys):
    """These keys of 12B."""

    tower: EmbedderConfig


class ClippedLinear(eqx.Module):
    """A linear map whose inputs and outputs are clipped to bounds from the checkpoint, which are not trained."""

    linear: AbstractLinear
    input_min: Float[Array, ""] | None  # None: nothing is clipped, by any of the four
    input_max: Float[Array, ""] | None
    output_min: Float[Array, ""] | None
    output_max: Float[Array, ""] | None

    def __init__(self, in_features: int, out_features: int, clips: bool, *, key: PRNGKeyArray):
        self.linear = Linear(in_features, out_features, key=key)
        bound = lambda value: jnp.asarray(value, jnp.float32) if clips else None
        self.input_min, self.input_max = bound(-1e4), bound(1e4)
        self.output_min, self.output_max = bound(-1e4), bound(1e4)

    def __call__(self, x: Float[Array, "*batch in"]) -> Float[Array, "*batch out"]:
        y = self.linear(clipped(x, self.input_min, self.input_max))
        return clipped(y, self.output_min, self.output_max)


def clipped(
    x: Float[Array, "*batch dim"], least: Float[Array, ""] | None, most: Float[Array, ""] | None
) -> Float[Array, "*batch dim"]:
    """Clips numbers to bounds, if there are any."""
    if least is None or most is None:
        return x
    least, most = (jnp.broadcast_to(jax.lax.stop_gradient(bound), x.shape) for bound in (least, most))
    return jnp.minimum(jnp.maximum(x, least), most)


class PatchEmbedder(eqx.Module):
    """A linear map of a patch's pixels, plus learned embeddings of its column and of its row."""

    input_proj: AbstractLinear
    position_embedding_table: Float[Array, "axes places embed"]  # of columns, and of rows

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (proj, table) = config, jax.random.split(key)
        self.input_proj = Linear(c.pixels, c.hidden_size, key=proj)
        shape = (2, c.position_embedding_size, c.hidden_size)
        self.position_embedding_table = 0.02 * jax.random.truncated_normal(table, -3, 3, shape)

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], at: Tokens
    ) -> Float[Array, "pictures patches embed"]:
        x = self.input_proj((2 * (patches - 0.5)).astype(self.position_embedding_table.dtype))
        return x + places_of(at, self.position_embedding_table[0], self.position_embedding_table[1])


def places_of(
    at: Tokens, columns: Float[Array, "places embed"], rows: Float[Array, "places embed"]
) -> Float[Array, "pictures patches embed"]:
    """Looks up the embeddings of each patch's column and row, and adds them."""
    assert at.rotary is not None, "patches have rows and columns"
    row, column = (jnp.minimum(at.rotary[..., axis], len(rows) - 1) for axis in (0, 1))  # padding may be beyond
    return lookup(columns, column) + lookup(rows, row)


class AxialRotary(AbstractRotary):
    """Rotates the first half of a head by the column of its patch, and the second half by the row.

    Each half is rotated as `Rotary` does. `dim` is its size. Cos and sin are cast to the dtype of `x`.
    """

    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        assert at.rotary is not None, "patches have rows and columns"
        halves = zip(jnp.split(x, 2, axis=-1), (at.rotary[..., 1], at.rotary[..., 0]), strict=True)
        return jnp.concatenate([rotated(half, *self.turns(place)) for half, place in halves], axis=-1)


class Attention(eqx.Module):
    q_proj: ClippedLinear
    k_proj: ClippedLinear
    v_proj: ClippedLinear
    o_proj: ClippedLinear
    q_norm: Float32RMSNorm
    k_norm: Float32RMSNorm
    head_dim: int = eqx.field(static=True)
    rotary: AxialRotary = eqx.field(static=True)
    eps: float = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (q, k, v, o) = config, jax.random.split(key, 4)
        width, clips = c.num_attention_heads * c.head_dim, c.use_clipped_linears
        self.q_proj, self.k_proj, self.v_proj = (ClippedLinear(c.hidden_size, width, clips, key=n) for n in (q, k, v))
        self.o_proj = ClippedLinear(width, c.hidden_size, clips, key=o)
        self.q_norm = Float32RMSNorm(c.head_dim, c.rms_norm_eps)
        self.k_norm = Float32RMSNorm(c.head_dim, c.rms_norm_eps)
        self.head_dim = c.head_dim
        self.rotary = AxialRotary(c.head_dim // 2, c.rope_parameters.rope_theta)
        self.eps = c.rms_norm_eps

    def __call__(self, x: Float[Array, "pictures patches embed"], at: Tokens) -> Float[Array, "pictures patches embed"]:
        heads = lambda y: y.reshape(*y.shape[:2], -1, self.head_dim)
        q = self.rotary(self.q_norm(heads(self.q_proj(x))), at)
        k = self.rotary(self.k_norm(heads(self.k_proj(x))), at)
        v = rms_normalized(heads(self.v_proj(x)), self.eps)
        y = kernels.attention(q, k, v, at, scale=1.0, mask=kernels.Full())
        return self.o_proj(y.reshape(*y.shape[:2], -1))


class MLP(eqx.Module):
    gate_proj: ClippedLinear
    up_proj: ClippedLinear
    down_proj: ClippedLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = ClippedLinear(c.hidden_size, c.intermediate_size, c.use_clipped_linears, key=gate)
        self.up_proj = ClippedLinear(c.hidden_size, c.intermediate_size, c.use_clipped_linears, key=up)
        self.down_proj = ClippedLinear(c.intermediate_size, c.hidden_size, c.use_clipped_linears, key=down)

    def __call__(self, x: Float[Array, "pictures patches embed"]) -> Float[Array, "pictures patches embed"]:
        return self.down_proj(gelu_times(self.gate_proj(x), self.up_proj(x)))


class Block(AbstractBlock):
    input_layernorm: Float32RMSNorm
    self_attn: Attention
    post_attention_layernorm: Float32RMSNorm
    pre_feedforward_layernorm: Float32RMSNorm
    mlp: MLP
    post_feedforward_layernorm: Float32RMSNorm

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.pre_feedforward_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config, key=mlp)
        self.post_feedforward_layernorm = Float32RMSNorm(config.hidden_size, config.rms_norm_eps)

    def __call__(
        self, x: Float[Array, "pictures patches embed"], cache: None, at: Tokens
    ) -> tuple[Float[Array, "pictures patches embed"], None, None]:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), at))
        return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x))), None, None


class Tower(eqx.Module):
    """`features = tower(patches, at)`."""

    patch_embedder: PatchEmbedder
    layers: Stack
    std_bias: Float[Array, " embed"] | None  # None: features are not standardized
    std_scale: Float[Array, " embed"] | None
    merge_size: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (patch, layers) = config, jax.random.split(key)
        self.patch_embedder = PatchEmbedder(c, key=patch)
        self.layers = Stack(lambda _, *, key: Block(c, key=key), [None] * c.num_hidden_layers, key=layers)
        self.std_bias = jnp.zeros(c.hidden_size) if c.standardize else None
        self.std_scale = jnp.ones(c.hidden_size) if c.standardize else None
        self.merge_size = c.pooling_kernel_size

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], at: Tokens
    ) -> Float[Array, "pictures squares embed"]:
        """Features of each square of patches, whose patches lie together, and are where `at` says (`places`)."""
        x, _, _ = self.layers(self.patch_embedder(patches, at), None, at)
        pictures, patches_each, dim = x.shape
        squares = x.reshape(pictures, patches_each // self.merge_size**2, -1, dim).astype(jnp.float32)
        y = jnp.mean(squares, axis=2).astype(x.dtype).astype(jnp.float32) * dim**0.5
        if self.std_bias is not None and self.std_scale is not None:  # not trained
            bias, scale = (jax.lax.stop_gradient(a).astype(jnp.float32) for a in (self.std_bias, self.std_scale))
            y = (y - jnp.broadcast_to(bias, y.shape)) * jnp.broadcast_to(scale, y.shape)
        return y.astype(x.dtype)


class Embedder(eqx.Module):
    """`features = embedder(patches, at)`: a projection of a square's pixels, with learned embeddings of its place."""

    patch_ln1: LayerNorm
    patch_dense: AbstractLinear
    patch_ln2: LayerNorm
    pos_embedding: Float[Array, "places axes embed"]  # of columns, and of rows
    pos_norm: LayerNorm
    merge_size: int = eqx.field(static=True)

    def __init__(self, config: EmbedderConfig, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (dense, table) = config, jax.random.split(key)
        self.patch_ln1 = LayerNorm(c.pixels * c.merge_size**2, 1e-5)
        self.patch_dense = Linear(c.pixels * c.merge_size**2, c.mm_embed_dim, bias=True, key=dense)
        self.patch_ln2 = LayerNorm(c.mm_embed_dim, 1e-5)
        shape = (c.mm_posemb_size, 2, c.mm_embed_dim)
        self.pos_embedding = 0.02 * jax.random.truncated_normal(table, -3, 3, shape)
        self.pos_norm = LayerNorm(c.mm_embed_dim, 1e-5)
        self.merge_size = c.merge_size

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], at: Tokens
    ) -> Float[Array, "pictures squares embed"]:
        """Features of each square of patches, whose patches lie together, and are where `at` says (`places`)."""
        assert at.rotary is not None, "patches have rows and columns"
        merged = self.merge_size**2
        at = Tokens(rotary=at.rotary[:, ::merged] // self.merge_size)  # where the squares are
        x = self.patch_ln1(merged_patches(patches, self.merge_size).astype(self.pos_embedding.dtype))
        x = self.patch_ln2(self.patch_dense(x))
        return self.pos_norm(x + places_of(at, self.pos_embedding[:, 0], self.pos_embedding[:, 1]))


def merged_patches(
    patches: Float[Array, "pictures patches pixels"], merge_size: int
) -> Float[Array, "pictures squares more"]:
    """Joins the pixels of each square, row by row: (height, width, channel), as those of a patch are."""
    pictures, count, pixels = patches.shape
    side = int((pixels // 3) ** 0.5)
    x = patches.reshape(pictures, count // merge_size**2, merge_size, merge_size, side, side, 3)
    return x.swapaxes(3, 4).reshape(pictures, count // merge_size**2, -1)


def places(grids: Int[Array, "pictures 2"], patches: int, merge_size: int) -> Tokens:
    """The row and column of each patch, of pictures whose squares lie row by row, and so do the patches of each.

    Patches beyond rows * columns are padding, which is a segment of its own, so that no patch sees it.
    """
    index = jnp.arange(patches)[None]
    (square, within), across = jnp.divmod(index, merge_size**2), jnp.maximum(grids[:, 1:] // merge_size, 1)
    rows = square // across * merge_size + within // merge_size
    columns = square % across * merge_size + within % merge_size
    inside = index < jnp.prod(grids, axis=1, keepdims=True)
    return Tokens(segments=inside.astype(jnp.int32), rotary=jnp.stack([rows, columns], axis=-1))


class Vision(AbstractVision):
    """A tower, whose features are normalised and projected to the width of the text model."""

    tower: Tower | Embedder
    projection: AbstractLinear
    eps: float = eqx.field(static=True)
    processor: ClassVar[type[Gemma4]] = Gemma4

    def __init__(self, config: VisionConfig | UnifiedVisionConfig, hidden_size: int, *, key: PRNGKeyArray):
        tower, projection = jax.random.split(key)
        if isinstance(config, UnifiedVisionConfig):
            self.tower, width = Embedder(config.tower, key=tower), config.tower.mm_embed_dim
        else:
            self.tower, width = Tower(config.tower, key=tower), config.tower.hidden_size
        self.projection = Linear(width, hidden_size, key=projection)
        self.eps = config.tower.rms_norm_eps

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], grids: Int[Array, "pictures 2"]
    ) -> Float[Array, "pictures tokens embed"]:
        x = self.tower(patches, places(grids, patches.shape[1], self.tower.merge_size))
        return self.projection(rms_normalized(x, self.eps))


PARTITION_RULES = {  # under "vision"
    "projection": P("tensor", "fsdp"),
    "tower.patch_embedder.input_proj": P("tensor", "fsdp"),
    "tower.patch_embedder.position_embedding_table": P(),
    "tower.layers.*.[qkv]_proj.linear": P("tensor", "fsdp"),
    "tower.layers.*.o_proj.linear": P("fsdp", "tensor"),
    "tower.layers.*.gate_proj.linear": P("tensor", "fsdp"),
    "tower.layers.*.up_proj.linear": P("tensor", "fsdp"),
    "tower.layers.*.down_proj.linear": P("fsdp", "tensor"),
    "tower.layers.*put_m*": P(),
    "tower.std_*": P(),
    "tower.patch_dense": P("tensor", "fsdp"),
    "tower.patch_ln*": P(),
    "tower.pos_*": P(),
    "tower.*norm.weight": P(),
}

# Names of tensors in checkpoints: of the tower, and of the text model beside it.
CHECKPOINT_NAMES = {
    "vision.tower.patch_embedder.*": "vision_tower.patch_embedder.{}",
    "vision.tower.layers.*": "vision_tower.encoder.layers.{}",
    "vision.tower.std_*": "vision_tower.std_{}",
    "vision.tower.*": "vision_embedder.{}",
    "vision.projection.*": "embed_vision.embedding_projection.{}",
}
PARTS = ("vision_tower.", "vision_embedder.", "embed_vision.")
BEGINNINGS = {"vision": {"model.": "model.language_model."} | {part: f"model.{part}" for part in PARTS}}
# Tensors that the text model does not need: of towers for images, and for sound.
REDUNDANT = {f"{part}*": None for part in (*PARTS, "model.audio_tower.", "model.embed_audio.")}

# Keys of the text model that are written beside `text_config`.
OUTSIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version", "eos_token_id")
NESTED = {
    keys: Nested(keys, names={"architectures": [architecture], "model_type": kind}, outside=OUTSIDE)
    for keys, kind, architecture in (
        (VisionConfig, "gemma4", "Gemma4ForConditionalGeneration"),
        (UnifiedVisionConfig, "gemma4_unified", "Gemma4UnifiedForConditionalGeneration"),
    )
}
SOUND = ("audio_config", "audio_token_id", "boa_token_id", "eoa_token_id", "eoa_token_index")  # is not implemented


def flat(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Brings a config.json of any form into the flat one, of the text model's keys with `vision` beside them.

    Raises:
        ValueError: from `Nested.flat` and `_without_per_layer_config`.
    """
    if "text_config" not in hub:
        return _without_per_layer_config(hub)
    # Only the outer tie_word_embeddings counts, and without it embeddings are tied.
    own = {"tie_word_embeddings": True} | {key: value for key, value in hub.items() if key not in SOUND}
    keys = UnifiedVisionConfig if hub.get("model_type") == "gemma4_unified" else VisionConfig
    return _without_per_layer_config(NESTED[keys].flat(own))


def usual_kinds(layers: int) -> tuple[Literal["sliding_attention", "full_attention"], ...]:
    """Returns the kinds of layers where config.json has no layer_types: every sixth is full, and the last."""
    return tuple("full_attention" if n % 6 == 5 or n == layers - 1 else "sliding_attention" for n in range(layers))


def _without_per_layer_config(text: Mapping[str, Any]) -> dict[str, Any]:
    """Brings `per_layer_config`, as transformers 5 writes it, back into the keys of full attention of the releases.

    It has a layer's number -> head_dim, and perhaps num_key_value_heads.

    Raises:
        ValueError: if it says more, or not the same of all layers with full attention.
    """
    text = dict(text)
    if (stated := text.pop("per_layer_config", None)) is None:
        return text
    layers = text.get("num_hidden_layers")
    kinds = text.get("layer_types") or usual_kinds(layers if isinstance(layers, int) else 0)
    full = {str(n) for n, kind in enumerate(kinds) if kind == "full_attention"}
    match [dict(sizes) for sizes in stated.values()]:
        case [{"head_dim": head, **others}, *_] as each if (
            stated.keys() == full and others.keys() <= {"num_key_value_heads"} and all(one == each[0] for one in each)
        ):
            heads = others.get("num_key_value_heads")
            return text | dict(global_head_dim=head, num_global_key_value_heads=heads)
    raise ValueError(
        f"config.json says per_layer_config={stated!r:.200}; gemma4 needs a head_dim, and perhaps num_key_value_heads, "
        "of all layers with full attention, the same of all, and of no others."
    )


def nested(hub: dict[str, Any]) -> dict[str, Any]:
    """Inverts `flat` for a model with a tower; a text model's keys stay as they are."""
    unified = (hub["vision"] or {}).keys() == {field.name for field in dataclasses.fields(UnifiedVisionConfig)}
    return NESTED[UnifiedVisionConfig if unified else VisionConfig].nested(hub)
