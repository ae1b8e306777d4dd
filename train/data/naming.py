"""Names of a user's columns for the fields that are read here: `--columns prompt=question completion=answer`."""

import dataclasses
from collections.abc import Mapping, Sequence

from train.base.options import OptionGroup
from train.data.record import KEYS, BadRecord, Record


@dataclasses.dataclass(frozen=True, kw_only=True)
class ColumnOptions(OptionGroup):
    """Options for the names of records' columns, for every script that reads records."""

    columns: tuple[str, ...] = ()
    """Your columns for fields, such as prompt=question. Every record of every --data must have these columns.
    docs/data.md lists the fields."""


def parse(columns: Sequence[str]) -> dict[str, str]:
    """Parses FIELD=COLUMN into field -> column.

    Raises:
        ValueError: an element has another form, names a field that is not read, or names a field again.
    """
    found: dict[str, str] = {}
    for each in columns:
        field, _, column = each.partition("=")
        if not column:
            raise ValueError(f"--columns {each!r} must be FIELD=COLUMN, such as prompt=question.")
        if field not in KEYS:
            raise ValueError(f"--columns {each!r} names {field!r}, which is none of the fields: {', '.join(KEYS)}.")
        if field in found:
            raise ValueError(f"--columns names {field!r} twice, as {found[field]!r} and {column!r}.")
        found[field] = column
    return found


@dataclasses.dataclass(frozen=True)
class Renamed:
    """A map over records that renames the user's columns to fields. Other columns stay as they are."""

    columns: Mapping[str, str]

    def __call__(self, record: Record) -> Record:
        """Raises BadRecord if the record lacks a column."""
        fields = record.fields
        if not isinstance(fields, dict):
            raise BadRecord(record.where, f": a record must be a JSON object, not a {type(fields).__name__}.")
        for field, column in self.columns.items():
            if column not in fields:
                there = ", ".join(map(str, fields)) or "none"
                raise BadRecord(
                    record.where,
                    f": there is no column {column!r}, which --columns names {field}; it has {there}.",
                )
        others = {name: value for name, value in fields.items() if name not in self.columns.values()}
        return record._replace(fields=others | {field: fields[column] for field, column in self.columns.items()})
