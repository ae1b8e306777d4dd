"""Scores of completions: their rewards, their advantages, and the shares that are correct, pass@k and maj@k."""

import collections
import concurrent.futures
import dataclasses
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import ClassVar, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import Bool, Float

from train.base import cluster
from train.base.options import Group, OptionGroup, option
from train.data.prompts import Prompt
from train.data.rewards import ANSWERS, BadRecord, Reward
from train.methods.judges import Judge
from train.step import loss
from zoo.generation.shapes import bucket


T = TypeVar("T")
Each = Float[np.ndarray, "some group names"]  # rewards of some prompts' completions, by the rewards' names
NEEDS = {"exact": "answer", "number": "answer", "python": "tests"}  # fields of the records, by reward


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOptions(OptionGroup):
    """Options for the rewards of completions."""

    help_group: ClassVar[Group] = Group.METHOD

    reward: tuple[str, ...] = (r"regex:[^\n]+\.",)
    r"""Functions of completions: exact or number (against the record's answer), python (runs code with the record's
    tests), regex:PATTERN, file.py:function, which is called with the text and the record's fields, model:FOLDER, the
    reward that a reward model gives, or model:FOLDER:LABEL, the probability that a classifier gives."""
    reward_weights: tuple[float, ...] = option((), rare=True)
    """Weight of each of several rewards. Without weights each reward has the weight 1."""
    correct: float | None = option(None, rare=True)
    """Least reward of a completion that counts as correct in pass@1 and pass@k. None: the sum of the weights of the
    rewards, which is the full reward if each reward is at most 1."""
    advantages: Literal["grpo", "rloo", "gdpo"] = option("grpo", rare=True)
    """Comparison of a completion's reward with those of its group. grpo: with their mean, in standard deviations. rloo:
    with the mean of the others. gdpo: each of several rewards as in grpo, and their weighted sum once more."""
    scale_rewards: bool = option(True, rare=True)
    """Divide advantages of grpo by the standard deviation of their group; Dr. GRPO does not."""
    overlong: int = option(0, rare=True)
    """Number of tokens below --max-new-tokens from which on a completion loses reward, down to -1 (DAPO's soft overlong
    punishment). 0: none."""

    @property
    def of_reward(self) -> tuple[float, ...]:
        """Returns the weight of each --reward."""
        return self.reward_weights or (1.0,) * len(self.reward)

    @property
    def names(self) -> tuple[str, ...]:
        """Returns the names of all rewards, of which the last may be the punishment of long completions."""
        return self.reward + ("overlong",) * bool(self.overlong)

    @property
    def weights(self) -> tuple[float, ...]:
        """Returns the weights of all rewards."""
        return self.of_reward + (1.0,) * bool(self.overlong)

    @property
    def least_correct(self) -> float:
        """Returns the least reward of a correct completion: --correct, or the sum of the positive weights."""
        return sum(weight for weight in self.of_reward if weight > 0) if self.correct is None else self.correct

    def correct_of(self, each: Float[np.ndarray, "prompts group names"]) -> Bool[np.ndarray, "prompts group"]:
        """Finds the completions that are correct, however long they are."""
        return each[..., : len(self.of_reward)] @ np.array(self.of_reward, np.float32) >= self.least_correct - 1e-6


def try_rewards(
    prompts: Iterable[tuple[str, Prompt]], names: Sequence[str], judges: Sequence[Reward | Judge]
) -> dict[str, float]:
    """Checks before a run that all records have the fields that its rewards need.

    Returns each reward's value for the first record, with the record's answer, if it has one, as the completion. A
    reward of the user's, or a model, is called just once, and code is run just once.

    Args:
        prompts: places of records, such as a file and a line, with their prompts.
        names: the rewards, as --reward names them.
        judges: the same rewards' functions and models.

    Raises:
        ValueError: a record lacks a field, or a reward fails or returns no finite number; names the record.
    """
    found: dict[str, float] = {}
    for where, prompt in prompts:
        for name, judge in zip(names, judges, strict=True):
            if name in found and (name not in NEEDS or NEEDS[name] in prompt.record):
                continue
            try:
                answer = str(prompt.record.get("answer", ""))
                of_model = isinstance(judge, Judge)
                worth = float(judge.rate([prompt], [[answer]])[0, 0] if of_model else judge(answer, prompt.record))
            except BadRecord as error:
                raise ValueError(f"{where}: {error}") from error
            except Exception as error:  # raised by the user's function
                raise ValueError(f"{where}: --reward {name} raises {type(error).__name__}: {error}.") from error
            if not math.isfinite(worth):
                raise ValueError(f"{where}: --reward {name} gives {worth}, and has to give a finite number.")
            found.setdefault(name, worth)
    return found


def score(
    texts: list[list[str]], prompts: Sequence[Prompt], options: RewardOptions, judges: Sequence[Reward | Judge]
) -> tuple[Float[np.ndarray, "prompts group names"], float]:
    """Computes every reward of every completion. Also returns the number of rewards that failed, which count as 0.

    A reward fails if it raises an error or is not finite. Process 0 computes the rewards for all processes, since a
    user's function may be random; but models are on the devices of all.

    Raises:
        BadRecord: a record lacks a field that a reward needs.
    """
    found = np.zeros((len(prompts), len(texts[0]), len(judges)), np.float32)
    functions = {n: judge for n, judge in enumerate(judges) if not isinstance(judge, Judge)}
    errors = 0.0

    def judge() -> None:
        nonlocal errors
        with concurrent.futures.ThreadPoolExecutor() as pool:
            calls = {
                at: pool.submit(functions[at[2]], texts[at[0]][at[1]], prompts[at[0]].record)
                for at in np.ndindex(found.shape)
                if at[2] in functions
            }
            for at, call in calls.items():
                try:
                    worth = call.result()
                    if not isinstance(worth, np.bool_ | np.integer | np.floating) and type(worth) not in (
                        float, int, bool,
                    ):  # fmt: skip
                        # float(worth) would not do: an object may define its own, and a text may be of any length.
                        raise TypeError(f"it returned a {type(worth).__name__}, and must return a number")
                    worth = float(worth)
                    if not math.isfinite(worth):
                        raise ValueError(f"it is {worth}")
                    found[at] = worth
                except BadRecord:
                    raise
                except Exception as error:  # of any type, as the function may be the user's and the text is the model's
                    errors += 1
                    if errors == 1:
                        what = f"{type(error).__name__}: {error}, for {texts[at[0]][at[1]][:200]!r}"
                        warnings.warn(
                            f"The reward {options.reward[at[2]]} raises {what}. Such count as 0.", stacklevel=2
                        )

    if jax.process_count() == 1:
        judge()
    else:
        cluster.all_or_raise(judge if jax.process_index() == 0 else lambda: None)
        found, errors = map(np.array, multihost_utils.broadcast_one_to_all((found, errors)))
    for n, model in enumerate(judges):
        if isinstance(model, Judge):
            worth = model.rate(prompts, texts)
            found[..., n], errors = np.where(np.isfinite(worth), worth, 0), errors + np.sum(~np.isfinite(worth))
    return found, float(errors)


def dull(each: Float[np.ndarray, "prompts group names"], options: RewardOptions) -> Bool[np.ndarray, " prompts"]:
    """Finds the groups whose completions all have the same reward, so that they teach nothing."""
    return np.ptp(each @ np.array(options.weights, np.float32), axis=1) == 0


def with_signal(
    draw: Callable[[Sequence[int], int], tuple[list[T], Each]],
    groups: Sequence[T],
    each: Float[np.ndarray, "prompts group names"],
    options: RewardOptions,
    most: int,
    seed: int,
) -> tuple[list[T], Float[np.ndarray, "prompts group names"]]:
    """Draws groups that teach nothing again, up to `most` times. Returns all groups with their rewards.

    This is dynamic sampling, DAPO, arXiv:2503.14476, section 3.2, where other prompts take their place.

    Args:
        draw: (the numbers of prompts, a seed) -> their groups, and rewards.
    """
    groups, each = list(groups), each.copy()
    for attempt in range(1, most + 1):
        numbers = np.flatnonzero(dull(each, options)).tolist()
        if not numbers:
            break
        more = bucket(len(numbers), 1) - len(numbers)  # few numbers of prompts, so that little is compiled
        for m, group, own in zip(numbers, *draw(numbers + numbers[:1] * more, seed + (attempt << 20)), strict=False):
            groups[m], each[m] = group, own
    return groups, each


def advantages_of(
    each: Float[np.ndarray, "prompts group names"], options: RewardOptions
) -> Float[np.ndarray, " completions"]:
    """Computes the advantage of each completion from its rewards."""
    weights = np.array(options.weights, np.float32)
    match options.advantages:
        case "grpo":
            found = loss.group_advantages(jnp.asarray(each @ weights), scale=options.scale_rewards)
        case "rloo":
            found = loss.leave_one_out(jnp.asarray(each @ weights))
        case "gdpo":
            found = loss.advantages_of_each(jnp.asarray(each), jnp.asarray(weights))
    return np.asarray(found).reshape(-1)


def pass_at(correct: Bool[np.ndarray, "prompts group"]) -> dict[str, float]:
    """Estimates pass@k, the probability that one of k completions is correct, for k of 1, 2, 4, ... and the group size.

    For n completions of a prompt, c of them correct, the unbiased estimate is 1 - C(n - c, k) / C(n, k) (Chen et al.,
    2021, arXiv:2107.03374, eq. 1). It is averaged over the prompts.
    """
    n = correct.shape[1]
    sizes = sorted({2**i for i in range(n.bit_length()) if 2**i <= n} | {n})
    failed = lambda c, k: math.comb(n - c, k) / math.comb(n, k)
    return {f"pass@{k}": 1 - float(np.mean([failed(int(c), k) for c in correct.sum(axis=1)])) for k in sizes}


def majorities(
    texts: Sequence[Sequence[str]], each: Float[np.ndarray, "prompts group names"], options: RewardOptions
) -> dict[str, float]:
    """Computes maj@k of the first reward that reads answers, such as `number`; nothing if there is none."""
    for n, name in enumerate(options.reward):
        if name in ANSWERS:
            answers = [[ANSWERS[name](text) for text in group] for group in texts]
            return majority_at(answers, each[..., n] == 1)
    return {}


def majority_at(answers: Sequence[Sequence[Hashable]], correct: Bool[np.ndarray, "prompts group"]) -> dict[str, float]:
    """Estimates maj@k, the probability that the most frequent answer of k completions is correct.

    This is self-consistency, Wang et al., 2022, arXiv:2203.11171. k is 4, 8, ... and the group size. The completions of
    a prompt are cut into groups of k, over which the result is averaged. Of answers that are equally frequent one is
    taken at random, so their mean counts. A completion without an answer, None, has no vote.
    """
    n = correct.shape[1]
    sizes = sorted({2**i for i in range(2, n.bit_length()) if 2**i <= n} | {n})

    def share(answers: Sequence[Hashable], correct: Sequence[bool]) -> float:
        votes = collections.Counter(answer for answer in answers if answer is not None)
        best = [answer for answer, count in votes.items() if count == max(votes.values())]
        right = {answer for answer, good in zip(answers, correct, strict=True) if good}
        return sum(answer in right for answer in best) / len(best) if best else 0.0

    def mean(k: int) -> float:
        starts = range(0, n - k + 1, k)
        parts = (
            share(group[at : at + k], good[at : at + k].tolist())
            for group, good in zip(answers, correct, strict=True)
            for at in starts
        )
        return float(np.mean(list(parts)))

    return {f"maj@{k}": mean(k) for k in sizes}
