"""Readers of ArrayRecord and TFRecord files. Each of their records is a tf.train.Example, or a text in UTF-8."""

import pathlib
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np

from convert import cache
from train.data.formats.index import index
from train.data.record import KEYS, Records


# ======================================================================================================================
# Files.
# ======================================================================================================================


# Reads all records. Prints each file's name first, so that the last name printed is the file that ended the process.
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


def check_array_records(files: Sequence[pathlib.Path], names: Sequence[str] = ()) -> None:
    """Reads all records of ArrayRecord files in another process, as damaged files can crash the native code.

    Each file is read once: the cache folder records which files are whole, until they change.

    Raises:
        ValueError: a file is damaged. It is named as in `names`, if these are given.
    """
    noted = [cache.folder("whole") / cache.name_of(cache.key_of(file)) for file in files]
    unread = {str(file): note for file, note in zip(files, noted, strict=True) if not note.exists()}
    if not unread:
        return
    command = [sys.executable, "-P", "-c", READ_ARRAY_RECORDS, *unread]
    child = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if not child.returncode:
        for note in unread.values():
            note.parent.mkdir(parents=True, exist_ok=True)
            note.touch()
        return
    if child.returncode < 0:
        reason = f"reading it ended a process by {signal.Signals(-child.returncode).name}"
    else:
        reason = child.stderr.splitlines()[-1]
    file = child.stdout.splitlines()[-1]
    name = dict(zip(map(str, files), names, strict=False)).get(file, file)
    raise ValueError(f"{name} is broken: {reason}. Fetch or write it again.")


def read_array_record(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens an ArrayRecord file. `check_array_records` must have read it before."""
    try:
        source = grain.sources.ArrayRecordDataSource([str(file)])
        length = len(source)  # pyright: ignore[reportArgumentType] (its type differs on Windows)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"{name} is broken: {error}") from error
    return Records(name, length, lambda index: _fields(source[index], every))


def read_tfrecord(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens a TFRecord file: finds the beginnings of its records by their lengths, and reads records on demand.

    A record is its length in 8 bytes, the masked CRC-32C of these, its bytes, and their masked CRC-32C. Both checksums
    are verified. https://www.tensorflow.org/tutorials/load_data/tfrecord
    """
    try:
        import google_crc32c
    except ImportError:
        raise ImportError(f"Reading {name} needs google-crc32c: pip install -e '.[data]'") from None

    places = index(file, name, _framed)

    def read(index: int) -> dict[str, Any]:
        start, length = map(int, places[index])
        with open(file, "rb") as stream:
            stream.seek(start)
            data, crc = stream.read(length), stream.read(4)
        if _masked(google_crc32c.value(data)) != crc:
            raise ValueError("its bytes do not have the checksum that was written with them.")
        return _fields(data, every)

    return Records(name, len(places), read)


def _masked(crc: int) -> bytes:
    return struct.pack("<I", ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF)


def _framed(file: pathlib.Path, name: str) -> Iterator[tuple[int, int]]:
    """Yields the offset of each record's bytes, and their number. Verifies the lengths' checksums."""
    import google_crc32c

    size, at, number = file.stat().st_size, 0, 0
    with open(file, "rb") as stream:
        while at < size:
            number += 1
            head = stream.read(12)
            if len(head) < 12 or _masked(google_crc32c.value(head[:8])) != head[8:]:
                what = "is cut off" if len(head) < 12 else "has a damaged length, or the file is no TFRecord"
                raise ValueError(f"{name}, record {number} is broken: it {what}.")
            (length,) = struct.unpack("<Q", head[:8])
            if at + 16 + length > size:
                raise ValueError(f"{name}, record {number} is broken: it is cut off.")
            yield at + 12, length
            at += 16 + length
            stream.seek(at)


# ======================================================================================================================
# Records.
# ======================================================================================================================


def _fields(data: bytes, every: bool) -> dict[str, Any]:
    """Returns the fields of a tf.train.Example, or a text."""
    if fields := _example_fields(data, every):
        return fields
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError as error:
        raise ValueError(f"it is neither a tf.train.Example nor UTF-8 text: {error}") from error


def _example_fields(data: bytes, every: bool) -> dict[str, Any]:
    """Parses a serialized tf.train.Example; returns an empty dict for anything else.

    Example { Features features = 1 }, Features { map<string, Feature> feature = 1 }, Feature { one of BytesList = 1,
    FloatList = 2, Int64List = 3 }, each { repeated value = 1 }. Unknown keys get an empty list, unless `every` key is
    requested. The lists messages/role and messages/content become one list of objects, which TFDS splits in this way.
    """
    fields: dict[str, Any] = {}
    try:
        for _, features in _protobuf(data):
            for _, entry in _protobuf(features):
                pair = dict(_protobuf(entry))
                key = pair[1].decode()
                ((kind, values),) = _protobuf(pair[2])
                known = every or key.partition("/")[0] in KEYS
                fields[key] = _values(kind, [value for _, value in _protobuf(values)], every) if known else []
        for head, _, tail in [key.partition("/") for key in fields]:
            if tail and head in KEYS:
                rows = fields.setdefault(head, [{} for _ in fields[f"{head}/{tail}"]])
                for row, value in zip(rows, fields.pop(f"{head}/{tail}"), strict=True):
                    row[tail] = value
    except (ValueError, IndexError, KeyError):
        return {}
    # A list of one string may have been a string; ids and objects are always in lists.
    return {key: v[0] if len(v) == 1 and isinstance(v[0], str | bytes) else v for key, v in fields.items()}


def _values(kind: int, parts: list[bytes], every: bool) -> list[Any]:
    """Returns the values of a feature. If `every` key is requested, bytes that are no text are returned as bytes."""
    if kind == 1:
        return [_text(part) if every else part.decode() for part in parts]
    data = b"".join(parts)
    return np.frombuffer(data, "<f4").tolist() if kind == 2 else _varints(data)


def _text(data: bytes) -> str | bytes:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return data


def _varints(data: bytes) -> list[int]:
    """Decodes varints: 64-bit signed numbers, 7 bits a byte, lowest bits first. The last byte of each is below 128."""
    if not data:
        return []
    found = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero(found < 128) + 1
    if not len(ends) or ends[-1] != len(found):
        raise ValueError("a number that does not end")
    starts = np.concatenate([[0], ends[:-1]])
    shifts = 7 * (np.arange(len(found)) - np.repeat(starts, ends - starts))
    return np.add.reduceat((found & 127).astype(np.uint64) << shifts.astype(np.uint64), starts).view(np.int64).tolist()


def _protobuf(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yields the number and the bytes of each field of a protobuf message whose fields are all length-delimited.

    All messages within an Example are such. https://protobuf.dev/programming-guides/encoding
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
