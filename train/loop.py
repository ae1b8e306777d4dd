"""What every training script shares: where its state comes from, its loop, and what it leaves behind.

Scripts put these together: data and model are theirs, and so is what a step does.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import pathlib
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import grain
import jax
import jax.numpy as jnp
import numpy as np
import rich
import tyro
from jax.sharding import Mesh
from jax.typing import DTypeLike
from rich.markup import escape

import zoo
from train import cluster, folder, report
from train.checkpoint import Checkpoints
from train.data.packing import Example
from train.mesh import check_mesh, put_batch, without_stages
from train.metrics import MetricsFile, Progress, flops_per_token
from train.optim import make_optimizer
from train.options import Options, changes, telling
from train.plot import plot_losses
from train.state import abstract_state, init_state
from train.step import REMAT, Batch, Objective, jit_train_step, targets_of
from train.stop import StopRequest
from zoo import lora, peft
from zoo.checkpoint import skeleton
from zoo.config import write as write_config
from zoo.nn.model import Family
from zoo.quantized import quantize_training
from zoo.registry import family_of
from zoo.surgery import cast, shardings
from zoo.tokenizer import Tokenizer


Experience = Callable[[Any, Any, int], tuple[Sequence[Mapping[str, np.ndarray]], dict[str, float]]]


def resolve(o: Any, config: Any, steps: int, width_lr: float) -> Any:
    """`o` with numbers for all that was left to us. `width_lr` is the learning rate of a model of width 4,096."""
    changes = {
        "steps": steps,
        "lr": o.lr or width_lr * 4096 / config.hidden_size,
        "warmup": math.ceil(0.03 * steps) if o.warmup < 0 else o.warmup,
        "decay": math.ceil(0.2 * steps) if o.decay < 0 else o.decay,
        "weight_decay": 0.1 if o.weight_decay < 0 else o.weight_decay,
        "eval_every": o.eval_every or math.ceil(steps / 10),
        "sample_every": o.sample_every or math.ceil(steps / 4),
    }
    return dataclasses.replace(o, compute_dtype=compute_dtype(o), **changes)


def compute_dtype(o: Options) -> str:
    """What --compute-dtype stands for on these devices."""
    return {"cpu": "float32"}.get(jax.default_backend(), "bfloat16") if o.compute_dtype == "auto" else o.compute_dtype


def row_length(o: Options, config: Any) -> int:
    """Tokens of a row.

    Raises:
        ValueError: if the model has fewer positions.
    """
    if o.seq_len > config.max_position_embeddings:
        raise ValueError(f"--seq-len {o.seq_len} exceeds the model's {config.max_position_embeddings} positions.")
    return o.seq_len or min(config.max_position_embeddings, 2048)


def count(data: grain.IterDataset) -> int:
    """How many batches there are, found by making them all."""
    with rich.get_console().status("Counting the batches of all epochs (--steps skips this)"):
        return sum(1 for _ in data)


def identity(o: Any, config: Any, family: Family, data: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that goes on with it; also all that its export needs."""
    model = str(pathlib.Path(o.model).resolve()) if pathlib.Path(o.model).is_dir() else o.model
    hub = write_config(config, family, export_dtype(config))
    return {"model": model, "config": hub, "data": dict(data)}


def abstract_model(config: Any, family: Family, mesh: Mesh, *, mtp: bool) -> Any:
    """The shapes of a model's float32 parameters, and where on the mesh they lie."""
    model = skeleton(family, config, mtp=mtp)
    places = shardings(model, family.partition_rules, mesh)
    return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), model, places)


def run(
    o: Any,
    *,
    config: Any,
    family: Family,
    mesh: Mesh,
    tokenizer: Tokenizer,
    make_model: Callable[[], Any],
    data: grain.IterDataset,
    objective: Objective,
    identity: Mapping[str, Any],
    validation: grain.IterDataset | None = None,
    prompts: Sequence[Sequence[int]] = (),
    count: Callable[[Batch], Any] = targets_of,
    others: Any = None,
    experience: Experience | None = None,
    example: Mapping[str, np.ndarray] | None = None,
    updates: int = 1,
    mtp: bool = False,
    adapters: bool = False,
    neftune: float = 0.0,
    two_passes: bool = False,
) -> pathlib.Path | None:
    """Trains `make_model()`, or goes on with the last checkpoint in `o.out`, until `o.steps`; then exports the model.

    Returns the folder of the export. A SIGTERM or Ctrl-C saves and returns None, and so does a dry run.

    Args:
        identity: what must not have changed since that checkpoint.
        objective, count, others, two_passes: see `train.step.train_step`; the validation data is measured by them too.
        prompts: what to show continuations of, from time to time.
        experience: makes of the model, an element of `data` and the number of the step what to learn from, in `updates`
            batches, such as `example`. Without it, every element of `data` is a batch.
        mtp: the model has the module that predicts one more token.
        adapters: it has adapters, and these are what is trained, kept in checkpoints, and exported.

    Raises:
        FloatingPointError: if the loss or a gradient is not finite; the state before that step is saved.
    """
    # ---------------------------------------------------------------------------------------------- state, new or old
    if o.patience and validation is None:
        raise ValueError(f"--patience {o.patience} waits for a lower loss on validation data, and there is none.")
    check_mesh(mesh, skeleton(family, config, mtp=mtp), family, batch=o.batch // o.microbatches, seq_len=o.seq_len)
    optimizer, schedule = make_optimizer(o, updates)
    prepared = lambda model: model if o.matmul == "float" else quantize_training(model, o.matmul)
    dtype, frozen = jnp.dtype(o.compute_dtype), None
    if adapters:
        trained, frozen = lora.split(prepared(make_model()))
        abstract, fresh = abstract_state(trained, optimizer), lambda: init_state(trained, optimizer)
    else:
        abstract = abstract_state(prepared(abstract_model(config, family, mesh, mtp=mtp)), optimizer)
        fresh = lambda: init_state(prepared(make_model()), optimizer)
    if o.router_bias_rate and (adapters or family.rebalance is None):
        why = "adapters leave routers alone" if adapters else f"the routers of {family.name} have no biases"
        raise ValueError(f"--router-bias-rate {o.router_bias_rate}, but {why}.")
    rebalance = functools.partial(family.rebalance, rate=o.router_bias_rate) if family.rebalance else None
    step = lambda state: jit_train_step(
        state, optimizer=optimizer, schedule=schedule, compute_dtype=dtype, objective=objective, count=count,
        remat=REMAT[o.remat], microbatches=o.microbatches, router_balance=o.router_balance, router_z=o.router_z,
        rebalance=rebalance, neftune=neftune, two_passes=two_passes,
    )  # fmt: skip
    identity = dict(identity) | {"patience": o.patience > 0}  # without it, that of the best look may not be kept
    about = {"identity": identity, "options": telling(o)}
    o = dataclasses.replace(o, out=o.out or folder.choose(o.name, about, accept_data=o.accept_data))
    if o.dry_run:
        report.rows(
            "Run", {"steps": f"{o.steps:,}", "tokens a step": f"{o.batch * o.seq_len:,}", "peak learning rate": o.lr}
        )
        batch = put_batch(example or next(iter(data)), mesh)
        report.rows("Memory of a device", report.memory(step(abstract), abstract, batch, frozen, others))
        report.rows("Disk", report.disk(o.out, abstract, o.keep + (o.patience > 0)))
        report.rows("Mesh", report.mesh(mesh))
        return None
    checkpoints = Checkpoints(
        o.out / "checkpoints", identity=identity, keep=o.keep, say=rich.print, accept_data=o.accept_data
    )
    iterator, looks, rewarm = iter(data), [], None
    if found := checkpoints.restore(abstract):
        state, position = found
        iterator.set_state(position["data"])
        n, looks = int(state.step) // updates, position["looks"]
        rich.print(f"Going on from step {n:,} of {o.out}.")
        if others_now := changes(position["options"], telling(o)):
            rich.print(f"Not as before: {others_now}.")
        if rewarm := position["rewarm"]:
            optimizer, schedule = make_optimizer(o, updates, rewarm)
        was, now = position["rate"], float(jnp.asarray(schedule(n * updates)))
        if now > 1.01 * was and n < o.steps:
            if o.rewarm:
                rewarm = {"start": n * updates, "rate": was, "steps": o.rewarm * updates}
                optimizer, schedule = make_optimizer(o, updates, rewarm)
            how = f"over {o.rewarm:,} steps" if o.rewarm else "at once; --rewarm 100 would take 100 steps for it"
            rich.print(f"The learning rate rises from {was:.2g}, where the old schedule was, to {now:.2g} {how}.")
    else:
        state, n = fresh(), 0
    folder.describe(o.out, about)
    step = step(state)
    metrics, samples = (
        MetricsFile(o.out / name, step=n or -1, say=rich.print) for name in ("metrics.jsonl", "samples.jsonl")
    )
    best = lambda: min(looks, key=lambda look: look[1])[0]
    save = lambda: checkpoints.save(
        state,
        {
            "data": iterator.get_state(),
            "looks": looks,
            "options": telling(o),
            "rewarm": rewarm,
            "rate": float(jnp.asarray(schedule(n * updates))),
        },
        best=best() * updates if o.patience else None,
    )
    whole = lambda: lora.joined(state.model, frozen)

    # ---------------------------------------------------------------------------------------- a look from time to time
    sums = jax.jit(
        lambda model, batch, others: (objective(cast(model, dtype), batch, others)[1][0], count(batch)),
    )

    def validate() -> dict[str, float]:
        """The objective's means of the validation data, such as "validation_loss"."""
        if validation is None:
            return {}
        found = [
            sums(whole(), put_batch(batch, mesh), others)
            for _, batch in zip(range(o.eval_batches), validation, strict=False)
        ]
        total, units = jax.tree.map(lambda *a: sum(map(float, a)), *jax.device_get(found))
        means = {f"validation_{name}": value / units for name, value in total.items()}
        looks.append([n, means["validation_loss"]])
        return means

    def sample() -> None:
        room = config.max_position_embeddings - o.sample_tokens
        shown = [prompt[-room:] for prompt in prompts]
        with generating(whole(), mesh, dtype) as model:
            texts = zoo.generate(model, tokenizer, shown, max_new_tokens=o.sample_tokens)
        for prompt, text in zip(map(tokenizer.decode, shown), texts, strict=True):
            rich.print(f"[dim]step {n:,}: {escape(prompt)}[/dim][bold]{escape(text)}[/bold]\n")
            samples.write(n, prompt=prompt, text=text)

    # ------------------------------------------------------------------------------------------------------- the loop
    ended = lambda: n >= o.steps or (o.patience and n - best() >= o.patience * o.eval_every)
    due = lambda every: n % every == 0 or ended()
    if n == 0:
        metrics.write(0, **validate())
        sample()
        if o.patience:
            save()
    flops = flops_per_token(config, o.seq_len, frozen=adapters)
    bar = Progress(o.steps, start=n, flops_per_token=flops, console=rich.get_console())
    with checkpoints, cluster.watching(), StopRequest() as stop, bar as progress:
        reason = ""
        while not ended() and not reason:
            batches, numbers = experience(whole(), next(iterator), n) if experience else ([next(iterator)], {})
            cluster.passing()
            steps, started = [], time.monotonic()
            for batch in batches:
                state, of_step = step(state, put_batch(batch, mesh), frozen, others)
                steps.append(of_step)
            numbers |= mean_of_steps(jax.device_get(steps))
            if experience:
                numbers["training_tokens_per_second"] = float(numbers["tokens"] / (time.monotonic() - started))
            if not numbers.pop("finite"):
                save()
                raise FloatingPointError(
                    f"The loss ({numbers['loss']}) or a gradient is not finite at step {n + 1}; the state of step {n} "
                    f"is in {checkpoints.folder}. Lower --lr, or look at the data."
                )
            n, reason = n + 1, stop.agreed()
            if due(o.eval_every):
                numbers |= validate()
            metrics.write(n, **numbers, **progress.update(n, **numbers))
            if due(o.sample_every):
                sample()
            if due(o.eval_every if o.patience else o.save_every) or reason:
                save()
            checkpoints.check()
        if reason:
            rich.print(f"Stopped by {reason} after step {n:,}, which is saved; the same command goes on from there.")
            return None
        if n < o.steps:
            rich.print(f"Validation has not improved since step {best():,}, so the run ends at step {n:,}.")
        if o.patience and best() != n:
            if found := checkpoints.restore(abstract, step=best() * updates):
                (state, _), n = found, best()
                rich.print(f"The model of step {best():,} is exported, where validation was best.")
            else:
                rich.print(f"WARNING: step {best():,} was best, but is damaged; the model of step {n:,} is exported.")

    # --------------------------------------------------------------------------------------------------- what is left
    exported = o.out / ("adapter" if adapters else "model")
    if adapters:
        peft.save(whole(), exported, base=o.model, over={name: identity[name] for name in peft.OVER})
    else:
        zoo.save(cast(state.model, export_dtype(config)), exported)
    if jax.process_index():
        return exported
    if not adapters:
        tokenizer.save_eos(exported)
    if len(looks) > 1:
        losses = {step: loss for step, loss in looks}
        own = f", {losses[n]:.3f} of the {exported.name} that is exported" if n in losses else ""
        rich.print(f"Validation loss: {looks[0][1]:.3f} at first, {min(losses.values()):.3f} at best{own}.")
    plot_losses(metrics.path, o.out / "loss.png")
    how = f'zoo.peft.load(model, "{exported}")' if adapters else f'zoo.load("{exported}")'
    rich.print(f"The loss curve is {o.out / 'loss.png'}. The {exported.name} loads with {how}.")
    return exported


@contextlib.contextmanager
def generating(model: Any, mesh: Mesh, dtype: DTypeLike) -> Iterator[Any]:
    """The model to generate with, in `dtype`, on a mesh without stages: generation has no pipeline."""
    model, family = cast(model, dtype), family_of(model)
    there = without_stages(mesh, model, family)
    with jax.set_mesh(there):
        yield model if there == mesh else jax.device_put(model, shardings(model, family.partition_rules, there))


def mean_of_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The metrics of several updates as those of one: means, but of tokens and targets sums; finite, if all were."""
    together = {"tokens": np.sum, "targets": np.sum, "finite": np.all}
    return {name: together.get(name, np.mean)([step[name] for step in steps]) for name in steps[0]}


def export_dtype(config: Any) -> np.dtype:
    """The dtype of the checkpoint that a run began with."""
    hub = json.loads((config.source / "config.json").read_text())
    return jnp.dtype(hub.get("dtype") or hub.get("torch_dtype") or "float32")


def prompt_of(example: Example) -> list[int]:
    """What precedes the first token to be learnt; of a text, its first quarter."""
    learnt = example.mask.index(1) if 1 in example.mask else len(example.ids)
    return example.ids[:learnt] if learnt > 1 else example.ids[: max(1, min(64, len(example.ids) // 4))]


def command(main: Callable[[Any], None], options: type) -> None:
    """`main` with the options of the command line. What the user can mend is told in one sentence, not a traceback.

    What XLA compiles is kept for the next run, in JAX_COMPILATION_CACHE_DIR or the user's cache folder.
    """
    o = tyro.cli(options)
    if not jax.config.jax_compilation_cache_dir:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "equinox-zoo" / "jax"))
    try:
        cluster.initialize(o.coordinator, o.processes, o.process)
        main(o)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        cluster.end(f"{type(error).__name__}: {error}")
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        cluster.end(
            f"a computation of all processes failed, most likely because one has died ({str(error).splitlines()[0]}). "
            "Start all of them again: the run goes on from its last checkpoint."
        )
    except Exception as error:  # a fault of ours, whose place says more; the other processes must not wait for this one
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        cluster.end(f"{type(error).__name__}: {error}")
