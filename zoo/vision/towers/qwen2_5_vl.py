"""Qwen2.5-VL's vision tower (arXiv:2502.13923): a picture of any shape becomes a token for each 28 x 28 pixels.

It is a transformer over patches. A patch has two frames, which of an image are the same one. Its place is told by
rotary positions along rows and columns. Most layers attend within windows of 112 x 112 pixels; a few attend to the
whole picture. Four neighbouring patches become one feature of the text model.

A feature's coordinates in the text are those of Qwen3-VL (`qwen3_vl.with_coordinates`).
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import AbstractLinear, Linear, RMSNorm, erf_gelu, swiglu
from zoo.nn.stack import Stack
from zoo.vision.model import AbstractTowerConfig, AbstractVision
from zoo.vision.processors.qwen3_vl import Qwen3VL
from zoo.vision.towers.qwen3_vl import AxialRotary, RopeDelta


@dataclasses.dataclass(frozen=True)
class Config(AbstractTowerConfig):
    """The `vision_config` of a config.json."""

    implied: ClassVar[dict[str, Any]] = {  # and the family's model_type
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "axial", "rope_theta": 10_000.0},
        "in_chans": 3,  # this and the next repeat other keys in the released files
        "spatial_patch_size": 14,
    }
    patches: ClassVar[None] = None

    hidden_size: int = 3584
    intermediate_size: int = 3420
    depth: int = 32
    num_heads: int = 16
    out_hidden_size: int = 3584  # the text model's width
    fullatt_block_indexes: tuple[int, ...] = (7, 15, 23, 31)  # layers that attend to the whole picture
    window_size: int = 112  # pixels along a side
    patch_size: int = 14
    temporal_patch_size: int = 2
    spatial_merge_size: int = 2
    in_channels: int = 3
    tokens_per_second: int = 4  # of videos alone

    def __post_init__(self):
        if self.hidden_size % (4 * self.num_heads):
            raise ValueError(
                f"vision_config has hidden_size={self.hidden_size}, which is no multiple of four times "
                f"num_heads={self.num_heads}."
            )
        if self.window < self.spatial_merge_size:
            raise ValueError(
                f"vision_config has window_size={self.window_size}, which is less than a feature of "
                f"{self.spatial_merge_size} x {self.spatial_merge_size} patches."
            )

    @property
    def pixels(self) -> int:
        return self.in_channels * self.temporal_patch_size * self.patch_size**2

    @property
    def window(self) -> int:
        """The patches along a side of a window, which is made of whole features."""
        return self.window_size // self.spatial_merge_size // self.patch_size * self.spatial_merge_size


EPS = 1e-6  # of all norms


class PatchEmbedding(eqx.Module):
    """A linear map of a patch's pixels, stored as the convolution over two frames that it is."""

    weight: Float[Array, "out channels frames height width"]

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c = config
        shape = (c.hidden_size, c.in_channels, c.temporal_patch_size, c.patch_size, c.patch_size)
        self.weight = 0.02 * jax.random.truncated_normal(key, -3, 3, shape)

    def __call__(self, patches: Float[Array, "pictures patches pixels"]) -> Float[Array, "pictures patches embed"]:
        return jnp.einsum("...i,oi->...o", patches.astype(self.weight.dtype), self.weight.reshape(len(self.weight), -1))


class Attention(eqx.Module):
    qkv: AbstractLinear  # rows: all queries', all keys', all values'
    proj: AbstractLinear
    num_heads: int = eqx.field(static=True)
    rotary: AxialRotary = eqx.field(static=True)
    windowed: bool = eqx.field(static=True)

    def __init__(self, config: Config, windowed: bool, *, key: PRNGKeyArray):
        width, (qkv, proj) = config.hidden_size, jax.random.split(key)
        self.qkv = Linear(width, 3 * width, bias=True, key=qkv)
        self.proj = Linear(width, width, bias=True, key=proj)
        self.num_heads = config.num_heads
        self.rotary = AxialRotary(width // config.num_heads // 2, 10_000.0)
        self.windowed = windowed

    def __call__(self, x: Float[Array, "pictures patches embed"], at: Tokens) -> Float[Array, "pictures patches embed"]:
        heads = lambda y: y.reshape(*y.shape[:2], self.num_heads, -1)
        q, k, v = map(heads, jnp.split(self.qkv(x), 3, axis=-1))
        q, k = self.rotary(q, at), self.rotary(k, at)
        at, mask = (at, kernels.Spans()) if self.windowed else (at._replace(spans=None), kernels.Full())
        y = kernels.attention(q, k, v, at, scale=q.shape[-1] ** -0.5, mask=mask)
        return self.proj(y.reshape(x.shape))


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, bias=True, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, bias=True, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, bias=True, key=down)

    def __call__(self, x: Float[Array, "pictures patches embed"]) -> Float[Array, "pictures patches embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Block(AbstractBlock):
    norm1: RMSNorm
    attn: Attention
    norm2: RMSNorm
    mlp: MLP
    ordered: ClassVar[bool] = True  # of the text: where a picture's features stand is counted along the row

    def __init__(self, config: Config, windowed: bool, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.norm1 = RMSNorm(config.hidden_size, EPS)
        self.attn = Attention(config, windowed, key=attention)
        self.norm2 = RMSNorm(config.hidden_size, EPS)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "pictures patches embed"], cache: None, at: Tokens
    ) -> tuple[Float[Array, "pictures patches embed"], None, None]:
        x = x + self.attn(self.norm1(x), at)
        return x + self.mlp(self.norm2(x)), None, None


class Merger(eqx.Module):
    """Makes neighbouring patches, which follow one another, one feature of the text model."""

    ln_q: RMSNorm
    fc1: AbstractLinear
    fc2: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        width = c.spatial_merge_size**2 * c.hidden_size
        self.ln_q = RMSNorm(c.hidden_size, EPS)
        self.fc1 = Linear(width, width, bias=True, key=fc1)
        self.fc2 = Linear(width, c.out_hidden_size, bias=True, key=fc2)

    def __call__(self, x: Float[Array, "pictures patches dim"]) -> Float[Array, "pictures tokens embed"]:
        together = self.ln_q(x).reshape(len(x), -1, self.fc1.shape[1])
        return self.fc2(erf_gelu(self.fc1(together)))


class Tower(AbstractVision):
    """`features = tower(patches, grids)`."""

    patch_embed: PatchEmbedding
    blocks: Stack
    merger: Merger
    config: Config = eqx.field(static=True)
    processor: ClassVar[type[Qwen3VL]] = Qwen3VL
    cache: ClassVar[type[RopeDelta]] = RopeDelta

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (patch, blocks, merger) = config, jax.random.split(key, 3)
        self.config = c
        self.patch_embed = PatchEmbedding(c, key=patch)
        windowed = [n not in c.fullatt_block_indexes for n in range(c.depth)]
        self.blocks = Stack(lambda n, *, key: Block(c, windowed[n], key=key), windowed, key=blocks)
        self.merger = Merger(c, key=merger)

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], grids: Int[Array, "pictures 2"]
    ) -> Float[Array, "pictures tokens embed"]:
        """Returns a feature for each square of neighbouring patches, which follow one another, as `Qwen3VL` cuts them.

        transformers brings the patches of each window together; here they stay, and a mask tells the windows apart.
        """
        count = patches.shape[1]
        places, real = self.places(grids, count)
        row, column = jnp.unstack(places // self.config.window, axis=-1)
        windows = row * count + column  # a row has fewer windows than there are patches
        at = Tokens(segments=real.astype(jnp.int32), spans=windows, rotary=places)
        x, _, _ = self.blocks(self.patch_embed(patches), None, at)
        return self.merger(x)

    def places(
        self, grids: Int[Array, "pictures 2"], patches: int
    ) -> tuple[Int[Array, "pictures patches 2"], Bool[Array, "pictures patches"]]:
        """The row and column of each patch, and which patches are not padding."""
        merge, n = self.config.spatial_merge_size, jnp.arange(patches)[None]
        square, row, column = n // merge**2, n // merge % merge, n % merge
        wide = jnp.maximum(grids[:, 1:] // merge, 1)
        places = jnp.stack([square // wide * merge + row, square % wide * merge + column], axis=-1)
        return places, n < grids[:, :1] * grids[:, 1:]


PARTITION_RULES = {  # under the tower's path
    "patch_embed.*": P(),
    # Over "tensor" each device has an equal share of the rows, which is not that of its heads: XLA exchanges them.
    "*.qkv": P("tensor", "fsdp"),
    "*.proj": P("fsdp", "tensor"),
    "*.gate_proj": P("tensor", "fsdp"),
    "*.up_proj": P("tensor", "fsdp"),
    "*.down_proj": P("fsdp", "tensor"),
    "*.fc1": P("tensor", "fsdp"),
    "*.fc2": P("fsdp", "tensor"),
    "*norm*": P(),
    "*.ln_q.*": P(),
}
