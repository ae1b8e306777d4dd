"""The help of a script, in groups: --help prints the options that most runs use, and --help-all prints all of them.

An option stands in the group that `option` gives it, or else in the `help_group` of the class that declares it. Its
text is the docstring below it. If that text explains the default, as "0: never." does, the help prints the explanation.
"""

import ast
import dataclasses
import difflib
import enum
import functools
import inspect
import itertools
import os
import pathlib
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import rich
import tyro
from rich.text import Text


WIDTH, INDENT = 100, 26  # columns of a line, and columns before an option's text
Every = int | Literal["never"]  # the number of steps between two times of an action


class Group(enum.StrEnum):
    """The headings, in their order. Options of a class without a `help_group` belong to DATA."""

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


def option(default: Any, *, group: Group | None = None, rare: bool = False) -> Any:
    """Declares an option that has another group than its class, or that only --help-all prints."""
    return dataclasses.field(default=default, metadata={"group": group, "rare": rare})


@dataclasses.dataclass(frozen=True)
class Option:
    """The description of one option in the help."""

    name: str  # with dashes, and with a nested option's prefix: "lora.rank"
    kind: Any  # the option's type
    default: Any
    text: str
    group: Group
    rare: bool
    positional: bool

    @property
    def flags(self) -> tuple[str, ...]:
        """Returns the flags that set the option: two for a bool, of which the second is --no-NAME."""
        above, dot, own = self.name.rpartition(".")
        return (f"--{self.name}", f"--{above}{dot}no-{own}") if self.kind is bool else (f"--{self.name}",)

    @property
    def invocation(self) -> str:
        """Returns the option as the help shows it: --seq-len INT."""
        several = typing.get_origin(self.kind) is tuple
        flags = self.flags if self.default is not False else self.flags[:1]
        if self.positional:
            return self.name.upper() + "..." * several
        kind = "" if self.kind is bool else _kind(typing.get_args(self.kind)[0] if several else self.kind)
        return " ".join([", ".join(flags), *filter(None, [kind])]) + "..." * several

    @property
    def default_in_words(self) -> str:
        """Returns the default in words: its explanation in the option's text, or else the value."""
        if self.default is dataclasses.MISSING:
            return "required"
        plain = f"{self.default:g}" if isinstance(self.default, float) else str(self.default)
        told = re.search(rf"(?:^|\. ){re.escape(plain)}: (.+?)(?:;|\.(?= |$))", self.text)
        if told and not isinstance(self.default, str):
            return f"default: {told[1]}"
        if isinstance(self.default, tuple):
            plain = " ".join(map(str, self.default))
        return "default: " + {"True": "yes", "None": "none", "": "none"}.get(plain, plain)


def options_of(script: type[Any]) -> list[Option]:
    """Returns all options that can be set. Options that the script itself declares, or declares again, come first."""
    return list(_options(script))


def show(script: type[Any], *, everything: bool) -> None:
    """Prints the help of a script."""
    found = options_of(script)
    usage = ["usage:", program(), *(each.invocation for each in found if each.positional), "[options]"]
    lines: list[str | Text] = [" ".join(usage), ""]
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    lines += [*textwrap.wrap(" ".join((inspect.getdoc(script) or "").split()), width)]
    for group in Group:
        of_group = [each for each in found if each.group is group and (everything or not each.rare)]
        lines += ["", Text(group, style="bold")] if of_group else []
        for each in sorted(of_group, key=lambda each: not each.positional):
            text = each.text if everything else re.split(r"; |\.(?: |$)", each.text)[0]
            default = f" ({each.default_in_words})" if each.default is not False else ""
            told = textwrap.wrap(text + default, width - INDENT, break_on_hyphens=False)
            head = f"  {each.invocation}"
            if len(head) < INDENT:
                head, told = head.ljust(INDENT) + told[0], told[1:]
            lines += [head, *(" " * INDENT + line for line in told)]
    if not everything and any(each.rare for each in found):
        lines += ["", "--help-all prints every option, with all that there is to say of it."]
    for line in lines:
        rich.get_console().print(line, highlight=False, markup=False, soft_wrap=True)


def refuse_unknown(script: type[Any], arguments: Sequence[str]) -> None:
    """Raises a ValueError for a word that looks like an option and is none. The message names the closest option."""
    found = options_of(script)
    known = {flag for each in found for flag in each.flags}
    for word in arguments:
        given = word.partition("=")[0]
        if re.match(r"--[A-Za-z]", given) and given.replace("_", "-") not in known:
            near = nearest(given.replace("_", "-"), found)
            mean = f"do you mean {near}?" if near else "--help-all lists all of them."
            raise ValueError(f"{program()} has no option {given}; {mean}")


def nearest(flag: str, found: Sequence[Option]) -> str | None:
    """Returns the option that is probably meant by `flag`: one of a similar name, or with these words in its text.

    So --learning-rate finds --lr, whose text is "Peak learning rate".
    """
    words = flag[2:].split("-")

    def score(name: str, text: str) -> float:
        of_name = name[2:].split("-")
        part = set(of_name) < set(words) and 2 * len(of_name) >= len(words)
        begun = len(name) > 4 and flag.startswith(name)
        at = text.lower().find(" ".join(words)) if len(words) > 1 else -1
        said = 0.9 - min(at, 100) / 1000 if at >= 0 else 0.0
        return max(
            difflib.SequenceMatcher(a=flag[2:], b=name[2:]).ratio(), 0.75 * part + 0.05 * begun, 0.7 * begun, said
        )

    scores = [(score(name, each.text.split(". ")[0]), name) for each in found for name in each.flags]
    best, name = max(scores, key=lambda scored: scored[0])
    return name if best >= 0.7 else None


def program() -> str:
    """Returns the command of this process, such as python -m train.sft."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else os.path.basename(sys.argv[0])


def kinds(options: type[Any]) -> dict[str, Any]:
    """Returns field name -> type, for every option that can be set."""
    hints = typing.get_type_hints(options, include_extras=True)
    fixed = lambda name: tyro.conf.Suppress in getattr(hints[name], "__metadata__", ())
    return {field.name: hints[field.name] for field in dataclasses.fields(options) if not fixed(field.name)}


def _options(script: type[Any], above: str = "", *, rare: bool = False) -> Iterator[Option]:
    fields = {field.name: field for field in dataclasses.fields(script)}
    declaring = {name: [c for c in script.__mro__ if name in vars(c).get("__annotations__", {})] for name in fields}
    for name, kind in sorted(kinds(script).items(), key=lambda each: script.__mro__.index(declaring[each[0]][0])):
        owner = declaring[name][-1]
        first = next(field for field in dataclasses.fields(owner) if field.name == name)
        hidden = rare or first.metadata.get("rare", False)
        positional = tyro.conf.Positional[int].__metadata__[0] in getattr(kind, "__metadata__", ())  # pyright: ignore
        kind = typing.get_args(kind)[0] if hasattr(kind, "__metadata__") else kind
        if dataclasses.is_dataclass(kind):
            yield from _options(typing.cast(type, kind), f"{above}{name}.".replace("_", "-"), rare=hidden)
            continue
        text = next((_texts(c)[name] for c in script.__mro__ if name in _texts(c)), "")
        yield Option(
            f"{above}{name}".replace("_", "-"), kind, fields[name].default, text,
            first.metadata.get("group") or vars(owner).get("help_group", Group.DATA),
            hidden, positional,
        )  # fmt: skip


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


def _kind(kind: Any) -> str:
    """Returns a type as the help shows it: INT, PATH, or adamw|muon."""
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join(_kind(each) for each in typing.get_args(kind) if each is not type(None))
    return "PATH" if kind is pathlib.Path else kind.__name__.upper()
