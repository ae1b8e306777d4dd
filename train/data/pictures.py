"""Images of chats that a model is trained on: their places among the tokens, and their patches.

Tokens are made from the sizes of images alone, and packed. Then the images of a batch's rows are opened. A batch has
four more arrays: `patches` [batch, slots, patches, pixels] of each row's pictures; `grids` [batch, slots, 2], as in
`zoo.nn.model.Images`; `image` [batch, seq], the slot of each token's picture or -1; and `feature` [batch, seq], the
token's feature within that picture.
"""

import concurrent.futures
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np
from jaxtyping import Float32, Int, Int32

from train.data.records import Record
from zoo.generation.shapes import bucket
from zoo.nn.model import Images
from zoo.text import prompts
from zoo.text.messages import Messages, has_images, image_parts
from zoo.text.prompts import source_of, without_images
from zoo.text.tokenizer import Tokenizer
from zoo.vision.open import image_size, open_image
from zoo.vision.processors.base import AbstractImageProcessor


class Picture(NamedTuple):
    patches: Float32[np.ndarray, "patches pixels"]
    grid: Int[np.ndarray, "2"]  # rows and columns


@dataclasses.dataclass(frozen=True)
class Shown:
    """A chat as its template reads it, and the texts and sizes of its images."""

    messages: Messages
    texts: Sequence[str]
    counts: Sequence[int]
    """Number of features of each picture. An image may be several pictures."""
    processor: AbstractImageProcessor

    def expand(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[str, list[tuple[int, int]]]:
        """Replaces the markers of a rendered chat, or of its beginning, by the texts of the images.

        Returns the text, and `spans` moved to their new places in it.
        """
        marker = self.processor.marker
        texts = self.texts[: text.count(marker)]
        starts, at = [], -1
        for _ in texts:
            at = text.index(marker, at + 1)
            starts.append(at)
        longer = np.cumsum([0, *(len(written) - len(marker) for written in texts)])
        moved = lambda at: at + int(longer[np.searchsorted(starts, at)])
        return self.processor.expand(text, texts), [(moved(start), moved(end)) for start, end in spans]

    def places(self, ids: Sequence[int], tokenizer: Tokenizer) -> Int32[np.ndarray, "length 2"]:
        """Finds the picture that each token belongs to, numbered from 1, or 0; and the token's feature in that picture.

        Raises:
            ValueError: the number of image tokens is not that of the first images.
        """
        (placeholder,) = tokenizer.encode(self.processor.placeholder, special=False)
        found = np.zeros((len(ids), 2), np.int32)
        here, ends = np.array(ids) == placeholder, np.cumsum([0, *self.counts])
        if here.sum() not in ends:
            raise ValueError(f"the chat has {here.sum()} tokens of images, and its images are {ends[-1]} of them.")
        number = np.arange(here.sum())
        picture = np.searchsorted(ends, number, side="right")
        found[here] = np.stack([picture, number - ends[picture - 1]], axis=1)
        return found


def shown(messages: Messages, record: Record, tokenizer: Tokenizer) -> Shown | None:
    """Prepares a chat with images: the messages for the template, and each image's text. None if it has no images.

    Raises:
        ValueError: an image cannot be read, the chat template leaves one out, or the model was loaded without its
            tower.
    """
    if not has_images(messages):
        return None
    if (processor := tokenizer.processor) is None:
        raise ValueError("the chat has an image: --vision loads the vision tower of a model that has one.")
    sizes = [image_size(source) for source in sources(messages, record)]
    texts = [processor.text(*size) for size in sizes]
    counts = [
        text.count(processor.placeholder) // pictures
        for text, size in zip(texts, sizes, strict=True)
        for pictures in [processor.count(*size)]
        for _ in range(pictures)
    ]
    plain = [without_images(message) for message in messages]
    if (written := tokenizer.render_marked(plain).count(processor.marker)) != len(sizes):
        raise ValueError(f"the chat has {len(sizes)} images, and its template writes {written} of them.")
    return Shown(plain, texts, counts, processor)


def sources(messages: Messages, record: Record) -> Iterator[Any]:
    """Yields the source of each image of a record's chat, as `open_image` takes it.

    If a message does not name the source of its image, the next one of the record's `images` is taken.

    Raises:
        ValueError: an image has no source, or the chat has a video.
    """
    beside = iter(record.fields.get("images") or ())
    for part in image_parts(messages):
        if part["type"] == "video":
            raise ValueError("the chat has a video; training takes images, such as some of the frames.")
        source = source_of(part, lambda: next(beside, None))
        is_name = isinstance(source, str) and not source.lower().startswith(("data:", "http:", "https:"))
        yield record.folder / source if is_name else source


def chat_of(record: Record) -> list[Any]:
    """Returns the messages of a record, whether its keys are messages, conversations, or prompt and completion."""
    fields = record.fields
    chat = fields.get("messages") or fields.get("conversations")
    return chat or [*fields.get("prompt", ()), *fields.get("completion", ())]


def pictures_of(messages: Messages, record: Record, processor: AbstractImageProcessor) -> list[Picture]:
    """Opens the pictures of a record's chat.

    Raises:
        ValueError: an image cannot be read; names the record.
    """
    try:
        images = [processor(open_image(source)) for source in sources(messages, record)]
    except ValueError as error:
        raise ValueError(f"{record.where}: {error}") from error
    return [Picture(*both) for image in images for both in zip(image.pictures, image.shapes, strict=True)]


@functools.cache
def blank(processor: AbstractImageProcessor) -> Picture:
    """Makes a small picture that fills the slots of rows with fewer pictures than others."""
    image = processor(np.zeros((32, 32, 3), np.uint8))
    return Picture(image.pictures[0], image.shapes[0])


def with_patches(
    batch: Mapping[str, np.ndarray],
    records: grain.MapDataset[Record],
    processor: AbstractImageProcessor,
    chat_of: Callable[[Record], Messages] = chat_of,
) -> dict[str, np.ndarray]:
    """Opens the images of a batch. `record[b, s]` and `picture[b, s]` identify the picture of each image token.

    `chat_of` returns the messages of a record that hold its images.

    Raises:
        ValueError: as in `pictures_of`.
    """
    batch = dict(batch)
    record, picture = batch.pop("record"), batch.pop("picture")
    seen = picture > 0
    pairs_of = lambda row: zip(record[row][seen[row]].tolist(), picture[row][seen[row]].tolist(), strict=True)
    of_rows = [sorted(set(pairs_of(row))) for row in range(len(seen))]
    numbers = sorted({number for pairs in of_rows for number, _ in pairs})
    with concurrent.futures.ThreadPoolExecutor() as threads:
        opened = threads.map(lambda n: pictures_of(chat_of(records[n]), records[n], processor), numbers)
        found = dict(zip(numbers, opened, strict=True))
    rows = [[found[number][index - 1] for number, index in pairs] for pairs in of_rows]
    image = np.full(seen.shape, -1, np.int32)
    for row, pairs in enumerate(of_rows):
        for slot, (number, index) in enumerate(pairs):
            image[row, (record[row] == number) & (picture[row] == index)] = slot
    return batch | stacked(rows, processor) | {"image": image}


def stacked(rows: Sequence[Sequence[Picture]], processor: AbstractImageProcessor) -> dict[str, np.ndarray]:
    """Stacks the pictures of each row into a batch's `patches` and `grids`.

    Every row has the same number of slots, a power of two, so that few shapes are compiled.
    """
    slots = bucket(max(1, *map(len, rows)), 1)
    every = [one for row in rows for one in [*row, *[blank(processor)] * (slots - len(row))]]
    patches = prompts.stacked([patches for patches, _ in every], processor)
    grids, shape = np.stack([grid for _, grid in every]).astype(np.int32), (len(rows), slots)
    return {"patches": patches.reshape(*shape, *patches.shape[1:]), "grids": grids.reshape(*shape, 2)}


def whole(picture: Int[np.ndarray, " length"], end: int) -> int:
    """Returns where to cut a row: at `end`, or before the picture that a cut at `end` would split.

    `picture` has the number of the picture that each token belongs to, or 0.
    """
    if end >= len(picture) or not picture[end] or picture[end] != picture[end - 1]:
        return end
    return int(np.argmax(picture == picture[end]))


def of_prompt(
    record: Record,
    places: Int[np.ndarray, "length 2"] | None,
    length: int,
    processor: AbstractImageProcessor | None,
    messages: Any = None,
) -> Images | None:
    """Opens the images of the first `length` tokens of a record, as for a batch of one row. None if there are none.

    The images are in `messages`, by default the record's. A prompt that is a string has no images.
    """
    if places is None or processor is None or not (count := int(places[:length, 0].max(initial=0))):
        return None
    found = pictures_of(chat_of(record) if messages is None else messages, record, processor)[:count]
    patches, grids = (list(arrays) for arrays in zip(*found, strict=True))
    return Images(
        prompts.stacked(patches, processor), np.stack(grids), places[None, :length, 0] - 1, places[None, :length, 1]
    )


def of_rows(images: Sequence[Images | None], seq: int, tokenizer: Tokenizer) -> dict[str, np.ndarray]:
    """Makes the four image arrays of a batch of rows of `seq` tokens. Each row begins with a prompt with its images."""
    assert tokenizer.processor is not None, "who calls has asked"
    image, feature = np.full((len(images), seq), -1, np.int32), np.zeros((len(images), seq), np.int32)
    rows: list[list[Picture]] = []
    for row, of_row in enumerate(images):
        rows.append([])
        if of_row is not None:
            length = of_row.image.shape[1]
            image[row, :length], feature[row, :length] = of_row.image[0], of_row.feature[0]
            both = zip(np.asarray(of_row.patches), np.asarray(of_row.grids), strict=True)
            rows[-1] = [Picture(patches, grid) for patches, grid in both]
    return stacked(rows, tokenizer.processor) | {"image": image, "feature": feature}
