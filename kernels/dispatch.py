"""Chooses the implementation that serves a call, by what each says of itself and by its `refusal`.

Each operation is a folder of this package, and `reference.py` in it defines it. Every file there that says `PLATFORMS`
and `RANK` at its top is an implementation: it has a function with the operation's name, and `refusal` with the same
arguments, which returns why it cannot take them, or None. The reference takes everything, and has none.
"""

import ast
import functools
import importlib
import pathlib
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
from jaxtyping import Array

from kernels.backends.device import device
from kernels.mesh import free


FOLDER = pathlib.Path(__file__).parent
EVERYWHERE = {"cpu", "gpu", "tpu"}


class Implementation(NamedTuple):
    """The two lines at the top of an implementation's file."""

    platforms: tuple[str, ...]  # where it is asked; with none, it serves only where it is asked for by name
    rank: int  # of those for a platform, the one of the lowest rank is asked first

    @property
    def split_by_xla(self) -> bool:
        """Whether XLA itself can split it over a mesh.

        It can where all is plain JAX, as it is in what serves every platform. It cannot split a Pallas kernel: it would
        gather its arguments.
        """
        return set(self.platforms) == EVERYWHERE


@functools.cache
def operations() -> tuple[str, ...]:
    """Returns the names of the operations: of the folders that define one."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/reference.py")))


@functools.cache
def implementations(operation: str) -> dict[str, Implementation]:
    """Returns an operation's implementations by name, the plainest first.

    Files are read and not imported: to import Mosaic takes most of a second, and what JAX has moved or removed fails
    only the implementations that are written in it.
    """
    found = {}
    for path in sorted(FOLDER.joinpath(operation).glob("*.py")):
        said = dict(re.findall(r"^(PLATFORMS|RANK) = (.+)$", path.read_text(), re.MULTILINE))
        if said:
            found[path.stem] = Implementation(ast.literal_eval(said["PLATFORMS"]), ast.literal_eval(said["RANK"]))
    return dict(sorted(found.items(), key=lambda item: -item[1].rank))


def preference(operation: str, platform: str) -> list[str]:
    """Returns the implementations to ask on a platform, in order: the first that does not refuse serves."""
    return [name for name, said in reversed(implementations(operation).items()) if platform in said.platforms]


class Choice(NamedTuple):
    """The implementation that serves a call, and for each of the others why it cannot, or None if it could."""

    operation: str
    implementation: str
    others: dict[str, str | None]

    def __str__(self) -> str:
        """Says it in words. On a CPU, where kernels of other platforms are only interpreted, it says whose they are."""
        known, names = implementations(self.operation), {"cpu": "a CPU", "gpu": "a GPU", "tpu": "a TPU"}
        where = lambda name: " or ".join(names[each] for each in known[name].platforms)
        could = lambda name: f"could, on {where(name)}" if known[name].platforms else "could, if asked for"
        others = "; ".join(f"{name}: {why or could(name)}" for name, why in self.others.items())
        return f"{self.operation} is served by {self.implementation}; {others}"


# JAX's caches are keyed by these contexts, so a function is traced anew under another preference.
_preferred = jax.make_user_context(())
_explained = jax.make_user_context(None)


class _Log:
    """Collects the choices of one `explain`. It is not a list, since JAX hashes the values of contexts."""

    def __init__(self) -> None:
        self.choices: list[Choice] = []


def prefer(*names: str) -> AbstractContextManager[None]:
    """In `with prefer("triton"):`, asks these implementations first, in order, in all calls that name none.

    Where they cannot serve, ranks decide as usual; `explain` tells which one serves.

    Raises:
        ValueError: naming an implementation that no operation has.
    """
    known = sorted({name for operation in operations() for name in implementations(operation)})
    for name in names:
        if name not in known:
            raise ValueError(f"No operation has an implementation {name!r}; there are {', '.join(known)}.")
    return _preferred(names)


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
    """Runs the implementation asked for; for None, the first that can of `prefer`'s, `first` and `preference`.

    Raises:
        ValueError: if the implementation asked for cannot take these arguments, with its reason and who can.
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
    """Returns the module of the first of these implementations that can serve; of the last, if none of the others."""
    able = (name for name in names[:-1] if _refusal(operation, name, *args, **kwargs) is None)
    return _module(operation, next(able, names[-1]))


def _refusal(operation: str, implementation: str, *args: Any, **kwargs: Any) -> str | None:
    axes = {axis: size for axis, size in free().items() if size > 1}
    if axes and not implementations(operation)[implementation].split_by_xla:
        return f"it is for one device, and the arrays may be split over a mesh of {axes}: call it in jax.shard_map"
    try:
        module = _module(operation, implementation)
    except ImportError as error:  # JAX moves and removes what these kernels are written in
        return f"jax {jax.__version__} does not have what it is written in ({error})"
    return None if implementation == "reference" else module.refusal(*args, **kwargs)


def _module(operation: str, implementation: str) -> Any:
    return importlib.import_module(f"kernels.{operation}.{implementation}")
