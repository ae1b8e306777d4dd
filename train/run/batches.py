"""The batches of a step: of the data, or of a rollout; and rollouts that are one step off, each made beside the update
of the step before, with its first weights.

The schedule is fixed: a rollout and an update begin and end together, whichever takes longer, so a run is a function of
its seed. Each rollout is written to the run's folder before the checkpoint that needs it.
"""

import concurrent.futures
import json
import math
import os
import pathlib
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from kernels.mesh import BATCH
from train.base.goodput import timed
from train.run.start import Run
from train.state.mesh import on_mesh
from train.state.offload import to_device
from train.state.state import TrainState
from train.step.microbatches import filled_up
from train.step.task import Rolled, Rollout
from zoo import lora


FOLDER = "ahead"  # within the run's


class Batches:
    """The batches of each step of a run. Use it in a `with` that ends when the run does."""

    def __init__(self, run: Run):
        self.run, task, self._ahead = run, run.task, None
        if task.rollout and task.ahead:
            dtype, frozen = run.recipe.compute_dtype, run.trained.frozen
            frozen = frozen if task.ahead == run.mesh else on_mesh(frozen, task.ahead, dtype)
            self._ahead = Ahead(task.rollout, task.ahead, dtype, frozen, run.out, task.updates)
        self._multiple = run.recipe.microbatches * math.prod(run.mesh.shape[axis] for axis in BATCH)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ahead:
            self._ahead.close()

    def take(self) -> Rolled:
        """Returns the batches of the next step, and begins the rollout of the step after it, if that is to be ahead."""
        run, element = self.run, timed("input")(next)
        if run.task.rollout is None:
            return Rolled([element(run.data)], {})
        rolled = self._ahead and self._ahead.take(run.n)
        if rolled is None:
            rolled = timed("generation")(run.task.rollout)(run.model(), element(run.data), run.n, run.out)
        if self._ahead and run.n + 1 < run.steps:
            self._ahead.begin(run.state, element(run.data), run.n + 1)
        batches = [filled_up(batch, self._multiple) for batch in rolled.batches]
        segments = np.concatenate([batch["segments"].reshape(-1) for batch in batches])
        return rolled._replace(
            batches=batches, numbers=dict(rolled.numbers) | {"padding": float(np.mean(segments == 0))}
        )

    def finish(self) -> None:
        """Waits for the rollout that has begun, if there is one, and writes it to the run's folder."""
        if self._ahead:
            self._ahead.finish()


class Ahead:
    """The rollouts of a run, of which at most one is being made."""

    def __init__(self, rollout: Rollout, mesh: Mesh, dtype: DTypeLike, frozen: Any, out: pathlib.Path, updates: int):
        """
        Args:
            mesh: that of the devices that sample, on which the `frozen` weights are.
            dtype: the dtype in which the model samples.
            out: folder of the run.
            updates: number of updates of a step.
        """
        self.rollout, self.mesh, self.dtype, self.frozen = rollout, mesh, dtype, frozen
        self.out, self.updates = out, updates
        self._pool = concurrent.futures.ThreadPoolExecutor(1)
        self._next: tuple[int, concurrent.futures.Future[Rolled]] | None = None

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)

    def begin(self, state: TrainState, element: Any, n: int) -> None:
        """Begins the rollout after `n` steps, with a copy of the weights: the update writes over them."""
        model = lora.combine(on_mesh(to_device(state.model), self.mesh, self.dtype, anew=True), self.frozen)

        def make() -> Rolled:
            with jax.set_mesh(self.mesh):  # of this thread
                return self.rollout(model, element, n, self.out)

        self._next = n, self._pool.submit(make)

    def finish(self) -> None:
        """Waits for the rollout that has begun, if there is one, and writes it to the run's folder."""
        if self._next is not None:
            n, future = self._next
            rolled = timed("generation")(future.result)()
            _write(self.out / FOLDER / f"{n:06}.npz", rolled._replace(numbers=rolled.numbers | {"staleness": 1}))
            self._next = None

    def take(self, n: int) -> Rolled | None:
        """Returns the rollout after `n` steps; None: it was not made ahead, which is so at the beginning of a run.

        Forgets rollouts that no checkpoint needs.
        """
        kept = [int(path.name) for path in (self.out / "checkpoints").glob("*") if path.name.isdigit()]
        for path in (self.out / FOLDER).glob("[0-9]*.npz"):
            if int(path.stem) < min(kept, default=0) // self.updates:
                path.unlink()
        path = self.out / FOLDER / f"{n:06}.npz"
        return _read(path) if path.exists() else None


def _write(path: pathlib.Path, rolled: Rolled) -> None:
    """Writes a rollout under another name and renames it, so that nobody reads half of it."""
    path.parent.mkdir(exist_ok=True)
    arrays: dict[str, Any] = {f"{n}/{name}": a for n, batch in enumerate(rolled.batches) for name, a in batch.items()}
    others = json.dumps({"numbers": rolled.numbers, "samples": list(rolled.samples)}).encode()
    with open(new := path.with_suffix(".tmp"), "wb") as file:
        np.savez(file, others=np.frombuffer(others, np.uint8), **arrays)
        os.fsync(file.fileno())
    new.replace(path)


def _read(path: pathlib.Path) -> Rolled:
    with np.load(path) as file:
        others = json.loads(file["others"].tobytes())
        batches: dict[int, dict[str, np.ndarray]] = {}
        for key in file.files:
            if key != "others":
                n, name = key.split("/")
                batches.setdefault(int(n), {})[name] = file[key]
    return Rolled([batches[n] for n in sorted(batches)], others["numbers"], others["samples"])
