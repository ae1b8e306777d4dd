"""Logging of a run: its metrics and samples, in files, in a page, and in trackers."""

import contextlib
import dataclasses
import functools
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import shlex
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, SupportsFloat

import jax
import rich
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.markup import escape

import zoo
from convert.private import public
from train.base import writing
from train.base.goodput import timed
from train.base.options import Every, Group, OptionGroup, option
from train.state.mesh import generating
from train.watch import memory, page
from train.watch.metrics import MetricsFile, read_metrics
from train.watch.trackers import Tracker, named, tracker
from zoo.generation.generate import Encoded
from zoo.nn.model import AbstractModel
from zoo.text.tokenizer import Tokenizer


PACKAGES = ("jax", "jaxlib", "equinox", "optax", "orbax-checkpoint", "grain", "numpy")
TOKENS = 64  # of a sample
EVERY = 10.0  # least seconds between two writings of the page, which take at most a hundredth of the run's time


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchOptions(OptionGroup):
    """Options for logging: samples, trackers, and norms of layers."""

    help_group: ClassVar[Group] = Group.WATCHING
    retired: ClassVar[Mapping[str, str]] = {"sample-tokens": "a sample has 64 tokens."}

    sample_every: Every = option(0, identity=False)
    """Number of steps between samples: texts that the model writes. 0: a quarter of --steps. never: no
    samples."""
    tracker: tuple[str, ...] = option((), identity=False)
    """Trackers that get metrics and samples, too: tensorboard, wandb, trackio, mlflow, or several of these."""
    norms_every: Every = option(0, rare=True, identity=False)
    """Number of steps between norms of each layer's activations and gradients, which cost a forward and a backward pass
    of one microbatch. 0: never. The word never is accepted, too."""

    def norms_due(self, n: int) -> bool:
        return self.norms_every not in (0, "never") and n % self.norms_every == 0


class Watch:
    """The writer of a run's logs: metrics.jsonl, samples.jsonl, report.html, run.json, and trackers.

    Use it in a `with`, around the steps. It may write before the `with` begins. Only process 0 writes.

    Args:
        out: the run's folder.
        n: number of steps that are done.
        new: whether the run begins here. If not, entries of later steps in the files are removed.
        parameters: numbers of parameters, of the model and of what is trained, for run.json.
    """

    def __init__(
        self, options: WatchOptions, out: pathlib.Path, n: int, *, new: bool, parameters: Mapping[str, int] = {}
    ):
        self._out, self.path, self.norms_due = out, out / "metrics.jsonl", options.norms_due
        before = read_metrics(self.path) if self.path.exists() else []
        after, logged = -1 if new else n, before[-1]["step"] if before else -1
        self._metrics = MetricsFile(self.path, step=after)
        self._samples, self._after = MetricsFile(out / "samples.jsonl", step=after), after
        self._writes, self._step, self._drawn, self._took = jax.process_index() == 0, n, -math.inf, 0.0
        self.trackers: list[Tracker] = []
        self._latest: dict[str, float] = {}
        if self._writes:
            about = _noted(out, lambda about: _started(about, n, parameters))
            self.trackers = [tracker(name, out, about, n, logged) for name in options.tracker]

    def __enter__(self) -> "Watch":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if not self._writes:
            return
        ended = {"time": time.time(), "step": self._step, "metrics": self._latest}
        if error is not None:
            ended["error"] = f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError, ValueError):  # a second error would hide the first, such as of a full disk
            _noted(self._out, lambda about: about["starts"][-1].update(ended=ended))
        self._draw()
        self._tell("finish", error is None)

    def write(self, step: int, **values: Any) -> None:
        """Writes the metrics of a step, and the page if it is due."""
        values |= memory.usage()
        self._metrics.write(step, **values)
        self._step = step
        numbers = {name: float(value) for name, value in values.items() if isinstance(value, SupportsFloat)}
        self._latest |= {name: value for name, value in numbers.items() if math.isfinite(value)}
        self._tell("log", step, {named(name): value for name, value in numbers.items()})
        if self._writes and time.monotonic() - self._drawn >= max(EVERY, 100 * self._took):
            self._draw()

    def sample(self, step: int, *, prompt: str, text: str, **more: Any) -> None:
        """Writes a sample: a prompt, and the text by which the model continues it. Trackers get no `more` values."""
        self._samples.write(step, prompt=prompt, text=text, **more)
        self._tell("text", step, prompt, text)

    def wrong(self, step: int, **answer: Any) -> None:
        """Writes a wrong answer to a question of --eval-tasks (`train.evaluate.task.Wrong`) into wrong.jsonl."""
        self._wrong.write(step, **answer)

    @functools.cached_property
    def _wrong(self) -> MetricsFile:
        return MetricsFile(self._out / "wrong.jsonl", step=self._after)

    def memory(self, breakdown: dict[str, int]) -> None:
        """Prints a device's memory by kind (`train.watch.memory.breakdown`), and writes it into run.json."""
        rich.print(memory.sentence(breakdown))
        if self._writes:
            with contextlib.suppress(OSError, ValueError):  # as when the disk is full
                _noted(self._out, lambda about: about["starts"][-1].update(memory=breakdown))

    def _draw(self) -> None:
        """Writes the page. If that fails, the page is not written again; the run goes on."""
        began = time.monotonic()
        try:
            page.write([self._out], self._out / page.REPORT)
            self._took = time.monotonic() - began
        except Exception as error:
            self._took = math.inf
            rich.print(f"WARNING: {self._out / page.REPORT} can't be written ({type(error).__name__}: {error}).")
        self._drawn = time.monotonic()

    def _tell(self, method: str, *arguments: Any) -> None:
        """Calls a method of each tracker. A tracker that fails is not called again; the run goes on."""
        for each in list(self.trackers):
            try:
                getattr(each, method)(*arguments)
            except Exception as error:
                self.trackers.remove(each)
                what = f"{type(error).__name__}: {error}"
                rich.print(f"WARNING: {each.name} failed ({what}) and gets no more of this run; {self.path} has all.")


def _noted(folder: pathlib.Path, change: Any) -> dict[str, Any]:
    """Changes run.json, in one move. Returns its new content."""
    path = folder / page.RUN
    about = json.loads(path.read_text())
    change(about)
    writing.write_private(path, json.dumps(about, indent=1) + "\n")
    return about


def _started(about: dict[str, Any], step: int, parameters: Mapping[str, int]) -> None:
    """Adds a start of the run to the content of run.json. The first start gives the run an id for trackers, too."""
    about.setdefault("id", uuid.uuid4().hex[:12])
    about.setdefault("starts", []).append(
        {"time": time.time(), "step": step, **origin(), "parameters": dict(parameters)}
    )


def origin() -> dict[str, Any]:
    """Returns the origin of a run: command, versions, the commit of this package's checkout, machine and devices."""
    versions = {"python": platform.python_version(), "equinox-zoo": zoo.__version__}
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    return {
        "command": public(shlex.join(sys.orig_argv)),
        "versions": versions,
        "commit": commit(),
        "host": socket.gethostname(),
        "devices": f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        "processes": jax.process_count(),
    }


@functools.cache
def commit() -> str:
    """Returns the commit of the checkout that this package is imported from; "" if there is no checkout.

    It ends in "-dirty" if files have changed since the commit.
    """
    root = pathlib.Path(zoo.__file__).parents[1]
    git = lambda *words: subprocess.run(
        ["git", "-C", os.fspath(root), *words], capture_output=True, text=True, timeout=10, check=True
    ).stdout.strip()
    try:
        if not git("ls-files", "zoo/__init__.py"):  # another project's, into which the package is installed
            return ""
        return git("describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    except (OSError, subprocess.SubprocessError):
        return ""


@dataclasses.dataclass(frozen=True)
class Samples:
    """Texts that a model writes while it is trained, for the user to read."""

    tokenizer: Tokenizer
    prompts: Sequence[Encoded]
    mesh: Mesh
    dtype: DTypeLike
    record: Callable[..., None]  # such as `Watch.sample`

    @timed("generation")
    def write(self, step: int, model: AbstractModel) -> None:
        """Prints how the model continues each prompt, and passes the text to `record`.

        Of a text that is too long the end is shown. A prompt with images stays whole, and leaves fewer tokens to all.
        """
        positions = model.config.max_position_embeddings
        shown = [prompt for prompt in self.prompts if not prompt.images or len(prompt.ids) < positions]
        longest = max((len(prompt.ids) for prompt in shown if prompt.images), default=0)
        tokens = min(TOKENS, positions // 2, positions - longest)
        prompts = [prompt if prompt.images else Encoded(prompt.ids[tokens - positions :]) for prompt in shown]
        with generating(model, self.mesh, self.dtype) as model:
            texts = zoo.generate(model, self.tokenizer, prompts, max_new_tokens=tokens)
        for prompt, text in zip([self.tokenizer.decode(prompt.ids) for prompt in prompts], texts, strict=True):
            rich.print(f"[dim]step {step:,}: {escape(prompt)}[/dim][bold]{escape(text)}[/bold]\n")
            self.record(step, prompt=prompt, text=text)
