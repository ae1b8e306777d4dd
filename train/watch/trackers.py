"""Trackers, which show runs beside each other in a browser: TensorBoard, Weights & Biases, Trackio and MLflow.

Each tracker is a package of its own, which is imported only if --tracker names it. It reads its usual environment
variables. Metrics have the names that transformers' Trainer gives them: train/loss, train/grad_norm, eval/loss.
"""

import importlib
import math
import os
import pathlib
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from train.watch.page import flat


PROJECT = "equinox-zoo"  # unless the tracker's own environment variable names another


@runtime_checkable
class Tracker(Protocol):
    """A destination of a run's metrics and samples, beside metrics.jsonl.

    When a run goes on, the tracker continues its curves. The run repeats the steps since its last checkpoint. A tracker
    either replaces its earlier values of these steps, or skips the repeated ones, which are the same.
    """

    name: str

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Logs the metrics of a step."""
        ...

    def text(self, step: int, prompt: str, text: str) -> None:
        """Logs a prompt, and the text by which the model continues it."""
        ...

    def finish(self, well: bool) -> None:
        """Sends everything that is left, and ends the run. `well`: the run has ended without an error."""
        ...


def named(metric: str) -> str:
    """Returns a metric's name in trackers.

    "validation_loss" becomes "eval/loss", "eval_math" becomes "eval/math", and "loss" becomes "train/loss".
    """
    if metric.startswith(("validation_", "eval_")):
        return "eval/" + metric.partition("_")[2]
    return metric if "/" in metric else f"train/{metric}"


def check(names: Sequence[str]) -> None:
    """Checks the names of trackers, before anything is loaded.

    Raises:
        ValueError: a name is none of `TRACKERS`.
        ImportError: a tracker's package is not installed.
    """
    for name in names:
        if name not in TRACKERS:
            raise ValueError(f"--tracker {name} is unknown; there are {', '.join(TRACKERS)}.")
        _module(name)


def tracker(name: str, folder: pathlib.Path, about: Mapping[str, Any], step: int, logged: int) -> Tracker:
    """Opens a tracker for the run in `folder`.

    Args:
        about: the run's run.json.
        step: the step that the run goes on from.
        logged: the last step that the run has logged before, perhaps later than `step`; -1: none.
    """
    return TRACKERS[name](folder, about, step, logged)


def settings(about: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the settings of a run that are logged: options, the identity of its data and model, versions, commit."""
    start = {key: value for key, value in about["starts"][-1].items() if key not in ("time", "step", "memory")}
    options = {name.removeprefix("--"): value for name, value in about["options"].items()}
    identity = {key: value for key, value in about["identity"].items() if key != "config"}
    return options | flat(identity) | flat(about["identity"].get("config", {}), "config.") | flat(start)


def _module(name: str) -> Any:
    package = {"tensorboard": "tensorboardX"}.get(name, name)
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise ImportError(f"--tracker {name} needs {package}: pip install 'equinox-zoo[{name}]'.") from error


def _key(name: str) -> str:
    """Converts a name to one that MLflow accepts: letters, digits and a few signs."""
    return re.sub(r"[^\w\-. :/]", "_", name)[:250]


def _finite(numbers: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in numbers.items() if math.isfinite(value)}


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir runs` shows all runs."""

    name = "tensorboard"

    def __init__(self, folder: pathlib.Path, about: Mapping[str, Any], step: int, logged: int):
        # TensorBoard drops the values that an earlier start has written for steps from purge_step on.
        self._writer = _module(self.name).SummaryWriter(
            str(folder / "tensorboard"), purge_step=step + 1 if step else None, filename_suffix=f".{step}"
        )
        rows = "".join(f"| {key} | `{value}` |\n" for key, value in settings(about).items())
        self._writer.add_text("settings", f"| | |\n|---|---|\n{rows}", step)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def text(self, step: int, prompt: str, text: str) -> None:
        self._writer.add_text(f"samples/{prompt[:60]}", f"```\n{prompt}{text}\n```", step)

    def finish(self, well: bool) -> None:
        self._writer.close()


class WandB:
    """Weights & Biases: WANDB_PROJECT, WANDB_ENTITY and WANDB_MODE (offline, disabled) set the destination."""

    name = "wandb"

    def __init__(self, folder: pathlib.Path, about: Mapping[str, Any], step: int, logged: int):
        self._wandb, self._samples = _module(self.name), []
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT), name=folder.resolve().name, id=about["id"],
            resume="allow", dir=str(folder), config=settings(about),
        )  # fmt: skip

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step >= self._run.step:  # W&B accepts no earlier steps
            self._run.log(dict(numbers), step=step)

    def text(self, step: int, prompt: str, text: str) -> None:
        self._samples.append([step, prompt, text])
        if step >= self._run.step:
            table = self._wandb.Table(columns=["step", "prompt", "text"], data=list(self._samples))
            self._run.log({"samples": table}, step=step)

    def finish(self, well: bool) -> None:
        self._run.finish(exit_code=0 if well else 1)


class Trackio:
    """Trackio, which keeps runs on this machine: `trackio show`. TRACKIO_PROJECT and TRACKIO_SPACE_ID set the place."""

    name = "trackio"

    def __init__(self, folder: pathlib.Path, about: Mapping[str, Any], step: int, logged: int):
        self._trackio = _module(self.name)
        self._run = self._trackio.init(
            project=os.environ.get("TRACKIO_PROJECT", PROJECT), name=f"{folder.resolve().name}-{about['id']}",
            resume="allow", config=settings(about), embed=False,
        )  # fmt: skip
        self._logged = logged

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._logged:
            self._run.log(_finite(numbers), step=step)

    def text(self, step: int, prompt: str, text: str) -> None:
        table = self._trackio.Table(columns=["prompt", "text"], data=[[prompt, text]])
        self._run.log({"samples": table}, step=step)

    def finish(self, well: bool) -> None:
        self._run.finish()


class MLflow:
    """MLflow: MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME set the destination."""

    name = "mlflow"

    def __init__(self, folder: pathlib.Path, about: Mapping[str, Any], step: int, logged: int):
        mlflow = _module(self.name)
        self._client = mlflow.MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
        found = self._client.get_experiment_by_name(name)
        experiment = found.experiment_id if found else self._client.create_experiment(name)
        runs = self._client.search_runs([experiment], f"tags.id = '{about['id']}'", max_results=1)
        self._entities, self._logged = mlflow.entities, logged if runs else -1
        if runs:
            self._id = runs[0].info.run_id
            self._client.update_run(self._id, "RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=folder.resolve().name, tags={"id": about["id"]})
            self._id = run.info.run_id
            params = [self._entities.Param(_key(key), str(value)[:6000]) for key, value in settings(about).items()]
            for first in range(0, len(params), 100):  # one call takes up to 100
                self._client.log_batch(self._id, params=params[first : first + 100])

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        if step > self._logged:
            now = int(time.time() * 1000)
            metrics = [self._entities.Metric(_key(name), value, now, step) for name, value in numbers.items()]
            self._client.log_batch(self._id, metrics=metrics)

    def text(self, step: int, prompt: str, text: str) -> None:
        self._client.log_text(self._id, f"{prompt}{text}", f"samples/step-{step:06d}.txt")

    def finish(self, well: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if well else "FAILED")


TRACKERS = {kind.name: kind for kind in (TensorBoard, WandB, Trackio, MLflow)}
