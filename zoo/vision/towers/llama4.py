"""Llama 4's vision tower (Meta, 2025): each tile of 336 x 336 pixels becomes 144 tokens.

It is a transformer over the patches of a tile, and an adapter that makes four of them one feature. An image is cut into
tiles of one size, and the tower reads each by itself. A tile's patches and a class token behind
them all see each other. Each has a learned vector for its place; and half of each head's features turn with the patch's
column, half with its row, as Llama's do with the position (`InterleavedRotary`). The class token does not turn.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import spread
from zoo.nn.block import AbstractBlock, split_tokens
from zoo.nn.layers import AbstractLinear, LayerNorm, Linear, erf_gelu
from zoo.nn.rope import InterleavedRotary
from zoo.nn.stack import Stack
from zoo.vision.model import AbstractTowerConfig


NORM_EPS = 1e-5


def standard_form(stated: Mapping[str, Any]) -> dict[str, Any]:
    """Brings a `vision_config` into the older form: `rope_theta` stands by itself, not in `rope_parameters`."""
    match stated.get("rope_parameters"):
        case {"rope_theta": theta, "rope_type": "default", **others} if not others:
            return dict(stated) | dict(rope_theta=theta, rope_parameters=None)
    return dict(stated)


@dataclasses.dataclass(frozen=True)
class Config(AbstractTowerConfig):
    """The `vision_config` of a config.json."""

    implied: ClassVar[dict[str, Any]] = dict(
        model_type="llama4_vision_model", hidden_act="gelu", multi_modal_projector_bias=False, norm_eps=NORM_EPS,
        vision_feature_layer=-1, vision_feature_select_strategy="default",
    )  # fmt: skip
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = standard_form

    hidden_size: int = 768
    intermediate_size: int = 5632
    num_hidden_layers: int = 34
    num_attention_heads: int = 16
    image_size: int = 448  # pixels along a tile's side
    patch_size: int = 14
    num_channels: int = 3
    pixel_shuffle_ratio: float = 0.5  # features along a tile's side, of its patches
    projector_input_dim: int = 4096  # width of the adapter, and of what it returns
    projector_output_dim: int = 4096
    vision_output_dim: int = 7680
    rope_theta: float = 10_000.0

    def __post_init__(self):
        def check(fine: bool, says: str) -> None:
            if not fine:
                raise ValueError(f"vision_config has {says}.")

        width, heads, ratio = self.hidden_size, self.num_attention_heads, self.pixel_shuffle_ratio
        multiple = f"hidden_size={width}, which is no multiple of 4 * num_attention_heads={heads}"
        check(width % (4 * heads) == 0, multiple)
        multiple = f"image_size={self.image_size}, which is no multiple of patch_size={self.patch_size}"
        check(self.image_size % self.patch_size == 0, multiple)
        merged = f"pixel_shuffle_ratio={ratio}, which is not one over a divisor of the {self.side} patches of a side"
        check(ratio * self.merged == 1 and self.side % self.merged == 0, merged)
        shuffled = width * self.merged**2
        check(
            self.intermediate_size == shuffled,
            f"intermediate_size={self.intermediate_size}, but its adapter reads {shuffled} features: those of "
            f"{self.merged**2} patches",
        )
        widths = (self.projector_input_dim, self.projector_output_dim, self.vision_output_dim)
        names = "projector_input_dim, projector_output_dim and vision_output_dim"
        check(len(set(widths)) == 1, f"{names} {widths}, which must be equal")

    @property
    def side(self) -> int:
        """The number of patches along a side of a tile."""
        return self.image_size // self.patch_size

    @property
    def merged(self) -> int:
        """The number of patches along a side that become one feature."""
        return round(1 / self.pixel_shuffle_ratio)

    @property
    def pixels(self) -> int:
        return self.num_channels * self.patch_size**2

    @property
    def patches(self) -> int:
        return self.side**2


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    o_proj: AbstractLinear
    num_heads: int = eqx.field(static=True)
    side: int = eqx.field(static=True)  # of a tile, in patches
    rotary: InterleavedRotary = eqx.field(static=True)  # of half a head

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        width, keys = config.hidden_size, jax.random.split(key, 4)
        make = lambda key: Linear(width, width, bias=True, key=key)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = map(make, keys)
        self.num_heads, self.side = config.num_attention_heads, config.side
        self.rotary = InterleavedRotary(width // self.num_heads // 2, config.rope_theta)

    def __call__(self, x: Float[Array, "tiles tokens embed"]) -> Float[Array, "tiles tokens embed"]:
        heads = lambda y: y.reshape(*y.shape[:2], self.num_heads, -1)
        q, k, v = self.turned(heads(self.q_proj(x))), self.turned(heads(self.k_proj(x))), heads(self.v_proj(x))
        y = kernels.attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=kernels.Full())
        return self.o_proj(y.reshape(x.shape))

    def turned(self, x: Float[Array, "tiles tokens heads dim"]) -> Float[Array, "tiles tokens heads dim"]:
        """Turns the first half of each head by the patch's column, the second by its row, both counted from 1."""
        rows, columns = np.indices((self.side, self.side)).reshape(2, -1) + 1
        places = [np.append(axis, 0)[None] for axis in (columns, rows)]  # 0: the class token
        halves = zip(jnp.split(x, 2, axis=-1), places, strict=True)
        return jnp.concatenate([self.rotary(half, Tokens(rotary=jnp.asarray(at))) for half, at in halves], axis=-1)


class MLP(eqx.Module):
    fc1: AbstractLinear
    fc2: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        self.fc1 = Linear(c.hidden_size, c.intermediate_size, bias=True, key=fc1)
        self.fc2 = Linear(c.intermediate_size, c.hidden_size, bias=True, key=fc2)

    def __call__(self, x: Float[Array, "tiles tokens embed"]) -> Float[Array, "tiles tokens embed"]:
        return self.fc2(erf_gelu(self.fc1(x)))


class Block(AbstractBlock):
    input_layernorm: LayerNorm
    self_attn: Attention
    post_attention_layernorm: LayerNorm
    mlp: MLP

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.input_layernorm = LayerNorm(config.hidden_size, NORM_EPS)
        self.self_attn = Attention(config, key=attention)
        self.post_attention_layernorm = LayerNorm(config.hidden_size, NORM_EPS)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "tiles tokens embed"], cache: None, at: Tokens
    ) -> tuple[Float[Array, "tiles tokens embed"], None, None]:
        x = x + self.self_attn(self.input_layernorm(x))
        return x + self.mlp(self.post_attention_layernorm(x)), None, None


class Adapter(eqx.Module):
    """Makes a square of neighbouring patches one feature: their features one after another ("pixel shuffle"), and a
    gelu after each of two linear maps."""

    fc1: AbstractLinear
    fc2: AbstractLinear
    merged: int = eqx.field(static=True)  # patches along a square's side

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        self.fc1 = Linear(c.intermediate_size, c.projector_input_dim, key=fc1)
        self.fc2 = Linear(c.projector_output_dim, c.projector_output_dim, key=fc2)
        self.merged = c.merged

    def __call__(self, x: Float[Array, "tiles patches embed"]) -> Float[Array, "tiles features out"]:
        tiles, patches, embed = x.shape
        side = round(patches**0.5) // self.merged
        squares = x.reshape(tiles, side, self.merged, side, self.merged, embed).transpose(0, 1, 3, 2, 4, 5)
        return split_tokens(erf_gelu(self.fc2(erf_gelu(self.fc1(squares.reshape(tiles, side**2, -1))))))


class Tower(eqx.Module):
    """`features = tower(patches)`."""

    patch_embedding: AbstractLinear
    class_embedding: Float[Array, " embed"]
    positional_embedding_vlm: Float[Array, "tokens embed"]  # the class token's is the last
    layernorm_pre: LayerNorm
    layers: Stack
    layernorm_post: LayerNorm
    vision_adapter: Adapter

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (patch, token, position, layers, adapter) = config, jax.random.split(key, 5)
        self.patch_embedding = Linear(c.pixels, c.hidden_size, key=patch)
        scale, tokens = c.hidden_size**-0.5, c.patches + 1
        self.class_embedding = scale * jax.random.truncated_normal(token, -3, 3, (c.hidden_size,))
        self.positional_embedding_vlm = scale * jax.random.truncated_normal(position, -3, 3, (tokens, c.hidden_size))
        self.layernorm_pre = LayerNorm(c.hidden_size, NORM_EPS)
        self.layers = Stack(lambda _, *, key: Block(c, key=key), [None] * c.num_hidden_layers, key=layers)
        self.layernorm_post = LayerNorm(c.hidden_size, NORM_EPS)
        self.vision_adapter = Adapter(c, key=adapter)

    def __call__(self, patches: Float[Array, "tiles patches pixels"]) -> Float[Array, "tiles features embed"]:
        """Features of each square of patches, of tiles whose patches lie row by row: [channels, height, width] each."""
        x = self.patch_embedding(patches.astype(self.class_embedding.dtype))
        x = jnp.concatenate([x, spread(self.class_embedding, (len(x), 1, x.shape[-1]))], axis=1)
        x = self.layernorm_pre(x + spread(self.positional_embedding_vlm, x.shape))
        x, _, _ = self.layers(x)
        return self.vision_adapter(self.layernorm_post(x)[:, :-1])


PARTITION_RULES = {  # under the tower's path
    "patch_embedding": P("tensor", "fsdp"),
    "class_embedding": P(),
    "positional_embedding_vlm": P(),
    "layers.*.[qkv]_proj": P("tensor", "fsdp"),
    "layers.*.o_proj": P("fsdp", "tensor"),
    "*.fc1": P("tensor", "fsdp"),
    "*.fc2": P("fsdp", "tensor"),
    "*norm*": P(),
}
