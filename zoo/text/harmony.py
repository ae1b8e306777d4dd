"""Split replies of gpt-oss into channels: OpenAI's harmony format (github.com/openai/harmony, docs/format.md).

    <|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!

The channel `analysis` has the reasoning, `final` the answer, and `commentary` calls of functions and the text before
them. A call names its function in the header:

    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 2}<|call|>
"""

import re

from zoo.text.calls import checked
from zoo.text.replies import AbstractReader, Piece


START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL = (
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call")
)
BEGIN = f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}"  # of a reply that must call NAME


def split(text: str) -> tuple[str, str]:
    """Split a reply with its special tokens into reasoning and answer. The reply may be incomplete.

    A tool call is part of the answer, with its header, as the model wrote it. Text outside channels is, too.
    """
    piece = _split(text, calls=False, end=True)
    return piece.reasoning, piece.answer


class Reader(AbstractReader):
    """Splits a reply that has channels. Without `calls` these are part of the answer."""

    def __init__(self, *, calls: bool = False):
        self._calls, self._text, self._all = calls, "", Piece()

    def push(self, text: str, *, end: bool = False) -> Piece:
        self._text += text
        before, self._all = self._all, _split(self._text, calls=self._calls, end=end)
        return Piece(
            self._all.reasoning[len(before.reasoning) :],
            self._all.answer[len(before.answer) :],
            self._all.calls[len(before.calls) :],
        )


def _split(text: str, *, calls: bool, end: bool) -> Piece:
    if calls and not end and " to=".startswith(text):  # the header of a call may begin with its function
        return Piece()
    if not text.startswith((CHANNEL, " to=") if calls else CHANNEL):
        return Piece(answer=text)
    reasoning, answer, found = [], [], []
    messages = text.split(START)
    for number, message in enumerate(messages):
        header, opened, body = message.partition(MESSAGE)
        if not opened:
            continue
        body = body.removesuffix(END)
        channel = header.removeprefix("assistant").removeprefix(CHANNEL).partition(CONSTRAIN)[0].strip()
        called = re.search(r"\bto=functions\.([\w.-]+)", header) if calls else None
        if channel == "analysis":
            reasoning.append(body)
        elif channel in ("final", "commentary"):
            answer.append(body)
        elif called is None:
            answer.append(header + MESSAGE + body)
        elif end or number + 1 < len(messages) or CALL in body:
            try:
                found.append(checked(called[1], body.removesuffix(CALL)))
            except (ValueError, RecursionError):
                answer.append(header + MESSAGE + body)
    return Piece("\n".join(reasoning), "\n".join(answer), found)
