"""Locks a folder by a file, so that no other process writes there."""

import errno
import fcntl
import os
import pathlib
import socket
import weakref


def lock(path: pathlib.Path, owner: object) -> str:
    """Locks a file until `owner` or this process ends. Returns "", or which other process has it.

    These are POSIX record locks: the system releases them when a process dies, and forked processes do not inherit
    them. On a file system that has none, nothing is locked.
    """
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    weakref.finalize(owner, os.close, file)
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return path.read_text().strip() or "another process" if error.errno in (errno.EACCES, errno.EAGAIN) else ""
    os.truncate(file, 0)
    os.write(file, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return ""
