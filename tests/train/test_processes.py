"""Runs of several real processes, joined by gloo on this machine, have the same numbers, files and ends as one process.

The processes run one task after another (see joined.py). The tests' own process does the work of a single process.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys

import jax
import numpy as np
import pytest

import convert.tensors
import train.tiny
import zoo
from tests import hurry
from tests.close import close
from tests.train import joined
from tests.train.conftest import command, devices
from tests.zoo.programs import MODEL, noise, on_host
from train.base import cluster
from zoo.nn.heads import RewardHead
from zoo.surgery import with_head


ROOT = pathlib.Path(__file__).parents[2]
LIMIT = 240  # seconds for any processes


def pair(folder, devices, codes, *tasks):
    """Runs tasks in two processes together, until both end with these exit codes. None allows any code of an aborted
    process.

    Returns each process's output: task -> text.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    outputs, processes = [folder / f"{address}-{n}.txt" for n in range(2)], []
    try:
        for n, output in enumerate(outputs):
            call = [sys.executable, "-m", "tests.train.joined", address, "2", str(n), *map(json.dumps, tasks)]
            with output.open("w") as file:
                processes.append(
                    subprocess.Popen(
                        call, cwd=ROOT, env=hurry.environment(devices=devices),
                        stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
                    )
                )  # fmt: skip
        for process in processes:
            process.wait(LIMIT)
    finally:
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    text = "\n".join(f"----- {output}\n{output.read_text()[-3000:]}" for output in outputs)
    for process, code in zip(processes, codes, strict=True):
        assert process.returncode if code is None else process.returncode == code, text
    found = [re.split("^===== (.*)\n", output.read_text(), flags=re.M)[1:] for output in outputs]
    return [dict(zip(parts[::2], parts[1::2], strict=True)) for parts in found]


def script(name, out, *options, kind="quiet"):
    """Returns a task that trains the model of `folder` a little."""
    data = ["--model", str(out.parent / "model"), "--data", str(train.tiny.INSTRUCTIONS), "--out", str(out)]
    data += ["--seq-len", "32", "--lr", "1e-3"]
    judges = ["--reward", r"regex:[^\n]+\.", f"model:{out.parent / 'judge'}"]
    data += judges if name == "grpo" else ["--batch", "8"]
    return [kind, f"train.{name}", *data, *options]


def struck(task, kind, step):
    """Returns the task with a signal to the second process in this step."""
    return ["struck", kind, str(step), *task[1:]]


def with_disks(folder, task):
    """Returns the task with a folder of local checkpoints for each process."""
    return ["with_disks", str(folder / "disks" / "{process}"), *task]


def alone(task, number=2):
    """Runs the task in this process, with `number` devices."""
    kind, name, *options = task
    with pytest.MonkeyPatch.context() as patch:
        devices(patch, number)
        if kind == "quiet":
            patch.setattr(zoo, "generate", lambda model, tokenizer, prompts, **_: [""] * len(prompts))
        command(name, *options)


def metrics(out):
    path = out / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []


def last_step(out):
    return max((line["step"] for line in metrics(out)), default=-1)


def saved_steps(out):
    return {int(path.name) for path in (out / "checkpoints").iterdir() if path.name.isdigit()}


def assert_same_run(ours, theirs):
    """Checks that every loss is the same, except for the order in which numbers were added up."""
    ours, theirs = metrics(ours), metrics(theirs)
    assert [line["step"] for line in ours] == [line["step"] for line in theirs]
    for name in ("loss", "validation_loss", "grad_norm"):
        values = [[line[name] for line in lines if name in line] for lines in (ours, theirs)]
        close(*({name: each} for each in values), terms=2 * MODEL)
    for name in ("tokens", "targets"):
        assert [line.get(name) for line in ours] == [line.get(name) for line in theirs]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder for all runs, with a much smaller version of the embedded model and the same tokenizer, and a
    random reward model.
    """
    folder, config = tmp_path_factory.mktemp("processes"), zoo.config("tiny")
    sizes = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, head_dim=16)
    config = dataclasses.replace(config, source=zoo.tokenizer("tiny").folder, **sizes)
    model = noise(lambda: zoo.qwen3.Model(config, key=jax.random.key(0)), 0.2)
    zoo.save(on_host(model), folder / "model")
    zoo.save(on_host(with_head(model, RewardHead(32, None, key=jax.random.key(0)))), folder / "judge")
    return folder


FINE_TUNING = ["--steps", "4", "--save-every", "3", "--eval-every", "2", "--sample-every", "4"]
ADAPTERS = ["--steps", "2", "--lora.rank", "4", "--quantize", "int8"]
GRPO = ["--steps", "2", "--prompts", "2", "--group", "4", "--max-new-tokens", "8"]
EMBEDDING = ["--steps", "2", "--eval-every", "2"]
PRETRAINING = ["--steps", "12", "--hold-out", "0"]
REPLICAS = ["--mesh", "replica=2,fsdp=2"]  # in each replica two devices share the state


BAD = ["--seq-len", 32, "--lr", 1e-3, "--batch", 8, "--epochs", 1, "--packing", "off", "--hold-out", 0]
BAD += ["--sample-every", 99, "--save-every", 99, "--on-nonfinite", "skip", "--skip-spikes", 40]


@pytest.fixture(scope="module")
def runs(folder):
    """Returns pre-training tasks: undisturbed, told to stop, and killed in the second process."""
    run = lambda name, *more: script("pretrain", folder / name, *PRETRAINING, *more)
    return {
        "calm": run("calm", *REPLICAS, "--save-every", "99"),
        "stormy": run("stormy", "--save-every", "2"),
        "robbed": run("robbed", *REPLICAS, "--save-every", "99"),
    }


def printed(outputs, tasks):
    """Returns each process's output by the name of the task."""
    return [{name: output[json.dumps(task)] for name, task in tasks.items()} for output in outputs]


@pytest.fixture(scope="module")
def two(folder):
    """Returns each task's output from two processes with a device each. The last fails in both, and so ends them."""
    bad = joined.write_marked(folder / "bad.jsonl")
    joined.save(str(folder / "bits"))
    tasks = {
        "restore": ["restore", str(folder / "bits")],
        "save": ["save", str(folder / "bits of two")],
        "restore own": ["restore", str(folder / "bits of two")],
        "fail": ["fail_to_save", str(folder / "failing")],
        "sft": script("sft", folder / "sft-two", *FINE_TUNING, kind="script"),
        "dry": script("sft", folder / "dry", *FINE_TUNING, "--dry-run"),
        "adapters": script("sft", folder / "adapters-two", *ADAPTERS),
        "grpo": script("grpo", folder / "grpo-two", *GRPO),
        "embed": script("embed", folder / "embed-two", *EMBEDDING),
        "bad": ["bad_steps", str(bad), str(folder / "bad-steps"), "--model", str(folder / "model"), *map(str, BAD)],
        "generate": ["generate"],
        "wrong": script("sft", folder / "wrong", "--mesh", "fsdp=3"),
    }
    return printed(pair(folder, 1, (1, 1), *tasks.values()), tasks)


@pytest.fixture(scope="module")
def four(folder, runs):
    """Returns the outputs of `runs` from two processes with two devices each. The last run kills the second process."""
    tasks = {
        "calm": runs["calm"],
        "stormy": struck([*runs["stormy"], *REPLICAS], "SIGTERM", 3),
        "robbed": with_disks(folder, struck(runs["robbed"], "SIGKILL", 8)),
    }
    return printed(pair(folder, 2, (1, -signal.SIGKILL), *tasks.values()), tasks)


@pytest.fixture(scope="module")
def later(folder, runs, four):
    """Returns the outputs of two other processes that resume the runs of `four`. One has lost its disk, and is killed
    in the end.
    """
    assert last_step(folder / "robbed") < 12 and not saved_steps(folder / "robbed")
    shutil.rmtree(folder / "disks" / "1")
    tasks = {
        "robbed": with_disks(folder, runs["robbed"]),
        "stormy": struck([*runs["stormy"], "--mesh", "fsdp=4"], "SIGKILL", 5),
    }
    return printed(pair(folder, 2, (1, -signal.SIGKILL), *tasks.values()), tasks)


def test_long_messages_are_sent_in_parts():
    """Beyond 64 MiB a message has several parts. One process receives its own."""
    for size in (cluster.CHUNK, cluster.CHUNK + 3):
        data = b"abc" * (size // 3 + 1)
        assert cluster.broadcast(data[-size:], 0) == data[-size:]


@pytest.mark.thorough
def test_fine_tuning(folder, two):
    """Two processes with a device each give the results of one with two, and only the first one prints and writes."""
    alone(script("sft", folder / "sft-one", *FINE_TUNING, kind="script"))
    one, two, (first, second) = folder / "sft-one", folder / "sft-two", (output["sft"] for output in two)
    assert_same_run(two, one)
    lines = [line for line in metrics(two) if "loss" in line]
    assert len(lines) == 4 and all(len(line["own_seconds"]) == 2 for line in lines)
    assert (two / "samples.jsonl").read_text() == (one / "samples.jsonl").read_text()
    assert "step 4/4" in first and f'zoo.load("{two / "model"}")' in first
    # Gloo's threads print about their connections, also into each other's lines.
    assert not [word for word in ("step", "loss", "records", "zoo", "Warning") if word in second], second
    assert (two / "loss.png").exists() and saved_steps(two) == {3, 4}
    files = [sorted(path.name for path in (out / "model").iterdir()) for out in (one, two)]
    assert files[0] == files[1]
    ours, theirs = (convert.tensors.open_tensors(out / "model") for out in (two, one))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        got, want = (t.view().astype(np.float32) for t in (ours[name], tensor))
        np.testing.assert_allclose(got, want, rtol=2**-7, atol=1e-5, err_msg=name)  # bfloat16, rounded once


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, task, seen",
    [
        ("adapters", ("sft", ADAPTERS), ("loss", "validation_loss", "grad_norm")),
        ("grpo", ("grpo", GRPO), ("loss", "reward", "length", "entropy")),
        ("embed", ("embed", EMBEDDING), ("loss", "validation_loss", "validation_mrr", "grad_norm")),
    ],
)
def test_two_processes_do_what_one_does(folder, two, name, task, seen):
    """Two processes equal one with adapters, which both export together, with samples, which both draw alike and a
    reward model rates, and with the negatives of all devices.
    """
    alone(script(task[0], folder / f"{name}-one", *task[1]))
    ours, theirs = (metrics(folder / f"{name}-{processes}") for processes in ("two", "one"))
    assert len(ours) == len(theirs) == 3
    for number in seen:
        values = [[line[number] for line in lines if number in line] for lines in (ours, theirs)]
        close(*({number: each} for each in values), terms=3 * MODEL)
        assert values[0]


@pytest.mark.thorough
def test_stopped_killed_and_resumed_by_other_numbers_of_devices(folder, runs, four, later):
    """Pre-training runs on two processes with four devices, one of which gets SIGTERM; then on two with another mesh,
    one of which is killed; and then on one process with eight devices.
    """
    assert "Stopped by SIGTERM after step 3, which is saved" in four[0]["stormy"].replace("\n", " ")
    first = later[0]["stormy"]
    assert "Going on from step 3 " in first
    assert "Process 0: a computation of all processes failed, most likely because one has died" in first
    assert "Traceback" not in first

    resumed = max(saved_steps(folder / "stormy"))
    assert 3 < resumed < 12
    alone([*runs["stormy"], "--mesh", "fsdp=4,tensor=2"], 8)
    assert_same_run(folder / "stormy", folder / "calm")


@pytest.mark.thorough
def test_a_lost_disk(folder, later):
    """A process is killed, and its own disk is lost: the run resumes from its replica's pieces, to the last bit.

    Nothing is saved in the shared folder before the end.
    """
    calm, out, first = folder / "calm", folder / "robbed", later[0]["robbed"]
    (step,) = map(int, re.findall(r"Going on from step (\d+) of", first))
    assert step >= 4 and step % 2 == 0 and f"pieces of step {step} come from the disks of other processes" in first
    for name in ("loss", "grad_norm"):
        assert [line.get(name) for line in metrics(out)] == [line.get(name) for line in metrics(calm)]
    assert saved_steps(out) == {12} and not list((folder / "disks").glob("*/*/*/*[0-9]"))


@pytest.mark.thorough
def test_errors_of_all_are_told_by_all(two):
    for n, output in enumerate(two):
        assert f"Process {n}: ValueError: The mesh 'fsdp=3'" in output["wrong"] and "Traceback" not in output["wrong"]


@pytest.mark.thorough
def test_a_process_that_lives_and_hangs_is_named_and_ends_the_run(folder):
    first, _ = pair(folder, 1, (1, None), ["hang"])
    told = first['["hang"]']
    assert re.search(r"Process 0 has waited \d s for process 1, which lives and has not come this far\.", told)
    assert re.search(r"Process 0: Process 1 has not come to where the others are for \d s, so the run ends\.", told)


@pytest.mark.thorough
def test_a_process_that_fails_ends_the_others(folder):
    task = ["fail", str(folder)]
    first, second = (output[json.dumps(task)] for output in pair(folder, 1, (1, 1), task))
    assert "Process 1: IsADirectoryError" in second and "Traceback" not in second
    assert "Process 0: Another process of this run has failed, and says why." in first


@pytest.mark.thorough
def test_dry_run(folder, two):
    first, second = (output["dry"] for output in two)
    assert all(word in first for word in ("Example 3", "Memory", "Mesh", "2 x cpu")) and "Memory" not in second
    assert not (folder / "dry").exists()


@pytest.mark.thorough
def test_a_checkpoint_of_two_processes_is_restored_by_one_bit_by_bit(folder, two):
    """Two processes also restore one's checkpoint, and their own; otherwise later tasks would not have run."""
    joined.restore(str(folder / "bits of two"))


@pytest.mark.thorough
def test_a_save_that_fails_in_one_process_fails_in_all_and_the_run_goes_on(folder, two):
    """The tasks themselves check the failure; this test checks the files that are left."""
    assert [path.name for path in (folder / "failing").iterdir()] == ["7"]


@pytest.mark.thorough
def test_bad_steps_of_two_processes(folder, two):
    """Both processes skip a NaN and a spike; the batch is saved once, and gives the same when it is computed again."""
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
        assert len(batch["tokens"]) == 8  # rows of both processes
    said = two[0]["bad"].replace("\n", " ")
    assert f"batch-{nan}.npz: its loss is nan, and its gradients' norm nan, bit by bit as in the run." in said
    assert "The first NaN is made by" in said


@pytest.mark.thorough
def test_generation(two, capsys):
    """Rows on the devices of several processes are generated for all of them."""
    joined.generate(jax.devices()[:2])
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
