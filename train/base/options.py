"""Options of scripts as values: each group of options is a frozen dataclass beside the code that obeys it.

A script's options are a dataclass whose fields are options or groups of options. The options of a `Flat` group have no
prefix on the command line and in run.yaml: the field `optim: Flat[OptimizerOptions]` gives --lr. Those of other groups
have the field's name as their prefix: --lora.rank.
"""

import ast
import dataclasses
import enum
import functools
import inspect
import itertools
import os
import pathlib
import textwrap
import typing
from collections.abc import Iterator, Mapping
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


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a script."""

    name: str  # with dashes, and with the prefix of its group: "lora.rank"
    fields: tuple[str, ...]  # names of the fields that lead to it: ("optim", "lr")
    kind: Any  # its type
    default: Any
    group: Group
    rare: bool
    identity: bool
    was: str | None
    positional: bool
    classes: tuple[type, ...]  # the classes that declare it, the last one first

    @property
    def prefix(self) -> str:
        """Returns the prefix of its group, such as "lora."; empty if the group is flat."""
        return self.name[: self.name.rfind(".") + 1]

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the flags that set the option: two for a bool, of which the second is --no-NAME."""
        own = self.name.removeprefix(self.prefix)
        return (f"--{self.name}", f"--{self.prefix}no-{own}") if self.kind is bool else (f"--{self.name}",)

    @property
    def text(self) -> str:
        """Returns the description: the docstring below the field."""
        return next((_texts(each)[self.fields[-1]] for each in self.classes if self.fields[-1] in _texts(each)), "")

    def value(self, options: OptionGroup) -> Any:
        """Returns the option's value in the options of its script."""
        return functools.reduce(getattr, self.fields, options)


@functools.cache
def options_of(script: type[OptionGroup]) -> tuple[Option, ...]:
    """Returns all options that can be set. Options that the script itself declares, or declares again, come first."""
    return tuple(_options(script))


def kinds(group: type[OptionGroup]) -> dict[str, Any]:
    """Returns name -> type, for every option, and for every group of options with a prefix."""
    found: dict[str, Any] = {}
    for name, kind in _hints(group).items():
        found |= kinds(_bare(kind)) if _is_flat(kind) else {name: kind}
    return found


def plain(options: OptionGroup) -> dict[str, Any]:
    """Returns name -> value, for every option; groups with a prefix are dicts, too."""
    found: dict[str, Any] = {}
    for name, kind in _hints(type(options)).items():
        value = getattr(options, name)
        own = plain(value) if isinstance(value, OptionGroup) else value
        found |= own if _is_flat(kind) else {name: own}
    return found


def retired(script: type[OptionGroup]) -> dict[str, str]:
    """Returns former option -> a sentence about it, for the options that the script no longer has."""
    groups = {(option.prefix, each) for option in options_of(script) for each in option.classes}
    return {
        f"{prefix}{name}": sentence
        for prefix, group in groups
        if issubclass(group, OptionGroup)
        for name, sentence in group.retired.items()
    }


def _options(
    group: type[OptionGroup], fields: tuple[str, ...] = (), prefix: str = "", default: Any = None, rare: bool = False
) -> Iterator[Option]:
    own = {field.name: field for field in dataclasses.fields(group)}
    declaring = {name: tuple(c for c in group.__mro__ if name in vars(c).get("__annotations__", {})) for name in own}
    for name, kind in sorted(_hints(group).items(), key=lambda each: group.__mro__.index(declaring[each[0]][0])):
        owner = declaring[name][-1]
        metadata = next(field for field in dataclasses.fields(owner) if field.name == name).metadata
        value = own[name].default if default is None else getattr(default, name)
        bare, path, hidden = _bare(kind), (*fields, name), rare or metadata.get("rare", False)
        if isinstance(bare, type) and issubclass(bare, OptionGroup):
            below = prefix if _is_flat(kind) else f"{prefix}{name}.".replace("_", "-")
            yield from _options(bare, path, below, value, hidden)
            continue
        yield Option(
            name=f"{prefix}{name}".replace("_", "-"),
            fields=path,
            kind=bare,
            default=value,
            group=metadata.get("group") or owner.help_group,
            rare=hidden,
            identity=metadata.get("identity", True),
            was=metadata.get("was"),
            positional=_POSITIONAL in getattr(kind, "__metadata__", ()),
            classes=declaring[name],
        )


_POSITIONAL = typing.cast(Any, tyro.conf.Positional[int]).__metadata__[0]
_FLAT = typing.cast(Any, Flat[int]).__metadata__[0]


@functools.cache
def _hints(group: type[OptionGroup]) -> dict[str, Any]:
    """Returns field name -> type, for every field that can be set."""
    hints = typing.get_type_hints(group, include_extras=True)
    fixed = lambda name: tyro.conf.Suppress in getattr(hints[name], "__metadata__", ())
    return {field.name: hints[field.name] for field in dataclasses.fields(group) if not fixed(field.name)}


def _bare(kind: Any) -> Any:
    return typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind


def _is_flat(kind: Any) -> bool:
    return _FLAT in getattr(kind, "__metadata__", ())


def _flat_groups(group: type[OptionGroup]) -> dict[str, type[OptionGroup]]:
    return {name: _bare(kind) for name, kind in _hints(group).items() if _is_flat(kind)}


def _taken(group: type[OptionGroup], values: dict[str, Any]) -> dict[str, Any]:
    """Removes the values of a group's options from `values`, and returns them."""
    return {name: values.pop(name) for name in _names(group) if name in values}


def _names(group: type[OptionGroup]) -> list[str]:
    below = itertools.chain(*(_names(each) for each in _flat_groups(group).values()))
    return [*(field.name for field in dataclasses.fields(group)), *below]


@functools.cache
def _texts(declares: type[Any]) -> dict[str, str]:
    """Returns field name -> docstring below the field, for the fields of a class."""
    if not dataclasses.is_dataclass(declares):
        return {}
    body = typing.cast(ast.ClassDef, ast.parse(textwrap.dedent(inspect.getsource(declares))).body[0]).body
    found = {}
    for field, below in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            found[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return found
