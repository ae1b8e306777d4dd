"""The embedded default: code that made `zoo.load("tiny")`, and the scripts' own data (instructions and preferences)."""

import pathlib


INSTRUCTIONS = pathlib.Path(__file__).parent / "instructions.jsonl"
PREFERENCES = pathlib.Path(__file__).parent / "preferences.jsonl"
