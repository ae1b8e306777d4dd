"""The contract of a vision tower, which is the part "vision" of a family's model, and of its config."""

import abc
import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from zoo.nn.fields import part_config, text_config
from zoo.nn.model import AbstractConfig, AbstractTower
from zoo.vision.processors.base import AbstractImageProcessor
from zoo.vision.processors.qwen3_vl import Qwen3VLVideo


class AbstractVision(AbstractTower):
    """The part "vision" of a family's model, with what makes its patches."""

    processor: ClassVar[type[AbstractImageProcessor]]
    """Makes the patches, as the checkpoint's preprocessor_config.json says."""
    video: ClassVar[type[Qwen3VLVideo] | None] = None
    """Makes those of videos; None: the model takes none."""


class AbstractTowerConfig(abc.ABC):
    """The `vision_config` of a config.json. Fields are named as its keys."""

    implied: ClassVar[dict[str, Any]]
    """Key -> the one value of it that the tower implements, or `OneOf` several."""
    standard_form: ClassVar[Callable[[Mapping[str, Any]], Mapping[str, Any]]] = dict
    """Brings a `vision_config`, of which there may be several forms, into the one that the fields speak of."""

    @property
    @abc.abstractmethod
    def pixels(self) -> int:
        """The number of values of a patch."""

    @property
    @abc.abstractmethod
    def patches(self) -> int | None:
        """The number of patches of each image that the tower reads; None: images keep their shapes."""


@dataclasses.dataclass(frozen=True)
class AbstractVisionKeys(abc.ABC):
    """The keys of a multimodal config.json beside its `text_config`; `tower` is its `vision_config`."""

    tower: AbstractTowerConfig


class AbstractVisionConfig(AbstractConfig):
    """The config of a model that can have a tower."""

    vision: AbstractVisionKeys | None  # None: there is no tower


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


@dataclasses.dataclass(frozen=True)
class Nested:
    """The form of a multimodal config.json: `text_config`, `vision_config`, and keys beside these two.

    A text model's file is flat: its keys are those of `text_config`. A family that reads both forms brings them into
    the flat one, in which the tower and the keys beside are one more key, `vision`.
    """

    keys: type[AbstractVisionKeys]
    """The family's class of `vision`. Its fields except `tower` are keys beside `vision_config`."""
    names: Mapping[str, Any]
    """`architectures` and `model_type` of a model with its tower."""
    outside: Sequence[str] = ()
    """Keys of the text model that are written beside `text_config`. Where both have one, the one beside counts."""
    projector: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Key of the projector, beside `vision_config` -> the one value of it that is implemented."""

    def flat(self, hub: Mapping[str, Any]) -> dict[str, Any]:
        """Brings a config.json of either form into the flat one.

        Raises:
            ValueError: naming the key of `vision_config`, or beside `text_config`, that is unknown, of the wrong type,
                or of a value not implemented.
        """
        if "text_config" not in hub:
            return dict(hub)
        own = {field.name for field in dataclasses.fields(self.keys)} - {"tower"} | self.projector.keys()
        read = {"architectures", "model_type", "tie_word_embeddings", "vision_config"} - set(self.outside)
        text = text_config({key: hub[key] for key in hub if key not in self.outside}, own | read)
        text |= {key: hub[key] for key in self.outside if key in hub}
        if (stated := hub.get("vision_config")) is not None:
            tower = part_config(self.tower, self.tower.standard_form(stated), self.tower.implied, "vision_config")
            beside = {key: hub[key] for key in own & hub.keys()}
            text["vision"] = part_config(self.keys, beside | {"tower": tower}, self.projector, "It")
        return text

    def nested(self, hub: dict[str, Any]) -> dict[str, Any]:
        """The inverse of `flat`, of a model with its tower; of a text model, what it is given without `vision`."""
        if (vision := hub.pop("vision")) is None:
            return hub
        outer = {key: hub.pop(key) for key in self.outside if key in hub}
        hub.pop("architectures")
        objects = {"text_config": hub, "vision_config": self.tower.implied | vision.pop("tower")}
        return {**self.names, **outer, **self.projector, **vision, **objects}

    @property
    def tower(self) -> type[AbstractTowerConfig]:
        """The class of `vision_config`."""
        return typing.get_type_hints(self.keys)["tower"]
