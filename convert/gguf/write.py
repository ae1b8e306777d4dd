"""Writes GGUF files tensor by tensor, so that memory holds few of their rows at a time."""

import math
import os
import pathlib
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Shaped

from convert.gguf.architectures import Made


TYPES = {"f32": ("F32", 0), "f16": ("F16", 1), "bf16": ("BF16", 32), "q8_0": ("Q8_0", 7), "q4_0": ("Q4_0", 2)}
"""Name of a type -> its name in GGUF, and the number by which general.file_type says that most matrices have it."""
PIECE = 2**22  # values that are made at a time
BLOCK = 32  # neighbours that share a scale in Q8_0 and Q4_0
# Matrices that stay in F32 in files of any type, as llama.cpp's converter leaves them: routers and short convolutions.
PRECISE = ("ffn_gate_inp.weight", "shortconv.conv.weight")
EMBEDDINGS = ("token_embd.weight", "output.weight")


def write_file(
    path: pathlib.Path,
    metadata: Mapping[str, Any],
    tensors: Iterable[Made],
    kind: str,
    advance: Callable[[int], None] = lambda count: None,
) -> None:
    """Writes a GGUF file of version 3 beside `path`, and then gives it that name.

    Args:
        path: the file; an older one stays whole until the new one is complete.
        metadata: key -> bool, int, float, text, list of these, or array of numbers. Numbers are stored in 32 bits.
        tensors: what `architectures.made` yields.
        kind: one of TYPES, for matrices. Vectors, routers and short convolutions are in F32. A matrix whose rows cannot
            be cut into blocks is in F16; embeddings in Q4_0 are in Q8_0.
        advance: is called with the number of values that were written.

    Raises:
        ValueError: a value is too large for F16; the message names the tensor.
        OSError: the file cannot be written.
    """
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, GGUFWriter  # takes a tenth of a second

    unfinished = path.with_name(f"{path.name}.{uuid.uuid4().hex}.unfinished")
    writer = GGUFWriter(unfinished, metadata["general.architecture"])
    scalars = {
        bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING,
    }  # fmt: skip
    for key, value in {**metadata, "general.file_type": TYPES[kind][1], "general.quantization_version": 2}.items():
        if key == "general.architecture":
            continue  # which the writer has
        if type(value) in scalars:
            writer.add_key_value(key, value, scalars[type(value)])
        else:
            writer.add_array(key, value.tolist() if isinstance(value, np.ndarray) else list(value))
    every = [(name, shape, make, _kind_of(name, shape, kind)) for name, shape, make in tensors]
    for name, shape, _, stored in every:
        values, width = GGML_QUANT_SIZES[GGMLQuantizationType[stored]]
        count = math.prod(shape[:-1]) * (shape[-1] // values * width)
        # The package takes the shape of bytes for uint8, and that of values for all else.
        writer.add_tensor_info(name, shape, np.dtype(np.float32), count, GGMLQuantizationType[stored])
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for name, shape, make, stored in every:
            writer.write_tensor_data(_values(name, shape, make, stored, advance))
        writer.close()
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    except BaseException:
        writer.close()
        unfinished.unlink(missing_ok=True)
        raise


def _kind_of(name: str, shape: tuple[int, ...], kind: str) -> str:
    if len(shape) < 2 or name.endswith(PRECISE):
        return "F32"
    if kind.startswith("q") and shape[-1] % BLOCK:
        return "F16"
    return "Q8_0" if kind == "q4_0" and name in EMBEDDINGS else TYPES[kind][0]


def _values(
    name: str,
    shape: tuple[int, ...],
    make: Callable[[slice], np.ndarray],
    kind: str,
    advance: Callable[[int], None],
) -> np.ndarray:
    """Makes and stores a tensor some rows at a time; the result has the bytes of the file."""
    step, pieces = max(1, PIECE // max(1, math.prod(shape[1:]))), []
    for start in range(0, shape[0], step):
        values = make(slice(start, min(start + step, shape[0])))
        pieces.append(stored(values, kind, name))
        advance(values.size)
    return np.concatenate(pieces) if len(pieces) > 1 else pieces[0]


def stored(values: Float32[np.ndarray, "*shape"], kind: str, name: str) -> Shaped[np.ndarray, "*stored"]:
    """Stores values in a type of GGUF: rounds them to a plain one, or quantises blocks of each row.

    Raises:
        ValueError: a value is too large for F16.
    """
    match kind:
        case "F32":
            return values
        case "BF16":
            return values.astype(ml_dtypes.bfloat16).view(np.uint8)
        case "F16":
            with np.errstate(over="ignore"):
                half = values.astype(np.float16)
            if not np.isfinite(half).all():
                raise ValueError(f"{name} has values that float16 cannot hold: write the file with --type bf16.")
            return half
    from gguf import GGMLQuantizationType
    from gguf.quants import quantize

    return quantize(values, GGMLQuantizationType[kind])
