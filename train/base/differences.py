"""A comparison of two trees of JSON, such as a run's identity now and when its checkpoint was written."""

import json
from collections.abc import Mapping
from typing import Any

import jax

from zoo.surgery import path_name


MISSING = "missing"


def differences(stored: Mapping[str, Any], present: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Compares two trees of JSON. Returns dotted path -> both values, where they differ, sorted by path.

    MISSING stands for the value of a path that only one of them has.
    """
    old, new = _flat(stored), _flat(present)
    both = {name: (old.get(name, MISSING), new.get(name, MISSING)) for name in sorted(old.keys() | new.keys())}
    return {name: (a, b) for name, (a, b) in both.items() if a != b}


def _flat(tree: Any) -> dict[str, Any]:
    """Flattens a tree of JSON values to dotted path -> value."""
    leaves = jax.tree_util.tree_leaves_with_path(json.loads(json.dumps(tree)), is_leaf=lambda leaf: leaf is None)
    return {path_name(path): leaf for path, leaf in leaves}
