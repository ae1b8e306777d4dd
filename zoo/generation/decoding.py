"""Compiles the functions of continuous batching, which `Engine` calls: `read` and `advance`, which run the model, and
`take`, `put` and `copy`, by which rows go on from what was read before.

With a draft, `Engine` calls `zoo.generation.speculative.advance` instead of `advance`. Functions that change the state
take all other arrays as one first argument, `inputs`, since XLA reuses the memory of the second (`compiled`).
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, UInt32

import zoo.nn.cache
from kernels.backends.compile_options import compile_options
from kernels.backends.device import Device, device
from kernels.mesh import BATCH
from zoo.generation.pages import Layout
from zoo.generation.sampling import Settings
from zoo.generation.shapes import bucket
from zoo.nn import rows
from zoo.nn.cache import AbstractCache, partition_specs, split_over
from zoo.nn.model import AbstractModel, Images
from zoo.nn.moe import choices_of_each_token
from zoo.nn.programs import in_programs
from zoo.nn.routing import experts_of
from zoo.nn.rows import HostArray
from zoo.nn.scan import is_apart


AT_ONCE = 8  # most rows that read together
CHUNK = 512  # most tokens that a row reads at a time
PAGE = 64  # positions of a page
TPU_PAGE = 128  # on TPUs, which store heads of 64 features and latents by columns of so many positions
T = TypeVar("T")

Record = Literal["experts", "hidden"]
Records = dict[Record, Array]
"""A record of some tokens: experts [batch, seq, layers, choices], features [batch, seq, embed]."""


class Progress(eqx.Module):
    """How far each row's sequence has come. In a free row `left` is 0."""

    positions: Int[HostArray, " batch"]  # the position of the next token
    drawn: Int[HostArray, " batch"]  # the number of tokens drawn so far
    left: Int[HostArray, " batch"]  # the number of tokens that may still be drawn

    def after(self, count: Int[Array, " batch"], left: Int[Array, " batch"]) -> "Progress":
        """Returns the progress after `count` more tokens, with so many `left`."""
        return Progress(self.positions + count, self.drawn + count, left)


class State(eqx.Module):
    """The arrays that stay on the devices: tokens, caches of model and draft, and the logits of each row's next token.

    Index i of `tokens` holds position i, as in a cache. Rows are longer than their sequences; tokens at later positions
    are never read.
    """

    tokens: Int[Array, "batch seq"]
    caches: tuple[Any, Any]
    logits: Float[Array, "batch vocab"]
    draft_state: Any  # `zoo.generation.speculative.DraftState`; None without a draft, like the second cache
    progress: Progress


class Rows(eqx.Module):
    """Each row's sequence, as the host knows it."""

    progress: Progress
    ahead: Bool[HostArray, " batch"]  # whether the state's progress counts, as a step is on its way in this row
    keys: UInt32[HostArray, "batch words"]
    settings: Settings
    record: tuple[Record, ...] = eqx.field(static=True, default=())

    def now(self, state: State) -> Progress:
        """Returns the progress of rows before the next step."""
        choose = lambda device, host: jnp.where(self.ahead, device, host)
        return jax.tree.map(choose, state.progress, self.progress)


class Reading(eqx.Module):
    """Tokens that some rows of the batch read at once: `lengths` new tokens of each, from position `starts` on.

    A number in `rows` that no row has fills the arrays up to a shape that is compiled, with no tokens to read.
    """

    rows: Int[HostArray, " rows"]
    tokens: Int[HostArray, "rows seq"]
    starts: Int[HostArray, " rows"]
    lengths: Int[HostArray, " rows"]
    images: Images | None = None  # of these tokens
    record: tuple[Record, ...] = eqx.field(static=True, default=())


class RowState(eqx.Module):
    """The arrays that a row has of its own after a text. With them and its pages, another row goes on from there."""

    caches: tuple[Any, Any]  # None in place of what lies in pages
    logits: Float[Array, "1 vocab"]
    draft_state: Any


Tables = Sequence[Int[HostArray, "batch pages"]]
"""The pages of each row, for each window of `zoo.nn.rows.windows`."""


class Likeliest(eqx.Module):
    """The likeliest tokens in the place of each drawn one, and their log-probabilities, in order."""

    tokens: Int[Array, "batch *steps top"]
    logprobs: Float[Array, "batch *steps top"]

    @classmethod
    def of(cls, scaled: Float[Array, "batch *steps vocab"], top: int) -> "Likeliest":
        """Finds the likeliest tokens under softmax(scaled)."""
        if not top:
            return cls(*(jnp.zeros((*scaled.shape[:-1], 0), dtype) for dtype in (jnp.int32, jnp.float32)))
        values, tokens = jax.lax.top_k(scaled, top)
        return cls(tokens, values - jax.nn.logsumexp(scaled, axis=-1, keepdims=True))


class Drawn(eqx.Module):
    """New tokens: the first `count` of each row are valid, and took `calls` calls of the model."""

    tokens: Int[Array, "batch steps"]
    logprobs: Float[Array, "batch steps"]
    likeliest: Likeliest
    count: Int[Array, " batch"]
    calls: Int[Array, " batch"]
    records: Records

    @classmethod
    def init(cls, batch: int, steps: int, top: int, records: Any) -> "Drawn":
        """Makes what no token is in yet. `records` has the shapes of those of the tokens of one call."""
        integers, numbers = (lambda *shape, dtype=dtype: jnp.zeros(shape, dtype) for dtype in (jnp.int32, jnp.float32))
        likeliest = Likeliest(integers(batch, steps, top), numbers(batch, steps, top))
        none = jax.tree.map(lambda a: jnp.zeros((batch, steps, *a.shape[2:]), a.dtype), records)
        return cls(integers(batch, steps), numbers(batch, steps), likeliest, integers(batch), integers(batch), none)


def room(draft: Any, max_tokens: int) -> int:
    """Returns the length of a row: a draft needs `num_draft_tokens` + 1 more positions, for rejected tokens."""
    return max_tokens + (0 if draft is None else draft.num_draft_tokens + 1)


def layout_of(
    model: AbstractModel,
    draft: Any,
    batch: int,
    max_tokens: int,
    sizes: Mapping[str, int],
    stride: int,
    chunk: int = CHUNK,
    cache_tokens: int | None = None,
    page: int | None = None,
) -> Layout | None:
    """Lays out the pages of `batch` rows on a mesh whose axes have these `sizes`; see `Engine` for the arguments.

    None where the mesh splits rows: each device then has memory for its own rows, whatever their texts need.
    """
    if math.prod(sizes[axis] for axis in split_over(batch, BATCH, sizes)) > 1:
        return None
    size, at_once = room(draft, max_tokens), max(chunk, model.config.cache_limit or 0, 2 * room(draft, stride))
    slots = TPU_PAGE if page is None and device().platform == "tpu" else min(page or PAGE, bucket(size, 8))
    width = -(-size // slots)
    all_rows = (batch + min(batch, AT_ONCE)) * width  # prompts whose samples wait have as much as some rows
    count = all_rows if cache_tokens is None else max(width, -(-cache_tokens // slots))
    return Layout(batch, slots, width, count, at_once)


def most_together(seq: int) -> int:
    """Returns the number of rows that read together, if they read chunks that are padded to `seq` tokens.

    That keeps a device busy. More would only leave a CPU's caches: it takes 4 x 512 tokens a third longer than one by
    one.
    """
    return AT_ONCE if device().platform != "cpu" else max(1, min(AT_ONCE, 1024 // seq))


def init_caches(
    model: AbstractModel,
    draft: Any,
    batch: int,
    max_tokens: int,
    cache_dtype: DTypeLike | None,
    layout: Layout | None = None,
) -> tuple[Any, Any]:
    """Makes the caches of the model and of the draft (None without a draft), in pages if there is a `layout`."""
    size = room(draft, max_tokens)
    options: Any = dict(widen=size - max_tokens) | (
        {} if layout is None else dict(pages=layout.pages, slots=layout.slots)
    )
    cache = lambda model: zoo.nn.cache.init_cache(model, batch, size, cache_dtype, **options)
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
def init_state(
    model: AbstractModel,
    draft: Any,
    batch: int,
    max_tokens: int,
    cache_dtype: DTypeLike | None,
    mesh: Any,
    layout: Layout | None = None,
) -> State:
    """Makes the state of a batch of free rows. On a mesh, rows and heads are split like those of activations."""

    def placed(x: Array, *axes: Any) -> Array:
        return x if mesh is None else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, P(*axes)))

    caches = init_caches(model, draft, batch, max_tokens, cache_dtype, layout)
    batch_axes: Any = ()
    if mesh is not None:
        specs = partition_specs(caches, mesh.shape)
        caches = jax.tree.map(lambda x, spec: placed(x, *spec), caches, specs)
        batch_axes = split_over(batch, BATCH, mesh.shape)
    draft_state = None if draft is None else draft.init_state(batch, model.config.vocab_size)
    tokens = jnp.zeros((batch, room(draft, max_tokens)), jnp.int32)
    logits = jnp.zeros((batch, model.config.vocab_size), jnp.float32)
    of_rows = (tokens, logits, draft_state, Progress(*jnp.zeros((3, batch), jnp.int32)))
    tokens, logits, draft_state, progress = jax.tree.map(lambda x: placed(x, batch_axes), of_rows)
    return State(tokens, caches, logits, draft_state, progress)


def compiled(
    function: Callable[..., T], *, options: Literal["decode"] | None = "decode", donate: bool = True
) -> Callable[..., T]:
    """Compiles a function like `eqx.filter_jit`, but does not wait until its result is there.

    So the host goes on while the device works. If the layers of a model lie apart (`zoo.nn.stack.apart`), they are
    programs of their own.

    Args:
        function: takes trees, of which leaves that are no arrays are static, and returns a tree of arrays.
        options: XLA's options (`kernels.backends.compile_options`).
        donate: whether the second argument's memory may be reused.
    """

    def run(static: tuple[Any, tuple[Any, ...]], first: Any, second: Any, others: Any) -> T:
        structure, leaves = static
        return function(*eqx.combine((first, second, *others), jax.tree.unflatten(structure, leaves)))

    @functools.cache
    def with_options(_: Device) -> Callable[..., T]:
        given = compile_options(options) if options else None
        return jax.jit(run, static_argnums=0, donate_argnums=2 if donate else (), compiler_options=given)

    cut = in_programs(run, free=1 if donate else None)

    @functools.wraps(function)
    def call(*args: Any) -> T:
        (first, second, *others), static = eqx.partition(args, lambda x: isinstance(x, jax.Array | np.ndarray))
        leaves, structure = jax.tree.flatten(static)
        of_layers = any(map(is_apart, jax.tree.leaves(first, is_leaf=is_apart)))
        whole_or_cut = cut if of_layers else with_options(device())
        return whole_or_cut((structure, tuple(leaves)), first, second, others)

    return call


@functools.partial(compiled, options=None)
def read(inputs: tuple[tuple[AbstractModel, Any], Reading, Tables], state: State) -> tuple[State, Records]:
    """Reads tokens of some rows into the rows' caches, and computes the logits after the last of them.

    `inputs`: the model and the draft (None without one), the tokens, and the rows' pages.
    """
    (model, draft), new, tables = inputs
    index, caches = jnp.broadcast_to(jnp.arange(new.tokens.shape[1]), new.tokens.shape), state.caches
    positions = jnp.where(index < new.lengths[:, None], new.starts[:, None] + index, -1)
    caches = rows.with_tables(caches, tables)
    cache, draft_cache = rows.select(caches, new.rows)
    x, cache, records = hidden(model, jnp.asarray(new.tokens), cache, positions, new.record, new.images)
    last = jnp.take_along_axis(x, jnp.maximum(new.lengths - 1, 0)[:, None, None], axis=1)
    logits = model.unembed(last)[:, 0].astype(jnp.float32)
    draft_state = None
    if draft is not None:
        past = jax.tree.map(lambda a: a.at[new.rows].get(mode="clip"), state.draft_state)
        draft_state, draft_cache = draft.read(x, new, past, draft_cache)
    put = lambda old, new_rows: old.at[new.rows].set(new_rows)
    logits, draft_state = jax.tree.map(put, (state.logits, state.draft_state), (logits, draft_state))
    at = jnp.where(positions < 0, state.tokens.shape[1], positions)
    tokens = state.tokens.at[new.rows[:, None], at].set(new.tokens)
    caches = rows.replace(caches, new.rows, (cache, draft_cache))
    return State(tokens, caches, logits, draft_state, state.progress), records


def hidden(
    model: AbstractModel,
    tokens: Int[Array, "batch seq"],
    cache: Any,
    positions: Int[Array, "batch seq"],
    record: Sequence[Record],
    images: Images | None = None,
) -> tuple[Float[Array, "batch seq embed"], Any, Records]:
    """Returns the model's features, its new cache, and what is to be recorded of these tokens."""
    with choices_of_each_token() if "experts" in record else contextlib.nullcontext():
        x, cache, reports = model.hidden(tokens, cache, positions=positions, images=images)
    of: dict[Record, Callable[[], Array]] = {"experts": lambda: experts_of(model.layers, reports), "hidden": lambda: x}
    return x, cache, {name: of[name]() for name in record}


def shapes_of_records(model: AbstractModel, cache: Any, batch: int, record: Sequence[Record]) -> Any:
    """Returns the shapes of what is recorded of a token in each row."""
    tokens = jnp.zeros((batch, 1), jnp.int32)
    return jax.eval_shape(lambda: hidden(model, tokens, cache, tokens, record)[2]) if record else {}


@functools.partial(compiled, options=None, donate=False)
def take(state: State, row: Int[HostArray, ""]) -> RowState:
    """Copies what a row has of its own."""
    one = lambda a: jax.lax.dynamic_slice_in_dim(a, row, 1)
    return RowState(rows.own(state.caches, row), *jax.tree.map(one, (state.logits, state.draft_state)))


@functools.partial(compiled, options=None)
def put(inputs: tuple[RowState | None, Int[HostArray, " seq"], Int[HostArray, " rows"]], state: State) -> State:
    """Puts what a row had of its own (None: nothing), and its tokens, into these rows. A number that no row has is left
    out.

    What the new text has not written is at later positions than it has reached, so causality hides it.
    """
    one, text, to = inputs
    state = eqx.tree_at(lambda s: s.tokens, state, state.tokens.at[to].set(text))
    if one is None:
        return state
    into = lambda old, new: old.at[to].set(new)
    logits, draft_state = jax.tree.map(into, (state.logits, state.draft_state), (one.logits, one.draft_state))
    return State(state.tokens, rows.with_own(state.caches, to, one.caches), logits, draft_state, state.progress)


@functools.partial(compiled, options=None)
def copy(pairs: Sequence[Int[HostArray, "pairs 2"]], state: State) -> State:
    """Copies pages, for each pair to the first from the second, for each window of `zoo.nn.rows.windows`."""
    return eqx.tree_at(lambda s: s.caches, state, rows.copy_pages(state.caches, pairs))


@compiled
def advance(
    inputs: tuple[tuple[AbstractModel, None], Int[HostArray, " stops"], Rows, Tables],
    state: State,
    steps: int,
    top: int,
    enough: Int[HostArray, ""],
) -> tuple[State, Drawn]:
    """Decodes up to `steps` tokens in each row, and stops early once at most `enough` rows have more to draw.

    It also finds the `top` likeliest tokens in the place of each. A row that has no more to draw stays as it is, so
    that it may go on later.
    """
    (model, _), stops, table, pages = inputs
    now, keys = table.now(state), jax.random.wrap_key_data(jnp.asarray(table.keys))
    batch = len(keys)

    def unfinished(carry: Any) -> Array:
        n, left, _, _ = carry
        return (n < steps) & (jnp.sum(left > 0) > enough)

    def body(carry: Any) -> Any:
        n, left, state, drawn = carry
        live, (cache, _) = left > 0, state.caches
        at = jnp.where(live, now.positions + n, -1)  # rows that have ended are padding
        logits = table.settings.penalized(state.logits, state.tokens, now.positions - now.drawn, at)
        token = table.settings.draw(logits, jax.vmap(jax.random.fold_in)(keys, now.drawn + n))
        tokens = write(state.tokens, token[:, None], at[:, None])
        put = lambda old, new: jax.lax.dynamic_update_slice_in_dim(old, new[:, None], n, axis=1)
        scaled = table.settings.of_logprobs(state.logits)
        x, cache, records = hidden(model, token[:, None], cache, at[:, None], table.record)
        new = Drawn(
            put(drawn.tokens, token),
            put(drawn.logprobs, logprob(scaled, token)),
            jax.tree.map(put, drawn.likeliest, Likeliest.of(scaled, top)),
            drawn.count + live.astype(jnp.int32),
            drawn.calls + live.astype(jnp.int32),
            jax.tree.map(lambda old, new: put(old, new[:, 0]), drawn.records, records),
        )
        left = jnp.where(jnp.any(token[:, None] == stops[None], axis=-1), 0, jnp.maximum(left - 1, 0))
        logits = jnp.where(live[:, None], model.unembed(x)[:, 0].astype(jnp.float32), state.logits)
        return n + 1, left, State(tokens, (cache, None), logits, None, state.progress), new

    state = eqx.tree_at(lambda s: s.caches, state, rows.with_tables(state.caches, pages))
    drawn = Drawn.init(batch, steps, top, shapes_of_records(model, state.caches[0], batch, table.record))
    _, left, state, drawn = jax.lax.while_loop(unfinished, body, (jnp.array(0), now.left, state, drawn))
    return eqx.tree_at(lambda s: s.progress, state, now.after(drawn.count, left)), drawn


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
