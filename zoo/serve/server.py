"""Answers requests over HTTP, whole or as server-sent events, in the forms of OpenAI's API reference."""

import asyncio
import contextlib
import dataclasses
import functools
import pathlib
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from zoo.generation.constraints import AbstractConstraint
from zoo.generation.decoding import CHUNK
from zoo.generation.engine import Engine
from zoo.generation.sampling import Sampling
from zoo.serve import texts
from zoo.serve.answers import Scores, choice, delta, event, joined, message, usage
from zoo.serve.fields import (
    BODY,
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    REPLIES,
    RERANK,
    SCORE,
    Field,
    Refusal,
    is_object,
    is_text,
    read,
)
from zoo.serve.guard import Guard
from zoo.serve.metrics import Metrics
from zoo.serve.prompts import Prompts
from zoo.serve.reply import Ask, Gain, Reply, Token
from zoo.serve.served import Served
from zoo.serve.worker import Worker
from zoo.text.messages import Tools
from zoo.text.prompts import check_room
from zoo.text.replies import Piece


STRIDE = 4  # tokens of a step: with more the device waits less for the host, with fewer clients wait less
PAGE = pathlib.Path(__file__).with_name("page.html").read_text(encoding="utf-8")


class Server:
    """Serves models by their names; requests without a name get the first. `app()` is the ASGI application.

    Requests must carry `api_key`, if there is one. Their Host header must name localhost or one of `hosts`, because any
    web page can point a host name of its own at this machine. "*", or an address that means all interfaces, turns this
    check off.
    """

    SECONDS = 30.0  # a request, head and body together, must arrive within this time

    def __init__(
        self,
        served: Sequence[Served],
        *,
        batch: int,
        max_tokens: int,
        chunk: int = CHUNK,
        api_key: str | None = None,
        hosts: Sequence[str] = (),
    ):
        """
        Args:
            served: models of one architecture, such as one without and with adapters.
            batch: rows of each model's engine.
            max_tokens: most tokens of a prompt and its reply.
            chunk: most tokens of prompts that are read between two tokens of a reply.
        """
        for option, value in ("batch", batch), ("max_tokens", max_tokens):
            if value < 1:
                raise ValueError(f"{option}={value} leaves no room for any reply; it must be at least 1.")
        self.served = {each.name: each for each in served}
        if len(self.served) < len(served):
            raise ValueError(f"Two models have one name: {', '.join(each.name for each in served)}.")
        self.api_key = api_key
        self.hosts = (
            None if {"*", "0.0.0.0", "::"} & {*hosts} else {"localhost", "127.0.0.1", "::1", *map(str.lower, hosts)}
        )
        self.positions = min(max_tokens, *(each.model.config.max_position_embeddings for each in served))
        make = lambda each: Engine(
            each.model, batch=batch, max_tokens=self.positions, stops=each.tokenizer.eos, stride=STRIDE,
            draft=each.draft, chunk=chunk, beside=chunk, prefixes=True, raw_logprobs=True,
        )  # fmt: skip
        self.metrics = Metrics()
        self.worker = Worker(served[0], make, self.metrics)
        self._prompts = Prompts(self.positions)

    def app(self) -> ASGIApp:
        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            await asyncio.to_thread(self.worker.close)

        app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/models/{name:path}", self.model),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/v1/embeddings", self.embeddings, methods=["POST"]),
                Route("/v1/score", self.score, methods=["POST"]),
                Route("/v1/rerank", self.rerank, methods=["POST"]),
                Route("/v2/rerank", self.rerank, methods=["POST"]),  # of Cohere's client
                Route("/", self.page),
                Route("/health", self.health),
                Route("/metrics", self.counts),
            ],
            exception_handlers={Refusal: refused, HTTPException: not_routed, Exception: failed},
            lifespan=lifespan,
        )

        return Guard(app, self.api_key, self.hosts, self.metrics)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(map(self._about, self.served))})

    async def model(self, request: Request) -> Response:
        return JSONResponse(self._about(self._named(request.path_params["name"]).name))

    def _about(self, name: str) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": 0, "owned_by": "zoo", "max_model_len": self.positions}

    def _named(self, name: str) -> Served:
        if name not in self.served:
            known = ", ".join(map(repr, self.served))
            raise Refusal(
                f"There is no model {name!r} here, only {known}.", "model", status=404, code="model_not_found"
            )
        return self.served[name]

    async def page(self, request: Request) -> Response:
        return HTMLResponse(PAGE, headers={"X-Frame-Options": "DENY"})

    async def health(self, request: Request) -> Response:
        if not self.worker.is_alive():
            raise Refusal("The models' thread has ended.", status=503)
        return JSONResponse({"status": "ok"})

    async def counts(self, request: Request) -> Response:
        running, waiting = self.worker.replies()
        text = self.metrics.text({"zoo_replies_running": running, "zoo_replies_waiting": waiting})
        return PlainTextResponse(text, media_type="text/plain; version=0.0.4")

    async def embeddings(self, request: Request) -> Response:
        return await self._texts(request, EMBEDDINGS, "input", texts.embeddings)

    async def score(self, request: Request) -> Response:
        return await self._texts(request, SCORE, "text_2", texts.scores)

    async def rerank(self, request: Request) -> Response:
        return await self._texts(request, RERANK, "documents", texts.rerank)

    async def _texts(
        self, request: Request, fields: dict[str, Field], required: str,
        answer: Callable[[dict[str, Any], Served], dict[str, Any]],
    ) -> Response:  # fmt: skip
        said, served = await self._read(request, fields, required)
        try:
            for text in [said[required]] if is_text(said[required]) else said[required]:
                check_room(served.tokenizer, text, served.model.config.max_position_embeddings, required)
            return JSONResponse(await self.worker.call(lambda: answer(said, served)))
        except ValueError as error:
            raise Refusal(str(error), required) from error

    async def completions(self, request: Request) -> Response:
        said, served = await self._read(request, COMPLETIONS, "prompt")
        one = is_text(said["prompt"]) or type(said["prompt"][0]) is int
        prompts = [said["prompt"]] if one else said["prompt"]
        if is_text(prompts[0]):
            prompts = await self._prompts.texts(served, prompts, "prompt", served.tokenizer.encode)
        constraint = await self._constraint(said, served, lambda grammar: served.grammars.constraint(grammar))
        echo, top = said.get("echo", False), said.get("logprobs")
        sampling = self._sampling(said, served, said.get("max_tokens", 16))
        ask = Ask(served, [], sampling, constraint=constraint, likeliest=bool(top))
        replies = self._replies(said, ask, prompts, "prompt")
        start = lambda reply: None if echo else reply.ask.prompt[-1]
        scores = {} if top is None else {reply: Scores(served.tokenizer, start(reply), top) for reply in replies}

        def content(reply: Reply, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
            return {"text": text, "logprobs": scores[reply].completion(tokens) if scores else None}

        openings, echoed = {}, {}
        for reply in replies if echo else ():
            if scores and reply.ask not in echoed:  # one pass for all replies to a prompt
                echoed[reply.ask] = await self.worker.score(served, reply.ask.prompt)
            text, tokens = served.tokenizer.decode(reply.ask.prompt), echoed.get(reply.ask, [])
            openings[reply] = await asyncio.to_thread(content, reply, text, tokens)
        if said.get("stream"):
            gained = lambda reply, gain: content(reply, gain.parts.answer, gain.tokens)
            return self._stream(said, "cmpl", "text_completion", replies, openings, gained)

        await unless_gone(request, self._finish(replies))
        contents = []
        for reply in replies:
            written = await asyncio.to_thread(content, reply, reply.text, reply.tokens)
            contents.append(joined(openings[reply], written) if echo else written)
        return self._whole("cmpl", "text_completion", replies, contents)

    async def chat(self, request: Request) -> Response:
        said, served = await self._read(request, CHAT, "messages")
        tokenizer, tools, chosen = served.tokenizer, tools_of(said), said.get("tool_choice")
        if "top_logprobs" in said and not said.get("logprobs"):
            raise Refusal("top_logprobs needs logprobs.", "top_logprobs")
        options = {"tools": tools, "add_generation_prompt": True} | said.get("chat_template_kwargs", {})
        if effort := said.get("reasoning_effort"):
            if "reasoning_effort" not in (tokenizer.chat_template or ""):
                raise Refusal("The model's chat template has no place for a reasoning_effort.", "reasoning_effort")
            options["reasoning_effort"] = effort
        prompt, images = await self._prompts.chat(served, said["messages"], options)
        constraint = await self._constraint(
            said, served, lambda grammar: served.grammars.answer(grammar, prompt, tools)
        )
        begun = self._begun(served, prompt, chosen)
        reader = functools.partial(tokenizer.reader, prompt, tools, begun)
        prompt = prompt + tokenizer.encode(begun, special=False)
        new = said.get("max_completion_tokens", said.get("max_tokens", max(1, self.positions - len(prompt))))
        ask = Ask(
            served, [], self._sampling(said, served, new), special=tokenizer.delimiters(tools), reader=reader,
            constraint=constraint, images=images,
            parallel=said.get("parallel_tool_calls", True) and not is_object(chosen),
            likeliest=bool(said.get("top_logprobs")),
        )  # fmt: skip
        replies = self._replies(said, ask, [prompt], "messages")
        top = said.get("top_logprobs", 0)
        scores = {reply: Scores(tokenizer, prompt[-1], top) for reply in replies} if said.get("logprobs") else {}
        of = lambda reply, tokens: {"logprobs": scores[reply].chat(tokens)} if scores else {}
        if said.get("stream"):
            openings = {reply: {"delta": {"role": "assistant", "content": ""}} for reply in replies}
            gained = lambda reply, gain: {"delta": delta(gain)} | of(reply, gain.tokens)
            return self._stream(said, "chatcmpl", "chat.completion.chunk", replies, openings, gained)

        await unless_gone(request, self._finish(replies))
        write = lambda reply: {"message": message(reply.parts)} | of(reply, reply.tokens)
        contents = [await asyncio.to_thread(write, reply) for reply in replies]
        return self._whole("chatcmpl", "chat.completion", replies, contents)

    def _begun(self, served: Served, prompt: list[int], chosen: Any) -> str:
        """Returns the text with which a reply to a prompt has to begin, by its `tool_choice`."""
        if chosen in (None, "auto", "none"):
            return ""
        try:
            return served.tokenizer.beginning(prompt, None if chosen == "required" else chosen["function"]["name"])
        except ValueError as error:
            raise Refusal(str(error), "tool_choice") from error

    async def _constraint(
        self, said: dict[str, Any], served: Served, make: Callable[[str], AbstractConstraint]
    ) -> Callable[[], AbstractConstraint] | None:
        """Compiles the grammar that replies must follow, in a thread, and lets `make` try it; None without any."""
        if (structure := structure_of(said)) is None:
            return None
        field, kind, value = structure
        if said.get("tool_choice", "auto") not in ("auto", "none"):
            raise Refusal(f"{field} is for answers, and tool_choice asks for a call.", field)

        def compiled() -> Callable[[], AbstractConstraint]:
            grammar = served.grammars.compile(kind, value)
            make(grammar)
            return functools.partial(make, grammar)

        try:
            return await asyncio.to_thread(compiled)
        except ValueError as error:
            raise Refusal(f"{field}: {error}", field) from error

    async def _read(self, request: Request, fields: dict[str, Field], required: str) -> tuple[dict[str, Any], Served]:
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":  # any web page can make a browser send other types
            raise Refusal(f"The Content-Type must be application/json, not {kind or 'absent'}.", status=415)
        body = bytearray()
        try:
            async with asyncio.timeout_at(getattr(request.state, "deadline", None)):  # which `Timely` sets
                async for part in request.stream():
                    body += part
                    if len(body) > BODY:
                        raise Refusal(f"The body has more than {BODY} bytes. Send several requests.", status=413)
        except TimeoutError as error:
            raise Refusal(f"The request did not arrive within {self.SECONDS:g} seconds.", status=408) from error
        large = len(body) > 2**16
        said = await asyncio.to_thread(read, body, fields, required) if large else read(body, fields, required)
        served = self._named(said.get("model", next(iter(self.served))))
        if fields in (CHAT, COMPLETIONS) and served.model.head is not None:
            raise Refusal(f"{served.name!r} has a head for {served.model.head.kind}: it writes no text.", "model")
        return said, served

    def _sampling(self, said: dict[str, Any], served: Served, new: int) -> Sampling:
        """Returns the options with which a reply of up to `new` tokens is drawn, but for its seed."""
        top_k, biases = said.get("top_k", 0), {int(id): float(v) for id, v in said.get("logit_bias", {}).items()}
        if biases and max(biases) >= (size := served.model.config.vocab_size):
            raise Refusal(f"logit_bias has token ids that are not from 0 to {size - 1}.", "logit_bias")
        numbers = {"temperature": 1, "repetition_penalty": served.tokenizer.repetition_penalty} | said
        names = "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
        given: dict[str, Any] = {name: float(numbers[name]) for name in names if name in numbers}
        return Sampling(max_new_tokens=new, top_k=top_k if top_k > 0 else None, logit_bias=biases, **given)

    def _replies(self, said: dict[str, Any], ask: Ask, prompts: list[list[int]], field: str) -> list[Reply]:
        """Makes `n` replies for each prompt, in order, like `ask`, which has no prompt and no seed."""
        n, stop, new = said.get("n", 1), said.get("stop", []), ask.sampling.max_new_tokens
        vocab = ask.served.model.config.vocab_size
        if len(prompts) * n > REPLIES:
            raise Refusal(f"{len(prompts)} prompts with n={n} make more than {REPLIES} replies. Ask for fewer.", field)
        replies = []
        for prompt in prompts:
            if not prompt:
                raise Refusal(f"{field} has no tokens.", field)
            if len(prompt) + new > self.positions:
                raise Refusal(
                    f"{field} has {len(prompt)} tokens, which with {new} new ones exceeds the {self.positions} that "
                    "there is room for. Shorten it or ask for fewer.",
                    field,
                    code="context_length_exceeded",
                )
            if not 0 <= min(prompt) <= max(prompt) < vocab:
                raise Refusal(f"{field} has token ids that are not from 0 to {vocab - 1}.", field)
            seed = said.get("seed", secrets.randbits(32)) % 2**32
            own = dataclasses.replace(
                ask, prompt=prompt, sampling=dataclasses.replace(ask.sampling, seed=seed),
                stop=[stop] if is_text(stop) else stop,
            )  # fmt: skip
            replies += [Reply(len(replies) + i, own) for i in range(n)]
        return replies

    async def _finish(self, replies: list[Reply]) -> None:
        async with contextlib.aclosing(self.worker.write(replies)) as gains:
            async for _ in gains:
                pass

    def _head(self, prefix: str, kind: str, reply: Reply) -> dict[str, Any]:
        id, name = f"{prefix}-{uuid.uuid4().hex}", reply.ask.served.name
        return {"id": id, "object": kind, "created": int(time.time()), "model": name}

    def _whole(self, prefix: str, kind: str, replies: list[Reply], contents: list[dict[str, Any]]) -> Response:
        choices = [choice(reply, content, reply.finish) for reply, content in zip(replies, contents, strict=True)]
        return JSONResponse(self._head(prefix, kind, replies[0]) | {"choices": choices, "usage": usage(replies)})

    def _stream(
        self,
        said: dict[str, Any],
        prefix: str,
        kind: str,
        replies: list[Reply],
        openings: dict[Reply, dict[str, Any]],
        gained: Callable[[Reply, Gain], dict[str, Any]],
    ) -> Response:
        """Streams server-sent events: the openings, then what replies gain, as it comes, then the usage if asked."""
        counted = said.get("stream_options") == {"include_usage": True}
        head = self._head(prefix, kind, replies[0]) | ({"usage": None} if counted else {})

        async def events() -> AsyncIterator[str]:
            for reply, content in openings.items():
                yield event(head | {"choices": [choice(reply, content, reply.finish)]})
            try:
                async with contextlib.aclosing(self.worker.write(replies)) as gains:
                    async for reply, gain, finish in gains:
                        content = gained(reply, gain)
                        if gain.parts != Piece() or finish or content.get("logprobs"):
                            yield event(head | {"choices": [choice(reply, content, finish)]})
            except Refusal as error:
                yield event(error.body)
            except Exception as error:  # too late for another status
                yield event(Refusal(f"The server failed: {error!r}", status=500).body)
            else:
                if counted:
                    yield event(head | {"choices": [], "usage": usage(replies)})
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")


def tools_of(said: dict[str, Any]) -> Tools:
    """Returns the tools that the replies to a request may call; None for none."""
    tools, choice = said.get("tools") or None, said.get("tool_choice", "auto")
    if choice not in ("auto", "none") and not tools:
        raise Refusal("tool_choice asks for a call, but there are no tools.", "tool_choice")
    name = choice["function"]["name"] if is_object(choice) else None
    if name is not None and name not in [tool["function"]["name"] for tool in tools or ()]:
        raise Refusal(f"tool_choice names {name!r}, which is not among the tools.", "tool_choice")
    return None if choice == "none" else tools


def structure_of(said: dict[str, Any]) -> tuple[str, str, Any] | None:
    """Returns the field with a grammar for replies, and the kind and value of `Grammars.compile`; None if none has."""
    structure, form = said.get("structured_outputs"), said.get("response_format", {"type": "text"})
    if structure and form["type"] != "text":
        raise Refusal("Give either structured_outputs or response_format.", "structured_outputs")
    if structure:
        ((kind, value),) = structure.items()
        return "structured_outputs", kind, value
    if form["type"] == "text":
        return None
    return "response_format", "json", form.get("json_schema", {"schema": {"type": "object"}})["schema"]


async def unless_gone(request: Request, work: Coroutine[Any, Any, None]) -> None:
    """Waits for `work`, and cancels it if the client disconnects."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    done, leaving = asyncio.create_task(work), asyncio.create_task(gone())
    try:
        await asyncio.wait({done, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not done.done():
            raise Refusal("The client has left.", status=499)
        done.result()
    finally:
        done.cancel()
        leaving.cancel()


async def refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, Refusal)
    return JSONResponse(error.body, error.status)


async def not_routed(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path}: {error.detail}."
    return await refused(request, Refusal(message, status=error.status_code))


async def failed(request: Request, error: Exception) -> Response:
    return await refused(request, Refusal(f"The server failed: {error!r}", status=500))
