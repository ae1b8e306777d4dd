"""The chat templates that the families' instruct models are published with: rendered text equals transformers' and
committed hashes, and masks cover exactly the assistant's text.

The templates are the models' own files, and not in this repository: they are in ../shared/data/templates, and its
README lists their sources. `python -m tests.zoo.test_templates` writes the hashes again.
"""

# ruff: noqa: RUF001 (DeepSeek's tokens have a wide bar)

import concurrent.futures
import hashlib
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

import jinja2
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from tests.zoo import test_tokenizer
from zoo.text import templates
from zoo.text.tokenizer import Tokenizer


TEMPLATES = pathlib.Path(__file__).parents[3] / "shared" / "data" / "templates"
GOLDEN = pathlib.Path(__file__).parent / "golden" / "templates.json"


class Family(NamedTuple):
    """The text that a template writes around an assistant's turn, and its model's special tokens."""

    bos: str
    eos: str
    end: str  # the end of an assistant's turn
    before: str = ""  # text between the header and the content
    last: str = ""  # the same for the last turn only


HEADERS = Family("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>")
CHATML = Family("", "<|im_end|>", "<|im_end|>")
GEMMA = Family("<bos>", "<end_of_turn>", "<end_of_turn>")
DEEPSEEK = Family("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
FAMILIES = {
    "llama2": Family("<s>", "</s>", " </s>", " "),
    "llama3": HEADERS,
    "llama3.1": HEADERS,
    "llama3.2": HEADERS,
    "llama3.3": HEADERS,
    "llama4": Family("<|begin_of_text|>", "<|eot|>", "<|eot|>"),
    "mistral-7b-v0.1": Family("<s>", "</s>", "</s>"),
    "mistral-7b-v0.2": Family("<s>", "</s>", "</s>"),
    "mistral-7b-v0.3": Family("<s>", "</s>", " </s>", " "),
    "mistral-nemo": Family("<s>", "</s>", "</s>"),
    "mixtral-8x7b": Family("<s>", "</s>", "</s>"),
    "mixtral-8x22b": Family("<s>", "</s>", "</s>", " "),
    "gemma": GEMMA,
    "gemma2": GEMMA,
    "gemma3": GEMMA,
    "qwen2.5": CHATML,
    "qwen3": CHATML._replace(last="<think>\n\n</think>\n\n"),
    "qwen3-instruct-2507": CHATML,
    "qwen3-coder": CHATML,
    "qwen3-thinking-2507": CHATML._replace(last="\n</think>\n\n"),
    "deepseek-v2": DEEPSEEK._replace(before=" "),
    "deepseek-v3": DEEPSEEK,
    "deepseek-v3.1": DEEPSEEK,
    "deepseek-r1": DEEPSEEK._replace(last="\n</think>\n\n"),
    "deepseek-r1-first": DEEPSEEK,
    "kimi-k2": Family("[BOS]", "<|im_end|>", "<|im_end|>"),
    "gpt-oss": Family("<|startoftext|>", "<|return|>", "<|return|>", last="<|channel|>final<|message|>"),
}
CALL = "<|call|>"  # ends a turn of gpt-oss that calls a tool
SPECIAL = [
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>"),
    *("<|header_start|>", "<|header_end|>", "<|eom|>", "<start_of_turn>", "<|im_start|>", "<think>", "</think>"),
    *(
        "<tool_call>",
        "</tool_call>",
        "<｜User｜>",
        "<｜Assistant｜>",
        "<|im_user|>",
        "<|im_assistant|>",
        "<|im_system|>",
    ),
    *("<|im_middle|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", CALL),
]

SYSTEM = {"role": "system", "content": 'Be <b>kind</b> & "brief".'}
ASKS = [{"role": "user", "content": " What's 2 & 2, in été? "}, {"role": "user", "content": "And 3?\n"}]
ANSWERS = [{"role": "assistant", "content": "4,\n\nété"}, {"role": "assistant", "content": "It is 6."}]
TURNS = [ASKS[0], ANSWERS[0], ASKS[1], ANSWERS[1]]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds < & 'é' two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "description": "one"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def call(arguments: Any) -> list[dict[str, Any]]:
    function = {"name": "add", "arguments": arguments}
    return [
        ASKS[0],
        {"role": "assistant", "tool_calls": [{"id": "abcdef123", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "abcdef123", "name": "add", "content": "four"},
        ANSWERS[0],
    ]


def thinks(answer: dict[str, str]) -> dict[str, str]:
    return answer | {"content": f"<think>\nhm\n</think>\n\n{answer['content']}"}


def reasons(answer: dict[str, str], key: str) -> dict[str, str]:
    return answer | {key: "hm"}


CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one ask": (ASKS[:1], {}),
    "system": ([SYSTEM, ASKS[0]], {}),
    "one answer": (TURNS[:2], {}),
    "turns": (TURNS, {}),
    "system, turns": ([SYSTEM, *TURNS], {}),
    "parts": ([{"role": "user", "content": [{"type": "text", "text": "What's 2?"}]}, ANSWERS[0]], {}),
    "tools": ([SYSTEM, ASKS[0]], {"tools": TOOLS}),
    "tools, turns": (TURNS[:3], {"tools": TOOLS}),
    "call": (call({"a": 2, "b": 2})[:2], {"tools": TOOLS}),
    "called": (call({"a": 2, "b": 2})[:3], {"tools": TOOLS}),
    "call, answer, ask": ([*call({"a": 2, "b": 2}), ASKS[1]], {"tools": TOOLS}),
    "call in JSON": (call('{"a": 2, "b": 2}'), {"tools": TOOLS}),
    "thought": ([ASKS[0], thinks(ANSWERS[0]), ASKS[1], thinks(ANSWERS[1])], {}),
    "reasoning": ([ASKS[0], *(reasons(a, "reasoning_content") for a in ANSWERS[:1]), ASKS[1]], {}),
    "thinking": ([ASKS[0], reasons(ANSWERS[0], "thinking"), ASKS[1], reasons(ANSWERS[1], "thinking")], {}),
    "no thinking": (TURNS[:3], {"enable_thinking": False, "thinking": False}),
    "much thinking": (TURNS[:3], {"reasoning_effort": "high", "thinking": True}),
    "two answers": ([ASKS[0], *ANSWERS], {}),
}


def cases() -> Iterator[tuple[str, list[dict[str, Any]], dict[str, Any]]]:
    for name, (chat, options) in CHATS.items():
        yield name, chat, options
        yield f"{name}, prompt", chat, options | {"add_generation_prompt": True}


class Friday(datetime):
    """A fixed date for templates that write the date."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 11, 20)


def pin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sys.modules["zoo.text.tokenizer"].datetime, "datetime", Friday)


@pytest.fixture(autouse=True)
def pinned(monkeypatch):
    pin(monkeypatch)


@pytest.fixture(params=FAMILIES)
def name(request):
    if not (file := TEMPLATES / f"{request.param}.jinja").exists():
        pytest.skip(f"needs {file}")
    return request.param


def write(folder: pathlib.Path, name: str) -> pathlib.Path:
    """Writes a folder in Hub layout: the template, and a tokenizer of bytes with all families' special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    family = FAMILIES[name]
    tokenizer.add_special_tokens([*SPECIAL, *(token for f in FAMILIES.values() for token in (f.bos, f.eos) if token)])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": family.bos or None, "eos_token": family.eos}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{name}.jinja").read_text())
    return folder


def rendered(tokenizer: Tokenizer, chat: list[dict[str, Any]], options: dict[str, Any]) -> str | None:
    """Returns the rendered chat, or None if the template refuses it."""
    try:
        return tokenizer.render(chat, **options)
    except ValueError as error:
        assert "refuses the messages" in str(error)
        return None


def learnt(tokenizer: Tokenizer, chat: list[dict[str, Any]], options: dict[str, Any]) -> list[str] | None:
    """Returns the assistant's text by the masks, turn by turn; None if the template refuses or cuts the chat."""
    try:
        examples = tokenizer.encode_chat(chat, tools=options.get("tools"))
    except ValueError as error:
        assert "refuses the messages" in str(error) or "leaves out the" in str(error)
        return None
    return [text for each in examples for on, text in test_tokenizer.runs(tokenizer, *each) if on]


def found(tokenizer: Tokenizer) -> dict[str, Any]:
    """Returns the start of the hash of each case's text, - for none."""
    texts = [rendered(tokenizer, chat, options) for _, chat, options in cases()]
    short = lambda text: "-" if text is None else hashlib.sha256(text.encode()).hexdigest()[:8]
    return {"template": short(tokenizer.chat_template), "texts": " ".join(map(short, texts))}


def test_text_equals_the_committed(name, tmp_path):
    assert found(Tokenizer(write(tmp_path, name))) == json.loads(GOLDEN.read_text())[name]


def test_reasoning_goes_by_every_name(tmp_path):
    template = "{{ messages[0].reasoning_content }} {{ messages[0].thinking }} {{ messages[0].content }}"
    tokenizer = Tokenizer(test_tokenizer.folder(tmp_path / "a", template))
    for name in "reasoning_content", "thinking", "reasoning":
        assert tokenizer.render([{"role": "assistant", "content": "4", name: "hm"}]) == "hm hm 4"


@pytest.mark.parametrize(
    ("kind", "both"),  # two questions: V3.2 opens an answer to each, V4 joins them
    [
        ("deepseek_v32", "<｜User｜>a<｜Assistant｜></think><｜User｜>b"),
        ("deepseek_v4", "<｜User｜>a\n\nb"),
    ],
)
def test_deepseek_without_a_template(kind, both, tmp_path):
    """Text equals that of the code in the repositories of V3.2 and V4, which has the instructions for tools, too."""
    test_tokenizer.folder(tmp_path, None)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    tokenizer, ask, say = Tokenizer(tmp_path), dict(role="user", content="c"), dict(role="assistant", content="d")
    first = [dict(role="system", content="s"), ask | dict(content="a"), ask | dict(content="b")]
    chat = [*first, reasons(say, "reasoning_content"), ask]
    text = f"<s>s{both}<｜Assistant｜></think>d</s><｜User｜>c<｜Assistant｜>"
    assert tokenizer.render(chat) == f"{text}</think>"
    assert tokenizer.render(chat, thinking=True) == f"{text}<think>"
    assert tokenizer.render([*chat, chat[3]], thinking=True) == f"{text}<think>hm</think>d</s>"
    with pytest.raises(ValueError, match="tools, and the reasoning_effort max, need the folder encoding"):
        tokenizer.render(chat, tools=TOOLS)
    with pytest.raises(ValueError, match="message 2 is not a text alone"):
        tokenizer.render(call({})[:2])


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template, said",
    [
        (ENDLESS, "refuses the messages: it takes more than 10 seconds"),
        ("{{ messages[0].content * 10**8 }}", f"refuses the messages: its text has more than {2**26} bytes"),
        pytest.param(
            "{{ 'a'.center(10**12) }}",
            f"refuses the messages: it needs more than {2**30} bytes of memory",
            marks=pytest.mark.skipif(sys.platform != "linux", reason="of memory only Linux has limits"),
        ),
        ("{% for %}", "is broken at line 1"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    ],
)
def test_a_template_is_bounded_and_the_next_one_works(tmp_path, monkeypatch, template, said):
    runs_out = [template == ENDLESS]

    class Timer(threading.Timer):
        """Ends at once for the endless template, which this thread renders first, and never for others."""

        def __init__(self, seconds, function):
            here = threading.current_thread() is threading.main_thread()
            super().__init__(0.0 if here and runs_out and runs_out.pop() else 600.0, function)

    monkeypatch.setattr(templates.threading, "Timer", Timer)
    tokenizer = Tokenizer(test_tokenizer.folder(tmp_path / "a", template))
    usual = Tokenizer(test_tokenizer.folder(tmp_path / "b", "{{ messages[0].content }}"))
    with concurrent.futures.ThreadPoolExecutor() as pool:
        others = [pool.submit(usual.render, [{"role": "user", "content": str(i)}]) for i in range(20)]
        with pytest.raises(ValueError, match=said):
            tokenizer.render([{"role": "user", "content": "a"}])
        assert [other.result() for other in others] == [str(i) for i in range(20)]
    assert usual.render([{"role": "user", "content": "é\ud800"}]) == "é\ud800"


ATTACKS = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ lipsum.__globals__['os'].popen('id').read() }}",
    "{{ self.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ joiner.__init__.__globals__ }}",
    "{{ messages.__class__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'content': 1}) }}",
    "{{ messages|attr('__class__') }}",
    "{{ '{0.__class__.__mro__}'.format(messages) }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{% extends 'base.html' %}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
]


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_template_gets_at_nothing(tmp_path, attack):
    """A template reaches neither Python's objects, files, nor its arguments: it is refused, or writes nothing."""
    tokenizer = Tokenizer(test_tokenizer.folder(tmp_path / "a", attack))
    try:
        text = tokenizer.render([{"role": "user", "content": "a"}])
    except ValueError as error:
        assert "\n" not in str(error)
    else:
        assert text in ("", "[Undefined]", "[]"), text


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the children of a process")
def test_the_process_for_templates_can_die(tmp_path):
    tokenizer = Tokenizer(test_tokenizer.folder(tmp_path / "a", "{{ messages[0].content }}"))
    command = lambda child: pathlib.Path(f"/proc/{child}/cmdline").read_bytes()
    for _ in range(2):
        assert tokenizer.render([{"role": "user", "content": "a"}]) == "a"
        children = [list.read_text().split() for list in pathlib.Path("/proc/self/task").glob("*/children")]
        (process,) = [int(n) for of_task in children for n in of_task if templates.__file__.encode() in command(n)]
        os.kill(process, signal.SIGKILL)
        os.waitid(os.P_PID, process, os.WEXITED | os.WNOWAIT)


@pytest.mark.live
def test_text_equals_transformers(name, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Friday)
    write(tmp_path, name)
    assert_equals(Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


@pytest.mark.live
@pytest.mark.parametrize(
    "name", ["qwen3_5_think", "qwen3_5_nothink", "qwen3_6", "qwen3_8", "nemotron_3_nano", "nemotron_3_super"]
)
def test_text_of_trls_copies_equals_transformers(name, tmp_path):
    """TRL has the hybrids' templates as published."""
    trl, transformers = pytest.importorskip("trl"), pytest.importorskip("transformers")
    template = (pathlib.Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    test_tokenizer.folder(tmp_path, template)
    assert_equals(Tokenizer(tmp_path), transformers.AutoTokenizer.from_pretrained(tmp_path))


def assert_equals(tokenizer: Tokenizer, theirs: Any) -> None:
    for case, chat, options in cases():
        try:
            want = theirs.apply_chat_template(chat, tokenize=False, **options)
        except (jinja2.TemplateError, TypeError):
            want = None
        assert rendered(tokenizer, chat, options) == want, case


def test_masks(name, tmp_path):
    """Masks cover every turn of the assistant, with its end token, and no other text."""
    tokenizer, family = Tokenizer(write(tmp_path, name)), FAMILIES[name]
    first, second = (family.before + family.last + answer["content"] + family.end for answer in ANSWERS)
    assert learnt(tokenizer, *CHATS["turns"]) == [first, second]
    assert learnt(tokenizer, *CHATS["one answer"]) == [first]
    for case, (chat, options) in CHATS.items():
        texts = learnt(tokenizer, chat, options)
        if texts is None or case == "two answers":  # without a header between them, they are one run
            continue
        assistant = [message for message in chat if message["role"] == "assistant"]
        for text, message in zip(texts, assistant, strict=True):
            assert text.endswith((family.end, CALL)), case
            assert message.get("content", "").split("</think>")[-1].strip() in text, case
        others = {str(message["content"]).strip() for message in chat if message["role"] != "assistant"}
        assert not any(other in text for other in others for text in texts), case


if __name__ == "__main__":
    written = {}
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        pin(patch)
        for family in FAMILIES:
            written[family] = found(Tokenizer(write(pathlib.Path(folder), family)))
    GOLDEN.write_text(json.dumps(written, indent=1) + "\n")
