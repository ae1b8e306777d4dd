"""Read calls of functions in replies. Each family writes calls in a form of its own, as its chat template shows.

    <tool_call>
    {"name": "add", "arguments": {"a": 2}}
    </tool_call>

`FORMS` has the delimiters of each form, and the function that reads the text between them. A text that is not in its
form raises ValueError, and stays text.
"""

# ruff: noqa: RUF001 (DeepSeek's tokens have a wide bar)

import ast
import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from zoo.text.messages import Tools


@dataclasses.dataclass(frozen=True)
class Call:
    """A call of a function. `id` is the one that the model has written, if its form has one."""

    name: str
    arguments: Mapping[str, Any]
    id: str | None = None


@dataclasses.dataclass(frozen=True)
class Form:
    """A form in which calls are written.

    - `marks`: a chat template that has all of these texts writes this form.
    - `opens`: texts of which each opens a call, or a list of calls.
    - `close`: the text that closes it; "" if only the end of the reply does.
    - `read`: reads the text in between. `Tools` have the types of arguments.
    - `begin`: the text with which a reply begins that must call the function NAME.
    - `inner`: control tokens in between.
    - `bare`: characters with which a reply begins that is a call without `opens`.
    """

    marks: tuple[str, ...]
    opens: tuple[str, ...]
    close: str
    read: Callable[[str, Tools], list[Call]]
    begin: str
    inner: tuple[str, ...] = ()
    bare: str = ""


def form_of(template: str) -> Form | None:
    """Return the form in which a chat template writes calls; None if it writes none, or in an unknown form."""
    return next((form for form in FORMS if all(mark in template for mark in form.marks)), None)


def checked(name: Any, arguments: Any, id: Any = None) -> Call:
    """Return the call of these parts. Arguments may also be the text of an object in JSON.

    Raises:
        ValueError: a part is of another type.
    """
    arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        raise ValueError("A call has a name, and an object as its arguments.")
    return Call(name, arguments, id if isinstance(id, str) else None)


def _each(pattern: str, text: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern, which with white space are all of the text.

    Raises:
        ValueError: there is other text.
    """
    at = 0
    for found in re.finditer(pattern, text, re.DOTALL):
        if text[at : found.start()].strip():
            break
        yield found
        at = found.end()
    if text[at:].strip():
        raise ValueError(f"This is in no known form: {text[at:]}")


# ======================================================================================================================
# Arguments in JSON.
# ======================================================================================================================


def _objects(text: str, _: Tools) -> list[Call]:
    """Read {"name": ..., "arguments": ...}, several of these, or a list. Llama calls the arguments "parameters"."""
    calls: list[Call] = []
    while text := text.strip(" \n\t;,"):
        value, end = json.JSONDecoder().raw_decode(text)
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, dict):
                raise ValueError(f"This is no call: {each}")
            calls.append(checked(each.get("name"), each.get("arguments", each.get("parameters")), each.get("id")))
        text = text[end:]
    return calls


def _named(pattern: str) -> Callable[[str, Tools], list[Call]]:
    """Make a reader of names with JSON, by a pattern whose groups are `name`, `arguments` and perhaps `id`."""
    return lambda text, _: [
        checked(found["name"], found["arguments"], found.groupdict().get("id")) for found in _each(pattern, text)
    ]


# ======================================================================================================================
# Arguments as text: the types are those of the function's parameters.
# ======================================================================================================================


def _tagged(call: str, argument: str) -> Callable[[str, Tools], list[Call]]:
    """Make a reader of tags, by patterns whose groups are `name` and `arguments`, and `key` and `value`."""

    def read(text: str, tools: Tools) -> list[Call]:
        calls = []
        for found in _each(call, text):
            types = _types(found["name"], tools)
            given = {each["key"]: each["value"] for each in _each(argument, found["arguments"])}
            arguments = {key: _typed(value, types.get(key, {"string"})) for key, value in given.items()}
            calls.append(Call(found["name"], arguments))
        return calls

    return read


def _types(name: str, tools: Tools) -> dict[str, set[str]]:
    """Return the names of JSON's types that each parameter of a function may have."""
    functions = [tool.get("function", {}) for tool in tools or ()]
    schema = next((each.get("parameters") for each in functions if each.get("name") == name), None)
    properties = schema.get("properties") if isinstance(schema, dict) else None

    def types(schema: Any) -> set[str]:
        if not isinstance(schema, dict):
            return set()
        own = schema.get("type", [])
        others = [each for key in ("anyOf", "oneOf") for each in schema.get(key, [])]
        return ({own} if isinstance(own, str) else {*own}).union(*map(types, others)) or {"string"}

    return {key: types(each) for key, each in properties.items()} if isinstance(properties, dict) else {}


def _typed(value: str, types: set[str]) -> Any:
    """Return a value that is written as text. What is in no form of its types stays text, as models may write it."""
    if "string" in types:
        return None if value == "null" and "null" in types else value
    constants = {"True": True, "False": False, "None": None}  # some templates write Python's
    try:
        return constants[value.strip()] if value.strip() in constants else json.loads(value)
    except (ValueError, RecursionError):
        return value


def _invocations(prefix: str = "") -> Callable[[str, Tools], list[Call]]:
    """Make a reader of <invoke name="add"><parameter name="a">2</parameter></invoke>, with a prefix in each tag."""
    return _tagged(
        rf'<{prefix}invoke name="(?P<name>[^"]+)">(?P<arguments>.*?)</{prefix}invoke>',
        rf'<{prefix}parameter name="(?P<key>[^"]+)"[^>]*>(?P<value>.*?)</{prefix}parameter>',
    )


# ======================================================================================================================
# Calls as in Python, and Gemma's.
# ======================================================================================================================


def _python(text: str, _: Tools) -> list[Call]:
    """Read add(a=2), several in lines, or a list. Values may also be JSON's true, false and null."""
    try:
        body = [each.value if isinstance(each, ast.Expr) else each for each in ast.parse(text.strip()).body]
        nodes = [node for each in body for node in (each.elts if isinstance(each, ast.List | ast.Tuple) else [each])]
        return [_python_call(node) for node in nodes]
    except (SyntaxError, TypeError, RecursionError, MemoryError) as error:
        raise ValueError(f"This is not in Python's form: {error}") from error


def _python_call(node: ast.AST) -> Call:
    if not isinstance(node, ast.Call) or node.args:
        raise ValueError(f"This is no call: {ast.unparse(node)}")
    values = {str(each.arg): ast.literal_eval(_Constants().visit(each.value)) for each in node.keywords}
    json.dumps(values)  # raises if there are sets or the like
    return Call(ast.unparse(node.func), values)


class _Constants(ast.NodeTransformer):
    """Replaces JSON's constants by Python's."""

    def visit_Name(self, node: ast.Name) -> ast.AST:
        known = {"true": True, "false": False, "null": None}
        return ast.Constant(known[node.id]) if node.id in known else node


def _python_or_objects(text: str, tools: Tools) -> list[Call]:
    text = text.replace("<|python_end|>", "")
    try:
        return _objects(text, tools)
    except ValueError:
        return _python(text, tools)


def _gemma(text: str, _: Tools) -> list[Call]:
    """Read call:add{a:2,b:<|"|>text<|"|>}: objects without quotes around keys, and with a token around texts."""
    calls = []
    for found in _each(r"call:(?P<name>[^{\s]+)(?P<arguments>\{.*\})", text):
        pieces = found["arguments"].split('<|"|>')
        pieces[::2] = [re.sub(r"(?<=[{,])\s*([^\s{}\[\],:\"]+)\s*:", r'"\1":', piece) for piece in pieces[::2]]
        pieces[1::2] = map(json.dumps, pieces[1::2])
        calls.append(checked(found["name"], "".join(pieces)))
    return calls


# ======================================================================================================================
# The table. The first form whose marks a template has is the template's.
# ======================================================================================================================

_SECTION = "<｜tool▁calls▁begin｜>"
_CALL = "<｜tool▁call▁begin｜>"
_DEEPSEEK = {
    "opens": (_SECTION,),
    "close": "<｜tool▁calls▁end｜>",
    "inner": (_CALL, "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
}
_HERMES = {"opens": ("<tool_call>",), "close": "</tool_call>"}

FORMS = (
    Form(  # DeepSeek V3 and R1
        marks=("<｜tool▁sep｜>", "```json"), **_DEEPSEEK,
        read=_named(
            r"<｜tool▁call▁begin｜>function<｜tool▁sep｜>(?P<name>[^\n]+)\n```json\n(?P<arguments>.*?)\n```"
            r"<｜tool▁call▁end｜>"
        ),
        begin=f"{_SECTION}{_CALL}function<｜tool▁sep｜>NAME\n```json\n",
    ),
    Form(  # DeepSeek V3.1
        marks=("<｜tool▁sep｜>",), **_DEEPSEEK,
        read=_named(r"<｜tool▁call▁begin｜>(?P<name>[^<]+)<｜tool▁sep｜>(?P<arguments>.*?)<｜tool▁call▁end｜>"),
        begin=f"{_SECTION}{_CALL}NAME<｜tool▁sep｜>",
    ),
    Form(  # DeepSeek V3.2
        marks=("<｜DSML｜",), opens=("<｜DSML｜function_calls>",), close="</｜DSML｜function_calls>",
        read=_invocations("｜DSML｜"), inner=("｜DSML｜",),
        begin='<｜DSML｜function_calls>\n<｜DSML｜invoke name="NAME">\n',
    ),
    Form(  # Kimi
        marks=("<|tool_calls_section_begin|>",),
        opens=("<|tool_calls_section_begin|>",), close="<|tool_calls_section_end|>",
        read=_named(
            r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s<:]*[^\s<:.]):\d+)\s*<\|tool_call_argument_begin\|>"
            r"(?P<arguments>.*?)<\|tool_call_end\|>"
        ),
        begin="<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>",
        inner=("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    ),
    Form(  # MiniMax M2
        marks=("<minimax:tool_call>",), opens=("<minimax:tool_call>",), close="</minimax:tool_call>",
        read=_invocations(), begin='<minimax:tool_call>\n<invoke name="NAME">\n',
    ),
    Form(  # Muse Glimmer, whose replies have channels (`zoo.text.harmony`)
        marks=("<atem:function_calls>",), opens=("<atem:function_calls>",), close="</atem:function_calls>",
        read=_invocations("atem:"),
        begin=' to=NAME<|message|><atem:function_calls>\n<atem:invoke name="NAME">\n',
    ),
    Form(  # Mistral: Nemo, and Small 3 and 3.1, write a list; Ministral 3, Devstral 2 and Small 4 write names
        marks=("[ARGS]",), opens=("[TOOL_CALLS]",), close="", inner=("[ARGS]", "[CALL_ID]"),
        read=_named(
            r"(?:\[TOOL_CALLS\])?\s*(?P<name>[^\s\[{]+)(?:\[CALL_ID\](?P<id>\w+))?\[ARGS\]"
            r"(?P<arguments>.*?)(?=\[TOOL_CALLS\]|\Z)"
        ),
        begin="[TOOL_CALLS]NAME[ARGS]",
    ),
    Form(
        marks=("[TOOL_CALLS]",), opens=("[TOOL_CALLS]",), close="", read=_objects,
        begin='[TOOL_CALLS][{"name": "NAME", "arguments":',
    ),
    Form(  # Gemma 4
        marks=("<|tool_call>call:",), opens=("<|tool_call>",), close="<tool_call|>", read=_gemma,
        begin="<|tool_call>call:NAME{", inner=('<|"|>',),
    ),
    Form(  # LFM2
        marks=("<|tool_call_start|>",), opens=("<|tool_call_start|>",), close="<|tool_call_end|>", read=_python,
        begin="<|tool_call_start|>[NAME(",
    ),
    Form(  # Olmo 3
        marks=("<function_calls>",), opens=("<function_calls>",), close="</function_calls>", read=_python,
        begin="<function_calls>\nNAME(",
    ),
    Form(  # Nemotron Nano 2
        marks=("<TOOLCALL>",), opens=("<TOOLCALL>",), close="</TOOLCALL>", read=_objects,
        begin='<TOOLCALL>[{"name": "NAME", "arguments":',
    ),
    Form(  # Phi 4 mini
        marks=("<|/tool_call|>",), opens=("<|tool_call|>",), close="<|/tool_call|>", read=_objects,
        begin='<|tool_call|>{"name": "NAME", "arguments":',
    ),
    Form(  # Qwen3 Coder, Qwen3.5, Nemotron 3, MiMo
        marks=("<tool_call>", "<function="), **_HERMES,
        read=_tagged(
            r"<function=(?P<name>[^>]+)>(?P<arguments>.*?)</function>",
            r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?</parameter>",
        ),
        begin="<tool_call>\n<function=NAME>\n",
    ),
    Form(  # GLM 4.5 to 4.7
        marks=("<tool_call>", "<arg_key>"), **_HERMES,
        read=_tagged(
            r"\s*(?P<name>[^\s<]+)\s*(?P<arguments>.*)",
            r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>",
        ),
        begin="<tool_call>NAME\n",
    ),
    Form(  # Qwen2.5, Qwen3, SmolLM3, Granite 4
        marks=("<tool_call>",), **_HERMES, read=_objects, begin='<tool_call>\n{"name": "NAME", "arguments":',
    ),
    Form(  # Llama from 3.1 on: objects; Llama 4 also writes Python's form
        marks=('"parameters": dictionary',), opens=("<|python_tag|>", "<|python_start|>"), close="",
        read=_python_or_objects, begin='{"name": "NAME", "parameters":', inner=("<|python_end|>",), bare="{[",
    ),
)  # fmt: skip
