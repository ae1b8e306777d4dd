"""Messages of chats: their images, and the reasoning of the assistant's, which have several forms."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]] | None

REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message that may hold its reasoning


def image_parts(messages: Messages) -> Iterator[Mapping[str, Any]]:
    """Yield the parts of a chat's messages that are images or videos, in order."""
    for message in messages:
        if isinstance(message.get("content"), list | tuple):
            yield from (part for part in message["content"] if is_image(part))


def is_image(part: Any) -> bool:
    """Whether a part of a message is an image, or a video."""
    return isinstance(part, Mapping) and part.get("type") in ("image", "image_url", "video")


def has_images(messages: Messages) -> bool:
    """Whether a message of a chat holds an image."""
    return next(image_parts(messages), None) is not None


def check_text(messages: Messages) -> None:
    """Raise ValueError if a message holds an image."""
    if has_images(messages):
        raise ValueError(
            "A message holds an image. zoo.generate, the chat and the server take it, and training with --vision."
        )


def join_texts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message whose content is one text, if the content was a list of texts."""
    parts = message.get("content")
    if not isinstance(parts, list | tuple):
        return message
    texts = [part.get("text") for part in parts if isinstance(part, Mapping) and part.get("type") == "text"]
    whole = [text for text in texts if isinstance(text, str)]
    return {**message, "content": "".join(whole)} if len(whole) == len(parts) else message


def with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Copy a message's reasoning to every field in which templates look for it, as transformers does."""
    found = next((message[name] for name in REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def reasoning_of(message: Mapping[str, Any]) -> str:
    """Return a message's reasoning: from a field of REASONING, else from before </think> in the content, else ""."""
    found = next((message[name] for name in REASONING if message.get(name)), None)
    if not isinstance(found, str):
        content = message.get("content")
        before, closed, _ = content.rpartition("</think>") if isinstance(content, str) else ("", "", "")
        found = before.rpartition("<think>")[2] if closed else ""
    return found.strip()
