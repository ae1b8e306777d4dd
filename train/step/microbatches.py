"""Microbatches: a batch that is computed in parts, one after another, so that less of it is in memory at a time."""

import math
import operator
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num, Shaped

from zoo.nn.pipeline import Largest, is_largest


T = TypeVar("T")


def elastic(microbatches: int, *, rows: int, shares: int, processes: int, full: int) -> int:
    """Returns the number of microbatches for fewer processes than all, so that a device has no more rows at a time.

    Args:
        microbatches: the number of microbatches with all processes.
        rows: the number of rows in a step.
        shares: the number of shares into which the mesh splits the rows now.
        processes, full: the number of processes now, and when none is lost.
    """
    least = math.ceil(microbatches * full / processes)
    fitting = (parts for parts in range(least, rows + 1) if rows % (parts * shares) == 0)
    return next(fitting, microbatches)  # if none fits, the check of the mesh raises the error


def filled_up(
    batch: Mapping[str, Shaped[np.ndarray, "rows ..."]], multiple: int
) -> dict[str, Shaped[np.ndarray, "more ..."]]:
    """Adds rows of padding, so that the number of rows is a multiple of `multiple`.

    They are copies of the last row in which no token belongs to a document.
    """
    more = -len(batch["tokens"]) % multiple
    filled = {name: np.concatenate([a, np.repeat(a[-1:], more, axis=0)]) for name, a in batch.items()}
    for name in ("segments", "loss_mask"):
        filled[name][len(batch["tokens"]) :] = 0
    return filled


def split(rows: T, parts: int) -> T:
    """Splits arrays [batch, ...] into [parts, batch / parts, ...]. Every part has rows of every device.

    Raises:
        ValueError: the parts would not be of one size.
    """
    size = len(jax.tree.leaves(rows)[0])
    if size % parts:
        raise ValueError(f"A batch of {size} sequences can't be split into {parts} microbatches of one size.")
    return jax.tree.map(lambda a: a.reshape(size // parts, parts, *a.shape[1:]).swapaxes(0, 1), rows)


def summed(function: Callable[[Any], T], parts: Any) -> T:
    """Sums `function(part)` over the leading axis of `parts`, one part after another, and merges each `Largest`."""
    add = lambda a, b: Largest(jnp.maximum(a.value, b.value)) if is_largest(a) else a + b
    # The sum starts from the first part: starting from zeros would cost one more buffer of the size of the model.
    first, rest = (jax.tree.map(operator.itemgetter(index), parts) for index in (0, slice(1, None)))
    total = function(first)
    if len(jax.tree.leaves(parts)[0]) == 1:
        return total
    more = lambda total, part: (jax.tree.map(add, total, function(part), is_leaf=is_largest), None)
    return jax.lax.scan(more, total, rest)[0]


def per(count: Num[Array, ""], sums: T) -> T:
    """Divides sums by a count, or by 1 if the count is 0."""
    n = jnp.maximum(count, 1).astype(jnp.float32)
    return jax.tree.map(lambda total: total / n.astype(total.dtype), sums)
