"""The start of a run: everything that its loop holds, at the first step or at the last checkpoint."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh

from train.base import program
from train.base.options import Every
from train.evaluate.validation import Validation
from train.run import folder, replay, report, resume
from train.run.defaults import resolve_remat
from train.run.offending import SpikeGuard
from train.run.options import Options
from train.state import optim
from train.state.checkpoint import Checkpoints
from train.state.mesh import put_batch
from train.state.offload import to_device
from train.state.remat import REMAT
from train.state.state import Trained, TrainState, abstract_state, init_state
from train.step.router import rebalancing
from train.step.step import Recipe, jit_train_step
from train.step.task import Task
from zoo import lora
from zoo.registry import family_of
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass
class Run:
    """Everything the loop holds. `data`, `state` and `n` change from step to step."""

    o: Options
    out: pathlib.Path  # the folder that the run writes to
    trained: Trained
    task: Task
    checkpoints: Checkpoints
    validation: Validation
    guard: SpikeGuard
    step: Callable[..., tuple[TrainState, dict[str, Any]]]  # compiled
    recipe: Recipe
    rewarm: Mapping[str, Any] | None  # see train.state.optim.rewarmed
    data: Any  # iterator
    state: TrainState
    n: int  # number of steps that are done
    new: bool  # whether the run begins here

    def model(self) -> Any:
        return lora.joined(to_device(self.state.model), self.trained.frozen)

    def done(self) -> bool:
        return self.n >= self.o.optim.steps or self.validation.out_of_patience(self.n)

    def is_due(self, every: Every) -> bool:
        """Whether the run is done, or `n` is a multiple of `every`; with 0, whether no checkpoint is being saved."""
        if every == "never":
            return False
        return self.done() or (self.n % every == 0 if every else self.checkpoints.idle())


def start(
    o: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> Run | None:
    """Makes the run, at its first step or at its last checkpoint. Returns None after a dry run, which prints memory."""
    manifest = folder.run_manifest(o, identity)  # of the options as given: another device may need other microbatches
    optimizer, schedule = optim.make_optimizer(o.optim, task.updates)
    abstract = abstract_state(trained.abstract, optimizer, o.state)
    o = o.changed(step=resolve_remat(o.step, o.state, trained, mesh, (abstract, trained.frozen, task.reference)))
    validation = Validation(o.validation, task, trained.config, tokenizer, mesh, o.step.compute_dtype)
    recipe = Recipe(
        optimizer=optimizer, schedule=schedule, compute_dtype=jnp.dtype(o.step.compute_dtype),
        objective=task.objective, remat=REMAT[o.step.remat], microbatches=o.step.microbatches,
        router_balance=o.router.router_balance, router_z=o.router.router_z,
        rebalance=rebalancing(o.router, family_of(trained.config), adapters=trained.adapters), neftune=task.neftune,
    )  # fmt: skip
    out = folder.run_folder(o, manifest)
    if o.dry_run:
        batch = put_batch(task.example or next(iter(task.data)), mesh, trained.abstract, task.reference)
        report.run(o, out, mesh, abstract, jit_train_step(abstract, recipe), batch, trained.frozen, task.reference)
        return None
    if o.offending.replay:
        return replay.replay(o.offending, jit_train_step(abstract, recipe), abstract, trained, task.reference, mesh)
    checkpoints = resume.checkpoints(o, out, manifest["identity"])
    weights = lambda: init_state(trained.make(), optimizer, o.state)
    state, saved, new = resume.begin(o, out, checkpoints, abstract, manifest, task.updates, weights)
    data, n, rewarm = iter(task.data), int(state.step) // task.updates, None
    if saved:
        validation.evaluations = saved["looks"]
        data.set_state(saved["data"] or data.get_state())  # "data" is None if --load-state is of a run with other data
        optimizer, schedule, rewarm = optim.resumed(
            o.optim, task.updates, n, rate=saved["rate"], rewarm=saved["rewarm"]
        )
        recipe = dataclasses.replace(recipe, optimizer=optimizer, schedule=schedule)
    folder.write_manifest(out, manifest, o)
    step = jit_train_step(state, recipe)
    if o.step.program:
        told = program.explaining(
            manifest["options"], model=trained.name, remat=o.step.remat, microbatches=o.step.microbatches
        )
        step = program.loaded(o.step.program, step, told)
    guard = SpikeGuard(o.offending, f"train.{o.name}", out, manifest["identity"], (saved or {}).get("spikes"))
    return Run(o, out, trained, task, checkpoints, validation, guard, step, recipe, rewarm, data, state, n, new)
