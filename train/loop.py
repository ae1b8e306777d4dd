"""The training loop: starts or resumes a run, takes its steps, and exports the model. All training scripts share it."""

import dataclasses
import functools
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
from rich.markup import escape

import zoo
from train import cluster, folder, report
from train.checkpoint import Checkpoints
from train.mesh import abstract_model, check_mesh, generating, put_batch
from train.metrics import MetricsFile, Progress, flops_per_token
from train.optim import make_optimizer
from train.options import Options
from train.plot import plot_losses
from train.remat import REMAT
from train.state import TrainState, abstract_state, init_state
from train.step import Objective, jit_train_step
from train.stop import StopRequest
from zoo import lora, peft
from zoo.checkpoint import skeleton
from zoo.quantized import quantize_training
from zoo.registry import family_of
from zoo.surgery import cast
from zoo.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class Trained:
    """What is trained: a model, or adapters of one."""

    name: str  # of the model that the run begins with, as in the options
    config: Any
    abstract: Any  # shapes, dtypes and shardings of `make()`
    make: Callable[[], Any]
    frozen: Any = None  # of a model with adapters, all but these (`zoo.lora.split`)


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
    mesh: Mesh
    checkpoints: Checkpoints
    step: Callable[..., tuple[TrainState, dict[str, Any]]]  # compiled, and so is the next
    losses: Callable[[Any, Any, Any], tuple[Any, Any]]  # the objective's count and sums
    schedule: optax.Schedule
    rewarm: dict[str, Any] | None  # see train.optim.rewarmed
    data: Any  # iterator
    state: TrainState
    n: int  # steps that are done
    evaluations: list[list]  # [step, validation loss]

    def model(self) -> Any:
        return lora.joined(self.state.model, self.trained.frozen)

    def best(self) -> int:
        """The step with the lowest validation loss."""
        return min(self.evaluations, key=lambda evaluation: evaluation[1])[0]

    def ended(self) -> bool:
        waited = self.o.patience and self.n - self.best() >= self.o.patience * self.o.eval_every
        return self.n >= self.o.steps or bool(waited)

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
    reason = ""
    metrics, samples = (
        MetricsFile(run.out / name, step=run.n or -1, say=rich.print) for name in ("metrics.jsonl", "samples.jsonl")
    )
    if run.n == 0:
        metrics.write(0, **evaluate(run))
        sample(run, tokenizer, samples)
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
                numbers |= evaluate(run)
            metrics.write(run.n, **numbers, **progress.update(run.n, **numbers))
            if run.due(o.sample_every):
                sample(run, tokenizer, samples)
            if run.due(o.eval_every if o.patience else o.save_every) or reason:
                save(run)
            run.checkpoints.check()
        if reason:
            saved = f"after step {run.n:,}, which is saved"
            rich.print(f"Stopped by {reason} {saved}; the same command goes on from there.")
            return None
        restore_best(run)
    return export(run, tokenizer, identity, metrics.path)


def start(o: Options, trained: Trained, task: Task, mesh: Mesh, identity: Mapping[str, Any]) -> Run | None:
    """The run at its first step, or at that of its last checkpoint. After a dry run, which reports memory, None."""
    family, adapters = family_of(trained.config), trained.frozen is not None
    if o.patience and task.validation is None:
        raise ValueError(f"--patience {o.patience} waits for a lower loss on validation data, and there is none.")
    if o.router_bias_rate and (adapters or family.rebalance is None):
        why = "adapters leave routers alone" if adapters else f"the routers of {family.name} have no biases"
        raise ValueError(f"--router-bias-rate {o.router_bias_rate}, but {why}.")
    rewarm, dtype = None, jnp.dtype(o.compute_dtype)
    optimizer, schedule = make_optimizer(o, task.updates)
    abstract = abstract_state(trained.abstract, optimizer)
    rebalance = family.rebalance if o.router_bias_rate else None
    step = lambda state: jit_train_step(
        state, optimizer=optimizer, schedule=schedule, compute_dtype=dtype, objective=task.objective,
        remat=REMAT[o.remat], microbatches=o.microbatches, router_balance=o.router_balance, router_z=o.router_z,
        rebalance=rebalance and functools.partial(rebalance, rate=o.router_bias_rate),
        neftune=task.neftune,
    )  # fmt: skip
    # A run without --patience does not keep its best checkpoint, so it cannot be resumed with it.
    about = {"identity": dict(identity) | {"patience": o.patience > 0}, "options": folder.telling(o)}
    out = o.out or folder.choose(o.name, about, accept_data=o.accept_data)
    if o.dry_run:
        batch = put_batch(task.example or next(iter(task.data)), mesh)
        report.run(o, out, mesh, abstract, step(abstract), batch, trained.frozen, task.reference)
        return None
    checkpoints = Checkpoints(
        out / "checkpoints", identity=about["identity"], keep=o.keep, say=rich.print, accept_data=o.accept_data
    )
    data, n, evaluations = iter(task.data), 0, []
    if found := checkpoints.restore(abstract):
        state, saved = found
        data.set_state(saved["data"])
        n, evaluations, rewarm = int(state.step) // task.updates, saved["looks"], saved["rewarm"]
        rich.print(f"Going on from step {n:,} of {out}.")
        if changed := folder.changes(saved["options"], about["options"]):
            rich.print(f"Not as before: {changed}.")
        optimizer, schedule = make_optimizer(o, task.updates, rewarm)
        was, now = saved["rate"], rate(schedule, n * task.updates)
        if now > 1.01 * was and n < o.steps:
            if o.rewarm:
                rewarm = {"start": n * task.updates, "rate": was, "steps": o.rewarm * task.updates}
                optimizer, schedule = make_optimizer(o, task.updates, rewarm)
            how = f"over {o.rewarm:,} steps" if o.rewarm else "at once; --rewarm 100 would take 100 steps for it"
            rich.print(f"The learning rate rises from {was:.2g}, where the old schedule was, to {now:.2g} {how}.")
    else:
        state = init_state(trained.make(), optimizer)
    folder.describe(out, about)
    losses = jax.jit(lambda model, batch, reference: task.objective(cast(model, dtype), batch, reference)[1:3])
    return Run(
        o, out, trained, task, mesh, checkpoints, step(state), losses, schedule, rewarm, data, state, n, evaluations
    )


def rate(schedule: optax.Schedule, update: int) -> float:
    return float(jnp.asarray(schedule(update)))


def save(run: Run) -> None:
    """Starts to save a checkpoint. Its JSON says where the run is, and keeps its keys: older runs have them."""
    position = {
        "data": run.data.get_state(),
        "looks": run.evaluations,
        "options": folder.telling(run.o),
        "rewarm": run.rewarm,
        "rate": rate(run.schedule, run.n * run.task.updates),
    }
    best = run.best() * run.task.updates if run.o.patience else None
    run.checkpoints.save(run.state, position, best=best)


def evaluate(run: Run) -> dict[str, float]:
    """The objective's means over the validation data, such as "validation_loss"; nothing without such data."""
    if run.task.validation is None:
        return {}
    found = [
        run.losses(run.model(), put_batch(batch, run.mesh), run.task.reference)
        for _, batch in zip(range(run.o.eval_batches), run.task.validation, strict=False)
    ]
    count, sums = jax.tree.map(lambda *a: sum(map(float, a)), *jax.device_get(found))
    means = {f"validation_{name}": value / count for name, value in sums.items()}
    run.evaluations.append([run.n, means["validation_loss"]])
    return means


def sample(run: Run, tokenizer: Tokenizer, samples: MetricsFile) -> None:
    """Shows how the model continues the prompts."""
    room = run.trained.config.max_position_embeddings - run.o.sample_tokens
    prompts = [prompt[-room:] for prompt in run.task.prompts]
    with generating(run.model(), run.mesh, run.o.compute_dtype) as model:
        texts = zoo.generate(model, tokenizer, prompts, max_new_tokens=run.o.sample_tokens)
    for prompt, text in zip(map(tokenizer.decode, prompts), texts, strict=True):
        rich.print(f"[dim]step {run.n:,}: {escape(prompt)}[/dim][bold]{escape(text)}[/bold]\n")
        samples.write(run.n, prompt=prompt, text=text)


def restore_best(run: Run) -> None:
    """With --patience, goes back to the step with the lowest validation loss."""
    best = run.best() if run.o.patience else run.n
    if run.n < run.o.steps:
        rich.print(f"Validation has not improved since step {best:,}, so the run ends at step {run.n:,}.")
    if best != run.n:
        abstract = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), run.state)
        if found := run.checkpoints.restore(abstract, step=best * run.task.updates):
            run.state, run.n = found[0], best
            rich.print(f"The model of step {best:,} is exported, where validation was best.")
        else:
            rich.print(f"WARNING: step {best:,} was best, but is damaged; the model of step {run.n:,} is exported.")


def export(run: Run, tokenizer: Tokenizer, identity: Mapping[str, Any], metrics: pathlib.Path) -> pathlib.Path:
    """Writes the model, or its adapter, and the curve of the losses. Returns the folder."""
    adapters, out = run.trained.frozen is not None, run.out
    exported = out / ("adapter" if adapters else "model")
    if adapters:
        peft.save(run.model(), exported, base=run.trained.name, over={name: identity[name] for name in peft.OVER})
    else:
        zoo.save(cast(run.state.model, folder.export_dtype(run.trained.config)), exported)
    if jax.process_index():
        return exported
    if not adapters:
        tokenizer.save_eos(exported)
    if len(run.evaluations) > 1:
        losses = {step: loss for step, loss in run.evaluations}
        own = f", {losses[run.n]:.3f} of the {exported.name} that is exported" if run.n in losses else ""
        first = run.evaluations[0][1]
        rich.print(f"Validation loss: {first:.3f} at first, {min(losses.values()):.3f} at best{own}.")
    plot_losses(metrics, out / "loss.png")
    how = f'zoo.peft.load(model, "{exported}")' if adapters else f'zoo.load("{exported}")'
    rich.print(f"The loss curve is {out / 'loss.png'}. The {exported.name} loads with {how}.")
    return exported


def mean_of_updates(updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of a step: means over its updates, but of tokens and targets sums; finite, if all were."""
    together = {"tokens": np.sum, "targets": np.sum, "finite": np.all}
    return {name: together.get(name, np.mean)([update[name] for update in updates]) for name in updates[0]}


def to_train(
    load: Callable[[], Any],
    o: Options,
    name: str,
    config: Any,
    mesh: Mesh,
    *,
    adapters: bool = False,
    parts: Sequence[str] = (),
) -> Trained:
    """What `load()` loads, as what is trained: all of its weights, or its adapters. The mesh must divide it."""
    family, shape = family_of(config), dict(batch=o.batch // o.microbatches, seq_len=o.seq_len)
    check_mesh(mesh, skeleton(family, config, parts), family, **shape)
    prepared = lambda model: model if o.matmul == "float" else quantize_training(model, o.matmul)
    if not adapters:
        abstract = abstract_model(config, family, mesh, parts)
        return Trained(name, config, prepared(abstract), lambda: prepared(load()))
    model, frozen = lora.split(prepared(load()))
    return Trained(name, config, model, lambda: model, frozen)
