"""Evaluation during runs: questions from the user's files or from lm-eval, which the model answers as it learns.

A file has one JSON object a line: `prompt`, a string or a list of messages; `answer`, a string or a list of accepted
strings; and optionally `match`, the way in which answers are compared. `zoo.evaluation` has lm-eval's tasks.
"""

import functools
import itertools
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import rich
import rich.progress
from jax.sharding import Mesh

from train.base.goodput import clock
from train.data import rewards
from train.data.prompts import Prompt, encode
from train.data.records import Record, open_records
from train.evaluate.task import WRONG, Task, TaskOptions, Wrong
from train.state.mesh import generating
from zoo import evaluation
from zoo.generation.engine import Completion, Engine
from zoo.generation.sampling import Sampling
from zoo.generation.shapes import bucket
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.text.tokenizer import Tokenizer


T = TypeVar("T")
ROWS = 32  # answers that are written at a time, if the memory suffices
LIMIT = 200  # questions of a task of lm-eval, from its beginning; `zoo.evaluate` asks all, of the exported model
MATCHES: dict[str, rewards.Reward] = {"exact": rewards.exact, "number": rewards.number}


class Tasks:
    """All tasks of --eval-tasks.

    Raises:
        ValueError, OSError: a task does not exist, or one of its records has no question; names file and line.
        ImportError: a task is of lm-eval, which is not installed.
    """

    def __init__(self, options: TaskOptions, tokenizer: Tokenizer, config: AbstractConfig, mesh: Mesh, dtype: Any):
        self.mesh, self.dtype, self.rows = mesh, dtype, ROWS
        self.tasks = [find(name, options, tokenizer, config) for name in options.eval_tasks]
        names = [task.name for task in self.tasks]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"Two of --eval-tasks are named {', '.join(sorted(twice))}: rename a file.")

    def evaluate(self, model: AbstractModel, step: int, record: Callable[..., None]) -> dict[str, float]:
        """Returns the metrics of all tasks after `step`. Passes some wrong answers to `record`."""
        if not self.tasks:
            return {}
        numbers, console = {}, rich.get_console()
        bar = rich.progress.Progress(console=console, transient=True, disable=not console.is_terminal)
        with generating(model, self.mesh, self.dtype) as model, bar:
            for task in self.tasks:
                shown = bar.add_task(task.name)

                def told(done: int, of: int, shown: rich.progress.TaskID = shown) -> None:
                    bar.update(shown, completed=done, total=of)
                    clock().change("evaluation")  # shows progress to `train.run.watchdog`

                found, self.rows = retry_smaller(functools.partial(task.evaluate, model, told=told), self.rows)
                numbers |= found
                for wrong in task.wrong():
                    record(step, task=task.name, **wrong._asdict())
        rich.print(f"step {step:,}: " + ", ".join(f"{name} {value:.3f}" for name, value in numbers.items()))
        return numbers


def retry_smaller(call: Callable[[int], T], rows: int) -> tuple[T, int]:
    """Returns `call(rows)`, and the number of rows. Out of memory, it tries again with half as many rows.

    With several processes the error is raised instead, since another process may have had enough memory, and would wait
    for ever.
    """
    while True:
        try:
            return call(rows), rows
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error) or rows == 1 or jax.process_count() > 1:
                raise
        rows //= 2  # outside the `except`, where the error no longer holds the arrays
        rich.print(f"The device's memory does not suffice for {2 * rows} answers at a time: trying {rows}.")


def find(name: str, options: TaskOptions, tokenizer: Tokenizer, config: AbstractConfig) -> Task:
    """Returns the task for one name of --eval-tasks."""
    if pathlib.Path(name).suffix in (".jsonl", ".json"):
        return Questions(pathlib.Path(name), options, tokenizer, config)
    return Harness(name, options, tokenizer)


# ======================================================================================================================
# Questions of a file.
# ======================================================================================================================


class Question(NamedTuple):
    prompt: Prompt
    answers: tuple[str, ...]
    match: rewards.Reward

    def right(self, text: str) -> bool:
        return any(self.match(text, {"answer": answer}) == 1 for answer in self.answers)


class Questions:
    """The questions of a file, which the model answers greedily. The metric is the share of right answers."""

    def __init__(self, path: pathlib.Path, options: TaskOptions, tokenizer: Tokenizer, config: AbstractConfig):
        try:
            records, _ = open_records(path, 0.0)
        except (ValueError, OSError) as error:
            raise type(error)(f"--eval-tasks: {error}") from error
        self.name, self.tokenizer, self.tokens = f"eval_{path.stem}", tokenizer, options.eval_tokens
        self.questions = [question(record, tokenizer) for record in records]
        room = config.max_position_embeddings - options.eval_tokens
        for record, each in zip(records, self.questions, strict=True):
            if len(each.prompt.ids) > room:
                raise ValueError(
                    f"{record.where}: the prompt has {len(each.prompt.ids):,} tokens, which with --eval-tokens "
                    f"{options.eval_tokens} exceed the model's {config.max_position_embeddings:,} positions."
                )
        self.wrongs: list[Wrong] = []

    def evaluate(self, model: AbstractModel, rows: int, told: Callable[[int, int], None]) -> dict[str, float]:
        texts = [self.tokenizer.answer(completion.tokens) for completion in self._write(model, rows, told)]
        right = [each.right(text) for each, text in zip(self.questions, texts, strict=True)]
        self.wrongs = [
            Wrong(self.tokenizer.decode(each.prompt.ids), text, each.prompt.record["answer"])
            for each, text, is_right in zip(self.questions, texts, right, strict=True)
            if not is_right
        ]
        return {self.name: sum(right) / len(right)}

    def wrong(self) -> Sequence[Wrong]:
        return self.wrongs[:WRONG]

    def _write(self, model: AbstractModel, rows: int, told: Callable[[int, int], None]) -> list[Completion]:
        longest = max(len(each.prompt.ids) for each in self.questions)
        engine = Engine(
            model,
            batch=min(rows, len(self.questions)),
            max_tokens=bucket(longest) + self.tokens,
            stops=self.tokenizer.eos,
            prefixes=True,
        )
        sampling = Sampling(max_new_tokens=self.tokens)
        completions = [
            engine.submit(each.prompt.ids, sampling, images=each.prompt.images)[0] for each in self.questions
        ]
        while not engine.idle:
            engine.step()
            told(sum(completion.finished for completion in completions), len(completions))
        return completions


def question(record: Record, tokenizer: Tokenizer) -> Question:
    """Reads a question. Without a `match`, answers are compared as numbers if `is_number` holds for each of them.

    Raises:
        ValueError: the record has no prompt, or no answer that could be compared; names file and line.
    """
    prompt = encode(record, tokenizer)
    answer, match = prompt.record.get("answer"), prompt.record.get("match")
    answers = tuple(str(each) for each in (answer if isinstance(answer, list) else [answer]))
    if answer is None or not answers:
        raise ValueError(
            f"{record.where}: a question needs an `answer`, a string or a list of those that are accepted."
        )
    if match is None:
        match = "number" if all(map(is_number, answers)) else "exact"
    if match not in MATCHES:
        raise ValueError(f"{record.where}: the `match` {match!r} is neither {' nor '.join(MATCHES)}.")
    if match == "number" and None in map(rewards.value, answers):
        raise ValueError(f"{record.where}: an answer has no number, to which the `match` number compares.")
    return Question(prompt, answers, MATCHES[match])


def is_number(answer: str) -> bool:
    """Whether an answer is a number, or has one marked, like answers of GSM8K ("#### 72") and MATH (\\boxed{72})."""
    marked = re.search(r"####|\\boxed", answer) or re.fullmatch(rewards.NUMBER, answer.strip())
    return bool(marked) and rewards.value(answer) is not None


# ======================================================================================================================
# Tasks of lm-eval.
# ======================================================================================================================


class Harness:
    """Tasks of lm-eval by one name (`zoo.evaluation.Tasks`). The metrics are `eval_TASK/METRIC`, as `zoo.evaluate`'s.

    Raises:
        ImportError, ValueError: lm-eval is not installed, or has no such task.
    """

    def __init__(self, name: str, options: TaskOptions, tokenizer: Tokenizer):
        try:
            self._tasks = evaluation.Tasks(name)
        except (ImportError, ValueError) as error:
            raise type(error)(f"--eval-tasks: {error} A file of questions ends in .jsonl.") from error
        self.name, self._tokenizer, self._tokens = f"eval_{pathlib.Path(name).stem}", tokenizer, options.eval_tokens
        self._wrong: list[Wrong] = []

    def evaluate(self, model: AbstractModel, rows: int, told: Callable[[int, int], None]) -> dict[str, float]:
        results = self._tasks.run(
            model, self._tokenizer, limit=LIMIT, batch=rows, max_new_tokens=self._tokens, told=told, bootstrap=0
        )
        self._wrong = list(itertools.islice(wrong(results["samples"]), WRONG))
        return {f"eval_{name}": value for name, value in evaluation.metrics(results).items()}

    def wrong(self) -> Sequence[Wrong]:
        return self._wrong


def wrong(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> Iterator[Wrong]:
    """Yields the answers whose first metric is 0, from the samples that lm-eval logs."""
    for sample in itertools.chain(*samples.values()):
        if sample[sample["metrics"][0]] == 0:
            resps = sample["filtered_resps"]
            text = resps[0] if len(resps) == 1 else f"log-likelihoods: {[value for value, *_ in resps]}"
            yield Wrong(sample["arguments"][0][0], str(text), str(sample["target"]))
