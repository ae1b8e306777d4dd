"""Options of a run in a file: `--config run.yaml` reads them, and every run's folder has a run.yaml with all of them.

The file is YAML. Yet each value is read like the same word on the command line, by the option's type: 1e-4 is a number,
and off is not false. The options of a group stand below its name or have it as a prefix: `lora: {rank: 16}` or
`lora.rank: 16`.
"""

import argparse
import dataclasses
import os
import pathlib
import shlex
import sys
import typing
from collections.abc import Sequence
from typing import Any, TypeVar

import rich
import tyro
import yaml

from convert.private import public
from train.base import help, writing
from train.base.listing import kinds, options_of, plain, retired
from train.base.options import OptionGroup


RUN = "run.yaml"  # in the folder of every run
# Options of a single start. They are not written to the run's file, as the run may be started again without them.
ONCE = {"accept_data", "config", "dry_run"}
O = TypeVar("O", bound=OptionGroup)


class DerivedSteps(int):
    """A number of steps that was derived from the data, as --steps was 0. run.yaml has 0 for it, so that the data of a
    run from that file ends in the same place."""


def parse(options: type[O], arguments: Sequence[str] | None = None) -> O:
    """Returns the options of the command line and of its --config, or prints the help. The command line's own win.

    Raises:
        ValueError: there is no such option; or the --config file is no YAML of options, or has an option that the
            script does not have, or has one twice.
        OSError: the --config file cannot be read.
        SystemExit: the help is printed, or a value is not of its option's type.
    """
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if asked := {"-h", "--help", "--help-all"}.intersection(arguments):
        help.show(options, everything="--help-all" in asked)
        sys.exit(0)
    help.refuse_unknown(options, arguments)
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config", nargs="?")
    path = finder.parse_known_args(arguments)[0].config
    return tyro.cli(options, prog=help.program(), args=[*(read(path, options) if path else []), *arguments])


def read(path: str | os.PathLike, options: type[OptionGroup]) -> list[str]:
    """Returns the options of a file as words of a command line."""
    try:
        text = pathlib.Path(path).read_text()
        _refuse_twice(yaml.compose(text, Loader=yaml.BaseLoader), path)
        found = yaml.load(text, Loader=yaml.BaseLoader)  # this loader leaves values as strings
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}.") from error
    return _words(found or {}, options, path, "")


def write(folder: pathlib.Path, options: OptionGroup) -> None:
    """Writes run.yaml: the resolved options, below the command that gave them, as a comment.

    The commands of the run's earlier starts stay above this command.
    """
    path, command = folder / RUN, f"# {public(shlex.join(sys.orig_argv))}"
    before = [line for line in path.read_text().splitlines() if line.startswith("# ")] if path.exists() else []
    commands = [line for line in before if line != command] + [command]
    lasting = {name: value for name, value in plain(options).items() if name not in ONCE}
    text = yaml.safe_dump(_yaml(lasting), sort_keys=False, allow_unicode=True)
    writing.write_private(path, "\n".join(commands) + "\n" + text)


def _words(found: Any, options: type[OptionGroup], path: str | os.PathLike, group: str) -> list[str]:
    """Returns the options of one group in the file as words of a command line, for `read`."""
    if not isinstance(found, dict):
        raise ValueError(f"{path} has {found!r} where options with their names have to be, such as lr: 1e-4.")
    known, former, words = kinds(options), retired(options), []
    for key, value in found.items():
        name, _, below = key.replace("-", "_").partition(".")
        if sentence := former.get(name.replace("_", "-")):
            rich.print(f"WARNING: {path} has {group}{key}, which has no effect any more: {sentence}")
            continue
        if name not in known or name == "config" or bool(below) > dataclasses.is_dataclass(known[name]):
            others = [each for each in options_of(options) if each.name not in ("config", key)]
            near = help.nearest(f"--{name}".replace("_", "-"), others)
            mean = f"; do you mean {group}{near.removeprefix('--')}?" if near else "."
            raise ValueError(f"{path} has {group}{key}, which is no option of this script{mean}")
        kind, option = known[name], f"--{group}{name}".replace("_", "-")
        if isinstance(kind, type) and issubclass(kind, OptionGroup):
            words += _words({below: value} if below else value, kind, path, f"{group}{name}.")
        elif isinstance(value, dict):
            raise ValueError(f"{path}: {group}{key} has no options of its own, but {', '.join(value)} below it.")
        elif kind is bool:
            if value.lower() not in ("true", "false"):
                raise ValueError(f"{path}: {group}{key} is true or false, not {value}.")
            sign = "" if value.lower() == "true" else "no-"
            words.append(f"--{group}{sign}{name}".replace("_", "-"))
        elif typing.get_origin(kind) is tuple:
            words += [option, *map(_word, value if isinstance(value, list) else [value])]
        elif isinstance(value, list):
            raise ValueError(f"{path}: {group}{key} has one value, not {len(value)}.")
        else:
            words.append(f"{option}={_word(value)}")
    return words


def _word(value: str) -> str:
    """Returns a value in the command line's spelling: YAML writes None and infinity differently."""
    return {"": "None", "~": "None", "null": "None", ".inf": "inf", "-.inf": "-inf"}.get(value, value)


def _yaml(value: Any) -> Any:
    """Converts the value of an option, or of a group of options, to one that YAML can hold."""
    if isinstance(value, dict):
        return {name.replace("_", "-"): _yaml(each) for name, each in value.items()}
    if isinstance(value, tuple):
        return [str(each) if isinstance(each, os.PathLike) else each for each in value]
    if isinstance(value, DerivedSteps):
        return 0
    return str(value) if isinstance(value, os.PathLike) else value


def _refuse_twice(node: Any, path: str | os.PathLike) -> None:
    """Raises a ValueError for a key that stands twice, of which YAML would silently use the last."""
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        for key, value in node.value:
            if keys.count(key.value) > 1:
                raise ValueError(f"{path} has {key.value} twice.")
            _refuse_twice(value, path)
