"""The picture of a loss curve."""

import math

import pytest
from PIL import Image

from train.metrics import MetricsFile
from train.plot import CURVES, plot_losses, ticks


def colours(path):
    """Where pixels have about a curve's colour: name -> list of (x, y)."""
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
