"""The beginning of a run: at its own last checkpoint, at the full state of another run, or at its model's weights."""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import rich

from convert import manifest
from convert.private import public_json
from train.base.cluster import agree, all_or_raise
from train.base.differences import differences
from train.base.listing import kinds
from train.run import folder
from train.run.options import Options
from train.state import local
from train.state.checkpoint import Checkpoints, describe, read_arrays, unreadable
from train.state.state import TrainState


def checkpoints(options: Options, out: pathlib.Path, identity: Mapping[str, Any]) -> Checkpoints:
    """Opens the checkpoints of the run in the folder `out`."""
    shared = options.checkpoints
    return Checkpoints(
        out / "checkpoints", identity=identity, keep=shared.keep, accept_data=shared.accept_data,
        options=kinds(type(options)), local=local.folder(),
    )  # fmt: skip


def begin(
    options: Options,
    out: pathlib.Path,
    checkpoints: Checkpoints,
    abstract: TrainState,
    manifest: Mapping[str, Any],
    updates: int,
    weights: Callable[[], TrainState],
) -> tuple[TrainState, Mapping[str, Any] | None, bool]:
    """Loads the state with which a run begins or goes on: its last checkpoint, or --load-state, or else `weights()`.

    Returns the state, the JSON that was saved with it (see `train.run.loop.save`; None for `weights()`), and whether
    the run is new.

    Args:
        updates: the number of updates in a step.

    Raises:
        ValueError: the checkpoint is of another run, or the state of another model or optimizer; or no step is left.
        OSError: there is no whole and undamaged checkpoint.
    """
    steps, source = options.optim.steps, options.checkpoints.load_state
    if found := checkpoints.restore(abstract):
        state, saved = found
        if (n := int(state.step) // updates) > steps:
            raise ValueError(f"{out} has done {n:,} steps, and --steps is {steps:,}: give {n:,} or more.")
        rich.print(f"Going on from step {n:,} of {out}.")
        if changed := folder.changes(saved["options"], manifest["options"], options):
            rich.print(f"Not as before: {changed}.")
        return state, saved, False
    if source is None:
        return weights(), None, True
    state, saved = load_state(source, abstract, manifest["identity"], updates)
    if (n := int(state.step) // updates) >= steps:
        raise ValueError(
            f"The state of --load-state {source} is of step {n:,}, and --steps {steps:,} counts from the same "
            "beginning: give more."
        )
    place = "at its place in the data" if saved["data"] is not None else "at the beginning of the data, which is other"
    rich.print(f"Beginning with the full state of {source}, at step {n:,} and {place}.")
    return state, saved, True


def load_state(
    source: str, abstract: TrainState, identity: Mapping[str, Any], updates: int = 1
) -> tuple[TrainState, dict[str, Any]]:
    """Reads the full state of another run, which may still be writing its checkpoints; nothing there is changed.

    Returns the state, and the JSON that was saved with it. The "data" in the JSON is None if the data differs from that
    of `identity`; its "looks" are empty, since they are of the other run's validation.

    Args:
        source: RUN, the folder of a run, whose newest undamaged checkpoint is read; or RUN@STEP for that step's.
        identity: the identity of the new run.

    Raises:
        ValueError: the arrays have other names, shapes or dtypes, or the adapters belong to other weights.
        OSError: there is no such checkpoint, or it is damaged or cannot be read.
    """
    step = agree(all_or_raise(functools.partial(_find, source, updates)))
    path = _split(source)[0] / "checkpoints" / str(step)
    meta = json.loads((path / "meta.json").read_text())
    present = describe(abstract)
    if changed := differences({key: meta[key] for key in present}, present):
        name, (old, new) = next(iter(changed.items()))
        raise ValueError(
            f"{path} can't be the state of this run: its {name} is {old}, and here it is {new}. --load-state needs the "
            "same model, adapters, --optimizer, --moments and --weights-dtype."
        )
    theirs, ours = public_json(meta["identity"]), public_json(identity)
    if "lora" in ours and ours["lora"] == theirs.get("lora") and theirs.get("weights") != ours.get("weights"):
        raise ValueError(f"The adapters in {path} are of other weights than those of {ours['model']}.")
    saved = meta["data"] | {"looks": []}
    if theirs["data"] != ours["data"]:
        saved["data"] = None
    return read_arrays(path, abstract), saved


def _split(source: str) -> tuple[pathlib.Path, int | None]:
    run, _, step = source.rpartition("@")
    return (
        (pathlib.Path(run).resolve(), int(step)) if run and step.isdigit() else (pathlib.Path(source).resolve(), None)
    )


def _find(source: str, updates: int) -> int:
    """Finds the number of the checkpoint that `source` names. Every process verifies it, so that all fail alike."""
    run, wanted = _split(source)
    there = sorted((int(path.name) for path in (run / "checkpoints").glob("*") if path.name.isdigit()), reverse=True)
    chosen, problem = there if wanted is None else [step for step in there if step == wanted * updates], ""
    for step in chosen:
        try:
            manifest.verify(run / "checkpoints" / str(step))
            return step
        except manifest.DAMAGE as error:
            problem = problem or f" ({error})"
        except OSError as error:
            raise unreadable(run / "checkpoints" / str(step), error) from error
    what = "has no undamaged checkpoint" if wanted is None else f"has no undamaged checkpoint of step {wanted:,}"
    steps = ", ".join(str(step // updates) for step in reversed(there))
    raise OSError(f"--load-state: {run} {what}{problem}; " + (f"it has those of steps {steps}." if steps else "none."))
