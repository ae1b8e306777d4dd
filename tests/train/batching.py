"""Batches of records, as a script makes them from one data set."""

import functools

import grain

from train.data import pictures, rows
from train.data.packing import TEXT, RecordKind
from train.data.records import Record
from zoo.text.tokenizer import Tokenizer


def batches(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    batch: int,
    seq_len: int,
    kind: RecordKind = TEXT,
    seed: int | None = None,
    epochs: int | None = None,
    **options,
):
    packed = rows.in_memory(kind.pack(records, tokenizer, seq_len=seq_len, seed=seed, **options), seq_len)
    assert packed is not None
    order = packed if seed is None else rows.order([rows.Rows(packed, seed, as_packed=True)], epochs=epochs)
    opening = dict(records=records, processor=tokenizer.processor, chat_of=kind.chat_of)
    finish = functools.partial(pictures.with_patches, **opening) if tokenizer.processor else None
    return rows.read_ahead(rows.batches(order, batch, finish=finish))
