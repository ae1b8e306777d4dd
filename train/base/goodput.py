"""Goodput: where the seconds of a run go, and the share of them that went into steps, over all of its restarts.

    start        loading the program, the data and the model, up to the first step; and all that has no other name
    compile      XLA compiling, at whatever time
    input        waiting for a batch
    step         training steps, from placing the batch to having the numbers
    evaluation   validation losses
    checkpoint   saving, as far as the run waits for it
    generation   samples, and rollouts
    lost         steps that were computed, and then lost because the run ended before it saved them
    away         between the end of one start of the run and the beginning of the next; not part of the whole

goodput.json in the run's folder has these seconds for each start of the run, and their sums. A metrics line has
"step_seconds" and "input_seconds" of its step. With several processes it has "own_seconds", too: for each process the
seconds that it spent on all but the step and compiling. The slowest process has the most, as the others wait for it
within the step.
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
SLOW = 3  # times the median: a step that takes longer is listed at the end of the run
P = ParamSpec("P")
T = TypeVar("T")


class Clock:
    """A clock that counts seconds by phase. `phase` is the current one."""

    def __init__(self):
        self.began = time.time()
        self.seconds: collections.defaultdict[str, float] = collections.defaultdict(float)
        self.phase, self._since, self.moved = "start", time.monotonic(), time.monotonic()
        self._compiled: list[tuple[float, float]] = []
        self._thread = threading.get_ident()

    @contextlib.contextmanager
    def during(self, phase: str) -> Iterator[None]:
        """Counts the seconds inside the `with` for `phase`, and not for the phase around it."""
        before = self.change(phase)
        try:
            yield
        finally:
            self.change(before)

    def change(self, phase: str) -> str:
        """Counts the seconds for `phase` from now on. Returns the phase before."""
        now, before = time.monotonic(), self.phase
        self.seconds[before] += now - self._since
        self.phase, self._since, self.moved = phase, now, now
        return before

    def compiled(self, seconds: float) -> None:
        """Counts the last `seconds` for compiling. No second counts twice where programs are traced within others."""
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
    """Returns the clock of this process's run, or of the run that is about to begin."""
    return _clock


def begin() -> None:
    """Starts the clock of the next run."""
    global _clock
    _clock = Clock()


def _listen(event: str, seconds: float, **_: str | int) -> None:
    if event.startswith("/jax/core/compile/"):
        _clock.compiled(seconds)


jax.monitoring.register_event_duration_secs_listener(_listen)  # pyright: ignore[reportArgumentType]


def timed(phase: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Decorates a function so that its seconds count for `phase`."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **named: P.kwargs) -> T:
            with _clock.during(phase):
                return function(*args, **named)

        return call

    return decorate


class Goodput:
    """The seconds of a run that goes on from `step`, in goodput.json of its folder `out`. Process 0 alone writes.

    Use it in a `with` that ends when the run does; it then prints where the seconds went.
    """

    def __init__(self, out: pathlib.Path, step: int):
        self.path, self.clock = out / FILE, _clock
        self.first = self.last = step
        self.times: list[float] = []  # seconds of each step
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
        """Records that step `n` is done. Returns its metrics; after a rollout also "training_tokens_per_second".

        All processes call it at the same point.
        """
        self.clock.change(self.clock.phase)
        spent = collections.Counter(self.clock.seconds)
        spent.subtract(self._before)
        self._before.update(spent)
        self.last = n
        if n > self.first + 1:  # not the first step, which begins before it is compiled
            if len(self.times) >= 10 and spent["step"] > SLOW * self.median():
                self.slow.append((n, spent["step"]))
            self.times.append(spent["step"])
        found: dict[str, Any] = {f"{name}_seconds": spent[name] for name in ("step", "input")}
        if jax.process_count() > 1:
            own = sum(spent.values()) - spent["step"] - spent["compile"]
            found["own_seconds"] = [round(seconds, 4) for seconds in cluster.of_each(own)]
        return found | ({"training_tokens_per_second": float(tokens) / spent["step"]} if "reward" in numbers else {})

    def median(self) -> float:
        """Returns the median duration of the last 100 steps, in seconds. It is 0 until the second step is done."""
        return statistics.median(self.times[-100:]) if self.times else 0.0

    def saving(self, step: int) -> None:
        """Records that a checkpoint of `step` is being saved. A restart from it does not lose the seconds until now."""
        self.last = step
        self.marks = [*self.marks[-9:], self._mark()]
        self.write()

    def table(self) -> dict[str, float]:
        """Returns the seconds by phase, over all starts of the run."""
        total = collections.Counter()
        for start in (*self.starts, self._now()):
            total.update(start["seconds"])
        return {name: total[name] for name in NAMES}

    def line(self) -> str:
        """Returns the summary that the run prints at its end."""
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
        """Writes the file, which the report draws and the next start continues. A failure is only a warning."""
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
    """Reads the earlier starts of a run that goes on from `step`.

    The seconds that the last start spent after it saved that step are moved to "lost". Its "away" is the time since its
    last sign of life.
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
