"""Freezing: weights that are chosen by the patterns of --freeze, and stay as they are while others are trained.

They get no gradients, and the optimizer keeps nothing for them. They stay in the data type of their checkpoint, so that
they are exported with the bits that were loaded.
"""

import fnmatch
from collections.abc import Sequence
from typing import TypeVar

import equinox as eqx
import jax

from zoo.surgery import path_name


T = TypeVar("T")


def split(model: T, patterns: Sequence[str]) -> tuple[T, T]:
    """Splits a model into what is trained and what is frozen; each has None in place of the other's arrays.

    Args:
        patterns: of the paths of arrays, as `fnmatch` reads them.

    Raises:
        ValueError: a pattern matches nothing, or together they match everything.
    """
    paths = [path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(model)]
    for pattern in patterns:
        if not fnmatch.filter(paths, pattern):
            raise ValueError(f"--freeze {pattern} matches none of the model's weights, which are {', '.join(paths)}.")
    is_trained = lambda path, _: not any(fnmatch.fnmatch(path_name(path), pattern) for pattern in patterns)
    chosen = jax.tree_util.tree_map_with_path(is_trained, model)
    if not any(jax.tree.leaves(chosen)):
        raise ValueError(f"--freeze {' '.join(patterns)} leaves nothing to train.")
    return eqx.partition(model, chosen)
