"""Files of a data set: finding them, and copying them to this machine, since records are read by random access.

A data set is named by a file, a folder, a glob ('data/*.jsonl'), a URL of an object store (gs://, s3://, hf://, or any
other that fsspec supports) with a file, a folder or a glob, or by hf:NAME (`train.data.hub`). Each name may be followed
by @file.py:function (`train.data.functions`). Files of object stores and of web servers (`train.data.web`), and
compressed files (.gz, .zst), are copied into the cache folder when they are opened, and again once they have changed.
"""

import concurrent.futures
import contextlib
import dataclasses
import glob
import gzip
import pathlib
import re
import shutil
import urllib.parse
import zlib
from collections.abc import Sequence
from typing import Any, Literal

import fsspec
import fsspec.callbacks
import jax
import rich

from convert import cache, manifest
from convert.private import public
from train.data import functions, hub, web
from train.data.formats import READERS


VALID = "valid|validation|val|dev"
# Files beside data: descriptions by TFDS and Hugging Face `datasets`, and the latter's cached results.
BESIDE = re.compile(r"(dataset_infos?|dataset_dict|features|state)\.json|cache-\w+\.arrow|.*\.labels\.txt")
# Kind of URL -> package, and our extra that installs it.
PACKAGES = {"gs": ("gcsfs", "gcs"), "gcs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3"), "s3a": ("s3fs", "s3")}
COPIES = 8  # files that are copied at a time


def find_files(path: str | pathlib.Path) -> tuple[list[str], list[str]]:
    """Returns the sorted names of the files to train on, and of the files to validate on. A name is a path or a URL.

    In a folder, the words train, valid, validation, val, dev and test in the names of files and subfolders decide. Test
    files are for validation if there are no other validation files. Files without such a word are for training, unless
    there are files with the word train. If a glob would have no files for training, all its files are for training.

    Raises:
        FileNotFoundError: there is no such file or folder.
        OSError: a store cannot be read.
        ValueError: there is nothing to train on, or files are of several kinds.
        ImportError: a store needs a package that is not installed.
    """
    files, chosen = _list(functions.split(str(path))[0])
    if chosen == "file":
        train, valid = list(files), []
    else:
        files = {
            file: text for file, text in files.items() if kind(file) in READERS and not BESIDE.fullmatch(_last(file))
        }

        def named(words: str) -> list[str]:
            pattern = re.compile(rf"(?<![a-z])({words})(?![a-z])", re.IGNORECASE)
            return [file for file, text in files.items() if pattern.search(text)]

        valid = named(VALID) or named("test")
        rest = [file for file in files if file not in named(f"{VALID}|test")]
        train = [file for file in named("train|training") if file in rest] or rest
        if chosen == "glob" and not train:
            train, valid = list(files), []
    if not train or kind(train[0]) not in READERS:
        raise ValueError(
            f"{path} has nothing to train on: files must end in {', '.join(READERS)}, or one of these and .gz or .zst."
        )
    if len({kind(file) for file in train + valid}) > 1:
        raise ValueError(f"{path} has files of several kinds, {_last(train[0])} among them: name a single one of them.")
    return train, valid


def _list(path: str) -> tuple[dict[str, str], Literal["file", "glob", "folder"]]:
    """Returns file -> its name below the folder, sorted; and how the files were chosen."""
    if "://" in path:
        return _list_store(path)
    if path.startswith("hf:"):
        return hub.files(path), "glob"
    here = pathlib.Path(path)
    if here.is_file():
        return {path: here.name}, "file"
    if here.is_dir():
        found, root, chosen = here.rglob("*"), here, "folder"
    elif glob.has_magic(path):
        found, root, chosen = map(pathlib.Path, glob.glob(path, recursive=True)), pathlib.Path(_fixed(path)), "glob"
    else:
        raise FileNotFoundError(f"{path} is neither a file nor a folder.")
    files = {str(file): str(file.relative_to(root)) for file in sorted(found) if file.is_file()}
    if not files and chosen == "glob":
        raise FileNotFoundError(f"No file matches {path}.")
    return files, chosen


def _list_store(url: str) -> tuple[dict[str, str], Literal["file", "glob", "folder"]]:
    """Returns the same as `_list`, for a URL."""
    if web.is_url(url) and not re.search(r"[*\[]", url):
        return {url: _last(url)}, "file"
    system, path = filesystem(url)
    try:
        if system.isfile(path):
            found, root, chosen = [path], path.rpartition("/")[0], "file"
        elif glob.has_magic(path):
            found, root, chosen = system.glob(path), _fixed(path), "glob"
        else:
            found, root, chosen = system.find(path), path.rstrip("/"), "folder"
    except Exception as error:  # each store has its own errors
        raise OSError(f"{url} cannot be listed: {type(error).__name__}: {error}") from error
    if not found:
        raise FileNotFoundError(f"{url} is no file and no folder with files, or they are hidden from you.")
    found = sorted(found, key=pathlib.PurePosixPath)
    return {system.unstrip_protocol(file): file.removeprefix(f"{root}/") for file in found}, chosen


def _fixed(pattern: str) -> str:
    """Returns the folder before the first wildcard."""
    return re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")[0]


def _last(name: str) -> str:
    path = urllib.parse.urlsplit(name).path if web.is_url(name) else name  # without a query
    return path.rpartition("/")[2]


def kind(name: str) -> str:
    """Returns a file's suffix without compression and shard number: ".json" for c4.00000-of-00008.json.gz."""
    plain = _last(name).removesuffix(".gz").removesuffix(".zst")
    suffix = pathlib.PurePath(re.sub(r"-\d+-of-\d+$", "", plain)).suffix
    return {".tfrecords": ".tfrecord"}.get(suffix, suffix)


def filesystem(url: str) -> tuple[Any, str]:
    """Returns the file system of a URL, and the path in it.

    Raises:
        ImportError: the file system's package is not installed.
        ValueError: there is no file system for this kind of URL.
    """
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:
        package, extra = PACKAGES.get(url.partition("://")[0], ("", ""))
        how = f"{package}: pip install -e '.[{extra}]'" if package else f"another package: {error}"
        raise ImportError(f"Reading {url} needs {how}") from None
    except ValueError as error:
        raise ValueError(f"{url} cannot be read: {error}.") from error


# ======================================================================================================================
# Copies on this machine.
# ======================================================================================================================


def local(names: Sequence[str]) -> list[pathlib.Path]:
    """Returns paths of uncompressed files on this machine. Copies files into the cache folder if needed.

    Raises:
        OSError: a file cannot be copied.
        ValueError: a compressed file is damaged.
    """
    with concurrent.futures.ThreadPoolExecutor(COPIES) as pool:
        return list(pool.map(_plain, names))


def _plain(name: str) -> pathlib.Path:
    path = fetched(name)
    if path.suffix not in (".gz", ".zst"):
        return path
    return cache.keep(cache.key_of(path), path.stem, lambda to: unpack(path, name, to))


def fetched(name: str) -> pathlib.Path:
    """Returns the path of a file on this machine, still compressed if it is. A .bin has its .idx beside it."""
    if "://" not in name:
        return pathlib.Path(name)
    parts = [name, f"{name.removesuffix('.bin')}.idx"] if kind(name) == ".bin" else [name]
    with contextlib.ExitStack() as stack:
        try:
            opened = [web.opened(part, stack) if web.is_url(part) else _Stored.of(part) for part in parts]
        except Exception as error:
            raise OSError(f"{public(name)} cannot be read: {_why(error)}") from error
        there = [part for part in opened if part]

        def copy(to: pathlib.Path) -> None:
            for part in reversed(there):
                place = to if part.name == name else to.with_name(_last(part.name))
                told = {"desc": public(_last(part.name)), "unit": "B", "unit_scale": True, "disable": None}
                try:
                    part.write(place, fsspec.callbacks.TqdmCallback(told))
                except Exception as error:
                    raise OSError(f"{public(name)} cannot be copied: {_why(error)}") from error

        return cache.keep(" ".join([name, *(part.key for part in there)]), _last(name), copy)


def _why(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


@dataclasses.dataclass(frozen=True)
class _Stored:
    """A file of an object store, with the interface of `train.data.web.Opened`."""

    name: str
    system: Any
    path: str
    key: str  # stands for the file's properties in its store

    @classmethod
    def of(cls, name: str) -> "_Stored | None":
        system, path = filesystem(name)
        return cls(name, system, path, system.ukey(path)) if system.exists(path) else None

    def write(self, to: pathlib.Path, bar: fsspec.callbacks.Callback) -> None:
        self.system.get_file(self.path, str(to), callback=bar)
        if (came := to.stat().st_size) != (size := self.system.size(self.path)):
            raise OSError(f"it came with {came:,} bytes of {size:,}; start again")


def unpack(path: pathlib.Path, name: str, to: pathlib.Path) -> None:
    """Writes the uncompressed content of a file to `to`."""
    rich.print(f"Unpacking {public(name)} into {to.parent}")
    try:
        with _unpacked(path, name) as plain, open(to, "wb") as out:
            shutil.copyfileobj(plain, out, 2**20)
    except (EOFError, gzip.BadGzipFile, zlib.error, OSError) as error:
        raise ValueError(f"{name} cannot be unpacked: {error}") from error


def _unpacked(path: pathlib.Path, name: str) -> Any:
    if path.suffix == ".gz":
        return gzip.open(path)
    try:
        import pyarrow as pa
    except ImportError:
        raise ImportError(f"Reading {name} needs pyarrow: pip install -e '.[data]'") from None
    return pa.CompressedInputStream(pa.OSFile(str(path)), "zstd")


def hashes(path: str | pathlib.Path) -> dict[str, str]:
    """Returns name below the folder -> SHA-256, for each file of a data set, and for the user's function's file.

    Only process 0 reads the files, since no other compares the hashes; the others return {}.
    """
    if jax.process_index():
        return {}
    data, function = functions.split(str(path))
    names, (train, valid) = _list(data)[0], find_files(data)
    places: dict[str, str] = {}
    if function:
        file = function.rpartition(":")[0]
        places[pathlib.PurePath(file).name] = file
    for file in train + valid:
        places[names[file]] = str(fetched(file))
        if kind(file) == ".bin":
            places[f"{names[file].removesuffix('.bin')}.idx"] = str(fetched(file).with_suffix(".idx"))
    found = manifest.hashes(pathlib.Path(), places.values())
    return {name: found[place] for name, place in places.items()}
