"""This machine: its free memory, and paths to write to. Object stores cannot replace, lock and hash files."""

import os
import pathlib
import re


MEMORY = pathlib.Path("/proc/meminfo")
CONTAINER = pathlib.Path("/sys/fs/cgroup")  # version 2


def free_memory() -> int | None:
    """Returns the bytes of memory that a process may still take, by Linux and by its container; None: not known."""
    free = []
    if MEMORY.exists() and (found := re.search(r"^MemAvailable: +(\d+) kB$", MEMORY.read_text(), re.MULTILINE)):
        free.append(1024 * int(found[1]))
    try:
        most, used = ((CONTAINER / name).read_text().strip() for name in ("memory.max", "memory.current"))
        free.append(int(most) - int(used))
    except (OSError, ValueError):  # there is no container, or it has no limit ("max")
        pass
    return min(free, default=None)


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
