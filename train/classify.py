"""A script that trains a classifier of texts or chats, or a model that decides: `python -m train.classify --help`.

The model's output embeddings give way to a head with a row for each label, which reads a text's last token. With
`--lora.rank` only adapters and the head are trained. A checkpoint that is a classifier already keeps its labels and its
head, and goes on learning.

A model that decides answers questions of choice and score in one pass (`zoo.decide`). It keeps its output embeddings,
and learns the logits of the labels of a question's options.
"""

import dataclasses
import functools
import itertools
import json
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import zoo
from convert.files import DECISION
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.labelled import BITS, LABELLED, QUESTIONS, TEXTS, has_several, is_question, labels_of
from train.data.records import open_records
from train.data.sets import DataOptions, open_data
from train.evaluate import calibration, validation
from train.evaluate.calibration import Answers
from train.run import finetune, report
from train.run.defaults import resolve_steps, width_lr
from train.step.language import features
from train.step.loss import at_last
from train.step.step import Batch, Losses, Scalars
from train.step.task import Measure, Task
from train.watch.metrics import read_metrics
from zoo.mesh import make_mesh
from zoo.nn.heads import ClassificationHead, pool
from zoo.nn.model import AbstractModel
from zoo.nn.stack import Reports
from zoo.text.questions import KINDS, Settings
from zoo.text.tokenizer import Tokenizer
from zoo.weights.heads import has_several_labels, is_classifier, labels_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyOptions(finetune.FineTuningOptions):
    """Train a classifier. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "classify"

    data: tuple[str, ...] = option((), group=Group.DATA, identity=False)
    """Files, folders of them, globs, URLs or hf:NAME; docs/classify.md lists the formats. A record has a label, or a
    list of labels, and text or messages; or it has state, question and answer."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of the model's outputs. (): those of a classifier that goes on learning, or
    else those of the records, sorted."""
    epochs: int = option(3, group=Group.STEP)
    """Number of times through the data, if --steps is 0."""
    mixture: Flat[DataOptions] = DataOptions()

    @property
    def parts(self) -> tuple[str, ...]:
        return ()


Table = tuple[tuple[int, ...], ...]  # tokens of the labels of each type of questions


def answers(model: AbstractModel, batch: Batch, table: Table | None = None) -> tuple[Answers, Reports]:
    """Computes the logits of a batch's texts (see `train.data.labelled`), by the model's head.

    Args:
        table: the tokens whose logits answer questions; the model then has no head.
    """
    x, reports = features(model, batch)
    of_texts = functools.partial(at_last, segments=batch["segments"], mask=batch["loss_mask"], documents=TEXTS)
    target = of_texts(batch["targets"])
    here = (batch["segments"][:, None] == jnp.arange(1, TEXTS + 1)[None, :, None]) & (batch["loss_mask"] != 0)[:, None]
    last = pool(x, here, "lasttoken")
    kind = jnp.full_like(target, -1)
    if table is None:
        assert isinstance(model.head, ClassificationHead), "`main` gives the model this head"
        logits = model.head.score(last).astype(jnp.float32)
    else:
        kind, count = of_texts(batch["kind"]), of_texts(batch["options"])
        of_kinds = jnp.take(model.unembed(last).astype(jnp.float32), jnp.asarray(table), axis=-1)
        is_kind = kind[..., None] == jnp.arange(len(table))[None, None]
        logits = jnp.sum(jnp.where(is_kind[..., None], of_kinds, 0), axis=-2)
        options = jnp.arange(logits.shape[-1])[None, None] < jnp.maximum(count, 1)[..., None]
        logits = jnp.where(options, logits, -jnp.inf)
    flat = lambda a: a.reshape(-1, *a.shape[2:])
    return Answers(*map(flat, (logits, target, kind, target >= 0))), reports


def objective(
    model: AbstractModel,
    batch: Batch,
    reference: Any = None,
    means: Scalars | None = None,
    *,
    several: bool = False,
    table: Table | None = None,
) -> Losses:
    """Computes the cross-entropy of a batch's labels, for `train.step.step.train_step`.

    The sums are "loss", in nats; "accuracy", the number of texts whose label has the largest logit; and "brier_score",
    the squared distances of the probabilities from 1 for the label and 0 for the others, which calibration lowers.

    If texts have `several` labels, each label is right or not by its own: "loss" and "brier_score" are the means over
    the labels, and "accuracy" counts texts whose labels all have positive logits, and no others.
    """
    found, reports = answers(model, batch, table)
    logits, labels = found.logits, jnp.arange(found.logits.shape[-1])[None]
    if several:
        right = (jnp.maximum(found.target, 0)[:, None] >> labels & 1).astype(jnp.float32)
        metrics = {
            "loss": jnp.mean(jax.nn.softplus(logits) - right * logits, axis=-1),
            "accuracy": jnp.all((logits > 0) == (right > 0), axis=-1).astype(jnp.float32),
            "brier_score": jnp.mean(jnp.square(jax.nn.sigmoid(logits) - right), axis=-1),
        }
    else:
        right = found.target[:, None] == labels
        logp = jax.nn.log_softmax(logits, axis=-1)
        of_label = jnp.sum(jnp.where(right, logp, 0), axis=-1)
        metrics = {
            "loss": -of_label,
            "accuracy": (of_label >= jnp.max(logp, axis=-1)).astype(jnp.float32),
            "brier_score": jnp.sum(jnp.square(jnp.exp(logp) - right.astype(jnp.float32)), axis=-1),
        }
    sums = {name: jnp.sum(jnp.where(found.present, values, 0)) for name, values in metrics.items()}
    return sums["loss"], jnp.sum(found.present), sums, reports


def label_table(tokenizer: Tokenizer) -> Table:
    """Returns the tokens of the labels of each type of questions, in rows of one length.

    Labels that are no single tokens have their first; `train.data.labelled` refuses questions with these.
    """
    labels = Settings.of(tokenizer.folder).labels
    most = max(len(labels[kind]) for kind in KINDS)
    first = lambda kind: tuple(tokenizer.encode(label, special=False)[0] for label in labels[kind])
    return tuple(first(kind) + (0,) * (most - len(labels[kind])) for kind in KINDS)


def main(o: ClassifyOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    o.refuse_vision("labels are those of text")
    if not o.data:
        raise ValueError("--data names records with a text, or messages, and a label.")
    if o.validation.tasks.eval_tasks:
        raise ValueError("--eval-tasks asks a language model, and a classifier writes nothing; leave it out.")
    mesh = make_mesh(o.step.mesh)
    model = o.source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, **o.chat.arguments), model.config
    o = finetune.resolve(o, config, width_lr=width_lr(o.lora))
    stated = model.config_json.get("pad_token_id")
    pad = tokenizer.pad if stated is None else stated
    records = [open_records(path, 0.0, o.mixture.naming.columns)[0] for path in o.data]
    first = next(iter(records[0]))
    decides, several = is_question(first), has_several(first)

    # ----------------------------------------------------------------------------------------------------------- data
    if decides:
        head, table, settings = None, label_table(tokenizer), {"vocab_size": config.vocab_size}
    else:
        own = labels_in(model.config_json) if is_classifier(model.config_json) else ()
        if own and o.labels and o.labels != own:
            given = " ".join(o.labels)
            raise ValueError(f"--labels {given}: {o.model} has the labels {' '.join(own)}; leave them out.")
        if own and has_several_labels(model.config_json) != several:
            raise ValueError(f"{o.model} gives a text {'one label' if several else 'several'}, and the records do not.")
        labels, table = own or o.labels or labels_of(itertools.chain(*records)), None
        if several and len(labels) > BITS:
            raise ValueError(f"There are {len(labels)} labels; texts have several of at most {BITS}.")
        head = ClassificationHead(config.hidden_size, labels, pad, several=several, key=jax.random.key(o.seed))
        settings = {"vocab_size": config.vocab_size, "labels": labels, "pad": pad, "several": several}
    whole, kind = o.phase(o.data, o.mixture.weights), QUESTIONS if decides else LABELLED
    opened = open_data(o.mixture, whole, o.reading(o.epochs), mesh, tokenizer, kind, settings)
    report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, opened.steps)
    measure = Measure(
        lambda model, batch: answers(model, batch, table)[0],
        functools.partial(calibration.metrics, several=several),
    )
    learnt = functools.partial(objective, several=several, table=table)
    task = Task(opened.data, learnt, validation=opened.validation, measure=measure)
    exported = finetune.run(o, model, mesh, tokenizer, task, data=opened.source, head=head)
    if exported and decides and jax.process_index() == 0:
        write_temperatures(exported, o, tokenizer)


def write_temperatures(exported: pathlib.Path, o: ClassifyOptions, tokenizer: Tokenizer) -> None:
    """Writes the temperatures that suit the validation data best into the decision.json of the exported model."""
    lines = [line for line in read_metrics(exported.parent / "metrics.jsonl") if "validation_loss" in line]
    if o.validation.keeps_best:
        metric = o.validation.best or "validation_loss"
        step = validation.best(metric, [[line["step"], line[metric]] for line in lines])[0]
        lines = [line for line in lines if line["step"] == step]
    found = {kind: lines[-1].get(f"validation_temperature_{kind}") for kind in KINDS} if lines else {}
    settings = Settings.of(tokenizer.folder)
    stated = {
        "labels": {kind: list(labels) for kind, labels in settings.labels.items()},
        "temperature": dict(settings.temperature) | {kind: value for kind, value in found.items() if value},
        "noul_options": list(settings.noul),
    }
    (exported / DECISION).write_text(json.dumps(stated, indent=2) + "\n")


if __name__ == "__main__":
    command(main, ClassifyOptions)
