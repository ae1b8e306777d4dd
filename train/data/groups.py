"""Rows of groups of texts, for models that embed: an anchor, its positive, and hard negatives.

A row is as in `train.data.rows`, and the texts of a group lie side by side: with `texts` texts in a group, segments 1
to `texts` are the row's first group, the anchor first and the positive second. The target of a text's last token is a
hash of the text, by which the loss finds equal ones, and no other token is in the `loss_mask`.
"""

import collections
import functools
import itertools
import math
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int32

from train.data import pictures
from train.data.packing import Example, RecordKind, Survey, fill, with_last
from train.data.record import NUMBERED, BadRecord, Problems, Record
from train.data.rows import Row
from zoo.text.tokenizer import Tokenizer


FORMATS = (
    "anchor and positive, query and positive, query and answer, question and answer, or sentence1 and sentence2 "
    "(strings), or messages that begin with a question and its answer; optionally negative (a string or a list), "
    "negative_1, negative_2 and so on; and with --loss cosent score (a number), with --loss distill scores (a list)"
)
GROUPS = 32  # largest number of groups in a row


class Group(NamedTuple):
    anchor: str
    positive: str
    negatives: Sequence[str]
    scores: Sequence[float]  # of the positive and the negatives, as far as the record has any


def group(record: Record) -> Group:
    """Returns a record's texts, and their scores.

    Raises:
        ValueError: the record has another format; names file and line.
    """
    match record.fields:
        case (
            {"anchor": str(anchor), "positive": str(positive)}
            | {"query": str(anchor), "positive": str(positive)}
            | {"query": str(anchor), "answer": str(positive)}
            | {"question": str(anchor), "answer": str(positive)}
            | {"sentence1": str(anchor), "sentence2": str(positive)}
            | {
                "messages": [
                    {"role": "user", "content": str(anchor)}, {"role": "assistant", "content": str(positive)}, *_,
                ]
            }
        ):  # fmt: skip
            negatives = _negatives(record.fields)
            scores = record.fields.get("scores", record.fields.get("score", []))
            scores = scores if isinstance(scores, list) else [scores]
            if all(isinstance(text, str) for text in negatives) and all(map(_is_finite, scores)):
                return Group(anchor, positive, negatives, scores)
    raise BadRecord(record.where, f": a record must have {FORMATS}.")


def _negatives(fields: Mapping[str, Any]) -> list[Any]:
    """Returns the values of `negative`, and of `negative_1` and so on."""
    numbered = itertools.takewhile(lambda name: fields.get(name) is not None, NUMBERED)
    together = fields.get("negative") or []
    return [*(together if isinstance(together, list) else [together]), *(fields[name] for name in numbered)]


def _is_finite(score: Any) -> bool:
    return isinstance(score, int | float) and math.isfinite(score)


class Text(NamedTuple):
    ids: list[int]  # the last is the text's hash
    score: float


def encode(
    record: Record, tokenizer: Tokenizer, *, texts: int, scored: bool = False, pad: int | None, seq_len: int
) -> list[Text]:
    """Returns the `texts` texts of a record's group, each with its hash behind its tokens.

    The anchor has the tokenizer's prompt "query" before it, and the others have "document", if there are these. Further
    negatives than there is room for are left out; in the place of missing ones the positive stands again, which the
    loss does not count. A text loses its end beyond its share of a row.

    If `scored`, each text but the anchor needs a score, and no negative may be missing.

    Raises:
        ValueError: the record has another format, an empty text, or too few scores; names file and line.
    """
    found = group(record)
    negatives = [*found.negatives[: texts - 2], *[found.positive] * (texts - 2 - len(found.negatives))]
    if scored and min(len(found.scores), 1 + len(found.negatives)) < texts - 1:
        raise BadRecord(
            record.where, f" has {len(found.negatives)} negatives and {len(found.scores)} scores, fewer than are read."
        )
    query, document = (tokenizer.prompts.get(name, "") for name in ("query", "document"))
    whole = [query + found.anchor, *(document + text for text in (found.positive, *negatives))]
    ids = [with_last(tokenizer.encode(text, most=seq_len // texts), hashed(text), pad)[0] for text in whole]
    if min(map(len, ids)) < 2:
        raise BadRecord(record.where, ": a text is empty.")
    scores = [0.0, *found.scores[: texts - 1]] if scored else [0.0] * texts
    return [Text(*each) for each in zip(ids, scores, strict=True)]


def hashed(text: str) -> int:
    """Returns a number of 31 bits that is the same for equal texts."""
    return zlib.crc32(text.encode(errors="replace")) & 0x7FFFFFFF


def pack(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    texts: int,
    scored: bool = False,
    pad: int | None,
    seq_len: int,
    seed: int | None = None,
) -> Iterator[Row]:
    """Packs the groups of all records into rows of `seq_len` tokens, in their order or, with a `seed`, at random.

    If `scored`, rows have the array "score" [seq], float32, at each text's last token.
    """
    if seed is not None:
        records = records.shuffle(seed=seed)
    columns = functools.partial(_columns, tokenizer=tokenizer, texts=texts, scored=scored, pad=pad, seq_len=seq_len)
    rows = fill(records.map(columns), seq_len=seq_len, packing="fit", most=GROUPS)
    return map(functools.partial(_named, texts=texts, scored=scored), rows)


def _columns(
    record: Record, tokenizer: Tokenizer, texts: int, scored: bool, pad: int | None, seq_len: int
) -> list[dict[str, Int32[np.ndarray, "length columns"]]]:
    """Returns a group's columns.

    These are token, target, mask of the target, number of the text in the group, position in it, and the score's bits.
    """
    found, options = [], dict[str, Any](texts=texts, scored=scored, pad=pad, seq_len=seq_len)
    for number, (ids, score) in enumerate(encode(record, tokenizer, **options)):
        places = np.arange(len(ids) - 1)
        bits = np.where(places == len(places) - 1, np.float32(score), np.float32(0)).view(np.int32)
        columns = ids[:-1], ids[1:], places == len(places) - 1, number + 0 * places, places, bits
        found.append(np.array(columns, np.int32).T)
    return [{"columns": np.concatenate(found)}]


def _named(row: dict[str, np.ndarray], texts: int, scored: bool) -> Row:
    names = ("tokens", "targets", "loss_mask", "number", "positions", "score")
    named = dict(zip(names, np.ascontiguousarray(row["columns"].T), strict=True))
    groups, number, scores = row["columns_segment_ids"], named.pop("number"), named.pop("score").view(np.float32)
    named |= {"segments": np.where(groups > 0, texts * (groups - 1) + number + 1, 0)}
    return named | ({"score": scores} if scored else {})


def survey(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    texts: int,
    scored: bool = False,
    pad: int | None,
    seq_len: int,
    sample: int = 1000,
) -> Survey:
    """Validates and measures up to `sample` records, evenly spread, as `pack` would pack them.

    Lengths are of groups. `shortened` counts records with a text that is cut. The examples are the texts of the first
    group.

    Raises:
        ValueError: some records cannot be learnt from.
    """
    indices = np.linspace(0, len(records) - 1, min(sample, len(records))).astype(int).tolist()
    looked, found, problems, options = [], [], Problems(), dict[str, Any](texts=texts, scored=scored, pad=pad)
    for i in indices:
        with problems.noted():
            record = records[i]
            found.append([text.ids for text in encode(record, tokenizer, seq_len=2**31, **options)])
            looked.append(record)
    problems.refuse(len(indices))
    if (largest := max(id for group in found for ids in group for id in ids[:-1])) >= vocab_size:
        raise ValueError(
            f"token {largest} is beyond the model's vocabulary of {vocab_size}; is it the model's tokenizer?"
        )
    source: Any = grain.MapDataset.source(looked)
    rows = pack(source, tokenizer, vocab_size=vocab_size, seq_len=seq_len, **options)
    sizes = [sum(len(ids) - 1 for ids in group) for group in found]
    lengths = np.quantile(sizes, [0, 0.5, 0.95, 1], method="nearest").tolist()
    return Survey(
        records=len(records),
        sampled=len(looked),
        keys=dict(collections.Counter(key for record in looked for key in record.fields)),
        lengths=dict(zip(("min", "median", "95%", "max"), lengths, strict=True)),
        shortened=sum(any(len(ids) - 1 > seq_len // texts for ids in group) for group in found),
        unlearnt=0,
        fill=float(np.mean([(row["segments"] > 0).mean() for row in rows])),
        examples=[Example(ids[:-1], [0] * (len(ids) - 2) + [1], True) for ids in found[0]],
    )


def prompts_of(records: Iterable[Record], tokenizer: Tokenizer, **_: Any) -> list[Any]:
    """Returns no prompts: a model that embeds writes nothing."""
    return []


EMBEDDED = RecordKind("groups", pack, survey, prompts_of, pictures.chat_of)
