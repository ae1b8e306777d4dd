"""Opens GGUF files: metadata, and tensors that are read and dequantised by slices.

The header is read here: the `gguf` package makes several arrays of each string, and so takes 2 s for a vocabulary of
49,000 tokens and 20 s for gpt-oss's, where this takes 0.05 s and 0.5 s. The blocks of quantised types are decoded by
that package. Source of the layout: docs/gguf.md of github.com/ggml-org/ggml.
"""

import functools
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int, Shaped, UInt8

from convert.files import PART, regular
from convert.packed import BLOCK, Packed, ranges
from convert.tensors import File, Tensor


MAGIC, VERSIONS = b"GGUF", (2, 3)
STRING, ARRAY, BOOL = 8, 9, 7
SCALARS = {  # by the number of the metadata's type: struct's letter
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", BOOL: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip
FLOATS = {
    "F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)
}  # fmt: skip
# The quantised types that are read: all that the package decodes and whose blocks tests compare with it.
QUANTISED = (
    "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4"
)  # fmt: skip


@dataclass(frozen=True)
class Stored:
    """A tensor in a GGUF file, as it is stored."""

    name: str
    shape: tuple[int, ...]
    """In numpy's order, the reverse of the file's: a linear map is (out, in)."""
    kind: str
    """The name of its type, such as "Q4_K"."""
    rows: Tensor
    """The bytes of each row, uint8 [rows, bytes]."""

    @property
    def width(self) -> int:
        """Returns the number of values of a row."""
        return self.shape[-1]


@dataclass(frozen=True)
class Opened:
    """The content of a GGUF file, or of all parts of one that is split."""

    path: pathlib.Path
    metadata: Mapping[str, Any]
    """Numbers, texts and lists; arrays of numbers are numpy's."""
    tensors: Mapping[str, Stored]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture"))

    @property
    def dtype(self) -> np.dtype:
        """Returns the dtype that tensors are decoded to, unless another is asked for.

        It is that of the matrices if most of their bytes are in a plain type, and bfloat16 if a matrix is quantised,
        as for other quantised checkpoints. llama.cpp's files hold norms and biases in F32 in any case.
        """
        matrices = [tensor for tensor in self.tensors.values() if len(tensor.shape) > 1]
        if not matrices or any(tensor.kind not in FLOATS for tensor in matrices):
            return FLOATS["BF16"]
        return FLOATS[max(matrices, key=lambda tensor: tensor.rows.nbytes).kind]


def open_file(path: pathlib.Path) -> Opened:
    """Opens a GGUF file. If its name says that it is one of several parts, the others are opened, too.

    Raises:
        OSError: a file or another part of it is not there.
        ValueError: a file is damaged, or its version, or the type of a tensor, is not read; the message names it.
    """
    parts, tensors = [_open(part) for part in parts_of(path)], {}
    if len(parts) == 1:
        return parts[0]
    for opened in parts:
        if twice := tensors.keys() & opened.tensors.keys():
            raise ValueError(f"{min(twice)} is in {opened.path} and in a part before it.")
        tensors |= opened.tensors
    return Opened(path, parts[0].metadata, tensors)


def parts_of(path: pathlib.Path) -> list[pathlib.Path]:
    """Returns the files that a GGUF file consists of, by its name: itself, or all parts from 00001-of-N on.

    Raises:
        FileNotFoundError: a part is not there.
    """
    if (part := PART.fullmatch(path.name)) is None:
        return [path]
    count = int(part["count"])
    paths = [path.with_name(f"{part['name']}-{n:05}-of-{count:05}.gguf") for n in range(1, count + 1)]
    if missing := [each.name for each in paths if not each.exists()]:
        raise FileNotFoundError(f"{path} is one of {count} parts, and {', '.join(missing[:3])} is not beside it.")
    return paths


def _open(path: pathlib.Path) -> Opened:
    size = regular(path)
    file = File(path)
    if size < 24:
        raise ValueError(f"{path} is no GGUF file: it has {size} bytes.")
    with mmap.mmap(file.descriptor, 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != MAGIC:
            raise ValueError(f"{path} is no GGUF file: it begins with {content[:4]!r}.")
        header = _Header(content, 4)
        version = header.scalar("I")
        if version not in VERSIONS:
            what = "of big-endian machines" if not version & 0xFFFF else f"of version {version}"
            raise ValueError(f"{path} is a GGUF file {what}; versions 2 and 3 in little-endian order are read.")
        try:
            count, entries = header.scalar("Q"), header.scalar("Q")
            metadata: dict[str, Any] = {}
            for _ in range(entries):
                name = header.text()
                if name in metadata:
                    raise ValueError(f"the key {name} appears twice")
                metadata[name] = header.value(header.scalar("I"))
            infos = [(header.text(), header.numbers("Q", header.scalar("I")), *header.info()) for _ in range(count)]
        except (struct.error, UnicodeDecodeError, ValueError, OverflowError, MemoryError) as error:
            raise ValueError(f"{path} is not a whole GGUF file, near byte {header.at:,}: {error}.") from error
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1 or alignment % 8:
        raise ValueError(f"{path} says general.alignment={alignment!r}, which is no multiple of 8.")
    start, tensors = -(-header.at // alignment) * alignment, {}
    for name, reverse, kind, offset in infos:
        if name in tensors:
            raise ValueError(f"{path} holds {name} twice.")
        tensors[name] = _stored(file, name, tuple(map(int, reverse[::-1])), kind, start + offset, size)
    return Opened(path, metadata, tensors)


def _stored(file: File, name: str, shape: tuple[int, ...], number: int, offset: int, size: int) -> Stored:
    """Checks the place and type of a tensor."""
    kinds = _kinds()
    if number not in kinds:
        known = ", ".join([*FLOATS, *QUANTISED])
        raise ValueError(
            f"{name} in {file.path} has the type {_name_of(number)}, which is not read; those that are: {known}."
        )
    kind, values, width = kinds[number]
    if not shape or min(shape) < 1 or shape[-1] % values:
        raise ValueError(f"{name} in {file.path} has the shape {list(shape)}, which {kind} cannot have; it is damaged.")
    rows = (math.prod(shape[:-1]), shape[-1] // values * width)
    if offset + math.prod(rows) > size:
        raise ValueError(f"{file.path} ends before {name} does; fetch it again.")
    return Stored(name, shape, kind, Tensor(name, rows, np.dtype(np.uint8), offset, file))


class _Header:
    """A reader of a header's values, one after another."""

    def __init__(self, content: mmap.mmap, at: int):
        self.content, self.at = content, at

    def scalar(self, letter: str) -> Any:
        (value,) = struct.unpack_from(f"<{letter}", self.content, self.at)
        self.at += struct.calcsize(letter)
        return value

    def numbers(self, letter: str, count: int) -> np.ndarray:
        dtype = np.dtype(letter).newbyteorder("<")
        return np.frombuffer(self._bytes(count * dtype.itemsize), dtype)

    def text(self) -> str:
        return self._bytes(self.scalar("Q")).decode()

    def info(self) -> tuple[int, int]:
        return self.scalar("I"), self.scalar("Q")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            of, count = self.scalar("I"), self.scalar("Q")
            if of in SCALARS:
                return self.numbers(SCALARS[of], count)
            if of != STRING:
                raise ValueError(f"an array of the type {of} is not read")
            if count > len(self.content) // 8:
                raise ValueError(f"an array has {count:,} texts")
            return [self.text() for _ in range(count)]
        if kind not in SCALARS:
            raise ValueError(f"there is no type {kind} of metadata")
        value = self.scalar(SCALARS[kind])
        return short(value) if kind == 6 else value

    def _bytes(self, count: int) -> bytes:
        if count > len(self.content) - self.at:
            raise ValueError(f"{count:,} bytes are announced, and {len(self.content) - self.at:,} are left")
        self.at += count
        return self.content[self.at - count : self.at]


def short(value: float) -> float:
    """Returns the shortest decimal that rounds to this float32: 1e-05 for 9.999999747378752e-06."""
    return float(str(np.float32(value)))


@functools.cache
def _kinds() -> dict[int, tuple[str, int, int]]:
    """Returns by a type's number its name, the values of a block, and their bytes."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType  # takes a tenth of a second

    return {int(GGMLQuantizationType[kind]): (kind, *GGML_QUANT_SIZES[GGMLQuantizationType[kind]]) for kind in
            (*FLOATS, *QUANTISED)}  # fmt: skip


def _name_of(number: int) -> str:
    from gguf import GGMLQuantizationType

    return GGMLQuantizationType(number).name if number in set(GGMLQuantizationType) else f"number {number}"


def decode(rows: UInt8[np.ndarray, "rows bytes"], kind: str) -> Shaped[np.ndarray, "rows width"]:
    """Decodes whole rows: those of a plain type as they are, all others to float32."""
    if kind in FLOATS:
        return rows.view(FLOATS[kind])
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return dequantize(rows, GGMLQuantizationType[kind])


@dataclass(frozen=True, kw_only=True)
class Rows(Packed):
    """Rows of a stored tensor, in the Hub's order and form.

    Of rows whose pairs are `interleaved` each head has the first halves of all pairs, then the second ones, on the Hub;
    in the file the halves of a pair are neighbours. Source: `permute` in conversion/llama.py of
    github.com/ggml-org/llama.cpp.
    """

    stored: Stored
    sizes: tuple[int, ...]
    """The shape; a row is its last axis."""
    first: int = 0
    """The first of the stored rows."""
    interleaved: int = 0
    """The rows of a head, if their pairs are interleaved."""
    shift: float = 0.0
    """A number that is added, in float32."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.sizes

    @property
    def file(self) -> pathlib.Path:
        return self.stored.rows.file

    @property
    def nbytes(self) -> int:
        return math.prod(self.sizes[:-1]) * self.stored.rows.shape[1]

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Decodes the part at `index` (slices without steps) to `dtype`, and reads no more than a head beyond it."""
        *lead, columns = ranges(index, self.sizes)
        grid = np.arange(math.prod(self.sizes[:-1])).reshape(self.sizes[:-1])
        rows = grid[tuple(slice(axis.start, axis.stop) for axis in lead)].reshape(-1)
        order = None
        if self.interleaved and not lead:  # a bias: its values are ordered as a weight's rows are
            order = _interleaved(np.arange(columns.start, columns.stop), self.interleaved)
            columns = range(self.sizes[-1])
        elif self.interleaved:
            rows = _interleaved(rows, self.interleaved)
        out = np.empty((len(rows), len(columns)), dtype)
        for start in range(0, len(rows), BLOCK):
            values = self._decoded(rows[start : start + BLOCK] + self.first)[:, columns.start : columns.stop]
            with np.errstate(over="ignore"):
                out[start : start + BLOCK] = values
        shape = (*map(len, lead), len(columns))
        return out.reshape(shape) if order is None else out.reshape(shape)[order]

    def _decoded(self, rows: Int[np.ndarray, " rows"]) -> Shaped[np.ndarray, "rows width"]:
        low, high = int(rows.min()), int(rows.max()) + 1
        raw = np.empty((high - low, self.stored.rows.shape[1]), np.uint8)
        self.stored.rows.read_into(raw, low)
        if high - low != len(rows) or self.interleaved:
            raw = raw[rows - low]
        values = decode(raw, self.stored.kind)
        return values.astype(np.float32) + np.float32(self.shift) if self.shift else values


def _interleaved(rows: Int[np.ndarray, " rows"], head: int) -> Int[np.ndarray, " rows"]:
    """Returns where the Hub's rows are in a file whose pairs are interleaved."""
    within = rows % head
    return rows - within + 2 * (within % (head // 2)) + within // (head // 2)


@dataclass(frozen=True, kw_only=True)
class Alternating(Packed):
    """All experts' rows of one or more tensors in turn, as gpt-oss has gate and up: row 2n is the first tensor's.

    Weights [experts, rows, columns] have their last two axes swapped on the Hub; biases [experts, rows] do not.
    """

    parts: tuple[Rows, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, *columns = self.parts[0].shape
        return experts, *columns, rows * len(self.parts)

    @property
    def file(self) -> pathlib.Path:
        return self.parts[0].file

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Decodes the part at `index` (slices without steps) to `dtype`, as a swapped view."""
        experts, *columns, rows = ranges(index, self.shape)
        out = np.empty((len(experts), len(rows), *map(len, columns)), dtype)
        own, count = tuple(slice(axis.start, axis.stop) for axis in columns), len(self.parts)
        for n, part in enumerate(self.parts):
            skipped = (n - rows.start) % count  # rows before the first of this part
            first, taken = (rows.start + skipped) // count, len(range(skipped, len(rows), count))
            at = (slice(experts.start, experts.stop), slice(first, first + taken), *own)
            out[:, skipped::count] = part.part(at, dtype)
        return np.moveaxis(out, 1, -1)


@dataclass(frozen=True, kw_only=True)
class Heads(Packed):
    """The rows of two tensors, head by head: those of the first, whose last two axes are swapped, and of the second.

    So llama.cpp splits DeepSeek's map from latents to keys [heads, latent, keys] and values [heads, values, latent].
    """

    swapped: Rows
    plain: Rows

    @property
    def shape(self) -> tuple[int, ...]:
        heads, values, latent = self.plain.shape
        return heads * (self.swapped.shape[2] + values), latent

    @property
    def file(self) -> pathlib.Path:
        return self.plain.file

    @property
    def nbytes(self) -> int:
        return self.swapped.nbytes + self.plain.nbytes

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Decodes the part at `index` (slices without steps) to `dtype`, from whole heads."""
        rows, columns = ranges(index, self.shape)
        height = self.shape[0] // self.plain.shape[0]
        heads = slice(rows.start // height, -(-rows.stop // height))
        both = [self.swapped.part((heads,), dtype).swapaxes(1, 2), self.plain.part((heads,), dtype)]
        whole = np.concatenate(both, axis=1).reshape(-1, self.shape[1])
        return whole[rows.start - heads.start * height :][: len(rows), columns.start : columns.stop]


def plain(stored: Stored, name: str, shape: tuple[int, ...], dtype: np.dtype) -> Tensor | Rows:
    """Returns a stored tensor under its name on the Hub; as the file's own bytes if they are of this dtype."""
    if FLOATS.get(stored.kind) == dtype:
        return replace(stored.rows, name=name, shape=shape, dtype=dtype)
    return Rows(name=name, dtype=dtype, stored=stored, sizes=shape)


def values(stored: Stored) -> Float32[np.ndarray, "..."]:
    """Reads a whole tensor of the file, in its own order."""
    return Rows(name=stored.name, stored=stored, sizes=stored.shape).part((), np.dtype(np.float32))
