"""Trajectories: the model's replies to prompts of an environment, and the environment's answers, as training batches.

The tokens of a reply are the beginning of the next prompt: they are never decoded and encoded anew. Turn t of
trajectory n of prompt m draws with a key of these three numbers. Answers of environments enter the engine at times that
follow from its steps, and not from a clock. So a step gives the same bits however long its tools take.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import hashlib
import itertools
import json
import pathlib
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from train.base import cluster
from train.data.record import Record
from train.methods.environments import Environment, EnvironmentOptions, Host, Journal, Response, forget
from train.methods.rollouts import (
    RewardOptions,
    RolloutOptions,
    Text,
    advantages_of,
    batches_of,
    dull,
    pass_at,
    with_signal,
)
from train.state.mesh import generating
from train.step import loss
from train.step.task import Rolled
from zoo.generation.engine import Completion, Engine
from zoo.generation.sampling import Sampling
from zoo.nn.model import AbstractModel
from zoo.text.calls import Call
from zoo.text.replies import Piece
from zoo.text.tokenizer import Tokenizer


Message = dict[str, Any]
End = Literal["", "done", "turns", "length", "lost"]
JOURNAL = "journal"  # the folder of a run's journal, within the run's
TURNS = 2**30  # beyond the numbers with which the engine folds a key for each token
SHOWN = 3  # trajectories of a step that samples.jsonl may have


# ======================================================================================================================
# Chats in tokens.
# ======================================================================================================================


@dataclasses.dataclass(frozen=True)
class Chats:
    """The texts and tokens of chats with an environment.

    Raises:
        ValueError: there are tools, and the chat template takes none or writes calls in an unknown form.
    """

    tokenizer: Tokenizer
    tools: Sequence[Mapping[str, Any]] | None
    past: Literal["split", "refuse"]

    def __post_init__(self) -> None:
        if self.tools:
            self.tokenizer.beginning([])  # raises if calls have an unknown form
            call = {"name": self.tools[0]["function"]["name"], "arguments": {}}
            chat = [{"role": "user", "content": "Well?"}, _message(Piece(), [_called("call00000", call)])]
            chat.append({"role": "tool", "tool_call_id": "call00000", "name": call["name"], "content": "Nothing."})
            self.tokenizer.render_whole(chat, self.tools)

    def first(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Returns a chat's text and tokens, with an assistant's turn opened at the end."""
        text = self.tokenizer.render_whole(messages, self.tools, add_generation_prompt=True)
        return text, self.tokenizer.encode_marked(text)[0]

    def read(self, prompt: Sequence[int], tokens: Sequence[int]) -> Piece:
        """Splits a reply into reasoning, answer and calls."""
        stream = self.tokenizer.stream(prompt, special=self.tokenizer.delimiters(self.tools))
        texts = [stream.push(token) for token in tokens if token not in self.tokenizer.eos]
        return sum(self.tokenizer.reader(prompt, self.tools).split(["".join(texts)]), Piece())

    def following(
        self, text: str, messages: Sequence[Message], new: Sequence[Message], end: int
    ) -> tuple[str, list[int], bool]:
        """Returns the text of a chat with new messages, and the tokens that follow those of the chat.

        Where the template does not write the chat and then the new messages, these are the tokens of all, and the third
        value is True.

        Args:
            text: the chat before the last reply.
            messages: the chat with the last reply.
            end: the token that ended the reply.

        Raises:
            ValueError: the template rewrites the chat, and `past` is "refuse".
        """
        tokenizer, control = self.tokenizer, self.tokenizer.decode([end], special=True)
        past = tokenizer.render_marked(messages, self.tools, add_generation_prompt=False)
        whole = tokenizer.render_marked([*messages, *new], self.tools, add_generation_prompt=True)
        if past.startswith(text) and whole.startswith(past):
            _, found, tail = past[len(text) :].rpartition(control)
            rest = whole[len(past) :]
            # The template may end a turn by the header of the next one, which the model then has drawn.
            rest = tail + rest if found and not tail.strip() else rest.removeprefix(control) if not found else None
            if rest is not None and (ids := tokenizer.encode_marked(control + rest)[0])[0] == end:
                return whole, ids[1:], False
        if self.past == "refuse":
            raise ValueError(
                f"The chat template of {tokenizer.folder} writes turns of the past anew, such as without their "
                "reasoning, so the next prompt does not begin with the tokens that were drawn. With --past split such "
                "a trajectory is learnt in several texts."
            )
        return whole, tokenizer.encode_marked(whole)[0], True


def _message(piece: Piece, calls: Sequence[Mapping[str, Any]]) -> Message:
    """Returns a reply as a message for chat templates."""
    reasoning = {"reasoning_content": piece.reasoning} if piece.reasoning else {}
    return {"role": "assistant", "content": piece.answer} | reasoning | ({"tool_calls": [*calls]} if calls else {})


def _called(id: str, function: Mapping[str, Any]) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": dict(function)}


# ======================================================================================================================
# One trajectory.
# ======================================================================================================================


class Move(NamedTuple):
    """An act of an environment: at the beginning of a trajectory, or after a reply."""

    messages: list[Message]  # new ones: the reply, and what follows
    text: str = ""  # the chat up to the next reply
    tokens: list[int] = []  # of what follows; all tokens of the chat, if it is `anew`  # noqa: RUF012
    anew: bool = False
    other: bool = False  # whether another chat begins, after the reply
    end: End = ""
    reward: float = 0.0  # of the whole trajectory
    turn_reward: float = 0.0  # of the reply before
    problem: str = ""  # an error of the environment's own
    calls: int = 0
    errors: int = 0  # of calls
    seconds: float = 0.0  # of calls


@dataclasses.dataclass
class Branch:
    """A text as the model saw it. `logprobs` has None at tokens that were not drawn, and `turns` their number there."""

    tokens: list[int]
    logprobs: list[float | None]
    turns: list[int]  # of the reply that a token is part of, from 0 on; of another token that of the next reply
    experts: Int[np.ndarray, "tokens layers choices"] | None = None  # those that tokens had, see --router-replay


@dataclasses.dataclass(eq=False)
class Trajectory:
    """A chat of the model with an environment, of prompt `place[0]` and sample `place[1]`."""

    place: tuple[int, int]
    record: Mapping[str, Any]
    environment: Environment
    messages: list[Message] = dataclasses.field(default_factory=list)
    start: int = 0  # of the present chat in the messages: a function may begin another one
    text: str = ""
    branches: list[Branch] = dataclasses.field(default_factory=list)
    moves: list[Move] = dataclasses.field(default_factory=list)
    turns: int = 0
    completion: Completion | None = None
    before: Completion | None = None  # the one that this one continues

    @property
    def last(self) -> Move:
        """The last move of the environment."""
        return self.moves[-1]

    @property
    def length(self) -> int:
        """The number of drawn tokens."""
        return sum(logprob is not None for branch in self.branches for logprob in branch.logprobs)

    @property
    def rewards(self) -> list[float]:
        """The rewards of the turns. That of the whole trajectory comes with the last one."""
        found = [move.turn_reward for move in self.moves[1:]]
        if self.last.end == "lost":
            return [0.0] * len(found)
        return [*found[:-1], found[-1] + self.last.reward] if found else []

    def apply(self, move: Move) -> None:
        """Adds a reply, if one is finished, and a move."""
        if (done := self.completion) is not None:
            self.branches[-1].tokens += done.tokens
            self.branches[-1].logprobs += done.logprobs
            self.branches[-1].turns += [self.turns - 1] * len(done.tokens)
            self.branches[-1].experts = done.records.get("experts")
        if move.tokens and not move.end:
            if move.anew:
                self.branches.append(Branch([], [], []))
            self.branches[-1].tokens += move.tokens
            self.branches[-1].logprobs += [None] * len(move.tokens)
            self.branches[-1].turns += [self.turns] * len(move.tokens)
        self.start = len(self.messages) + 1 if move.other else self.start
        self.messages += move.messages
        self.text = move.text
        self.moves.append(move)


@dataclasses.dataclass(frozen=True)
class Players:
    """The side of the environments, called in threads: they wait for answers while the engine draws."""

    chats: Chats
    options: EnvironmentOptions
    host: Host
    room: int  # most tokens of a chat

    def begin(self, at: Trajectory, seeds: Sequence[int]) -> Move:
        """Returns the first move: the prompt."""
        response = at.environment.ask("reset", at.record, *seeds, after=[at.record, seeds])
        if response.error:
            return Move([], end="lost", problem=f"reset raises {response.error}")
        text, tokens = self.chats.first(response.value)
        if len(tokens) >= self.room:
            problem = f"a prompt has {len(tokens):,} tokens, which leaves no room for a reply in --seq-len"
            return Move(response.value, text, end="length", problem=problem)
        return Move(response.value, text, tokens, anew=True)

    def answer(self, at: Trajectory, done: Completion) -> Move:
        """Returns the move after a reply. It changes nothing of the trajectory, beside its environment."""
        drawn, before = done.prompt + done.tokens, at.environment.seconds
        piece = self.chats.read(done.prompt, done.tokens)
        calls = [(call.id or f"call{at.turns:02}{n:03}", call) for n, call in enumerate(piece.calls)]
        functions = [_called(id, {"name": c.name, "arguments": dict(c.arguments)}) for id, c in calls]
        reply = _message(piece, functions)
        limit: End = "length" if not done.ended else "turns" if at.turns == self.options.turns else ""
        if self.host.drives:
            move = self._resumed(reply, at, drawn, limit)
        elif not calls:
            move = self._after(piece.answer, at, drawn, limit)
        else:
            move = Move([], end=limit) if limit else self._results(calls, at, drawn)
        if not move.end:
            messages = [*at.messages[at.start :], reply]
            if move.other:
                text, tokens, anew = *self.chats.first(move.messages), True
            else:
                text, tokens, anew = self.chats.following(at.text, messages, move.messages, done.tokens[-1])
            full = len(tokens) + (0 if anew else len(drawn)) >= self.room
            move = move._replace(text=text, tokens=tokens, anew=anew, end="length" if full else "")
        if move.end not in ("", "lost"):
            response = at.environment.ask("reward", after=drawn)
            problem = move.problem or (f"reward raises {response.error}" if response.error else "")
            move = move._replace(reward=response.value or 0.0, problem=problem)
        if self.host.scores and move.end != "lost":
            response = at.environment.ask("turn_reward", after=drawn)
            problem = f"turn_reward raises {response.error}" if response.error else move.problem
            move = move._replace(turn_reward=response.value or 0.0, problem=problem)
        return move._replace(messages=[reply, *move.messages], seconds=at.environment.seconds - before)

    def _resumed(self, reply: Message, at: Trajectory, drawn: Sequence[int], limit: End) -> Move:
        """Returns the move of a function that drives the conversation."""
        response = at.environment.ask("resume", reply, after=drawn)
        if response.error:
            return Move([], end="lost" if response.lost else "done", problem=f"the function raises {response.error}")
        if response.value is None:
            return Move([], end="length" if limit == "length" else "done")
        return Move(response.value["new"], other=response.value["other"], end=limit)

    def _after(self, answer: str, at: Trajectory, drawn: Sequence[int], limit: End) -> Move:
        """Returns the move after an answer that calls no tool."""
        response = at.environment.ask("reply", answer, after=drawn) if self.host.replies else Response()
        if response.error:
            return Move([], end="lost" if response.lost else "done", problem=f"reply raises {response.error}")
        if response.value is None:
            return Move([], end="length" if limit == "length" else "done")
        return Move([{"role": "user", "content": response.value}], end=limit)

    def _results(self, calls: Sequence[tuple[str, Call]], at: Trajectory, drawn: Sequence[int]) -> Move:
        """Returns the move after calls of tools, which have ids: their results."""
        names, results, errors = [tool["function"]["name"] for tool in self.chats.tools or ()], [], 0
        for id, call in calls:
            response = Response(error=f"there is no tool {call.name!r}; there are {', '.join(names)}.")
            if call.name in names:
                response = at.environment.ask("tool", call.name, dict(call.arguments), after=drawn)
            errors += response.error is not None
            content = response.value if response.error is None else f"Error: {response.error}"
            results.append({"role": "tool", "tool_call_id": id, "name": call.name, "content": content})
            if response.lost:
                return Move(results, end="lost", calls=len(results), errors=errors)
        return Move(results, calls=len(results), errors=errors)


# ======================================================================================================================
# All trajectories of a step.
# ======================================================================================================================


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
    return Rolled(batches_of(texts, options, rows, seed + n, chats.tokenizer), numbers, samples)


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
