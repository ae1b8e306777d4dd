"""The two programs with which GRPO samples between its steps, and what a device needs for them."""

import functools
import math
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from kernels.backends.compile_options import compile_options
from kernels.mesh import BATCH
from train.base.places import here
from train.planning.ahead import Program, device_bytes
from train.state.mesh import replicated
from zoo import lora
from zoo.generation import decoding
from zoo.generation.decoding import CHUNK, most_together
from zoo.generation.pages import Layout
from zoo.generation.sampling import settings
from zoo.generation.shapes import bucket
from zoo.nn.cache import init_cache, partition_specs, split_over
from zoo.nn.model import AbstractConfig
from zoo.nn.rows import windows
from zoo.surgery import cast


STRIDE = 16  # tokens that `zoo.generation.engine.Engine` decodes at a time


class RolloutPrograms(NamedTuple):
    """The programs with which a device samples."""

    prefill: Program  # reads the prompts of some groups
    advance: Program  # decodes all rows
    beside: int  # bytes that a device holds between updates: model, optimizer, reference; not what sampling reads
    weights: int  # bytes that decoding reads
    trained: int  # bytes of those weights that updates change
    filled: int  # bytes of the caches that all rows have filled, on average
    layout: Layout | None  # the caches' pages; None: each row has memory for all of its tokens
    most: int  # tokens of a row


def shapes_on(tree: Any, mesh: Mesh) -> Any:
    """Returns the same shapes on another mesh."""
    place = lambda a: NamedSharding(mesh, a.sharding.spec)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place(a)), tree)


def sampling(
    config: AbstractConfig,
    mesh: Mesh,
    update: Program,
    *,
    seq: int,
    prompt: int,
    new: int,
    rows: int,
    group: int,
    turns: int,
    cache_dtype: str,
) -> RolloutPrograms:
    """Makes the two programs of `zoo.generation.engine` that `train.methods` runs, for this update's state.

    Args:
        mesh: that of sampling, which may be of other devices than the update's.
        seq: number of tokens of a row, a prompt with its completion, or with its replies and what follows them.
        prompt: number of tokens before the first reply.
        new: number of tokens that are drawn.
        rows: number of completions that are sampled at a time.
        group: number of completions of each prompt.
        turns: number of replies.
    """
    state, _, kept, reference = update.arguments
    at = lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)
    split = here(state.model)  # arrays in the host's memory are copied to its devices for sampling
    trained = jax.tree.map(lambda a: at(a, replicated(a.sharding)), split)
    held = lora.combine(trained, kept)
    pairs = zip(*map(jax.tree.leaves, (split, trained)), strict=True)
    parts = [part for part, whole in pairs if part.sharding != whole.sharding]  # of what is gathered over replicas
    everywhere, rows_of = NamedSharding(mesh, P()), lambda spec: NamedSharding(mesh, spec)
    placed = lambda shapes, specs: jax.tree.map(lambda a, spec: at(a, rows_of(spec)), shapes, specs)

    def in_bfloat16(tree: Any) -> Any:
        shapes = eqx.filter_eval_shape(functools.partial(cast, dtype=jnp.bfloat16), tree)
        return placed(shapes, jax.tree.map(lambda a: a.sharding.spec, tree))

    model = in_bfloat16(held)
    same = [b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(held), strict=True) if a.dtype == b.dtype]
    beside = device_bytes((held, parts, state.opt_state, state.step, reference)) - device_bytes(same)

    cache = None if cache_dtype == "auto" else cache_dtype
    most = bucket(prompt) + new if turns == 1 else seq + 1
    later = math.ceil((seq + 1 - new - prompt) / (turns - 1)) if turns > 1 else 0  # tokens before each further reply
    read_at_once = bucket(min(max(prompt, later), CHUNK))
    readers = rows if later else math.ceil(rows / group)  # a group reads its prompt once
    groups = bucket(min(most_together(read_at_once), readers), 1)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

    layout = decoding.layout_of(model, None, rows, most, mesh.shape, STRIDE)
    empty = eqx.filter_eval_shape(lambda m: decoding.init_caches(m, None, rows, most, cache, layout), model)
    caches = placed(empty, partition_specs(empty, mesh.shape))
    filled = eqx.filter_eval_shape(lambda m: init_cache(m, rows, (prompt + seq + 1) // 2, cache), model)
    filled = placed(filled, partition_specs(filled, mesh.shape))
    split = NamedSharding(mesh, P(split_over(rows, BATCH, mesh.shape)))
    logits = jax.ShapeDtypeStruct((rows, config.vocab_size), jnp.float32, sharding=split)

    def table() -> decoding.Rows:
        keys, ahead = jnp.zeros((rows, 2), jnp.uint32), jnp.zeros(rows, bool)
        return decoding.Rows(
            decoding.Progress(*jnp.zeros((3, rows), jnp.int32)), ahead, keys, settings([zoo.Sampling()] * rows)
        )

    described = jax.tree.map(lambda a: at(a, everywhere), jax.eval_shape(table))
    tables = [ints(rows, layout.width) for _ in windows(empty)] if layout else []
    progress = [at(ints(rows), split) for _ in range(3)]
    drawn: Any = (at(ints(rows, most), split), caches, logits, progress)
    chunk: Any = (ints(groups), ints(groups, read_at_once), ints(groups), ints(groups))

    def state_of(drawn: Any) -> decoding.State:
        return decoding.State(drawn[0], drawn[1], drawn[2], None, decoding.Progress(*drawn[3]))

    def read(model: Any, chunk: Any, tables: Any, drawn: Any) -> Any:
        inputs = (model, None), decoding.Reading(*chunk), tables
        return decoding.read.__wrapped__(inputs, state_of(drawn))[0]

    def advance(model: Any, stops: Any, table: Any, tables: Any, drawn: Any, enough: Any) -> Any:
        inputs = (model, None), stops, table, tables
        return decoding.advance.__wrapped__(inputs, state_of(drawn), STRIDE, 0, enough)

    with jax.set_mesh(mesh):
        decode = jax.jit(advance, donate_argnums=4, compiler_options=compile_options("decode"))
    return RolloutPrograms(
        Program(jax.jit(read, donate_argnums=3), (model, chunk, tables, drawn), {}),
        Program(decode, (model, ints(1), described, tables, drawn, ints()), {"cache": caches}),
        beside,
        device_bytes(model),
        device_bytes(in_bfloat16(trained)),
        device_bytes(filled),
        layout,
        most,
    )
