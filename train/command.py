"""The command line of a training script."""

import os
import pathlib
import traceback
from collections.abc import Callable
from typing import Any

import jax
import tyro

from train import cluster


def command(main: Callable[[Any], None], options: type) -> None:
    """Calls `main` with the options of the command line. Errors that the user can mend are one sentence, no traceback.

    Programs that XLA compiles are kept for the next run, in JAX_COMPILATION_CACHE_DIR or the user's cache folder.
    """
    o = tyro.cli(options)
    if not jax.config.jax_compilation_cache_dir:
        cache = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
        jax.config.update("jax_compilation_cache_dir", str(cache / "equinox-zoo" / "jax"))
    try:
        cluster.initialize(o.coordinator, o.processes, o.process)
        main(o)
    except (ValueError, OSError, ImportError, FloatingPointError) as error:
        cluster.end(f"{type(error).__name__}: {error}")
    except jax.errors.JaxRuntimeError as error:
        if jax.process_count() == 1:
            raise
        cluster.end(
            f"a computation of all processes failed, most likely because one has died ({str(error).splitlines()[0]}). "
            "Start all of them again: the run goes on from its last checkpoint."
        )
    except Exception as error:  # a fault of ours, whose place says more; the other processes must not wait for this one
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        cluster.end(f"{type(error).__name__}: {error}")
