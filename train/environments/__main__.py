"""Writes records for a built-in environment: `python -m train.environments calculator questions.jsonl`."""

import importlib
import json
import pathlib
import random
import shutil
from typing import Literal

import tyro

from train.methods import host
from train.methods.environments import BUILT_IN, FOLDER


def main(
    name: tyro.conf.Positional[Literal["calculator", "python", "guess"]],
    file: tyro.conf.Positional[pathlib.Path],
    count: int = 1000,
    solved: bool = False,
    template: pathlib.Path | None = None,
    seed: int = 0,
) -> None:
    """Writes records for a built-in environment of train.grpo.

    Args:
        name: the environment.
        file: file of JSON lines to write.
        count: number of records.
        solved: write chats in which the records are solved, with the tools, for train.sft.
        template: file to write a chat template to, for models whose own has no tools.
        seed: seed of the records.
    """
    if template is not None:
        shutil.copy(FOLDER / "tools.jinja", template)
    module, draw = importlib.import_module(f"train.environments.{name}"), random.Random(seed)
    tools = host.describe(getattr(module, BUILT_IN[name]))["tools"]
    with file.open("w") as lines:
        for _ in range(count):
            record = module.record(draw)
            if solved:
                record = {"messages": module.solved(record)} | ({"tools": tools} if tools else {})
            lines.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    tyro.cli(main, prog="python -m train.environments")
