"""Muse Glimmer's vision tower (Meta, 2026): a picture of any shape within 4,096 squares of 28 x 28 pixels becomes a
token for each square.

It is a transformer over patches. A patch has two frames, which of an image are the same one. Three of four layers
attend within windows of 32 x 32 patches; the others, and the last, attend to the whole picture. A patch's place is told
twice: by learned vectors of a grid of places, resampled to the picture's shape, and by rotary positions. Four
neighbouring patches become one feature.
"""

import dataclasses
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.mesh import split_lookup
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import AbstractLinear, Embedding, LayerNorm, Linear, erf_gelu
from zoo.nn.rope import AbstractRotary, rotated
from zoo.nn.stack import Stack
from zoo.vision.model import AbstractTowerConfig


@dataclasses.dataclass(frozen=True)
class Rope:
    """The rotary positions, of the column in one half of a head's pairs and of the row in the other."""

    rope_theta: float = 10_000.0
    rope_type: Literal["default", "axial"] = "default"  # the second, as transformers 5 writes it, means the first

    def __post_init__(self):
        object.__setattr__(self, "rope_type", "default")


@dataclasses.dataclass(frozen=True)
class Config(AbstractTowerConfig):
    """The `vision_config` of a config.json."""

    implied: ClassVar[dict[str, Any]] = dict(model_type="muse_glimmer_vision", hidden_act="gelu")
    patches: ClassVar[None] = None

    hidden_size: int = 1536
    intermediate_size: int = 8960
    num_hidden_layers: int = 50
    num_attention_heads: int = 16
    layer_types: tuple[Literal["window_attention", "full_attention"], ...] = ()  # (): full at each 4th and the last
    patch_size: int = 14
    patch_temporal: int = 2
    merge_size: int = 2
    pos_emb_height: int = 32  # also the side of a window, in patches
    pos_emb_width: int = 32
    max_position_embeddings: int = 1024  # nothing depends on it
    rope_parameters: Rope = Rope()
    layer_norm_eps: float = 1e-5  # of the norms before and after the layers

    def __post_init__(self):
        c, last = self, self.num_hidden_layers - 1
        full = [n % 4 == 3 or n == last for n in range(c.num_hidden_layers)]
        kinds = c.layer_types or tuple("full_attention" if one else "window_attention" for one in full)
        object.__setattr__(self, "layer_types", kinds)
        if len(kinds) != len(full):
            raise ValueError(
                f"vision_config has layer_types with {len(kinds)} entries, but num_hidden_layers is {len(full)}."
            )
        if c.hidden_size % (4 * c.num_attention_heads):
            raise ValueError(
                f"vision_config has hidden_size={c.hidden_size}, which is no multiple of four times "
                f"num_attention_heads={c.num_attention_heads}."
            )
        if c.pos_emb_height != c.pos_emb_width or c.pos_emb_height % c.merge_size:
            raise ValueError(
                f"vision_config has pos_emb_height={c.pos_emb_height} and pos_emb_width={c.pos_emb_width}; only equal "
                f"multiples of merge_size={c.merge_size} are implemented."
            )

    @property
    def pixels(self) -> int:
        return 3 * self.patch_temporal * self.patch_size**2

    @property
    def features(self) -> int:
        """The width of a feature."""
        return self.hidden_size * self.merge_size**2


class PatchEmbedder(eqx.Module):
    """Embeds the pixels of a patch, and adds a learned vector of its place."""

    patch_embedding: AbstractLinear
    position_embedding_table: Embedding
    side: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (patch, place) = config, jax.random.split(key)
        self.patch_embedding = Linear(c.pixels, c.hidden_size, key=patch)
        self.position_embedding_table = Embedding(c.pos_emb_height * c.pos_emb_width, c.hidden_size, key=place)
        self.side = c.pos_emb_height

    def __call__(
        self,
        patches: Float[Array, "pictures patches pixels"],
        places: Int[Array, "pictures patches 2"],
        grids: Int[Array, "pictures 2"],
    ) -> Float[Array, "pictures patches embed"]:
        table = self.position_embedding_table.weight
        x = self.patch_embedding(patches.astype(table.dtype))
        return x + self.resampled(table.astype(jnp.float32), places, grids).astype(x.dtype)

    def resampled(
        self,
        table: Float[Array, "vectors embed"],
        places: Int[Array, "pictures patches 2"],
        grids: Int[Array, "pictures 2"],
    ) -> Float[Array, "pictures patches embed"]:
        """The vector of each place: bilinear between four of the table, of which those beyond its edge are zero.

        The model was trained with patches counted along rows, and places along columns: the n-th patch has the n-th
        place, which is that of another patch unless the picture is a square.
        """
        rows, columns = (jnp.maximum(grids[:, axis, None], 1) for axis in (0, 1))
        number = places[..., 0] * columns + places[..., 1]
        sizes = jnp.stack([columns, rows], axis=-1).astype(jnp.float32)
        place = jnp.stack([number // rows, number % rows], axis=-1).astype(jnp.float32)
        place = (place + 0.5) * self.side / sizes - 0.5  # pixels' centres, as in grid_sample
        first, x = jnp.floor(place), jnp.zeros((*places.shape[:2], table.shape[1]))
        for down, right in ((0, 0), (0, 1), (1, 0), (1, 1)):
            corner = first + jnp.broadcast_to(jnp.array([down, right], jnp.float32), first.shape)
            inside = jnp.all((corner >= 0) & (corner < self.side), axis=-1)
            weight = jnp.where(inside, jnp.prod(1 - jnp.abs(place - corner), axis=-1), 0)
            row, column = jnp.unstack(jnp.clip(corner, 0, self.side - 1).astype(jnp.int32), axis=-1)
            x = x + weight[..., None] * split_lookup(table, row * self.side + column)
        return x


class AxialRotary(AbstractRotary):
    """Rotates the first half of the pairs of a head's features by a patch's column, the others by its row, in float32.

    Rows and columns count from 1. `dim` is half the size of a head.
    """

    def __call__(
        self, x: Float[Array, "pictures patches heads dim"], at: Tokens
    ) -> Float[Array, "pictures patches heads dim"]:
        assert at.rotary is not None, "patches have rows and columns"
        columns, rows = (self.turns(at.rotary[..., axis] + 1) for axis in (1, 0))
        cos, sin = (jnp.concatenate(both, axis=-1) for both in zip(columns, rows, strict=True))
        return rotated(x.astype(jnp.float32), cos, sin).astype(x.dtype)


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    proj: AbstractLinear
    num_heads: int = eqx.field(static=True)
    rotary: AxialRotary = eqx.field(static=True)
    windowed: bool = eqx.field(static=True)

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        c, keys = config, jax.random.split(key, 4)
        maps = (Linear(c.hidden_size, c.hidden_size, bias=True, key=key) for key in keys)
        self.q_proj, self.k_proj, self.v_proj, self.proj = maps
        self.num_heads = c.num_attention_heads
        self.rotary = AxialRotary(c.hidden_size // c.num_attention_heads // 2, c.rope_parameters.rope_theta)
        self.windowed = kind == "window_attention"

    def __call__(self, x: Float[Array, "pictures patches embed"], at: Tokens) -> Float[Array, "pictures patches embed"]:
        heads = lambda y: y.reshape(*y.shape[:2], self.num_heads, -1)
        q, k = self.rotary(heads(self.q_proj(x)), at), self.rotary(heads(self.k_proj(x)), at)
        at, mask = (at, kernels.Spans()) if self.windowed else (at._replace(spans=None), kernels.Full())
        y = kernels.attention(q, k, heads(self.v_proj(x)), at, scale=q.shape[-1] ** -0.5, mask=mask)
        return self.proj(y.reshape(x.shape))


class MLP(eqx.Module):
    fc1: AbstractLinear
    fc2: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        self.fc1 = Linear(c.hidden_size, c.intermediate_size, bias=True, key=fc1)
        self.fc2 = Linear(c.intermediate_size, c.hidden_size, bias=True, key=fc2)

    def __call__(self, x: Float[Array, "pictures patches embed"]) -> Float[Array, "pictures patches embed"]:
        return self.fc2(erf_gelu(self.fc1(x)))


class Block(AbstractBlock):
    norm1: LayerNorm
    attn: Attention
    norm2: LayerNorm
    mlp: MLP

    def __init__(self, config: Config, kind: str, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.norm1 = LayerNorm(config.hidden_size, 1e-5)
        self.attn = Attention(config, kind, key=attention)
        self.norm2 = LayerNorm(config.hidden_size, 1e-5)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "pictures patches embed"], cache: None, at: Tokens
    ) -> tuple[Float[Array, "pictures patches embed"], None, None]:
        x = x + self.attn(self.norm1(x), at)
        return x + self.mlp(self.norm2(x)), None, None


class Tower(eqx.Module):
    """`features = tower(patches, grids)`."""

    patch_embedder: PatchEmbedder
    ln_pre: LayerNorm
    layers: Stack
    ln_post: LayerNorm
    config: Config = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (patch, layers) = config, jax.random.split(key)
        self.config = c
        self.patch_embedder = PatchEmbedder(c, key=patch)
        self.ln_pre = LayerNorm(c.hidden_size, c.layer_norm_eps)
        self.layers = Stack(lambda n, *, key: Block(c, c.layer_types[n], key=key), c.layer_types, key=layers)
        self.ln_post = LayerNorm(c.hidden_size, c.layer_norm_eps)

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], grids: Int[Array, "pictures 2"]
    ) -> Float[Array, "pictures tokens dim"]:
        """Features of each square of neighbouring patches, which follow one another, as `patchify` cuts them."""
        (pictures, count, _), merge, side = patches.shape, self.config.merge_size, self.config.pos_emb_height
        places, real = self.places(grids, count)
        row, column = jnp.unstack(places // side, axis=-1)
        windows = row * count + column  # a row has fewer windows than there are patches
        at = Tokens(segments=real.astype(jnp.int32), spans=windows, rotary=places)
        x = self.ln_pre(self.patch_embedder(patches, places, grids))
        x, _, _ = self.layers(x, None, at)
        squares = self.ln_post(x).reshape(pictures, count // merge**2, merge**2, -1)
        return jnp.swapaxes(squares, 2, 3).reshape(pictures, count // merge**2, -1)

    def places(
        self, grids: Int[Array, "pictures 2"], patches: int
    ) -> tuple[Int[Array, "pictures patches 2"], Bool[Array, "pictures patches"]]:
        """The row and column of each patch, and which patches are not padding."""
        merge, n = self.config.merge_size, jnp.arange(patches)[None]
        square, row, column = n // merge**2, n // merge % merge, n % merge
        wide = jnp.maximum(grids[:, 1:] // merge, 1)
        places = jnp.stack([square // wide * merge + row, square % wide * merge + column], axis=-1)
        return places, n < grids[:, :1] * grids[:, 1:]


PARTITION_RULES = {  # under the tower's path
    "patch_embedder.patch_embedding": P("tensor", "fsdp"),
    "patch_embedder.position_embedding_table": P(),
    "ln_*": P(),
    "layers.*.[qkv]_proj": P("tensor", "fsdp"),
    "layers.*.proj": P("fsdp", "tensor"),
    "layers.*.fc1": P("tensor", "fsdp"),
    "layers.*.fc2": P("fsdp", "tensor"),
    "layers.*norm*": P(),
}
