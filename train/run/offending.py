"""Skipped steps, which were not finite or a spike and have changed nothing: they are reported, and kept for a replay.

    offending-17/batch-17.npz   the batch of step 17 (with several updates: batch-17.1.npz, and so on)
    offending-17/about.json     the loss and the gradient norm, bit by bit, and the script of the run
    offending-17/run.yaml       the run's options
    offending-17/state          the model and the optimizer before the step, as a checkpoint

The compiled step decides which steps are skipped (`train.step.update`), by limits that this module computes.
"""

import dataclasses
import inspect
import json
import math
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import rich
import tyro

from train.base import runfile
from train.base.cluster import agree
from train.base.options import Group, OptionGroup, option
from train.base.share import whole
from train.state.checkpoint import Checkpoints
from train.state.offload import to_device
from train.state.state import Trained, TrainState
from train.step import nans
from train.step.update import Limits, PerGradient
from zoo.surgery import path_name


MAX_CONSECUTIVE = 10  # steps that are not finite, one after another, after which a run ends
MAX_SAVED_STATES = 3  # folders with the state; later folders have the batch alone, to save disk space
MAX_SAVED_BATCHES = 20  # folders in all; later steps are only counted


@dataclasses.dataclass(frozen=True, kw_only=True)
class OffendingOptions(OptionGroup):
    """Options for skipped steps: what to do after NaNs and loss spikes."""

    help_group: ClassVar[Group] = Group.FAULTS

    on_nonfinite: Literal["stop", "skip"] = option("stop", rare=True, identity=False)
    """Action after a step whose loss or gradients are not finite, which has changed nothing. stop: save and end; the
    same command goes on with the next batch. skip: go on, but end after 10 such steps in a row. The batch is kept in
    the run's folder, see docs/faults.md."""
    skip_spikes: float = option(0.0, rare=True)
    """Number of standard deviations by which the loss, or the gradients' norm, may exceed its running mean, such as 6.
    A step above that is a spike, and changes nothing. Mean and deviation are of about the last 128 steps. 0: spikes are
    like all other steps."""
    replay: tyro.conf.Suppress[tyro.conf.Fixed[pathlib.Path | None]] = None
    """Folder offending-... of a run, whose step is computed once more, by train.replay. Nothing is trained."""

    retired: ClassVar[Mapping[str, str]] = {
        "check-nans": "python -m train.replay FOLDER names the operation that made the first NaN.",
        "check-replay-every": "set the environment variable ZOO_CHECK_STEP_EVERY (docs/faults.md).",
        "replay": "python -m train.replay FOLDER computes a step once more.",
    }


class Running:
    """The running mean and variance of a number: exponential averages, but plain ones over the first `WINDOW` steps."""

    WINDOW: ClassVar[int] = 128

    def __init__(self, count: int = 0, mean: float = 0.0, variance: float = 0.0):
        self.count, self.mean, self.variance = count, mean, variance

    def limit(self, deviations: float) -> float:
        """Returns the mean plus `deviations` standard deviations; infinite until half of the window is full.

        A deviation counts as at least 1 % of the mean, or a steady number could not change at all.
        """
        if self.count < self.WINDOW // 2:
            return math.inf
        return self.mean + deviations * max(math.sqrt(self.variance), 0.01 * abs(self.mean))

    def add(self, number: float) -> None:
        weight, off = max(1 / (self.count + 1), 1 / self.WINDOW), number - self.mean
        self.count, self.mean = self.count + 1, self.mean + weight * off
        self.variance = (1 - weight) * (self.variance + weight * off**2)


class SpikeGuard:
    """The check of each step's loss and gradient norm: it keeps the batch of a bad step, and stops or skips.

    A checkpoint keeps `numbers`, so that a resumed run has the same limits.

    Args:
        script: the module of the run's script, such as train.sft.
        identity: the identity of the run's checkpoints.
    """

    def __init__(
        self,
        options: OffendingOptions,
        script: str,
        out: pathlib.Path,
        identity: Mapping[str, Any],
        numbers: Sequence[Any] | None = None,
    ):
        self.options, self.script, self.out, self.identity = options, script, out, identity
        self.seen = [Running(*each) for each in numbers or ((), ())]
        self.row = 0

    def numbers(self) -> list[list[Any]]:
        return [[each.count, each.mean, each.variance] for each in self.seen]

    def limits(self) -> Limits | None:
        """Returns the limits of the next step. None without --skip-spikes, when a step only has to be finite."""
        if not self.options.skip_spikes:
            return None
        loss, norm = (np.float32(each.limit(self.options.skip_spikes)) for each in self.seen)
        return Limits(loss, norm)

    def check(
        self,
        n: int,
        state: TrainState,
        numbers: dict[str, Any],
        updates: Sequence[Mapping[str, Any]],
        batches: Sequence[Any],
    ) -> str:
        """Checks the updates of step `n`. Returns the reason why the run has to end; empty if it goes on.

        It removes "finite" and "spike" from `numbers`, the step's metrics. After a bad step it adds "skipped", the
        number of updates that changed nothing; it also keeps the batches, and prints a warning if the run goes on.
        """
        finite, spike = bool(numbers.pop("finite")), bool(numbers.pop("spike", False))
        limits = self.limits()
        for update in updates:
            if update["finite"]:
                for each, name, limit in zip(self.seen, ("loss", "grad_norm"), limits or (math.inf,) * 2, strict=True):
                    # A number above the limit counts as the limit. So if numbers stay higher, the limit follows: after
                    # some twenty steps it has reached a hundred deviations.
                    each.add(min(float(update[name]), float(limit)))
        if finite and not spike:
            self.row = 0
            return ""
        wrong = [n for n, update in enumerate(updates) if not update["finite"] or update.get("spike", False)]
        numbers["skipped"] = len(wrong)
        told = f"its loss is {numbers['loss']:.4g}, and its gradients' norm {numbers['grad_norm']:.4g}"
        kind = "is a spike" if finite else "is not finite"
        why = f"Step {n} {kind}: {told}. It has changed nothing, and its batch is left out."
        self.row = 0 if finite else self.row + 1
        if folder := self._keep(n, state, updates, batches):
            why += f" {'It' if wrong == [0] else 'All of it'} is in {folder}: python -m train.replay {folder}"
        if finite or (self.options.on_nonfinite == "skip" and self.row < MAX_CONSECUTIVE):
            rich.get_console().print(f"WARNING: {why}", markup=False, soft_wrap=True)
            return ""
        many = (
            f" It is the {MAX_CONSECUTIVE}th in a row: the model has most likely diverged."
            if self.row == MAX_CONSECUTIVE
            else ""
        )
        return f"{why}{many} The same command goes on after it. Lower --lr, or look at the data."

    def _keep(
        self, n: int, state: TrainState, updates: Sequence[Mapping[str, Any]], batches: Sequence[Any]
    ) -> pathlib.Path | None:
        """Writes the folder of step `n`, unless there are `MAX_SAVED_BATCHES` already. Returns the folder or None."""
        folder, first = self.out / f"offending-{n}", jax.process_index() == 0
        others = agree(len([path for path in self.out.glob("offending-*") if path != folder]))
        if others >= MAX_SAVED_BATCHES:
            return None
        begun, batches = int(state.step) - len(updates), [whole(batch) for batch in batches]
        if first:
            folder.mkdir(exist_ok=True)
            shutil.copy(self.out / runfile.RUN, folder / runfile.RUN)
            steps = []
            for number, (update, batch) in enumerate(zip(updates, batches, strict=True)):
                name = f"batch-{n}.npz" if len(batches) == 1 else f"batch-{n}.{number + 1}.npz"
                write_batch(folder / name, batch)
                bits = {key: bits_of(update[key]) for key in ("loss", "grad_norm")}
                steps.append({"batch": name, "update": begun + number, "dtypes": dtypes(batch)} | bits)
            about = {"script": self.script, "step": n, "steps": steps, "identity": self.identity}
            (folder / "about.json").write_text(json.dumps(about, indent=1) + "\n")
        if others < MAX_SAVED_STATES:
            with Checkpoints(folder / "state", identity=self.identity, keep=1) as kept:
                kept.save(state, {})
        return folder


def explained(step: Callable[..., Any], state: TrainState, batch: Any, trained: Trained, reference: Any) -> list[str]:
    """Computes a step once more. Returns sentences on its first operation, and its first gradient, that is not finite.

    Args:
        step: a step made by `train.step.step.jit_train_step`.
    """
    arguments = {"state": to_device(state), "batch": batch, "frozen": trained.frozen, "reference": reference}
    given = {name: value for name, value in arguments.items() if value is not None}
    plain = inspect.unwrap(step)  # not compiled
    function = lambda given: plain(*(given.get(name) for name in arguments), PerGradient())[1]
    found, said = nans.first(function, given)
    leaves = jax.tree_util.tree_leaves_with_path(eqx.filter(state.model, eqx.is_inexact_array))
    fine = np.asarray(found["finite_gradients"])
    bad = [path_name(path) for (path, _), good in zip(leaves, fine, strict=True) if not good]
    if bad:
        said.append(f"Of {len(leaves)} gradients {len(bad)} are not finite; the first is that of {bad[0]}.")
    return said or ["Computed once more, it is finite."]


def at_step(state: TrainState, step: int) -> TrainState:
    """Returns the state with another step number, on which the rounding of --weights-dtype bfloat16 depends."""
    number = jax.device_put(np.int32(step), state.step.sharding)
    return dataclasses.replace(state, step=number)


def bits_of(number: Any) -> str:
    """Returns the bits of a float32 in hexadecimal, so that NaNs can be compared, too."""
    return np.float32(number).tobytes().hex()


def dtypes(batch: Mapping[str, Any]) -> dict[str, str]:
    return {name: np.asarray(array).dtype.name for name, array in batch.items()}


def write_batch(path: pathlib.Path, batch: Mapping[str, Any]) -> None:
    """Writes a batch's arrays as uint8, with a last axis for the bytes of a number: NumPy's files have no bfloat16."""
    raw = lambda a: np.ascontiguousarray(a)[..., None].view(np.uint8)
    arrays: dict[str, Any] = {name: raw(np.asarray(array)) for name, array in batch.items()}
    np.savez(path, **arrays)


def read_batch(path: pathlib.Path, dtypes: Mapping[str, str]) -> dict[str, np.ndarray]:
    """Reads a batch that `write_batch` wrote."""
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name].view(jnp.dtype(dtype))[..., 0] for name, dtype in dtypes.items()}
