"""Rows made of records: detecting formats, tokenizing, and packing documents into rows, all through grain.

    records, held_out = open_records("chats/")
    for row in pack(records, tokenizer, vocab_size=model.config.vocab_size, seq_len=1024):
        ...

`train.data.rows` describes a row. Targets are taken before documents are packed, so no target is a token of another
document.
"""

import collections
import dataclasses
import datetime
import functools
import hashlib
import itertools
import json
import pathlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import grain
import jax
import numpy as np
from jaxtyping import Int32, Shaped

from convert import manifest
from train.base.options import OptionGroup, option
from train.data import files, pictures
from train.data.record import BadRecord, Problems, Record
from train.data.rows import Row
from zoo.generation.generate import Encoded
from zoo.text import tiktoken
from zoo.text.messages import Messages
from zoo.text.tokenizer import Tokenizer, source_of


FORMATS = (
    "messages (a list of {role, content}), conversations (a list of {from, value}), "
    "prompt and completion (both strings or both lists of messages), instruction, input and output (Alpaca), "
    "question and answer, text (a string), or tokens (a list of ids)"
)
REMEDY = "--columns FIELD=COLUMN renames other keys, and DATA@file.py:function makes fields of them (docs/data.md)."
ROLES = {role: role for role in ("system", "developer", "user", "assistant", "tool", "function", "ipython")}
ROLES |= {"human": "user", "gpt": "assistant", "model": "assistant", "bot": "assistant"}
BINS = 64  # rows that are packed at a time; more rows leave less padding, and mix the epochs of a small data set more

DATE = datetime.date(2026, 1, 1)  # for templates that write one: a run that goes on tomorrow has the same tokens

Packing = Literal["fit", "concat", "off"]
LongTexts = Literal["split", "cut"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PackingOptions(OptionGroup):
    """Options for packing texts and chats into rows."""

    packing: Packing = "fit"
    """How examples are put into rows. fit: several in a row, as tightly as possible. concat: one after another, and
    continued in the next row. off: one in a row. Examples in one row do not see each other."""
    long_texts: LongTexts = "split"
    """Treatment of a text that is longer than a row. split: it is continued in other rows. cut: its end is left out.
    Chats and completions that are longer than a row lose their ends, unless --packing is concat."""

    def settings(self, vocab_size: int, *, completions_only: bool = True) -> dict[str, Any]:
        """Returns the arguments of `pack`, but for `seq_len`."""
        return dict(vocab_size=vocab_size, completions_only=completions_only) | dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(OptionGroup):
    """Options for the chat template, which turns chats into text: options of `zoo.tokenizer`."""

    template: str | None = option(None, identity=False)
    """Jinja file, or another model (a zoo name, a Hub repository or a folder) whose chat template is used, such as the
    instruction-tuned model for a base model. The exported model has this template. None: the model's own."""
    retired: ClassVar[Mapping[str, str]] = {
        "date": "templates that write a date get 2026-01-01.",
        "special-in-content": "control tokens in messages stay text; write such a chat as a prompt and a completion.",
    }

    @property
    def arguments(self) -> dict[str, Any]:
        """Returns these options as arguments of `zoo.tokenizer`."""
        return {"date": DATE, "chat_template": self.template}


# ======================================================================================================================
# Formats. A record's keys show its format. The tokenizer turns a record into ids, and a mask of the ids to be learnt.
# ======================================================================================================================


class Example(NamedTuple):
    ids: list[int]
    mask: list[int]  # 1: to be learnt
    whole: bool  # must not be cut into pieces: a chat, or a prompt with its completion
    places: Int32[np.ndarray, "length 2"] | None = None  # see `train.data.pictures.Shown.places`; None: no images


def encode(record: Record, tokenizer: Tokenizer, *, vocab_size: int, completions_only: bool = True) -> list[Example]:
    """Tokenizes a record. All tokens are to be learnt, or with `completions_only` the tokens that follow a prompt.

    Texts and completions get the tokenizer's first end token. Chats are rendered by their template. A chat becomes
    several examples if the template writes an answer differently once others follow (`Tokenizer.encode_chat`).

    Raises:
        ValueError: the record has no known format, or ids beyond the model's `vocab_size`; names file and line.
    """
    try:
        examples = _encode(record, tokenizer, completions_only)
        largest = max((id for example in examples for id in example.ids), default=0)
        if largest >= vocab_size:
            raise ValueError(
                f"token {largest} is beyond the model's vocabulary of {vocab_size}; "
                f"is {tokenizer.folder} the model's tokenizer?"
            )
    except ValueError as error:
        raise BadRecord(record.where, f": {error}") from error
    return examples


def _encode(record: Record, tokenizer: Tokenizer, completions_only: bool) -> list[Example]:
    match fields := record.fields:
        case {"messages": list(turns)} | {"conversations": list(turns)}:
            return _encode_chat(messages(turns, tokenizer), 0, record, tokenizer, completions_only)
        case {"prompt": list(prompt), "completion": list(completion)}:
            turns, given = messages(prompt + completion, tokenizer), len(prompt)
            return _encode_chat(turns, given, record, tokenizer, completions_only)
        case {"prompt": str(prompt), "completion": str(completion)}:
            # Encoded together, since separate encoding can give other tokens: sentencepiece puts a space before a text.
            text, start = prompt + completion, len(prompt) if completions_only else 0
            ids, mask = tokenizer.encode_spans(text, [(start, len(text))])
        case {"instruction": str(asked), "output": str(answer)} | {"question": str(asked), "answer": str(answer)}:
            if "instruction" in fields and fields.get("input"):
                asked = f"{asked}\n\n{fields['input']}"
            return _encode(_asked(record, asked, answer, tokenizer), tokenizer, completions_only)
        case {"text": str(text)}:
            ids = tokenizer.encode(text)
            mask = [1] * len(ids)
        case {"tokens": list(ids)}:  # tokenized before, so no token is added
            return [Example(ids, _mask_of(fields, ids), whole=fields.get("loss_mask") is not None)]
        case dict():
            found = ", ".join(f"{key} ({type(value).__name__})" for key, value in fields.items())
            raise ValueError(f"the record has {found or 'no keys'}, but must have {FORMATS}. {REMEDY}")
        case _:
            raise ValueError(f"a record must be a JSON object, not a {type(fields).__name__}.")
    if ids and ids[-1] in tokenizer.eos:
        mask[-1] = 1
    elif tokenizer.eos and not fields.get("continues"):
        ids, mask = [*ids, tokenizer.eos[0]], [*mask, 1]
    return [Example(ids, mask, whole="completion" in fields)]


def with_last(ids: list[int], target: int, pad: int | None) -> tuple[list[int], list[int]]:
    """Makes a `target` follow a text's ids, for a head that reads the text's last token; returns ids and mask.

    It alone is to be learnt. Tokens at the end that are `pad` are left out, since heads do not count them as text.
    """
    end = len(ids) - next((n for n, id in enumerate(reversed(ids)) if id != pad), 0)
    return [*ids[:end], target], [*[0] * end, 1]


def _asked(record: Record, asked: str, answer: str, tokenizer: Tokenizer) -> Record:
    """Returns a question with its answer as a chat, or as a prompt with a completion if there is no chat template."""
    if tokenizer.chat_template is None:
        return record._replace(fields={"prompt": f"{asked}\n", "completion": answer})
    turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    return record._replace(fields={"messages": turns})


def _mask_of(fields: dict[str, Any], ids: list[Any]) -> list[int]:
    """Returns the mask of a record of tokens: its `loss_mask`, or else ones. Raises a ValueError for wrong values."""
    wrong = [id for id in ids if type(id) is not int or id < 0]
    if wrong:
        raise ValueError(f"tokens has {wrong[0]!r}, and may have whole numbers from 0 alone.")
    mask = [1] * len(ids) if fields.get("loss_mask") is None else fields["loss_mask"]
    if not isinstance(mask, list) or len(mask) != len(ids) or any(learnt not in (0, 1) for learnt in mask):
        raise ValueError(f"loss_mask must be a list of 0 and 1, {len(ids)} of them as of tokens.")
    return [int(learnt) for learnt in mask]


def messages(turns: list[Any], tokenizer: Tokenizer) -> Messages:
    """Converts the messages of a chat, from either known layout, to role and content. Joins parts that are all text.

    Raises:
        ValueError: a message has neither layout, a weight other than 0 and 1, or a role that is neither known here nor
            named in the chat template. The first such message is named.
    """
    found = []
    for number, turn in enumerate(turns, 1):
        match turn:
            case {"role": str(role)}:
                message = dict(turn)
            case {"from": str(role), "value": str(content)}:
                message = {"content": content}
            case _:
                raise ValueError(f"message {number} must have role and content, or from and value.")
        if role.lower() not in ROLES and not tokenizer.names_role(role):
            raise ValueError(f"message {number} is by {role!r}, which is no role; there are {', '.join(ROLES)}.")
        if message.get("weight") not in (None, 0, 1):
            raise ValueError(f"message {number} has the weight {message['weight']!r}, which must be 0 or 1.")
        found.append(message | {"role": ROLES.get(role.lower(), role)})
    if not found:
        raise ValueError("the list of messages is empty.")
    return tokenizer.joined(found)


def tools_of(fields: dict[str, Any]) -> Any:
    """Returns the tools that a record's chat may call, or None. Columnar files hold tools as JSON."""
    tools = fields.get("tools")
    return json.loads(tools) if isinstance(tools, str) else tools


def _encode_chat(
    messages: Messages, given: int, record: Record, tokenizer: Tokenizer, completions_only: bool
) -> list[Example]:
    shown, tools, expand = pictures.shown(messages, record, tokenizer), tools_of(record.fields), None
    if shown is not None:
        messages, expand = shown.messages, shown.expand
    if completions_only:
        found = tokenizer.encode_chat(messages, tools=tools, given=given, expand=expand)
    elif any(message.get("weight") == 0 for message in messages):
        raise ValueError("a message has the weight 0, but with --no-completions-only all are learnt.")
    else:
        ids = tokenizer.encode_all(messages, tools=tools, expand=expand)
        found = [(ids, [1] * len(ids))]
    if shown is None:
        return [Example(ids, mask, True) for ids, mask in found]
    placed = [(ids, mask, shown.places(ids, tokenizer)) for ids, mask in found]
    # A token that stands for a part of an image is never to be learnt.
    return [Example(ids, np.where(at[:, 0] > 0, 0, mask).tolist(), True, at) for ids, mask, at in placed]


# ======================================================================================================================
# Rows.
# ======================================================================================================================


def pack(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    seq_len: int,
    packing: Packing = "fit",
    long_texts: LongTexts = "split",
    completions_only: bool = True,
    seed: int | None = None,
) -> Iterator[Row]:
    """Packs all records into rows of `seq_len` tokens, in their order or, with a `seed`, in random order.

    `packing` decides how rows are filled. "fit": with whole examples, as tightly as possible. "concat": with all
    examples one after another, continued in the next row when a row is full. "off": with one example each. A text that
    is longer than a row is split into pieces, or with `long_texts` "cut" loses its end. A chat or completion that is
    longer than a row always loses its end (`survey` counts these), except with "concat".

    If the tokenizer has an image processor, rows have the places of images, too (`train.data.pictures`).
    """
    processor, numbered = tokenizer.processor, records.map_with_index(lambda n, record: (n, record))
    if processor and packing == "concat":
        raise ValueError("--packing concat would cut images, too: use fit, or off.")
    if seed is not None:
        numbered = numbered.shuffle(seed=seed)
    to_example = functools.partial(
        _columns, tokenizer=tokenizer, vocab_size=vocab_size, completions_only=completions_only,
        longest=None if packing == "concat" else seq_len, longest_text=seq_len if long_texts == "cut" else None,
    )  # fmt: skip
    return map(_named, fill(numbered.map(to_example), seq_len=seq_len, packing=packing))


def fill(
    examples: grain.MapDataset[list[dict[str, Shaped[np.ndarray, "length ..."]]]],
    *,
    seq_len: int,
    packing: Packing,
    most: int | None = None,
) -> grain.IterDataset:
    """Packs the examples of each record, arrays "columns", into rows, see `pack`. "fit" puts up to `most` in a row."""
    cut = _Pieces(sys.maxsize if packing == "concat" else seq_len)
    pieces = grain.experimental.FlatMapIterDataset(examples.to_iter_dataset(), cut)
    if packing == "concat":
        return grain.experimental.ConcatThenSplitIterDataset(pieces, length_struct={"columns": seq_len})
    return grain.experimental.BestFitPackIterDataset(
        pieces,
        length_struct={"columns": seq_len},
        num_packing_bins=BINS if packing == "fit" else 1,
        max_sequences_per_bin=most if packing == "fit" else 1,
    )


def max_length(whole: bool, *, seq_len: int, packing: Packing, long_texts: LongTexts) -> int:
    """Returns the largest number of ids of an example that `pack` puts into rows. The last id is only a target.

    Args:
        whole: whether the example must not be cut into pieces, see `Example`.
    """
    ends = packing != "concat" if whole else long_texts == "cut"
    return seq_len + 1 if ends else sys.maxsize


def prompts_of(records: Iterable[Record], tokenizer: Tokenizer, *, vocab_size: int) -> list[Encoded]:
    """Returns the prompts (`prompt_of`) of the first three records, with their images, for a model to continue."""
    prompts = []
    for record in itertools.islice(records, 3):
        example = encode(record, tokenizer, vocab_size=vocab_size)[-1]
        ids = prompt_of(example)
        prompts.append(Encoded(ids, pictures.of_prompt(record, example.places, len(ids), tokenizer.processor)))
    return prompts


def prompt_of(example: Example) -> list[int]:
    """Returns the tokens before the first token to be learnt; for a text, its first quarter, at most 64 tokens."""
    learnt = example.mask.index(1) if 1 in example.mask else len(example.ids)
    return example.ids[:learnt] if learnt > 1 else example.ids[: max(1, min(64, len(example.ids) // 4))]


def _columns(
    numbered: tuple[int, Record],
    tokenizer: Tokenizer,
    vocab_size: int,
    completions_only: bool,
    longest: int | None,
    longest_text: int | None,
) -> list[dict[str, Int32[np.ndarray, "length columns"]]]:
    """Returns, for each example that has a target, the columns token, target, and mask of the target.

    A chat or completion is cut at `longest`, a text at `longest_text`. For a model with vision there are three more
    columns: the number of the record, the token's picture and its feature. There a cut that would split a picture is
    made before the picture.
    """
    number, record = numbered
    found = []
    for ids, mask, whole, places in encode(record, tokenizer, vocab_size=vocab_size, completions_only=completions_only):
        columns, end = np.array([ids[:-1], ids[1:], mask[1:]], np.int32).T, longest if whole else longest_text
        if tokenizer.processor is not None:
            places = np.zeros((len(ids), 2), np.int32) if places is None else places
            columns = np.column_stack([columns, np.full(len(columns), number, np.int32), places[:-1]])
            end = pictures.whole(places[:, 0], min(len(columns), end or len(columns)))
        found.append({"columns": columns[:end]})
    return [example for example in found if len(example["columns"])]


class _Pieces(grain.experimental.FlatMapTransform):
    """A map from a record's examples to pieces: an example that is longer than a row is cut into several."""

    max_fan_out = sys.maxsize

    def __init__(self, length: int):
        self.length = length

    def flat_map(self, element: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        arrays, step = [example["columns"] for example in element], self.length
        return [{"columns": columns[i : i + step]} for columns in arrays for i in range(0, len(columns), step)]


def _named(row: dict[str, np.ndarray]) -> Row:
    names = ("tokens", "targets", "loss_mask", "record", "picture", "feature")
    named = dict(zip(names, np.ascontiguousarray(row["columns"].T), strict=False))
    return named | dict(segments=row["columns_segment_ids"], positions=row["columns_positions"])


def fingerprint(path: str | pathlib.Path, tokenizer: Tokenizer, **settings: Any) -> dict[str, Any]:
    """Returns, as plain JSON, everything that must be the same when an iterator's state is restored.

    It has the files, by name and SHA-256; the tokenizer, with the tokens that it puts around texts; and `settings`,
    which should be the arguments of `pack`. An iterator's state is only an index, so compare this before restoring it.
    """
    return {
        "files": files.hashes(path),
        "tokenizer": tokenizer_hash(tokenizer),
        "bos": tokenizer.bos,
        "eos": list(tokenizer.eos),
        **settings,
    }


def file_hashes(root: pathlib.Path, files: Sequence[pathlib.Path]) -> dict[str, str]:
    """Returns name below `root` -> SHA-256. Only process 0 reads the files, since no other compares the hashes."""
    folder = root if root.is_dir() else root.parent
    return manifest.hashes(folder, [str(file.relative_to(folder)) for file in files if jax.process_index() == 0])


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    """Returns a SHA-256 of all that determines tokens: the tokenizer, its chat template, and the date if it is used."""
    template = tokenizer.chat_template or ""
    dated = str(tokenizer.date) if "strftime_now" in template else ""
    file = tokenizer.folder / source_of(tokenizer.folder)
    content = file.read_bytes()
    if file.name == tiktoken.NAME:  # Kimi's tokenizer, whose special tokens are named in another file
        reserved = range(tokenizer.vocab_size - tiktoken.RESERVED, tokenizer.vocab_size)
        content += "".join(tokenizer.decode([id], special=True) for id in reserved).encode()
    return hashlib.sha256(content + (template + dated).encode()).hexdigest()


# ======================================================================================================================
# The survey: a check of the data before training.
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class Survey:
    """The results of `survey`, for `sampled` of the `records`."""

    records: int
    sampled: int
    keys: dict[str, int]  # key -> number of the sampled records that have it
    lengths: dict[str, int]  # tokens of an example, before anything is cut: "min", "median", "95%", "max"
    shortened: int  # records with a chat or completion that is longer than a row and loses its end
    unlearnt: int  # records with no token to be learnt, or with none within a row
    fill: float  # fraction of the rows that is not padding
    examples: list[Example]  # up to three: the first, the middle and the last
    several: int = 0  # chats that become several examples, see `encode`


def survey(
    records: grain.MapDataset[Record],
    tokenizer: Tokenizer,
    *,
    vocab_size: int,
    seq_len: int,
    packing: Packing = "fit",
    long_texts: LongTexts = "split",
    completions_only: bool = True,
    sample: int = 1000,
) -> Survey:
    """Validates and measures up to `sample` records, evenly spread, as `pack` would pack them with the same arguments.

    Raises:
        ValueError: some records cannot be learnt from (the message has each problem with the number of records and the
            first places), or there is nothing to learn.
    """
    indices = np.linspace(0, len(records) - 1, min(sample, len(records))).astype(int)
    options: dict[str, Any] = dict(vocab_size=vocab_size, completions_only=completions_only)
    chosen, found, problems = [], [], Problems()
    for i in indices.tolist():
        with problems.noted():
            found.append(encode(record := records[i], tokenizer, **options))
            chosen.append(record)
    problems.refuse(len(indices))
    limit = lambda example: max_length(example.whole, seq_len=seq_len, packing=packing, long_texts=long_texts)
    learns = lambda example: any(example.mask[1 : limit(example)])
    examples = [example for of_record in found for example in of_record]
    source: Any = grain.MapDataset.source(chosen)
    rows = pack(source, tokenizer, seq_len=seq_len, packing=packing, long_texts=long_texts, **options)
    if not any(map(learns, examples)):
        raise ValueError(
            f"There is nothing to learn in the {len(chosen)} records looked at: {chosen[0].where} and the others have "
            f"no text, or no completion within the first {seq_len} tokens."
        )
    fills = [(row["segments"] > 0).mean() for row in rows]
    lengths = np.quantile([len(example.ids) for example in examples], [0, 0.5, 0.95, 1], method="nearest").tolist()
    return Survey(
        records=len(records),
        sampled=len(chosen),
        keys=dict(collections.Counter(key for record in chosen for key in record.fields)),
        lengths=dict(zip(("min", "median", "95%", "max"), lengths, strict=True)),
        shortened=sum(any(len(example.ids) > limit(example) for example in of_record) for of_record in found),
        unlearnt=sum(not any(map(learns, of_record)) for of_record in found),
        fill=float(np.mean(fills)) if fills else 0.0,
        examples=[examples[i] for i in sorted({0, len(examples) // 2, len(examples) - 1})],
        several=sum(len(of_record) > 1 for of_record in found),
    )


# ======================================================================================================================
# Kinds of records.
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class RecordKind:
    """The functions that make rows of one kind of records."""

    name: str
    pack: Callable[..., Iterator[Row]]
    survey: Callable[..., Survey]
    prompts_of: Callable[..., list[Encoded]]
    chat_of: Callable[[Record], Any]  # the messages of a record that may hold images


TEXT = RecordKind("text", pack, survey, prompts_of, pictures.chat_of)
