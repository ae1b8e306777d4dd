"""Split replies in channels: OpenAI's harmony format (github.com/openai/harmony, docs/format.md), and Muse's.

    <|channel|>analysis<|message|>A greeting.<|end|><|start|>assistant<|channel|>final<|message|>Hello!

The channel `analysis` has the reasoning, `final` the answer, and `commentary` calls of functions and the text before
them. A call names its function in the header:

    <|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>

Muse Glimmer has recipients in place of channels: its reasoning is to itself, its answer to the user:

     to=self<|message|>A greeting.<|eom|><|start|>assistant to=user<|message|>Hello!
"""

import re

from zoo.text.calls import FORMS, Call, checked
from zoo.text.messages import Tools
from zoo.text.replies import AbstractReader, Piece


START, CHANNEL, CONSTRAIN, MESSAGE, END, CALL = (
    f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "call")
)
MUSE = next(form for form in FORMS if "<atem:function_calls>" in form.marks)
BEGIN = f"{CHANNEL}commentary to=functions.NAME {CONSTRAIN}json{MESSAGE}"  # of a reply that must call NAME


def split(text: str) -> tuple[str, str]:
    """Split a reply with its special tokens into reasoning and answer. The reply may be incomplete.

    A tool call is part of the answer, with its header, as the model wrote it. Text outside channels is, too.
    """
    piece = _split(text, None, end=True)
    return piece.reasoning, piece.answer


class Reader(AbstractReader):
    """Splits a reply that has channels. Without tools calls are part of the answer."""

    def __init__(self, tools: Tools = None):
        self._tools, self._text, self._all = tools, "", Piece()

    def push(self, text: str, *, end: bool = False) -> Piece:
        self._text += text
        before, self._all = self._all, _split(self._text, self._tools, end=end)
        return Piece(
            self._all.reasoning[len(before.reasoning) :],
            self._all.answer[len(before.answer) :],
            self._all.calls[len(before.calls) :],
        )


def _split(text: str, tools: Tools, *, end: bool) -> Piece:
    if not end and " to=".startswith(text):  # a header may begin so
        return Piece()
    if not text.startswith((CHANNEL, " to=")):
        return Piece(answer=text)
    reasoning: list[str] = []
    answer: list[str] = []
    calls: list[Call] = []
    messages = text.split(START)
    for number, message in enumerate(messages):
        header, opened, body = message.partition(MESSAGE)
        if not opened:
            continue
        body = re.sub(r"<\|(end|eom|eot)\|>$", "", body)
        kind = header.removeprefix("assistant").removeprefix(CHANNEL).partition(CONSTRAIN)[0].strip()
        if kind in ("analysis", "to=self"):
            reasoning.append(body)
        elif kind in ("final", "commentary", "to=user"):
            answer.append(body)
        elif not tools or "to=" not in header:
            answer.append(header + MESSAGE + body)
        elif end or number + 1 < len(messages) or CALL in body:  # the call is whole
            try:
                calls += _read(header, body.removesuffix(CALL), tools)
            except (ValueError, RecursionError):
                answer.append(header + MESSAGE + body)
    return Piece("\n".join(reasoning), "\n".join(answer), calls)


def _read(header: str, body: str, tools: Tools) -> list[Call]:
    if function := re.search(r"\bto=functions\.([\w.-]+)", header):
        return [checked(function[1], body)]
    inner = body.strip().removeprefix(MUSE.opens[0]).removesuffix(MUSE.close)
    if len(inner) == len(body.strip()):
        raise ValueError("This is in no known form.")
    return MUSE.read(inner, tools)
