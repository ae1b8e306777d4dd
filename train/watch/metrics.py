"""Metrics of a run in a file, and its progress on the console, with speed and MFU."""

import collections
import contextlib
import datetime
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, SupportsFloat, SupportsInt

import jax
import numpy as np
import rich
import rich.console
import rich.progress

from train.base import writing
from train.base.flops import peak_flops


def mean_of_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Combines the metrics of a step's updates: means, but sums of tokens and targets, and the largest logit."""
    together = {"tokens": np.sum, "targets": np.sum, "finite": np.all, "attention_logit": np.max}
    return {name: together.get(name, np.mean)([update[name] for update in updates]) for name in updates[0]}


class MetricsFile:
    """metrics.jsonl: one JSON object a line, with its "step". Each line can be read as soon as it is written.

    A run that goes on from `step` drops the lines of later steps, so the file has every step once. Lines that are no
    JSON object with a step are removed: `say` gets a warning, and a copy of the file keeps them. Only process 0 writes.
    """

    def __init__(self, path: str | os.PathLike, *, step: int = 0, say: Callable[[str], None] = rich.print):
        self.path, self._writes, self._say = pathlib.Path(path), jax.process_index() == 0, say
        self._late: list[str] = []  # lines that could not be written yet
        if not self._writes:
            return
        lines = _lines(self.path) if self.path.exists() else {}
        if broken := ", ".join(str(number) for number, line in lines.items() if line is None):
            copy = shutil.copy(self.path, self.path.with_suffix(".broken"))
            say(f"WARNING: {path} has lines that are no step's ({broken}). They are left out; {copy} has them.")
        kept = [line for line in lines.values() if line and line["step"] <= step]
        writing.write(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def write(self, step: int, **values: Any) -> None:
        """Appends a line. Arrays of one number become numbers; NaN and infinities become "nan", "inf" and "-inf".

        If a line cannot be written, as on a full disk, `say` gets a warning, and the line is written with a later one.
        """
        if not self._writes:
            return
        line = {"step": step} | {name: _json_number(value) for name, value in values.items()}
        self._late.append(json.dumps(line, allow_nan=False) + "\n")
        size = None
        try:
            with self.path.open("ab") as file:
                size = file.tell()
                file.write("".join(self._late).encode())
            self._late = []
        except OSError as error:
            if size is not None:
                with contextlib.suppress(OSError):
                    os.truncate(self.path, size)  # removes a line that is half written
            if len(self._late) == 1:
                self._say(f"WARNING: {self.path} can't be written ({error}); its lines are written once it can.")


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl. Lines that are no JSON object with a step are skipped."""
    return [line for line in _lines(pathlib.Path(path)).values() if line]


def _lines(path: pathlib.Path) -> dict[int, dict[str, Any] | None]:
    """Reads line number -> object, or None for a line without a step. Ignores a last line that was cut off."""
    found = {}
    for number, text in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        found[number] = line if isinstance(line, dict) and type(line.get("step")) is int else None
    return found


class Progress:
    """A display of step, loss, speed, MFU and time left: a bar on a terminal, else a line every `interval` seconds.

    Use it as `with Progress(...) as progress:`, and call `update` after every step. The speed is measured over the last
    50 steps, with pauses, but without the first step, which compiles.

    `steps` is the number of the last step, `start` the number of the step to go on from. The MFU (model FLOPs
    utilisation) is speed times `flops_per_token`, divided by `peak_flops`, which is shown beside it. If the peak is not
    known, as on a CPU, the operations a second are shown instead.
    """

    def __init__(
        self,
        steps: int,
        *,
        start: int = 0,
        flops_per_token: float,
        interval: float = 10.0,
        console: rich.console.Console | None = None,
    ):
        self.steps, self.interval, self.flops_per_token, self.peak = steps, interval, flops_per_token, peak_flops()
        self.console = console or rich.console.Console()
        columns = ("{task.completed:,}/{task.total:,}", rich.progress.BarColumn(), "{task.description}")
        self._bar = rich.progress.Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._task = self._bar.add_task("compiling", total=steps, completed=start)
        self._marks = collections.deque(maxlen=51)
        self._tokens, self._printed = 0, -interval

    def __enter__(self) -> "Progress":
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def print(self, text: str) -> None:
        """Prints a line of text above the bar."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(
        self, step: int, *, loss: SupportsFloat, tokens: SupportsInt, reward: SupportsFloat | None = None, **_: Any
    ) -> dict[str, float]:
        """Shows that `step` is done, with its loss and reward, and the speed, from its number of tokens.

        Returns the metrics that depend on the clock: "tokens_per_second", and "mfu" if the peak is known.
        """
        now = time.monotonic()
        self._tokens += int(tokens)
        self._marks.append((now, step, self._tokens))
        started, first, before = self._marks[0]
        text, rates = f"loss {float(loss):.4f}", {}
        if reward is not None:
            text = f"reward {float(reward):.3f}  {text}"
        if step > first:
            seconds = now - started
            rates["tokens_per_second"] = (self._tokens - before) / seconds
            text += f"  {rates['tokens_per_second']:,.0f} tokens/s"
            done = rates["tokens_per_second"] * self.flops_per_token
            if self.peak:
                rates["mfu"] = done / self.peak
                text += f"  MFU {rates['mfu']:.1%} of {self.peak / 1e12:,.0f} TFLOP/s"
            else:
                text += f"  {done / 1e9:,.1f} GFLOP/s"
            left = datetime.timedelta(seconds=round((self.steps - step) * seconds / (step - first)))
            text += f"  {left} left"
        self._bar.update(self._task, completed=step, description=text)
        if not self.console.is_terminal and (now - self._printed >= self.interval or step == self.steps):
            self.print(f"step {step:,}/{self.steps:,}  {text}")
            self._printed = now
        return rates


def _json_number(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
