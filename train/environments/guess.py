"""A game of two turns without tools: guess a number from 1 to 9; after the first guess it is told how far it lies."""

import random
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from train.data import rewards


TURNS, MOST = 2, 9


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
        return "That is no number." if guess is None else _hint(guess, self._number)

    def reward(self) -> float:
        return float(self._number in self._guesses)


def _hint(guess: Fraction | int, number: int) -> str:
    return f"It is {number - guess} higher." if guess < number else f"It is {guess - number} lower."


def record(draw: random.Random) -> dict[str, Any]:
    """Draws a record."""
    return {"prompt": f"Guess a number from 1 to {MOST}.", "answer": str(draw.randint(1, MOST))}


def solved(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat in which the record is solved."""
    return _chat(record, int(record["answer"]))


def guessed(record: Mapping[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """Returns a chat in which the second guess takes no notice of what was said of the first."""
    return _chat(record, draw.randint(1, MOST))


def _chat(record: Mapping[str, Any], second: int) -> list[dict[str, Any]]:
    first, number = MOST // 2 + 1, int(record["answer"])
    said = [record["prompt"], str(first)]
    if first != number:
        said += [_hint(first, number), str(second)]
    return [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(said)]
