"""What every training script shares: its options, where its state comes from, its loop, and what it leaves behind.

Scripts put these together: data and model are theirs, and so is what a step does.
"""

import dataclasses
import functools
import json
import math
import os
import pathlib
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
from train.metrics import MetricsFile, Progress, flops_per_token, read_metrics
from train.optim import adamw, make_schedule
from train.plot import plot_losses
from train.state import abstract_state, init_state
from train.step import REMAT, jit_train_step, loss_sums
from train.stop import StopRequest
from zoo.checkpoint import skeleton
from zoo.config import write as write_config
from zoo.surgery import cast, quantize_training, shardings
from zoo.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """The options of every training script. Where 0 stands for a choice of ours, `resolve` makes it."""

    out: pathlib.Path = pathlib.Path("runs/train")
    """Folder of the run: checkpoints, metrics.jsonl, samples.jsonl, loss.png, and the exported model."""
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
    z_loss: float = 0.0
    """Weight of log(Z)^2 in the loss, which keeps logits from growing; 1e-4 in PaLM."""
    router_balance: float = 0.0
    """Weight of the load-balancing loss in a mixture of experts; 0.01 in Switch Transformers, 0.001 in Qwen3."""
    router_z: float = 0.0
    """Weight of the router z-loss in a mixture of experts, which keeps its logits from growing; 0.001 in ST-MoE."""
    router_bias_rate: float = 0.0
    """By how much each step moves the routers' biases towards an even load, in DeepSeek V3; 0.001 in its paper."""
    mtp_weight: float = 0.0
    """Weight of the loss of the token after the next, which DeepSeek V3 has a module for; 0.3, then 0.1 in its paper.
    0: without that module."""
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


def make_optimizer(o: Options) -> tuple[optax.GradientTransformation, optax.Schedule]:
    schedule = make_schedule(o.schedule, peak=o.lr, steps=o.steps, warmup=o.warmup, decay=o.decay)
    return adamw(schedule, weight_decay=o.weight_decay, clip_norm=o.clip_norm), schedule


def identity(o: Any, config: Any, family: ModuleType, data: Mapping[str, Any]) -> dict[str, Any]:
    """What must not change between a checkpoint and the run that goes on with it; also all that its export needs."""
    model = str(pathlib.Path(o.model).resolve()) if pathlib.Path(o.model).is_dir() else o.model
    hub = write_config(config, family, export_dtype(config))
    return {"model": model, "config": hub, "data": dict(data), "mtp": o.mtp_weight > 0}


def abstract_model(config: Any, family: ModuleType, mesh: Mesh, *, mtp: bool) -> Any:
    """The shapes of a model's float32 parameters, and where on the mesh they lie."""
    model = skeleton(family, config, mtp=mtp)
    places = shardings(model, family.PARTITION_RULES, mesh)
    return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), model, places)


def run(
    o: Options,
    *,
    config: Any,
    family: ModuleType,
    mesh: Mesh,
    tokenizer: Tokenizer,
    make_model: Callable[[], Any],
    data: grain.IterDataset,
    validation: grain.IterDataset | None,
    prompts: Sequence[Sequence[int]],
    identity: Mapping[str, Any],
) -> None:
    """Trains `make_model()`, or goes on with the last checkpoint in `o.out`, until `o.steps`; then exports the model.

    `identity` is what must not have changed since that checkpoint. A SIGTERM or Ctrl-C saves and returns.

    Raises:
        FloatingPointError: if the loss or a gradient is not finite; the state before that step is saved.
    """
    # ---------------------------------------------------------------------------------------------- state, new or old
    mtp = o.mtp_weight > 0
    check_mesh(mesh, skeleton(family, config, mtp=mtp), family, batch=o.batch // o.microbatches, seq_len=o.seq_len)
    optimizer, schedule = make_optimizer(o)
    prepared = lambda model: model if o.matmul == "float" else quantize_training(model, o.matmul)
    abstract = abstract_state(prepared(abstract_model(config, family, mesh, mtp=mtp)), optimizer)
    dtype = jnp.dtype(o.compute_dtype)
    if o.router_bias_rate and not hasattr(family, "rebalance"):
        raise ValueError(
            f"--router-bias-rate {o.router_bias_rate}, but the routers of {family.__name__} have no biases."
        )
    rebalance = functools.partial(family.rebalance, rate=o.router_bias_rate) if o.router_bias_rate else None
    step = lambda state: jit_train_step(
        state, optimizer=optimizer, schedule=schedule, compute_dtype=dtype, remat=REMAT[o.remat],
        microbatches=o.microbatches, z_loss=o.z_loss, router_balance=o.router_balance, router_z=o.router_z,
        rebalance=rebalance, mtp_weight=o.mtp_weight,
    )  # fmt: skip
    if o.dry_run:
        report.rows(
            "Run", {"steps": f"{o.steps:,}", "tokens a step": f"{o.batch * o.seq_len:,}", "peak learning rate": o.lr}
        )
        batch = put_batch(next(iter(data)), mesh)
        report.rows("Memory of a device", report.memory(step(abstract), abstract, batch))
        report.rows("Disk", report.disk(o.out, abstract, o.keep))
        report.rows("Mesh", report.mesh(mesh))
        return
    checkpoints, iterator = (
        Checkpoints(o.out / "checkpoints", identity=identity, keep=o.keep, say=rich.print),
        iter(data),
    )
    if found := checkpoints.restore(abstract):
        state, position = found
        iterator.set_state(position)
        n = int(state.step)
        rich.print(f"Going on from step {n:,} of {o.out}.")
    else:
        state, n = init_state(prepared(make_model()), optimizer), 0
    step = step(state)
    metrics, samples = (MetricsFile(o.out / name, step=n or -1) for name in ("metrics.jsonl", "samples.jsonl"))

    # ---------------------------------------------------------------------------------------- a look from time to time
    sums = jax.jit(
        lambda model, batch: (loss_sums(cast(model, dtype), batch)[1][0]["loss"], jnp.sum(batch["loss_mask"]))
    )

    def validate(model: Any) -> dict[str, float]:
        """Mean loss of a target of the validation data, in nats."""
        if validation is None:
            return {}
        found = [
            sums(model, put_batch(batch, mesh)) for _, batch in zip(range(o.eval_batches), validation, strict=False)
        ]
        loss, targets = np.sum(jax.device_get(found), axis=0)
        return {"validation_loss": float(loss / targets)}

    def sample(model: Any, at: int) -> None:
        room = config.max_position_embeddings - o.sample_tokens
        shown = [prompt[-room:] for prompt in prompts]
        whole, model = without_stages(mesh, model, family), cast(model, dtype)
        with jax.set_mesh(whole):
            if whole != mesh:
                model = jax.device_put(model, shardings(model, family.PARTITION_RULES, whole))
            texts = zoo.generate(model, tokenizer, shown, max_new_tokens=o.sample_tokens)
        for prompt, text in zip(map(tokenizer.decode, shown), texts, strict=True):
            rich.print(f"[dim]step {at:,}: {escape(prompt)}[/dim][bold]{escape(text)}[/bold]\n")
            samples.write(at, prompt=prompt, text=text)

    # ------------------------------------------------------------------------------------------------------- the loop
    due = lambda step, every: step % every == 0 or step == o.steps
    if n == 0:
        metrics.write(0, **validate(state.model))
        sample(state.model, 0)
    bar = Progress(o.steps, start=n, flops_per_token=flops_per_token(config, o.seq_len), console=rich.get_console())
    with checkpoints, StopRequest() as stop, bar as progress:
        reason = ""
        while n < o.steps and not reason:
            state, numbers = step(state, put_batch(next(iterator), mesh))
            numbers = jax.device_get(numbers)
            if not numbers.pop("finite"):
                checkpoints.save(state, iterator.get_state())
                raise FloatingPointError(
                    f"The loss ({numbers['loss']}) or a gradient is not finite at step {n + 1}; the state of step {n} "
                    f"is in {checkpoints.folder}. Lower --lr, or look at the data."
                )
            n, reason = n + 1, stop.agreed()
            if due(n, o.eval_every):
                numbers |= validate(state.model)
            metrics.write(n, **numbers, **progress.update(n, **numbers))
            if due(n, o.sample_every):
                sample(state.model, n)
            if due(n, o.save_every) or reason:
                checkpoints.save(state, iterator.get_state())
            checkpoints.check()
    if reason:
        rich.print(f"Stopped by {reason} after step {n:,}, which is saved; the same command goes on from there.")
        return

    # --------------------------------------------------------------------------------------------------- what is left
    zoo.save(cast(state.model, export_dtype(config)), o.out / "model")
    if jax.process_index():
        return
    if looks := [float(line["validation_loss"]) for line in read_metrics(metrics.path) if "validation_loss" in line]:
        rich.print(f"Validation loss: {looks[0]:.3f} nats a token at first, {looks[-1]:.3f} now.")
    plot_losses(metrics.path, o.out / "loss.png")
    rich.print(f'The loss curve is {o.out / "loss.png"}. The model loads with zoo.load("{o.out / "model"}").')


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
