"""The images of rows of tokens: of a part of a row, of two rows one after the other, and of a batch."""

from collections.abc import Sequence

import numpy as np

from zoo.generation.shapes import bucket
from zoo.nn.model import Images, pad_patches


def part_of_images(images: Images | None, start: int, end: int) -> Images | None:
    """Returns the images of a row's tokens from `start` to `end` - 1; None: there are none."""
    if images is None or not (images.image[0, start:end] >= 0).any():
        return None
    image = np.asarray(images.image)[:, start:end]
    kept = np.unique(image[image >= 0])
    renumbered = np.where(image < 0, -1, np.searchsorted(kept, image)).astype(np.int32)
    feature = np.asarray(images.feature)[:, start:end]
    return Images(np.asarray(images.patches)[kept], np.asarray(images.grids)[kept], renumbered, feature)


def joined_images(first: Images | None, length: int, second: Images | None, more: int) -> Images | None:
    """Joins the images of a row of `length` tokens with those of `more` tokens that follow."""
    first, second = part_of_images(first, 0, length), part_of_images(second, 0, more)
    if first is None and second is None:
        return None
    patches, grids, before = [], [], 0
    image, feature = np.full((1, length + more), -1, np.int32), np.zeros((1, length + more), np.int32)
    for images, at in ((first, 0), (second, length)):
        if images is not None:
            here = slice(at, at + images.image.shape[1])
            image[:, here] = np.where(images.image < 0, -1, images.image + before)
            feature[:, here], before = images.feature, before + len(images.patches)
            patches, grids = patches + list(np.asarray(images.patches)), grids + list(np.asarray(images.grids))
    return Images(pad_patches(patches), np.stack(grids), image, feature)


def batched_images(each: Sequence[Images | None], rows: int, seq: int) -> Images | None:
    """Joins the images of prompts into those of a padded batch [rows, seq]; None if there are no images.

    The last image is repeated until their number is a power of two, so that few shapes are compiled.
    """
    if not (some := [images for images in each if images is not None]):
        return None
    up = lambda x, size: np.concatenate([x, x[-1:].repeat(size - len(x), axis=0)])
    patches, grids = (
        pad_patches([np.asarray(one) for images in some for one in images.patches]),
        [images.grids for images in some],
    )
    patches, grids = (up(x, bucket(len(patches), 1)) for x in (patches, np.concatenate(grids)))
    image, feature = np.full((rows, seq), -1, np.int32), np.zeros((rows, seq), np.int32)
    first = 0
    for row, images in enumerate(each):
        if images is not None:
            length = images.image.shape[1]
            image[row, :length] = np.where(images.image[0] < 0, -1, images.image[0] + first)
            feature[row, :length] = images.feature[0]
            first += len(images.patches)
    return Images(patches, grids, image, feature)
