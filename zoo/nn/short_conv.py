"""Gated short convolutions: layers that see the last few tokens alone, and the cache of what they have seen."""

from collections.abc import Mapping
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import Tokens
from kernels.mesh import BATCH, TENSOR
from kernels.sums import spread
from zoo.nn.cache import NEVER, AbstractCache, PagesOf, all_of_rows, positions_of, split_over
from zoo.nn.layers import AbstractLinear, Conv1d, Linear
from zoo.nn.mixer import AbstractMixer


class ConvCache(AbstractCache):
    """The last inputs of convolutions, in a ring: index i holds that of a position p with p % length == i."""

    inputs: Float[Array, "layers batch length channels"]
    layer: Int[Array, ""]
    rewinds: ClassVar[bool] = True  # by as many tokens as it is widened by

    @classmethod
    def init(cls, layers: int, batch: int, length: int, channels: int, dtype: DTypeLike) -> "ConvCache":
        return cls(jnp.zeros((layers, batch, length, channels), dtype), jnp.array(0, jnp.int32))

    def update(
        self, x: Float[Array, "batch seq channels"], before: int, at: Tokens
    ) -> tuple["ConvCache", Float[Array, "batch before channels"]]:
        """Writes new inputs. Returns the cache, and the last `before` inputs before the first of the new ones.

        Before position 0 are zeros, whatever the row held before.

        Raises:
            ValueError: for packed documents, which a cache would mix up.
        """
        length, positions = self.inputs.shape[2], positions_of(at, x)
        first = jnp.min(jnp.where(positions < 0, NEVER, positions), axis=1, keepdims=True)
        earlier = first - before + jnp.arange(before)[None]
        rows = jnp.arange(len(x))[:, None]
        tail = jnp.where(earlier[..., None] < 0, 0, self.inputs[self.layer, rows, earlier % length])
        kept = (positions >= 0) & (positions > jnp.max(positions, axis=1, keepdims=True) - length)
        index = jnp.where(kept, positions % length, length)  # out of bounds, and so not written
        new = self.inputs.at[self.layer, rows, index].set(x.astype(self.inputs.dtype))
        return ConvCache(new, self.layer), tail

    def partition_specs(self, sizes: Mapping[str, int]) -> "ConvCache":
        rows, channels = (split_over(self.inputs.shape[n], axes, sizes) for n, axes in ((1, BATCH), (3, (TENSOR,))))
        return eqx.tree_at(lambda c: (c.inputs, c.layer), self, (P(None, rows, None, channels), P()))

    def in_int8(self) -> "ConvCache":
        """Itself: it is as small as a few tokens."""
        return self

    def widened(self, more: int) -> "ConvCache":
        layers, batch, length, channels = self.inputs.shape
        return ConvCache.init(layers, batch, length + more, channels, self.inputs.dtype)

    def paged(self, pages: PagesOf, slots: int, length: int) -> "ConvCache":
        return self

    def of_rows(self) -> "ConvCache":
        return all_of_rows(self)


class ShortConv(AbstractMixer):
    """A short convolution between two gates, as in LFM2 (arXiv:2511.23404).

        y_t = W_out (c_t * sum over i < width of w_i * b_{t-i} * u_{t-i}),        [b_t, c_t, u_t] = W_in x_t

    Products are those of each channel by itself. There is no activation: what is not linear are the gates b and c.
    """

    in_proj: AbstractLinear  # rows: all of b, all of c, all of u
    conv: Conv1d
    out_proj: AbstractLinear

    def __init__(self, hidden: int, width: int, *, bias: bool, key: PRNGKeyArray):
        """Initialise random weights, in float32.

        Args:
            hidden: features of what it reads and returns.
            width: tokens that the convolution sees, its own among them.
            bias: whether the two projections and the convolution have biases.
            key: random key.
        """
        into, conv, out = jax.random.split(key, 3)
        self.in_proj = Linear(hidden, 3 * hidden, bias=bias, key=into)
        self.conv = Conv1d(hidden, width, bias=bias, key=conv)
        self.out_proj = Linear(hidden, hidden, bias=bias, key=out)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: ConvCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], ConvCache | None]:
        b, c, u = jnp.split(self.in_proj(x), 3, axis=-1)
        weight, tail = self.conv.weight[:, 0], None
        if cache is not None:
            cache, tail = cache.update(b * u, weight.shape[1] - 1, at)
        y, _ = kernels.causal_conv(b * u, weight, at, tail=tail)
        y = y if self.conv.bias is None else y + spread(self.conv.bias, y.shape)
        return self.out_proj(c * y), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> ConvCache:
        channels, _, width = self.conv.weight.shape[-3:]
        return ConvCache.init(layers, batch, width - 1, channels, dtype)
