"""The command line of a training script."""

import dataclasses
import os
import pathlib
import sys
import traceback
import typing
from collections.abc import Callable
from typing import Any, ClassVar

import jax

from convert import machine
from convert.private import public, warn_of_secrets
from train.base import cache, cluster, runfile, stop
from train.base.help import Group, option


LOST = (
    "a computation of all processes failed, most likely because one has died ({}). "
    "Start all of them again: the run goes on from its last checkpoint."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions:
    """Options for `command`: a file of options, and how the processes of a run find each other."""

    help_group: ClassVar[Group] = Group.DEVICES
    name: ClassVar[str]  # of the script

    config: pathlib.Path | None = option(None, group=Group.RUN)
    """YAML file of any of these options, such as the run.yaml in the folder of another run. Options of the command line
    win over those of the file."""
    coordinator: str | None = option(None, rare=True)
    """host:port of process 0. Needed only if several processes were started by no launcher that JAX knows: see
    docs/clusters.md."""
    processes: int | None = option(None, rare=True)
    """Number of processes."""
    process: int | None = option(None, rare=True)
    """Number of this process, counted from 0."""

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


def command(main: Callable[[Any], None], options: type[CommandOptions]) -> None:
    """Calls `main` with the options of the command line.

    An error that the user can mend is printed as one sentence, without a traceback, and ends the process.

    Programs that XLA compiles are cached for the next run, in JAX_COMPILATION_CACHE_DIR or the user's cache folder.
    """
    warn_of_secrets(sys.argv)
    try:
        o = runfile.parse(options)
    except (ValueError, OSError) as error:
        raise SystemExit(public(f"{type(error).__name__}: {error}")) from error
    if not jax.config.jax_compilation_cache_dir:
        jax.config.update("jax_compilation_cache_dir", str(cache.folder("jax")))
    try:
        with stop.handled(stop.leave):
            cluster.initialize(o.coordinator, o.processes, o.process)
            main(o)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        if "Gloo" in str(error) and jax.process_count() > 1:  # jaxlib raises some of its errors as ValueErrors
            cluster.end(LOST.format(str(error).splitlines()[0]))
        cluster.end(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        cluster.end(LOST.format(str(error).splitlines()[0]))
    except Exception as error:  # a bug of ours needs its traceback, and the other processes must not wait for this one
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        cluster.end(f"{type(error).__name__}: {error}")
