"""A script that distils a larger model's predictions into a model: `python -m train.distill --help`.

With `--teacher` alone, the teacher runs beside the student. `--store` writes the teacher's largest logits to a folder
instead, and `--logits` learns from such a folder, without the teacher.
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
import numpy as np
import rich
import rich.progress
from jax.sharding import Mesh

import kernels
import train.tiny
import zoo
from kernels.mesh import CONTEXT
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.packing import TEXT, PackingOptions, file_hashes, tokenizer_hash
from train.data.rows import Rows, batches, order, read_ahead
from train.data.sets import DataOptions, open_data
from train.methods import teacher
from train.run import finetune, folder, report
from train.run.defaults import resolve_steps, width_lr
from train.state.mesh import put_batch
from train.step import loss
from train.step.language import features
from train.step.step import Batch, Losses, Scalars
from train.step.task import Task
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractModel
from zoo.source import Source
from zoo.weights.gather import gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions(finetune.FineTuningOptions):
    """Distil a model. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "distill"

    teacher: str | None = None
    """Larger model: a zoo name, a Hub repository org/name, or a folder. It must have the student's vocabulary."""
    store: pathlib.Path | None = None
    """Folder to write the teacher's logits to, for all --epochs of the data. Nothing is trained."""
    logits: pathlib.Path | None = None
    """Folder that --store has written. The model learns from it instead of --data."""
    top_k: int = option(64, rare=True)
    """Number of logits of each token that --store keeps. A logit takes six bytes."""
    data: tuple[str, ...] = option((str(train.tiny.INSTRUCTIONS),), group=Group.DATA, identity=False)
    """Files, folders of them, or prepared stores, as for train.sft."""
    completions_only: bool = True
    """Learn completions and the assistant's messages, but not prompts."""
    epochs: int = option(1, group=Group.STEP)
    """Number of times through the data, if --steps is 0."""
    beta: float = 0.0
    """Kind of divergence. 0: the forward KL(teacher || student). 1: the reverse. In between: mixed as in GKD. Stored
    logits allow the forward KL alone."""
    temperature: float = option(1.0, rare=True)
    """Number that both models' logits are divided by. The loss is multiplied by the square of this number (Hinton et
    al., 2015)."""
    weight: float = 1.0
    """Weight of the divergence, from 0 to 1. The rest is the weight of the cross-entropy of the data's own tokens."""
    mixture: Flat[DataOptions] = DataOptions()
    rows: Flat[PackingOptions] = PackingOptions()

    @property
    def parts(self) -> tuple[str, ...]:
        return ()


def objective(
    model: AbstractModel,
    batch: Batch,
    reference: Any = None,
    means: Scalars | None = None,
    *,
    options: DistillOptions,
) -> Losses:
    """Computes the loss of a batch's targets, for `train.step.step.train_step`.

    `reference` is the teacher. If it is None, the batch has the teacher's logits, "top_values" and "top_indices".

    The sums are "loss" and "divergence"; with a `weight` below 1 also "cross_entropy" and "accuracy" on the data's own
    tokens.
    """
    x, reports = features(model, batch)
    if reference is None:
        divergence = functools.partial(loss.divergence_top_k, temperature=options.temperature)
        given = (batch["top_values"].astype(jnp.float32), batch["top_indices"])
        each = loss.by_chunks(lambda x, *given: divergence(model.unembed(x), *given), x, *given)
    else:
        divergence = functools.partial(loss.divergence, beta=options.beta, temperature=options.temperature)
        y = jax.lax.stop_gradient(features(reference, batch)[0])
        each = loss.by_chunks(lambda x, y: divergence(model.unembed(x), reference.unembed(y)), x, y)
    learnt = batch["loss_mask"] != 0
    divergences = options.temperature**2 * jnp.sum(jnp.where(learnt, each, 0))
    total, sums = options.weight * divergences, {"divergence": divergences}
    if options.weight < 1:
        plain, seen = kernels.cross_entropy(model.unembed, x, batch["targets"], batch["loss_mask"])
        total += (1 - options.weight) * plain
        sums |= {"cross_entropy": seen["loss"], "accuracy": seen["correct"]}
    return total, jnp.sum(learnt), jax.lax.stop_gradient(sums | {"loss": total}), reports


def main(o: DistillOptions) -> None:
    # --------------------------------------------------------------------------------------------------- mesh, models
    if (o.teacher is None) == (o.logits is None) or (o.store and o.logits):
        raise ValueError("Give --teacher, to learn from it or to --store its logits; or --logits, to learn from those.")
    if o.logits and o.beta:
        raise ValueError(f"--beta {o.beta} needs all of the teacher's logits; of stored ones there is the forward KL.")
    mesh = make_mesh(o.step.mesh)
    o.refuse_vision("stored logits have no images")
    model, larger = Source.open(o.model, o.revision), Source.open(o.teacher) if o.teacher else None
    tokenizer, config = zoo.tokenizer(model, **o.chat.arguments), model.config
    o = finetune.resolve(o, config, width_lr=width_lr(o.lora))
    if larger and (vocab := larger.config.vocab_size) != config.vocab_size:
        raise ValueError(f"{o.teacher} has {vocab} tokens and {o.model} {config.vocab_size}: they must have the same.")

    # ----------------------------------------------------------------------------------------------------------- data
    if o.logits:
        rows, about = teacher.read(o.logits)
        of_tokens = about.get("tokenizer", about["data"].get("tokenizer"))  # older folders have it in "data"
        if of_tokens != tokenizer_hash(tokenizer) or about["seq_len"] != o.step.seq_len:
            raise ValueError(f"{o.logits} is of another tokenizer, or of rows of {about['seq_len']} tokens.")
        batch, hold_out, steps = o.step.batch, o.mixture.hold_out, o.optim.steps
        held = min(math.ceil(hold_out * len(rows)), len(rows) - 1)
        kept = Rows(rows[: len(rows) - held], o.seed)
        data = read_ahead(batches(order([kept], epochs=None if steps else o.epochs), batch, mesh=mesh))
        validation = read_ahead(batches(rows[-held:], batch, mesh=mesh)) if held else None
        source, prompts, steps = about, [], steps or -(-len(kept.rows) * o.epochs // batch)
        source |= {"batch": batch, "seed": o.seed, "hold_out": hold_out}  # this run's, not those of the stored data
        source["logits"] = {"files": file_hashes(o.logits, [o.logits / teacher.ROWS])}
    else:
        settings = o.rows.settings(config.vocab_size, completions_only=o.completions_only)
        whole = o.phase(o.data, o.mixture.weights)
        whole = dataclasses.replace(whole, steps=0) if o.store else whole
        opened = open_data(o.mixture, whole, o.reading(o.epochs), mesh, tokenizer, TEXT, settings)
        report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)
        data, validation, prompts, steps = opened.data, opened.validation, opened.prompts, opened.steps
        source = {"data": opened.source, "tokenizer": tokenizer_hash(tokenizer)}
    if larger:
        source |= {"teacher": o.teacher, "teacher_weights": folder.weights_hash(larger)}
        if o.store:
            return store(o, o.store, larger, mesh, data, source)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, steps)
    task = Task(
        data,
        functools.partial(objective, options=o),
        reference=zoo.load(larger, dtype=o.step.compute_dtype, mesh=mesh) if larger else None,
        validation=validation,
        prompts=prompts,
    )
    finetune.run(o, model, mesh, tokenizer, task, data=source)


def store(
    options: DistillOptions, to: pathlib.Path, larger: Source, mesh: Mesh, data: grain.IterDataset,
    about: dict[str, Any],
) -> None:  # fmt: skip
    """Writes the largest logits of the teacher, `larger`, for all batches to the folder `to`."""
    seq_len, k = options.step.seq_len, options.top_k
    if jax.process_count() > 1 or mesh.shape[CONTEXT] > 1:
        raise ValueError("--store works in one process, with whole sequences: without context in --mesh.")
    with jax.set_mesh(mesh):
        model = zoo.load(larger, dtype=options.step.compute_dtype, mesh=mesh)
        top = jax.jit(functools.partial(teacher.top_k, k=k))

        def with_logits(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            values, indices = map(gathered, top(model, put_batch(batch, mesh, model)))
            return batch | {"top_values": values, "top_indices": indices}

        bar = rich.progress.track(data, "Storing logits", console=rich.get_console())
        rows = teacher.write(to, map(with_logits, bar), about | {"top_k": k, "seq_len": seq_len})
    rich.print(f"{rows:,} rows of {seq_len:,} tokens are in {to}, with {k} logits of each token.")


if __name__ == "__main__":
    command(main, DistillOptions)
