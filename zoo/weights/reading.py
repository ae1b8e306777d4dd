"""Read an array of a model from a checkpoint's tensors: any part of it, in any dtype, by several threads."""

import collections
import concurrent.futures
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.dequantize import Nvfp4, PackedIntegers
from convert.packed import E8M0, Fp8Blocks, Keepable, Mxfp4, Packed, Scaled, scale_values
from convert.tensors import Tensor
from zoo.quantized import BLOCKS, STORED, Format, Holding, Kept, quantize_weight


Index = tuple[slice, ...]
Part = Callable[[Any], Any]  # reads the part of an array at an `Index`

PIECE = 2**25  # bytes that a thread reads at a time
QUANTIZED_PIECE = 2**18  # the same for a thread that quantizes: this fits into a core's cache
# By format: the bits of two codes that count, and what these are in two zeros. In e2m1 a zero may have a sign.
ZEROS = {"int4": (0xFF, 0x88), "mxfp4": (0x77, 0), "nvfp4": (0x77, 0), "fp8_blocks": (0x7F, 0)}


@dataclasses.dataclass(frozen=True)
class Fused:
    """The tensors of all experts read as one, [experts, rows, columns]. An expert's tensors are joined along rows."""

    name: str
    experts: tuple[tuple[Tensor | Packed, ...], ...]

    @property
    def shape(self) -> tuple[int, ...]:
        first = self.experts[0]
        return len(self.experts), sum(tensor.shape[0] for tensor in first), *first[0].shape[1:]

    @property
    def dtype(self) -> np.dtype:
        return self.experts[0][0].dtype

    @property
    def file(self) -> pathlib.Path:
        return self.experts[0][0].file

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for expert in self.experts for tensor in expert)

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Reads the part at `index` (slices without steps) in `dtype`, and nothing else."""
        experts, rows, columns = (*index, *[slice(None)] * (3 - len(index)))
        parts = [
            np.concatenate([tensor.part((own, columns), dtype) for tensor, own in self._rows(expert, rows)])
            for expert in self.experts[experts]
        ]
        return np.stack(parts) if parts else np.empty((0, len(range(self.shape[1])[rows]), self.shape[2]), dtype)

    def as_stored(self, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Reads as `Keepable` does."""
        experts, rows = index
        both = []
        for expert in self.experts[experts]:
            parts = [
                tensor.as_stored((own,)) for tensor, own in self._rows(expert, rows) if isinstance(tensor, Keepable)
            ]
            both.append([np.concatenate(arrays) for arrays in zip(*parts, strict=True)])
        codes, scales = map(np.stack, zip(*both, strict=True))
        return codes, scales

    def _rows(self, expert: tuple[Tensor | Packed, ...], rows: slice) -> Iterator[tuple[Tensor | Packed, slice]]:
        """Yields an expert's tensors, each with those of its rows that are among the joined `rows`."""
        (first, last, _), start = rows.indices(self.shape[1]), 0
        for tensor in expert:
            size = tensor.shape[0]
            yield tensor, slice(min(max(first - start, 0), size), min(max(last - start, 0), size))
            start += size


Stored = Tensor | Packed | Fused  # a tensor of a checkpoint, whose values are read later


def kept_as(tensor: Stored, dtype: np.dtype) -> Holding | None:
    """Return how a model of `dtype` holds a tensor that stays as it is stored; None: it has to be dequantised."""
    match tensor:
        case Fused():
            each = {kept_as(part, dtype) for expert in tensor.experts for part in expert}
            return each.pop() if len(each) == 1 else None
        case Fp8Blocks():
            return Holding("fp8_blocks", np.dtype(f"uint{8 * tensor.scales.dtype.itemsize}"), BLOCKS["fp8_blocks"])
        case Mxfp4():
            return Holding("mxfp4", np.dtype(np.uint8), BLOCKS["mxfp4"])
        case Nvfp4():
            return Holding("nvfp4", np.dtype(np.uint32), BLOCKS["nvfp4"])
        case PackedIntegers() if tensor.is_int4 and tensor.group_size:
            return Holding("int4", dtype, tensor.group_size)
    return None


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a model, and the names of the tensors that it is made of."""

    path: str
    array: Any  # or a jax.ShapeDtypeStruct
    names: NDArray[Any]  # of tensors, along the array's leading axes: none, layers, experts, or both
    transposed: bool  # whether the tensors' last two axes are swapped
    either: bool = False  # whether some checkpoints do not swap them

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Return the shape of each tensor."""
        shape = self.array.shape[self.names.ndim :]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


class Scan:
    """Refuses values, as they are read, that no trained weight has: NaN, infinities, and matrices of zeros alone.

    A matrix is a `weight` with two axes or more: embeddings, linear maps, routers and experts. All else may be zeros,
    such as biases, and norms stored as their distance from one (Gemma's). A matrix is refused only if this process has
    read all of it, in however many parts: one of several processes may hold nothing but the padding of a vocabulary.
    Values are checked in the dtype that was asked for, so that values too large for that dtype are refused, too.
    """

    def __init__(self):
        self.zeros: list[tuple[str, int]] = []  # of each piece of zeros alone: its matrix's name, and its size

    def look(self, tensor: Stored, values: np.ndarray, parameter: Parameter | None = None) -> None:
        """Check a piece of a tensor, which becomes part of `parameter`. Several threads may call this at once.

        Raises:
            ValueError: a value is NaN or infinite; the message names the tensor.
        """
        if not values.size:
            return
        bits = 8 * values.itemsize
        # Compare bits as integers. The largest signed integer has the bits of the largest positive number; the largest
        # unsigned one, which begins with the sign, those of the most negative. On bfloat16 this takes a third of the
        # time of isfinite.
        positive, negative = int(values.view(f"i{bits // 8}").max()), int(values.view(f"u{bits // 8}").max())
        sign, infinity = 1 << (bits - 1), int(np.array(np.inf, values.dtype).view(f"u{bits // 8}"))
        if positive >= infinity or negative >= sign + infinity:
            as_kind = "" if values.dtype == tensor.dtype else f" in {values.dtype}"
            raise self.refusal(tensor, f"holds NaN or infinities{as_kind}")
        matrix = parameter and parameter.path.endswith("weight") and len(tensor.shape) > 1
        if matrix and positive <= 0 and negative <= sign:
            self.zeros.append((tensor.name, values.size))

    def look_stored(self, tensor: Stored, codes: np.ndarray, scales: np.ndarray, format: Kept) -> None:
        """Check codes and scales of rows that stay as they are stored as `look` checks values."""
        mask, zeros = ZEROS[format]
        if format == "fp8_blocks":
            self.look(tensor, codes)
        values = scale_values(scales) if scales.dtype.kind == "u" else scales
        if values.dtype != E8M0:
            self.look(tensor.scales if isinstance(tensor, Scaled) else tensor, values)
        elif np.isnan(values).any():
            raise self.refusal(tensor, "has scales that are NaN")
        if not scales.any() or (codes.view(np.uint8) & mask == zeros).all():
            self.zeros.append((tensor.name, codes.size if format == "fp8_blocks" else 2 * codes.size))

    def end(self, tensors: Iterable[Stored]) -> None:
        """Raise a ValueError that names the matrix, if all of a matrix was read and is zeros."""
        zeros = collections.Counter()
        for name, count in self.zeros:
            zeros[name] += count
        self.zeros.clear()
        for tensor in tensors:
            if zeros[tensor.name] == math.prod(tensor.shape):
                raise self.refusal(tensor, "holds nothing but zeros")

    @staticmethod
    def refusal(tensor: Stored, what: str) -> ValueError:
        return ValueError(
            f"{tensor.name} in {tensor.file} {what}: the file is damaged, or its training had failed. "
            "Take another, or load it as it is with check_values=False."
        )


def once(part: Part) -> Part:
    """Make `part` read each index once, however many devices hold it."""
    held = functools.cache(lambda *bounds: part(tuple(slice(*b) for b in bounds)))
    return lambda index: held(*((s.start, s.stop) for s in index))


@dataclasses.dataclass(frozen=True)
class Reader:
    """Reads arrays of a model from the tensors of a checkpoint, by several threads."""

    tensors: Mapping[str, Stored]
    pool: concurrent.futures.Executor
    scan: Scan | None
    """Checks the values; None: they are not checked."""
    mmap: bool
    """Whether an array may be the memory-mapped file, in place of a copy."""

    def read(self, parameter: Parameter, index: Index, dtype: np.dtype) -> np.ndarray:
        """Read `array[index]` of a parameter, with at most one copy; without `mmap`, with at least one."""
        names, inner, shape = locate(parameter, index)
        if (mapped := self._mapped(parameter, index, dtype)) is not None:
            look = lambda tensor, at, piece: self._look(tensor, mapped[piece], parameter)
            if self.scan:
                self._for_each_piece(look, names, shape, PIECE // dtype.itemsize)
            return mapped
        out = aligned_empty((*names.shape, *shape), dtype)
        if not shape:  # a number, which has no rows
            for at in np.ndindex(names.shape):
                out[at] = self.tensors[str(names[at])].part((), dtype)
            return out

        def fetch(tensor: Stored, at: tuple[int, ...], piece: slice) -> None:
            plain = whole_rows(tensor, inner) and not parameter.transposed
            if plain and isinstance(tensor, Tensor) and tensor.dtype == dtype:
                tensor.read_into(out[at][piece], inner[0].start + piece.start)
            else:
                out[at][piece] = rows(tensor, inner, piece, dtype, parameter.transposed)
            self._look(tensor, out[at][piece], parameter)

        self._for_each_piece(fetch, names, shape, PIECE // dtype.itemsize)
        return out

    def read_stored(self, parameter: Parameter, index: Index, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
        """Read the rows `index` of a parameter as they are stored: codes, and scales for a model of `dtype`."""
        names, inner, shape = locate(parameter, (*index, slice(None)))
        first = self.tensors[str(parameter.names.flat[0])]
        how = kept_as(first, dtype)
        assert how is not None
        stored, blocks = how.sizes(shape[-1])
        codes = aligned_empty((*names.shape, *shape[:-1], stored), STORED[how.format])
        scales = aligned_empty((*names.shape, *shape[:-1], blocks), how.scale)

        def fetch(tensor: Stored, at: tuple[int, ...], piece: slice) -> None:
            these = slice(inner[0].start + piece.start, inner[0].start + piece.stop)
            assert isinstance(tensor, Keepable | Fused)
            codes[at][piece], scales[at][piece] = tensor.as_stored((these, *inner[1:-1]))
            if self.scan:
                self.scan.look_stored(tensor, codes[at][piece], scales[at][piece], how.format)

        self._for_each_piece(fetch, names, shape, PIECE // dtype.itemsize)
        return codes, scales

    def read_quantized(
        self, parameter: Parameter, index: Index, dtype: np.dtype, format: Format
    ) -> tuple[np.ndarray, np.ndarray]:
        """Read the rows `index` of a parameter in `dtype`, and quantize them piece by piece: values and scales.

        Rows are read whole, since a row's scale depends on all of it.
        """
        names, inner, shape = locate(parameter, (*index, slice(None)))
        values, scales = quantize_weight(np.zeros((1, shape[-1]), dtype), format, np)
        values = aligned_empty((*names.shape, *shape[:-1], *values.shape[1:]), STORED[format])
        scales = aligned_empty((*names.shape, *shape[:-1], *scales.shape[1:]), dtype)

        def fetch(tensor: Stored, at: tuple[int, ...], piece: slice) -> None:
            weight = rows(tensor, inner, piece, dtype, parameter.transposed)
            self._look(tensor, weight, parameter)
            values[at][piece], scales[at][piece] = quantize_weight(weight, format, np)

        self._for_each_piece(fetch, names, shape, QUANTIZED_PIECE // dtype.itemsize)
        return values, scales

    def _mapped(self, parameter: Parameter, index: Index, dtype: np.dtype) -> np.ndarray | None:
        """Map `array[index]` of a parameter that is stored as one tensor as it is; None if it has to be copied."""
        names, inner, shape = locate(parameter, index)
        if not self.mmap or names.ndim or not shape or parameter.transposed:
            return None
        tensor = self.tensors[names.item()]
        if not isinstance(tensor, Tensor) or dtype != tensor.dtype:
            return None
        if shape == tensor.shape and tensor.offset % 64:
            return None  # jax takes an aligned mapping over as the array, and would copy any other
        return tensor.view(own=True)[inner]

    def _look(self, tensor: Stored, values: np.ndarray, parameter: Parameter) -> None:
        if self.scan:
            self.scan.look(tensor, values, parameter)

    def _for_each_piece(
        self,
        fetch: Callable[[Stored, tuple[int, ...], slice], None],
        names: NDArray[Any],
        shape: tuple[int, ...],
        size: int,
    ) -> None:
        """Call `fetch(tensor, its index in names, a slice of its rows)` for all rows of all tensors, in several
        threads.

        A slice has at most `size` numbers, or one row if that has more.
        """
        step = max(1, size // max(1, math.prod(shape[1:])))
        pieces = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
        each = [(self.tensors[str(names[at])], at, piece) for at in np.ndindex(names.shape) for piece in pieces]
        for done in [self.pool.submit(fetch, *one) for one in each]:
            done.result()


def locate(parameter: Parameter, index: Index) -> tuple[NDArray[Any], Index, tuple[int, ...]]:
    """Find `array[index]` of a parameter: the names of its tensors, the index into each, and that index's shape."""
    lead = parameter.names.ndim
    names, sizes = parameter.names[(*index[:lead], ...)], parameter.array.shape[lead:]
    inner = tuple(slice(*s.indices(n)) for s, n in zip(index[lead:], sizes, strict=True))
    return names, inner, tuple(s.stop - s.start for s in inner)


def rows(tensor: Stored, index: Index, piece: slice, dtype: np.dtype, transposed: bool) -> np.ndarray:
    """Read `tensor[index][piece]` in the model's orientation and `dtype`."""
    first = slice(index[0].start + piece.start, index[0].start + piece.stop)
    index = (first, *index[1:])
    if transposed:
        index = (*index[:-2], index[-1], index[-2])
    elif isinstance(tensor, Tensor) and whole_rows(tensor, index):  # mapped pages would count as memory
        out = np.empty((first.stop - first.start, *tensor.shape[1:]), tensor.dtype)
        tensor.read_into(out, first.start)
        with np.errstate(over="ignore"):  # `Scan` reports overflows, and names the tensor
            return out.astype(dtype, copy=False)
    mapped = isinstance(tensor, Tensor)
    part = tensor.view(own=True)[index].astype(dtype, copy=False) if mapped else tensor.part(index, dtype)
    return part.swapaxes(-1, -2) if transposed else part


def whole_rows(tensor: Stored, index: Index) -> bool:
    return tuple(s.stop - s.start for s in index[1:]) == tensor.shape[1:]


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Make an array like `np.empty`, aligned to 64 bytes: `jax.device_put` takes it over on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
