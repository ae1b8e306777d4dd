"""The task of a run: its data, and its objective."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import grain
import numpy as np
from jax.sharding import Mesh

from train.step.step import Batch, Objective
from zoo.generation.generate import Encoded
from zoo.nn.model import AbstractModel


class Rolled(NamedTuple):
    """The results of a rollout."""

    batches: Sequence[Mapping[str, np.ndarray]]
    numbers: dict[str, float]  # metrics
    samples: Sequence[Mapping[str, Any]] = ()  # of what was generated: arguments of `train.watch.watch.Watch.sample`


@runtime_checkable
class Rollout(Protocol):
    """A function that makes the batches of a step."""

    def __call__(self, model: Any, element: Any, n: int, folder: pathlib.Path | None, /) -> Rolled:
        """Returns `Task.updates` batches.

        Args:
            element: one of the data, such as prompts.
            n: the number of the step.
            folder: that of the run, where a rollout may keep what it needs if the run is killed; None: in evaluations.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Measure:
    """Metrics of all validation data together, such as ranks among all texts, beside the objective's means."""

    outputs: Callable[[AbstractModel, Batch], Any]  # arrays of a batch, with one axis in common; compiled
    metrics: Callable[[Any], dict[str, float]]  # of these arrays, those of all batches joined along that first axis


@dataclasses.dataclass(frozen=True)
class Task:
    """The data and the objective of a run."""

    data: grain.IterDataset  # batches; with a rollout its inputs, such as prompts
    objective: Objective  # for the validation data, too
    reference: Any = None  # another model that the objective gets
    validation: grain.IterDataset | None = None  # elements like those of the data
    measure: Measure | None = None  # of the validation data
    prompts: Sequence[Encoded] = ()  # prompts whose continuations are printed as samples
    rollout: Rollout | None = None
    ahead: Mesh | None = None  # where rollouts are made beside the update of the step before, with its first weights
    beside: Sequence[AbstractModel] = ()  # other models that the rollout holds on the devices of the update
    metric: str = "loss"  # that of the validation data by which --patience and the report go
    updates: int = 1  # batches of a rollout
    example: Mapping[str, np.ndarray] | None = None  # a batch of the shapes that a rollout returns, for a dry run
