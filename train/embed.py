"""A script that trains a model to embed texts: `python -m train.embed --help`.

An anchor, such as a question, is to be nearer to its positive, such as the answer, than to the positives of all other
groups in the step, on all devices, and to the hard negatives that records have. Or cosines are to follow scores that
records have. Without arguments the script teaches the embedded model `tiny` to find the answers to questions about
Python. Give `--model` and `--data` for your own. With `--lora.rank` only adapters are trained.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import train.tiny
import zoo
from kernels.mesh import CONTEXT
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.groups import EMBEDDED, GROUPS
from train.data.sets import DataOptions, open_data
from train.evaluate import retrieval
from train.evaluate.retrieval import Loss, Texts
from train.run import finetune, report
from train.run.defaults import resolve_steps, width_lr
from train.step import loss
from train.step.language import features
from train.step.microbatches import split
from train.step.step import Batch, Losses, Scalars
from train.step.task import Measure, Task
from zoo.mesh import make_mesh
from zoo.nn.heads import EmbeddingHead, normalized
from zoo.nn.model import AbstractModel
from zoo.nn.stack import Reports
from zoo.weights.heads import described


@dataclasses.dataclass(frozen=True, kw_only=True)
class EmbedOptions(finetune.FineTuningOptions):
    """Train a model that embeds. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "embed"

    data: tuple[str, ...] = option((str(train.tiny.INSTRUCTIONS),), group=Group.DATA, identity=False)
    """Files, folders of them, globs, URLs or hf:NAME; docs/heads.md lists the formats. A record has anchor and
    positive, and optionally negative; or question and answer; or a chat that begins with these."""
    loss: Loss = "contrastive"
    """contrastive: the anchor's positive is to be nearest (InfoNCE). cosent: the cosines of pairs are to have the order
    of the records' score. distill: the softmax of a group's cosines is to be that of the records' scores, such as a
    reranker's."""
    negatives: int = 0
    """Number of hard negatives that each record gives; further ones are left out."""
    temperature: float = 0.05
    """Number by which cosines are divided before the softmax. Less: near candidates count more."""
    margin: float | None = None
    """Candidates whose cosine exceeds that of the positive by more than this are taken for right answers, and not
    counted; 0.1 in Qwen3-Embedding. None: only texts that are equal are not counted."""
    symmetric: bool = False
    """Learn the way from positives to anchors, too, with --loss contrastive."""
    widths: tuple[int, ...] = ()
    """Numbers of the first features that are to do as embeddings, too, such as 64 256 (Matryoshka). The loss is the
    mean of theirs and that of the whole."""
    epochs: int = option(0, group=Group.STEP)
    """Number of times through the data, if --steps is 0. 0: 1 epoch, but 8 for the embedded questions."""
    mixture: Flat[DataOptions] = DataOptions()

    @property
    def parts(self) -> tuple[str, ...]:
        return ()

    @property
    def texts(self) -> int:
        """Returns the number of texts in a group."""
        return 2 + self.negatives


def objective(
    model: AbstractModel,
    batch: Batch,
    reference: Any = None,
    means: Scalars | None = None,
    *,
    options: EmbedOptions,
    parts: int = 1,
) -> Losses:
    """Computes the loss of a batch's groups (see `train.data.groups`), for `train.step.step.train_step`.

    The model reads the batch in so many `parts`, one after another, to save memory. The loss and its gradients are
    those of the whole batch (GradCache, arXiv:2101.06983).

    The sums are "loss"; and, if the loss is contrastive, "accuracy", the number of anchors whose positive is the
    nearest of the batch's candidates.
    """
    texts, reports = texts_of(model, batch, options.texts, parts)
    each = [of_groups(texts._replace(vectors=texts.vectors[..., :width]), options) for width in (*options.widths, None)]
    sums = {"loss": jnp.mean(jnp.stack([total for total, _ in each])), **each[-1][1]}
    return sums["loss"], jnp.sum(texts.present), sums, reports


def texts_of(model: AbstractModel, batch: Batch, texts: int, parts: int = 1) -> tuple[Texts, Reports]:
    """Embeds the texts of a batch, in parts. With several parts there are no reports."""
    head = model.head
    assert isinstance(head, EmbeddingHead), "`main` gives the model this head"

    def read(rows: Batch) -> tuple[Array, Reports]:
        x, reports = features(model, rows)
        return head(x, head.members(rows["tokens"], rows["segments"], GROUPS * texts)), reports

    if parts == 1:
        (vectors, reports), whole = read(batch), batch
    else:
        rows = split(dict(batch), parts)
        vectors, reports = loss.by_parts(lambda rows: read(rows)[0], rows), ()
        whole = {name: array.reshape(-1, array.shape[-1]) for name, array in rows.items()}
    options: Any = dict(segments=whole["segments"], mask=whole["loss_mask"], documents=GROUPS * texts)
    numbers = loss.at_last(whole["targets"], **options)
    scores = loss.per_document(whole["score"], **options) if "score" in whole else jnp.zeros(numbers.shape)
    groups = lambda array: array.reshape(-1, texts, *array.shape[2:])
    return Texts(groups(vectors.reshape(*numbers.shape, -1)), groups(numbers), groups(scores)), reports


def of_groups(texts: Texts, options: EmbedOptions) -> tuple[Float[Array, ""], Scalars]:
    """Computes the sum of the groups' losses, and other sums."""
    texts, total = texts._replace(vectors=normalized(texts.vectors)), lambda a: jnp.sum(jnp.where(texts.present, a, 0))
    if options.loss == "contrastive":
        losses, nearer = compared(texts.vectors, texts.numbers, options)
        return total(losses), {"accuracy": total((nearer == 0).astype(jnp.float32))}
    product = functools.partial(jnp.einsum, "gw,gtw->gt", precision=jax.lax.Precision.HIGHEST)
    cosines = product(texts.vectors[:, 0], texts.vectors[:, 1:])
    if options.loss == "cosent":
        value = loss.cosent(cosines[:, 0], texts.scores[:, 1], texts.present, temperature=options.temperature)
        return value * jnp.sum(texts.present).astype(jnp.float32), {}
    return total(loss.divergence(cosines / options.temperature, texts.scores[:, 1:], beta=0.0)), {}


def compared(
    vectors: Float[Array, "groups texts width"], numbers: Int[Array, "groups texts"], options: EmbedOptions
) -> tuple[Float[Array, " groups"], Int[Array, " groups"]]:
    """Computes the loss of each group, and the number of candidates that are nearer to its anchor than its positive.

    The candidates are the positives and the negatives of all groups. `numbers` are their hashes.
    """
    (groups, texts), there = numbers.shape, numbers >= 0
    anchors, positives, candidates = vectors[:, 0], vectors[:, 1], vectors[:, 1:].reshape(-1, vectors.shape[-1])
    cosines = functools.partial(jnp.einsum, "nw,mw->nm", precision=jax.lax.Precision.HIGHEST)
    same = lambda a, b: a[:, None] == b[None]
    scores, column = cosines(anchors, candidates), jnp.arange(groups * (texts - 1))
    own = same(jnp.arange(groups) * (texts - 1), column)
    nearest = jnp.sum(jnp.where(own, scores, 0), axis=1, keepdims=True)  # the cosine of the positive
    # A text that equals the positive is right, too, and so is the positive of an equal anchor.
    equal = same(numbers[:, 0], numbers[:, 0])
    right = same(numbers[:, 1], numbers[:, 1:].reshape(-1))
    right |= jnp.repeat(equal, texts - 1, axis=1) & (column % (texts - 1) == 0)[None]
    counted = there[:, 1:].reshape(-1)[None] & ~right
    if options.margin is not None:
        counted &= jax.lax.stop_gradient(scores) <= jax.lax.stop_gradient(nearest) + options.margin
    losses = loss.info_nce(scores, own, counted, temperature=options.temperature)
    if options.symmetric:
        others = there[None, :, 0] & ~equal & ~same(numbers[:, 1], numbers[:, 1])
        of_positives = cosines(positives, anchors)
        back = loss.info_nce(of_positives, jnp.eye(groups, dtype=bool), others, temperature=options.temperature)
        losses = (losses + back) / 2
    return losses, jnp.sum(counted & (scores > nearest), axis=1)


def main(o: EmbedOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    o.refuse_vision("texts are embedded")
    if o.validation.tasks.eval_tasks:
        raise ValueError("--eval-tasks asks a language model, and a model that embeds writes nothing; leave it out.")
    mesh = make_mesh(o.step.mesh)
    if mesh.shape[CONTEXT] > 1:
        raise ValueError("--mesh: context splits texts, which are embedded whole; take fsdp.")
    model = o.source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, **o.chat.arguments), model.config
    embedded = o.data == (str(train.tiny.INSTRUCTIONS),)  # few records and a small model: other defaults do well
    epochs, lr = o.epochs or (8 if embedded else 1), o.optim.lr or (1e-3 if embedded else 0.0)
    o = finetune.resolve(o.changed(epochs=epochs, lr=lr), config, width_lr=width_lr(o.lora))
    head = described("embedding", model.config_json, config)
    if o.lora.rank and jax.tree.leaves(head):
        raise ValueError(
            f"--lora.rank: {o.model} has linear maps behind its pooling, which no adapter's file can hold."
        )
    if wide := [width for width in o.widths if not 0 < width < config.hidden_size]:
        raise ValueError(f"--widths {wide[0]}: the model has {config.hidden_size} features.")
    if o.loss == "distill" and not o.negatives:
        raise ValueError("--loss distill compares the texts of a group: give --negatives.")
    if o.loss == "cosent" and o.negatives:
        raise ValueError("--loss cosent reads pairs with a score: leave out --negatives.")
    if o.step.microbatches > 1 and (o.router.router_balance or o.router.router_sequence or o.router.router_z):
        raise ValueError("--microbatches: the losses of routers are not computed in parts; leave one of both out.")
    if o.step.microbatches > 1 and o.optim.qk_clip:
        raise ValueError("--microbatches: --qk-clip is not computed in parts here; leave one of both out.")
    # The objective reads the batch in parts, so that the loss is that of the whole; --remat auto would choose others.
    parts, remat = o.step.microbatches, "dots" if o.step.remat == "auto" else o.step.remat
    o = o.changed(microbatches=1, remat=remat)

    # ----------------------------------------------------------------------------------------------------------- data
    settings = {"vocab_size": config.vocab_size, "texts": o.texts, "scored": o.loss != "contrastive", "pad": None}
    whole = o.phase(o.data, o.mixture.weights)
    opened = open_data(o.mixture, whole, o.reading(o.epochs), mesh, tokenizer, EMBEDDED, settings)
    report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, opened.steps)
    measure = Measure(
        lambda model, batch: texts_of(model, batch, o.texts)[0], functools.partial(retrieval.metrics, loss=o.loss)
    )
    objective_of = functools.partial(objective, options=o, parts=parts)
    task = Task(opened.data, objective_of, validation=opened.validation, measure=measure)
    finetune.run(o, model, mesh, tokenizer, task, data=opened.source, head=head)


if __name__ == "__main__":
    command(main, EmbedOptions)
