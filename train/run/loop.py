"""The training loop of all training scripts: it starts or resumes a run, takes its steps, and exports the model."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from jax.sharding import Mesh

from train.base import cluster, profiling, program
from train.base.flops import flops_per_token
from train.base.goodput import timed
from train.base.help import Every
from train.base.stop import StopRequest, stopped
from train.evaluate.validation import Validation
from train.run import folder, replay, report, resume
from train.run.defaults import resolve_remat
from train.run.offending import Guard
from train.run.options import Options
from train.run.twice import twice
from train.run.watchdog import Watchdog
from train.state import optim
from train.state.checkpoint import Checkpoints
from train.state.mesh import put_batch
from train.state.offload import to_device
from train.state.remat import REMAT
from train.state.state import Trained, TrainState, abstract_state, init_state
from train.step.router import rebalancing
from train.step.step import Objective, jit_train_step
from train.watch.metrics import Progress, mean_of_updates
from train.watch.watch import Samples, Watch
from zoo import lora
from zoo.generation.generate import Encoded
from zoo.registry import family_of
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Task:
    """The data and the objective of a run."""

    data: grain.IterDataset  # batches; with a rollout its inputs, such as prompts
    objective: Objective  # for the validation data, too
    reference: Any = None  # another model that the objective gets
    validation: grain.IterDataset | None = None  # elements like those of the data
    prompts: Sequence[Encoded] = ()  # prompts whose continuations are printed as samples
    rollout: Callable[[Any, Any, int], tuple[Sequence[Mapping[str, np.ndarray]], dict[str, float]]] | None = None
    """(the model, an element of the data, the number of the step) -> `updates` batches, and metrics."""
    updates: int = 1
    example: Mapping[str, np.ndarray] | None = None  # a batch of the shapes that a rollout returns, for a dry run
    neftune: float = 0.0  # see `train.step.neftune`


@dataclasses.dataclass
class Run:
    """Everything the loop holds. `data`, `state` and `n` change from step to step."""

    o: Options
    out: pathlib.Path  # the folder that the run writes to
    trained: Trained
    task: Task
    checkpoints: Checkpoints
    validation: Validation
    guard: Guard
    step: Callable[..., tuple[TrainState, dict[str, Any]]]  # compiled
    schedule: optax.Schedule
    rewarm: Mapping[str, Any] | None  # see train.state.optim.rewarmed
    data: Any  # iterator
    state: TrainState
    n: int  # number of steps that are done
    new: bool  # whether the run begins here

    def model(self) -> Any:
        return lora.joined(to_device(self.state.model), self.trained.frozen)

    def ended(self) -> bool:
        return self.n >= self.o.steps or self.validation.waited(self.n)

    def due(self, every: Every) -> bool:
        """Whether the run has ended, or `n` is a multiple of `every`; with 0, whether no checkpoint is being saved."""
        if every == "never":
            return False
        return self.ended() or (self.n % every == 0 if every else self.checkpoints.idle())


def run(
    o: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> pathlib.Path | None:
    """Trains until `o.steps`, from the last checkpoint in `o.out` if there is one, then exports the model.

    Returns the folder of the export; None after a dry run.

    Args:
        identity: all that must not have changed since that checkpoint (`train.run.folder.identity`).

    Raises:
        FloatingPointError: the loss or a gradient is not finite; the state is saved.
        SystemExit: after SIGTERM, Ctrl-C and the like (`train.base.stop`); the state is saved.
    """
    if (run := start(o, trained, task, mesh, tokenizer, identity)) is None:
        return None
    reason, dog, validation, metrics = "", Watchdog(o, run.out, run.n), run.validation, Watch(run)
    samples = Samples(tokenizer, task.prompts, o.sample_tokens, mesh, o.compute_dtype, metrics.sample)
    if run.new:
        if o.eval_every != "never":
            metrics.write(run.n, **validation.evaluate(run.model(), run.n, metrics.wrong))
        if o.sample_every != "never":
            samples.write(run.n, run.model())
        if o.keeps_best:
            save(run)
    left = trained.abstract if o.freeze else None
    flops = flops_per_token(trained.config, o.seq_len, frozen=trained.adapters, trained=left)
    bar = Progress(o.steps, start=run.n, flops_per_token=flops, console=rich.get_console())
    with dog, metrics, run.checkpoints, cluster.watching(), StopRequest(run.out) as stop, bar as progress:
        while not run.ended() and not reason:
            # ---------------------------------------------------------------------------------- a batch, or several
            batches, numbers = [timed("input")(next)(run.data)], {}
            if task.rollout:
                batches, numbers = timed("generation")(task.rollout)(run.model(), batches[0], run.n)
            dog.begin(run.n + 1, batches)
            # -------------------------------------------------------------------------------------- as many updates
            updates: list[Any] = []
            compute = twice(run.step, run.n + 1) if o.replays(run.n + 1) else run.step
            for batch in batches:
                placed = put_batch(batch, mesh, run.state.model, task.reference)
                run.state, update = compute(run.state, placed, trained.frozen, task.reference, run.guard.limits())
                updates.append(update)
            updates, run.n = jax.device_get(updates), run.n + 1
            numbers |= mean_of_updates(updates)
            why, reason = run.guard.look(run, numbers, updates, batches, mesh), stop.agreed()
            numbers |= dog.done(run.n, **numbers)
            # ---------------------------------------------------------------------------- evaluation, logging, saving
            if run.due(o.eval_every):
                numbers |= validation.evaluate(run.model(), run.n, metrics.wrong)
            metrics.write(run.n, **numbers, **progress.update(run.n, **numbers), **metrics.look(run, placed))
            if run.due(o.sample_every):
                samples.write(run.n, run.model())
            shared = run.due(o.eval_every if o.keeps_best else o.save_every) or reason or why
            if shared or o.local_due(run.n):
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


def start(o: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping) -> Run | None:
    """Makes the run, at its first step or at its last checkpoint. Returns None after a dry run, which prints memory."""
    about = folder.about(o, identity)  # from the options as given, since another device may need other microbatches
    optimizer, schedule = optim.make_optimizer(o, task.updates)
    kept: Any = dict(weights_dtype=o.weights_dtype, offload=o.offload)
    abstract = abstract_state(trained.abstract, optimizer, **kept)
    o = resolve_remat(o, trained, mesh, (abstract, trained.frozen, task.reference))
    dtype, rewarm = jnp.dtype(o.compute_dtype), None
    validation = Validation(o, task, trained.config, tokenizer, mesh)
    rebalance = rebalancing(o, family_of(trained.config), adapters=trained.adapters)
    step = lambda state: jit_train_step(
        state, optimizer=optimizer, schedule=schedule, compute_dtype=dtype, objective=task.objective,
        remat=REMAT[o.remat], microbatches=o.microbatches, router_balance=o.router_balance, router_z=o.router_z,
        rebalance=rebalance, neftune=task.neftune,
    )  # fmt: skip
    out = o.out or folder.choose(o.name, about, accept_data=o.accept_data)
    if o.dry_run:
        batch = put_batch(task.example or next(iter(task.data)), mesh, trained.abstract, task.reference)
        report.run(o, out, mesh, abstract, step(abstract), batch, trained.frozen, task.reference)
        return None
    if o.replay:
        return replay.replay(o, step(abstract), abstract, trained, task, mesh)
    checkpoints = resume.checkpoints(o, out, about["identity"])
    weights = lambda: init_state(trained.make(), optimizer, **kept)
    state, saved, new = resume.begin(o, out, checkpoints, abstract, about, task.updates, weights)
    data, n = iter(task.data), int(state.step) // task.updates
    if saved:
        validation.looks = saved["looks"]
        data.set_state(saved["data"] or data.get_state())  # "data" is None if --load-state is of a run with other data
        optimizer, schedule, rewarm = optim.resumed(o, task.updates, n, rate=saved["rate"], rewarm=saved["rewarm"])
    folder.describe(out, about, o)
    compiled = profiling.dumped(o, out, program.loaded(o, step(state), about["options"]))
    guard = Guard(o, out, about["identity"], (saved or {}).get("spikes"))
    return Run(o, out, trained, task, checkpoints, validation, guard, compiled, schedule, rewarm, data, state, n, new)


def save(run: Run, *, only_local: bool = False) -> None:
    """Starts to save a checkpoint. Never rename the keys of its JSON, the place in the data: older runs have them."""
    updates, best = run.task.updates, run.validation.best()
    position = dict(data=run.data.get_state(), looks=run.validation.looks, spikes=run.guard.numbers())
    position |= dict(options=folder.telling(run.o), rewarm=run.rewarm)
    position["rate"] = optim.rate_of(run.schedule, run.n * updates)
    run.checkpoints.save(run.state, position, best=best and best * updates, only_local=only_local)
