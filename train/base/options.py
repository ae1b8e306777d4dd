"""Options of scripts as values: each group of options is a frozen dataclass beside the code that obeys it.

A script's options are a dataclass whose fields are options or groups of options. The options of a `Flat` group have no
prefix on the command line and in run.yaml: the field `optim: Flat[OptimizerOptions]` gives --lr. Those of other groups
have the field's name as their prefix: --lora.rank.
"""

import dataclasses
import enum
import functools
import itertools
import os
import pathlib
import typing
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import tyro

from convert import machine


T = TypeVar("T")
Flat = Annotated[T, tyro.conf.arg(name="")]
Every = int | Literal["never"]  # the number of steps between two times of an action


class Group(enum.StrEnum):
    """The headings of the help, in their order."""

    MODEL = "Model"
    DATA = "Data"
    METHOD = "Method"
    STEP = "Batch and step"
    OPTIMIZER = "Optimizer"
    RUN = "Run folder and checkpoints"
    VALIDATION = "Validation"
    WATCHING = "Watching"
    FAULTS = "Faults"
    DEVICES = "Devices and processes"


def option(
    default: Any, *, group: Group | None = None, rare: bool = False, identity: bool = True, was: str | None = None
) -> Any:
    """Declares an option whose field needs more than a default.

    Args:
        default: the value if the option is not given; `dataclasses.MISSING` for a required option.
        group: heading in the help. None: the `help_group` of the class.
        rare: whether only --help-all prints the option.
        identity: whether a run's numbers depend on the option. False: the run can go on with another value, since the
            option does not change what is learnt, or names files that are compared by their contents.
        was: the name that the option had in older runs.
    """
    metadata = {"group": group, "rare": rare, "identity": identity, "was": was}
    return dataclasses.field(default=default, metadata=metadata)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptionGroup:
    """A group of options. A script's own options are one, too."""

    help_group: ClassVar[Group] = Group.DATA
    retired: ClassVar[Mapping[str, str]] = {}  # former option -> what to do instead, in a sentence

    def __post_init__(self) -> None:
        """Converts values given in Python: strings to paths, and one value or a list of values to a tuple."""
        for field in dataclasses.fields(self):
            value, kinds = getattr(self, field.name), typing.get_args(field.type)
            if typing.get_origin(field.type) is tuple:
                values = (value,) if isinstance(value, str | os.PathLike | float | int) else value
                value = tuple(kinds[0](each) for each in values)
            elif value is not None and pathlib.Path in (field.type, *kinds):
                value = machine.path(f"--{field.name.replace('_', '-')}", value)
            elif field.type is str and isinstance(value, os.PathLike):
                value = os.fspath(value)
            object.__setattr__(self, field.name, value)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Makes options by the names of the command line: `SFTOptions.of(lr=1e-4, batch=8)`.

        Raises:
            TypeError: there is no such option, or a required one is missing.
        """
        defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(cls)}
        taken = {name: _taken(kind, values) for name, kind in _flat_groups(cls).items()}
        groups = {name: defaults[name].changed(**own) for name, own in taken.items() if name not in values}
        return cls(**groups, **values)

    def changed(self, **values: Any) -> Self:
        """Returns the options with other values, by the names of the command line.

        Raises:
            TypeError: there is no such option.
        """
        taken = {name: _taken(kind, values) for name, kind in _flat_groups(type(self)).items()}
        groups = {name: getattr(self, name).changed(**own) for name, own in taken.items() if own}
        return dataclasses.replace(self, **groups, **values)


_FLAT = typing.cast(Any, Flat[int]).__metadata__[0]


@functools.cache
def hints(group: type[OptionGroup]) -> dict[str, Any]:
    """Returns field name -> type, for every field that can be set."""
    hints = typing.get_type_hints(group, include_extras=True)
    fixed = lambda name: tyro.conf.Suppress in getattr(hints[name], "__metadata__", ())
    return {field.name: hints[field.name] for field in dataclasses.fields(group) if not fixed(field.name)}


def bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def is_flat(kind: Any) -> bool:
    return _FLAT in getattr(kind, "__metadata__", ())


def _flat_groups(group: type[OptionGroup]) -> dict[str, type[OptionGroup]]:
    return {name: bare(kind) for name, kind in hints(group).items() if is_flat(kind)}


def _taken(group: type[OptionGroup], values: dict[str, Any]) -> dict[str, Any]:
    """Removes the values of a group's options from `values`, and returns them."""
    return {name: values.pop(name) for name in _names(group) if name in values}


def _names(group: type[OptionGroup]) -> list[str]:
    below = itertools.chain(*(_names(each) for each in _flat_groups(group).values()))
    return [*(field.name for field in dataclasses.fields(group)), *below]
