"""Open images, and turn them into what vision towers take, as transformers' processors do, with Pillow and numpy.

    processor = Gemma3.read(folder)  # as the checkpoint's preprocessor_config.json says
    image = processor(open_image("photo.jpg"))
    prompt = processor.expand(prompt, [image.text])

A class for each family's processor. Its fields are the file's keys; `pictures` says what the tower sees of an image,
still in 8 bits, and `text` what stands for it in the prompt. All resize with Pillow, as transformers' processors of the
"pil" kind do, and give the same numbers as those. transformers has the kind "torchvision" too, the only one for Llama 4
and for videos. Of a photograph's values, resized there, up to 5 in 1,000 differ from these by one level of 255, and
with a bicubic filter 2 in a million by two; of noise more do, by up to three.
"""

import abc
import base64
import collections
import dataclasses
import http.client
import io
import math
import os
import pathlib
import time
import typing
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int, UInt8

from convert.hub import read_json, regular
from zoo.config import alternatives, typed


Image = UInt8[np.ndarray, "_ _ 3"]  # height, width, RGB
Processor = TypeVar("Processor", bound="AbstractProcessor")

# What Pillow is let read. Its other formats are rare, and one of them starts another program (EPS).
FORMATS = ("AVIF", "BMP", "GIF", "JPEG", "JPEG2000", "MPO", "PNG", "PPM", "TIFF", "WEBP")
MAX_PIXELS = 89_478_485  # of an image that is opened, 256 MiB as RGB; Pillow warns of larger ones
MAX_BYTES = 2**30  # of a file
DOWNLOAD_BYTES = 2**25  # at most, of an image from a URL
DOWNLOAD_SECONDS = 30

CLIP_MEAN, CLIP_STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)
BILINEAR, BICUBIC = 2, 3  # Pillow's numbers, as in the files
Filter = Literal[1, 2, 3, 4, 5]


def open_image(source: str | os.PathLike[str] | bytes | Any, *, remote: bool = False) -> Image:
    """Open an image as RGB, 8 bits a channel: upright, its first frame, on white.

    Upright means turned as its EXIF tag says, as transformers' `load_image` does. What is transparent is laid on white,
    as transformers' processors do with an image that Pillow opened; `load_image` of a path drops transparency instead,
    and shows whatever colours lie beneath. Of 16 bits the upper 8 are kept, where Pillow's `convert("RGB")` makes
    all grey values above 255 white.

    Args:
        source: a path, the bytes of a file, a data: URL in base64, an http(s) URL, or Pillow's image.
        remote: whether http(s) URLs are downloaded: at most `DOWNLOAD_BYTES`, in `DOWNLOAD_SECONDS`.

    Raises:
        ValueError: naming the source, if it cannot be read, is damaged or is no image; has more than `MAX_PIXELS`; has
            floats or 32-bit integers for pixels; or is a URL, and those are not allowed.
    """
    from PIL import Image as pillow

    if isinstance(source, pillow.Image):
        return _rgb(source, "the image")
    image, name = _opened(source, remote)
    return _rgb(image, name)


def image_size(source: str | os.PathLike[str] | bytes | Any) -> tuple[int, int]:
    """Tell height and width of an image as `open_image` gives it, of which the beginning is read.

    Raises:
        ValueError: as `open_image`, but for damage behind the beginning.
    """
    from PIL import ExifTags
    from PIL import Image as pillow

    image, name = (source, "the image") if isinstance(source, pillow.Image) else _opened(source, False)
    try:
        turned = image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)
    except Exception as error:
        raise _damaged(name, error) from error
    return (image.width, image.height) if turned else (image.height, image.width)


def _opened(source: str | os.PathLike[str] | bytes, remote: bool) -> tuple[Any, str]:
    """Pillow's image, of which it has read the beginning, and what errors call it."""
    from PIL import Image as pillow

    name, data = _file(source, remote)
    pillow.init()
    try:
        # Some builds of Pillow lack some formats.
        return pillow.open(io.BytesIO(data), formats=[f for f in FORMATS if f in pillow.OPEN]), name
    except pillow.UnidentifiedImageError as error:
        kinds = ", ".join(FORMATS)
        raise ValueError(f"{name} is no image of a kind that is read ({kinds}): convert it to PNG.") from error
    except (pillow.DecompressionBombError, pillow.DecompressionBombWarning) as error:
        raise ValueError(_too_large(name)) from error
    except Exception as error:  # damage can lead to any in Pillow's readers
        raise _damaged(name, error) from error


def _rgb(image: Any, name: str) -> Image:
    """Decode Pillow's image. `name` is for errors."""
    from PIL import Image as pillow
    from PIL import ImageOps

    if image.width * image.height > MAX_PIXELS:
        raise ValueError(_too_large(name))
    if not image.width * image.height:
        raise ValueError(f"{name} has no pixels, but {image.width} x {image.height}: get it anew.")
    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        deep = image.mode.startswith(("I", "F"))  # more than 8 bits, of one channel
        if not deep and ("A" in image.getbands() or image.info.get("transparency") is not None):
            image = image.convert("RGBA")
            image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
        array = np.array(image if deep else image.convert("RGB"))
    except Exception as error:
        raise _damaged(name, error) from error
    if not deep:
        return array
    if array.dtype.kind == "f" or array.min() < 0 or array.max() >= 2**16:
        raise ValueError(f"{name} has {array.dtype} pixels, of which nothing says what is white: save it in 8 bits.")
    return np.repeat((array >> 8).astype(np.uint8)[..., None], 3, axis=-1)


def _too_large(name: str) -> str:
    return f"{name} has more than {MAX_PIXELS:,} pixels, the most that is opened: make it smaller."


def _damaged(name: str, error: Exception) -> ValueError:
    said = str(error).partition("\n")[0] or type(error).__name__
    return ValueError(f"{name} is damaged or cut off ({said}): get it anew.")


def _file(source: str | os.PathLike[str] | bytes, remote: bool) -> tuple[str, bytes]:
    """What errors call it, and its bytes."""
    if isinstance(source, bytes):
        name, data = f"the image of {len(source)} bytes", source
    elif isinstance(source, str) and source[:5].lower() == "data:":
        header, comma, payload = source.partition(",")
        name = f"the image {header[:40]},{payload[:20]}..."
        if not comma or not header.lower().endswith(";base64"):
            raise ValueError(f"{name} is no data URL in base64, as in data:image/png;base64,iVBO...")
        try:
            data = base64.b64decode(payload)
        except ValueError as error:
            raise ValueError(f"{name} is no base64 ({error}): encode it anew.") from error
    elif isinstance(source, str) and source[:8].lower().startswith(("http://", "https://")):
        if not remote:
            raise ValueError(f"{source} is not downloaded unless that is allowed (remote=True): give a file instead.")
        name, data = source, _download(source)
    else:
        try:
            if (size := regular(source)) > MAX_BYTES:  # and no pipe, which may never end
                raise ValueError(f"it has {size:,} bytes, and {MAX_BYTES:,} are the most")
            name, data = str(source), pathlib.Path(source).read_bytes()
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise ValueError(f"{str(source)[:200]!r} cannot be read: {why}.") from error
    if not data:
        raise ValueError(f"{name} is empty: get it anew.")
    return name, data


def _download(url: str) -> bytes:
    data, end = bytearray(), time.monotonic() + DOWNLOAD_SECONDS
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_SECONDS) as response:
            while block := response.read1(2**16):
                data += block
                if len(data) > DOWNLOAD_BYTES:
                    raise ValueError(f"it has more than {DOWNLOAD_BYTES:,} bytes")
                if time.monotonic() > end:
                    raise TimeoutError(f"it takes more than {DOWNLOAD_SECONDS} seconds")
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ValueError(f"{url} cannot be downloaded ({error}): give a file instead.") from error
    return bytes(data)


def resize(image: Image, height: int, width: int, resample: int) -> Image:
    """Resize an image with one of Pillow's filters, in 8 bits."""
    from PIL import Image as pillow

    if not (height and width):
        raise ValueError(f"An image of {image.shape[1]} x {image.shape[0]} pixels is too thin to be resized: crop it.")
    return np.asarray(pillow.fromarray(image).resize((width, height), pillow.Resampling(resample)))


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
    """Of all its pictures, one after another; a patch's features are in the order of a convolution's weight."""
    grids: Int[np.ndarray, "pictures 3"]
    """How many patches each picture has along time, height and width."""
    text: str
    """What stands for it in the prompt."""

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
    """What a chat template writes for an image, and `expand` replaces."""
    placeholder: ClassVar[str]
    """What stands for each feature of an image in its `text`."""
    implied: ClassVar[Mapping[str, Any]] = {}
    """Key of the files -> the one value of it that is implemented, beside `IMPLIED`."""
    files: ClassVar[Sequence[str]] = ("preprocessor_config.json",)
    section: ClassVar[str] = "image_processor"
    """Of processor_config.json, where transformers 5 writes what older versions write into one of `files`."""
    skipped: ClassVar[Collection[str]] = NOT_THE_PIXELS
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = dict
    """Brings a parsed file, of which there may be several forms, into the one that the fields speak of."""
    precision: ClassVar[Any] = np.float32
    """The dtype in which pixels are normalized."""

    image_mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    image_std: tuple[float, ...] = (0.5, 0.5, 0.5)
    rescale_factor: float = 1 / 255

    def __post_init__(self):
        for key in ("image_mean", "image_std"):
            if len(getattr(self, key)) != 3:
                raise ValueError(f"{key}={getattr(self, key)}, but there are three channels.")

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
        values = cls._values(inner, inner_file) | cls._values(outer, outer_file)
        required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
        if missing := [key for key in required if key not in values]:
            raise ValueError(f"{inner_file} lacks {', '.join(map(repr, missing))}, which {cls.__name__} needs.")
        try:
            return cls(**values)
        except ValueError as error:
            raise ValueError(f"{inner_file}: {error}") from error

    @classmethod
    def _values(cls, hub: Mapping[str, Any], file: pathlib.Path) -> dict[str, Any]:
        hints = {f.name: typing.get_type_hints(cls)[f.name] for f in dataclasses.fields(cls)}
        implied, values = IMPLIED | dict(cls.implied), {}
        for key, value in cls.standard_form(hub).items():
            if value is None or key in cls.skipped:
                continue
            says = f"{file} says {key}={value!r}; {cls.__name__}"
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
        """What the tower sees of an image, one picture or several, resized to whole patches."""

    @abc.abstractmethod
    def count(self, height: int, width: int) -> int:
        """How many pictures the tower sees of an image of this size."""

    @abc.abstractmethod
    def text(self, height: int, width: int) -> str:
        """What stands in the prompt for an image of this size, in pixels before it is resized.

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(AbstractImageProcessor):
    """Gemma 3's: the whole image as a square, whatever its shape, and with "pan and scan" crops of a long one besides.

    The patch size stands in config.json, in `vision_config`.
    """

    marker: ClassVar[str] = "<start_of_image>"
    placeholder: ClassVar[str] = "<image_soft_token>"

    size: Rectangle
    image_seq_length: int = 256
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2

    def crops(self, height: int, width: int) -> int:
        """How many crops an image of this size is cut into along its longer side; 0: it is seen only as a whole."""
        longer, shorter, smallest = max(height, width), min(height, width), self.pan_and_scan_min_crop_size
        if not self.do_pan_and_scan or longer / shorter < self.pan_and_scan_min_ratio_to_activate:
            return 0
        count = min(math.floor(longer / shorter + 0.5), longer // smallest)
        count = min(max(2, count), self.pan_and_scan_max_num_crops)
        return count if min(math.ceil(longer / count), shorter) >= smallest else 0

    def pictures(self, image: Image) -> list[Image]:
        height, width, _ = image.shape
        pictures = [image]
        if count := self.crops(height, width):
            wide, step = width >= height, math.ceil(max(height, width) / count)
            spans = [slice(start, start + step) for start in range(0, count * step, step)]
            pictures += [image[:, span] if wide else image[span] for span in spans]
        return [resize(picture, self.size.height, self.size.width, self.resample) for picture in pictures]

    def patchify(self, picture: Float32[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches features"]:
        return patchify(picture[None], self.patch_size)

    def count(self, height: int, width: int) -> int:
        return 1 + self.crops(height, width)

    def text(self, height: int, width: int) -> str:
        whole = f"\n\n<start_of_image>{self.placeholder * self.image_seq_length}<end_of_image>\n\n"
        if not (count := self.crops(height, width)):
            return whole
        crops = " ".join([whole] * count)
        return f"Here is the original image {whole} and here are some crops to help you see better {crops}"


def smart_resize(
    height: int, width: int, factor: int, bounds: PixelBounds, *, frames: int = 1, temporal: int = 1
) -> tuple[int, int]:
    """Find multiples of `factor` near an image's height and width whose product is within bounds, as Qwen's models do.

    Of a video, `bounds` are those of all its frames together, of which `temporal` make one patch.

    Raises:
        ValueError: it is more than 200 times as long as wide.
    """
    if max(height, width) > 200 * min(height, width):
        raise ValueError(f"An image of {width} x {height} pixels is over 200 times longer than wide: crop it.")
    rows, columns = round(height / factor), round(width / factor)
    pixels = round(frames / temporal) * temporal * rows * columns * factor**2
    if pixels > bounds.longest_edge:
        shrink = math.sqrt(frames * height * width / bounds.longest_edge)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif pixels < bounds.shortest_edge:
        grow = math.sqrt(bounds.shortest_edge / (frames * height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return rows * factor, columns * factor


def _with_bounds(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Older files have `min_pixels` and `max_pixels`, in `size` or beside it, where they win."""
    hub = dict(hub)
    size = dict(hub["size"]) if isinstance(hub.get("size"), Mapping) else {}
    for older, key in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        for value in (size.pop(older, None), hub.pop(older, None)):
            if value is not None:
                size[key] = value
    return hub | {"size": size} if size else hub


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VL(AbstractImageProcessor):
    """That of Qwen2-VL, Qwen2.5-VL, Qwen3-VL and Qwen3.5: images keep their shape, and take as many patches as it has.

    A patch holds two frames, which of an image are the same one. Patches that are merged into a feature are neighbours.
    """

    keeps_shape: ClassVar[bool] = True
    marker: ClassVar[str] = "<|image_pad|>"  # between <|vision_start|> and <|vision_end|>, which stay
    placeholder: ClassVar[str] = "<|image_pad|>"
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = staticmethod(_with_bounds)

    size: PixelBounds
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    resample: Filter = BICUBIC
    temporal_patch_size: int = 2
    merge_size: int = 2

    def resized(self, height: int, width: int) -> tuple[int, int]:
        return smart_resize(height, width, self.patch_size * self.merge_size, self.size)

    def pictures(self, image: Image) -> list[Image]:
        return [resize(image, *self.resized(*image.shape[:2]), self.resample)]

    def patchify(self, picture: Float32[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches features"]:
        frames = np.broadcast_to(picture, (self.temporal_patch_size, *picture.shape))
        return patchify(frames, self.patch_size, merge_size=self.merge_size, temporal=self.temporal_patch_size)

    def count(self, height: int, width: int) -> int:
        return 1

    def text(self, height: int, width: int) -> str:
        height, width = self.resized(height, width)
        return self.placeholder * (height * width // (self.patch_size * self.merge_size) ** 2)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Qwen3VLVideo(AbstractProcessor):
    """The same for videos: each pair of frames follows the time at which it was seen, in words.

    Which frames to take is the caller's choice; the models were trained on two a second.
    """

    marker: ClassVar[str] = "<|video_pad|>"  # between <|vision_start|> and <|vision_end|>, which stay
    placeholder: ClassVar[str] = "<|video_pad|>"
    files: ClassVar[Sequence[str]] = ("video_preprocessor_config.json", "preprocessor_config.json")
    section: ClassVar[str] = "video_processor"
    implied: ClassVar[Mapping[str, Any]] = {"cap_pixels_per_frame": False}
    skipped: ClassVar[Collection[str]] = NOT_THE_PIXELS | {
        "do_sample_frames", "fps", "max_duration", "max_frames", "max_image_size", "max_video_tokens", "min_frames",
        "num_frames", "return_metadata", "use_token_compression",
    }  # fmt: skip
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = staticmethod(_with_bounds)

    size: PixelBounds
    resample: Filter = BICUBIC
    patch_size: int = 16
    temporal_patch_size: int = 2
    merge_size: int = 2

    def resized(self, frames: int, height: int, width: int) -> tuple[int, int]:
        factor = self.patch_size * self.merge_size
        if min(height, width) < factor:
            scale = max(factor / height, factor / width)
            height, width = int(height * scale), int(width * scale)
        return smart_resize(height, width, factor, self.size, frames=frames, temporal=self.temporal_patch_size)

    def text(self, seconds: Sequence[float], height: int, width: int) -> str:
        """What stands in the prompt for frames of this size at these times."""
        height, width = self.resized(len(seconds), height, width)
        features = self.placeholder * (height * width // (self.patch_size * self.merge_size) ** 2)
        pairs = [seconds[n : n + self.temporal_patch_size] for n in range(0, len(seconds), self.temporal_patch_size)]
        middles = [(pair[0] + pair[-1]) / 2 for pair in pairs]
        return "".join(f"<{middle:.1f} seconds><|vision_start|>{features}<|vision_end|>" for middle in middles)

    def __call__(self, frames: Sequence[Image], seconds: Sequence[float]) -> Processed:
        """Turn frames, as `open_image` gives them, and the times at which they were seen into patches and text.

        The last frame is repeated where the count is no multiple of `temporal_patch_size`.

        Raises:
            ValueError: there are fewer frames than are in a patch, of several sizes, or not as many times.
        """
        sizes, least = {frame.shape[:2] for frame in frames}, self.temporal_patch_size
        if len(frames) < least or len(sizes) > 1 or len(frames) != len(seconds):
            raise ValueError(
                f"A video needs {least} frames or more, all of one size, and a time for each; here are {len(frames)}, "
                f"of {len(sizes)} sizes, and {len(seconds)} times."
            )
        height, width = self.resized(len(frames), *frames[0].shape[:2])
        pictures = [resize(frame, height, width, self.resample) for frame in frames]
        pictures += [pictures[-1]] * (-len(frames) % least)
        patches = patchify(
            self.normalize(np.stack(pictures)), self.patch_size, merge_size=self.merge_size, temporal=least
        )
        grid = (len(pictures) // least, height // self.patch_size, width // self.patch_size)
        return Processed(patches, np.array([grid]), self.text(seconds, *frames[0].shape[:2]))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama4(AbstractImageProcessor):
    """Llama 4's: tiles of a canvas that fits the image best, then the whole image as one more tile.

    Normalized in bfloat16, as in transformers and the original.
    """

    marker: ClassVar[str] = "<|image|>"
    placeholder: ClassVar[str] = "<|patch|>"
    implied: ClassVar[Mapping[str, Any]] = dict(
        fake_image_token="<|image|>",
        image_token="<|image|>",
        start_of_image_token="<|image_start|>",
        end_of_image_token="<|image_end|>",
        patch_token="<|patch|>",
        tile_x_separator_token="<|tile_x_separator|>",
        tile_y_separator_token="<|tile_y_separator|>",
    )
    precision: ClassVar[Any] = ml_dtypes.bfloat16

    size: Rectangle
    max_patches: int = 16
    resize_to_max_canvas: bool = False
    pixel_shuffle_ratio: float = 0.5

    def __post_init__(self):
        super().__post_init__()
        if self.size.height != self.size.width or self.size.height % self.patch_size:
            raise ValueError(f"size={self.size}, but tiles are square, and of whole patches of {self.patch_size}.")

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """How many rows and columns of tiles an image of this size is laid on: at most `max_patches` tiles.

        The canvas on which it is enlarged least, or shrunk least if it fits none, and of those the smallest.
        """
        by_shape = collections.defaultdict(list)  # in transformers' order, where canvases are equally good
        for count in range(self.max_patches, 0, -1):
            for rows in (rows for rows in range(1, count + 1) if count % rows == 0):
                by_shape[rows / (count // rows)].append((rows, count // rows))
        canvases = np.array([canvas for shape in by_shape.values() for canvas in shape])
        sides = np.array([height, width], np.float32)
        scales = ((canvases * self.size.height).astype(np.float32) / sides).min(axis=1)
        enlarging = scales[scales >= 1]
        if not len(enlarging):
            scale = scales.max()
        else:
            scale = enlarging.max() if self.resize_to_max_canvas else enlarging.min()
        best = canvases[scales == scale]
        rows, columns = best[best.prod(axis=1).argmin()].tolist()
        return rows, columns

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size on the canvas: no more than that of a tile, if the image is smaller than one."""
        tile, limits = self.size.height, []
        for side, tiles in zip((height, width), self.canvas(height, width), strict=True):
            limit = tiles * tile if self.resize_to_max_canvas else min(max(side, tile), tiles * tile)
            # transformers divides in float32 where the canvas is the limit, which shows where it rounds down.
            is_canvas = self.resize_to_max_canvas or tiles * tile < max(side, tile)
            limits.append((limit, np.float32(limit) if is_canvas else limit))
        (most_high, high), (most_wide, wide) = limits
        if wide / width < high / height:
            size = min(math.floor(height * (wide / width)), most_high), most_wide
        else:
            size = most_high, min(math.floor(width * (high / height)), most_wide)
        return max(size[0], 1), max(size[1], 1)

    def pictures(self, image: Image) -> list[Image]:
        tile, (rows, columns) = self.size.height, self.canvas(*image.shape[:2])
        height, width = self.resized(*image.shape[:2])
        canvas = np.zeros((rows * tile, columns * tile, 3), np.uint8)
        canvas[:height, :width] = resize(image, height, width, self.resample)
        tiles = list(canvas.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3))
        return tiles + [resize(image, tile, tile, self.resample)] * (len(tiles) > 1)

    def patchify(self, picture: Float32[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches features"]:
        return patchify(picture[None], self.patch_size)

    def count(self, height: int, width: int) -> int:
        rows, columns = self.canvas(height, width)
        return 1 + rows * columns if rows * columns > 1 else 1

    def text(self, height: int, width: int) -> str:
        patches, downsampled = (self.size.height // self.patch_size) ** 2, round(1 / self.pixel_shuffle_ratio**2)
        tile = self.placeholder * (patches // downsampled)
        rows, columns = self.canvas(height, width)
        row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
        return f"<|image_start|>{row * rows if rows * columns > 1 else ''}<|image|>{tile}<|image_end|>"


def _with_side(hub: Mapping[str, Any]) -> dict[str, Any]:
    """Patches that are said to be as high as wide have one size."""
    patch = hub.get("patch_size")
    if isinstance(patch, Mapping) and patch.get("height") == patch.get("width"):
        return {**hub, "patch_size": patch.get("height")}
    return dict(hub)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pixtral(AbstractImageProcessor):
    """Pixtral's and Mistral Small 3.x's: images keep their shape, and a token ends each row of features.

    Patches that are merged into a feature are neighbours.
    """

    keeps_shape: ClassVar[bool] = True
    marker: ClassVar[str] = "[IMG]"
    placeholder: ClassVar[str] = "[IMG]"
    implied: ClassVar[Mapping[str, Any]] = dict(
        image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]"
    )
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = staticmethod(_with_side)

    size: LongestEdge
    image_mean: tuple[float, ...] = CLIP_MEAN
    image_std: tuple[float, ...] = CLIP_STD
    resample: Filter = BICUBIC
    patch_size: int = 16
    spatial_merge_size: int

    def resized(self, height: int, width: int) -> tuple[int, int]:
        ratio, side = max(height, width) / self.size.longest_edge, self.patch_size * self.spatial_merge_size
        if ratio > 1:
            height, width = math.floor(height / ratio), math.floor(width / ratio)
        return math.ceil(height / side) * side, math.ceil(width / side) * side

    def pictures(self, image: Image) -> list[Image]:
        return [resize(image, *self.resized(*image.shape[:2]), self.resample)]

    def patchify(self, picture: Float32[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches features"]:
        return patchify(picture[None], self.patch_size, merge_size=self.spatial_merge_size)

    def count(self, height: int, width: int) -> int:
        return 1

    def text(self, height: int, width: int) -> str:
        height, width = self.resized(height, width)
        side = self.patch_size * self.spatial_merge_size
        row = self.placeholder * (width // side)
        return "[IMG_BREAK]".join([row] * (height // side)) + "[IMG_END]"
