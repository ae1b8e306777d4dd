"""The loss curve of a run, as a picture. Drawn with Pillow: matplotlib would add a ninth to the size of the install."""

import math
import os
import pathlib

from PIL import Image, ImageDraw, ImageFont

from train.metrics import read_metrics


CURVES = {"loss": ("training", "#4477aa"), "validation_loss": ("validation", "#cc6677")}
SIZE, SHARP = (1200, 675), 2  # pixels; drawn this many times larger, and scaled down for smooth lines
LEFT, TOP, RIGHT, BOTTOM = 90, 60, 1170, 610


def plot_losses(metrics: str | os.PathLike, picture: str | os.PathLike) -> None:
    """Draws "loss" and "validation_loss" of a metrics.jsonl against the step, as a PNG."""
    lines = read_metrics(metrics)
    curves = {
        name: [(line["step"], float(line[name])) for line in lines if math.isfinite(float(line.get(name, "nan")))]
        for name in CURVES
    }
    points = [point for curve in curves.values() for point in curve] or [(0, 0.0)]
    (first, last), (low, high) = ((float(min(axis)), float(max(axis))) for axis in zip(*points, strict=True))
    x = lambda step: LEFT + (RIGHT - LEFT) * (step - first) / max(last - first, 1)
    y = lambda loss: BOTTOM - (BOTTOM - TOP) * (loss - low) / (high - low or 1.0)

    image = Image.new("RGB", (SIZE[0] * SHARP, SIZE[1] * SHARP), "white")
    draw = ImageDraw.Draw(image)
    scaled = lambda *numbers: [SHARP * number for number in numbers]
    font = lambda size: ImageFont.load_default(SHARP * size)
    text = lambda at, words, anchor="mm", size=18, fill="#333333": draw.text(
        tuple(scaled(*at)), words, fill=fill, font=font(size), anchor=anchor
    )
    for loss in ticks(low, high, 6):
        draw.line(scaled(LEFT, y(loss), RIGHT, y(loss)), fill="#dddddd", width=SHARP)
        text((LEFT - 12, y(loss)), f"{loss:g}", "rm")
    for step in ticks(first, last, 8):
        draw.line(scaled(x(step), TOP, x(step), BOTTOM), fill="#eeeeee", width=SHARP)
        text((x(step), BOTTOM + 22), f"{step:,.0f}")
    text(((LEFT + RIGHT) / 2, BOTTOM + 50), "step")
    text((LEFT, TOP - 28), f"{pathlib.Path(metrics).resolve().parent.name}: loss in nats a token", "lm", 24)
    for row, (name, curve) in enumerate((name, curve) for name, curve in curves.items() if curve):
        label, color = CURVES[name]
        draw.line([number for step, loss in curve for number in scaled(x(step), y(loss))], fill=color, width=3 * SHARP)
        for step, loss in curve if name == "validation_loss" else curve[-1:]:
            draw.ellipse(scaled(x(step) - 5, y(loss) - 5, x(step) + 5, y(loss) + 5), fill=color)
        text((RIGHT - 10, TOP + 24 + 28 * row), f"{label}, at last {curve[-1][1]:.3f}", "rm", 20, color)
    image.resize(SIZE, Image.Resampling.LANCZOS).save(picture)


def ticks(low: float, high: float, count: int) -> list[float]:
    """Up to about `count` round numbers from `low` to `high`: multiples of 1, 2 or 5 times a power of ten."""
    if high <= low:
        return [low]
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    unit = next(power * n for n in (1, 2, 5, 10) if power * n >= rough)
    return [unit * n for n in range(math.ceil(low / unit), math.floor(high / unit) + 1)]
