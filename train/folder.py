"""Which folder a run writes to, if --out does not say: runs/sft, or runs/sft-2 and so on."""

import fnmatch
import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import rich

from train.checkpoint import DATA, differences
from train.cluster import agree
from train.options import with_new


RUN = "run.json"  # in the folder of every run: what run it is
ROOT = pathlib.Path("runs")


def choose(name: str, about: Mapping[str, Any], *, accept_data: bool) -> pathlib.Path:
    """The folder below runs/ in which `about` is being done or was done, or else a new one.

    `about` is the run's identity and those of its options on which its numbers depend. So the same command goes on
    where it was interrupted, and another one writes over nothing.
    """
    folder = lambda number: ROOT / (name if number == 1 else f"{name}-{number}")
    number, why = _choose(name, about, accept_data) if jax.process_index() == 0 else (0, "")
    if why:
        rich.print(f"{why} So this run goes to {folder(number)}; --out names a folder.")
    return folder(agree(number))


def _choose(name: str, about: Mapping[str, Any], accept_data: bool) -> tuple[int, str]:
    """The folder's number, and what is in the newest of the others."""
    taken, why = [], ""
    for path in ROOT.glob(f"{name}*"):
        if (match := re.fullmatch(rf"{name}(?:-(\d+))?", path.name)) and (path.is_file() or any(path.iterdir())):
            taken.append(int(match[1] or 1))
    for number in sorted(taken, reverse=True):
        path = ROOT / (name if number == 1 else f"{name}-{number}")
        try:
            changed = differences(_completed(json.loads((path / RUN).read_text())), _completed(about))
        except (OSError, ValueError, KeyError):
            why = why or f"{path} has other files."
            continue
        others = [key for key in changed if not fnmatch.fnmatch(key, DATA)]
        if not others and (accept_data or not changed):
            return number, ""
        if not others:
            why = f"The data of {path} has changed since, with which --accept-data would go on."
            continue
        key = min(others, key=lambda key: not key.startswith("options."))
        old, new = changed[key]
        why = why or f"{path} has another run: {key.removeprefix('options.')} was {old} and is {new}."
    return next(number for number in range(1, len(taken) + 2) if number not in taken), why


def _completed(about: Mapping[str, Any]) -> dict[str, Any]:
    return {**about, "options": with_new(about["options"])}


def describe(folder: pathlib.Path, about: Mapping[str, Any]) -> None:
    """Writes down what run a folder has."""
    if jax.process_index() == 0:
        (folder / RUN).write_text(json.dumps(about, indent=1) + "\n")
