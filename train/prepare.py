"""A script that packs data once into a store of rows, for any number of processes: `python -m train.prepare --help`.

    python -m train.prepare chats/ --model llama3.1-8b --seq-len 4096 --out prepared
    python -m train.sft --model llama3.1-8b --seq-len 4096 --data prepared

After an interruption, the same command goes on with the files that are missing. The bytes of the store depend on the
data and the options alone, not on the number of workers.
"""

import os
import sys
from typing import Any

import jax
import rich
import rich.progress

import zoo
from convert.private import public, warn_of_secrets
from train.base import runfile
from train.base.lock import lock
from train.data import packing, store
from train.data.records import open_records
from train.run import report
from train.run.preparation import PrepareOptions, made, shards_of


def main(o: PrepareOptions) -> dict[str, Any]:
    """Writes the store, and returns the content of its store.json (`train.data.store`); nothing if other machines still
    make files of it.

    Raises:
        ValueError, OSError: the data cannot be learnt from, or the folder is of another preparation.
    """
    (number, of), model = o.share, o.source.open(o.model, o.revision)
    tokenizer = zoo.tokenizer(model, **o.chat.arguments)
    kind, shape = o.how(model.config.vocab_size)
    opened = [open_records(path, o.hold_out, o.naming.columns) for path in o.data]
    for path, (records, _) in zip(o.data, opened, strict=True):
        found = kind.survey(records, tokenizer, **shape)
        report.data(path, found, tokenizer, vocab_size=shape["vocab_size"], seq_len=o.seq_len, dry_run=False)
    with rich.get_console().status("Hashing the data"):
        sources = [packing.fingerprint(path, tokenizer)["files"] for path in o.data]
    about = {"version": 1, "model": o.model, **store.identity(kind.name, tokenizer, shape)}
    about |= {"hold_out": o.hold_out, "seed": o.seed, "sources": [dict(files=files) for files in sources]}
    about |= {"columns": " ".join(o.naming.columns)} if o.naming.columns else {}
    o.out.parent.mkdir(parents=True, exist_ok=True)
    own = f".{o.part.replace('/', '-of-')}" if o.part else ""
    if other := lock(o.out.with_name(f"{o.out.name}{own}.lock"), o):
        raise OSError(f"{o.out} is being prepared by another command ({other}): wait until it has ended.")
    store.begin(o.out, about)
    shards = shards_of(o, opened)
    finished = lambda: {shard.name: found for shard in shards if (found := store.finished(o.out, shard.name))}
    if done := finished():
        rich.print(f"{len(done):,} of {len(shards):,} files are there already.")
    left = [shard for shard in shards[number::of] if shard.name not in done]
    workers = min(o.workers or os.cpu_count() or 1, len(left))
    bar = rich.progress.Progress(*rich.progress.Progress.get_default_columns(), rich.progress.MofNCompleteColumn())
    with bar as progress:
        total = len(shards[number::of])
        task = progress.add_task("Preparing", total=total, completed=total - len(left))
        for _ in made(o, left, workers):
            progress.advance(task)
    if missing := len(shards) - len(done := finished()):
        rich.print(f"{missing:,} of {len(shards):,} files are still to be made, by the other parts.")
        return {}
    content = store.end(o.out, done)
    for split in content["splits"]:
        report.rows(f"{o.out}, {split}", dict(store.summary(content, split)))
    return content


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # other processes may be using an accelerator
    warn_of_secrets(sys.argv)
    try:
        main(runfile.parse(PrepareOptions))
    except (ValueError, OSError, ImportError) as error:
        raise SystemExit(public(f"{type(error).__name__}: {error}")) from error
