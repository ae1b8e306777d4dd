"""The embedded default: how `zoo.load("tiny")` was made, and the scripts' own data (instructions and preferences)."""

import pathlib


INSTRUCTIONS = pathlib.Path(__file__).parent / "instructions.jsonl"
PREFERENCES = pathlib.Path(__file__).parent / "preferences.jsonl"
