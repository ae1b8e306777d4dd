"""Reads records from jsonl, json, parquet, text and ArrayRecord files, with random access, as a `grain.MapDataset`.

    train, valid = open_records("chats/")
    train[0]  # Record(where="chats/train.jsonl, line 1", fields={"messages": [...]})

Records are read from the files when they are asked for; `train.data.packing` turns them into tokens.
"""

import array
import dataclasses
import json
import math
import pathlib
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import grain


# What `train.data.packing`, `train.data.preferences`, and the rewards of `train.data.rewards` read.
KEYS = (
    "messages", "conversations", "prompt", "completion", "text", "tools", "images",
    "chosen", "rejected", "label", "answer", "tests",
)  # fmt: skip
PIECE = 16 * 1024  # bytes of a .txt file that are a record; the last one can be half as long again
LINE = 2**23  # most bytes of a .jsonl line: tokenizing it takes 150 times as much memory


class Record(NamedTuple):
    """One record of a file, as it is in the file."""

    where: str  # file and line, for messages
    fields: Any
    folder: pathlib.Path = pathlib.Path()  # of the file, which names of images are relative to


def find_files(path: str | pathlib.Path) -> tuple[list[pathlib.Path], list[pathlib.Path]]:
    """Returns the files to train on and the files to validate on, both sorted.

    In a folder, the words train, valid, validation, val, dev and test in the names of files and subfolders tell them
    apart. Test files are for validation where there are no others. Without such words all files are for training.

    Raises:
        FileNotFoundError: there is no such file or folder.
        ValueError: there is nothing to train on, or files are of several kinds.
    """
    path = pathlib.Path(path)
    if path.is_file():
        train, valid = [path], []
    elif path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file() and _kind(file) in READERS)

        def named(words: str) -> list[pathlib.Path]:
            pattern = re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
            return [file for file in files if pattern.search(str(file.relative_to(path)))]

        valid = named("valid|validation|val|dev") or named("test")
        rest = [file for file in files if file not in named("valid|validation|val|dev|test")]
        train = [file for file in named("train|training") if file in rest] or rest
    else:
        raise FileNotFoundError(f"{path} is neither a file nor a folder.")
    if not train or _kind(train[0]) not in READERS:
        raise ValueError(f"{path} has nothing to train on: files must end in {', '.join(READERS)}.")
    if len({_kind(file) for file in train + valid}) > 1:
        raise ValueError(f"{path} has files of several kinds, {train[0].name} among them: name a single one of them.")
    return train, valid


def open_records(
    path: str | pathlib.Path, holdout: float = 0.02
) -> tuple[grain.MapDataset[Record], grain.MapDataset[Record] | None]:
    """Opens the records to train on, and those to validate on.

    Records for validation come from the folder's files for it (see `find_files`); without such files they are the last
    of the records, a share of `holdout` (from 0 to 1) and at least one; for a holdout of 0, or a single record, None.

    Raises:
        FileNotFoundError, ValueError: as `find_files`, or the data set is empty.
    """
    train, valid = find_files(path)
    records = _concatenated(train)
    if valid:
        return records, _concatenated(valid)
    held = min(math.ceil(holdout * len(records)), len(records) - 1)
    return (records[:-held], records[-held:]) if held else (records, None)


def weighted(sets: Sequence[grain.MapDataset[Record]], weights: Sequence[float] = ()) -> grain.MapDataset[Record]:
    """Joins data sets into one, in which their numbers of records have the ratios of `weights`; () leaves them as are.

    Every record is in it: those of the set that is largest for its weight once, those of the others repeatedly.

    Raises:
        ValueError: `weights` are not one positive number for each set.
    """
    if not weights:
        return grain.MapDataset.concatenate(list(sets))
    if len(weights) != len(sets) or min(weights) <= 0:
        raise ValueError(f"{len(sets)} data sets need as many positive weights, not {list(weights)}.")
    unit = max(len(records) / weight for records, weight in zip(sets, weights, strict=True))
    counts = [max(len(records), round(unit * weight)) for records, weight in zip(sets, weights, strict=True)]
    return grain.MapDataset.concatenate([records.repeat()[:count] for records, count in zip(sets, counts, strict=True)])


def _concatenated(files: Sequence[pathlib.Path]) -> grain.MapDataset[Record]:
    check_array_records([file for file in files if _kind(file) == ".array_record"])
    sources = [READERS[_kind(file)](file) for file in files]
    filled = [grain.MapDataset.source(source) for source in sources if len(source)]
    if not filled:
        raise ValueError(f"The data set is empty: no records in {', '.join(map(str, files))}.")
    return grain.MapDataset.concatenate(filled)


def _kind(file: pathlib.Path) -> str:
    """Returns a file's suffix, without a shard's number: ".array_record" for c4.array_record-00000-of-00008."""
    return pathlib.Path(re.sub(r"-\d+-of-\d+$", "", file.name)).suffix


# ======================================================================================================================
# Readers of each kind of file.
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class File:
    """The records of one file, as a random access data source of grain."""

    length: int
    read: Callable[[int], Record]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Record:
        return self.read(index)


def read_json_lines(file: pathlib.Path) -> File:
    """Opens a file of one JSON object a line; skips empty lines. Keeps where lines begin, and reads them on demand."""
    starts, numbers = array.array("Q"), array.array("Q")
    with open(file, "rb") as lines:
        at = 0
        for number, line in enumerate(lines, 1):
            if len(line) > LINE:
                raise ValueError(
                    f"{file}, line {number} has {len(line):,} bytes, and may have {LINE:,}: split its text."
                )
            if not line.isspace():
                # A line is parsed when it is read, but one that was cut off is better found before a long run.
                if not line.rstrip().endswith(b"}"):
                    raise ValueError(f"{file}, line {number} is broken: each line must be a whole JSON object.")
                starts.append(at)
                numbers.append(number)
            at += len(line)

    def read(index: int) -> Record:
        where = f"{file}, line {numbers[index]}"
        with open(file, "rb") as lines:
            lines.seek(starts[index])
            line = lines.readline()
        try:
            return Record(where, json.loads(line), file.parent)
        except json.JSONDecodeError as error:
            raise ValueError(f"{where} is broken: {error.msg} at column {error.colno}.") from error
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 text: {error}") from error

    return File(len(starts), read)


def read_json(file: pathlib.Path) -> File:
    """Opens a JSON list of objects, all in memory; or JSON lines, whose files often have this suffix, too."""
    with open(file, "rb") as stream:
        if stream.read(1024).lstrip()[:1] != b"[":
            return read_json_lines(file)
        stream.seek(0)
        try:
            items = json.load(stream)
        except ValueError as error:
            raise ValueError(f"{file} is broken: {error}") from error
    return File(len(items), lambda index: Record(f"{file}, record {index + 1}", items[index], file.parent))


def read_parquet(file: pathlib.Path) -> File:
    """Opens rows, all in memory, since the format has no random access: use ArrayRecord for large data sets."""
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"Reading {file} needs pyarrow: pip install -e '.[data]'") from None
    try:
        with parquet.ParquetFile(file) as groups:
            table = groups.read([name for name in groups.schema_arrow.names if name in KEYS] or None)
    except (OSError, ValueError) as error:
        raise ValueError(f"{file} is broken: {error}") from error
    fields = lambda index: table.slice(index, 1).to_pylist()[0]
    return File(len(table), lambda index: Record(f"{file}, record {index + 1}", fields(index), file.parent))


def read_text(file: pathlib.Path) -> File:
    """Opens a text in pieces, of whole lines where possible; all pieces but the last are marked by `continues`."""
    size = file.stat().st_size
    cuts = [0]
    with open(file, "rb") as stream:
        while size - cuts[-1] > PIECE + PIECE // 2:
            stream.seek(cuts[-1])
            cuts.append(cuts[-1] + _cut(stream.read(PIECE)))
    if size:
        cuts.append(size)

    def read(index: int) -> Record:
        start, end = cuts[index : index + 2]
        where = f"{file}, bytes {start} to {end}"
        with open(file, "rb") as stream:
            stream.seek(start)
            piece = stream.read(end - start)
        try:
            return Record(where, {"text": piece.decode(), "continues": end < size})
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is not UTF-8 text: {error}") from error

    return File(len(cuts) - 1, read)


def _cut(block: bytes) -> int:
    """Returns where to end a piece: after the last whole line, else before the last space, or the last character."""
    cut = block.rfind(b"\n") + 1 or block.rfind(b" ")
    if cut > 0:
        return cut
    return next((i for i in range(len(block) - 1, len(block) - 5, -1) if block[i] & 0xC0 != 0x80), len(block))


# Reads all records. Prints each file's name first, so that the last name is that of the file that ended the process.
READ_ARRAY_RECORDS = """
import sys
from array_record.python.array_record_module import ArrayRecordReader
for file in sys.argv[1:]:
    print(file, flush=True)
    at, reader = 0, ArrayRecordReader(file)
    if not reader.num_records():
        sys.exit("it has no records, or its index is damaged")
    try:
        for at in range(reader.num_records()):
            reader.read()
    except Exception as error:
        sys.exit(f"record {at + 1}: {error}")
"""


def check_array_records(files: Sequence[pathlib.Path]) -> None:
    """Reads all records of ArrayRecord files once, in another process: damaged files can crash the native code.

    Raises:
        ValueError: a file is damaged; names it.
    """
    if not files:
        return
    command = [sys.executable, "-P", "-c", READ_ARRAY_RECORDS, *map(str, files)]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if child.returncode < 0:
        reason = f"reading it ended a process by {signal.Signals(-child.returncode).name}"
    elif child.returncode:
        reason = child.stderr.splitlines()[-1]
    else:
        return
    raise ValueError(f"{child.stdout.splitlines()[-1]} is broken: {reason}. Fetch or write it again.")


def read_array_record(file: pathlib.Path) -> File:
    """Opens a file whose records are each a tf.train.Example of strings, or a text in UTF-8."""
    try:
        source = grain.sources.ArrayRecordDataSource([str(file)])
        length = len(source)  # pyright: ignore[reportArgumentType] (its type differs on Windows)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{file} is broken: {error}") from error

    def read(index: int) -> Record:
        where = f"{file}, record {index + 1}"
        try:
            data = source[index]
        except RuntimeError as error:  # damaged since it was checked
            raise ValueError(f"{where} is broken: {error}") from error
        try:
            return Record(where, _example_fields(data) or {"text": data.decode()})
        except UnicodeDecodeError as error:
            raise ValueError(f"{where} is neither a tf.train.Example nor UTF-8 text: {error}") from error

    return File(length, read)


def _example_fields(data: bytes) -> dict[str, Any]:
    """Parses the strings of a serialized tf.train.Example; returns an empty dict for anything else.

    Example { Features features = 1 }, Features { map<string, Feature> feature = 1 }, Feature { one of BytesList = 1 and
    two lists of numbers }, BytesList { repeated bytes value = 1 }.
    """
    fields = {}
    try:
        for _, features in _protobuf(data):
            for _, entry in _protobuf(features):
                pair = dict(_protobuf(entry))
                key = pair[1].decode()
                ((kind, values),) = _protobuf(pair[2])
                strings = [value.decode() for _, value in _protobuf(values)] if kind == 1 and key in KEYS else []
                fields[key] = strings[0] if len(strings) == 1 else strings
    except (ValueError, IndexError, KeyError):
        return {}
    return fields


def _protobuf(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the bytes of each field of a protobuf message whose fields all have a length.

    So have all messages on the way to the strings of an Example. https://protobuf.dev/programming-guides/encoding
    """
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        size = varint()
        if kind != 2 or at + size > len(data):
            raise ValueError("a field without a length, or with a wrong one")
        yield number, data[at : at + size]
        at += size


READERS = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".txt": read_text,
    ".array_record": read_array_record,
}
