"""Counts the FLOPs of a run, writes its metrics to a file, and shows its progress."""

import collections
import datetime
import functools
import json
import math
import os
import pathlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, SupportsFloat, SupportsInt

import jax
import numpy as np
import rich
import rich.console
import rich.progress

from train.plan.chips import chip_of
from zoo.checkpoint import skeleton
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Embedding
from zoo.nn.model import AbstractConfig, AbstractMixtureConfig
from zoo.nn.stack import Stack
from zoo.registry import family_of
from zoo.surgery import modules, path_name


class Products(NamedTuple):
    """Multiply-adds of one token's forward pass, by part of the model."""

    layers: float  # with the layers' weights; of a mixture's experts only those that a token goes to
    head: float  # with the output head's weights
    attention: float  # scores, and weighted sums of values


class Weights(NamedTuple):
    """Where the weights of a model's matrix products are."""

    layers: dict[str, float]  # path of an array -> multiply-adds of a token
    head: str  # path of the output head, which may be the embedding
    below: frozenset[str]  # what paths of layers and of embeddings begin with


@functools.lru_cache
def weights_of(config: AbstractConfig) -> Weights:
    """The weights that a token is multiplied with; of a mixture's experts the share that it goes to."""
    c, layers = config, {}
    chosen = c.num_experts_per_tok if isinstance(c, AbstractMixtureConfig) else 0
    is_linear = lambda m: isinstance(m, AbstractLinear | AbstractExpertLinear)
    model = skeleton(family_of(c), c)
    for name, stack in modules(model, Stack):
        for path, m in jax.tree_util.tree_leaves_with_path(stack, is_leaf=is_linear):
            router = not is_linear(m) and len(m.shape) - path_name(path).startswith("period") == 2
            if is_linear(m) or router:
                share = chosen / m.shape[-3] if isinstance(m, AbstractExpertLinear) else 1
                layers[f"{name}.{path_name(path)}{'' if router else '.weight'}"] = math.prod(m.shape) * share
    embeddings = [path for path, _ in modules(model, Embedding)]
    heads = [path for path, _ in modules(model, AbstractLinear) if path == "lm_head"]
    below = frozenset(path.split(".")[0] for path in (*layers, *embeddings))
    return Weights(layers, f"{[*heads, *embeddings][0]}.weight", below)


@functools.lru_cache
def products_per_token(config: AbstractConfig, seq: int) -> Products:
    """Counts the multiply-adds of a token, on average over a causal sequence of `seq` tokens."""
    attention = sum(config.attention_products(n, seq) for n in range(config.num_hidden_layers))
    return Products(
        float(sum(weights_of(config).layers.values())), float(config.vocab_size * config.hidden_size), attention
    )


def flops_per_token(config: AbstractConfig, seq: int, *, frozen: bool = False, trained: Any = None) -> float:
    """Counts the floating point operations of training on one token, in sequences of `seq`, as MFU does.

    They are 6 for every weight of a matrix product, 2 forward and 4 backward. The head and routers count, embedding
    look-ups do not; of a mixture's experts those count that a token goes to. And they are 6 for every multiply-add of
    causal attention, in which a token sees half of its sequence on average, or less through a window or in a chunk.
    What remat computes again does not count.

    Args:
        frozen: only adapters are trained, which are not counted: each weight has no gradient, and counts 4.
        trained: what --freeze leaves to be trained, a tree as the model, with None for all else. A frozen weight counts
            4; or 2 if nothing is trained before it, so that nothing is sent back through it. Layers are taken together.
    """
    p = products_per_token(config, seq)
    if trained is None:
        return (4.0 if frozen else 6.0) * (p.layers + p.head) + 6.0 * p.attention
    weights, paths = weights_of(config), {path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(trained)}
    own = sum(products for path, products in weights.layers.items() if path in paths) + p.head * (weights.head in paths)
    through_head = paths != {weights.head} or weights.head.split(".")[0] in weights.below
    through_layers = any(path.split(".")[0] in weights.below for path in paths)
    back = p.head * through_head + (p.layers + 2 * p.attention) * through_layers  # two products for each of attention
    return 2.0 * (p.layers + p.head + p.attention + own + back)


def peak_flops() -> float | None:
    """Returns the bfloat16 peak of all devices together, in operations a second; None if it is not known."""
    chip = chip_of(jax.devices()[0].device_kind)
    return chip and chip.flops * jax.device_count()


def mean_of_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of a step: means over its updates, but of tokens and targets sums; finite, if all were."""
    together = {"tokens": np.sum, "targets": np.sum, "finite": np.all}
    return {name: together.get(name, np.mean)([update[name] for update in updates]) for name in updates[0]}


class MetricsFile:
    """metrics.jsonl: one JSON object a line, with its "step"; each line can be read as soon as it is written.

    A run that goes on from `step` drops the lines after it, so the file has every step once. Lines of any other kind
    are left out: `say` is told, and a copy of the file keeps them. Of several processes only process 0 writes.
    """

    def __init__(self, path: str | os.PathLike, *, step: int = 0, say: Callable[[str], None] = rich.print):
        self.path, self._writes = pathlib.Path(path), jax.process_index() == 0
        if not self._writes:
            return
        lines = _lines(self.path) if self.path.exists() else {}
        if broken := ", ".join(str(number) for number, line in lines.items() if line is None):
            copy = shutil.copy(self.path, self.path.with_suffix(".broken"))
            say(f"WARNING: {path} has lines that are no step's ({broken}). They are left out; {copy} has them.")
        kept = [line for line in lines.values() if line and line["step"] <= step]
        new = self.path.with_suffix(".tmp")
        new.write_text("".join(json.dumps(line) + "\n" for line in kept))
        new.replace(self.path)

    def write(self, step: int, **values: Any) -> None:
        """Appends a line. Arrays of one number become numbers; NaN and infinities become "nan", "inf" and "-inf"."""
        if not self._writes:
            return
        line = {"step": step} | {name: _json_number(value) for name, value in values.items()}
        with self.path.open("a") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")


def read_metrics(path: str | os.PathLike) -> list[dict[str, Any]]:
    """Reads the lines of a metrics.jsonl, without those that are not JSON objects with a step."""
    return [line for line in _lines(pathlib.Path(path)).values() if line]


def _lines(path: pathlib.Path) -> dict[int, dict[str, Any] | None]:
    """Reads number of a line -> its object, or None if it has no step; ignores a last line that was cut off."""
    found = {}
    for number, text in enumerate(path.read_text(errors="replace").split("\n")[:-1], 1):
        try:
            line = json.loads(text)
        except ValueError:
            line = None
        found[number] = line if isinstance(line, dict) and type(line.get("step")) is int else None
    return found


class Progress:
    """Shows step, loss, speed, MFU and time left: a bar on a terminal, elsewhere a line every `interval` seconds.

    Use it as `with Progress(...) as progress:`, and call `update` after every step. Speed is that of the last 50 steps,
    pauses included, but without the first step, which compiles.

    `steps` is the number of the last step, `start` that of the step to go on from. The MFU (model FLOPs utilisation) is
    speed times `flops_per_token`, divided by `peak_flops`, which is shown beside it. Where the peak is not known, as on
    a CPU, the operations a second are shown instead.
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
        """Shows that `step` is done, with its loss and reward, and the speed that its number of tokens makes.

        Returns the numbers that depend on the clock: "tokens_per_second", and "mfu" if the peak is known.
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
