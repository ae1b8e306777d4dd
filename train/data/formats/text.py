"""Readers of JSON lines, JSON lists, CSV, and plain texts."""

import csv
import json
import pathlib
from collections.abc import Iterator
from typing import Any

from train.data.formats.index import index
from train.data.record import Records


PIECE = 16 * 1024  # bytes of one record of a .txt file; the last record can be half as long again
LINE = 2**23  # most bytes of a .jsonl line: tokenizing a line takes 150 times as much memory


def read_json_lines(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens a file of one JSON object a line; skips empty lines. Keeps the lines' offsets, and reads them on demand."""
    starts = index(file, name, _lines)

    def read(index: int) -> Any:
        with open(file, "rb") as lines:
            lines.seek(int(starts[index, 0]))
            return json.loads(lines.readline())

    return Records(name, len(starts), read, lambda index: f"line {starts[index, 1]}")


def _lines(file: pathlib.Path, name: str) -> Iterator[tuple[int, int]]:
    """Yields the offset of each line, and its number from 1."""
    with open(file, "rb") as lines:
        at = 0
        for number, line in enumerate(lines, 1):
            if len(line) > LINE:
                raise ValueError(
                    f"{name}, line {number} has {len(line):,} bytes, and may have {LINE:,}: split its text."
                )
            if not line.isspace():
                # Lines are parsed on demand, but a line that was cut off is better reported before a long run.
                if not line.rstrip().endswith(b"}"):
                    raise ValueError(f"{name}, line {number} is broken: each line must be a whole JSON object.")
                yield at, number
            at += len(line)


def read_json(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens a JSON list of objects, all in memory; or JSON lines, which often have the suffix .json, too."""
    with open(file, "rb") as stream:
        if stream.read(1024).lstrip()[:1] != b"[":
            return read_json_lines(file, name, every)
        stream.seek(0)
        try:
            items = json.load(stream)
        except ValueError as error:
            raise ValueError(f"{name} is broken: {error}") from error
    return Records(name, len(items), items.__getitem__)


def read_csv(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens a table with commas, all in memory. The first row names the columns, and values are strings.

    A field in quotes may have line breaks, so a record's place is the line where the record ends.
    """
    csv.field_size_limit(LINE)
    with open(file, encoding="utf-8-sig", newline="") as lines:  # spreadsheets write a byte order mark
        reader = csv.reader(lines, strict=True)
        try:
            rows = [(reader.line_num, row) for row in reader if row]
        except (csv.Error, UnicodeDecodeError) as error:
            raise ValueError(f"{name} is broken after line {reader.line_num}: {error}.") from error
    (_, head), *rows = rows or [(0, [])]
    if len(set(head)) < len(head) or not all(head):
        raise ValueError(f"{name} must name each of its columns differently in its first row, which is {head}.")

    def read(index: int) -> dict[str, str]:
        values = rows[index][1]
        if len(values) != len(head):
            raise ValueError(f"it has {len(values)} fields, and the first row {len(head)}.")
        return dict(zip(head, values, strict=True))

    return Records(name, len(rows), read, lambda index: f"line {rows[index][0]}")


def read_text(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens a text as pieces, of whole lines where possible. All pieces but the last have `continues` set."""
    cuts, size = index(file, name, _pieces), file.stat().st_size

    def read(index: int) -> dict[str, Any]:
        start, end = map(int, cuts[index])
        with open(file, "rb") as stream:
            stream.seek(start)
            return {"text": stream.read(end - start).decode(), "continues": end < size}

    return Records(name, len(cuts), read, lambda index: f"bytes {cuts[index, 0]} to {cuts[index, 1]}")


def _pieces(file: pathlib.Path, name: str) -> Iterator[tuple[int, int]]:
    """Yields the offsets of the beginning and the end of each piece."""
    size, at = file.stat().st_size, 0
    with open(file, "rb") as stream:
        while size - at > PIECE + PIECE // 2:
            stream.seek(at)
            end = at + _cut(stream.read(PIECE))
            yield at, end
            at = end
    if size:
        yield at, size


def _cut(block: bytes) -> int:
    """Returns where to end a piece: after the last whole line, or else before the last space or the last character."""
    cut = block.rfind(b"\n") + 1 or block.rfind(b" ")
    if cut > 0:
        return cut
    return next((i for i in range(len(block) - 1, len(block) - 5, -1) if block[i] & 0xC0 != 0x80), len(block))
