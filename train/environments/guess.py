"""A game of two turns without tools: guess a number from 1 to 3, of which the first guess tells where it lies."""

import random
from collections.abc import Mapping
from typing import Any

from train.data import rewards


TURNS = 2


class Guess:
    """Keeps the number `answer` of the record. The reward is 1 where one of two guesses is that number."""

    def reset(self, record: Mapping[str, Any]) -> str:
        self._number, self._guesses = int(record["answer"]), []
        return record["prompt"]

    def reply(self, answer: str) -> str | None:
        guess = rewards.value(answer)
        self._guesses.append(guess)
        if guess == self._number or len(self._guesses) == TURNS:
            return None
        if guess is None:
            return "That is no number."
        return "Higher." if guess < self._number else "Lower."

    def reward(self) -> float:
        return float(self._number in self._guesses)


def record(draw: random.Random) -> dict[str, Any]:
    """Draws a record."""
    return {"prompt": "Guess a number from 1 to 3.", "answer": str(draw.randint(1, 3))}


def solved(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat in which the record is solved."""
    said = [record["prompt"], "2"]
    if record["answer"] != "2":
        said += ["Higher." if record["answer"] == "3" else "Lower.", record["answer"]]
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
