"""Read a tokenizer.json once in a process of its own, to find out whether this process can read it safely.

The file comes with the model. If it is damaged or malicious, the library `tokenizers` panics, hangs, or asks for more
memory than there is, which would end this process.

The other process runs this file as a script, so the file imports nothing of zoo. On Linux that process has `MEMORY`
bytes and, also on macOS, `SECONDS` of processor time, which does not pass while a busy machine lets the process wait.
"""

import contextlib
import hashlib
import os
import pathlib
import subprocess
import sys


if __name__ == "__main__":
    sys.path += sys.argv[2:]  # where the import below is found; the process ignores environment variables

import tokenizers


SECONDS, MEMORY, LARGEST = 20, 2**32, 2**27  # limits: time and memory of the process, bytes of the file


def check(file: pathlib.Path) -> None:
    """Raise ValueError if reading the file would end this process. A file that passes may still be unreadable."""
    if (size := file.stat().st_size) > LARGEST:
        raise ValueError(f"{file} has {size:,} bytes, more than any tokenizer ({LARGEST:,}): fetch it again.")
    with file.open("rb") as data:
        digest = hashlib.file_digest(data, "sha256").digest()
    if digest not in _ends:
        _ends[digest] = _end(file)
    if _ends[digest]:
        raise ValueError(f"{file} is no tokenizer that can be used: to read it {_ends[digest]}. Fetch it again.")


_ends: dict[bytes, str] = {}  # results of `_end`, by the SHA-256 of the file


def _end(file: pathlib.Path) -> str:
    """Return how the process that read the file ended, in words; "" if it could read the file."""
    names = ("LANG", "LC_ALL", "LD_LIBRARY_PATH", "PATH", "SYSTEMROOT")
    place = str(pathlib.Path(tokenizers.__path__[0]).parent)
    try:
        process = subprocess.run(
            [sys.executable, "-I", __file__, str(file.absolute()), place],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, timeout=30 * SECONDS,
            env={name: os.environ[name] for name in names if name in os.environ} | {"TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return f"takes more than {30 * SECONDS} seconds"
    if process.returncode == 0:
        return ""
    return f"ended a process that may take {SECONDS} seconds and {MEMORY:,} bytes"


def _read(file: str) -> None:
    with contextlib.suppress(ImportError, ValueError, OSError):  # Windows has no such limits, macOS none for memory
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with contextlib.suppress(Exception):  # the caller gets the error again, and reports it; a panic is no Exception
        tokenizer = tokenizers.Tokenizer.from_file(file)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        tokenizer.decode(tokenizer.encode("One, two; 3.").ids)


if __name__ == "__main__":
    _read(sys.argv[1])
