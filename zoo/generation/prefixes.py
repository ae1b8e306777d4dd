"""Beginnings of texts that were read before, and from which others go on: finished texts, and parts of prompts.

Prompts are always read in the same chunks. So what was read of one is, bit for bit, what another would read that begins
with the same chunks.
"""

import collections
import dataclasses
import hashlib
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np

from zoo.generation.pages import Pool, Table
from zoo.nn.model import Images


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The first `length` tokens of a text, as a row has read them: its pages, and what the row had of its own."""

    length: int
    table: Table
    row: Any  # `zoo.generation.decoding.RowState`; None: there is nothing beside pages
    long: bool
    """Whether the text was read as one beyond the model's `cache_limit`, which no shorter one can go on from."""
    in_chunks: bool
    """Whether all of it was read in chunks, and nothing was drawn."""
    records: dict[str, np.ndarray]
    """The records of its tokens (`zoo.generation.engine.Engine`)."""


class Prefixes:
    """Prefixes by key, at most so many. Those that were not used for the longest time go first."""

    def __init__(self, pool: Pool, most: int):
        self._pool, self._most = pool, most
        self._of: collections.OrderedDict[Hashable, Prefix] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def get(self, key: Hashable) -> Prefix | None:
        """Returns a prefix, which now was used last; None: there is none, or no longer."""
        if key in self._of:
            self._of.move_to_end(key)
        return self._of.get(key)

    def put(self, key: Hashable, prefix: Prefix) -> None:
        """Keeps a prefix, which holds its pages from now on."""
        self.drop(key)
        self._of[key] = prefix
        if len(self._of) > self._most:
            self.evict()

    def drop(self, key: Hashable) -> None:
        """Forgets a prefix, if there is one of this key."""
        if prefix := self._of.pop(key, None):
            self._pool.release(prefix.table)

    def evict(self) -> bool:
        """Forgets the prefix that was not used for the longest time. Returns whether there was one."""
        if not self._of:
            return False
        self.drop(next(iter(self._of)))
        return True


def ends_of_chunks(length: int, images: Images | None, chunk: int, first: int) -> list[int]:
    """Returns where the chunks end in which a text is read: at multiples of `chunk`, but no earlier than `first`, and
    at the end of the text. One that would end within an image ends behind it."""
    ends = [end for end in range(chunk, length, chunk) if end > first]
    ends = [first, *ends] if 0 < first < length else ends
    if images is not None:
        image = np.asarray(images.image)[0]
        inside = np.append(
            (image[1:] >= 0) & (image[1:] == image[:-1]), False
        )  # of token n: whether n + 1 belongs to it
        ends = sorted({end + int(np.argmin(inside[end - 1 :])) for end in ends})
    return [*(end for end in ends if end < length), length]


def keys_of_chunks(tokens: Sequence[int], images: Images | None, ends: Sequence[int], long: bool) -> list[bytes]:
    """Returns a hash for each chunk, of all tokens and images up to its end, and of how they are read (`Prefix`)."""
    digest, start, keys = hashlib.sha256(bytes([long])), 0, []
    for end in ends:
        digest.update(np.array(tokens[start:end], np.int32).tobytes())
        if images is not None:
            image = np.asarray(images.image)[0, start:end]
            for array in (image, images.feature[0, start:end]):
                digest.update(np.asarray(array).tobytes())
            for n in np.unique(image[image >= 0]):
                digest.update(np.asarray(images.patches[n]).tobytes() + np.asarray(images.grids[n]).tobytes())
        keys.append(digest.digest())
        start = end
    return keys
