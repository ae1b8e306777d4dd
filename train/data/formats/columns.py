"""Readers of tables, whose rows are records: parquet, and Arrow as Hugging Face `datasets` writes it."""

import collections
import pathlib
import threading
from typing import Any

import numpy as np

from train.data.record import KEYS, Records


EOS = b"\xff\xff\xff\xff\0\0\0\0"  # ends a stream of Arrow, https://arrow.apache.org/docs/format/Columnar.html
MEMORY = 2**30  # largest size in memory, in bytes, of the cached row groups of all parquet files


def _chosen(names: list[str], every: bool) -> list[str]:
    """Returns the columns to read. If no column is known, these are all of them, so that a message can name them."""
    return names if every else [name for name in names if name in KEYS] or names


class _Groups:
    """A cache of the row groups that were read last."""

    def __init__(self) -> None:
        self.tables: collections.OrderedDict[tuple[str, int], Any] = collections.OrderedDict()
        self.bytes, self.lock = 0, threading.Lock()

    def read(self, file: pathlib.Path, key: str, group: int, columns: list[str]) -> Any:
        from pyarrow import parquet

        with self.lock:
            if (key, group) in self.tables:
                self.tables.move_to_end((key, group))
                return self.tables[key, group]
            with parquet.ParquetFile(file) as whole:
                table = whole.read_row_group(group, columns)
            self.tables[key, group] = table
            self.bytes += table.nbytes
            while self.bytes > MEMORY and len(self.tables) > 1:
                self.bytes -= self.tables.popitem(last=False)[1].nbytes
            return table


GROUPS = _Groups()


def read_parquet(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens the rows of a parquet file. A row is read with its row group; the last groups are cached, up to `MEMORY`.

    So data that fits into the cache, and data that is read in order, is read once. Other data in random order is slow,
    since a group is read for each of its rows; `python -m train.prepare` reads in order.
    """
    try:
        from pyarrow import parquet
    except ImportError:
        raise ImportError(f"Reading {name} needs pyarrow: pip install -e '.[data]'") from None
    try:
        with parquet.ParquetFile(file) as whole:
            columns = _chosen(whole.schema_arrow.names, every)
            sizes = [whole.metadata.row_group(i).num_rows for i in range(whole.num_row_groups)]
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is broken: {error}") from error
    key, ends = f"{file} {file.stat().st_mtime_ns} {every}", np.cumsum(sizes)

    def read(index: int) -> Any:
        group = int(np.searchsorted(ends, index, side="right"))
        table = GROUPS.read(file, key, group, columns)
        return table.slice(index - int(ends[group]) + sizes[group], 1).to_pylist()[0]

    return Records(name, sum(sizes), read)


def read_arrow(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens the rows of an Arrow stream or file, memory-mapped: rows are read on demand."""
    try:
        import pyarrow as pa
    except ImportError:
        raise ImportError(f"Reading {name} needs pyarrow: pip install -e '.[data]'") from None
    try:
        source = pa.memory_map(str(file))
        if source.read(6) == b"ARROW1":
            table = pa.ipc.open_file(source).read_all()
        else:
            source.seek(max(0, source.size() - len(EOS)))
            if source.read() != EOS:
                raise ValueError("it does not end as a stream of Arrow does, so it may have been cut off")
            source.seek(0)
            table = pa.ipc.open_stream(source).read_all()
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{name} is broken: {error}. Fetch or write it again.") from error
    table = table.select(_chosen(table.column_names, every))

    def read(index: int) -> Any:
        row = table.slice(index, 1)
        row.validate(full=True)  # otherwise offsets that point out of the file would be followed
        return row.to_pylist()[0]

    return Records(name, len(table), read)
