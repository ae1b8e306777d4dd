"""Dequantises weights as they are read, in the formats of bitsandbytes, compressed-tensors, ModelOpt, GPTQ and AWQ.

Each class follows its library's formula: scales and products in float32, rounded once to the dtype asked for. The first
value of a 32-bit word is in its lowest bits.
"""

import abc
import json
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int, Int32, Integer, UInt8

from convert.packed import BLOCK, E4M3, Keepable, Scaled, ranges, swapped
from convert.tensors import DTYPES, Tensor


FLOATS = DTYPES["F16"], DTYPES["BF16"], DTYPES["F32"]
INT32 = np.dtype(np.int32)
NVFP4_COLUMNS = 16  # neighbours of a row that share a scale in NVFP4
AWQ_NIBBLES = [0, 4, 1, 5, 2, 6, 3, 7]  # where an AWQ word holds the first, second, ... of its eight values


@dataclass(frozen=True, kw_only=True)
class _Matrix(Scaled):
    """A weight (out, in) that is dequantised in bands of whole rows."""

    @abc.abstractmethod
    def _rows(self, rows: range) -> Float32[np.ndarray, "rows in"]:
        """Dequantises these rows, without rounding to a dtype."""

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Dequantises the matrix at `index` (slices without steps) to `dtype`, and reads no other rows."""
        rows, columns = ranges(index, self.shape)
        out = np.empty((len(rows), len(columns)), dtype)
        for start in range(0, len(rows), BLOCK):
            band = rows[start : start + BLOCK]
            with np.errstate(over="ignore"):
                out[start : start + len(band)] = self._rows(band)[:, columns.start : columns.stop]
        return out


@dataclass(frozen=True, kw_only=True)
class Bnb4(_Matrix):
    """bitsandbytes' nf4 and fp4: codes into a table of 16 values, and a float32 scale for each block of codes.

    codes: bytes of two codes in C order, the first in the upper half. scales: float32, or uint8 to be looked up in
    `nested_table` and scaled by `nested_scales` ("double quantisation", QLoRA, arXiv:2305.14314, section 3). `state`:
    the bytes of a JSON object with shape, block sizes and the nested scales' offset. Source: dequantize_4bit and
    dequantize_blockwise in bitsandbytes/functional.py.
    """

    table: Tensor
    state: Tensor
    nested_scales: Tensor | None = None
    nested_table: Tensor | None = None

    @property
    def _said(self) -> dict[str, Any]:
        if not self.state.readable:
            raise ValueError(
                f"{self.name} in {self.file} is stored by bitsandbytes in 4 bits, which states shapes among the data "
                "and not in the header; load the repository, or download it and inspect the folder."
            )
        try:
            said = json.loads(self.state.view().tobytes())
            sizes = [*said["shape"], said["blocksize"], said.get("nested_blocksize", 1)]
            if len(sizes) == 4 and all(type(n) is int and n > 0 for n in sizes):
                return {"nested_blocksize": 1, "nested_offset": 0.0, **said}
        except (ValueError, KeyError, TypeError):
            pass
        raise ValueError(f"{self.state.name} in {self.state.file} does not say a shape and block sizes; it is damaged.")

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self._said["shape"])

    @property
    def fits(self) -> bool:
        if not self.state.readable:
            return True
        said, (rows, width), nested = self._said, self.shape, self.nested_scales is not None
        blocks = -(-rows * width // said["blocksize"])
        kinds = [self.scales.dtype == (np.uint8 if nested else np.float32), self.table.shape == (16,)]
        if self.nested_scales and self.nested_table:
            groups = -(-blocks // said["nested_blocksize"])
            kinds += [self.nested_scales.shape == (groups,), self.nested_table.shape == (256,)]
        return self.codes.nbytes == -(-rows * width // 2) and self.scales.shape == (blocks,) and all(kinds)

    def _rows(self, rows: range) -> Float32[np.ndarray, "rows in"]:
        said, width = self._said, self.shape[1]
        start, stop, size = rows.start * width, rows.stop * width, said["blocksize"]
        taken = self.codes.view().reshape(-1).view(np.uint8)[start // 2 : -(-stop // 2)]
        values = np.stack([taken >> 4, taken & 15], axis=1).reshape(-1)[start % 2 :][: stop - start]
        blocks = np.arange(start // size, -(-stop // size))
        scales = self.scales.view()[blocks]
        if self.nested_scales and self.nested_table:
            nested = self.nested_scales.view()[blocks // said["nested_blocksize"]]
            scales = self.nested_table.view()[scales] * nested + np.float32(said["nested_offset"])
        scales = scales.repeat(size)[start % size :][: stop - start]
        return (self.table.view()[values] * scales).reshape(len(rows), width)


@dataclass(frozen=True, kw_only=True)
class Bnb8(_Matrix):
    """bitsandbytes' int8: the scale of a row is its largest magnitude, in float32, and a value is code * scale / 127.

    Source: int8_vectorwise_dequant in bitsandbytes/functional.py.
    """

    layout: Tensor | None = None  # a number for the order of the codes; 0 is row by row

    @property
    def fits(self) -> bool:
        return len(self.shape) == 2 and self.scales.dtype == np.float32 and self.scales.shape == self.shape[:1]

    def _rows(self, rows: range) -> Float32[np.ndarray, "rows in"]:
        if self.layout and (number := self.layout.view().item()):
            raise ValueError(
                f"{self.layout.name} in {self.file} is {number}: an order of the values made for one kind of GPU, "
                "which is not read; save the model again with a newer bitsandbytes."
            )
        taken = slice(rows.start, rows.stop)
        values = self.codes.view()[taken].astype(np.float32) * self.scales.view()[taken, None]
        return values * np.float32(1 / 127)


@dataclass(frozen=True, kw_only=True)
class _Affine(_Matrix):
    """A weight (code - zero) * scale, with a scale, and perhaps a zero point, for each group of columns of a row.

    `group_size` is the number of columns in a group; None: one group has all columns. `groups`, if given, has the group
    of each column.
    """

    zeros: Tensor | None = None
    groups: Tensor | None = None
    group_size: int | None

    @abc.abstractmethod
    def _codes(self, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Returns these rows' codes [rows, in], scales [rows or 1, groups], and zero points like scales, or None."""

    def _rows(self, rows: range) -> Float32[np.ndarray, "rows in"]:
        codes, scales, zeros = self._codes(rows)
        count, columns = scales.shape[1], np.arange(self.shape[1])
        groups = self.groups.view() if self.groups else columns // (self.group_size or len(columns))
        if self.groups and (groups.min() < 0 or groups.max() >= count):
            raise ValueError(f"{self.groups.name} in {self.file} names groups that are not from 0 to {count - 1}.")
        spread = lambda factors: np.take(factors.astype(np.float32), groups, axis=1)
        codes = codes.astype(np.float32)
        return (codes if zeros is None else codes - spread(zeros)) * spread(scales)

    @property
    def _number(self) -> int:
        """Returns the number of groups."""
        return -(-self.shape[1] // (self.group_size or self.shape[1]))

    def _groups_fit(self) -> bool:
        floats = self.scales.dtype in FLOATS
        return floats and (not self.groups or (self.groups.shape, self.groups.dtype) == (self.shape[1:], INT32))


@dataclass(frozen=True, kw_only=True)
class Blocks(_Affine):
    """compressed-tensors' float8 and int8: one scale for the tensor, or one per row, per group of a row, or per block.

    codes float8_e4m3fn or int8 [out, in]; scales [], [1], [1, 1], [out], [out, 1], [out, groups] or, for blocks of
    `block_rows` x `group_size`, [row blocks, column blocks]; zeros like scales. Source: _process_quantization in
    compressed_tensors/quantization/lifecycle/forward.py.
    """

    block_rows: int | None = None

    def _table(self, tensor: Tensor) -> tuple[int, int]:
        """Returns the shape of the scales, padded with ones to two axes."""
        rows, columns, *_ = (*tensor.shape, 1, 1)
        return rows, columns

    @property
    def fits(self) -> bool:
        if len(self.shape) != 2 or not self._groups_fit() or len(self.scales.shape) > 2:
            return False
        rows, columns = self._table(self.scales)
        wanted = {-(-self.shape[0] // self.block_rows)} if self.block_rows else {1, self.shape[0]}
        same = self.zeros is None or self.zeros.shape == self.scales.shape
        return same and rows in wanted and columns == self._number

    def _codes(self, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        height, width = self._table(self.scales)
        taken = np.array(rows) // (self.block_rows or (1 if height > 1 else self.shape[0]))
        factors = lambda tensor: tensor and tensor.view().reshape(height, width)[taken]
        return self.codes.view()[rows.start : rows.stop], factors(self.scales), factors(self.zeros)


@dataclass(frozen=True, kw_only=True)
class PackedIntegers(_Affine, Keepable):
    """compressed-tensors' "pack-quantized": signed integers of `bits` bits, shifted to be unsigned, in 32-bit words.

    codes int32 [out, words]; scales [out, groups]; zeros int32 [words, groups], packed along out. Source:
    unpack_from_int32 in compressed_tensors/compressors/pack_quantized/helpers.py.
    """

    bits: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[0], self.codes.shape[1] * 32 // self.bits

    @property
    def fits(self) -> bool:
        if len(self.codes.shape) != 2 or self.codes.dtype != INT32 or not self._groups_fit():
            return False
        words = -(-self.shape[0] * self.bits // 32)
        zeros = self.zeros is None or (self.zeros.shape, self.zeros.dtype) == ((words, self._number), INT32)
        return zeros and self.scales.shape == (self.shape[0], self._number)

    @property
    def is_int4(self) -> bool:
        """Whether it has 4 bits, no zero points, and a scale for each 32, 64 or 128 neighbours, as Kimi's experts."""
        size = self.group_size
        grouped = size is not None and size in (32, 64, 128) and self.shape[1] % size == 0
        return self.bits == 4 and grouped and self.zeros is None and self.groups is None

    def as_stored(self, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows of 4 bits. A code is the integer plus 8. `int4_words` is the inverse."""
        (rows,) = index
        words = np.empty((rows.stop - rows.start, self.codes.shape[1]), INT32)
        self.codes.read_into(words, rows.start)
        return swapped(words.view(np.uint8)), self.scales.view()[rows]

    def _codes(self, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        taken = slice(rows.start, rows.stop)
        scales = self.scales.view()[taken]
        zeros = np.full(scales.shape, 1 << (self.bits - 1), np.uint8)
        if self.zeros:  # zero points are shifted like the codes
            zeros = unpacked_columns(self.zeros.view().T, self.bits, rows).T
        return unpacked(self.codes.view()[taken], self.bits), scales, zeros


@dataclass(frozen=True, kw_only=True)
class Nvfp4(_Matrix, Keepable):
    """NVFP4: float4_e2m1fn, a float8 scale for each 16 neighbours of a row, and a float32 scale for the whole weight.

    codes uint8 [out, in / 2], the first of two values in the low bits; scales float8_e4m3fn [out, in / 16]; `whole`
    float32 [] or [1]. A scale of 16 values is multiplied by `whole`, or divided by it if `divides`. Sources:
    NVFP4QTensor in modelopt/torch/quantization/qtensor/nvfp4_tensor.py, and, for `divides`, NVFP4PackedCompressor in
    compressed_tensors/compressors/nvfp4/base.py.
    """

    whole: Tensor
    divides: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[0], self.codes.shape[1] * 2

    @property
    def fits(self) -> bool:
        if len(self.codes.shape) != 2 or self.codes.dtype != np.uint8:
            return False
        blocks = self.shape[1] / NVFP4_COLUMNS
        whole = self.whole.shape in ((), (1,)) and self.whole.dtype == np.float32
        return whole and (self.scales.shape, self.scales.dtype) == ((self.shape[0], blocks), E4M3)

    def as_stored(self, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows. A scale is the product of a block's and the whole weight's, in float32."""
        (rows,) = index
        codes = np.empty((rows.stop - rows.start, self.codes.shape[1]), np.uint8)
        self.codes.read_into(codes, rows.start)
        return swapped(codes), self._scales(rows).view(np.uint32)

    def _rows(self, rows: range) -> Float32[np.ndarray, "rows in"]:
        taken = slice(rows.start, rows.stop)
        codes = unpacked(self.codes.view()[taken], 4).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
        return codes * self._scales(taken).repeat(NVFP4_COLUMNS, axis=1)

    def _scales(self, rows: slice) -> Float32[np.ndarray, "rows blocks"]:
        scales, whole = self.scales.view()[rows].astype(np.float32), self.whole.view().reshape(())
        return scales / whole if self.divides else scales * whole


@dataclass(frozen=True, kw_only=True)
class Gptq(_Affine):
    """GPTQ's (arXiv:2210.17323) integers, stored as (in, out); with `desc_act`, columns are grouped by importance.

    codes int32 [in words, out]; scales [groups, out]; zeros int32 [groups, out words]; groups int32 [in]. Files of
    `version` 1 store each zero point minus one. Source: QuantLinear in AutoGPTQ's
    auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py.
    """

    bits: int
    version: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[1], self.codes.shape[0] * 32 // self.bits

    @property
    def fits(self) -> bool:
        if not self.zeros or len(self.codes.shape) != 2 or not self._groups_fit():
            return False
        shapes = (self._number, self.shape[0]), (self._number, -(-self.shape[0] * self.bits // 32))
        kinds = self.codes.dtype == self.zeros.dtype == INT32
        return kinds and (self.scales.shape, self.zeros.shape) == shapes

    def _codes(self, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        assert self.zeros
        taken = slice(rows.start, rows.stop)
        zeros = unpacked_columns(self.zeros.view(), self.bits, rows).T
        zeros = (zeros + np.uint8(self.version == 1)) & np.uint8((1 << self.bits) - 1)
        return unpacked(self.codes.view()[:, taken].T, self.bits), self.scales.view()[:, taken].T, zeros


@dataclass(frozen=True, kw_only=True)
class Awq(Gptq):
    """AWQ's (arXiv:2306.00978) 4 bits in its layout "gemm": like GPTQ's, but packed along out.

    codes int32 [in, out words]; the eight values of a word are in the order of `AWQ_NIBBLES`. Source:
    awq/utils/packing_utils.py of AutoAWQ.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape[1] * 32 // self.bits, self.codes.shape[0]

    def _codes(self, rows: range) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        assert self.zeros
        get = lambda tensor: unpacked_columns(tensor.view(), self.bits, rows, AWQ_NIBBLES).T
        return get(self.codes), self.scales.view()[:, rows.start : rows.stop].T, get(self.zeros)


def int4_words(codes: UInt8[np.ndarray, "rows bytes"]) -> Int32[np.ndarray, "rows words"]:
    """Packs codes of 4 bits, two to a byte with the first in its upper half, into `PackedIntegers`' words."""
    return np.ascontiguousarray(swapped(codes)).view(INT32)


def unpacked(words: Integer[np.ndarray, "rows words"], bits: int) -> UInt8[np.ndarray, "rows columns"]:
    """Unpacks unsigned integers of 2, 4 or 8 bits from words of any size; the first is in the lowest bits."""
    taken = np.ascontiguousarray(words).view(np.uint8)[..., None]  # the lowest byte is the first
    shifts, mask = np.arange(0, 8, bits, dtype=np.uint8), np.uint8((1 << bits) - 1)
    return ((taken >> shifts) & mask).reshape(len(words), -1)


def unpacked_columns(
    words: Int[np.ndarray, "rows words"], bits: int, columns: range, order: list[int] | None = None
) -> UInt8[np.ndarray, "rows columns"]:
    """Unpacks only these columns; `order` lists where a word holds its first, second, ... column (None: in order)."""
    per = 32 // bits
    first = columns.start // per
    values = unpacked(words[:, first : -(-columns.stop // per)], bits)
    if order:
        values = values.reshape(len(words), -1, per)[..., order].reshape(len(words), -1)
    return values[:, columns.start - first * per :][:, : len(columns)]
