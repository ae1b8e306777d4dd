"""The chat in the terminal: its prompts to the model, its output, and its end. Tests provide the lines."""

import io
import pathlib
import runpy
import sys

import pytest

import zoo
from tests.zoo.test_tokenizer import INST, folder
from zoo.chat import ROOM, Conversation, LoadOptions, chat
from zoo.generation.engine import Engine
from zoo.generation.generate import Encoded
from zoo.generation.sampling import Sampling
from zoo.source import Source


ASK = "What does textwrap.dedent do?"


@pytest.fixture(scope="module")
def model():
    return zoo.load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer():
    return zoo.tokenizer("tiny")


@pytest.fixture
def talk(model, monkeypatch, capsys):
    """Enters lines, or raises exceptions among them, and then Ctrl-D. Returns the output and the model's prompts."""
    monkeypatch.setattr(zoo, "load", lambda source, **options: model)

    def talk(*lines, source="tiny", system=None, **options):
        stream, prompts = Conversation._stream, []

        def record(self, prompt, seed):
            prompts.append(self.tokenizer.decode(prompt.ids, special=True))
            return stream(self, prompt, seed)

        entered = iter([*lines, EOFError()])

        def read(prompt):
            line = next(entered)
            if isinstance(line, BaseException):
                raise line
            return line

        with monkeypatch.context() as patch:
            patch.setattr("builtins.input", read)
            patch.setattr(Conversation, "_stream", record)
            chat(source, Sampling(**{"max_new_tokens": 12} | options), system=system)
        return capsys.readouterr().out, prompts

    return talk


def reply(model, tokenizer, messages, new=12):
    ids = tokenizer.encode(tokenizer.render(messages, add_generation_prompt=True), special=False)
    return "".join(zoo.stream(model, tokenizer, ids, max_new_tokens=new))


@pytest.mark.thorough
@pytest.mark.parametrize("room", [ROOM, 16])
def test_a_conversation(talk, model, tokenizer, monkeypatch, room):
    """Each prompt is the whole conversation, rendered by the model's template, in one engine's room or in several."""
    monkeypatch.setattr("zoo.chat.ROOM", room)
    rooms, make = [], Engine.__init__
    monkeypatch.setattr(
        Engine, "__init__", lambda *of, **options: rooms.append(options["max_tokens"]) or make(*of, **options)
    )
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASK}]
    first = reply(model, tokenizer, messages)
    longer = [*messages, {"role": "assistant", "content": first}, {"role": "user", "content": "And then?"}]
    shown, prompts = talk(ASK, "", "  And then? ", system="Be brief.")
    assert prompts == [tokenizer.render(turns, add_generation_prompt=True) for turns in (messages, longer)]
    assert len(rooms) == (2 if room == ROOM else 3)  # that of the first reply above, and those of the conversation
    assert first in shown and reply(model, tokenizer, longer) in shown and "512 positions" in shown


def test_a_turn_reads_what_is_new(talk, monkeypatch):
    """The engine reads each token once, and tokens stay as they were drawn; after /reset it reads all anew."""
    engines, replies, make, submit = [], [], Engine.__init__, Engine.submit
    monkeypatch.setattr(
        Engine, "__init__", lambda self, *of, **options: engines.append(self) or make(self, *of, **options)
    )
    monkeypatch.setattr(Engine, "submit", lambda *of, **options: replies.extend(got := submit(*of, **options)) or got)
    talk(ASK, "And then?", "And then?", temperature=1.0, seed=3)
    first, second, third = (reply.prompt for reply in replies)
    texts = [reply.prompt + reply.tokens for reply in replies]
    assert second[: len(texts[0])] == texts[0] and third[: len(texts[1])] == texts[1]
    (engine,) = engines
    assert engine.tokens_read == len(first) + len(second) - len(texts[0]) + len(third) - len(texts[1])
    talk(ASK, "/reset", ASK)
    assert engines[1].tokens_read == 2 * len(first) and len(engines) == 2


def test_commands(talk):
    shown, prompts = talk(ASK, "/reset", ASK, "/sing", "/exit", "never asked")
    assert prompts[0] == prompts[1] and len(prompts) == 2
    assert "starts anew" in shown and "/sing is no command. /reset" in shown


def test_images(monkeypatch, talk):
    """Images go with the next message. A model that takes none, and a file that is no image, are reported."""
    assert "A model of qwen3 takes no images; docs" in talk("/image photo.png")[0]
    monkeypatch.setattr("zoo.chat.require_vision", lambda model: model)
    encode = lambda model, tokenizer, messages: sent.append(messages) or Encoded([1])
    monkeypatch.setattr("zoo.chat.encode", encode)
    sent, image = [], pathlib.Path(__file__).parents[2] / "docs" / "caches.png"
    monkeypatch.setattr(Conversation, "_stream", lambda *_: iter(["A chart."]))
    shown, _ = talk("/image nothing.png", f"/image {image}", "What is it?", "And?")
    assert "'nothing.png' cannot be read" in shown and "caches.png goes with your next message" in shown
    part = {"type": "image", "path": str(image)}
    assert sent[0][-1]["content"] == [part, {"type": "text", "text": "What is it?"}]
    assert sent[1][-1]["content"] == "And?"
    with pytest.raises(ValueError, match="A draft takes no images: use --images or --draft"):
        chat("tiny", load=LoadOptions(images=True, draft="mtp"))


def test_a_draft_of_ngrams(model, monkeypatch):
    monkeypatch.setattr(zoo, "load", lambda source, **options: model)
    _, draft = LoadOptions(draft="ngram", num_draft_tokens=3).model(Source.open("tiny"))
    assert isinstance(draft, zoo.NGramDraft) and draft.num_draft_tokens == 3


def test_seeds(talk):
    options = {"temperature": 1.0, "top_p": 0.9}
    first, again, other = (talk(ASK, seed=seed, **options)[0] for seed in (1, 1, 2))
    assert first == again != other


def test_control_c_stops_a_reply_and_no_more(talk, monkeypatch):
    def interrupted(*_):
        yield "Half a"
        raise KeyboardInterrupt

    monkeypatch.setattr(Conversation, "_stream", interrupted)
    shown, prompts = talk(ASK, KeyboardInterrupt(), "Go on.")
    assert shown.count("Half a (stopped)") == 2 and shown.count("/reset starts anew") == 2
    assert "<|im_start|>assistant\nHalf a<|im_end|>" in prompts[1]


def test_it_stays_within_the_positions(talk, tokenizer, monkeypatch):
    """The oldest turns are dropped, from one user message to the next. A message too long by itself is not kept."""
    monkeypatch.setattr(Conversation, "_stream", lambda *_: iter(["So be it."]))
    long = ASK * 20
    shown, prompts = talk(long, long, long, max_new_tokens=200)
    assert "its oldest 2 messages are dropped" in shown
    assert prompts[0].count("<|im_start|>user") == prompts[-1].count("<|im_start|>user") == 1
    assert all(len(tokenizer.encode(prompt, special=False)) + 200 <= 512 for prompt in prompts)
    shown, prompts = talk(ASK * 80, ASK)
    assert "does not fit into the model's 512 positions" in shown and len(prompts) == 1 and prompts[0].count(ASK) == 1


def test_templates_that_are_missing_or_refuse(talk, tmp_path):
    with pytest.raises(ValueError, match="has no chat template, so it cannot turn messages into text"):
        talk(source=str(folder(tmp_path / "a", "")))
    strict = INST.replace("{% set system, turns", "{{ raise_exception('no system') }}{% set system, turns", 1)
    with pytest.raises(ValueError, match="refuses the messages: no system"):
        talk(source=str(folder(tmp_path / "b", strict)), system="Be brief.")


def test_the_command(model, monkeypatch, capsys):
    monkeypatch.setattr(zoo, "load", lambda source, **options: {"tiny": model}[source.name])
    arguments = ["zoo", "chat", "tiny", "--max-new-tokens", "12", "--system", "Be brief.", "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{ASK}\n/exit\n"))
    monkeypatch.delitem(sys.modules, "zoo.__main__", raising=False)  # other tests import parts of it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # see tests/train/conftest.py
    runpy.run_module("zoo", run_name="__main__")
    shown = capsys.readouterr().out
    assert shown.startswith("tiny, 512 positions") and shown.count("> ") == 2


def test_the_command_refuses(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["zoo", "chat", "nothing"])
    monkeypatch.delitem(sys.modules, "zoo.__main__", raising=False)  # other tests import parts of it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # see tests/train/conftest.py
    with pytest.raises(SystemExit, match="'nothing' is no zoo name"):
        runpy.run_module("zoo", run_name="__main__")
