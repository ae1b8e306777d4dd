"""Pipeline parallelism: the layers of a stack lie on the stages of a mesh, and microbatches go round them.

Every stage has several chunks of neighbouring layers: with S stages the first has chunks 0, S, 2 S, ... A microbatch
goes through chunk 0 on the first stage, through chunk 1 on the second, and from the last stage back to the first for
chunk S. S microbatches are on their way at once; when they are through, the next S start (the interleaved schedule of
arXiv:2104.04473, section 2.2, which is also called circular). With M microbatches and R rounds a step takes M R + S - 1
ticks instead of M R: the more rounds, the less a stage stands idle.

A microbatch has one sequence of each device that splits the batch, as long as there are enough of them. The backward
pass is JAX's, which runs the same schedule from its end.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from kernels import mesh
from kernels.mesh import STAGE


T = TypeVar("T")

ROUNDS = 4  # at most: each one more sends every microbatch once more through the network


def pipeline(
    run: Callable[[Any, Float[Array, "rows seq embed"], Any], tuple[Float[Array, "rows seq embed"], Any]],
    layers: Any,
    x: Float[Array, "batch seq embed"],
    shared: Any,
) -> tuple[Float[Array, "batch seq embed"], Any]:
    """`run(layers, x, shared)`, with the layers spread over the stages of the mesh in scope.

    Args:
        run: maps some of the layers, and sequences, to the sequences after those layers, and what each layer reports:
            sums over the tokens, so that the reports of microbatches add up.
        layers: arrays with an axis of layers in front, a multiple of the number of stages.
        shared: what `run` needs of each sequence besides: a tree of arrays with an axis of sequences in front.

    Raises:
        ValueError: if the sequences can't be split evenly.
    """
    stages, others = mesh.split(STAGE), math.prod(mesh.split(axis) for axis in mesh.BATCH if axis != STAGE)
    if len(x) % (stages * others):
        raise ValueError(f"{len(x)} sequences can't be split over {stages} stages of {others} shares evenly.")
    count = jax.tree.leaves(layers)[0].shape[0] // stages  # a stage's
    rounds = rounds_of(count)

    def microbatches(a: Array) -> Array:
        """[batch, ...] -> [microbatches, others, ...], of which each stage holds what it had of the batch."""
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
    """How often a microbatch comes round to a stage that has so many layers."""
    return max(n for n in range(1, ROUNDS + 1) if layers % n == 0)


def _on_each_stage(run: Callable[..., Any], stages: int, chunks: Any, x: Array, shared: Any) -> Any:
    chunks = jax.tree.map(lambda a: a[:, 0], chunks)
    # By permutations: for what gathers and scatters, XLA would gather the rows of all devices of a stage.
    send = lambda a, source, to: _placed(jax.lax.ppermute(a, STAGE, [(source, to)]))
    everywhere = lambda a: jax.lax.all_gather(a, STAGE, axis=0, tiled=True)
    x = jnp.concatenate([send(_placed(x), source, 0) for source in range(stages)])  # on the first stage
    shared = jax.tree.map(lambda a: _placed(everywhere(a)), shared)
    stage, count, rounds = jax.lax.axis_index(STAGE), len(x), jax.tree.leaves(chunks)[0].shape[0]
    at = lambda tree, i: jax.tree.map(lambda a: a[i], tree)

    def tick(carry: Any, t: Array) -> tuple[Any, None]:
        arriving, out, reports = carry
        work = t - stage  # which of this stage's pieces of work is due: by rounds of `stages` microbatches
        due = (work >= 0) & (work < count * rounds)
        work = jnp.clip(work, 0, count * rounds - 1)
        group, round_, member = work // (stages * rounds), work % (stages * rounds) // stages, work % stages
        i = group * stages + member
        arriving = jnp.where((stage == 0) & (round_ == 0), x[i], arriving)
        y, new = run(at(chunks, round_), arriving, at(shared, i))
        finished = due & (stage == stages - 1) & (round_ == rounds - 1)
        out = out.at[jnp.where(finished, i, count)].set(y, mode="drop")
        reports = jax.tree.map(lambda total, a: total.at[round_].add(jnp.where(due, a, 0)), reports, new)
        leaving = jax.lax.ppermute(y, STAGE, [(s, (s + 1) % stages) for s in range(stages)])
        return (leaving, _placed(out), reports), None

    _, new = jax.eval_shape(run, at(chunks, 0), x[0], at(shared, 0))
    zeros = jax.tree.map(lambda a: jnp.zeros((rounds, *a.shape), a.dtype), new)
    start = (jnp.zeros_like(x[0]), _placed(jnp.zeros_like(x)), zeros)
    (_, out, reports), _ = jax.lax.scan(tick, start, jnp.arange(count * rounds + stages - 1))
    # The last stage has the results; each gets its share of the batch back.
    shares = jnp.split(out, stages)
    out = sum(send(share, stages - 1, to) for to, share in enumerate(shares))
    return out, jax.tree.map(lambda a: a[:, None], reports)


def _placed(a: Array, first: str | None = None) -> Array:
    """Microbatches [microbatches, rows, seq, ...], of which each device has its own rows and tokens."""
    rows, tokens = mesh.splitting(a.shape[1], *mesh.BATCH[1:]), mesh.splitting(a.shape[2], mesh.CONTEXT)
    return jax.lax.with_sharding_constraint(a, P(first, rows, tokens)) if mesh.free() else a
