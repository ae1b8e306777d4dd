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
from train.planning.ahead import Compiled, Program, device_bytes
from zoo import lora
from zoo.generation import decoding
from zoo.generation.decoding import CHUNK, most_together
from zoo.generation.sampling import settings
from zoo.generation.shapes import bucket
from zoo.nn.cache import partition_specs, split_over
from zoo.nn.model import AbstractConfig
from zoo.nn.rows import windows
from zoo.surgery import cast


STRIDE = 16  # tokens that `zoo.generation.engine.Engine` decodes at a time


class RolloutPrograms(NamedTuple):
    """The programs that a device runs between GRPO's updates, while it holds the state of the training."""

    prefill: Program  # reads the prompts of some groups
    advance: Program  # decodes all rows
    beside: int  # bytes that a device holds meanwhile: model, optimizer, reference; not the arrays that sampling reads

    def needed(self, prefill: Compiled, advance: Compiled) -> int:
        """Returns the bytes that a device needs: the larger number of the two programs."""
        return self.beside + max(prefill.needed, advance.needed)


def sampling(
    config: AbstractConfig,
    mesh: Mesh,
    update: Program,
    *,
    seq: int,
    max_new_tokens: int,
    rows: int,
    group: int,
    cache_dtype: str,
) -> RolloutPrograms:
    """Makes the two programs of `zoo.generation.engine` that `train.methods.rollouts` runs, for this update's state.

    Args:
        seq: number of tokens of a row, a prompt with its completion.
        rows: number of completions that are sampled at a time.
        group: number of completions of each prompt.
    """
    state, _, kept, reference = update.arguments
    held = lora.combine(here(state.model), kept)  # arrays in the host's memory are copied to its devices for sampling
    model = eqx.filter_eval_shape(functools.partial(cast, dtype=jnp.bfloat16), held)
    at = lambda a, place: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place)
    everywhere, rows_of = NamedSharding(mesh, P()), lambda spec: NamedSharding(mesh, spec)
    model = jax.tree.map(lambda a, before: at(a, before.sharding), model, held)
    same = [b for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(held), strict=True) if a.dtype == b.dtype]
    beside = device_bytes((held, state.opt_state, state.step, reference)) - device_bytes(same)

    prompt, cache = seq + 1 - max_new_tokens, None if cache_dtype == "auto" else cache_dtype
    most = bucket(prompt) + max_new_tokens
    read_at_once = bucket(min(prompt, CHUNK))
    groups = bucket(min(most_together(read_at_once), math.ceil(rows / group)), 1)
    ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=everywhere)

    layout = decoding.layout_of(model, None, rows, most, mesh.shape, STRIDE)
    empty = eqx.filter_eval_shape(lambda m: decoding.init_caches(m, None, rows, most, cache, layout), model)
    caches = jax.tree.map(lambda a, spec: at(a, rows_of(spec)), empty, partition_specs(empty, mesh.shape))
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
        Program(decode, (model, ints(1), described, tables, drawn, ints()), {"cache": drawn}),
        beside,
    )
