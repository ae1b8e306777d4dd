"""The options of a script one by one: for its help, for run.yaml, and for comparisons of runs."""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import typing
from collections.abc import Iterator
from typing import Any

import tyro

from train.base.options import Group, OptionGroup, bare, hints, is_flat


_POSITIONAL = typing.cast(Any, tyro.conf.Positional[int]).__metadata__[0]


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
    for name, kind in hints(group).items():
        found |= kinds(bare(kind)) if is_flat(kind) else {name: kind}
    return found


def plain(options: OptionGroup) -> dict[str, Any]:
    """Returns name -> value, for every option; groups with a prefix are dicts, too."""
    found: dict[str, Any] = {}
    for name, kind in hints(type(options)).items():
        value = getattr(options, name)
        own = plain(value) if isinstance(value, OptionGroup) else value
        found |= own if is_flat(kind) else {name: own}
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
    for name, kind in sorted(hints(group).items(), key=lambda each: group.__mro__.index(declaring[each[0]][0])):
        owner = declaring[name][-1]
        metadata = next(field for field in dataclasses.fields(owner) if field.name == name).metadata
        value = own[name].default if default is None else getattr(default, name)
        own_kind, path, hidden = bare(kind), (*fields, name), rare or metadata.get("rare", False)
        if isinstance(own_kind, type) and issubclass(own_kind, OptionGroup):
            below = prefix if is_flat(kind) else f"{prefix}{name}.".replace("_", "-")
            yield from _options(own_kind, path, below, value, hidden)
            continue
        yield Option(
            name=f"{prefix}{name}".replace("_", "-"),
            fields=path,
            kind=own_kind,
            default=value,
            group=metadata.get("group") or owner.help_group,
            rare=hidden,
            identity=metadata.get("identity", True),
            was=metadata.get("was"),
            positional=_POSITIONAL in getattr(kind, "__metadata__", ()),
            classes=declaring[name],
        )


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
