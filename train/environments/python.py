"""Python in a confined process (`train.data.confine`), and sums that are quick to program."""

import pathlib
import random
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from train.data import confine, rewards


SECONDS = 10
PROGRAM = f"{rewards.GUARD}\nexec(compile(open(0).read(), 'code', 'exec'), {{'__name__': '__main__'}})"


class Python:
    """Asks the record's `prompt`. The reward is 1 where the last answer gives the number `answer` of the record."""

    def reset(self, record: Mapping[str, Any]) -> str:
        self._record, self._said = record, ""
        return record["prompt"]

    def run(self, code: str) -> str:
        """Runs a Python program, and returns what it prints. Nothing is kept from one program to the next.

        Args:
            code: the program, which has 10 seconds, and neither files nor a network
        """
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            printed = pathlib.Path(folder) / "printed"
            limits = confine.__file__, folder, str(SECONDS), str(rewards.BYTES)
            with printed.open("wb") as file:
                child = subprocess.Popen(
                    [sys.executable, "-I", *limits, "-c", PROGRAM], cwd=folder, env={}, start_new_session=True,
                    stdin=subprocess.PIPE, stdout=file, stderr=subprocess.STDOUT,
                )  # fmt: skip
                try:
                    child.communicate(code.encode(errors="replace"), timeout=SECONDS)
                except subprocess.TimeoutExpired:
                    raise TimeoutError(f"the program took more than {SECONDS} seconds") from None
                finally:
                    child.kill()
                    child.communicate()
            return printed.read_text(errors="replace") or "(It printed nothing.)"

    def reply(self, answer: str) -> None:
        self._said = answer

    def reward(self) -> float:
        return rewards.number(self._said, self._record)


def record(draw: random.Random) -> dict[str, Any]:
    """Draws a record."""
    most, divisor = draw.randint(20, 999), draw.randint(3, 19)
    answer = sum(n for n in range(1, most + 1) if n % divisor == 0)
    return {"prompt": f"What is the sum of the multiples of {divisor} up to {most}?", "answer": str(answer)}


def solved(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat in which the record is solved."""
    divisor, most = (int(word) for word in record["prompt"].removesuffix("?").split() if word.isdigit())
    call = {"name": "run", "arguments": {"code": f"print(sum(range(0, {most + 1}, {divisor})))"}}
    return [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call00000", "name": "run", "content": f"{record['answer']}\n"},
        {"role": "assistant", "content": record["answer"]},
    ]


def guessed(record: Mapping[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """Returns a chat in which the record's answer is guessed."""
    guess = str(draw.randint(20, 99_999))
    return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": guess}]
