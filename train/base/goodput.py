"""Goodput: where the seconds of a run go, and how many its steps got, over all of its restarts.

    start        loading the program, the data and the model, up to the first step; and all that has no other name
    compile      XLA compiling, at whatever time
    input        waiting for a batch
    step         training steps, from placing the batch to having the numbers
    evaluation   validation losses
    checkpoint   saving, as far as the run waits for it
    generation   samples, and rollouts
    lost         steps that were computed, and then lost because the run ended before it saved them
    away         between the end of one start of the run and the beginning of the next; not part of the whole

goodput.json in the run's folder has them for each start of the run, and in all. A metrics line has "step_seconds" and
"input_seconds" of its step. Of several processes it has "own_seconds" too, a list with a number of each process: what
it spent on all but the step and compiling. In the step all wait for the last one, so the slowest process has the most.
"""

import collections
import contextlib
import functools
import json
import pathlib
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import rich

from train.base import cluster, writing


FILE = "goodput.json"
SLOW = 3  # times the median: a step that takes longer is named
P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """Counts seconds by what they are spent on. `phase` is what they are spent on now."""

    def __init__(self):
        self.began = time.time()
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.phase, self._since, self.moved = "start", time.monotonic(), time.monotonic()
        self._compiled: list[tuple[float, float]] = []
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the seconds in it for `phase`, and not for what is around it."""
        before = self.change(phase)
        try:
            yield
        finally:
            self.change(before)

    def change(self, phase: str) -> str:
        """From now on the seconds count for `phase`; returns what they counted for."""
        now, before = time.monotonic(), self.phase
        self.seconds[before] += now - self._since
        self.phase, self._since, self.moved = phase, now, now
        return before

    def compiled(self, seconds: float) -> None:
        """Counts the last seconds for compiling. Programs are traced within others: no second counts twice."""
        if threading.get_ident() != self._thread:
            return
        end = time.monotonic()
        start, within = end - seconds, 0.0
        while self._compiled and self._compiled[-1][0] >= start:
            a, b = self._compiled.pop()
            within += b - a
        self._compiled.append((start, end))
        self.seconds[self.phase] -= seconds - within
        self.seconds["compile"] += seconds - within


_clock = Clock()


def clock() -> Clock:
    """The clock of the run of this process, or of the one that is about to begin."""
    return _clock


def begin() -> None:
    """Start the clock of the run that comes next."""
    global _clock
    _clock = Clock()


def _listen(event: str, seconds: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        _clock.compiled(seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)  # pyright: ignore[reportArgumentType]


def timed(phase: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Makes a function whose seconds count for `phase`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            with _clock.during(phase):
                return function(*args, **named)

        return call

    return decorate


class Goodput:
    """The seconds of a run, in goodput.json of its folder `out`. It goes on from `step`. Process 0 alone writes.

    Use it in a `with` that ends when the run does; then it prints where the seconds went.
    """

    def __init__(self, out: pathlib.Path, step: int):
        self.path, self.clock = out / FILE, _clock
        self.first = self.last = step
        self.times: list[float] = []  # of steps
        self.slow: list[tuple[int, float]] = []
        self._before = collections.Counter()  # seconds of each kind when a step began
        self.starts: list[dict[str, Any]] = _earlier(self.path, step)
        self.marks: list[dict[str, Any]] = [self._mark()]

    def __enter__(self) -> "Goodput":
        self.clock.change("step")
        self._before.update(self.clock.seconds)
        return self

    def __exit__(self, *_: Any) -> None:
        self.clock.change("end")
        self.write()
        rich.print(self.line())
        begin()

    def step(self, n: int, *, tokens: Any, **numbers: Any) -> dict[str, Any]:
        """Notes that step `n` is done. Returns its metrics; with a rollout, how fast the training on it was.

        All processes call it at the same point.
        """
        self.clock.change(self.clock.phase)
        spent = collections.Counter(self.clock.seconds)
        spent.subtract(self._before)
        self._before.update(spent)
        self.last = n
        if n > self.first + 1:  # the first one begins before it is compiled
            if len(self.times) >= 10 and spent["step"] > SLOW * self.median():
                self.slow.append((n, spent["step"]))
            self.times.append(spent["step"])
        found: dict[str, Any] = {f"{name}_seconds": spent[name] for name in ("step", "input")}
        if jax.process_count() > 1:
            own = sum(spent.values()) - spent["step"] - spent["compile"]
            found["own_seconds"] = [round(seconds, 4) for seconds in cluster.of_each(own)]
        return found | ({"training_tokens_per_second": float(tokens) / spent["step"]} if "reward" in numbers else {})

    def median(self) -> float:
        """Of the last hundred steps, in seconds; 0 before the second one."""
        return statistics.median(self.times[-100:]) if self.times else 0.0

    def saving(self, step: int) -> None:
        """Notes that a checkpoint of `step` is being saved: what was done until now is not lost if it is used."""
        self.last = step
        self.marks = [*self.marks[-9:], self._mark()]
        self.write()

    def table(self) -> dict[str, float]:
        """Seconds by what they were spent on, over all starts of the run."""
        total = collections.Counter()
        for start in (*self.starts, self._now()):
            total.update(start["seconds"])
        return {name: total[name] for name in NAMES}

    def line(self) -> str:
        """What the run prints at its end."""
        seconds = self.table()
        whole = sum(seconds.values()) - seconds["away"] or 1.0
        spent = sorted(((value, name) for name, value in seconds.items() if name != "away"), reverse=True)
        parts = ", ".join(f"{name} {value / whole:.0%}" for value, name in spent if value >= whole / 200)
        starts = f" in {len(self.starts) + 1} starts" if self.starts else ""
        worst = sorted(self.slow, key=lambda each: -each[1])[:3]
        slow = ", ".join(f"step {n:,} ({value:.3g} s)" for n, value in worst)
        slow = f" Slow, at a median of {self.median():.3g} s: {slow}; {len(self.slow)} in all." if slow else ""
        return f"Goodput {seconds['step'] / whole:.0%} of {whole:,.0f} s{starts}: {parts}.{slow}"

    def write(self) -> None:
        """Writes the file: the report draws it, and the next start goes on from it. No run ends for its sake."""
        if jax.process_index():
            return
        content = {"seconds": self.table(), "starts": [*self.starts, self._now()]}
        try:
            writing.write(self.path, json.dumps(content, indent=1) + "\n")
        except OSError as error:
            rich.print(f"WARNING: {self.path} can't be written ({error}).")

    def _mark(self) -> dict[str, Any]:
        self.clock.change(self.clock.phase)
        return {"step": self.last, "time": time.time(), "seconds": _named(self.clock.seconds)}

    def _now(self) -> dict[str, Any]:
        now = self._mark()
        about = {"began": self.clock.began, "ended": now["time"], "from": self.first, "to": self.last}
        slow = [{"step": n, "seconds": value} for n, value in self.slow[-20:]]
        return about | {"seconds": now["seconds"], "median": self.median(), "slow": slow, "marks": self.marks}


NAMES = ("start", "compile", "input", "step", "evaluation", "checkpoint", "generation", "lost", "away")


def _named(seconds: Mapping[str, float]) -> dict[str, float]:
    other = sum(value for name, value in seconds.items() if name not in NAMES)
    return {name: seconds.get(name, 0.0) + (other if name == "start" else 0.0) for name in NAMES}


def _earlier(path: pathlib.Path, step: int) -> list[dict[str, Any]]:
    """The starts of a run that goes on from `step`, without the seconds that were spent after that step was saved.

    These are "lost" of the last start, and "away" of it is the time since its last sign of life.
    """
    try:
        starts = json.loads(path.read_text())["starts"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    if not starts or not step:
        return []
    last = starts[-1]
    marks = [mark for mark in last["marks"] if mark["step"] <= step]
    metrics = path.with_name("metrics.jsonl")
    ended = max(last["ended"], metrics.stat().st_mtime if metrics.exists() else 0.0)
    mark = marks[-1] if marks else {"time": last["began"], "seconds": dict.fromkeys(NAMES, 0.0)}
    seconds, lost = last["seconds"], 0.0
    if last["to"] > step or ended > last["ended"] + 1:  # it went on after what was saved
        seconds, lost = mark["seconds"], max(0.0, ended - mark["time"])
    seconds = seconds | {"lost": lost, "away": max(0.0, _clock.began - ended)}
    return [*starts[:-1], last | {"seconds": seconds, "ended": ended}]
