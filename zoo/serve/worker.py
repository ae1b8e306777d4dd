"""Runs the models in a thread of its own: steps their engines for all requests, and scores tokens in between."""

import asyncio
import concurrent.futures
import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from kernels.cross_entropy.chunks import Chunks
from zoo.generation.engine import Completion, Engine
from zoo.generation.shapes import bucket
from zoo.nn.model import AbstractModel
from zoo.serve.fields import TOP, Refusal
from zoo.serve.metrics import Metrics
from zoo.serve.reply import Gain, Reply, Token
from zoo.serve.served import Served


T = TypeVar("T")


@eqx.filter_jit
def score(
    model: AbstractModel, tokens: Int[Array, "1 seq"], top: int
) -> tuple[Float[Array, " seq"], Int[Array, "seq top"], Float[Array, "seq top"]]:
    """Computes log-probabilities after each token: of the token that follows, and of the `top` likeliest, with ids.

    Logits exist for 128 positions at a time, to save memory. The numbers of the last position are meaningless.
    """
    x, _, _ = model.hidden(tokens)
    chunks = Chunks.of(1, tokens.shape[1], 128)

    def numbers(part: tuple[Array, Array]) -> tuple[Array, Array, Array]:
        x, following = part
        logp = jax.nn.log_softmax(model.unembed(x).astype(jnp.float32), axis=-1)
        values, ids = jax.lax.top_k(logp, top)
        return jnp.take_along_axis(logp, following[..., None], axis=-1)[..., 0], ids, values

    found = jax.lax.map(numbers, (chunks.cut(x), chunks.cut(jnp.roll(tokens, -1, axis=1))))
    own, ids, values = (chunks.joined(a)[0] for a in found)
    return own, ids, values


def no_numbers() -> Refusal:
    return Refusal(
        "The model's logits are NaN: its weights are damaged, or overflow in this dtype. Start the server with another "
        "--dtype or without --quantize, or fetch the weights anew.",
        status=500,
    )


class Worker(threading.Thread):
    """The models' thread. Coroutines send work to its inbox, and it sends results back through their event loop.

    Each model has an engine of its own, made when it is first asked. Engines take turns, step by step.
    """

    def __init__(self, first: Served, make_engine: Callable[[Served], Engine], metrics: Metrics):
        super().__init__(name="zoo.serve", daemon=True)
        self._make_engine, self._metrics = make_engine, metrics
        # Those made; none after a failure, which may lose arrays. A model with a head writes nothing.
        self._engines = {} if first.model.head is not None else {first: make_engine(first)}
        self._inbox: queue.SimpleQueue[Callable[[], Any]] = queue.SimpleQueue()
        self._told: set[Served] = set()  # those of which the log says that the first reply is compiled
        self._running: dict[Completion, tuple[Reply, Callable[[Any], Any]]] = {}
        self._open = True
        self._scorers: dict[tuple[Served, tuple[int, ...]], Callable[..., Any]] = {}  # by the shape of tokens
        self._compiling = asyncio.Lock()

    def run(self) -> None:
        while self._open:
            try:
                if not self._running or not self._inbox.empty():
                    self._inbox.get()()
                    continue
                for served, engine in list(self._engines.items()):
                    self._step(served, engine)
            except Exception as error:  # whatever fails, waiting clients must be told
                logging.getLogger("uvicorn.error").exception("The engine failed.")
                for _, deliver in self._running.values():
                    deliver(error)
                self._running, self._engines = {}, {}

    def _step(self, served: Served, engine: Engine) -> None:
        found = engine.tokens_found
        new = engine.step()
        self._metrics.add("zoo_prompt_tokens_found_total", engine.tokens_found - found, model=served.name)
        self._metrics.add("zoo_generated_tokens_total", sum(map(len, new.values())), model=served.name)
        for completion, tokens in new.items():
            reply, deliver = self._running[completion]
            logprobs, likeliest = completion.logprobs[-len(tokens) :], completion.likeliest[-len(tokens) :]
            if np.isnan(logprobs).any():
                self._cancel([reply])
                deliver(no_numbers())
                continue
            gain = reply.push(list(map(Token, tokens, logprobs, likeliest or [{}] * len(tokens))))
            if completion.ended and reply.constraint is not None and not reply.constraint.complete:
                deliver(Refusal("The grammar got too complex for this reply, and ended it.", status=500))
            else:
                deliver((reply, gain, reply.finish))
            if reply.finish:
                self._cancel([reply])

    def replies(self) -> tuple[int, int]:
        """Counts the replies that have tokens, and those that have none yet."""
        begun = [bool(reply.tokens) for reply, _ in list(self._running.values())]
        return sum(begun), len(begun) - sum(begun)

    def cut(self) -> None:
        """Ends all replies early, each with a refusal that says so."""
        self._inbox.put(self._cut)

    def _cut(self) -> None:
        if self._running:
            logging.getLogger("uvicorn.error").warning("Stopping: %d replies are cut.", len(self._running))
        for reply, deliver in list(self._running.values()):
            self._cancel([reply])
            deliver(Refusal(f"The server stops, and cut this reply after {len(reply.tokens)} tokens.", status=503))

    def close(self) -> None:
        self._inbox.put(functools.partial(setattr, self, "_open", False))
        self.join()

    async def write(self, replies: Sequence[Reply]) -> AsyncGenerator[tuple[Reply, Gain, str | None], None]:
        """Yields (reply, gain, finish) as tokens come; `finish` is None before the last. Closing frees rows."""
        events: asyncio.Queue[Any] = asyncio.Queue()
        deliver = functools.partial(asyncio.get_running_loop().call_soon_threadsafe, events.put_nowait)
        left = [reply for reply in replies if not reply.finish]
        times = dict.fromkeys(left, began := time.monotonic())
        self._inbox.put(functools.partial(self._submit, list(left), deliver))
        try:
            while left:
                event = await events.get()
                if isinstance(event, Exception):
                    raise event
                reply, _, finish = event
                now = time.monotonic()
                name = "zoo_first_token_seconds" if times[reply] == began else "zoo_token_gap_seconds"
                self._metrics.observe(name, now - times[reply])
                times[reply] = now
                yield event
                if finish:
                    left.remove(reply)
                    self._metrics.observe("zoo_reply_seconds", now - began)
                    self._metrics.add("zoo_replies_total", model=reply.ask.served.name, reason=finish)
        finally:
            self._inbox.put(functools.partial(self._cancel, left))

    async def score(self, served: Served, tokens: list[int]) -> list[Token]:
        """Computes the log-probability of each token of a text but the first, and the `TOP` likeliest in its place.

        This takes one forward pass, padded to a power of two so that few lengths are compiled. Compiling is done in
        another thread, while replies go on.
        """
        limit, top = served.model.config.max_position_embeddings, min(TOP, served.model.config.vocab_size)
        padded = np.zeros((1, min(limit, bucket(len(tokens), 128))), np.int32)
        padded[0, : len(tokens)] = tokens
        async with self._compiling:
            program = await asyncio.to_thread(self._scorer, served, padded.shape, top)
        own, ids, values = await self.call(lambda: jax.device_get(program(served.model, jnp.asarray(padded), top)))
        n = len(tokens) - 1
        if np.isnan(own[:n]).any():
            raise no_numbers()
        likeliest = [dict(zip(*each, strict=True)) for each in zip(ids[:n].tolist(), values[:n].tolist(), strict=True)]
        return [Token(tokens[0], None, {}), *map(Token, tokens[1:], own[:n].tolist(), likeliest)]

    async def call(self, function: Callable[[], T]) -> T:
        """Calls a function in the models' thread, and returns what it returns."""
        future: concurrent.futures.Future[T] = concurrent.futures.Future()

        def work() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except Exception as error:  # raised in the caller
                    future.set_exception(error)

        self._inbox.put(work)
        return await asyncio.wrap_future(future)

    def _scorer(self, served: Served, shape: tuple[int, ...], top: int) -> Callable[..., Any]:
        if (served, shape) not in self._scorers:
            lowered = score.lower(served.model, jnp.zeros(shape, jnp.int32), top)
            self._scorers[served, shape] = lowered.compile()
        return self._scorers[served, shape]

    def _submit(self, replies: Sequence[Reply], deliver: Callable[[Any], Any]) -> None:
        try:
            for ask, group in itertools.groupby(replies, key=lambda reply: reply.ask):
                engine, same = self._engine(ask.served), list(group)
                self._metrics.add("zoo_prompt_tokens_total", len(ask.prompt), model=ask.served.name)
                completions = engine.submit(
                    ask.prompt, ask.sampling, samples=len(same), images=ask.images, owner=deliver,
                    top=TOP if ask.likeliest else 0,  # one number, so that one further program is compiled
                    constrained=[reply.constraint for reply in same if reply.constraint is not None],
                )  # fmt: skip
                for completion, reply in zip(completions, same, strict=True):
                    self._running[completion] = reply, deliver
        except Exception as error:  # raised in the caller
            self._cancel(replies)
            deliver(error)

    def _engine(self, served: Served) -> Engine:
        if served not in self._told:
            self._told.add(served)
            logging.getLogger("uvicorn.error").info(
                "Compiling %s for its first reply, which may take minutes.", served.name
            )
        if served not in self._engines:
            self._engines[served] = self._make_engine(served)
        return self._engines[served]

    def _cancel(self, replies: Sequence[Reply]) -> None:
        for completion in [completion for completion, (reply, _) in self._running.items() if reply in replies]:
            reply, _ = self._running.pop(completion)
            self._engines[reply.ask.served].cancel(completion)
