"""Replies while they are written: their tokens, their texts, and the parts of these."""

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Literal

from zoo.generation.constraints import AbstractConstraint
from zoo.generation.generate import first, partial_stop_length
from zoo.generation.sampling import Sampling
from zoo.nn.model import Images
from zoo.serve.served import Served
from zoo.text.replies import AbstractReader, Piece


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
    """A request to continue a prompt.

    - `sampling`: without stop strings, as the engine takes it.
    - `special`: the special tokens that the text shows (`Tokenizer.stream`).
    - `reader`: makes a reader for each reply; None leaves replies whole.
    - `constraint`: makes a constraint for each reply; None leaves replies free.
    - `parallel`: whether a reply may have several calls; else it ends with the first.
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


@dataclasses.dataclass
class Gain:
    """The gain of a reply by new tokens: what its `parts` gain, after `calls` calls.

    `tokens` begin with the one before the new ones, which have `logprobs`.
    """

    parts: Piece
    calls: int
    tokens: list[int]
    logprobs: list[float]


class Reply:
    """One of the continuations that a request asks for. `finish` is the reason why it ended, None before it ends."""

    def __init__(self, index: int, ask: Ask):
        self.index, self.ask = index, ask
        self.tokens: list[int] = []  # including the end token
        self.logprobs: list[float] = []  # the engine's
        self.text = ""  # without end token and stop string
        self.parts = Piece()
        self.finish: Literal["stop", "length", "tool_calls"] | None = None if ask.sampling.max_new_tokens else "length"
        self.constraint = None if ask.constraint is None else ask.constraint()
        self._decoder, self._given = ask.served.tokenizer.stream(ask.prompt, special=ask.special), 0
        self._reader = None if ask.reader is None else ask.reader()

    def push(self, tokens: Sequence[int], logprobs: Sequence[float]) -> Gain:
        """Adds tokens until the reply ends, and returns what they add: no text that may begin a stop string."""
        before, calls = len(self.tokens), len(self.parts.calls)
        for token, logprob in zip(tokens, logprobs, strict=True):
            if not self.finish:
                self._add(token)
                self.logprobs.append(logprob)
        until = len(self.text) - (0 if self.finish else partial_stop_length(self.text, self.ask.stop))
        text, self._given = self.text[self._given : until], until
        parts = Piece(answer=text) if self._reader is None else self._reader.push(text, end=bool(self.finish))
        if parts.calls and not self.ask.parallel:
            parts.calls, self.finish = parts.calls[:1], "stop"
        self.parts += parts
        if self.parts.calls and self.finish == "stop":
            self.finish = "tool_calls"
        return Gain(parts, calls, [*self.ask.prompt[-1:], *self.tokens][before:], self.logprobs[before:])

    def _add(self, token: int) -> None:
        self.tokens.append(token)
        if token in self.ask.served.tokenizer.eos:
            self.finish = "stop"
            return
        self.text += self._decoder.push(token)
        if (at := first(self.text, self.ask.stop)) is not None:
            self.text, self.finish = self.text[:at], "stop"
        elif len(self.tokens) == self.ask.sampling.max_new_tokens:
            self.finish = "length"
