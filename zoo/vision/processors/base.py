"""Turns images into what vision towers take, as transformers' processors do, with Pillow and numpy.

    processor = Gemma3.read(folder)  # as the checkpoint's preprocessor_config.json says
    image = processor(open_image("photo.jpg"))
    prompt = processor.expand(prompt, [image.text])

Each family's processor is a class in a file beside this one. Its fields are the file's keys; `pictures` says what the
tower sees of an image, still in 8 bits, and `text` what stands for it in the prompt. All resize with Pillow, as
transformers' processors of the "pil" kind do, and give the same numbers as those. transformers has the kind
"torchvision" too, the only one for Llama 4 and for videos. Of a photograph's values, resized there, up to 5 in 1,000
differ from these by one level of 255, and with a bicubic filter 2 in a million by two; of noise more do, by up to
three.
"""

import abc
import dataclasses
import pathlib
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np
from jaxtyping import Float32, Int, UInt8

from convert.files import read_json
from zoo.nn.fields import alternatives, typed
from zoo.vision.open import MAX_PIXELS, Image


Processor = TypeVar("Processor", bound="AbstractProcessor")

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
LANCZOS, BILINEAR, BICUBIC = 1, 2, 3  # Pillow's numbers, as in the files
Filter = Literal[1, 2, 3, 4, 5]
MAX_FEATURES = 2**20  # of an image
# The largest values of the files' numbers, far above those of any model: memory and time grow with them.
MOST = dict(
    height=2**13, width=2**13, longest_edge=MAX_PIXELS, shortest_edge=MAX_PIXELS, patch_size=2**8,
    temporal_patch_size=2**4, merge_size=2**4, spatial_merge_size=2**4, max_patches=2**8, image_seq_length=2**14,
    pan_and_scan_min_crop_size=2**13, pan_and_scan_max_num_crops=2**8, max_soft_tokens=2**14, pooling_kernel_size=2**4,
    max_image_tokens=2**14,
)  # fmt: skip


def resize(image: Image, height: int, width: int, resample: int) -> Image:
    """Resize an image with one of Pillow's filters, in 8 bits."""
    from PIL import Image as pillow

    if not (height and width):
        raise ValueError(f"An image of {image.shape[1]} x {image.shape[0]} pixels is too thin to be resized: crop it.")
    check_size(height, width)
    return np.asarray(pillow.fromarray(image).resize((width, height), pillow.Resampling(resample)))


def check_size(height: int, width: int) -> None:
    """Raise ValueError for more pixels than an image may have that is opened, before there is an array of them."""
    if height * width > MAX_PIXELS:
        raise ValueError(f"Images would become {width} x {height} pixels, and {MAX_PIXELS:,} are the most.")


def check_features(count: int) -> None:
    """Raise ValueError for more features of an image than a prompt has tokens, before there is a text of them."""
    if count > MAX_FEATURES:
        raise ValueError(f"An image would become {count:,} tokens, and {MAX_FEATURES:,} are the most.")


def patchify(
    frames: Float32[np.ndarray, "time height width 3"], patch_size: int, *, merge_size: int = 1, temporal: int = 1
) -> Float32[np.ndarray, "patches features"]:
    """Cut frames into patches, as rows whose features are (channel, time, height, width), as in a convolution's weight.

    Patches follow one another by time, then by rows and columns. With `merge_size` blocks of so many patches a side do,
    and within each its patches. `temporal` frames are in one patch.
    """
    time, height, width, _ = frames.shape
    rows, columns = (side // (merge_size * patch_size) for side in (height, width))
    within = (merge_size, patch_size)
    blocks = frames.reshape(time // temporal, temporal, rows, *within, columns, *within, 3)
    return blocks.transpose(0, 2, 5, 3, 6, 8, 1, 4, 7).reshape(-1, 3 * temporal * patch_size**2)


@dataclasses.dataclass(frozen=True)
class Processed:
    """An image, or a video, as a tower and a prompt take it."""

    patches: Float32[np.ndarray, "patches features"]
    """Patches of all its pictures, one after another. Their features are in the order of a convolution's weight."""
    grids: Int[np.ndarray, "pictures 3"]
    """The number of patches of each picture along time, height and width."""
    text: str
    """The text that stands for it in the prompt."""

    @property
    def shapes(self) -> Int[np.ndarray, "shown 2"]:
        """Rows and columns of all that the tower reads at once: each picture, or each time of a video."""
        return self.grids[:, 1:].repeat(self.grids[:, 0], axis=0)

    @property
    def pictures(self) -> list[Float32[np.ndarray, "_ features"]]:
        """The patches of each of these."""
        return np.split(self.patches, self.shapes.prod(axis=1).cumsum()[:-1])


@dataclasses.dataclass(frozen=True)
class Rectangle:
    height: int
    width: int


@dataclasses.dataclass(frozen=True)
class LongestEdge:
    longest_edge: int


@dataclasses.dataclass(frozen=True)
class PixelBounds:
    """The fewest and the most pixels of a resized image; the names are Qwen's."""

    shortest_edge: int
    longest_edge: int


# Keys of the files that say nothing of the pixels: names of classes, the layout of transformers' arrays, the padding
# of batches, which patches do not need.
NOT_THE_PIXELS = {
    "_valid_processor_keys", "auto_map", "chat_template", "crop_size", "data_format", "default_to_square", "device",
    "disable_grouping", "do_pad", "feature_extractor_type", "image_processor_type", "input_data_format", "pad_size",
    "processor_class", "return_tensors", "size_divisor", "video_processor_type",
}  # fmt: skip
IMPLIED = dict(do_convert_rgb=True, do_resize=True, do_rescale=True, do_normalize=True, do_center_crop=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractProcessor(abc.ABC):
    """How a checkpoint wants images prepared. Fields are named as keys of preprocessor_config.json."""

    marker: ClassVar[str]
    """The text that a chat template writes for an image, which `expand` replaces."""
    placeholder: ClassVar[str]
    """The token that stands for each feature of an image in its `text`."""
    implied: ClassVar[Mapping[str, Any]] = {}
    """Key of the files -> the one value of it that is implemented, beside `IMPLIED`."""
    files: ClassVar[Sequence[str]] = ("preprocessor_config.json",)
    section: ClassVar[str] = "image_processor"
    """The key of processor_config.json for what older versions of transformers write into one of `files`."""
    skipped: ClassVar[Collection[str]] = NOT_THE_PIXELS
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = dict
    """Brings a parsed file, of which there may be several forms, into the one that the fields speak of."""
    patch_of_tower: ClassVar[int | None] = None
    """The patch size where config.json's `vision_config` has none, for processors that take it from there alone."""
    precision: ClassVar[Any] = np.float32
    """The dtype in which pixels are normalized."""

    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    def __post_init__(self):
        for key in ("image_mean", "image_std"):
            if len(getattr(self, key)) != 3:
                raise ValueError(f"{key}={getattr(self, key)}, but there are three channels.")
        fields = dataclasses.asdict(self)
        for key, value in (fields | fields.get("size", {})).items():
            if key in MOST and not 1 <= value <= MOST[key]:
                raise ValueError(f"{key}={value} is not from 1 to {MOST[key]:,}.")

    @classmethod
    def read(cls: type[Processor], folder: pathlib.Path) -> Processor:
        """Read the processor of a checkpoint's folder.

        Raises:
            ValueError: naming the file and the key that is missing, unknown, of the wrong type, or of a value not
                implemented; or if no file says how images are processed.
        """
        outer_file = folder / "processor_config.json"
        outer = read_json(outer_file) if outer_file.is_file() else {}
        inner_file, inner = outer_file, outer.get(cls.section)
        if inner is None:
            found = [folder / name for name in cls.files if (folder / name).is_file()]
            if not found:
                raise ValueError(f"{folder} has no {cls.files[0]}: download it from the model's repository.")
            inner_file, inner = found[0], read_json(found[0])
        outer = {key: value for key, value in outer.items() if not isinstance(value, Mapping)}  # no other section
        values = cls._values(inner, inner_file) | cls._values(outer, outer_file) | cls._of_tower(folder / "config.json")
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [key for key in required if key not in values]:
            raise ValueError(f"{inner_file} lacks {', '.join(map(repr, missing))}, which {cls.__name__} needs.")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{inner_file}: {error}") from error

    @classmethod
    def _of_tower(cls, file: pathlib.Path) -> dict[str, Any]:
        tower = read_json(file).get("vision_config") if cls.patch_of_tower and file.is_file() else None
        if tower is None:
            return {}
        size = tower.get("patch_size", cls.patch_of_tower)
        says = f"{file} says patch_size={size!r:.200} in vision_config; {cls.__name__}"
        return {"patch_size": typed("patch_size", size, int, says)}

    @classmethod
    def _values(cls, hub: Mapping[str, Any], file: pathlib.Path) -> dict[str, Any]:
        hints = {f.name: typing.get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
        implied, values = IMPLIED | dict(cls.implied), {}
        for key, value in cls.standard_form(hub).items():
            if value is None or key in cls.skipped:
                continue
            says = f"{file} says {key}={value!r:.200}; {cls.__name__}"
            if key in hints:
                values[key] = typed(key, value, hints[key], says)
            elif key not in implied:
                raise ValueError(f"{says} does not know it. If it says nothing of the pixels, remove it.")
            elif value not in (allowed := alternatives(implied[key])):
                raise ValueError(f"{says} implements only {' and '.join(map(repr, allowed))}.")
        return values

    @classmethod
    def expand(cls, prompt: str, texts: Sequence[str]) -> str:
        """Replace each `marker` in a prompt by the text of its image, in order.

        Raises:
            ValueError: there are more images than markers, or fewer.
        """
        before, *after = prompt.split(cls.marker)
        if len(after) != len(texts):
            raise ValueError(f"The prompt has {len(after)} times {cls.marker}, and there are {len(texts)} for it.")
        return before + "".join(text + between for text, between in zip(texts, after, strict=True))

    def normalize(self, picture: UInt8[np.ndarray, "*frames 3"]) -> Float32[np.ndarray, "*frames 3"]:
        """Subtract the mean and divide by the standard deviation of each channel."""
        rounded = lambda values: np.asarray(values, np.float32).astype(self.precision)
        levels = rounded(np.arange(256) * self.rescale_factor)
        return ((levels[picture] - rounded(self.image_mean)) / rounded(self.image_std)).astype(np.float32)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AbstractImageProcessor(AbstractProcessor):
    keeps_shape: ClassVar[bool] = False
    """Whether pictures have sizes of their own, and so as many patches as they need."""

    resample: Filter = BILINEAR
    patch_size: int = 14

    @abc.abstractmethod
    def pictures(self, image: Image) -> list[Image]:
        """Returns the pictures that the tower gets of an image, one or several, resized to whole patches."""

    @abc.abstractmethod
    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        """Heights and widths of `pictures` of an image of this size."""

    def count(self, height: int, width: int) -> int:
        """Returns the number of pictures that the tower gets of an image of this size."""
        return len(self.sizes(height, width))

    @abc.abstractmethod
    def text(self, height: int, width: int) -> str:
        """Returns the text in the prompt for an image of this size, in pixels before it is resized.

        It has as many `placeholder`s as the model has features of the image.
        """

    def __call__(self, image: Image) -> Processed:
        """Turn an image, as `open_image` gives it, into patches and text.

        Raises:
            ValueError: it is too thin.
        """
        pictures = self.pictures(image)
        grids = [(1, picture.shape[0] // self.patch_size, picture.shape[1] // self.patch_size) for picture in pictures]
        patches = np.concatenate([self.patchify(self.normalize(picture)) for picture in pictures])
        return Processed(patches, np.array(grids), self.text(*image.shape[:2]))

    @abc.abstractmethod
    def patchify(self, picture: Float32[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches features"]:
        """Cut a normalized picture into patches, in the order in which the tower reads them."""
