"""One trajectory: the model's replies to a prompt of an environment, and the environment's answers.

The tokens of a reply are the beginning of the next prompt: they are never decoded and encoded anew.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Int

from train.methods.chats import Chats, Message, call_of, message_of
from train.methods.environments import Environment, EnvironmentOptions, Host, Response
from zoo.generation.engine import Completion
from zoo.text.calls import Call


End = Literal["", "done", "turns", "length", "lost"]


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
        functions = [call_of(id, {"name": c.name, "arguments": dict(c.arguments)}) for id, c in calls]
        reply = message_of(piece, functions)
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
