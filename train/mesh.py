"""The devices of a run, arranged by what they split: a mesh, from a few words."""

import math
import re
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

from kernels.mesh import BATCH, FEATURES, SEQUENCE
from zoo.layers import AbstractExpertLinear
from zoo.pipeline import STAGE
from zoo.stack import Stack
from zoo.surgery import modules, shardings


# From those that send least to those that send most. Stages come first since XLA wants nested `shard_map`s in order.
AXES = (STAGE, "replica", "fsdp", "expert", SEQUENCE, FEATURES)
ACROSS = ("replica", STAGE, "fsdp")  # those that may cross the slow network between slices of TPUs


def make_mesh(text: str = "fsdp=-1", devices: Sequence[Any] | None = None) -> Mesh:
    """The mesh that `text` describes, as "fsdp=4,tensor=2" does, of `devices` (None: all there are).

    Each axis splits something:

    - "replica": the sequences of a batch. Every replica has all parameters; the optimizer's state is split (ZeRO-1).
    - "fsdp": the sequences, the parameters and the optimizer's state. Layers are gathered as they are needed (ZeRO-3).
    - "tensor": heads, the features of hidden layers and the vocabulary, that is, the work on each token.
    - "context": the tokens of each sequence, and the parameters as fsdp does.
    - "expert": the experts of a mixture, to which tokens travel; all else as fsdp does.
    - "stage": the layers, through which microbatches go in a pipeline (see `zoo.pipeline`); all else as fsdp does.

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


def check_mesh(mesh: Mesh, model: Any, family: ModuleType, *, batch: int, seq_len: int) -> None:
    """Raises ValueError, saying what does divide, unless the mesh splits all that it has to split evenly.

    `model` may be made of `jax.ShapeDtypeStruct`; a step has `batch` sequences of `seq_len` tokens.
    """
    c, size = model.config, mesh.shape
    shares = math.prod(size[axis] for axis in BATCH)
    experts = [m.shape[-3] for _, m in modules(model, AbstractExpertLinear)]
    stack = next(m for _, m in modules(model, Stack))
    names = "*".join(axis for axis in BATCH if size[axis] > 1) or "1"
    for number, divisor, what, how in (
        (batch, shares, "sequences of a step", names),
        (seq_len, 2 * size[SEQUENCE] if size[SEQUENCE] > 1 else 1, "tokens of a row", "2*context"),
        (c.num_attention_heads, size[FEATURES], "heads", FEATURES),
        (stack.repeats, size[STAGE], "repeated groups of layers", STAGE),
        *((n, size["expert"], "experts", "expert") for n in experts),
    ):
        if number % divisor:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ValueError(
                f"{number} {what} can't be split by {how} = {divisor}: it must divide them, as {fitting} do."
            )
    if size["expert"] > 1 and not experts:
        raise ValueError(
            f"expert={size['expert']} in the mesh, but {family.__name__} has no experts: use fsdp instead."
        )
    shardings(model, family.PARTITION_RULES, mesh)


def without_stages(mesh: Mesh, model: Any, family: ModuleType) -> Mesh:
    """The same devices with those of the stages along "fsdp", or along "replica" where that does not divide the model.

    For generating: a pipeline would mostly stand idle.
    """

    def along(axis: str) -> Mesh:
        sizes = {**mesh.shape, STAGE: 1, axis: mesh.shape[STAGE] * mesh.shape[axis]}
        devices = np.moveaxis(mesh.devices, 0, AXES.index(axis) - 1)  # the stages' next to those that they join
        return Mesh(devices.reshape(list(sizes.values())), AXES, axis_types=mesh.axis_types)

    try:
        shardings(model, family.PARTITION_RULES, along("fsdp"))
    except ValueError:
        return along("replica")
    return along("fsdp")


def put_batch(
    batch: Mapping[str, Shaped[np.ndarray | Array, "batch seq ..."]], mesh: Mesh
) -> dict[str, Shaped[Array, "batch seq ..."]]:
    """`batch` on the devices: its sequences split over the axes that do so, and the tokens of each over "context".

    Every process gives the whole of it. The tokens of a row come back in the order of `balanced`.

    Raises:
        ValueError: if they can't be split evenly.
    """
    shares, parts, place = math.prod(mesh.shape[axis] for axis in BATCH), mesh.shape[SEQUENCE], token_sharding(mesh)
    put = {}
    for name, array in batch.items():
        if len(array) % shares:
            raise ValueError(f"{len(array)} sequences of {name!r} can't be split over {shares} devices evenly.")
        array = np.asarray(array)[:, balanced(array.shape[1], parts)] if parts > 1 else array
        put[name] = jax.make_array_from_callback(array.shape, place, array.__getitem__)
    return put


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [batch, seq, ...]."""
    return NamedSharding(mesh, P(BATCH, SEQUENCE))


def balanced(seq: int, parts: int) -> Int[np.ndarray, " seq"]:
    """The order of a sequence's tokens in which each of so many devices along "context" has as much to attend to.

    Early tokens see little, late ones much. So the sequence is cut into twice as many pieces, and each device gets one
    from the front and its counterpart from the back (Llama 3, arXiv:2407.21783, section 3.3.2).

    Raises:
        ValueError: if the sequence can't be cut evenly.
    """
    if seq % (2 * parts):
        raise ValueError(f"{seq} tokens can't be cut into {2 * parts} pieces, two for each of context={parts}.")
    pieces = np.arange(seq).reshape(2 * parts, -1)
    return np.stack([pieces[:parts], pieces[: parts - 1 : -1]], axis=1).reshape(-1)
