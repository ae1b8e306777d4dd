"""Rollouts: the model's own completions of prompts, with their rewards and advantages, as training batches."""

import dataclasses
import functools
import itertools
import pathlib
import time
from collections.abc import Sequence
from typing import Any, ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from train.base.options import Group, OptionGroup, option
from train.data.prompts import Prompt
from train.data.rewards import Reward
from train.methods import support
from train.methods.judges import Judge
from train.methods.scores import (
    Each,
    RewardOptions,
    advantages_of,
    dull,
    majorities,
    pass_at,
    score,
    with_signal,
)
from train.methods.texts import Text, batches_of
from train.state.mesh import generating, reads_in_order
from train.step import loss
from train.step.task import Rolled
from zoo.generation.complete import complete
from zoo.generation.decoding import Record
from zoo.generation.engine import Completion
from zoo.nn.model import AbstractModel
from zoo.text.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutOptions(OptionGroup):
    """Options for sampling completions, and for making batches of them."""

    help_group: ClassVar[Group] = Group.METHOD

    group: int = option(8, group=Group.STEP)
    """Number of completions of each prompt."""
    max_new_tokens: int = option(32, group=Group.STEP)
    """Largest number of tokens of a completion."""
    temperature: float = 1.0
    """Temperature of sampling. The probabilities that are trained are those at this temperature, too."""
    top_k: int = option(0, rare=True)
    """Number of likeliest tokens among which each token is drawn. The loss has the probabilities among the same tokens.
    0: all."""
    top_p: float = option(1.0, rare=True)
    """Draw only from the fewest of the --top-k tokens whose probabilities add up to this number. 1: from all of
    them."""
    iterations: int = option(1, rare=True)
    """Number of times that a step learns from its completions. All times but the first are off-policy."""
    minibatches: int = option(1, rare=True)
    """Number of updates in each of the --iterations."""
    mask_truncated: bool = option(False, rare=True)
    """Learn nothing from completions that did not end by themselves."""
    redraws: int = option(0, rare=True)
    """Number of times that a group is drawn again while its rewards are equal, so that it teaches nothing (DAPO's
    dynamic sampling). Evaluations draw none again."""
    rollout_batch: int = option(64, rare=True, was="slots")
    """Number of completions that are sampled at a time."""
    cache_dtype: Literal["auto", "int8"] = option("auto", rare=True)
    """Data type of cached keys and values while sampling. auto: --compute-dtype."""
    router_replay: bool = option(False, rare=True)
    """Send each token of an update to the experts that it had while sampling, in a mixture of experts."""
    one_step_off: bool = option(False, rare=True)
    """Sample for the next step beside the update of this one, so that tools and rewards do not keep the devices
    waiting. Completions of all steps but the first are then drawn with the weights before the last step."""
    sampling_mesh: str | None = option(None, group=Group.DEVICES, rare=True, identity=False)
    """Mesh of the devices that sample with --one-step-off, such as fsdp=4: the last ones of all, and --mesh has the
    others. By default the devices of --mesh sample, too."""
    exact_rollouts: bool = option(False, rare=True)
    """Compute the log-probabilities that ratios compare with by the trainer's own program before the first update of a
    step, instead of taking the sampler's, which differ by rounding. It costs one forward pass."""
    importance: Literal["none", "truncate", "icepop"] = option("none", rare=True)
    """Weight of a token's loss with --exact-rollouts: its probability for the trainer divided by the sampler's.
    truncate: at most 2. icepop: 0 where it is below 0.5 or above 5. none: 1."""

    @property
    def record(self) -> tuple[Record, ...]:
        """Returns the records of tokens that `zoo.generation.engine.Engine` has to make."""
        return ("experts",) * self.router_replay


def rollout(
    model: AbstractModel,
    prompts: Sequence[Prompt],
    n: int,
    folder: pathlib.Path | None,
    *,
    options: RolloutOptions,
    rewards: RewardOptions,
    judges: Sequence[Reward | Judge],
    tokenizer: Tokenizer,
    mesh: Mesh,
    rows: int,
    dtype: str,
    seed: int,
) -> Rolled:
    """Samples completions for step `n` of `train.grpo`. Its metrics are mean reward, pass@k, length and the like.

    The batches have `packed` texts, each a prompt with one completion.

    Args:
        folder: that of the run; None: in evaluations, which draw no group again.
        judges: the functions and models that `rewards` names.
        rows: number of rows of a batch.
        dtype: the dtype in which the model samples.
    """

    draw = functools.partial(sampled, model, options=options, tokenizer=tokenizer, mesh=mesh, dtype=dtype)

    texts_of = lambda groups: [[tokenizer.answer(c.tokens) for c in group] for group in groups]

    def judge(prompts: Sequence[Prompt], groups: list[list[Completion]]) -> tuple[Each, float]:
        each, errors = score(texts_of(groups), prompts, rewards, judges)
        if rewards.overlong:
            lengths = np.array([[len(c.tokens) for c in group] for group in groups])
            punished = loss.overlong(jnp.asarray(lengths), most=options.max_new_tokens, margin=rewards.overlong)
            each = np.concatenate([each, np.asarray(punished, np.float32)[..., None]], axis=-1)
        return each, errors

    def again(numbers: Sequence[int], seed: int) -> tuple[list[list[Completion]], Each]:
        some = [prompts[m] for m in numbers]
        found = draw(some, seed=seed)
        return found, judge(some, found)[0]

    started = time.monotonic()
    groups = draw(prompts, seed=seed + n)
    seconds = time.monotonic() - started
    each, errors = judge(prompts, groups)
    total = each @ np.array(rewards.weights, np.float32)
    completions = list(itertools.chain(*groups))
    lengths = [len(c.tokens) for c in completions]
    numbers = {
        "reward": float(total.mean()),
        "reward_deviation": float(total.std(axis=1).mean()),
        "reward_errors": errors,
        **pass_at(rewards.correct_of(each)),
        **majorities(texts_of(groups), each, rewards),
        "length": float(np.mean(lengths)),
        "ended": float(np.mean([c.ended for c in completions])),
        "generation_tokens_per_second": sum(lengths) / seconds,
    }
    if len(rewards.names) > 1:
        numbers |= {f"reward_{name}": float(mean) for name, mean in zip(rewards.names, each.mean((0, 1)), strict=True)}
    if options.redraws and folder is not None:
        groups, each = with_signal(again, groups, each, rewards, options.redraws, seed + n)
        numbers["without_signal"] = float(np.mean(dull(each, rewards)))
    advantages = advantages_of(each, rewards)

    pairs = ((prompt, c) for prompt, group in zip(prompts, groups, strict=True) for c in group)
    texts = []
    for (prompt, c), advantage in zip(pairs, advantages, strict=True):
        if c.ended or not options.mask_truncated:
            among, logprobs = None, c.logprobs
            if options.top_k:
                among, logprobs = support.kept(c, options.top_k, options.top_p if options.top_p < 1 else np.inf)
            old, experts = [*[None] * len(prompt.ids), *logprobs], c.records.get("experts")
            texts.append(Text(prompt.ids + c.tokens, old, float(advantage), prompt.images, experts, among))
    batches = batches_of(
        texts, rows, tokenizer, iterations=options.iterations, minibatches=options.minibatches, seed=seed + n,
        branches=not reads_in_order(model),
    )  # fmt: skip
    return Rolled(batches, numbers)


def sampled(
    model: AbstractModel,
    prompts: Sequence[Prompt],
    *,
    options: RolloutOptions,
    tokenizer: Tokenizer,
    mesh: Mesh,
    dtype: str,
    seed: int,
) -> list[list[Completion]]:
    """Samples a group of completions of each prompt."""
    with generating(model, mesh, dtype) as sampling:
        return complete(
            sampling, [prompt.ids for prompt in prompts], samples=options.group,
            max_new_tokens=options.max_new_tokens, temperature=options.temperature, stops=tokenizer.eos, seed=seed,
            batch=options.rollout_batch, cache_dtype=None if options.cache_dtype == "auto" else options.cache_dtype,
            images=[prompt.images for prompt in prompts] if tokenizer.processor else (), record=options.record,
            **filters(model, options),
        )  # fmt: skip


def filters(model: AbstractModel, options: RolloutOptions) -> dict[str, Any]:
    """Returns the arguments of `zoo.generation.complete.complete` for --top-k and --top-p."""
    if not options.top_k:
        return {}
    top = support.size(options.top_k, model.config.vocab_size)
    return {"top_k": options.top_k, "top_p": options.top_p if options.top_p < 1 else None, "top": top}


def support_rows(rows: int, seq: int, options: RolloutOptions, vocab_size: int) -> dict[str, np.ndarray]:
    """Makes the array of `train.methods.support.kept` for a batch of padding, if there is --top-k."""
    kept = support.size(options.top_k, vocab_size)
    return {"support": np.zeros((rows, seq, kept), np.int32)} if kept else {}
