"""The command line of a training script."""

import dataclasses
import pathlib
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import jax

from convert.private import public, warn_of_secrets
from kernels.backends.errors import out_of_jax, show_all_frames
from kernels.backends.program_cache import keep_programs
from train.base import cluster, runfile, stop
from train.base.options import Group, OptionGroup, option


LOST = (
    "a computation of all processes failed, most likely because one has died ({}). "
    "Start all of them again: the run goes on from its last checkpoint."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommandOptions(OptionGroup):
    """Options for `command`: a file of options."""

    help_group: ClassVar[Group] = Group.RUN
    name: ClassVar[str]  # of the script

    config: pathlib.Path | None = option(None, identity=False)
    """YAML file of any of these options, such as the run.yaml in the folder of another run. Options of the command line
    win over those of the file."""
    retired: ClassVar[Mapping[str, str]] = {
        "coordinator": "set the environment variable JAX_COORDINATOR_ADDRESS (docs/clusters.md).",
        "processes": "set the environment variable NNODES (docs/clusters.md).",
        "process": "set the environment variable NODE_RANK (docs/clusters.md).",
        "full-processes": "train.launch --elastic sets the environment variable ZOO_FULL_PROCESSES.",
    }


def command(main: Callable[[Any], None], options: type[CommandOptions]) -> None:
    """Calls `main` with the options of the command line.

    An error that the user can mend is printed as one sentence, without a traceback, and ends the process.

    Programs that XLA compiles are kept for the next run (`keep_programs`).
    """
    warn_of_secrets(sys.argv)
    try:
        o = runfile.parse(options)
    except (ValueError, OSError) as error:
        raise SystemExit(public(f"{type(error).__name__}: {error}")) from error
    keep_programs()
    show_all_frames()
    try:
        with stop.handled(stop.leave):
            cluster.initialize()
            main(o)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        if "Gloo" in str(error) and jax.process_count() > 1:  # jaxlib raises some of its errors as ValueErrors
            cluster.end(LOST.format(str(error).splitlines()[0]))
        _end_if_out_of_jax(error, o)
        cluster.end(" ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]))
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        cluster.end(LOST.format(str(error).splitlines()[0]))
    except Exception as error:  # a bug of ours needs its traceback, and the other processes must not wait for this one
        _end_if_out_of_jax(error, o)
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        cluster.end(f"{type(error).__name__}: {error}")


def _end_if_out_of_jax(error: Exception, options: CommandOptions) -> None:
    """Ends this process if an error was raised inside of JAX. Its traceback is in the run's folder, if there is one."""
    if (refused := out_of_jax(error)) is None:
        return
    out, text = getattr(options, "out", None), public("".join(traceback.format_exception(error)))
    if out is None or not out.is_dir():
        print(text, file=sys.stderr)
        cluster.end(f"{refused}. Please report it with the traceback above.")
    path = out / f"error-{jax.process_index()}.txt"
    path.write_text(text)
    cluster.end(f"{refused}. Please report it with the traceback in {path}.")
