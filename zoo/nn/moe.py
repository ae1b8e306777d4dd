"""Mixtures of experts: tokens to their experts and back, without dropping any, and what routers did, for the losses.

Which experts a token goes to, and with what weight, is each family's own few lines.
"""

import math
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from kernels import mesh
from kernels.device import device
from kernels.mesh import EXPERT
from kernels.sums import largest, permuted, scaled


# Experts as one map of rows that are sorted by expert, given how many rows each expert has.
Experts = Callable[[Float[Array, "rows embed"], Int[Array, " experts"]], Float[Array, "rows embed"]]


def mix(
    experts: Experts,
    x: Float[Array, "batch seq embed"],
    chosen: Int[Array, "batch seq choices"],
    weights: Float[Array, "batch seq choices"],
) -> Float[Array, "batch seq embed"]:
    """For each token the sum, in float32, over its choices: the weight times what that expert makes of the token.

    `experts` is a module whose arrays have an axis of experts in front.

    Under a mesh each device sorts its own tokens. Where the mesh splits the experts over the axis "expert", tokens
    travel to the devices that have theirs, and back. All tokens may want the same device, and none is dropped: so they
    go in as many parts as there are devices along that axis, and no part needs more room than the tokens of a device.
    XLA alone splits what is within an expert over "tensor".
    """
    axes = {axis for axis, size in mesh.free().items() if axis != mesh.TENSOR or size == 1}
    if not axes:
        return _mix(experts, x, chosen, weights, devices=1)
    batch, devices = tuple(axis for axis in mesh.BATCH if axis in axes), mesh.split(EXPERT)
    shares = math.prod(map(mesh.split, batch))
    padding = lambda a: jnp.pad(a, ((0, -len(a) % shares), (0, 0), (0, 0)))  # a decode may have few sequences
    tokens = P(batch, mesh.splitting(x.shape[1], mesh.CONTEXT))
    arrays, static = eqx.partition(experts, eqx.is_array)
    y = jax.shard_map(
        lambda arrays, *tokens: _mix(eqx.combine(arrays, static), *tokens, devices=devices),
        axis_names=axes,
        in_specs=(P(EXPERT if devices > 1 else None), tokens, tokens, tokens),
        out_specs=tokens,
        check_vma=False,
    )(arrays, padding(x), padding(chosen), padding(weights))
    return y[: len(x)]


def top_k(
    scores: Float[Array, "batch seq *groups options"], k: int
) -> tuple[Float[Array, "batch seq *groups k"], Int[Array, "batch seq *groups k"]]:
    """`jax.lax.top_k`, by each device for its own tokens: XLA would gather all of them for it."""

    def local(scores: Array) -> tuple[Array, Array]:
        return largest(scores, k)

    if not (axes := mesh.free()):
        return local(scores)
    tokens = mesh.tokens_spec(scores.shape)
    return jax.shard_map(local, axis_names=set(axes), in_specs=tokens, out_specs=tokens, check_vma=False)(scores)


def _mix(experts: Experts, x: Array, chosen: Array, weights: Array, *, devices: int) -> Array:
    """`mix` of one device's tokens, with `experts` its share of them along an axis of so many devices."""
    flat = [a.reshape(-1, a.shape[-1]) for a in (x, chosen, weights)]
    held = jax.tree.leaves(eqx.filter(experts, eqx.is_array))[0].shape[0]
    if devices == 1:
        return _sum_of_choices(experts, held, *flat).reshape(x.shape)
    tokens = len(flat[0])
    parts = [jnp.pad(a, ((0, -tokens % devices), (0, 0))).reshape(devices, -1, a.shape[-1]) for a in flat]
    away = lambda rows, sizes: _elsewhere(experts, rows, sizes, devices)
    # Computed again in the backward pass, or the rooms of all parts would be kept for it.
    part = jax.checkpoint(lambda part: _sum_of_choices(away, held * devices, *part), prevent_cse=False)
    return jax.lax.map(part, parts).reshape(-1, x.shape[-1])[:tokens].reshape(x.shape)


def _sum_of_choices(experts: Experts, count: int, x: Array, chosen: Array, weights: Array) -> Array:
    """One row for each (token, choice), sorted by the expert that was chosen; and back, token by token."""
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    row = jnp.argsort(order)  # of each choice
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    y = experts(permuted(x, order // chosen.shape[1], row.reshape(chosen.shape)), sizes)
    y = scaled(y, permuted(weights.reshape(-1), order, row[:, None])[:, None])
    y = permuted(y, row, order[:, None]).reshape(*chosen.shape, x.shape[-1])
    return jnp.sum(y.astype(jnp.float32), axis=1).astype(x.dtype)


def _elsewhere(experts: Experts, rows: Array, sizes: Array, devices: int) -> Array:
    """`experts(rows, sizes)`, where each device along the axis "expert" has a share of the experts."""
    room = len(rows)
    sent = sizes.reshape(devices, -1).astype(jnp.int32)  # rows of each expert, by the device that has it
    received = jax.lax.all_to_all(sent, EXPERT, 0, 0)  # rows of each expert of this device, by the device they are from
    arrived = _send(rows, sent, received)
    # Each device's rows come sorted by expert, in a room of their own. Those of one expert go together.
    ends = jnp.cumsum(received, axis=1)
    of = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(room), side="right"))(ends).reshape(-1)
    order = jnp.argsort(of, stable=True)  # what is no row is of no expert, and comes last
    place = jnp.argsort(order)
    y = experts(permuted(arrived, order, place[:, None]), jnp.sum(received, axis=0))
    return _send_back(permuted(y, place, order[:, None]), sent, received)


def _send(rows: Array, sent: Array, received: Array) -> Array:
    """Each device's rows to where they are wanted, there in a room for each device they are from: [devices * room]."""
    counts, room = jnp.sum(sent, axis=1), len(rows)
    starts = jnp.cumsum(counts) - counts
    if _ragged():
        out = jnp.zeros((len(sent) * room, rows.shape[1]), rows.dtype)
        there = jnp.full(len(sent), jax.lax.axis_index(EXPERT) * room, jnp.int32)
        return jax.lax.ragged_all_to_all(rows, out, starts, counts, there, jnp.sum(received, axis=1), axis_name=EXPERT)
    row, place = _in_rooms(counts, room)
    rooms = permuted(rows, row, place[:, None]).reshape(len(sent), room, -1)
    return jax.lax.all_to_all(rooms, EXPERT, 0, 0).reshape(-1, rows.shape[1])


def _send_back(y: Array, sent: Array, received: Array) -> Array:
    """The inverse of `_send`."""
    counts, room = jnp.sum(sent, axis=1), len(y) // len(sent)
    starts = jnp.cumsum(counts) - counts
    if _ragged():
        here = jnp.arange(len(sent), dtype=jnp.int32) * room
        there = jax.lax.all_to_all(starts, EXPERT, 0, 0, tiled=True)
        out = jnp.zeros((room, y.shape[1]), y.dtype)
        return jax.lax.ragged_all_to_all(y, out, here, jnp.sum(received, axis=1), there, counts, axis_name=EXPERT)
    rooms = jax.lax.all_to_all(y.reshape(len(sent), room, -1), EXPERT, 0, 0)
    row, place = _in_rooms(counts, room)
    return permuted(rooms.reshape(y.shape), place, row[:, None])


def _in_rooms(counts: Array, room: int) -> tuple[Int[Array, " places"], Int[Array, " rows"]]:
    """Where `counts` rows go to each device, a room each: each place's row (`room`: none), each row's place."""
    starts, within = jnp.cumsum(counts) - counts, jnp.arange(room)
    row = jnp.where(within[None] < counts[:, None], starts[:, None] + within[None], room)
    device = jnp.searchsorted(jnp.cumsum(counts), within, side="right")
    return row.reshape(-1), device * room + within - starts[device]


def _ragged() -> bool:
    """Whether only rows need to travel. XLA has no such operation on a CPU, where the rooms do, full or not."""
    return device().platform != "cpu"


class Routing(eqx.Module):
    """What one router did with the tokens that count, or those of a stack of layers: sums over the tokens."""

    tokens: Float[Array, "*layers"]
    load: Float[Array, "*layers experts"]  # tokens that chose each expert
    probability: Float[Array, "*layers experts"]  # what each token gives to each expert, chosen or not; 1 in all
    squared_log_z: Float[Array, "*layers"]  # log of the sum of the exponentials of a token's logits, squared

    @classmethod
    def of(
        cls,
        logits: Float[Array, "batch seq experts"],
        probability: Float[Array, "batch seq experts"],
        chosen: Int[Array, "batch seq choices"],
        segments: Int[Array, "batch seq"] | None,
    ) -> "Routing":
        """Tokens whose segment is 0 are padding, and do not count."""
        counted = jnp.ones(logits.shape[:2]) if segments is None else (segments != 0).astype(jnp.float32)
        # Sums of comparisons, not a scatter, for which tokens that are split over devices would be gathered.
        load = jnp.sum(jax.nn.one_hot(chosen, logits.shape[-1]) * counted[..., None, None], axis=(0, 1, 2))
        squared_log_z = jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))
        return cls(
            jnp.sum(counted),
            load,
            jnp.einsum("bs,bse->e", counted, probability.astype(jnp.float32)),
            jnp.sum(counted * squared_log_z),
        )

    def share_of(self, tokens: Int[Array, ""], load: Float[Array, "*layers experts"] | None) -> "Routing":
        """These tokens as a part of so many, of whose choices each expert had such a `load` (None: of these alone).

        The losses of all parts, each as its share of the whole, add up to those of the whole; so do their gradients.
        """
        tokens = jnp.broadcast_to(tokens.astype(self.tokens.dtype), self.tokens.shape)
        return Routing(tokens, self.load if load is None else load, self.probability, self.squared_log_z)

    def imbalance(self) -> Float[Array, "*layers"]:
        """The number of experts times the sum, over them, of the share of the choices and of the mean probability.

        1 where all is even. Only the probability has a gradient.
        """
        share = self.load / jnp.maximum(jnp.sum(self.load, axis=-1, keepdims=True), 1)
        mean = self.probability / jnp.maximum(self.tokens, 1)[..., None]
        return self.load.shape[-1] * jnp.sum(share * mean, axis=-1)

    def balance_loss(self) -> Float[Array, "*layers"]:
        """The load-balancing loss of Switch Transformers (arXiv:2101.03961, section 2.2), as transformers has it for
        several choices: `imbalance` times the number of experts that a token chooses."""
        return self.imbalance() * jnp.sum(self.load, axis=-1) / jnp.maximum(self.tokens, 1)

    def z_loss(self) -> Float[Array, "*layers"]:
        """The router z-loss of ST-MoE (arXiv:2202.08906, section 4): the mean of the squared log of Z."""
        return self.squared_log_z / jnp.maximum(self.tokens, 1)
