"""Gemma 3's image processor: a square, and crops of long images."""

import dataclasses
import math
from typing import ClassVar

import numpy as np
from jaxtyping import Float32

from zoo.vision.open import Image
from zoo.vision.processors.base import AbstractImageProcessor, Rectangle, check_size, patchify, resize


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gemma3(AbstractImageProcessor):
    """Gemma 3's: the whole image as a square, whatever its shape, and with "pan and scan" crops of a long one besides.

    The patch size is that of config.json's `vision_config`, whose tower cuts the patches in transformers.
    """

    marker: ClassVar[str] = "<start_of_image>"
    placeholder: ClassVar[str] = "<image_soft_token>"
    patch_of_tower: ClassVar[int | None] = 16  # of a vision_config that has none, as in `zoo.vision.towers.siglip`

    size: Rectangle
    image_seq_length: int = 256
    do_pan_and_scan: bool = False
    pan_and_scan_min_crop_size: int = 256
    pan_and_scan_max_num_crops: int = 4
    pan_and_scan_min_ratio_to_activate: float = 1.2

    def __post_init__(self):
        super().__post_init__()
        check_size(self.size.height * (1 + self.pan_and_scan_max_num_crops), self.size.width)

    def crops(self, height: int, width: int) -> int:
        """Returns the number of crops along the longer side of an image of this size; 0: it is read only as a whole."""
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

    def sizes(self, height: int, width: int) -> list[tuple[int, int]]:
        return [(self.size.height, self.size.width)] * (1 + self.crops(height, width))

    def text(self, height: int, width: int) -> str:
        whole = f"\n\n<start_of_image>{self.placeholder * self.image_seq_length}<end_of_image>\n\n"
        if not (count := self.crops(height, width)):
            return whole
        crops = " ".join([whole] * count)
        return f"Here is the original image {whole} and here are some crops to help you see better {crops}"
