"""Pixtral's vision tower (arXiv:2410.07073): an image of any shape within 1540 x 1540 pixels becomes a token for each
28 x 28 of them, and one at the end of each row.

It is a transformer over the patches of a picture, which all see each other. Rotary positions of two axes tell it where
a patch is: half of a head's pairs turn with the row, and half with the column.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import AbstractLinear, Linear, RMSNorm, swiglu
from zoo.nn.rope import AbstractRotary
from zoo.nn.stack import Stack
from zoo.vision.model import AbstractTowerConfig


def standard_form(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Brings a `vision_config` into the older form, with `rope_theta` and without `rope_parameters`.

    Raises:
        ValueError: if these scale the rope.
    """
    stated = {"hidden_act": "gelu"} | dict(stated)  # what transformers takes an absent one for
    match stated.pop("rope_parameters", None):
        case None:
            return stated
        case {"rope_theta": theta, "rope_type": "default" | "axial", **others} if not others:
            return stated | {"rope_theta": theta}
        case parameters:
            raise ValueError(f"vision_config says rope_parameters={parameters!r}; only a rope_theta is implemented.")


@dataclasses.dataclass(frozen=True)
class Config(AbstractTowerConfig):
    """The `vision_config` of a config.json."""

    implied: ClassVar[dict[str, Any]] = dict(model_type="pixtral", hidden_act="silu")
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = standard_form
    patches: ClassVar[None] = None

    hidden_size: int = 1024
    intermediate_size: int = 4096
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    head_dim: int = 0  # 0: hidden_size / num_attention_heads, the only value there is
    image_size: int = 1024  # pixels along a side, of the largest image that it was trained on; nothing depends on it
    patch_size: int = 16
    num_channels: int = 3
    rope_theta: float = 10_000.0

    def __post_init__(self):
        heads, head_dim = self.num_attention_heads, self.head_dim or self.hidden_size // self.num_attention_heads
        object.__setattr__(self, "head_dim", head_dim)
        if head_dim * heads != self.hidden_size or head_dim % 4:
            raise ValueError(
                f"vision_config has hidden_size={self.hidden_size}, which is not num_attention_heads={heads} times a "
                f"head_dim that is a multiple of 4 ({head_dim})."
            )

    @property
    def pixels(self) -> int:
        return self.num_channels * self.patch_size**2


class PatchConv(eqx.Module):
    """A linear map of a patch's pixels, stored as the convolution that it is."""

    weight: Float[Array, "out channels height width"]

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c = config
        shape = (c.hidden_size, c.num_channels, c.patch_size, c.patch_size)
        self.weight = 0.02 * jax.random.truncated_normal(key, -3, 3, shape)

    def __call__(self, patches: Float[Array, "pictures patches pixels"]) -> Float[Array, "pictures patches embed"]:
        x = patches.astype(self.weight.dtype)
        return jnp.einsum("...i,oi->...o", x, self.weight.reshape(len(self.weight), -1))


class AxialRotary(AbstractRotary):
    """Rotates the pairs `(x[i], x[i + dim / 2])`: by the row and every other frequency, the first among them, in the
    first half of the pairs, and by the column and the rest of the frequencies in the second.

    As in transformers, cos and sin are cast to the dtype of `x` before they are used.
    """

    def __call__(self, x: Float[Array, "batch seq heads dim"], at: Tokens) -> Float[Array, "batch seq heads dim"]:
        assert at.rotary is not None, "patches have rows and columns"
        (frequencies, _), places = self.frequencies(), at.rotary.astype(jnp.float32)
        angle = jnp.concatenate([places[..., n : n + 1] * frequencies[None, None, n::2] for n in (0, 1)], axis=-1)
        cos, sin = (turn(angle)[:, :, None].astype(x.dtype) for turn in (jnp.cos, jnp.sin))
        a, b = jnp.split(x, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    num_heads: int = eqx.field(static=True)
    rotary: AxialRotary = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        width, keys = config.hidden_size, jax.random.split(key, 4)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear(width, width, key=key) for key in keys)
        self.num_heads = config.num_attention_heads
        self.rotary = AxialRotary(config.head_dim, config.rope_theta)

    def __call__(self, x: Float[Array, "pictures patches embed"], at: Tokens) -> Float[Array, "pictures patches embed"]:
        heads = lambda y: y.reshape(*y.shape[:2], self.num_heads, -1)
        q, k = self.rotary(heads(self.q_proj(x)), at), self.rotary(heads(self.k_proj(x)), at)
        y = kernels.attention(q, k, heads(self.v_proj(x)), at, scale=self.rotary.dim**-0.5, mask=kernels.Full())
        return self.o_proj(y.reshape(x.shape))


class MLP(eqx.Module):
    gate_proj: AbstractLinear
    up_proj: AbstractLinear
    down_proj: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (gate, up, down) = config, jax.random.split(key, 3)
        self.gate_proj = Linear(c.hidden_size, c.intermediate_size, key=gate)
        self.up_proj = Linear(c.hidden_size, c.intermediate_size, key=up)
        self.down_proj = Linear(c.intermediate_size, c.hidden_size, key=down)

    def __call__(self, x: Float[Array, "pictures patches embed"]) -> Float[Array, "pictures patches embed"]:
        return self.down_proj(swiglu(x, self.gate_proj, self.up_proj))


class Block(AbstractBlock):
    attention_norm: RMSNorm
    attention: Attention
    ffn_norm: RMSNorm
    feed_forward: MLP

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.attention_norm = RMSNorm(config.hidden_size, 1e-5)
        self.attention = Attention(config, key=attention)
        self.ffn_norm = RMSNorm(config.hidden_size, 1e-5)
        self.feed_forward = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "pictures patches embed"], cache: None, at: Tokens
    ) -> tuple[Float[Array, "pictures patches embed"], None, None]:
        x = x + self.attention(self.attention_norm(x), at)
        return x + self.feed_forward(self.ffn_norm(x)), None, None


class Tower(eqx.Module):
    """`features = tower(patches, at)`."""

    patch_conv: PatchConv
    ln_pre: RMSNorm
    layers: Stack

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (patch, layers) = config, jax.random.split(key)
        self.patch_conv = PatchConv(c, key=patch)
        self.ln_pre = RMSNorm(c.hidden_size, 1e-5)
        self.layers = Stack(lambda _, *, key: Block(c, key=key), [None] * c.num_hidden_layers, key=layers)

    def __call__(
        self, patches: Float[Array, "pictures patches pixels"], at: Tokens
    ) -> Float[Array, "pictures patches embed"]:
        """Features of each patch, each as [channels, height, width], which are where `at` says (`places`)."""
        x, _, _ = self.layers(self.ln_pre(self.patch_conv(patches)), None, at)
        return x


def places(grids: Int[Array, "pictures 2"], patches: int, merge_size: int) -> Tokens:
    """The row and column of each patch, of pictures cut by `patchify`.

    Its blocks lie row by row, and so do the patches of each, `merge_size` a side.

    Patches beyond rows * columns are padding, which is a segment of its own, so that no patch sees it.
    """
    index = jnp.arange(patches)[None]
    (block, within), columns = jnp.divmod(index, merge_size**2), jnp.maximum(grids[:, 1:] // merge_size, 1)
    rows = block // columns * merge_size + within // merge_size
    columns = block % columns * merge_size + within % merge_size
    inside = index < jnp.prod(grids, axis=1, keepdims=True)
    return Tokens(segments=inside.astype(jnp.int32), rotary=jnp.stack([rows, columns], axis=-1))


PARTITION_RULES = {  # under the tower's path
    "patch_conv.weight": P(),
    "ln_pre.weight": P(),
    "layers.*.[qkv]_proj": P("tensor", "fsdp"),
    "layers.*.o_proj": P("fsdp", "tensor"),
    "layers.*.gate_proj": P("tensor", "fsdp"),
    "layers.*.up_proj": P("tensor", "fsdp"),
    "layers.*.down_proj": P("fsdp", "tensor"),
    "*norm.weight": P(),
}
