"""One layer's array, named by where it lies in the array of all layers of its kind."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """`stack[layer]`, not yet read.

    A Pallas kernel is opaque to XLA, which copies `stack[layer]` whole before the kernel may read a part of it: in
    decoding that is all experts of a layer, or all of its cache, at every token. A kernel that is given the stack and
    the number of the layer reads what it needs.
    """

    stack: Any  # [layers, ...]; like all pytrees it also holds what JAX puts in place of arrays, such as Refs and specs
    layer: Any  # int32 []

    @classmethod
    def of(cls, x: "Shaped[Array, '...'] | Stacked") -> "Stacked":
        """An array as the only layer of a stack, for a kernel that takes both in one way."""
        return x if isinstance(x, Stacked) else cls(x[None], jnp.zeros((), jnp.int32))

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype

    def read(self) -> Shaped[Array, "..."]:
        """The layer's array. Products of XLA's own read it in place; a Pallas kernel gets a copy."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)


def read(x: Shaped[Array, "..."] | Stacked) -> Shaped[Array, "*shape"]:
    """The array itself, for an implementation that takes no stack."""
    return x.read() if isinstance(x, Stacked) else x


def gradient(x: Shaped[Array, "..."] | Stacked, of_layer: Shaped[Array, "..."]) -> Any:
    """The gradient of `x`, of whose array it is `of_layer`: zero in the other layers of a stack."""
    if not isinstance(x, Stacked):
        return of_layer
    return Stacked(jnp.zeros_like(x.stack).at[x.layer].set(of_layer), np.zeros((), jax.dtypes.float0))
