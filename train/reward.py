"""A script that trains a reward model on preferences, by Bradley and Terry's loss: `python -m train.reward --help`.

The model's output embeddings give way to a head that gives each text a number, higher for the completion that was
chosen. Without arguments the script teaches the embedded model `tiny` to rate whole answers above answers that break
off or go on about something else. Give `--model` and `--data` for your own. With `--lora.rank` only adapters and the
head are trained. A checkpoint that has such a head already keeps it, and goes on learning.
"""

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

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
from zoo.mesh import make_mesh
from zoo.nn.heads import RewardHead
from zoo.nn.model import AbstractModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOptions(finetune.FineTuningOptions):
    """Train a reward model. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "reward"

    data: tuple[str, ...] = option((str(train.tiny.PREFERENCES),), group=Group.DATA, identity=False)
    """Files, folders of them, globs, URLs or hf:NAME; docs/data.md lists the formats. A record has
    chosen and rejected, prompt unless they share their beginning, and optionally margin, a number by which the reward
    of chosen should exceed the other."""
    centre: float = 0.0
    """Weight of (chosen + rejected)^2 in the loss, which keeps rewards near 0; 0.01 is usual. 0: without this term."""
    epochs: int = option(0, group=Group.STEP)
    """Number of times through the data, if --steps is 0. 0: 1 epoch, but 4 for the embedded preferences."""
    mixture: Flat[DataOptions] = DataOptions()

    @property
    def parts(self) -> tuple[str, ...]:
        return ()


def objective(
    model: AbstractModel, batch: Batch, reference: Any = None, means: Scalars | None = None, *, centre: float
) -> Losses:
    """Computes the loss of a batch's pairs (see `train.data.preferences`), for `train.step.step.train_step`.

    The sums are "loss"; "chosen_reward" and "rejected_reward"; "margin", the difference of the two; and "accuracy", the
    number of pairs whose margin is positive.
    """
    x, reports = features(model, batch)
    assert isinstance(model.head, RewardHead), "`main` gives the model this head"
    values, mask = model.head.score(x)[..., 0].astype(jnp.float32), batch["loss_mask"]
    of_documents = functools.partial(loss.per_document, segments=batch["segments"], mask=mask, documents=2 * PAIRS)
    rewards, present = of_documents(values), of_documents(jnp.ones(mask.shape))[:, ::2] > 0
    chosen, rejected, least = rewards[:, ::2], rewards[:, 1::2], of_documents(batch["margin"])[:, ::2]
    margin = chosen - rejected
    metrics = {
        "loss": loss.bradley_terry(chosen, rejected, least, centre=centre),
        "chosen_reward": chosen, "rejected_reward": rejected,
        "margin": margin, "accuracy": (margin > 0).astype(jnp.float32),
    }  # fmt: skip
    totals = {name: jnp.sum(jnp.where(present, values, 0)) for name, values in metrics.items()}
    return totals["loss"], jnp.sum(present), totals, reports


def main(o: RewardOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    o.refuse_vision("a reward is given to text")
    if o.validation.tasks.eval_tasks:
        raise ValueError("--eval-tasks asks a language model, and a reward model writes nothing; leave it out.")
    mesh = make_mesh(o.step.mesh)
    model = o.source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, **o.chat.arguments), model.config
    embedded = o.data == (str(train.tiny.PREFERENCES),)  # few records and a small model: other defaults do well
    epochs, lr = o.epochs or (4 if embedded else 1), o.optim.lr or (1e-3 if embedded else 0.0)
    o = finetune.resolve(o.changed(epochs=epochs, lr=lr), config, width_lr=width_lr(o.lora) / 2)
    stated = model.config_json.get("pad_token_id")
    pad = tokenizer.pad if stated is None else stated
    head = RewardHead(config.hidden_size, pad, key=jax.random.key(o.seed))

    # ----------------------------------------------------------------------------------------------------------- data
    settings = {"vocab_size": config.vocab_size, "scored": True, "pad": pad}
    whole = o.phase(o.data, o.mixture.weights)
    opened = open_data(o.mixture, whole, o.reading(o.epochs), mesh, tokenizer, PREFERENCES, settings)
    report.opened(opened.sets, tokenizer, vocab_size=config.vocab_size, dry_run=o.dry_run)

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, opened.steps)
    task = Task(opened.data, functools.partial(objective, centre=o.centre), validation=opened.validation)
    finetune.run(o, model, mesh, tokenizer, task, data=opened.source, head=head)


if __name__ == "__main__":
    command(main, RewardOptions)
