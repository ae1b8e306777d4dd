"""The model families, one file each. A file here that defines `FAMILY` is found."""

import importlib
import pkgutil

from zoo.nn.model import Family


__all__ = [info.name for info in pkgutil.iter_modules(__path__)]  # pyright: ignore[reportUnsupportedDunderAll]

FAMILIES: dict[str, Family] = {name: importlib.import_module(f"{__name__}.{name}").FAMILY for name in __all__}
