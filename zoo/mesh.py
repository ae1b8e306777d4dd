"""Devices, arranged by what they split: a mesh, from a few words."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from kernels.mesh import CONTEXT, EXPERT, FSDP, REPLICA, STAGE, TENSOR


# From those that send least to those that send most. Stages come first since XLA wants nested `shard_map`s in order.
AXES = (STAGE, REPLICA, FSDP, EXPERT, CONTEXT, TENSOR)
ACROSS = (REPLICA, STAGE, FSDP)  # those that may cross the slow network between slices of TPUs


def make_mesh(text: str = "fsdp=-1", devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `text` describes, as "fsdp=4,tensor=2" does, of `devices` (None: all there are).

    Each axis splits something:

    - "replica": the sequences of a batch. Every replica has all parameters; the optimizer's state is split (ZeRO-1).
    - "fsdp": the sequences, the parameters and the optimizer's state. Layers are gathered as they are needed (ZeRO-3).
    - "tensor": heads, the features of hidden layers and the vocabulary, that is, the work on each token.
    - "context": the tokens of each sequence, and the parameters as fsdp does.
    - "expert": the experts of a mixture, to which tokens travel; all else as fsdp does.
    - "stage": the layers, through which microbatches go in a pipeline (see `zoo.nn.pipeline`); all else as fsdp does.

    An axis that is not named has size 1; one of size -1 takes the devices that the others leave. Where the devices are
    several slices of TPUs, the slow network between them is crossed by replica, else by stage, else by fsdp.

    Raises:
        ValueError: if the text can't be read, its product is not the number of devices, or the slices can't be divided.
    """
    devices = jax.devices() if devices is None else devices
    sizes = {}
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\w+)\s*=\s*(-1|[1-9]\d*)\s*", part)
        if not match or match[1] not in AXES or match[1] in sizes:
            raise ValueError(f"{part!r} in the mesh {text!r}: write each of {', '.join(AXES)} at most once, as fsdp=8.")
        sizes[match[1]] = int(match[2])
    known = math.prod(size for size in sizes.values() if size != -1)
    free = [axis for axis, size in sizes.items() if size == -1]
    if len(free) > 1:
        raise ValueError(f"The mesh {text!r} leaves {' and '.join(free)} open; at most one size can be -1.")
    if len(devices) % known if free else len(devices) != known:
        needs = f"a multiple of {known}" if free else f"{known}"
        raise ValueError(f"The mesh {text!r} needs {needs} devices; there are {len(devices)}.")
    shape = [len(devices) // known if axis in free else sizes.get(axis, 1) for axis in AXES]
    kinds = (AxisType.Auto,) * len(AXES)
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices == 1:
        # Not jax.make_mesh, which refuses what no wiring of a torus has, such as 256 devices along an axis of 8x8x8.
        grid = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(grid, AXES, axis_types=kinds)
    across, left = [1] * len(AXES), slices
    for i in map(AXES.index, ACROSS):
        across[i] = math.gcd(shape[i], left)
        left //= across[i]
    if left > 1:
        raise ValueError(
            f"The devices lie in {slices} slices, and the mesh {text!r} can't be divided between them: "
            f"{'*'.join(ACROSS)} must be a multiple of {slices}."
        )
    within = [size // n for size, n in zip(shape, across, strict=True)]
    grid = mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=kinds)
