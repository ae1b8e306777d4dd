"""A comparison of data files with the descriptions beside them: no checksum shows that whole records are missing."""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any


def check(files: Sequence[str], lengths: Sequence[int]) -> None:
    """Checks the files of folders that TFDS, or `save_to_disk` of `datasets`, has written.

    No file may be missing, and files by TFDS must have as many records as dataset_info.json says.

    Args:
        files: names of files; files of object stores are skipped.
        lengths: the number of records in each file.

    Raises:
        ValueError: a file is missing, or has another number of records; or a description is no JSON.
    """
    shards: dict[tuple[pathlib.Path, str], list[str]] = {}
    for file, length in zip(files, lengths, strict=True):
        path = pathlib.Path(file)
        match = re.search(r"-(\w+)\.(tfrecord|array_record)-(\d+)-of-\d+$", path.name)
        if match and (expected := _shards(path.parent).get(match[1])):
            shards[path.parent, path.name[: match.start(3)]] = expected
            if int(match[3]) >= len(expected) or length != int(expected[int(match[3])]):
                raise ValueError(
                    f"{file} has {length:,} records, but not by dataset_info.json. Fetch or write it again."
                )
    for (folder, begin), expected in shards.items():
        _all(folder, [f"{begin}{i:05}-of-{len(expected):05}" for i in range(len(expected))], "dataset_info.json")
    for folder in {pathlib.Path(file).parent for file in files}:
        _all(folder, [each["filename"] for each in _read(folder / "state.json").get("_data_files", [])], "state.json")


def _shards(folder: pathlib.Path) -> dict[str, list[str]]:
    """Returns split -> number of records in each of its files, as TFDS writes them."""
    splits = _read(folder / "dataset_info.json").get("splits")
    return {each["name"]: each.get("shardLengths", []) for each in splits} if isinstance(splits, list) else {}


def _all(folder: pathlib.Path, names: Sequence[str], why: str) -> None:
    if missing := [name for name in names if not (folder / name).exists()]:
        raise ValueError(f"{folder} lacks {missing[0]}, which its {why} names. Fetch or write it again.")


def _read(file: pathlib.Path) -> dict[str, Any]:
    try:
        return json.loads(file.read_text()) if file.exists() else {}
    except ValueError as error:
        raise ValueError(f"{file} is broken: {error}") from error
