"""One layer's array, named by where it lies in the array of all layers of its kind."""

import dataclasses

import jax
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """`stack[layer]`, not yet read.

    A Pallas kernel is opaque to XLA, which copies `stack[layer]` whole before the kernel may read a part of it: in
    decoding that is all experts of a layer, or all of its cache, at every token. A kernel that is given the stack and
    the number of the layer reads what it needs.
    """

    stack: Shaped[Array, "layers ..."]
    layer: Int[Array, ""]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stack.shape[1:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def dtype(self) -> DTypeLike:
        return self.stack.dtype

    def read(self) -> Shaped[Array, "..."]:
        """The layer's array. Products of XLA's own read it in place; a Pallas kernel gets a copy."""
        return jax.lax.dynamic_index_in_dim(self.stack, self.layer, keepdims=False)


def read(x: Shaped[Array, "..."] | Stacked) -> Shaped[Array, "*shape"]:
    """The array itself, for an implementation that takes no stack."""
    return x.read() if isinstance(x, Stacked) else x
