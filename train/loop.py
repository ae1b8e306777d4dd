"""What every training script shares: its options, where its state comes from, its loop, and what it leaves behind.

Scripts put these together: data and model are theirs, and so is what a step does.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
import time
from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import rich
import tyro
from jax.sharding import Mesh
from rich.markup import escape

import zoo
from train import cluster, report
from train.checkpoint import Checkpoints
from train.data import Example
from train.mesh import check_mesh, put_batch, without_stages
from train.metrics import MetricsFile, Progress, flops_per_token
from train.optim import adamw, make_schedule
from train.plot import plot_losses
from train.state import abstract_state, init_state
from train.step import REMAT, Batch, Objective, cross_entropy, jit_train_step, targets_of
from train.stop import StopRequest
from zoo import lora, peft
from zoo.checkpoint import skeleton
from zoo.config import write as write_config
from zoo.quantized import quantize_training
from zoo.surgery import cast, shardings
from zoo.tokenizer import Tokenizer


Experience = Callable[[Any, Any, int], tuple[Sequence[Mapping[str, np.ndarray]], dict[str, float]]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every training script. Where 0 stands for a choice of ours, `resolve` makes it."""

    out: pathlib.Path = pathlib.Path("runs/train")
    """Folder of the run: checkpoints, metrics.jsonl, samples.jsonl, loss.png, and the exported model or adapter."""
    seq_len: int = 0
    """Tokens of a row. 0: as many as the model has positions, up to 2,048."""
    batch: int = 4
    """Rows of a step."""
    microbatches: int = 1
    """Parts in which a step works through its rows, one after another, to save memory; the update is the same."""
    steps: int = 0
    """Optimizer steps of the whole run."""
    lr: float = 0.0
    """Peak learning rate, reached after the warmup. 0: in inverse proportion to the model's width."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """How the learning rate falls: along a cosine, or in a straight line over the last --decay steps."""
    warmup: int = -1
    """Steps in which the learning rate rises. -1: 3 % of them."""
    decay: int = -1
    """Steps in which wsd's learning rate falls. -1: 20 % of them."""
    weight_decay: float = 0.1
    """Taken off matrices at every step, times the learning rate."""
    clip_norm: float = 1.0
    """Gradients of a larger global norm are scaled down to it."""
    router_balance: float = 0.0
    """Weight of the load-balancing loss in a mixture of experts; 0.01 in Switch Transformers, 0.001 in Qwen3."""
    router_z: float = 0.0
    """Weight of the router z-loss in a mixture of experts, which keeps its logits from growing; 0.001 in ST-MoE."""
    router_bias_rate: float = 0.0
    """By how much each step moves the routers' biases towards an even load, in DeepSeek V3; 0.001 in its paper."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of the forward and backward pass; weights are kept in float32. auto: bfloat16, but float32 on a CPU."""
    matmul: Literal["float", "int8", "fp8"] = "float"
    """What linear maps of the layers multiply in: --compute-dtype, or eight bits, to which weights and activations are
    rounded row by row; fp8 rounds gradients too. Weights are kept in float32 all the same. Embedding, head, routers and
    experts stay as with float."""
    remat: Literal["none", "dots", "full", "offload"] = "dots"
    """What the backward pass computes again to save memory: nothing, all but matrix products, or whole layers; offload
    also keeps the layers' inputs in the memory of a GPU's or TPU's host."""
    mesh: str = "fsdp=-1"
    """Devices by what they split, such as fsdp=4,tensor=2: replica (the batch), fsdp (batch and parameters), tensor
    (work on each token), context (sequences), expert (a mixture's experts), stage (layers); -1 takes what is left."""
    seed: int = 0
    """Of the order of the data, and of random weights."""
    eval_every: int = 0
    """Steps between losses on the validation data. 0: a tenth of the run."""
    eval_batches: int = 50
    """Batches of validation data at most."""
    patience: int = 0
    """End the run after so many looks at the validation data in a row without a lower loss, and export the model of the
    lowest one; checkpoints are then saved at these looks. 0: never."""
    sample_every: int = 0
    """Steps between generations to look at. 0: a quarter of the run."""
    sample_tokens: int = 64
    """Tokens of such a generation."""
    save_every: int = 200
    """Steps between checkpoints."""
    keep: int = 2
    """How many of the newest checkpoints to keep."""
    dry_run: bool = False
    """Only look: at the data, three examples (dimmed: what is not learnt), memory, mesh and disk. Trains nothing."""
    coordinator: str | None = None
    """host:port of process 0, if there are several and no launcher that JAX knows has started them: see
    docs/clusters.md."""
    processes: int | None = None
    """How many there are."""
    process: int | None = None
    """Which of them this one is, from 0."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModeling(Options):
    """Options of the scripts that learn to predict the next token."""

    z_loss: float = 0.0
    """Weight of log(Z)^2 in the loss, which keeps logits from growing; 1e-4 in PaLM."""
    mtp_weight: float = 0.0
    """Weight of the loss of the token after the next, which DeepSeek V3 has a module for; 0.3, then 0.1 in its paper.
    0: without that module."""

    def objective(self) -> Objective:
        return functools.partial(cross_entropy, z_loss=self.z_loss, mtp_weight=self.mtp_weight)


def resolve(o: Any, config: Any, steps: int, width_lr: float) -> Any:
    """`o` with numbers for all that was left to us. `width_lr` is the learning rate of a model of width 4,096."""
    changes = {
        "steps": steps,
        "lr": o.lr or width_lr * 4096 / config.hidden_size,
        "warmup": math.ceil(0.03 * steps) if o.warmup < 0 else o.warmup,
        "decay": math.ceil(0.2 * steps) if o.decay < 0 else o.decay,
        "eval_every": o.eval_every or math.ceil(steps / 10),
        "sample_every": o.sample_every or math.ceil(steps / 4),
    }
    if o.compute_dtype == "auto":
        changes["compute_dtype"] = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return dataclasses.replace(o, **changes)


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


def make_optimizer(o: Options, updates: int = 1) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW and its learning rate, for a run that makes so many updates in a step."""
    steps, warmup, decay = (updates * n for n in (o.steps, o.warmup, o.decay))
    schedule = make_schedule(o.schedule, peak=o.lr, steps=steps, warmup=warmup, decay=decay)
    return adamw(schedule, weight_decay=o.weight_decay, clip_norm=o.clip_norm), schedule


def identity(o: Any, config: Any, family: ModuleType, data: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that goes on with it; also all that its export needs."""
    model = str(pathlib.Path(o.model).resolve()) if pathlib.Path(o.model).is_dir() else o.model
    hub = write_config(config, family, export_dtype(config))
    return {"model": model, "config": hub, "data": dict(data)}


def abstract_model(config: Any, family: ModuleType, mesh: Mesh, *, mtp: bool) -> Any:
    """The shapes of a model's float32 parameters, and where on the mesh they lie."""
    model = skeleton(family, config, mtp=mtp)
    places = shardings(model, family.PARTITION_RULES, mesh)
    return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), model, places)


def run(
    o: Any,
    *,
    config: Any,
    family: ModuleType,
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
    updates: int = 1,
    mtp: bool = False,
    adapters: bool = False,
    neftune: float = 0.0,
) -> pathlib.Path | None:
    """Trains `make_model()`, or goes on with the last checkpoint in `o.out`, until `o.steps`; then exports the model.

    Returns the folder of the export. A SIGTERM or Ctrl-C saves and returns None, and so does a dry run.

    Args:
        identity: what must not have changed since that checkpoint.
        objective, count, others: see `train.step.train_step`; the validation data is measured by them too.
        prompts: what to show continuations of, from time to time.
        experience: makes of the model, an element of `data` and the number of the step what to learn from, in `updates`
            batches. Without it, every element of `data` is a batch.
        mtp: the model has the module that predicts one more token.
        adapters: it has adapters, and these are what is trained, kept in checkpoints, and exported.

    Raises:
        FloatingPointError: if the loss or a gradient is not finite; the state before that step is saved.
    """
    # ---------------------------------------------------------------------------------------------- state, new or old
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
    if o.router_bias_rate and (adapters or not hasattr(family, "rebalance")):
        why = "adapters leave routers alone" if adapters else f"the routers of {family.__name__} have no biases"
        raise ValueError(f"--router-bias-rate {o.router_bias_rate}, but {why}.")
    rebalance = functools.partial(family.rebalance, rate=o.router_bias_rate) if o.router_bias_rate else None
    step = lambda state: jit_train_step(
        state, optimizer=optimizer, schedule=schedule, compute_dtype=dtype, objective=objective, count=count,
        remat=REMAT[o.remat], microbatches=o.microbatches, router_balance=o.router_balance, router_z=o.router_z,
        rebalance=rebalance, neftune=neftune,
    )  # fmt: skip
    if o.dry_run:
        report.rows(
            "Run", {"steps": f"{o.steps:,}", "tokens a step": f"{o.batch * o.seq_len:,}", "peak learning rate": o.lr}
        )
        if experience is None:
            batch = put_batch(next(iter(data)), mesh)
            report.rows("Memory of a device", report.memory(step(abstract), abstract, batch, frozen, others))
        report.rows("Disk", report.disk(o.out, abstract, o.keep))
        report.rows("Mesh", report.mesh(mesh))
        return None
    keep = max(o.keep, o.patience + 2) if o.patience else o.keep
    checkpoints = Checkpoints(o.out / "checkpoints", identity=identity, keep=keep, say=rich.print)
    iterator, looks = iter(data), []
    if found := checkpoints.restore(abstract):
        state, position = found
        iterator.set_state(position["data"])
        n, looks = int(state.step) // updates, position["looks"]
        rich.print(f"Going on from step {n:,} of {o.out}.")
    else:
        state, n = fresh(), 0
    step = step(state)
    metrics, samples = (MetricsFile(o.out / name, step=n or -1) for name in ("metrics.jsonl", "samples.jsonl"))
    save = lambda: checkpoints.save(state, {"data": iterator.get_state(), "looks": looks})
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
        shown, model = [prompt[-room:] for prompt in prompts], cast(whole(), dtype)
        there = without_stages(mesh, model, family)
        with jax.set_mesh(there):
            if there != mesh:
                model = jax.device_put(model, shardings(model, family.PARTITION_RULES, there))
            texts = zoo.generate(model, tokenizer, shown, max_new_tokens=o.sample_tokens)
        for prompt, text in zip(map(tokenizer.decode, shown), texts, strict=True):
            rich.print(f"[dim]step {n:,}: {escape(prompt)}[/dim][bold]{escape(text)}[/bold]\n")
            samples.write(n, prompt=prompt, text=text)

    # ------------------------------------------------------------------------------------------------------- the loop
    due = lambda every: n % every == 0 or n == o.steps
    best = lambda: min(looks, key=lambda look: look[1])[0]
    if n == 0:
        metrics.write(0, **validate())
        sample()
        if o.patience:
            save()
    flops = flops_per_token(config, o.seq_len, frozen=adapters)
    bar = Progress(o.steps, start=n, flops_per_token=flops, console=rich.get_console())
    with checkpoints, StopRequest() as stop, bar as progress:
        reason = ""
        while n < o.steps and not reason:
            batches, numbers = experience(whole(), next(iterator), n) if experience else ([next(iterator)], {})
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
                if o.patience and n - best() >= o.patience * o.eval_every:
                    rich.print(f"Validation has not improved since step {best():,}, so the run ends at step {n:,}.")
                    o = dataclasses.replace(o, steps=n)
            metrics.write(n, **numbers, **progress.update(n, **numbers))
            if due(o.sample_every):
                sample()
            if due(o.eval_every if o.patience else o.save_every) or reason:
                save()
            checkpoints.check()
        if reason:
            rich.print(f"Stopped by {reason} after step {n:,}, which is saved; the same command goes on from there.")
            return None
        if o.patience and best() != n:
            state, _ = checkpoints.restore(abstract, step=best() * updates)
            rich.print(f"The model of step {best():,} is exported, where validation was best.")

    # --------------------------------------------------------------------------------------------------- what is left
    exported = o.out / ("adapter" if adapters else "model")
    if adapters:
        peft.save(whole(), exported, base=o.model)
    else:
        zoo.save(cast(state.model, export_dtype(config)), exported)
    if jax.process_index():
        return exported
    if len(looks) > 1:
        rich.print(f"Validation loss: {looks[0][1]:.3f} at first, {min(look[1] for look in looks):.3f} at best.")
    plot_losses(metrics.path, o.out / "loss.png")
    how = f'zoo.peft.load(model, "{exported}")' if adapters else f'zoo.load("{exported}")'
    rich.print(f"The loss curve is {o.out / 'loss.png'}. The {exported.name} loads with {how}.")
    return exported


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
