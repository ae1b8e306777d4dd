"""Runs of several real processes, joined by gloo on this machine: the same numbers, files and ends as of one."""

import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pytest

import convert.tensors
import train.tiny
from train import cluster


pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 150  # seconds for any run


class Run:
    """Processes that were started together, and what each of them prints."""

    def __init__(self, folder, processes, devices, *command):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        quick = "--xla_backend_optimization_level=0"  # to compile
        environment = os.environ | {
            "JAX_PLATFORMS": "cpu", "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices} {quick}",
            "COLUMNS": "200",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        }  # fmt: skip
        self.outputs = [folder / f"{address}-{n}.txt" for n in range(processes)]
        self.processes = []
        for n, output in enumerate(self.outputs):
            joined = ["--coordinator", address, "--processes", str(processes), "--process", str(n)]
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [sys.executable, *command, *(joined if processes > 1 else [])],
                        cwd=ROOT, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip

    def wait_for(self, condition):
        """Until the condition holds; the processes have to go on meanwhile."""
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end and all(p.poll() is None for p in self.processes), self.text()
            time.sleep(0.05)

    def finish(self, *codes):
        """What the processes printed, when all have ended, with these exit codes; without any, all with 0."""
        try:
            for process in self.processes:
                process.wait(LIMIT)
        finally:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert [p.returncode for p in self.processes] == list(codes or (0,) * len(self.processes)), self.text()
        return [output.read_text() for output in self.outputs]

    def text(self):
        return "\n".join(f"----- {output}\n{output.read_text()[-3000:]}" for output in self.outputs)


def script(name, out, *options):
    """A command line that trains the embedded model a little."""
    command = ["-m", f"train.{name}", "--model", "tiny", "--data", str(train.tiny.INSTRUCTIONS), "--out", str(out)]
    command += ["--seq-len", "32", "--lr", "1e-3", "--sample-tokens", "1"]
    command += [] if name == "grpo" else ["--batch", "8", "--eval-batches", "1"]
    return [*command, *options]


def metrics(out):
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def last_step(out):
    return max((line["step"] for line in metrics(out)), default=-1)


def saved_steps(out):
    return {int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit()}


def assert_same_run(ours, theirs):
    """Every loss is the same but for the order in which numbers were added up."""
    ours, theirs = metrics(ours), metrics(theirs)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for name in ("loss", "validation_loss", "grad_norm"):
        values = [[line[name] for line in lines if name in line] for lines in (ours, theirs)]
        np.testing.assert_allclose(*values, rtol=1e-5, err_msg=name)
    for name in ("tokens", "targets"):
        assert [line.get(name) for line in ours] == [line.get(name) for line in theirs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


def test_fine_tuning(folder):
    """Two processes with four devices each do what one with eight does, and only the first speaks and writes."""
    options = ["--steps", "4", "--save-every", "3", "--eval-every", "2", "--sample-every", "4"]
    one, two = folder / "one", folder / "two"
    Run(folder, 1, 8, *script("sft", one, *options)).finish()
    first, second = Run(folder, 2, 4, *script("sft", two, *options)).finish()
    assert_same_run(two, one)
    assert (two / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    assert "step 4/4" in first and f'zoo.load("{two / "model"}")' in first
    # Gloo's threads write of their connections, and into each other's lines.
    assert not [word for word in ("step", "loss", "records", "zoo", "Warning") if word in second], second
    assert (two / "loss.png").exists() and saved_steps(two) == {3, 4}
    files = [sorted(path.name for path in (out / "model").iterdir()) for out in (one, two)]
    assert files[0] == files[1]
    ours, theirs = (convert.tensors.open_tensors(out / "model") for out in (two, one))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        got, want = (t.view().astype(np.float32) for t in (ours[name], tensor))
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-5, err_msg=name)  # bfloat16, rounded once


@pytest.mark.parametrize(
    "name, options, seen",
    [
        ("sft", ["--lora.rank", "4", "--quantize", "int8"], ("loss", "validation_loss", "grad_norm")),
        ("grpo", ["--prompts", "2", "--group", "4", "--max-new-tokens", "8"], ("loss", "reward", "length", "entropy")),
    ],
)
def test_two_processes_do_what_one_does(folder, name, options, seen):
    """With adapters, whose export both take part in; and with samples, which both have to draw alike."""
    outs = folder / f"{name}-one", folder / f"{name}-two"
    for processes, out in zip((1, 2), outs, strict=True):
        Run(folder, processes, 2 // processes, *script(name, out, "--steps", "2", *options)).finish()
    ours, theirs = (metrics(out) for out in outs)
    assert len(ours) == len(theirs) == 3
    for number in seen:
        values = [[line[number] for line in lines if number in line] for lines in (ours, theirs)]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6, err_msg=number)
        assert values[0]


def test_stopped_killed_and_resumed_by_other_numbers_of_processes(folder):
    """Pre-training by four processes, one of which gets SIGTERM; by two, one of which is killed; and by one."""
    options = ["--steps", "12", "--save-every", "2", "--eval-every", "12", "--sample-every", "12"]
    calm, out = folder / "calm", folder / "stormy"
    Run(folder, 1, 8, *script("pretrain", calm, *options)).finish()

    run = Run(folder, 4, 2, *script("pretrain", out, *options))
    run.wait_for(lambda: last_step(out) >= 1)
    os.kill(run.processes[2].pid, signal.SIGTERM)
    first, *_ = run.finish()
    (stopped,) = map(int, re.findall(r"Stopped by SIGTERM after step (\d+), which is saved", first))
    assert 1 <= stopped == last_step(out) < 6

    run = Run(folder, 2, 1, *script("pretrain", out, *options))
    run.wait_for(lambda: any(stopped < step for step in saved_steps(out)))
    os.kill(run.processes[1].pid, signal.SIGKILL)
    killed = time.monotonic()
    first, _ = run.finish(1, -signal.SIGKILL)
    assert time.monotonic() - killed < 60
    assert f"Going on from step {stopped} " in first
    assert "Process 0: a computation of all processes failed, most likely because one has died" in first
    assert "Traceback" not in first

    (only,) = Run(folder, 1, 8, *script("pretrain", out, *options, "--mesh", "fsdp=4,tensor=2")).finish()
    (resumed,) = map(int, re.findall(r"Going on from step (\d+) ", only))
    assert stopped < resumed < 12
    assert_same_run(out, calm)


def test_errors_are_told_and_end_all(folder):
    """What is wrong everywhere is said everywhere; what is wrong in one process ends the others too."""
    texts = Run(folder, 2, 1, *script("sft", folder / "bad", "--mesh", "fsdp=3")).finish(1, 1)
    for n, text in enumerate(texts):
        assert f"Process {n}: ValueError: The mesh 'fsdp=3'" in text and "Traceback" not in text
    (folder / "blocked" / "metrics.jsonl").mkdir(parents=True)
    run = Run(folder, 2, 1, *script("sft", folder / "blocked", "--steps", "2"))
    first, _ = run.finish(1, run.processes[1].wait(LIMIT))  # which JAX aborts, or it comes upon the loss by itself
    assert "Process 0: IsADirectoryError" in first and "Traceback" not in first and run.processes[1].returncode


def test_dry_run(folder):
    first, second = Run(folder, 2, 1, *script("sft", folder / "dry", "--steps", "2", "--dry-run")).finish()
    assert all(word in first for word in ("Example 3", "Memory", "Mesh", "2 x cpu")) and "Memory" not in second
    assert not (folder / "dry").exists()


CHILD = """
import json, pathlib, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
from train import cluster
from train.checkpoint import Checkpoints
from zoo.mesh import make_mesh
from train.state import TrainState

task, folder, *joined = sys.argv[1:]
if joined:
    _, coordinator, _, processes, _, process = joined
    cluster.initialize(coordinator, int(processes), int(process))
place = NamedSharding(make_mesh(), P("fsdp"))
random = np.random.default_rng(0)
values = [random.standard_normal((8, 5)).astype(np.float32), random.integers(-128, 128, (8, 3), np.int8)]
step, places = np.int32(7), (NamedSharding(place.mesh, P()), place, place)
put = lambda a, place: jax.make_array_from_callback(a.shape, place, lambda index: a[index])
state = TrainState(*map(put, (step, *values), places))
said = []
kept = Checkpoints(folder, identity={}, say=said.append)
if task == "save":
    kept.save(state, {"next": 3})
    kept.close()
elif task == "fail":
    blocked, first = pathlib.Path(folder, "7.unfinished"), jax.process_index() == 0
    if first:
        blocked.write_text("a file where process 0 needs a folder")
    kept.save(state, None)
    assert len(said) == 1 and "could not be saved" in said[0] and not kept.steps()
    if first:
        blocked.unlink()
    kept.save(state, None)
    kept.close()
    assert len(said) == 1 and kept.steps() == [7]
else:
    abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), state)
    restored, data = kept.restore(abstract)
    assert data == {"next": 3} and restored.step == 7
    for array, value in zip(jax.tree.leaves(restored), (step, *values), strict=True):
        assert array.dtype == value.dtype and array.addressable_shards
        for shard in array.addressable_shards:
            assert np.asarray(shard.data).tobytes() == value[shard.index].tobytes()
"""


def test_a_checkpoint_of_four_processes_is_restored_by_others_bit_by_bit(folder):
    kept = folder / "bits"
    Run(folder, 4, 1, "-c", CHILD, "save", str(kept)).finish()
    for processes, devices in ((2, 1), (1, 8)):
        Run(folder, processes, devices, "-c", CHILD, "restore", str(kept)).finish()


def test_a_save_that_fails_in_one_process_fails_in_all_and_the_run_goes_on(folder):
    Run(folder, 2, 1, "-c", CHILD, "fail", str(folder / "failing")).finish()


GENERATE = """
import sys
import jax, zoo
from train import cluster
from zoo.mesh import make_mesh

if joined := sys.argv[1:]:
    _, coordinator, _, processes, _, process = joined
    cluster.initialize(coordinator, int(processes), int(process))
mesh = make_mesh()
with jax.set_mesh(mesh):
    model = zoo.load("tiny", mesh=mesh)
    prompts = ["The module", "A list", "for i", "def f"]
    print("TEXTS", zoo.generate(model, zoo.tokenizer("tiny"), prompts, max_new_tokens=4, stop=["?"]))
"""


def test_generation(folder):
    """Rows that lie on the devices of several processes come to all of them."""
    texts = [
        text.split("TEXTS ")[1].splitlines()[0]
        for processes, devices in ((1, 2), (2, 1))
        for text in Run(folder, processes, devices, "-c", GENERATE).finish()
    ]
    assert len(texts) == 3 and len(set(texts)) == 1


@pytest.mark.parametrize(
    "environment, several",
    [
        ({}, False),
        ({"SLURM_NTASKS": "8"}, False),
        ({"SLURM_NTASKS": "1", "SLURM_STEP_NODELIST": "a"}, False),
        ({"SLURM_NTASKS": "8", "SLURM_STEP_NODELIST": "a[1-2]"}, True),
        ({"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ({"TPU_WORKER_HOSTNAMES": "localhost"}, False),
        ({"TPU_WORKER_HOSTNAMES": "a,b"}, True),
        ({"MEGASCALE_NUM_SLICES": "2"}, True),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, False),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1", "JOB_COMPLETION_INDEX": "0"}, True),
    ],
)
def test_launchers(monkeypatch, environment, several):
    monkeypatch.setattr(os, "environ", environment)
    assert cluster.launched() == several
