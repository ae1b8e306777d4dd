"""What a model remembers between calls of `decode`: arrays, passed in and handed back."""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


class KV(eqx.Module):
    """Keys and values of several alike layers, seen at one of them.

    Slot i holds position i. So causality masks every slot that has not been reached, whatever lies in it, and the only
    state of a decode is these arrays and the caller's `positions`.
    """

    k: Float[Array, "layers batch slots heads dim"]
    v: Float[Array, "layers batch slots heads value_dim"]
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, heads: int, dim: int, dtype: DTypeLike) -> "KV":
        zeros = jnp.zeros((layers, batch, slots, heads, dim), dtype)
        return cls(zeros, zeros.copy(), jnp.array(0))

    def update(
        self,
        k: Float[Array, "batch seq heads dim"],
        v: Float[Array, "batch seq heads value_dim"],
        positions: Int[Array, "batch seq"] | None,
    ) -> tuple["KV", Float[Array, "batch slots heads dim"], Float[Array, "batch slots heads value_dim"]]:
        """The cache with these written at their positions (None: from 0 on), and all keys and values of this layer."""
        if positions is None:
            positions = jnp.arange(k.shape[1])[None]
        at = (self.layer, jnp.arange(len(k))[:, None], positions)
        new = KV(self.k.at[at].set(k), self.v.at[at].set(v), self.layer)
        return new, new.k[self.layer], new.v[self.layer]
