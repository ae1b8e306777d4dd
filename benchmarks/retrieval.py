"""Draws how a model that embeds learns to find texts: docs/heads.png, from the metrics of a run of `train.embed`.

python -m train.tiny.pairs pairs.jsonl
python -m train.embed --data pairs.jsonl --seq-len 256 --batch 32 --epochs 3 --lr 2e-3 --hold-out 0.07
python -m benchmarks.retrieval runs/embed
"""

import pathlib

import rich
import tyro

from train.watch.metrics import read_metrics
from train.watch.plot import Curve, draw


PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "heads.png"
CURVES = {"recall@10": "#4477aa", "mrr": "#228833", "recall@1": "#cc6677"}


def main(run: tyro.conf.Positional[pathlib.Path], picture: pathlib.Path = PICTURE) -> None:
    """Draws the curves, and prints the first and the last figures.

    Args:
        run: folder of the run.
        picture: file to draw.
    """
    lines, curves = read_metrics(run / "metrics.jsonl"), []
    for name, colour in CURVES.items():
        points = [(line["step"], line[f"validation_{name}"]) for line in lines if f"validation_{name}" in line]
        first, last = points[0][1], points[-1][1]
        rich.print(f"{name}: {first:.3f} at first, {last:.3f} at last")
        curves.append(Curve(f"{name}, from {first:.3f} to {last:.3f}", colour, points, dots=points))
    draw(curves, "descriptions that find what they describe, in held-out documentation of Python", "step", picture)


if __name__ == "__main__":
    tyro.cli(main, prog="python -m benchmarks.retrieval")
