"""The cache folder of programs that XLA compiled for tests, which all checkouts of a user share.

It is equinox-zoo/tests/xla-KEY in XDG_CACHE_HOME or ~/.cache. JAX finds a program in it by its code, XLA's flags, the
version of jaxlib, and the CPU. KEY also depends on the versions of Python and jax, and on the CPU as Linux describes
it: XLA only warns when it loads a program of another CPU, and may then die of an illegal instruction. The folders are
safe to delete.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import shutil
import zlib

import jax
import jaxlib


MOST_BYTES = 3 << 30  # of the programs of all keys
CPU = pathlib.Path("/proc/cpuinfo")
CHECKED = ".checked"  # this file's modification time is when `tidy` last checked its folder


def home() -> pathlib.Path:
    """Returns the path of the folder that contains a folder for each key."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "equinox-zoo" / "tests"


def folder() -> pathlib.Path:
    """Creates the folder for this machine and these versions, if it is missing, and returns its path."""
    parts = (platform.python_version_tuple()[:2], jax.__version__, jaxlib.__version__, cpu())
    path = home() / f"xla-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)  # JAX runs what lies in it, so nobody else may write there
    return path


def cpu() -> str:
    """Returns the CPU's name and instruction sets, or the machine's name if Linux does not describe the CPU."""
    if not CPU.exists():
        return " ".join((platform.machine(), platform.processor(), platform.node()))
    lines = CPU.read_text().split("\n\n")[0].splitlines()
    entries = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU part", "flags", "Features")
    return " ".join([platform.machine(), *(entries.get(name, "") for name in names)])


def tidy() -> None:
    """Removes programs that were written in part, and the least recently used ones beyond MOST_BYTES.

    JAX writes a program straight to its file. If the process is killed meanwhile, the file is incomplete: JAX would
    refuse to load it, and never replace it. A process that wants to read a removed program compiles it again.
    """
    programs = []
    for place in home().glob("xla-*"):
        checked, last = place / CHECKED, 0.0
        if checked.exists():
            last = checked.stat().st_mtime
        checked.touch()
        for path in place.glob("*-cache"):
            with contextlib.suppress(FileNotFoundError):  # another process tidies, too
                found = path.stat()
                if found.st_mtime >= last and _is_part(path.read_bytes()):
                    path.unlink()
                else:
                    programs.append((max(found.st_atime, found.st_mtime), found.st_size, path))
    total = sum(size for _, size, _ in programs)
    for _, size, path in sorted(programs):
        if total <= MOST_BYTES:
            break
        path.unlink(missing_ok=True)
        total -= size


def _is_part(program: bytes) -> bool:
    """Whether the end is missing, as zlib tells. Where JAX uses zstandard instead, only an empty file counts."""
    if program[:1] != b"\x78":
        return not program
    try:
        zlib.decompress(program)
    except zlib.error:
        return True
    return False


def clear() -> None:
    """Removes the programs of this machine and these versions."""
    shutil.rmtree(folder(), ignore_errors=True)
    folder()
