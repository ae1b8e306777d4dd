"""The book of pages: which ones are free, and how many texts hold each of the others.

Pages hold the vectors of neighbouring positions in a model's caches (`zoo.nn.cache`). Layers that see equally far back
share one set of pages, so all of this is kept once for each of `zoo.nn.rows.windows`. Texts that begin alike hold the
same pages; who writes to a page that others hold gets a copy first.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int


NONE = -1  # in a table: there is no page, or no longer

Table = list[list[int]]
"""The pages of a text, for each window: entry i is that of positions i * slots to (i + 1) * slots - 1."""

Copies = list[dict[int, int]]
"""Pages to be copied, for each window: to which one, and from which."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """The pages of the caches of `batch` rows: how many there are, of how many slots."""

    batch: int
    slots: int
    """The number of positions of a page."""
    width: int
    """The most pages of a row."""
    count: int
    """The number of pages of layers that see everything."""
    at_once: int
    """The most positions that a row writes at a time."""

    def most(self, window: int | None) -> int:
        """Returns the most pages that a row has at a time, in layers that see so many positions back; None: all."""
        return self.width if window is None else min(self.width, -(-(window + self.at_once) // self.slots) + 2)

    def pages(self, window: int | None) -> int:
        """Returns the number of pages. With a window there are as many for kept texts as for all rows."""
        return self.count if window is None else min(self.count, 2 * self.batch * self.most(window))


class Pool:
    """The pages of an engine's caches, for each of their windows. Without a layout there are none."""

    def __init__(self, layout: Layout | None, windows: Sequence[int | None]):
        assert layout is not None or not windows
        self.windows, self.slots, self.width = windows, layout.slots if layout else 1, layout.width if layout else 0
        self.counts = [layout.pages(window) for window in windows] if layout else []
        self.most = np.array([layout.most(window) for window in windows] if layout else [], int)  # that a row has
        self._free = [list(range(count)) for count in self.counts]
        self._holders = [[0] * count for count in self.counts]

    @property
    def free(self) -> Int[np.ndarray, " windows"]:
        """The number of free pages, for each window."""
        return np.array([len(pages) for pages in self._free], int)

    def empty(self) -> Table:
        """Makes the table of a text that has no pages yet."""
        return [[] for _ in self.windows]

    def lacking(self, table: Table, start: int, end: int) -> list[list[int]]:
        """Returns, for each window, the entries of `table` that need a page of their own before positions `start` to
        `end` - 1 are written."""
        entries = range(start // self.slots, -(-end // self.slots))
        owned = lambda pages, holders, i: i < len(pages) and pages[i] != NONE and holders[pages[i]] == 1
        return [
            [i for i in entries if not owned(pages, holders, i)]
            for pages, holders in zip(table, self._holders, strict=True)
        ]

    def reserve(self, table: Table, start: int, end: int) -> Copies | None:
        """Gives a text pages of its own for positions `start` to `end` - 1, which are to be written.

        Returns the copies to be made of pages that other texts hold, too. Where too few pages are free it returns None,
        and has changed nothing.
        """
        lacking = self.lacking(table, start, end)
        if any(len(entries) > len(free) for entries, free in zip(lacking, self._free, strict=True)):
            return None
        copies: Copies = [{} for _ in table]
        for pages, entries, free, holders, pairs in zip(table, lacking, self._free, self._holders, copies, strict=True):
            for i in entries:
                pages += [NONE] * (i + 1 - len(pages))
                old, pages[i] = pages[i], free.pop()
                holders[pages[i]] = 1
                if old != NONE:
                    holders[old] -= 1
                    pairs[pages[i]] = old
        return copies

    def share(self, table: Table, length: int) -> Table:
        """Returns a table of the pages that hold the first `length` positions, or what windows have left of them."""
        shared = [pages[: -(-length // self.slots)] for pages in table]
        for pages, holders in zip(shared, self._holders, strict=True):
            for page in pages:
                if page != NONE:
                    holders[page] += 1
        return shared

    def release(self, table: Table) -> None:
        """Gives back the pages of a text. One that no other text holds is free."""
        for window in range(len(table)):
            self._give_back(window, table[window], len(table[window]))

    def leave(self, table: Table, length: int) -> None:
        """Gives back the pages that no token from position `length` on sees, since windows have left them."""
        for n, window in enumerate(self.windows):
            if window is not None:
                self._give_back(n, table[n], max(length + 1 - window, 0) // self.slots)

    def _give_back(self, window: int, pages: list[int], end: int) -> None:
        holders, free = self._holders[window], self._free[window]
        for i in range(min(end, len(pages)) - 1, -1, -1):
            page, pages[i] = pages[i], NONE
            if page == NONE:  # and so are all before it
                break
            holders[page] -= 1
            if not holders[page]:
                free.append(page)

    def arrays(self, tables: Sequence[Table | None]) -> list[Int[np.ndarray, "batch width"]]:
        """Returns tables for the compiled functions, one for each window. A number that no page has means none."""
        arrays = []
        for window, count in enumerate(self.counts):
            array = np.full((len(tables), self.width), NONE, np.int32)
            for row, table in enumerate(tables):
                if table is not None:
                    array[row, : len(table[window])] = table[window]
            arrays.append(np.where(array == NONE, count, array))
        return arrays
