"""The contract of a vision tower: the part "vision" of a family's model."""

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, TypeVar

from zoo.nn.model import AbstractConfig, AbstractTower
from zoo.vision.processors.base import AbstractImageProcessor
from zoo.vision.processors.qwen3_vl import Qwen3VLVideo


class AbstractVision(AbstractTower):
    """The part "vision" of a family's model, with what makes its patches."""

    processor: ClassVar[type[AbstractImageProcessor]]
    """Makes the patches, as the checkpoint's preprocessor_config.json says."""
    video: ClassVar[type[Qwen3VLVideo] | None] = None
    """Makes those of videos; None: the model takes none."""


class AbstractVisionConfig(AbstractConfig):
    """The config of a model that can have a tower."""

    vision: Any  # the family's own class; None: there is no tower


C = TypeVar("C", bound=AbstractVisionConfig)


def by_parts(config: C, parts: Sequence[str]) -> C:
    """Returns the config of a model with these parts: without `vision` if that is not one of them.

    Raises:
        ValueError: if it is, and the config has no tower.
    """
    if "vision" not in parts:
        return dataclasses.replace(config, vision=None)
    if config.vision is None:
        raise ValueError('The config has no vision tower: leave parts=("vision",) out.')
    return config
