"""Quantised weights: values by hand, float64 references bit by bit, the bytes read, refusals, and quantising."""

import concurrent.futures
import os
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from convert.formats import unpack
from convert.packed import Fp8Blocks, Mxfp4, quantize_blocks, quantize_mxfp4
from convert.tensors import open_tensors, save_tensors


E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
F32 = np.dtype(np.float32)
BF16 = np.dtype(ml_dtypes.bfloat16)
FLOATS = [F32, BF16, np.dtype(np.float16)]
FP4 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def bits(array):
    return array.shape, array.dtype, array.tobytes()


def opened(folder, **arrays):
    save_tensors(folder, {name: (a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()})
    return open_tensors(folder)


def fp8(folder, codes, scales) -> Any:
    """Returns a tensor of float8 codes, or their bytes, as read from a file."""
    return unpack(opened(folder, w_scale_inv=scales, w=codes.view(E4M3)))["w"]


def mxfp4(folder, blocks, scales) -> Any:
    return unpack(opened(folder, x_scales=scales, x_blocks=blocks))["x"]


def fp8_values():
    """Returns the 256 values of float8_e4m3fn by its definition: a sign, 4 bits of exponent and 3 of mantissa."""
    values = []
    for byte in range(128):
        exponent, mantissa = byte >> 3, byte & 7
        values.append(2.0**-6 * mantissa / 8 if exponent == 0 else 2.0 ** (exponent - 7) * (1 + mantissa / 8))
    values[127] = np.nan
    return np.array(values + [-value for value in values])


def spread(scales, shape):
    """Returns the scale of each value of a matrix in blocks of 128 x 128, in float64."""
    return scales.astype(np.float64).repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]


def rounded(values, dtype):
    with np.errstate(over="ignore"):
        return values.astype(dtype)


def mxfp4_values(blocks, scales):
    """Returns [experts, in, out] in float64, computed one value at a time."""
    experts, rows, groups, _ = blocks.shape
    out = np.empty((experts, groups * 32, rows))
    for expert, column, row in np.ndindex(out.shape):
        byte = int(blocks[expert, row, column // 32, column % 32 // 2])
        factor = 2.0 ** (int(scales[expert, row, column // 32]) - 127)
        out[expert, column, row] = FP4[byte >> 4 if column % 2 else byte & 15] * factor
    return out


# --------------------------------------------------------------------------------------------------------------- values


def test_fp8_by_hand(tmp_path):
    codes = np.array([[0x38, 0xC0, 0x01], [0x7E, 0x80, 0x40], [0x08, 0xB9, 0xFE]], np.uint8)
    scales = np.array([[0.5, 3], [4, 0.25]], np.float32)
    weight, at = np.zeros((129, 129), np.uint8), np.ix_([0, 1, 128], [0, 1, 128])
    weight[at] = codes
    whole = fp8(tmp_path, weight, scales).part((), F32)[at]
    expected = np.array([[0.5, -1, 3 * 2**-9], [224, -0.0, 6], [2**-4, -4.5, -112]], np.float32)
    assert bits(whole) == bits(expected)


def test_every_fp8_byte(tmp_path):
    weight = fp8(tmp_path, np.arange(256, dtype=np.uint8)[None], np.array([[1.0, -2.0]], np.float32))
    expected = fp8_values() * np.repeat([1.0, -2.0], 128)
    np.testing.assert_array_equal(weight.part((), F32)[0], expected.astype(np.float32))
    assert np.isnan(expected).sum() == 2


SCALES = {
    "float32": np.array([[2.3e-4, 1 / 3], [1.7e-41, 3.1e3]], np.float32),  # one is subnormal; one overflows float16
    "bfloat16": np.array([[2.3e-4, 1 / 3], [1e36, 7.0]], BF16),  # one overflows
    "float8_e8m0fnu": np.array([[0, 120], [127, 253]], np.uint8).view(E8M0),
}
FP8_INDICES = {
    "whole": (),
    "whole in words": (slice(0, 130), slice(0, 200)),
    "first rows": (slice(0, 7),),
    "rows across blocks": (slice(100, 130),),
    "one row": (slice(128, 129),),
    "last row": (slice(-1, None),),
    "columns": (slice(None), slice(0, 128)),
    "columns across blocks": (slice(None), slice(100, 177)),
    "one column": (slice(None), slice(199, 200)),
    "both": (slice(127, 129), slice(126, 130)),
    "one value": (slice(129, 130), slice(128, 129)),
    "no rows": (slice(4, 4),),
    "no columns": (slice(None), slice(5, 5)),
}


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("scales", SCALES.values(), ids=SCALES)
@pytest.mark.parametrize("index", FP8_INDICES.values(), ids=FP8_INDICES)
def test_fp8_has_the_bits_of_float64(tmp_path, index, scales, dtype):
    codes = np.random.default_rng(0).integers(0, 256, (130, 200), dtype=np.uint8).view(E4M3)
    reference = rounded(codes.astype(np.float64) * spread(scales, codes.shape), dtype)
    assert bits(fp8(tmp_path, codes, scales).part(index, dtype)) == bits(reference[index])


def test_float16_is_rounded_once(tmp_path):
    """The product is so little above the middle of two float16 numbers that float32 rounds it to the middle."""
    value, scale = 1.625, np.float32(float.fromhex("0x1.3b3b14p-1"))
    exact = np.float64(value) * np.float64(scale)
    assert exact > 1 + 2**-11 == np.float32(exact) and np.float32(exact).astype(np.float16) == 1
    weight = fp8(tmp_path, np.array([[value]]).astype(E4M3), np.array([[scale]]))
    assert weight.part((), np.dtype(np.float16)) == 1 + 2**-10


def test_float32_arithmetic_would_have_the_same_bits_in_bfloat16():
    """ml_dtypes rounds float64 to float32 on the way to bfloat16, as is the product of two float32 numbers."""
    rng = np.random.default_rng(0)
    codes = fp8_values()[:127].astype(np.float32)[:, None]
    scales = np.exp2(rng.uniform(-149, 119, (1, 4000))).astype(np.float32)
    direct = rounded(codes.astype(np.float64) * scales.astype(np.float64), BF16)
    assert bits(direct) == bits((codes * scales).astype(BF16))


def test_mxfp4_by_hand(tmp_path):
    """In one row of two groups, the low four bits are the first value."""
    blocks = np.zeros((1, 1, 2, 16), np.uint8)
    blocks[0, 0, 0, :3] = [0x21, 0xF7, 0x08]
    blocks[0, 0, 1, 15] = 0x9D
    x = mxfp4(tmp_path, blocks, np.array([[[128, 126]]], np.uint8))
    expected = np.zeros((1, 64, 1), np.float32)
    expected[0, :6, 0] = [1, 2, 12, -12, -0.0, 0]
    expected[0, 62:, 0] = [-1.5, -0.25]
    assert x.shape == (1, 64, 1)
    assert bits(x.part((), F32)) == bits(expected)


MXFP4_INDICES = {
    "whole": (),
    "one expert": (slice(1, 2),),
    "one expert in words": (slice(2, 3), slice(0, 96), slice(0, 131)),
    "experts": (slice(1, 3),),
    "rows": (slice(0, 1), slice(None), slice(120, 131)),
    "one row": (slice(None), slice(None), slice(130, 131)),
    "a group": (slice(0, 1), slice(32, 64)),
    "columns across groups": (slice(None), slice(31, 65)),
    "one odd column": (slice(0, 1), slice(45, 46)),
    "all three": (slice(1, 2), slice(7, 90), slice(3, 5)),
    "no experts": (slice(3, 3),),
    "no columns": (slice(0, 1), slice(40, 40)),
    "no rows": (slice(0, 1), slice(None), slice(9, 9)),
}


@pytest.fixture(scope="module")
def experts(tmp_path_factory):
    """Returns three experts [131, 96] with every scale from 0 to 255, and their values in float64."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (3, 131, 3, 16), dtype=np.uint8)
    scales = rng.permutation(np.arange(3 * 131 * 3) % 256).astype(np.uint8).reshape(3, 131, 3)
    return mxfp4(tmp_path_factory.mktemp("experts"), blocks, scales), mxfp4_values(blocks, scales)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("index", MXFP4_INDICES.values(), ids=MXFP4_INDICES)
def test_mxfp4_has_the_bits_of_float64(experts, index, dtype):
    x, values = experts
    assert bits(x.part(index, dtype)) == bits(rounded(values, dtype)[index])


@pytest.mark.parametrize("scale", [0, 1, 100, 127, 252])
def test_mxfp4_is_exact(tmp_path, scale):
    """Values are exact, even the smallest scale's subnormal numbers. From scale 2 ** 126 on, 6 would overflow."""
    blocks = np.tile(np.arange(0, 256, 17, dtype=np.uint8), (1, 1, 1, 1))
    x = mxfp4(tmp_path, blocks, np.full((1, 1, 1), scale, np.uint8))
    expected = np.repeat(FP4, 2)[None, :, None] * 2.0 ** (scale - 127)
    for dtype in (F32, BF16):
        np.testing.assert_array_equal(x.part((), dtype).astype(np.float64), expected)


def test_mxfp4_transposed_back_is_contiguous(experts):
    x, _ = experts
    assert x.part((slice(1, 2),), BF16).swapaxes(1, 2).flags.c_contiguous


def test_many_threads_dequantise_one_tensor(experts):
    x, _ = experts
    parts = [(slice(None), slice(None), slice(row, row + 9)) for row in range(0, 131, 9)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        whole = np.concatenate(list(pool.map(lambda index: x.part(index, BF16), parts)), axis=2)
    assert bits(whole) == bits(x.part((), BF16))


@pytest.mark.parametrize("index", [(slice(0, 130, 2),), (slice(None, None, -1),), (slice(None), slice(0, 9, 3))])
def test_steps_are_refused(tmp_path, index):
    weight = fp8(tmp_path, np.zeros((130, 200), np.uint8), np.ones((2, 2), np.float32))
    with pytest.raises(ValueError, match="has steps"):
        weight.part(index, F32)


# ------------------------------------------------------------------------------------------------- properties and reads


def test_what_is_known_of_them_unread(tmp_path):
    """Shape, dtype and size are known before reading, even if the two parts are in two files."""
    arrays = {
        "a.weight": np.zeros((576, 300), E4M3),
        "a.weight_scale_inv": np.ones((5, 3), np.float32),
        "norm.weight": np.ones(7, BF16),
        "x_blocks": np.zeros((2, 4, 3, 16), np.uint8),
        "x_scales": np.zeros((2, 4, 3), np.uint8),
    }
    lazy = {name: (a.shape, a.dtype, lambda a=a: a) for name, a in arrays.items()}
    save_tensors(tmp_path, lazy, shard_bytes=100)
    tensors = open_tensors(tmp_path)
    unpacked = unpack(tensors)
    assert unpacked.keys() == {"a.weight", "norm.weight", "x"}
    assert unpacked["norm.weight"] is tensors["norm.weight"]
    weight, x = unpacked["a.weight"], unpacked["x"]
    assert isinstance(weight, Fp8Blocks) and isinstance(x, Mxfp4)
    assert (weight.name, weight.shape, weight.dtype, weight.nbytes) == ("a.weight", (576, 300), BF16, 576 * 300 + 60)
    assert (x.name, x.shape, x.dtype, x.nbytes) == ("x", (2, 96, 4), BF16, 2 * 4 * 3 * 17)
    for packed, name in ((weight, "a.weight"), (x, "x_blocks")):
        assert packed.file == tensors[name].file != packed.scales.file


def test_what_is_not_asked_for_may_be_gone(tmp_path):
    """Only the requested rows are read: the codes are last in these files, which are cut off after those rows."""
    codes, scales = np.zeros((1000, 256), np.uint8), np.ones((8, 2), np.float32)
    blocks, exponents = np.zeros((9, 64, 8, 16), np.uint8), np.zeros((9, 64, 8), np.uint8)
    weight = fp8(tmp_path / "fp8", codes, scales)
    x = mxfp4(tmp_path / "mxfp4", blocks, exponents)
    os.truncate(weight.file, weight.codes.offset + 300 * 256)
    os.truncate(x.file, x.codes.offset + (3 * 64 + 10) * 128)
    assert weight.part((slice(290, 300),), BF16).shape == (10, 256)
    assert x.part((slice(2, 3),), BF16).shape == (1, 256, 64)
    assert x.part((slice(3, 4), slice(None), slice(4, 10)), BF16).shape == (1, 256, 6)
    for tensor, index in ((weight, (slice(290, 301),)), (x, (slice(3, 4), slice(None), slice(4, 11)))):
        with pytest.raises(OSError, match=f"{tensor.file} ends before {tensor.codes.name} does"):
            tensor.part(index, BF16)


def peak(tensor, index, dtype=BF16):
    """Returns the peak bytes that reading a part takes, without the part itself."""
    tensor.part((slice(0, 1),), dtype)
    tracemalloc.start()
    try:
        part = tensor.part(index, dtype)
        return tracemalloc.get_traced_memory()[1] - part.nbytes
    finally:
        tracemalloc.stop()


def test_memory_is_bounded_by_a_band_of_rows(tmp_path):
    codes, scales = np.zeros((4096, 512), np.uint8), np.ones((32, 4), np.float32)
    blocks, exponents = np.zeros((64, 512, 8, 16), np.uint8), np.zeros((64, 512, 8), np.uint8)
    weight, x = fp8(tmp_path / "fp8", codes, scales), mxfp4(tmp_path / "mxfp4", blocks, exponents)
    assert peak(weight, ()) < 128 * 512 * 20  # bytes, and numpy's indices
    assert peak(x, (slice(5, 6),)) < 128 * 128 * 20
    assert peak(x, ()) < 128 * 128 * 20


def test_columns_take_no_memory_for_the_others(tmp_path):
    weight = fp8(tmp_path / "fp8", np.zeros((128, 2**15), np.uint8), np.ones((1, 2**8), np.float32))
    x = mxfp4(tmp_path / "mxfp4", np.zeros((1, 128, 2**10, 16), np.uint8), np.zeros((1, 128, 2**10), np.uint8))
    assert peak(weight, (slice(None), slice(1000, 1064))) < 2**18
    assert peak(x, (slice(None), slice(1000, 1064))) < 2**18


# ------------------------------------------------------------------------------------------------------------ bad input


WEIGHT = np.zeros((130, 200), E4M3)
BLOCKS = np.zeros((2, 3, 4, 16), np.uint8)
BAD = {
    "float8 without scales": (dict(w=WEIGHT), r"^w in .* has no scales; the checkpoint lacks w_scale_inv"),
    "blocks without scales": (dict(x_blocks=BLOCKS), r"^x_blocks in .* has no scales; the checkpoint lacks x_scales"),
    "factors alone": (dict(w_scale_inv=np.ones((2, 2), np.float32)), r"^w_scale_inv in .* scales nothing"),
    "exponents alone": (dict(x_scales=BLOCKS[..., 0]), r"^x_scales in .* scales nothing"),
    "factors of bfloat16": (
        dict(w=np.zeros((130, 200), BF16), w_scale_inv=np.ones((2, 2), np.float32)),
        r"^w_scale_inv in .* scales nothing",
    ),
    "factors too few": (
        dict(w=WEIGHT, w_scale_inv=np.ones((2, 1), np.float32)),
        r"^w in .*, float8_e4m3fn\[130, 200\], and w_scale_inv in .*, float32\[2, 1\], do not fit",
    ),
    "factors for whole blocks alone": (dict(w=WEIGHT, w_scale_inv=np.ones((1, 1), np.float32)), "do not fit"),
    "factors of integers": (dict(w=WEIGHT, w_scale_inv=np.ones((2, 2), np.uint8)), r"uint8\[2, 2\], do not fit"),
    "one factor": (dict(w=WEIGHT, w_scale_inv=np.ones((), np.float32)), r"float32\[\], do not fit"),
    "float8 of one axis": (dict(w=WEIGHT[0], w_scale_inv=np.ones(2, np.float32)), r"float8_e4m3fn\[200\], and"),
    "float8 of three axes": (
        dict(w=WEIGHT[None], w_scale_inv=np.ones((1, 2, 2), np.float32)),
        r"float8_e4m3fn\[1, 130, 200\], and",
    ),
    "exponents too few": (dict(x_blocks=BLOCKS, x_scales=BLOCKS[:, :2, :, 0]), r"uint8\[2, 2, 4\], do not fit"),
    "blocks of 8 bytes": (dict(x_blocks=BLOCKS[..., :8], x_scales=BLOCKS[..., 0]), r"uint8\[2, 3, 4, 8\], and"),
    "blocks of one expert": (dict(x_blocks=BLOCKS[0], x_scales=BLOCKS[0, ..., 0]), r"uint8\[3, 4, 16\], and"),
    "blocks of signed bytes": (dict(x_blocks=BLOCKS.view(np.int8), x_scales=BLOCKS[..., 0]), r"int8\[2, 3, 4, 16\]"),
    "exponents as float32": (dict(x_blocks=BLOCKS, x_scales=np.ones((2, 3, 4), np.float32)), r"float32\[2, 3, 4\]"),
    "quantised and not": (
        dict(x_blocks=BLOCKS, x_scales=BLOCKS[..., 0], x=np.zeros((2, 128, 3), BF16)),
        r"^x is in .*, and quantised in .*; remove one",
    ),
}


@pytest.mark.parametrize("arrays, message", BAD.values(), ids=BAD)
def test_bad_input_is_named(tmp_path, arrays, message):
    with pytest.raises(ValueError, match=message) as caught:
        unpack(opened(tmp_path, **arrays))
    assert str(tmp_path / "model.safetensors") in str(caught.value) and "\n" not in str(caught.value)


# ----------------------------------------------------------------------------------------------------------- quantising


def test_quantised_by_hand():
    weight = np.zeros((2, 129), np.float32)
    weight[:, :4] = [[448, 17, 19, -0.3], [-1.5, 2**-10, 3 * 2**-10, 0]]
    codes, scales = quantize_blocks(weight)
    assert bits(scales) == bits(np.array([[1, 1]], np.float32))  # the second block has nothing but zeros
    # 17 and 19 lie half way between even numbers, 2 ** -10 and 3 * 2 ** -10 half way between multiples of 2 ** -9
    expected = [[0x7E, 0x58, 0x5A, 0xAA], [0xBC, 0x00, 0x02, 0x00]]
    assert codes[:, :4].view(np.uint8).tolist() == expected and not codes[:, 4:].view(np.uint8).any()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(130, 200), (128, 128), (1, 1), (300, 5)], ids=str)
def test_quantised_and_back(tmp_path, shape, dtype):
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=shape) * np.exp2(rng.uniform(-20, 3, shape))).astype(dtype)
    codes, scales = quantize_blocks(weight)
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    factors, values = spread(scales, shape), weight.astype(np.float64)
    back = fp8(tmp_path, codes, scales).part((), np.dtype(np.float64))
    half_step = np.maximum(np.abs(values) / 16, factors * 2**-10)  # 3 bits of mantissa; subnormal numbers
    assert (np.abs(back - values) <= half_step * (1 + 2**-20)).all()
    for i, j in np.ndindex(scales.shape):
        tile = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
        largest = np.abs(values[tile]).max()
        assert scales[i, j] == np.float32(largest) / np.float32(448)
        assert np.abs(back[tile] - values[tile]).max() <= largest * 16 / 448 * (1 + 2**-20)
        assert np.abs(codes[tile].astype(np.float32)).max() == 448


def test_no_magnitude_overflows():
    """Blocks of one row of every float32 magnitude do not overflow."""
    rng = np.random.default_rng(0)
    largest = rng.integers(1, 0x7F800000, 4096, dtype=np.uint32).view(np.float32)
    largest[:5] = [1e-45, 1e-38, np.finfo(np.float32).tiny, np.finfo(np.float32).max, 6e4]
    codes, scales = quantize_blocks((largest * rng.choice([-1, 1], 4096).astype(np.float32)).repeat(128)[None])
    assert np.isfinite(codes.astype(np.float32)).all()
    assert (scales >= np.finfo(np.float32).tiny).all()
    normal = largest > 6e-36
    assert normal.mean() > 0.9
    assert (np.abs(codes.astype(np.float32)).reshape(4096, 128)[normal] == 448).all()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_refused(value):
    weight = np.zeros((200, 300), np.float32)
    weight[150, 299] = value
    with pytest.raises(ValueError, match="infinities or NaN"):
        quantize_blocks(weight)


def test_mxfp4_quantised_by_hand():
    """Ties go to the even code; the scale is the smallest by which nothing exceeds 6."""
    weight = np.zeros((1, 96), np.float32)
    weight[0, :8] = [6.1, -0.25, 2.5, 3.5, 1.5, -7, 5, -0.0]  # the scale is 2: 3.05, -0.125, 1.25, 1.75, ...
    weight[0, 32:37] = [5.1, 0.25, 0.75, 2.5, 3.5]  # the scale is 1
    blocks, scales = quantize_mxfp4(weight)
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(3, 32)
    assert scales.tolist() == [[128, 127, 0]]
    assert codes[0, :8].tolist() == [5, 8, 2, 4, 2, 8 + 6, 4, 8]
    assert codes[1, :5].tolist() == [7, 0, 2, 4, 6] and not codes[2].any()


def test_mxfp4_is_quantised_in_pieces():
    """2,048 blocks are one piece, and what follows them another; no block depends on the others."""
    weight = np.random.default_rng(0).normal(size=(3000, 32)).astype(F32)
    parts = [quantize_mxfp4(weight[start:stop]) for start, stop in ((0, 1000), (1000, 3000))]
    for whole, *some in zip(quantize_mxfp4(weight), *parts, strict=True):
        np.testing.assert_array_equal(whole, np.concatenate(some))


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
def test_mxfp4_and_back(tmp_path, dtype):
    """No number is further off than half a gap, and what MXFP4 holds comes back bit by bit, whatever its scales."""
    rng = np.random.default_rng(0)
    weight = (rng.normal(size=(2, 40, 96)) * np.exp2(rng.uniform(-20, 3, (2, 40, 1)))).astype(dtype)
    blocks, scales = quantize_mxfp4(weight)
    back = mxfp4(tmp_path, blocks, scales).part((), F32).swapaxes(1, 2).reshape(2, 40, 3, 32)
    near = weight.astype(np.float32).reshape(back.shape)
    largest = np.abs(near).max(axis=-1, keepdims=True)
    assert (np.abs(back - near) <= np.maximum(np.abs(near) / 4, largest / 12) * (1 + 1e-6)).all()
    codes = rng.integers(0, 256, (2, 64, 6, 16), dtype=np.uint8)
    scales = rng.integers(1, 252, codes.shape[:3], dtype=np.uint8)
    numbers = mxfp4(tmp_path, codes, scales).part((), dtype).swapaxes(1, 2)
    again = quantize_mxfp4(numbers)
    np.testing.assert_array_equal(again[0], codes)
    np.testing.assert_array_equal(again[1], scales)


@pytest.mark.parametrize(
    "weight, message",
    [(np.full((1, 32), np.inf, F32), "infinities or NaN"), (np.ones((1, 48), F32), "Rows of 48 weights cannot be")],
)
def test_what_mxfp4_cannot_hold(weight, message):
    with pytest.raises(ValueError, match=message):
        quantize_mxfp4(weight)


# --------------------------------------------------------------------------------------------------------- transformers


@pytest.mark.live
def test_mxfp4_of_transformers(tmp_path):
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.mxfp4")
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (2, 32, 4, 16), dtype=np.uint8)
    scales = rng.permutation(256).astype(np.uint8).reshape(2, 32, 4)
    x = theirs.convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32)
    assert bits(mxfp4(tmp_path, blocks, scales).part((), F32)) == bits(x.numpy())


@pytest.mark.live
def test_fp8_of_transformers(tmp_path):
    """Values equal transformers' for whole blocks; transformers refuses others."""
    torch = pytest.importorskip("torch")
    theirs = pytest.importorskip("transformers.integrations.finegrained_fp8")
    codes, scales = quantize_blocks(np.random.default_rng(0).normal(size=(256, 384)).astype(np.float32))
    weight = torch.from_numpy(codes.view(np.uint8)).view(torch.float8_e4m3fn)
    pair = {"weight": [weight], "weight_scale_inv": [torch.from_numpy(scales)]}
    whole = theirs.Fp8Dequantize(None).convert(pair)["weight"]
    ours = fp8(tmp_path, codes, scales)
    assert bits(ours.part((), F32)) == bits(whole.numpy())
    assert ours.part((), BF16).tobytes() == whole.bfloat16().view(torch.uint16).numpy().tobytes()
