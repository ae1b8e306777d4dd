"""The training loop: starts or resumes a run, takes its steps, and exports the model. All training scripts share it."""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
from jax.sharding import Mesh

from train import cluster, folder, optim, report
from train.checkpoint import Checkpoints
from train.defaults import resolve_remat
from train.mesh import put_batch
from train.metrics import MetricsFile, Progress, flops_per_token, mean_of_updates
from train.options import Options
from train.remat import REMAT
from train.router import rebalancing
from train.samples import Samples
from train.state import Trained, TrainState, abstract_state, init_state
from train.step import Objective, jit_train_step
from train.stop import StopRequest
from train.validation import Validation
from zoo import lora
from zoo.registry import family_of
from zoo.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Task:
    """What is learnt, and from what."""

    data: grain.IterDataset  # batches; with a rollout what that begins with, such as prompts
    objective: Objective  # of the validation data too
    reference: Any = None  # another model that the objective gets
    validation: grain.IterDataset | None = None
    prompts: Sequence[Sequence[int]] = ()  # tokens whose continuations are shown from time to time
    rollout: Callable[[Any, Any, int], tuple[Sequence[Mapping[str, np.ndarray]], dict[str, float]]] | None = None
    """(the model, an element of the data, the number of the step) -> `updates` batches, and metrics."""
    updates: int = 1
    example: Mapping[str, np.ndarray] | None = None  # a batch of the shapes that a rollout returns, for a dry run
    neftune: float = 0.0  # see train.neftune


@dataclasses.dataclass
class Run:
    """A run between two of its steps. What changes comes last."""

    o: Options
    out: pathlib.Path  # the folder that it writes to
    trained: Trained
    task: Task
    checkpoints: Checkpoints
    validation: Validation
    step: Callable[..., tuple[TrainState, dict[str, Any]]]  # compiled
    schedule: optax.Schedule
    rewarm: Mapping[str, Any] | None  # see train.optim.rewarmed
    data: Any  # iterator
    state: TrainState
    n: int  # steps that are done

    def model(self) -> Any:
        return lora.joined(self.state.model, self.trained.frozen)

    def ended(self) -> bool:
        return self.n >= self.o.steps or self.validation.waited(self.n)

    def due(self, every: int) -> bool:
        return self.n % every == 0 or self.ended()


def run(
    o: Options, trained: Trained, task: Task, mesh: Mesh, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> pathlib.Path | None:
    """Trains until `o.steps`, from the last checkpoint in `o.out` if there is one, then exports the model.

    Returns the folder of the export; None after a dry run, and after SIGTERM or Ctrl-C, which save the state.

    Args:
        identity: what must not have changed since that checkpoint (`train.folder.identity`).

    Raises:
        FloatingPointError: if the loss or a gradient is not finite; the state before that step is saved.
    """
    if (run := start(o, trained, task, mesh, identity)) is None:
        return None
    reason, validation = "", run.validation
    metrics, texts = (MetricsFile(run.out / f"{name}.jsonl", step=run.n or -1) for name in ("metrics", "samples"))
    samples = Samples(tokenizer, task.prompts, o.sample_tokens, mesh, o.compute_dtype, texts)
    if run.n == 0:
        metrics.write(0, **validation.evaluate(run.model(), 0))
        samples.write(0, run.model())
        if o.patience:
            save(run)
    flops = flops_per_token(trained.config, o.seq_len, frozen=trained.frozen is not None)
    bar = Progress(o.steps, start=run.n, flops_per_token=flops, console=rich.get_console())
    with run.checkpoints, cluster.watching(), StopRequest() as stop, bar as progress:
        while not run.ended() and not reason:
            # ---------------------------------------------------------------------------------- a batch, or several
            batches, numbers = [next(run.data)], {}
            if task.rollout:
                batches, numbers = task.rollout(run.model(), batches[0], run.n)
            cluster.passing()
            # -------------------------------------------------------------------------------------- as many updates
            updates, started = [], time.monotonic()
            for batch in batches:
                run.state, update = run.step(run.state, put_batch(batch, mesh), trained.frozen, task.reference)
                updates.append(update)
            numbers |= mean_of_updates(jax.device_get(updates))
            if task.rollout:
                numbers["training_tokens_per_second"] = float(numbers["tokens"] / (time.monotonic() - started))
            if not numbers.pop("finite"):
                save(run)
                raise FloatingPointError(
                    f"The loss ({numbers['loss']}) or a gradient is not finite at step {run.n + 1}; the state of step "
                    f"{run.n} is in {run.checkpoints.folder}. Lower --lr, or look at the data."
                )
            run.n, reason = run.n + 1, stop.agreed()
            # ------------------------------------------------------------------------------ and what is done at times
            if run.due(o.eval_every):
                numbers |= validation.evaluate(run.model(), run.n)
            metrics.write(run.n, **numbers, **progress.update(run.n, **numbers))
            if run.due(o.sample_every):
                samples.write(run.n, run.model())
            if run.due(o.eval_every if o.patience else o.save_every) or reason:
                save(run)
            run.checkpoints.check()
        if reason:
            rich.print(f"Stopped by {reason} after step {run.n:,}, which is saved; the same command goes on from it.")
            return None
        run.state, run.n = validation.restore_best(run.checkpoints, run.state, run.n, task.updates)
    exported = folder.export(run.out, run.model(), trained, tokenizer, identity)
    report.result(exported, run.n, validation.looks, metrics.path)
    return exported


def start(o: Options, trained: Trained, task: Task, mesh: Mesh, identity: Mapping[str, Any]) -> Run | None:
    """The run at its first step, or at that of its last checkpoint. After a dry run, which reports memory, None."""
    about = folder.about(o, identity)  # of the options as given: another device may need other microbatches
    optimizer, schedule = optim.make_optimizer(o, task.updates)
    abstract = abstract_state(trained.abstract, optimizer)
    o = resolve_remat(o, trained, mesh, (abstract, trained.frozen, task.reference))
    dtype, rewarm = jnp.dtype(o.compute_dtype), None
    validation = Validation(o, task.validation, task.objective, mesh, dtype, task.reference)
    rebalance = rebalancing(o, family_of(trained.config), adapters=trained.frozen is not None)
    step = lambda state: jit_train_step(
        state, optimizer=optimizer, schedule=schedule, compute_dtype=dtype, objective=task.objective,
        remat=REMAT[o.remat], microbatches=o.microbatches, router_balance=o.router_balance, router_z=o.router_z,
        rebalance=rebalance, neftune=task.neftune,
    )  # fmt: skip
    out = o.out or folder.choose(o.name, about, accept_data=o.accept_data)
    if o.dry_run:
        batch = put_batch(task.example or next(iter(task.data)), mesh)
        report.run(o, out, mesh, abstract, step(abstract), batch, trained.frozen, task.reference)
        return None
    checkpoints = Checkpoints(out / "checkpoints", identity=about["identity"], keep=o.keep, accept_data=o.accept_data)
    data, n = iter(task.data), 0
    if found := checkpoints.restore(abstract):
        state, saved = found
        data.set_state(saved["data"])
        n, validation.looks = int(state.step) // task.updates, saved["looks"]
        rich.print(f"Going on from step {n:,} of {out}.")
        if changed := folder.changes(saved["options"], about["options"]):
            rich.print(f"Not as before: {changed}.")
        optimizer, schedule, rewarm = optim.resumed(o, task.updates, n, rate=saved["rate"], rewarm=saved["rewarm"])
    else:
        state = init_state(trained.make(), optimizer)
    folder.describe(out, about)
    return Run(o, out, trained, task, checkpoints, validation, step(state), schedule, rewarm, data, state, n)


def save(run: Run) -> None:
    """Starts to save a checkpoint. Its JSON says where the run is, and keeps its keys: older runs have them."""
    updates, best = run.task.updates, run.validation.best()
    position = {
        "data": run.data.get_state(),
        "looks": run.validation.looks,
        "options": folder.telling(run.o),
        "rewarm": run.rewarm,
        "rate": optim.rate_of(run.schedule, run.n * updates),
    }
    run.checkpoints.save(run.state, position, best=None if best is None else best * updates)
