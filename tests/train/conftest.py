"""Fixtures and helpers for tests of the training scripts: a tiny base model, command lines in process, quick runs."""

import contextlib
import dataclasses
import functools
import json
import runpy
import string
import sys
import warnings
from typing import Any

import jax
import numpy as np
import pytest
import rich
import safetensors.numpy

import zoo
import zoo.mesh
from tests.zoo import tiny
from train import sft
from train.base.stop import AGAIN, StopRequest
from train.run import loop, start
from train.state import optim
from train.watch.metrics import read_metrics
from zoo.nn.model import AbstractModel


class Bigram(AbstractModel):
    """A model whose logits are rows of a table, for tests that do not depend on the model: it compiles in no time."""

    table: jax.Array
    config: Any = None
    embed_tokens: Any = None
    layers: Any = None

    def forward(self, tokens, cache, at):
        return self.table[tokens], None, ()

    def unembed(self, x):
        return x


def documents(batch):
    """Yields the row of each document of a batch, and the document's part of each array; of branches, each with the
    trunk.
    """
    of_tokens = {name: a for name, a in batch.items() if name not in ("patches", "grids")}
    for row, segments in enumerate(np.asarray(batch["segments"])):
        numbers = np.asarray(batch.get("branches", batch["segments"]))[row]
        for n in range(1, numbers.max() + 1):
            here = (numbers == n) | (numbers == 0) & (segments == segments[numbers == n][0])
            yield row, {name: a[row][here] for name, a in of_tokens.items()}


def unspaced(text):
    """Returns a text without white space: where lines are wrapped depends on the length of the paths in them."""
    return "".join(text.split())


def write_words(path, seed, count=60, sign=str.upper):
    """Writes records of a random word as the prompt, and `sign(word)` as the completion."""
    random = np.random.RandomState(seed)
    words = ["".join(random.choice(list(string.ascii_lowercase), random.randint(3, 9))) for _ in range(count)]
    lines = [json.dumps({"prompt": f"{word} ", "completion": sign(word)}) + "\n" for word in words]
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join(lines))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Returns a folder with a tiny random model, its tokenizer of 64 tokens, and words to write in capitals."""
    folder = tmp_path_factory.mktemp("base")
    tiny.write(folder / "model", "qwen3", eos_token_id=63)
    tiny.write_tokenizer(folder / "model")
    write_words(folder / "words.jsonl", 0)
    return folder


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Returns a folder like `base`, with prompts, and a model whose layers have 36 MiB in bfloat16."""
    folder = tmp_path_factory.mktemp("wide")
    size = dict(hidden_size=512, intermediate_size=4096, num_hidden_layers=3, eos_token_id=63)
    tiny.write(folder / "model", "qwen3", **size)
    tensors = tiny.filled(tiny.MODULES["qwen3"].shapes(tiny.CONFIGS["qwen3"] | size), np.random.RandomState(0))
    safetensors.numpy.save_file(tensors, folder / "model" / "model.safetensors", metadata={"format": "pt"})
    tiny.write_tokenizer(folder / "model")
    write_words(folder / "words.jsonl", 0)
    return folder


@contextlib.contextmanager
def until_stopped():
    """Suppresses the exit of a run that was asked to stop."""
    try:
        yield
    except SystemExit as end:
        if end.code != AGAIN:
            raise


def command(script, *arguments):
    """Runs `python -m script` with these arguments in this process. An error message of its end is a SystemExit."""
    with pytest.MonkeyPatch.context() as patch, until_stopped(), warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # the warning that the module was imported before
        patch.setattr(sys, "argv", [script, *map(str, arguments)])
        # Otherwise runpy, which bypasses jaxtyping's hook, leaves instrumented bytecode where plain Python finds it.
        patch.setattr(sys, "dont_write_bytecode", True)
        patch.setattr(rich.get_console(), "width", 300)  # otherwise long paths are cut
        runpy.run_module(script, run_name="__main__", alter_sys=True)


def devices(patch, number):
    """Gives scripts only `number` of the eight devices."""
    make, few = zoo.mesh.make_mesh, jax.devices()[:number]
    make_mesh = lambda text="fsdp=-1", devices=None: make(text, devices or few)
    for name, module in list(sys.modules.items()):
        if name.startswith("train.") and hasattr(module, "make_mesh"):
            patch.setattr(module, "make_mesh", make_mesh)
    patch.setattr(zoo.mesh, "make_mesh", make_mesh)


def remembered(function, key):
    """Returns a function that calls `function` only once for each key."""
    made = {}

    def call(*args, **options):
        name = key(*args, **options)
        if name not in made:
            made[name] = function(*args, **options)
        return made[name]

    return call


@pytest.fixture(scope="module")
def quick():
    """Gives runs of scripts one device, leaves out samples, and shares compiled steps that are the same.

    Two runs with the same options trace and compile the same step, which takes most of the time of a short run.
    """

    def rates(o, updates=1):
        numbers = o.schedule, o.lr, o.steps, o.warmup, o.decay, o.weight_decay, o.clip_norm, updates
        return o.optimizer, o.moments, *numbers

    def parts(value):
        return (value.func, *sorted(value.keywords.items())) if isinstance(value, functools.partial) else value

    def step(state, recipe):
        arrays = tuple((a.shape, a.dtype, a.sharding) for a in jax.tree.leaves(state))
        fields = (parts(getattr(recipe, field.name)) for field in dataclasses.fields(recipe))
        return jax.tree.structure(state), arrays, *fields

    with pytest.MonkeyPatch.context() as patch:
        devices(patch, 1)
        patch.setattr(zoo, "generate", lambda model, tokenizer, prompts, **_: [""] * len(prompts))
        patch.setattr(optim, "make_optimizer", remembered(optim.make_optimizer, rates))
        patch.setattr(start, "jit_train_step", remembered(start.jit_train_step, step))
        yield


@pytest.fixture(scope="module")
def model(base):
    return zoo.load(base / "model", dtype="float32")


def run(base, out, **changes):
    """Runs `train.sft`, and returns its metrics so far."""
    o = sft.SFTOptions.of(
        model=str(base / "model"),
        data=(str(base / "words.jsonl"),),
        out=out,
        steps=8,
        seq_len=32,
        lr=1e-2,
        hold_out=0.0,
    )
    with until_stopped():
        sft.main(o.changed(**changes))
    return read_metrics(out / "metrics.jsonl") if out.exists() else []


def losses(metrics):
    return [line["loss"] for line in metrics if "loss" in line]


@pytest.fixture
def stop_after(monkeypatch):
    """Returns `stop_after(n)`, which sends the next run a SIGTERM in its n-th step, or none if n is 0."""

    def stop_after(steps):
        class Stop(StopRequest):
            asked = 0

            def agreed(self):
                self.asked += 1
                return "SIGTERM" if self.asked == steps else ""

        monkeypatch.setattr(loop, "StopRequest", Stop)

    return stop_after
