"""Tiles of rows that are sorted by group, for products of each row with its group's matrix."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int


FEW = 64  # most rows that have a tile each


def mean_rows(tokens: int, groups: int, *, least: int, most: int) -> int:
    """Returns the power of two, from `least` to `most`, that holds a group of mean size."""
    mean = -(-tokens // groups)
    return max(least, min(1 << (mean - 1).bit_length(), most))


def spans(group_sizes: Int[Array, " groups"], tokens: int) -> tuple[Int[Array, " groups"], Int[Array, " groups"]]:
    """Returns the start and the end of each group's rows. No group goes beyond the last row."""
    ends = jnp.minimum(jnp.cumsum(group_sizes), tokens)
    return jnp.concatenate([jnp.zeros_like(ends[:1]), ends[:-1]]), ends


def with_rest(group_sizes: Int[Array, " groups"], tokens: int) -> Int[Array, " groups+1"]:
    """Appends a group for the rows that belong to none."""
    return jnp.append(group_sizes, jnp.int32(tokens))  # as large as possible: `spans` ends it at the last row


class Tiles(NamedTuple):
    """Tiles of sorted rows: each has rows of one group, at most `size` of them.

    Only the first `count` tiles are used. Those after them belong to the last group, and have no rows.
    """

    size: int
    count: Int[Array, ""]
    group: Int[Array, " tiles"]
    first: Int[Array, " tiles"]  # the tile's first row
    end: Int[Array, " tiles"]  # the row after the tile's last

    @classmethod
    def of(
        cls, group_sizes: Int[Array, " groups"], tokens: int, size: int, *, aligned: bool = False, empty: bool = False
    ) -> "Tiles":
        """Cuts the rows into tiles.

        `aligned` tiles are also cut at the multiples of `size`, so that each lies within one block of rows. With
        `empty`, a group without rows has one tile, without rows.
        """
        starts, ends = spans(group_sizes, tokens)
        origins = starts // size * size if aligned else starts
        counts = jnp.where(ends > starts, (ends - origins + size - 1) // size, int(empty))
        groups = len(group_sizes)
        most = -(-tokens // size) + (groups if empty else min(groups, tokens))
        group = jnp.repeat(jnp.arange(groups, dtype=jnp.int32), counts, total_repeat_length=most)
        ordinal = jnp.arange(most, dtype=jnp.int32) - (jnp.cumsum(counts) - counts)[group]
        origin = origins[group] + size * ordinal
        first = jnp.clip(origin, starts[group], ends[group])
        return cls(size, jnp.cumsum(counts)[-1], group, first, jnp.minimum(origin + size, ends[group]))

    @classmethod
    def with_rest(cls, group_sizes: Int[Array, " groups"], tokens: int, size: int) -> "Tiles":
        """Cuts the rows into tiles; those that belong to no group are one more group at the end.

        Few rows of many groups have a tile each, found by comparisons alone: a GPU runs three kernels, where `of` takes
        a dozen. A tile that would begin within another one has no rows, and belongs to the last group.
        """
        if tokens > min(FEW, len(group_sizes)):
            return cls.of(with_rest(group_sizes, tokens), tokens, size)
        first, groups = np.arange(tokens, dtype=np.int32), jnp.arange(len(group_sizes))
        until = groups[None] <= groups[:, None]
        ends = jnp.minimum(jnp.sum(jnp.where(until, group_sizes[None], 0), axis=1, dtype=jnp.int32), tokens)
        over = ends[None] <= first[:, None]  # groups that end before a row
        group = jnp.sum(over, axis=1, dtype=jnp.int32)
        start = jnp.max(jnp.where(over, ends[None], 0), axis=1)
        end = jnp.min(jnp.where(over, tokens, ends[None]), axis=1)  # the rest ends at the last row
        begins = (first - start) % size == 0
        group = jnp.where(begins, group, len(group_sizes))
        end = jnp.where(begins, jnp.minimum(first + size, end), first)
        return cls(size, jnp.int32(tokens), group, jnp.asarray(first), end)
