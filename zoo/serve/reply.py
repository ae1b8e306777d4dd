"""Replies while they are written: their tokens, their texts, and the parts of these."""

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Literal, NamedTuple

from zoo.generation.constraints import AbstractConstraint
from zoo.generation.generate import first, partial_stop_length
from zoo.generation.sampling import Sampling
from zoo.nn.model import Images
from zoo.serve.served import Served
from zoo.text.replies import AbstractReader, Piece


class Token(NamedTuple):
    """A token with its log-probability, None for the first of a text, and the likeliest in its place with theirs."""

    id: int
    logprob: float | None
    likeliest: Mapping[int, float]


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
    """A request to continue a prompt.

    - `sampling`: without stop strings, as the engine takes it.
    - `special`: the special tokens that the text shows (`Tokenizer.stream`).
    - `reader`: makes a reader for each reply; None leaves replies whole.
    - `constraint`: makes a constraint for each reply; None leaves replies free.
    - `parallel`: whether a reply may have several calls; else it ends with the first.
    - `likeliest`: whether tokens come with the likeliest ones in their places.
    """

    served: Served
    prompt: list[int]
    sampling: Sampling
    stop: Sequence[str] = ()
    special: bool | Collection[str] = False
    reader: Callable[[], AbstractReader] | None = None
    constraint: Callable[[], AbstractConstraint] | None = None
    parallel: bool = True
    images: Images | None = None
    likeliest: bool = False


@dataclasses.dataclass
class Gain:
    """The gain of a reply by new `tokens`: what its `parts` gain, after `calls` calls."""

    parts: Piece
    calls: int
    tokens: list[Token]


class Reply:
    """One of the continuations that a request asks for. `finish` is the reason why it ended, None before it ends."""

    def __init__(self, index: int, ask: Ask):
        self.index, self.ask = index, ask
        self.tokens: list[Token] = []  # including the end token
        self.text = ""  # without end token and stop string
        self.parts = Piece()
        self.finish: Literal["stop", "length", "tool_calls"] | None = None if ask.sampling.max_new_tokens else "length"
        self.constraint = None if ask.constraint is None else ask.constraint()
        self._decoder, self._given = ask.served.tokenizer.stream(ask.prompt, special=ask.special), 0
        self._reader = None if ask.reader is None else ask.reader()

    def push(self, tokens: Sequence[Token]) -> Gain:
        """Adds tokens until the reply ends, and returns what they add: no text that may begin a stop string."""
        before, calls = len(self.tokens), len(self.parts.calls)
        for token in tokens:
            if not self.finish:
                self._add(token)
        until = len(self.text) - (0 if self.finish else partial_stop_length(self.text, self.ask.stop))
        text, self._given = self.text[self._given : until], until
        parts = Piece(answer=text) if self._reader is None else self._reader.push(text, end=bool(self.finish))
        if parts.calls and not self.ask.parallel:
            parts.calls, self.finish = parts.calls[:1], "stop"
        self.parts += parts
        if self.parts.calls and self.finish == "stop":
            self.finish = "tool_calls"
        return Gain(parts, calls, self.tokens[before:])

    def _add(self, token: Token) -> None:
        self.tokens.append(token)
        if token.id in self.ask.served.tokenizer.eos:
            self.finish = "stop"
            return
        self.text += self._decoder.push(token.id)
        if (at := first(self.text, self.ask.stop)) is not None:
            self.text, self.finish = self.text[:at], "stop"
        elif len(self.tokens) == self.ask.sampling.max_new_tokens:
            self.finish = "length"
