"""Replies in channels are split into reasoning and answer, whole and piece by piece, in the chat and in the server."""

import json
import re

import pytest
import tokenizers

import zoo
from tests.zoo.test_chat import ASK, talk  # noqa: F401 (a fixture)
from tests.zoo.test_serve import CHAT, COMPLETIONS, MESSAGES, Running
from tests.zoo.test_tokenizer import folder
from zoo.serve.reply import Token
from zoo.text.calls import Call
from zoo.text.harmony import Reader, split
from zoo.text.replies import Piece


ANALYSIS = "<|channel|>analysis<|message|>They greet.<|end|>"
FINAL = "<|start|>assistant<|channel|>final<|message|>Hello é!"
CALL = '<|start|>assistant<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}'
SPECIAL = [f"<|{name}|>" for name in ("start", "channel", "constrain", "message", "end", "return", "call")]
# Like gpt-oss's: the model opens its channels itself, and sees only the answers of earlier turns.
TEMPLATE = """\
{%- for message in messages -%}
<|start|>{{ message.role }}{{ '<|channel|>final' if message.role == 'assistant' -}}
<|message|>{{ message.content }}<|end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}"""


@pytest.fixture(scope="module")
def model():
    return zoo.load("tiny", dtype="float32")


@pytest.fixture
def source(tmp_path):
    """Returns a folder with a tokenizer that has channels."""
    path = folder(tmp_path / "channels", TEMPLATE)
    tokenizer = tokenizers.Tokenizer.from_file(str(path / "tokenizer.json"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.save(str(path / "tokenizer.json"))
    config = json.loads((path / "tokenizer_config.json").read_text())
    (path / "tokenizer_config.json").write_text(json.dumps(config | {"eos_token": "<|return|>"}))
    return path


@pytest.mark.parametrize(
    "text, reasoning, answer",
    [
        (ANALYSIS + FINAL, "They greet.", "Hello é!"),
        (FINAL.removeprefix("<|start|>assistant"), "", "Hello é!"),
        (ANALYSIS + "<|start|>assistant" + ANALYSIS + FINAL, "They greet.\nThey greet.", "Hello é!"),
        (ANALYSIS + CALL, "They greet.", CALL.removeprefix("<|start|>")),
        (CALL.removeprefix("<|start|>assistant"), "", CALL.removeprefix("<|start|>assistant")),
        (ANALYSIS + CALL.replace(" to=functions.add", ""), "They greet.", '{"a": 1}'),  # a word before the calls
        (ANALYSIS + FINAL.replace("final", "final <|constrain|>json"), "They greet.", "Hello é!"),
        (ANALYSIS + "<|start|>assistant<|channel|>fin", "They greet.", ""),
        ("Hello <|message|>", "", "Hello <|message|>"),
        ("", "", ""),
    ],
)
def test_split(text, reasoning, answer):
    assert split(text) == (reasoning, answer)


def test_pieces_join_to_the_whole(source):
    """The pieces are single tokens as a stream decodes them; special tokens come whole."""
    tokenizer = zoo.tokenizer(source)
    for text in ANALYSIS + FINAL, ANALYSIS + "<|start|>assistant" + ANALYSIS + CALL:
        decoder = tokenizer.stream(special=True)
        said = list(Reader().split(decoder.push(id) for id in tokenizer.encode(text)))
        whole = sum(said, Piece())
        assert (whole.reasoning, whole.answer) == split(text) and not whole.calls and len(said) > 20


def test_calls(source):
    """A call is read once it is whole. One that is no JSON stays text, and so do all without tools."""
    tokenizer, name = zoo.tokenizer(source), " to=functions.add"
    read = lambda text, tools=(1,): sum(
        tokenizer.reader([], tools).split(map(tokenizer.stream(special=True).push, tokenizer.encode(text))), Piece()
    )
    other = CALL.replace(name, "").replace("<|start|>assistant", f"<|start|>assistant{name}")
    for text in ANALYSIS + CALL, ANALYSIS + CALL + "<|call|>", ANALYSIS + other:
        assert read(text) == Piece("They greet.", "", [Call("add", {"a": 1})])
    assert read(other.removeprefix("<|start|>assistant")) == Piece("", "", [Call("add", {"a": 1})])
    assert read(ANALYSIS + CALL + CALL + FINAL) == Piece("They greet.", "Hello é!", [Call("add", {"a": 1})] * 2)
    cut = ANALYSIS + CALL.removesuffix("}")
    assert read(cut) == Piece("They greet.", cut.partition("<|start|>")[2])
    assert read(ANALYSIS + CALL, ()) == Piece(*split(ANALYSIS + CALL))


def test_muse(tmp_path):
    """Muse's recipients in place of channels: itself, the user, and functions, whose arguments are tags."""
    tokenizer = zoo.tokenizer(folder(tmp_path / "muse", "{{ messages[0].content }}{# <atem:function_calls> #}"))
    assert tokenizer.channels and tokenizer.beginning([1], "add").startswith(" to=add<|message|><atem:function_calls>")
    thought, start = " to=self<|message|>Hm.<|eom|>", "<|start|>assistant"
    add = (
        '<atem:function_calls>\n<atem:invoke name="add">\n<atem:parameter name="a">1</atem:parameter>\n</atem:invoke>\n'
    )
    call = f"{start} to=add<|message|>{add}</atem:function_calls><|eom|>"
    tools = [{"function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}]
    for text, want in (
        (f"{thought}{start} to=user<|message|>Hello", Piece("Hm.", "Hello")),
        (thought + call + call, Piece("Hm.", "", [Call("add", {"a": 1})] * 2)),
        (" to=user<|message|>Hello<|eot|>", Piece("", "Hello")),
        (f" to=add<|message|>{add[:30]}", Piece("", f" to=add<|message|>{add[:30]}")),
    ):
        pieces = re.split(r"(?<=>)|(?=<)", text)
        assert sum(tokenizer.reader([1], tools).split(pieces), Piece()) == want
    assert split(thought + call) == ("Hm.", call.removeprefix("<|start|>").removesuffix("<|eom|>"))


def test_the_answer_of_a_reply(source):
    tokenizer = zoo.tokenizer(source)
    assert tokenizer.answer(tokenizer.encode(ANALYSIS + FINAL + "<|return|>")) == "Hello é!"
    assert tokenizer.answer(tokenizer.encode(ANALYSIS)) == ""
    assert tokenizer.answer(tokenizer.encode("Hello é!<|return|>")) == "Hello é!"
    plain = zoo.tokenizer("tiny")
    assert plain.answer([*plain.encode("Hello"), *plain.eos]) == "Hello"


def test_other_tokenizers_have_no_channels(tmp_path):
    for tokenizer in zoo.tokenizer("tiny"), zoo.tokenizer(folder(tmp_path / "chatml")):
        assert not tokenizer.channels and tokenizer.reader([]).push(ANALYSIS) == Piece(answer=ANALYSIS)


def test_chat(talk, source, monkeypatch):  # noqa: F811
    """The reasoning is shown before the answer, and only the answer stays in the conversation."""
    tokenizer = zoo.tokenizer(source)

    def pieces(engine, completion, decoder, stop):
        engine.cancel(completion)
        return map(decoder.push, tokenizer.encode(ANALYSIS + FINAL))

    monkeypatch.setattr(zoo.chat, "pieces", pieces)
    shown, prompts = talk(ASK, "And then?", source=str(source))
    assert shown.count("They greet.\n\nHello é!\n") == 2 and "analysis" not in shown
    messages = [{"role": "user", "content": ASK}, {"role": "assistant", "content": "Hello é!"}]
    messages.append({"role": "user", "content": "And then?"})
    assert prompts[1] == tokenizer.render(messages, add_generation_prompt=True)


def test_serve(model, source, monkeypatch):
    """Replies over HTTP are split, whole and in pieces; the model's tokens are given by the test."""
    tokenizer = zoo.tokenizer(source)
    script = tokenizer.encode(ANALYSIS + FINAL + "<|return|>")
    tokenizer.eos = (script[-1],)  # as gpt-oss's, which does not end with a message

    with Running(model, tokenizer) as running:

        async def write(replies):
            for reply in replies:
                for token in script:
                    yield reply, reply.push([Token(token, 0.0, {})]), reply.finish

        monkeypatch.setattr(running.server.worker, "write", write)
        body = {"messages": MESSAGES, "max_tokens": 100, "n": 2}
        choices = running.ask(CHAT, **body)["choices"]
        events = [event["choices"][0] for event in running.events(CHAT, **body)]
        completion = running.ask(COMPLETIONS, prompt="hello", max_tokens=100)["choices"][0]
    want = {"role": "assistant", "content": "Hello é!", "reasoning_content": "They greet."}
    assert [choice["message"] for choice in choices] == [want, want]
    assert {choice["finish_reason"] for choice in choices} == {"stop"}
    for index in range(2):
        deltas = [event["delta"] for event in events if event["index"] == index]
        for field in ("content", "reasoning_content"):
            assert "".join(delta.get(field, "") for delta in deltas) == want[field]
        assert sum("reasoning_content" in delta for delta in deltas) > 3
    assert completion["text"] == "analysisThey greet.assistantfinalHello é!"  # a completion is plain text
