"""The devices of a run, arranged by what they split: a mesh, from a few words."""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from zoo.stack import BATCH_AXES


AXES = (*BATCH_AXES, "tensor")


def make_mesh(text: str = "fsdp=-1", devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `text` describes, as "fsdp=4,tensor=2" does, of `devices` (None: all there are).

    "replica" splits the batch, "fsdp" the batch and the parameters, "tensor" the parameters and the work on each token.
    An axis that is not named has size 1; one of size -1 takes the devices that the others leave.

    Raises:
        ValueError: if the text can't be read, or its product is not the number of devices.
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
    return jax.make_mesh(shape, AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def put_batch(
    batch: Mapping[str, Int[np.ndarray | Array, "batch seq"]], mesh: Mesh
) -> dict[str, Int[Array, "batch seq"]]:
    """`batch` on the devices, its sequences split over "replica" and "fsdp".

    Raises:
        ValueError: if they can't be split evenly.
    """
    shards = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    for name, array in batch.items():
        if len(array) % shards:
            raise ValueError(f"{len(array)} sequences of {name!r} can't be split over {shards} devices evenly.")
    return jax.device_put(dict(batch), NamedSharding(mesh, P(BATCH_AXES)))
