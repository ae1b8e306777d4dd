"""Validation: the losses of a run on data that it does not learn from, and the end of the run by --patience."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import numpy as np
import rich
from jax.sharding import Mesh
from jax.typing import DTypeLike

from train.checkpoint import Checkpoints
from train.goodput import timed
from train.mesh import put_batch
from train.state import TrainState
from train.step import Objective
from zoo.nn.model import AbstractModel
from zoo.surgery import cast


@dataclasses.dataclass(frozen=True, kw_only=True)
class ValidationOptions:
    """When a run is validated, in `Options`."""

    eval_every: int = 0
    """Number of steps between losses on the validation data. 0: a tenth of --steps."""
    eval_batches: int = 50
    """Largest number of batches of validation data that are used each time."""
    patience: int = 0
    """Number of validation losses in a row, none of them a new lowest one, after which the run ends. The model of the
    lowest loss is exported. Checkpoints are then saved whenever the loss is computed. 0: the run takes all --steps."""


class Validation:
    """The losses so far, in `looks` as [step, loss]. A checkpoint keeps them.

    Raises:
        ValueError: --patience needs validation data, and there is none.
    """

    def __init__(
        self,
        o: ValidationOptions,
        data: Iterable[Mapping[str, np.ndarray]] | None,
        objective: Objective,
        mesh: Mesh,
        dtype: DTypeLike,
        reference: Any = None,
    ):
        if o.patience and data is None:
            raise ValueError(f"--patience {o.patience} waits for a lower loss on validation data, and there is none.")
        self.o, self.data, self.mesh, self.reference = o, data, mesh, reference
        self.looks: list[list] = []
        self._sums = jax.jit(lambda model, batch, reference: objective(cast(model, dtype), batch, reference)[1:3])

    @timed("evaluation")
    def evaluate(self, model: AbstractModel, n: int) -> dict[str, float]:
        """The objective's means over the data after step `n`, such as "validation_loss"; nothing without data."""
        if self.data is None:
            return {}
        found = [
            self._sums(model, put_batch(batch, self.mesh, model, self.reference), self.reference)
            for _, batch in zip(range(self.o.eval_batches), self.data, strict=False)
        ]
        count, sums = jax.tree.map(lambda *a: sum(map(float, a)), *jax.device_get(found))
        means = {f"validation_{name}": value / count for name, value in sums.items()}
        self.looks.append([n, means["validation_loss"]])
        return means

    def best(self) -> int | None:
        """The step with the lowest loss, whose checkpoint is kept; None without --patience."""
        return min(self.looks, key=lambda look: look[1])[0] if self.o.patience else None

    def waited(self, n: int) -> bool:
        """Whether the loss has not reached a new lowest value for --patience times before step `n`."""
        best = self.best()
        return best is not None and n - best >= self.o.patience * self.o.eval_every

    def restore_best(self, checkpoints: Checkpoints, state: TrainState, n: int, updates: int) -> tuple[TrainState, int]:
        """The state to export and its step: of the lowest loss, with --patience, or else those given.

        Args:
            updates: how many updates one step makes; a checkpoint's number counts updates.
        """
        best = self.best()
        if best is None or best == n:
            return state, n
        if self.waited(n):
            rich.print(f"Validation has not improved since step {best:,}, so the run ends at step {n:,}.")
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
        if found := checkpoints.restore(abstract, step=best * updates):
            rich.print(f"The model of step {best:,} is exported, where validation was best.")
            return found[0], best
        rich.print(f"WARNING: step {best:,} was best, but is damaged; the model of step {n:,} is exported.")
        return state, n
