"""A lock on a folder, held by a file, so that no other process writes there."""

import errno
import fcntl
import os
import pathlib
import socket
import weakref


def lock(path: pathlib.Path, owner: object) -> str:
    """Locks a file until `owner` or this process ends. Returns "", or the name of the other process that holds it.

    The lock is a POSIX record lock: the system releases it when the process dies, and forked processes do not inherit
    it. On a file system without such locks, nothing is locked.
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
