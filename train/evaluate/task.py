"""The protocol of a task that a model is evaluated on during a run, and the options that all tasks share."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from train.base.options import Group, OptionGroup, option
from zoo.nn.model import AbstractModel


WRONG = 5  # number of wrong answers that are recorded of each task at each evaluation


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """Options for the tasks of each evaluation."""

    help_group: ClassVar[Group] = Group.VALIDATION

    eval_tasks: tuple[str, ...] = ()
    """Questions that the model answers at each evaluation, greedily. They are .jsonl files (docs/watching.md), names of
    tasks of lm-eval, or YAML files of such tasks or folders of these. The metric of math.jsonl is eval_math."""
    eval_tokens: int = option(256, rare=True)
    """Largest number of tokens of an answer, unless a task of lm-eval sets another."""
    retired: ClassVar[Mapping[str, str]] = {
        "eval-rows": "32 answers are written at a time, or fewer where the memory does not suffice.",
        "eval-questions": "all questions of a file are asked, and the first 200 of a task of lm-eval.",
    }


class Wrong(NamedTuple):
    """An answer that does not count as right."""

    prompt: str
    text: str  # the model's answer
    answer: Any  # the right answer


@runtime_checkable
class Task(Protocol):
    """A task that a model can be evaluated on."""

    name: str

    def evaluate(self, model: AbstractModel, rows: int, told: Callable[[int, int], None]) -> dict[str, float]:
        """Returns the task's metrics, computed with `rows` sequences at a time.

        If several processes hold parts of the model, all of them call it, and all get the same.

        Args:
            told: is called with the number of questions that are done, and the number of all questions.
        """
        ...

    def wrong(self) -> Sequence[Wrong]:
        """Returns some wrong answers of the last evaluation."""
        ...
