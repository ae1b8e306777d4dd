"""Prompts with images: turns chats with images or videos into token ids and the inputs of the model's vision tower."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from zoo.nn.model import AbstractModel, Images, pad_patches, require_vision
from zoo.text.messages import Messages, image_parts, is_image
from zoo.text.tokenizer import Tokenizer
from zoo.vision.model import AbstractVision
from zoo.vision.open import begin_image, open_image
from zoo.vision.processors.base import AbstractImageProcessor, Processed


# Keys in which a part of a message gives its image's location: transformers' and OpenAI's.
SOURCES = ("image", "path", "url", "base64", "image_url")


@dataclasses.dataclass(frozen=True)
class Limits:
    """The most that a chat with images may have. A chat with more is refused before an image is decoded."""

    tokens: int
    images: int
    pixels: int
    """The most pixels of all images together, at their files' sizes."""
    bytes: int
    """The most bytes of all patches that the tower reads."""


class TooLong(ValueError):
    """A prompt has more tokens than there is room for."""


def check_room(tokenizer: Tokenizer, text: str, tokens: int, name: str) -> None:
    """Raise TooLong, before a text is tokenised, if it has more characters than `tokens` tokens could have."""
    if len(text) > (most := tokens * tokenizer.longest):
        raise TooLong(
            f"{name} has {len(text)} characters; the {tokens} tokens that there is room for have at most {most}. "
            "Shorten it."
        )


def encode_prompt(
    model: AbstractModel,
    tokenizer: Tokenizer,
    messages: Messages,
    *,
    remote: bool = False,
    limits: Limits | None = None,
    **options: Any,
) -> tuple[list[int], Images]:
    """Turn a chat with images into token ids, and images in the form of a batch of one row.

    By default the ids end with the opening of an assistant's turn. The content of a message with images is a list of
    `{"type": "text", "text": ...}` and `{"type": "image", "image": ...}`, whose image is anything that
    `zoo.vision.open.open_image` takes. As in transformers, the image's key may also be "path", "url" or "base64", or
    the part may be `{"type": "image_url", "image_url": {"url": ...}}`. A video is
    `{"type": "video", "video": [...], "fps": 2}`, with its frames, each as an image, and the number of frames in a
    second; or, in place of "fps", "seconds" with the time of each frame.

    Args:
        model: a model with a vision tower, loaded from a folder with a preprocessor_config.json.
        tokenizer: a tokenizer whose chat template has a place for images.
        messages: the chat.
        remote: whether http(s) URLs are downloaded.
        limits: refuse more than these.
        options: those of `Tokenizer.render`.

    Raises:
        ValueError: the model takes no images, the template has no place for them, an image cannot be read, or there are
            more or larger images than `limits` allow.
        TooLong: there are more tokens than `limits` allow.
    """
    vision, source = _vision_of(model)
    parts = list(image_parts(messages))
    kinds = _kinds(vision, parts)
    processors = {kind: kind.read(source) for kind in dict.fromkeys(kinds)}
    by = [processors[kind] for kind in kinds]
    if limits and len(parts) > limits.images:
        raise ValueError(f"The chat has {len(parts)} images, and {limits.images} are the most. Show fewer.")
    plain = [without_images(message) for message in messages]
    given: dict[str, Any] = {"add_generation_prompt": True} | options
    text = tokenizer.render_whole(plain, **given)
    if limits:
        check_room(tokenizer, text, limits.tokens, "The chat")
    measured = _measured(by, parts, remote, limits)
    for processor in processors.values():
        said = [said for own, (said, _) in zip(by, measured, strict=True) if own is processor]
        text = processor.expand(text, said)
    ids, _ = tokenizer.encode_marked(text)
    if limits and len(ids) > limits.tokens:
        raise TooLong(f"The chat has {len(ids)} tokens, and there is room for {limits.tokens}. Shorten it.")
    shown = [measured.pop(0)[1]() for _ in parts]  # one after another, so that one is decoded at a time
    placeholders = [tokenizer.encode(processor.placeholder, special=False)[0] for processor in processors.values()]
    return ids, _batch(vision, by, shown, ids, placeholders)


def _batch(
    vision: AbstractVision,
    processors: Sequence[Any],
    shown: Sequence[Processed],
    ids: Sequence[int],
    placeholders: Sequence[int],
) -> Images:
    """Put images into a batch of one row of tokens, `ids`, in which the `placeholders` stand for their features."""
    counts = [one.text.count(own.placeholder) // len(one.shapes) for own, one in zip(processors, shown, strict=True)]
    return Images.of(
        stacked([picture for one in shown for picture in one.pictures], vision.processor),
        [count for count, one in zip(counts, shown, strict=True) for _ in one.shapes],
        np.array([ids]),
        placeholders,
        np.concatenate([one.shapes for one in shown]),
    )


def _kinds(vision: AbstractVision, parts: Sequence[Mapping[str, Any]]) -> list[type[Any]]:
    """Return the class of the processor of each part, an image or a video.

    Raises:
        ValueError: a part is a video, and the model takes none.
    """
    kinds = [vision.video if part["type"] == "video" else vision.processor for part in parts]
    if None in kinds:
        raise ValueError("The model takes images, but no videos: show it some of the frames as images.")
    return [kind for kind in kinds if kind is not None]


def stacked(
    pictures: Sequence[Float[np.ndarray, "_ pixels"]], processor: AbstractImageProcessor | type[AbstractImageProcessor]
) -> Float[np.ndarray, "pictures patches pixels"]:
    """Stack the patches of pictures, padded to a power of two if shapes vary, so that few shapes are compiled."""
    most = max(map(len, pictures))
    return pad_patches(pictures, 1 << (most - 1).bit_length() if processor.keeps_shape else most)


def _measured(
    processors: Sequence[Any], parts: Sequence[Mapping[str, Any]], remote: bool, limits: Limits | None
) -> list[tuple[str, Callable[[], Processed]]]:
    """Return each image's text in the prompt, which depends on its size, and a function that decodes and processes it.

    A video is processed immediately.

    Raises:
        ValueError: an image cannot be read, or the images exceed `limits`.
    """
    seen: list[tuple[str, Callable[[], Processed]]] = []
    pictures: list[tuple[int, int]] = []
    tokens = pixels = 0
    for processor, part in zip(processors, parts, strict=True):
        if part["type"] == "video":
            video = _video(processor, part, remote)
            seen.append((video.text, lambda video=video: video))
            continue
        image = begin_image(source_of(part), remote=remote)
        size = image.height, image.width
        said, sizes = processor.text(*size), processor.sizes(*size)
        seen.append((said, lambda processor=processor, image=image: processor(image.decode())))
        tokens += said.count(processor.placeholder)
        pixels += image.height * image.width
        pictures += sizes
        if limits is None:
            continue
        if tokens > limits.tokens:
            raise TooLong(f"The chat's images are more than the {limits.tokens} tokens that there is room for.")
        if pixels > limits.pixels:
            raise ValueError(f"The chat's images have more than {limits.pixels:,} pixels: make them smaller.")
        # All are padded to the patches of the largest, and these to a power of two (at most twice as many). A pixel has
        # three channels in float32, and with Qwen two frames.
        largest = max(height * width for height, width in pictures)
        if len(pictures) * largest * 2 * 4 * 3 * 2 > limits.bytes:
            raise ValueError(
                f"The chat's images may need more than {limits.bytes:,} bytes: show fewer or smaller ones."
            )
    return seen


def _video(processor: Any, part: Mapping[str, Any], remote: bool) -> Processed:
    """Process a video for the tower and the prompt.

    Raises:
        ValueError: a frame cannot be read, the video is no list of frames, or the frames' times are not given.
    """
    frames, fps, seconds = part.get("video"), part.get("fps"), part.get("seconds")
    if not isinstance(frames, list | tuple):
        raise ValueError('A video is a list of its frames, each as an image: {"type": "video", "video": [...]}.')
    if seconds is None:
        if not (isinstance(fps, int | float) and fps > 0):
            raise ValueError('A video says how many frames it has in a second, "fps", or the times of all, "seconds".')
        seconds = [n / fps for n in range(len(frames))]
    return processor([open_image(frame, remote=remote) for frame in frames], list(seconds))


def processor_of(model: AbstractModel) -> AbstractImageProcessor:
    """Read a model's image processor from the folder that the model was loaded from.

    Raises:
        ValueError: the model takes no images, or there is no such folder or file.
    """
    vision, source = _vision_of(model)
    return vision.processor.read(source)


def _vision_of(model: AbstractModel) -> tuple[AbstractVision, pathlib.Path]:
    """Return a model's vision part, and the folder that the model was loaded from."""
    vision, source = require_vision(model).vision, model.config.source
    assert isinstance(vision, AbstractVision), "zoo.models say what prepares their images"
    if source is None:
        raise ValueError("The model was made without a checkpoint, so nothing says how its images are prepared.")
    return vision, source


def source_of(part: Mapping[str, Any], elsewhere: Callable[[], Any] = lambda: None) -> Any:
    """Return the location of a part's image, as `open_image` takes it; if the part has none, that of `elsewhere()`.

    Raises:
        ValueError: neither gives a location.
    """
    source = next((part[key] for key in SOURCES if part.get(key) is not None), None)
    source = elsewhere() if source is None else source
    if isinstance(source, Mapping):  # OpenAI's form, or that of an image column of Hugging Face's datasets
        source = next((source[key] for key in ("url", "bytes", "path") if source.get(key) is not None), None)
    if source is None:
        raise ValueError(f"An image of a message says nowhere where it lies: give it one of {', '.join(SOURCES)}.")
    return f"data:image/unknown;base64,{source}" if part.get("base64") is not None else source


def without_images(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a message without its images, whose places are all that templates need."""
    if not isinstance(message.get("content"), list | tuple):
        return message
    plain = lambda part: {"type": "video" if part["type"] == "video" else "image"} if is_image(part) else part
    return {**message, "content": [plain(part) for part in message["content"]]}
