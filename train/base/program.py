"""A compiled step in a file: `train.plan --save` writes it on any machine, and --program loads it where it is to run.

The file's first line is JSON: versions, devices, options, arguments, a hash of the traced step, and a hash of the
executable. The executable follows, as XLA serialises it. A run traces its own step, and uses the executable only if the
traced steps are the same. Nothing is unpickled; yet an executable is machine code, and XLA does not check what it does.
"""

import hashlib
import importlib.metadata
import json
import pathlib
import re
from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import jax
import rich
from jax._src import compiler

import zoo


# Packages whose executables differ from one version to the next, by platform. XLA for GPUs is in the plugin.
COMPILERS = {"tpu": ("libtpu",), "gpu": ("jax-cuda13-pjrt", "jax-cuda12-pjrt")}
LONGEST = 400  # characters; a longer string in a traced step is a kernel, which names files of its machine
# Options that do not change the step: how often and on what data a run validates, and the order of its data.
OTHERS = ("--eval-batches", "--eval-every", "--patience", "--hold-out", "--epochs", "--seed", "--chat.", "--packing")


def write(path: pathlib.Path, lowered: Any, executable: Any, options: Mapping[str, Any]) -> None:
    """Writes a compiled step.

    Args:
        lowered: the traced step, `jax.stages.Lowered`.
        executable: the step compiled, `jax.stages.Compiled`.
        options: as in `loaded`.

    Raises:
        ValueError: this platform cannot serialise executables.
    """
    try:
        code = executable.runtime_executable().serialize()
    except (AttributeError, jax.errors.JaxRuntimeError) as error:
        raise ValueError(f"The compiled step can't be saved on this platform: {_first(error)}") from error
    place = jax.tree.leaves(executable.input_shardings)[0]
    about = _about(lowered, place) | {"options": dict(options), "executable": _hash(code)}
    new = path.with_name(f"{path.name}.tmp")
    new.write_bytes(json.dumps(about).encode() + b"\n" + code)
    new.replace(path)


def loaded(path: pathlib.Path, step: Callable[..., Any], options: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns a step that loads its executable from a file at its first call.

    Args:
        path: the file of --program.
        step: a function that `jax.jit` returned.
        options: option -> value, for the options that may explain why two steps differ (`explaining`).

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no program, or is damaged.

    The first call of the step raises a ValueError if the program is of another step; the message names the difference.
    """
    return Loaded(path, step, options)


class Loaded:
    """A step whose executable comes from a file. It can only be called with the shapes of its first call."""

    def __init__(self, path: pathlib.Path, step: Any, options: Mapping[str, Any]):
        self._path, self._step, self._options = path, step, options
        self._compiled: Any = None
        self._read()  # so that a missing file is reported before the run begins

    def lower(self, *arguments: Any) -> Any:
        return self._step.lower(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        if self._compiled is None:
            self._compiled = self._load(self.lower(*arguments), jax.tree.leaves(arguments)[0].sharding)
        return self._compiled(*arguments)

    def _read(self) -> tuple[dict[str, Any], bytes]:
        line, _, code = self._path.read_bytes().partition(b"\n")
        try:
            about = json.loads(line)
            whole = about["executable"] == _hash(code)
        except (ValueError, TypeError, KeyError):
            raise ValueError(f"--program {self._path} is no program: train.plan --save writes such.") from None
        if not whole:
            raise ValueError(f"--program {self._path} is damaged: copy it again.")
        return about, code

    def _load(self, lowered: Any, place: Any) -> Any:
        there, code = self._read()
        if why := differences(there, _about(lowered, place) | {"options": self._options}):
            raise ValueError(
                f"--program {self._path} {why}: make it again with train.plan --save, or leave --program out."
            )
        # JAX's own way to make a `jax.stages.Compiled` of a stored executable is a pickle, which could run any code
        # before it is checked.
        load = lambda backend, module, places, settings, callbacks, devices, *_: backend.deserialize_executable(
            code, devices, settings
        )
        try:
            with mock.patch.object(compiler, "compile_or_get_cached", load):
                compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise ValueError(f"--program {self._path} can't be loaded here: {_first(error)}") from error
        rich.print(f"The step is {self._path}; nothing was compiled for it.")
        return compiled


def differences(there: Mapping[str, Any], here: Mapping[str, Any]) -> str:
    """Explains why a program `there` is not that of the run `here`, with both values. Empty if it is the same."""
    for name in ("jax", "jaxlib", "equinox-zoo", "compiler"):
        if there.get(name) != here[name]:
            return f"was compiled with {name} {there.get(name)}, and this is {here[name]}"
    if there.get("devices") != here["devices"]:
        return f"is for {there.get('devices')}, and this run has {here['devices']}"
    if there.get("traced") == here["traced"]:
        return ""
    before, now = there["options"], here["options"]
    if changed := [name for name in sorted(before.keys() & now.keys()) if before[name] != now[name]]:
        each = "; ".join(f"{name} was {before[name]}, and is {now[name]} here" for name in changed)
        return f"is of another step: {each}"
    before, now = there["arguments"], here["arguments"]
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            return f"is of another model: its argument {name} is {before.get(name)}, and {now.get(name)} here"
    return "is of another step, with the same options and shapes: of another model, or of other code"


def _about(lowered: Any, place: Any) -> dict[str, Any]:
    """Collects all that a program must have in common with a run: versions, devices, arguments, and the traced step."""
    device, mesh = place.mesh.devices.flat[0], place.mesh
    axes = ", ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1)
    leaves = jax.tree_util.tree_leaves_with_path(lowered.args_info[0])
    version = importlib.metadata.version
    found = {each.metadata["Name"] for each in importlib.metadata.distributions()}
    compilers = [f"{name} {version(name)}" for name in COMPILERS.get(device.platform, ()) if name in found]
    return {
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "equinox-zoo": zoo.__version__,
        "compiler": ", ".join(compilers) or "jaxlib's",
        "devices": f"{mesh.size} x {device.device_kind}" + f" ({axes})" * bool(axes),
        "arguments": {jax.tree_util.keystr(path): f"{a.dtype}{list(a.shape)}" for path, a in leaves},
        "traced": _hash(KERNEL.sub("", lowered.as_text()).encode()),
    }


def explaining(options: Mapping[str, Any], *, model: str, remat: str, microbatches: int) -> dict[str, Any]:
    """Returns option -> value, for the options that may explain why two steps differ.

    Args:
        options: all options on which the run's numbers depend (`train.run.folder.defining_options`).
    """
    found = {name: value for name, value in options.items() if not name.startswith(OTHERS)}
    return found | {"--model": model, "--remat": remat, "--microbatches": microbatches}


# A kernel in a custom call. It names files and lines of the machine that traced it, so it is removed before hashing.
# A constant array is a string, too, but follows "dense<", and stays.
KERNEL = re.compile(rf'(?<!dense<)"(?:[^"\\\n]|\\.){{{LONGEST},}}"')


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _first(error: Exception) -> str:
    return str(error).splitlines()[0]
