"""Qwen3-VL's processors of images and of videos, also those of Qwen3.5 to 3.8."""

import dataclasses
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32

from zoo.vision.open import Image
from zoo.vision.processors.base import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    NOT_THE_PIXELS,
    AbstractImageProcessor,
    AbstractProcessor,
    Filter,
    PixelBounds,
    Processed,
    check_features,
    patchify,
    resize,
)


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

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        return [self.resized(height, width)]

    def text(self, height: int, width: int) -> str:
        height, width = self.resized(height, width)
        count = height * width // (self.patch_size * self.merge_size) ** 2
        check_features(count)
        return self.placeholder * count


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
        """Returns the text in the prompt for frames of this size at these times."""
        height, width = self.resized(len(seconds), height, width)
        count = height * width // (self.patch_size * self.merge_size) ** 2
        check_features(count)
        features = self.placeholder * count
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
