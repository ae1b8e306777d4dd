"""Rows of pairs of documents, made of records of preferences. `train.data.packing` reads and tokenizes the records.

A row is as in `train.data.rows`, and its documents come in pairs, side by side: segments 1 and 2 are the row's first
pair, 3 and 4 the next one. A pair is

- for losses that compare: the chosen completion after its prompt, and the rejected one after the same prompt;
- for KTO (`unpaired`), where each completion is only labelled desirable or not: the completion after its prompt, and
  the completion of another record after the same prompt. From the latter the loss estimates its baseline. The array
  "desirable" [seq] is 1 in pairs of a desirable completion.

For a reward model (`scored`) documents have all of their tokens, but for `pad` at the end, and only the last token is
in the `loss_mask`: the model's features there give the document's reward. The array "margin" [seq], float32, is the
record's `margin`, or 0.
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Int32

from train.data import pictures
from train.data.packing import REMEDY, Example, RecordKind, Survey, encode, fill, prompt_of, with_last
from train.data.record import BadRecord, Problems, Record
from train.data.rows import Row
from zoo.generation.generate import Encoded
from zoo.text.messages import has_images
from zoo.text.tokenizer import Tokenizer


FORMATS = (
    "chosen and rejected (both strings or both lists of messages), and prompt of the same kind unless they share their "
    "beginning; or prompt, completion and label (true or false), for KTO; and for a reward model optionally margin (a "
    "number)"
)
PAIRS = 32  # largest number of pairs in a row


# ======================================================================================================================
# Records.
# ======================================================================================================================


class Completion(NamedTuple):
    prompt: Any  # a string or a list of messages
    completion: Any  # the same kind as the prompt
    tools: Any
    desirable: bool
    where: str


def completions(record: Record) -> list[Completion]:
    """Returns a record's completions: the chosen and the rejected one of a pair, or the only one.

    If there is no prompt, or it is also within the chosen messages, the prompt is the common beginning of chosen and
    rejected, in messages or, for strings, in characters. A beginning that both share does not change a comparison.

    Raises:
        ValueError: the record has another format; names file and line.
    """
    fields = record.fields
    match fields:
        case {"prompt": prompt, "chosen": chosen, "rejected": rejected} if _alike(prompt, chosen, rejected):
            pass
        case {"chosen": chosen, "rejected": rejected} if _is_within(fields.get("prompt"), chosen, rejected):
            shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), None)
            if shared is None:
                raise BadRecord(record.where, ": chosen and rejected are the same, or one begins with the other.")
            shared -= chosen[shared - 1 : shared] == " "  # a space belongs to the completion: tokens begin with spaces
            prompt, chosen, rejected = chosen[:shared], chosen[shared:], rejected[shared:]
        case {"prompt": prompt, "completion": completion, "label": bool(label)} if _alike(prompt, completion):
            return [Completion(prompt, completion, fields.get("tools"), label, record.where)]
        case _:
            items = fields.items() if isinstance(fields, dict) else ()
            found = ", ".join(f"{key} ({type(value).__name__})" for key, value in items)
            raise BadRecord(record.where, f": the record has {found or 'no keys'}, but must have {FORMATS}. {REMEDY}")
    both = ((chosen, True), (rejected, False))
    return [Completion(prompt, completion, fields.get("tools"), label, record.where) for completion, label in both]


def _alike(*values: Any) -> bool:
    """Whether all are strings, or all are lists of messages."""
    return {type(value) for value in values} in ({str}, {list})


def _is_within(prompt: Any, chosen: Any, rejected: Any) -> bool:
    """Whether chosen and rejected include the prompt: the record has none, or one that is a message of `chosen`."""
    if not _alike(chosen, rejected):
        return False
    return prompt is None or any(prompt in turn.values() for turn in chosen if isinstance(turn, dict))


class Pair(NamedTuple):
    first: Example
    second: Example
    desirable: bool = True
    margin: float = 0.0  # by which the first one's reward should exceed the second one's


def encode_pairs(
    record: Record, other: Record, tokenizer: Tokenizer, *, vocab_size: int, unpaired: bool, scored: bool = False
) -> list[Pair]:
    """Tokenizes the pairs of a record. If `unpaired`, each completion is paired with one of the `other` record.

    Only if `scored`, the record's margin is read.

    Raises:
        ValueError: the record cannot be used for this loss; names file and line.
    """
    example = functools.partial(_example, record=record, tokenizer=tokenizer, vocab_size=vocab_size)
    own = completions(record)
    if unpaired:
        others = completions(other)
        if isinstance(own[0].prompt, str) != isinstance(others[0].prompt, str):
            raise BadRecord(record.where, f" is text, but {other.where} has messages; KTO mixes the two.")
        mixed = [c._replace(completion=others[i % len(others)].completion) for i, c in enumerate(own)]
        return [Pair(example(c), example(m), c.desirable) for c, m in zip(own, mixed, strict=True)]
    if len(own) == 1:
        raise BadRecord(record.where, " has a completion and a label, which only train.dpo --loss kto learns from.")
    chosen, rejected = map(example, own)
    return [Pair(chosen, rejected, margin=_margin(record) if scored else 0.0)]


def _margin(record: Record) -> float:
    margin = record.fields.get("margin", 0.0)
    if isinstance(margin, bool) or not isinstance(margin, int | float) or not math.isfinite(margin):
        raise BadRecord(record.where, f": margin is {margin!r}, and must be a number.")
    return float(margin)


def _example(c: Completion, record: Record, tokenizer: Tokenizer, vocab_size: int) -> Example:
    if has_images([turn for turn in c.completion if isinstance(turn, dict)]):
        raise BadRecord(c.where, ": a completion holds an image, and only prompts may.")
    fields = {"prompt": c.prompt, "completion": c.completion, "tools": c.tools}
    fields["images"] = record.fields.get("images")
    examples = encode(Record(c.where, fields, record.folder), tokenizer, vocab_size=vocab_size)
    if len(examples) > 1:
        raise BadRecord(
            c.where,
            f": a completion has several answers, which the chat template of {tokenizer.folder} writes "
            "differently once others follow. End it with the first, and put what comes before into the prompt.",
        )
    return examples[0]


def prompts_of(records: Iterable[Record], tokenizer: Tokenizer, *, vocab_size: int) -> list[Encoded]:
    """Returns the prompts of the first three records, with their images, for a model to continue."""
    prompts = []
    for record in itertools.islice(records, 3):
        first = completions(record)[0]
        example = _example(first, record, tokenizer, vocab_size)
        ids = prompt_of(example)
        shown = pictures.of_prompt(record, example.places, len(ids), tokenizer.processor, first.prompt)
        prompts.append(Encoded(ids, shown))
    return prompts


def shorten(pair: Pair, room: int) -> Pair:
    """Cuts the ends of a pair's documents if together they exceed `room` tokens. The longer document is cut first."""
    first, second = pair.first, pair.second
    limit = max(room // 2, room - min(len(first.ids), len(second.ids)))

    def cut(example: Example) -> Example:
        places, end = example.places, limit
        if places is not None:
            end = pictures.whole(places[:, 0], limit)
            places = places[:end]
        return Example(example.ids[:end], example.mask[:end], example.whole, places)

    return pair._replace(first=cut(first), second=cut(second))


def is_learnt(pair: Pair) -> bool:
    return any(pair.first.mask[1:]) and any(pair.second.mask[1:])


# ======================================================================================================================
# Rows.
# ======================================================================================================================


def pack(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    seq_len: int,
    unpaired: bool = False,
    scored: bool = False,
    pad: int | None = None,
    seed: int | None = None,
) -> Iterator[Row]:
    """Packs all records into rows of `seq_len` tokens; the top of this file describes a row.

    A pair that is longer than a row loses the ends of its completions (`shorten`). If no token of a completion is left,
    the pair is skipped. `survey` counts both. All else is as in `train.data.packing.pack`.

    For KTO, the other record is the record before. So each completion is put after one other prompt.
    """
    numbered = records.map_with_index(lambda n, record: (n, record))
    if seed is not None:
        numbered = numbered.shuffle(seed=seed)
    before = grain.MapDataset.concatenate([numbered[-1:], numbered[:-1]])
    to_pairs = functools.partial(
        _columns, tokenizer=tokenizer, vocab_size=vocab_size, unpaired=unpaired, scored=scored, pad=pad, seq_len=seq_len
    )
    both = grain.experimental.ZipMapDataset((numbered, before))
    pairs = both.map(to_pairs)  # pyright: ignore[reportArgumentType] (typed as if not zipped)
    return map(functools.partial(_named, scored=scored), fill(pairs, seq_len=seq_len, packing="fit", most=PAIRS))


def _columns(
    numbered: tuple[tuple[int, Record], tuple[int, Record]],
    tokenizer: Tokenizer,
    vocab_size: int,
    unpaired: bool,
    scored: bool,
    pad: int | None,
    seq_len: int,
) -> list[dict[str, Int32[np.ndarray, "length columns"]]]:
    """Returns each pair's columns: token, target, mask of the target, document (0 or 1), position in it, desirable.

    If `scored`, the bits of the margin stand in the place of desirable. For a model with vision there are three more
    columns: the number of the record, the token's picture and its feature.
    """
    found, ((record_number, record), (_, other)) = [], numbered
    for pair in encode_pairs(record, other, tokenizer, vocab_size=vocab_size, unpaired=unpaired, scored=scored):
        label = np.float32(pair.margin).view(np.int32) if scored else pair.desirable
        if is_learnt(pair := shorten(pair, _room(seq_len, scored))):
            documents = []
            for number, (ids, mask, _, places) in enumerate((pair.first, pair.second)):
                if scored:
                    ids, mask = with_last(ids, 0, pad)
                same = np.ones(len(ids) - 1, int)
                columns = [ids[:-1], ids[1:], mask[1:], number * same, np.arange(len(same)), label * same]
                if tokenizer.processor is not None:
                    places = np.zeros((len(ids), 2), int) if places is None else places
                    columns += [record_number * same, *places[:-1].T]
                documents.append(np.array(columns, np.int32).T)
            found.append({"columns": np.concatenate(documents)})
    return found


def _room(seq_len: int, scored: bool) -> int:
    """Returns the most tokens of a pair. A document's last token is only a target, unless it is scored."""
    return seq_len if scored else seq_len + 2


def _named(row: dict[str, np.ndarray], scored: bool) -> Row:
    label = "margin" if scored else "desirable"
    names = ("tokens", "targets", "loss_mask", "second", "positions", label, "record", "picture", "feature")
    named = dict(zip(names, np.ascontiguousarray(row["columns"].T), strict=False))
    pairs, second = row["columns_segment_ids"], named.pop("second")
    if scored:
        named[label] = named[label].view(np.float32)
    return named | {"segments": np.where(pairs > 0, 2 * pairs - 1 + second, 0)}


def survey(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    seq_len: int,
    unpaired: bool = False,
    scored: bool = False,
    pad: int | None = None,
    sample: int = 1000,
) -> Survey:
    """Validates and measures up to `sample` records, evenly spread, as `pack` would pack them.

    Lengths are of pairs, both documents together. `shortened` counts records with a pair that is cut, and `unlearnt`
    records with a pair that is skipped. The examples are the two documents of the first pair.

    Raises:
        ValueError: some records cannot be learnt from, or there is nothing to learn.
    """
    indices = np.linspace(0, len(records) - 1, min(sample, len(records))).astype(int).tolist()
    options: dict[str, Any] = dict(vocab_size=vocab_size, unpaired=unpaired, scored=scored)
    looked, found, problems = [], [], Problems()
    for i in indices:
        with problems.noted():
            completions(record := records[i])
            looked.append(record)
    for record, other in zip(looked, looked[-1:] + looked[:-1], strict=True):
        with problems.noted():
            found.append(encode_pairs(record, other, tokenizer, **options))
    problems.refuse(len(indices))
    short = [[shorten(pair, _room(seq_len, scored)) for pair in pairs] for pairs in found]
    lost = sum(not all(map(is_learnt, pairs)) for pairs in short)
    if not any(map(is_learnt, itertools.chain(*short))):
        raise ValueError(
            f"There is nothing to learn in the {len(looked)} records looked at: in {looked[0].where} and the others a "
            f"completion is empty, or its prompt fills half of a row of {seq_len} tokens."
        )
    source: Any = grain.MapDataset.source(looked)
    rows = pack(source, tokenizer, seq_len=seq_len, pad=pad, **options)
    pairs, lengths_of = list(itertools.chain(*found)), lambda pairs: [(len(a.ids), len(b.ids)) for a, b, *_ in pairs]
    sizes = [len(pair.first.ids) + len(pair.second.ids) for pair in pairs]
    lengths = np.quantile(sizes, [0, 0.5, 0.95, 1], method="nearest").tolist()
    return Survey(
        records=len(records),
        sampled=len(looked),
        keys=dict(collections.Counter(key for record in looked for key in record.fields)),
        lengths=dict(zip(("min", "median", "95%", "max"), lengths, strict=True)),
        shortened=sum(lengths_of(before) != lengths_of(after) for before, after in zip(found, short, strict=True)),
        unlearnt=lost,
        fill=float(np.mean([(row["segments"] > 0).mean() for row in rows])),
        examples=[*pairs[0][:2]],
    )


PREFERENCES = RecordKind("pairs", pack, survey, prompts_of, lambda record: completions(record)[0].prompt)
