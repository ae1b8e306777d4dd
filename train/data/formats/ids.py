"""Readers of ids that a tokenizer has made before: Megatron's .bin with .idx, and .npy."""

import pathlib

import numpy as np

from train.data.record import Records


PIECE = 16 * 1024  # ids of one record of a one-dimensional .npy file
# Code in an .idx file -> dtype: Megatron-LM, megatron/core/datasets/indexed_dataset.py.
DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


def read_megatron(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens the documents of an indexed data set of Megatron-LM: ids in NAME.bin, and their index in NAME.idx.

    An .idx file has "MMIDIDX\\0\\0", the version 1 and a code of the dtype; the number of sequences and the number of
    document bounds; the lengths of the sequences in ids, their offsets in bytes, and the first sequence of each
    document, followed by the number of sequences.
    """
    beside, said = file.with_suffix(".idx"), f"{name.removesuffix('.bin')}.idx"
    if not beside.exists():
        raise ValueError(
            f"{name} has no {pathlib.Path(said).name} beside it, as Megatron's data sets have. Put plain ids into .npy."
        )
    data = np.memmap(beside, np.uint8, "r") if beside.stat().st_size else b""
    head = bytes(data[:34])
    if head[:9] != b"MMIDIDX\0\0" or len(head) < 34 or int.from_bytes(head[9:17], "little") != 1:
        raise ValueError(f"{said} is broken: it is no index of a Megatron data set of version 1.")
    code, sequences, ends = (int.from_bytes(head[a:b], "little") for a, b in ((17, 18), (18, 26), (26, 34)))
    if code not in DTYPES:
        raise ValueError(f"{said} has the dtype of code {code}, which is none of whole numbers.")
    if len(data) < 34 + 12 * sequences + 8 * ends:
        raise ValueError(f"{said} is broken: it has {len(data):,} bytes, too few for {sequences:,} sequences.")
    parts = np.split(data[34 : 34 + 12 * sequences + 8 * ends], [4 * sequences, 12 * sequences])
    # Copied, since the arrays are not aligned in the file.
    lengths, starts, documents = (
        np.frombuffer(p.tobytes(), t) for p, t in zip(parts, ("<i4", "<i8", "<i8"), strict=True)
    )
    dtype, size = np.dtype(DTYPES[code]).newbyteorder("<"), file.stat().st_size
    expected = int(starts[-1]) + int(lengths[-1]) * dtype.itemsize if sequences else 0
    if size != expected:
        raise ValueError(f"{name} is broken: it has {size:,} bytes, and its .idx says {expected:,}.")
    if sequences and (lengths.min() < 0 or np.any(np.diff(starts) != lengths[:-1] * np.int64(dtype.itemsize))):
        raise ValueError(f"{said} is broken: its sequences do not follow one another.")
    if ends == 0 or documents[0] != 0 or documents[-1] != sequences or np.any(np.diff(documents) < 0):
        raise ValueError(f"{said} is broken: its documents are not made of its {sequences:,} sequences.")
    bounds = np.append(starts, expected)[documents] // dtype.itemsize
    ids = np.memmap(file, dtype, "r") if size else np.zeros(0, dtype)
    read = lambda index: {"tokens": ids[bounds[index] : bounds[index + 1]].tolist()}
    return Records(name, ends - 1, read, lambda index: f"document {index + 1}")


def read_npy(file: pathlib.Path, name: str, every: bool) -> Records:
    """Opens an array of ids, memory-mapped. A record is a row or, in one dimension, `PIECE` consecutive ids."""
    try:
        ids = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise ValueError(f"{name} is broken, or no array of numbers: {error}") from error
    if ids.ndim not in (1, 2) or ids.dtype.kind not in "iu":
        raise ValueError(
            f"{name} has {ids.dtype} of shape {ids.shape}; ids are whole numbers, of one dimension or two."
        )
    if ids.ndim == 2:
        return Records(name, len(ids), lambda index: {"tokens": ids[index].tolist()}, lambda index: f"row {index + 1}")
    read = lambda index: {"tokens": ids[index * PIECE : (index + 1) * PIECE].tolist()}
    return Records(name, -(-len(ids) // PIECE), read, lambda index: f"ids from {index * PIECE}")
