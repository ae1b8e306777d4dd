"""Values of options that the user leaves to us: 0, -1 or auto becomes the value that the option's help names."""

import dataclasses
import math
from typing import Any, TypeVar

import jax
import rich
from jax.sharding import Mesh

from kernels.mesh import BATCH
from train.base.runfile import Counted
from train.planning import ahead, fit
from train.run.options import Options
from train.run.report import device_bytes
from train.state import offload
from train.state.state import Lora, Trained
from train.step.microbatches import elastic
from train.watch import trackers
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractConfig


O = TypeVar("O", bound=Options)


def resolve(o: O, config: AbstractConfig, *, width_lr: float, weight_decay: float = 0.1) -> O:
    """Fills in options left at 0, -1 or "auto". `resolve_steps` does those that depend on the number of steps.

    `width_lr` is the learning rate of a model of width 4,096.

    Raises:
        ValueError: the model has fewer positions than --seq-len, or there is no such --tracker.
        ImportError: a tracker's package is not installed.
    """
    trackers.check(o.tracker)
    if o.seq_len > config.max_position_embeddings:
        raise ValueError(f"--seq-len {o.seq_len} exceeds the model's {config.max_position_embeddings} positions.")
    dtype = {"cpu": "float32"}.get(jax.default_backend(), "bfloat16")
    if (processes := jax.process_count()) < o.full_processes:
        shares = math.prod(make_mesh(o.mesh).shape[axis] for axis in BATCH)
        parts = elastic(o.microbatches, rows=o.batch, shares=shares, processes=processes, full=o.full_processes)
        rich.print(f"{processes} of {o.full_processes} processes: a step has {parts} microbatches.")
        o = dataclasses.replace(o, microbatches=parts)
    return dataclasses.replace(
        o,
        seq_len=o.seq_len or min(config.max_position_embeddings, 2048),
        lr=o.lr or width_lr * 4096 / config.hidden_size,
        weight_decay=weight_decay if o.weight_decay < 0 else o.weight_decay,
        compute_dtype=dtype if o.compute_dtype == "auto" else o.compute_dtype,
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


def resolve_steps(o: O, steps: int) -> O:
    """Fills in the options that depend on the number of steps. `steps` was derived from the data if --steps is 0."""
    follows = of_steps(steps)
    return dataclasses.replace(
        o,
        steps=steps if o.steps else Counted(steps),
        warmup=follows["warmup"] if o.warmup < 0 else o.warmup,
        decay=follows["decay"] if o.decay < 0 else o.decay,
        eval_every=o.eval_every or follows["eval_every"],
        sample_every=o.sample_every or follows["sample_every"],
    )


def resolve_remat(o: O, trained: Trained, mesh: Mesh, held: Any) -> O:
    """Chooses the fastest remat and microbatches that fit into memory, by the estimates of `train.planning.fit`.

    Prints the choice and the reason in one line. If nothing is estimated to fit, it chooses the way that needs the
    least memory, since the estimates are rather too high. If JAX does not report the size of the memory, it is dots.

    `held` are the arrays that lie on the devices before a step, or their shapes.
    """
    if o.remat != "auto":
        return o
    ways = fit.ways(
        trained.config, mesh, trained.abstract, ahead.device_bytes(held), rows=o.batch, seq=o.seq_len,
        compute_dtype=o.compute_dtype, frozen=trained.adapters, least=o.microbatches, copied=offload.is_copied(o),
    )  # fmt: skip
    available = device_bytes()
    if available is None or not ways:
        rich.print("--remat auto is --remat dots: how much memory a device has is not known.")
        return dataclasses.replace(o, remat="dots")
    fitting = [way for way in ways if way.needed <= fit.MARGIN * available]
    best = fitting[0] if fitting else min(ways, key=lambda way: way.needed)
    gb = lambda size: f"{size / 1e9:,.1f} GB"
    why = "the fastest" if best is ways[0] else f"{ways[0]}, the fastest, needs about {gb(ways[0].needed)}"
    why = why if fitting else "nothing is estimated to fit, and this needs the least"
    rich.print(f"--remat auto is {best}: a device needs about {gb(best.needed)} of {gb(available)}; {why}.")
    return dataclasses.replace(o, remat=best.remat, microbatches=best.microbatches)
