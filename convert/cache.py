"""The user's cache folder, for files that can be made or fetched again."""

import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
from collections.abc import Callable


def folder(kind: str) -> pathlib.Path:
    """Returns the path of equinox-zoo/KIND in XDG_CACHE_HOME or ~/.cache. It need not exist."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "equinox-zoo" / kind


def keep(key: str, name: str, make: Callable[[pathlib.Path], None]) -> pathlib.Path:
    """Returns the path of a file that `make` writes once for each `key`. Other processes wait until it is complete.

    The key must change whenever the content would. Files of old keys stay until the user removes them.
    """
    path = folder("data") / name_of(key) / name
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.parent / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # released when the process ends, however it ends
        if not path.exists():
            unfinished = path.with_name(f"{name}.unfinished")
            try:
                make(unfinished)
                unfinished.replace(path)
            except BaseException:
                with contextlib.suppress(OSError):
                    shutil.rmtree(path.parent)
                raise
    return path


def name_of(key: str) -> str:
    """Returns a short name for a key: 16 hexadecimal digits of its SHA-256."""
    return hashlib.sha256(key.encode()).hexdigest()[:16]


def key_of(file: pathlib.Path) -> str:
    """Returns a key that stands for a local file's content: its path, size and time of change."""
    found = file.stat()
    return f"{file.resolve()} {found.st_size} {found.st_mtime_ns}"


def sha256(file: pathlib.Path) -> str:
    """Returns the SHA-256 of a local file. Hashes it again only if its path, size, time of change or inode differs."""
    note = folder("hashes") / name_of(f"{key_of(file)} {file.stat().st_ino}")
    with contextlib.suppress(OSError):
        if re.fullmatch("[0-9a-f]{64}", known := note.read_text()):
            return known
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    with contextlib.suppress(OSError):  # without a cache folder the file is hashed again the next time
        note.parent.mkdir(parents=True, exist_ok=True)
        note.write_text(digest)
    return digest
