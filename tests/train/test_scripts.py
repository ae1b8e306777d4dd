"""The scripts as a user runs them, in processes of their own: to the end, killed, told to stop, and with bad input."""

import json
import os
import pathlib
import re
import signal
import string
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

import convert.tensors
import zoo
from tests.zoo import make_golden, tiny


pytestmark = pytest.mark.slow

ROOT = pathlib.Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data"
STEPS = 40


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """A tiny random model with a tokenizer, and a data set: spell a word in capitals."""
    folder = tmp_path_factory.mktemp("base")
    tiny.write(folder / "model", "qwen3", eos_token_id=63)
    tiny.write_tokenizer(folder / "model")
    random = np.random.RandomState(0)
    with (folder / "words.jsonl").open("w") as file:
        for _ in range(200):
            word = "".join(random.choice(list(string.ascii_lowercase), random.randint(3, 9)))
            file.write(json.dumps({"prompt": word + " ", "completion": word.upper()}) + "\n")
    return folder


def start(base, out, *options, script="train.sft", **kwargs):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "", "COLUMNS": "200",
        "JAX_COMPILATION_CACHE_DIR": str(base / "cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    command = [sys.executable, "-m", script, "--model", str(base / "model"), "--data", str(base / "words.jsonl")]
    command += ["--out", str(out), "--steps", str(STEPS), "--seq-len", "32", "--batch", "4", "--lr", "3e-3"]
    command += ["--sample-tokens", "4", "--save-every", "4", *options]
    return subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **kwargs
    )


def finish(process, code=0):
    output, _ = process.communicate(timeout=300)
    assert process.returncode == code, output
    return output


def metrics(out):
    path = out / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def losses(out):
    return {line["step"]: line["loss"] for line in metrics(out) if "loss" in line}


def wait_for_step(process, out, step):
    while process.poll() is None and max(losses(out), default=0) < step:
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(base):
    """A run that nobody disturbed."""
    return finish(start(base, base / "whole")), base / "whole"


def test_a_run(base, whole):
    output, out = whole
    assert list(losses(out)) == list(range(1, STEPS + 1))
    held_out = [line["validation_loss"] for line in metrics(out) if "validation_loss" in line]
    assert len(held_out) == 11 and held_out[-1] < held_out[0] - 0.3
    line = metrics(out)[-1]
    assert {"accuracy", "grad_norm", "learning_rate", "tokens", "tokens_per_second"} <= line.keys()
    assert (out / "loss.png").read_bytes().startswith(b"\x89PNG")
    samples = [json.loads(sample) for sample in (out / "samples.jsonl").read_text().splitlines()]
    assert {sample["step"] for sample in samples} == {0, 10, 20, 30, 40}
    assert f'zoo.load("{out / "model"}")' in output
    model = zoo.load(out / "model")
    assert model.config == zoo.load(base / "model").config
    assert model.embed_tokens.weight.dtype == "float32"
    assert zoo.tokenizer(out / "model").encode("ab") == zoo.tokenizer(base / "model").encode("ab")


def test_killed_and_resumed(base, whole):
    """SIGKILL at three moments, saves under way: every loss and every weight is as if nothing had happened."""
    out = base / "killed"
    for step in (5, 17, 28):
        process = start(base, out)
        wait_for_step(process, out, step)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert process.returncode == -signal.SIGKILL
    assert "Going on from step" in finish(start(base, out))
    assert losses(out) == losses(whole[1])
    assert list(losses(out)) == list(range(1, STEPS + 1))
    ours, theirs = (convert.tensors.open_tensors(folder / "model") for folder in (out, whole[1]))
    assert all(ours[name].view().tobytes() == theirs[name].view().tobytes() for name in theirs)


@pytest.mark.parametrize("matmul", ["int8", "fp8"])
def test_eight_bits(base, whole, matmul):
    """The losses are nearly those of the float run, though this one stops in between and goes on."""
    out = base / matmul
    process = start(base, out, "--matmul", matmul)
    wait_for_step(process, out, 9)
    process.send_signal(signal.SIGTERM)
    finish(process)
    assert "Going on from step" in finish(start(base, out, "--matmul", matmul))
    assert list(losses(out)) == list(range(1, STEPS + 1))
    ours, theirs = (np.array(list(losses(folder).values())) for folder in (out, whole[1]))
    assert np.mean(ours[-8:]) < np.mean(ours[:8]) - 0.3
    assert 0 < np.mean(np.abs(ours - theirs)) < 0.1 and abs(np.mean(ours[-8:]) - np.mean(theirs[-8:])) < 0.05
    assert zoo.load(out / "model").config == zoo.load(base / "model").config


def test_told_to_stop(base, whole):
    out = base / "stopped"
    process = start(base, out)
    wait_for_step(process, out, 9)
    process.send_signal(signal.SIGTERM)
    output = finish(process)
    (step,) = map(int, re.findall(r"Stopped by SIGTERM after step (\d+), which is saved", output))
    assert max(losses(out)) == step < STEPS
    assert f"Going on from step {step}" in finish(start(base, out))
    assert losses(out) == losses(whole[1])


def test_resuming_on_other_data_is_refused(base, whole):
    output = finish(start(base, whole[1], "--batch", "8"), code=1)
    assert "identity.data.batch is 4, and now it is 8" in output.replace("\n", "")
    assert "Traceback" not in output


def test_not_finite(base):
    output = finish(start(base, base / "nan", "--lr", "1e30", "--clip-norm", "inf", "--warmup", "0"), code=1)
    (step,) = map(int, re.findall(r"not finite at step (\d+); the state of step", output))
    assert step > 1 and "Lower --lr" in output and "Traceback" not in output
    assert (base / "nan" / "checkpoints" / str(step - 1)).is_dir()
    assert not (base / "nan" / "model").exists()


def test_dry_run(base):
    output = finish(start(base, base / "dry", "--dry-run"))
    words = [
        "words.jsonl",
        "190",
        "prompt",
        "completion",
        "Example 3",
        "filled",
        "vocabulary",
        "Memory",
        "Mesh",
        "fsdp",
        "free",
    ]
    assert all(word in output for word in words), output
    assert not (base / "dry").exists()


def test_pretrain(base):
    output = finish(start(base, base / "pretrain", "--steps", "8", script="train.pretrain"))
    assert len(losses(base / "pretrain")) == 8 and "zoo.load" in output
    assert zoo.load(base / "pretrain" / "model").config == zoo.config(base / "model")


@pytest.mark.parametrize(
    "content, options, words",
    [
        ("", [], ["bad.jsonl", "empty"]),
        ('{"prompt": "a", "completion": "B"}\n{"prompt": "a", "comp\n', [], ["bad.jsonl", "line 2"]),
        ('{"question": "a"}\n', [], ["bad.jsonl, line 1", "question", "messages"]),
        ('{"text": "abc"}\n' * 9, ["--seq-len", "100"], ["--seq-len 100", "64 positions"]),
        ('{"text": "abc"}\n' * 9, ["--model", "./nowhere"], ["nowhere"]),
        ('{"text": "abc"}\n' * 9, ["--mesh", "fsdp=3"], ["fsdp=3", "3 devices"]),
        ('{"prompt": "abcdefg", "completion": "h"}\n' * 9, ["--seq-len", "4"], ["nothing to learn"]),
    ],
)
def test_bad_input(base, tmp_path, content, options, words):
    (tmp_path / "bad.jsonl").write_text(content)
    output = finish(start(base, tmp_path / "out", "--data", str(tmp_path / "bad.jsonl"), *options), code=1)
    last = output.replace("\n", " ")
    assert all(word in last for word in words), output
    assert "Traceback" not in output
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def shakespeare(tmp_path_factory):
    """The start of the longer run in the README, on real weights."""
    if not SHARED.is_dir():
        pytest.skip("the small trained Llama is not beside this checkout")
    folder = tmp_path_factory.mktemp("shakespeare")
    (folder / "model").symlink_to(SHARED / "aidreams260k")
    options = ["--data", str(SHARED / "text" / "tinyshakespeare.txt"), "--seq-len", "128", "--batch", "16"]
    finish(start(folder, folder / "out", *options, "--save-every", "1000"))
    return folder / "out"


def test_real_weights_learn_shakespeare(shakespeare):
    """Held-out loss falls by more than a nat."""
    held_out = [line["validation_loss"] for line in metrics(shakespeare) if "validation_loss" in line]
    assert held_out[-1] < held_out[0] - 1


@pytest.mark.live
def test_transformers_loads_what_was_trained(shakespeare):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    theirs = make_golden.logits(shakespeare / "model")
    ours = np.asarray(zoo.load(shakespeare / "model")(jnp.asarray(tiny.TOKENS)))
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
