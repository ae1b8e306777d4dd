"""Validation: metrics on data that a run does not learn from, its best step by a metric, and its end by --patience."""

import dataclasses
import fnmatch
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
import numpy as np
import rich
from jax.sharding import Mesh

from train.base.goodput import timed
from train.base.options import Every, Flat, Group, OptionGroup
from train.evaluate.task import TaskOptions
from train.evaluate.tasks import Tasks
from train.state.checkpoint import Checkpoints
from train.state.mesh import put_batch
from train.state.state import TrainState
from train.step.step import Batch
from train.step.task import Task
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.surgery import cast
from zoo.text.tokenizer import Tokenizer
from zoo.weights.gather import gathered


# Metrics that are better when they are lower; any other metric is better when it is higher. The names are those of
# metrics of the validation data, without "validation_", and of lm-eval's metrics.
LOWER = (
    "*loss*", "*perplexity", "divergence*", "*kl", "*drift", "mismatched", "*_errors",
    "bits_per_byte", "brier_score", "calibrat*_error", "*mse", "*mae", "wer", "ter",
)  # fmt: skip
BATCHES = 50  # of validation data that are used each time, at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationOptions(OptionGroup):
    """Options for validation: how often, and what follows from its metrics."""

    help_group: ClassVar[Group] = Group.VALIDATION

    eval_every: Every = 0
    """Number of steps between evaluations: losses on the validation data, and --eval-tasks. 0: a tenth of --steps.
    never: no evaluations."""
    best: str | None = None
    """Metric of the evaluations, such as validation_accuracy or eval_math, by which the best model is exported. The
    best has the lowest loss, or the highest accuracy, reward or other metric. Checkpoints are then saved at each
    evaluation, and the best is kept. None: the last model is exported, or with --patience the model of the lowest
    validation_loss."""
    patience: int = 0
    """Number of evaluations in a row without a new best by --best, after which the run ends. 0: it takes all
    --steps."""
    tasks: Flat[TaskOptions] = TaskOptions()
    retired: ClassVar[Mapping[str, str]] = {
        "eval-batches": "50 batches of validation data are used at most; --hold-out, or smaller files, give fewer."
    }

    @property
    def keeps_best(self) -> bool:
        """Whether the best checkpoint is kept and exported."""
        return bool(self.best or self.patience)


class Validation:
    """The values of `metric` so far, in `evaluations` as [step, value]. A checkpoint keeps them.

    `metric` is --best. Without --best it is the task's own: the validation loss, or the reward on held-out prompts.

    Args:
        dtype: the dtype of the forward pass.

    Raises:
        ValueError: --patience or --best needs evaluations, validation data or --eval-tasks, and there are none.
        ValueError, OSError, ImportError: a task of --eval-tasks is missing or bad (`train.evaluate.tasks.Tasks`).
    """

    def __init__(
        self,
        options: ValidationOptions,
        task: Task,
        config: AbstractConfig,
        tokenizer: Tokenizer,
        mesh: Mesh,
        dtype: str,
    ):
        self.metric = options.best or f"validation_{task.metric}"
        if options.keeps_best and options.eval_every == "never":
            raise ValueError("--best and --patience go by evaluations: leave out --eval-every never.")
        if options.patience and not options.best and task.validation is None:
            what = "higher reward on held-out prompts" if task.metric == "reward" else "lower loss on validation data"
            raise ValueError(
                f"--patience {options.patience} waits for a {what}, and there is none. Give --hold-out, or another "
                "metric by --best."
            )
        if options.best and task.validation is None and not options.tasks.eval_tasks:
            raise ValueError(f"--best {options.best} needs evaluations: give --hold-out or --eval-tasks.")
        self.options, self.task, self.mesh = options, task, mesh
        self.tasks = Tasks(options.tasks, tokenizer, config, mesh, dtype)
        self.evaluations: list[list] = []
        objective, outputs = task.objective, task.measure.outputs if task.measure else lambda model, batch: ()

        @jax.jit
        def numbers(model: AbstractModel, batch: Batch, reference: Any) -> tuple[Any, Any]:
            model = cast(model, dtype)
            return objective(model, batch, reference)[1:3], outputs(model, batch)

        self._numbers = numbers

    @timed("evaluation")
    def evaluate(self, model: AbstractModel, n: int, record: Callable[..., None]) -> dict[str, float]:
        """Returns the metrics after step `n`: of the validation data, such as "validation_loss", and of --eval-tasks.

        Args:
            record: is called with some wrong answers (`train.watch.watch.Watch.wrong`).

        Raises:
            ValueError: --best is none of these metrics.
        """
        numbers = {f"validation_{name}": value for name, value in self._means(model).items()}
        numbers |= self.tasks.evaluate(model, n, record)
        if self.options.keeps_best and self.metric not in numbers:
            raise ValueError(f"--best {self.metric} is no metric of the evaluations, which have {', '.join(numbers)}.")
        if self.metric in numbers:
            self.evaluations.append([n, numbers[self.metric]])
        return numbers

    def _means(self, model: AbstractModel) -> dict[str, float]:
        """Computes the metrics of the validation data: the objective's means over targets, and the task's `measure`.

        If the task has a rollout, they are the rollout's means over prompts, with the same random numbers each time.
        """
        data, reference = self.task.validation, self.task.reference
        if data is None:
            return {}
        if self.task.rollout:
            rollout = timed("evaluation")(self.task.rollout)
            drawn = [(rollout(model, prompts, n, None).numbers, len(prompts)) for n, prompts in enumerate(data)]
            names = [name for name in drawn[0][0] if not name.endswith(("_errors", "_per_second"))]
            count = sum(size for _, size in drawn)
            return {name: sum(numbers[name] * size for numbers, size in drawn) / count for name in names}
        found, outputs = [], []
        for _, batch in zip(range(BATCHES), data, strict=False):
            sums, arrays = self._numbers(model, put_batch(batch, self.mesh, model, reference), reference)
            found.append(sums)
            outputs.append(jax.tree.map(gathered, arrays))
        count, sums = jax.tree.map(lambda *a: sum(map(float, a)), *jax.device_get(found))
        means = {name: value / count for name, value in sums.items()}
        if measure := self.task.measure:
            means |= measure.metrics(jax.tree.map(lambda *arrays: np.concatenate(arrays), *outputs))
        return means

    def best(self) -> int | None:
        """Returns the step that is best by the metric, whose checkpoint is kept; None without --best and --patience."""
        return best(self.metric, self.evaluations)[0] if self.options.keeps_best else None

    def out_of_patience(self, n: int) -> bool:
        """Whether no new best has come in the --patience evaluations before step `n`."""
        step, every = self.best() if self.options.patience else None, self.options.eval_every
        return step is not None and every != "never" and n - step >= self.options.patience * every

    def restore_best(self, checkpoints: Checkpoints, state: TrainState, n: int, updates: int) -> tuple[TrainState, int]:
        """Returns the state to export, and its step. With --best or --patience it is the best, or else the given one.

        Args:
            updates: the number of updates in one step; a checkpoint's number counts updates.
        """
        best = self.best()
        if best is None or best == n:
            return state, n
        if self.out_of_patience(n):
            rich.print(f"{self.metric} has not improved since step {best:,}, so the run ends at step {n:,}.")
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
        if found := checkpoints.restore(abstract, step=best * updates):
            rich.print(f"The model of step {best:,} is exported, where {self.metric} was best.")
            return found[0], best
        rich.print(f"WARNING: step {best:,} was best, but is damaged; the model of step {n:,} is exported.")
        return state, n


def lower(metric: str) -> bool:
    """Whether a metric of the evaluations is better when it is lower. The name of a task does not decide it."""
    parts = metric.split("/")[1:] if metric.startswith("eval_") else [metric.removeprefix("validation_")]
    return any(fnmatch.fnmatch(part, pattern) for part in parts for pattern in LOWER)


def best(metric: str, evaluations: Sequence[Sequence[Any]]) -> Sequence[Any]:
    """Returns the best of the pairs (step, value of the metric), and of equal ones the first. NaN is worse than all."""
    sign = 1 if lower(metric) else -1
    return min(evaluations, key=lambda pair: (math.isnan(pair[1]), sign * pair[1]))
