"""Encodes prompts of requests in threads, since a megabyte of text takes a second, and within limits of memory."""

import asyncio
import contextlib
import itertools
import weakref
from collections.abc import Callable
from typing import Any

from zoo.nn.model import Images, has_vision
from zoo.serve.fields import HELD, IMAGES, PATCHES, PIXELS, Refusal, in_older_form, in_template_form
from zoo.serve.served import Served
from zoo.text.messages import has_images
from zoo.text.prompts import Limits, TooLong, check_room, encode_prompt
from zoo.text.tokenizer import Tokenizer


class Prompts:
    """Encodes prompts of up to `positions` tokens."""

    def __init__(self, positions: int):
        self._positions = positions
        self._seeing, self._count = asyncio.Lock(), itertools.count()
        self._held: weakref.WeakValueDictionary[int, Images] = weakref.WeakValueDictionary()  # of requests in progress

    async def texts(
        self, served: Served, texts: list[str], field: str, encode: Callable[[str], list[int]]
    ) -> list[list[int]]:
        """Encodes texts. A text that is too long is refused first."""
        try:
            check_room(served.tokenizer, max(texts, key=len), self._positions, field)
        except TooLong as error:
            raise Refusal(str(error), field, code="context_length_exceeded") from error
        return await asyncio.to_thread(lambda: list(map(encode, texts)))

    async def chat(
        self, served: Served, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[list[int], Images | None]:
        """Encodes a chat and its images. `options` are those of `Tokenizer.render`."""
        tokenizer, sighted = served.tokenizer, has_vision(served.model)
        messages = await asyncio.to_thread(lambda: [in_template_form(each, sighted) for each in messages])
        try:
            if has_images(messages):
                return await self._see(served, messages, options)
            rendered = await asyncio.to_thread(_rendered, tokenizer, messages, options)
            (prompt,) = await self.texts(served, [rendered], "messages", lambda text: tokenizer.encode_marked(text)[0])
        except ValueError as error:
            code = "context_length_exceeded" if isinstance(error, TooLong) else None
            raise Refusal(str(error), "messages", code=code) from error
        return prompt, None

    async def _see(
        self, served: Served, messages: list[dict[str, Any]], options: dict[str, Any]
    ) -> tuple[list[int], Images]:
        """Encodes a chat with images, one request at a time, so that only one request's images are decoded at once."""
        async with self._seeing:
            if sum(images.patches.nbytes for images in list(self._held.values())) > HELD:
                raise Refusal("Images of other requests fill the server's memory. Ask again later.", status=503)
            limits = Limits(self._positions, IMAGES, PIXELS, PATCHES)
            prompt, images = await asyncio.to_thread(
                encode_prompt, served.model, served.tokenizer, messages, limits=limits, **options
            )
        self._held[next(self._count)] = images
        return prompt, images


def _rendered(tokenizer: Tokenizer, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
    """Renders a chat, in the form of older templates if the template refuses the other."""
    try:
        return tokenizer.render_whole(messages, **options)
    except ValueError as error:
        if messages != (older := list(map(in_older_form, messages))):
            with contextlib.suppress(ValueError):
                return tokenizer.render_whole(older, **options)
        raise error
