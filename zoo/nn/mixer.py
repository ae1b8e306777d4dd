"""The part of a decoder's layer that reads other tokens than its own: attention, or a recurrence."""

import abc

import equinox as eqx
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from kernels import Tokens
from zoo.nn.cache import AbstractCache


class AbstractMixer(eqx.Module):
    """Attention or a recurrence: `y, cache = mixer(x, cache, at)`, as the layers of a hybrid call theirs.

    Each class has its own kind of cache, which it makes, and takes no other.
    """

    @abc.abstractmethod
    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: AbstractCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], AbstractCache | None]:
        """Computes what the layer adds to the features, and the new cache (None without one)."""

    @abc.abstractmethod
    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> AbstractCache:
        """Makes an empty cache for positions 0 to `length` - 1, of so many layers like this one."""
