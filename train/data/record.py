"""Records, which the readers of all data formats return, each with its place in a file."""

import contextlib
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple


# The fields that `train.data.packing`, the other kinds of records and the rewards of `train.data.rewards` read. Formats
# that store columns read only these fields, or every column for a function of the user's.
NUMBERED = tuple(f"negative_{n}" for n in range(1, 17))  # columns of several hard negatives
KEYS = (
    "messages", "conversations", "prompt", "completion", "text", "tokens", "loss_mask", "tools", "images",
    "chosen", "rejected", "label", "answer", "tests",
    "question", "instruction", "input", "output",
    "anchor", "positive", "negative", "query", "sentence1", "sentence2", "score", "scores", *NUMBERED,
    "labels", "state", "teacher", "hint",
)  # fmt: skip


class Record(NamedTuple):
    """One record of a file, as it is in the file."""

    where: str  # file and line, for messages
    fields: Any
    folder: pathlib.Path = pathlib.Path()  # the file's folder, to which names of images are relative


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of one file, as a random access data source of grain.

    `read` raises a ValueError, RuntimeError or OSError for a damaged record.
    """

    name: str  # the file's path or URL
    length: int
    read: Callable[[int], Any]  # index -> fields
    place: Callable[[int], str] = lambda index: f"record {index + 1}"

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Record:
        where = f"{self.name}, {self.place(index)}"
        try:
            return Record(where, self.read(index), pathlib.Path(self.name).parent)
        except json.JSONDecodeError as error:
            raise BadRecord(where, f" is broken: {error.msg} at column {error.colno}.") from error
        except UnicodeDecodeError as error:
            raise BadRecord(where, f" is not UTF-8 text: {error}") from error
        except (ValueError, RuntimeError, OSError) as error:
            raise BadRecord(where, f" is broken: {error}") from error


class BadRecord(ValueError):
    """An error for a record that cannot be learnt from: its place, and the rest of a sentence that begins with that."""

    def __str__(self) -> str:
        return "".join(self.args)


PLACES = 3  # largest number of places that are named for one problem


@dataclasses.dataclass
class Problem:
    """A problem that several records have: the message of the first record, and the places of the first few."""

    told: str
    count: int = 0
    places: list[str] = dataclasses.field(default_factory=list)

    def __str__(self) -> str:
        others, more = self.places[1:], self.count - len(self.places)
        named = [*others, f"{more:,} more"] if more else others
        return f"{self.told} So in {self.count - 1:,} others: {'; '.join(named)}." if others else self.told


class Problems:
    """A collection of all problems of the records, so that one pass over the data reports them together."""

    def __init__(self) -> None:
        self.found: dict[str, Problem] = {}  # by the message without numbers and names

    @property
    def count(self) -> int:
        """Returns the number of bad records."""
        return sum(problem.count for problem in self.found.values())

    @contextlib.contextmanager
    def noted(self) -> Iterator[None]:
        """Records a BadRecord that is raised inside the `with`, and suppresses it."""
        try:
            yield
        except BadRecord as error:
            where, why = error.args
            problem = self.found.setdefault(re.sub(r"\d+|'[^']*'", "*", why), Problem(str(error)))
            problem.count += 1
            if len(problem.places) < PLACES:
                problem.places.append(where)

    def refuse(self, looked: int) -> None:
        """Raises a ValueError if there are problems. The message has a line for each kind, the most frequent first.

        Args:
            looked: the number of records that were checked.
        """
        if self.found:
            kinds = sorted(self.found.values(), key=lambda problem: -problem.count)
            head = f"{self.count:,} of the {looked:,} records looked at cannot be learnt from."
            raise ValueError("\n".join([head, *map(str, kinds)]))
