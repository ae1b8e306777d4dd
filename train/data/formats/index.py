"""Places of the records of a file, found by reading it through. The cache folder keeps those of a large file."""

import array
import pathlib
from collections.abc import Callable, Iterable

import numpy as np
from jaxtyping import UInt64

from convert import cache


LARGE = 2**26  # bytes; a smaller file is read through in a tenth of a second


def index(
    file: pathlib.Path, name: str, scan: Callable[[pathlib.Path, str], Iterable[tuple[int, int]]]
) -> UInt64[np.ndarray, "records 2"]:
    """Returns the pairs of numbers that `scan` yields for the records of a file. For a large file they are cached.

    Raises:
        ValueError: as in `scan`.
    """

    def scanned() -> UInt64[np.ndarray, "records 2"]:
        flat = array.array("Q")
        for pair in scan(file, name):
            flat.extend(pair)
        return np.array(flat, np.uint64).reshape(-1, 2)

    if file.stat().st_size < LARGE:
        return scanned()

    def write(path: pathlib.Path) -> None:
        with open(path, "wb") as out:
            np.save(out, scanned())

    return np.load(cache.keep(f"{scan.__qualname__} {cache.key_of(file)}", "index.npy", write), mmap_mode="r")
