"""Tokenizes and packs data once, into a store of rows for any number of processes: `python -m train.prepare --help`.

    python -m train.prepare chats/ --model llama3.1-8b --seq-len 4096 --out prepared
    python -m train.sft --model llama3.1-8b --seq-len 4096 --data prepared

Interrupted at any moment, the same command goes on with the files that are missing. The bytes of the store depend on
the data and the options alone, not on the number of workers.
"""

import concurrent.futures
import dataclasses
import functools
import multiprocessing
import os
import pathlib
from typing import Any, Literal

import grain
import jax
import rich
import rich.progress
import tyro

import zoo
from train import report
from train.data import packing, store
from train.data.packing import TEXT, Chat, Kind, LongTexts, Packing
from train.data.preferences import PREFERENCES
from train.data.records import Record, open_records
from train.data.sets import text_settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowOptions:
    """Data, and how rows are made of it."""

    data: tyro.conf.Positional[tuple[str, ...]]
    """Files, folders of them, globs, URLs, or hf:NAME, as for train.sft and train.pretrain."""
    model: str
    """Model whose tokenizer and template are used: a zoo name, a Hub repository org/name, or a folder."""
    revision: str | None = None
    """Branch, tag or commit of the Hub repository."""
    seq_len: int = 2048
    """Tokens of a row."""
    kind: Literal["text", "preferences", "kto"] = "text"
    """Kind of records. text: texts, chats, and prompts with completions, for pretrain, sft and distill. preferences:
    chosen and rejected, for dpo. kto: completions with a label, or pairs, for dpo with --loss kto."""
    packing: Packing = "fit"
    """As of the run: its default is fit for train.sft, and concat for train.pretrain."""
    long_texts: LongTexts = "split"
    """What becomes of a text that is longer than a row. split: it is continued in other rows. cut: its end is left
    out."""
    completions_only: bool = True
    """Learn completions and what the assistant says, but not prompts."""
    chat: Chat = dataclasses.field(default_factory=Chat)

    def how(self, vocab_size: int) -> tuple[Kind, dict[str, Any]]:
        """What makes rows of these records, and the arguments of its `pack`."""
        if self.kind == "text":
            settings = text_settings(self, vocab_size, completions_only=self.completions_only)
            return TEXT, settings | {"seq_len": self.seq_len}
        return PREFERENCES, {"vocab_size": vocab_size, "unpaired": self.kind == "kto", "seq_len": self.seq_len}


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareOptions(RowOptions):
    """Prepare data for training. Run again with the same options, it goes on where it was interrupted."""

    out: pathlib.Path
    """Folder of the store. It is made, or is that of an interrupted preparation."""
    hold_out: float = 0.0
    """Fraction of the records to validate on, from the end of each --data without files for it. 0: the run holds out
    rows instead."""
    seed: int = 0
    """Seed of the order in which the records of a file of the store are packed; a run shuffles the rows of all."""
    workers: int = 0
    """Number of processes. 0: as many as the machine has cores."""


@dataclasses.dataclass(frozen=True)
class Shard:
    """The records from `start` to `stop` of one split of one --data, which become one file of rows."""

    name: str
    path: str
    split: int  # 0: to train on, 1: to validate on
    start: int
    stop: int


def main(o: PrepareOptions) -> dict[str, Any]:
    """Writes the store, and returns the content of its store.json (`train.data.store`).

    Raises:
        ValueError, OSError: the data cannot be learnt from, or the folder is of another preparation.
    """
    tokenizer = zoo.tokenizer(o.model, revision=o.revision, **vars(o.chat))
    kind, shape = o.how(zoo.config(tokenizer.folder).vocab_size)
    opened = [open_records(path, o.hold_out) for path in o.data]
    for path, (records, _) in zip(o.data, opened, strict=True):
        found = kind.survey(records, tokenizer, **shape)
        report.data(path, found, tokenizer, vocab_size=shape["vocab_size"], seq_len=o.seq_len, dry_run=False)
    with rich.get_console().status("Hashing the data"):
        sources = [packing.fingerprint(path, tokenizer)["files"] for path in o.data]
    about = {"version": 1, "model": o.model, **store.identity(kind.name, tokenizer, shape)}
    about |= {"hold_out": o.hold_out, "seed": o.seed, "sources": [dict(files=files) for files in sources]}
    store.begin(o.out, about)
    shards = shards_of(o, opened)
    done = {shard.name: found for shard in shards if (found := store.finished(o.out, shard.name))}
    if done:
        rich.print(f"{len(done):,} of {len(shards):,} files are there already.")
    left = [shard for shard in shards if shard.name not in done]
    workers = min(o.workers or os.cpu_count() or 1, len(left))
    bar = rich.progress.Progress(*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with bar as progress:
        task = progress.add_task("Preparing", total=len(shards), completed=len(done))
        for shard, found in _made(o, left, workers):
            done[shard.name] = found
            progress.advance(task)
    content = store.end(o.out, done)
    for split in content["splits"]:
        report.rows(f"{o.out}, {split}", dict(store.summary(content, split)))
    return content


def shards_of(o: PrepareOptions, opened: Any) -> list[Shard]:
    """Cuts all data into shards of `train.data.store.RECORDS` records, in order."""
    found = []
    for split, name in enumerate(("train", "valid")):
        cuts = [
            (path, start, min(start + store.RECORDS, len(both[split])))
            for path, both in zip(o.data, opened, strict=True)
            for start in range(0, len(both[split] or ()), store.RECORDS)
        ]
        for number, (path, start, stop) in enumerate(cuts):
            found.append(Shard(store.shard_name(name, number, len(cuts)), path, split, start, stop))
    return found


def _made(o: PrepareOptions, shards: list[Shard], workers: int) -> Any:
    """Yields shards with what `make` returns of them, as they are done."""
    if workers <= 1:
        yield from ((shard, make(o, shard)) for shard in shards)
        return
    # Processes that are started anew: a fork would copy JAX's and the tokenizer's threads in the middle of their work.
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(workers, mp_context=context, initializer=_alone) as pool:
        futures = {pool.submit(make, o, shard): shard for shard in shards}
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


def make(o: PrepareOptions, shard: Shard) -> dict[str, Any]:
    """Writes one file of the store. Returns what is in it (`train.data.store.write_shard`)."""
    tokenizer, kind, shape, opened = _opened(o)
    records: grain.MapDataset[Record] = opened[shard.path][shard.split]
    rows = kind.pack(records[shard.start : shard.stop], tokenizer, seed=o.seed, **shape)
    return store.write_shard(o.out, shard.name, rows, shard.stop - shard.start)


@functools.lru_cache(maxsize=1)
def _opened(o: PrepareOptions) -> Any:
    """Opens tokenizer and data once in a process."""
    tokenizer = zoo.tokenizer(o.model, revision=o.revision, **vars(o.chat))
    kind, shape = o.how(zoo.config(tokenizer.folder).vocab_size)
    return tokenizer, kind, shape, {path: open_records(path, o.hold_out) for path in o.data}


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # an accelerator may be at work for others
    try:
        main(tyro.cli(PrepareOptions))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(f"{type(error).__name__}: {error}") from error
