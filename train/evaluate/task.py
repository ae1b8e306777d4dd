"""The protocol of a task that a model is evaluated on during a run, and the options that all tasks share."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from train.base.help import Group, option
from zoo.nn.model import AbstractModel


WRONG = 5  # answers that are shown of each task each time


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions:
    """What a model is asked whenever a run is validated, in `train.evaluate.validation.ValidationOptions`."""

    help_group: ClassVar[Group] = Group.VALIDATION

    eval_tasks: tuple[str, ...] = ()
    """Questions that the model answers at each evaluation, greedily. They are .jsonl files (docs/watching.md), or
    tasks of lm-eval by their names or as YAML files or folders of them. The metric of math.jsonl is eval_math."""
    eval_questions: int = option(200, rare=True)
    """Number of questions of each of --eval-tasks, from its beginning. 0: all."""
    eval_tokens: int = option(256, rare=True)
    """Largest number of tokens of an answer, where a task of lm-eval does not say."""
    eval_rows: int = option(32, rare=True)
    """Number of answers that are written at a time. It is halved if the device's memory does not suffice."""


class Wrong(NamedTuple):
    """An answer that does not count as right."""

    prompt: str
    text: str  # what the model wrote
    answer: Any  # what it should have


@runtime_checkable
class Task(Protocol):
    """What a model can be evaluated on."""

    name: str

    def evaluate(self, model: AbstractModel, rows: int, told: Callable[[int, int], None]) -> dict[str, float]:
        """Returns the task's metrics, with `rows` sequences at a time; tells how many of how many questions are done.

        If several processes hold parts of the model, all call this, and all get the same.
        """
        ...

    def wrong(self) -> Sequence[Wrong]:
        """Some wrong answers of the last evaluation."""
        ...
