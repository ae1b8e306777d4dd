"""The help of a script, in groups: --help prints the options that most runs use, and --help-all prints all of them.

An option stands in the group that `option` gives it, or else in the `help_group` of the class that declares it. Its
text is the docstring below it. If that text explains the default, as "0: never." does, the help prints the explanation.
"""

import dataclasses
import difflib
import inspect
import os
import pathlib
import re
import shutil
import sys
import textwrap
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal

import rich
from rich.text import Text

from train.base.listing import Option, options_of, retired
from train.base.options import Group, OptionGroup


WIDTH, INDENT = 100, 26  # columns of a line, and columns before an option's text


def invocation(option: Option) -> str:
    """Returns an option as the help shows it: --seq-len INT."""
    several = typing.get_origin(option.kind) is tuple
    flags = option.flags if option.default is not False else option.flags[:1]
    if option.positional:
        return option.name.upper() + "..." * several
    kind = "" if option.kind is bool else _kind(typing.get_args(option.kind)[0] if several else option.kind)
    return " ".join([", ".join(flags), *filter(None, [kind])]) + "..." * several


def default_in_words(option: Option) -> str:
    """Returns an option's default in words: its explanation in the option's text, or else the value."""
    if option.default is dataclasses.MISSING:
        return "required"
    plain = f"{option.default:g}" if isinstance(option.default, float) else str(option.default)
    told = re.search(rf"(?:^|\. ){re.escape(plain)}: (.+?)(?:;|\.(?= |$))", option.text)
    if told and not isinstance(option.default, str):
        return f"default: {told[1]}"
    if isinstance(option.default, tuple):
        plain = " ".join(map(str, option.default))
    return "default: " + {"True": "yes", "None": "none", "": "none"}.get(plain, plain)


def show(script: type[OptionGroup], *, everything: bool) -> None:
    """Prints the help of a script."""
    found = options_of(script)
    usage = ["usage:", program(), *(invocation(each) for each in found if each.positional), "[options]"]
    lines: list[str | Text] = [" ".join(usage), ""]
    width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns)
    lines += [*textwrap.wrap(" ".join((inspect.getdoc(script) or "").split()), width)]
    for group in Group:
        of_group = [each for each in found if each.group is group and (everything or not each.rare)]
        lines += ["", Text(group, style="bold")] if of_group else []
        for each in sorted(of_group, key=lambda each: not each.positional):
            text = each.text if everything else re.split(r"; |\.(?: |$)", each.text)[0]
            default = f" ({default_in_words(each)})" if each.default is not False else ""
            told = textwrap.wrap(text + default, width - INDENT, break_on_hyphens=False)
            head = f"  {invocation(each)}"
            if len(head) < INDENT:
                head, told = head.ljust(INDENT) + told[0], told[1:]
            lines += [head, *(" " * INDENT + line for line in told)]
    if not everything and any(each.rare for each in found):
        lines += ["", "--help-all prints every option, with all that there is to say of it."]
    for line in lines:
        rich.get_console().print(line, highlight=False, markup=False, soft_wrap=True)


def refuse_unknown(script: type[OptionGroup], arguments: Sequence[str]) -> None:
    """Raises a ValueError for a word that looks like an option and is none.

    The message names the closest option; for a former option it says what to do instead.
    """
    found, former = options_of(script), retired(script)
    known = {flag for each in found for flag in each.flags}
    for word in arguments:
        given = word.partition("=")[0]
        if re.match(r"--[A-Za-z]", given) and given.replace("_", "-") not in known:
            if sentence := former.get(given[2:].removeprefix("no-").replace("_", "-")):
                raise ValueError(f"{program()} has no option {given} any more: {sentence}")
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


def _kind(kind: Any) -> str:
    """Returns a type as the help shows it: INT, PATH, or adamw|muon."""
    if typing.get_origin(kind) is Literal:
        return "|".join(map(str, typing.get_args(kind)))
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return "|".join(_kind(each) for each in typing.get_args(kind) if each is not type(None))
    return "PATH" if kind is pathlib.Path else kind.__name__.upper()
