"""Prompts of records: their tokens, images and fields, for rollouts and for the questions of an evaluation."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from train.data import pictures
from train.data.packing import REMEDY, messages, tools_of
from train.data.records import Record
from zoo.nn.model import Images
from zoo.text.tokenizer import Tokenizer


class Prompt(NamedTuple):
    ids: list[int]
    record: Mapping[str, Any]
    images: Images | None = None  # as for a batch of one row


def encode(record: Record, tokenizer: Tokenizer) -> Prompt:
    """Tokenizes a record's prompt. A last message by the assistant is moved from the messages to the field "answer".

    Raises:
        ValueError: the record has no prompt, or one that the chat template refuses; names file and line.
    """
    try:
        return _encode(record, tokenizer)
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error


def _encode(record: Record, tokenizer: Tokenizer) -> Prompt:
    match fields := record.fields:
        case {"prompt": str(text)}:
            return Prompt(tokenizer.encode(text), fields)
        case {"prompt": list(turns)} | {"messages": list(turns)} | {"conversations": list(turns)}:
            turns = messages(turns, tokenizer)
            if turns[-1]["role"] == "assistant":
                fields = {"answer": turns[-1]["content"]} | fields
                turns = turns[:-1]
            tools, shown = tools_of(fields), pictures.shown(turns, record, tokenizer)
            if shown is None:
                return Prompt(tokenizer.encode_prompt(turns, tools=tools), fields)
            ids = tokenizer.encode_prompt(shown.messages, tools=tools, expand=shown.expand)
            places = shown.places(ids, tokenizer)
            return Prompt(ids, fields, pictures.of_prompt(record, places, len(ids), shown.processor, turns))
    raise ValueError(f"the record has neither a prompt nor messages. {REMEDY}")
