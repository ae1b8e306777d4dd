"""Checks that a chat template has written all of a chat: contents, calls of tools, tools, and reasoning.

A template is a program that may skip what it does not know, and a model would then learn from, or answer, less than the
chat says. The text is searched for each part of the chat. A part that is not found in its place may still be there in
another form: so it is changed, and the chat is rendered again. If the text stays the same, the part was left out.
"""

import json
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

from zoo.text.messages import REASONING, Messages, Tools, reasoning_of


CALLS = ("tool_calls", "function_call")  # fields of a message that may hold its calls of tools
USUAL = ("system", "user", "assistant", "tool")  # roles that templates may know without naming them


def check_fields(
    doubtful: Iterator[tuple[int, str]],
    messages: Messages,
    text: Any,
    render: Callable[[Messages], Any],
    template: str,
) -> None:
    """Raise ValueError if changing a doubtful field of a message leaves the text the same: then it is lost.

    Args:
        doubtful: numbers of messages, and fields, from `doubts`.
        messages: the chat.
        text: what `render(messages)` has returned.
        render: renders a chat.
        template: the template's name, for the message.
    """
    for number, field in doubtful:
        changed = [*messages]
        changed[number] = _changed_in(messages[number], field)
        try:
            lost = render(changed) == text
        except ValueError:  # the template has read the field
            lost = False
        if lost:
            raise ValueError(
                f"{template} leaves out the {field.replace('_', ' ')} of message {number + 1}, by "
                f"{messages[number]['role']!r}, so it would be lost. Say it where the template writes it, end the chat "
                "with that message, or remove it."
            )


def check_tools(tools: Tools, shown: str, renders_the_same: Callable[[], bool], template: str) -> None:
    """Raise ValueError if a text does not name all tools, and the template writes it without them, too."""
    if any(name not in shown for name in _names(tools)) and renders_the_same():
        raise ValueError(f"{template} leaves out the tools: give none, or another template.")


def doubts(
    messages: Messages, text: str, learnt: Container[int], known: Callable[[str], bool]
) -> Iterator[tuple[int, str]]:
    """Yield message number and field for fields that a rendered text lacks in their place.

    The text may still have such a field in another form.

    Args:
        messages: the chat.
        text: the rendered text, without marks.
        learnt: messages whose reasoning, and content beside calls, must be there, too.
        known: whether a role is known to the template.
    """
    end, places = 0, []  # of each message: the end of the text before it, and the start of its content
    for number, message in enumerate(messages):
        role, pieces = message["role"], _pieces(message, number in learnt)
        begin, after, whole = _find(pieces, text, end)
        unnamed = bool(pieces) and role not in USUAL and not known(role)  # a short text may be found anywhere
        if unnamed or not whole:
            yield number, "content"
        places.append((end, begin))
        if role not in ("system", "developer"):  # some templates write theirs before the last question
            end = after
    for number, message in enumerate(messages):
        start, stop = places[number][0], places[number + 1][1] if number + 1 < len(messages) else None
        for field in CALLS:
            if any(text.find(name, start, stop) < 0 for name in _names(message.get(field))):
                yield number, field
        if number in learnt and reasoning_of(message) not in text[start:]:
            yield number, "reasoning"


def _pieces(message: Mapping[str, Any], learnt: bool) -> list[str]:
    """Return the texts of a message that a template must write: without `learnt`, none beside calls."""
    if message["role"] == "assistant" and not learnt and any(message.get(field) for field in CALLS):
        return []
    return [piece for leaf in _leaves(message.get("content")) if (piece := _answer(leaf))]


def _find(pieces: Sequence[str], text: str, start: int) -> tuple[int | None, int, bool]:
    """Find pieces of a text, one after another from `start` on.

    Returns:
        Where the first one begins, or None; where the last one ends; and whether the text has all, in any place.
    """
    begin, after = None, start
    for piece in pieces:
        if (at := text.find(piece, after)) >= 0:
            begin, after = at if begin is None else begin, at + len(piece)
        elif piece not in text and not any(json.dumps(piece, ensure_ascii=e)[1:-1] in text for e in (False, True)):
            return begin, after, False
    return begin, after, True


def _answer(content: str) -> str:
    return content.rpartition("</think>")[2].strip()


def _leaves(value: Any) -> Iterator[str]:
    """Yield the texts and numbers of a content, or of a part of one."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item) if key not in ("role", "type") else ()
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _leaves(item)
    elif isinstance(value, str) or type(value) in (int, float):
        yield str(value)


def _names(calls: Any) -> list[str]:
    """Return the names of functions that are called, or of tools."""
    calls = calls if isinstance(calls, list | tuple) else [calls]
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)]
    names = [function.get("name") for function in functions if isinstance(function, Mapping)]
    return [name for name in names if isinstance(name, str)]


def _changed_in(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    """Return a message with another content, other calls, or other reasoning in every field that holds it."""
    if field != "reasoning":
        return {**message, field: _changed(message[field])}
    reasoning = reasoning_of(message)
    other = lambda value: value.replace(reasoning, _changed(reasoning)) if isinstance(value, str) else value
    return {key: other(value) if key in (*REASONING, "content") else value for key, value in message.items()}


def _changed(value: Any) -> Any:
    """Return another value of the same form."""
    if isinstance(value, str):
        return f"x{value}x"
    if isinstance(value, Mapping):
        return {key: item if key in ("role", "type") else _changed(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_changed(item) for item in value]
    return value + 1 if type(value) in (int, float) else value
