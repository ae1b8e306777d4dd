"""Gather arrays that several processes hold: to the process that writes them, or to all."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert.tensors import Lazy
from zoo.nn.model import AbstractModel


def gathered(array: jax.Array | np.ndarray) -> np.ndarray:
    """Return an array's values. If several processes hold parts, these are gathered, and all must call this."""
    return np.asarray(array) if _is_here(array) else multihost_utils.process_allgather(array, tiled=True)


def write_once(model: AbstractModel, tensors: dict[str, Lazy], write: Callable[[dict[str, Lazy]], None]) -> None:
    """Call `write(tensors)` in one process. `tensors` are from `zoo.weights.checkpoint.export(model)`.

    If several processes hold parts of the model, all must call this. Process 0 writes. For each tensor that it needs,
    it broadcasts the tensor's number, and all gather that tensor. So no host holds more than its part and one tensor.

    Raises:
        OSError: process 0 failed (raised in the other processes).
    """
    if all(map(_is_here, jax.tree.leaves(model))):
        return write(tensors)
    done, failed = -1, -2
    gather = [get for _, _, get in tensors.values()]
    broadcast = lambda n: int(multihost_utils.broadcast_one_to_all(np.int32(n)))
    if jax.process_index() == 0:
        request = lambda n: gather[broadcast(n)]()
        try:
            write(
                {
                    name: (shape, dtype, functools.partial(request, n))
                    for n, (name, (shape, dtype, _)) in enumerate(tensors.items())
                }
            )
        except BaseException:
            broadcast(failed)
            raise
        broadcast(done)
    else:
        while (n := broadcast(done)) >= 0:  # process 0's number; its own argument is ignored
            gather[n]()
        if n == failed:
            raise OSError("Process 0 could not write the model, and says why.")


def _is_here(array: Any) -> bool:
    """Whether this process holds all of an array."""
    return not isinstance(array, jax.Array) or array.is_fully_addressable
