"""Functions in the user's own files, named file.py:function; and data sets whose records such a function converts.

    --data 'questions.parquet@rows.py:to_chat'

where rows.py has `def to_chat(fields: dict) -> dict`, from all fields of a record to the fields that are learnt from.
"""

import dataclasses
import importlib.util
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any

from train.data.record import BadRecord, Record


LARGEST = 2**26  # bytes of a record: at 64 MiB it would be some ten million tokens


def load(name: str) -> Callable[..., Any]:
    """Returns the function that file.py:function names.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file cannot be imported, or has no such function.
    """
    path, _, function = name.rpartition(":")
    if not pathlib.Path(path).is_file():
        raise FileNotFoundError(f"There is no {path}, which {name!r} names.")
    spec = importlib.util.spec_from_file_location(pathlib.Path(path).stem, path)
    assert spec and spec.loader, path
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # raised by the user's code
        raise ValueError(f"{path} can't be imported: {type(error).__name__}: {error}") from error
    if not callable(getattr(module, function, None)):
        raise ValueError(f"{path} has no function {function!r}.")
    return getattr(module, function)


def split(data: str) -> tuple[str, str | None]:
    """Splits DATA@file.py:function into the data and the function. Without a function, the second is None."""
    match = re.fullmatch(r"(.+)@([^@]*\.py:\w+)", data, re.DOTALL)
    return (match[1], match[2]) if match else (data, None)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """A map over records that replaces a record's fields by a function of them."""

    name: str
    function: Callable[[dict[str, Any]], Any]

    def __call__(self, record: Record) -> Record:
        """Returns the record with new fields.

        Raises:
            ValueError: the function fails, or returns no dict or one that is too large; names the record.
        """
        if not isinstance(record.fields, dict):
            raise BadRecord(record.where, f": a record must be a JSON object, not a {type(record.fields).__name__}.")
        try:
            fields = self.function(dict(record.fields))
        except (Exception, SystemExit) as error:  # raised by the user's code
            raise BadRecord(record.where, f": {self.name} raised {type(error).__name__}: {error}") from error
        if not isinstance(fields, Mapping):
            raise BadRecord(record.where, f": {self.name} returned {fields!r:.40}, and must return a dict of fields.")
        if (size := _size(fields)) > LARGEST:
            raise BadRecord(
                record.where,
                f": {self.name} returned {size / 2**20:,.0f} MiB or more, and a record may have {LARGEST >> 20}. "
                "Cut it into several records before.",
            )
        return record._replace(fields=dict(fields))


def _size(value: Any) -> int:
    """Counts the bytes of the texts, arrays and numbers in a record's fields. Counting stops above LARGEST."""
    size, left = 0, [value]
    while left and size <= LARGEST:
        value = left.pop()
        if isinstance(value, str | bytes | bytearray):
            size += len(value)
        elif isinstance(value, Mapping):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple):
            size += 8 * len(value)
            left += [each for each in value if not isinstance(each, int | float)]
        else:
            size += getattr(value, "nbytes", 8)
    return size
