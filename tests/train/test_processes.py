"""Runs of several real processes, joined by gloo on this machine: the same numbers, files and ends as of one.

The processes do one task after another (see joined.py). What one process does is done in the tests' own.
"""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import convert.tensors
import train.tiny
from tests import hurry
from tests.train import joined
from tests.train.conftest import command
from train.base import cluster


ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 240  # seconds for any processes


class Run:
    """Processes that were started together, and what each of them prints."""

    def __init__(self, folder, processes, devices, *tasks):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            address = f"127.0.0.1:{free.getsockname()[1]}"
        self.outputs = [folder / f"{address}-{n}.txt" for n in range(processes)]
        self.processes = []
        for n, output in enumerate(self.outputs):
            call = [sys.executable, "-m", "tests.train.joined", address, str(processes), str(n)]
            with output.open("w") as file:
                self.processes.append(
                    subprocess.Popen(
                        [*call, *map(json.dumps, tasks)], cwd=ROOT, env=hurry.environment(devices=devices),
                        stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip

    def wait_for(self, condition):
        """Until the condition holds; the processes have to go on meanwhile."""
        end = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < end and all(p.poll() is None for p in self.processes), self.text()
            time.sleep(0.05)

    def finish(self, *codes):
        """When all have ended, with these exit codes: of each process, task -> what it printed."""
        try:
            for process in self.processes:
                process.wait(LIMIT)
        finally:
            for process in self.processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        assert [p.returncode for p in self.processes] == list(codes), self.text()
        found = [re.split("^===== (.*)\n", output.read_text(), flags=re.M)[1:] for output in self.outputs]
        return [dict(zip(parts[::2], parts[1::2], strict=True)) for parts in found]

    def text(self):
        return "\n".join(f"----- {output}\n{output.read_text()[-3000:]}" for output in self.outputs)


def script(name, out, *options):
    """A task that trains the embedded model a little."""
    data = ["--model", "tiny", "--data", str(train.tiny.INSTRUCTIONS), "--out", str(out)]
    data += ["--seq-len", "32", "--lr", "1e-3", "--sample-tokens", "1"]
    data += [] if name == "grpo" else ["--batch", "8", "--eval-batches", "1"]
    return ["script", f"train.{name}", *data, *options]


def alone(task):
    """The same in this process, with eight devices."""
    _, name, *options = task
    command(name, *options)


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


FINE_TUNING = ["--steps", "4", "--save-every", "3", "--eval-every", "2", "--sample-every", "4"]
ADAPTERS = ["--steps", "2", "--lora.rank", "4", "--quantize", "int8"]
GRPO = ["--steps", "2", "--prompts", "2", "--group", "4", "--max-new-tokens", "8"]
PRETRAINING = ["--steps", "12", "--save-every", "2", "--eval-every", "12", "--sample-every", "12"]


BAD = ["--seq-len", 32, "--lr", 1e-3, "--batch", 8, "--epochs", 1, "--packing", "off", "--hold-out", 0]
BAD += ["--sample-every", 99, "--save-every", 99, "--on-nonfinite", "skip", "--skip-spikes", 40]


@pytest.fixture(scope="module")
def four(folder):
    """What four processes with two devices each print of a mesh that is wrong for all; first they save a checkpoint."""
    wrong = script("sft", folder / "bad", "--mesh", "fsdp=3")
    outputs = Run(folder, 4, 2, ["save", str(folder / "bits")], wrong).finish(1, 1, 1, 1)
    return [output[json.dumps(wrong)] for output in outputs]


@pytest.fixture(scope="module")
def two(folder, four):
    """Two processes with four devices each, and what they print of each task. The second one gets a SIGTERM in the
    first task; the last task fails in the first process only."""
    (folder / "blocked" / "metrics.jsonl").mkdir(parents=True)
    bad = joined.write_marked(folder / "bad.jsonl")
    tasks = {
        "stormy": script("pretrain", folder / "stormy", *PRETRAINING),
        "restore": ["restore", str(folder / "bits")],
        "fail": ["fail_to_save", str(folder / "failing")],
        "dry": script("sft", folder / "dry", "--steps", "2", "--dry-run"),
        "sft": script("sft", folder / "sft-two", *FINE_TUNING),
        "adapters": script("sft", folder / "adapters-two", *ADAPTERS),
        "grpo": script("grpo", folder / "grpo-two", *GRPO),
        "bad": ["bad_steps", str(bad), str(folder / "bad-steps"), *map(str, BAD)],
        "generate": ["generate"],
        "blocked": script("sft", folder / "blocked", "--steps", "2"),
    }
    run = Run(folder, 2, 4, *tasks.values())
    run.wait_for(lambda: last_step(folder / "stormy") >= 1)
    os.kill(run.processes[1].pid, signal.SIGTERM)
    outputs = run.finish(1, run.processes[1].wait(LIMIT))  # which JAX aborts, or it comes upon the loss by itself
    assert run.processes[1].returncode
    begun = [[name for name, task in tasks.items() if json.dumps(task) in output] for output in outputs]
    assert begun[0] == list(tasks) and begun[1][:-1] == list(tasks)[:-1], run.text()  # all but the last succeeded
    return [{name: output.get(json.dumps(task), "") for name, task in tasks.items()} for output in outputs]


@pytest.mark.slow
def test_fine_tuning(folder, two):
    """Two processes with four devices each do what one with eight does, and only the first speaks and writes."""
    alone(script("sft", folder / "sft-one", *FINE_TUNING))
    one, two, (first, second) = folder / "sft-one", folder / "sft-two", (output["sft"] for output in two)
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


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, task, seen",
    [
        ("adapters", ("sft", ADAPTERS), ("loss", "validation_loss", "grad_norm")),
        ("grpo", ("grpo", GRPO), ("loss", "reward", "length", "entropy")),
    ],
)
def test_two_processes_do_what_one_does(folder, two, name, task, seen):
    """With adapters, whose export both take part in; and with samples, which both have to draw alike."""
    alone(script(task[0], folder / f"{name}-one", *task[1]))
    ours, theirs = (metrics(folder / f"{name}-{processes}") for processes in ("two", "one"))
    assert len(ours) == len(theirs) == 3
    for number in seen:
        values = [[line[number] for line in lines if number in line] for lines in (ours, theirs)]
        np.testing.assert_allclose(*values, rtol=1e-4, atol=1e-6, err_msg=number)
        assert values[0]


@pytest.mark.slow
def test_stopped_killed_and_resumed_by_other_numbers_of_devices(folder, two):
    """Pre-training by two processes with eight devices, one of which gets SIGTERM; by two with two, one of which is
    killed; and by one process."""
    calm, out = folder / "calm", folder / "stormy"
    alone(script("pretrain", calm, *PRETRAINING))
    (stopped,) = map(int, re.findall(r"Stopped by SIGTERM after step (\d+), which is saved", two[0]["stormy"]))
    assert 1 <= stopped < 6

    task = script("pretrain", out, *PRETRAINING)
    run = Run(folder, 2, 1, task)
    run.wait_for(lambda: any(stopped < step for step in saved_steps(out)))
    os.kill(run.processes[1].pid, signal.SIGKILL)
    killed = time.monotonic()
    first, _ = (output[json.dumps(task)] for output in run.finish(1, -signal.SIGKILL))
    assert time.monotonic() - killed < 60
    assert f"Going on from step {stopped} " in first
    assert "Process 0: a computation of all processes failed, most likely because one has died" in first
    assert "Traceback" not in first

    resumed = max(saved_steps(out))
    assert stopped < resumed < 12
    alone([*task, "--mesh", "fsdp=4,tensor=2"])
    assert_same_run(out, calm)


@pytest.mark.slow
def test_a_lost_disk(folder):
    """A process is killed, and its own disk is lost: the run goes on from the pieces of its replica, to the last bit.

    Nothing is saved in the shared folder before the end. In each replica two devices share the state.
    """
    calm, out, disks = folder / "undisturbed", folder / "robbed", folder / "disks"
    options = ["--steps", "12", "--save-every", "99", "--eval-every", "12", "--mesh", "replica=2,fsdp=2"]
    task = script("pretrain", out, *options, "--local-checkpoints", str(disks / "{process}"), "--save-local-every", "2")
    there = lambda process: {int(path.name.split("-")[0]) for path in disks.glob(f"{process}/*/*/*[0-9]")}
    run = Run(folder, 2, 2, script("pretrain", calm, *options), task)
    run.wait_for(lambda: max(there(0) & there(1), default=0) >= 4)
    os.kill(run.processes[1].pid, signal.SIGKILL)
    run.finish(1, -signal.SIGKILL)
    assert last_step(out) < 12 and not saved_steps(out)

    shutil.rmtree(disks / "1")
    first, _ = (output[json.dumps(task)] for output in Run(folder, 2, 2, task).finish(0, 0))
    (step,) = map(int, re.findall(r"Going on from step (\d+) of", first))
    assert step >= 4 and step % 2 == 0 and f"pieces of step {step} come from the disks of other processes" in first
    for name in ("loss", "grad_norm", "validation_loss"):
        assert [line.get(name) for line in metrics(out)] == [line.get(name) for line in metrics(calm)]
    assert saved_steps(out) == {12} and not there(0) | there(1)


@pytest.mark.slow
def test_errors_are_told_and_end_all(four, two):
    """What is wrong everywhere is said everywhere; what is wrong in one process ends the others too."""
    for n, text in enumerate(four):
        assert f"Process {n}: ValueError: The mesh 'fsdp=3'" in text and "Traceback" not in text
    first = two[0]["blocked"]
    assert "Process 0: IsADirectoryError" in first and "Traceback" not in first


@pytest.mark.slow
def test_a_process_that_lives_and_hangs_is_named_and_ends_the_run(folder):
    run = Run(folder, 2, 1, ["hang"])
    first, _ = run.finish(1, run.processes[1].wait(LIMIT))  # whom JAX aborts
    assert run.processes[1].returncode
    told = first['["hang"]']
    assert re.search(r"Process 0 has waited \d s for process 1, which lives and has not come this far\.", told)
    assert re.search(r"Process 0: Process 1 has not come to where the others are for \d s, so the run ends\.", told)


@pytest.mark.slow
def test_a_process_that_fails_ends_the_others(folder):
    first, second = Run(folder, 2, 1, ["fail"]).finish(1, 1)
    assert "Process 1: This one fails." in second['["fail"]']
    assert "Process 0: Another process of this run has failed, and says why." in first['["fail"]']


@pytest.mark.slow
def test_dry_run(folder, two):
    first, second = (output["dry"] for output in two)
    assert all(word in first for word in ("Example 3", "Memory", "Mesh", "8 x cpu")) and "Memory" not in second
    assert not (folder / "dry").exists()


@pytest.mark.slow
def test_a_checkpoint_of_four_processes_is_restored_by_others_bit_by_bit(folder, two):
    """By two, or they had not gone on to the tasks that follow; and by one with fewer devices."""
    joined.restore(str(folder / "bits"), jax.devices()[:4])


@pytest.mark.slow
def test_a_save_that_fails_in_one_process_fails_in_all_and_the_run_goes_on(folder, two):
    """As the tasks themselves see; here is what they left."""
    assert [path.name for path in (folder / "failing").iterdir()] == ["7"]


@pytest.mark.slow
def test_bad_steps_of_two_processes(folder, two):
    """A NaN and a spike are left out by both alike; the batch is kept once, and computed again it is the same."""
    first, second = ([line for line in output["bad"].splitlines() if line.startswith("[[")] for output in two)
    assert len(first) == 1 and first == second
    found = json.loads(first[0])
    ((nan, *_),) = [each for each in found if not each[1]]
    ((spike, *_),) = [each for each in found if each[2]]
    lines = [line for line in metrics(folder / "bad-steps") if "loss" in line]
    assert [line["step"] for line in lines if line.get("skipped")] == sorted([nan, spike]) and len(lines) == 8
    assert {path.name for path in (folder / "bad-steps").glob("offending-*")} == {
        f"offending-{n}" for n in (nan, spike)
    }
    kept = folder / "bad-steps" / f"offending-{nan}"
    assert [path.name for path in kept.glob("*.npz")] == [f"batch-{nan}.npz"]
    with np.load(kept / f"batch-{nan}.npz") as batch:
        assert len(batch["tokens"]) == 8  # of both processes
    said = two[0]["bad"].replace("\n", " ")
    assert f"batch-{nan}.npz: its loss is nan, and its gradients' norm nan, bit by bit as in the run." in said
    assert "The first NaN is made by" in said


@pytest.mark.slow
def test_generation(two, capsys):
    """Rows that lie on the devices of several processes come to all of them."""
    joined.generate()
    texts = [line for text in (*(o["generate"] for o in two), capsys.readouterr().out) for line in text.splitlines()]
    texts = [json.loads(line) for line in texts if line.startswith('["')]
    assert len(texts) == 3 and len(texts[0]) == 8 and texts[0] == texts[1] == texts[2]


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
