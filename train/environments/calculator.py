"""A calculator, and products of numbers that are too large for a head."""

import ast
import operator
import random
from collections.abc import Callable, Mapping
from typing import Any

from train.data import rewards


OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod, ast.USub: operator.neg, ast.UAdd: operator.pos,
}  # fmt: skip
LONGEST = 200  # characters of an expression, and digits of what a power may give


class Calculator:
    """Asks the record's `prompt`. The reward is 1 where the last answer gives the number `answer` of the record."""

    def reset(self, record: Mapping[str, Any]) -> str:
        self._record, self._said = record, ""
        return record["prompt"]

    def calculate(self, expression: str) -> str:
        """Computes an arithmetic expression.

        Args:
            expression: such as 12 * (3 + 4)
        """
        if len(expression) > LONGEST:
            raise ValueError(f"the expression has more than {LONGEST} characters")
        return f"{_value(ast.parse(expression.strip(), mode='eval').body)}"

    def reply(self, answer: str) -> None:
        self._said = answer

    def reward(self) -> float:
        return rewards.number(self._said, self._record)


def _value(node: ast.AST) -> int | float:
    match node:
        case ast.Constant(int() | float() as value):
            return value
        case ast.UnaryOp(op, of) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(of))
        case ast.BinOp(left, ast.Pow(), right):
            base, power = _value(left), _value(right)
            if abs(power) * len(str(base)) > LONGEST:
                raise ValueError("the power is too large")
            return base**power
        case ast.BinOp(left, op, right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_value(left), _value(right))
    raise ValueError(f"{ast.unparse(node)} is not arithmetic")


def record(draw: random.Random) -> dict[str, Any]:
    """Draws a record."""
    a, b = draw.randint(12, 99), draw.randint(12, 99)
    return {"prompt": f"What is {a} * {b}?", "answer": str(a * b)}


def solved(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a chat in which the record is solved."""
    expression = _expression(record)
    call = {"name": "calculate", "arguments": {"expression": expression}}
    return [
        {"role": "user", "content": record["prompt"]},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "call00000", "type": "function", "function": call}]},
        {"role": "tool", "tool_call_id": "call00000", "name": "calculate", "content": record["answer"]},
        {"role": "assistant", "content": f"{expression} is {record['answer']}."},
    ]


def guessed(record: Mapping[str, Any], draw: random.Random) -> list[dict[str, Any]]:
    """Returns a chat in which the record's answer is guessed."""
    guess = f"{_expression(record)} is {draw.randint(144, 9801)}."
    return [{"role": "user", "content": record["prompt"]}, {"role": "assistant", "content": guess}]


def _expression(record: Mapping[str, Any]) -> str:
    return record["prompt"].removeprefix("What is ").removesuffix("?")
