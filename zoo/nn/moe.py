"""Mixtures of experts: dispatches tokens to their experts, combines the outputs, and sums up what routers chose.

No token is dropped. Each family computes itself which experts a token goes to, and with what weights.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import mesh
from kernels.backends.device import device
from kernels.mesh import CONTEXT, EXPERT, FSDP, TENSOR
from kernels.stacked import Stacked, read
from kernels.sums import largest, permuted, pick, scaled
from zoo.nn.layers import AbstractExpertLinear, ExpertLinear, swiglu


# `experts(rows, sizes)` maps rows that are sorted by expert, of which each expert has so many.
Experts = Callable[[Float[Array, "rows embed"], Int[Array, " experts"]], Float[Array, "rows embed"]]


def dispatch(
    experts: Experts,
    x: Float[Array, "batch seq embed"],
    chosen: Int[Array, "batch seq choices"],
    weights: Float[Array, "batch seq choices"],
    down: Callable[[Any], AbstractExpertLinear],
) -> Float[Array, "batch seq embed"]:
    """Dispatches tokens to their experts, and combines the outputs: for each token their weighted sum, in float32.

    `experts` is a module of `AbstractExpertLinear`s. `down` selects the one that maps the hidden layer to the outputs;
    all others map to the hidden layer.

    Under a mesh each device sorts its own tokens. Where the axis "expert" splits the experts, an all-to-all sends
    tokens to the devices that have their experts, and another one sends the outputs back. No token is dropped, so one
    device may be sent all of them. To bound its buffers they are sent in as many chunks as the axis has devices: a
    chunk needs room for one device's tokens. The axis "tensor" splits the features of the hidden layer: each device
    computes a part of every output, and the parts are added last, when there is one row for each token.
    """
    if not (axes := mesh.free()):
        return _dispatch(experts, x, chosen, weights, devices=1)
    batch, devices = tuple(axis for axis in mesh.BATCH if axis in axes), mesh.split(EXPERT)
    shares = math.prod(map(mesh.split, batch))
    padding = lambda a: jnp.pad(a, ((0, -len(a) % shares), (0, 0), (0, 0)))  # where decoding has few sequences
    tokens = P(batch, mesh.splitting(x.shape[1], mesh.CONTEXT))
    expert, hidden = (axis if mesh.split(axis) > 1 else None for axis in (EXPERT, TENSOR))
    arrays, static = eqx.partition(experts, eqx.is_array)
    is_linear = lambda node: isinstance(node, AbstractExpertLinear)
    specs = jax.tree.map(lambda m: m.partition_specs(P(expert, hidden, None)), experts, is_leaf=is_linear)
    specs = eqx.tree_at(down, specs, down(experts).partition_specs(P(expert, None, hidden)))
    specs = eqx.filter(specs, lambda leaf: isinstance(leaf, P))
    if mesh.split(FSDP) > 1 or mesh.split(CONTEXT) > 1:  # they are gathered, which should be one layer's alone
        arrays = jax.tree.map(read, arrays, is_leaf=_is_stacked)
    of_stack = lambda array, spec: Stacked(P(None, *spec), P()) if _is_stacked(array) else spec
    specs = jax.tree.map(of_stack, arrays, specs, is_leaf=_is_stacked)

    def local(arrays: Any, *tokens: Array) -> Array:
        experts = eqx.combine(arrays, static)
        experts = eqx.tree_at(down, experts, down(experts).part(TENSOR)) if hidden else experts
        return _dispatch(experts, *tokens, devices=devices)[None]

    parts = jax.shard_map(
        local,
        axis_names=set(axes),
        in_specs=(specs, tokens, tokens, tokens),
        out_specs=P(hidden, *tokens),
        check_vma=False,
    )(arrays, padding(x), padding(chosen), padding(weights))
    # Added outside of the shard_map, where XLA chooses between an all-reduce and a reduce-scatter.
    return jax.lax.reduce_sum(parts, axes=(0,))[: len(x)]


def top_k(
    scores: Float[Array, "batch seq *groups options"], k: int
) -> tuple[Float[Array, "batch seq *groups k"], Int[Array, "batch seq *groups k"]]:
    """Runs `jax.lax.top_k` on each device for its own tokens: XLA would gather all tokens first."""

    def local(scores: Array) -> tuple[Array, Array]:
        return largest(scores, k)

    if not (axes := mesh.free()):
        return local(scores)
    tokens = mesh.tokens_spec(scores.shape)
    return jax.shard_map(local, axis_names=set(axes), in_specs=tokens, out_specs=tokens, check_vma=False)(scores)


_given: contextvars.ContextVar[Array | None] = contextvars.ContextVar("given", default=None)


@contextlib.contextmanager
def given_experts(chosen: Int[Array, "batch seq choices"]) -> Iterator[None]:
    """Has routers choose these experts, whatever their scores are, in functions that are traced within this context."""
    token = _given.set(chosen)
    try:
        yield
    finally:
        _given.reset(token)


def choose(
    scores: Float[Array, "batch seq experts"], k: int
) -> tuple[Float[Array, "batch seq k"], Int[Array, "batch seq k"]]:
    """Returns each token's k experts with the highest scores, after their scores; or the experts that are given.

    See `given_experts`.
    """
    given = _given.get()
    return top_k(scores, k) if given is None else (pick(scores, given), given)


def split_gate_up(y: Float[Array, "rows both"]) -> tuple[Float[Array, "rows half"], Float[Array, "rows half"]]:
    """Splits the features in two halves; under "tensor", where a device has neighbours, into its part of each.

    Of n devices the i-th has the parts 2i and 2i + 1 of 2n, the first n of which are the first half. It sends one of
    them to the device that needs it of the first half and is even, or of the second and is odd; then the other one.
    """
    first, second = jnp.split(y, 2, axis=-1)
    if (devices := mesh.manual(mesh.TENSOR)) == 1:
        return first, second
    device, received = jax.lax.axis_index(mesh.TENSOR), []
    for odd in (0, 1):
        sent = [p for p in range(2 * devices) if (p % devices + p // devices) % 2 == odd]
        sends_second = jnp.asarray([p % 2 == 1 for p in sent])[device]
        pairs = [(p // 2, p % devices) for p in sent]
        received.append(jax.lax.ppermute(jnp.where(sends_second, second, first), mesh.TENSOR, pairs))
    return tuple(jnp.where(device % 2 == half, *received) for half in (0, 1))


class GatedExperts(eqx.Module):
    """A gated MLP for each expert, `down_proj(silu(gate) * up)`, whose gate and up are halves of one matrix."""

    gate_up_proj: AbstractExpertLinear  # rows: first all of gate, then all of up
    down_proj: AbstractExpertLinear

    def __init__(self, experts: int, hidden: int, width: int, *, key: PRNGKeyArray):
        gate_up, down = jax.random.split(key)
        self.gate_up_proj = ExpertLinear(experts, hidden, 2 * width, key=gate_up)
        self.down_proj = ExpertLinear(experts, width, hidden, key=down)

    def __call__(self, x: Float[Array, "rows embed"], sizes: Int[Array, " experts"]) -> Float[Array, "rows embed"]:
        gate, up = split_gate_up(self.gate_up_proj(x, sizes))
        return self.down_proj(swiglu(gate, up), sizes)


def _dispatch(experts: Experts, x: Array, chosen: Array, weights: Array, *, devices: int) -> Array:
    """Does what `dispatch` does for one device's tokens; of the experts it has one share of `devices`."""
    flat = [a.reshape(-1, a.shape[-1]) for a in (x, chosen, weights)]
    held = jax.tree.leaves(eqx.filter(experts, eqx.is_array), is_leaf=_is_stacked)[0].shape[0]
    if devices == 1:
        return _sort_and_combine(experts, held, *flat).reshape(x.shape)
    tokens = len(flat[0])
    parts = [jnp.pad(a, ((0, -tokens % devices), (0, 0))).reshape(devices, -1, a.shape[-1]) for a in flat]
    remote = lambda rows, sizes: _across_devices(experts, rows, sizes, devices)
    # Recomputed in the backward pass, which would otherwise keep the buffers of all chunks.
    part = jax.checkpoint(lambda part: _sort_and_combine(remote, held * devices, *part), prevent_cse=False)
    return jax.lax.map(part, parts).reshape(-1, x.shape[-1])[:tokens].reshape(x.shape)


def _is_stacked(node: Any) -> bool:
    return isinstance(node, Stacked)


def _sort_and_combine(experts: Experts, count: int, x: Array, chosen: Array, weights: Array) -> Array:
    """Sorts (token, choice) pairs by expert, runs the experts, and sums the weighted outputs of each token."""
    order = jnp.argsort(chosen.reshape(-1), stable=True)
    row = jnp.argsort(order)  # of each choice
    sizes = jnp.bincount(chosen.reshape(-1), length=count)
    y = experts(permuted(x, order // chosen.shape[1], row.reshape(chosen.shape)), sizes)
    y = scaled(y, permuted(weights.reshape(-1), order, row[:, None])[:, None])
    y = permuted(y, row, order[:, None]).reshape(*chosen.shape, x.shape[-1])
    return kernels.total(y.astype(jnp.float32), axis=1)[:, 0].astype(x.dtype)


def _across_devices(experts: Experts, rows: Array, sizes: Array, devices: int) -> Array:
    """Computes `experts(rows, sizes)` where each device along the axis "expert" has a share of the experts."""
    capacity = len(rows)
    sent = sizes.reshape(devices, -1).astype(jnp.int32)  # rows of each expert, by the device that has it
    received = jax.lax.all_to_all(sent, EXPERT, 0, 0)  # rows of each expert of this device, by the device they are from
    arrived = _send(rows, sent, received)
    # Rows arrive sorted by expert in a buffer for each sender. This brings all rows of an expert together.
    ends = jnp.cumsum(received, axis=1)
    of = jax.vmap(lambda ends: jnp.searchsorted(ends, jnp.arange(capacity), side="right"))(ends).reshape(-1)
    order = jnp.argsort(of, stable=True)  # the unused ends of buffers are of no expert, and come last
    place = jnp.argsort(order)
    y = experts(permuted(arrived, order, place[:, None]), jnp.sum(received, axis=0))
    return _send_back(permuted(y, place, order[:, None]), sent, received)


def _send(rows: Array, sent: Array, received: Array) -> Array:
    """Sends rows to the devices of their experts, which have a buffer of `capacity` rows for each sender."""
    counts, capacity = jnp.sum(sent, axis=1), len(rows)
    starts = jnp.cumsum(counts) - counts
    if _ragged():
        out = jnp.zeros((len(sent) * capacity, rows.shape[1]), rows.dtype)
        there = jnp.full(len(sent), jax.lax.axis_index(EXPERT) * capacity, jnp.int32)
        return jax.lax.ragged_all_to_all(rows, out, starts, counts, there, jnp.sum(received, axis=1), axis_name=EXPERT)
    row, place = _in_buffers(counts, capacity)
    buffers = permuted(rows, row, place[:, None]).reshape(len(sent), capacity, -1)
    return jax.lax.all_to_all(buffers, EXPERT, 0, 0).reshape(-1, rows.shape[1])


def _send_back(y: Array, sent: Array, received: Array) -> Array:
    """Sends rows back: the inverse of `_send`."""
    counts, capacity = jnp.sum(sent, axis=1), len(y) // len(sent)
    starts = jnp.cumsum(counts) - counts
    if _ragged():
        here = jnp.arange(len(sent), dtype=jnp.int32) * capacity
        there = jax.lax.all_to_all(starts, EXPERT, 0, 0, tiled=True)
        out = jnp.zeros((capacity, y.shape[1]), y.dtype)
        return jax.lax.ragged_all_to_all(y, out, here, jnp.sum(received, axis=1), there, counts, axis_name=EXPERT)
    buffers = jax.lax.all_to_all(y.reshape(len(sent), capacity, -1), EXPERT, 0, 0)
    row, place = _in_buffers(counts, capacity)
    return permuted(buffers.reshape(y.shape), place, row[:, None])


def _in_buffers(counts: Array, capacity: int) -> tuple[Int[Array, " places"], Int[Array, " rows"]]:
    """Lays out `counts` rows for each device in buffers of `capacity` rows each.

    Returns the row at each place (`capacity` where there is none), and the place of each row.
    """
    starts, within = jnp.cumsum(counts) - counts, jnp.arange(capacity)
    row = jnp.where(within[None] < counts[:, None], starts[:, None] + within[None], capacity)
    device = jnp.searchsorted(jnp.cumsum(counts), within, side="right")
    return row.reshape(-1), device * capacity + within - starts[device]


def _ragged() -> bool:
    """Whether XLA can send rows alone (`ragged_all_to_all`). On CPUs it cannot: whole buffers are sent, full or not."""
    return device().platform != "cpu"


_each_token: contextvars.ContextVar[bool] = contextvars.ContextVar("each_token", default=False)


@contextlib.contextmanager
def choices_of_each_token() -> Iterator[None]:
    """Has routers report each token's experts (`Routing.chosen`), in functions that are traced within this context."""
    token = _each_token.set(True)
    try:
        yield
    finally:
        _each_token.reset(token)


class Routing(eqx.Module):
    """The choices of one router, or of a stack of layers: sums over the tokens that are not padding."""

    tokens: Float[Array, "*layers"]
    load: Float[Array, "*layers experts"]  # how many tokens chose each expert
    probability: Float[Array, "*layers experts"]  # of each expert, chosen or not; a token's add up to 1
    squared_log_z: Float[Array, "*layers"]  # the square of a token's logsumexp(logits)
    imbalance_of_rows: Float[Array, "*layers"]  # of each row by itself, as `imbalance`, times the row's tokens
    chosen: Int[Array, "*layers batch seq choices"] | None = None  # of each token: see `choices_of_each_token`

    @classmethod
    def of(
        cls,
        logits: Float[Array, "batch seq experts"],
        probability: Float[Array, "batch seq experts"],
        chosen: Int[Array, "batch seq choices"],
        segments: Int[Array, "batch seq"] | None,
    ) -> "Routing":
        """Sums over all tokens but padding, whose segment is 0."""
        counted = jnp.ones(logits.shape[:2]) if segments is None else (segments != 0).astype(jnp.float32)
        # Sums of one-hot vectors: for a scatter XLA would gather tokens that are split over devices.
        load = jnp.sum(jax.nn.one_hot(chosen, logits.shape[-1]) * counted[..., None, None], axis=(1, 2))  # of each row
        tokens = jnp.maximum(jnp.sum(counted, axis=1, keepdims=True), 1)
        mean = jnp.einsum("bs,bse->be", counted, probability.astype(jnp.float32)) / tokens
        squared_log_z = jnp.square(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))
        return cls(
            jnp.sum(counted),
            jnp.sum(load, axis=0),
            jnp.einsum("bs,bse->e", counted, probability.astype(jnp.float32)),
            jnp.sum(counted * squared_log_z),
            logits.shape[-1] * jnp.sum(load / chosen.shape[-1] * mean),
            chosen if _each_token.get() else None,
        )

    def share_of(self, tokens: Int[Array, ""], load: Float[Array, "*layers experts"] | None) -> "Routing":
        """Makes this one part of a batch of `tokens` tokens; `load` is that of the whole batch, or None for its own.

        So the losses of all parts add up to the loss of the whole batch, and so do their gradients.
        """
        tokens = jnp.broadcast_to(tokens.astype(self.tokens.dtype), self.tokens.shape)
        load = self.load if load is None else load
        return Routing(tokens, load, self.probability, self.squared_log_z, self.imbalance_of_rows)

    def imbalance(self) -> Float[Array, "*layers"]:
        """Computes experts * sum(share of the choices * mean probability), summed over the experts.

        It is 1 where both are even. Only the probability has a gradient.
        """
        share = self.load / jnp.maximum(jnp.sum(self.load, axis=-1, keepdims=True), 1)
        mean = self.probability / jnp.maximum(self.tokens, 1)[..., None]
        return self.load.shape[-1] * jnp.sum(share * mean, axis=-1)

    def balance_loss(self) -> Float[Array, "*layers"]:
        """The load-balancing loss of Switch Transformers (arXiv:2101.03961, section 2.2), as transformers has it for
        several choices: `imbalance` times the number of experts that a token chooses."""
        return self.imbalance() * jnp.sum(self.load, axis=-1) / jnp.maximum(self.tokens, 1)

    def sequence_loss(self) -> Float[Array, "*layers"]:
        """The sequence-wise balance loss of DeepSeek V3 (arXiv:2412.19437, equations 17 to 20), a row being a sequence.

        It is the mean of the rows' `imbalance`, each weighted by the row's tokens.
        """
        return self.imbalance_of_rows / jnp.maximum(self.tokens, 1)

    def z_loss(self) -> Float[Array, "*layers"]:
        """The router z-loss of ST-MoE (arXiv:2202.08906, section 4): the mean of the squared log of Z."""
        return self.squared_log_z / jnp.maximum(self.tokens, 1)
