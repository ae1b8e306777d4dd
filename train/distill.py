"""A script that distils a larger model's predictions into a model: `python -m train.distill --help`.

With `--teacher` alone, the teacher runs beside the student. `--store` writes the teacher's largest logits to a folder
instead, and `--logits` learns from such a folder, without the teacher.
"""

import dataclasses
import functools
import math
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import rich
import rich.progress

import kernels
import train.tiny
import zoo
from kernels.mesh import CONTEXT
from train.base.command import command
from train.base.help import Group, option
from train.data.packing import TEXT, file_hashes, tokenizer_hash
from train.data.pictures import refuse_vision
from train.data.rows import Set, batches, order, reading
from train.data.sets import TextOptions, open_data, text_settings
from train.methods import teacher
from train.run import finetune, folder, loop, report
from train.run.defaults import resolve_steps, width_lr
from train.state.mesh import put_batch
from train.step import loss
from train.step.step import Batch, Losses, Scalars, features
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractModel
from zoo.weights.gather import gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions(TextOptions, finetune.FineTuningOptions):
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
    data: tuple[str, ...] = (str(train.tiny.INSTRUCTIONS),)
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


def objective(
    model: AbstractModel,
    batch: Batch,
    reference: Any = None,
    means: Scalars | None = None,
    *,
    o: DistillOptions,
) -> Losses:
    """Computes the loss of a batch's targets, for `train.step.step.train_step`.

    `reference` is the teacher. If it is None, the batch has the teacher's logits, "top_values" and "top_indices".

    The sums are "loss" and "divergence"; with a `weight` below 1 also "cross_entropy" and "accuracy" on the data's own
    tokens.
    """
    x, reports = features(model, batch)
    if reference is None:
        divergence = functools.partial(loss.divergence_top_k, temperature=o.temperature)
        given = (batch["top_values"].astype(jnp.float32), batch["top_indices"])
        each = loss.by_chunks(lambda x, *given: divergence(model.unembed(x), *given), x, *given)
    else:
        divergence = functools.partial(loss.divergence, beta=o.beta, temperature=o.temperature)
        y = jax.lax.stop_gradient(features(reference, batch)[0])
        each = loss.by_chunks(lambda x, y: divergence(model.unembed(x), reference.unembed(y)), x, y)
    learnt = batch["loss_mask"] != 0
    divergences = o.temperature**2 * jnp.sum(jnp.where(learnt, each, 0))
    total, sums = o.weight * divergences, {"divergence": divergences}
    if o.weight < 1:
        plain, seen = kernels.cross_entropy(model.unembed, x, batch["targets"], batch["loss_mask"])
        total += (1 - o.weight) * plain
        sums |= {"cross_entropy": seen["loss"], "accuracy": seen["correct"]}
    return total, jnp.sum(learnt), jax.lax.stop_gradient(sums | {"loss": total}), reports


def main(o: DistillOptions) -> None:
    # --------------------------------------------------------------------------------------------------- mesh, models
    if (o.teacher is None) == (o.logits is None) or (o.store and o.logits):
        raise ValueError("Give --teacher, to learn from it or to --store its logits; or --logits, to learn from those.")
    if o.logits and o.beta:
        raise ValueError(f"--beta {o.beta} needs all of the teacher's logits; of stored ones there is the forward KL.")
    mesh = make_mesh(o.mesh)
    refuse_vision(o, "stored logits have no images")
    tokenizer = zoo.tokenizer(o.model, revision=o.revision, **o.chat.arguments)
    config = zoo.config(tokenizer.folder)
    o = finetune.resolve(o, config, width_lr=width_lr(o.lora))
    if o.teacher and (vocab := zoo.config(o.teacher).vocab_size) != config.vocab_size:
        raise ValueError(f"{o.teacher} has {vocab} tokens and {o.model} {config.vocab_size}: they must have the same.")

    # ----------------------------------------------------------------------------------------------------------- data
    if o.logits:
        rows, about = teacher.read(o.logits)
        of_tokens = about.get("tokenizer", about["data"].get("tokenizer"))  # older folders have it in "data"
        if of_tokens != tokenizer_hash(tokenizer) or about["seq_len"] != o.seq_len:
            raise ValueError(f"{o.logits} is of another tokenizer, or of rows of {about['seq_len']} tokens.")
        held = min(math.ceil(o.hold_out * len(rows)), len(rows) - 1)
        kept = Set(rows[: len(rows) - held], o.seed)
        data = reading(batches(order([kept], epochs=None if o.steps else o.epochs), o.batch, mesh=mesh))
        validation = reading(batches(rows[-held:], o.batch, mesh=mesh)) if held else None
        source, prompts, steps = about, [], o.steps or -(-len(kept.rows) * o.epochs // o.batch)
        source |= {"batch": o.batch, "seed": o.seed, "hold_out": o.hold_out}  # this run's, not those of the stored data
        source["logits"] = {"files": file_hashes(o.logits, [o.logits / teacher.ROWS])}
    else:
        settings = text_settings(o, config.vocab_size, completions_only=o.completions_only)
        once = dataclasses.replace(o, steps=0) if o.store else o
        learnt = open_data(once, mesh, tokenizer, TEXT, settings)
        report.opened(learnt.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)
        data, validation, prompts, steps = learnt.data, learnt.validation, learnt.prompts, learnt.steps
        source = {"data": learnt.source, "tokenizer": tokenizer_hash(tokenizer)}
    if o.teacher:
        source |= {"teacher": o.teacher, "teacher_weights": folder.weights_hash(o.teacher)}
    if o.store:
        return store(o, o.store, mesh, data, source)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, steps)
    task = loop.Task(
        data,
        functools.partial(objective, o=o),
        reference=zoo.load(o.teacher, dtype=o.compute_dtype, mesh=mesh) if o.teacher else None,
        validation=validation,
        prompts=prompts,
    )
    finetune.run(o, config, mesh, tokenizer, task, source=source)


def store(o: DistillOptions, to: pathlib.Path, mesh: Any, data: Any, source: dict[str, Any]) -> None:
    """Writes the teacher's largest logits for all batches to the folder `to`."""
    if jax.process_count() > 1 or mesh.shape[CONTEXT] > 1:
        raise ValueError("--store works in one process, with whole sequences: without context in --mesh.")
    with jax.set_mesh(mesh):
        larger = zoo.load(source["teacher"], dtype=o.compute_dtype, mesh=mesh)
        top = jax.jit(functools.partial(teacher.top_k, k=o.top_k))

        def with_logits(batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
            values, indices = map(gathered, top(larger, put_batch(batch, mesh, larger)))
            return batch | {"top_values": values, "top_indices": indices}

        bar = rich.progress.track(data, "Storing logits", console=rich.get_console())
        rows = teacher.write(to, map(with_logits, bar), source | {"top_k": o.top_k, "seq_len": o.seq_len})
    rich.print(f"{rows:,} rows of {o.seq_len:,} tokens are in {to}, with {o.top_k} logits of each token.")


if __name__ == "__main__":
    command(main, DistillOptions)
