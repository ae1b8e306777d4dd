"""How an array of a model is read from a checkpoint's tensors: any part of it, in any dtype, by several threads."""

import collections
import concurrent.futures
import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from convert.packed import Packed
from convert.tensors import Tensor
from zoo.quantized import STORED, Format, quantize_weight


Source = Tensor | Packed
Index = tuple[slice, ...]
Part = Callable[[Any], Any]  # reads what an `Index` takes of an array

PIECE = 2**25  # bytes that a thread reads at a time
QUANTIZED_PIECE = 2**18  # and where it quantises them: what fits into a core's cache


@dataclasses.dataclass(frozen=True)
class Parameter:
    """One array of a model, and the tensors that it is made of."""

    path: str
    array: Any  # or its jax.ShapeDtypeStruct
    names: NDArray[Any]  # of the tensors; its axes are the array's first: none, layers, experts, or both
    transposed: bool  # the tensors' last two axes

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of each tensor."""
        shape = self.array.shape[self.names.ndim :]
        return (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape


class Scan:
    """Refuses what no trained weight is, as it is read: NaN, infinities, and matrices of nothing but zeros.

    Biases, and scales that are stored as their distance from one (Gemma's norms), may well be zeros, so of these only a
    NaN or an infinity is refused: a matrix is a `weight` of two axes or more, and embeddings, linear maps, routers and
    experts have one. It is refused when all of it was read here, by however many parts: one of several processes may
    well hold nothing but the padding of a vocabulary. Values are looked at in the dtype that is asked for, so that one
    too large for it is found as well.
    """

    def __init__(self):
        self.zeros: list[tuple[str, int]] = []  # name of a matrix, and how many zeros a piece of it has, all it has

    def look(self, tensor: Source, values: np.ndarray, parameter: Parameter | None = None) -> None:
        """Looks at a piece of a tensor, that is to become one of the `parameter`. Any thread may call it.

        Raises:
            ValueError: naming the tensor, if one of the values is NaN or infinite.
        """
        if not values.size:
            return
        bits = 8 * values.itemsize
        # Of the bits, read as integers: the largest is that of the largest positive number, or of the largest negative
        # one, which begins with the sign. It takes a third of the time of isfinite on bfloat16.
        positive, negative = int(values.view(f"i{bits // 8}").max()), int(values.view(f"u{bits // 8}").max())
        sign, infinity = 1 << (bits - 1), int(np.array(np.inf, values.dtype).view(f"u{bits // 8}"))
        if positive >= infinity or negative >= sign + infinity:
            as_kind = "" if values.dtype == tensor.dtype else f" in {values.dtype}"
            raise self.refusal(tensor, f"holds NaN or infinities{as_kind}")
        matrix = parameter and parameter.path.endswith("weight") and len(tensor.shape) > 1
        if matrix and positive <= 0 and negative <= sign:
            self.zeros.append((tensor.name, values.size))

    def end(self, tensors: Iterable[Source]) -> None:
        """Raises ValueError, naming it, if all of a matrix was read and is zeros."""
        zeros = collections.Counter()
        for name, count in self.zeros:
            zeros[name] += count
        self.zeros.clear()
        for tensor in tensors:
            if zeros[tensor.name] == math.prod(tensor.shape):
                raise self.refusal(tensor, "holds nothing but zeros")

    @staticmethod
    def refusal(tensor: Source, what: str) -> ValueError:
        return ValueError(
            f"{tensor.name} in {tensor.file} {what}: the file is damaged, or its training had failed. "
            "Take another, or load it as it is with check_values=False."
        )


def once(part: Part) -> Part:
    """`part`, which reads each index only once, however many of the devices hold it."""
    held = functools.cache(lambda *bounds: part(tuple(slice(*b) for b in bounds)))
    return lambda index: held(*((s.start, s.stop) for s in index))


def read(
    parameter: Parameter,
    tensors: Mapping[str, Source],
    index: Index,
    dtype: np.dtype,
    pool: concurrent.futures.Executor,
    scan: Scan | None = None,
    mmap: bool = True,
) -> np.ndarray:
    """`array[index]` of a parameter, with at most one copy made; without `mmap`, with one at least."""
    names, inner, shape = locate(parameter, index)
    if mmap and names.ndim == 0 and not parameter.transposed:
        tensor = tensors[names.item()]
        whole = shape == tensor.shape
        if isinstance(tensor, Tensor) and dtype == tensor.dtype and not (whole and tensor.offset % 64):
            # An aligned mapping becomes the array; any other would be copied from it.
            mapped = tensor.view(own=True)[inner]
            if scan:
                look = lambda tensor, at, piece: scan.look(tensor, mapped[piece], parameter)
                for_each_piece(look, tensors, names, shape, PIECE // dtype.itemsize, pool)
            return mapped
    out = aligned_empty((*names.shape, *shape), dtype)

    def fetch(tensor: Source, at: tuple[int, ...], piece: slice) -> None:
        plain = whole_rows(tensor, inner) and not parameter.transposed
        if plain and isinstance(tensor, Tensor) and tensor.dtype == dtype:
            tensor.read_into(out[at][piece], inner[0].start + piece.start)
        else:
            out[at][piece] = rows(tensor, inner, piece, dtype, parameter.transposed)
        if scan:
            scan.look(tensor, out[at][piece], parameter)

    for_each_piece(fetch, tensors, names, shape, PIECE // dtype.itemsize, pool)
    return out


def read_quantized(
    parameter: Parameter,
    tensors: Mapping[str, Source],
    index: Index,
    dtype: np.dtype,
    format: Format,
    pool: concurrent.futures.Executor,
    scan: Scan | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """`zoo.quantized.quantize_weight` of the rows `index` of a parameter in `dtype`, worked out piece by piece.

    The rows are read whole, since a row's scale depends on all of it.
    """
    names, inner, shape = locate(parameter, (*index, slice(None)))
    values, scales = quantize_weight(np.zeros((1, shape[-1]), dtype), format, np)
    values = aligned_empty((*names.shape, *shape[:-1], *values.shape[1:]), STORED[format])
    scales = aligned_empty((*names.shape, *shape[:-1], *scales.shape[1:]), dtype)

    def fetch(tensor: Source, at: tuple[int, ...], piece: slice) -> None:
        weight = rows(tensor, inner, piece, dtype, parameter.transposed)
        if scan:
            scan.look(tensor, weight, parameter)
        values[at][piece], scales[at][piece] = quantize_weight(weight, format, np)

    for_each_piece(fetch, tensors, names, shape, QUANTIZED_PIECE // dtype.itemsize, pool)
    return values, scales


def locate(parameter: Parameter, index: Index) -> tuple[NDArray[Any], Index, tuple[int, ...]]:
    """Where `array[index]` of a parameter lies: the names of the tensors, what it takes of each, and its shape."""
    lead = parameter.names.ndim
    names, sizes = parameter.names[(*index[:lead], ...)], parameter.array.shape[lead:]
    inner = tuple(slice(*s.indices(n)) for s, n in zip(index[lead:], sizes, strict=True))
    return names, inner, tuple(s.stop - s.start for s in inner)


def rows(tensor: Source, index: Index, piece: slice, dtype: np.dtype, transposed: bool) -> np.ndarray:
    """`tensor[index][piece]` in the model's orientation."""
    first = slice(index[0].start + piece.start, index[0].start + piece.stop)
    index = (first, *index[1:])
    if transposed:
        index = (*index[:-2], index[-1], index[-2])
    elif isinstance(tensor, Tensor) and whole_rows(tensor, index):  # not mapped: its pages would count as memory
        out = np.empty((first.stop - first.start, *tensor.shape[1:]), tensor.dtype)
        tensor.read_into(out, first.start)
        with np.errstate(over="ignore"):  # `Scan` names the tensor
            return out.astype(dtype, copy=False)
    mapped = isinstance(tensor, Tensor)
    part = tensor.view(own=True)[index].astype(dtype, copy=False) if mapped else tensor.part(index, dtype)
    return part.swapaxes(-1, -2) if transposed else part


def whole_rows(tensor: Source, index: Index) -> bool:
    return tuple(s.stop - s.start for s in index[1:]) == tensor.shape[1:]


def for_each_piece(
    fetch: Callable[[Source, tuple[int, ...], slice], None],
    tensors: Mapping[str, Source],
    names: NDArray[Any],
    shape: tuple[int, ...],
    size: int,
    pool: concurrent.futures.Executor,
) -> None:
    """`fetch(tensor, its place among the names, some of its rows)` for all rows of all tensors, by several threads.

    `size`: how many numbers at a time, or one row if that has more.
    """
    step = max(1, size // max(1, math.prod(shape[1:])))
    pieces = [slice(start, min(start + step, shape[0])) for start in range(0, shape[0], step)]
    work = [
        pool.submit(fetch, tensors[str(names[at])], at, piece) for at in np.ndindex(names.shape) for piece in pieces
    ]
    for done in work:
        done.result()


def aligned_empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """`np.empty` at a multiple of 64 bytes, from where `jax.device_put` takes it over on a CPU without a copy."""
    size = math.prod(shape) * dtype.itemsize
    buffer = np.empty(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    return buffer[start : start + size].view(dtype).reshape(shape)
