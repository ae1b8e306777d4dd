"""The training loop of all training scripts: it starts or resumes a run, takes its steps, and exports the model."""

import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import rich
from jax.sharding import Mesh

from train.base import cluster
from train.base.flops import flops_per_token
from train.base.goodput import timed
from train.base.profiling import Profile
from train.base.stop import StopRequest, stopped
from train.run import folder, report
from train.run.options import Options
from train.run.start import Run, start
from train.run.twice import twice
from train.run.watchdog import Watchdog
from train.state import optim
from train.state.mesh import put_batch
from train.state.offload import to_device
from train.state.state import Trained
from train.step.norms import jit_norms
from train.step.task import Task
from train.watch.memory import breakdown
from train.watch.metrics import Progress, mean_of_updates
from train.watch.watch import Samples, Watch
from zoo.text.tokenizer import Tokenizer


def run(
    options: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> pathlib.Path | None:
    """Trains until --steps, from the last checkpoint in the run's folder if there is one, then exports the model.

    Returns the folder of the export; None after a dry run.

    Args:
        identity: all that must not have changed since that checkpoint (`train.run.folder.identity`).

    Raises:
        FloatingPointError: the loss or a gradient is not finite; the state is saved.
        SystemExit: after SIGTERM, Ctrl-C and the like (`train.base.stop`); the state is saved.
    """
    if (run := start(options, trained, task, mesh, tokenizer, identity)) is None:
        return None
    options, validation = run.options, run.validation
    dog = Watchdog(options.watchdog, Profile(options.profiling, run.out), run.out, run.n)
    metrics, norms = Watch(options.watch, run.out, run.n, new=run.new), jit_norms(run.recipe)
    samples = Samples(
        tokenizer, task.prompts, options.watch.sample_tokens, mesh, options.step.compute_dtype, metrics.sample
    )
    eval_every, keeps_best = options.validation.eval_every, options.validation.keeps_best
    sample_every = options.watch.sample_every
    if run.new:
        if eval_every != "never":
            metrics.write(run.n, **validation.evaluate(run.model(), run.n, metrics.wrong))
        if sample_every != "never":
            samples.write(run.n, run.model())
        if keeps_best:
            save(run)
    left = trained.abstract if options.freeze else None
    flops = flops_per_token(trained.config, options.step.seq_len, frozen=trained.adapters, trained=left)
    bar = Progress(options.optim.steps, start=run.n, flops_per_token=flops, console=rich.get_console())
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
            compute = twice(run.step, run.n + 1) if options.offending.replays(run.n + 1) else run.step
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
                metrics.memory(breakdown(run.state, trained, task.reference, placed, options.step, options.state))
                is_first = False
            if options.watch.norms_due(run.n):
                found = norms(to_device(run.state.model), trained.frozen, placed, task.reference)
                numbers |= {name: float(value) for name, value in jax.device_get(found).items()}
            metrics.write(run.n, **numbers)
            if run.is_due(sample_every):
                samples.write(run.n, run.model())
            shared = run.is_due(eval_every if keeps_best else options.checkpoints.save_every) or reason or why
            if shared or options.local.is_due(run.n):
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


def save(run: Run, *, only_local: bool = False) -> None:
    """Starts to save a checkpoint. Never rename the keys of its JSON, the place in the data: older runs have them."""
    updates, best = run.task.updates, run.validation.best()
    position = dict(data=run.data.get_state(), looks=run.validation.evaluations, spikes=run.guard.numbers())
    position |= dict(options=folder.defining_options(run.options), rewarm=run.rewarm)
    position["rate"] = optim.rate_of(run.recipe.schedule, run.n * updates)
    run.checkpoints.save(run.state, position, best=best and best * updates, only_local=only_local)
