"""Tiles of rows that are sorted by group, for products of each row with its group's matrix."""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


FEW = 256  # rows: up to so many, comparing each with all takes a GPU less time than starting the kernels of a sort


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


class Tile(NamedTuple):
    """One tile: rows of one group."""

    group: Int[Array, ""]
    first: Int[Array, ""]  # its first row
    end: Int[Array, ""]  # the row after its last

    @classmethod
    def nth(cls, n: Int[Array, ""], group_sizes: Int[Array, " groups"], tokens: int, size: int) -> "Tile":
        """Finds tile `n` of those of `Tiles.of` without the others, in a kernel. One beyond them has no rows."""
        ends = lax.cumsum(group_sizes, axis=0)
        starts, ends = jnp.minimum(ends - group_sizes, tokens), jnp.minimum(ends, tokens)
        counts = (ends - starts + size - 1) // size
        until = lax.cumsum(counts, axis=0)  # tiles of the groups up to each, its own included
        group = jnp.sum((until <= n).astype(jnp.int32))
        of_group = lambda x: jnp.sum(jnp.where(jnp.arange(len(x), dtype=jnp.int32) == group, x, 0))
        first = of_group(starts) + size * (n - of_group(until - counts))
        return cls(group, first, jnp.minimum(first + size, of_group(ends)))
