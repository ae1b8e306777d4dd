"""Shared parts of the GPU benchmarks: a process that may fail, time on the device, and the report."""

import contextlib
import dataclasses
import datetime
import fnmatch
import importlib
import json
import multiprocessing
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, Self

import rich.box
import rich.console
import rich.markup
import rich.table

from benchmarks.common import RESULTS, circumstances


PACKAGES = (
    "jax", "jaxlib", "jax-cuda12-plugin", "jax-cuda13-plugin", "equinox", "optax", "torch", "triton", "transformers",
    "peft", "flash-attn", "fla-core", "mamba-ssm", "nvidia-cudnn-cu12", "nvidia-cudnn-cu13", "nvidia-cublas",
)  # fmt: skip


class Failed(Exception):
    """Raised if a worker has no result; the message is the reason."""


class Worker:
    """A process that calls functions for this one, one at a time, and is replaced once it has failed.

    A kernel that reads out of bounds, or never ends, then harms only the process that it runs in.
    """

    def __init__(self):
        self._process: Any = None

    def __call__(self, function: str, *args: Any, patience: float, **options: Any) -> Any:
        """Imports and calls `function`, such as "benchmarks.in_jax.measure", in the process. Returns its result.

        Raises:
            Failed: if the function raised, if its process died, or if it took longer than `patience` seconds.
        """
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=work, args=(theirs,))
            self._process.start()
            theirs.close()
        try:
            self._pipe.send((function, args, options))
            if not self._pipe.poll(patience):
                self.close()
                raise Failed(f"it took more than {patience:.0f} s")
            failure, result, usable = self._pipe.recv()
        except (EOFError, OSError):
            failure, result, usable = "its process died", None, False
        if not usable:
            self.close()
        if failure:
            raise Failed(failure)
        return result

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._process = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def work(pipe: Connection) -> None:
    """Serves the calls that come through the pipe, until its other end is closed."""
    with contextlib.suppress(EOFError):  # the other end has been closed
        while True:
            function, args, options = pipe.recv()
            module, name = function.rsplit(".", 1)
            try:
                pipe.send((None, getattr(importlib.import_module(module), name)(*args, **options), True))
            except Exception as error:
                # JAX and torch raise RuntimeErrors once a device has failed, and then all later calls fail, too.
                usable = isinstance(error, NotImplementedError) or not isinstance(error, RuntimeError)
                reason = " ".join(str(error).split())[:200]
                missing = isinstance(error, ModuleNotFoundError) and f"not installed: {error.name}"
                pipe.send((missing or f"{type(error).__name__}: {reason}", None, usable))


def regions(queue: Callable[[int], float], *, seconds: float, count: int) -> list[float]:
    """Returns `count` measurements of the milliseconds that one call takes on the device.

    `queue(n)` puts n calls into the device's queue, waits for the last, and returns the seconds that they took. A
    region has enough calls to last `seconds` at least, so that the overhead of its start and its end is negligible. If
    a call takes long, there are at most three regions.
    """
    calls, took = 1, queue(1)  # the first call also warms up
    while took < seconds:
        calls = max(2 * calls, round(1.1 * calls * seconds / took)) if took < seconds / 2 else calls + calls // 8 + 1
        took = queue(calls)
    return [1e3 * queue(calls) / calls for _ in range(count if took < 0.2 else min(count, 3))]


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether the name matches one of the patterns, such as "*D128*"."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def prepare(rehearse: bool, memory: float) -> None:
    """Sets child processes' environment: JAX allocates on demand, up to this fraction. A rehearsal is on the CPU."""
    os.environ.update(XLA_PYTHON_CLIENT_PREALLOCATE="false", XLA_PYTHON_CLIENT_MEM_FRACTION=str(memory))
    if rehearse:
        os.environ.update(JAX_PLATFORMS="cpu", CUDA_VISIBLE_DEVICES="")


def device(worker: Worker, rehearse: bool) -> str:
    """Returns the kind of GPU that JAX has, or "rehearsal"."""
    platform, kind = worker("benchmarks.in_jax.platform", patience=120)
    if rehearse:
        return "rehearsal"
    if platform != "gpu":
        raise SystemExit(f"JAX has a {kind} here, and no GPU. --rehearse goes through it all on the CPU, very small.")
    return kind


def driver() -> str:
    """Returns the card, its driver and its power limit, from nvidia-smi."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version,power.limit,memory.total", "--format=csv,noheader"]
    try:
        return subprocess.run(query, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def folder(out: pathlib.Path | None, rehearse: bool) -> pathlib.Path:
    """Returns the folder for results: `out`, or by default RESULTS, or a temporary one for a rehearsal."""
    return out or (pathlib.Path(tempfile.mkdtemp()) if rehearse else RESULTS)


def report(
    name: str,
    device: str,
    out: pathlib.Path,
    *,
    columns: Mapping[str, Callable[[dict[str, Any]], Any]],
    rows: Sequence[dict[str, Any]],
    targets: Sequence["Target"],
    settings: Mapping[str, Any],
) -> None:
    """Prints a table of the rows and one of the targets, and writes both to out/<name>-<device>-<date>.json.

    A column is a function from a row to the cell: a number, a text, or None. The last column may be cut short.
    """
    console = rich.console.Console(width=200)
    table = rich.table.Table(title=f"{name}, {device}", box=rich.box.SIMPLE)
    for column in columns:
        table.add_column(column, no_wrap=True, max_width=50 if column == list(columns)[-1] else None)
    for row in rows:
        table.add_row(*(_text(show(row)) for show in columns.values()))
    console.print(table)
    if targets:
        title = f"targets, {device}"
        table = rich.table.Table("target", "measured", "acceptable", "aim", "", title=title, box=rich.box.SIMPLE)
        for target in targets:
            table.add_row(target.name, *map(_text, (target.value, target.acceptable, target.aim)), target.verdict)
        console.print(table)

    record = {
        "device": device,
        "card": driver(),
        "settings": settings,
        "targets": [dataclasses.asdict(target) | {"verdict": target.verdict} for target in targets],
        "rows": rows,
    } | circumstances(PACKAGES)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{name}-{device.lower().replace(' ', '-')}-{datetime.date.today()}.json"
    path.write_text(json.dumps(record, indent=2) + "\n")
    console.print(f"Written to {path}.", soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Target:
    """A number to reach; larger is better."""

    name: str
    value: float | None  # None: it was not measured
    acceptable: float
    aim: float

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        return "aim reached" if self.value >= self.aim else "acceptable" if self.value >= self.acceptable else "MISSED"


def ratio(a: float | None, b: float | None) -> float | None:
    """Returns a / b, or None if either was not measured."""
    return a / b if a and b else None


def _text(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None else rich.markup.escape(str(value))
