"""Make a mesh of devices from a short description, such as "fsdp=4,tensor=2"."""

import math
import re
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh

from kernels.mesh import CONTEXT, EXPERT, FSDP, REPLICA, STAGE, TENSOR


# Ordered by traffic, least first. Stages come first because XLA wants nested `shard_map`s in this order.
AXES = (STAGE, REPLICA, FSDP, EXPERT, CONTEXT, TENSOR)
ACROSS = (REPLICA, STAGE, FSDP)  # axes that may cross the slow network between slices of TPUs


def make_mesh(text: str = "fsdp=-1", devices: Sequence[Any] | None = None) -> Mesh:
    """Make the mesh that `text` describes, such as "fsdp=4,tensor=2", of `devices` (None: all).

    The axes, and what each splits:

    - "replica": the sequences of a batch. Every replica computes with all parameters; training's state is split.
    - "fsdp": sequences, parameters and the optimizer's state. Layers are gathered when they are needed (ZeRO-3).
    - "tensor": heads, the features of hidden layers, and the vocabulary: that is, the work on each token.
    - "context": the tokens of each sequence; parameters as fsdp does.
    - "expert": the experts of a mixture, to which tokens are sent; all else as fsdp does.
    - "stage": the layers, as a pipeline of microbatches (see `zoo.nn.pipeline`); all else as fsdp does.

    An axis that is not named has size 1. An axis of size -1 takes all devices that the others leave. If the devices are
    several slices of TPUs, replica crosses the slow network between them, then stage, then fsdp.

    Raises:
        ValueError: if the text is malformed, the sizes do not match the number of devices, or the axes that may cross
            slices do not divide them.
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
        # Not jax.make_mesh: it refuses axes that do not fit the torus's wiring, such as 256 devices of 8x8x8.
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
