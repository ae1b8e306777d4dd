"""Plots of curves, such as the losses of a run, with Pillow: matplotlib would make the install a ninth larger."""

import math
import os
import pathlib
from typing import NamedTuple

from PIL import Image, ImageDraw, ImageFont

from train.watch.metrics import read_metrics


CURVES = {"loss": ("training", "#4477aa"), "validation_loss": ("validation", "#cc6677")}
REWARD = {"reward": ("reward", "#228833")}
WHAT = {
    "reward": "mean reward of a completion",
    "margin": "loss of a preference",
    "brier_score": "loss in nats a text",
    "validation_mrr": "loss in nats an anchor",
    "divergence": "divergence from the teacher in nats a token",
}
SIZE, SHARP = (1200, 675), 2  # pixels; plots are drawn SHARP times larger and scaled down, for smooth lines
LEFT, TOP, RIGHT, BOTTOM = 90, 60, 1170, 610


def plot_losses(metrics: str | os.PathLike, picture: str | os.PathLike) -> None:
    """Plots "loss" and "validation_loss" of a metrics.jsonl against the step, as a PNG; or "reward", if it has rewards.

    The title names the kind of loss, which follows from the other metrics: preferences have a margin, distillation has
    a divergence.
    """
    lines = read_metrics(metrics)
    curves, rewards = [], any("reward" in line for line in lines)
    for name, (label, color) in (REWARD if rewards else CURVES).items():
        number = lambda value: isinstance(value, int | float) and math.isfinite(value)
        points = [(line["step"], float(line[name])) for line in lines if number(line.get(name))]
        last = f"{label}, at last {points[-1][1]:.3f}" if points else ""
        curves.append(Curve(last, color, points, dots=points if name == "validation_loss" else points[-1:]))
    has = lambda name: any(name in line for line in lines)
    what = next((words for name, words in WHAT.items() if has(name)), "loss in nats a token")
    draw(curves, f"{pathlib.Path(metrics).resolve().parent.name}: {what}", "step", picture)


class Curve(NamedTuple):
    label: str
    color: str
    points: list[tuple[float, float]]
    dots: list[tuple[float, float]]  # points to mark


def draw(curves: list[Curve], title: str, below: str, picture: str | os.PathLike) -> None:
    """Draws the curves that have points. `below` is the label of the horizontal axis."""
    curves = [curve for curve in curves if curve.points]
    points = [point for curve in curves for point in curve.points] or [(0, 0.0)]
    (first, last), (low, high) = ((float(min(axis)), float(max(axis))) for axis in zip(*points, strict=True))
    x = lambda value: LEFT + (RIGHT - LEFT) * (value - first) / (last - first or 1.0)
    y = lambda value: BOTTOM - (BOTTOM - TOP) * (value - low) / (high - low or 1.0)

    image = Image.new("RGB", (SIZE[0] * SHARP, SIZE[1] * SHARP), "white")
    canvas = ImageDraw.Draw(image)
    scaled = lambda *numbers: [SHARP * number for number in numbers]
    font = lambda size: ImageFont.load_default(SHARP * size)
    text = lambda at, words, anchor="mm", size=18, fill="#333333": canvas.text(
        tuple(scaled(*at)), words, fill=fill, font=font(size), anchor=anchor
    )
    for value in ticks(low, high, 6):
        canvas.line(scaled(LEFT, y(value), RIGHT, y(value)), fill="#dddddd", width=SHARP)
        text((LEFT - 12, y(value)), f"{value:g}", "rm")
    for value in ticks(first, last, 8):
        canvas.line(scaled(x(value), TOP, x(value), BOTTOM), fill="#eeeeee", width=SHARP)
        text((x(value), BOTTOM + 22), f"{value:,.0f}")
    text(((LEFT + RIGHT) / 2, BOTTOM + 50), below)
    text((LEFT, TOP - 28), title, "lm", 24)
    # The legend is on the side where most curves are low.
    rising = sum(curve.points[-1][1] - curve.points[0][1] for curve in curves) > 0
    place, anchor = (LEFT + 10, "lm") if rising else (RIGHT - 10, "rm")
    for row, curve in enumerate(curves):
        canvas.line(
            [number for a, b in curve.points for number in scaled(x(a), y(b))], fill=curve.color, width=3 * SHARP
        )
        for a, b in curve.dots:
            canvas.ellipse(scaled(x(a) - 5, y(b) - 5, x(a) + 5, y(b) + 5), fill=curve.color)
        text((place, TOP + 24 + 28 * row), curve.label, anchor, 20, curve.color)
    image.resize(SIZE, Image.Resampling.LANCZOS).save(picture)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Returns about `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    return [unit * n for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
