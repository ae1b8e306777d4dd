"""The contract of a vision tower: the part "vision" of a family's model."""

import abc
from typing import ClassVar

import equinox as eqx
from jaxtyping import Array, Float, Int

from zoo.vision.processors.base import AbstractImageProcessor
from zoo.vision.processors.qwen3_vl import Qwen3VLVideo


class AbstractVision(eqx.Module):
    """The part "vision" of a family's model: `features = vision(patches, grids)`."""

    processor: ClassVar[type[AbstractImageProcessor]]
    """Makes the patches, as the checkpoint's preprocessor_config.json says."""
    video: ClassVar[type[Qwen3VLVideo] | None] = None
    """Makes those of videos; None: the model takes none."""

    @abc.abstractmethod
    def __call__(
        self, patches: Float[Array, "images patches pixels"], grids: Int[Array, "images 2"]
    ) -> Float[Array, "images tokens embed"]:
        """What stands in the place of each image's tokens, in their order; see `Images` for `grids`."""
