"""Muse Glimmer's image processor: images keep their shape, within a number of tokens."""

import dataclasses
import itertools
import math
from typing import ClassVar

import numpy as np
from jaxtyping import Float32

from zoo.vision.open import Image
from zoo.vision.processors.base import LANCZOS, AbstractImageProcessor, Filter, check_features, patchify, resize


@dataclasses.dataclass(frozen=True, kw_only=True)
class MuseGlimmer(AbstractImageProcessor):
    """Muse Glimmer's: images keep their shape, and become smaller where they have more than `max_image_tokens`.

    A patch holds two frames, which of an image are the same one. Pixels lie as (time, channel, height, width) in it.
    Patches that are merged into a feature are neighbours.

    transformers resizes with torchvision alone, which does not round between columns and rows: where an image becomes
    larger, sharp edges differ by up to 8 levels of 255, and else by one.
    """

    keeps_shape: ClassVar[bool] = True
    marker: ClassVar[str] = "<|patch|>"
    placeholder: ClassVar[str] = "<|patch|>"

    resample: Filter = LANCZOS
    temporal_patch_size: int = 2
    merge_size: int = 2
    max_image_tokens: int = 4096

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tokens: of those next to the image's size, the ones nearest to its shape."""
        side = self.patch_size * self.merge_size
        rows, columns = height / side, width / side
        ratio = columns / rows
        if rows * columns > self.max_image_tokens:
            rows = (self.max_image_tokens / ratio) ** 0.5
            columns = rows * ratio
        near = set(itertools.product(*((math.floor(n), math.ceil(n)) for n in (rows, columns))))
        near = [(r, c) for r, c in near if r >= 1 and c >= 1 and r * c <= self.max_image_tokens]
        if not near:
            return max(1, round(rows)), max(1, round(columns))
        return min(near, key=lambda grid: abs(grid[0] / grid[1] - height / width))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        rows, columns = self.grid(height, width)
        return rows * self.patch_size * self.merge_size, columns * self.patch_size * self.merge_size

    def pictures(self, image: Image) -> list[Image]:
        return [resize(image, *self.resized(*image.shape[:2]), self.resample)]

    def patchify(self, picture: Float32[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches features"]:
        frame = patchify(picture[None], self.patch_size, merge_size=self.merge_size)
        return np.tile(frame, (1, self.temporal_patch_size))

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        return [self.resized(height, width)]

    def text(self, height: int, width: int) -> str:
        rows, columns = self.grid(height, width)
        check_features(rows * columns)
        return f"<|image_start|>{self.placeholder * (rows * columns)}<|image_end|>"
