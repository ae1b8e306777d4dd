"""The cache of recurrent layers: for each head a matrix, and the last inputs of a short convolution.

Its size does not grow with the text. A layer runs its recurrence by `recur`, with or without a cache.
"""

from collections.abc import Callable, Mapping
from typing import ClassVar, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int

from kernels import Slots, Tokens
from kernels.mesh import BATCH, TENSOR
from zoo.nn.cache import NEVER, AbstractCache, PagesOf, all_of_rows, positions_of, split_over


X = TypeVar("X")
Y = TypeVar("Y")
State = Array | Slots | None
"""The state that `kernels.delta_rule` begins with and returns: with a cache, its place there. None means zeros."""
Step = Callable[[X, State, Array | None, Tokens], tuple[Y, State, Array]]
"""`y, state, tail = step(x, state, tail, at)`, as by `kernels.causal_conv` and then `kernels.delta_rule`."""


class RecurrentCache(AbstractCache):
    """States of the last numbers of tokens, in a ring: slot i holds the state after n tokens for an n % slots == i.

    One slot is enough to go on from the last token. With k more, k tokens can be taken back.
    """

    state: Float32[Array, "layers batch slots heads dim v_dim"]
    tail: Float[Array, "layers batch slots before channels"]
    layer: Int[Array, ""]
    rewinds: ClassVar[bool] = True  # by as many tokens as it is widened by

    @classmethod
    def init(
        cls, layers: int, batch: int, state: tuple[int, int, int], tail: tuple[int, int], dtype: DTypeLike
    ) -> "RecurrentCache":
        """An empty cache, for a state of (heads, dim, v_dim) and a tail of (before, channels) in `dtype`."""
        rows = layers, batch, 1
        return cls(jnp.zeros((*rows, *state), jnp.float32), jnp.zeros((*rows, *tail), dtype), jnp.array(0, jnp.int32))

    def partition_specs(self, sizes: Mapping[str, int]) -> "RecurrentCache":
        rows, heads = split_over(self.state.shape[1], BATCH, sizes), split_over(self.state.shape[3], (TENSOR,), sizes)
        specs = P(None, rows, None, heads), P(None, rows), P()
        return eqx.tree_at(lambda c: (c.state, c.tail, c.layer), self, specs)

    def in_int8(self) -> "RecurrentCache":
        """Itself: every token rounds a state anew, so that errors of 8 bits would add up."""
        return self

    def widened(self, more: int) -> "RecurrentCache":
        wide = lambda x: jnp.zeros((*x.shape[:2], x.shape[2] + more, *x.shape[3:]), x.dtype)
        return eqx.tree_at(lambda c: (c.state, c.tail), self, replace_fn=wide)

    def paged(self, pages: PagesOf, slots: int, length: int) -> "RecurrentCache":
        return self

    def of_rows(self) -> "RecurrentCache":
        return all_of_rows(self)

    def advance(self, step: Step[X, Y], x: X, positions: Int[Array, "batch seq"]) -> tuple[Y, "RecurrentCache"]:
        """Runs `step` from the state before the first of these positions, and keeps the state after the last one."""
        slots = self.state.shape[2]
        first = jnp.min(jnp.where(positions < 0, NEVER, positions), axis=1)
        # A row of padding alone keeps slot 0 as it is. Before position 0 is nothing, whatever the row has of another.
        before = jnp.where(first == NEVER, 0, jnp.where(first == 0, -1, first % slots))
        after = jnp.where(first == NEVER, 0, (jnp.max(positions, axis=1) + 1) % slots)
        state, tail = (Slots(kept, self.layer, before, after) for kept in (self.state, self.tail))
        y, state, last = step(x, state, tail.read(), Tokens(positions))
        assert isinstance(state, Slots)
        return y, RecurrentCache(state.stack, tail.write(last).stack, self.layer)


def recur(step: Step[X, Y], x: X, cache: RecurrentCache | None, at: Tokens) -> tuple[Y, RecurrentCache | None]:
    """Runs a layer's recurrence over the tokens of `x`, a tree of arrays [batch, seq, ...].

    Without a cache the state begins as None, which means zeros. Few tokens, all of which might be taken back, are read
    one by one: the cache keeps the state after each.

    Raises:
        ValueError: for packed documents together with a cache.
    """
    if cache is None:
        return step(x, None, None, at)[0], None
    positions = positions_of(at, jax.tree.leaves(x)[0])
    if not 1 < positions.shape[1] <= cache.state.shape[2]:
        return cache.advance(step, x, positions)

    def token(cache: RecurrentCache, now: tuple[X, Int[Array, "batch seq"]]) -> tuple[RecurrentCache, Y]:
        y, cache = cache.advance(step, *now)
        return cache, y

    by_token = lambda a: jnp.moveaxis(a, 1, 0)[:, :, None]
    cache, y = jax.lax.scan(token, cache, jax.tree.map(by_token, (x, positions)))
    return jax.tree.map(lambda a: jnp.moveaxis(a[:, :, 0], 0, 1), y), cache
