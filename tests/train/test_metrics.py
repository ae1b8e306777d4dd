"""The metrics file, the picture, and the output on a screen or in a log."""

import collections
import io
import json
import math
import resource

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rich.console

from train.base import flops
from train.watch import metrics
from train.watch.metrics import MetricsFile, Progress, read_metrics
from train.watch.plot import plot_losses


def test_metrics_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path)
    for step in range(1, 5):
        file.write(step, loss=jnp.float32(step), tokens=np.int64(7), finite=jnp.array(True))
    assert read_metrics(path)[-1] == {"step": 4, "loss": 4.0, "tokens": 7, "finite": True}, "written at once"
    file.write(5, loss=math.nan, grad_norm=jnp.float32(jnp.inf))
    strict = json.loads(path.read_text().splitlines()[-1], parse_constant=pytest.fail)
    assert strict == {"step": 5, "loss": "nan", "grad_norm": "inf"}


def test_going_on_drops_what_came_after(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 1, "loss": 1.5}\n{"step": 2, "loss": 2.5}\n{"step": 2, "validation_loss": 1}\n{"step": 3, "lo'
    )
    file = MetricsFile(path, step=2)
    file.write(3, loss=3.5)
    assert [(line["step"], line.get("loss")) for line in read_metrics(path)] == [
        (1, 1.5),
        (2, 2.5),
        (2, None),
        (3, 3.5),
    ]
    MetricsFile(path)
    assert read_metrics(path) == []


def test_a_full_disk(tmp_path):
    """A limit of a few bytes on file sizes fails like a full disk: no line is lost or cut."""
    path, said = tmp_path / "metrics.jsonl", []
    file, hard = MetricsFile(path, say=said.append), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    file.write(1, loss=1.0)
    before = path.read_bytes()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 5, hard))
        file.write(2, loss=2.0)
        file.write(3, loss=3.0)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert path.read_bytes() == before and len(said) == 1 and f"{path} can't be written" in said[0]
    file.write(4, loss=4.0)
    assert [line["loss"] for line in read_metrics(path)] == [1.0, 2.0, 3.0, 4.0]


def test_lines_that_are_no_steps(tmp_path):
    """Lines that are broken, empty or foreign are reported in one message, kept in a copy, and otherwise ignored."""
    path, said = tmp_path / "metrics.jsonl", []
    lines = [
        '{"step": 1, "loss": 1.5}',
        '{"step": 2, "lo',
        "",
        "5",
        '{"loss": 3}',
        '{"step": "3"}',
        '{"step": 4, "loss": "low"}',
    ]
    text = "\n".join(lines) + "\n"
    path.write_bytes(text.encode() + b"\xff\n")
    file = MetricsFile(path, step=4, say=said.append)
    file.write(5, loss=0.5)
    assert [line["step"] for line in read_metrics(path)] == [1, 4, 5]
    assert len(said) == 1 and "(2, 3, 4, 5, 6, 8)" in said[0] and "metrics.broken" in said[0]
    assert (tmp_path / "metrics.broken").read_bytes() == text.encode() + b"\xff\n"
    plot_losses(path, tmp_path / "loss.png")
    MetricsFile(path, step=5, say=said.append)
    path.write_text("")
    MetricsFile(path, step=5, say=said.append)
    assert len(said) == 1


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    return now


def test_progress_in_a_log(clock, monkeypatch):
    monkeypatch.setattr(metrics, "peak_flops", lambda: 1e12)
    out = io.StringIO()
    console = rich.console.Console(file=out, width=40)
    with Progress(200, start=100, flops_per_token=1e9, console=console) as bar:
        for step in range(101, 201):
            rates = bar.update(step, loss=np.float32(1 + step / 1000), tokens=np.int32(300), targets=1)
            clock[0] += 1.0 if step > 101 else 60.0  # a pause, such as for evaluation
    assert rates["tokens_per_second"] == 300 and rates["mfu"] == pytest.approx(0.3)
    lines = out.getvalue().splitlines()
    assert lines[0] == "step 101/200  loss 1.1010"
    assert lines[1] == "step 102/200  loss 1.1020  5 tokens/s  MFU 0.5% of 1 TFLOP/s  1:38:00 left"
    assert lines[-1] == "step 200/200  loss 1.2000  300 tokens/s  MFU 30.0% of 1 TFLOP/s  0:00:00 left"
    assert 10 <= len(lines) <= 13, "every ten seconds"


def test_progress_on_a_terminal(clock):
    out = io.StringIO()
    console = rich.console.Console(file=out, width=100, force_terminal=True)
    with Progress(10, flops_per_token=1e6, console=console) as bar:
        for step in range(1, 11):
            rates = bar.update(step, loss=2.0, tokens=50)
            clock[0] += 0.5
        bar.print("[a sample]")
    assert rates == {"tokens_per_second": 100}
    shown = out.getvalue()
    assert "[a sample]" in shown and "100 tokens/s  0.1 GFLOP/s" in shown and "MFU" not in shown


@pytest.mark.parametrize(
    ("kind", "peak"), [("NVIDIA H200", 989e12), ("TPU v5 lite", 197e12), ("TPU v5", 459e12), ("cpu", None)]
)
def test_peak_flops(kind, peak, monkeypatch):
    device = collections.namedtuple("Device", "device_kind")(kind)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    assert flops.peak_flops() == peak
