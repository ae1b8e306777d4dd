"""What a run asks of its mesh: that it divides model and batch, and where the batch lies on it."""

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from kernels.mesh import BATCH, CONTEXT, EXPERT, FSDP, REPLICA, STAGE, TENSOR, split
from zoo.checkpoint import skeleton
from zoo.mesh import AXES
from zoo.nn.layers import AbstractExpertLinear
from zoo.nn.model import Family
from zoo.nn.stack import Stack
from zoo.registry import family_of
from zoo.surgery import cast, modules, shardings


def check_mesh(mesh: Mesh, model: Any, family: Family, *, batch: int, seq_len: int) -> None:
    """Raises ValueError, saying what does divide, unless the mesh splits all that it has to split evenly.

    `model` may be made of `jax.ShapeDtypeStruct`; a step has `batch` sequences of `seq_len` tokens.
    """
    c, size = model.config, mesh.shape
    shares = math.prod(size[axis] for axis in BATCH)
    experts = [m.shape[-3] for _, m in modules(model, AbstractExpertLinear)]
    names = "*".join(axis for axis in BATCH if size[axis] > 1) or "1"
    for number, divisor, what, how in (
        (batch, shares, "sequences of a step", names),
        (seq_len, 2 * size[CONTEXT] if size[CONTEXT] > 1 else 1, "tokens of a row", "2*context"),
        (c.num_attention_heads, size[TENSOR], "heads", TENSOR),
        (model.layers.repeats, size[STAGE], "repeated groups of layers", STAGE),
        *((n, size[EXPERT], "experts", EXPERT) for n in experts),
    ):
        if number % divisor:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ValueError(
                f"{number} {what} can't be split by {how} = {divisor}: it must divide them, as {fitting} do."
            )
    if size[EXPERT] > 1 and not experts:
        raise ValueError(f"expert={size[EXPERT]} in the mesh, but {family.name} has no experts: use fsdp instead.")
    for path, stack in modules(model, Stack):
        for numbers, block in stack.blocks():
            if block.ordered and size[CONTEXT] > 1:
                raise ValueError(
                    f"{CONTEXT}={size[CONTEXT]} in the mesh, but layer {numbers[0]} of {family.name} ({path}, a "
                    f"{type(block).__name__}) needs the tokens of a row in order: use fsdp or tensor instead."
                )
    shardings(model, family.partition_rules, mesh)


def abstract_model(config: Any, family: Family, mesh: Mesh, *, mtp: bool) -> Any:
    """Shapes of a model's float32 parameters, and where on the mesh they lie."""
    model = skeleton(family, config, mtp=mtp)
    places = shardings(model, family.partition_rules, mesh)
    return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), model, places)


def without_stages(mesh: Mesh, model: Any, family: Family) -> Mesh:
    """The same devices with those of the stages along "fsdp", or along "replica" where that does not divide the model.

    For generating: a pipeline would mostly stand idle.
    """

    def along(axis: str) -> Mesh:
        sizes = {**mesh.shape, STAGE: 1, axis: mesh.shape[STAGE] * mesh.shape[axis]}
        devices = np.moveaxis(mesh.devices, 0, AXES.index(axis) - 1)  # the stages' next to those that they join
        return Mesh(devices.reshape(list(sizes.values())), AXES, axis_types=mesh.axis_types)

    try:
        shardings(model, family.partition_rules, along(FSDP))
    except ValueError:
        return along(REPLICA)
    return along(FSDP)


@contextlib.contextmanager
def generating(model: Any, mesh: Mesh, dtype: DTypeLike) -> Iterator[Any]:
    """The model to generate with, in `dtype`, on a mesh without stages: generation has no pipeline."""
    model, family = cast(model, dtype), family_of(model)
    there = without_stages(mesh, model, family)
    with jax.set_mesh(there):
        yield model if there == mesh else jax.device_put(model, shardings(model, family.partition_rules, there))


def put_batch(
    batch: Mapping[str, Shaped[np.ndarray | Array, "batch seq ..."]], mesh: Mesh
) -> dict[str, Shaped[Array, "batch seq ..."]]:
    """`batch` on the devices: its sequences split over the axes that do so, and the tokens of each over "context".

    Every process gives the whole of it. The tokens of a row come back in the order of `balanced`.

    Raises:
        ValueError: if they can't be split evenly.
    """
    shares, parts, place = math.prod(mesh.shape[axis] for axis in BATCH), mesh.shape[CONTEXT], token_sharding(mesh)
    put = {}
    for name, array in batch.items():
        if len(array) % shares:
            raise ValueError(f"{len(array)} sequences of {name!r} can't be split over {shares} devices evenly.")
        array = np.asarray(array)[:, balanced(array.shape[1], parts)] if parts > 1 else array
        put[name] = jax.make_array_from_callback(array.shape, place, array.__getitem__)
    return put


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Of arrays [batch, seq, ...]."""
    return NamedSharding(mesh, P(BATCH, CONTEXT))


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


def next_token(values: Shaped[Array, "batch seq"]) -> Shaped[Array, "batch seq"]:
    """At each token the value of the next one in its row, and 0 at the last; of rows in the order of `put_batch`."""
    seq, parts = values.shape[1], split(CONTEXT)
    order = balanced(seq, parts) if parts > 1 else np.arange(seq)
    return jnp.pad(values[:, np.argsort(order)][:, 1:], ((0, 0), (0, 1)))[:, order]
