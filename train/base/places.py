"""Places in the memories of GPUs that are not here, and of their hosts.

jaxlib describes such GPUs without their memories, and so a `NamedSharding` on them forgets its kind of memory. A
program needs it when it is lowered; when it has been compiled, jax compares places and wants it to be forgotten.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
from jax.sharding import NamedSharding


class Place(NamedSharding):
    """A `NamedSharding` in the memory of such devices."""

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
    """The shapes of a program's arguments, each at a `Place` if one is at a `HostPlace`: jax wants all or none."""
    arrays = jax.tree.leaves(tree)
    if not any(isinstance(array.sharding, HostPlace) for array in arrays):
        return tree
    told = lambda place: place if isinstance(place, Place) else Place(place.mesh, place.spec)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=told(a.sharding)), tree)


def here(tree: Any) -> Any:
    """The same shapes, all in the memory of devices."""
    at = lambda place: NamedSharding(place.mesh, place.spec)
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=at(a.sharding)), tree)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Lets places forget their kinds of memory."""
    Place.tells = False
    try:
        yield
    finally:
        Place.tells = True
