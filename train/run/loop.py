"""The training loop of all training scripts: it takes the steps of a run, and exports the model."""

import pathlib
from typing import Any

import jax
import rich

from train.base import cluster
from train.base.stop import StopRequest, stopped
from train.run import folder, report, twice
from train.run.batches import Batches
from train.run.start import Run
from train.state import optim
from train.state.mesh import put_batch
from train.step.norms import jit_norms
from train.watch.metrics import Progress, mean_of_updates


def train(run: Run) -> pathlib.Path:
    """Takes the steps that are left of a run, from `train.run.start.start`, and exports the model. Returns its folder.

    Raises:
        FloatingPointError: the loss or a gradient is not finite; the state is saved.
        SystemExit: after SIGTERM, Ctrl-C and the like (`train.base.stop`); the state is saved.
    """
    task, frozen, watch, dog = run.task, run.trained.frozen, run.watch, run.watchdog
    norms = jit_norms(run.recipe)
    if run.new:
        if run.eval_every != "never":
            watch.write(run.n, **run.validation.evaluate(run.model(), run.n, watch.wrong))
        if run.sample_every != "never":
            run.samples.write(run.n, run.model())
        if run.validation.options.keeps_best:
            save(run)
    bar = Progress(run.steps, start=run.n, flops_per_token=run.flops, console=rich.get_console())
    reason, is_first = "", True
    with (
        dog, watch, run.checkpoints, cluster.watching(), StopRequest(run.out) as stop, bar as progress,
        Batches(run) as source,
    ):  # fmt: skip
        while not run.done() and not reason:
            # ---------------------------------------------------------------------------------- a batch, or several
            batches, numbers, samples = source.take()
            dog.begin(run.n + 1, batches)
            # -------------------------------------------------------------------------------------- as many updates
            step = twice.twice(run.step, run.n + 1) if twice.is_due(run.n + 1) else run.step
            updates: list[Any] = []
            for batch in batches:
                placed = put_batch(batch, run.mesh, run.state.model, task.reference)
                run.state, update = step(run.state, placed, frozen, task.reference, run.guard.limits())
                updates.append(update)
            updates, run.n = jax.device_get(updates), run.n + 1
            numbers |= mean_of_updates(updates)
            why, reason = run.guard.check(run.n, run.state, numbers, updates, batches), stop.agreed()
            numbers |= dog.done(run.n, **numbers)
            source.finish()
            # ---------------------------------------------------------------------------- evaluation, logging, saving
            if run.is_due(run.eval_every):
                numbers |= run.validation.evaluate(run.model(), run.n, watch.wrong)
            numbers |= progress.update(run.n, **numbers)
            if is_first:
                watch.memory(run.memory(run.state, placed))
                is_first = False
            if watch.norms_due(run.n):
                found = norms(run.parameters(), frozen, placed, task.reference)
                numbers |= {name: float(value) for name, value in jax.device_get(found).items()}
            watch.write(run.n, **numbers)
            if run.is_due(run.sample_every):
                run.samples.write(run.n, run.model())
                for sample in samples:
                    watch.sample(run.n, **sample)
            shared = run.is_due(run.save_every) or reason or why
            if shared or run.checkpoints.local_due(run.n):
                save(run, only_local=not shared)
            run.checkpoints.check()
            if why:
                raise FloatingPointError(why)
        if not reason:
            run.state, run.n = run.validation.restore_best(run.checkpoints, run.state, run.n, task.updates)
    if reason:
        stopped(reason, run.n)
    exported = folder.export(run.out, run.model(), run.trained, run.tokenizer, run.manifest["identity"])
    report.result(exported, run.n, run.validation, watch.path, head=run.trained.abstract.head)
    return exported


def save(run: Run, *, only_local: bool = False) -> None:
    """Starts to save a checkpoint. Never rename the keys of its JSON, the place in the data: older runs have them."""
    updates, best = run.task.updates, run.validation.best()
    position = dict(data=run.data.get_state(), looks=run.validation.evaluations, spikes=run.guard.numbers())
    position |= dict(options=run.manifest["options"], rate=optim.rate_of(run.recipe.schedule, run.n * updates))
    run.checkpoints.save(run.state, position, best=best and best * updates, only_local=only_local)
