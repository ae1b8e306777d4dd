"""Mixtures of experts: dispatches tokens to their experts, combines the outputs, and sums up what routers chose.

No token is dropped. Each family computes itself which experts a token goes to, and with what weights.
"""

import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, PRNGKeyArray

import kernels
from kernels import mesh
from kernels.mesh import CONTEXT, EXPERT, FSDP, REPLICA, TENSOR
from kernels.stacked import Stacked, read
from kernels.sums import largest, permuted, scaled
from kernels.top_k.shared import Best, Score, best, scores_of
from zoo.nn.layers import AbstractExpertLinear, ExpertLinear, silu_times


# The rows of an exchange's buffers for each device, over the rows that it is sent if all devices are sent equally many.
FIRST, FURTHER = 1.25, 0.25
LEAST = 128  # rows that buffers have in any case
SCOPE = "further_rounds"  # the `jax.named_scope` of what does not fit the first round

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
    tokens to the devices that have their experts, and another one sends the outputs back. Buffers have room for
    `FIRST` times the mean. No token is dropped: what does not fit is sent in as many further rounds as it takes, in
    buffers of `FURTHER` times the mean. The axis "tensor" splits the features of the hidden layer: each device
    computes a part of every output, and the parts are added last, when there is one row for each token.
    """
    if not (axes := mesh.free()):
        return _dispatch(experts, x, chosen, weights, devices=1)
    batch, devices = tuple(axis for axis in mesh.BATCH if axis in axes), mesh.split(EXPERT)
    shares = math.prod(map(mesh.split, batch))
    # Where there are few sequences. Those that are added go where the last one goes, not all to one expert.
    padding = lambda a, mode="constant": jnp.pad(a, ((0, -len(a) % shares), (0, 0), (0, 0)), mode)
    tokens = P(batch, mesh.splitting(x.shape[1], mesh.CONTEXT))
    expert, hidden = (axis if mesh.split(axis) > 1 else None for axis in (EXPERT, TENSOR))
    arrays, static = eqx.partition(experts, eqx.is_array)
    is_linear = lambda node: isinstance(node, AbstractExpertLinear)
    specs = jax.tree.map(lambda m: m.partition_specs(P(expert, hidden, None)), experts, is_leaf=is_linear)
    specs = eqx.tree_at(down, specs, down(experts).partition_specs(P(expert, None, hidden)))
    specs = eqx.filter(specs, lambda leaf: isinstance(leaf, P))
    if mesh.split(FSDP) > 1 or mesh.split(CONTEXT) > 1:  # they are gathered, which should be one layer's alone
        arrays = jax.tree.map(read, arrays, is_leaf=_is_stacked)
    specs = jax.tree.map(_spec_of, arrays, specs, is_leaf=_is_stacked)
    apart = mesh.split(REPLICA) > 1 and not any(map(_is_stacked, jax.tree.leaves(arrays, is_leaf=_is_stacked)))
    if apart:
        arrays, specs = jax.tree.map(mesh.by_replica, arrays), jax.tree.map(lambda spec: P(REPLICA, *spec), specs)

    def local(arrays: Any, *tokens: Array) -> Array:
        arrays = jax.tree.map(lambda a: a[0], arrays) if apart else arrays
        experts = eqx.combine(arrays, static)
        experts = eqx.tree_at(down, experts, down(experts).part(TENSOR)) if hidden else experts
        return _dispatch(experts, *tokens, devices=devices)[None]

    parts = jax.shard_map(
        local,
        axis_names=set(axes),
        in_specs=(specs, tokens, tokens, tokens),
        out_specs=P(hidden, *tokens),
        check_vma=False,
    )(arrays, padding(x), padding(chosen, "edge"), padding(weights))
    # Added outside of the shard_map, where XLA chooses between an all-reduce and a reduce-scatter.
    return jax.lax.reduce_sum(parts, axes=(0,))[: len(x)]


def with_shared(
    y: Float[Array, "batch seq embed"], shared: Float[Array, "batch seq embed"]
) -> Float[Array, "batch seq embed"]:
    """Adds the outputs of the shared experts to those of the chosen ones, which `dispatch` returns.

    Where a GPU decodes, the kernel that sums up the chosen experts' outputs adds these, and then the residual.
    Otherwise this sum becomes a part of cuBLAS's product for the shared experts, and the residual takes a kernel more.
    """
    return y + kernels.apart(shared)


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
    logits: Float[Array, "batch seq experts"],
    k: int,
    score: Score | None = None,
    *,
    bias: Float[Array, " experts"] | Stacked | None = None,
    groups: int = 1,
    kept: int = 1,
    normalise: float | None = None,
) -> Best:
    """Returns all experts' scores, each token's k experts with the highest ones after theirs; or the experts given.

    See `kernels.top_k` and `given_experts`. Each device chooses for its own tokens, as in `top_k`.
    """
    if (given := _given.get()) is not None:
        return best(scores_of(logits, score), given, normalise)

    def local(logits: Array, bias: Array | Stacked | None) -> Best:
        return kernels.top_k(logits, k, score=score, bias=bias, groups=groups, kept=kept, normalise=normalise)

    if not (axes := mesh.free()):
        return local(logits, bias)
    tokens = mesh.tokens_spec(logits.shape)
    specs = (tokens, P())
    return jax.shard_map(local, axis_names=set(axes), in_specs=specs, out_specs=tokens, check_vma=False)(logits, bias)


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
        return self.down_proj(silu_times(gate, up), sizes)


def _dispatch(experts: Experts, x: Array, chosen: Array, weights: Array, *, devices: int) -> Array:
    """Does what `dispatch` does for one device's tokens; of the experts it has one share of `devices`."""
    rows, chosen, weights = (a.reshape(-1, a.shape[-1]) for a in (x, chosen, weights))
    held = jax.tree.leaves(eqx.filter(experts, eqx.is_array), is_leaf=_is_stacked)[0].shape[0]
    if devices == 1:
        return _sort_and_combine(experts, held, rows, chosen, weights).reshape(x.shape)
    return _across_devices((experts, rows, weights), _Routes.of(chosen, held, devices)).astype(x.dtype).reshape(x.shape)


def _is_stacked(node: Any) -> bool:
    return isinstance(node, Stacked)


def _spec_of(array: Array | Stacked, spec: P) -> P | Stacked:
    """Returns the spec of an array of experts, or of the arrays of a `Stacked`; `spec` is a layer's."""
    if not isinstance(array, Stacked):
        return spec
    return Stacked(P(None, *spec), P(), own=None if array.own is None else spec)


def _sort_and_combine(experts: Experts, count: int, x: Array, chosen: Array, weights: Array) -> Array:
    """Sorts (token, choice) pairs by expert, runs the experts, and sums the weighted outputs of each token."""
    by_expert = kernels.sort_rows(x, chosen, count)
    y, back = experts(by_expert.rows, by_expert.sizes), by_expert.place.reshape(-1)
    y = scaled(y, permuted(weights.reshape(-1), by_expert.order, back[:, None])[:, None])
    y = permuted(y, back, by_expert.order[:, None]).reshape(*chosen.shape, x.shape[-1])
    return jnp.sum(y.astype(jnp.float32), axis=1).astype(x.dtype)


class _Routes(NamedTuple):
    """The ways of one device's (token, choice) pairs to the devices along the axis "expert" that have their experts."""

    order: Int[Array, " pairs"]  # the pairs, sorted by expert, and so by device
    device: Int[Array, "tokens choices"]
    rank: Int[Array, "tokens choices"]  # the place of a pair among the sorted pairs of its device
    sent: Int[Array, "devices experts"]  # pairs for each expert, by the device that has it
    received: Int[Array, "devices experts"]  # pairs for each expert of this device, by the device that they are from

    @classmethod
    def of(cls, chosen: Int[Array, "tokens choices"], held: int, devices: int) -> "_Routes":
        """Computes the routes of pairs to their chosen experts, of which each device has `held`."""
        flat, device = chosen.reshape(-1), chosen // held
        order = jnp.argsort(flat, stable=True)
        sent = jnp.bincount(flat, length=held * devices).astype(jnp.int32).reshape(devices, held)
        rank = jnp.argsort(order).reshape(chosen.shape) - _starts(jnp.sum(sent, axis=1))[device]
        return cls(order, device, rank, sent, jax.lax.all_to_all(sent, EXPERT, 0, 0))

    def rooms(self) -> tuple[int, int]:
        """Returns the rows of the buffers for each device, of the first round and of each further one."""
        pairs, devices = self.order.size, len(self.sent)
        of = lambda share: min(pairs, max(LEAST, math.ceil(share * pairs / devices)))
        return of(FIRST), of(FURTHER)

    def further_rounds(self) -> Int[Array, ""]:
        """Returns how many further rounds the fullest pair of devices needs. All devices of the mesh agree on it."""
        first, further = self.rooms()
        beyond = jnp.maximum(jnp.max(jnp.sum(self.sent, axis=1)) - first, 0)
        return jax.lax.pmax(-(-beyond // further), jax.sharding.get_abstract_mesh().manual_axes)


# What is differentiated: the experts, the tokens, and the weights of the tokens' choices.
_Given = tuple[Experts, Float[Array, "tokens embed"], Float[Array, "tokens choices"]]


def _across_devices(given: _Given, routes: _Routes) -> Float[Array, "tokens embed"]:
    """Computes the weighted sums of the experts' outputs, in float32, where each device has a share of the experts."""
    first, _ = routes.rooms()
    if first == routes.order.size:  # all pairs fit
        return _round(given, routes, 0, first)
    return _rounds(given, routes, routes.further_rounds())


@eqx.filter_custom_vjp
def _rounds(given: _Given, routes: _Routes, further: Int[Array, ""]) -> Float[Array, "tokens embed"]:
    """Sums a first round and `further` ones. The number is known at run time only, which JAX cannot differentiate."""
    return _add_further(given, routes, further, _round(given, routes, 0, routes.rooms()[0]))


@_rounds.def_fwd
def _(perturbed: Any, given: _Given, routes: _Routes, further: Array) -> tuple[Array, Any]:
    y, pull = _differentiated(perturbed, given, routes, 0, routes.rooms()[0])
    return _add_further(given, routes, further, y), pull


@_rounds.def_bwd
def _(pull: Any, d_y: Array, perturbed: Any, given: _Given, routes: _Routes, further: Array) -> Any:
    def add(n: Array, sums: Any) -> Any:
        start, room = _further_round(routes, n)
        return jax.tree.map(jnp.add, sums, _differentiated(perturbed, given, routes, start, room)[1](d_y)[0])

    (sums,) = pull(d_y)
    with jax.named_scope(SCOPE):
        return jax.lax.fori_loop(0, further, add, sums)


def _differentiated(perturbed: Any, given: _Given, routes: _Routes, start: Any, room: int) -> tuple[Array, Any]:
    """Computes a round, and the function that maps its gradient to those of what is differentiated."""
    moving, still = eqx.partition(given, perturbed)
    return jax.vjp(lambda moving: _round(eqx.combine(moving, still), routes, start, room), moving)


def _add_further(given: _Given, routes: _Routes, further: Array, y: Array) -> Array:
    with jax.named_scope(SCOPE):
        return jax.lax.fori_loop(0, further, lambda n, y: y + _round(given, routes, *_further_round(routes, n)), y)


def _further_round(routes: _Routes, n: Array) -> tuple[Array, int]:
    first, room = routes.rooms()
    return first + n * room, room


def _round(given: _Given, routes: _Routes, start: Any, room: int) -> Float[Array, "tokens embed"]:
    """Sums, for each token, the outputs of those of its choices whose ranks are the `room` ones from `start` on.

    Pairs are sent in buffers of `room` rows for each device, and outputs are sent back in the same places.
    """
    experts, x, weights = given
    devices, (tokens, choices), places = len(routes.sent), weights.shape, len(routes.sent) * room
    exchange = lambda a: jax.lax.all_to_all(a.reshape(devices, room, -1), EXPERT, 0, 0).reshape(a.shape)
    # The pair at each place of the buffers, and the place of each pair.
    counts, ranks = jnp.sum(routes.sent, axis=1), start + jnp.arange(room)
    sorted_pair = jnp.take(routes.order, _starts(counts)[:, None] + ranks[None], mode="clip")
    pair = jnp.where(ranks[None] < counts[:, None], sorted_pair, tokens * choices).reshape(-1)
    fits = (routes.rank >= start) & (routes.rank < start + room)
    place = jnp.where(fits, routes.device * room + routes.rank - start, places)
    rows = exchange(permuted(x, pair // choices, place))
    weight = exchange(permuted(weights.reshape(-1), pair, place.reshape(-1, 1)))
    # Each sender's rows are sorted by expert. This brings all rows of an expert together, and outputs back.
    ends = jnp.clip(jnp.cumsum(routes.received, axis=1) - start, 0, room)
    sizes = jnp.diff(ends, axis=1, prepend=0)
    arrived = ends - sizes + room * jnp.arange(devices)[:, None]
    grouped = _starts(sizes.T.reshape(-1)).reshape(-1, devices).T
    there = _moved(places, *(a.T.reshape(-1) for a in (grouped, arrived, sizes)))
    back = _moved(places, *(a.reshape(-1) for a in (arrived, grouped, sizes)))
    y = experts(permuted(rows, there, back[:, None]), jnp.sum(sizes, axis=0))
    y = scaled(y, permuted(weight, there, back[:, None])[:, None])
    y = exchange(permuted(y, back, there[:, None]))
    y = permuted(y, place.reshape(-1), pair[:, None]).reshape(tokens, choices, -1)
    return jnp.sum(y.astype(jnp.float32), axis=1)


def _starts(counts: Int[Array, " runs"]) -> Int[Array, " runs"]:
    """Returns where each run starts if runs of these lengths follow one another."""
    return jnp.cumsum(counts) - counts


def _moved(places: int, to: Array, of: Array, lengths: Array) -> Int[Array, " places"]:
    """Returns the place that the row at each place comes from, or `places`, where runs of rows move to other places.

    Run i has `lengths[i]` rows, from place `of[i]` on, and moves to `to[i]`. The first run moves to place 0, and each
    other one to a place after the run before it.
    """
    here = jnp.arange(places)
    run = jnp.searchsorted(to, here, side="right", method="compare_all") - 1  # one pass, where "scan" is a loop
    within = here - to[run]
    return jnp.where(within < lengths[run], of[run] + within, places)


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
