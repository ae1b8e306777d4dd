"""Speed of preparing and reading data, against Hugging Face `datasets`, torch's DataLoader and grain alone.

    python -m benchmarks.data --help

It needs torch, transformers and datasets beside this project. Nothing is downloaded: the text comes from the pages in
docs/, and the tokenizer is the embedded model's. Tokens are counted in the same way for all.
"""

import collections
import contextlib
import functools
import importlib
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import grain
import numpy as np

import zoo
from benchmarks.common import Contestant, alternate, import_transformers, ratios, report
from train.data import rows, store
from train.data.records import open_records
from train.run import preparation
from train.tiny import INSTRUCTIONS


DOCS = pathlib.Path(__file__).parents[1] / "docs"
READ_AHEAD = grain.ReadOptions(num_threads=2, prefetch_buffer_size=4)  # as in `train.data.rows.read_ahead`


# ======================================================================================================================
# Preparing: text becomes rows of tokens in files.
# ======================================================================================================================


def write_text(path: pathlib.Path, characters: int) -> None:
    """Writes about `characters` characters of docs/, repeated as needed, as records of 200 to 4,000 characters."""
    text, length = "\n".join(page.read_text() for page in sorted(DOCS.glob("*.md"))), random.Random(0)
    with path.open("w") as file:
        while characters > 0:
            at = 0
            while at < len(text) and characters > 0:
                piece = text[at : at + length.randint(200, 4000)]
                file.write(json.dumps({"text": piece}) + "\n")
                at, characters = at + len(piece), characters - len(piece)


def prepares(path: str, seq_len: int, packing: Any) -> Callable[[], int]:
    """Builds all files of a store, one after another, as a single process of train.prepare does. Returns tokens."""
    out = tempfile.mkdtemp()
    o = preparation.PrepareOptions.of(
        data=(path,), model="tiny", out=pathlib.Path(out), seq_len=seq_len, packing=packing
    )
    shards = preparation.shards_of(o, [open_records(path, o.hold_out)])
    return lambda: sum(preparation.make(o, shard)["tokens"] for shard in shards)


def maps(path: str, seq_len: int, packed: bool) -> Callable[[], int]:
    """Runs `datasets.map` in batches: texts to ids and, if `packed`, ids joined and cut into rows. Returns tokens."""
    transformers = import_transformers()
    import datasets

    compute: Any = importlib.import_module("pyarrow.compute")
    datasets.disable_progress_bars()
    tokenizer = transformers.AutoTokenizer.from_pretrained(zoo.tokenizer("tiny").folder)
    texts = datasets.load_dataset("json", data_files=path, split="train", cache_dir=tempfile.mkdtemp())

    def to_ids(batch: dict[str, Any]) -> dict[str, Any]:
        return {"ids": tokenizer([text + tokenizer.eos_token for text in batch["text"]])["input_ids"]}

    def to_rows(batch: dict[str, Any]) -> dict[str, Any]:
        joined = [id for ids in batch["ids"] for id in ids]
        return {"ids": [joined[at : at + seq_len] for at in range(0, len(joined), seq_len)]}

    def call() -> int:
        made = texts.map(to_ids, batched=True, remove_columns="text", load_from_cache_file=False)
        if packed:
            made = made.map(to_rows, batched=True, load_from_cache_file=False)
        return compute.sum(compute.list_value_length(made.data.column("ids"))).as_py()

    return call


# ======================================================================================================================
# Reading: batches of rows, shuffled, from one store.
# ======================================================================================================================


def write_store(folder: pathlib.Path, seq_len: int, tokens: int) -> None:
    """Writes a store of full rows of random tokens below 50,000, in documents of `seq_len` / 4 tokens."""
    length = seq_len // 4
    lines = np.random.default_rng(0).integers(0, 50_000, (64, seq_len + 1), dtype=np.int32)
    same = dict(
        loss_mask=np.ones(seq_len, np.int32),
        segments=np.repeat(np.arange(1, 5, dtype=np.int32), length),
        positions=np.tile(np.arange(length, dtype=np.int32), 4),
    )
    made = (
        dict(tokens=lines[n % 64, :-1], targets=lines[n % 64, 1:], **same) for n in range(tokens // seq_len)
    )  # later rows repeat these 64: such a store is as large as one of different rows
    store.begin(folder, {"version": 1, "settings": {"seq_len": seq_len}})
    name = store.shard_name("train", 0, 1)
    store.end(folder, {name: store.write_shard(folder, name, made, tokens // seq_len)})


def source(folder: str) -> Any:
    """Returns the rows of a store as bytes."""
    shards = store.read(pathlib.Path(folder))["shards"]
    return grain.sources.ArrayRecordDataSource(
        [f"{folder}/{name}.array_record[0:{shard['rows']}]" for name, shard in shards.items()]
    )


def reads(folder: str, seq_len: int, batch: int) -> Callable[[], int]:
    """Reads a store in the way that a run does. Returns tokens."""
    found = store.rows(pathlib.Path(folder), store.read(pathlib.Path(folder)), "train")
    assert found is not None
    batches = rows.read_ahead(rows.batches(rows.order([rows.Rows(found, seed=0)], epochs=1), batch))
    return lambda: sum(each["tokens"].size for each in batches)


def grain_reads(folder: str, seq_len: int, batch: int) -> Callable[[], int]:
    """Reads with grain alone: the same bytes, shuffled and batched as lists, not as arrays. Returns tokens."""
    batches = grain.MapDataset.source(source(folder)).shuffle(seed=0).batch(batch, batch_fn=list)
    return lambda: sum(len(each) for each in batches.to_iter_dataset(READ_AHEAD)) * seq_len


class Rows:
    """The rows of a store, as torch's DataLoader takes them."""

    def __init__(self, folder: str, seq_len: int):
        self.source, self.seq_len = source(folder), seq_len

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> rows.Row:
        return rows.from_bytes(self.source[index], self.seq_len)


def torch_reads(folder: str, seq_len: int, batch: int, workers: int) -> Callable[[], int]:
    """Reads with torch's DataLoader (0 workers: in this process), and decodes rows as ours. Returns tokens."""
    import torch.utils.data

    loader = torch.utils.data.DataLoader(
        Rows(folder, seq_len), batch_size=batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )
    return lambda: sum(each["tokens"].numel() for each in loader)


class Counted:
    """The rows of a store as bytes, with a count of the reads."""

    def __init__(self, folder: str):
        self.source, self.times, self.bytes = source(folder), collections.Counter(), 0

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> bytes:
        found = self.source[index]
        self.times[index] += 1
        self.bytes += len(found)
        return found


def of_processes(folder: str, seq_len: int, batch: int, processes: int) -> dict[str, list[float]]:
    """Reads an epoch as each process in turn. Returns how often rows were read, and the bytes of each process."""
    counted, taken = Counted(folder), []
    order = rows.order([rows.Rows(rows.of_bytes(counted, seq_len), seed=0)], epochs=1)
    for here in np.array_split(np.arange(batch), processes):
        before, mine = counted.bytes, rows.Batches(order, batch, here)
        collections.deque(map(mine.__getitem__, range(len(mine))), maxlen=0)
        taken.append((counted.bytes - before) / 1e3)
    once = sum(times == 1 for times in counted.times.values())
    return {"rows read once": [once], "rows read otherwise": [len(counted) - once], "kB of a process": taken}


# ======================================================================================================================
# A run.
# ======================================================================================================================


def waiting(steps: int) -> dict[str, list[float]]:
    """Returns the seconds that a run on the embedded model waits for batches of a store, from its goodput.json."""
    with tempfile.TemporaryDirectory() as folder:
        python = functools.partial(subprocess.run, check=True, stdout=subprocess.DEVNULL)
        made, out, length = f"{folder}/store", pathlib.Path(folder, "run"), ["--seq-len", "512"]
        of = [sys.executable, "-m"]
        python([*of, "train.prepare", str(INSTRUCTIONS), "--model", "tiny", "--out", made, "--workers", "1", *length])
        options = ["--data", made, "--out", str(out), "--steps", str(steps), "--batch", "8"]
        python([*of, "train.sft", *options, *length])
        seconds = json.loads((out / "goodput.json").read_text())["seconds"]
    share = 100 * seconds["input"] / (seconds["input"] + seconds["step"])
    return {"steps, s": [seconds["step"]], "input, s": [seconds["input"]], "input, % of both": [share]}


def take_turns(builds: dict[str, Callable[[], Callable[[], int]]], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns each contestant's millions of tokens per second, and per CPU second.

    The first turn is not counted. CPU seconds exclude those of child processes.
    """
    with contextlib.ExitStack() as stack:
        contestants = {name: stack.enter_context(Contestant(build)) for name, build in builds.items()}
        for each in contestants.values():
            each.turn()
        taken = alternate({name: each.turn for name, each in contestants.items()}, rounds)
    rate = lambda turn, seconds: turn["outputs"][0] / turn[seconds] / 1e6
    return {
        name: {
            "M tokens / s": [rate(turn, "wall") for turn in turns],
            "M tokens / CPU s": [rate(turn, "cpu") for turn in turns],
            "tokens": [turns[0]["outputs"][0]],
        }
        for name, turns in taken.items()
    }


def main(
    megabytes: float = 4,
    tokens: int = 2**24,
    seq_lens: tuple[int, ...] = (1024, 4096),
    batch_tokens: int = 32_768,
    processes: int = 1024,
    steps: int = 30,
    rounds: int = 5,
) -> None:
    """Measures the throughput of preparing and reading in one process each, many simulated processes, and a run.

    Args:
        megabytes: size of the text to prepare, in rows of 1,024 tokens.
        tokens: tokens of the stores that are read.
        seq_lens: tokens of a row of these.
        batch_tokens: tokens of a batch.
        processes: number of processes that share the batches of the first store; simulated one after another.
        steps: steps of the run on the embedded model.
        rounds: turns of each contestant.
    """
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one core each
    results: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder, "text.jsonl")
        write_text(text, round(megabytes * 1e6))
        made = take_turns(
            {
                "train.prepare, concat": functools.partial(prepares, str(text), 1024, "concat"),
                "train.prepare, fit": functools.partial(prepares, str(text), 1024, "fit"),
                "datasets.map": functools.partial(maps, str(text), 1024, packed=False),
                "datasets.map, and rows": functools.partial(maps, str(text), 1024, packed=True),
            },
            rounds,
        )
        results |= {f"prepare: {name}": values for name, values in made.items()}
        for seq_len in seq_lens:
            at = pathlib.Path(folder, f"rows of {seq_len}")
            write_store(at, seq_len, tokens)
            args = (str(at), seq_len, batch_tokens // seq_len)
            made = take_turns(
                {
                    "a run": functools.partial(reads, *args),
                    "grain, bytes alone": functools.partial(grain_reads, *args),
                    "DataLoader": functools.partial(torch_reads, *args, workers=0),
                    "DataLoader, 2 workers": functools.partial(torch_reads, *args, workers=2),
                },
                rounds,
            )
            for name, values in made.items():
                values["of DataLoader"] = ratios(values["M tokens / s"], made["DataLoader"]["M tokens / s"])
                results[f"read, rows of {seq_len:,}: {name}"] = values
        results[f"{processes:,} processes"] = of_processes(
            f"{folder}/rows of {seq_lens[0]}", seq_lens[0], processes, processes
        )
    results["a run of the embedded model"] = waiting(steps)
    settings = dict(megabytes=megabytes, tokens=tokens, seq_lens=seq_lens, batch_tokens=batch_tokens, rounds=rounds)
    settings |= dict(processes=processes, steps=steps)
    report("data", "cpu", settings, results)


if __name__ == "__main__":
    import tyro

    tyro.cli(main)
