"""Rollouts: the model's own completions of prompts, with their rewards and advantages, as training batches."""

import collections
import concurrent.futures
import dataclasses
import functools
import itertools
import math
import pathlib
import time
import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int, Int32, Shaped

from train.base import cluster
from train.base.options import Group, OptionGroup, option
from train.data import pictures
from train.data.prompts import Prompt
from train.data.rewards import ANSWERS, BadRecord, Reward
from train.methods import support
from train.methods.judges import Judge
from train.state.mesh import generating
from train.step import loss
from train.step.task import Rolled
from zoo.generation.complete import complete
from zoo.generation.decoding import Record
from zoo.generation.engine import Completion
from zoo.generation.images import joined_images
from zoo.generation.shapes import bucket
from zoo.nn.model import AbstractModel, Images
from zoo.text.tokenizer import Tokenizer


T = TypeVar("T")
TEXTS = 64  # largest number of texts in a row
SHARING = 8  # completions that share a row on average, so that rows can be filled evenly
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
    return Rolled(batches_of(texts, options, rows, seed + n, tokenizer), numbers)


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


class Text(NamedTuple):
    """Tokens of a prompt and of a completion, or of several by turns. The last one was drawn."""

    tokens: Sequence[int]
    logprobs: Sequence[float | None]  # of each token; None: it was not drawn
    advantage: float | Float[np.ndarray, " targets"]  # of the text, or of each of its tokens but the first
    images: Images | None = None  # the prompt's
    experts: Int[np.ndarray, "tokens layers choices"] | None = None  # those that tokens had, see --router-replay
    support: Int32[np.ndarray, "drawn kept"] | None = None  # of the last tokens, see `train.methods.support`


def rows_of(completions: int, multiple: int) -> int:
    """Returns the number of rows for a number of completions: a multiple of `multiple`."""
    return multiple * math.ceil(completions / SHARING / multiple)


def batches_of(
    texts: Sequence[Text], options: RolloutOptions, rows: int, seed: int, tokenizer: Tokenizer
) -> list[dict[str, Shaped[np.ndarray, "rows ..."]]]:
    """Returns the batches of a step: for each of its iterations all texts, in another order, in `minibatches` parts.

    Args:
        rows: number of rows of a batch.
    """
    random = np.random.RandomState(seed % 2**32)
    orders = [random.permutation(len(texts)) for _ in range(options.iterations)]
    parts = [part for order in orders for part in np.array_split(order, options.minibatches)]
    return [packed([texts[n] for n in part], rows, tokenizer) for part in parts]


def packed(texts: Sequence[Text], rows: int, tokenizer: Tokenizer) -> dict[str, Shaped[np.ndarray, "rows ..."]]:
    """Packs texts into rows: the longest first, each into the row with the fewest tokens so far.

    These are the arrays of `train.data.rows`, and two more: "advantages", equal along a text or a turn, and "old",
    the log-probability with which each target was drawn; and, if texts have them, the tokens' "experts", in the form of
    `zoo.nn.routing.experts_of`, and the targets' "support". Rows are as long as the longest one, rounded up (`few`).

    Raises:
        ValueError: there are too many texts for these rows.
    """
    if len(texts) > rows * TEXTS:
        raise ValueError(
            f"{len(texts)} texts do not fit {rows} rows of at most {TEXTS}: conversations were split into too many "
            "parts; take a chat template that does not rewrite its past, or fewer --turns."
        )
    table: list[list[Text]] = [[] for _ in range(rows)]
    filled = [0] * rows
    length = lambda text: len(text.tokens) - 1  # the last token is only a target
    for text in sorted(texts, key=length, reverse=True):
        row = min((n for n in range(rows) if len(table[n]) < TEXTS), key=filled.__getitem__)
        table[row].append(text)
        filled[row] += length(text)
    seq_len = few(max(filled))
    arrays = padding_rows(rows, seq_len)
    if texts and texts[0].experts is not None:
        arrays["experts"] = np.zeros((rows, seq_len, *texts[0].experts.shape[1:]), np.int32)
    if texts and texts[0].support is not None:
        arrays["support"] = np.zeros((rows, seq_len, texts[0].support.shape[1]), np.int32)
    for n, row in enumerate(table):
        end = 0
        for segment, text in enumerate(row, 1):
            here, end, old = slice(end, end + length(text)), end + length(text), text.logprobs[1:]
            arrays["tokens"][n, here], arrays["targets"][n, here] = text.tokens[:-1], text.tokens[1:]
            arrays["loss_mask"][n, here] = [logprob is not None for logprob in old]
            arrays["old"][n, here] = [logprob or 0.0 for logprob in old]
            arrays["segments"][n, here], arrays["positions"][n, here] = segment, np.arange(length(text))
            arrays["advantages"][n, here] = text.advantage
            if text.experts is not None:
                arrays["experts"][n, here] = text.experts[: length(text)]
            if text.support is not None:
                arrays["support"][n, end - len(text.support) : end] = text.support
    if tokenizer.processor is not None:
        arrays |= pictures.of_rows([_images(row) for row in table], seq_len, tokenizer)
    return arrays


def _images(row: Sequence[Text]) -> Images | None:
    """Joins the images of a row's texts."""
    images, end = None, 0
    for text in row:
        length = len(text.tokens) - 1
        images, end = joined_images(images, end, text.images, length), end + length
    return images


def few(length: int) -> int:
    """Rounds the length of rows up to a multiple of 16, and of a power of two that is at most a sixteenth of it.

    So few lengths are compiled, at most sixteen between one and its double, and few tokens are padding.
    """
    unit = max(16, 1 << max(0, (length - 1).bit_length() - 5))
    return max(unit, math.ceil(length / unit) * unit)


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


def padding_rows(rows: int, seq: int) -> dict[str, Shaped[np.ndarray, "rows seq"]]:
    """Makes a batch of padding."""
    integers = dict.fromkeys(("tokens", "targets", "loss_mask", "segments", "positions"), np.int32)
    kinds = integers | dict.fromkeys(("advantages", "old"), np.float32)
    return {name: np.zeros((rows, seq), kind) for name, kind in kinds.items()}


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
