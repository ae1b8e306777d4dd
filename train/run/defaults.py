"""Values of options that the user leaves to us: 0, -1 or auto becomes the value that the option's help names."""

import math
from typing import Any, TypeVar

import jax
import rich
from jax.sharding import Mesh

from kernels.mesh import BATCH
from train.base import cluster
from train.base.runfile import DerivedSteps
from train.planning import ahead, fit
from train.run.options import Options
from train.run.report import device_bytes
from train.state.remat import StepOptions, remat_of
from train.state.state import Lora, StateOptions, Trained
from train.step.microbatches import elastic
from train.watch import trackers
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractConfig


O = TypeVar("O", bound=Options)


def resolve(options: O, config: AbstractConfig, *, width_lr: float, weight_decay: float = 0.1) -> O:
    """Fills in options left at 0, -1 or "auto". `resolve_steps` does those that depend on the number of steps.

    `width_lr` is the learning rate of a model of width 4,096.

    Raises:
        ValueError: the model has fewer positions than --seq-len, or there is no such --remat or --tracker.
        ImportError: a tracker's package is not installed.
    """
    trackers.check(options.watch.tracker)
    step = options.step
    if step.seq_len > config.max_position_embeddings:
        raise ValueError(f"--seq-len {step.seq_len} exceeds the model's {config.max_position_embeddings} positions.")
    if step.remat != "auto":
        remat_of(step.remat)  # refused before anything is loaded
    dtype = {"cpu": "float32"}.get(jax.default_backend(), "bfloat16")
    microbatches = step.microbatches
    if (processes := jax.process_count()) < (full := cluster.full_processes()):
        shares = math.prod(make_mesh(step.mesh).shape[axis] for axis in BATCH)
        microbatches = elastic(microbatches, rows=step.batch, shares=shares, processes=processes, full=full)
        rich.print(f"{processes} of {full} processes: a step has {microbatches} microbatches.")
    return options.changed(
        microbatches=microbatches,
        seq_len=step.seq_len or min(config.max_position_embeddings, 2048),
        lr=options.optim.lr or width_lr * 4096 / config.hidden_size,
        weight_decay=weight_decay if options.optim.weight_decay < 0 else options.optim.weight_decay,
        compute_dtype=dtype if step.compute_dtype == "auto" else step.compute_dtype,
    )


def width_lr(adapters: Lora) -> float:
    """Returns the learning rate for fine-tuning a model of width 4,096.

    Adapters do well with ten times the rate of weights (QLoRA, arXiv:2305.14314, table 9).
    """
    return 2e-4 if adapters.rank else 2e-5


def of_steps(steps: int) -> dict[str, int]:
    """Returns the defaults of options that follow from the number of steps."""
    return {
        "warmup": math.ceil(0.03 * steps),
        "decay": math.ceil(0.2 * steps),
        "eval_every": math.ceil(steps / 10),
        "sample_every": math.ceil(steps / 4),
    }


def resolve_steps(options: O, steps: int) -> O:
    """Fills in the options that depend on the number of steps. `steps` was derived from the data if --steps is 0."""
    follows = of_steps(steps)
    return options.changed(
        steps=steps if options.optim.steps else DerivedSteps(steps),
        warmup=follows["warmup"] if options.optim.warmup < 0 else options.optim.warmup,
        decay=follows["decay"] if options.optim.decay < 0 else options.optim.decay,
        eval_every=options.validation.eval_every or follows["eval_every"],
        sample_every=options.watch.sample_every or follows["sample_every"],
    )


def resolve_remat(options: StepOptions, kept: StateOptions, trained: Trained, mesh: Mesh, held: Any) -> StepOptions:
    """Chooses the fastest remat and microbatches that fit into memory, by the estimates of `train.planning.fit`.

    Prints the choice and the reason in one line. If nothing is estimated to fit, it chooses what needs the
    least memory, since the estimates are rather too high. If JAX does not report the size of the memory, it is dots.

    `held` are the arrays that lie on the devices before a step, or their shapes.
    """
    if options.remat != "auto":
        return options
    candidates = fit.candidates(options, kept, trained, mesh, ahead.device_bytes(held))
    available = device_bytes()
    if available is None or not candidates:
        rich.print("--remat auto is --remat dots: how much memory a device has is not known.")
        return options.changed(remat="dots")
    fitting = [each for each in candidates if each.needed <= fit.MARGIN * available]
    best, fastest = fitting[0] if fitting else min(candidates, key=lambda each: each.needed), candidates[0]
    gb = lambda size: f"{size / 1e9:,.1f} GB"
    why = "the fastest" if best is fastest else f"{fastest}, the fastest, needs about {gb(fastest.needed)}"
    why = why if fitting else "nothing is estimated to fit, and this needs the least"
    rich.print(f"--remat auto is {best}: a device needs about {gb(best.needed)} of {gb(available)}; {why}.")
    return options.changed(remat=best.remat, microbatches=best.microbatches)
