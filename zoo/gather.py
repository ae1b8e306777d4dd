"""Arrays that several processes hold, brought to the one that writes them, or to all."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from convert.tensors import Lazy


def gathered(array: jax.Array) -> np.ndarray:
    """The values of an array, gathered if other processes hold parts of it; then all of them have to call this."""
    return np.asarray(array) if _is_here(array) else multihost_utils.process_allgather(array, tiled=True)


def write_once(model: Any, tensors: dict[str, Lazy], write: Callable[[dict[str, Lazy]], None]) -> None:
    """`write(tensors)`, which are those that `zoo.checkpoint.export` makes of `model`.

    If several processes hold parts of the model, all call this: process 0 writes, and the others help it to gather
    each tensor that it asks for. So no host has more than its part and one tensor.

    Raises:
        OSError: in the other processes, if process 0 fails.
    """
    if all(map(_is_here, jax.tree.leaves(model))):
        return write(tensors)
    done, failed = -1, -2
    makers = [make for _, _, make in tensors.values()]
    said = lambda n: int(multihost_utils.broadcast_one_to_all(np.int32(n)))
    if jax.process_index() == 0:
        asked = lambda n: makers[said(n)]()
        try:
            write(
                {
                    name: (shape, dtype, functools.partial(asked, n))
                    for n, (name, (shape, dtype, _)) in enumerate(tensors.items())
                }
            )
        except BaseException:
            said(failed)
            raise
        said(done)
    else:
        while (n := said(done)) >= 0:
            makers[n]()
        if n == failed:
            raise OSError("Process 0 could not write the model, and says why.")


def _is_here(array: Any) -> bool:
    """Whether this process holds all of it."""
    return not isinstance(array, jax.Array) or array.is_fully_addressable
