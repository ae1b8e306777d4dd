"""A script that trains a model on preferences, by DPO, IPO, ORPO or KTO: `python -m train.dpo --help`.

Without arguments it teaches the embedded model `tiny` to prefer whole answers to answers that break off or go on about
something else; that takes less than a minute on two CPU cores. Give `--model` and `--data` for your own. With
`--lora.rank` only adapters are trained, and the reference is the model without adapters.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

import train.tiny
import zoo
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data.preferences import PAIRS, PREFERENCES
from train.data.sets import DataOptions, open_data
from train.run import finetune, report
from train.run.defaults import resolve_steps, width_lr
from train.step import loss
from train.step.language import features
from train.step.step import Batch, Losses, Scalars
from train.step.task import Task
from zoo import lora
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractModel
from zoo.nn.stack import Reports


class Pairs(NamedTuple):
    """The pairs of a batch, from which losses are computed. A pair has a first and a second completion."""

    # Log-probabilities minus the reference's; without a reference, the mean log-probability of a completion's tokens.
    first: Float[Array, "batch pairs"]
    second: Float[Array, "batch pairs"]
    lengths: tuple[Float[Array, "batch pairs"], Float[Array, "batch pairs"]]  # numbers of tokens, at least 1
    desirable: Bool[Array, "batch pairs"]  # whether the first completion is desirable
    baseline: Float[Array, ""]  # 0 for losses that compare the two completions


@dataclasses.dataclass(frozen=True)
class Loss:
    """A row of `LOSSES`."""

    of: Callable[[Any, Pairs], Float[Array, "batch pairs"]]
    """Options and pairs -> the loss of each pair. Formulas are in `train.step.loss`."""
    reference: bool = True
    """Whether the loss needs the reference model's log-probabilities."""
    unpaired: bool = False
    """Whether the loss learns from first completions alone, and uses second completions only for a baseline: see
    `train.data.preferences`."""


LOSSES = {
    "dpo": Loss(lambda o, p: loss.dpo(p.first, p.second, beta=o.beta, label_smoothing=o.label_smoothing)),
    "ipo": Loss(lambda o, p: loss.ipo(p.first / p.lengths[0], p.second / p.lengths[1], beta=o.beta)),
    "orpo": Loss(lambda o, p: loss.orpo(p.first, p.second, beta=o.beta), reference=False),
    "kto": Loss(
        lambda o, p: loss.kto(
            p.first, p.desirable, p.baseline,
            beta=o.beta, desirable_weight=o.desirable_weight, undesirable_weight=o.undesirable_weight,
        ),
        unpaired=True,
    ),
}  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class DPOOptions(finetune.FineTuningOptions):
    """Teach a model preferences. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "dpo"

    data: tuple[str, ...] = option((str(train.tiny.PREFERENCES),), group=Group.DATA, identity=False)
    """Files, folders of them, globs, URLs, hf:NAME, or prepared stores; docs/data.md lists the formats. The keys of a
    record decide its kind: chosen and rejected, and prompt unless they share their beginning; or, for kto alone,
    prompt, completion and label."""
    loss: Literal[tuple(LOSSES)] = "dpo"  # pyright: ignore[reportInvalidTypeForm]
    """Loss. dpo, ipo and orpo compare two completions, orpo without a reference model. kto rates each completion by
    itself."""
    beta: float = 0.1
    """Strength with which the model is kept near the reference; the tau of ipo. For orpo, which has no reference, the
    weight of the comparison (its lambda)."""
    label_smoothing: float = 0.0
    """Fraction of the preferences that are assumed to be wrong, for dpo (conservative DPO)."""
    desirable_weight: float = option(1.0, rare=True)
    """Weight of desirable completions, for kto."""
    undesirable_weight: float = option(1.0, rare=True)
    """Weight of undesirable completions, for kto. The two weights should be in inverse proportion to the numbers of
    desirable and undesirable completions."""
    epochs: int = option(0, group=Group.STEP)
    """Number of times through the data, if --steps is 0. 0: 1 epoch, but 4 for the embedded preferences."""
    mixture: Flat[DataOptions] = DataOptions()

    @property
    def parts(self) -> tuple[str, ...]:
        return ("vision",) * self.vision


def objective(
    model: AbstractModel,
    batch: Batch,
    reference: Any = None,
    means: Scalars | None = None,
    *,
    options: DPOOptions,
) -> Losses:
    """Computes the loss of a batch's pairs (see `train.data.preferences`), for `train.step.step.train_step`.

    `reference` is the model to stay near to; None means this model without its adapters.

    The sums are, for losses that compare completions:

    - "loss";
    - "chosen_logps" and "rejected_logps", the log-probabilities of completions;
    - "chosen_reward" and "rejected_reward", beta times the completions' log-ratios to the reference, or for orpo, which
      has no reference, beta times the mean log-probability of their tokens;
    - "margin", the difference of the two rewards; and "accuracy", the number of pairs with a positive margin.

    For kto they are:

    - "loss";
    - "mismatched", the log-ratios of completions after the prompts of other records;
    - "kl", the baseline: the mean of these log-ratios over the whole batch, or 0 if that is negative;
    - "margin", the distance of a completion's reward from the baseline's, positive on the right side; and "accuracy",
      as above.
    """
    row, mask = LOSSES[options.loss], batch["loss_mask"]
    sums = functools.partial(loss.per_document, segments=batch["segments"], mask=mask, documents=2 * PAIRS)

    def completions(model: AbstractModel) -> tuple[Float[Array, "batch documents"], Reports]:
        """Computes the log-probabilities of each row's completions."""
        x, reports = features(model, batch)
        return sums(loss.logprobs(model.unembed, x, batch["targets"])[0]), reports

    logps, reports = completions(model)
    lengths = sums(jnp.ones(mask.shape, jnp.float32))
    present, tokens = lengths[:, ::2] > 0, jnp.maximum(lengths, 1)
    if row.reference:
        scores = logps - jax.lax.stop_gradient(completions(lora.bare(model) if reference is None else reference)[0])
    else:
        scores = logps / tokens
    first, second, desirable, baseline = scores[:, ::2], scores[:, 1::2], present, jnp.zeros(())
    if row.unpaired:
        desirable = sums(batch["desirable"].astype(jnp.float32))[:, ::2] > 0
        baseline = loss.kto_baseline(second, present) if means is None else jnp.maximum(means["mismatched"], 0)
        margin = options.beta * jnp.where(desirable, first - baseline, baseline - first)
        metrics = {"kl": jnp.broadcast_to(baseline, margin.shape), "mismatched": second}
    else:
        margin = options.beta * (first - second)
        metrics = {
            "chosen_reward": options.beta * first, "rejected_reward": options.beta * second,
            "chosen_logps": logps[:, ::2], "rejected_logps": logps[:, 1::2],
        }  # fmt: skip
    losses = row.of(options, Pairs(first, second, (tokens[:, ::2], tokens[:, 1::2]), desirable, baseline))
    metrics |= {"loss": losses, "margin": margin, "accuracy": (margin > 0).astype(jnp.float32)}
    totals = {name: jnp.sum(jnp.where(present, values, 0)) for name, values in metrics.items()}
    pairs = jnp.sum(jnp.max(batch["segments"], axis=1)) // 2
    return totals["loss"], pairs, totals, reports


def main(o: DPOOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.step.mesh)
    model = o.source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, parts=o.parts, **o.chat.arguments), model.config
    embedded = o.data == (str(train.tiny.PREFERENCES),)  # few records and a small model: other defaults do well
    epochs, lr = o.epochs or (4 if embedded else 1), o.optim.lr or (2e-4 if embedded else 0.0)
    # A twentieth of fine-tuning's learning rate: preferences are learnt at 1e-6 or so (TRL's default).
    rate, row = width_lr(o.lora) / 20, LOSSES[o.loss]
    o = finetune.resolve(o.changed(epochs=epochs, lr=lr), config, width_lr=rate)

    # ----------------------------------------------------------------------------------------------------------- data
    settings = {"vocab_size": config.vocab_size, "unpaired": row.unpaired}
    whole = o.phase(o.data, o.mixture.weights)
    opened = open_data(o.mixture, whole, o.reading(o.epochs), mesh, tokenizer, PREFERENCES, settings)
    report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, opened.steps)
    task = Task(
        opened.data,
        functools.partial(objective, options=o),
        reference=finetune.load_frozen(o, model, mesh) if row.reference and not o.lora.rank else None,
        validation=opened.validation,
        prompts=opened.prompts,
    )
    finetune.run(o, model, mesh, tokenizer, task, data={**opened.source, "loss": o.loss})


if __name__ == "__main__":
    command(main, DPOOptions)
