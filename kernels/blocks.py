"""Reads the sizes of the blocks that kernels work in from block_sizes/, which `python -m benchmarks.tune` writes.

There is one file for each module of kernels, keyed by kernel, chip, dtype and class of shape. A chip on which nothing
was measured gets its platform's row ("gpu" or "tpu"), chosen so that no register spills in the compile tests.
"""

import functools
import json
from importlib import resources

import jax.numpy as jnp
from jax.typing import DTypeLike

from kernels.device import device


@functools.cache
def table(module: str) -> dict[str, dict]:
    """Reads a module's file: kernel -> chip -> dtype -> class of shape -> sizes."""
    return json.loads(resources.files("kernels").joinpath(f"block_sizes/{module}.json").read_text())


def sizes(module: str, kernel: str, dtype: DTypeLike, shape_class: str) -> dict[str, int]:
    """Returns the sizes for a kernel, such as `{"q": 128, "kv": 64, "warps": 4, "stages": 2}`.

    Looks under the kind of device in use ("NVIDIA H200"), then under its platform ("cpu" where kernels are
    interpreted). Within that it looks by dtype ("bfloat16", or "*"), and then by class of shape ("d128", or "*").

    Raises:
        KeyError: if no row fits.
    """
    platform, kind = device()
    for chip in (kind, platform):
        for by_dtype in (str(jnp.dtype(dtype)), "*"):
            for by_shape in (shape_class, "*"):
                found = table(module)[kernel].get(chip, {}).get(by_dtype, {}).get(by_shape)
                if found is not None:
                    return found
    raise KeyError(f"kernels/block_sizes/{module}.json has no sizes for {kernel}, {kind}, {dtype}, {shape_class}.")
