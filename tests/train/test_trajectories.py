"""Trajectories of several turns: environments in processes, chats in tokens, rows, the journal, and the script."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import json
import os
import select
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests import hurry
from tests.close import close
from tests.reliability import trials
from tests.train.conftest import command, documents
from tests.transcripts import ROOT, files
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from train import grpo
from train.data.records import Record
from train.environments import calculator, guess, search
from train.environments import python as python_
from train.environments import tiny as tiny_
from train.environments.__main__ import chats
from train.methods import environments, trajectories
from train.methods.chats import Chats
from train.methods.environments import Environment, EnvironmentOptions, Host, Journal
from train.methods.texts import packed
from train.methods.trajectory import Move, Players, Trajectory
from train.step import loss
from train.step.language import features
from zoo.generation.engine import Completion
from zoo.mesh import make_mesh


pytestmark = pytest.mark.usefixtures("quick")
TOOLS = environments.FOLDER / "tools.jinja"
PLAIN = (
    "{% for m in messages %}{{ m.role[0] }} {{ m.content }}<end>{% endfor %}{% if add_generation_prompt %}a {% endif %}"
)
FORGETS = PLAIN.replace("m.content", "(m.content if loop.last or m.role != 'assistant' else 'x')")  # its own past turns

OWN = '''
import asyncio, os, secrets, subprocess
from typing import Literal

class Own:
    """An environment that does what the record says."""

    def reset(self, record):
        self._record, self._said = record, []
        return [{"role": "system", "content": "be brief"}, {"role": "user", "content": record["prompt"]}]

    def add(self, a: int, b: float | None = None, how: Literal["up", "down"] = "up", many: list[int] = ()) -> int:
        """Adds numbers.

        It adds more than two.

        Args:
            a: the first of them,
                which is whole
            how (str): the direction
        """
        return a + (b or 0)

    async def later(self, name: str) -> str:
        """Waits."""
        if name == "never":
            await asyncio.Event().wait()
        return f"{name} {os.getpid()}"

    def do(self, what: str) -> str:
        """Does something bad."""
        if what == "dies":
            os._exit(1)
        if what == "exits":
            raise SystemExit("no")
        if what == "floods":
            return "x" * 10**6
        if what == "loops":
            while True:
                pass
        while what == "clings":
            try:
                while True:
                    pass
            except TimeoutError:
                pass
        if what == "forks":
            child = subprocess.Popen(["sleep", "1000"])
            return str(child.pid)

    def _hidden(self):
        pass

    def reward(self):
        return self._record.get("reward", 1)
'''
GAME = '''
import os, secrets

class Game:
    """Answers with letters of the last answer, and ends after three of the answers."""

    def reset(self, record):
        self._turn, self._letters = 0, 0
        return record["prompt"]

    def reply(self, answer):
        if os.environ.get("CALLS"):
            with open(os.environ["CALLS"], "a") as file:
                file.write(f"{answer}\\n")
        if os.environ.get("COUNT"):
            with open(os.environ["COUNT"], "ab", buffering=0) as file:
                file.write(b".")
                if file.tell() == int(os.environ["KILL"]):
                    os.kill(int(open(f"/proc/{os.getppid()}/stat").read().rpartition(")")[2].split()[1]), 9)  # trainer
        self._turn += 1
        self._letters += sum(c in "aeiou" for c in answer)
        random = secrets.token_hex(2) if os.environ.get("RANDOM") else ""
        return None if self._turn == 3 else f"more {random}{answer[:3]}"

    def reward(self):
        return self._letters / 10

class Scored(Game):
    """Has a reward for each answer."""

    def reply(self, answer):
        self._last = answer
        return super().reply(answer)

    def turn_reward(self):
        return len(self._last) / 10
'''
FUNCTIONS = '''
import asyncio

def add(a: int, b: int) -> int:
    """Adds numbers."""
    return a + b

async def rollout(episode, record):
    """Asks twice in one chat, and then in another one."""
    chat = [{"role": "user", "content": record["prompt"]}]
    first = await episode.generate(chat)
    second = await episode.generate([*chat, first, {"role": "user", "content": f"more {first['content'][:3]}"}])
    other = await episode.generate([{"role": "user", "content": f"judge {second['content'][:4]}"}])
    return sum(c in "aeiou" for c in other["content"]) / 10

async def calls(episode, record):
    """Runs the tools that the model calls, with messages as OpenAI's library writes them."""
    chat = [{"role": "user", "content": record["prompt"]}]
    while True:
        reply = await episode.generate(chat)
        if not reply.get("tool_calls"):
            return float(reply["content"] == record["answer"])
        for call in reply["tool_calls"]:
            call["function"]["arguments"] = str(call["function"]["arguments"]).replace("'", '"')
        chat = [*chat, reply | {"content": None, "refusal": None}]
        for call in reply["tool_calls"]:
            chat.append({"role": "tool", "tool_call_id": call["id"], "content": str(add(2, 3))})

calls.tools = [add]

async def limited(episode, record):
    try:
        while True:
            await episode.generate([{"role": "user", "content": "go on"}])
            if record.get("bad"):
                raise ValueError("bad")
    except asyncio.CancelledError:
        if record.get("sure"):
            return 0.5
        raise

async def idle(episode, record):
    return 1

def plain(episode, record):
    return 1
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.write(folder / "model", "qwen3", eos_token_id=63, max_position_embeddings=256)
    tiny.write_tokenizer(folder / "model")
    (folder / "model" / "chat_template.jinja").write_text(PLAIN)
    (folder / "forgets.jinja").write_text(FORGETS)
    (folder / "own.py").write_text(OWN)
    (folder / "game.py").write_text(GAME)
    (folder / "functions.py").write_text(FUNCTIONS)
    records = [{"prompt": word} for word in ("abc", "hello", "fox", "dog")]
    (folder / "data.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def own(folder):
    with Host(f"{folder / 'own.py'}:Own", 0.2, 100) as own:
        yield own


def environment(host, **record):
    made = Environment(host, Journal(None, 0), (0, 0))
    assert not made.ask("reset", {"prompt": "?"} | record, 1, 2, after=[]).error
    return made


# ======================================================================================================================
# Environments in their processes.
# ======================================================================================================================


def test_tools_are_described_by_types_and_docstrings(own):
    add, later, do = own.tools
    assert add == {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds numbers.\n\nIt adds more than two.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer", "description": "the first of them, which is whole"},
                    "b": {"type": "number", "nullable": True},
                    "how": {"type": "string", "enum": ["up", "down"], "description": "the direction"},
                    "many": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["a"],
            },
        },
    }
    assert [each["function"]["name"] for each in (later, do)] == ["later", "do"] and not own.replies and not own.scores


def test_a_description(own):
    said = trajectories.described(own, Record("line 1", {"prompt": "Well?"}))
    assert said == "these tools: add, later, do. Its first prompt: 'Well?'"
    with pytest.raises(ValueError, match=r"line 2: reset raises KeyError: 'prompt'\."):
        trajectories.described(own, Record("line 2", {}))


def test_errors_of_tools_are_results(own):
    made = environment(own, reward=float("nan"))
    tool = lambda name, /, **given: made.ask("tool", name, given, after=[])
    assert tool("add", a=1, b=2).value == "3" and tool("later", name="x").value.startswith("x ")
    assert tool("add", c=1).error.startswith("TypeError: ") and tool("do", what="exits").error == "SystemExit: no"
    assert tool("do", what="loops").error == "TimeoutError: it took more than 0.2 seconds"
    assert tool("later", name="never").error == "TimeoutError: it took more than 0.2 seconds"
    assert tool("do", what="floods").value == "x" * 100 + "\n... and 999,900 more characters"
    child = int(tool("do", what="forks").value)
    assert made.ask("reward", after=[]).error == "ValueError: reward is nan"
    made.close()
    own.start().end()  # messages are read in order, so the first process is killed by now, with its child
    with contextlib.suppress(ProcessLookupError):
        number = os.pidfd_open(child)
        assert select.select([number], [], [], 60)[0]  # it has ended, or is about to
        os.close(number)


def test_a_tool_that_dies_or_clings_costs_its_trajectory_alone(own, monkeypatch):
    monkeypatch.setattr(environments, "GRACE", 0.1)
    dies, clings, other = (environment(own) for _ in range(3))
    for made, what in ((dies, "dies"), (clings, "clings")):
        response = made.ask("tool", "do", {"what": what}, after=[])
        assert response.lost and response.error.startswith("The environment is lost")
        assert made.ask("reward", after=[]).lost
    assert other.ask("reward", after=[]).value == 1.0
    for made in (dies, clings, other):
        made.close()


@pytest.mark.parametrize(
    "code, message",
    [
        ("Own = 1", "own.py has no class Own"),
        ("class Own:\n    def reset(self, record): pass", "the class Own has no method `reward`"),
        ("import nothing", "ModuleNotFoundError: No module named 'nothing'"),
        ("class Own:\n    reset = reward = lambda self: 0\n    def x(self, a: int): pass", "tool x has no docstring"),
        ("class Own:\n    reset = reward = lambda self: 0\n    def x(self, a): 'X.'", "the argument a, which needs"),
        ("class Own:\n    reset = reward = lambda self: 0\n    def x(self, a: bytes): 'X.'", "has no form in JSON"),
    ],
)
def test_refused_classes(tmp_path, code, message):
    (tmp_path / "own.py").write_text(code + "\n")
    with pytest.raises(ValueError, match=message):
        Host(f"{tmp_path / 'own.py'}:Own", 1, 1)


@pytest.mark.parametrize(
    "module, name", [(calculator, "calculator"), (python_, "python"), (guess, "guess"), (search, "search")]
)
def test_built_in_environments(module, name, tmp_path):
    """The chat in which a record is solved earns the reward, with the tools' own results."""
    import random

    draw = random.Random(0)
    search.write(tmp_path)
    with Host(module.__name__.rpartition(".")[2], 20, 1000) as built_in:
        for _ in range(2):
            record = module.record(draw) | {"folder": str(tmp_path)}
            made, chat = Environment(built_in, Journal(None, 0), (0, 0)), module.solved(record)
            assert made.ask("reset", record, 0, 0, after=[]).value == chat[0:1]
            for said, then in zip(chat[1:], [*chat[2:], {"content": None}], strict=True):
                for call in said.get("tool_calls", ()):
                    found = made.ask("tool", call["function"]["name"], call["function"]["arguments"], after=[])
                    assert found.value == then["content"]
                if said["role"] == "assistant" and not said.get("tool_calls"):
                    assert made.ask("reply", said["content"], after=[]).value == then["content"]
            assert made.ask("reward", after=[]).value == 1.0
            made.close()


def test_search(tmp_path):
    """Lines come by their words, rare ones first, and an answer without a number is right if its words are there."""
    (tmp_path / "a.md").write_text("The cat sat.\nA bird.\nThe dog ran.\n")
    with Host("search", 20, 1000) as built_in:
        made = environment(built_in, folder=str(tmp_path), answer="the dog")
        found = made.ask("tool", "search", {"words": "the DOG"}, after=[]).value
        assert json.loads(found) == ["The dog ran.", "The cat sat."]
        assert made.ask("reply", "It was The Dog!", after=[]).value is None and made.ask("reward", after=[]).value == 1
        made.close()
        made = environment(built_in, folder=str(tmp_path / "none"), answer="1")
        assert "has no texts" in made.ask("tool", "search", {"words": "dog"}, after=[]).error
        made.close()


@pytest.mark.thorough
def test_the_tiny_model(tmp_path):
    """Its chats are short, and each digit is a token, also in a call and in a result."""
    tiny_.main(tmp_path)
    model, tokenizer = zoo.load(tmp_path), zoo.tokenizer(tmp_path)
    assert tokenizer.vocab_size <= model.config.vocab_size
    for name, longest in {"calculator": 70, "python": 80, "guess": 30, "search": 60}.items():
        for chat in chats(name, 3, solved=1.0, seed=5):
            ids = tokenizer.encode_marked(tokenizer.render_whole(chat["messages"], chat.get("tools")))[0]
            tokens = [tokenizer.decode([id], special=True) for id in ids]
            assert "".join(tokens) == tokenizer.render(chat["messages"], tools=chat.get("tools"))
            assert len(ids) <= longest
            assert all(len(token) == 1 for token in tokens if any(map(str.isdigit, token)))


def test_the_python_tool_is_confined():
    with Host("python", 20, 1000) as built_in:
        made = environment(built_in, answer="1")
        for code in ("import os; os.fork()", "import socket; socket.create_connection(('127.0.0.1', 9))"):
            assert "PermissionError" in made.ask("tool", "run", {"code": code}, after=[]).value
        made.close()


# ======================================================================================================================
# Chats in tokens.
# ======================================================================================================================


def play(host, tokenizer, record, replies, *, turns=8, past="refuse"):
    """Plays a trajectory in which the model draws these replies."""
    chats = Chats(tokenizer, host.tools, past)
    players = Players(chats, EnvironmentOptions(turns=turns), host, 400)
    at = Trajectory((0, 0), record, Environment(host, Journal(None, 0), (0, 0)))
    at.apply(players.begin(at, (0, 0)))
    for text in replies:
        before = list(at.branches[-1].tokens)
        drawn = [*tokenizer.encode(text, special=False), tokenizer.eos[-1]]
        at.completion = Completion(drawn, [-1.0] * len(drawn), ended=True, finished=True, prompt=before)
        at.turns += 1
        move = players.answer(at, at.completion)
        at.apply(move)
        went_on = at.branches[-2 if move.anew else -1].tokens
        assert went_on[: len(before) + len(drawn)] == before + drawn
    at.environment.close()
    return at


def test_a_trajectory_with_a_tool():
    """The calculator's question, a call, its result, and an answer: each prompt begins with the tokens before it."""
    tokenizer = zoo.tokenizer("tiny", chat_template=str(TOOLS))
    replies = (
        'I see. <tool_call>\n{"name":  "calculate", "arguments": {"expression": "12*34"}}\n</tool_call>',
        '<tool_call>{"name": "divide", "arguments": {}}</tool_call>',
        "It is 408.",
    )
    with Host("calculator", 20, 1000) as built_in:
        at = play(built_in, tokenizer, {"prompt": "What is 12 * 34?", "answer": "408"}, replies)
    assert at.last.end == "done" and at.last.reward == 1.0 and len(at.branches) == 1
    assert [m["content"] for m in at.messages if m["role"] == "tool"] == [
        "408", "Error: there is no tool 'divide'; there are calculate."
    ]  # fmt: skip
    assert sum(m.calls for m in at.moves) == 2 and sum(m.errors for m in at.moves) == 1
    learnt = [t for t, p in zip(at.branches[0].tokens, at.branches[0].logprobs, strict=True) if p is not None]
    end = tokenizer.decode([tokenizer.eos[1]], special=True)
    assert tokenizer.decode(learnt, special=True) == end.join([*replies, ""])
    whole = tokenizer.decode(at.branches[0].tokens, special=True)
    assert "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n408\n</tool_response><|im_end|>" in whole
    rows = packed(trajectories._texts([at], np.array([[0.5]]), False), 1, tokenizer)
    assert rows["loss_mask"].sum() == len(learnt) and (rows["targets"][rows["loss_mask"] == 1] == learnt).all()
    assert (rows["old"][rows["loss_mask"] == 1] == -1).all() and not rows["old"][rows["loss_mask"] == 0].any()


def test_a_template_that_rewrites_the_past(folder):
    tokenizer = zoo.tokenizer(folder / "model", chat_template=str(folder / "forgets.jinja"))
    asked, reply = {"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}
    split, refuse = (Chats(tokenizer, None, past) for past in ("split", "refuse"))
    text, _ = split.first([asked])
    whole, ids, anew = split.following(text, [asked, reply], [asked], 63)
    assert anew and whole == "u b<end>a x<end>u b<end>a " and tokenizer.decode(ids, special=True) == whole
    with pytest.raises(ValueError, match=r"writes turns of the past anew.*--past split"):
        refuse.following(text, [asked, reply], [asked], 63)


def test_a_function_that_calls_tools(folder):
    """A chat that a function goes on with keeps the tokens, also where another library has written its messages."""
    tokenizer = zoo.tokenizer("tiny", chat_template=str(TOOLS))
    call = '<tool_call>\n{"name":  "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    with Host(f"{folder / 'functions.py'}:calls", 20, 1000) as host:
        at = play(host, tokenizer, {"prompt": "2 + 3?", "answer": "5"}, [call, call, "5"])
        assert [tool["function"]["name"] for tool in host.tools] == ["add"]
        assert host.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    assert at.last.end == "done" and at.last.reward == 1.0 and not at.last.problem and len(at.branches) == 1


def test_limits_and_errors_of_functions(folder):
    """At a limit the function is cancelled; it may return a reward all the same."""
    tokenizer = zoo.tokenizer(folder / "model")
    with Host(f"{folder / 'functions.py'}:limited", 20, 1000) as host:
        played = [({}, "ab"), ({"sure": 1}, "ab"), ({"bad": 1}, "a")]
        last = [play(host, tokenizer, record, replies, turns=2).last for record, replies in played]
    ends = [(each.end, each.reward, each.problem) for each in last]
    assert ends == [("turns", 0.0, ""), ("turns", 0.5, ""), ("done", 0.0, "the function raises ValueError: bad")]
    with Host(f"{folder / 'functions.py'}:idle", 20, 1000) as host:
        assert play(host, tokenizer, {}, []).last.problem.endswith("the function ended before it called generate")
    with pytest.raises(ValueError, match="the function plain is not `async def`"):
        Host(f"{folder / 'functions.py'}:plain", 20, 1000)


def test_a_function_goes_on_from_the_journal(folder, tmp_path):
    """A function that was killed between two replies is brought to where it was, and goes on."""
    replies = [{"role": "assistant", "content": content} for content in ("abc", "efg", "aeiou")]

    def ask(count):
        with (
            Host(f"{folder / 'functions.py'}:rollout", 20, 1000) as host,
            contextlib.closing(Journal(tmp_path, 0)) as journal,
            contextlib.closing(Environment(host, journal, (0, 0))) as made,
        ):
            found = [made.ask("reset", {"prompt": "x"}, 1, 2, after=[])]
            found += [made.ask("resume", reply, after=n) for n, reply in enumerate(replies[:count])]
            return [response.value for response in (*found, made.ask("reward", after=count))]

    begun, whole = ask(2), ask(3)
    assert begun[:3] == whole[:3] and begun[3] == 0 and whole[3:] == [None, 0.5]
    assert whole[1]["new"] == [{"role": "user", "content": "more abc"}] and not whole[1]["other"]
    assert whole[2] == {"new": [{"role": "user", "content": "judge efg"}], "other": True}


VERIFIERS = """
import json

class Sums:
    tool_defs = [{"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}]

    async def run_rollout(self, record, client, model, sampling):
        chat = record["prompt"]
        while True:
            found = await client.get_native_response(chat, model, sampling, tools=self.tool_defs)
            message = found.choices[0].message
            chat = [*chat, message.model_dump()]
            if not message.tool_calls:
                return {"reward": float(record["answer"] in message.content)}
            for call in message.tool_calls:
                result = str(sum(json.loads(call.function.arguments).values()))
                chat.append({"role": "tool", "tool_call_id": call.id, "content": result})

def load_environment(name):
    return Sums()
"""
CLIENTS = """
class OpenAIChatCompletionsClient:
    def __init__(self, client):
        self.client = client
"""
OPENENV = """
import types

class GenericEnvClient:
    def __init__(self, base_url):
        self.steps, self.url = 0, base_url

    async def reset(self):
        return types.SimpleNamespace(observation={"echoed_message": self.url}, reward=None, done=False)

    async def step(self, action):
        self.steps += 1
        seen = {"echoed_message": action["message"]}
        return types.SimpleNamespace(observation=seen, reward=len(action["message"]), done=self.steps == 2)
"""


def test_environments_of_other_libraries(folder, tmp_path, monkeypatch):
    """The page's examples play environments of verifiers and of OpenEnv, for which small modules stand in."""
    pytest.importorskip("openai")
    stand_ins = {
        "verifiers/__init__.py": VERIFIERS,
        "verifiers/clients.py": CLIENTS,
        "openenv/core.py": OPENENV,
    }
    for name, code in (files(ROOT / "docs" / "agents.md") | stand_ins).items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    record = {"prompt": [{"role": "user", "content": "2 + 3?"}], "answer": "5"}
    with Host(f"{tmp_path / 'of_verifiers.py'}:rollout", 20, 1000) as host:
        at = play(host, zoo.tokenizer("tiny", chat_template=str(TOOLS)), record, [call, "It is 5."])
        assert [tool["function"]["name"] for tool in host.tools] == ["add"]
    assert at.last == at.last._replace(end="done", reward=1.0, problem="") and len(at.branches) == 1
    assert [m["content"] for m in at.messages if m["role"] == "tool"] == ["5"]
    with Host(f"{tmp_path / 'of_openenv.py'}:Remote", 20, 1000) as host:
        at = play(host, zoo.tokenizer(folder / "model"), {"url": "abc"}, ["de", "fgh"])
    assert at.last.end == "done" and at.last.reward == 5.0
    assert [m["content"] for m in at.messages] == ["abc", "de", "de", "fgh"]


def test_templates_without_tools_are_refused(folder):
    tools = [{"type": "function", "function": {"name": "add"}}]
    with pytest.raises(ValueError, match="in no form that is known"):
        Chats(zoo.tokenizer(folder / "model"), tools, "split")


# ======================================================================================================================
# Rollouts.
# ======================================================================================================================


class Backwards(concurrent.futures.ThreadPoolExecutor):
    """Runs what waits only when a result is needed, the last first."""

    def submit(self, function, *arguments):
        self.waiting = [*getattr(self, "waiting", ()), (future := concurrent.futures.Future(), function, arguments)]
        future.result = lambda: self.run() or concurrent.futures.Future.result(future)
        return future

    def run(self):
        for future, function, arguments in reversed(self.waiting):
            future.set_result(function(*arguments))
        self.waiting = []


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder / "model", dtype="float32")


@pytest.fixture
def sample(folder, model):
    """Returns a function that samples a step of the game, with a template and the folder of a run."""
    o = grpo.GRPOOptions.of(environment="game", prompts=4, group=4, max_new_tokens=40, temperature=30.0)
    o = o.changed(rollout_batch=8, turns=4)
    records = [json.loads(line) for line in (folder / "data.jsonl").read_text().splitlines()]
    mesh = make_mesh("fsdp=1", jax.devices()[:1])

    def sample(template=None, run=None, name="game.py:Game", redraws=0, credit="trajectory"):
        tokenizer = zoo.tokenizer(folder / "model", chat_template=template)
        with Host(f"{folder / name}", 20, 100) as game, jax.set_mesh(mesh):
            return trajectories.rollout(
                model, records, 3, run, host=game, chats=Chats(tokenizer, game.tools, "split"),
                environment=o.environments.changed(credit=credit),
                options=dataclasses.replace(o.rollouts, redraws=redraws), rewards=o.rewards, mesh=mesh, rows=2,
                seq_len=150,
                dtype="float32", seed=0,
            )  # fmt: skip

    return sample


def equal(a, b):
    return all((x[name] == y[name]).all() for x, y in zip(a, b, strict=True) for name in x)


@pytest.mark.thorough
def test_rollouts(folder, model, sample, monkeypatch):
    """Texts hold what the model saw, their targets what it drew, with its own log-probabilities; and they are the same
    whichever answer comes first.
    """
    (rows,), numbers, samples = sample()
    tokenizer, drawn = zoo.tokenizer(folder / "model"), rows["loss_mask"] == 1
    texts = [text for _, text in documents(rows)]
    assert len(texts) == 16 and len(rows["tokens"]) == 2 and numbers["branches"] == 1
    several = 0
    for each in texts:
        text = tokenizer.decode([*each["tokens"], each["targets"][-1]], special=True)
        turns = text.split("a ", 1)[1]
        learnt = tokenizer.decode(each["targets"][each["loss_mask"] == 1], special=True)
        assert text.startswith("u ") and learnt.count("<end>") + (not learnt.endswith("<end>")) >= 1
        several += learnt.count("<end>") > 1
        for answer in learnt.split("<end>")[:-1]:
            assert f"a {answer}<end>" in text and (not turns.endswith(f"{answer}<end>") or answer in turns)
    assert several > 1 and 1 < numbers["turns"] <= 3 and numbers["truncated"] + numbers["ended"] == 1
    assert numbers["reward"] > 0 and len({each["end"] for each in samples} - {"done", "length"}) == 0

    def logps(model):
        x, _ = features(model, {name: jnp.asarray(rows[name]) for name in ("tokens", "segments", "positions")})
        return loss.logprobs(lambda x: model.unembed(x).astype("float32") / 30.0, x, jnp.asarray(rows["targets"]))[0]

    with jax.set_mesh(make_mesh("fsdp=1", jax.devices()[:1])):
        close(np.asarray(jax.jit(logps)(model))[drawn], rows["old"][drawn], terms=MODEL)
    with monkeypatch.context() as patch:
        patch.setattr(concurrent.futures, "ThreadPoolExecutor", Backwards)
        assert equal([rows], sample().batches)


@pytest.mark.thorough
def test_rewards_of_turns(folder, sample):
    """With --credit turn each turn has its own advantage, by its own and later rewards of its prompt's trajectories."""
    tokenizer = zoo.tokenizer(folder / "model")
    (rows,), numbers, _ = sample(name="game.py:Scored", credit="turn")
    of_all = [text for _, text in documents(sample(name="game.py:Scored").batches[0])]
    groups, total = collections.defaultdict(list), 0.0
    for (_, text), other in zip(documents(rows), of_all, strict=True):
        places = np.flatnonzero(text["loss_mask"])
        turns = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        said = [tokenizer.decode(text["targets"][turn]) for turn in turns]
        earned = np.array([len(answer) / 10 for answer in said])
        earned[-1] += sum(letter in "aeiou" for answer in said for letter in answer) / 10
        total += earned.sum()
        groups[tuple(text["tokens"][: places[0] + 1])].append((earned, [text["advantages"][turn] for turn in turns]))
        assert len({*other["advantages"][places]}) == 1
    assert {*map(len, groups.values())} == {4}
    close(numbers["reward"], total / 16, terms=50)
    for group in groups.values():
        earned, present = np.zeros((4, 4), np.float32), np.zeros((4, 4), bool)
        for row, (each, _) in enumerate(group):
            earned[row, : len(each)], present[row, : len(each)] = each, True
        wanted = np.asarray(loss.turn_advantages(jnp.asarray(earned), jnp.asarray(present)))
        for row, (_, found) in enumerate(group):
            for turn, advantages in enumerate(found):
                close(advantages, wanted[row, turn], terms=50)


@pytest.mark.thorough
def test_split_trajectories(folder, sample):
    """Where the template rewrites the past, each turn is a text, and its trajectory's advantage is theirs."""
    (rows,), numbers, _ = sample(str(folder / "forgets.jinja"))
    texts = [text for _, text in documents(rows)]
    assert numbers["branches"] > 1 and len(texts) == round(numbers["branches"] * 16)
    assert all(np.abs(np.diff(text["loss_mask"])).sum() <= 2 for text in texts), "the targets of a text are one turn"


@pytest.mark.thorough
def test_functions(folder, sample, monkeypatch):
    """A function's two chats are two texts, with the same advantage; the first has two turns."""
    (rows,), numbers, samples = sample(name="functions.py:rollout")
    texts = [text for _, text in documents(rows)]
    assert numbers["branches"] > 1 and len(texts) == round(numbers["branches"] * 16)
    tokenizer, turns = zoo.tokenizer(folder / "model"), []
    for each in texts:
        drawn = each["loss_mask"] == 1
        text = tokenizer.decode([*each["tokens"], each["targets"][-1]], special=True)
        turns.append((np.diff(drawn.astype(int), prepend=0) == 1).sum())
        assert turns[-1] == (1 if text.startswith("u judge") else 1 + ("<end>u more" in text)) and drawn.any()
    assert {*turns} == {1, 2} and {each["end"] for each in samples} <= {"done", "length"}
    monkeypatch.setattr(concurrent.futures, "ThreadPoolExecutor", Backwards)
    assert equal([rows], sample(name="functions.py:rollout").batches)


def test_evaluations_draw_no_group_again(sample, tmp_path, monkeypatch):
    drawn = []

    def play(engine, groups, *_):
        drawn.append(len(groups))
        for each in itertools.chain(*groups):
            each.apply(Move([], tokens=[1], anew=True))
            each.completion = Completion([2], [-1.0], ended=True, finished=True)
            each.apply(Move([], end="done", reward=1.0))

    monkeypatch.setattr(trajectories, "_play", play)
    assert sample(run=tmp_path, redraws=2).numbers["without_signal"] == 1 and drawn == [4, 4, 4]
    assert "without_signal" not in sample(redraws=2).numbers and drawn == [4, 4, 4, 4]


@pytest.mark.thorough
def test_the_journal(folder, sample, tmp_path, monkeypatch):
    """A step that is killed goes on with the answers that it has had, although its environment answers otherwise."""
    monkeypatch.setenv("RANDOM", "1")
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    (tmp_path / "journal").mkdir()
    for step in (2, 3):
        (tmp_path / "journal" / f"{step:06}.jsonl").write_text("")
    whole = sample(run=tmp_path)
    assert not (tmp_path / "journal" / "000002.jsonl").exists(), "no checkpoint needs it any longer"
    path = tmp_path / "journal" / "000003.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    assert equal(whole.batches, sample(run=tmp_path).batches) and not (tmp_path / "calls").exists()
    kept = len(lines) // 2
    path.write_text("".join(lines[:kept]) + lines[kept][:-9])
    again = sample(run=tmp_path)
    assert (tmp_path / "calls").exists() and not equal(whole.batches, again.batches)
    assert set(lines[:kept]) <= set(path.read_text().splitlines(keepends=True))
    assert equal(again.batches, sample(run=tmp_path).batches)


def test_nothing_begins(folder, sample, monkeypatch):
    monkeypatch.setattr(Players, "begin", lambda *_: Move([], end="lost", problem="no luck"))
    with pytest.raises(ValueError, match="no trajectory has begun: no luck"):
        sample()


# ======================================================================================================================
# The script.
# ======================================================================================================================


def arguments(folder, out, *more):
    usual = {
        "model": folder / "model", "data": folder / "data.jsonl", "environment": f"{folder / 'game.py'}:Game",
        "prompts": 2, "group": 2, "max-new-tokens": 30, "seq-len": 128, "temperature": 30, "lr": 0.01, "out": out,
    }  # fmt: skip
    return [str(word) for name, value in usual.items() for word in (f"--{name}", value)] + [str(word) for word in more]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.thorough
def test_the_script(folder, tmp_path):
    """The script trains on trajectories, and samples.jsonl has some."""
    more = [
        "--steps",
        2,
        "--hold-out",
        0.5,
        "--eval-every",
        2,
        "--sample-every",
        2,
        "--loss",
        "grpo",
        "--turns",
        2,
        "--redraws",
        1,
    ]
    command("train.grpo", *arguments(folder, tmp_path / "run", *more))
    lines = lines_of(tmp_path / "run" / "metrics.jsonl")
    assert [line["step"] for line in lines if "turns" in line] == [1, 2]
    assert all(1 <= line["turns"] <= 2 and line["drift"] < 1e-2 for line in lines if "turns" in line)
    assert lines[-1]["validation_turns"] >= 1 and 0 <= lines[-1]["without_signal"] <= 1
    samples = lines_of(tmp_path / "run" / "samples.jsonl")
    assert {each["step"] for each in samples} == {2} and samples[0]["messages"][0]["role"] == "user"
    assert "messages" not in (tmp_path / "run" / "report.html").read_text()
    with pytest.raises(SystemExit, match="gives the reward itself; leave out --reward"):
        command("train.grpo", *arguments(folder, tmp_path / "run", "--reward", "exact"))


def numbers(out):
    lines = lines_of(out / "metrics.jsonl")
    return [{k: v for k, v in line.items() if "second" not in k and "memory" not in k} for line in lines]


@pytest.mark.thorough
@pytest.mark.parametrize("more", [["--steps", 2], ["--steps", 3, "--one-step-off"]])
def test_a_run_that_fails_anywhere_goes_on_to_the_same_numbers(folder, tmp_path, monkeypatch, more):
    """A run that fails at any answer of an environment goes on with the same tokens, rewards and losses."""
    script = lambda out: command("train.grpo", *arguments(folder, out, *more, "--save-every", 1))
    script(tmp_path / "whole")
    whole, put = numbers(tmp_path / "whole"), Journal.put
    answers = sum(len(lines_of(path)) for path in (tmp_path / "whole" / "journal").iterdir())
    for trial in range(count := trials(4, 20, 20)):
        left = itertools.count(answers * trial // count, -1)

        def fail(journal, key, response, left=left):
            put(journal, key, response)
            if next(left) == 0:
                raise ZeroDivisionError

        with monkeypatch.context() as patch, pytest.raises((ZeroDivisionError, SystemExit)):
            patch.setattr(Journal, "put", fail)
            script(tmp_path / f"failed{trial}")
        script(tmp_path / f"failed{trial}")
        assert numbers(tmp_path / f"failed{trial}") == whole


# A run that is killed when a rollout of the next step is written and no checkpoint needs it yet.
WRITTEN = """
import os, runpy
from train.run import batches
write = batches._write
batches._write = lambda *what: (write(*what), os.kill(os.getpid(), 9))
runpy.run_module("train.grpo", run_name="__main__", alter_sys=True)
"""


@pytest.mark.thorough
def test_a_killed_run_goes_on_to_the_same_numbers(folder, tmp_path):
    """A run one step off that is killed by SIGKILL in its first rollout, in the second, beside an update, and after
    that, goes on with the same samples, rewards and losses.
    """
    more = ["--steps", 3, "--save-every", 1, "--sample-every", 1, "--one-step-off"]

    def script(out, *, after=0, start=("-m", "train.grpo")):
        """Returns the exit code of a run that its environment kills after a number of answers; 0: not at all."""
        count = out.with_suffix(".count")
        count.touch()
        kill = {"COUNT": str(count), "KILL": str(after and count.stat().st_size + after)}
        words = [sys.executable, *start, *arguments(folder, out, *more)]
        return subprocess.run(words, env=hurry.environment() | kill, cwd=ROOT, capture_output=True).returncode

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    assert script(whole) == 0
    half = whole.with_suffix(".count").stat().st_size // 2
    assert script(killed, after=1) == -signal.SIGKILL
    assert script(killed, after=half) == -signal.SIGKILL
    assert (killed / "journal" / "000001.jsonl").exists() and not (killed / "ahead").exists(), "in the second rollout"
    assert script(killed, start=("-c", WRITTEN)) == -signal.SIGKILL
    assert (killed / "ahead" / "000001.npz").exists() and script(killed) == 0
    assert numbers(killed) == numbers(whole)
    assert lines_of(killed / "samples.jsonl") == lines_of(whole / "samples.jsonl")
