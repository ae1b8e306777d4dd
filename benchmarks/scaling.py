"""Memory of a training step per device, as devices and batch grow together, and compile time by depth.

    python -m benchmarks.scaling

XLA compiles for fake devices of this CPU and reports the bytes needed; nothing is computed. The state should shrink
with the number of devices where a mesh splits it, and the rest should stay the same. Draws docs/scaling.png.
"""

import dataclasses
import datetime
import json
import os
import pathlib
from typing import Any


os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import rich
import rich.table
import tyro

from benchmarks.common import RESULTS, circumstances
from train.planning.ahead import Compiled, compile_ahead, training
from train.state.mesh import abstract_model
from train.watch.plot import Curve, draw
from zoo.mesh import make_mesh
from zoo.registry import CONFIGS, family_of


MODEL, ROWS, SEQ = "llama3.2-1b", 2, 1024  # rows of a device
COLORS = {"replica": "#cc6677", "fsdp": "#4477aa", "tensor": "#ddaa33", "context": "#228833", "stage": "#aa3377"}
DEPTHS = (4, 16, 64)
PICTURE = pathlib.Path(__file__).parents[1] / "docs" / "scaling.png"


def compiled(text: str, devices: int, **changes: Any) -> Compiled:
    """Compiles the step, with full remat, for `devices` devices that have `ROWS` rows each."""
    config = dataclasses.replace(CONFIGS[MODEL], **changes)
    mesh = make_mesh(text, jax.devices()[:devices])
    size = dict(batch=ROWS * devices, seq=SEQ, remat="full", microbatches=1)
    return compile_ahead(training(abstract_model(config, family_of(config), mesh), mesh, **size), mesh)


def main(*, layers: int = 16) -> None:
    """Prints tables, draws the figure, and writes results/scaling-cpu-DATE.json.

    Args:
        layers: layers of the model that is measured.
    """
    gb = lambda found: {"state": found.arguments / 1e9, "temporaries": found.temporaries / 1e9}
    table = rich.table.Table("devices, by", "number", "state, GB", "temporaries, GB")
    alone, rows, curves = gb(compiled("fsdp=1", 1, num_hidden_layers=layers)), [], []
    for axis, color in COLORS.items():
        points = []
        for n in (1, 2, 4, 8):
            found = alone if n == 1 else gb(compiled(f"{axis}={n}", n, num_hidden_layers=layers))
            rows.append({"axis": axis, "devices": n} | found)
            points.append((n, sum(found.values())))
            table.add_row(axis, str(n), *(f"{x:.2f}" for x in found.values()))
        curves.append(Curve(f"{axis}: {points[-1][1]:.1f} GB", color, points, dots=points))
    draw(curves, f"{MODEL}, {ROWS} x {SEQ:,} tokens a device: GB of each device", "devices", PICTURE)
    seconds = {depth: compiled("fsdp=8", 8, num_hidden_layers=depth).seconds for depth in DEPTHS}
    rich.print(table, {f"{depth} layers": f"compiled in {s:.1f} s" for depth, s in seconds.items()})
    path = RESULTS / f"scaling-cpu-{datetime.date.today()}.json"
    record = {"layers": layers, "rows": rows, "compile seconds by depth": seconds} | circumstances(("jax", "jaxlib"))
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"Written to {path} and {PICTURE}.")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_enable_compilation_cache", False)
    tyro.cli(main)
