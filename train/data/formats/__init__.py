"""Readers of each kind of file: from a path on this machine, and the file's name for messages, to its records.

A reader raises a ValueError that names the file if it is damaged, or an ImportError that names the missing package. The
third argument of a reader is whether to read every column, and not only those of `train.data.record.KEYS`.
"""

from collections.abc import Callable
from pathlib import Path

from train.data.formats.columns import read_arrow, read_parquet
from train.data.formats.examples import read_array_record, read_tfrecord
from train.data.formats.ids import read_megatron, read_npy
from train.data.formats.text import read_csv, read_json, read_json_lines, read_text
from train.data.record import Records


READERS: dict[str, Callable[[Path, str, bool], Records]] = {
    ".jsonl": read_json_lines,
    ".json": read_json,
    ".parquet": read_parquet,
    ".txt": read_text,
    ".array_record": read_array_record,
    ".tfrecord": read_tfrecord,
    ".arrow": read_arrow,
    ".bin": read_megatron,
    ".npy": read_npy,
    ".csv": read_csv,
}
