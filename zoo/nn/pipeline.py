"""Pipeline parallelism: spreads the layers of a stack over the stages of a mesh, and sends microbatches round them.

Every stage has several chunks of neighbouring layers: with S stages the first has chunks 0, S, 2 S, ... A microbatch
goes through chunk 0 on the first stage, through chunk 1 on the second, and from the last stage back to the first for
chunk S. S microbatches are in flight at once; when they are through, the next S start. This is the interleaved
schedule of arXiv:2104.04473, section 2.2, also called circular. With M microbatches and R rounds a step takes
M R + S - 1 ticks instead of M R: the more rounds, the less a stage is idle.

A microbatch has one sequence of each device that splits the batch, if there are enough sequences. The backward pass is
JAX's own, which runs the schedule in reverse.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from kernels import mesh
from kernels.mesh import STAGE


T = TypeVar("T")

ROUNDS = 4  # at most: every further round sends each microbatch through the network once more


class Largest(eqx.Module):
    """Numbers in a layer's report whose value for a batch is the largest of its parts', and not their sum."""

    value: Float[Array, "..."]


def is_largest(node: Any) -> bool:
    return isinstance(node, Largest)


def pipeline(
    run: Callable[[Any, Float[Array, "rows seq embed"], Any], tuple[Float[Array, "rows seq embed"], Any]],
    layers: Any,
    x: Float[Array, "batch seq embed"],
    shared: Any,
) -> tuple[Float[Array, "batch seq embed"], Any]:
    """Computes `run(layers, x, shared)` with the layers spread over the stages of the mesh in scope.

    Args:
        run: runs some of the layers on some sequences. Returns their features after these layers, and each layer's
            reports: sums over tokens, so that those of microbatches can be added up, and each a `Largest`.
        layers: arrays with an axis of layers in front, whose size is a multiple of the number of stages.
        shared: what else `run` needs of each sequence: a tree of arrays with an axis of sequences in front.

    Raises:
        ValueError: if the sequences can't be split evenly.
    """
    stages, others = mesh.split(STAGE), math.prod(mesh.split(axis) for axis in mesh.BATCH if axis != STAGE)
    if len(x) % (stages * others):
        raise ValueError(f"{len(x)} sequences can't be split over {stages} stages of {others} shares evenly.")
    count = jax.tree.leaves(layers)[0].shape[0] // stages  # a stage's
    rounds = rounds_of(count)

    def microbatches(a: Array) -> Array:
        """Reshapes [batch, ...] to [microbatches, others, ...]; each stage keeps the sequences that it had."""
        a = a.reshape(stages, others, -1, *a.shape[1:]).swapaxes(1, 2).reshape(-1, others, *a.shape[1:])
        return _placed(a, STAGE)

    def batch(a: Array) -> Array:
        return a.reshape(stages, -1, others, *a.shape[2:]).swapaxes(1, 2).reshape(-1, *a.shape[2:])

    chunks = jax.tree.map(lambda a: a.reshape(rounds, stages, count // rounds, *a.shape[1:]), layers)
    y, reports = jax.shard_map(
        lambda *args: _on_each_stage(run, stages, *args),
        axis_names={STAGE},
        in_specs=(P(None, STAGE), P(STAGE), P(STAGE)),
        out_specs=(P(STAGE), P(None, STAGE)),
        check_vma=False,
    )(chunks, *jax.tree.map(microbatches, (x, shared)))
    return batch(y), jax.tree.map(lambda a: a.reshape(-1, *a.shape[3:]), reports)


def rounds_of(layers: int) -> int:
    """Returns the number of rounds that a microbatch makes where a stage has so many layers."""
    return max(n for n in range(1, ROUNDS + 1) if layers % n == 0)


def _on_each_stage(run: Callable[..., Any], stages: int, chunks: Any, x: Array, shared: Any) -> Any:
    chunks = jax.tree.map(lambda a: a[:, 0], chunks)
    # Sends by permutations: for gathers and scatters, XLA would gather the rows of all devices of a stage.
    send = lambda a, source, to: _placed(jax.lax.ppermute(a, STAGE, [(source, to)]))
    everywhere = lambda a: jax.lax.all_gather(a, STAGE, axis=0, tiled=True)
    x = jnp.concatenate([send(_placed(x), source, 0) for source in range(stages)])  # on the first stage
    shared = jax.tree.map(lambda a: _placed(everywhere(a)), shared)
    stage, count, rounds = jax.lax.axis_index(STAGE), len(x), jax.tree.leaves(chunks)[0].shape[0]
    at = lambda tree, i: jax.tree.map(lambda a: a[i], tree)

    def nothing(report: Any) -> Any:
        if is_largest(report):
            return Largest(jnp.full((rounds, *report.value.shape), -jnp.inf, report.value.dtype))
        return jnp.zeros((rounds, *report.shape), report.dtype)

    def merged(round_: Array, due: Array, total: Any, new: Any) -> Any:
        if is_largest(new):
            larger = jnp.maximum(total.value[round_], jnp.where(due, new.value, -jnp.inf))
            return Largest(total.value.at[round_].set(larger))
        return total.at[round_].add(jnp.where(due, new, 0))

    def tick(carry: Any, t: Array) -> tuple[Any, None]:
        arriving, out, reports = carry
        work = t - stage  # the number of this stage's next piece of work, in groups of `stages` microbatches
        due = (work >= 0) & (work < count * rounds)
        work = jnp.clip(work, 0, count * rounds - 1)
        group, round_, member = work // (stages * rounds), work % (stages * rounds) // stages, work % stages
        i = group * stages + member
        arriving = jnp.where((stage == 0) & (round_ == 0), x[i], arriving)
        y, new = run(at(chunks, round_), arriving, at(shared, i))
        finished = due & (stage == stages - 1) & (round_ == rounds - 1)
        out = out.at[jnp.where(finished, i, count)].set(y, mode="drop")
        reports = jax.tree.map(functools.partial(merged, round_, due), reports, new, is_leaf=is_largest)
        leaving = jax.lax.ppermute(y, STAGE, [(s, (s + 1) % stages) for s in range(stages)])
        return (leaving, _placed(out), reports), None

    _, new = jax.eval_shape(run, at(chunks, 0), x[0], at(shared, 0))
    start = (jnp.zeros_like(x[0]), _placed(jnp.zeros_like(x)), jax.tree.map(nothing, new, is_leaf=is_largest))
    (_, out, reports), _ = jax.lax.scan(tick, start, jnp.arange(count * rounds + stages - 1))
    # The last stage has the results, and sends each stage its share of the batch.
    shares = jnp.split(out, stages)
    out = sum(send(share, stages - 1, to) for to, share in enumerate(shares))
    return out, jax.tree.map(lambda a: a[:, None], reports)


def _placed(a: Array, first: str | None = None) -> Array:
    """Splits microbatches [microbatches, rows, seq, ...] so that each device keeps its own rows and tokens."""
    rows, tokens = mesh.splitting(a.shape[1], *mesh.BATCH[1:]), mesh.splitting(a.shape[2], mesh.CONTEXT)
    return jax.lax.with_sharding_constraint(a, P(first, rows, tokens)) if mesh.free() else a
