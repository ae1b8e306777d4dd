"""Prepared stores: rows of tokens in files, made once by `train.prepare` and read by any number of processes.

    about.json                              the data and the options that rows are made from; written first
    train-00003-of-00040.array_record       rows (`train.data.rows.to_bytes`) of records from 3 * 8,192 on
    train-00003-of-00040.json               counts, size and SHA-256 of the .array_record; written after it
    store.json                              all of these together; written last: a folder without it is incomplete

The bytes of a file of rows follow from its records alone, whichever process makes it, so no file is made twice.
Machines that share a folder may write to it at once: each has names of its own for what it has begun, and renames it at
its end.
"""

import bisect
import concurrent.futures
import hashlib
import itertools
import json
import os
import pathlib
import re
import shutil
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import grain
import numpy as np
from array_record.python import array_record_module  # pyright: ignore[reportAttributeAccessIssue]

from convert import cache, manifest
from convert.private import public, public_json
from train.base import writing
from train.base.differences import differences
from train.data.packing import tokenizer_hash
from train.data.rows import Row, of_bytes, to_bytes
from zoo.text.tokenizer import Tokenizer


ABOUT, STORE = "about.json", "store.json"
AGAIN = ": copy the store again, or prepare it anew."
RECORDS = 8192  # records of one file
COUNTED = ("records", "rows", "documents", "tokens", "learnt")


def is_store(path: str | pathlib.Path) -> bool:
    """Whether a folder is a store, complete or not."""
    return (pathlib.Path(path) / ABOUT).is_file()


# ======================================================================================================================
# Writing.
# ======================================================================================================================


def begin(folder: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Makes the folder, or checks that it is of an interrupted preparation with the same data and options.

    Raises:
        ValueError: the folder is of another preparation, or has other files.
    """
    new = public_json(dict(about))
    files = [path.name for path in folder.iterdir()] if folder.exists() else []
    if not is_store(folder):
        if not all(name.startswith(ABOUT) for name in files):
            raise ValueError(f"{folder} has other files: name a new folder by --out.")
        folder.mkdir(parents=True, exist_ok=True)
        _write_json(folder / ABOUT, new)
    elif changed := differences(public_json(json.loads((folder / ABOUT).read_text())), new):
        name, (before, now) = next(iter(changed.items()))
        raise ValueError(f"{folder} was begun with other data or options: {name} was {before} and is {now}.")


def shard_name(split: str, number: int, of: int) -> str:
    return f"{split}-{number:05}-of-{of:05}"


def write_shard(folder: pathlib.Path, name: str, rows: Iterable[Row], records: int) -> dict[str, Any]:
    """Writes rows to NAME.array_record, and their counts to NAME.json. Returns the content of NAME.json.

    If the process is interrupted, NAME.json is missing, and a later start writes NAME.array_record again. What it has
    begun goes when the store is complete.

    Args:
        records: the number of records that the rows are made of.
    """
    path, counts = folder / f"{name}.array_record", dict.fromkeys(COUNTED, 0) | {"records": records}
    new = _own(path)
    writer = array_record_module.ArrayRecordWriter(str(new), "group_size:1")
    for row in rows:
        _written(path, writer.write, to_bytes(row))
        counts["rows"] += 1
        counts["documents"] += int(row["segments"].max())
        counts["tokens"] += int(np.count_nonzero(row["segments"]))
        counts["learnt"] += int(np.count_nonzero(row["loss_mask"]))
    _written(path, writer.close)
    with new.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    new.replace(path)
    return _write_json(path.with_suffix(".json"), counts | {"bytes": path.stat().st_size, "sha256": digest})


def _written(path: pathlib.Path, write: Callable[..., None], *data: bytes) -> None:
    try:
        write(*data)
    except RuntimeError as error:
        _own(path).unlink(missing_ok=True)  # otherwise a full disk would stay full
        free = shutil.disk_usage(path.parent).free / 1e9
        raise OSError(
            f"{path} could not be written, where {free:.1f} GB are free: {error}. Make room; then the same command "
            "goes on with what is missing."
        ) from error


def finished(folder: pathlib.Path, name: str) -> dict[str, Any] | None:
    """Returns the content of a shard's NAME.json. None if the shard was not written to its end."""
    try:
        found = json.loads((folder / f"{name}.json").read_text())
        whole = (folder / f"{name}.array_record").stat().st_size == found["bytes"]
    except (OSError, ValueError, KeyError):
        return None
    return found if whole else None


def end(folder: pathlib.Path, shards: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Writes store.json: the content of about.json, all shards, and their sums for each split. Returns its content."""
    about, splits = json.loads((folder / ABOUT).read_text()), {}
    for name, shard in shards.items():
        of_split = splits.setdefault(name.partition("-")[0], dict.fromkeys(COUNTED, 0))
        for key in COUNTED:
            of_split[key] += shard[key]
    for path in folder.glob("*.tmp"):
        if not path.name.startswith(STORE):  # another machine may be about to complete the store, too
            path.unlink(missing_ok=True)
    return _write_json(folder / STORE, about | {"splits": splits, "shards": dict(sorted(shards.items()))})


def _write_json(path: pathlib.Path, content: dict[str, Any]) -> dict[str, Any]:
    writing.write(new := _own(path), public(json.dumps(content, indent=1)) + "\n")
    new.replace(path)
    return content


def _own(path: pathlib.Path) -> pathlib.Path:
    """Returns the name under which this process writes a file, before it renames it."""
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.tmp")


# ======================================================================================================================
# Reading.
# ======================================================================================================================


def read(folder: pathlib.Path) -> dict[str, Any]:
    """Reads store.json, and checks the sizes of the shards.

    Raises:
        FileNotFoundError: the store is not complete.
        ValueError: a file is missing or has another size; or store.json is no JSON.
    """
    if not (folder / STORE).is_file():
        raise FileNotFoundError(f"{folder} is not complete: run `python -m train.prepare` for it to its end.")
    store = json.loads((folder / STORE).read_text())
    for name, shard in store["shards"].items():
        path = folder / f"{name}.array_record"
        size = path.stat().st_size if path.is_file() else None
        if size != shard["bytes"]:
            has = "is missing" if size is None else f"has {size:,} bytes"
            raise ValueError(f"{path} {has}, and was written with {shard['bytes']:,}: copy the store again.")
    return store


def verify(folder: pathlib.Path, *, anew: bool = False) -> None:
    """Compares the SHA-256 of all shards with those in store.json.

    A shard is read once, and its hash is cached (`convert.cache.sha256`). With `anew` every shard is read again.

    Raises:
        ValueError: a shard has changed since it was written; names the shard, and its first damaged row if one is.
    """

    def check(named: tuple[str, Mapping[str, Any]]) -> None:
        name, shard = named
        path = folder / f"{name}.array_record"
        found = manifest.hashes(folder, [path.name])[path.name] if anew else cache.sha256(path)
        if found != shard["sha256"]:
            rows = _Rows([path], [shard["rows"]])
            for n in range(len(rows)):
                rows[n]  # raises the error that names the row
            raise ValueError(f"{path} is not what was written{AGAIN}")

    with concurrent.futures.ThreadPoolExecutor() as pool:
        list(pool.map(check, read(folder)["shards"].items()))


class _Rows:
    """The rows of several files as bytes, by number."""

    def __init__(self, paths: Sequence[pathlib.Path], counts: Sequence[int]):
        self._paths, self._ends = paths, list(itertools.accumulate(counts))
        # The names have the numbers of rows, as each file would be opened now otherwise.
        named = [f"{path}[0:{count}]" for path, count in zip(paths, counts, strict=True)]
        self._source: Any = grain.sources.ArrayRecordDataSource(named)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, number: int) -> bytes:
        try:
            return self._source[number]
        except RuntimeError as error:  # each row has a hash in its file
            n = bisect.bisect(self._ends, number)
            row = number - (self._ends[n - 1] if n else 0) + 1
            raise ValueError(f"{self._paths[n]}, row {row:,}, is not what was written{AGAIN}") from error


def rows(folder: pathlib.Path, store: Mapping[str, Any], split: str) -> grain.MapDataset[Row] | None:
    """Returns the rows of a split, such as "train"; None if it has no rows."""
    shards = [(name, shard["rows"]) for name, shard in store["shards"].items() if re.match(rf"{split}-\d", name)]
    filled = [(folder / f"{name}.array_record", count) for name, count in shards if count]
    return of_bytes(_Rows(*zip(*filled, strict=True)), store["settings"]["seq_len"]) if filled else None


def identity(kind: str, tokenizer: Tokenizer, shape: Mapping[str, Any]) -> dict[str, Any]:
    """Returns everything but the records that rows depend on, in a store and in a run.

    Args:
        kind: the `train.data.packing.RecordKind.name` of the records.
        shape: arguments of the kind's `pack`.
    """
    of_tokens = {"tokenizer": tokenizer_hash(tokenizer), "bos": tokenizer.bos, "eos": list(tokenizer.eos)}
    return {"kind": kind, **of_tokens, "settings": dict(shape)}


def fingerprint(folder: pathlib.Path) -> str:
    """Returns a SHA-256 of a store: that of store.json, which has the hashes of all shards."""
    return hashlib.sha256((folder / STORE).read_bytes()).hexdigest()


def refuse_other(folder: pathlib.Path, store: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    """Checks that a store's rows are the same as the run would make.

    Args:
        now: `identity` of the run.

    Raises:
        ValueError: a setting differs; names the setting, and both values.
    """
    plain = json.loads(json.dumps(dict(now)))
    if changed := differences({key: store[key] for key in plain}, plain):
        name, (before, wanted) = next(iter(changed.items()))
        name = "--" + name.removeprefix("settings.").replace("_", "-") if name.startswith("settings.") else name
        raise ValueError(
            f"{folder} was prepared for {store['model']} with {name} {before}, and this run has {wanted}: give the "
            "run the same, or prepare the data again."
        )


def summary(store: Mapping[str, Any], split: str) -> Sequence[tuple[str, str]]:
    """Describes a split in words: its rows, records, documents, tokens and padding."""
    counts, seq_len = store["splits"][split], store["settings"]["seq_len"]
    return [
        ("rows", f"{counts['rows']:,} of {seq_len:,} tokens"),
        ("records", f"{counts['records']:,}"),
        ("documents", f"{counts['documents']:,}"),
        ("tokens", f"{counts['tokens']:,}, of which {counts['learnt']:,} are learnt"),
        ("filled", f"{100 * counts['tokens'] / max(1, counts['rows'] * seq_len):.1f} % of the rows is not padding"),
    ]
