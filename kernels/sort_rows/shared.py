"""The part that `sort_rows` implementations share: the form of their result."""

from typing import NamedTuple

from jaxtyping import Array, Float, Int


class Sorted(NamedTuple):
    """Pairs of a row and a choice, sorted by group; pairs of a group stay in their order."""

    rows: Float[Array, "pairs dim"]  # a copy of each pair's row
    order: Int[Array, " pairs"]  # the pairs, each by its number, row * choices + choice
    place: Int[Array, "tokens choices"]  # where each pair stands among the sorted ones
    sizes: Int[Array, " groups"]  # pairs of each group
