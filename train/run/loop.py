"""The training loop of all training scripts: it starts or resumes a run, takes its steps, and exports the model."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import rich
from jax.sharding import Mesh

from train.base import cluster, program
from train.base.flops import flops_per_token
from train.base.goodput import timed
from train.base.options import Every
from train.base.profiling import Profile
from train.base.stop import StopRequest, stopped
from train.evaluate.validation import Validation
from train.run import folder, replay, report, resume
from train.run.defaults import resolve_remat
from train.run.offending import SpikeGuard
from train.run.options import Options
from train.run.twice import twice
from train.run.watchdog import Watchdog
from train.state import optim
from train.state.checkpoint import Checkpoints
from train.state.mesh import put_batch
from train.state.offload import to_device
from train.state.remat import REMAT
from train.state.state import Trained, TrainState, abstract_state, init_state
from train.step.norms import jit_norms
from train.step.router import rebalancing
from train.step.step import Recipe, jit_train_step
from train.step.task import Task
from train.watch.memory import breakdown
from train.watch.metrics import Progress, mean_of_updates
from train.watch.watch import Samples, Watch
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


def run(
    o: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> pathlib.Path | None:
    """Trains until --steps, from the last checkpoint in the run's folder if there is one, then exports the model.

    Returns the folder of the export; None after a dry run.

    Args:
        identity: all that must not have changed since that checkpoint (`train.run.folder.identity`).

    Raises:
        FloatingPointError: the loss or a gradient is not finite; the state is saved.
        SystemExit: after SIGTERM, Ctrl-C and the like (`train.base.stop`); the state is saved.
    """
    if (run := start(o, trained, task, mesh, tokenizer, identity)) is None:
        return None
    o, validation = run.o, run.validation
    dog = Watchdog(o.watchdog, Profile(o.profiling, run.out), run.out, run.n)
    metrics, norms = Watch(o.watch, run.out, run.n, new=run.new), jit_norms(run.recipe)
    samples = Samples(tokenizer, task.prompts, o.watch.sample_tokens, mesh, o.step.compute_dtype, metrics.sample)
    eval_every, sample_every, keeps_best = o.validation.eval_every, o.watch.sample_every, o.validation.keeps_best
    if run.new:
        if eval_every != "never":
            metrics.write(run.n, **validation.evaluate(run.model(), run.n, metrics.wrong))
        if sample_every != "never":
            samples.write(run.n, run.model())
        if keeps_best:
            save(run)
    left = trained.abstract if o.freeze else None
    flops = flops_per_token(trained.config, o.step.seq_len, frozen=trained.adapters, trained=left)
    bar = Progress(o.optim.steps, start=run.n, flops_per_token=flops, console=rich.get_console())
    reason, is_first = "", True
    with dog, metrics, run.checkpoints, cluster.watching(), StopRequest(run.out) as stop, bar as progress:
        while not run.done() and not reason:
            # ---------------------------------------------------------------------------------- a batch, or several
            batches, numbers = [timed("input")(next)(run.data)], {}
            if task.rollout:
                batches, numbers = timed("generation")(task.rollout)(run.model(), batches[0], run.n)
            dog.begin(run.n + 1, batches)
            # -------------------------------------------------------------------------------------- as many updates
            updates: list[Any] = []
            compute = twice(run.step, run.n + 1) if o.offending.replays(run.n + 1) else run.step
            for batch in batches:
                placed = put_batch(batch, mesh, run.state.model, task.reference)
                run.state, update = compute(run.state, placed, trained.frozen, task.reference, run.guard.limits())
                updates.append(update)
            updates, run.n = jax.device_get(updates), run.n + 1
            numbers |= mean_of_updates(updates)
            why, reason = run.guard.check(run.n, run.state, numbers, updates, batches), stop.agreed()
            numbers |= dog.done(run.n, **numbers)
            # ---------------------------------------------------------------------------- evaluation, logging, saving
            if run.is_due(eval_every):
                numbers |= validation.evaluate(run.model(), run.n, metrics.wrong)
            numbers |= progress.update(run.n, **numbers)
            if is_first:
                metrics.memory(breakdown(run.state, trained, task.reference, placed, o.step, o.state))
                is_first = False
            if o.watch.norms_due(run.n):
                found = norms(to_device(run.state.model), trained.frozen, placed, task.reference)
                numbers |= {name: float(value) for name, value in jax.device_get(found).items()}
            metrics.write(run.n, **numbers)
            if run.is_due(sample_every):
                samples.write(run.n, run.model())
            shared = run.is_due(eval_every if keeps_best else o.checkpoints.save_every) or reason or why
            if shared or o.local.is_due(run.n):
                save(run, only_local=not shared)
            run.checkpoints.check()
            if why:
                raise FloatingPointError(why)
        if not reason:
            run.state, run.n = validation.restore_best(run.checkpoints, run.state, run.n, task.updates)
    if reason:
        stopped(reason, run.n)
    exported = folder.export(run.out, run.model(), trained, tokenizer, identity)
    report.result(exported, run.n, validation, metrics.path)
    return exported


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


def save(run: Run, *, only_local: bool = False) -> None:
    """Starts to save a checkpoint. Never rename the keys of its JSON, the place in the data: older runs have them."""
    updates, best = run.task.updates, run.validation.best()
    position = dict(data=run.data.get_state(), looks=run.validation.evaluations, spikes=run.guard.numbers())
    position |= dict(options=folder.defining_options(run.o), rewarm=run.rewarm)
    position["rate"] = optim.rate_of(run.recipe.schedule, run.n * updates)
    run.checkpoints.save(run.state, position, best=best and best * updates, only_local=only_local)
