"""Split replies into reasoning, answer, and calls of functions, while they are generated.

<think>Two and two.</think>A sum: <tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call>
"""

import abc
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence

from zoo.text.calls import Call, Form, form_of
from zoo.text.messages import Tools


# Texts around reasoning: Mistral's, Gemma 4's, and all others'.
TAGS = (("[THINK]", "[/THINK]"), ("<|channel>thought", "<channel|>"), ("<think>", "</think>"))


@dataclasses.dataclass
class Piece:
    """The parts of a reply, or what they gain by a piece of its text. A call comes whole."""

    reasoning: str = ""
    answer: str = ""
    calls: list[Call] = dataclasses.field(default_factory=list)

    def __add__(self, new: "Piece") -> "Piece":
        return Piece(self.reasoning + new.reasoning, self.answer + new.answer, self.calls + new.calls)


class AbstractReader(abc.ABC):
    """Splits one reply."""

    @abc.abstractmethod
    def push(self, text: str, *, end: bool = False) -> Piece:
        """Add text, and return what the parts gain by it. `end`: no more will come.

        Text that may open another part is held back until it is known. A call that cannot be read is part of the
        answer, as the model wrote it.
        """

    def split(self, pieces: Iterable[str]) -> Iterator[Piece]:
        """Split the text of a whole reply, which comes in pieces."""
        for text in pieces:
            yield self.push(text)
        yield self.push("", end=True)


@dataclasses.dataclass(frozen=True)
class Style:
    """How a model's replies are written: `tags` around reasoning, and the form of calls; None if there is none."""

    tags: tuple[str, str] | None = None
    form: Form | None = None

    @classmethod
    def of(cls, template: str) -> "Style":
        """Return the style that a chat template shows."""
        return cls(next((tags for tags in TAGS if tags[1] in template), None), form_of(template))

    @property
    def delimiters(self) -> Sequence[str]:
        """The texts at which a reader splits replies."""
        inside = () if self.form is None else (*self.form.opens, self.form.close, *self.form.inner)
        return [text for text in (*(self.tags or ()), *inside) if text]

    def reasons(self, prompt: str) -> bool:
        """Whether a reply begins with reasoning, because the prompt ends with the tag that opens it."""
        return self.tags is not None and prompt.rstrip().endswith(self.tags[0])


class Reader(AbstractReader):
    """Splits a reply at the delimiters of a style. `reasons` is that of `Style`."""

    def __init__(self, style: Style, tools: Tools = None, *, reasons: bool = False):
        self._tags, self._form, self._tools = style.tags, style.form, tools
        self._held = ""  # text that is in no part yet
        self._part: Callable[[Piece, bool], bool] = self._reason if reasons else self._answer
        self._opening = ""  # that of the call in `_held`
        self._answered = False  # whether the answer has begun
        self._gap = reasons  # whether the text stands after a delimiter, and white space there is left out

    def push(self, text: str, *, end: bool = False) -> Piece:
        self._held += text
        piece = Piece()
        while self._part(piece, end):
            pass
        return piece

    def _reason(self, piece: Piece, end: bool) -> bool:
        """Move held text into the reasoning, and return whether another part begins."""
        assert self._tags is not None
        text, closed, rest = self._held.partition(self._tags[1])
        ready = (text if closed or end else text[: len(text) - partial(text, self._tags[1:])]).rstrip()
        piece.reasoning += self._spaced(ready)
        self._held = rest if closed else self._held[len(ready) :]
        if closed:
            self._part, self._gap = self._answer, True
        return bool(closed)

    def _answer(self, piece: Piece, end: bool) -> bool:
        """Move held text into the answer, and return whether another part begins."""
        text, form, tags = self._held, self._form, () if self._answered or self._tags is None else self._tags[:1]
        opens = (*tags, *(form.opens if form else ()))
        found = [
            (at, each) for each in opens if (at := text.find(each)) >= 0 and (each not in tags or not text[:at].strip())
        ]
        at, opening = min(found, default=(len(text), None))
        if form and not self._answered and text.lstrip()[:1] in {*form.bare}:
            at, opening = 0, ""
        ready = text[:at] if opening is not None or end else text[: len(text) - partial(text, opens)]
        if opening is not None or (form and not end):
            ready = ready.rstrip()  # white space before a call is left out
        said = self._spaced(ready)
        piece.answer += said
        self._answered = self._answered or bool(said)
        self._held = text[len(ready) :]
        if opening is not None and opening in tags:
            self._held, self._part, self._gap = self._held.lstrip()[len(opening) :], self._reason, True
        elif opening is not None:
            self._opening, self._part = opening, self._call
        return opening is not None

    def _call(self, piece: Piece, end: bool) -> bool:
        """Read a call if the held text has all of it, and return whether it has."""
        assert self._form is not None
        start, close = self._held.index(self._opening) + len(self._opening), self._form.close
        at = self._held.find(close, start) if close else -1
        if at < 0 and not end:
            return False
        inner, stop = (self._held[start:], len(self._held)) if at < 0 else (self._held[start:at], at + len(close))
        try:
            calls = self._form.read(inner, self._tools)
        except (ValueError, RecursionError):
            calls = []
        if calls:
            piece.calls += calls
            self._gap = True
        else:
            piece.answer += self._spaced(self._held[:stop])
            self._answered = True
        self._held, self._part = self._held[stop:], self._answer
        return True

    def _spaced(self, text: str) -> str:
        """Remove white space from the beginning of a text if it stands after a delimiter."""
        text = text.lstrip() if self._gap else text
        self._gap = self._gap and not text
        return text


def partial(text: str, delimiters: Sequence[str]) -> int:
    """Count the characters at the end of a text that may begin a delimiter."""
    return max((n for each in delimiters for n in range(1, len(each)) if text.endswith(each[:n])), default=0)
