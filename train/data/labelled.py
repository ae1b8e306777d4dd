"""Rows of texts with labels, for a head that reads a text's last token. A row is as in `train.data.rows`.

The target of a text's last token is the number of its label, and no other token is in the `loss_mask`.
"""

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import grain

from train.data import packing, pictures
from train.data.packing import RecordKind, Survey, messages, with_last
from train.data.record import BadRecord, Record
from train.data.rows import Row
from zoo.text.tokenizer import Tokenizer


FORMATS = "a label (a string or a number), and text (a string) or messages (a list of {role, content})"


def label_of(record: Record) -> str:
    """Returns the name of a record's label.

    Raises:
        ValueError: the record has none; names file and line.
    """
    match record.fields:
        case {"label": str() | int() as label}:
            return str(label)
        case _:
            raise BadRecord(record.where, f": a record must have {FORMATS}.")


def labels_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Returns the names of the labels that records have, sorted."""
    return tuple(sorted(set(map(label_of, records))))


def encode(record: Record, tokenizer: Tokenizer, *, labels: Sequence[str], pad: int | None, seq_len: int) -> Record:
    """Turns a record into one of tokens (`train.data.packing`), of which the last is the number of the label.

    The end of a text that is longer than a row is left out.

    Raises:
        ValueError: the record has another format, or a label that is none of `labels`; names file and line.
    """
    name, fields = label_of(record), record.fields
    if name not in labels:
        raise BadRecord(record.where, f" has the label {name!r}, which is none of {', '.join(labels)}.")
    try:
        match fields:
            case {"text": str(text)}:
                ids = tokenizer.encode(text, most=seq_len)
            case {"messages": list(turns)}:
                ids = tokenizer.encode_all(messages(turns, tokenizer))[:seq_len]
            case _:
                raise ValueError(f"a record must have {FORMATS}.")
    except ValueError as error:
        raise BadRecord(record.where, f": {error}") from error
    tokens, mask = with_last(ids, labels.index(name), pad)
    return record._replace(fields={"tokens": tokens, "loss_mask": mask})


def pack(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    labels: Sequence[str],
    pad: int | None,
    seq_len: int,
    seed: int | None = None,
) -> Iterator[Row]:
    """Packs all records into rows of `seq_len` tokens, in their order or, with a `seed`, in random order."""
    encoded = records.map(functools.partial(encode, tokenizer=tokenizer, labels=labels, pad=pad, seq_len=seq_len))
    return packing.pack(encoded, tokenizer, vocab_size=vocab_size, seq_len=seq_len, seed=seed)


def survey(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    labels: Sequence[str],
    pad: int | None,
    seq_len: int,
) -> Survey:
    """Validates and measures some of the records, as `train.data.packing.survey` does. Its examples are the texts.

    Raises:
        ValueError: as in that function.
    """
    encoded = records.map(functools.partial(encode, tokenizer=tokenizer, labels=labels, pad=pad, seq_len=seq_len))
    found = packing.survey(encoded, tokenizer, vocab_size=vocab_size, seq_len=seq_len)
    texts = [example._replace(ids=example.ids[:-1], mask=example.mask[1:]) for example in found.examples]
    return dataclasses.replace(found, examples=texts)


def prompts_of(records: Iterable[Record], tokenizer: Tokenizer, **_: Any) -> list[Any]:
    """Returns no prompts: a classifier writes nothing."""
    return []


LABELLED = RecordKind("labelled", pack, survey, prompts_of, pictures.chat_of)
