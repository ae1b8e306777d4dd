"""Paths to write to, which must be on this machine: object stores cannot replace, lock and hash files."""

import os
import pathlib
import re


def path(name: str, value: str | os.PathLike[str]) -> pathlib.Path:
    """Returns the path of a folder or file to write.

    Args:
        name: the name of the option or argument, for the message.

    Raises:
        ValueError: `value` is a URL.
    """
    if re.match(r"\w{2,}:/", str(value)):  # pathlib turns two slashes into one
        raise ValueError(
            f"{name} {value} is in an object store, and must be a path of this machine: mount the store there "
            "(gcsfuse, mountpoint-s3), or copy what was written when it is whole. Only data is read from URLs."
        )
    return pathlib.Path(value)
