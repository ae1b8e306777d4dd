"""Validates the fields of requests, by name and value, and defines the error that a refused request gets.

Fields are those of OpenAI's API reference, except that `top_k`, `min_p`, `repetition_penalty` and
`chat_template_kwargs` are vLLM's. Every field is honoured or refused, never ignored.
"""

import dataclasses
import json
import math
import re
from collections.abc import Callable
from typing import Any, TypeGuard

from zoo.text.messages import is_image


class Refusal(Exception):
    """The error of a refused request, which is answered with OpenAI's error object; its `param` names the field."""

    def __init__(self, message: str, param: str | None = None, *, status: int = 400, code: str | None = None):
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status, self.body = status, {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclasses.dataclass(frozen=True)
class Field:
    """The values that a field may have, in words and as a test."""

    words: str
    test: Callable[[Any], bool]


def number(low: int, high: int | None = None, *, whole: bool = False) -> Field:
    kinds, name = ((int,), "a whole number") if whole else ((int, float), "a number")
    span = f"from {low} on" if high is None else f"from {low} to {high}"
    return Field(f"{name} {span}", lambda v: type(v) in kinds and v >= low and (high is None or v <= high))


def only(value: Any) -> Field:
    """Returns the `Field` of an option that is not implemented: only its neutral value is allowed."""
    return Field(f"{json.dumps(value)} or absent: nothing else is supported", lambda v: v == value)


def listed(test: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda v: isinstance(v, list) and len(v) > 0 and all(map(test, v))


def is_text(value: Any) -> bool:
    return isinstance(value, str)


def is_word(value: Any) -> bool:
    return is_text(value) and value != ""


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def are_stops(value: Any) -> bool:
    stops = [value] if is_text(value) else value
    return listed(is_word)(stops) and len(stops) <= STOPS and all(len(stop) <= STOP for stop in stops)


def is_function(value: Any) -> bool:
    """Whether this has the form {"type": "function", "function": {"name": ...}}; names are OpenAI's, with dots."""
    function = value.get("function") if is_object(value) and value.get("type") == "function" else None
    name = function.get("name") if is_object(function) else None
    return isinstance(name, str) and re.fullmatch(r"[\w.-]{1,64}", name) is not None


def is_tool(value: Any) -> bool:
    return (
        is_function(value)
        and is_object(value["function"].get("parameters", {}))
        and not value["function"].get("strict")
    )


def is_structure(value: Any) -> bool:
    """Whether this is a grammar for replies in vLLM's form."""
    tests = {"json": is_object, "regex": is_word, "grammar": is_word, "choice": listed(is_word)}
    return is_object(value) and len(value) == 1 and all(name in tests and tests[name](v) for name, v in value.items())


def is_format(value: Any) -> bool:
    """Whether this is a `response_format`."""
    if not is_object(value) or value.get("type") != "json_schema":
        return value in ({"type": "text"}, {"type": "json_object"})
    schema = value.get("json_schema")
    return value.keys() == {"type", "json_schema"} and is_object(schema) and is_object(schema.get("schema"))


def are_biases(value: Any) -> bool:
    """Whether this maps token ids, which are strings in JSON, to biases."""
    if not is_object(value) or len(value) > BIASES:
        return False
    biases = [type(v) in (int, float) and -100 <= v <= 100 for v in value.values()]
    return all(biases) and all(re.fullmatch("[0-9]{1,9}", id) for id in value)


BIASES = 1024  # most tokens of a `logit_bias`
STOPS, STOP = 16, 256  # most stop strings, and most characters of each: all are searched for at every token
BODY, REPLIES = 2**23, 1024  # most bytes of a body, and most replies to one request
TOP = 20  # most tokens with log-probabilities at each position
IMAGES, PIXELS = 128, 2**25  # most images in a request, and most pixels of all of them before resizing
PATCHES, HELD = 2**30, 2**31  # most bytes of a request's resized images, and of those of all requests that wait

is_ids = listed(lambda v: type(v) is int)
flag = Field("true or false", lambda v: isinstance(v, bool))

BOTH = {
    "model": Field("a string", is_text),
    "max_tokens": number(0, whole=True),
    "temperature": number(0, 2),
    "top_p": number(0, 1),
    "top_k": number(-1, whole=True),
    "min_p": number(0, 1),
    "seed": number(-(2**63), 2**63 - 1, whole=True),
    "n": number(1, 128, whole=True),
    "stop": Field(f"a string or a list of up to {STOPS}, each of 1 to {STOP} characters", are_stops),
    "stream": flag,
    "stream_options": Field(
        'an object with "include_usage", true or false',
        lambda v: v in ({"include_usage": True}, {"include_usage": False}),
    ),
    "user": Field("a string", is_text),
    "frequency_penalty": number(-2, 2),
    "presence_penalty": number(-2, 2),
    "repetition_penalty": Field("a number above 0", lambda v: type(v) in (int, float) and 0 < v < math.inf),
    "logit_bias": Field("an object of up to 1024 token ids, with numbers from -100 to 100", are_biases),
    "structured_outputs": Field(
        'an object with one of "json", a schema, "regex", "choice", a list of strings, and "grammar", of Lark',
        is_structure,
    ),
}
CHAT = BOTH | {
    "messages": Field("a list of objects with a role", listed(lambda v: is_object(v) and is_text(v.get("role")))),
    "max_tokens": number(1, whole=True),
    "max_completion_tokens": number(1, whole=True),
    "tools": Field(
        'a list of {"type": "function", "function": {"name": ..., "parameters": {...}}}, without "strict"',
        lambda v: v == [] or listed(is_tool)(v),
    ),
    "tool_choice": Field(
        '"auto", "none", "required" or {"type": "function", "function": {"name": ...}}',
        lambda v: v in ("auto", "none", "required") or is_function(v),
    ),
    "parallel_tool_calls": flag,
    "chat_template_kwargs": Field(
        "an object that names neither messages nor self",
        lambda v: is_object(v) and not v.keys() & {"messages", "self"},
    ),
    "reasoning_effort": Field("a string that is not empty", is_word),
    "response_format": Field(
        '{"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": {"schema": {...}}}',
        is_format,
    ),
    "logprobs": flag,
    "top_logprobs": number(0, TOP, whole=True),
}
COMPLETIONS = BOTH | {
    "prompt": Field(
        "a string, a list of strings, a list of token ids, or a list of such lists",
        lambda v: is_text(v) or is_ids(v) or listed(is_text)(v) or listed(is_ids)(v),
    ),
    "echo": flag,
    "logprobs": number(0, TOP, whole=True),
    "suffix": only(""),
    "best_of": only(1),
}
MODEL = {"model": BOTH["model"], "user": BOTH["user"]}
TEXTS = Field("a string, or a list of strings", lambda v: is_text(v) or listed(is_text)(v))
EMBEDDINGS = MODEL | {
    "input": TEXTS,
    "encoding_format": Field('"float" or "base64"', lambda v: v in ("float", "base64")),
    "dimensions": number(1, whole=True),
    "prompt_name": Field("a string", is_text),
}
SCORE = MODEL | {"text_1": Field("a string", is_text), "text_2": TEXTS, "instruction": Field("a string", is_text)}
RERANK = MODEL | {
    "query": Field("a string", is_text),
    "documents": Field("a list of strings", listed(is_text)),
    "top_n": number(1, whole=True),
    "return_documents": flag,
    "instruction": Field("a string", is_text),
}


def read(body: bytes | bytearray, fields: dict[str, Field], required: str) -> dict[str, Any]:
    """Parses and validates the body of a request, and returns the fields whose values are not null."""
    try:
        text = body.decode("utf-8-sig")
        value = json.loads(text)
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise Refusal("The body has half of a surrogate pair, such as \\ud83d alone, which is no character.") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(f"The body is not JSON: {error}") from error
    if not is_object(value):
        raise Refusal("The body is not a JSON object.")
    said = {name: v for name, v in value.items() if v is not None}
    for name, v in said.items():
        if name not in fields:
            raise Refusal(f"{name} is not supported; what is: {', '.join(sorted(fields))}.", name)
        if not fields[name].test(v):
            raise Refusal(f"{name} must be {fields[name].words}.", name)
    if required not in said:
        raise Refusal(f"{required} is missing.", required)
    return said


def in_template_form(message: dict[str, Any], images: bool) -> dict[str, Any]:
    """Brings a message into the form that chat templates expect: text in one piece, arguments of calls as objects.

    If `images` are allowed, content with images stays a list. Clients cannot name files: images must be data: URLs.
    """
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list):
        shown = [part for part in content if is_image(part)]
        if shown and not images:
            raise Refusal("messages may have text content only: this server takes no images (--images).", "messages")
        urls: list[Any] = [part.get("image_url") if part["type"] == "image_url" else None for part in shown]
        if not all(is_object(url) and is_text(url.get("url")) and url["url"].startswith("data:") for url in urls):
            raise Refusal('An image must be {"type": "image_url", "image_url": {"url": "data:..."}}.', "messages")
        texts = [part for part in content if not is_image(part)]
        if not all(is_object(part) and part.get("type") == "text" and is_text(part.get("text")) for part in texts):
            raise Refusal("messages may have text and images as content only.", "messages")
        if shown:  # without other keys that the client may have put beside a URL, such as a path
            plain = iter([{"type": "image_url", "image_url": {"url": url["url"]}} for url in urls])
            message = message | {"content": [next(plain) if is_image(part) else part for part in content]}
        else:
            message = message | {"content": "".join(part["text"] for part in texts)}
    if calls is not None:
        try:
            message = message | {"tool_calls": [call | {"function": _with_object(call["function"])} for call in calls]}
        except (TypeError, KeyError, ValueError) as error:
            raise Refusal(f"messages has tool_calls that can't be read: {error!r}", "messages") from error
    return message


def _with_object(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function["arguments"]
    return function | {"arguments": json.loads(arguments) if is_text(arguments) else arguments}


def in_older_form(message: dict[str, Any]) -> dict[str, Any]:
    """Brings a message with calls into the form of DeepSeek's templates: arguments as texts, and always a content."""
    if not message.get("tool_calls"):
        return message
    text = lambda function: function | {"arguments": json.dumps(function["arguments"], ensure_ascii=False)}
    calls = [call | {"function": text(call["function"])} for call in message["tool_calls"]]
    return message | {"tool_calls": calls, "content": message.get("content") or ""}
