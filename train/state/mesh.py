"""Functions that check that a mesh divides model and batch, and that place models and batches on it."""

import contextlib
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, Sharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Int, Shaped

from kernels.mesh import BATCH, CONTEXT, EXPERT, FSDP, REPLICA, STAGE, TENSOR, split
from train.base.share import Share
from zoo.mesh import AXES, make_mesh
from zoo.nn.heads import AbstractHead
from zoo.nn.layers import AbstractExpertLinear
from zoo.nn.model import AbstractConfig, AbstractModel, Family
from zoo.nn.stack import Stack
from zoo.registry import family_of
from zoo.surgery import cast, modules, shardings, with_head
from zoo.weights.checkpoint import skeleton


T = TypeVar("T")


def meshes(mesh: str, sampling: str | None, devices: Sequence[Any] | None = None) -> tuple[Mesh, Mesh]:
    """Makes the mesh of the updates, and that of sampling: other devices, the last ones; None: the same mesh.

    Raises:
        ValueError: a mesh does not fit its devices, or that of sampling leaves its size open or takes all devices.
    """
    if not sampling:
        return (made := make_mesh(mesh, devices)), made
    devices = jax.devices() if devices is None else devices
    count = math.prod(map(int, re.findall(r"=\s*(-?\d+)", sampling)))
    if not 0 < count < len(devices):
        raise ValueError(
            f"--sampling-mesh {sampling} has to take some of the {len(devices)} devices and leave the others to "
            "--mesh: write its sizes, such as fsdp=1."
        )
    there = make_mesh(sampling, devices[-count:])
    return make_mesh(mesh, devices[:-count]), there


def check_mesh(mesh: Mesh, model: AbstractModel, family: Family, *, batch: int, seq_len: int) -> None:
    """Checks that the mesh divides the batch, the rows, and the model's heads, layers, experts and matrices evenly.

    `model` may be made of `jax.ShapeDtypeStruct`; a step has `batch` sequences of `seq_len` tokens.

    Raises:
        ValueError: the mesh does not divide one of these; the error names the numbers that would. Or the mesh has an
            axis that the model cannot use.
    """
    c, size = model.config, mesh.shape
    shares = math.prod(size[axis] for axis in BATCH)
    experts = [m.shape[-3] for _, m in modules(model, AbstractExpertLinear)]
    repeats = [repeats for _, repeats in model.layers.runs]  # the stages must divide one of these
    names = "*".join(axis for axis in BATCH if size[axis] > 1) or "1"
    for number, divisor, what, how in (
        (batch, shares, "sequences of a step", names),
        (seq_len, 2 * size[CONTEXT] if size[CONTEXT] > 1 else 1, "tokens of a row", "2*context"),
        (c.num_attention_heads, size[TENSOR], "heads", TENSOR),
        (max(repeats, key=lambda n: (n % size[STAGE] == 0, n)), size[STAGE], "repeated groups of layers", STAGE),
        *((n, size[EXPERT], "experts", EXPERT) for n in experts),
    ):
        if number % divisor:
            fitting = ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
            raise ValueError(
                f"{number} {what} can't be split by {how} = {divisor}: it must divide them, as {fitting} do."
            )
    if size[EXPERT] > 1 and not experts:
        raise ValueError(f"expert={size[EXPERT]} in the mesh, but {family.name} has no experts: use fsdp instead.")
    shardings(model, family.partition_rules, mesh)


def check_sampling(mesh: Mesh, model: AbstractModel, family: Family) -> None:
    """Checks that the mesh of sampling divides the model's heads, layers, experts and matrices evenly.

    Raises:
        ValueError: as in `check_mesh`. Sampling takes any number of rows, of any length.
    """
    check_mesh(mesh, model, family, batch=mesh.size, seq_len=2 * mesh.size)


def abstract_model(
    config: AbstractConfig, family: Family, mesh: Mesh, parts: Sequence[str] = (), head: AbstractHead | None = None
) -> AbstractModel:
    """Returns the shapes of a model's float32 parameters with their shardings.

    `parts` are names in `family.parts`. A `head` stands in the place of the output embeddings.
    """
    model = skeleton(family, config, parts)
    of = lambda array: jax.ShapeDtypeStruct(array.shape, array.dtype)
    model = model if head is None else with_head(model, jax.tree.map(of, head))
    places = shardings(model, family.partition_rules, mesh)
    return jax.tree.map(lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place), model, places)


def replicated(place: Sharding) -> Sharding:
    """Returns the same sharding, but with all of the array in every replica."""
    if not isinstance(place, NamedSharding) or (spec := without_replicas(place.spec)) == place.spec:
        return place
    return NamedSharding(place.mesh, spec)


def without_replicas(spec: P) -> P:
    """Returns a spec whose axes are not split over replicas."""
    names = [axes_of(entry) for entry in spec]
    if REPLICA not in sum(names, ()):
        return spec
    return P(*(tuple(name for name in entry if name != REPLICA) or None for entry in names))


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a `PartitionSpec`."""
    return (entry,) if isinstance(entry, str) else entry or ()


def without_stages(mesh: Mesh, model: AbstractModel, family: Family) -> Mesh:
    """Returns a mesh of the same devices without stages, for generating, where a pipeline would mostly be idle.

    The stages' devices join "fsdp", or "replica" if "fsdp" would then not divide the model.
    """

    def along(axis: str) -> Mesh:
        sizes = {**mesh.shape, STAGE: 1, axis: mesh.shape[STAGE] * mesh.shape[axis]}
        devices = np.moveaxis(mesh.devices, 0, AXES.index(axis) - 1)  # puts stages beside the axis that they join
        return Mesh(devices.reshape(list(sizes.values())), AXES, axis_types=mesh.axis_types)

    try:
        shardings(model, family.partition_rules, along(FSDP))
    except ValueError:
        return along(REPLICA)
    return along(FSDP)


@contextlib.contextmanager
def generating(model: AbstractModel, mesh: Mesh, dtype: DTypeLike) -> Iterator[Any]:
    """Yields the model to generate with, in `dtype`, on a mesh without stages: generation has no pipeline."""
    model, family = cast(model, dtype), family_of(model)
    there = without_stages(mesh, model, family)
    with jax.set_mesh(there):
        yield model if there == mesh else jax.device_put(model, shardings(model, family.partition_rules, there))


def on_mesh(model: T, mesh: Mesh, dtype: DTypeLike, *, anew: bool = False) -> T:
    """Copies a model, or a part of one, in `dtype` to a mesh, which may be of other devices; each replica gets all.

    Arrays that are there in this dtype are copied only with `anew`.
    """
    places = jax.tree.map(lambda a: NamedSharding(mesh, without_replicas(a.sharding.spec)), model)
    return jax.device_put(cast(model, dtype), places, may_alias=False if anew else None)


OF_ROWS = ("patches", "grids")  # arrays of a batch that have no axis of tokens (`train.data.pictures`)


def put_batch(
    batch: Mapping[str, Shaped[np.ndarray | Array, "batch ..."] | Share], mesh: Mesh, *models: Any
) -> dict[str, Shaped[Array, "batch ..."]]:
    """Puts `batch` on the devices: sequences are split over the axes in `BATCH`, and the tokens of each over "context".

    Every process gives the whole batch, or the rows of its devices (`train.base.share.Share`). If "context" splits
    rows, their tokens are put in the order of `balanced`, unless one of the models that read the batch needs them in
    order (`keeps_order`). A batch that stays in order loses its "positions", which shows the order to `positions_of`
    and `next_token`, unless its documents have branches. Images are placed with their sequences.

    Raises:
        ValueError: sequences or tokens can't be split evenly.
    """
    shares, parts, place = math.prod(mesh.shape[axis] for axis in BATCH), mesh.shape[CONTEXT], token_sharding(mesh)
    put, ordered = {}, keeps_order(mesh, *models)
    for name, array in batch.items():
        if len(array) % shares:
            raise ValueError(f"{len(array)} sequences of {name!r} can't be split over {shares} devices evenly.")
        if name in OF_ROWS:
            rows = lambda index, array=array: array[index[0]]
            put[name] = jax.make_array_from_callback(array.shape, NamedSharding(mesh, P(BATCH)), rows)
            continue
        if array.shape[1] % parts:
            raise ValueError(f"{array.shape[1]} tokens of {name!r} can't be split over {CONTEXT}={parts} evenly.")
        if ordered and name == "positions" and "branches" not in batch:
            continue
        order = slice(None) if ordered else balanced(array.shape[1], parts)
        part = lambda index, array=array, order=order: array[index[0]][:, order][:, index[1]]
        put[name] = jax.make_array_from_callback(array.shape, place, part)
    return put


def in_order(values: Shaped[np.ndarray, "batch seq"], mesh: Mesh, *models: Any) -> Shaped[np.ndarray, "batch seq"]:
    """Returns values of the tokens of a batch that `put_batch` has placed, in the order that they had before."""
    if keeps_order(mesh, *models):
        return values
    return values[:, np.argsort(balanced(values.shape[1], mesh.shape[CONTEXT]))]


def keeps_order(mesh: Mesh, *models: Any) -> bool:
    """Whether `put_batch` keeps the tokens of a row in order, for the models (or None) that read the batch.

    It does if "context" does not split rows, or if a model `reads_in_order`.
    """
    return mesh.shape[CONTEXT] == 1 or reads_in_order(models)


def reads_in_order(models: Any) -> bool:
    """Whether a model, or one of several, has a recurrence or a convolution (`AbstractBlock.ordered`)."""
    return any(block.ordered for _, stack in modules(models, Stack) for _, block in stack.blocks())


def positions_of(batch: Mapping[str, Shaped[Array, "batch ..."]]) -> Int[Array, "batch seq"] | None:
    """Returns the positions of a batch's tokens, or None if the tokens are in order.

    Tokens are in order unless `put_batch` has moved them, or documents have branches; positions then count from 0 in
    each document, or go on in each branch. Attention's fastest kernels need to know while they are traced that tokens
    are in order, and an array cannot show it.
    """
    return batch.get("positions") if split(CONTEXT) > 1 or "branches" in batch else None


def token_sharding(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of arrays [batch, seq, ...]."""
    return NamedSharding(mesh, P(BATCH, CONTEXT))


def balanced(seq: int, parts: int) -> Int[np.ndarray, " seq"]:
    """Orders a sequence's tokens so that each of `parts` devices along "context" has the same attention work.

    Under a causal mask, early tokens see few keys, and late tokens many. So the sequence is cut into 2 * `parts`
    pieces. Each device gets a piece from the front and its counterpart from the back (Llama 3, arXiv:2407.21783,
    section 3.3.2).

    Raises:
        ValueError: the sequence can't be cut evenly.
    """
    if seq % (2 * parts):
        raise ValueError(f"{seq} tokens can't be cut into {2 * parts} pieces, two for each of context={parts}.")
    pieces = np.arange(seq).reshape(2 * parts, -1)
    return np.stack([pieces[:parts], pieces[: parts - 1 : -1]], axis=1).reshape(-1)


def next_token(
    values: Shaped[Array, "batch seq"], batch: Mapping[str, Shaped[Array, "batch ..."]]
) -> Shaped[Array, "batch seq"]:
    """Returns, at each token of the batch, the value of the next token in its row, and 0 at the last."""
    following = lambda a: jnp.pad(a[:, 1:], ((0, 0), (0, 1)))
    if positions_of(batch) is None:
        return following(values)
    order = balanced(values.shape[1], split(CONTEXT))
    return following(values[:, np.argsort(order)])[:, order]
