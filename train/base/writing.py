"""Functions that write small files of a run or a store."""

import os
import pathlib

from convert.private import public


def write(path: pathlib.Path, text: str, mode: int = 0o666) -> None:
    """Writes a file under another name and renames it, so that nobody reads half of it.

    Args:
        mode: permissions, which the process's umask reduces.

    Raises:
        OSError: the file cannot be written; the error names it.
    """
    new = path.with_name(f"{path.name}.tmp")
    try:
        new.unlink(missing_ok=True)
        with open(new, "w", encoding="utf-8", opener=lambda name, flags: os.open(name, flags, mode)) as file:
            file.write(text)
        new.replace(path)
    except OSError as error:  # the error of a full disk has no file name
        new.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_private(path: pathlib.Path, text: str) -> None:
    """Writes `public(text)` to a file that only its owner may read: commands may hold other secrets."""
    write(path, public(text), 0o600)
