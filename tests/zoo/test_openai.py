"""The server through OpenAI's own client: chats, streams, tools, structured answers, errors, adapters."""

import concurrent.futures
import json
import sys

import pytest

import zoo
from tests.close import close
from tests.zoo.programs import MODEL
from tests.zoo.test_lora import trained
from tests.zoo.test_serve import ADD, MESSAGES, NEW, PROMPT, ROOM, Running, greedy, written  # noqa: F401 (a fixture)
from zoo.chat import LoadOptions
from zoo.serve import models, serve
from zoo.serve.server import Server


openai = pytest.importorskip("openai")


@pytest.fixture(scope="module")
def model():
    return zoo.load("tiny", dtype="float32")


@pytest.fixture(scope="module")
def tokenizer():
    return zoo.tokenizer("tiny")


def client_of(running, key="any"):
    return openai.OpenAI(base_url=f"http://127.0.0.1:{running.port}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def running(model, tokenizer):
    with Running(model, tokenizer, max_tokens=ROOM, api_key="sesame") as running:
        yield running


@pytest.fixture(scope="module")
def client(running):
    with client_of(running, "sesame") as client:
        yield client


def test_chat_and_completions(client, model, tokenizer):
    asked = {"model": "tiny", "temperature": 0, "max_tokens": NEW}
    text = greedy(model, tokenizer, PROMPT)
    assert client.completions.create(prompt=PROMPT, **asked).choices[0].text == text
    pieces = client.completions.create(prompt=PROMPT, stream=True, **asked)
    assert "".join(piece.choices[0].text for piece in pieces) == text

    ids = tokenizer.encode(tokenizer.render(MESSAGES, add_generation_prompt=True), special=False)
    want = greedy(model, tokenizer, ids)
    answer = client.chat.completions.create(messages=MESSAGES, **asked)
    assert answer.choices[0].message.content == want and answer.choices[0].finish_reason == "length"
    assert answer.usage.prompt_tokens == len(ids) and answer.usage.completion_tokens == NEW
    asked |= {"stream": True, "stream_options": {"include_usage": True}}
    *pieces, last = client.chat.completions.create(messages=MESSAGES, **asked)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == want and last.usage == answer.usage
    assert [each.id for each in client.models.list()] == [client.models.retrieve("tiny").id] == ["tiny"]


@pytest.mark.thorough
def test_logprobs(client, model, tokenizer):
    """Log-probabilities of a chat are those of a completion of its prompt."""
    asked = {"model": "tiny", "temperature": 0, "max_tokens": NEW}
    ids = tokenizer.encode(tokenizer.render(MESSAGES, add_generation_prompt=True), special=False)
    of_text = client.completions.create(prompt=ids, logprobs=3, **asked).choices[0]
    of_chat = client.chat.completions.create(messages=MESSAGES, logprobs=True, top_logprobs=3, **asked).choices[0]
    content = of_chat.logprobs.content
    assert [each.token for each in content] == of_text.logprobs.tokens
    assert [each.logprob for each in content] == of_text.logprobs.token_logprobs
    for each, tops in zip(content, of_text.logprobs.top_logprobs, strict=True):
        assert each.bytes is None or bytes(each.bytes).decode() == each.token
        assert len(each.top_logprobs) == 3 and {top.token: top.logprob for top in each.top_logprobs} == tops
        assert each.top_logprobs[0].token == each.token  # the likeliest
    # They are the model's own at any temperature, and streams have the same.
    drawn = {"temperature": 0.5, "seed": 3, "stop": "never", "presence_penalty": 1}
    for options in {}, drawn:
        ask = lambda options=asked | options, **more: client.chat.completions.create(
            messages=MESSAGES, logprobs=True, top_logprobs=3, **options, **more
        )
        found = ask().choices[0].logprobs.content
        assert found[0].top_logprobs == content[0].top_logprobs
        for each in found:
            assert each.logprob in [top.logprob for top in each.top_logprobs] or each.logprob < min(
                top.logprob for top in each.top_logprobs
            )
        pieces = [piece.choices[0].logprobs for piece in ask(stream=True) if piece.choices[0].logprobs]
        assert [each for piece in pieces for each in piece.content] == found
    for more in {"logprobs": 0}, {"logprobs": 2}, {"logprobs": 2, "echo": True}:
        (whole,) = client.completions.create(prompt=ids, **asked, **more).choices
        pieces = [piece.choices[0] for piece in client.completions.create(prompt=ids, stream=True, **asked, **more)]
        assert "".join(piece.text for piece in pieces) == whole.text and len(pieces) > 3
        for field, want in whole.logprobs.model_dump().items():
            assert [each for piece in pieces for each in getattr(piece.logprobs, field)] == want
        assert whole.logprobs.token_logprobs[-NEW:] == of_text.logprobs.token_logprobs
        assert whole.logprobs.tokens[-NEW:] == of_text.logprobs.tokens


def test_biases(client, tokenizer):
    """A token that is made likely is all that is written, and one that is made unlikely is never."""
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": 4}
    (token,) = tokenizer.encode("a", special=False)
    assert client.completions.create(logit_bias={token: 100}, **asked).choices[0].text == "aaaa"
    likeliest = client.completions.create(temperature=0, logprobs=0, **asked).choices[0].logprobs.tokens[0]
    ids = tokenizer.encode(likeliest, special=False)
    other = client.completions.create(temperature=0, logprobs=0, logit_bias=dict.fromkeys(map(str, ids), -100), **asked)
    assert other.choices[0].logprobs.tokens[0] != likeliest


def test_tools(written):  # noqa: F811
    """Calls arrive as the client's own types, whole and in pieces, and go back as messages."""
    client = client_of(written)
    asked = {"model": "tiny", "messages": MESSAGES, "tools": [ADD], "max_tokens": 100}
    written.text = '<think>Hm</think><tool_call>{"name": "add", "arguments": {"a": 41}}</tool_call>'
    (choice,) = client.chat.completions.create(**asked).choices
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 41})
    assert choice.finish_reason == "tool_calls" and choice.message.content is None
    assert choice.message.model_extra["reasoning_content"] == "Hm"
    with client.chat.completions.stream(**asked) as stream:
        (other,) = stream.get_final_completion().choices
    assert [each.function.arguments for each in other.message.tool_calls] == [call.function.arguments]
    result = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    written.text = "It is 42."
    asked["messages"] = [*MESSAGES, choice.message, result]
    with pytest.raises(openai.BadRequestError, match="leaves out"):  # this template writes one message
        client.chat.completions.create(**asked)


def test_errors(running, client):
    with pytest.raises(openai.NotFoundError, match="There is no model 'gpt'"):
        client.chat.completions.create(model="gpt", messages=MESSAGES)
    with pytest.raises(openai.BadRequestError, match="store is not supported"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, store=True)
    with pytest.raises(openai.AuthenticationError, match="API key"):
        client_of(running, "open").models.list()


@pytest.mark.thorough
def test_structured_answers(client):
    """Answers by a schema are valid whatever the model writes, also drawn, streamed and several at once."""
    pytest.importorskip("llguidance")
    schema = {
        "type": "object",
        "properties": {"kind": {"enum": ["cat", "dog"]}, "legs": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["kind", "legs"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "animal", "schema": schema}}
    asked = {"model": "tiny", "messages": MESSAGES, "max_tokens": 150}
    answers = client.chat.completions.create(response_format=form, n=3, seed=5, **asked).choices
    for choice in answers:
        value = json.loads(choice.message.content)
        assert value.keys() == {"kind", "legs"} and value["kind"] in ("cat", "dog") and 0 <= value["legs"] <= 99
        assert choice.finish_reason == "stop"
    pieces = client.chat.completions.create(response_format=form, seed=5, stream=True, **asked)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == answers[0].message.content
    for structure, test in (
        ({"choice": ["yes", "no"]}, lambda text: text in ("yes", "no")),
        ({"regex": "[0-9]{3}-[a-c]"}, lambda text: len(text) == 5 and text[3] == "-"),
        ({"grammar": 'start: "a" "b"+ "!"'}, lambda text: set(text) <= set("ab!")),
    ):
        answer = client.completions.create(
            model="tiny", prompt=PROMPT, max_tokens=60, extra_body={"structured_outputs": structure}
        )
        assert test(answer.choices[0].text)
    with pytest.raises(openai.BadRequestError, match="response_format: Invalid type: nothing"):
        wrong = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}
        client.chat.completions.create(response_format=wrong, **asked)


def test_without_llguidance(client, running, monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    (served,) = running.server.served.values()
    monkeypatch.delitem(vars(served), "grammars", raising=False)
    with pytest.raises(openai.BadRequestError, match=r"needs llguidance: pip install 'equinox-zoo\[grammar\]'"):
        client.chat.completions.create(model="tiny", messages=MESSAGES, response_format={"type": "json_object"})


@pytest.mark.thorough
def test_adapters_by_name(model, tokenizer, tmp_path):
    """Requests choose the model or an adapter of it by name, also at the same time, and each replies as alone."""
    adapted = trained(model)
    zoo.peft.save(adapted, tmp_path, base="tiny")
    served = models("tiny", LoadOptions(dtype="float32"), {"sql": tmp_path}, None)
    assert served[1].model.embed_tokens.weight is served[0].model.embed_tokens.weight
    with Running(served[0].model, tokenizer, max_tokens=ROOM, others=served[1:]) as running:
        client = client_of(running)
        assert [each.id for each in client.models.list()] == ["tiny", "sql"]
        ask = lambda name: client.completions.create(model=name, prompt=PROMPT, max_tokens=NEW, temperature=0)
        with concurrent.futures.ThreadPoolExecutor() as pool:
            answers = list(pool.map(ask, ["tiny", "sql"] * 2))
        wanted = [greedy(each, tokenizer, PROMPT) for each in (model, adapted)]
        assert [answer.choices[0].text for answer in answers] == wanted * 2 and wanted[0] != wanted[1]
        assert [answer.model for answer in answers] == ["tiny", "sql"] * 2
        counts = running.request("/metrics")[1]
    for name in "tiny", "sql":
        assert f'zoo_generated_tokens_total{{model="{name}"}} {2 * NEW}' in counts
    with pytest.raises(ValueError, match="takes no others: name all by --adapters"):
        models("tiny", LoadOptions(adapter=tmp_path), {"sql": tmp_path}, None)
    with pytest.raises(SystemExit, match="--adapters sql is not NAME=FOLDER"):
        serve("tiny", adapters=("sql",))
    with pytest.raises(ValueError, match="Two models have one name: tiny, tiny"):
        Server([served[0], served[0]], batch=1, max_tokens=9)


@pytest.mark.thorough
def test_embeddings_scores_and_rankings(tokenizer):
    """They are those of zoo.embed and zoo.rank, and a model with a head writes no text."""
    texts = ["import os", "Return the sum.", "import sys"]
    (served,) = models("tiny", LoadOptions(dtype="float32"), {}, None, "embedding")
    want = zoo.embed(served.model, tokenizer, texts)
    with Running(served.model, tokenizer) as running:
        client = client_of(running)
        for options in {}, {"encoding_format": "float"}:
            answer = client.embeddings.create(model="tiny", input=texts, **options)
            close([each.embedding for each in answer.data], want, terms=MODEL)
        assert answer.usage.prompt_tokens == sum(len(tokenizer.encode(text)) for text in texts)
        short = client.embeddings.create(model="tiny", input=texts[0], dimensions=8).data[0].embedding
        close(short, zoo.embed(served.model, tokenizer, texts[0], width=8), terms=MODEL)
        status, answer = running.request("/v1/score", {"text_1": texts[0], "text_2": texts[1:]})
        ranked = {each.index: each.score for each in zoo.rank(served.model, tokenizer, texts[0], texts[1:])}
        scores = {each["index"]: each["score"] for each in json.loads(answer)["data"]}
        assert status == 200 and list(scores) == [0, 1]
        close(scores, ranked, terms=MODEL, size=1)
        asked = {"query": texts[0], "documents": texts}
        results = running.ask("/v1/rerank", **asked)["results"]
        want = zoo.rank(served.model, tokenizer, texts[0], texts)
        assert [each["index"] for each in results] == [each.index for each in want] and want[0].index == 0
        close([each["relevance_score"] for each in results], [each.score for each in want], terms=MODEL, size=1)
        assert all(each["document"] == {"text": texts[each["index"]]} for each in results)
        first = running.ask("/v2/rerank", **asked, top_n=1, return_documents=False)["results"]
        assert first == [{"index": 0, "relevance_score": results[0]["relevance_score"]}]
        for path, body, words in (
            ("/v1/chat/completions", {"messages": MESSAGES}, "has a head for embedding: it writes no text"),
            ("/v1/embeddings", {"input": 3}, "a string, or a list of strings"),
            ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, "fewer than width"),
            ("/v1/embeddings", {"input": "a", "prompt_name": "query"}, "no prompt 'query'"),
            ("/v1/embeddings", {"input": ["a"] * 1025}, "1024 are the most"),
            ("/v1/embeddings", {"input": "a" * 10**6}, "tokens that there is room for"),
            ("/v1/score", {"text_2": "a"}, "text_1 is missing"),
            ("/v1/rerank", {"documents": ["a"]}, "query is missing"),
            ("/v1/rerank", {"query": "a", "documents": "a"}, "a list of strings"),
        ):
            status, answer = running.request(path, body)
            assert status == 400 and words in json.loads(answer)["error"]["message"], answer
    with pytest.raises(ValueError, match="takes no adapters, drafts and images here"):
        models("tiny", LoadOptions(images=True), {}, None, "embedding")


def test_models_without_a_head_embed_nothing(client):
    with pytest.raises(openai.BadRequestError, match="no head for embeddings"):
        client.embeddings.create(model="tiny", input="a")
