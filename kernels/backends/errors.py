"""Errors that JAX and the libraries on it raise: mistakes of a program, and nothing that its user can mend."""

import pathlib
import traceback

import jax


LIBRARIES = "jax", "jaxlib", "equinox", "optax"
HERE = pathlib.Path(__file__).resolve().parents[2]


def out_of_jax(error: BaseException) -> str | None:
    """Describes an error that was raised inside of JAX: in which of our functions, and what to try; None: it was not.

    JAX's own filter of tracebacks has to be off (`show_all_frames`).
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames or not set(pathlib.Path(frames[-1].filename).parts) & set(LIBRARIES):
        return None
    ours = [f for f in frames if pathlib.Path(f.filename).is_relative_to(HERE) and f.name != "<lambda>"]
    where = f"{pathlib.Path(ours[-1].filename).relative_to(HERE)}, {ours[-1].name}" if ours else "a call of JAX"
    said = str(error).strip().splitlines() or [""]
    return (
        f"JAX refused a computation in {where} ({type(error).__name__}: {said[0]}). That is a mistake of this program "
        "and not of your data. Try it on one device (--mesh fsdp=1), with --dtype float32, or without the options that "
        "you added last"
    )


def show_all_frames() -> None:
    """Keeps JAX's frames in tracebacks, by which its errors are known."""
    jax.config.update("jax_traceback_filtering", "off")
