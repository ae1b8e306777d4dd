"""Chooses the implementation that serves a call, by the tables below and by each implementation's `refusal`."""

import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from kernels.device import device
from kernels.mesh import free


# The module of each implementation. It has a function with the operation's name, and `refusal` with the same arguments,
# which returns why it cannot take them, or None. To add an implementation, write a module and list it in these tables.
MODULES = {
    "attention": {
        "reference": "reference",
        "xla": "attention_xla",
        "tpu": "attention_tpu",
        "triton": "attention_triton",
        "cudnn": "attention_cudnn",
        "mosaic": "attention_mosaic",
    },
    "decode_attention": {
        "reference": "reference",
        "xla": "decode_attention_xla",
        "tpu": "decode_attention_tpu",
        "triton": "decode_attention_triton",
    },
    "cross_entropy": {
        "reference": "reference",
        "xla": "cross_entropy_xla",
    },
    "delta_rule": {
        "reference": "delta_rule_reference",
        "xla": "delta_rule_xla",
        "triton": "delta_rule_triton",
        "tpu": "delta_rule_tpu",
    },
    "delta_step": {
        "reference": "delta_rule_reference",
        "triton": "delta_step_triton",
        "tpu": "delta_step_tpu",
    },
    "quantized_matmul": {
        "reference": "matmul_reference",
        "xla": "matmul_xla",
        "tpu": "matmul_tpu",
        "triton": "matmul_triton",
    },
    "ragged_dot": {
        "reference": "reference",
        "xla": "ragged_dot_xla",
        "tpu": "ragged_dot_tpu",
        "triton": "ragged_dot_triton",
        "mosaic": "ragged_dot_mosaic",
    },
}

# The implementations to ask, in order, by platform: the first that does not refuse serves. "mosaic" is experimental,
# and serves only where it is asked for by name.
PREFERENCES = {
    "attention": {
        "cpu": ("xla", "reference"),
        "gpu": ("cudnn", "triton", "xla", "reference"),
        "tpu": ("tpu", "xla", "reference"),
    },
    "decode_attention": {
        "cpu": ("xla", "reference"),
        "gpu": ("triton", "xla", "reference"),
        "tpu": ("tpu", "xla", "reference"),
    },
    "cross_entropy": {
        "cpu": ("xla", "reference"),
        "gpu": ("xla", "reference"),
        "tpu": ("xla", "reference"),
    },
    "delta_rule": {
        "cpu": ("xla", "reference"),
        "gpu": ("triton", "xla", "reference"),
        "tpu": ("tpu", "xla", "reference"),
    },
    "delta_step": {
        "cpu": ("reference",),
        "gpu": ("triton", "reference"),
        "tpu": ("tpu", "reference"),
    },
    "quantized_matmul": {
        "cpu": ("xla", "reference"),
        "gpu": ("triton", "xla", "reference"),
        "tpu": ("tpu", "xla", "reference"),
    },
    "ragged_dot": {
        "cpu": ("xla", "reference"),
        "gpu": ("triton", "xla", "reference"),
        "tpu": ("tpu", "xla", "reference"),
    },
}

# Implementations that XLA itself splits over a mesh. It cannot split a Pallas kernel: it would gather its arguments.
SPLIT_BY_XLA = ("reference", "xla")


class Choice(NamedTuple):
    """The implementation that serves a call, and for each of the others why it cannot, or None if it could."""

    operation: str
    implementation: str
    others: dict[str, str | None]


# JAX's caches are keyed by these contexts, so a function is traced anew under another preference.
_preferred = jax.make_user_context(())
_explained = jax.make_user_context(None)


class _Log:
    """Collects the choices of one `explain`. It is not a list, since JAX hashes the values of contexts."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []


def prefer(*implementations: str) -> AbstractContextManager[None]:
    """In `with prefer("triton"):`, asks these implementations first, in order, in all calls that name none.

    Where they cannot serve, the tables decide as usual; `explain` tells which one serves.

    Raises:
        ValueError: naming an implementation that no operation has.
    """
    known = sorted({name for modules in MODULES.values() for name in modules})
    for name in implementations:
        if name not in known:
            raise ValueError(f"No operation has an implementation {name!r}; there are {', '.join(known)}.")
    return _preferred(implementations)


def explain(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Choice]:
    """Lists which implementation would serve each operation that `function(*args, **kwargs)` calls, in order of calls.

    `function` is an operation, or anything that calls some, such as a model. Nothing is computed, so arrays may be
    `jax.ShapeDtypeStruct`s. Under `jax.set_mesh` the answer is for the devices of that mesh.
    """
    leaves, structure = jax.tree.flatten((args, kwargs))
    is_array = [hasattr(leaf, "shape") and hasattr(leaf, "dtype") for leaf in leaves]

    def call(arrays: list[Array]) -> None:
        remaining = iter(arrays)
        given = [next(remaining) if array else leaf for array, leaf in zip(is_array, leaves, strict=True)]
        args, kwargs = jax.tree.unflatten(structure, given)
        function(*args, **kwargs)

    log = _Log()
    with _explained(log):
        jax.eval_shape(call, [leaf for leaf, array in zip(leaves, is_array, strict=True) if array])
    return log.choices


def run(operation: str, implementation: str | None, *args: Any, first: str | None = None, **kwargs: Any) -> Any:
    """Runs the implementation asked for; for None, the first that can of `prefer`'s, `first` and `PREFERENCES`.

    Raises:
        ValueError: if the implementation asked for cannot take these arguments, with its reason and who can.
    """
    refusal = lambda name: _refusal(operation, name, *args, **kwargs)
    refusals = lambda: {name: refusal(name) for name in MODULES[operation] if name != implementation}
    if implementation is None:  # modules after the first that can serve are neither asked nor imported
        preference = (*_preferred.value, first, *PREFERENCES[operation][device().platform])
        implementation = next(name for name in preference if name in MODULES[operation] and refusal(name) is None)
    else:
        reason = refusal(implementation) if implementation in MODULES[operation] else "no such implementation"
        if reason is not None:
            others = "; ".join(f"{name}: {why or 'can'}" for name, why in refusals().items())
            raise ValueError(f"{operation}(implementation={implementation!r}): {reason}. The others: {others}.")
    if _explained.value is not None:
        _explained.value.choices.append(Choice(operation, implementation, refusals()))
    return getattr(_module(operation, implementation), operation)(*args, **kwargs)


def first(operation: str, implementations: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Returns the module of the first of these implementations that can serve; of the last, if none of the others."""
    able = (name for name in implementations[:-1] if _refusal(operation, name, *args, **kwargs) is None)
    return _module(operation, next(able, implementations[-1]))


def _refusal(operation: str, implementation: str, *args: Any, **kwargs: Any) -> str | None:
    axes = {axis: size for axis, size in free().items() if size > 1}
    if axes and implementation not in SPLIT_BY_XLA:
        return f"it is for one device, and the arrays may be split over a mesh of {axes}: call it in jax.shard_map"
    try:
        module = _module(operation, implementation)
    except ImportError as error:  # JAX moves and removes what these kernels are written in
        return f"jax {jax.__version__} does not have what it is written in ({error})"
    return None if implementation == "reference" else module.refusal(*args, **kwargs)


def _module(operation: str, implementation: str) -> Any:
    return importlib.import_module(f"kernels.{MODULES[operation][implementation]}")
