"""Writes the hashes of a folder's files into the folder, and verifies them: the error names the changed file."""

import concurrent.futures
import hashlib
import json
import pathlib
from collections.abc import Iterable


NAME = "manifest.json"
# Errors of missing files and wrong contents. Others may come from a file server, and be temporary.
DAMAGE = (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError)


def write(folder: pathlib.Path) -> None:
    """Writes manifest.json: the SHA-256 of every other file below the folder."""
    files = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file() and path.name != NAME]
    (folder / NAME).write_text(json.dumps(hashes(folder, sorted(files)), indent=0) + "\n")


def verify(folder: pathlib.Path) -> None:
    """Checks every file that manifest.json lists.

    Raises:
        OSError: a file or the manifest is missing or cannot be read; the message names the file.
        ValueError: a file has changed; the message names the file.
    """
    manifest = json.loads((folder / NAME).read_text())
    for name, digest in hashes(folder, manifest).items():
        if digest != manifest[name]:
            raise ValueError(f"{folder / name} is not what was written")


def hashes(folder: pathlib.Path, files: Iterable[str]) -> dict[str, str]:
    """Returns name -> SHA-256 of files that are named relative to the folder; reads several at a time."""

    def sha256(name: str) -> str:
        try:
            with (folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except OSError as error:  # an error of reading lacks the file's name
            raise OSError(error.errno, error.strerror, str(folder / name)) from error

    with concurrent.futures.ThreadPoolExecutor() as pool:
        return dict(zip(files, pool.map(sha256, files), strict=True))
