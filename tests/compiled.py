"""The folder of programs that XLA compiled for tests, which all checkouts of a user share.

It lies in XDG_CACHE_HOME or ~/.cache, as equinox-zoo/tests/xla-KEY. JAX finds a program in it by its code, XLA's flags,
the version of jaxlib, and the CPU. The key of the folder adds the versions of Python and jax, and the CPU as Linux
describes it: XLA loads a program of another CPU with no more than a warning, and may then die of an illegal
instruction. The folders are safe to delete.
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
CHECKED = ".checked"  # the file whose time of change says when `tidy` last looked at its folder


def home() -> pathlib.Path:
    """Returns the path of the folder that has a folder for each key."""
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "equinox-zoo" / "tests"


def folder() -> pathlib.Path:
    """Returns the path of the folder for this machine and these versions, which it makes."""
    parts = (platform.python_version_tuple()[:2], jax.__version__, jaxlib.__version__, cpu())
    path = home() / f"xla-{hashlib.sha256(repr(parts).encode()).hexdigest()[:16]}"
    path.mkdir(mode=0o700, parents=True, exist_ok=True)  # JAX runs what lies in it, so nobody else may write there
    return path


def cpu() -> str:
    """Returns the name of the CPU with the instructions that it has, or the machine's name where Linux does not say."""
    if not CPU.exists():
        return " ".join((platform.machine(), platform.processor(), platform.node()))
    lines = CPU.read_text().split("\n\n")[0].splitlines()
    entries = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    names = ("vendor_id", "cpu family", "model", "model name", "stepping", "CPU part", "flags", "Features")
    return " ".join([platform.machine(), *(entries.get(name, "") for name in names)])


def tidy() -> None:
    """Removes programs that were written in part, and beyond MOST_BYTES those that were last used longest ago.

    JAX writes a program straight to its file. A process that is killed meanwhile leaves a part, which JAX would refuse
    to load and never replace. A process that reads a program when it is removed compiles it.
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
    """Whether the end is missing, as zlib tells; JAX takes zstandard in its place where that is installed."""
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
