"""Teaches a model which of two answers is preferred: `python -m train.dpo --help`. By DPO, IPO, ORPO or KTO.

Without arguments it teaches the embedded model `tiny` to prefer whole answers to those that break off or go on about
something else; that takes less than a minute on two CPU cores. Give `--model` and `--data` for your own; with
`--lora.rank` only adapters are trained, and the reference is the model without them.
"""

import dataclasses
import functools
import itertools
import pathlib
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

import train.tiny
import zoo
from train import finetune, loop, loss, report
from train.data.packing import fingerprint
from train.data.preferences import PAIRS, batches, encode_pairs, survey
from train.data.records import open_records
from train.step import Batch
from zoo import lora
from zoo.mesh import make_mesh


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(finetune.Options):
    """Teach a model preferences. Run again with the same options, it goes on from the last checkpoint."""

    name: ClassVar[str] = "dpo"

    data: pathlib.Path = train.tiny.PREFERENCES
    """A file (.jsonl, .json, .parquet), or a folder of them, with train and valid files if it has any. The keys of a
    record say what it is: chosen and rejected, and prompt unless they share their beginning; or, for kto alone, prompt,
    completion and label."""
    loss: Literal["dpo", "ipo", "orpo", "kto"] = "dpo"
    """dpo, ipo and orpo compare two completions, orpo without a reference model. kto learns from each by itself."""
    beta: float = 0.1
    """How much it costs to leave the reference model; IPO's tau. ORPO's lambda: what the comparison weighs."""
    label_smoothing: float = 0.0
    """The part of the preferences that are thought to be wrong, for dpo (conservative DPO)."""
    desirable_weight: float = 1.0
    """What desirable completions weigh, for kto."""
    undesirable_weight: float = 1.0
    """What undesirable completions weigh, for kto: the two should be in inverse proportion to how many there are."""
    hold_out: float = 0.05
    """Fraction of the records to validate on, from the end, if the data has no validation files."""
    epochs: int = 0
    """Times through the data, if --steps is 0. 0: 1, but 4 for the embedded preferences."""


def count(batch: Batch) -> Int[Array, ""]:
    """How many pairs there are."""
    return jnp.sum(jnp.max(batch["segments"], axis=1)) // 2


def objective(
    model: Any,
    batch: Batch,
    reference: Any = None,
    *,
    o: Options,
    remat: Callable[[Callable], Callable] | None = None,
    whole: dict[str, Float[Array, ""]] | None = None,
) -> tuple[Float[Array, ""], tuple[dict[str, Float[Array, ""]], Any]]:
    """The loss of a batch's pairs (see `train.data.preferences`), for `train.step.train_step`.

    `reference` is the model to stay near to; None means this one without its adapters. kto's baseline is that of all
    the batch, so where this is a part of one, `whole` has the means of all of it.

    The sums are "loss"; "chosen_logps" and "rejected_logps", the log-probabilities of completions; "chosen_reward" and
    "rejected_reward", beta times their log-ratios to the reference (for orpo, which has none, of a token's mean
    log-probability); "margin", the difference of the two; and "accuracy", the number of pairs in which it is positive.
    For kto they are "loss"; "mismatched", log-ratios of completions after the prompts of others; "kl", the baseline,
    which is their mean or 0; "margin", how far a completion's reward is on its side of the baseline's; and "accuracy",
    as before.
    """
    mask, segments = batch["loss_mask"], batch["segments"]
    sums = functools.partial(loss.per_document, segments=segments, mask=mask, documents=2 * PAIRS)

    def completions(model: Any, **options: Any) -> tuple[Float[Array, "batch documents"], Any]:
        """Log-probabilities of a row's completions."""
        x, reports = model.hidden(batch["tokens"], positions=batch["positions"], segments=segments, **options)
        return sums(loss.logprobs(model.unembed, x, batch["targets"])[0]), reports

    logps, reports = completions(model, remat=remat)
    lengths = sums(jnp.ones(mask.shape, jnp.float32))
    if o.loss == "orpo":
        scores = logps / jnp.maximum(lengths, 1)
    else:
        scores = logps - jax.lax.stop_gradient(completions(lora.bare(model) if reference is None else reference)[0])
    present, first, second = lengths[:, ::2] > 0, scores[:, ::2], scores[:, 1::2]
    match o.loss:
        case "dpo":
            losses = loss.dpo(first, second, beta=o.beta, label_smoothing=o.label_smoothing)
        case "ipo":
            mean = scores / jnp.maximum(lengths, 1)
            losses = loss.ipo(mean[:, ::2], mean[:, 1::2], beta=o.beta)
        case "orpo":
            losses = loss.orpo(first, second, beta=o.beta)
        case "kto":
            baseline = loss.kto_baseline(second, present) if whole is None else jnp.maximum(whole["mismatched"], 0)
            desirable = sums(batch["desirable"].astype(jnp.float32))[:, ::2] > 0
            losses = loss.kto(
                first, desirable, baseline,
                beta=o.beta, desirable_weight=o.desirable_weight, undesirable_weight=o.undesirable_weight,
            )  # fmt: skip
    if o.loss == "kto":
        margin = o.beta * jnp.where(desirable, first - baseline, baseline - first)
        looks = {"kl": jnp.broadcast_to(baseline, margin.shape), "mismatched": second}
    else:
        margin = o.beta * (first - second)
        looks = {
            "chosen_reward": o.beta * first, "rejected_reward": o.beta * second,
            "chosen_logps": logps[:, ::2], "rejected_logps": logps[:, 1::2],
        }  # fmt: skip
    looks |= {"loss": losses, "margin": margin, "accuracy": (margin > 0).astype(jnp.float32)}
    totals = {name: jnp.sum(jnp.where(present, values, 0)) for name, values in looks.items()}
    return totals["loss"], (totals, reports)


def main(o: Options) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    tokenizer = zoo.tokenizer(o.model, revision=o.revision, **vars(o.chat))
    config = zoo.config(tokenizer.folder)
    embedded = o.data == train.tiny.PREFERENCES  # few, for a small model: other numbers do well
    o = dataclasses.replace(
        finetune.resolved(o),
        seq_len=loop.row_length(o, config),
        epochs=o.epochs or (4 if embedded else 1),
        lr=o.lr or (2e-4 if embedded else 0.0),
    )

    # ----------------------------------------------------------------------------------------------------------- data
    records, held_out = open_records(o.data, o.hold_out)
    shape: dict[str, Any] = dict(vocab_size=config.vocab_size, seq_len=o.seq_len, unpaired=o.loss == "kto")
    found = survey(records, tokenizer, **shape)
    report.data(o.data, found, tokenizer, vocab_size=config.vocab_size, seq_len=o.seq_len)
    if o.dry_run:
        report.examples(found, tokenizer, seq_len=o.seq_len)
    shape["batch"] = o.batch
    data = batches(records, tokenizer, seed=o.seed, epochs=None if o.steps else o.epochs, **shape)
    validation = batches(held_out, tokenizer, epochs=1, **shape) if held_out else None
    pairs = functools.partial(encode_pairs, tokenizer=tokenizer, vocab_size=config.vocab_size, unpaired=o.loss == "kto")
    shown = [pairs(record, record)[0].first for record in itertools.islice(held_out or records, 3)]
    source = {"data": fingerprint(o.data, tokenizer), "hold_out": o.hold_out, "seed": o.seed, "loss": o.loss}

    # ----------------------------------------------------------------------------------------------------------- train
    # A twentieth of what fine-tuning takes: preferences are learnt at 1e-6 or so (TRL's default).
    o = loop.resolve(o, config, o.steps or loop.count(data), width_lr=finetune.width_lr(o) / 20)
    finetune.run(
        o,
        config,
        mesh,
        tokenizer,
        source=source | shape,
        data=data,
        objective=functools.partial(objective, o=o),
        count=count,
        two_passes=o.loss == "kto",
        others=None if o.loss == "orpo" or o.lora.rank else finetune.frozen(o, mesh),
        validation=validation,
        prompts=[loop.prompt_of(example) for example in shown],
    )


if __name__ == "__main__":
    loop.command(main, Options)
