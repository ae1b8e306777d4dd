"""A search over the texts of a folder, and questions that one of their lines answers."""

import collections
import itertools
import json
import math
import pathlib
import random
import re
import zlib
from collections.abc import Mapping
from typing import Any

from train.data import rewards


SYLLABLES = ("ba", "do", "ga", "ki", "lo", "mu", "ne", "pi", "ra", "so", "tu", "ve")
TOWNS = sorted("".join(syllables).capitalize() for syllables in itertools.product(SYLLABLES, repeat=3))
KINDS = (".txt", ".md")
MOST = 3  # lines that a search returns


class Search:
    """Asks the record's `prompt`, which texts in its `folder` answer. The reward is 1 where the last answer gives the
    number `answer` of the record or, where that is no number, has its words.
    """

    def reset(self, record: Mapping[str, Any]) -> str:
        self._record, self._said = record, ""
        return record["prompt"]

    def search(self, words: str) -> list[str]:
        """Finds lines of the texts that have these words, the best first.

        Args:
            words: some words, such as a name
        """
        folder = pathlib.Path(self._record["folder"])
        texts = sorted(path for path in folder.rglob("*") if path.suffix in KINDS)
        if not texts:
            raise FileNotFoundError(f"{folder} has no texts: files that end in {' or '.join(KINDS)}")
        return _best([line for path in texts for line in path.read_text("utf-8", "replace").splitlines()], words)

    def reply(self, answer: str) -> None:
        self._said = answer

    def reward(self) -> float:
        answer = str(self._record["answer"])
        if rewards.value(answer) is not None:
            return rewards.number(self._said, self._record)
        return float(" ".join(_words(answer)) in " ".join(_words(self._said)))


def _best(lines: list[str], words: str) -> list[str]:
    """Returns the `MOST` lines that have most of the words; a word counts the more, the fewer lines have it."""
    sets = [{*_words(line)} for line in lines]
    frequency = collections.Counter(word for each in sets for word in each)
    weights = {word: math.log1p(len(lines) / frequency[word]) for word in {*_words(words)} if frequency[word]}
    worth = [sum(weights[word] for word in sorted(weights) if word in each) for each in sets]
    order = sorted(range(len(lines)), key=lambda n: -worth[n])
    return [lines[n] for n in order[:MOST] if worth[n]]


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def record(draw: random.Random) -> dict[str, Any]:
    """Draws a record, for the texts of `write`."""
    town = draw.choice(TOWNS)
    return {"prompt": f"How many people live in {town}?", "answer": str(_people(town))}


def write(folder: pathlib.Path) -> None:
    """Writes the texts: a line for each town, in a file for each letter."""
    folder.mkdir(parents=True, exist_ok=True)
    for letter, towns in itertools.groupby(TOWNS, key=lambda town: town[0]):
        (folder / f"{letter}.txt").write_text("".join(f"{_line(town)}\n" for town in towns))


def _line(town: str) -> str:
    return f"{town} has {_people(town)} people."


def _people(town: str) -> int:
    return 100 + zlib.crc32(town.encode()) % 9900


def solved(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat in which the record is solved."""
    town = record["prompt"].removeprefix("How many people live in ").removesuffix("?")
    call = {"name": "search", "arguments": {"words": town}}
    return [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call00000", "name": "search", "content": json.dumps([_line(town)])},
        {"role": "assistant", "content": record["answer"]},
    ]


def guessed(record: Mapping[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """Returns a chat in which the record's answer is guessed."""
    guess = str(draw.randint(100, 9999))
    return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": guess}]
