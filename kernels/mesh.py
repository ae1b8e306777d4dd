"""Names the axes of device meshes, and splits operations over them.

XLA cannot split a Pallas kernel, so operations run within `jax.shard_map`. This module decides, by the names of the
axes of the mesh in scope (`jax.set_mesh`), over which of them each axis of an array is split.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, Shaped

from kernels.stacked import Stacked, read
from kernels.sums import lookup
from kernels.tokens import Tokens


# The axes of a mesh, and what each splits. zoo.mesh.make_mesh documents them for users.
REPLICA = "replica"  # sequences of the batch; each replica has all parameters and its share of the optimizer's state
FSDP = "fsdp"  # sequences of the batch, parameters and optimizer state
TENSOR = "tensor"  # heads, the features of hidden layers, the words of the vocabulary
CONTEXT = "context"  # the tokens of a sequence; parameters as FSDP does
EXPERT = "expert"  # the experts of a mixture; all else as FSDP does
STAGE = "stage"  # layers, in a pipeline; all else as FSDP does

BATCH = (STAGE, REPLICA, FSDP, EXPERT)  # sequences are split over these
PARAMETERS = (FSDP, EXPERT, CONTEXT, STAGE)  # parameters are split over these, whose devices differ in tokens


def free() -> dict[str, int]:
    """Returns the axes of the mesh in scope, with their sizes, that no enclosing `shard_map` has made manual.

    Axes of size 1 are included. On one device, or if all axes are manual, the result is empty: then a kernel can be
    called directly.
    """
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    return {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual and mesh.size > 1}


def split(axis: str) -> int:
    """Returns the number of devices along a free axis, or 1 for an axis that is not free."""
    return free().get(axis, 1)


def manual(axis: str) -> int:
    """Returns the number of devices along an axis that an enclosing `shard_map` has made manual, or 1 if none has."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[axis] if axis in mesh.manual_axes else 1


def splitting(size: int, *axes: str) -> tuple[str, ...]:
    """Returns those of these axes, in order, that are free and together split `size` evenly."""
    return fitting(size, {axis: split(axis) for axis in axes if split(axis) > 1})


def fitting(size: int, axes: Mapping[str, int]) -> tuple[str, ...]:
    """Chooses axes in order. An axis is taken if its size divides `size` / the sizes of the axes taken before it."""
    chosen: tuple[str, ...] = ()
    for axis, devices in axes.items():
        if size % devices == 0:
            chosen, size = (*chosen, axis), size // devices
    return chosen


def tokens_spec(shape: tuple[int, ...]) -> P:
    """Returns the spec of an array [batch, seq, ...]: sequences over `BATCH`, their tokens over `CONTEXT`."""
    return P(splitting(shape[0], *BATCH), splitting(shape[1], CONTEXT))


def splits_tokens_alone(shape: tuple[int, ...]) -> bool:
    """Whether this is a shape [batch, seq, features] of whose tokens each device of the mesh in scope has its own."""
    if len(shape) != 3:
        return False
    devices = math.prod(split(axis) for axis in (*splitting(shape[0], *BATCH), *splitting(shape[1], CONTEXT)))
    return devices == math.prod(free().values())


def split_tokens(
    product: Callable[[Any, Any], Float[Array, "*tokens out"]], x: Any, w: Any
) -> Float[Array, "*tokens out"]:
    """Runs `product(x, w)` on each device, with its tokens of the arrays in `x`, and all of `w`.

    On a mesh (`splits_tokens_alone` says whether it can serve) the first array of `x` is [batch, seq, ...]. The others
    are, too, or are single numbers.
    """
    axes = free()
    if math.prod(axes.values()) == 1:
        return product(x, w)
    spec = tokens_spec(jax.tree.leaves(x)[0].shape)
    of_x = jax.tree.map(lambda array: spec if array.ndim else P(), x)
    return jax.shard_map(product, axis_names=set(axes), in_specs=(of_x, P()), out_specs=spec, check_vma=False)(x, w)


@jax.custom_vjp
def by_replica(a: Shaped[Array, "..."]) -> Shaped[Array, "replicas ..."]:
    """Repeats an array for each replica, for a `shard_map`. The replicas' gradients are then added up outside of it.

    Within, gradients would be summed over all devices at once. Outside, XLA sums those of a replica's devices, and then
    those of the replicas, each by a reduce-scatter where the sum is split.
    """
    return jnp.broadcast_to(a, (split(REPLICA), *a.shape))


def _add_replicas(_: None, gradients: Array) -> tuple[Array]:
    apart = P(REPLICA, *[P.UNCONSTRAINED] * (gradients.ndim - 1))  # else XLA might add up replicas first
    return (jax.lax.reduce_sum(jax.lax.with_sharding_constraint(gradients, apart), axes=(0,)),)


by_replica.defvjp(lambda a: (by_replica(a), None), _add_replicas)


def split_attention(
    attend: Callable[..., Float[Array, "batch seq heads v_dim"]],
    q: Float[Array, "batch seq heads dim"],
    k: Float[Array, "batch kv_seq kv_heads dim"] | Stacked,
    v: Float[Array, "batch kv_seq kv_heads v_dim"] | Stacked | None,
    *,
    sinks: Float[Array, " heads"] | None,
    q_tokens: Tokens,
    kv_tokens: Tokens,
    grows: bool = False,
) -> Float[Array, "batch seq heads v_dim"]:
    """Runs `attend` on each device, with the device's share of the sequences, the heads and the queries.

    If the tokens of a sequence are split, each device all-gathers the sequence's keys and values, which are small with
    grouped heads (Llama 3, arXiv:2407.21783, section 3.3.2). Masks compare positions, so tokens may be in any order.
    Query heads are split. Key/value heads that the devices do not divide are repeated until they do: 2 heads over 3
    devices are repeated three times each, and a device gets the 2 that its query heads need. A single key/value head,
    such as a latent, is whole on each device. An axis of the mesh that does not divide an axis of the arrays leaves it
    whole, and the tokens of a cache (`Stacked`) are not split.

    `grows`: later queries see more keys, as under a causal mask alone. If tokens are in order, the last device would
    then do most of the work. So of n devices, device i exchanges the later half of its queries with device n - 1 - i.
    Then each device's early and late queries see about as many keys in total as every other device's.
    """
    if not (axes := free()):
        return attend(q, k, v, sinks=sinks, q_tokens=q_tokens, kv_tokens=kv_tokens)
    batch = splitting(len(q), *BATCH)
    cached = isinstance(k, Stacked)
    seq = () if cached else splitting(math.gcd(q.shape[1], k.shape[1]), CONTEXT)
    heads = splitting(q.shape[2], TENSOR)
    devices = split(CONTEXT)
    unbalanced = grows and seq and q_tokens.in_order and q.shape[1] % (2 * devices) == 0
    if heads and k.shape[2] != 1 and k.shape[2] % split(TENSOR):
        times = math.lcm(k.shape[2], split(TENSOR)) // k.shape[2]  # both divide the query heads, so the lcm does
        k, v = _repeat_heads(k, times), None if v is None else _repeat_heads(v, times)

    def given(tokens: Tokens) -> Tokens:
        """Makes positions an array if sequences are split, because an index on a device is then no position."""
        return tokens._replace(positions=jnp.asarray(tokens.positions)) if seq and tokens.in_order else tokens

    def spec(ids: Any) -> P:
        return P(batch if len(ids) == len(q) else None, seq)

    whole = P(batch, seq, heads)
    of_keys = P(batch, seq, heads if k.shape[2] > 1 else ())
    exchanged = functools.partial(_exchange_halves, devices) if unbalanced else lambda a: a

    def local(q: Any, k: Any, v: Any, sinks: Any, q_ids: Any, kv_ids: Any) -> Any:
        gather = lambda a: jax.lax.all_gather(a, CONTEXT, axis=1, tiled=True) if seq else a
        k, v, kv_ids = jax.tree.map(gather, (k, v, kv_ids))
        q, q_ids = jax.tree.map(exchanged, (q, q_ids))
        tokens = dict(q_tokens=merge(q_tokens, q_ids), kv_tokens=merge(kv_tokens, kv_ids))
        return exchanged(attend(q, k, v, sinks=sinks, **tokens))  # returns outputs to the queries' devices

    # Positions in numpy, known when tracing, are not split.
    arrays = lambda tokens: tuple(ids for ids in tokens if isinstance(ids, jax.Array))

    def merge(tokens: Tokens, ids: tuple[Array, ...]) -> Tokens:
        rest = iter(ids)
        return Tokens._make(next(rest) if isinstance(old, jax.Array) else old for old in tokens)

    q_tokens, kv_tokens = given(q_tokens), given(kv_tokens)
    q_ids, kv_ids = arrays(q_tokens), arrays(kv_tokens)
    return jax.shard_map(
        local,
        axis_names=set(axes),
        in_specs=(whole, _spec_of(k, of_keys), _spec_of(v, of_keys), P(heads), *jax.tree.map(spec, (q_ids, kv_ids))),
        out_specs=whole,
        check_vma=False,
    )(q, k, v, sinks, q_ids, kv_ids)


def _repeat_heads(x: Array | Stacked, times: int) -> Any:
    """Repeats each key/value head [batch, kv_seq, kv_heads, dim], of an array or of a layer of a cache."""
    wide = jnp.repeat(read(x), times, axis=2)
    return Stacked.of(wide) if isinstance(x, Stacked) else wide


def _spec_of(x: Array | Stacked | None, of_keys: P) -> Any:
    """Returns the spec of keys or values: `of_keys`, or for a cache a `Stacked` with the specs of its arrays."""
    if not isinstance(x, Stacked):
        return None if x is None else of_keys
    batch, seq, heads = of_keys
    of_stack = P(None, batch, seq, heads) if x.table is None else P(None, None, None, heads)  # rows share pages
    scale, table = None if x.scale is None else of_stack, None if x.table is None else P(batch)
    return dataclasses.replace(x, stack=of_stack, layer=P(), scale=scale, table=table)


def _exchange_halves(devices: int, a: Array) -> Array:
    """Exchanges the later half of device i's tokens with that of device n - 1 - i, along `CONTEXT` of n `devices`."""
    kept, sent = jnp.split(a, 2, axis=1)
    received = jax.lax.ppermute(sent, CONTEXT, [(n, devices - 1 - n) for n in range(devices)])
    return jnp.concatenate([kept, received], axis=1)


def split_lookup(
    table: Float[Array, "vocab embed"], tokens: Int[Array, "batch seq"]
) -> Float[Array, "batch seq embed"]:
    """Looks up `table[tokens]` in a table whose rows are split over `TENSOR` and their features over `PARAMETERS`.

    An all-gather brings tokens to the devices that have the features, and an all-to-all brings features back. So no
    device ever holds the whole table, or all features of all devices' tokens, as XLA by itself sometimes would.
    """
    if not (axes := free()):
        return lookup(table, tokens)
    words, features = splitting(table.shape[0], TENSOR), splitting(table.shape[1], *PARAMETERS)

    def local(table: Array, tokens: Array) -> Array:
        tokens = jax.lax.all_gather(tokens, features) if features else tokens[None]
        tokens -= jax.lax.axis_index(TENSOR) * len(table) if words else 0
        here = (tokens >= 0) & (tokens < len(table))
        rows = jnp.where(here[..., None], lookup(table, jnp.where(here, tokens, 0)), 0)
        rows = jax.lax.psum(rows, words)
        return jax.lax.all_to_all(rows, features, 0, 3, tiled=True)[0] if features else rows[0]

    spec = tokens_spec(tokens.shape)
    return jax.shard_map(
        local, axis_names=set(axes), in_specs=(P(words, features), spec), out_specs=spec, check_vma=False
    )(table, tokens)
