"""The options of a script that reads a model's config.json."""

import dataclasses
from typing import ClassVar

from train.base.options import Group, OptionGroup, option
from zoo.source import Source


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceOptions(OptionGroup):
    """Options for opening models."""

    help_group: ClassVar[Group] = Group.MODEL

    ignore_keys: tuple[str, ...] = option((), rare=True, identity=False)
    """Keys of a model's config.json to skip where they would be refused: keys that you know not to change the model,
    such as vision_config.key of an object (docs/config.md)."""

    def open(self, model: str, revision: str | None = None) -> Source:
        """Opens a zoo name, a Hub repository or a folder.

        Raises:
            OSError, ValueError: as in `Source.open`.
        """
        return Source.open(model, revision, ignore=self.ignore_keys)
