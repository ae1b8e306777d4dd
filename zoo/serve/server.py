"""Answers requests over HTTP, whole or as server-sent events, in the forms of OpenAI's API reference."""

import asyncio
import contextlib
import dataclasses
import hmac
import itertools
import json
import re
import secrets
import time
import uuid
import weakref
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import numpy as np
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from zoo.generation.decoding import CHUNK
from zoo.generation.engine import Engine
from zoo.generation.sampling import Sampling
from zoo.generation.speculative import AbstractDraft
from zoo.nn.model import AbstractModel, Images, has_vision
from zoo.serve.fields import (
    BODY,
    CHAT,
    COMPLETIONS,
    HELD,
    IMAGES,
    PATCHES,
    PIXELS,
    REPLIES,
    Field,
    Refusal,
    in_template_form,
    is_text,
    read,
)
from zoo.serve.worker import Ask, Reply, Worker
from zoo.text.harmony import Parts
from zoo.text.messages import has_images
from zoo.text.prompts import Limits, TooLong, check_room, encode_prompt
from zoo.text.tokenizer import Tokenizer


STRIDE = 4  # tokens of a step: with more the device waits less for the host, with fewer clients wait less


class Server:
    """Serves one model under one name. `app()` is the ASGI application.

    Requests must carry `api_key`, if there is one. Their Host header must name localhost or one of `hosts`, because any
    web page can point a host name of its own at this machine. "*", or an address that means all interfaces, turns this
    check off.
    """

    SECONDS = 30.0  # a request, head and body together, must arrive within this time

    def __init__(
        self,
        name: str,
        model: AbstractModel,
        tokenizer: Tokenizer,
        *,
        batch: int,
        max_tokens: int,
        draft: AbstractDraft | None = None,
        api_key: str | None = None,
        hosts: Sequence[str] = (),
    ):
        for option, value in ("batch", batch), ("max_tokens", max_tokens):
            if value < 1:
                raise ValueError(f"{option}={value} leaves no room for any reply; it must be at least 1.")
        self.name, self.model, self.tokenizer, self.vocab_size = name, model, tokenizer, model.config.vocab_size
        self.api_key = api_key
        self.hosts = (
            None if {"*", "0.0.0.0", "::"} & {*hosts} else {"localhost", "127.0.0.1", "::1", *map(str.lower, hosts)}
        )
        self.positions = min(max_tokens, model.config.max_position_embeddings)
        make = lambda: Engine(
            model,
            batch=batch,
            max_tokens=self.positions,
            stops=tokenizer.eos,
            stride=STRIDE,
            draft=draft,
            prefixes=True,
            beside=CHUNK,
        )
        self.worker = Worker(model, make)
        self._seeing, self._count = asyncio.Lock(), itertools.count()
        self._held: weakref.WeakValueDictionary[int, Images] = weakref.WeakValueDictionary()  # of requests in progress

    def app(self) -> ASGIApp:
        @contextlib.asynccontextmanager
        async def lifespan(_: Starlette) -> AsyncIterator[None]:
            self.worker.start()
            yield
            await asyncio.to_thread(self.worker.close)

        app = Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/completions", self.completions, methods=["POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ],
            exception_handlers={Refusal: refused, HTTPException: not_routed, Exception: failed},
            lifespan=lifespan,
        )

        async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
            await self._guarded(app, scope, receive, send)

        return guarded

    async def models(self, request: Request) -> Response:
        model = {"id": self.name, "object": "model", "created": 0, "owned_by": "zoo", "max_model_len": self.positions}
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        said = await self._read(request, COMPLETIONS, "prompt")
        one = is_text(said["prompt"]) or type(said["prompt"][0]) is int
        prompts = [said["prompt"]] if one else said["prompt"]
        if is_text(prompts[0]):
            prompts = await self._encode(prompts, "prompt", self.tokenizer.encode)
        replies = self._replies(said, prompts, said.get("max_tokens", 16), "prompt")
        echo, top = said.get("echo", False), said.get("logprobs")
        echoed = lambda reply: self.tokenizer.decode(reply.ask.prompt) if echo else ""
        if said.get("stream"):
            if top is not None:
                raise Refusal("logprobs cannot be streamed.", "logprobs")
            shown = lambda reply, piece: {"text": piece, "logprobs": None}
            openings = {reply: shown(reply, echoed(reply)) for reply in replies if echo}
            return self._stream(said, "cmpl", "text_completion", replies, openings, shown)

        await unless_gone(request, self._finish(replies))
        contents = []
        for reply in replies:
            logprobs = None if top is None else await self._logprobs(reply, top, echo)
            contents.append({"text": echoed(reply) + reply.text, "logprobs": logprobs})
        return self._whole("cmpl", "text_completion", replies, contents)

    async def chat(self, request: Request) -> Response:
        said = await self._read(request, CHAT, "messages")
        options = {"tools": said.get("tools"), "add_generation_prompt": True} | said.get("chat_template_kwargs", {})
        images, sighted = None, has_vision(self.model)
        messages = await asyncio.to_thread(lambda: [in_template_form(each, sighted) for each in said["messages"]])
        try:
            if has_images(messages):
                prompt, images = await self._see(messages, options)
            else:
                rendered = await asyncio.to_thread(self.tokenizer.render_whole, messages, **options)
                encode = lambda text: self.tokenizer.encode_marked(text)[0]
                (prompt,) = await self._encode([rendered], "messages", encode)
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else None
            raise Refusal(str(error), "messages", code=code) from error
        new = said.get("max_completion_tokens", said.get("max_tokens", max(1, self.positions - len(prompt))))
        replies = self._replies(said, [prompt], new, "messages", special=self.tokenizer.channels, images=images)
        parts = {reply: Parts(self.tokenizer.channels) for reply in replies}

        def shown(reply: Reply, piece: str) -> dict[str, str]:
            reasoning, answer = parts[reply].push(piece)
            return {"content": answer} | ({"reasoning_content": reasoning} if reasoning else {})

        if said.get("stream"):
            openings = {reply: {"delta": {"role": "assistant", "content": ""}} for reply in replies}
            deltas = lambda reply, piece: {"delta": shown(reply, piece)}
            return self._stream(said, "chatcmpl", "chat.completion.chunk", replies, openings, deltas)

        await unless_gone(request, self._finish(replies))
        contents = [{"message": {"role": "assistant"} | shown(reply, reply.text)} for reply in replies]
        return self._whole("chatcmpl", "chat.completion", replies, contents)

    async def _guarded(self, app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
        """Checks the host name and the API key of a request before anything else reads the request.

        A response before the whole body has arrived closes the connection, which would wait for the rest without end.
        """
        if scope["type"] != "http":
            return await app(scope, receive, send)
        request = Request(scope)
        arrived = request.headers.get("content-length", "0") == "0" and "transfer-encoding" not in request.headers

        async def received() -> Message:
            nonlocal arrived
            message = await receive()
            arrived = arrived or (message["type"] == "http.request" and not message.get("more_body", False))
            return message

        async def sent(message: Message) -> None:
            if message["type"] == "http.response.start" and not arrived:
                MutableHeaders(scope=message)["connection"] = "close"
            await send(message)

        try:
            self._check(request)
        except Refusal as error:
            arrived = False  # so that the connection is closed
            app = await refused(request, error)
        await app(scope, received, sent)

    def _check(self, request: Request) -> None:
        host = re.sub(r":\d*$", "", request.headers.get("host", "")).strip("[]").lower()
        if self.hosts is not None and host not in self.hosts:
            raise Refusal(f"This server is not called {host!r}; if it is, start it with --hosts.", status=421)
        given = request.headers.get("authorization", "").encode()
        if self.api_key is not None and not hmac.compare_digest(given, f"Bearer {self.api_key}".encode()):
            raise Refusal("The API key is missing or wrong.", status=401, code="invalid_api_key")

    async def _read(self, request: Request, fields: dict[str, Field], required: str) -> dict[str, Any]:
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
        if said.get("model", self.name) != self.name:
            message = f"There is no model {said['model']!r} here, only {self.name!r}."
            raise Refusal(message, "model", status=404, code="model_not_found")
        return said

    async def _encode(self, texts: list[str], field: str, encode: Callable[[str], list[int]]) -> list[list[int]]:
        """Tokenises in a thread, because a megabyte takes a second. A text that is too long is refused first."""
        try:
            check_room(self.tokenizer, max(texts, key=len), self.positions, field)
        except TooLong as error:
            raise Refusal(str(error), field, code="context_length_exceeded") from error
        return await asyncio.to_thread(lambda: list(map(encode, texts)))

    async def _see(self, messages: list[dict[str, Any]], options: dict[str, Any]) -> tuple[list[int], Images]:
        """Encodes a chat with images, one request at a time, so that only one request's images are decoded at once."""
        async with self._seeing:
            if sum(images.patches.nbytes for images in list(self._held.values())) > HELD:
                raise Refusal("Images of other requests fill the server's memory. Ask again later.", status=503)
            limits = Limits(self.positions, IMAGES, PIXELS, PATCHES)
            prompt, images = await asyncio.to_thread(
                encode_prompt, self.model, self.tokenizer, messages, limits=limits, **options
            )
        self._held[next(self._count)] = images
        return prompt, images

    def _replies(
        self,
        said: dict[str, Any],
        prompts: list[list[int]],
        new: int,
        field: str,
        *,
        special: bool = False,
        images: Images | None = None,
    ) -> list[Reply]:
        """Makes `n` replies for each prompt, in order; `special` and `images` are those of `Ask`."""
        top_k, n, stop = said.get("top_k", 0), said.get("n", 1), said.get("stop", [])
        numbers = {"temperature": 1, "repetition_penalty": self.tokenizer.repetition_penalty} | said
        names = "temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"
        given: dict[str, Any] = {name: float(numbers[name]) for name in names if name in numbers}
        sampling = Sampling(max_new_tokens=new, top_k=top_k if top_k > 0 else None, **given)
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
            if not 0 <= min(prompt) <= max(prompt) < self.vocab_size:
                raise Refusal(f"{field} has token ids that are not from 0 to {self.vocab_size - 1}.", field)
            seed = said.get("seed", secrets.randbits(32)) % 2**32
            own = dataclasses.replace(sampling, seed=seed)
            ask = Ask(prompt, own, [stop] if is_text(stop) else stop, special, images)
            replies += [Reply(len(replies) + i, ask, self.tokenizer) for i in range(n)]
        return replies

    async def _finish(self, replies: list[Reply]) -> None:
        async with contextlib.aclosing(self.worker.write(replies)) as pieces:
            async for _ in pieces:
                pass

    def _head(self, prefix: str, kind: str) -> dict[str, Any]:
        return {"id": f"{prefix}-{uuid.uuid4().hex}", "object": kind, "created": int(time.time()), "model": self.name}

    def _whole(self, prefix: str, kind: str, replies: list[Reply], contents: list[dict[str, Any]]) -> Response:
        choices = [choice(reply, content, reply.finish) for reply, content in zip(replies, contents, strict=True)]
        return JSONResponse(self._head(prefix, kind) | {"choices": choices, "usage": usage(replies)})

    def _stream(
        self,
        said: dict[str, Any],
        prefix: str,
        kind: str,
        replies: list[Reply],
        openings: dict[Reply, dict[str, Any]],
        shown: Callable[[Reply, str], dict[str, Any]],
    ) -> Response:
        """Streams server-sent events: the openings, then pieces of replies as they come, then the usage if asked."""
        counted = said.get("stream_options") == {"include_usage": True}
        head = self._head(prefix, kind) | ({"usage": None} if counted else {})

        async def events() -> AsyncIterator[str]:
            for reply, content in openings.items():
                yield event(head | {"choices": [choice(reply, content, reply.finish)]})
            try:
                async with contextlib.aclosing(self.worker.write(replies)) as pieces:
                    async for reply, piece, finish in pieces:
                        if piece or finish:
                            yield event(head | {"choices": [choice(reply, shown(reply, piece), finish)]})
            except Refusal as error:
                yield event(error.body)
            except Exception as error:  # too late for another status
                yield event(Refusal(f"The server failed: {error!r}", status=500).body)
            else:
                if counted:
                    yield event(head | {"choices": [], "usage": usage(replies)})
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _logprobs(self, reply: Reply, top: int, echo: bool) -> dict[str, list[Any]]:
        """Makes OpenAI's `logprobs` of the reply with its end token, and with `echo` of the prompt, too.

        As in OpenAI's API, the first token of a prompt has none. Every other token has its own log-probability, and
        those of the `top` likeliest tokens.
        """
        tokens = reply.ask.prompt + reply.tokens
        found = await self.worker.score(tokens)
        return await asyncio.to_thread(self._named, tokens, 0 if echo else len(reply.ask.prompt), top, *found)

    def _named(
        self, tokens: list[int], start: int, top: int, own: np.ndarray, ids: np.ndarray, values: np.ndarray
    ) -> dict[str, list[Any]]:
        names, logprobs, tops, offsets, offset = [], [], [], [], 0
        for i in range(start, len(tokens)):
            names.append(self._name(tokens, i, tokens[i]))
            offsets.append(offset)
            offset += len(names[-1])
            logprobs.append(None if i == 0 else finite(own[i - 1]))
            likeliest: dict[str, float] = {}
            if i > 0:
                for id, value in [*zip(ids[i - 1, :top], values[i - 1, :top], strict=True), (tokens[i], own[i - 1])]:
                    likeliest.setdefault(self._name(tokens, i, int(id)), finite(value))
            tops.append(likeliest if i > 0 and top else None)
        return {"tokens": names, "token_logprobs": logprobs, "top_logprobs": tops, "text_offset": offsets}

    def _name(self, tokens: list[int], at: int, id: int) -> str:
        """Names a token by the text that it adds to the one before it, or by its id if that text is incomplete."""
        before = tokens[max(at - 1, 0) : at]
        name = self.tokenizer.decode([*before, id], special=True)[len(self.tokenizer.decode(before, special=True)) :]
        return f"token_id:{id}" if "\ufffd" in name or not name else name


def choice(reply: Reply, content: dict[str, Any], finish: str | None) -> dict[str, Any]:
    return {"index": reply.index, "finish_reason": finish, "logprobs": None} | content


def usage(replies: list[Reply]) -> dict[str, int]:
    """Counts tokens. Each prompt counts once, however many replies it has."""
    prompts = sum(len(ask.prompt) for ask in {reply.ask for reply in replies})
    written = sum(len(reply.tokens) for reply in replies)
    return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


def event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def finite(logprob: Any) -> float:
    """Replaces -inf, which JSON lacks, by -9999, as vLLM does."""
    return max(float(logprob), -9999.0)


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
