"""Compares files with what lies beside them: whole records may be missing, which no checksum shows."""

import json
import pathlib
import re
from collections.abc import Sequence
from typing import Any


def check(files: Sequence[str], lengths: Sequence[int]) -> None:
    """Checks that files in folders by TFDS have as many records as dataset_info.json says, and that no file is missing
    of those in folders by TFDS or by `save_to_disk` of `datasets`.

    Args:
        files: names of files; those of object stores are passed over.
        lengths: how many records each of them has.

    Raises:
        ValueError: a file is missing or too short; or what lies beside it is no JSON.
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
    """Returns the numbers of records in the files of each split, as TFDS writes them."""
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
