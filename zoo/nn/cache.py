"""What a model remembers between calls of `decode`: arrays, passed in and handed back.

Each kind holds several alike layers and is seen at one of them. `update` takes what the tokens of a call add, and
returns the new cache with all that the layer's queries may look at. Negative positions are padding, and not kept.

The axes of every array are the layers, the sequences of the batch, and what is of one sequence; `layer` is a scalar.
`empty` makes a model's caches, and can do two things to them that no model knows of.
"""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

from kernels.quantize import Quantized, dequantize, quantize


NEVER = jnp.iinfo(jnp.int32).max  # the position of a slot that holds nothing: causality hides it from every query


class Int8Vectors(eqx.Module):
    """Vectors in 8 bits, each with the float32 scale that makes its largest component 127."""

    values: Int8[Array, "*vectors dim"]
    scale: Float[Array, "*vectors"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class KV(eqx.Module):
    """Keys and values of every position so far.

    Slot i holds position i. So causality masks every slot that has not been reached, whatever lies in it, and the only
    state of a decode is these arrays and the caller's `positions`.
    """

    k: Float[Array, "layers batch slots heads dim"] | Int8Vectors
    v: Float[Array, "layers batch slots heads dim"] | Int8Vectors
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, heads: int, dim: int, dtype: DTypeLike) -> "KV":
        zeros = jnp.zeros((layers, batch, slots, heads, dim), dtype)
        return cls(zeros, zeros.copy(), jnp.array(0, jnp.int32))

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
        new = KV(_write(self.k, at, k), _write(self.v, at, v), self.layer)
        return new, _read(new.k, self.layer, k.dtype), _read(new.v, self.layer, v.dtype), None


class WindowKV(eqx.Module):
    """Keys and values of the last `slots` positions only, in a ring: slot i holds a position p with p % slots == i.

    For layers that look no further back. The caller still masks by position, since what is in the ring may lie before
    the window of an early token.
    """

    k: Float[Array, "layers batch slots heads dim"] | Int8Vectors
    v: Float[Array, "layers batch slots heads dim"] | Int8Vectors
    positions: Int[Array, "layers batch slots"]
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, heads: int, dim: int, dtype: DTypeLike) -> "WindowKV":
        zeros = jnp.zeros((layers, batch, slots, heads, dim), dtype)
        return cls(zeros, zeros.copy(), jnp.full((layers, batch, slots), NEVER, jnp.int32), jnp.array(0, jnp.int32))

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
            _write(self.k, at, k), _write(self.v, at, v), self.positions.at[at].set(positions), self.layer
        )  # an index of `slots` is out of bounds, and so not written
        if seq == 1:
            return new, _read(new.k, self.layer, k.dtype), _read(new.v, self.layer, v.dtype), new.positions[self.layer]
        pairs = ((self.k, k), (self.v, v))
        keys, values = (jnp.concatenate([_read(old, self.layer, x.dtype), x], axis=1) for old, x in pairs)
        positions = jnp.where(positions < 0, NEVER, positions)
        old = self.positions[self.layer]
        old = jnp.where(old < jnp.min(positions, axis=1, keepdims=True), old, NEVER)  # what is written anew is stale
        return new, keys, values, jnp.concatenate([old, positions], axis=1)


class LatentKV(eqx.Module):
    """What multi-head latent attention (arXiv:2405.04434, section 2.1) keeps: for all heads one latent vector, from
    which keys and values are made, and one rotary key. Slot i holds position i."""

    c_kv: Float[Array, "layers batch slots rank"] | Int8Vectors
    k_pe: Float[Array, "layers batch slots rope"] | Int8Vectors
    layer: Int[Array, ""]

    @classmethod
    def empty(cls, layers: int, batch: int, slots: int, rank: int, rope: int, dtype: DTypeLike) -> "LatentKV":
        zeros = lambda dim: jnp.zeros((layers, batch, slots, dim), dtype)
        return cls(zeros(rank), zeros(rope), jnp.array(0, jnp.int32))

    def update(
        self,
        c_kv: Float[Array, "batch seq rank"],
        k_pe: Float[Array, "batch seq rope"],
        positions: Int[Array, "batch seq"] | None,
    ) -> tuple["LatentKV", Float[Array, "batch slots rank"], Float[Array, "batch slots rope"]]:
        """The cache with these written at their positions (None: from 0 on), and this layer's."""
        at = (self.layer, jnp.arange(len(c_kv))[:, None], _slots(positions, c_kv, self.c_kv.shape[2]))
        new = LatentKV(_write(self.c_kv, at, c_kv), _write(self.k_pe, at, k_pe), self.layer)
        return new, _read(new.c_kv, self.layer, c_kv.dtype), _read(new.k_pe, self.layer, k_pe.dtype)


Cache = KV | WindowKV | LatentKV


def empty_kv(
    layers: int, batch: int, slots: int, heads: int, dim: int, dtype: DTypeLike, *, window: int | None
) -> KV | WindowKV:
    """An empty cache for positions 0 to `slots` - 1, of layers that look back over `window` positions (None: all)."""
    if window is None or window >= slots:
        return KV.empty(layers, batch, slots, heads, dim, dtype)
    return WindowKV.empty(layers, batch, window, heads, dim, dtype)


def empty(model: Any, batch: int, slots: int, dtype: DTypeLike | None = None, *, widen: int = 0) -> Any:
    """`model.init_cache`: an empty cache for positions 0 to `slots` - 1.

    `dtype` None is the model's own. "int8" keeps each vector in 8 bits (a head's key or value at a position; latent
    attention's two vectors), which `update` rounds as it writes and turns back as it reads. Windows keep `widen` more
    positions than they see: whoever takes back that many tokens needs what these pushed out of the ring.
    """
    int8 = dtype is not None and jnp.dtype(dtype) == jnp.int8
    own = jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))[0].dtype
    floating = own if dtype is None or int8 else dtype

    def wider(cache: Cache) -> Cache:
        if not isinstance(cache, WindowKV):
            return cache
        layers, batch, slots, heads, dim = cache.k.shape
        return WindowKV.empty(layers, batch, slots + widen, heads, dim, floating)

    cache = model.init_cache(batch, slots, floating)
    cache = jax.tree.map(wider, cache, is_leaf=lambda c: isinstance(c, Cache))
    return jax.tree.map(_int8, cache) if int8 else cache


def _int8(x: Array) -> Array | Int8Vectors:
    return Int8Vectors(*quantize(x, jnp.int8, "channel")) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _write(store: Array | Int8Vectors, at: tuple[Array, ...], new: Float[Array, "batch seq ..."]) -> Any:
    if isinstance(store, Int8Vectors):
        values, scale = quantize(new, jnp.int8, "channel")
        return Int8Vectors(store.values.at[at].set(values), store.scale.at[at].set(scale))
    return store.at[at].set(new)


def _read(store: Array | Int8Vectors, layer: Int[Array, ""], dtype: DTypeLike) -> Float[Array, "batch slots ..."]:
    if isinstance(store, Int8Vectors):
        return dequantize(Quantized(store.values[layer], store.scale[layer])).astype(dtype)
    return store[layer]


def _slots(
    positions: Int[Array, "batch seq"] | None, new: Float[Array, "batch seq ..."], slots: int
) -> Int[Array, "batch seq"]:
    """Where to write each new token; padding gets an index out of bounds, which is not written."""
    if positions is None:
        return jnp.broadcast_to(jnp.arange(new.shape[1]), new.shape[:2])
    return jnp.where(positions < 0, slots, positions)
