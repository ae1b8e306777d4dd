"""The folder of a run: choosing it without --out, describing its run in run.json, and exporting the result into it."""

import fnmatch
import json
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich

import zoo
from convert.private import public_json
from train.base import runfile, writing
from train.base.cluster import agree
from train.base.differences import differences
from train.base.listing import options_of
from train.run import defaults
from train.run.options import Options
from train.state.checkpoint import DATA
from train.state.state import Trained
from train.watch.page import RUN
from zoo.config import write as write_config
from zoo.nn.heads import AbstractHead
from zoo.nn.model import AbstractConfig, AbstractModel
from zoo.registry import family_of, is_local
from zoo.source import Source
from zoo.surgery import cast
from zoo.text.tokenizer import Tokenizer
from zoo.weights import peft
from zoo.weights.heads import config_keys


ROOT = pathlib.Path("runs")


def run_manifest(options: Options, identity: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the description by which a run is recognised: its identity, and the options its numbers depend on."""
    # A run without --patience or --best does not keep its best checkpoint, so it cannot be resumed with these options.
    fixed = dict(identity) | {"patience": options.validation.keeps_best}
    fixed |= {"best": options.validation.best} if options.validation.best else {}
    fixed |= {"freeze": list(options.freeze)} if options.freeze else {}
    return {"identity": public_json(fixed), "options": defining_options(options)}


def run_folder(options: Options, manifest: Mapping[str, Any]) -> pathlib.Path:
    """Returns the folder of a run: --out, or else runs/NAME, or runs/NAME-2 and so on, if it has this run, or is new.

    So the same command goes on where it was interrupted, and another command overwrites nothing.
    """
    if options.out:
        return options.out
    folder = lambda number: ROOT / (options.name if number == 1 else f"{options.name}-{number}")
    number, why = _choose(options, manifest) if jax.process_index() == 0 else (0, "")
    if why:
        rich.print(f"{why} So this run goes to {folder(number)}; --out names a folder.")
    return folder(agree(number))


def _choose(options: Options, manifest: Mapping[str, Any]) -> tuple[int, str]:
    """Returns the folder's number. For a new folder also returns why the newest existing folder was not taken."""
    taken, why, name, accept_data = [], "", options.name, options.checkpoints.accept_data
    here = _completed(manifest, options)
    for path in ROOT.glob(f"{name}*"):
        if (match := re.fullmatch(rf"{name}(?:-(\d+))?", path.name)) and (path.is_file() or any(path.iterdir())):
            taken.append(int(match[1] or 1))
    for number in sorted(taken, reverse=True):
        path = ROOT / (name if number == 1 else f"{name}-{number}")
        try:
            there = public_json(json.loads((path / RUN).read_text()))
            there = _completed(there, options)
            changed = differences(there, here)
        except (OSError, ValueError, KeyError):
            why = why or f"{path} has other files."
            continue
        others = [key for key in changed if not fnmatch.fnmatch(key, DATA)]
        if not others and (accept_data or not changed):
            return number, ""
        if not others:
            why = f"The data of {path} has changed since, with which --accept-data would go on."
            continue
        following = _following(there["options"], here["options"])
        key = min(others, key=lambda key: (key.removeprefix("options.") in following, not key.startswith("options.")))
        old, new = changed[key]
        why = why or f"{path} has another run: {key.removeprefix('options.')} was {old} and is {new}."
    return next(number for number in range(1, len(taken) + 2) if number not in taken), why


def _completed(manifest: Mapping[str, Any], options: Options) -> dict[str, Any]:
    return {"identity": manifest["identity"], "options": todays_options(manifest["options"], options)}


def write_manifest(folder: pathlib.Path, manifest: Mapping[str, Any], options: Options) -> None:
    """Writes run.json, which describes the run, and run.yaml, from which it can be run again.

    Other entries of run.json, such as the run's starts, stay.
    """
    if jax.process_index():
        return
    try:
        before = json.loads((folder / RUN).read_text())
    except (OSError, ValueError):
        before = {}
    writing.write_private(folder / RUN, json.dumps({**before, **manifest}, indent=1) + "\n")
    runfile.write(folder, options)


def defining_options(options: Options) -> dict[str, Any]:
    """Returns option -> value as JSON, for the options on which a run's numbers depend."""
    return {f"--{each.name}": public_json(each.value(options)) for each in options_of(type(options)) if each.identity}


def changes(before: Mapping[str, Any], now: Mapping[str, Any], options: Options) -> str:
    """Lists the options that differ, in one line. Empty if none differs.

    Args:
        options: those of the same script, today.
    """
    before = todays_options(public_json(before), options)  # earlier versions recorded passwords in URLs
    differs = {name for name in before.keys() | now.keys() if before.get(name) != now.get(name)}
    names = sorted(differs - _following(before, now))
    return ", ".join(f"{name} was {before.get(name)} and is {now.get(name)}" for name in names)


def _following(before: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Returns the options whose values follow from --steps or --lora.rank in both, so that they need no mention."""
    follow = lambda options: (
        {f"--{name.replace('_', '-')}": value for name, value in defaults.of_steps(options.get("--steps") or 0).items()}
        | {"--lora.alpha": 2.0 * (options.get("--lora.rank") or 0)}
    )
    old, new = follow(before), follow(now)
    return {name for name in old if before.get(name) == old[name] and now.get(name) == new[name]}


def todays_options(before: Mapping[str, Any], options: Options) -> dict[str, Any]:
    """Converts the options that an older version recorded to those of the same script today.

    Some are renamed; options that the script no longer has are left out, and new ones have their defaults.
    """
    found = {}
    for each in options_of(type(options)):
        if each.identity:
            names = [f"--{name}" for name in (each.name, each.was) if f"--{name}" in before]
            found[f"--{each.name}"] = before[names[0]] if names else public_json(each.default)
    return found


def identity(
    name: str,
    config: AbstractConfig,
    data: Mapping[str, Any],
    parts: Sequence[str] = (),
    template: str | None = None,
    head: AbstractHead | None = None,
) -> dict[str, Any]:
    """Returns everything that must not change in a run between checkpoints, with all that its export needs.

    `template` is the chat template that replaces the model's own, and `head` is the model's.
    """
    model = str(pathlib.Path(name).resolve()) if is_local(name) else name
    hub = write_config(config, family_of(config), export_dtype(config))
    hub |= config_keys(head, hub, config.source) if head else {}
    # The model's optional parts. "mtp" is always there, since checkpoints of earlier versions always have it.
    found = {"model": model, "config": hub, "data": dict(data), "mtp": False} | dict.fromkeys(parts, True)
    return found | ({"template": template} if template else {}) | ({"head": head.kind} if head else {})


def weights_hash(source: Source) -> str:
    """Returns `zoo.fingerprint` in process 0, and "" in the others, which do not compare it with a checkpoint's."""
    if jax.process_index():
        return ""
    with rich.get_console().status(f"Hashing the weights of {source.name}"):
        return zoo.fingerprint(source)


def export(
    out: pathlib.Path, model: AbstractModel, trained: Trained, tokenizer: Tokenizer, identity: Mapping[str, Any]
) -> pathlib.Path:
    """Writes the model, or only its adapter if adapters are trained, into the run's folder `out`. Returns the path."""
    if trained.adapters:
        over = {name: identity[name] for name in peft.OVER}
        peft.save(model, out / "adapter", base=trained.name, over=over)
        if jax.process_index() == 0:
            tokenizer.save_template(out / "adapter")
        return out / "adapter"
    zoo.save(cast(model, export_dtype(trained.config)), out / "model")
    if jax.process_index() == 0:
        tokenizer.save_changes(out / "model")
    return out / "model"


def export_dtype(config: AbstractConfig) -> np.dtype:
    """Returns the dtype of the checkpoint that a run began with."""
    assert config.source is not None  # the folder that the config was read from
    hub = json.loads((config.source / "config.json").read_text())
    return jnp.dtype(hub.get("dtype") or hub.get("torch_dtype") or "float32")
