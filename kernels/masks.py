"""Attention masks as values such as `Causal() & Window(1024)`, never held as a [seq, kv_seq] matrix.

A mask answers two questions, from which every implementation is made. `visible`: does this query see this key?
`bounds`: in this pair of blocks, may any query see any key, and does every query see every key? So kernels skip blocks
that no query sees, and apply no mask within blocks that all queries see in full.
"""

import abc
import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int8

from kernels.tokens import Tokens, given


class Extent(NamedTuple):
    """The smallest and the largest position, segment, span and branch among the tokens of a block."""

    least: Tokens
    most: Tokens


Bound = Bool[Array, "..."]


class Mask(abc.ABC):
    """A rule for which queries see which keys. Masks combine: `a & b` shows keys of both, `a | b` keys of either."""

    @abc.abstractmethod
    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        """Whether the query sees the key, for tokens whose arrays broadcast against each other."""

    @abc.abstractmethod
    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        """Returns (some, every) for pairs of blocks, whose arrays broadcast against each other.

        `some` is False only where no query sees any key, `every` True only where every query sees every key. Where
        `some` holds and `every` does not, `visible` decides for each token.
        """

    def __and__(self, other: "Mask") -> "Mask":
        return And(self, other)

    def __or__(self, other: "Mask") -> "Mask":
        return Or(self, other)

    def __contains__(self, kind: type["Mask"]) -> bool:
        """Whether this is a mask of that kind, or is combined from one."""
        return isinstance(self, kind)


@dataclasses.dataclass(frozen=True)
class Full(Mask):
    """Every query sees every key, as in an encoder."""

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return jnp.ones(jnp.broadcast_shapes(given(q.positions).shape, given(kv.positions).shape), bool)

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        every = self.visible(q.least, kv.least)
        return every, every


@dataclasses.dataclass(frozen=True)
class Causal(Mask):
    """A query sees the keys whose position is not after its own."""

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return given(kv.positions) <= given(q.positions)

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        return self.visible(q.most, kv.least), self.visible(q.least, kv.most)


@dataclasses.dataclass(frozen=True)
class Window(Mask):
    """A query sees its own position, the `size` - 1 before it, and all later ones: combine it with `Causal()`."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Window({self.size}) hides every key: give 1 or more, or no window at all.")

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return given(q.positions) - given(kv.positions) < self.size

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        return self.visible(q.least, kv.most), self.visible(q.most, kv.least)


@dataclasses.dataclass(frozen=True)
class Around(Mask):
    """A query sees the keys less than `size` positions away from its own, before and after it, as in an encoder."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Around({self.size}) hides every key: give 1 or more, or Full().")

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return self._reaches(q, kv) & self._reaches(kv, q)

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        some = self._reaches(q.least, kv.most) & self._reaches(kv.least, q.most)
        return some, self._reaches(q.most, kv.least) & self._reaches(kv.most, q.least)

    def _reaches(self, later: Tokens, earlier: Tokens) -> Bool[Array, "..."]:
        """Whether the first is less than `size` positions after the second. The largest int32 does not overflow."""
        return given(later.positions) - self.size < given(earlier.positions)


@dataclasses.dataclass(frozen=True)
class Chunk(Mask):
    """A query sees the keys of its own chunk of `size` positions (Llama 4's local layers)."""

    size: int

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"Chunk({self.size}) hides every key: give 1 or more, or no chunks at all.")

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return given(q.positions) // self.size == given(kv.positions) // self.size

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        chunk = lambda tokens: given(tokens.positions) // self.size
        return _overlap(chunk(q.least), chunk(q.most), chunk(kv.least), chunk(kv.most))


@dataclasses.dataclass(frozen=True)
class Segments(Mask):
    """A query sees the keys of its own segment: documents packed into one sequence."""

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return given(q.segments) == given(kv.segments)

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        return _overlap(*(given(x.segments) for x in (q.least, q.most, kv.least, kv.most)))


@dataclasses.dataclass(frozen=True)
class Branches(Mask):
    """A query sees the keys of branch 0, the trunk of its document, and those of its own branch."""

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return (given(kv.branches) == 0) | (given(q.branches) == given(kv.branches))

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        q_least, q_most, kv_least, kv_most = (given(x.branches) for x in (q.least, q.most, kv.least, kv.most))
        some, every = _overlap(q_least, q_most, kv_least, kv_most)
        return some | (kv_least == 0), every | (kv_most == 0)


@dataclasses.dataclass(frozen=True)
class Spans(Mask):
    """A query in a span sees that span's keys: `Causal() | Spans()` sees both ways within an image (Gemma 3).

    A span is an id of 0 or more. Tokens with a negative id are in no span: with this mask they see nothing, and no
    query sees them.
    """

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return (given(q.spans) == given(kv.spans)) & (given(q.spans) >= 0)

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        q_least, q_most, kv_least, kv_most = (given(x.spans) for x in (q.least, q.most, kv.least, kv.most))
        some, every = _overlap(q_least, q_most, kv_least, kv_most)
        return some & (q_most >= 0) & (kv_most >= 0), every & (q_least >= 0)


@dataclasses.dataclass(frozen=True)
class And(Mask):
    """Shows what both masks show."""

    a: Mask
    b: Mask

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return self.a.visible(q, kv) & self.b.visible(q, kv)

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        (some_a, every_a), (some_b, every_b) = self.a.bounds(q, kv), self.b.bounds(q, kv)
        return some_a & some_b, every_a & every_b

    def __contains__(self, kind: type[Mask]) -> bool:
        return kind in self.a or kind in self.b


@dataclasses.dataclass(frozen=True)
class Or(Mask):
    """Shows what either mask shows."""

    a: Mask
    b: Mask

    def visible(self, q: Tokens, kv: Tokens) -> Bool[Array, "..."]:
        return self.a.visible(q, kv) | self.b.visible(q, kv)

    def bounds(self, q: Extent, kv: Extent) -> tuple[Bound, Bound]:
        (some_a, every_a), (some_b, every_b) = self.a.bounds(q, kv), self.b.bounds(q, kv)
        return some_a | some_b, every_a | every_b

    def __contains__(self, kind: type[Mask]) -> bool:
        return kind in self.a or kind in self.b


def sliding(window: int | None) -> Mask:
    """Returns a causal mask over the last `window` positions, or over all (None)."""
    return Causal() if window is None else Causal() & Window(window)


SKIP, PARTIAL, FULL = 0, 1, 2


def block_classes(
    mask: Mask, q: Tokens, kv: Tokens, q_block: int, kv_block: int
) -> Int8[Array, "batch q_blocks kv_blocks"]:
    """Classifies each pair of blocks: SKIP (no query sees any key), FULL (all see all) or PARTIAL (mask each token).

    The arrays of `q` and `kv` are (batch or 1, tokens). An incomplete last block of keys is never FULL, so kernels
    check for keys beyond the end only where they mask anyway.
    """
    q_extent, kv_extent = _extent(q, q_block, axis=2), _extent(kv, kv_block, axis=1)
    some, every = mask.bounds(q_extent, kv_extent)
    kv_seq, blocks = given(kv.positions).shape[1], some.shape[2]
    whole = jnp.arange(1, blocks + 1) * kv_block <= kv_seq
    every = every & jnp.broadcast_to(whole[None, None, :], every.shape)
    return jnp.where(some, jnp.where(every, FULL, PARTIAL), SKIP).astype(jnp.int8)


class Schedule(NamedTuple):
    """The blocks of one side that each block of the other side has to visit: FULL ones first, then PARTIAL ones."""

    order: Int[Array, "*batch blocks others"]
    full: Int[Array, "*batch blocks"]  # the number of FULL blocks
    met: Int[Array, "*batch blocks"]  # the number of FULL or PARTIAL blocks; later ones in `order` are not visited

    @classmethod
    def of(cls, classes: Int8[Array, "*batch blocks others"]) -> "Schedule":
        count = lambda chosen: chosen.sum(axis=-1, dtype=jnp.int32)
        return cls(jnp.argsort(-classes, axis=-1).astype(jnp.int32), count(classes == FULL), count(classes != SKIP))


def _extent(tokens: Tokens, block: int, axis: int) -> Extent:
    """Returns the extents of blocks of (batch, tokens), as (batch, 1, blocks) or (batch, blocks, 1): 1 is at `axis`."""

    def each(reduce: str) -> Tokens:
        def one(x: Any) -> Int[Array, "batch ..."]:
            padded = jnp.pad(x, ((0, 0), (0, -x.shape[1] % block)), mode="edge")
            return jnp.expand_dims(getattr(padded.reshape(x.shape[0], -1, block), reduce)(axis=2), axis)

        return jax.tree.map(one, tokens)

    return Extent(each("min"), each("max"))


def _overlap(q_least: Array, q_most: Array, kv_least: Array, kv_most: Array) -> tuple[Bound, Bound]:
    """Returns the bounds of "both have the same id", from the smallest and largest ids of each block."""
    one_id = (q_least == q_most) & (kv_least == kv_most)
    return (kv_least <= q_most) & (q_least <= kv_most), one_id & (q_least == kv_least)
