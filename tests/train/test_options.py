"""The options for watching a run and for surviving faults, all at once, on the embedded model."""

import importlib.util
import re

import pytest

import convert.tensors
import train.step.language
import zoo
from tests.train import joined
from tests.train.conftest import command
from train.run import offending
from train.state import checkpoint
from train.watch.metrics import read_metrics


OPTIONS = """
model: tiny
seq-len: 32
batch: 8
epochs: 1
packing: off
hold-out: 0.1
lr: 1e-3
eval-every: 3
norms-every: 2
save-every: 0
keep: 1
freeze: [embed_tokens.*]
moments: bfloat16
weights-dtype: bfloat16
offload: optimizer
eval-tokens: 2
best: validation_loss
on-nonfinite: skip
skip-spikes: 40
profile: "2:3"
"""
TRACKERS = ["--tracker", "tensorboard"] if importlib.util.find_spec("tensorboardX") else []


@pytest.mark.thorough
@pytest.mark.usefixtures("quick")
def test_all_at_once(tmp_path, monkeypatch, capsys):
    """A NaN and a spike are skipped, and the run's files are written. Another run begins with its state, the page of
    both is drawn, and the NaN is computed again.
    """
    data = joined.write_marked(tmp_path / "data.jsonl")
    monkeypatch.setattr(train.step.language, "cross_entropy", joined.poisoned(data))
    monkeypatch.setattr(offending.Running, "WINDOW", 4)
    (tmp_path / "options.yaml").write_text(OPTIONS)
    one, two = tmp_path / "one", tmp_path / "two"
    (tmp_path / "questions.jsonl").write_text('{"prompt": "1 + 1 = ", "answer": "2"}\n' * 2)
    start = ["--config", tmp_path / "options.yaml", "--data", data, *TRACKERS]
    start += ["--eval-tasks", tmp_path / "questions.jsonl"]
    monkeypatch.setenv("ZOO_LOCAL_CHECKPOINTS", str(tmp_path / "local"))
    monkeypatch.setattr(checkpoint, "EVERY_LOCAL", 2)
    command("train.sft", *start, "--out", one)
    said = " ".join(capsys.readouterr().out.split())
    lines = [line for line in read_metrics(one / "metrics.jsonl") if "loss" in line]
    nan, spike = (int(re.search(rf"Step (\d+) is {what}", said)[1]) for what in ("not finite", "a spike"))
    assert [line["step"] for line in lines if line.get("skipped")] == sorted([nan, spike])
    assert "Goodput" in said
    assert {path.name for path in one.glob("offending-*")} == {f"offending-{nan}", f"offending-{spike}"}
    assert "%" in (one / "profile" / "summary.txt").read_text()
    assert len(list((one / "checkpoints").glob("[0-9]*"))) in (1, 2)  # the last and the best
    evaluated = [line for line in read_metrics(one / "metrics.jsonl") if "validation_loss" in line]
    assert all(0 <= line["eval_questions"] <= 1 for line in evaluated)
    assert "wrong.jsonl" in {path.name for path in one.iterdir()} and not list((tmp_path / "local").rglob("meta.json"))
    normed = [line["step"] for line in lines if any(key.startswith("gradient_norm/") for key in line)]
    assert normed == [line["step"] for line in lines if line["step"] % 2 == 0]
    assert len(list(one.rglob("events.out.tfevents.*"))) == len(TRACKERS[1:])
    assert "on-nonfinite: skip" in (one / "run.yaml").read_text() and not list(one.glob("stacks-*"))
    before, after = (
        convert.tensors.open_tensors(zoo.tokenizer("tiny").folder),
        convert.tensors.open_tensors(one / "model"),
    )
    same = {name: (before[name].view() == after[name].view()).all() for name in after}
    assert same["model.embed_tokens.weight"] and not all(same.values())

    command("train.sft", *start, "--out", two, "--load-state", one, "--steps", len(lines) + 2, "--profile", "None")
    said = " ".join(capsys.readouterr().out.split())
    assert f"Beginning with the full state of {one}, at step {len(lines)}" in said
    assert [line["step"] for line in read_metrics(two / "metrics.jsonl") if "loss" in line] == [
        len(lines) + 1, len(lines) + 2,
    ]  # fmt: skip

    command("train.compare", one, two, "--out", tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    assert all(f'"name": "{out.name}"' in page for out in (one, two))
    (one / "report.html").unlink()
    command("train.report", one)
    assert "Finished, at step" in (one / "report.html").read_text()
    capsys.readouterr()
    command("train.replay", one / f"offending-{nan}")
    said = " ".join(capsys.readouterr().out.split())
    assert f"batch-{nan}.npz: its loss is nan, and its gradients' norm nan, bit by bit as in the run." in said
