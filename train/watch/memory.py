"""Memory of a run, of a device and its host: measured by kind, beside the estimate of `train.planning.fit`."""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from train.planning import ahead, fit
from train.state.remat import StepOptions
from train.state.state import StateOptions, Trained, TrainState


def usage() -> dict[str, int]:
    """Measures memory in use, in bytes: of the first device, now and at its peak, and of this process on the host.

    The device's numbers are missing on a CPU, where JAX does not measure them, and the host's on systems but Linux.
    """
    found = {}
    if statistics := jax.local_devices()[0].memory_stats():
        found["memory/device_bytes"] = statistics["bytes_in_use"]
        found["memory/device_peak_bytes"] = statistics["peak_bytes_in_use"]
    pages = pathlib.Path("/proc/self/statm")
    if pages.exists():
        found["memory/host_bytes"] = int(pages.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return found


def breakdown(
    state: TrainState, trained: Trained, others: Mapping[str, Any], batch: Any, step: StepOptions, kept: StateOptions
) -> dict[str, int]:
    """Splits a device's memory, in bytes, by kind: the arrays of a run, of `others`, a batch, and activations.

    "offloaded" are the bytes in the host's memory; the other kinds leave these out. "activations" is the peak without
    all those arrays: it includes gradients and everything else that is there only while a step runs. So call it after a
    step. "estimated" is the estimate of "activations" by --remat auto.
    """
    arrays = {
        "parameters": state.model, "frozen": trained.frozen, **others,
        "optimizer": state.opt_state, "batch": batch,
    }  # fmt: skip
    placed = lambda tree: [a for a in jax.tree.leaves(tree) if isinstance(a, jax.Array)]
    found = {kind: size for kind, tree in arrays.items() if (size := ahead.device_bytes(placed(tree)))}
    held = sum(found.values())
    if size := ahead.host_bytes(placed(arrays)):
        found["offloaded"] = size
    if peak := usage().get("memory/device_peak_bytes"):
        found["activations"] = peak - held
    mesh = jax.tree.leaves(batch)[0].sharding.mesh
    candidates = fit.candidates(step, kept, trained, mesh, held)
    as_here = (each.needed for each in candidates if (each.remat, each.microbatches) == (step.remat, step.microbatches))
    if estimate := next(as_here, 0):
        found["estimated"] = round(estimate) - held
    return found


def sentence(kinds: dict[str, int]) -> str:
    """Describes the result of `breakdown` in a sentence."""
    size = lambda n: f"{n / 2**20:,.1f} MiB" if n < 2**30 else f"{n / 2**30:,.1f} GiB"
    held = [f"{kind} {size(n)}" for kind, n in kinds.items() if kind not in ("activations", "estimated", "offloaded")]
    away = f" In its host's: {size(kinds['offloaded'])}." if "offloaded" in kinds else ""
    steps = size(kinds["activations"]) if "activations" in kinds else "an unknown amount"
    estimate = f", estimated as {size(kinds['estimated'])}" if "estimated" in kinds else ""
    return f"Memory of a device: {', '.join(held)}; activations and gradients {steps}{estimate}.{away}"
