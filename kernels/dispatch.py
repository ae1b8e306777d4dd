"""Chooses the implementation for a call, by the platforms and the rank that each declares, and by its `refusal`.

Each operation is a folder of this package, whose `reference.py` defines the operation. Every file there that sets
`PLATFORMS` and `RANK` at its top is an implementation: it has a function with the operation's name, and `refusal` with
the same arguments, which returns why the implementation cannot take them, or None. The reference takes everything, and
has no `refusal`. A kernel whose file also has `MESH = True` splits its calls over a mesh itself, and its `refusal` says
over which meshes it cannot.
"""

import ast
import functools
import importlib
import pathlib
import re
from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from kernels.backends.device import device
from kernels.mesh import free


FOLDER = pathlib.Path(__file__).parent
EVERYWHERE = {"cpu", "gpu", "tpu"}


class Implementation(NamedTuple):
    """The platforms and the rank that an implementation's file declares."""

    platforms: tuple[str, ...]  # where it is tried; if empty, it is used only if asked for by name
    rank: int  # on a platform, the implementation of the lowest rank is tried first
    splits_itself: bool  # over a mesh

    @property
    def on_meshes(self) -> bool:
        """Whether the implementation takes arrays that are split over a mesh.

        XLA can split plain JAX, and an implementation for every platform is plain JAX. XLA cannot split a Pallas
        kernel: it would gather the kernel's arguments.
        """
        return self.splits_itself or set(self.platforms) == EVERYWHERE


@functools.cache
def operations() -> tuple[str, ...]:
    """Returns the names of the operations, which are the folders that have a `reference.py`."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/reference.py")))


@functools.cache
def implementations(operation: str) -> dict[str, Implementation]:
    """Returns an operation's implementations by name, the highest rank first, which is the reference's.

    Files are read and not imported. Importing Mosaic takes most of a second, and a name that JAX has moved or removed
    fails only the implementations that use it.
    """
    found = {}
    for path in sorted(FOLDER.joinpath(operation).glob("*.py")):
        said = dict(re.findall(r"^(PLATFORMS|RANK|MESH) = (.+)$", path.read_text(), re.MULTILINE))
        if said:
            values = (said["PLATFORMS"], said["RANK"], said.get("MESH", "False"))
            found[path.stem] = Implementation(*map(ast.literal_eval, values))
    return dict(sorted(found.items(), key=lambda item: -item[1].rank))


def preference(operation: str, platform: str) -> list[str]:
    """Returns the implementations to try on a platform, in order: the first that does not refuse is used."""
    return [name for name, said in reversed(implementations(operation).items()) if platform in said.platforms]


class Choice(NamedTuple):
    """The implementation that serves a call, and for each of the others why it cannot, or None if it could."""

    operation: str
    implementation: str
    others: dict[str, str | None]

    def __str__(self) -> str:
        """Describes the choice in words. Others' platforms are named: on a CPU their kernels are only interpreted."""
        known, names = implementations(self.operation), {"cpu": "a CPU", "gpu": "a GPU", "tpu": "a TPU"}
        where = lambda name: " or ".join(names[each] for each in known[name].platforms)
        could = lambda name: f"could, on {where(name)}" if known[name].platforms else "could, if asked for"
        others = "; ".join(f"{name}: {why or could(name)}" for name, why in self.others.items())
        return f"{self.operation} is served by {self.implementation}; {others}"


# JAX's caches are keyed by these contexts, so a function is traced anew under another preference.
_preferred = jax.make_user_context(())
_explained = jax.make_user_context(None)


class _Log:
    """The choices that one `explain` collects. It is not a list, because JAX hashes the values of contexts."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []


def prefer(*names: str) -> AbstractContextManager[None]:
    """Makes calls that name no implementation try these first, in order, within `with prefer("triton"):`.

    If these cannot serve, ranks decide as usual; `explain` lists the choices.

    Raises:
        ValueError: no operation has an implementation of such a name.
    """
    known = sorted({name for operation in operations() for name in implementations(operation)})
    for name in names:
        if name not in known:
            raise ValueError(f"No operation has an implementation {name!r}; there are {', '.join(known)}.")
    return _preferred(names)


def context() -> Hashable:
    """Returns what a traced function depends on beside its arguments: preferences, the mesh, and JAX's settings."""
    return (
        *_preferred.value,
        device(),
        jax.sharding.get_abstract_mesh(),
        jax.config.jax_default_matmul_precision,
        jax.config.jax_enable_x64,
        jax.config.jax_numpy_dtype_promotion,
    )


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
    """Runs the implementation asked for; for None, the first of `prefer`'s, `first` and `preference` that can serve.

    Raises:
        ValueError: the implementation asked for cannot take these arguments; the message says why, and which can.
    """
    known = implementations(operation)
    refusal = lambda name: _refusal(operation, name, *args, **kwargs)
    refusals = lambda: {name: refusal(name) for name in known if name != implementation}
    if implementation is None:  # modules after the first that can serve are neither asked nor imported
        asked = (*_preferred.value, first, *preference(operation, device().platform))
        implementation = next(name for name in asked if name in known and refusal(name) is None)
    else:
        reason = refusal(implementation) if implementation in known else "no such implementation"
        if reason is not None:
            others = "; ".join(f"{name}: {why or 'can'}" for name, why in refusals().items())
            raise ValueError(f"{operation}(implementation={implementation!r}): {reason}. The others: {others}.")
    if _explained.value is not None:
        _explained.value.choices.append(Choice(operation, implementation, refusals()))
    return getattr(_module(operation, implementation), operation)(*args, **kwargs)


def first(operation: str, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """Returns the module of the first of these implementations that can serve, or of the last if no other can."""
    able = (name for name in names[:-1] if _refusal(operation, name, *args, **kwargs) is None)
    return _module(operation, next(able, names[-1]))


def _refusal(operation: str, implementation: str, *args: Any, **kwargs: Any) -> str | None:
    axes = {axis: size for axis, size in free().items() if size > 1}
    if axes and not implementations(operation)[implementation].on_meshes:
        return f"it is for one device, and the arrays may be split over a mesh of {axes}: call it in jax.shard_map"
    try:
        module = _module(operation, implementation)
    except ImportError as error:  # JAX moves and removes names that these kernels use
        return f"jax {jax.__version__} does not have what it is written in ({error})"
    return None if implementation == "reference" else module.refusal(*args, **kwargs)


def _module(operation: str, implementation: str) -> Any:
    return importlib.import_module(f"kernels.{operation}.{implementation}")
