"""The server, over HTTP on this machine: replies against `zoo.generate`, log-probabilities against the plain forward
pass, events, concurrent requests, clients that leave, and all refusals.
"""

import asyncio
import concurrent.futures
import contextlib
import http.client
import json
import logging
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import types
import unittest.mock

import equinox as eqx
import h11
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.zoo.programs import MODEL, forward
from tests.zoo.test_templates import ENDLESS
from zoo.generation.engine import Engine
from zoo.generation.generate import continuation
from zoo.generation.sampling import Sampling
from zoo.mesh import make_mesh
from zoo.serve import ListenOptions, serve
from zoo.serve.listen import Listener, Timely
from zoo.serve.metrics import BOUNDS, GAUGES, Metrics
from zoo.serve.reply import Ask, Reply, Token
from zoo.serve.served import Served
from zoo.serve.server import PAGE, STRIDE, Server
from zoo.serve.worker import Worker
from zoo.text import templates


ROOT = pathlib.Path(__file__).parents[2]
PROMPT = "textwrap.dedent(text)\n\n"
MESSAGES = [{"role": "user", "content": "What does textwrap.dedent do?"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"a": {"type": "integer"}}}}}
NEW, ROOM = 16, 256  # tokens of most replies, and of a row; few numbers, so that little is compiled
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def model():
    return zoo.load("tiny", dtype="float32")  # two shapes of one computation agree to the token


@pytest.fixture(scope="module")
def tokenizer():
    return zoo.tokenizer("tiny")


class Announced(Listener):
    """A listener that reports when it has started, or cannot."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.tried = threading.Event()

    async def startup(self, sockets=None):
        try:
            await super().startup(sockets)
        finally:
            self.tried.set()


class Running:
    """A running server on a port of its own."""

    def __init__(self, model, tokenizer, grace=30.0, listening=None, max_tokens=512, others=(), **options):
        served = [Served("tiny", model, tokenizer), *others]
        self.server = Server(served, batch=4, max_tokens=max_tokens, **options)
        listening = {"log_level": "critical"} | (listening or {})
        self.uvicorn = Announced(self.server, host="127.0.0.1", port=0, grace=grace, **listening)
        self.thread = threading.Thread(target=self.uvicorn.run)

    def __enter__(self):
        self.thread.start()
        self.uvicorn.tried.wait()
        assert self.uvicorn.started
        self.port = self.uvicorn.servers[0].sockets[0].getsockname()[1]
        return self

    def __exit__(self, *_):
        self.uvicorn.should_exit = True
        self.thread.join()
        assert not self.server.worker.is_alive()

    def request(self, path, body=None, **headers):
        """Returns status and body."""
        headers = {"Content-Type": "application/json"} | headers
        with contextlib.closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)) as connection:
            body = body if body is None or isinstance(body, bytes) else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, body, headers)
            response = connection.getresponse()
            return response.status, response.read().decode()

    def exchange(self, sent):
        """Returns everything that the server sends before it closes the connection."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60) as connection:
            connection.sendall(sent)
            return b"".join(iter(lambda: connection.recv(4096), b""))

    def ask(self, path, **body):
        status, answer = self.request(path, body)
        assert status == 200, answer
        return json.loads(answer)

    def events(self, path, **body):
        status, answer = self.request(path, body | {"stream": True})
        *events, done, rest = answer.split("\n\n")
        assert (status, done, rest) == (200, "data: [DONE]", "")
        return [json.loads(event.removeprefix("data: ")) for event in events]


@pytest.fixture(scope="module")
def running(model, tokenizer):
    with Running(model, tokenizer, max_tokens=ROOM) as running:
        yield running


def greedy(model, tokenizer, prompt, new=NEW):
    """Returns the text of `zoo.generate`, with as many and as long rows as the server's, which so share programs."""
    ids = tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
    engine = Engine(model, batch=4, max_tokens=ROOM, stops=tokenizer.eos, stride=STRIDE)
    (completion,) = engine.submit(ids, Sampling(max_new_tokens=new))
    while not engine.idle:
        engine.step()
    return continuation(tokenizer, ids, completion)


@pytest.fixture
def arrived(monkeypatch):
    """Returns a semaphore that is released for each request as soon as its replies are in the worker's inbox."""
    write, arrived = Worker.write, threading.Semaphore(0)

    async def noted(self, replies):
        async with contextlib.aclosing(write(self, replies)) as pieces:
            asyncio.get_running_loop().call_soon(arrived.release)  # runs when this first waits
            async for piece in pieces:
                yield piece

    monkeypatch.setattr(Worker, "write", noted)
    return arrived


def test_models(running):
    (model,) = json.loads(running.request("/v1/models")[1])["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("tiny", "model", ROOM)
    assert json.loads(running.request("/v1/models/tiny")[1]) == model
    assert running.request("/v1/models/org/other")[0] == 404


def test_health_metrics_and_page(model, tokenizer):
    """Anybody may ask for the page and the health, and who has the key for counts, which are Prometheus's."""
    with Running(model, tokenizer, max_tokens=ROOM, api_key="sesame") as running:
        assert running.request("/health") == (200, '{"status":"ok"}')
        status, page = running.request("/")
        assert status == 200 and page == PAGE and "http:" not in page and "https:" not in page
        assert running.request("/metrics")[0] == 401
        key = {"Authorization": "Bearer sesame"}
        body = {"prompt": PROMPT, "max_tokens": NEW, "n": 2, "temperature": 0}
        assert running.request(COMPLETIONS, body, **key)[0] == 200
        status, text = running.request("/metrics", **key)
        running.server.worker.is_alive = lambda: False
        assert running.request("/health")[0] == 503
        del running.server.worker.is_alive
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    ids = len(tokenizer.encode(PROMPT))
    for name, want in (
        (f'zoo_requests_total{{path="{COMPLETIONS}",status="200"}}', 1),
        ('zoo_requests_total{path="/",status="200"}', 1),
        ('zoo_requests_total{path="/metrics",status="401"}', 1), ('zoo_prompt_tokens_total{model="tiny"}', ids),
        ('zoo_generated_tokens_total{model="tiny"}', 2 * NEW), ('zoo_replies_total{model="tiny",reason="length"}', 2),
        ("zoo_replies_running", 0), ("zoo_replies_waiting", 0), ("zoo_first_token_seconds_count", 2),
        ("zoo_token_gap_seconds_count", 2 * (NEW // STRIDE - 1)), ('zoo_reply_seconds_bucket{le="+Inf"}', 2),
    ):  # fmt: skip
        assert float(lines[name]) == want, (name, text)
    counts = [float(lines[f'zoo_reply_seconds_bucket{{le="{bound}"}}']) for bound in BOUNDS]
    assert counts == sorted(counts) and float(lines["zoo_reply_seconds_sum"]) > 0


@pytest.mark.thorough
def test_prompts_that_begin_alike(model, tokenizer):
    """A chunk of a prompt is read once, and the replies are as without that."""
    texts = [PROMPT * 5 + more for more in ("import os", "import re")]
    with Running(model, tokenizer, max_tokens=ROOM, chunk=16) as running:
        body = {"max_tokens": NEW, "temperature": 0}
        said = [running.ask(COMPLETIONS, prompt=text, **body)["choices"][0]["text"] for text in texts]
        counts = running.request("/metrics")[1]
    assert said == [greedy(model, tokenizer, text) for text in texts]
    (found,) = re.findall(r'zoo_prompt_tokens_found_total{model="tiny"} (.*)', counts)
    assert int(found) == len(tokenizer.encode(PROMPT * 5)) // 16 * 16


def test_labels_are_escaped():
    metrics = Metrics()
    metrics.add("zoo_replies_total", model='a"b\\c\n')
    assert r'zoo_replies_total{model="a\"b\\c\n"} 1' in metrics.text({name: 0 for name in GAUGES})


def test_completions(running, model, tokenizer):
    """Completions of a text, of its ids, and of several are right, whole and in events."""
    want = greedy(model, tokenizer, PROMPT)
    ids = tokenizer.encode(PROMPT)
    asked = {"model": "tiny", "max_tokens": NEW, "temperature": 0}
    for prompt in PROMPT, [PROMPT], ids, [ids]:
        answer = running.ask(COMPLETIONS, prompt=prompt, **asked)
        assert answer["object"] == "text_completion" and answer["model"] == "tiny" and answer["id"].startswith("cmpl-")
        assert answer["choices"] == [{"index": 0, "text": want, "finish_reason": "length", "logprobs": None}]
        assert answer["usage"] == {
            "prompt_tokens": len(ids), "completion_tokens": NEW, "total_tokens": len(ids) + NEW
        }  # fmt: skip
    two = running.ask(COMPLETIONS, prompt=["import os", PROMPT], echo=True, **asked)
    assert [choice["index"] for choice in two["choices"]] == [0, 1] and two["usage"]["completion_tokens"] == 2 * NEW
    assert two["choices"][0]["text"] == "import os" + greedy(model, tokenizer, "import os")
    assert two["choices"][1]["text"] == PROMPT + want

    *events, last = running.events(
        COMPLETIONS, prompt=PROMPT, echo=True, stream_options={"include_usage": True}, **asked
    )
    assert len(events) > 3 and len({event["id"] for event in events}) == 1
    assert "".join(event["choices"][0]["text"] for event in events) == PROMPT + want
    assert [event["choices"][0]["finish_reason"] for event in events] == [None] * (len(events) - 1) + ["length"]
    assert all(event["usage"] is None for event in events)
    assert last["choices"] == [] and last["usage"]["total_tokens"] == len(ids) + NEW


def test_chat(running, model, tokenizer):
    ids = tokenizer.encode(tokenizer.render(MESSAGES, add_generation_prompt=True), special=False)
    want = greedy(model, tokenizer, ids)
    asked = {"messages": MESSAGES, "max_completion_tokens": NEW, "temperature": 0}
    answer = running.ask(CHAT, **asked)
    assert answer["object"] == "chat.completion" and answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": want}
    parts = [
        {"role": "user", "content": [{"type": "text", "text": text} for text in ("What does ", "textwrap.dedent do?")]}
    ]
    assert running.ask(CHAT, **asked | {"messages": parts})["choices"] == answer["choices"]

    first, *events = running.events(CHAT, **asked)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert first["object"] == "chat.completion.chunk" and "usage" not in first
    assert "".join(event["choices"][0]["delta"]["content"] for event in events) == want
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_template_variables_tools_and_calls(tmp_path, model, tokenizer):
    """Tools, and vLLM's chat_template_kwargs, reach the template; the arguments of calls reach it as objects."""
    folder = shutil.copytree(tokenizer.folder, tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(
        "{{ messages[0].content }} {{ tools[0].function.name }} {{ mood }} "
        "{{ messages[1].tool_calls[0].function.arguments.a + 1 }}"
    )
    tokenizer = zoo.tokenizer(folder)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 41}'}}
    body = {
        "messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [call]}],
        "tools": [ADD],
        "chat_template_kwargs": {"mood": "glad"},
        "max_tokens": NEW,
        "temperature": 0,
    }
    with Running(model, tokenizer, max_tokens=ROOM) as running:
        written = running.ask(CHAT, **body)["choices"][0]["message"]["content"]
        assert written == greedy(model, tokenizer, f"{MESSAGES[0]['content']} add glad 42")
        call["function"]["arguments"] = "{"
        status, answer = running.request(CHAT, body)
        call["function"]["arguments"] = "{}"
        critic = {"role": "critic", "content": "a"}
        dropped = [
            running.request(CHAT, body | {"messages": [MESSAGES[0], second, critic]})
            for second in (
                critic,
                {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
            )
        ]
    assert status == 400 and "tool_calls that can't be read" in json.loads(answer)["error"]["message"]
    assert [code for code, _ in dropped] == [400, 400]
    assert "leaves out the content of message 3, by 'critic'" in json.loads(dropped[1][1])["error"]["message"]


WRITES = """{{ messages[0].content }}{% if tools %} {{ tools | tojson }}{% endif %}{# <tool_call> </think> #}
{%- if think %}<think>{% endif %}{% if reasoning_effort %}effort: {{ reasoning_effort }}{% endif %}"""


@pytest.fixture
def written(tmp_path, model, tokenizer, monkeypatch):
    """Returns a running server whose template has calls and reasoning, and whose model writes `text`."""
    folder = shutil.copytree(tokenizer.folder, tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(WRITES)
    tokenizer = zoo.tokenizer(folder)
    with Running(model, tokenizer, max_tokens=ROOM) as running:

        async def write(replies):
            for reply in replies:
                running.prompt = tokenizer.decode(reply.ask.prompt)
                ids = [*tokenizer.encode(running.text), *tokenizer.eos]
                for start in range(0, len(ids), STRIDE):
                    new = ids[start : start + STRIDE]
                    gain = reply.push([Token(id, 0.0, {}) for id in new])
                    yield reply, gain, reply.finish
                    if reply.finish:
                        break

        monkeypatch.setattr(running.server.worker, "write", write)
        yield running


def joined(events, index=0):
    """Returns the message that the events of a stream add up to, as OpenAI's client adds them, and its finish."""
    message, finish = {"content": "", "reasoning_content": "", "tool_calls": []}, None
    for choice in (event["choices"][0] for event in events if event["choices"][0]["index"] == index):
        for field in "content", "reasoning_content":
            message[field] += choice["delta"].get(field) or ""
        for call in choice["delta"].get("tool_calls", ()):
            assert call.pop("index") == len(message["tool_calls"])
            message["tool_calls"].append(call)
        finish = choice["finish_reason"] or finish
    return message, finish


def test_calls_of_tools(written):
    """Calls and reasoning come apart, whole and in events, and what is no call stays text."""
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 41}}\n</tool_call>'
    body = {"messages": MESSAGES, "tools": [ADD], "max_tokens": 150, "n": 2}
    written.text = f"<think>\nAdd.\n</think>\n\nI add.\n{call}\n{call}"
    functions = [{"name": "add", "arguments": '{"a": 41}'}] * 2
    for choice in written.ask(CHAT, **body)["choices"]:
        message = choice["message"]
        assert (message["content"], message["reasoning_content"], choice["finish_reason"]) == (
            "I add.",
            "Add.",
            "tool_calls",
        )
        assert [call["function"] for call in message["tool_calls"]] == functions
        assert len({call["id"] for call in message["tool_calls"] if len(call["id"]) == 9}) == 2
    assert '"add"' in written.prompt
    events = written.events(CHAT, **body)
    for index in range(2):
        message, finish = joined(events, index)
        assert (message["content"], message["reasoning_content"], finish) == ("I add.", "Add.", "tool_calls")
        assert [call["function"] for call in message["tool_calls"]] == functions

    one = written.ask(CHAT, **body, parallel_tool_calls=False)["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1 and one["finish_reason"] == "tool_calls"
    none = written.ask(CHAT, **body, tool_choice="none")["choices"][0]
    assert none["message"]["content"] == f"I add.\n{call}\n{call}" and none["finish_reason"] == "stop"
    assert "tool_calls" not in none["message"] and '"add"' not in written.prompt

    written.text = call
    assert written.ask(CHAT, **body)["choices"][0]["message"]["content"] is None
    written.text = wrong = call.replace("add", 'a"d')
    (message, finish), whole = joined(written.events(CHAT, **body)), written.ask(CHAT, **body)["choices"][0]
    assert message["content"] == whole["message"]["content"] == wrong and finish == whole["finish_reason"] == "stop"


def test_replies_that_must_be_calls(written):
    """The prompt ends with the beginning of a call, of any function or of one."""
    body = {"messages": MESSAGES, "tools": [ADD], "max_tokens": 100}
    for choice, begun, text in (
        ("required", '{"name": "', 'add", "arguments": {"a": 41}}\n</tool_call>'),
        (
            {"type": "function", "function": {"name": "add"}},
            '{"name": "add", "arguments":',
            ' {"a": 41}}\n</tool_call>',
        ),
    ):
        for think, closed in (False, ""), (True, "<think>\n</think>\n\n"):
            written.text = text
            answer = written.ask(CHAT, **body, tool_choice=choice, chat_template_kwargs={"think": think})["choices"][0]
            assert written.prompt.endswith(f"{closed}<tool_call>\n{begun}") and answer["finish_reason"] == "tool_calls"
            assert [call["function"]["arguments"] for call in answer["message"]["tool_calls"]] == ['{"a": 41}']
    written.text = "4"
    assert (
        written.ask(CHAT, messages=MESSAGES, max_tokens=9, reasoning_effort="low")["choices"][0]["message"]["content"]
        == "4"
    )
    assert written.prompt.endswith("effort: low")
    other = {"type": "function", "function": {"name": "other"}}
    status, answer = written.request(CHAT, body | {"tool_choice": other})
    assert status == 400 and "names 'other', which is not among the tools" in answer


def test_calls_in_older_templates(tmp_path, model, tokenizer):
    """DeepSeek's templates join arguments as text, and a content that must be there."""
    folder = shutil.copytree(tokenizer.folder, tmp_path / "tiny")
    (folder / "chat_template.jinja").write_text(
        "{% set call = messages[1].tool_calls[0].function %}{{ messages[1].content + call.name + call.arguments }}"
        "{{ messages[0].content }} {{ messages[2].content }}"
    )
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 41}'}}
    messages = [
        *MESSAGES,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "42"},
    ]
    tokenizer = zoo.tokenizer(folder)
    with Running(model, tokenizer, max_tokens=ROOM) as running:
        written = running.ask(CHAT, messages=messages, max_tokens=NEW, temperature=0)["choices"][0]["message"][
            "content"
        ]
    assert written == greedy(model, tokenizer, f'add{{"a": 41}}{MESSAGES[0]["content"]} 42')


@pytest.mark.thorough
def test_samples_and_seeds(running, tokenizer, monkeypatch):
    asked = {"prompt": PROMPT, "max_tokens": 12, "n": 3, "seed": 7}
    texts = [[choice["text"] for choice in running.ask(COMPLETIONS, **asked)["choices"]] for _ in range(2)]
    assert texts[0] == texts[1] and len(set(texts[0])) == 3
    other = running.ask(COMPLETIONS, **asked | {"seed": -8, "top_k": 50, "top_p": 0.9, "min_p": 0.01})
    assert [choice["text"] for choice in other["choices"]] != texts[0]
    assert (
        running.ask(COMPLETIONS, **asked | {"top_k": 1})["choices"][0]["text"]
        == (running.ask(COMPLETIONS, **asked | {"temperature": 0})["choices"][0]["text"])
    )
    greedy = asked | {"temperature": 0, "n": 1}
    plain = running.ask(COMPLETIONS, **greedy)["choices"][0]["text"]
    penalties = {"presence_penalty": 2}, {"frequency_penalty": 1.9}, {"repetition_penalty": 1.9}
    lowered = [running.ask(COMPLETIONS, **greedy | penalty)["choices"][0]["text"] for penalty in penalties]
    assert plain not in lowered
    with monkeypatch.context() as patch:
        patch.setattr(tokenizer, "repetition_penalty", 1.9)  # as if set in generation_config.json
        assert running.ask(COMPLETIONS, **greedy)["choices"][0]["text"] == lowered[2]
    events = running.events(COMPLETIONS, **asked)
    pieces = [event["choices"][0] for event in events]
    assert ["".join(p["text"] for p in pieces if p["index"] == i) for i in range(3)] == texts[0]


def test_stop_strings_and_end_tokens(model, tokenizer, running):
    whole = greedy(model, tokenizer, PROMPT)
    stop = whole[15:19]
    asked = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0, "stop": [stop, "no such text"]}
    want = whole[: whole.index(stop)]
    (choice,) = running.ask(COMPLETIONS, **asked)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (want, "stop")
    events = running.events(COMPLETIONS, **asked)
    assert "".join(event["choices"][0]["text"] for event in events) == want  # no part of it slipped through
    assert events[-1]["choices"][0]["finish_reason"] == "stop"

    ids = [int(i) for i in tokenizer.encode(PROMPT + whole, special=False)][len(tokenizer.encode(PROMPT)) :]
    ended = zoo.tokenizer("tiny")
    ended.eos = (ids[6],)
    with Running(model, ended, max_tokens=ROOM) as other:
        answer = other.ask(COMPLETIONS, prompt=PROMPT, max_tokens=NEW, temperature=0, logprobs=0)
    (choice,) = answer["choices"]
    used = ids.index(ids[6]) + 1
    assert choice["finish_reason"] == "stop" and choice["text"] == tokenizer.decode(ids[: used - 1])
    assert answer["usage"]["completion_tokens"] == used == len(choice["logprobs"]["tokens"])  # with the end token


@pytest.mark.thorough
def test_logprobs(running, model, tokenizer):
    """lm-eval's requests get the log-probabilities of the plain forward pass."""
    texts = [PROMPT, "The function returns a list of " * 25]  # fewer and more than 128 tokens
    answer = running.ask(COMPLETIONS, prompt=texts, max_tokens=1, temperature=0, logprobs=2, echo=True)
    for text, choice in zip(texts, answer["choices"], strict=True):
        ids = tokenizer.encode(text)
        padded = np.zeros((1, 256), int)  # so that both have one program
        padded[0, : len(ids)] = ids
        logits = np.asarray(forward(model, jnp.asarray(padded)), np.float64)[0, : len(ids)]
        ids.append(int(logits[-1].argmax()))
        want = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
        found = choice["logprobs"]
        assert (
            "".join(found["tokens"]) == choice["text"]
            and found["token_logprobs"][0] is found["top_logprobs"][0] is None
        )
        own = want[np.arange(len(ids) - 1), ids[1:]]
        close(found["token_logprobs"][1:], own, terms=MODEL, size=np.abs(want).max())
        for row, tops, logprob in zip(want, found["top_logprobs"][1:], found["token_logprobs"][1:], strict=True):
            assert 2 <= len(tops) <= 3 and logprob in tops.values()
            close(sorted(tops.values())[-2:], np.sort(row)[-2:], terms=MODEL, size=np.abs(want).max())
        assert found["text_offset"] == [len("".join(found["tokens"][:i])) for i in range(len(ids))]
    only = running.ask(COMPLETIONS, prompt=texts[0], max_tokens=3, temperature=0, logprobs=1)["choices"][0]
    assert "".join(only["logprobs"]["tokens"]) == only["text"] and len(only["logprobs"]["token_logprobs"]) == 3
    programs = running.server.worker._scorers
    assert len(programs) == 2  # one for each length, whatever the number
    none = running.ask(COMPLETIONS, prompt=texts[0], max_tokens=0, logprobs=1, echo=True)
    assert none["choices"][0]["text"] == PROMPT and none["usage"]["completion_tokens"] == 0
    assert len(none["choices"][0]["logprobs"]["tokens"]) == len(tokenizer.encode(PROMPT))


def test_characters_in_pieces(running, tokenizer):
    """A token that is no whole character is named by its number."""
    ids = tokenizer.encode("a🎉")
    names = running.ask(COMPLETIONS, prompt=ids, max_tokens=0, logprobs=1, echo=True)["choices"][0]["logprobs"][
        "tokens"
    ]
    assert names[0] == "a" and f"token_id:{ids[1]}" in names


def test_requests_at_the_same_time_share_steps(running, model, tokenizer, monkeypatch, arrived):
    """Each of six replies on four rows is the same as alone, and four are written in one step."""
    rows, step, together = [], Engine.step, threading.Event()

    def counted(self):
        together.wait()
        new = step(self)
        rows.append(len(new))
        return new

    monkeypatch.setattr(Engine, "step", counted)
    prompts = [PROMPT[:n] for n in (3, 6, 9, 12, 15, 18)]
    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        ask = lambda prompt: running.ask(COMPLETIONS, prompt=prompt, max_tokens=NEW, temperature=0)
        answers = [pool.submit(ask, prompt) for prompt in prompts]
        for _ in prompts:
            arrived.acquire()
        together.set()
        texts = [answer.result()["choices"][0]["text"] for answer in answers]
    assert texts == [greedy(model, tokenizer, prompt) for prompt in prompts]
    assert max(rows) == 4


@pytest.mark.thorough
def test_fair_turns(model, tokenizer):
    """A free row goes to the owner with the fewest rows, also while samples of another prompt wait."""
    engine = Engine(model, batch=4, max_tokens=ROOM, stops=tokenizer.eos, stride=STRIDE)
    few = Sampling(max_new_tokens=STRIDE)
    submit = lambda prompt, **options: engine.submit(tokenizer.encode(prompt), few, **options)
    many = [*submit("a", samples=7, owner="many"), *submit("b", samples=3, owner="many")]
    engine.step()
    assert [completion.finished for completion in many] == [True] * 4 + [False] * 6
    (one,) = submit(PROMPT, owner="one")
    engine.step()
    assert one.finished and [completion.finished for completion in many] == [True] * 7 + [False] * 3
    while not engine.idle:
        engine.step()
    assert tokenizer.decode(one.tokens) == greedy(model, tokenizer, PROMPT, STRIDE)


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_rows(running, monkeypatch, stream):
    step, submit, write = Engine.step, Engine.submit, Worker.write
    completions, submitted, noticed = [], threading.Event(), threading.Event()

    def recorded(self, *arguments, **options):
        completions.extend(submit(self, *arguments, **options))
        submitted.set()
        return completions

    async def watched(self, replies):
        try:
            async with contextlib.aclosing(write(self, replies)) as pieces:
                async for piece in pieces:
                    yield piece
        finally:
            noticed.set()

    body = json.dumps({"prompt": PROMPT, "max_tokens": 200, "n": 4, "stream": stream, "ignored": None})
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\n"
    head += f"Content-Type: application/json; charset=utf-8\r\nContent-Length: {len(body)}\r\n\r\n"
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", lambda self: noticed.wait() and step(self))
        patch.setattr(Engine, "submit", recorded)
        patch.setattr(Worker, "write", watched)
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall((head + body).encode())
            submitted.wait()
        noticed.wait()
    assert running.ask(COMPLETIONS, prompt=PROMPT, max_tokens=1)["usage"]["completion_tokens"] == 1
    assert len(completions) == 4 and all(c.finished and len(c.tokens) < 20 for c in completions)


def test_a_failure_is_told_and_survived(running, model, tokenizer, monkeypatch):
    def broken(*_, **options):
        raise RuntimeError("no memory")

    body = {"prompt": PROMPT, "max_tokens": NEW, "temperature": 0}
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "step", broken)
        status, answer = running.request(COMPLETIONS, body)
        assert status == 500 and "no memory" in json.loads(answer)["error"]["message"]
        status, answer = running.request(COMPLETIONS, body | {"stream": True})
        assert "no memory" in answer and "[DONE]" not in answer
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "submit", broken)
        assert running.request(COMPLETIONS, body)[0] == 500
    assert running.ask(COMPLETIONS, **body)["choices"][0]["text"] == greedy(model, tokenizer, PROMPT)


def test_logits_that_are_no_numbers(model, tokenizer):
    """Logits that are not finite are an error whether replies are drawn, streamed, or only scored."""
    broken = eqx.tree_at(lambda model: model.norm.weight, model, jnp.full_like(model.norm.weight, jnp.nan))
    asked = {"max_tokens": NEW, "temperature": 0}
    with Running(broken, tokenizer, max_tokens=ROOM) as running:
        for path, body, status in (
            (COMPLETIONS, asked | {"prompt": PROMPT}, 500),
            (COMPLETIONS, asked | {"prompt": PROMPT, "max_tokens": 0, "logprobs": 1, "echo": True}, 500),
            (COMPLETIONS, asked | {"prompt": PROMPT, "stream": True}, 200),
            (CHAT, asked | {"messages": MESSAGES}, 500),
        ):
            got, answer = running.request(path, body)
            assert got == status and "The model's logits are NaN" in answer and "[DONE]" not in answer


REFUSED = [
    (COMPLETIONS, {"promt": "a"}, 400, "promt", "not supported"),
    (COMPLETIONS, {}, 400, "prompt", "is missing"),
    (COMPLETIONS, {"prompt": 3}, 400, "prompt", "must be a string, a list of strings"),
    (COMPLETIONS, {"prompt": ""}, 400, "prompt", "has no tokens"),
    (COMPLETIONS, {"prompt": []}, 400, "prompt", "must be"),
    (COMPLETIONS, {"prompt": [2048]}, 400, "prompt", "not from 0 to 2047"),
    (COMPLETIONS, {"prompt": [-1]}, 400, "prompt", "not from 0 to 2047"),
    (COMPLETIONS, {"prompt": "a", "max_tokens": ROOM}, 400, "prompt", f"exceeds the {ROOM}"),
    (COMPLETIONS, {"prompt": "a", "logprobs": True}, 400, "logprobs", "whole number from 0 to 20"),
    (COMPLETIONS, {"prompt": "a", "temperature": -1}, 400, "temperature", "from 0 to 2"),
    (COMPLETIONS, {"prompt": "a", "n": 1.5}, 400, "n", "whole number"),
    (COMPLETIONS, {"prompt": "a", "stop": [""]}, 400, "stop", "each of 1 to 256 characters"),
    (COMPLETIONS, {"prompt": "a", "stop": ["b" * 257]}, 400, "stop", "each of 1 to 256 characters"),
    (COMPLETIONS, {"prompt": "a", "stop": ["b"] * 17}, 400, "stop", "a list of up to 16"),
    (COMPLETIONS, {"prompt": ["a"] * 9, "n": 128}, 400, "prompt", "9 prompts with n=128 make more than 1024 replies"),
    (COMPLETIONS, {"prompt": "\ud83d"}, 400, None, "half of a surrogate pair"),
    (COMPLETIONS, {"\ud83d": "a"}, 400, None, "half of a surrogate pair"),
    (COMPLETIONS, b"[" * 10**6, 400, None, "not JSON"),
    (COMPLETIONS, b" " * (2**23 + 1), 413, None, "more than 8388608 bytes"),
    (COMPLETIONS, {"prompt": "a", "best_of": 2}, 400, "best_of", "1 or absent"),
    (COMPLETIONS, {"prompt": "a", "stream_options": {"usage": 1}}, 400, "stream_options", "include_usage"),
    (COMPLETIONS, {"prompt": "a", "model": "gpt-4"}, 404, "model", "only 'tiny'"),
    (CHAT, {"messages": [{"content": "a"}]}, 400, "messages", "objects with a role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", "text content only"),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "messages", "refuses the messages"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs", "neither"),
    (CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"self": 1}}, 400, "chat_template_kwargs", "neither"),
    (CHAT, {"messages": MESSAGES, "max_tokens": 0}, 400, "max_tokens", "from 1 on"),
    (CHAT, {"messages": MESSAGES, "logprobs": 1}, 400, "logprobs", "true or false"),
    (CHAT, {"messages": MESSAGES, "reasoning_effort": "low"}, 400, "reasoning_effort", "has no place"),
    (CHAT, {"messages": MESSAGES, "top_logprobs": 1}, 400, "top_logprobs", "needs logprobs"),
    (CHAT, {"messages": MESSAGES, "response_format": {"type": "xml"}}, 400, "response_format", "json_schema"),
    (
        CHAT,
        {"messages": MESSAGES, "structured_outputs": {"json": {}, "regex": "a"}},
        400,
        "structured_outputs",
        "one of",
    ),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"a": 1}}, 400, "logit_bias", "token ids"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"5": 101}}, 400, "logit_bias", "-100 to 100"),
    (COMPLETIONS, {"prompt": "a", "logit_bias": {"2048": 1}}, 400, "logit_bias", "not from 0 to 2047"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "required"}, 400, "tool_choice", "there are no tools"),
    (CHAT, {"messages": MESSAGES, "tool_choice": "any"}, 400, "tool_choice", '"auto", "none"'),
    (CHAT, {"messages": MESSAGES, "tools": [{"type": "function"}]}, 400, "tools", "a list of"),
    (CHAT, {"messages": MESSAGES, "parallel_tool_calls": 1}, 400, "parallel_tool_calls", "true or false"),
    (CHAT, [], 400, None, "not a JSON object"),
    ("/v1/embeddings", {}, 400, "input", "is missing"),
    ("/v1/nothing", {}, 404, None, "Not Found"),
    (CHAT, None, 405, None, "Method Not Allowed"),
]


@pytest.mark.parametrize("path, body, status, param, words", REFUSED)
def test_refusals(running, path, body, status, param, words):
    got, answer = running.request(path, body)
    error = json.loads(answer)["error"]
    assert (got, error["type"], error["param"]) == (status, "invalid_request_error", param)
    assert words in error["message"]
    codes = (
        {404: "model_not_found"} if param == "model" else {400: "context_length_exceeded"} if "exceeds" in words else {}
    )
    assert error["code"] == codes.get(status)


def test_long_prompts_are_not_tokenised(running, tokenizer, monkeypatch):
    """A prompt with too many characters is refused without tokenising, which takes a second a megabyte."""
    for name in "encode", "encode_marked":
        monkeypatch.setattr(type(tokenizer), name, lambda *_, **options: pytest.fail("tokenised"))
    text = "a" * (ROOM * tokenizer.longest + 1)
    for path, body in (COMPLETIONS, {"prompt": text}), (CHAT, {"messages": [{"role": "user", "content": text}]}):
        status, answer = running.request(path, body)
        error = json.loads(answer)["error"]
        assert status == 400 and error["code"] == "context_length_exceeded", error
        assert f"the {ROOM} tokens that there is room for have at most" in error["message"]


def test_a_slow_template_holds_nobody_else_and_is_stopped(running, tokenizer, monkeypatch):
    late, started = [], threading.Event()

    class Timer(threading.Timer):
        def start(self):
            late.append(self.function)  # the test calls it
            started.set()

    monkeypatch.setattr(templates.threading, "Timer", Timer)
    monkeypatch.setattr(tokenizer, "chat_template", ENDLESS)
    with concurrent.futures.ThreadPoolExecutor() as pool:
        slow = pool.submit(running.request, CHAT, {"messages": MESSAGES})
        started.wait()
        assert running.request("/v1/models")[0] == 200 and not slow.done()
        late.pop()()
        status, answer = slow.result()
    assert status == 400 and "takes more than 10 seconds" in json.loads(answer)["error"]["message"]


def test_compiling_is_told_once(model, tokenizer, monkeypatch):
    """The first reply waits for the compiler, and the log tells why."""
    told = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "info", lambda text, *of: told.append(text % of))
    served = [Served(name, model, tokenizer) for name in ("one", "two")]
    make = lambda _: unittest.mock.Mock(spec=Engine, submit=lambda *_, **__: [object()])
    worker = Worker(served[0], make, Metrics())
    for each in (*served, served[0]):
        worker._submit([Reply(0, Ask(each, [1], Sampling()))], told.append)
    assert told == [f"Compiling {name} for its first reply, which may take minutes." for name in ("one", "two")]


def test_who_may_ask(model, tokenizer, running):
    """Browser pages may not ask: they reach this machine under names of their own, and send forms, but no JSON."""
    body = {"prompt": "a", "max_tokens": 1}
    for headers, status, words in (
        ({"Host": "evil.example:80"}, 421, "not called 'evil.example'"),
        ({"Host": "["}, 421, "--hosts"),
        ({"Content-Type": "text/plain"}, 415, "application/json, not text/plain"),
        ({"Content-Type": ""}, 415, "application/json, not absent"),
        ({"Host": "LocalHost"}, 200, ""),
        ({"Host": "[::1]:8000"}, 200, ""),
    ):
        got, answer = running.request(COMPLETIONS, body, **headers)
        assert got == status and words in answer, (headers, answer)
    assert running.request("/v1/models", Host="evil.example")[0] == 421
    with Running(model, tokenizer, max_tokens=ROOM, api_key="sesame", hosts=["my.example"]) as closed:
        for path, sent in ("/v1/models", None), (COMPLETIONS, body):
            for key in {}, {"Authorization": "Bearer open"}, {"Authorization": "sesame"}, {"Authorization": "Bearer "}:
                status, answer = closed.request(path, sent, **key)
                assert status == 401 and json.loads(answer)["error"]["code"] == "invalid_api_key"
        assert closed.request("/v1/models", Authorization="Bearer sesame", Host="my.example")[0] == 200
    assert Server([Served("tiny", model, tokenizer)], batch=1, max_tokens=9, hosts=["0.0.0.0"]).hosts is None


def test_refused_connections_are_closed(model, tokenizer, running):
    """Refused connections are closed before the body has arrived, which may never happen. Clients without a key learn
    nothing else, and get no redirects.
    """
    head = lambda path: f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n".encode()
    for sent, status in (
        (head(COMPLETIONS), b"415"),
        (head("/v1/nothing"), b"404"),
        (head("/v1/models"), b"405"),
        (head(CHAT).replace(b"localhost", b"evil.example"), b"421"),
        (head(CHAT).replace(b"Content-Length: 9", b"Transfer-Encoding: chunked"), b"415"),
    ):
        assert running.exchange(sent + b"\r\n").startswith(b"HTTP/1.1 " + status)
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)) as connection:
        for path in "/v1/models", "/v1/nothing", "/v1/models":  # their empty bodies have arrived
            connection.request("GET", path)
            assert connection.getresponse().read() and connection.sock
    with Running(model, tokenizer, max_tokens=ROOM, api_key="sesame") as closed:
        for path in COMPLETIONS, "/v1/models/", "/v1/embeddings":
            assert closed.exchange(head(path) + b"\r\n").startswith(b"HTTP/1.1 401")
        assert closed.request("/v1/models/")[0] == 401


def test_bodies_must_arrive(running, monkeypatch):
    """A client whose body never ends gets an answer, and its connection is closed."""
    monkeypatch.setattr(asyncio, "timeout_at", lambda deadline: asyncio.timeout(0))
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    answer = running.exchange(head.encode() + b"Content-Length: 9\r\n\r\n{")
    assert answer.startswith(b"HTTP/1.1 408") and b"did not arrive within 30 seconds" in answer
    assert b"\r\nconnection: close\r\n" in answer


class Clock:
    """A loop that records its timers, and a transport that records its writes."""

    def __init__(self, listener):
        self.timers, self.left, self.ended, self.now = [], 0, [], 0.0
        self.transport = types.SimpleNamespace(
            get_extra_info=lambda *_: None, set_write_buffer_limits=lambda high: None,
            get_write_buffer_size=lambda: self.left, is_closing=lambda: False, write=lambda data: None,
            close=lambda: self.ended.append("closed"), abort=lambda: self.ended.append("aborted"),
        )  # fmt: skip
        state = types.SimpleNamespace(connections=set(), tasks=set(), default_headers=[], total_requests=0)
        self.protocol = Timely(listener.config, state, {}, _loop=self)

    def call_later(self, seconds, function, *arguments):
        timer = types.SimpleNamespace(go=lambda: function(*arguments), cancel=lambda: self.timers.remove(timer))
        self.timers.append(timer)
        return timer

    def time(self):
        return self.now

    def create_task(self, work):
        work.close()
        return unittest.mock.Mock()

    def ring(self):
        """Fires the only timer."""
        (timer,) = self.timers
        self.timers.clear()
        timer.go()


def test_heads_must_arrive_and_answers_be_taken(running):
    """A head has one time limit however slowly its bytes come; an answer may take its time while data flow."""
    for dripping in b"", b"GET / HTTP/1.1\r\nHost: loc":
        clock = Clock(running.uvicorn)
        clock.protocol.connection_made(clock.transport)
        (first,) = clock.timers
        for byte in dripping:
            clock.protocol.data_received(bytes([byte]))
        assert clock.timers == [first] and not clock.ended
        clock.ring()
        assert clock.ended == ["closed"]
    clock = Clock(running.uvicorn)
    clock.protocol.connection_made(clock.transport)
    clock.protocol.data_received(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert not clock.timers
    clock.left = 10 * Timely.LEAST
    clock.protocol.pause_writing()
    clock.left -= Timely.LEAST
    clock.ring()
    assert not clock.ended
    clock.protocol.resume_writing()
    assert not clock.timers
    clock.protocol.pause_writing()
    clock.left -= Timely.LEAST - 1
    clock.ring()
    assert clock.ended == ["aborted"] and not clock.timers


def test_a_request_has_one_limit(running):
    """However slowly bytes come, a body has only its head's remaining time; the next request has the full time."""
    clock = Clock(running.uvicorn)
    clock.protocol.connection_made(clock.transport)
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n".encode()
    for byte in head + b"{":
        clock.now += 0.25
        clock.protocol.data_received(bytes([byte]))
        assert len(clock.timers) == (clock.protocol.scope is None)
    assert clock.now > 10.0 and clock.protocol.scope["state"]["deadline"] == Server.SECONDS
    clock.protocol.data_received(b"}")
    assert clock.protocol.scope["state"]["deadline"] == Server.SECONDS
    clock.protocol.cycle.response_complete = True
    for event in h11.Response(status_code=200, headers=[("content-length", "0")]), h11.EndOfMessage():
        clock.protocol.conn.send(event)
    clock.protocol.on_response_complete()
    ended = clock.now
    clock.now += 1
    clock.protocol.data_received(head)
    assert clock.protocol.scope["state"]["deadline"] == ended + Server.SECONDS


def test_stopping_cuts_late_replies_with_a_word(model, tokenizer, monkeypatch, arrived):
    """Replies that end in time are whole; others report that they were cut, in one piece and as events."""
    step, cut, steps, told = Engine.step, Worker.cut, threading.Semaphore(0), threading.Event()
    monkeypatch.setattr(Engine, "step", lambda self: steps.acquire() and step(self))
    monkeypatch.setattr(Worker, "cut", lambda self: told.set())  # cut is called below
    patient = {"timeout_graceful_shutdown": 600}
    with (
        concurrent.futures.ThreadPoolExecutor() as pool,
        Running(model, tokenizer, grace=0.0, listening=patient, max_tokens=ROOM) as stopping,
    ):
        body = {"prompt": PROMPT, "temperature": 0}
        short = pool.submit(stopping.request, COMPLETIONS, body | {"max_tokens": 5})
        arrived.acquire()
        long = [
            pool.submit(stopping.request, COMPLETIONS, body | {"max_tokens": 200, "stream": s}) for s in (False, True)
        ]
        for _ in long:
            arrived.acquire()
        stopping.uvicorn.should_exit = True
        told.wait()
        steps.release(3)  # 4 tokens each; in the first the long ones may still be in the inbox
        short.result()
        cut(stopping.server.worker)
        steps.release(99)
        stopping.thread.join()
    status, answer = short.result()
    assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 5
    (status, whole), (_, events) = (call.result() for call in long)
    assert status == 503
    for error in (
        json.loads(whole)["error"],
        json.loads(events.strip().splitlines()[-1].removeprefix("data: "))["error"],
    ):
        assert re.match(r"The server stops, and cut this reply after \d+ tokens\.", error["message"]), error


@pytest.mark.live
def test_lm_eval(running, model, tokenizer, tmp_path):
    """lm-eval's log-likelihoods equal the plain forward pass's, and its generations are greedy."""
    pytest.importorskip("lm_eval")
    url = f"base_url=http://127.0.0.1:{running.port}/v1/completions"
    options = f"model=tiny,{url},tokenizer=zoo/tiny,tokenizer_backend=huggingface,max_length={ROOM},num_concurrent=4"
    command = ["run", "--model", "local-completions", "--model_args", options, "--include_path", "tests/zoo/tasks"]
    command += ["--tasks", "zoo_choice,zoo_ending", "--log_samples", "--output_path", str(tmp_path)]
    environment = os.environ | {"HF_HOME": str(tmp_path / "cache"), "HF_DATASETS_OFFLINE": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "lm_eval", *command], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    assert re.search(r"zoo_choice.*acc .*\| 1\.00\|", run.stdout)
    assert re.search(r"zoo_ending.*exact_match.*\| 0\.25\|", run.stdout)
    samples = lambda task: map(json.loads, next(tmp_path.rglob(f"samples_{task}*")).read_text().splitlines())
    for sample in samples("zoo_choice"):
        question, choices = sample["doc"]["question"], sample["doc"]["choices"]
        for choice, [[found, _]] in zip(choices, sample["resps"], strict=True):
            context, whole = tokenizer.encode(question), tokenizer.encode(question + choice)
            logp = jax.nn.log_softmax(model(jnp.array([whole]))[0], axis=-1)
            want = sum(float(logp[i - 1, whole[i]]) for i in range(len(context), len(whole)))
            close(float(found), want, terms=MODEL, size=np.abs(logp).max())
    for sample in samples("zoo_ending"):
        text = greedy(model, tokenizer, sample["doc"]["question"], 8)
        assert sample["resps"] == [[text.split(".")[0]]]


@pytest.mark.thorough
def test_a_thousand_mixed_requests(model, tokenizer):
    """Each reply is as alone, whoever else asks, goes on, leaves, or has a grammar; in the end all pages are free."""
    pytest.importorskip("llguidance")
    random, lengths = np.random.default_rng(0), (4, 9, NEW)
    prompts = [*(PROMPT[:n] for n in (5, 9, 14, 20)), "import os\n" * 9]
    want = {(prompt, new): greedy(model, tokenizer, prompt, new) for prompt in prompts for new in lengths}
    body = lambda prompt, new, **more: {"prompt": prompt, "max_tokens": int(new), "temperature": 0} | more
    chats = {}
    for prompt, new in want:
        messages = [{"role": "user", "content": prompt}]
        for _ in range(2):
            ids = tokenizer.encode_prompt(messages)
            messages += [{"role": "assistant", "content": greedy(model, tokenizer, ids, new)}, MESSAGES[0]]
        chats[prompt, new] = messages

    def whole(prompt, new):
        texts = [choice["text"] for choice in running.ask(COMPLETIONS, **body(prompt, new, n=2))["choices"]]
        assert texts == [want[prompt, new]] * 2

    def streamed(prompt, new):
        events = running.events(COMPLETIONS, **body(prompt, new))
        assert "".join(event["choices"][0]["text"] for event in events) == want[prompt, new]

    def structured(prompt, _):
        answer = running.ask(COMPLETIONS, **body(prompt, 60, structured_outputs={"regex": "[a-c]{2,5}!"}))
        assert re.fullmatch("[a-c]{2,5}!", answer["choices"][0]["text"])

    def goes_on(prompt, new):
        messages = chats[prompt, new]
        for turn in 1, 3:
            answer = running.ask(CHAT, messages=messages[:turn], max_tokens=int(new), temperature=0)
            assert answer["choices"][0]["message"]["content"] == messages[turn]["content"]

    def leaves(prompt, new):
        sent = json.dumps(body(prompt, 200, stream=bool(new % 2), n=2))
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", running.port), timeout=60) as connection:
            connection.sendall(f"{head}Content-Length: {len(sent)}\r\n\r\n{sent}".encode())
            if new % 2:
                connection.recv(int(new) * 50)

    with Running(model, tokenizer, max_tokens=512, chunk=16) as running:
        kinds = random.choice([whole, streamed, structured, goes_on, leaves], 1000, p=[0.25, 0.25, 0.1, 0.1, 0.3])
        asked = zip(kinds, random.choice(prompts, 1000), random.choice(lengths, 1000), strict=True)
        with concurrent.futures.ThreadPoolExecutor(12) as pool:
            for done in [pool.submit(kind, str(prompt), new) for kind, prompt, new in asked]:
                done.result()
        for _ in range(200):  # until the last ones are known to have left
            whole(prompts[0], 4)
            if running.server.worker.replies() == (0, 0):
                break
        assert running.server.worker.replies() == (0, 0)
        (engine,) = running.server.worker._engines.values()
        assert engine.idle and engine.tokens_found > 0
        while engine._prefixes.evict():
            pass
        assert engine._pool.free.tolist() == engine._pool.counts


@pytest.mark.thorough
def test_a_draft_of_ngrams(model, tokenizer):
    """Texts and log-probabilities are those without a draft."""
    drafted = Served("drafted", model, tokenizer, zoo.NGramDraft(3))
    with Running(model, tokenizer, max_tokens=ROOM, others=[drafted]) as running:
        asked = {"prompt": [PROMPT, PROMPT * 2], "max_tokens": NEW, "temperature": 0, "logprobs": 2}
        answers = [running.ask(COMPLETIONS, model=name, **asked)["choices"] for name in ("tiny", "drafted")]
    for one, other in zip(*answers, strict=True):
        assert one["text"] == other["text"] and one["logprobs"]["tokens"] == other["logprobs"]["tokens"]
        close(one["logprobs"]["token_logprobs"], other["logprobs"]["token_logprobs"], terms=MODEL)
        for tops, others in zip(one["logprobs"]["top_logprobs"], other["logprobs"]["top_logprobs"], strict=True):
            assert tops.keys() == others.keys()
            close([*tops.values()], [others[token] for token in tops], terms=MODEL)


@pytest.mark.thorough
def test_on_a_mesh(model, tokenizer):
    placed = zoo.load("tiny", dtype="float32", mesh=make_mesh("fsdp=2,tensor=2", jax.devices()[:4]))
    with Running(placed, tokenizer, max_tokens=ROOM) as running:
        text = running.ask(COMPLETIONS, prompt=PROMPT, max_tokens=NEW, temperature=0)["choices"][0]["text"]
    assert text == greedy(model, tokenizer, PROMPT)


def test_no_rows(model, tokenizer):
    with pytest.raises(ValueError, match="batch=0 leaves no room"):
        Server([Served("tiny", model, tokenizer)], batch=0, max_tokens=512)


def test_keys(model, tokenizer, monkeypatch):
    """An empty key is refused before the model is loaded. A server that others can reach without a key is reported."""
    for variable, key in ("", None), ("sesame", " "):
        monkeypatch.setenv("ZOO_API_KEY", variable)
        with pytest.raises(SystemExit, match="The API key is empty"):
            serve("no/model", listen=ListenOptions(api_key=key))
    said = []
    monkeypatch.setattr(logging.getLogger("uvicorn.error"), "warning", lambda text, *of: said.append(text % of))
    for host, key, warned in ("0.0.0.0", None, True), ("my.example", None, True), ("0.0.0.0", "a", False), (
        "127.0.0.2", None, False
    ), ("localhost", None, False):  # fmt: skip
        said.clear()
        server = Server([Served("tiny", model, tokenizer)], batch=1, max_tokens=9, api_key=key)
        Listener(server, host=host, port=0, grace=1.0, log_config=None)
        assert [f"anybody who reaches {host} may use it" in text for text in said] == [True] * warned


def test_without_starlette(monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "zoo.serve.listen")
    with pytest.raises(SystemExit, match=r"serve needs starlette and uvicorn .*pip install 'equinox-zoo\[serve\]'"):
        serve("tiny")


ENDLESSLY = {"0": -100, "2": -100}  # without end tokens


@pytest.mark.thorough
def test_the_command():
    """The command serves, and after SIGTERM it finishes the replies in progress and takes no new requests."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "zoo", "serve", "tiny", "--port", str(port), "--batch", "2", "--max-tokens", "100"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            for line in process.stderr:
                if "running on" in line:
                    break
            with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
                connection.request("GET", "/v1/models")
                assert json.loads(connection.getresponse().read())["data"][0]["max_model_len"] == 100
                body = json.dumps({"prompt": "a", "max_tokens": 90, "stream": True, "logit_bias": ENDLESSLY})
                connection.request("POST", COMPLETIONS, body, {"Content-Type": "application/json"})
                response = connection.getresponse()
                first = response.readline()
                process.send_signal(signal.SIGTERM)
                rest = response.read().decode()  # all of it, within the time of --grace
                assert first.startswith(b"data: {") and rest.endswith("data: [DONE]\n\n")
                assert '"finish_reason": "length"' in rest
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port))
            process.stderr.read()
            assert process.wait(30) in (0, -signal.SIGTERM)
        finally:
            process.kill()
