"""A script that trains a classifier of texts or chats: `python -m train.classify --help`.

The model's output embeddings give way to a head with a row for each label, which reads a text's last token. With
`--lora.rank` only adapters and the head are trained. A checkpoint that is a classifier already keeps its labels and its
head, and goes on learning.
"""

import dataclasses
import itertools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import zoo
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.labelled import LABELLED, labels_of
from train.data.records import open_records
from train.data.sets import DataOptions, open_data
from train.run import finetune, report
from train.run.defaults import resolve_steps, width_lr
from train.step.language import features
from train.step.step import Batch, Losses, Scalars
from train.step.task import Task
from zoo.mesh import make_mesh
from zoo.nn.heads import ClassificationHead
from zoo.nn.model import AbstractModel
from zoo.source import Source
from zoo.weights.heads import is_classifier, labels_in


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifyOptions(finetune.FineTuningOptions):
    """Train a classifier. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "classify"

    data: tuple[str, ...] = option((), group=Group.DATA, identity=False)
    """Files, folders of them, globs, URLs or hf:NAME; docs/data.md lists the formats. A record has a label, and text or
    messages."""
    labels: tuple[str, ...] = ()
    """Names of the labels, in the order of the model's outputs. (): those of a classifier that goes on learning, or
    else those of the records, sorted."""
    epochs: int = option(3, group=Group.STEP)
    """Number of times through the data, if --steps is 0."""
    mixture: Flat[DataOptions] = DataOptions()

    @property
    def parts(self) -> tuple[str, ...]:
        return ()


def objective(model: AbstractModel, batch: Batch, reference: Any = None, means: Scalars | None = None) -> Losses:
    """Computes the cross-entropy of a batch's labels (see `train.data.labelled`), for `train.step.step.train_step`.

    The sums are "loss", in nats; "accuracy", the number of texts whose label has the largest logit; and "brier_score",
    the squared distances of the probabilities from 1 for the label and 0 for the others, which calibration lowers.
    """
    x, reports = features(model, batch)
    assert isinstance(model.head, ClassificationHead), "`main` gives the model this head"
    logits = model.head.score(x).astype(jnp.float32)
    is_label = jax.lax.broadcasted_iota(batch["targets"].dtype, logits.shape, 2) == batch["targets"][..., None]
    logp = jax.nn.log_softmax(logits, axis=-1)
    metrics = {
        "loss": -jnp.sum(jnp.where(is_label, logp, 0), axis=-1),
        "accuracy": (jnp.sum(jnp.where(is_label, logp, 0), axis=-1) >= jnp.max(logp, axis=-1)).astype(jnp.float32),
        "brier_score": jnp.sum(jnp.square(jnp.exp(logp) - is_label.astype(jnp.float32)), axis=-1),
    }
    learnt = batch["loss_mask"] != 0
    sums = {name: jnp.sum(jnp.where(learnt, values, 0)) for name, values in metrics.items()}
    return sums["loss"], jnp.sum(learnt), sums, reports


def main(o: ClassifyOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    o.refuse_vision("labels are those of text")
    if not o.data:
        raise ValueError("--data names records with a text, or messages, and a label.")
    if o.validation.tasks.eval_tasks:
        raise ValueError("--eval-tasks asks a language model, and a classifier writes nothing; leave it out.")
    mesh = make_mesh(o.step.mesh)
    model = Source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, **o.chat.arguments), model.config
    o = finetune.resolve(o, config, width_lr=width_lr(o.lora))
    stated = model.config_json.get("pad_token_id")
    pad = tokenizer.pad if stated is None else stated
    own = labels_in(model.config_json) if is_classifier(model.config_json) else ()
    if own and o.labels and o.labels != own:
        raise ValueError(f"--labels {' '.join(o.labels)}: {o.model} has the labels {' '.join(own)}; leave them out.")
    records = itertools.chain(*(open_records(path, 0.0, o.mixture.naming.columns)[0] for path in o.data))
    labels = own or o.labels or labels_of(records)
    head = ClassificationHead(config.hidden_size, labels, pad, key=jax.random.key(o.seed))

    # ----------------------------------------------------------------------------------------------------------- data
    settings = {"vocab_size": config.vocab_size, "labels": labels, "pad": pad}
    whole = o.phase(o.data, o.mixture.weights)
    opened = open_data(o.mixture, whole, o.reading(o.epochs), mesh, tokenizer, LABELLED, settings)
    report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, opened.steps)
    task = Task(opened.data, objective, validation=opened.validation)
    finetune.run(o, model, mesh, tokenizer, task, data=opened.source, head=head)


if __name__ == "__main__":
    command(main, ClassifyOptions)
