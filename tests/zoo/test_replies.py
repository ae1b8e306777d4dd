"""Replies are split into reasoning, answer and calls of functions: in the form of each family, whole and in pieces."""

# ruff: noqa: RUF001 (DeepSeek's tokens have a wide bar)

import json

import pytest

import zoo
from tests.zoo.test_tokenizer import folder
from zoo.text.calls import FORMS, Call, form_of
from zoo.text.replies import TAGS, Piece, Reader, Style


PARAMETERS = {
    "a": {"type": "integer"},
    "s": {"type": "string"},
    "l": {"anyOf": [{"type": "array"}, {"type": "null"}]},
    "b": {"type": "boolean"},
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": PARAMETERS}}}]
ARGUMENTS = {"a": 2, "s": 'x "y" {z}, 1', "l": [1, {"k": "v"}], "b": True}
JSON, NAMED = json.dumps(ARGUMENTS), json.dumps({"name": "add", "arguments": ARGUMENTS})
PYTHON = """add(a=2, s='x "y" {z}, 1', l=[1, {"k": "v"}], b=true)"""
VALUES = {"a": "2", "s": ARGUMENTS["s"], "l": json.dumps(ARGUMENTS["l"]), "b": "true"}


def tagged(form: str) -> str:
    return "".join(form.replace("KEY", key).replace("VALUE", value) for key, value in VALUES.items())


def invoked(prefix: str = "", attribute: str = "") -> str:
    parameter = f'<{prefix}parameter name="KEY"{attribute}>VALUE</{prefix}parameter>\n'
    return f'<{prefix}invoke name="add">\n{tagged(parameter)}</{prefix}invoke>\n'


def numbered(n: int) -> str:
    return f"<|tool_call_begin|>functions.add:{n}<|tool_call_argument_begin|>{JSON}<|tool_call_end|>"


GLM = "<arg_key>KEY</arg_key>\n<arg_value>VALUE</arg_value>\n"
CODER = tagged("<parameter=KEY>\nVALUE\n</parameter>\n")
GEMMA = 'call:add{a:2,b:true,l:[1,{k:<|"|>v<|"|>}],s:<|"|>x "y" {z}, 1<|"|>}'
R1 = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n{JSON}\n```<｜tool▁call▁end｜>\n"
V31 = f"<｜tool▁call▁begin｜>add<｜tool▁sep｜>{JSON}<｜tool▁call▁end｜>"
V32 = invoked("｜DSML｜", ' string="false"')
LLAMA = NAMED.replace("arguments", "parameters")

# A part of each family's template, and two calls as the model writes them.
WRITTEN = {
    "DeepSeek R1": ("<｜tool▁sep｜>\n```json", f"<｜tool▁calls▁begin｜>{R1 * 2}<｜tool▁calls▁end｜>"),
    "DeepSeek V3.1": ("<｜tool▁sep｜>", f"<｜tool▁calls▁begin｜>{V31 * 2}<｜tool▁calls▁end｜>"),
    "DeepSeek V3.2": ("<｜DSML｜", f"<｜DSML｜function_calls>\n{V32 * 2}</｜DSML｜function_calls>"),
    "Kimi": (
        "<|tool_calls_section_begin|>",
        f"<|tool_calls_section_begin|>{numbered(0)}{numbered(1)}<|tool_calls_section_end|>",
    ),
    "MiniMax": ("<minimax:tool_call>", f"<minimax:tool_call>\n{invoked() * 2}</minimax:tool_call>"),
    "Muse": (
        "<atem:function_calls>",
        f"<atem:function_calls>\n{invoked('atem:') * 2}</atem:function_calls>",
    ),
    "Mistral": ("[TOOL_CALLS]", f"[TOOL_CALLS] [{NAMED}, {NAMED}]"),
    "Ministral 3": ("[TOOL_CALLS][ARGS]", f"[TOOL_CALLS]add[ARGS]{JSON}" * 2),
    "Gemma 4": ("<|tool_call>call:", f"<|tool_call>{GEMMA}<tool_call|>" * 2),
    "LFM2": ("<|tool_call_start|>", f"<|tool_call_start|>[{PYTHON}, {PYTHON}]<|tool_call_end|>"),
    "Olmo 3": ("<function_calls>", f"<function_calls>\n{PYTHON}\n{PYTHON}\n</function_calls>"),
    "Nemotron 2": ("<TOOLCALL>", f"<TOOLCALL>[{NAMED}, {NAMED}]</TOOLCALL>"),
    "Phi 4": ("<|/tool_call|>", f"<|tool_call|>{NAMED}<|/tool_call|>" * 2),
    "Qwen3.5": (
        "<tool_call>\n<function=",
        f"<tool_call>\n<function=add>\n{CODER}</function>\n</tool_call>\n" * 2,
    ),
    "GLM": ("<tool_call><arg_key>", f"<tool_call>add\n{tagged(GLM)}</tool_call>\n" * 2),
    "Qwen3": ("<tool_call>", f"<tool_call>\n{NAMED}\n</tool_call>\n" * 2),
    "Llama 3": ('"parameters": dictionary', f"{LLAMA}; {LLAMA}"),
    "Llama 4": ('"parameters": dictionary', f"<|python_start|>[{PYTHON}, {PYTHON}]<|python_end|>"),
}


def whole(reader: Reader, text: str, size: int) -> Piece:
    return sum(reader.split(text[i : i + size] for i in range(0, len(text), size)), Piece())


def test_each_form_is_tested():
    assert {form_of(template) for template, _ in WRITTEN.values()} == set(FORMS)
    assert form_of("{{ messages[0].content }}") is None


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize("size", [1, 5, 10**6])
def test_calls(family, size):
    template, text = WRITTEN[family]
    style = Style.of(template + "</think>")
    for before in ("", "I add.\n\n") if text[:1] != "{" else ("",):
        said = whole(Reader(style, TOOLS), f"<think>\nTwo.\n</think>\n\n{before}{text}", size)
        assert (said.reasoning, said.answer) == ("Two.", before.strip())
        assert [(call.name, call.arguments) for call in said.calls] == [("add", ARGUMENTS)] * 2
        assert [call.id for call in said.calls] == (
            ["functions.add:0", "functions.add:1"] if family == "Kimi" else [None, None]
        )


@pytest.mark.parametrize("family", WRITTEN)
def test_what_is_no_call_stays_text(family):
    """A call that is cut, one without a name, and any without tools."""
    template, text = WRITTEN[family]
    style = Style.of(template)
    for wrong in text[: len(text) // 3], text.replace("add", ""):
        assert whole(Reader(style, TOOLS), wrong, 1) == Piece(answer=wrong)
    assert whole(Reader(Style()), text, 3) == Piece(answer=text)


@pytest.mark.parametrize("opening, closing", TAGS)
def test_reasoning(opening, closing):
    style = Style.of(closing)
    assert style.tags == (opening, closing)
    for size in 1, 4, 10**6:
        assert whole(Reader(style), f"{opening}\nTwo\n {closing}\n\nIt is\n4.\n", size) == Piece("Two", "It is\n4.\n")
        assert whole(Reader(style, reasons=True), f"\nTwo\n{closing}4", size) == Piece("Two", "4")
        assert whole(Reader(style), f"{opening}Two", size) == Piece("Two")  # cut
        assert whole(Reader(style), f"{opening}\n{closing}4", size) == Piece("", "4")
        quoted = f" The tag {opening} opens, {closing} closes. "
        assert whole(Reader(style), quoted, size) == Piece("", quoted)
    assert style.reasons(f"<|assistant|>{opening}\n") and not style.reasons(f"{opening}\n{closing}\n\n")


def test_text_comes_as_soon_as_it_is_known():
    reader = Reader(Style.of("<tool_call></think>"), TOOLS)
    pieces = [
        "<thi",
        "nk>",
        "Hm",
        " ",
        "so</",
        "think",
        ">\n",
        "A <",
        "b> ",
        "<tool",
        "_call>",
        NAMED,
        "</tool_call>",
        "\n",
    ]
    parts = [(p.reasoning, p.answer, len(p.calls)) for p in map(reader.push, pieces)]
    assert parts == [
        ("", "", 0), ("", "", 0), ("Hm", "", 0), ("", "", 0), (" so", "", 0), ("", "", 0), ("", "", 0), ("", "A", 0),
        ("", " <b>", 0), ("", "", 0), ("", "", 0), ("", "", 0), ("", "", 1), ("", "", 0),
    ]  # fmt: skip
    assert reader.push("", end=True) == Piece()


def test_types_of_arguments():
    """Values are text if they may be, and else JSON, or stay as they are written."""
    call = lambda key, value: (
        f"<tool_call>\n<function=add>\n<parameter={key}>\n{value}\n</parameter>\n</function>\n</tool_call>"
    )
    style = Style.of("<tool_call><function=")
    for key, value, want in (
        ("a", "2", 2), ("a", "two", "two"), ("b", "False", False), ("l", "None", None), ("l", "[1]", [1]),
        ("s", "2", "2"), ("unknown", "2", "2"), ("s", "\n two\nlines\n", "\n two\nlines\n"),
    ):  # fmt: skip
        (found,) = whole(Reader(style, TOOLS), call(key, value), 7).calls
        assert found == Call("add", {key: want})


def test_replies_that_must_be_calls(tmp_path):
    """The beginning of a reply is one of a call, after the reasoning that the prompt has opened."""
    template = "{{ messages[0].content }}{{ '<think>' if think }}<tool_call></think>"
    tokenizer = zoo.tokenizer(
        folder(tmp_path / "a", template.replace("<tool_call></think>", "{# <tool_call></think> #}"))
    )
    for text, close in ("a<think>\n", "\n</think>\n\n"), ("a", ""):
        prompt = tokenizer.encode(text)
        assert tokenizer.beginning(prompt) == f'{close}<tool_call>\n{{"name": "'
        begun = tokenizer.beginning(prompt, "add")
        assert begun == f'{close}<tool_call>\n{{"name": "add", "arguments":'
        reader = tokenizer.reader(prompt, TOOLS, begun)
        assert reader.push(f" {JSON}}}\n</tool_call>") == Piece(calls=[Call("add", ARGUMENTS)])
    for form in FORMS:
        assert "NAME" in form.begin and (form.bare or form.opens[0] in form.begin)
    with pytest.raises(ValueError, match="writes calls in no form that is known"):
        zoo.tokenizer(folder(tmp_path / "b", "a")).beginning([1])


def test_only_the_delimiters_among_special_tokens_are_shown():
    tokenizer = zoo.tokenizer("tiny")
    start, end = (tokenizer.encode(token, special=False) for token in ("<|im_start|>", "<|im_end|>"))
    ids = [*tokenizer.encode("Hello"), *start, *tokenizer.encode(" you"), *end]
    for special, want in (
        (False, "Hello you"), (True, "Hello<|im_start|> you<|im_end|>"), (["a<|im_start|>"], "Hello<|im_start|> you"),
    ):  # fmt: skip
        assert "".join(map(tokenizer.stream(special=special).push, ids)) == want
