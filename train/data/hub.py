"""Data sets by name, read by Hugging Face `datasets`: hf:NAME, hf:NAME:CONFIG, or hf:NAME:CONFIG:SPLIT.

If a split is too large to fetch, hf:NAME:CONFIG:SPLIT:RECORDS names its first records. NAME is a repository of the Hub,
or a folder that `datasets.load_dataset` reads. CONFIG may be empty.
"""

import contextlib
import importlib
import pathlib
import re
from typing import Any

import rich.progress

from convert import cache


BATCH = 1000  # records that are fetched at a time


def files(name: str) -> dict[str, str]:
    """Returns Arrow file -> SPLIT/NUMBER, for the files of a data set that `datasets` writes into its cache.

    With a number of records, the records are streamed into our cache, and stay there until the user removes them.

    Raises:
        ImportError: `datasets` is not installed.
        ValueError: the name has none of these forms.
        OSError: `datasets` cannot read the data set, or the split has no records.
    """
    match = re.fullmatch(r"hf:([^:]+)(?::([^:]*))?(?::([\w.-]+))?(?::(\d+))?", name)
    if not match:
        raise ValueError(
            f"{name} is no name of a data set: it must be like hf:NAME:CONFIG:SPLIT:RECORDS, or end before."
        )
    try:
        datasets: Any = importlib.import_module("datasets")
    except ImportError:
        raise ImportError(f"Reading {name} needs datasets: pip install -e '.[hf]'") from None
    repository, config, split, records = match.groups()
    try:
        if records:
            write = lambda to: _write(
                datasets.load_dataset(repository, config or None, split=split, streaming=True), int(records), name, to
            )
            return {str(cache.keep(name, f"{split}.arrow", write)): f"{split}/00000"}
        found = datasets.load_dataset(repository, config or None, split=split)
    except Exception as error:  # of many types, also those of the data set's own builder
        raise OSError(f"{name} cannot be loaded: {type(error).__name__}: {' '.join(str(error).split())}") from error
    splits: Any = {split: found} if split else found
    return {
        file["filename"]: f"{split}/{number:05}"
        for split, data in splits.items()
        for number, file in enumerate(data.cache_files)
    }


def _write(stream: Any, records: int, name: str, to: pathlib.Path) -> None:
    """Writes the first records of a stream as an Arrow file."""
    import pyarrow as pa

    count = 0
    with pa.OSFile(str(to), "wb") as sink, contextlib.ExitStack() as stack:
        progress = stack.enter_context(rich.progress.Progress())
        task = progress.add_task(f"Fetching records of {name}", total=records)
        for table in stream.take(records).with_format("arrow").iter(batch_size=BATCH):
            if not count:
                schema = table.schema  # a later batch may have other types where it has no values
                writer = stack.enter_context(pa.ipc.new_stream(sink, schema))
            writer.write_table(table.cast(schema))
            count += len(table)
            progress.advance(task, len(table))
    if not count:
        raise ValueError("it has no records.")
