"""SigLIP's vision tower (arXiv:2303.15343): 896 x 896 pixels become Gemma 3's 256 tokens, which see each other both
ways.

It is a transformer over the patches of an image of a fixed size, which all see each other. Each patch has a learned
vector for its place, so images of another size are resized first.
"""

import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.sums import spread
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import AbstractLinear, Embedding, LayerNorm, Linear, gelu
from zoo.nn.stack import Stack
from zoo.vision.model import AbstractTowerConfig


@dataclasses.dataclass(frozen=True)
class Config(AbstractTowerConfig):
    """The `vision_config` of a config.json."""

    implied: ClassVar[dict[str, Any]] = dict(
        model_type="siglip_vision_model", hidden_act="gelu_pytorch_tanh", vision_use_head=False
    )

    hidden_size: int = 768
    intermediate_size: int = 3072
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    image_size: int = 224  # pixels along a side
    patch_size: int = 16
    num_channels: int = 3
    layer_norm_eps: float = 1e-6

    def __post_init__(self):
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"vision_config has hidden_size={self.hidden_size}, which is no multiple of "
                f"num_attention_heads={self.num_attention_heads}."
            )
        if self.image_size % self.patch_size:
            raise ValueError(
                f"vision_config has image_size={self.image_size}, which is no multiple of patch_size={self.patch_size}."
            )

    @property
    def side(self) -> int:
        """The number of patches along a side of an image."""
        return self.image_size // self.patch_size

    @property
    def pixels(self) -> int:
        return self.num_channels * self.patch_size**2

    @property
    def patches(self) -> int:
        return self.side**2


class PatchEmbedding(eqx.Module):
    """A linear map of a patch's pixels, stored as the convolution that it is."""

    weight: Float[Array, "out channels height width"]
    bias: Float[Array, " out"]

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c = config
        shape = (c.hidden_size, c.num_channels, c.patch_size, c.patch_size)
        self.weight = 0.02 * jax.random.truncated_normal(key, -3, 3, shape)
        self.bias = jnp.zeros(c.hidden_size)

    def __call__(self, patches: Float[Array, "images patches pixels"]) -> Float[Array, "images patches embed"]:
        x = patches.astype(self.weight.dtype)
        y = jnp.einsum("...i,oi->...o", x, self.weight.reshape(len(self.weight), -1))
        return y + spread(self.bias, y.shape)


class Attention(eqx.Module):
    q_proj: AbstractLinear
    k_proj: AbstractLinear
    v_proj: AbstractLinear
    out_proj: AbstractLinear
    num_heads: int = eqx.field(static=True)

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        width, keys = config.hidden_size, jax.random.split(key, 4)
        make = lambda key: Linear(width, width, bias=True, key=key)
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = map(make, keys)
        self.num_heads = config.num_attention_heads

    def __call__(self, x: Float[Array, "images patches embed"]) -> Float[Array, "images patches embed"]:
        heads = lambda y: y.reshape(*y.shape[:2], self.num_heads, -1)
        q, k, v = heads(self.q_proj(x)), heads(self.k_proj(x)), heads(self.v_proj(x))
        y = kernels.attention(q, k, v, scale=q.shape[-1] ** -0.5, mask=kernels.Full())
        return self.out_proj(y.reshape(x.shape))


class MLP(eqx.Module):
    fc1: AbstractLinear
    fc2: AbstractLinear

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        c, (fc1, fc2) = config, jax.random.split(key)
        self.fc1 = Linear(c.hidden_size, c.intermediate_size, bias=True, key=fc1)
        self.fc2 = Linear(c.intermediate_size, c.hidden_size, bias=True, key=fc2)

    def __call__(self, x: Float[Array, "images patches embed"]) -> Float[Array, "images patches embed"]:
        return self.fc2(gelu(self.fc1(x)))


class Block(AbstractBlock):
    layer_norm1: LayerNorm
    self_attn: Attention
    layer_norm2: LayerNorm
    mlp: MLP

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        attention, mlp = jax.random.split(key)
        self.layer_norm1 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.self_attn = Attention(config, key=attention)
        self.layer_norm2 = LayerNorm(config.hidden_size, config.layer_norm_eps)
        self.mlp = MLP(config, key=mlp)

    def __call__(
        self, x: Float[Array, "images patches embed"], cache: None, at: Tokens
    ) -> tuple[Float[Array, "images patches embed"], None, None]:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x)), None, None


class Tower(eqx.Module):
    """`features = tower(patches)`."""

    patch_embedding: PatchEmbedding
    position_embedding: Embedding
    layers: Stack
    post_layernorm: LayerNorm

    def __init__(self, config: Config, *, key: PRNGKeyArray):
        """Initialise random weights, in float32."""
        c, (patch, position, layers) = config, jax.random.split(key, 3)
        self.patch_embedding = PatchEmbedding(c, key=patch)
        self.position_embedding = Embedding(c.patches, c.hidden_size, key=position)
        self.layers = Stack(lambda _, *, key: Block(c, key=key), [None] * c.num_hidden_layers, key=layers)
        self.post_layernorm = LayerNorm(c.hidden_size, c.layer_norm_eps)

    def __call__(self, patches: Float[Array, "images patches pixels"]) -> Float[Array, "images patches embed"]:
        """Features of each patch, of images whose patches lie row by row, each as [channels, height, width]."""
        x = self.patch_embedding(patches)
        x, _, _ = self.layers(x + spread(self.position_embedding.weight, x.shape))
        return self.post_layernorm(x)


PARTITION_RULES = {  # under the tower's path
    "patch_embedding.*": P(),
    "position_embedding": P(),
    "layers.*.[qkv]_proj": P("tensor", "fsdp"),
    "layers.*.out_proj": P("fsdp", "tensor"),
    "layers.*.fc1": P("tensor", "fsdp"),
    "layers.*.fc2": P("fsdp", "tensor"),
    "*norm*": P(),
}
