"""Reads the block sizes of kernels from JSON files, which `python -m benchmarks.tune` writes.

Each module of kernels has such a file beside it, for example attention/triton.json, keyed by kernel, chip, bytes of an
element and class of shape. Rows without a measurement have the largest blocks that fit in shared memory without
spilled registers, as compilers report.
"""

import functools
import json
from importlib import resources

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels.backends.device import Device, device


@functools.cache
def table(module: str) -> dict[str, dict]:
    """Reads the file of the module of this name: kernel -> chip -> bytes of an element -> class of shape -> sizes."""
    package, _, name = module.rpartition(".")
    return json.loads(resources.files(package).joinpath(f"{name}.json").read_text())


def chips(of: Device) -> list[str]:
    """Returns the names of rows for a device, the most specific first.

    For an NVIDIA GPU: its kind ("NVIDIA H200"), its compute capability ("sm_90"), the shared memory that a block may
    have ("227 KB"), and "gpu", whose rows fit in 99 KB, which all have. For others: the kind ("TPU v5"), the platform.
    """
    if of.capability is None:
        return [of.kind, of.platform]
    return [of.kind, "sm_{}{}".format(*of.capability), f"{of.shared} KB", of.platform]


def width(dtype: DTypeLike) -> str:
    """Returns the name of a dtype in rows, such as "2 bytes" for bfloat16 and float16."""
    size = jnp.dtype(dtype).itemsize
    return f"{size} byte{'s' * (size > 1)}"


def sizes(module: str, kernel: str, dtype: DTypeLike, shape_class: str) -> dict[str, int]:
    """Returns the sizes for a kernel of a module, such as `{"q": 128, "kv": 64, "warps": 4, "stages": 2}`.

    Looks up each of the `chips` of the device in use ("cpu" if kernels are interpreted), then the bytes of an element
    ("2 bytes", or "*"), then the class of shape ("d128", or "*").

    Raises:
        KeyError: no row fits.
    """
    for chip in chips(device()):
        for by_width in (width(dtype), "*"):
            for by_shape in (shape_class, "*"):
                found = table(module)[kernel].get(chip, {}).get(by_width, {}).get(by_shape)
                if found is not None:
                    return found
    raise KeyError(f"{module.replace('.', '/')}.json has no sizes for {kernel}, {device()}, {dtype}, {shape_class}.")
