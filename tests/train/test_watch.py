"""Watching a run while it continues: trackers, starts and ends in run.json, memory, and norms of layers."""

import json
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from kernels import Tokens, counted
from tests.close import close
from tests.train.conftest import command
from tests.zoo.programs import MODEL
from train.step import norms
from train.step.language import cross_entropy
from train.step.step import Recipe
from train.watch import memory, page, trackers
from train.watch.metrics import read_metrics
from train.watch.watch import Watch, WatchOptions, commit


class Stand(types.SimpleNamespace):
    """A stand-in for a tracker's package that records every call."""

    calls: list

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*arguments, **options):
            self.calls.append((name, arguments, options))
            return self

        return call


@pytest.fixture
def packages(monkeypatch):
    """Returns stand-ins for the trackers' packages, by name."""
    found = {name: Stand(calls=[]) for name in ("tensorboardX", "wandb", "trackio", "mlflow")}
    found["wandb"].step = 0
    mlflow = found["mlflow"]
    mlflow.search_runs = lambda *_, **__: []
    mlflow.info = types.SimpleNamespace(run_id="the run", experiment_id="the experiment")
    mlflow.experiment_id, mlflow.entities = (
        "the experiment",
        types.SimpleNamespace(Param=lambda key, value: (key, value), Metric=lambda *metric: metric),
    )
    for name, module in found.items():
        monkeypatch.setitem(sys.modules, name, module)
    return found


def started(folder, *, n=0, new=True, tracker=("tensorboard", "wandb", "trackio", "mlflow")):
    """Returns the watch of a run, as the loop has it before its first step."""
    folder.mkdir(exist_ok=True)
    if new:
        about = {
            "identity": {"model": "tiny", "data": {"files": {"a": "f00d"}}, "config": {}},
            "options": {"--lr": 0.1},
        }
        (folder / page.RUN).write_text(json.dumps(about))
    return Watch(WatchOptions(tracker=tracker), folder, n, new=new)


def of(package, method):
    return [(arguments, options) for name, arguments, options in package.calls if name == method]


def test_trackers(tmp_path, packages, monkeypatch):
    """Each tracker gets every step's numbers, by the names that its users know, the samples, and the run's details."""
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    with started(tmp_path / "a") as watch:
        watch.write(0, validation_loss=np.float32(5))
        watch.write(1, loss=jnp.float32(4.5), grad_norm=1, **{"gradient_norm/layers.00": 0.5})
        watch.sample(1, prompt="Why", text=" not?")
    about = json.loads((tmp_path / "a" / page.RUN).read_text())
    names = {"train/loss", "train/grad_norm", "gradient_norm/layers.00", "memory/host_bytes"}
    scalars = {(name, step) for (name, _, step), _ in of(packages["tensorboardX"], "add_scalar")}
    assert scalars >= {("eval/loss", 0)} | {(name, 1) for name in names}
    ((_, told),) = of(packages["wandb"], "init")
    assert told["id"] == about["id"] and told["resume"] == "allow" and told["project"] == "equinox-zoo"
    assert told["config"].items() >= {"lr": 0.1, "model": "tiny", "data.files.a": "f00d", "commit": commit()}.items()
    assert told["config"]["versions.jax"] == jax.__version__ and "equinox" in str(told["config"])
    for package in ("wandb", "trackio"):
        logged = {
            options["step"]: values for (values,), options in of(packages[package], "log") if "samples" not in values
        }
        assert logged[0]["eval/loss"] == 5 and logged[1]["train/loss"] == 4.5 and names <= logged[1].keys()
        assert len(of(packages[package], "Table")) == 1
    batches = [options["metrics"] for _, options in of(packages["mlflow"], "log_batch") if "metrics" in options]
    assert {(name, value, step) for batch in batches for name, value, _, step in batch} >= {("train/loss", 4.5, 1)}
    assert ("model", "tiny") in of(packages["mlflow"], "log_batch")[0][1]["params"]
    assert of(packages["wandb"], "finish") == [((), {"exit_code": 0})] and of(packages["tensorboardX"], "close")
    assert [start["ended"]["step"] for start in about["starts"]] == [1] and (tmp_path / "a" / page.REPORT).exists()
    assert read_metrics(tmp_path / "a" / "metrics.jsonl")[1]["loss"] == 4.5


def test_a_resumed_run_continues_its_curves(tmp_path, packages):
    """A run that had reached step 3 resumes from the checkpoint of step 2: the same run, and no step twice."""
    with started(tmp_path / "a") as watch:
        for step in range(1, 4):
            watch.write(step, loss=5.0 - step)
    for package in packages.values():
        package.calls.clear()
    packages["wandb"].step = 4  # the library's value for a run that it continues
    packages["mlflow"].search_runs = lambda *_, **__: [packages["mlflow"]]
    with pytest.raises(KeyboardInterrupt), started(tmp_path / "a", n=2, new=False) as watch:
        for step in range(3, 6):
            watch.write(step, loss=5.0 - step)
        raise KeyboardInterrupt
    assert [line["step"] for line in read_metrics(tmp_path / "a" / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    ((_, told),) = of(packages["tensorboardX"], "SummaryWriter")
    assert told["purge_step"] == 3, "what was written of later steps goes, and is written again"
    for package in ("wandb", "trackio"):
        assert [options["step"] for _, options in of(packages[package], "log")] == [4, 5]
    batches = [options["metrics"] for _, options in of(packages["mlflow"], "log_batch")]
    assert [batch[0][3] for batch in batches] == [4, 5] and not of(packages["mlflow"], "create_run")
    about = json.loads((tmp_path / "a" / page.RUN).read_text())
    assert [start["step"] for start in about["starts"]] == [0, 2]
    assert about["starts"][1]["ended"]["error"].startswith("KeyboardInterrupt")
    assert of(packages["wandb"], "finish") == [((), {"exit_code": 1})]


def test_a_tracker_that_fails_ends_no_run(tmp_path, packages, capsys):
    def broken(*_, **__):
        raise ConnectionError("no route")

    packages["wandb"].log = broken
    with started(tmp_path / "a", tracker=("wandb", "tensorboard")) as watch:
        watch.write(1, loss=1.0)
        watch.write(2, loss=0.5)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("WARNING: wandb failed (ConnectionError: no route)") == 1
    assert {step for (_, _, step), _ in of(packages["tensorboardX"], "add_scalar")} == {1, 2}


def test_trackers_that_are_not_there(monkeypatch):
    """A tracker that is not installed is refused before anything is loaded."""
    monkeypatch.setitem(sys.modules, "wandb", None)
    for words, said in (
        ("wandb", r"needs wandb: pip install 'equinox-zoo\[wandb\]'"),
        ("wand", "there are tensorboard"),
    ):
        with pytest.raises(SystemExit, match=said):
            command("train.sft", "--tracker", words)


@pytest.mark.live
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("name", trackers.TRACKERS)
def test_as_installed(tmp_path, name, monkeypatch):
    """The packages themselves accept a run and its continuation, without a network."""
    pytest.importorskip({"tensorboard": "tensorboardX"}.get(name, name))
    for variable, value in {
        "WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"file:{tmp_path}/mlruns", "MLFLOW_ALLOW_FILE_STORE": "true",
        "TRACKIO_DIR": str(tmp_path / "trackio"), "HOME": str(tmp_path),
    }.items():  # fmt: skip
        monkeypatch.setenv(variable, value)
    for n in (0, 3):
        with started(tmp_path / "a", n=n, new=n == 0, tracker=(name,)) as watch:
            for step in range(n + 1, n + 5):
                watch.write(step, loss=float("nan") if step == 2 else 1.0, validation_loss=2)
            watch.sample(n + 4, prompt="Why</b>", text=" not?")
        assert watch.trackers, "it has not failed"


def test_memory(tmp_path, monkeypatch):
    said = memory.sentence({"parameters": 2**30, "optimizer": 2**31, "batch": 2**20, "estimated": 2**32})
    assert said == (
        "Memory of a device: parameters 1.0 GiB, optimizer 2.0 GiB, batch 1.0 MiB; "
        "activations and gradients an unknown amount, estimated as 4.0 GiB."
    )
    stats = {"bytes_in_use": 3, "peak_bytes_in_use": 7}
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    assert memory.usage().items() >= {"memory/device_bytes": 3, "memory/device_peak_bytes": 7}.items()


@pytest.mark.thorough
def test_norms_of_layers(model):
    """Norms equal those of a step's gradients, and of the activations passed from layer to layer."""
    random = np.random.RandomState(0)
    batch = {name: random.randint(1, 63, (4, 12)) for name in ("tokens", "targets")}
    segments = np.repeat([[1] * 5 + [2] * 4 + [0] * 3], 4, axis=0)
    batch |= {"segments": segments, "loss_mask": (segments != 0).astype(np.int32)}
    batch = jax.tree.map(jnp.asarray, batch)
    rate = optax.constant_schedule(0.1)
    recipe = Recipe(
        objective=cross_entropy,
        optimizer=optax.sgd(rate),
        schedule=rate,
        compute_dtype="float32",
        remat=jax.checkpoint,
        microbatches=2,
    )
    made = norms.jit_norms(recipe)

    @jax.jit
    def both(model):
        part = jax.tree.map(lambda a: a[::2], batch)  # the first of two parts
        real = (part["segments"] != 0).astype("float32")
        gradients = jax.grad(lambda model: cross_entropy(model, part)[0] / real.sum().astype("float32"))(model)
        x, sizes, at = (
            model.embed_tokens(part["tokens"]),
            [],
            Tokens(None, part["segments"], None, counted(part["segments"])),
        )
        for numbers, block in model.layers.blocks():
            for n in range(len(numbers)):
                x, *_ = jax.tree.map(lambda a, n=n: a[n], block)(x, None, at)
                sizes.append(jnp.sqrt(jnp.sum(jnp.mean(x**2, -1) * real) / real.sum()))
        return made(model, None, batch, None), optax.tree.norm(gradients), sizes

    found, norm, sizes = both(model)
    of = lambda kind: {name.removeprefix(kind): float(value) for name, value in found.items() if name.startswith(kind)}
    close(list(of("activation_rms/layers.").values()), sizes, terms=MODEL)
    gradients = of("gradient_norm/")
    assert {"layers.00", "layers.01", "embed_tokens", "norm"} <= gradients.keys()
    close(np.linalg.norm(list(gradients.values())), float(norm), terms=2 * MODEL)
