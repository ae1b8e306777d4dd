"""A script that distils a larger model's predictions into a model: `python -m train.distill --help`.

With `--teacher` alone, the teacher runs beside the student. `--store` writes the teacher's largest logits to a folder
instead, and `--logits` learns from such a folder, without the teacher. With `--on-policy` the student learns from its
own completions (`train.methods.on_policy`).
"""

import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Mapping
from typing import Any, ClassVar

import grain
import jax
import jax.numpy as jnp
import numpy as np
import rich
import rich.progress
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
import train.tiny
import zoo
from kernels.mesh import BATCH, CONTEXT
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.packing import DATE, TEXT, PackingOptions, file_hashes, fingerprint, tokenizer_hash
from train.data.records import open_records
from train.data.rows import Rows, batches, concatenated, order, read_ahead
from train.data.sets import DataOptions, open_data
from train.data.store import is_store
from train.methods import on_policy, teacher
from train.methods.alignment import Alignment, tokens_of
from train.methods.texts import rows_of
from train.run import finetune, folder, report
from train.run.defaults import resolve_steps, width_lr
from train.state.mesh import put_batch
from train.step import loss
from train.step.language import features
from train.step.step import Batch, Losses, Scalars
from train.step.task import Task
from zoo.generation.generate import Encoded
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractModel
from zoo.source import Source
from zoo.surgery import cast
from zoo.text.tokenizer import Tokenizer
from zoo.weights.gather import gathered


EVALUATED = 64  # held-out prompts at most


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillOptions(finetune.FineTuningOptions):
    """Distil a model. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "distill"

    teacher: tuple[str, ...] = ()
    """Larger model: a zoo name, a Hub repository org/name, or a folder. It must have the student's vocabulary, unless
    with --on-policy. There, several are NAME=MODEL: the field `teacher` of a record, or the name of its file, names
    one."""
    store: pathlib.Path | None = None
    """Folder to write the teacher's logits to. It gets those of all --epochs of the data, and nothing is trained."""
    logits: pathlib.Path | None = None
    """Folder that --store has written. The model learns from it instead of --data."""
    top_k: int | None = option(None, rare=True)
    """Number of the teacher's largest logits of each token: those that --store keeps, at six bytes each (None: 64), or
    that --on-policy compares, with all others as one (None: all)."""
    data: tuple[str, ...] = option((str(train.tiny.INSTRUCTIONS),), group=Group.DATA, identity=False)
    """Files, folders of them, or prepared stores, as for train.sft."""
    completions_only: bool = True
    """Learn completions and the assistant's messages, no prompts."""
    epochs: int = option(1, group=Group.STEP)
    """Number of times through the data, if --steps is 0."""
    beta: float | None = None
    """Kind of divergence. 0: the forward KL(teacher || student). 1: the reverse. In between: mixed as in GKD. Stored
    logits allow the forward KL alone. None: 1 with --on-policy, else 0."""
    temperature: float = option(1.0, rare=True)
    """Number that both models' logits are divided by, also in sampling. The loss is multiplied by the square of this
    number (Hinton et al., 2015)."""
    weight: float = 1.0
    """Weight of the divergence, from 0 to 1. The rest is the weight of the cross-entropy of the data's own tokens."""
    policy: Flat[on_policy.OnPolicyOptions] = on_policy.OnPolicyOptions()
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

    `reference` is the teacher, or `Teachers` of completions. If it is None, the batch has the teacher's logits,
    "top_values" and "top_indices".

    The sums are "loss" and "divergence"; with a `weight` below 1 also "cross_entropy" and "accuracy" on the data's own
    tokens.
    """
    x, reports = features(model, batch)
    if reference is None:
        divergence = functools.partial(loss.divergence_top_k, temperature=options.temperature)
        given = (batch["top_values"].astype(jnp.float32), batch["top_indices"])
        each = loss.by_chunks(lambda x, *given: divergence(model.unembed(x), *given), x, *given)
    elif isinstance(reference, on_policy.Teachers):
        how: Any = dict(beta=options.beta, temperature=options.temperature, top_k=options.top_k)
        each = reference.divergences(model, x, batch, **how)
    else:
        divergence = functools.partial(loss.divergence, beta=options.beta or 0.0, temperature=options.temperature)
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
    if o.policy.on_policy or o.policy.hint:
        return learn_on_policy(o)
    if bool(o.teacher) == (o.logits is not None) or (o.store and o.logits):
        raise ValueError("Give --teacher, to learn from it or to --store its logits; or --logits, to learn from those.")
    if o.logits and o.beta:
        raise ValueError(f"--beta {o.beta} needs all of the teacher's logits; of stored ones there is the forward KL.")
    if len(o.teacher) > 1:
        raise ValueError("Several teachers need --on-policy, which chooses one for each record.")
    if o.top_k is not None and not o.store:
        raise ValueError("--top-k is for --store and --on-policy; without them all logits are compared.")
    mesh = make_mesh(o.step.mesh)
    o.refuse_vision("stored logits have no images")
    model, larger = o.source.open(o.model, o.revision), o.source.open(o.teacher[0]) if o.teacher else None
    tokenizer, config = zoo.tokenizer(model, **o.chat.arguments), model.config
    o = finetune.resolve(o.changed(beta=o.beta or 0.0), config, width_lr=width_lr(o.lora))
    if larger and (vocab := larger.config.vocab_size) != config.vocab_size:
        raise ValueError(
            f"{o.teacher[0]} has {vocab} tokens, and {o.model} {config.vocab_size}; take a teacher with the same."
        )

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
        source |= {"teacher": o.teacher[0], "teacher_weights": folder.weights_hash(larger)}
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


def learn_on_policy(o: DistillOptions) -> None:
    """Trains by the student's own completions."""
    # --------------------------------------------------------------------------------------------------- mesh, models
    own, batch = o.policy, o.step.batch
    if not 0 < own.on_policy <= 1:
        raise ValueError(f"--on-policy {own.on_policy} is a share of the steps, from 0 to 1, and above 0 with --hint.")
    if not o.teacher and own.hint is None:
        raise ValueError("--on-policy needs a --teacher; or a --hint, with which the model teaches itself.")
    for name, given in (
        ("logits", o.logits), ("store", o.store), ("weight", o.weight < 1), ("weights", o.mixture.weights),
        ("phases", o.mixture.phases), ("no-completions-only", not o.completions_only),
    ):  # fmt: skip
        if given:
            raise ValueError(f"--{name} does not go with --on-policy, whose completions are the model's; leave it out.")
    mesh = make_mesh(o.step.mesh)
    o.refuse_vision("teachers of completions read text alone")
    model = o.source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, **o.chat.arguments), model.config
    o = finetune.resolve(o.changed(beta=1.0 if o.beta is None else o.beta), config, width_lr=width_lr(o.lora))
    seq_len, dtype = o.step.seq_len, o.step.compute_dtype
    teachers, names, others, source = open_teachers(o, model, tokenizer, mesh)

    # ----------------------------------------------------------------------------------------------------------- data
    room = seq_len + 1 - own.max_new_tokens
    parts, shares = o.step.microbatches, math.prod(mesh.shape[axis] for axis in BATCH)
    rows = on_policy.Rows(
        tokenizer, config.vocab_size, names, others, own.hint, own.on_policy < 1, rows_of(batch, shares * parts),
        seq_len, room, parts,
    )  # fmt: skip
    if stores := [path for path in o.data if is_store(path)]:
        raise ValueError(f"--on-policy reads records, and {stores[0]} is a prepared store; give the files that it has.")
    opened = [open_records(path, o.mixture.hold_out, o.mixture.naming.columns) for path in o.data]
    records, held = concatenated([kept for kept, _ in opened]), [held for _, held in opened if held]
    looked_at = [rows.question(record) for record in itertools.islice(records, 200)]
    if not any(map(rows.fits, looked_at)):
        raise ValueError(f"No prompt has at most {room} tokens, --seq-len without --max-new-tokens; raise the former.")
    batched = lambda records: records.map(rows.question).to_iter_dataset().filter(rows.fits).batch(batch, batch_fn=list)
    data = batched(records.shuffle(seed=o.seed).repeat())
    validation = batched(concatenated(held)[:EVALUATED]) if held else None
    source |= {"data": [fingerprint(path, tokenizer) for path in o.data], "seed": o.seed, "seq_len": seq_len}
    source |= {"batch": batch, "hold_out": o.mixture.hold_out}
    source |= {"columns": " ".join(columns)} if (columns := o.mixture.naming.columns) else {}

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, o.optim.steps or -(-len(records) * o.epochs // batch))
    compute = functools.partial(objective, options=o)
    numbers = jax.jit(lambda model, batch, teachers: compute(cast(model, dtype), batch, teachers)[1:3])

    def measure(model: AbstractModel, batch: Mapping[str, np.ndarray]) -> dict[str, float]:
        count, sums = jax.device_get(numbers(model, put_batch(batch, mesh, model, teachers), teachers))
        return {name: float(value) / max(1.0, float(count)) for name, value in sums.items()}

    task = Task(
        data,
        compute,
        reference=teachers,
        validation=validation,
        prompts=[Encoded(question.prompt.ids) for question in looked_at[:3]],
        rollout=functools.partial(
            on_policy.rollout, options=own, temperature=o.temperature, rows=rows, measure=measure, mesh=mesh,
            dtype=dtype, seed=o.seed,
        ),
        example=rows.padding(batch),
    )  # fmt: skip
    finetune.run(o, model, mesh, tokenizer, task, data=source)


def open_teachers(
    options: DistillOptions, model: Source, tokenizer: Tokenizer, mesh: Mesh
) -> tuple[on_policy.Teachers, list[str], list[Tokenizer | None], dict[str, Any]]:
    """Loads the teachers of --on-policy.

    Returns them, their names, the tokenizers of those that have other tokens than the student, and their identity.

    Raises:
        ValueError: one of several has no name, or its tokens can't be aligned with the student's.
    """
    if not options.teacher:
        own = None if options.lora.rank else finetune.load_frozen(options, model, mesh)
        return on_policy.Teachers((on_policy.Teacher(own),)), [""], [None], {"hint": options.policy.hint}
    several, found, names, others = len(options.teacher) > 1, [], [], []
    identity: dict[str, Any] = {"teacher": [], "teacher_weights": []}
    for given in options.teacher:
        name, equals, path = given.partition("=") if several else ("", "=", given)
        if not equals or name in names:
            raise ValueError(f"--teacher {given!r}: of several, each has a name of its own, such as math=runs/math.")
        larger = options.source.open(path)
        other = zoo.tokenizer(larger, date=DATE)
        teacher = on_policy.Teacher(zoo.load(larger, dtype=options.step.compute_dtype, mesh=mesh))
        same = larger.config.vocab_size == model.config.vocab_size and tokens_of(other) == tokens_of(tokenizer)
        if not same:
            both = Alignment.of(tokenizer, other)
            ids = both.ours, both.theirs, both.our_ends, both.their_ends
            ours, theirs, *ends = (jax.device_put(each, NamedSharding(mesh, P())) for each in ids)
            teacher = on_policy.Teacher(teacher.model, (ours, theirs), (ends[0], ends[1]))
        found.append(teacher)
        names.append(name)
        others.append(None if same else other)
        identity["teacher"].append(given)
        identity["teacher_weights"].append(folder.weights_hash(larger))
    return on_policy.Teachers(tuple(found)), names, others, identity | {"hint": options.policy.hint}


def store(
    options: DistillOptions, to: pathlib.Path, larger: Source, mesh: Mesh, data: grain.IterDataset,
    about: dict[str, Any],
) -> None:  # fmt: skip
    """Writes the largest logits of the teacher, `larger`, for all batches to the folder `to`."""
    seq_len, k = options.step.seq_len, options.top_k or 64
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
