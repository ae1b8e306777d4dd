"""Size of a row's cache by the number of its positions: hybrids beside models with attention in every layer.

    python -m benchmarks.caches

Counted from the shapes of the caches, in bfloat16 with float32 states; nothing is computed. Draws docs/caches.png.
"""

import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import rich
import rich.table

from train.watch.plot import Curve, draw
from zoo.nn.cache import init_cache
from zoo.registry import CONFIGS, family_of
from zoo.weights.checkpoint import skeleton


POSITIONS = (1, 65_536, 131_072, 196_608, 262_144)
COLORS = {
    "qwen3-32b": "#cc6677",
    "qwen3-30b-a3b": "#aa3377",
    "qwen3.5-27b": "#4477aa",
    "qwen3.5-35b-a3b": "#66ccee",
    "qwen3-next-80b-a3b": "#228833",
    "kimi-linear-48b-a3b": "#ddaa33",
    "nemotron3-nano-30b-a3b": "#332288",
    "granite4-h-small": "#777777",
}
PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "caches.png"


def size(name: str, length: int) -> int:
    """Returns the bytes of the cache of one row with `length` positions."""
    model = skeleton(family_of(CONFIGS[name]), CONFIGS[name])
    caches = eqx.filter_eval_shape(lambda model: init_cache(model, 1, length, jnp.bfloat16), model)
    return sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(caches))


def main() -> None:
    table = rich.table.Table("model", *(f"{n:,}" for n in POSITIONS), title="GB of a row, by positions")
    curves = []
    for name, color in COLORS.items():
        points = [(n / 1024, size(name, n) / 1e9) for n in POSITIONS]
        curves.append(Curve(f"{name}: {points[-1][1]:.2f} GB", color, points, dots=points[1:]))
        table.add_row(name, *(f"{gb:.3f}" for _, gb in points))
    rich.print(table)
    draw(curves, "GB of a row's cache, in bfloat16", "thousands of positions (1,024)", PICTURE)
    print(f"Written to {PICTURE}.")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    main()
