"""Gemma 4's image processor: images keep their shape, within a number of patches."""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32

from zoo.vision.open import Image
from zoo.vision.processors.base import (
    BICUBIC,
    NOT_THE_PIXELS,
    AbstractImageProcessor,
    Filter,
    check_features,
    patchify,
    resize,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma4(AbstractImageProcessor):
    """Gemma 4's: an image is made as large as `max_soft_tokens` squares allow, and keeps its shape.

    Patches of a square, which becomes a token, are neighbours. Pixels are from 0 to 1, and lie as (height, width,
    channel) in a patch.
    """

    keeps_shape: ClassVar[bool] = True
    marker: ClassVar[str] = "<|image|>"
    placeholder: ClassVar[str] = "<|image|>"
    # Some files have a size, which transformers does not read either.
    implied: ClassVar[Mapping[str, Any]] = dict(do_normalize=False, size=dict(height=224, width=224))
    # Settings of sound, and a number that follows from the image.
    skipped: ClassVar[Collection[str]] = NOT_THE_PIXELS | {"audio_ms_per_token", "audio_seq_length", "image_seq_length"}

    image_mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    image_std: tuple[float, ...] = (1.0, 1.0, 1.0)
    resample: Filter = BICUBIC
    patch_size: int = 16
    max_soft_tokens: int = 280
    pooling_kernel_size: int = 3  # patches along the side of a square

    @property
    def side(self) -> int:
        """The pixels along the side of a square."""
        return self.patch_size * self.pooling_kernel_size

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Returns the size of an image in whole squares: the largest of its shape, or a row of squares if it is thin.

        Raises:
            ValueError: if not one square has room.
        """
        factor = math.sqrt(self.max_soft_tokens * self.side**2 / (height * width))
        rows, columns = (math.floor(factor * size / self.side) for size in (height, width))
        if rows == columns == 0:
            raise ValueError(f"An image of {width} x {height} pixels has no room for a token: check max_soft_tokens.")
        if rows == 0:
            rows, columns = 1, min(width // height, self.max_soft_tokens)
        elif columns == 0:
            rows, columns = min(height // width, self.max_soft_tokens), 1
        return rows * self.side, columns * self.side

    def pictures(self, image: Image) -> list[Image]:
        return [resize(image, *self.resized(*image.shape[:2]), self.resample)]

    def patchify(self, picture: Float32[np.ndarray, "height width 3"]) -> Float32[np.ndarray, "patches features"]:
        by_channel = patchify(picture[None], self.patch_size, merge_size=self.pooling_kernel_size)
        return by_channel.reshape(len(by_channel), 3, -1).swapaxes(1, 2).reshape(len(by_channel), -1)

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        return [self.resized(height, width)]

    def text(self, height: int, width: int) -> str:
        height, width = self.resized(height, width)
        count = (height // self.side) * (width // self.side)
        check_features(count)
        return f"<|image>{self.placeholder * count}<image|>"
