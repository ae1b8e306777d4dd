"""Records of a data set, in any format of `train.data.formats`, with random access: a `grain.MapDataset`.

    train, valid = open_records("chats/")
    train[0]  # Record(where="chats/train.jsonl, line 1", fields={"messages": [...]})

Records are read from the files on demand; `train.data.packing` turns them into tokens. Every process has the same
records in the same order. Opening is quick the second time, as the cache folder keeps the results of slow work.
"""

import pathlib
from collections.abc import Mapping, Sequence

import grain

from train.data import described, functions, naming
from train.data.files import find_files, kind, local
from train.data.formats import READERS
from train.data.formats.examples import check_array_records
from train.data.record import KEYS, Record
from train.data.rows import held_out


__all__ = ["KEYS", "Record", "find_files", "open_records"]


def open_records(
    path: str | pathlib.Path, holdout: float = 0.02, columns: Sequence[str] = ()
) -> tuple[grain.MapDataset[Record], grain.MapDataset[Record] | None]:
    """Opens the records to train on, and the records to validate on.

    Records for validation come from the validation files (see `find_files`). Without such files they are the last
    records: a share of `holdout` (from 0 to 1), and at least one. They are None if `holdout` is 0 or there is only one
    record.

    Args:
        path: a file, a folder, a glob, a URL, or hf:NAME; see `train.data.files`. With @file.py:function, that function
            converts the fields of each record in the files.
        columns: names of columns in the files for fields, see `train.data.naming`.

    Raises:
        OSError, ValueError, ImportError: as in `find_files`; or a file cannot be read; or the data set is empty.
    """
    data, function = functions.split(str(path))
    names = naming.parse(columns)
    train, valid = find_files(data)
    records = _concatenated(train, function, names)
    if valid:
        return records, _concatenated(valid, function, names)
    held = held_out(holdout, len(records))
    return (records[:-held], records[-held:]) if held else (records, None)


def _concatenated(files: Sequence[str], function: str | None, names: Mapping[str, str]) -> grain.MapDataset[Record]:
    paths = local(files)
    if kind(files[0]) == ".array_record":
        check_array_records(paths, files)
    every = function is not None or bool(names)
    sources = [READERS[kind(file)](path, file, every) for path, file in zip(paths, files, strict=True)]
    described.check(files, [len(source) for source in sources])
    filled = [grain.MapDataset.source(source) for source in sources if len(source)]
    if not filled:
        raise ValueError(f"The data set is empty: no records in {', '.join(files)}.")
    records = grain.MapDataset.concatenate(filled)
    if names:
        records = records.map(naming.Renamed(names))
    return records.map(functions.Mapped(function, functions.load(function))) if function else records
