"""Opens folders of safetensors in the Hub's layout without reading them, and writes them whole or not at all.

The Rust library checks every header before anything in it is used. Reading and writing values is done here, because
the library's numpy interface has no float8, cannot read into the caller's buffer, and needs a whole shard in memory to
write it.
"""

import contextlib
import functools
import hashlib
import json
import math
import mmap
import os
import pathlib
import re
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import ml_dtypes
import numpy as np
from huggingface_hub import StateDictSplit, split_state_dict_into_shards_factory
from safetensors import SafetensorError, safe_open

from convert import manifest
from convert.files import INDEX, MANIFEST, WEIGHTS, read_index, read_json, regular
from convert.hub import headers


DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E4M3FNUZ": np.dtype(ml_dtypes.float8_e4m3fnuz),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E5M2FNUZ": np.dtype(ml_dtypes.float8_e5m2fnuz),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U64": np.dtype(np.uint64),
    "U32": np.dtype(np.uint32),
    "U16": np.dtype(np.uint16),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
    "C64": np.dtype(np.complex64),
}
CODES = {dtype: code for code, dtype in DTYPES.items()}

HEADER = 2**24  # most bytes of a file's header: 140,000 tensors, ten times what the largest published files have

# A tensor that is made when it is written: its shape, its dtype, and a function that makes it.
Lazy = tuple[tuple[int, ...], np.dtype, Callable[[], np.ndarray]]


class File:
    """An open file of weights. Its tensors share the descriptor, which is closed when the last of them is gone."""

    def __init__(self, path: pathlib.Path):
        self.path = path
        self.descriptor = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self.descriptor)

    @functools.cached_property
    def mapped(self) -> np.ndarray:
        return self.map()

    def map(self) -> np.ndarray:
        return np.frombuffer(mmap.mmap(self.descriptor, 0, access=mmap.ACCESS_READ), np.uint8)


class _Remote(File):
    """A file on the Hub, of which only the header was downloaded."""

    def __init__(self, path: pathlib.Path):
        self.path = path


@dataclass(frozen=True)
class Tensor:
    """A tensor in a file: its name, shape and dtype, with values not read yet. Any thread may read it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    offset: int  # bytes of the file before the tensor's first byte
    _file: File = field(repr=False)

    @property
    def file(self) -> pathlib.Path:
        return self._file.path

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def readable(self) -> bool:
        """Whether the values can be read: False if only the file's header was downloaded."""
        return not isinstance(self._file, _Remote)

    def view(self, *, own: bool = False) -> np.ndarray:
        """Maps the file into memory: the array is read-only, not copied, and read from disk where it is touched.

        The mapping outlives the file's removal or replacement, but not its truncation. All tensors of a file share one
        mapping, whose pages stay in memory. With `own`, the array gets a mapping of its own, which is freed with it.
        """
        return np.ndarray(self.shape, self.dtype, self._file.map() if own else self._file.mapped, self.offset)

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Returns `view()[index]` as `dtype`, without a copy if the dtype is right already.

        Axes that the index leaves out are taken whole.
        """
        return self.view()[(*index, ...)].astype(dtype, copy=False)  # the ellipsis keeps a scalar an array

    def read_into(self, out: np.ndarray, start: int = 0) -> None:
        """Fills `out`, a C-contiguous array of this dtype, with rows from `start` on, straight from the file.

        Rows are along the first axis: an `out` of this tensor's shape is filled with the whole tensor.

        Raises:
            ValueError: `out` has another dtype or shape, or more rows than there are from `start` on.
            OSError: the file cannot be read, or has become shorter.
        """
        alike = (out.ndim, out.shape[1:], out.dtype) == (len(self.shape), self.shape[1:], self.dtype)
        rows, wanted = (shape[0] if shape else 1 for shape in (self.shape, out.shape))  # a scalar is one row
        if not (alike and 0 <= start <= rows - wanted and out.flags.c_contiguous and out.flags.writeable):
            raise ValueError(
                f"{self.name} in {self.file} is {self.dtype}{list(self.shape)}; it needs a writeable C-contiguous "
                f"array of that kind or of some of its rows, not {out.dtype}{list(out.shape)} from row {start} on."
            )
        rest, offset = _bytes(out), self.offset + start * math.prod(self.shape[1:]) * self.dtype.itemsize
        while rest:  # the system reads at most 2 GB at a time
            with _naming(self.file):
                count = os.preadv(self._file.descriptor, [rest], offset)
            if not count:
                raise OSError(f"{self.file} ends before {self.name} does; it was cut short after it was opened.")
            rest, offset = rest[count:], offset + count


def open_tensors(folder: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Opens a checkpoint: returns every tensor by name, in the order of the files.

    The folder holds model.safetensors, or model.safetensors.index.json and the files that it names. As in transformers,
    model.safetensors wins if both are there, and other files are ignored.

    Raises:
        FileNotFoundError: there is no such folder, it has no safetensors, or the index names a file that is not there.
        ValueError: a file is damaged, or the index and the files disagree; the message names the file and the tensor.
    """
    folder = pathlib.Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}.")
    if (folder / WEIGHTS).exists():
        return {tensor.name: tensor for tensor in open_file(folder / WEIGHTS)}
    if not (folder / INDEX).exists():
        raise FileNotFoundError(f"{folder} has neither {WEIGHTS} nor {INDEX}{_instead(folder)}.")
    index = read_index(folder / INDEX)
    tensors: dict[str, Tensor] = {}
    for name in sorted(set(index.values())):
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / INDEX} names {name}, which is not there; fetch or export it again.")
        for tensor in open_file(folder / name):
            if tensor.name in tensors:
                raise ValueError(f"{tensor.name} is both in {tensors[tensor.name].file} and in {tensor.file}.")
            if tensor.name not in index:
                raise ValueError(f"{tensor.file} holds {tensor.name}, which {folder / INDEX} does not list.")
            tensors[tensor.name] = tensor
    for name, file in index.items():
        if name not in tensors or tensors[name].file.name != file:
            raise ValueError(f"{folder / INDEX} puts {name} in {file}, which does not hold it.")
    return tensors


def verify_files(folder: str | os.PathLike[str], share: slice = slice(None)) -> None:
    """Checks that a checkpoint's files are those that `save_tensors` wrote together, by the hashes in its manifest.

    A folder without a manifest, written by another program, passes. Several files are hashed at a time, each at about
    1.8 GB/s on a core with instructions for SHA-256. `share` selects some of the files, so that several processes can
    share the work.

    Raises:
        ValueError: a file has changed since, or belongs to another export; the message names the file.
    """
    folder = pathlib.Path(folder)
    if not (folder / MANIFEST).exists():
        return
    written = read_json(folder / MANIFEST)
    used = {WEIGHTS} if (folder / WEIGHTS).exists() else {*read_index(folder / INDEX).values()}
    if strangers := sorted(used - written.keys()):
        raise ValueError(
            f"{folder / strangers[0]} would be loaded, but is of another export than {', '.join(sorted(written)[:2])} "
            f"and whatever else {folder / MANIFEST} lists; remove it with what belongs to it, or else the manifest."
        )
    verify_hashes(folder, MANIFEST, sorted(used)[share])


def verify_hashes(folder: pathlib.Path, listed: str, names: Sequence[str]) -> None:
    """Checks files of a folder against the hashes in its file `listed`.

    Raises:
        ValueError: a file's hash differs; the message names the file.
    """
    written = read_json(folder / listed)
    for name, digest in manifest.hashes(folder, names).items():
        if digest != written.get(name):
            raise ValueError(
                f"{folder / name} is not what was written with {listed}: it is damaged or of another export. Fetch or "
                f"export the folder again; if it is meant so, remove {listed}, or load with verify=False."
            )


def remote_tensors(repo: str, commit: str) -> dict[str, Tensor]:
    """Returns every tensor of a repository on the Hub, from headers alone: the values cannot be read.

    Raises:
        OSError, ValueError: as in `convert.hub.headers`; a ValueError also if a dtype is not one of DTYPES.
    """
    tensors = {}
    for file, header in headers(repo, commit).files_metadata.items():
        remote = _Remote(pathlib.Path(repo, file))
        for name, info in header.tensors.items():
            if info.dtype not in DTYPES:
                raise _unknown_dtype(name, remote.path, info.dtype)
            tensors[name] = Tensor(name, tuple(info.shape), DTYPES[info.dtype], info.data_offsets[0], remote)
    return tensors


def save_tensors(folder: str | os.PathLike[str], tensors: Mapping[str, Lazy], *, shard_bytes: int = 5 * 10**9) -> None:
    """Writes model.safetensors or, above `shard_bytes`, shards and model.safetensors.index.json, tensor by tensor.

    model.safetensors.manifest.json then has the SHA-256 of each file of tensors, for `verify_files`.

    All files are first written beside those of the folder. Then one rename makes them the folder's checkpoint, and the
    files of the earlier one are removed. So after an error, a full disk or a kill, the folder loads as the earlier
    checkpoint or as the new one. The tensors may come from the very files that are replaced.

    Raises:
        ValueError: there is nothing to write, safetensors has no such dtype, or a tensor is not made in the announced
            shape and dtype.
        OSError: a file cannot be written; the folder keeps what it held.
    """
    if not tensors:
        raise ValueError(f"There are no tensors to write to {folder}.")
    for name, (_, dtype, _) in tensors.items():
        if dtype not in CODES:
            raise ValueError(f"{name} is {dtype}, which safetensors cannot hold.")
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    plan = split_state_dict_into_shards_factory(
        dict(tensors),
        get_storage_size=lambda tensor: math.prod(tensor[0]) * tensor[1].itemsize,
        filename_pattern="model{suffix}.safetensors",
        max_shard_size=shard_bytes,
    )
    prefix = f"saving-{uuid.uuid4().hex}-"
    try:
        hashes = {
            file: write_file(folder / f"{prefix}{file}", {name: tensors[name] for name in names})
            for file, names in plan.filename_to_tensors.items()
        }
        write_json(folder / f"{prefix}{MANIFEST}", hashes)
        if plan.is_sharded:
            _write_index(folder / f"{prefix}{INDEX}", plan, prefix)
    except BaseException:
        for path in folder.glob(f"{prefix}*"):
            path.unlink()
        raise
    (folder / MANIFEST).unlink(missing_ok=True)  # first, so that it is never beside files that it does not list
    if plan.is_sharded:
        _publish_shards(folder, plan, prefix)
    else:
        os.replace(folder / f"{prefix}{WEIGHTS}", folder / WEIGHTS)
        _remove_others(folder, {WEIGHTS, f"{prefix}{MANIFEST}"})
    os.replace(folder / f"{prefix}{MANIFEST}", folder / MANIFEST)


def open_file(path: pathlib.Path) -> list[Tensor]:
    """Opens one file, and returns its tensors in the order of their offsets."""
    regular(path)
    with path.open("rb") as start:
        header = int.from_bytes(start.read(8), "little")
    if header > HEADER:
        raise ValueError(
            f"{path} is not a whole safetensors file, or one of far too many tensors: it says that its header has "
            f"{header:,} bytes; fetch it again, or export it in shards."
        )
    try:
        with safe_open(path, "np") as checked:
            pieces = [(name, checked.get_slice(name)) for name in checked.offset_keys()]
            layout = [(name, piece.get_dtype(), tuple(piece.get_shape())) for name, piece in pieces]
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file ({error}); fetch or export it again.") from error
    except OSError as error:
        raise OSError(f"{path} cannot be read: {error}.") from error
    file, offset, tensors = File(path), 8 + header, []
    for name, code, shape in layout:  # the library has checked that tensors fill the file without gaps
        if code not in DTYPES:
            raise _unknown_dtype(name, path, code)
        try:
            np.broadcast_to(np.zeros((), DTYPES[code]), shape)
        except ValueError as error:
            raise ValueError(f"{name} in {path} has the shape {list(shape)}, which numpy cannot hold.") from error
        tensors.append(Tensor(name, shape, DTYPES[code], offset, file))
        offset += tensors[-1].nbytes
    return tensors


def _unknown_dtype(name: str, file: pathlib.Path, code: str) -> ValueError:
    return ValueError(f"{name} in {file} has the dtype {code}, which is not one of {', '.join(DTYPES)}.")


def write_file(path: pathlib.Path, tensors: Mapping[str, Lazy]) -> str:
    """Writes one safetensors file, and returns its SHA-256.

    The data start at a multiple of 64 bytes, so that jax.device_put need not copy them.
    """
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1][1].itemsize))  # aligns each to its own item size
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (shape, dtype, _) in tensors.items():
        start, end = end, end + math.prod(shape) * dtype.itemsize
        header[name] = {"dtype": CODES[dtype], "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % 64)
    digest = hashlib.sha256()
    with _new_file(path) as write:

        def put(data: bytes | memoryview) -> None:
            write(data)
            digest.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for name, tensor in tensors.items():
            put(_bytes(_made(name, tensor)))
    return digest.hexdigest()


def _made(name: str, tensor: Lazy) -> np.ndarray:
    """Makes the values, and checks that they have the announced shape and dtype."""
    shape, dtype, make = tensor
    array = np.asarray(make())
    if (array.shape, array.dtype) != (shape, dtype):
        raise ValueError(f"{name} was announced as {dtype}{list(shape)}, but is {array.dtype}{list(array.shape)}.")
    return array


def _bytes(array: np.ndarray) -> memoryview:
    """Returns the values in C order: the array's own memory if it is contiguous, else a copy."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write_index(path: pathlib.Path, plan: StateDictSplit, prefix: str = "") -> None:
    """Writes the index of shards whose names begin with `prefix`."""
    weight_map = {name: prefix + file for name, file in plan.tensor_to_filename.items()}
    write_json(path, {"metadata": plan.metadata, "weight_map": weight_map})


def write_json(path: pathlib.Path, value: dict) -> None:
    """Writes a new file, and syncs it to the disk."""
    with _new_file(path) as write:
        write(json.dumps(value, indent=2).encode())


def _publish_shards(folder: pathlib.Path, plan: StateDictSplit, prefix: str) -> None:
    """Makes the shards with prefixed names the folder's checkpoint, then removes the prefix from their names."""
    index, files = folder / f"{prefix}{INDEX}", list(plan.filename_to_tensors)
    os.replace(index, folder / INDEX)
    _remove_others(folder, {INDEX, f"{prefix}{MANIFEST}", *(prefix + file for file in files)})
    # From here on the folder loads, and the final names are free. Each file has both names until the index is replaced.
    for file in files:
        try:
            os.link(folder / f"{prefix}{file}", folder / file)
        except OSError:  # a file system without hard links
            os.rename(folder / f"{prefix}{file}", folder / file)
    _write_index(index, plan)
    os.replace(index, folder / INDEX)
    _remove_others(folder, {INDEX, f"{prefix}{MANIFEST}", *files})


@contextlib.contextmanager
def _new_file(path: pathlib.Path) -> Iterator[Callable[[bytes | memoryview], None]]:
    """Yields a function that writes to a new file, and syncs the file to the disk when the block ends."""
    with path.open("xb", buffering=0) as file:

        def write(data: bytes | memoryview) -> None:
            rest = memoryview(data)
            with _naming(path):
                while rest:  # the system writes at most 2 GB at a time
                    rest = rest[file.write(rest) :]

        yield write
        with _naming(path):
            os.fsync(file.fileno())


@contextlib.contextmanager
def _naming(path: pathlib.Path) -> Iterator[None]:
    """Adds the file's name to the system's errors, which lack the name if only a descriptor was used."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _remove_others(folder: pathlib.Path, keep: set[str]) -> None:
    """Removes the weights of earlier exports, and files that killed exports left."""
    for path in folder.iterdir():
        ours = r"(saving-[0-9a-f]{32}-)?model(-\d+-of-\d+)?\.safetensors(\.(index|manifest)\.json)?"
        if re.fullmatch(ours, path.name) and path.name not in keep:
            path.unlink()


def _instead(folder: pathlib.Path) -> str:
    """Returns a clause for an error message, if the folder holds pickle files in place of safetensors, else ""."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".pkl", ".ckpt"))
    if pickles:
        return (
            f", only {pickles[0]}: pickle files can run code when opened and are refused; convert the repository with "
            "https://huggingface.co/spaces/safetensors/convert"
        )
    return ""
