"""Dequantises weights in float8 blocks and MXFP4 as they are read, and only the parts that are read.

Weights are stored as bytes, with a scale for each block. Each byte is looked up in a table for its scale. The table
holds the products of all byte values with the scale, computed in float64 and rounded once to the dtype asked for. This
is exact, and faster than casting and multiplying each value.
"""

import abc
import functools
import math
import pathlib
from dataclasses import dataclass, replace

import ml_dtypes
import numpy as np
from jaxtyping import Float, Float8e4m3fn, Float32, Float64, Shaped, UInt, UInt8

from convert.tensors import DTYPES, Tensor


BF16, E4M3, E8M0 = DTYPES["BF16"], DTYPES["F8_E4M3"], DTYPES["F8_E8M0"]
SCALES = {1: E8M0, 2: BF16, 4: DTYPES["F32"]}  # the dtypes of scales, by the bytes of one
BYTES = np.arange(256, dtype=np.uint8)
BLOCK = 128  # rows and columns that share a scale in float8, and rows that are dequantised at a time
E2M1 = np.arange(8, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)  # the numbers, without a sign
PAIRS = 16  # bytes, of two values each, that share a scale in MXFP4


@dataclass(frozen=True, kw_only=True)
class Packed(abc.ABC):
    """A tensor whose values are computed as they are read, from other numbers in a file. Any thread may read it."""

    name: str
    dtype: np.dtype = BF16  # the dtype it is dequantised to, unless another is asked for

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Returns the shape of the values."""

    @property
    @abc.abstractmethod
    def file(self) -> pathlib.Path:
        """Returns the file that holds it, for messages."""

    @property
    @abc.abstractmethod
    def nbytes(self) -> int:
        """Returns the bytes that store it."""

    @abc.abstractmethod
    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Dequantises the part at `index` (slices without steps) to `dtype`."""


@dataclass(frozen=True, kw_only=True)
class Scaled(Packed):
    """A quantised tensor, stored as several tensors: codes, scales and the like."""

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def file(self) -> pathlib.Path:
        return self.codes.file

    @property
    def tensors(self) -> list[Tensor]:
        """Returns the tensors that store this one."""
        return [tensor for tensor in vars(self).values() if isinstance(tensor, Tensor)]

    @property
    def nbytes(self) -> int:
        """Returns the bytes of all the tensors that store this one."""
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    @abc.abstractmethod
    def fits(self) -> bool:
        """Whether the shapes and dtypes of its tensors fit together."""


@dataclass(frozen=True, kw_only=True)
class Keepable(Scaled):
    """A quantised tensor whose codes a model may keep."""

    @abc.abstractmethod
    def as_stored(self, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Reads the codes and the scales of the rows at `index`, which has a slice for all axes but the last.

        Of two codes in a byte the first is in the upper half. Each row has scales of its own, for blocks that divide
        it. Scales that a model must not round are returned as their bits, unsigned integers: see `scale_values`.
        """


@dataclass(frozen=True, kw_only=True)
class Fp8Blocks(Keepable):
    """A matrix in float8 with a scale for each block of 128 x 128; the last rows and columns of blocks may be smaller.

    codes float8_e4m3fn [out, in]; scales [ceil(out / 128), ceil(in / 128)], which multiply the codes, although files
    call them weight_scale_inv. Source: README_WEIGHTS.md of github.com/deepseek-ai/DeepSeek-V3.
    """

    @property
    def fits(self) -> bool:
        blocks = tuple(-(-size // BLOCK) for size in self.shape)
        return len(self.shape) == 2 and self.scales.shape == blocks and self.scales.dtype in (np.float32, BF16, E8M0)

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Dequantises the matrix at `index` (slices without steps) to `dtype`, and reads nothing else."""
        rows, columns = ranges(index, self.shape)
        values = BYTES.view(E4M3).astype(np.float64)[:, None]
        blocks = slice(columns.start // BLOCK, -(-columns.stop // BLOCK))
        offsets = (np.arange(columns.start, columns.stop) // BLOCK - blocks.start) * len(BYTES)
        out = np.empty((len(rows), len(columns)), dtype)
        for i in range(rows.start // BLOCK, -(-rows.stop // BLOCK)):
            band = range(max(i * BLOCK, rows.start), min((i + 1) * BLOCK, rows.stop))
            table = _table(values, self.scales.view()[i, blocks].astype(np.float64), out.dtype)
            at = _bytes(self.codes, self.shape[1], band, columns) + offsets[None]
            into = out[band.start - rows.start : band.stop - rows.start].view(table.dtype)
            table.take(at, out=into, mode="clip")  # the default mode would fill a buffer first
        return out

    def as_stored(self, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows. A block has as many columns as divide both 128 and the row. `block_scales` is the inverse."""
        rows, columns = ranges(index, self.shape)
        codes = np.empty((len(rows), len(columns)), E4M3)
        self.codes.read_into(codes, rows.start)
        scales = self.scales.view()[np.array(rows) // BLOCK]
        scales = scales.repeat(BLOCK // (width := math.gcd(BLOCK, len(columns))), axis=1)[:, : len(columns) // width]
        return codes, scales.view(f"uint{8 * scales.dtype.itemsize}")


@dataclass(frozen=True, kw_only=True)
class Mxfp4(Keepable):
    """The experts' weights of gpt-oss in float4_e2m1fn, with a power of two as the scale of each 32 values.

    codes uint8 [experts, out, in / 32, 16], the first of two values in the low bits; scales uint8 [experts, out,
    in / 32], exponents plus 127. The dequantised shape is [experts, in, out], as in the bfloat16 releases. Source:
    gpt_oss/torch/weights.py of github.com/openai/gpt-oss.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        experts, rows, groups, _ = self.codes.shape
        return experts, groups * 2 * PAIRS, rows

    @property
    def fits(self) -> bool:
        shapes_fit = len(self.codes.shape) == 4 and self.codes.shape == (*self.scales.shape, PAIRS)
        return shapes_fit and self.codes.dtype == self.scales.dtype == np.uint8

    def part(self, index: tuple[slice, ...], dtype: np.dtype) -> np.ndarray:
        """Dequantises only the part at `index` (slices without steps), to `dtype`, as a transposed view."""
        experts, columns, rows = ranges(index, self.shape)
        _, height, width, _ = self.codes.shape
        groups = range(columns.start // (2 * PAIRS), -(-columns.stop // (2 * PAIRS)))
        pairs = range(groups.start * PAIRS, groups.stop * PAIRS)
        out = np.empty((len(experts), len(rows), 2 * len(pairs)), dtype)
        table = _mxfp4_table(out.dtype)
        for expert, values in zip(experts, out, strict=True):
            its_rows = range(expert * height + rows.start, expert * height + rows.stop)
            for start in range(0, len(rows), BLOCK):
                band = its_rows[start : start + BLOCK]
                offsets = _bytes(self.scales, width, band, groups).astype(np.uint16) * len(BYTES)
                at = _bytes(self.codes, width * PAIRS, band, pairs) + offsets.repeat(PAIRS, axis=1)
                table.take(at, out=values[start : start + BLOCK].view(table.dtype), mode="clip")
        return out[:, :, columns.start - 2 * pairs.start :][:, :, : len(columns)].swapaxes(1, 2)

    def as_stored(self, index: tuple[slice, ...]) -> tuple[np.ndarray, np.ndarray]:
        """Reads rows of some experts, which are (out, in)."""
        experts, rows = index
        codes = self.codes.view()[experts, rows]
        return swapped(codes.reshape(*codes.shape[:2], -1)), self.scales.view()[experts, rows]


def quantize_blocks(
    weight: Float[np.ndarray, "out in"],
) -> tuple[Float8e4m3fn[np.ndarray, "out in"], Float32[np.ndarray, "row_blocks column_blocks"]]:
    """Quantises to the codes and scales of `Fp8Blocks`: each block's largest magnitude becomes 448.

    Values are rounded to the nearest, ties to even. No scale is subnormal, and a block of zeros has the scale 1.

    Raises:
        ValueError: the weight holds infinities or NaN.
    """
    codes = np.empty(weight.shape, E4M3)
    scales = np.empty([-(-size // BLOCK) for size in weight.shape], np.float32)
    for i in range(len(scales)):  # a band of rows at a time
        band = weight[i * BLOCK : (i + 1) * BLOCK].astype(np.float32)
        largest = np.maximum.reduceat(np.abs(band).max(axis=0), np.arange(0, band.shape[1], BLOCK))
        if not np.isfinite(largest).all():
            raise ValueError("The weight holds infinities or NaN, which float8 blocks cannot hold.")
        scales[i] = np.where(largest, np.maximum(largest / np.float32(448), np.finfo(np.float32).tiny), 1)
        codes[i * BLOCK : (i + 1) * BLOCK] = band / scales[i].repeat(BLOCK)[None, : band.shape[1]]
    return codes, scales


def quantize_mxfp4(
    weight: Float[np.ndarray, "*rows in"],
) -> tuple[UInt8[np.ndarray, "*rows groups 16"], UInt8[np.ndarray, "*rows groups"]]:
    """Quantises rows to the codes and scales of `Mxfp4`: to the nearest number, ties to even.

    The scale of a block is the smallest power of two by which no magnitude exceeds 6, as in OpenAI's triton_kernels. If
    all numbers of a block are in MXFP4 exactly, the scale is the largest by which they are. So a block that was read
    from MXFP4 gets its own codes and scale again, if one of its magnitudes is 0.5 or 1.5 times its scale, as nearly all
    have; the others get its numbers. A block of zeros gets the scale 2**-127.

    Raises:
        ValueError: the weight holds infinities or NaN, or its rows cannot be cut into blocks of 32.
    """
    *rows, width = weight.shape
    if width % (2 * PAIRS):
        raise ValueError(f"Rows of {width} weights cannot be stored in MXFP4, whose blocks have {2 * PAIRS}.")
    blocks = weight.reshape(-1, 2 * PAIRS)
    codes, scales = np.empty((len(blocks), PAIRS), np.uint8), np.empty(len(blocks), np.uint8)
    for start in range(0, len(blocks), 16 * BLOCK):  # pieces that stay in a core's cache
        piece = slice(start, start + 16 * BLOCK)
        codes[piece], scales[piece] = _mxfp4_blocks(blocks[piece].astype(np.float32))
    return codes.reshape(*rows, -1, PAIRS), scales.reshape(*rows, -1)


def _mxfp4_blocks(
    blocks: Float32[np.ndarray, "blocks 32"],
) -> tuple[UInt8[np.ndarray, "blocks 16"], UInt8[np.ndarray, " blocks"]]:
    largest = np.abs(blocks).max(axis=1)
    if not np.isfinite(largest).all():
        raise ValueError("The weight holds infinities or NaN, which MXFP4 cannot hold.")
    fraction, exponent = np.frexp(largest / np.float32(6))
    exponent = np.clip(exponent - (fraction == 0.5), -126, 127)  # the smallest power of two that is not below
    scaled = np.abs(blocks) * np.ldexp(np.float32(1), -exponent)[:, None]
    bits = scaled.view(np.uint32)  # from 1 on a code has the exponent's last bits and the first bit of the fraction
    above = (bits + (0x1FFFFF + (bits >> 22 & 1)) >> 22) - 2 * 126
    codes = np.where(scaled < 1, np.rint(2 * scaled).astype(np.uint32), above).astype(np.uint8)
    exact = (E2M1[codes] == scaled).all(axis=1) & (largest > 0)
    # Half of a number and twice the scale are the same. 0.5 and 1.5, codes 1 and 3, have no half.
    halves = np.array([0, 0, 1, 0, 2, 3, 4, 5], np.uint8)
    while (exact := exact & (exponent < 127) & ~((codes == 1) | (codes == 3)).any(axis=1)).any():
        codes[exact] = halves[codes[exact]]
        exponent = exponent + exact
    codes |= np.signbit(blocks).astype(np.uint8) << 3
    return codes[:, ::2] | codes[:, 1::2] << 4, np.where(largest > 0, exponent + 127, 0).astype(np.uint8)


def block_scales(scales: UInt[np.ndarray, "out blocks"], columns: int) -> Shaped[np.ndarray, "..."]:
    """Returns the scales of `Fp8Blocks` for rows of so many columns, whose scales are as `Fp8Blocks.as_stored`'s."""
    return scale_values(scales[::BLOCK, :: BLOCK // math.gcd(BLOCK, columns)])


def scale_values(bits: UInt[np.ndarray, "*shape"]) -> Shaped[np.ndarray, "*shape"]:
    """Returns the scales that have these bits."""
    return bits.view(SCALES[bits.dtype.itemsize])


def swapped(codes: UInt8[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """Exchanges the halves of each byte."""
    return codes << 4 | codes >> 4


def ranges(index: tuple[slice, ...], shape: tuple[int, ...]) -> list[range]:
    """Returns the range of each axis that `index` selects; axes that the index leaves out are taken whole."""
    whole = (slice(None),) * (len(shape) - len(index))
    ranges = [range(size)[taken] for size, taken in zip(shape, (*index, *whole), strict=True)]
    if any(taken.step != 1 for taken in ranges):
        raise ValueError(f"{index} has steps, with which quantised tensors cannot be read.")
    return ranges


def _bytes(tensor: Tensor, width: int, rows: range, columns: range) -> UInt8[np.ndarray, "rows columns"]:
    """Reads a part of a tensor, viewed as a matrix of bytes with `width` columns."""
    matrix = replace(tensor, shape=(tensor.nbytes // width, width), dtype=BYTES.dtype)
    if len(columns) < width:  # whole rows are read, not mapped: a mapping's pages would count as the process's memory
        return matrix.view()[rows.start : rows.stop, columns.start : columns.stop]
    out = np.empty((len(rows), width), BYTES.dtype)
    matrix.read_into(out, rows.start)
    return out


def _table(values: Float64[np.ndarray, "byte n"], factors: Float64[np.ndarray, " m"], dtype: np.dtype) -> np.ndarray:
    """Returns a table whose item 256 f + b holds the n values of byte b, multiplied by factor f."""
    with np.errstate(over="ignore"):  # an overflowing product may never be looked up
        products = (factors[:, None, None] * values[None]).astype(dtype)
    return products.view(f"V{values.shape[1] * products.itemsize}").reshape(-1)


@functools.cache
def _mxfp4_table(dtype: np.dtype) -> np.ndarray:
    pairs = np.stack([BYTES & 15, BYTES >> 4], axis=1).view(ml_dtypes.float4_e2m1fn)
    return _table(pairs.astype(np.float64), np.exp2(BYTES - 127.0), dtype)
