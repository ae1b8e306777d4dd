"""Errors that JAX and the libraries on it raise: mistakes of a program, and nothing that its user can mend."""

import pathlib
import traceback

import jax


LIBRARIES = "jax", "jaxlib", "equinox", "optax"


def out_of_jax(error: BaseException) -> str | None:
    """Describes an error that was raised inside of JAX: which function called it, and what to try; None: it was not.

    JAX's own filter of tracebacks has to be off (`show_all_frames`).
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not _of_library(frames[-1].filename):
        return None
    callers = [f for f in frames if not _of_library(f.filename) and f.name != "<lambda>"]
    where = f"{'/'.join(pathlib.Path(callers[-1].filename).parts[-3:])}, {callers[-1].name}" if callers else "JAX"
    said = str(error).strip().splitlines() or [""]
    return (
        f"JAX refused a computation in {where} ({type(error).__name__}: {said[0]}). That is a mistake of this program "
        "and not of your data. Try it on one device (--mesh fsdp=1), with --dtype float32, or without the options that "
        "you added last"
    )


def _of_library(file: str) -> bool:
    return not set(LIBRARIES).isdisjoint(pathlib.Path(file).parts)


def show_all_frames() -> None:
    """Keeps JAX's frames in tracebacks, by which its errors are known."""
    jax.config.update("jax_traceback_filtering", "off")
