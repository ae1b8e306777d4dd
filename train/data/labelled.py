"""Rows of texts with labels, and of questions with answers, of which only the last token of each is in the `loss_mask`.

A row is as in `train.data.rows`. The target of a text's last token is the number of its label; or, if texts have
several labels, a number whose bits say which. The target of a question is the number of its answer among its options.
Rows of questions have two more arrays: `options`, the number of these, and `kind`, that of the question's type.
"""

import collections
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int32

from train.data import pictures
from train.data.packing import Example, RecordKind, Survey, fill, messages, with_last
from train.data.record import BadRecord, Problems, Record
from train.data.rows import Row
from zoo.text import questions
from zoo.text.questions import KINDS, Question, Settings
from zoo.text.tokenizer import Tokenizer


FORMATS = (
    "a label (a string or a number) or labels (a list of them), and text (a string) or messages (a list of {role, "
    "content}); or state, question ({type, instructions, criteria}) and answer"
)
TEXTS = 64  # largest number of texts in a row
BITS = 31  # largest number of labels of which a text has several


class Labelled(NamedTuple):
    ids: list[int]  # of the text
    target: int
    more: Sequence[int] = ()  # values of other arrays at the last token


def labels_of_record(record: Record) -> list[str]:
    """Returns the names of a record's label, or of its labels.

    Raises:
        ValueError: the record has none; names file and line.
    """
    match record.fields:
        case {"label": str() | int() as label}:
            return [str(label)]
        case {"labels": list(labels)} if all(isinstance(label, str | int) for label in labels):
            return list(map(str, labels))
        case _:
            raise BadRecord(record.where, f": a record must have {FORMATS}.")


def labels_of(records: Iterable[Record]) -> tuple[str, ...]:
    """Returns the names of the labels that records have, sorted."""
    return tuple(sorted({label for record in records for label in labels_of_record(record)}))


def is_question(record: Record) -> bool:
    """Whether a record asks a question about a state."""
    return isinstance(record.fields, dict) and isinstance(record.fields.get("question"), dict)


def has_several(record: Record) -> bool:
    """Whether a record has a list of labels."""
    return isinstance(record.fields, dict) and "labels" in record.fields


def encode(
    record: Record, tokenizer: Tokenizer, *, labels: Sequence[str], several: bool = False, pad: int | None, seq_len: int
) -> Labelled:
    """Tokenizes a record with a label, or with `several`.

    The end of a text that is longer than a row is left out.

    Raises:
        ValueError: the record has another format, or a label that is none of `labels`; names file and line.
    """
    own = labels_of_record(record)
    if has_several(record) != several:
        raise BadRecord(record.where, " has a label, and other records have several, or the other way about.")
    if unknown := [label for label in own if label not in labels]:
        raise BadRecord(record.where, f" has the label {unknown[0]!r}, which is none of {', '.join(labels)}.")
    try:
        match record.fields:
            case {"text": str(text)}:
                ids = tokenizer.encode(text, most=seq_len)
            case {"messages": list(turns)}:
                ids = tokenizer.encode_all(messages(turns, tokenizer))[:seq_len]
            case _:
                raise ValueError(f"a record must have {FORMATS}.")
    except ValueError as error:
        raise BadRecord(record.where, f": {error}") from error
    numbers = {labels.index(label) for label in own}
    target = sum(1 << number for number in numbers) if several else numbers.pop()
    return Labelled(with_last(ids, 0, pad)[0][:-1], target)


def encode_question(record: Record, tokenizer: Tokenizer, *, seq_len: int) -> Labelled:
    """Tokenizes a record with a question.

    The beginning of a prompt that is longer than a row is left out.

    Raises:
        ValueError: the record has another format, an answer that is no option, or labels that are no single tokens;
            names file and line.
    """
    try:
        match record.fields:
            case {"state": state, "question": dict(asked), "answer": bool() | str() | int() as answer}:
                question = Question.of(asked, Settings.of(tokenizer.folder))
            case _:
                raise ValueError(f"a record must have {FORMATS}.")
        name = str(answer).lower() if isinstance(answer, bool) else str(answer)
        if name not in question.options:
            raise ValueError(f"the answer {name!r} is none of {', '.join(question.options)}.")
        questions.label_ids(question, tokenizer)
        ids = questions.encode(state, question, tokenizer, most=seq_len)
    except ValueError as error:
        raise BadRecord(record.where, f": {error}") from error
    return Labelled(ids, question.options.index(name), (len(question.options), KINDS.index(question.kind)))


# ======================================================================================================================
# Rows.
# ======================================================================================================================


def _pack(
    records: grain.MapDataset[Record],
    encoded: Callable[..., Labelled],
    names: Sequence[str],
    *,
    seq_len: int,
    seed: int | None,
) -> Iterator[Row]:
    """Packs records into rows of `seq_len` tokens, in their order or, with a `seed`, in random order.

    Args:
        encoded: a record -> its tokens and target.
        names: names of the other arrays.
    """

    def columns(record: Record) -> list[dict[str, Int32[np.ndarray, "length columns"]]]:
        ids, target, more = encoded(record, seq_len=seq_len)
        last = np.arange(len(ids)) == len(ids) - 1
        return [{"columns": np.array([ids, [*ids[1:], target], last, *(n * last for n in more)], np.int32).T}]

    def named(row: dict[str, np.ndarray]) -> Row:
        arrays = np.ascontiguousarray(row["columns"].T)
        found = dict(zip(("tokens", "targets", "loss_mask", *names), arrays, strict=True))
        return found | dict(segments=row["columns_segment_ids"], positions=row["columns_positions"])

    if seed is not None:
        records = records.shuffle(seed=seed)
    return map(named, fill(records.map(columns), seq_len=seq_len, packing="fit", most=TEXTS))


def _survey(
    records: grain.MapDataset[Record],
    encoded: Callable[..., Labelled],
    pack: Callable[..., Iterator[Row]],
    *,
    vocab_size: int,
    seq_len: int,
    sample: int = 1000,
) -> Survey:
    """Validates and measures up to `sample` records, evenly spread, as `pack` packs them. Its examples are the texts.

    Raises:
        ValueError: some records cannot be learnt from.
    """
    looked, found, problems = [], [], Problems()
    for i in np.linspace(0, len(records) - 1, min(sample, len(records))).astype(int).tolist():
        with problems.noted():
            record = records[i]
            found.append(encoded(record, seq_len=2**31))
            looked.append(record)
    problems.refuse(min(sample, len(records)))
    if (largest := max(id for text in found for id in text.ids)) >= vocab_size:
        raise ValueError(
            f"token {largest} is beyond the model's vocabulary of {vocab_size}; is it the model's tokenizer?"
        )
    rows = pack(grain.MapDataset.source(looked), seq_len=seq_len, seed=None)
    lengths = np.quantile([len(text.ids) for text in found], [0, 0.5, 0.95, 1], method="nearest").tolist()
    shown = [found[i] for i in sorted({0, len(found) // 2, len(found) - 1})]
    return Survey(
        records=len(records),
        sampled=len(looked),
        keys=dict(collections.Counter(key for record in looked for key in record.fields)),
        lengths=dict(zip(("min", "median", "95%", "max"), lengths, strict=True)),
        shortened=sum(len(text.ids) > seq_len for text in found),
        unlearnt=0,
        fill=float(np.mean([(row["segments"] > 0).mean() for row in rows])),
        examples=[Example(text.ids, [0] * (len(text.ids) - 1) + [1], True) for text in shown],
    )


def pack(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    labels: Sequence[str],
    several: bool = False,
    pad: int | None,
    seq_len: int,
    seed: int | None = None,
) -> Iterator[Row]:
    """Packs texts with labels into rows of `seq_len` tokens, in their order or, with a `seed`, in random order."""
    encoded = functools.partial(encode, tokenizer=tokenizer, labels=labels, several=several, pad=pad)
    return _pack(records, encoded, (), seq_len=seq_len, seed=seed)


def survey(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    labels: Sequence[str],
    several: bool = False,
    pad: int | None,
    seq_len: int,
) -> Survey:
    """Validates and measures texts with labels.

    Raises:
        ValueError: some records cannot be learnt from.
    """
    options: dict[str, Any] = dict(labels=labels, several=several, pad=pad)
    encoded = functools.partial(encode, tokenizer=tokenizer, **options)
    packed = functools.partial(pack, tokenizer=tokenizer, vocab_size=vocab_size, **options)
    return _survey(records, encoded, packed, vocab_size=vocab_size, seq_len=seq_len)


def pack_questions(
    records: grain.MapDataset[Record], tokenizer: Tokenizer, *, vocab_size: int, seq_len: int, seed: int | None = None
) -> Iterator[Row]:
    """Packs questions into rows of `seq_len` tokens, in their order or, with a `seed`, in random order."""
    encoded = functools.partial(encode_question, tokenizer=tokenizer)
    return _pack(records, encoded, ("options", "kind"), seq_len=seq_len, seed=seed)


def survey_questions(
    records: grain.MapDataset[Record], tokenizer: Tokenizer, *, vocab_size: int, seq_len: int
) -> Survey:
    """Validates and measures questions.

    Raises:
        ValueError: some records cannot be learnt from.
    """
    encoded = functools.partial(encode_question, tokenizer=tokenizer)
    packed = functools.partial(pack_questions, tokenizer=tokenizer, vocab_size=vocab_size)
    return _survey(records, encoded, packed, vocab_size=vocab_size, seq_len=seq_len)


def prompts_of(records: Iterable[Record], tokenizer: Tokenizer, **_: Any) -> list[Any]:
    """Returns no prompts: a classifier writes nothing."""
    return []


LABELLED = RecordKind("labelled", pack, survey, prompts_of, pictures.chat_of)
QUESTIONS = RecordKind("questions", pack_questions, survey_questions, prompts_of, pictures.chat_of)
