"""Shardings with a kind of memory, on GPUs that are not attached to this machine and in their hosts' memory.

jaxlib describes such GPUs without their memories, and so a `NamedSharding` on them loses its kind of memory. Lowering a
program needs the kind. After compiling, jax compares shardings, and those must report no kind.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding


class Place(NamedSharding):
    """A `NamedSharding` in the memory of devices that are not attached."""

    kind: str = "device"
    tells: bool = True

    @property
    def memory_kind(self) -> str | None:
        return self.kind if Place.tells else None

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and super().__eq__(other)

    def __hash__(self) -> int:
        return hash((self.kind, super().__hash__()))


class HostPlace(Place):
    """A `NamedSharding` in the memory of their host."""

    kind = "pinned_host"


def explicit(tree: Any) -> Any:
    """Gives every argument's shape a `Place` if one has a `HostPlace`, as jax needs memory kinds on all or none."""
    arrays = jax.tree.leaves(tree)
    if not any(isinstance(array.sharding, HostPlace) for array in arrays):
        return tree
    told = lambda place: place if isinstance(place, Place) else Place(place.mesh, place.spec)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=told(a.sharding)), tree)


def here(tree: Any) -> Any:
    """Returns the same shapes, all in the memory of devices."""
    at = lambda place: NamedSharding(place.mesh, place.spec)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at(a.sharding)), tree)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Makes shardings report no memory kind inside the `with`: a compiled program for devices not attached has none."""
    Place.tells = False
    try:
        yield
    finally:
        Place.tells = True
