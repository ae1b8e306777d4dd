"""Qwen3-VL's vision tower (arXiv:2511.21631), and Qwen3.5's: a picture of any shape becomes a token for each 32 x 32
pixels.

It is a transformer over patches. A patch has two frames, which of an image are the same one. Its place is told twice:
by learned vectors of a square of places, interpolated to the picture's shape, and by rotary positions along rows and
columns. Four neighbouring patches become one feature of the text model. DeepStack (arXiv:2406.04334) makes further
features in the same way of what some layers in between give, which the text model adds after its first layers.

In the text a feature has three rotary coordinates (`with_coordinates`): where its picture begins, its row and its
column. Both families nest their config.json alike (`flat`, `nested`).
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens, counted
from kernels.mesh import BATCH, split_lookup
from kernels.sums import spread
from kernels.tokens import first_of_document
from zoo.nn.block import AbstractBlock
from zoo.nn.cache import NEVER, PagesOf, all_of_rows, positions_of, split_over
from zoo.nn.fields import part_config, text_config
from zoo.nn.layers import AbstractLinear, Embedding, LayerNorm, Linear, erf_gelu, gelu
from zoo.nn.model import AbstractRowCache, Images, OneOf
from zoo.nn.rope import AbstractRotary, rotated
from zoo.nn.stack import Caches, Stack
from zoo.vision.model import AbstractTowerConfig, AbstractVision, AbstractVisionKeys
from zoo.vision.processors.qwen3_vl import Qwen3VL, Qwen3VLVideo


IMPLIED = {"hidden_act": "gelu_pytorch_tanh", "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0}}


@dataclasses.dataclass(frozen=True)
class Config(AbstractTowerConfig):
    """The `vision_config` of a config.json."""

    implied: ClassVar[dict[str, Any]] = IMPLIED  # and the family's model_type
    patches: ClassVar[None] = None

    hidden_size: int = 1152
    intermediate_size: int = 4304
    depth: int = 27
    num_heads: int = 16
    out_hidden_size: int = 3584  # the text model's width
    deepstack_visual_indexes: tuple[int, ...] = (8, 16, 24)
    patch_size: int = 16
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    num_position_embeddings: int = 2304

    def __post_init__(self):
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"vision_config has hidden_size={self.hidden_size}, which is no multiple of four times "
                f"num_heads={self.num_heads}."
            )
        if math.isqrt(self.num_position_embeddings) ** 2 != self.num_position_embeddings:
            raise ValueError(f"vision_config has num_position_embeddings={self.num_position_embeddings}, no square.")
        deep = self.deepstack_visual_indexes
        if list(deep) != sorted(set(deep)) or not all(0 <= n < self.depth for n in deep):
            raise ValueError(
                f"vision_config has deepstack_visual_indexes={list(deep)}, which do not rise from 0 to "
                f"depth={self.depth}."
            )

    @property
    def pixels(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2


@dataclasses.dataclass(frozen=True)
class VisionConfig(AbstractVisionKeys):
    """The keys of a config.json about images; `tower` is its `vision_config`."""

    tower: Config
    mrope_section: tuple[int, ...]  # how many of the frequencies turn by each coordinate
    image_token_id: int
    video_token_id: int
    vision_start_token_id: int
    vision_end_token_id: int

    def check(self, hidden_size: int) -> None:
        """Checks that the tower's features have the text model's `hidden_size`.

        Raises:
            ValueError: if they have another.
        """
        if (width := self.tower.out_hidden_size) != hidden_size:
            raise ValueError(
                f"vision_config has out_hidden_size={width}, but the text model's hidden_size is {hidden_size}."
            )


EPS = 1e-6  # of all norms


class PatchEmbedding(eqx.Module):
    """A linear map of a patch's pixels, stored as the convolution over two frames that it is."""

    weight: Float[Array, "out channels frames height width"]
    bias: Float[Array, " out"]

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c = config
        shape = (c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
        self.weight = 0.02 * jax.random.truncated_normal(key, -3, 3, shape)
        self.bias = jnp.zeros(c.hidden_size)

    def __call__(self, patches: Float[Array, "pictures patches pixels"]) -> Float[Array, "pictures patches embed"]:
        y = jnp.einsum("...i,oi->...o", patches.astype(self.weight.dtype), self.weight.reshape(len(self.weight), -1))
        return y + spread(self.bias, y.shape)


class AxialRotary(AbstractRotary):
    """Rotates the first half of the pairs of a head's features by a patch's row, the others by its column, in float32.

    `dim` is half the size of a head.
    """

    def __call__(
        self, x: Float[Array, "pictures patches heads dim"], at: Tokens
    ) -> Float[Array, "pictures patches heads dim"]:
        assert at.rotary is not None
        rows, columns = (self.turns(at.rotary[..., axis]) for axis in (0, 1))
        cos, sin = (jnp.concatenate(both, axis=-1) for both in zip(rows, columns, strict=True))
        return rotated(x.astype(jnp.float32), cos, sin).astype(x.dtype)


class Attention(eqx.Module):
    qkv: AbstractLinear  # rows: all queries', all keys', all values'
    proj: AbstractLinear
    num_heads: int = eqx.field(static=True)
    rotary: AxialRotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        width, (qkv, proj) = config.hidden_size, jax.random.split(key)
        self.qkv = Linear(width, 3 * width, bias=True, key=qkv)
        self.proj = Linear(width, width, bias=True, key=proj)
        self.num_heads = config.num_heads
        self.rotary = AxialRotary(width // config.num_heads // 2, 10_000.0)

    def __call__(self, x: Float[Array, "pictures patches embed"], at: Tokens) -> Float[Array, "pictures patches embed"]:
        heads = lambda y: y.reshape(*y.shape[:2], self.num_heads, -1)
        q, k, v = map(heads, jnp.split(self.qkv(x), 3, axis=-1))
        q, k = self.rotary(q, at), self.rotary(k, at)
        y = kernels.attention(q, k, v, at, scale=q.shape[-1] ** -0.5, mask=kernels.Full())
        return self.proj(y.reshape(x.shape))


class MLP(eqx.Module):
    linear_fc1: AbstractLinear
    linear_fc2: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        self.linear_fc1 = Linear(c.hidden_size, c.intermediate_size, bias=True, key=fc1)
        self.linear_fc2 = Linear(c.intermediate_size, c.hidden_size, bias=True, key=fc2)

    def __call__(self, x: Float[Array, "pictures patches embed"]) -> Float[Array, "pictures patches embed"]:
        return self.linear_fc2(gelu(self.linear_fc1(x)))


class Block(AbstractBlock):
    norm1: LayerNorm
    attn: Attention
    norm2: LayerNorm
    mlp: MLP
    deep: bool = eqx.field(static=True)  # DeepStack takes what this layer gives: it is its report
    ordered: ClassVar[bool] = True  # of the text: where a picture's features stand is counted along the row

    def __init__(self, config: Config, deep: bool, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.norm1 = LayerNorm(config.hidden_size, EPS)
        self.attn = Attention(config, key=attention)
        self.norm2 = LayerNorm(config.hidden_size, EPS)
        self.mlp = MLP(config, key=mlp)
        self.deep = deep

    def __call__(
        self, x: Float[Array, "pictures patches embed"], cache: None, at: Tokens
    ) -> tuple[Float[Array, "pictures patches embed"], None, Float[Array, "pictures patches embed"] | None]:
        x = x + self.attn(self.norm1(x), at)
        x = x + self.mlp(self.norm2(x))
        return x, None, x if self.deep else None


class Merger(eqx.Module):
    """Makes neighbouring patches, which follow one another, one feature of the text model."""

    norm: LayerNorm  # of each patch, or in DeepStack's of all that become one feature
    linear_fc1: AbstractLinear
    linear_fc2: AbstractLinear
    merge: int = eqx.field(static=True)  # patches
    deep: bool = eqx.field(static=True)  # DeepStack's

    def __init__(self, config: Config, deep: bool, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        self.merge, self.deep = c.spatial_merge_size**2, deep
        width = self.merge * c.hidden_size
        self.norm = LayerNorm(width if deep else c.hidden_size, EPS)
        self.linear_fc1 = Linear(width, width, bias=True, key=fc1)
        self.linear_fc2 = Linear(width, c.out_hidden_size, bias=True, key=fc2)

    def __call__(self, x: Float[Array, "pictures patches dim"]) -> Float[Array, "pictures tokens embed"]:
        pictures, patches, dim = x.shape
        together = lambda y: y.reshape(pictures, patches // self.merge, self.merge * dim)
        x = self.norm(together(x)) if self.deep else together(self.norm(x))
        return self.linear_fc2(erf_gelu(self.linear_fc1(x)))


class RopeDelta(AbstractRowCache):
    """The offset of each row from slots of the cache to rotary positions: images take more slots than positions.

    transformers calls it `rope_deltas`.
    """

    tokens: Int[Array, "layers batch"]
    layer: Int[Array, ""]
    rewinds: ClassVar[bool] = True  # only text is taken back, which does not change the offset

    @classmethod
    def init(cls, batch: int) -> "RopeDelta":
        return cls(jnp.zeros((1, batch), jnp.int32), jnp.array(0, jnp.int32))

    def partition_specs(self, sizes: Mapping[str, int]) -> "RopeDelta":
        rows = split_over(self.tokens.shape[1], BATCH, sizes)
        return eqx.tree_at(lambda c: (c.tokens, c.layer), self, (P(None, rows), P()))

    def in_int8(self) -> "RopeDelta":
        return self

    def widened(self, more: int) -> "RopeDelta":
        return self

    def paged(self, pages: PagesOf, slots: int, length: int) -> "RopeDelta":
        return self

    def of_rows(self) -> "RopeDelta":
        return all_of_rows(self)


class Tower(AbstractVision):
    """`features, *deep = tower.levels(patches, grids)`."""

    patch_embed: PatchEmbedding
    pos_embed: Embedding
    blocks: Stack
    merger: Merger
    deepstack_merger_list: tuple[Merger, ...]
    config: Config = eqx.field(static=True)
    processor: ClassVar[type[Qwen3VL]] = Qwen3VL
    video: ClassVar[type[Qwen3VLVideo] | None] = Qwen3VLVideo
    cache: ClassVar[type[RopeDelta]] = RopeDelta

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, of = config, set(config.deepstack_visual_indexes)
        patch, position, blocks, merger, *deep = jax.random.split(key, 4 + len(of))
        self.config = c
        self.patch_embed = PatchEmbedding(c, key=patch)
        self.pos_embed = Embedding(c.num_position_embeddings, c.hidden_size, key=position)
        kinds = [n if n in of else None for n in range(c.depth)]
        self.blocks = Stack(lambda n, *, key: Block(c, n in of, key=key), kinds, key=blocks)
        self.merger = Merger(c, False, key=merger)
        self.deepstack_merger_list = tuple(Merger(c, True, key=key) for key in deep)

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], grids: Int[Array, "pictures 2"]
    ) -> Float[Array, "pictures tokens embed"]:
        return self.levels(patches, grids)[0]

    def levels(
        self, patches: Float[Array, "pictures patches pixels"], grids: Int[Array, "pictures 2"]
    ) -> tuple[Float[Array, "pictures tokens embed"], ...]:
        """Returns the features in the place of a picture's tokens, and those added after the text's first layers.

        Patches lie as `zoo.vision.processors.qwen3_vl.Qwen3VL` cuts them: those of a feature follow one another.
        """
        places, real = self.places(grids, patches.shape[1])
        x = self.patch_embed(patches)
        x = x + self.interpolated(places, grids).astype(x.dtype)
        x, _, reports = self.blocks(x, None, Tokens(segments=real.astype(jnp.int32), rotary=places))
        # Blocks are in the order of their layers, and those that report are kinds of their own, which are not repeated.
        deep = [jnp.reshape(y, x.shape) for part in reports for y in part if isinstance(y, Array)]
        return self.merger(x), *(merge(y) for merge, y in zip(self.deepstack_merger_list, deep, strict=True))

    def places(
        self, grids: Int[Array, "pictures 2"], patches: int
    ) -> tuple[Int[Array, "pictures patches 2"], Bool[Array, "pictures patches"]]:
        """The row and column of each patch, and which patches are not padding."""
        merge, n = self.config.spatial_merge_size, jnp.arange(patches)[None]
        block, row, column = n // merge**2, n // merge % merge, n % merge
        wide = jnp.maximum(grids[:, 1:] // merge, 1)
        places = jnp.stack([block // wide * merge + row, block % wide * merge + column], axis=-1)
        return places, n < grids[:, :1] * grids[:, 1:]

    def interpolated(
        self, places: Int[Array, "pictures patches 2"], grids: Int[Array, "pictures 2"]
    ) -> Float[Array, "pictures patches embed"]:
        """The learned vector of each place, in float32: bilinear between those of a square, whose corners are a
        picture's."""
        side = math.isqrt(self.config.num_position_embeddings)
        place = places.astype(jnp.float32) * (side - 1) / jnp.maximum(grids - 1, 1)[:, None].astype(jnp.float32)
        first = jnp.minimum(jnp.floor(place), side - 1)
        table, x = self.pos_embed.weight.astype(jnp.float32), jnp.zeros((*places.shape[:2], self.config.hidden_size))
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            corner = first + jnp.broadcast_to(jnp.array([down, right], jnp.float32), first.shape)
            weight = jnp.prod(1 - jnp.abs(place - corner), axis=-1)
            row, column = jnp.unstack(jnp.minimum(corner, side - 1).astype(jnp.int32), axis=-1)
            x = x + weight[..., None] * split_lookup(table, row * side + column)
        return x


PARTITION_RULES = {  # under the tower's path
    "patch_embed.*": P(),
    "pos_embed": P(),
    # Over "tensor" each device has an equal share of the rows, which is not that of its heads: XLA exchanges them.
    "*.qkv": P("tensor", "fsdp"),
    "*.proj": P("fsdp", "tensor"),
    "*.linear_fc1": P("tensor", "fsdp"),
    "*.linear_fc2": P("fsdp", "tensor"),
    "*norm*": P(),
}


# Names of tensors in checkpoints: of the tower, and of the text model beside it.
CHECKPOINT_NAMES = {
    "vision.patch_embed.*": "model.visual.patch_embed.proj.{}",
    "vision.*": "model.visual.{}",
}
BEGINNINGS = {"vision": {"model.visual.": "model.visual.", "model.": "model.language_model."}}
ALIASES = {"visual.": "model.visual."}  # names without `model.` before the tower


def with_coordinates(
    at: Tokens, x: Float[Array, "batch seq embed"], images: Images | None, merge: int | None, cache: Caches | None
) -> tuple[Tokens, Caches | None, Caches]:
    """Gives tokens the coordinates by which they are rotated.

    Returns where the tokens stand, the caches of the model's layers, and what the model's new cache has behind those:
    the `RopeDelta` of later tokens.

    A token of text goes one further along all axes. The features of an image all begin where it begins, and go further
    by row and column; what follows goes on after its longer side (Qwen2-VL, arXiv:2409.12191, section 2.1).

    Args:
        at: where the tokens `x` stand.
        images: those of this call.
        merge: patches along a side of a feature; None: there is no tower, and tokens are text.
        cache: the model's, from `AbstractModel.init_cache`.
    """
    if merge is None:
        return at, cache, ()
    delta = None
    if cache is not None:
        cache, (delta,) = cache[:-1], cache[-1]
    if images is None and delta is None:
        return at, cache, ()
    before = jnp.zeros((len(x), 1), jnp.int32)
    if delta is not None:
        assert isinstance(delta, RopeDelta), "as Model.init_cache has put it behind the layers' caches"
        positions = positions_of(at, x)
        first = jnp.min(jnp.where(positions < 0, NEVER, positions), axis=1)
        before = jnp.where(first == 0, 0, delta.tokens[0])[:, None]  # a row that begins anew has no images yet
    elif at.positions is not None:
        positions = at.positions
    else:
        positions = jnp.arange(x.shape[1])[None] if at.segments is None else counted(at.segments)
    if images is None:
        behind = jnp.zeros_like(before)
        rotary = positions - before
    else:
        is_text, image = images.image < 0, jnp.maximum(images.image, 0)
        rows, columns = (jnp.asarray(images.grids)[:, axis][image] // merge for axis in (0, 1))
        columns = jnp.maximum(columns, 1)
        ends = images.feature == rows * columns - 1
        takes = jnp.where(is_text, 1, jnp.where(ends, jnp.maximum(rows, columns), 0))
        deltas = jnp.cumsum(1 - takes, axis=1)
        behind, deltas = deltas[:, -1:], deltas - (1 - takes)
        if at.segments is not None:
            deltas = deltas - jnp.take_along_axis(deltas, first_of_document(at.segments), axis=1)
        start = positions - before - deltas
        row, column = (jnp.where(is_text, 0, way(images.feature, columns)) for way in (jnp.floor_divide, jnp.remainder))
        rotary = jnp.stack([start, start + row, start + column], axis=-1)
    new = () if delta is None else ((RopeDelta((before + behind).astype(jnp.int32).T, delta.layer),),)
    return at._replace(rotary=rotary), cache, new


IDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
# Keys beside text_config that repeat what it says, or that `flat` reads.
BESIDE = {"architectures", "model_type", "tie_word_embeddings", "vision_config", *IDS}
# Keys of the text model that are written beside text_config.
OUTSIDE = ("tie_word_embeddings", "dtype", "torch_dtype", "transformers_version")


def flat(hub: Mapping[str, Any], silent: VisionConfig) -> dict[str, Any]:
    """Brings a config.json of either form into the flat one, of the text model's keys with `vision` beside them.

    The text model's rotary positions know nothing of axes: of text, the coordinates of all axes are the position.

    Args:
        hub: the file. A text model's is flat.
        silent: values of the keys about images, and of `vision_config`, that the file leaves out.

    Raises:
        ValueError: for what `vision_config` says and the tower does not know, or if the axes do not take turns.
    """
    text: dict[str, Any] = dict(hub)
    vision: dict[str, Any] | None = None
    if "text_config" in hub:
        kind = hub.get("model_type")
        if (stated := hub.get("vision_config")) is not None:
            implied = IMPLIED | {"model_type": OneOf([kind, f"{kind}_vision"])}
            tower = part_config(Config, vars(silent.tower) | stated, implied, "vision_config")
            ids = {key: hub[key] for key in IDS if hub.get(key) is not None}
            vision = vars(silent) | ids | {"tower": tower}
        text = {"model_type": f"{kind}_text"} | text_config(hub, BESIDE)
        text["tie_word_embeddings"] = hub.get("tie_word_embeddings", False)  # this counts, and not text_config's own
    for key in ("rope_parameters", "rope_scaling"):
        if rope := text.get(key):
            if not rope.get("mrope_interleaved", True):
                raise ValueError(f"{key} says mrope_interleaved=False, but only true is implemented.")
            if vision is not None and (sections := rope.get("mrope_section")) is not None:
                vision["mrope_section"] = sections
            text[key] = {name: rope[name] for name in rope if name not in ("mrope_interleaved", "mrope_section")}
    return text if vision is None else text | {"vision": part_config(VisionConfig, vision, {}, "It")}


def nested(hub: dict[str, Any], rope: str, architecture: str) -> dict[str, Any]:
    """Inverts `flat` for a model with a tower; a text model's keys stay as they are.

    Args:
        hub: the flat form.
        rope: the key of the text model's rotary positions, which gets their axes.
        architecture: what transformers calls the model with its tower.
    """
    if (vision := hub.pop("vision")) is None:
        return hub
    outer = {key: hub.pop(key) for key in OUTSIDE if key in hub}
    axes = {"mrope_interleaved": True, "mrope_section": vision.pop("mrope_section")}
    hub[rope] = {"rope_type": "default"} | (hub[rope] or {}) | axes
    hub.pop("architectures")
    kind = hub["model_type"].removesuffix("_text")
    tower = {"model_type": kind, "hidden_act": IMPLIED["hidden_act"]} | vision.pop("tower")
    names = {"architectures": [architecture], "model_type": kind}
    return names | outer | vision | {"text_config": hub, "vision_config": tower}
