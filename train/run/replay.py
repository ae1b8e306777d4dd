"""Replay of an offending step: it is computed once more, and its numbers are compared with the run's, bit by bit."""

import json
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import rich
from jax.sharding import Mesh

from train.run.offending import OffendingOptions, at_step, bits_of, explained, read_batch
from train.state.checkpoint import Checkpoints
from train.state.mesh import put_batch
from train.state.state import Trained, TrainState
from train.step.update import Limits


def replay(
    options: OffendingOptions,
    step: Callable[..., Any],
    abstract: TrainState,
    trained: Trained,
    reference: Any,
    mesh: Mesh,
) -> None:
    """Computes the step in the folder --replay once more, and prints its loss and norm, and whether they are as before.

    Args:
        step: the compiled step.
        abstract: shapes of the step's state.

    Raises:
        ValueError: the folder has no state, or is of another run.
        OSError: the folder has no offending step.
    """
    folder = options.replay
    assert folder is not None
    about = json.loads((folder / "about.json").read_text())
    kept = Checkpoints(folder / "state", identity=about["identity"])
    if (found := kept.restore(abstract)) is None:
        raise ValueError(f"{folder} has the batch alone, without the state: a run keeps those of its first three.")
    kept.close()
    state, wrong = found[0], []
    limits = (
        Limits(np.float32(np.inf), np.float32(np.inf)) if options.skip_spikes else None
    )  # the run's program had limits
    for each in about["steps"]:
        batch = put_batch(read_batch(folder / each["batch"], each["dtypes"]), mesh, state.model, reference)
        state = at_step(state, each["update"])
        again = jax.tree.map(lambda a: a.copy(), state)  # the step donates its state
        _, update = step(again, batch, trained.frozen, reference, limits)
        update = jax.device_get(update)
        same = all(bits_of(update[key]) == each[key] for key in ("loss", "grad_norm"))
        told = f"its loss is {update['loss']:.4g}, and its gradients' norm {update['grad_norm']:.4g}"
        rich.print(f"{each['batch']}: {told}, {'bit by bit as' if same else 'NOT as'} in the run.")
        if not update["finite"] and not wrong:
            wrong = explained(step, state, batch, trained, reference)
            rich.get_console().print("\n".join(wrong), markup=False, soft_wrap=True)
