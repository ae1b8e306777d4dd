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

    options: Options
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
        return lora.combine(to_device(self.state.model), self.trained.frozen)

    def done(self) -> bool:
        return self.n >= self.options.optim.steps or self.validation.out_of_patience(self.n)

    def is_due(self, every: Every) -> bool:
        """Whether the run is done, or `n` is a multiple of `every`; with 0, whether no checkpoint is being saved."""
        if every == "never":
            return False
        return self.done() or (self.n % every == 0 if every else self.checkpoints.idle())


def start(
    options: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> Run | None:
    """Makes the run, at its first step or at its last checkpoint. Returns None after a dry run, which prints memory."""
    manifest = folder.run_manifest(options, identity)  # before --remat auto, which differs from device to device
    optimizer, schedule = optim.make_optimizer(options.optim, task.updates)
    abstract, router = abstract_state(trained.abstract, optimizer, options.state), options.router
    held = abstract, trained.frozen, task.reference
    options = options.changed(step=resolve_remat(options.step, options.state, trained, mesh, held))
    validation = Validation(options.validation, task, trained.config, tokenizer, mesh, options.step.compute_dtype)
    recipe = Recipe(
        optimizer=optimizer, schedule=schedule, compute_dtype=jnp.dtype(options.step.compute_dtype),
        objective=task.objective, remat=REMAT[options.step.remat], microbatches=options.step.microbatches,
        router_balance=router.router_balance, router_z=router.router_z,
        rebalance=rebalancing(router, family_of(trained.config), adapters=trained.adapters), neftune=task.neftune,
    )  # fmt: skip
    out = folder.run_folder(options, manifest)
    if options.dry_run:
        batch = put_batch(task.example or next(iter(task.data)), mesh, trained.abstract, task.reference)
        step = jit_train_step(abstract, recipe)
        report.run(options, out, mesh, abstract, step, batch, trained.frozen, task.reference)
        return None
    if options.offending.replay:
        step = jit_train_step(abstract, recipe)
        return replay.replay(options.offending, step, abstract, trained, task.reference, mesh)
    checkpoints = resume.checkpoints(options, out, manifest["identity"])
    weights = lambda: init_state(trained.make(), optimizer, options.state)
    state, saved, new = resume.begin(options, out, checkpoints, abstract, manifest, task.updates, weights)
    data, n, rewarm = iter(task.data), int(state.step) // task.updates, None
    if saved:
        validation.evaluations = saved["looks"]
        data.set_state(saved["data"] or data.get_state())  # "data" is None if --load-state is of a run with other data
        optimizer, schedule, rewarm = optim.resumed(
            options.optim, task.updates, n, rate=saved["rate"], rewarm=saved["rewarm"]
        )
        recipe = dataclasses.replace(recipe, optimizer=optimizer, schedule=schedule)
    folder.write_manifest(out, manifest, options)
    step = jit_train_step(state, recipe)
    if options.step.program:
        told = program.explaining(
            manifest["options"], model=trained.name, remat=options.step.remat, microbatches=options.step.microbatches
        )
        step = program.loaded(options.step.program, step, told)
    guard = SpikeGuard(
        options.offending, f"train.{options.name}", out, manifest["identity"], (saved or {}).get("spikes")
    )
    return Run(options, out, trained, task, checkpoints, validation, guard, step, recipe, rewarm, data, state, n, new)
