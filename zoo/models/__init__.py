"""The model families, one file each. A file here that defines `FAMILY` is found, and imported when it is needed."""

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Generic, TypeVar

from zoo.nn.model import Family


V = TypeVar("V")

__all__ = [info.name for info in pkgutil.iter_modules(__path__)]  # pyright: ignore[reportUnsupportedDunderAll]


class OfFamilies(Mapping[str, V], Generic[V]):
    """Values of families, by a name. A family's file is imported when one of its values is first requested."""

    def __init__(self, files: Mapping[str, str], value: Callable[[Family, str], V]):
        """Takes the file of each name, and the function that gives a family's value of a name."""
        self.files, self.value = files, value

    def __getitem__(self, name: str) -> V:
        return self.value(importlib.import_module(f"{__name__}.{self.files[name]}").FAMILY, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.files)

    def __len__(self) -> int:
        return len(self.files)


FAMILIES = OfFamilies({name: name for name in __all__}, lambda family, _: family)

if not TYPE_CHECKING:  # which then misses no misspelt name

    def __getattr__(name: str) -> ModuleType:
        """Imports a family's file when it is first requested, as `zoo.qwen3` does."""
        if name not in FAMILIES.files:
            raise AttributeError(f"zoo has no attribute {name!r}")
        return importlib.import_module(f"{__name__}.{name}")
