"""SmolLM2-135M-Instruct (tests/real.py) against transformers: answers, perplexity, chat, server and export."""

import io
import pathlib
import runpy
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert.tensors
import zoo
from tests import real
from tests.zoo.test_openai import client_of
from tests.zoo.test_serve import Running
from zoo.generation.engine import Engine


pytestmark = [pytest.mark.live, pytest.mark.filterwarnings("ignore")]  # of transformers

QUESTIONS = [
    "What is the capital of France?", "Name three colors.", "What is 7 plus 5?", "Who wrote Hamlet?",
    "Write a line of Python that prints hello.", "What is the opposite of hot?", "How many days has a week?",
    "Translate to French: good morning.", "Why is the sky blue?", "Finish: once upon a time",
]  # fmt: skip
NEW, ROWS = 32, 4  # tokens of an answer, and rows of the engine, as many as the server's
CHATS = [[{"role": "user", "content": question}] for question in QUESTIONS]
CLOSE = 1e-4  # of the largest logit
TEXT = pathlib.Path(__file__).parents[3] / "shared" / "data" / "text" / "tinyshakespeare.txt"


@pytest.fixture(scope="module")
def folder():
    return real.smollm2()


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder, dtype="float32")


@pytest.fixture(scope="module")
def tokenizer(folder):
    return zoo.tokenizer(folder)


@pytest.fixture(scope="module")
def theirs(folder):
    """Returns a function of rows of tokens, which computes transformers' logits."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def logits(tokens):
        with torch.no_grad():
            return model(torch.tensor(tokens)).logits.numpy()

    return logits


@pytest.fixture(scope="module")
def answered(model, tokenizer):
    """Returns the texts of `zoo.generate`, and the engine's completions, which have the tokens."""
    completions, submit = [], Engine.submit
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Engine, "submit", lambda *of, **more: completions.extend(got := submit(*of, **more)) or got)
        return zoo.generate(model, tokenizer, CHATS, batch=ROWS, max_new_tokens=NEW), completions


@pytest.fixture(scope="module")
def answers(answered):
    return answered[0]


def test_answers(answered, theirs):
    """Each token of an answer is the one that transformers finds likeliest after those before it.

    Where two logits differ by less than the rounding of both models, either token is.
    """
    answers, completions = answered
    assert "Paris" in answers[0] and len(set(answers)) == len(QUESTIONS)
    rows = [completion.prompt + completion.tokens for completion in completions]
    longest = max(map(len, rows))
    logits = theirs([row + [0] * (longest - len(row)) for row in rows])  # what follows a token changes nothing
    for question, completion, scores in zip(QUESTIONS, completions, logits, strict=True):
        for at, token in enumerate(completion.tokens, len(completion.prompt) - 1):
            rounding = 2 * CLOSE * np.abs(scores[at]).max()
            assert scores[at].max() - scores[at, token] <= rounding, (question, at)


def test_perplexity(model, tokenizer, theirs):
    if not TEXT.exists():
        pytest.skip(f"needs {TEXT}")
    tokens = np.array(tokenizer.encode(TEXT.read_text()[:10_000], special=False)[:2000]).reshape(4, 500)

    def nats(logits, tokens):
        logprobs = jax.nn.log_softmax(logits[:, :-1].astype(jnp.float32))
        return -jnp.take_along_axis(logprobs, tokens[:, 1:, None], axis=-1).mean()

    score = eqx.filter_jit(lambda model, tokens: nats(model(tokens), tokens))

    # Row by row, since the logits of all take 400 MB.
    ours = np.mean([score(model, row[None]) for row in tokens])
    wanted = np.mean([nats(jnp.asarray(theirs(row[None])), row[None]) for row in tokens])
    assert np.exp(ours) == pytest.approx(np.exp(wanted), rel=1e-4) and np.exp(ours) < 100


def test_chat(folder, model, answers, monkeypatch, capsys):
    monkeypatch.setattr(zoo, "load", lambda source, **options: model)
    monkeypatch.setattr("zoo.chat.ROOM", 128)  # the default cache has 4,096 tokens
    options = ["--max-new-tokens", str(NEW), "--temperature", "0"]
    monkeypatch.setattr(sys, "argv", ["zoo", "chat", str(folder), *options])
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{QUESTIONS[0]}\n/reset\n{QUESTIONS[1]}\n/exit\n"))
    monkeypatch.delitem(sys.modules, "zoo.__main__", raising=False)  # other tests import parts of it
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # see tests/train/conftest.py
    runpy.run_module("zoo", run_name="__main__")
    shown = capsys.readouterr().out
    assert answers[0] in shown and answers[1] in shown


def test_server(model, tokenizer, answers, monkeypatch):
    pytest.importorskip("openai")
    monkeypatch.setattr("zoo.serve.server.STRIDE", 16)  # that of `zoo.generate`, whose programs these then are
    room = max(64 + NEW, *(len(tokenizer.encode_prompt(chat)) + NEW for chat in CHATS))
    with Running(model, tokenizer, max_tokens=room) as running:
        client = client_of(running)
        ask = {"model": "tiny", "messages": CHATS[0], "temperature": 0, "max_tokens": NEW}
        assert client.chat.completions.create(**ask).choices[0].message.content == answers[0]
        pieces = client.chat.completions.create(**ask | {"messages": CHATS[1]}, stream=True)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == answers[1]


def test_export(folder, tmp_path):
    """An export has the bits of what was loaded, also as transformers reads it."""
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    zoo.save(zoo.load(folder), tmp_path)
    before, after = map(convert.tensors.open_tensors, (folder, tmp_path))
    assert before.keys() == after.keys()
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    for name in before:
        assert before[name].view().tobytes() == after[name].view().tobytes(), name
        assert before[name].view().tobytes() == read[name].contiguous().view(torch.uint8).numpy().tobytes(), name
