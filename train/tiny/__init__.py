"""The embedded default: how `zoo.load("tiny")` was made, and the instructions that `python -m train.sft` teaches it."""

import pathlib


INSTRUCTIONS = pathlib.Path(__file__).parent / "instructions.jsonl"
