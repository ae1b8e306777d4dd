"""Llama 4's image processor: tiles of a canvas that fits the image, then the whole image."""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, ClassVar

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from zoo.vision.open import Image
from zoo.vision.processors.base import AbstractImageProcessor, Rectangle, check_features, check_size, patchify, resize


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
        check_size(self.size.height * self.max_patches, self.size.width)
        check_features((self.size.height // self.patch_size) ** 2 * self.max_patches)
        if not 0.01 <= self.pixel_shuffle_ratio <= 1:
            raise ValueError(f"pixel_shuffle_ratio={self.pixel_shuffle_ratio} is not from 0.01 to 1.")

    def canvas(self, height: int, width: int) -> tuple[int, int]:
        """Returns the rows and columns of tiles for an image of this size: at most `max_patches` tiles.

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

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        rows, columns = self.canvas(height, width)
        return [(self.size.height, self.size.width)] * (rows * columns + (rows * columns > 1))

    def text(self, height: int, width: int) -> str:
        patches, downsampled = (self.size.height // self.patch_size) ** 2, round(1 / self.pixel_shuffle_ratio**2)
        rows, columns = self.canvas(height, width)
        tile = self.placeholder * (patches // downsampled)
        row = "<|tile_x_separator|>".join([tile] * columns) + "<|tile_y_separator|>"
        return f"<|image_start|>{row * rows if rows * columns > 1 else ''}<|image|>{tile}<|image_end|>"
