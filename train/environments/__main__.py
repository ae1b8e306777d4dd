"""Writes records for a built-in environment: `python -m train.environments calculator questions.jsonl`."""

import importlib
import json
import pathlib
import random
from collections.abc import Iterator
from typing import Any, Literal

import tyro

from train.environments import search
from train.methods import host
from train.methods.environments import BUILT_IN


def records(name: str, count: int, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields records of an environment."""
    module, draw = importlib.import_module(f"train.environments.{name}"), random.Random(seed)
    for _ in range(count):
        yield module.record(draw)


def chats(name: str, count: int, solved: float, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yields chats about an environment's records, with its tools. A share of `solved` solves them; others guess."""
    module, draw = importlib.import_module(f"train.environments.{name}"), random.Random(seed + 1)
    tools = host.describe(getattr(module, BUILT_IN[name]))["tools"]
    for record in records(name, count, seed):
        messages = module.solved(record) if draw.random() < solved else module.guessed(record, draw)
        yield {"messages": messages} | ({"tools": tools} if tools else {})


def main(
    name: tyro.conf.Positional[Literal["calculator", "python", "guess", "search"]],
    file: tyro.conf.Positional[pathlib.Path],
    count: int = 1000,
    solved: float | None = None,
    seed: int = 0,
) -> None:
    """Writes records for a built-in environment of train.grpo.

    Args:
        name: the environment.
        file: file of JSON lines to write. The texts for search are in a folder of the same name, without the ending.
        count: number of records.
        solved: write chats for train.sft, of which this share solves the records by the tools; the others guess.
        seed: seed of the records.
    """
    made = records(name, count, seed) if solved is None else chats(name, count, solved, seed)
    if name == "search" and solved is None:
        folder = file.with_suffix("")
        search.write(folder)
        made = (record | {"folder": str(folder)} for record in made)
    with file.open("w") as lines:
        for each in made:
            lines.write(json.dumps(each) + "\n")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m train.environments")
