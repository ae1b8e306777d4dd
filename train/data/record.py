"""What every format of data gives: records, each with the place where it stands."""

import dataclasses
import json
import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple


# What `train.data.packing`, `train.data.preferences`, and the rewards of `train.data.rewards` read. Formats that store
# columns read only these, or every one for a function of the user's.
KEYS = (
    "messages", "conversations", "prompt", "completion", "text", "tokens", "loss_mask", "tools", "images",
    "chosen", "rejected", "label", "answer", "tests",
)  # fmt: skip


class Record(NamedTuple):
    """One record of a file, as it is in the file."""

    where: str  # file and line, for messages
    fields: Any
    folder: pathlib.Path = pathlib.Path()  # of the file, which names of images are relative to


@dataclasses.dataclass(frozen=True)
class Records:
    """The records of one file, as a random access data source of grain.

    `read` raises a ValueError, RuntimeError or OSError for a damaged record.
    """

    name: str  # of the file: a path, or a URL
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
            raise ValueError(f"{where} is broken: {error.msg} at column {error.colno}.") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 text: {error}") from error
        except (ValueError, RuntimeError, OSError) as error:
            raise ValueError(f"{where} is broken: {error}") from error
