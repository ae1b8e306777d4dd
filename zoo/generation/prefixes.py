"""What was read before, and texts that begin with it go on from: finished texts that are kept, and shared prompts."""

import collections
import dataclasses
from collections.abc import Hashable
from typing import Any

from zoo.generation.pages import Pool, Table


@dataclasses.dataclass(frozen=True, eq=False)
class Prefix:
    """The first `length` tokens of a text, as a row has read them: its pages, and what the row had of its own."""

    length: int
    table: Table
    row: Any  # `zoo.generation.decoding.RowState`
    long: bool
    """Whether the text was read as one beyond the model's `cache_limit`, which no shorter one can go on from."""


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
