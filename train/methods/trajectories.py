"""All trajectories of a step, as training batches.

Turn t of trajectory n of prompt m draws with a key of these three numbers. Answers of environments enter the engine at
times that follow from its steps, and not from a clock. So a step gives the same bits however long its tools take.
"""

import collections
import concurrent.futures
import contextlib
import hashlib
import itertools
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from train.base import cluster
from train.data.record import Record
from train.methods.chats import Chats
from train.methods.environments import Environment, EnvironmentOptions, Host, Journal, forget
from train.methods.rollouts import RolloutOptions
from train.methods.scores import RewardOptions, advantages_of, dull, pass_at, with_signal
from train.methods.texts import Text, batches_of
from train.methods.trajectory import Move, Players, Trajectory
from train.state.mesh import generating, reads_in_order
from train.step import loss
from train.step.task import Rolled
from zoo.generation.engine import Completion, Engine
from zoo.generation.sampling import Sampling
from zoo.nn.model import AbstractModel


JOURNAL = "journal"  # the folder of a run's journal, within the run's
TURNS = 2**30  # beyond the numbers with which the engine folds a key for each token
SHOWN = 3  # trajectories of a step that samples.jsonl may have


def rollout(
    model: AbstractModel,
    records: Sequence[Mapping[str, Any]],
    n: int,
    folder: pathlib.Path | None,
    *,
    host: Host,
    chats: Chats,
    environment: EnvironmentOptions,
    options: RolloutOptions,
    rewards: RewardOptions,
    mesh: Mesh,
    rows: int,
    seq_len: int,
    dtype: str,
    seed: int,
) -> Rolled:
    """Samples trajectories for step `n` of `train.grpo`: `options.group` of each record.

    The batches have `packed` texts. Each is a trajectory, or the part of one whose beginning the chat template has not
    written anew.

    Args:
        folder: that of the run, which has a journal; None: in evaluations, which keep no answers and draw no group
            again.
        rows: number of rows of a batch.
        seq_len: largest number of tokens of a trajectory, the last one aside.
        dtype: the dtype in which the model samples.

    Raises:
        ValueError: no trajectory has begun, or the chat template refuses a chat.
    """
    started = time.monotonic()
    if folder is not None and jax.process_index() == 0:
        forget(folder / JOURNAL, _oldest(folder, options.iterations * options.minibatches))
    journal = Journal(folder and folder / JOURNAL if jax.process_index() == 0 else None, n)
    players = Players(chats, environment, host, seq_len + 1)

    def draw(numbers: Sequence[int], seed: int) -> tuple[list[list[Trajectory]], Float[np.ndarray, "some group 1"]]:
        groups = [
            [Trajectory((m, k), records[r], Environment(host, journal, (seed, m, k))) for k in range(options.group)]
            for m, r in enumerate(numbers)
        ]
        with generating(model, mesh, dtype) as sampling, contextlib.ExitStack() as environments:
            for each in itertools.chain(*groups):
                environments.callback(each.environment.close)
            engine = Engine(
                sampling, batch=min(options.rollout_batch, len(groups) * options.group), max_tokens=seq_len + 1,
                stops=chats.tokenizer.eos, cache_dtype=None if options.cache_dtype == "auto" else options.cache_dtype,
                record=options.record,
            )  # fmt: skip
            _play(engine, groups, players, options, seed)
        return groups, np.array([[[sum(each.rewards)] for each in group] for group in groups], np.float32)

    with contextlib.closing(journal):
        groups, rewarded = draw(range(len(records)), seed + n)
        seconds, everything, total = time.monotonic() - started, list(itertools.chain(*groups)), rewarded[..., 0]
        redraws = options.redraws if folder is not None else 0
        learnt, worth = with_signal(draw, groups, rewarded, rewards, redraws, seed + n)
    problems = [each.last.problem for each in everything if each.last.problem]
    if not any(each.length for each in everything):
        raise ValueError(f"--environment {environment.environment}: no trajectory has begun: {problems[0]}.")
    if problems:
        warnings.warn(f"--environment {environment.environment}: {problems[0]}. Such count as 0.", stacklevel=2)
    if environment.credit == "turn":
        advantages = np.concatenate([_of_turns(group, environment.turns, rewards.scale_rewards) for group in learnt])
    else:
        advantages = advantages_of(worth, rewards)[:, None]
    texts = _texts(list(itertools.chain(*learnt)), advantages, options.mask_truncated)
    numbers = {
        "reward": float(total.mean()),
        "reward_deviation": float(total.std(axis=1).mean()),
        "reward_errors": float(len(problems)),
        **pass_at(total >= rewards.least_correct - 1e-6),
        "length": float(np.mean([each.length for each in everything])),
        "ended": float(np.mean([each.last.end == "done" for each in everything])),
        **_numbers(everything),
        "generation_tokens_per_second": sum(each.length for each in everything) / seconds,
    }
    if redraws:
        numbers["without_signal"] = float(np.mean(dull(worth, rewards)))
    samples = [_sample(group[0]) for group in groups[:SHOWN]]
    batches = batches_of(
        texts, rows, chats.tokenizer, iterations=options.iterations, minibatches=options.minibatches, seed=seed + n,
        branches=not reads_in_order(model),
    )  # fmt: skip
    return Rolled(batches, numbers, samples)


def described(host: Host, record: Record) -> str:
    """Describes an environment in words, for a dry run: its tools, and its first prompt.

    Raises:
        ValueError: `reset` fails for the record.
    """
    with contextlib.closing(Environment(host, Journal(None, 0), (0, 0))) as environment:
        response = environment.ask("reset", record.fields, 0, 0, after=[])
    if response.error:
        raise ValueError(f"{record.where}: reset raises {response.error}.")
    tools = ", ".join(tool["function"]["name"] for tool in host.tools or ()) or "none"
    return f"these tools: {tools}. Its first prompt: {response.value[-1]['content']!r:.200}"


def _play(
    engine: Engine, groups: Sequence[Sequence[Trajectory]], players: Players, options: RolloutOptions, seed: int
) -> None:
    """Draws all trajectories to their ends, as many at a time as the engine has rows.

    Moves of environments wait until a quarter of the trajectories do, or nothing is left to draw. Then they enter in
    the order in which the replies before them ended.
    """
    queue, most = collections.deque(groups), options.rollout_batch
    drawing: dict[Completion, Trajectory] = {}
    waiting: list[tuple[Trajectory, Callable[[], Move]]] = []
    group_keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.key(seed), np.arange(len(groups)))

    def submit(of: Sequence[Trajectory], tokens: Sequence[int], key: Any, after: Completion | None) -> None:
        before = 0 if after is None else len(after.prompt) + len(after.tokens)
        new = min(options.max_new_tokens, players.room - before - len(tokens))
        sampling = Sampling(max_new_tokens=new, temperature=options.temperature)
        found = engine.submit(tokens, sampling, key=key, samples=len(of), after=after, keep=True)
        for each, each.completion in zip(of, found, strict=True):
            each.before, each.turns = after, each.turns + 1
            drawing[each.completion] = each

    with concurrent.futures.ThreadPoolExecutor(most) as pool:
        call = lambda *work: pool.submit(*work).result if jax.process_index() == 0 else lambda: Move([])
        while queue or drawing or waiting:
            while queue and len(drawing) + len(waiting) + len(queue[0]) <= max(most, len(queue[0])):
                group = queue.popleft()
                waiting += [(each, call(players.begin, each, _seeds(seed, *each.place))) for each in group]
            if drawing and 4 * len(waiting) < len(drawing) + len(waiting):
                engine.step()
                for done in [each for each in drawing if each.finished]:
                    each = drawing.pop(done)
                    if each.before is not None:
                        engine.free(each.before)
                    waiting.append((each, call(players.answer, each, done)))
                continue
            moves = _agreed([result for _, result in waiting])
            opened: dict[int, list[Trajectory]] = {}
            for (each, _), move in zip(waiting, moves, strict=True):
                before = each.completion
                each.apply(move)
                if before is not None and (move.end or move.anew):
                    engine.free(before)
                if move.end:
                    each.environment.close()
                elif before is None:
                    opened.setdefault(each.place[0], []).append(each)
                else:
                    key = jax.random.fold_in(group_keys[each.place[0]], each.place[1])
                    key = jax.random.fold_in(key, TURNS + each.turns)
                    submit([each], move.tokens, key, None if move.anew else before)
            for m, group in opened.items():
                if len(group) == options.group and all(each.last.tokens == group[0].last.tokens for each in group):
                    submit(group, group[0].last.tokens, group_keys[m], None)  # they share what is read
                    continue
                for each in group:
                    submit([each], each.last.tokens, jax.random.fold_in(group_keys[m], each.place[1]), None)
            waiting = []


def _agreed(results: Sequence[Callable[[], Move]]) -> list[Move]:
    """Waits for moves. Process 0 has the environments, and the others get its moves."""
    if jax.process_count() == 1:
        return [result() for result in results]
    moves = cluster.all_or_raise(lambda: [result() for result in results])
    told = cluster.broadcast(json.dumps([move._asdict() for move in moves]).encode(), 0)
    return [Move(**each) for each in json.loads(told)]


def _seeds(seed: int, prompt: int, sample: int) -> tuple[int, int]:
    """Returns the seeds of an environment's random numbers: for `reset`, equal within a group, and after it."""
    number = lambda *of: int.from_bytes(hashlib.sha256(repr(of).encode()).digest()[:4])
    return number(seed, prompt), number(seed, prompt, sample)


def _oldest(folder: pathlib.Path, updates: int) -> int:
    """Returns the step of the oldest checkpoint in a run's folder, to which the run may go back; 0 without one."""
    found = [int(path.name) for path in (folder / "checkpoints").glob("*") if path.name.isdigit()]
    return min(found, default=0) // updates


def _of_turns(group: Sequence[Trajectory], turns: int, scale: bool) -> Float[np.ndarray, "group turns"]:
    """Computes the advantages of turns, which are 0 after a trajectory's end. `turns` is the largest number of them."""
    rewards, present = np.zeros((len(group), turns), np.float32), np.zeros((len(group), turns), bool)
    for row, each in enumerate(group):
        rewards[row, : len(each.rewards)], present[row, : len(each.rewards)] = each.rewards, True
    return np.asarray(loss.turn_advantages(jnp.asarray(rewards), jnp.asarray(present), scale=scale))


def _texts(
    trajectories: Sequence[Trajectory], advantages: Float[np.ndarray, "all #turns"], mask_truncated: bool
) -> list[Text]:
    """Returns the texts of trajectories, one for each branch. With `mask_truncated`, truncated ones have none."""
    texts = []
    for each, advantage in zip(trajectories, advantages, strict=True):
        for branch in each.branches if each.last.end == "done" or not mask_truncated else ():
            drawn = [n for n, logprob in enumerate(branch.logprobs) if logprob is not None]
            if drawn:
                end = drawn[-1] + 1
                of_targets = advantage[np.minimum(branch.turns[1:end], len(advantage) - 1)]
                texts.append(Text(branch.tokens[:end], branch.logprobs[:end], of_targets, experts=branch.experts))
    return texts


def _numbers(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the metrics of turns and tools."""
    mean = lambda of: float(np.mean([of(each) for each in trajectories]))
    sum_of = lambda name: sum(getattr(move, name) for each in trajectories for move in each.moves)
    return {
        "turns": mean(lambda each: each.turns),
        "branches": mean(lambda each: len(each.branches)),
        "truncated": mean(lambda each: each.last.end != "done"),
        "tool_calls": sum_of("calls") / len(trajectories),
        "tool_errors": float(sum_of("errors")),
        "tool_seconds": sum_of("seconds") / max(1, sum_of("calls")),
    }


def _sample(trajectory: Trajectory) -> dict[str, Any]:
    """Returns a trajectory for samples.jsonl: its messages, a text of them, and its tokens with log-probabilities."""
    said = lambda message: "\n".join(
        [str(message["content"] or ""), *(f"-> {c['function']}" for c in message.get("tool_calls", ()))]
    ).strip()
    first, rest = trajectory.messages[:1], trajectory.messages[1:]
    texts = [f"{message['role']}: {said(message)}" for message in rest]
    last = trajectory.last
    return {
        "prompt": said(first[0]) if first else "",
        "text": "\n".join([*texts, f"[reward {sum(trajectory.rewards):g}, {last.end}]"]),
        "messages": trajectory.messages,
        "reward": sum(trajectory.rewards),
        "end": last.end,
        "branches": [{"tokens": each.tokens, "logprobs": each.logprobs} for each in trajectory.branches],
    }
