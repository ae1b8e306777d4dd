"""Compiles the three functions of continuous batching: `prefill`, `insert` and `advance`. `Engine` calls them.

With a draft, `Engine` calls `zoo.generation.speculative.advance` instead of `advance`. Functions that change the state
take all other arrays as one first argument, `inputs`: `donate="all-except-first"` lets XLA reuse the state's memory.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, UInt32

import zoo.nn.cache
from kernels.backends.compile_options import compile_options
from kernels.backends.device import Device, device
from kernels.mesh import BATCH
from zoo.generation.sampling import HostArray, Settings
from zoo.nn.cache import AbstractCache, partition_specs, split_over
from zoo.nn.model import AbstractModel, Images


T = TypeVar("T")


class State(eqx.Module):
    """The arrays that stay on the devices: tokens, caches of model and draft, and the logits of each row's next token.

    Index i of `tokens` holds position i, as in a cache. Rows are longer than their sequences; tokens at later positions
    are never read.
    """

    tokens: Int[Array, "batch seq"]
    caches: tuple[Any, Any]
    logits: Float[Array, "batch vocab"]
    draft_state: Any  # `zoo.generation.speculative.DraftState`; None without a draft, like the second cache


class Rows(eqx.Module):
    """Each row's sequence, as the host knows it. In a free row `left` is 0."""

    positions: Int[HostArray, " batch"]  # the position of the next token
    drawn: Int[HostArray, " batch"]  # the number of tokens drawn so far
    left: Int[HostArray, " batch"]  # the number of tokens that may still be drawn
    keys: UInt32[HostArray, "batch words"]
    settings: Settings


class Drawn(eqx.Module):
    """New tokens: the first `count` of each row are valid, and took `calls` calls of the model."""

    tokens: Int[Array, "batch steps"]
    logprobs: Float[Array, "batch steps"]
    count: Int[Array, " batch"]
    calls: Int[Array, " batch"]

    @classmethod
    def init(cls, batch: int, steps: int) -> "Drawn":
        integers = lambda *shape: jnp.zeros(shape, jnp.int32)
        return cls(integers(batch, steps), jnp.zeros((batch, steps), jnp.float32), integers(batch), integers(batch))


def room(draft: Any, max_tokens: int) -> int:
    """Returns the length of a row: a draft needs `num_draft_tokens` + 1 more positions, for rejected tokens."""
    return max_tokens + (0 if draft is None else draft.num_draft_tokens + 1)


def init_caches(
    model: AbstractModel, draft: Any, batch: int, max_tokens: int, cache_dtype: DTypeLike | None
) -> tuple[Any, Any]:
    """Makes the caches of the model and of the draft (None without a draft)."""
    size = room(draft, max_tokens)
    cache = lambda model: zoo.nn.cache.init_cache(model, batch, size, cache_dtype, widen=size - max_tokens)
    return cache(model), None if draft is None else cache(draft)


def check_rewinds(model: AbstractModel) -> None:
    """Raises a ValueError that names a layer, unless every layer's cache can take back rejected tokens."""
    caches = eqx.filter_eval_shape(lambda model: model.layers.init_cache(1, 2, jnp.float32), model)
    leaves = jax.tree.leaves(caches, is_leaf=lambda node: isinstance(node, AbstractCache))
    for (layers, block), cache in zip(model.layers.blocks(), leaves, strict=True):
        if not cache.rewinds:
            raise ValueError(
                f"Layer {layers[0]} (a {type(block).__name__}) can't take back what it has read, as a draft's rejected "
                "tokens need: generate without a draft."
            )


@eqx.filter_jit
def prefill(
    model: AbstractModel,
    draft: Any,
    prompts: Int[HostArray, "batch seq"],
    lengths: Int[HostArray, " batch"],
    max_tokens: int,
    cache_dtype: DTypeLike | None,
    images: Images | None = None,
) -> State:
    """Prefills right-padded prompts into new caches. Padding gets position -1, which a cache does not store."""
    cache, draft_cache = init_caches(model, draft, len(prompts), max_tokens, cache_dtype)
    indices = jnp.broadcast_to(jnp.arange(prompts.shape[1]), prompts.shape)
    positions = jnp.where(indices < lengths[:, None], indices, -1)
    x, cache, _ = model.hidden(jnp.asarray(prompts), cache, positions=positions, images=images)
    last = jnp.take_along_axis(x, (lengths - 1)[:, None, None], axis=1)
    logits = model.unembed(last)[:, 0].astype(jnp.float32)
    draft_state, draft_cache = (None, None) if draft is None else draft.prefill(x, prompts, lengths, draft_cache)
    tokens = jnp.pad(prompts, ((0, 0), (0, room(draft, max_tokens) - prompts.shape[1])))
    return State(tokens, (cache, draft_cache), logits, draft_state)


@eqx.filter_jit
def init_state(
    model: AbstractModel, draft: Any, batch: int, max_tokens: int, cache_dtype: DTypeLike | None, mesh: Any
) -> State:
    """Makes the state of a batch of free rows. On a mesh, rows and heads are split like those of activations."""

    def placed(x: Array, *axes: Any) -> Array:
        return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    caches = init_caches(model, draft, batch, max_tokens, cache_dtype)
    rows: Any = ()
    if mesh is not None:
        specs = partition_specs(caches, mesh.shape)
        caches = jax.tree.map(lambda x, spec: placed(x, *spec), caches, specs)
        rows = split_over(batch, BATCH, mesh.shape)
    draft_state = None if draft is None else draft.init_state(batch)
    tokens = jnp.zeros((batch, room(draft, max_tokens)), jnp.int32)
    logits = jnp.zeros((batch, model.config.vocab_size), jnp.float32)
    tokens, logits, draft_state = jax.tree.map(lambda x: placed(x, rows), (tokens, logits, draft_state))
    return State(tokens, caches, logits, draft_state)


@eqx.filter_jit(donate="all-except-first")
def insert(inputs: tuple[State, Int[HostArray, "batch 2"], Int[HostArray, ""]], state: State) -> State:
    """Copies rows of another state into `state`. `inputs`: the other state, pairs (row there, row here), their count.

    A cache's row is copied whole. Entries that the new prompt has not written are at later positions than the sequence
    has reached, so causality hides them.
    """
    new, pairs, count = inputs

    def copy(n: Array, state: State) -> State:
        source, target = pairs[n]
        cached = lambda old, new: old.at[:, target].set(new[:, source]) if old.ndim else old
        row = lambda old, new: old.at[target].set(new[source])
        rest = lambda state: (state.tokens, state.logits, state.draft_state)
        tokens, logits, draft_state = jax.tree.map(row, rest(state), rest(new))
        return State(tokens, jax.tree.map(cached, state.caches, new.caches), logits, draft_state)

    return jax.lax.fori_loop(0, count, copy, state)


def compiled(function: Callable[..., T]) -> Callable[..., T]:
    """Compiles a function like `eqx.filter_jit`, with XLA's options for decoding. The first argument is not donated."""

    @functools.cache
    def with_options(_: Device) -> Callable[..., T]:
        options: dict[str, Any] = {"compiler_options": compile_options("decode")}
        return eqx.filter_jit(function, donate="all-except-first", **options)

    return functools.wraps(function)(lambda *args: with_options(device())(*args))


@compiled
def advance(
    inputs: tuple[AbstractModel, Int[HostArray, " stops"], Rows], state: State, steps: int, enough: Int[HostArray, ""]
) -> tuple[State, Drawn]:
    """Decodes up to `steps` tokens in each row, and stops early once at most `enough` rows have more to draw."""
    model, stops, rows = inputs
    batch, keys = len(rows.left), jax.random.wrap_key_data(jnp.asarray(rows.keys))

    def unfinished(carry: Any) -> Array:
        n, left, _, _ = carry
        return (n < steps) & (jnp.sum(left > 0) > enough)

    def body(carry: Any) -> Any:
        n, left, state, drawn = carry
        live, (cache, _) = left > 0, state.caches
        at = jnp.where(live, rows.positions + n, -1)  # rows that have ended are padding
        logits = rows.settings.penalized(state.logits, state.tokens, rows.positions - rows.drawn, at)
        token = rows.settings.draw(logits, jax.vmap(jax.random.fold_in)(keys, rows.drawn + n))
        tokens = write(state.tokens, token[:, None], at[:, None])
        put = lambda old, new: jax.lax.dynamic_update_slice(old, new[:, None], (0, n))
        new = Drawn(
            put(drawn.tokens, token),
            put(drawn.logprobs, logprob(rows.settings.scaled(state.logits), token)),
            drawn.count + live.astype(jnp.int32),
            drawn.calls + live.astype(jnp.int32),
        )
        left = jnp.where(jnp.any(token[:, None] == stops[None], axis=-1), 0, jnp.maximum(left - 1, 0))
        logits, cache = model.decode(token[:, None], cache, positions=at[:, None])
        return n + 1, left, State(tokens, (cache, None), logits[:, 0].astype(jnp.float32), None), new

    start = (jnp.array(0), rows.left, state, Drawn.init(batch, steps))
    _, _, state, drawn = jax.lax.while_loop(unfinished, body, start)
    return state, drawn


def write(
    tokens: Int[Array, "batch seq"], new: Int[Array, "batch new"], positions: Int[Array, "batch new"]
) -> Int[Array, "batch seq"]:
    """Writes new tokens at their positions. Tokens at negative positions are padding, and are not written."""
    at = jnp.where(positions < 0, tokens.shape[1], positions)
    return tokens.at[jnp.arange(len(tokens))[:, None], at].set(new)


def logprob(scaled: Float[Array, "*batch vocab"], token: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Computes the log-probability of each token under softmax(scaled)."""
    chosen = jnp.take_along_axis(scaled, token[..., None], axis=-1)[..., 0]
    return chosen - jax.nn.logsumexp(scaled, axis=-1)
