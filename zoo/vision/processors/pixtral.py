"""Pixtral's image processor, of Mistral Small 3 and Ministral 3: images keep their shape."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float32

from zoo.vision.open import Image
from zoo.vision.processors.base import (
    BICUBIC,
    CLIP_MEAN,
    CLIP_STD,
    AbstractImageProcessor,
    Filter,
    LongestEdge,
    check_features,
    patchify,
    resize,
)


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

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        return [self.resized(height, width)]

    def text(self, height: int, width: int) -> str:
        height, width = self.resized(height, width)
        side = self.patch_size * self.spatial_merge_size
        check_features((height // side) * (width // side))
        row = self.placeholder * (width // side)
        return "[IMG_BREAK]".join([row] * (height // side)) + "[IMG_END]"
