"""Computes an offending step of a run once more: `python -m train.replay RUN/offending-17`.

A run keeps the batch and the state of a step that was not finite, or a spike (see docs/faults.md). The step's numbers
are compared with the run's, bit by bit, and the first operation that made a NaN is named with its line of code.
"""

import argparse
import json
import pathlib
import runpy
import sys
from typing import Any

import jax
import numpy as np
import rich
from jax.sharding import Mesh

from train import runfile
from train.checkpoint import Checkpoints
from train.mesh import put_batch
from train.nonfinite import Limits
from train.offending import at_step, bits_of, explained, read_batch


def replay(o: Any, step: Any, abstract: Any, trained: Any, task: Any, mesh: Mesh) -> None:
    """Prints what the step of the folder --replay finds now: `step` is compiled, `abstract` the shapes of its state.

    Raises:
        ValueError: the folder has no state, or is of another run.
        OSError: it has no offending step.
    """
    folder = o.replay
    about = json.loads((folder / "about.json").read_text())
    kept = Checkpoints(folder / "state", identity=about["identity"])
    if (found := kept.restore(abstract)) is None:
        raise ValueError(f"{folder} has the batch alone, without the state: a run keeps those of its first three.")
    kept.close()
    state, wrong = found[0], []
    limits = Limits(np.float32(np.inf), np.float32(np.inf)) if o.skip_spikes else None  # the run's program had some
    for each in about["steps"]:
        batch = put_batch(read_batch(folder / each["batch"], each["dtypes"]), mesh, state.model, task.reference)
        state = at_step(state, each["update"])
        again = jax.tree.map(lambda a: a.copy(), state)  # which the step uses up
        _, update = step(again, batch, trained.frozen, task.reference, limits)
        update = jax.device_get(update)
        same = all(bits_of(update[key]) == each[key] for key in ("loss", "grad_norm"))
        told = f"its loss is {update['loss']:.4g}, and its gradients' norm {update['grad_norm']:.4g}"
        rich.print(f"{each['batch']}: {told}, {'bit by bit as' if same else 'NOT as'} in the run.")
        if not update["finite"] and not wrong:
            wrong = explained(step, state, batch, trained, task)
            rich.get_console().print("\n".join(wrong), markup=False, soft_wrap=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m train.replay", description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, help="folder offending-... in that of a run")
    parser.add_argument("options", nargs="*", help="options that are to be others, such as --compute-dtype float32")
    arguments, more = parser.parse_known_args()
    try:
        script = json.loads((arguments.folder / "about.json").read_text())["script"]
    except (OSError, ValueError) as error:
        raise SystemExit(f"{arguments.folder} has no step to replay: {error}") from error
    config = arguments.folder / runfile.RUN
    sys.argv = [script, "--config", str(config), "--replay", str(arguments.folder), *arguments.options, *more]
    runpy.run_module(script, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
