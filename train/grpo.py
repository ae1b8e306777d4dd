"""A script that trains a model by rewards, with GRPO, Dr. GRPO, DAPO or GSPO: `python -m train.grpo --help`.

At each step the model continues some prompts, several times each. Functions of yours, or models, reward each
completion. Completions that are better than the mean of their prompt become more probable. The trained model itself
samples, on the same devices. Without arguments the script teaches the embedded model `tiny` to answer in one line that
ends with a full stop.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

import grain
import jax
import jax.numpy as jnp
import numpy as np
import rich
import tyro
from jax.sharding import Mesh
from jaxtyping import Array, Float, Shaped

import train.tiny
import zoo
from kernels.mesh import BATCH, STAGE
from train.base.command import command
from train.base.options import Flat, Group, option
from train.data import rewards
from train.data.naming import ColumnOptions
from train.data.packing import fingerprint
from train.data.pictures import of_rows
from train.data.prompts import encode
from train.data.records import Record, open_records
from train.methods import trajectories
from train.methods.chats import Chats
from train.methods.environments import EnvironmentOptions, Host
from train.methods.judges import NAME, Judge
from train.methods.rollouts import RolloutOptions, rollout, support_rows
from train.methods.scores import RewardOptions, try_rewards
from train.methods.texts import TEXTS, padding_rows, rows_of
from train.run import finetune
from train.run.defaults import resolve_steps, width_lr
from train.state.mesh import check_sampling, in_order, meshes, on_mesh, put_batch
from train.state.optim import OptimizerOptions
from train.state.remat import StepOptions
from train.step import loss
from train.step.language import features
from train.step.step import Batch, Losses, Scalars
from train.step.task import Rolled, Rollout, Task
from zoo import lora
from zoo.generation.generate import Encoded
from zoo.nn.layers import AbstractExpertLinear
from zoo.nn.model import AbstractModel
from zoo.nn.routing import replayed
from zoo.nn.stack import Reports
from zoo.registry import family_of
from zoo.surgery import cast, modules
from zoo.weights.checkpoint import skeleton
from zoo.weights.gather import gathered


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepOfRollouts(StepOptions):
    """Options for a step whose rows follow from --prompts, --group and --minibatches."""

    batch: tyro.conf.Suppress[tyro.conf.Fixed[int]] = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class GRPOOptions(finetune.FineTuningOptions):
    """Teach a model by rewards. Run again with the same options, it goes on from the last checkpoint."""

    help_group: ClassVar[Group] = Group.METHOD
    name: ClassVar[str] = "grpo"

    data: str = option(str(train.tiny.INSTRUCTIONS), group=Group.DATA, identity=False)
    """A file, a folder, a glob, a URL, or hf:NAME; docs/data.md lists the formats. A record has a prompt (a string or a
    list of messages), or messages, the last of which is the answer. Rewards get all fields of the record."""
    hold_out: float = option(0.0, group=Group.DATA)
    """Fraction of the prompts to evaluate on, from the end, if the data has no validation files. validation_reward and
    validation_pass@k are measured on these prompts."""
    eval_prompts: int = option(64, group=Group.VALIDATION, rare=True)
    """Largest number of prompts to evaluate on, each with a --group of completions. 0: all that are held out."""
    prompts: int = option(8, group=Group.STEP)
    """Number of prompts of a step."""
    loss: Literal["grpo", "dapo", "dr_grpo", "cispo", "sapo"] = "dapo"
    """How losses of tokens are averaged. grpo: over a completion, then over completions. dapo: over all tokens.
    dr_grpo: the sum of the losses is divided by completions times --max-new-tokens. cispo: as dapo, with ratios as
    weights that are clipped. sapo: as grpo, with a smooth gate instead of clipping."""
    level: Literal["token", "sequence"] = option("token", rare=True)
    """Level of the ratios of probabilities. token: each token has its own. sequence: each whole completion has one
    (GSPO)."""
    epsilon: float = 0.2
    """Distance from 1 at which ratios of probabilities are clipped, below and above."""
    epsilon_high: float = option(0.0, rare=True)
    """Distance above 1 at which ratios are clipped: 0.28 in DAPO; GSPO has 3e-4 below and 4e-4 above. 0: --epsilon."""
    high_entropy: float = option(1.0, rare=True)
    """Share of the tokens that are learnt from: those with the highest entropy."""
    kl: float = 0.0
    """Weight of the divergence from the model that the run began with (GRPO's beta); 0.04 in DeepSeekMath."""
    rewards: Flat[RewardOptions] = RewardOptions()
    rollouts: Flat[RolloutOptions] = RolloutOptions()
    environments: Flat[EnvironmentOptions] = EnvironmentOptions()
    naming: Flat[ColumnOptions] = ColumnOptions()
    optim: Flat[OptimizerOptions] = OptimizerOptions(steps=100)
    step: Flat[StepOfRollouts] = StepOfRollouts()

    @property
    def parts(self) -> tuple[str, ...]:
        return ("vision",) * self.vision


def logprobs(
    model: AbstractModel, batch: Batch, *, options: GRPOOptions
) -> tuple[tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]], Reports]:
    """Computes each target's log-probability and entropy at the temperature of sampling, and the layers' reports."""
    x, reports = features(model, batch)
    unembed = lambda x: model.unembed(x).astype(jnp.float32) / options.rollouts.temperature
    if "support" in batch:
        return loss.logprobs_among(unembed, x, batch["targets"], batch["support"]), reports
    return loss.logprobs(unembed, x, batch["targets"]), reports


def acting(model: AbstractModel, batch: Batch) -> AbstractModel:
    """Returns the model that learns from a batch, with the batch's experts if it has them (--router-replay)."""
    return replayed(model, batch["experts"]) if "experts" in batch else model


def rescored(
    rolled: Rolled, model: AbstractModel, mesh: Mesh, score: Callable[..., Float[Array, "batch seq"]]
) -> Rolled:
    """Replaces the sampler's log-probabilities of a rollout, "old", by the trainer's; the sampler's are "sampled".

    Args:
        score: (model, placed batch) -> the log-probabilities of the targets.
    """

    def of_trainer(batch: Mapping[str, Shaped[np.ndarray, "rows ..."]]) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
        found = in_order(gathered(score(model, put_batch(batch, mesh, model))), mesh, model)
        return {**batch, "old": np.where(batch["loss_mask"] != 0, found, 0), "sampled": batch["old"]}

    return rolled._replace(batches=[of_trainer(batch) for batch in rolled.batches])


def elsewhere(
    sample: Rollout, mesh: Mesh, dtype: str, model: AbstractModel, element: Any, n: int, folder: pathlib.Path | None
) -> Rolled:
    """Calls a rollout on the devices of another mesh, to which the model is copied unless it is there."""
    with jax.set_mesh(mesh):
        return sample(on_mesh(model, mesh, dtype), element, n, folder)


def objective(
    model: AbstractModel,
    batch: Batch,
    reference: Any = None,
    means: Scalars | None = None,
    *,
    options: GRPOOptions,
) -> Losses:
    """Computes the loss of completions, for `train.step.step.train_step`; see `train.step.loss`.

    Beside the usual arrays, a batch has "advantages" and "old", the log-probabilities with which its targets were drawn
    (`train.methods.texts.packed`); or as the trainer computes them, and then "sampled" are the sampler's
    (`rescored`). With "experts" the model that learns sends tokens to these. `reference` is the model to stay near to,
    if `o.kl`; None means this model without its adapters. The sums are "loss", "entropy", "clipped" (the fraction of
    tokens), "drift" (the distance of log-probabilities from "old"), "mismatch" (that of "old" from "sampled", if there
    are both) and, if `o.kl`, "kl".
    """
    mask = batch["loss_mask"]
    of_texts: Any = dict(segments=batch.get("branches", batch["segments"]), mask=mask, documents=TEXTS)
    (logps, entropy), reports = logprobs(acting(model, batch), batch, options=options)
    drawn, above = (logps, batch["old"], batch["advantages"], mask), options.epsilon_high or options.epsilon
    if options.level == "sequence":
        drawn = (*(loss.document_means(a, **of_texts) for a in drawn[:2]), *drawn[2:])
    match options.loss:
        case "cispo":
            values, clipped = loss.cispo(*drawn, epsilon_high=above)
        case "sapo":
            values, clipped = loss.sapo(*drawn), jnp.zeros(mask.shape, bool)
        case _:
            values, clipped = loss.clipped_policy(*drawn, epsilon_low=options.epsilon, epsilon_high=above)
    if options.high_entropy < 1:
        values = jnp.where(loss.of_high_entropy(entropy, mask, options.high_entropy), values, 0)
    metrics = {"entropy": entropy, "clipped": clipped.astype(jnp.float32), "drift": jnp.abs(logps - batch["old"])}
    if "sampled" in batch:
        metrics["mismatch"] = jnp.abs(batch["old"] - batch["sampled"])
        if options.rollouts.importance != "none":
            values *= loss.importance(batch["old"], batch["sampled"], mask, options.rollouts.importance)
    if options.kl:
        other = lora.bare(model) if reference is None else reference
        (there, _), _ = jax.lax.stop_gradient(logprobs(other, batch, options=options))
        metrics["kl"] = loss.kl_k3(logps, there)
        values += options.kl * metrics["kl"]
    # Metrics are averaged over tokens, whatever --loss is.
    size = options.rollouts.max_new_tokens if options.loss == "dr_grpo" else 1
    how: Any = {"cispo": "dapo", "sapo": "grpo"}.get(options.loss, options.loss)
    mean = lambda values: size * loss.aggregate(values, how="dapo" if how == "dapo" else "grpo", **of_texts)[0]
    total, count = loss.aggregate(values, how=how, max_length=options.rollouts.max_new_tokens, **of_texts)
    sums = {name: mean(values) for name, values in metrics.items()} | {"loss": total}
    return total, count, jax.lax.stop_gradient(sums), reports


def main(o: GRPOOptions) -> None:
    # ---------------------------------------------------------------------------------------------------- mesh, model
    mesh, there = meshes(o.step.mesh, o.rollouts.sampling_mesh)  # of updates, and of sampling
    model = o.source.open(o.model, o.revision)
    tokenizer, config = zoo.tokenizer(model, parts=o.parts, **o.chat.arguments), model.config
    group, minibatches, names, weights = (
        o.rollouts.group, o.rollouts.minibatches, o.rewards.reward, o.rewards.reward_weights
    )  # fmt: skip
    rows = o.prompts * group
    if rows % minibatches:
        raise ValueError(f"{o.prompts} x {group} completions can't be split into {minibatches} minibatches.")
    if o.level == "sequence" and o.loss in ("cispo", "sapo"):
        raise ValueError(f"--loss {o.loss} has ratios of tokens; leave out --level sequence.")
    if group < 2:
        raise ValueError(f"--group {group}: a completion is compared with the others of its prompt; take 2 or more.")
    if weights and len(weights) != len(names):
        raise ValueError(f"{len(names)} rewards need as many --reward-weights, not {len(weights)}.")
    if o.rewards.overlong > o.rollouts.max_new_tokens:
        raise ValueError(
            f"--overlong {o.rewards.overlong} is more than --max-new-tokens {o.rollouts.max_new_tokens}, below which "
            "it begins; take less."
        )
    if o.rollouts.top_p < 1 and not o.rollouts.top_k:
        raise ValueError(
            f"--top-p {o.rollouts.top_p} needs --top-k, such as 64: the loss keeps the tokens that could be drawn."
        )
    environment = o.environments.environment
    if environment and (o.rewards.overlong or o.rollouts.top_k):
        raise ValueError("--overlong and --top-k are for completions; leave them out with --environment.")
    if environment and names != RewardOptions().reward:
        raise ValueError(f"The environment {environment} gives the reward itself; leave out --reward.")
    if o.environments.credit == "turn" and o.rewards.advantages != "grpo":
        raise ValueError(f"--credit turn compares turns as grpo does; leave out --advantages {o.rewards.advantages}.")
    if environment:
        o.refuse_vision("environments have texts alone")
    if o.rollouts.router_replay and not any(modules(skeleton(family_of(config), config), AbstractExpertLinear)):
        raise ValueError(f"--router-replay: {o.model} has no experts; leave it out.")
    if o.rollouts.importance != "none" and not o.rollouts.exact_rollouts:
        raise ValueError(
            f"--importance {o.rollouts.importance} compares the trainer with the sampler: it needs --exact-rollouts."
        )
    if o.rollouts.one_step_off and jax.process_count() > 1:
        raise ValueError("--one-step-off is for one process; several would begin their programs in different orders.")
    if there != mesh:
        if not o.rollouts.one_step_off:
            raise ValueError(
                f"--sampling-mesh {o.rollouts.sampling_mesh}: these devices would wait for the others; add "
                "--one-step-off, with which both work at once."
            )
        check_sampling(there, skeleton(family_of(config), config), family_of(config))
        rich.print(f"The last {there.size} devices sample ({o.rollouts.sampling_mesh}), beside updates on the others.")
    if o.rollouts.router_replay and mesh.shape[STAGE] > 1:
        raise ValueError("--router-replay needs a mesh without stage; split the layers' matrices by fsdp or tensor.")
    if environment == "python":
        rewards.find("python")  # warns of what this system can't forbid
    embedded = o.data == str(train.tiny.INSTRUCTIONS)  # short prompts, for a small model
    seq_len, lr = o.step.seq_len or (96 if embedded else 0), o.optim.lr or (3e-4 if embedded else 0.0)
    o = o.changed(batch=rows // minibatches, seq_len=seq_len, lr=lr)
    o = finetune.resolve(o, config, width_lr=width_lr(o.lora) / 20)
    load = functools.partial(Judge.load, mesh=there, dtype=o.step.compute_dtype, batch=o.rollouts.rollout_batch)
    judges = [] if environment else [load(name) if name.startswith(NAME) else rewards.find(name) for name in names]

    # ----------------------------------------------------------------------------------------------------------- data
    records, held_out = open_records(o.data, o.hold_out, o.naming.columns)
    seq_len, columns = o.step.seq_len, o.naming.columns
    room = seq_len + 1 - o.rollouts.max_new_tokens
    looked_at = [] if environment else [encode(record, tokenizer) for record in itertools.islice(records, 200)]
    if not environment and not any(len(prompt.ids) <= room for prompt in looked_at):
        raise ValueError(f"No prompt has at most {room} tokens, --seq-len without --max-new-tokens; raise the former.")

    if o.dry_run and not environment:
        everything = itertools.chain(records, held_out or ())
        prompts = ((record.where, encode(record, tokenizer)) for record in everything)
        for name, worth in try_rewards(prompts, names, judges).items():
            rich.print(f"The reward {name} gives {worth:g} for the first record's answer, and all have what it needs.")

    def batched(records: grain.MapDataset[Record]) -> grain.IterDataset:
        if environment:
            return records.map(lambda record: record.fields).to_iter_dataset().batch(o.prompts, batch_fn=list)
        prompts = records.map(functools.partial(encode, tokenizer=tokenizer)).to_iter_dataset()
        return prompts.filter(lambda prompt: len(prompt.ids) <= room).batch(o.prompts, batch_fn=list)

    data = batched(records.shuffle(seed=o.seed).repeat())
    validation = batched(held_out[: o.eval_prompts or None]) if held_out else None
    source = {"data": fingerprint(o.data, tokenizer), "seed": o.seed, "prompts": o.prompts, "seq_len": seq_len}
    source |= {"hold_out": o.hold_out} if o.hold_out else {}
    source |= {"columns": " ".join(columns)} if columns else {}
    shown = max((prompt.images for prompt in looked_at if prompt.images), key=lambda i: len(i.patches), default=None)
    seen = of_rows([shown] * o.step.batch, seq_len, tokenizer) if o.vision else {}

    # ----------------------------------------------------------------------------------------------------------- train
    o = resolve_steps(o, o.optim.steps)
    shares = math.prod(mesh.shape[axis] for axis in BATCH)
    number = rows_of(o.step.batch, shares * o.step.microbatches)
    if o.rollouts.exact_rollouts and number % math.prod(there.shape[axis] for axis in BATCH):
        raise ValueError(
            f"--exact-rollouts: --sampling-mesh {o.rollouts.sampling_mesh} can't split {number} rows evenly; take a "
            "mesh that does."
        )
    sampling: Any = dict(
        options=o.rollouts, rewards=o.rewards, mesh=there, rows=number, dtype=o.step.compute_dtype, seed=o.seed
    )
    with contextlib.ExitStack() as processes:
        if environment:
            limits = o.environments.tool_seconds, o.environments.tool_output
            host = processes.enter_context(Host(environment, *limits))
            chats = Chats(tokenizer, host.tools, o.environments.past)
            sample = functools.partial(
                trajectories.rollout, host=host, chats=chats, environment=o.environments, seq_len=seq_len, **sampling
            )
            if o.dry_run:
                rich.print(f"The environment {environment} has {trajectories.described(host, next(iter(records)))}.")
        else:
            sample = functools.partial(rollout, judges=judges, tokenizer=tokenizer, **sampling)
        if o.rollouts.exact_rollouts:
            score = jax.jit(
                lambda model, batch: logprobs(acting(cast(model, o.step.compute_dtype), batch), batch, options=o)[0][0]
            )
            sampled = sample
            sample = lambda model, *of: rescored(sampled(model, *of), model, there, score)
        task = Task(
            data,
            functools.partial(objective, options=o),
            reference=finetune.load_frozen(o, model, mesh) if o.kl and not o.lora.rank else None,
            validation=validation,
            prompts=[Encoded(prompt.ids, prompt.images) for prompt in looked_at[:3]],
            rollout=sample if there == mesh else functools.partial(elsewhere, sample, there, o.step.compute_dtype),
            metric="reward",
            ahead=there if o.rollouts.one_step_off else None,
            updates=o.rollouts.iterations * minibatches,
            beside=[judge.model for judge in judges if isinstance(judge, Judge) and there == mesh],
            example=padding_rows(o.step.batch, seq_len)
            | support_rows(o.step.batch, seq_len, o.rollouts, config.vocab_size)
            | seen,
        )
        finetune.run(o, model, mesh, tokenizer, task, data=source)


if __name__ == "__main__":
    command(main, GRPOOptions)
