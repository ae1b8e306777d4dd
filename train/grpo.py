"""A script that trains a model by rewards, with GRPO, Dr. GRPO, DAPO or GSPO: `python -m train.grpo --help`.

At each step the model continues some prompts, several times each. Functions of yours reward each completion.
Completions that are better than the mean of their prompt become more probable. The trained model itself samples, on the
same devices. Without arguments the script teaches the embedded model `tiny` to answer in one line that ends with a full
stop.
"""

import dataclasses
import functools
import itertools
from typing import Any, ClassVar, Literal

import grain
import jax
import jax.numpy as jnp
import rich
import tyro

import train.tiny
import zoo
from train.base.command import command
from train.base.help import Group, option
from train.data import rewards
from train.data.naming import ColumnOptions
from train.data.packing import fingerprint
from train.data.pictures import of_rows
from train.data.prompts import encode
from train.data.records import Record, open_records
from train.methods.rollouts import empty, rollout, try_rewards
from train.run import finetune, loop
from train.run.defaults import resolve_steps, width_lr
from train.step import loss
from train.step.step import Batch, Losses, Scalars, features
from zoo import lora
from zoo.generation.generate import Encoded
from zoo.mesh import make_mesh
from zoo.nn.model import AbstractModel
from zoo.nn.stack import Reports


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOOptions(ColumnOptions, finetune.FineTuningOptions):
    """Teach a model by rewards. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "grpo"

    data: str = option(str(train.tiny.INSTRUCTIONS), group=Group.DATA)
    """A file, a folder, a glob, a URL, or hf:NAME; docs/data.md lists the formats. A record has a prompt (a string or a
    list of messages), or messages, the last of which is the answer. Rewards get all fields of the record."""
    reward: tuple[str, ...] = (r"regex:[^\n]+\.",)
    r"""Functions of completions: exact or number (against the record's answer), python (runs code with the record's
    tests), regex:PATTERN, or file.py:function, which is called with the text and the record's fields."""
    reward_weights: tuple[float, ...] = option((), rare=True)
    """Weight of each of several rewards. Without weights each reward has the weight 1."""
    correct: float | None = option(None, rare=True)
    """Least reward of a completion that counts as correct in pass@1 and pass@k. None: the sum of the weights of the
    rewards, which is the full reward if each reward is at most 1."""
    hold_out: float = option(0.0, group=Group.DATA)
    """Fraction of the prompts to evaluate on, from the end, if the data has no validation files. validation_reward and
    validation_pass@k are measured on these prompts."""
    eval_prompts: int = option(64, group=Group.VALIDATION, rare=True)
    """Largest number of prompts to evaluate on, each with a --group of completions. 0: all that are held out."""
    prompts: int = option(8, group=Group.STEP)
    """Number of prompts of a step."""
    group: int = option(8, group=Group.STEP)
    """Number of completions of each prompt."""
    max_new_tokens: int = option(32, group=Group.STEP)
    """Largest number of tokens of a completion."""
    temperature: float = 1.0
    """Temperature of sampling. The probabilities that are trained are those at this temperature, too."""
    loss: Literal["grpo", "dapo", "dr_grpo"] = "dapo"
    """How losses of tokens are averaged. grpo: over a completion, then over completions. dapo: over all tokens.
    dr_grpo: the sum of the losses is divided by completions times --max-new-tokens."""
    level: Literal["token", "sequence"] = option("token", rare=True)
    """Level of the ratios of probabilities. token: each token has its own. sequence: each whole completion has one
    (GSPO)."""
    scale_rewards: bool = option(True, rare=True)
    """Divide advantages by the standard deviation of their group; Dr. GRPO does not."""
    epsilon: float = 0.2
    """Distance from 1 at which ratios of probabilities are clipped, below and above."""
    epsilon_high: float = option(0.0, rare=True)
    """Distance above 1 at which ratios are clipped: 0.28 in DAPO; GSPO has 3e-4 below and 4e-4 above. 0: --epsilon."""
    kl: float = 0.0
    """Weight of the divergence from the model that the run began with (GRPO's beta); 0.04 in DeepSeekMath."""
    iterations: int = option(1, rare=True)
    """Number of times that a step learns from its completions. All times but the first are off-policy."""
    minibatches: int = option(1, rare=True)
    """Number of updates in each of the --iterations."""
    rollout_batch: int = option(64, rare=True)
    """Number of completions that are sampled at a time."""
    cache_dtype: Literal["auto", "int8"] = option("auto", rare=True)
    """Data type of cached keys and values while sampling. auto: --compute-dtype."""
    steps: int = 100
    # These two are no options here: batches follow from --prompts, --group and --minibatches.
    batch: tyro.conf.Suppress[tyro.conf.Fixed[int]] = 0
    eval_batches: tyro.conf.Suppress[tyro.conf.Fixed[int]] = 0


def objective(
    model: AbstractModel,
    batch: Batch,
    reference: Any = None,
    means: Scalars | None = None,
    *,
    o: GRPOOptions,
) -> Losses:
    """Computes the loss of completions, for `train.step.step.train_step`; see `train.step.loss`.

    Beside the usual arrays, a batch has "advantages" and "old", the log-probabilities with which its targets were
    drawn. `reference` is the model to stay near to, if `o.kl`; None means this model without its adapters. The sums are
    "loss", "entropy", "clipped" (the fraction of tokens), "drift" (the distance of log-probabilities from "old") and,
    if `o.kl`, "kl".
    """
    mask = batch["loss_mask"]

    def logprobs(model: AbstractModel) -> tuple[Any, Reports]:
        x, reports = features(model, batch)
        unembed = lambda x: model.unembed(x).astype(jnp.float32) / o.temperature
        return loss.logprobs(unembed, x, batch["targets"]), reports

    (logps, entropy), reports = logprobs(model)
    values, clipped = loss.clipped_policy(
        logps, batch["old"], batch["advantages"][:, 0], mask,
        epsilon_low=o.epsilon, epsilon_high=o.epsilon_high or o.epsilon, level=o.level,
    )  # fmt: skip
    metrics = {"entropy": entropy, "clipped": clipped.astype(jnp.float32), "drift": jnp.abs(logps - batch["old"])}
    if o.kl:
        (there, _), _ = jax.lax.stop_gradient(logprobs(lora.bare(model) if reference is None else reference))
        metrics["kl"] = loss.kl_k3(logps, there)
        values += o.kl * metrics["kl"]
    # Metrics are averaged over tokens, whatever --loss is.
    size = o.max_new_tokens if o.loss == "dr_grpo" else 1
    mean = lambda values: size * loss.aggregate(values, mask, "dapo" if o.loss == "dapo" else "grpo")[0]
    total, count = loss.aggregate(values, mask, o.loss, max_length=o.max_new_tokens)
    sums = {name: mean(values) for name, values in metrics.items()} | {"loss": total}
    return total, count, jax.lax.stop_gradient(sums), reports


def main(o: GRPOOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh = make_mesh(o.mesh)
    tokenizer = zoo.tokenizer(o.model, revision=o.revision, parts=o.parts, **o.chat.arguments)
    config = zoo.config(tokenizer.folder)
    rows, updates = o.prompts * o.group, o.iterations * o.minibatches
    if rows % o.minibatches:
        raise ValueError(f"{o.prompts} x {o.group} completions can't be split into {o.minibatches} minibatches.")
    if o.group < 2:
        raise ValueError(f"--group {o.group}: a completion is compared with the others of its prompt; take 2 or more.")
    if o.reward_weights and len(o.reward_weights) != len(o.reward):
        raise ValueError(f"{len(o.reward)} rewards need as many --reward-weights, not {len(o.reward_weights)}.")
    judges = [rewards.find(name) for name in o.reward]
    embedded = o.data == str(train.tiny.INSTRUCTIONS)  # short prompts, for a small model
    seq_len, lr = o.seq_len or (96 if embedded else 0), o.lr or (3e-4 if embedded else 0.0)
    o = dataclasses.replace(o, batch=rows // o.minibatches, seq_len=seq_len, lr=lr)
    o = finetune.resolve(o, config, width_lr=width_lr(o.lora) / 20)

    # ----------------------------------------------------------------------------------------------------------- data
    records, held_out = open_records(o.data, o.hold_out, o.columns)
    room = o.seq_len + 1 - o.max_new_tokens
    looked_at = [encode(record, tokenizer) for record in itertools.islice(records, 200)]
    if not any(len(prompt.ids) <= room for prompt in looked_at):
        raise ValueError(f"No prompt has at most {room} tokens, --seq-len without --max-new-tokens; raise the former.")

    if o.dry_run:
        everything = itertools.chain(records, held_out or ())
        prompts = ((record.where, encode(record, tokenizer)) for record in everything)
        for name, worth in try_rewards(prompts, o.reward, judges).items():
            rich.print(f"The reward {name} gives {worth:g} for the first record's answer, and all have what it needs.")

    def batched(records: grain.MapDataset[Record]) -> grain.IterDataset:
        prompts = records.map(functools.partial(encode, tokenizer=tokenizer)).to_iter_dataset()
        return prompts.filter(lambda prompt: len(prompt.ids) <= room).batch(o.prompts, batch_fn=list)

    data = batched(records.shuffle(seed=o.seed).repeat())
    validation = batched(held_out[: o.eval_prompts or None]) if held_out else None
    source = {"data": fingerprint(o.data, tokenizer), "seed": o.seed, "prompts": o.prompts, "seq_len": o.seq_len}
    source |= {"hold_out": o.hold_out} if o.hold_out else {}
    source |= {"columns": " ".join(o.columns)} if o.columns else {}
    shown = max((prompt.images for prompt in looked_at if prompt.images), key=lambda i: len(i.patches), default=None)
    seen = of_rows([shown] * o.batch, o.seq_len, tokenizer) if o.vision else {}

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, o.steps)
    task = loop.Task(
        data,
        functools.partial(objective, o=o),
        reference=finetune.frozen(o, mesh) if o.kl and not o.lora.rank else None,
        validation=validation,
        prompts=[Encoded(prompt.ids, prompt.images) for prompt in looked_at[:3]],
        rollout=functools.partial(rollout, o=o, tokenizer=tokenizer, mesh=mesh, judges=judges),
        updates=updates,
        example=empty(o.batch, o.seq_len) | seen,
    )
    finetune.run(o, config, mesh, tokenizer, task, source=source)


if __name__ == "__main__":
    command(main, GRPOOptions)
