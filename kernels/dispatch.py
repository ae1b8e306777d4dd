"""Which implementation serves a call: decided by the tables below, and by what each says that it cannot take."""

import importlib
import math
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
from jax.sharding import AxisType
from jaxtyping import Array

from kernels.device import device


# The module of each implementation. It has a function named as the operation, and `refusal`, of the same arguments: why
# it cannot take them, or None if it can. One more implementation is a module, and its name in these tables.
MODULES = {
    "attention": {
        "reference": "reference",
        "xla": "attention_xla",
    },
    "decode_attention": {
        "reference": "reference",
    },
    "ragged_dot": {
        "reference": "reference",
        "xla": "ragged_dot_xla",
    },
}

# Who is asked, in this order; the first that does not refuse serves. "mosaic" is experimental, and serves by name only.
PREFERENCES = {
    "attention": {
        "cpu": ("xla", "reference"),
        "gpu": ("cudnn", "triton", "xla", "reference"),
        "tpu": ("tpu", "xla", "reference"),
    },
    "decode_attention": {
        "cpu": ("reference",),
        "gpu": ("triton", "reference"),
        "tpu": ("tpu", "reference"),
    },
    "ragged_dot": {
        "cpu": ("xla", "reference"),
        "gpu": ("triton", "xla", "reference"),
        "tpu": ("tpu", "xla", "reference"),
    },
}

# XLA cannot look into a kernel of ours: it would gather its arguments on every device. These it splits by itself.
SPLIT_BY_XLA = ("reference", "xla", "cudnn")


class Choice(NamedTuple):
    """Who serves a call of an operation, and for every other implementation why it cannot, or None if it could."""

    operation: str
    implementation: str
    others: dict[str, str | None]


_explained: ContextVar[list[Choice] | None] = ContextVar("explained", default=None)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Choice]:
    """Who would serve each call of an operation that `function(*args, **kwargs)` makes, in their order.

    `function` is an operation, or anything that calls some, such as a model. Nothing is computed: arrays may as well be
    `jax.ShapeDtypeStruct`s. Under `jax.set_mesh` the answer is for the devices of that mesh.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: list[Array]) -> None:
        remaining = iter(arrays)
        given = [next(remaining) if array else leaf for array, leaf in zip(is_array, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, given)
        function(*args, **kwargs)

    choices: list[Choice] = []
    token = _explained.set(choices)
    try:
        jax.eval_shape(call, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array])
    finally:
        _explained.reset(token)
    return choices


def run(operation: str, implementation: str | None, *args: Any, first: str | None = None, **kwargs: Any) -> Array:
    """The result of the implementation asked for; else of `first`, where it is given and able, or by `PREFERENCES`.

    Raises:
        ValueError: if the implementation asked for cannot take these arguments, with its reason and who can.
    """
    refusals = {name: _refusal(operation, name, *args, **kwargs) for name in MODULES[operation]}
    able = [name for name, refusal in refusals.items() if refusal is None]
    if implementation is None:
        preference = (first, *PREFERENCES[operation][device().platform])
        implementation = next(name for name in preference if name in able)
    if implementation not in able:
        reason = refusals.get(implementation, "no such implementation")
        others = "; ".join(f"{name}: {why or 'can'}" for name, why in refusals.items() if name != implementation)
        raise ValueError(f"{operation}(implementation={implementation!r}): {reason}. The others: {others}.")
    choices = _explained.get()
    if choices is not None:
        choices.append(Choice(operation, implementation, {n: w for n, w in refusals.items() if n != implementation}))
    return getattr(_module(operation, implementation), operation)(*args, **kwargs)


def _refusal(operation: str, implementation: str, *args: Any, **kwargs: Any) -> str | None:
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    axes = {name: mesh.shape[name] for name, kind in kinds if kind != AxisType.Manual}
    if math.prod(axes.values()) > 1 and implementation not in SPLIT_BY_XLA:
        return f"it is for one device, and the arrays may be split over a mesh of {axes}: call it in jax.shard_map"
    module = _module(operation, implementation)
    return None if implementation == "reference" else module.refusal(*args, **kwargs)


def _module(operation: str, implementation: str) -> Any:
    return importlib.import_module(f"kernels.{MODULES[operation][implementation]}")
