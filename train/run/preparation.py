"""Preparation of data for training: several processes tokenize and pack records into the files of a store.

`train.prepare` is the command, and `train.data.store` the format.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
import re
from typing import Any

import grain
import jax

import zoo
from train.data import store
from train.data.records import Record, open_records
from train.data.sets import RowOptions


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions(RowOptions):
    """Prepare data for training. Run again with the same options, it goes on where it was interrupted."""

    out: pathlib.Path
    """Folder of the store. The folder is new, or that of an interrupted preparation."""
    hold_out: float = 0.0
    """Fraction of the records to validate on, from the end of each --data without validation files. 0: the run holds
    out rows instead."""
    seed: int = 0
    """Seed of the order in which each file's records are packed. A run shuffles the rows of all files of the store."""
    workers: int = 0
    """Number of processes. 0: as many as the machine has cores."""
    part: str = ""
    """Part of the files that this machine makes, such as 0/8 to 7/8 on eight machines that share the folder; all name
    the same number. The one that ends last completes the store."""

    @property
    def share(self) -> tuple[int, int]:
        """Returns the number of this machine, from 0 on, and that of all.

        Raises:
            ValueError: --part is no such pair.
        """
        match = re.fullmatch(r"(\d+)/(\d+)", self.part or "0/1")
        if not match or not int(match[1]) < int(match[2]):
            raise ValueError(f"--part {self.part}: write the number of this machine and that of all, as in 0/8 to 7/8.")
        return int(match[1]), int(match[2])


@dataclasses.dataclass(frozen=True)
class Shard:
    """The records from `start` to `stop` of one split of one --data, which become one file of rows."""

    name: str
    path: str
    split: int  # 0: to train on, 1: to validate on
    start: int
    stop: int


def shards_of(options: PrepareOptions, opened: Any) -> list[Shard]:
    """Splits all data into shards of `train.data.store.RECORDS` records, in order."""
    found = []
    for split, name in enumerate(("train", "valid")):
        cuts = [
            (path, start, min(start + store.RECORDS, len(both[split])))
            for path, both in zip(options.data, opened, strict=True)
            for start in range(0, len(both[split] or ()), store.RECORDS)
        ]
        for number, (path, start, stop) in enumerate(cuts):
            found.append(Shard(store.shard_name(name, number, len(cuts)), path, split, start, stop))
    return found


def made(options: PrepareOptions, shards: list[Shard], workers: int) -> Any:
    """Yields each shard with the result of `make`, as soon as it is done."""
    if workers <= 1:
        yield from ((shard, make(options, shard)) for shard in shards)
        return
    # Processes are spawned, since a fork would copy JAX's and the tokenizer's threads in the middle of their work.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_alone) as pool:
        futures = {pool.submit(make, options, shard): shard for shard in shards}
        try:
            for future in concurrent.futures.as_completed(futures):
                yield futures[future], future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def _alone() -> None:
    """Leaves the other cores, and accelerators, to other processes."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    jax.config.update("jax_platforms", "cpu")


def make(options: PrepareOptions, shard: Shard) -> dict[str, Any]:
    """Writes one file of the store. Returns its counts (`train.data.store.write_shard`)."""
    tokenizer, kind, shape, opened = _opened(options)
    records: grain.MapDataset[Record] = opened[shard.path][shard.split]
    rows = kind.pack(records[shard.start : shard.stop], tokenizer, seed=options.seed, **shape)
    return store.write_shard(options.out, shard.name, rows, shard.stop - shard.start)


@functools.lru_cache(maxsize=1)
def _opened(options: PrepareOptions) -> Any:
    """Opens tokenizer and data, once in each process."""
    model = options.source.open(options.model, options.revision)
    tokenizer = zoo.tokenizer(model, **options.chat.arguments)
    kind, shape = options.how(model.config.vocab_size)
    return (
        tokenizer,
        kind,
        shape,
        {path: open_records(path, options.hold_out, options.naming.columns) for path in options.data},
    )
