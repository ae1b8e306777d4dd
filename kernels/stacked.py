"""References to one layer's array, or to its rows' states, within the array of all layers."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Shaped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stacked:
    """A reference to `stack[layer]`, not read yet.

    A Pallas kernel is opaque to XLA, which copies `stack[layer]` whole before the kernel may read a part of it: in
    decoding that is all experts of a layer, or all of its cache, at every token. A kernel that is given the stack and
    the index of the layer reads only what it needs.

    The keys or values of a cache may be in 8 bits: then `scale` has the factors of their integers.

    They may also lie in pages, which rows of a batch have in any order, and share: then `stack` is [layers, pages,
    slots, ...], and `table` has the numbers of each row's pages. The layer's array is [batch, table's pages * slots,
    ...].

    Where a layer's array has a gradient, `own` is this array once more, as a scan takes it out of the stack. Kernels
    read the stack, and the gradient is that of `own`: of the stack it would be an array of all layers, in each layer.
    """

    stack: Any  # [layers, ...]; as in all pytrees, JAX may replace the array by another object, such as a Ref or a spec
    layer: Any  # int32 []
    scale: Any = None  # float32 [layers, batch, slots, heads * parts]; None: `stack` is not in 8 bits
    parts: tuple[int, ...] = dataclasses.field(default=(), metadata=dict(static=True))
    """The number of neighbouring features that share a scale, for each scale of a vector."""
    wide: Any = dataclasses.field(default=None, metadata=dict(static=True))
    """The dtype in which it is read, such as that of integers times their scales; None: that of `stack`."""
    table: Any = None  # int32 [batch, pages]; a number that is no page's may stand where nothing is to be read
    own: Any = None  # [...]; None: there is no gradient, or it is that of `stack`

    @classmethod
    def of(cls, x: "Shaped[Array, '...'] | Stacked") -> "Stacked":
        """Returns an array as the only layer of a stack, so that a kernel takes arrays and stacks in one way."""
        return x if isinstance(x, Stacked) else cls(x[None], jnp.zeros((), jnp.int32))

    @property
    def shape(self) -> tuple[int, ...]:
        if self.table is None:
            return self.stack.shape[1:]
        rows, pages = self.table.shape
        return rows, pages * self.stack.shape[2], *self.stack.shape[3:]

    @property
    def ndim(self) -> int:
        return self.stack.ndim - 1

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def dtype(self) -> np.dtype:
        return self.stack.dtype if self.wide is None else np.dtype(self.wide)

    def read(self) -> Shaped[Array, "..."]:
        """Returns the layer's array. XLA's own products read it in place; a Pallas kernel, or pages, get a copy."""
        if self.own is not None:
            return self.own
        if self.table is not None:
            return self.pages(self.table)
        of_layer = lambda x: jax.lax.dynamic_index_in_dim(x, self.layer, keepdims=False)
        return self.widened(of_layer(self.stack), None if self.scale is None else of_layer(self.scale))

    def pages(self, numbers: Int[Array, "batch pages"]) -> Shaped[Array, "batch slots ..."]:
        """Copies pages of the layer, and puts those of a row after one another."""

        def of_pages(
            stack: Any,
        ) -> Any:  # "clip" is a plain copy on CPUs; the default mode, "fill", takes twice as long
            found = stack.at[self.layer, numbers].get(mode="clip")
            return found.reshape(len(numbers), -1, *found.shape[3:])

        return self.widened(of_pages(self.stack), None if self.scale is None else of_pages(self.scale))

    def widened(self, values: Shaped[Array, "*vectors dim"], scale: Any) -> Shaped[Array, "*vectors dim"]:
        """Multiplies vectors of the stack by their scales, if they have any, and casts them to `wide`."""
        if scale is None:
            return values if self.wide is None else values.astype(self.wide)
        scale = scale.reshape(*values.shape[:-1], len(self.parts))
        return (values.astype(scale.dtype) * jnp.repeat(scale, np.array(self.parts), axis=-1)).astype(self.wide)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Slots:
    """The states of one layer for the rows of a batch, in a cache that has several slots for each row.

    As with `Stacked`, a kernel that is given the cache reads and writes only these states, and in place.
    """

    stack: Any  # [layers, batch, slots, ...]
    layer: Any  # int32 []
    before: Any  # int32 [batch]: the slot that has the row's state; below 0 the state is zeros, whatever the slots have
    after: Any  # int32 [batch]: the slot for the next state. For a row of padding only, the slot that it has read

    @property
    def fresh(self) -> Bool[Array, " batch"]:
        """Whether each row's state begins as zeros."""
        return self.before < 0

    def read(self) -> Shaped[Array, "batch ..."]:
        """Returns the states."""
        kept = self.stack[self._where(jnp.maximum(self.before, 0))]
        return jnp.where(jnp.expand_dims(self.fresh, range(1, kept.ndim)), 0, kept)

    def write(self, states: Shaped[Array, "batch ..."]) -> "Slots":
        """Returns a reference to the same slots of a cache that holds these states."""
        stack = self.stack.at[self._where(self.after)].set(states.astype(self.stack.dtype))
        return dataclasses.replace(self, stack=stack)

    def _where(self, slot: Any) -> tuple[Any, ...]:
        rows, slots = self.stack.shape[1:3]
        # With one slot there is nothing to look up: XLA slices the cache, and updates the slice.
        return (self.layer, slice(None), 0) if slots == 1 else (self.layer, jnp.arange(rows), slot)


def read(x: Shaped[Array, "..."] | Stacked) -> Shaped[Array, "*shape"]:
    """Returns the array itself, for an implementation that takes no stack."""
    return x.read() if isinstance(x, Stacked) else x


def without_gradient(x: Any) -> Any:
    """Returns a tree of arrays or `Stacked` to read, which has no gradient."""
    is_stacked = lambda node: isinstance(node, Stacked)
    bare = lambda node: dataclasses.replace(node, own=None) if is_stacked(node) else node
    return jax.lax.stop_gradient(jax.tree.map(bare, x, is_leaf=is_stacked))
