"""The picture of a loss curve."""

import json
import math

import pytest
from PIL import Image

from train.watch import plot
from train.watch.metrics import MetricsFile
from train.watch.plot import CURVES, plot_losses, ticks


def colours(path):
    """Returns the pixels that have about a curve's colour: name -> list of (x, y)."""
    with Image.open(path) as file:
        image = file.copy()
    near = lambda pixel, hex: all(abs(c - int(hex[i : i + 2], 16)) < 12 for c, i in zip(pixel, (1, 3, 5), strict=True))
    pixels = image.load()
    return {
        name: [(x, y) for x in range(100, 1160, 5) for y in range(120, 615) if near(pixels[x, y], hex)]
        for name, (_, hex) in CURVES.items()
    }


def test_a_falling_curve(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    for step in range(1, 50):
        file.write(step, loss=9 - step / 10 if step != 20 else math.nan)
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    found = colours(tmp_path / "loss.png")
    assert not found["validation_loss"]
    left, right = found["loss"][0], found["loss"][-1]
    assert left[0] < 250 and right[0] > 1100, "it goes from end to end"
    assert left[1] < right[1] - 300, "it falls"


def test_validation_alone_and_nothing_at_all(tmp_path):
    file = MetricsFile(tmp_path / "metrics.jsonl")
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    with Image.open(tmp_path / "loss.png") as image:
        assert image.size == (1200, 675)
    file.write(0, validation_loss=2.0)
    file.write(9, validation_loss=1.0)
    plot_losses(tmp_path / "metrics.jsonl", tmp_path / "loss.png")
    assert colours(tmp_path / "loss.png")["validation_loss"]


def test_ticks():
    assert ticks(0.0, 10.0, 5) == [0, 2, 4, 6, 8, 10]
    assert ticks(1.83, 3.1, 6) == pytest.approx([2.0, 2.5, 3.0])
    assert ticks(3.0, 3.0, 5) == [3.0]


def test_what_is_drawn_has_its_name(tmp_path, monkeypatch):
    said, file = [], tmp_path / "metrics.jsonl"
    monkeypatch.setattr(plot, "draw", lambda curves, title, *_: said.append((title, len(curves))))
    for names in (("accuracy",), ("margin",), ("reward",), ("divergence",)):
        file.write_text(json.dumps({"step": 1, "loss": 1.0} | dict.fromkeys(names, 1.0)) + "\n")
        plot_losses(file, tmp_path / "loss.png")
    words = [
        "loss in nats a token",
        "loss of a preference",
        "mean reward of a completion",
        "divergence from the teacher",
    ]
    assert [(title.split(": ")[1].split(" in nats a token")[0], n) for title, n in said] == [
        (word.removesuffix(" in nats a token"), 1 if "reward" in word else 2) for word in words
    ]
