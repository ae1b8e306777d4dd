"""What a model remembers between calls of `decode`: arrays, passed in and handed back.

Each kind holds several alike layers and is seen at one of them. `update` takes what the tokens of a call add, and
returns the new cache with all that the layer's queries may look at. Negative positions are padding, and not kept.
"""

import equinox as eqx
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int


NEVER = jnp.iinfo(jnp.int32).max  # the position of a slot that holds nothing: causality hides it from every query


class KV(eqx.Module):
    """Keys and values of every position so far.

    Slot i holds position i. So causality masks every slot that has not been reached, whatever lies in it, and the only
    state of a decode is these arrays and the caller's `positions`.
    """

    k: Float[Array, "layers batch slots heads dim"]
    v: Float[Array, "layers batch slots heads dim"]
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, heads: int, dim: int, dtype: DTypeLike) -> "KV":
        zeros = jnp.zeros((layers, batch, slots, heads, dim), dtype)
        return cls(zeros, zeros.copy(), jnp.array(0))

    def update(
        self,
        k: Float[Array, "batch seq heads dim"],
        v: Float[Array, "batch seq heads dim"],
        positions: Int[Array, "batch seq"] | None,
    ) -> tuple["KV", Float[Array, "batch slots heads dim"], Float[Array, "batch slots heads dim"], None]:
        """The cache with these written at their positions (None: from 0 on), and this layer's keys and values.

        The last result, the positions of the keys, is None: the index is the position.
        """
        at = (self.layer, jnp.arange(len(k))[:, None], _slots(positions, k, self.k.shape[2]))
        new = KV(self.k.at[at].set(k), self.v.at[at].set(v), self.layer)
        return new, new.k[self.layer], new.v[self.layer], None


class WindowKV(eqx.Module):
    """Keys and values of the last `slots` positions only, in a ring: slot i holds a position p with p % slots == i.

    For layers that look no further back. The caller still masks by position, since what is in the ring may lie before
    the window of an early token.
    """

    k: Float[Array, "layers batch slots heads dim"]
    v: Float[Array, "layers batch slots heads dim"]
    positions: Int[Array, "layers batch slots"]
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, heads: int, dim: int, dtype: DTypeLike) -> "WindowKV":
        zeros = jnp.zeros((layers, batch, slots, heads, dim), dtype)
        return cls(zeros, zeros.copy(), jnp.full((layers, batch, slots), NEVER), jnp.array(0))

    def update(
        self,
        k: Float[Array, "batch seq heads dim"],
        v: Float[Array, "batch seq heads dim"],
        positions: Int[Array, "batch seq"] | None,
    ) -> tuple[
        "WindowKV", Float[Array, "batch keys heads dim"], Float[Array, "batch keys heads dim"], Int[Array, "batch keys"]
    ]:
        """The cache with these written, and the keys and values that they may look at, with the keys' positions.

        For one token these are the ring's. Several tokens may push out of the ring what the first of them still see, so
        they get the old ring and themselves.
        """
        batch, seq, slots = *k.shape[:2], self.k.shape[2]
        if positions is None:
            positions = jnp.broadcast_to(jnp.arange(seq), (batch, seq))
        kept = (positions >= 0) & (positions > jnp.max(positions, axis=1, keepdims=True) - slots)
        at = (self.layer, jnp.arange(batch)[:, None], jnp.where(kept, positions % slots, slots))
        new = WindowKV(
            self.k.at[at].set(k), self.v.at[at].set(v), self.positions.at[at].set(positions), self.layer
        )  # an index of `slots` is out of bounds, and so not written
        if seq == 1:
            return new, new.k[self.layer], new.v[self.layer], new.positions[self.layer]
        keys, values = (jnp.concatenate(pair, axis=1) for pair in ((self.k[self.layer], k), (self.v[self.layer], v)))
        positions = jnp.where(positions < 0, NEVER, positions)
        old = self.positions[self.layer]
        old = jnp.where(old < jnp.min(positions, axis=1, keepdims=True), old, NEVER)  # what is written anew is stale
        return new, keys, values, jnp.concatenate([old, positions], axis=1)


class LatentKV(eqx.Module):
    """What multi-head latent attention (arXiv:2405.04434, section 2.1) keeps: for all heads one latent vector, from
    which keys and values are made, and one rotary key. Slot i holds position i."""

    c_kv: Float[Array, "layers batch slots rank"]
    k_pe: Float[Array, "layers batch slots rope"]
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, rank: int, rope: int, dtype: DTypeLike) -> "LatentKV":
        zeros = lambda dim: jnp.zeros((layers, batch, slots, dim), dtype)
        return cls(zeros(rank), zeros(rope), jnp.array(0))

    def update(
        self,
        c_kv: Float[Array, "batch seq rank"],
        k_pe: Float[Array, "batch seq rope"],
        positions: Int[Array, "batch seq"] | None,
    ) -> tuple["LatentKV", Float[Array, "batch slots rank"], Float[Array, "batch slots rope"]]:
        """The cache with these written at their positions (None: from 0 on), and this layer's."""
        at = (self.layer, jnp.arange(len(c_kv))[:, None], _slots(positions, c_kv, self.c_kv.shape[2]))
        new = LatentKV(self.c_kv.at[at].set(c_kv), self.k_pe.at[at].set(k_pe), self.layer)
        return new, new.c_kv[self.layer], new.k_pe[self.layer]


Cache = KV | WindowKV | LatentKV


def empty_kv(
    layers: int, batch: int, slots: int, heads: int, dim: int, dtype: DTypeLike, *, window: int | None
) -> KV | WindowKV:
    """An empty cache for positions 0 to `slots` - 1, of layers that look back over `window` positions (None: all)."""
    if window is None or window >= slots:
        return KV.empty(layers, batch, slots, heads, dim, dtype)
    return WindowKV.empty(layers, batch, window, heads, dim, dtype)


def _slots(
    positions: Int[Array, "batch seq"] | None, new: Float[Array, "batch seq ..."], slots: int
) -> Int[Array, "batch seq"]:
    """Where to write each new token; padding gets an index out of bounds, which is not written."""
    if positions is None:
        return jnp.broadcast_to(jnp.arange(new.shape[1]), new.shape[:2])
    return jnp.where(positions < 0, slots, positions)
