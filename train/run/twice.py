"""Steps that are computed twice, to find faulty hardware: the same program on the same numbers gives the same bits.

The environment variable ZOO_CHECK_STEP_EVERY is the number of steps from one such step to the next. Without it, or with
0, there are none. Such a step takes twice the time, and memory for one more state.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from train.base import environment
from train.base.cluster import of_each
from train.state.offload import one_by_one
from train.state.state import TrainState
from zoo.surgery import path_name


Step = Callable[..., tuple[TrainState, dict[str, Any]]]


def is_due(n: int) -> bool:
    """Whether step `n` is computed twice."""
    every = environment.number("ZOO_CHECK_STEP_EVERY", 0)
    return every > 0 and n % every == 0


def twice(step: Step, n: int) -> Step:
    """Wraps a compiled step: the new one computes step `n` twice, from a copy of the state, and compares the bits.

    It raises a FloatingPointError, in all processes, if any bits differ. The copy takes as much memory as the state.
    """

    def compute(state: TrainState, *arguments: Any) -> tuple[TrainState, dict[str, Any]]:
        again = jax.tree.map(lambda a: a.copy(), state)  # the step donates its state
        second, first = step(again, *arguments), step(state, *arguments)
        paths, leaves = zip(*jax.tree_util.tree_leaves_with_path(first), strict=True)
        others = tuple(jax.tree.leaves(second))
        if (same := np.asarray(_same(leaves, others))).all():
            return first
        wrong = np.flatnonzero(~same)
        where = [device for n in wrong for device in _devices(leaves[n], others[n])]
        here = f" on {', '.join(dict.fromkeys(where))}" if where else ""
        processes = [process for process, found in enumerate(of_each(float(len(where)))) if found]
        raise FloatingPointError(
            f"Step {n} was computed twice from the same numbers, and {len(wrong)} of {len(same)} arrays have other "
            f"bits, {path_name(paths[wrong[0]])} first, in process {', '.join(map(str, processes))}{here}. Its result "
            "is not saved. If the program is deterministic, which on GPUs XLA_FLAGS=--xla_gpu_deterministic_ops=true "
            "is for, a device computes wrongly: take that machine out, and the same command goes on from the last "
            "checkpoint."
        )

    return compute


def _devices(a: jax.Array, b: jax.Array) -> list[str]:
    """Lists this process's devices whose parts of the two arrays have different bits."""
    pairs = zip(a.addressable_shards, b.addressable_shards, strict=True)
    return [str(one.device) for one, other in pairs if _bytes(one) != _bytes(other)]


def _bytes(shard: Any) -> bytes:
    return np.asarray(shard.data).tobytes()


@jax.jit
def _same(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> jax.Array:
    """Whether each pair of arrays has the same bits. NaNs are compared by their bits, too; 0 and -0 differ."""
    return jnp.stack(one_by_one(lambda pair: (_bits(pair[0]) == _bits(pair[1])).all(), zip(left, right, strict=True)))


def _bits(array: jax.Array) -> jax.Array:
    if array.dtype == bool:
        return array
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))
