"""Caches: the state of a model between calls of `decode`, as arrays that are passed in and returned.

A cache holds the state of several layers of one kind; `layer` is the number of the one that uses it. `update` writes
the keys and values of new tokens, and returns the new cache with everything that the layer's queries may see: as
`kernels.Stacked`, the array of all layers and the layer's number, where that is what the cache holds, so that a decode
step need not copy the layer. Tokens at negative positions are padding, and not written.

The first axis of every array is the layers, the second the batch; `layer` is a scalar.
`init_cache` makes a model's caches, and may widen their windows and keep their vectors in 8 bits.

Vectors may lie in pages, so that the rows of a batch need no more memory than their texts, and may share what they have
in common (PagedAttention, arXiv:2309.06180). Then the second axis of their arrays is the pages, the third the slots of
a page, and a cache's `table` has the numbers of each row's pages: `table[0, row, i]` holds positions i * slots to
(i + 1) * slots - 1. Who decides which page is whose is `zoo.generation.pages`.
"""

import abc
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int8

import kernels
from kernels import Stacked, Tokens
from kernels.backends.device import device
from kernels.by_head import LANES
from kernels.mesh import BATCH, TENSOR, fitting
from kernels.quantized_matmul.quantize import quantize
from kernels.stacked import read


LEAF = dict(is_leaf=lambda node: node is None)  # for `eqx.tree_at`, of a field that may be None
NEVER = jnp.iinfo(jnp.int32).max  # the position of what was never written: causality hides it from every query


class AbstractCache(eqx.Module):
    """The state of layers of one kind. Each class says how its arrays are split, quantised and taken back."""

    layer: eqx.AbstractVar[Int[Array, ""]]

    rewinds: eqx.AbstractClassVar[bool]
    """Whether tokens can be taken back, as rejected draft tokens must be: a call at an earlier position than the last
    gives the same result as if the later ones had never been made. Keys are overwritten at their positions, so they
    can; a recurrent state cannot."""

    @abc.abstractmethod
    def partition_specs(self, sizes: Mapping[str, int]) -> "AbstractCache":
        """Replaces each array by its `PartitionSpec`, for a mesh whose axes have these sizes."""

    @abc.abstractmethod
    def in_int8(self) -> "AbstractCache":
        """Quantises the vectors to 8 bits, if this kind of state allows it."""

    @abc.abstractmethod
    def widened(self, more: int) -> "AbstractCache":
        """Makes an empty cache with room for so many more positions than its layers see, if it keeps only a window."""

    @abc.abstractmethod
    def paged(self, pages: "PagesOf", slots: int, length: int) -> "AbstractCache":
        """Makes an empty cache for positions 0 to `length` - 1 whose vectors lie in pages of so many slots, if it has
        vectors for positions. There are `pages(window)` pages for layers that see `window` positions back."""

    @abc.abstractmethod
    def of_rows(self) -> "AbstractCache":
        """Replaces each array by whether its second axis is the rows of the batch. That of pages is not."""


PagesOf = Callable[[int | None], int]
"""The number of pages that layers share which see so many positions back; None: all."""


def all_of_rows(cache: AbstractCache) -> Any:
    """`AbstractCache.of_rows` of a cache that has nothing in pages: all arrays, but not the layer's number."""
    return eqx.tree_at(lambda c: c.layer, jax.tree.map(lambda _: True, cache), False)


class AbstractPagedCache(AbstractCache):
    """A cache of vectors of positions, which may lie in pages. Without a table, row n of the batch is page n."""

    table: eqx.AbstractVar[Int[Array, "1 rows row_pages"] | None]
    """The numbers of each row's pages. A number that no page has stands where the row has none: what is written there
    is dropped, and what is read there may be anything."""

    window: eqx.AbstractVar[int | None]
    """With a table: the number of positions that the layers see; None: all."""


def split_over(size: int, axes: tuple[str, ...], sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Chooses which of these axes of a mesh split an axis of an array of this size."""
    return fitting(size, {axis: n for axis, n in sizes.items() if axis in axes})


class Int8Vectors(eqx.Module):
    """Vectors quantised to 8 bits: each, or each of its parts, has a float32 scale by which its largest component is
    127."""

    values: Int8[Array, "layers batch length *heads dim"]
    scale: Float[Array, "layers batch length numbers"]
    parts: tuple[int, ...] = eqx.field(static=True)
    """The number of neighbouring features that share a scale."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape


class KV(AbstractPagedCache):
    """Keys and values of every position so far; in pages also of a window alone.

    Index i along `length` holds position i. So causality masks all that has not been reached, whatever lies there, and
    the only state of a decode is these arrays and the caller's `positions`.
    """

    k: Float[Array, "layers batch length heads dim"] | Int8Vectors
    v: Float[Array, "layers batch length heads v_dim"] | Int8Vectors
    layer: Int[Array, ""]
    table: Int[Array, "1 rows row_pages"] | None = None
    window: int | None = eqx.field(static=True, default=None)
    rewinds: ClassVar[bool] = True

    @classmethod
    def init(
        cls,
        layers: int,
        batch: int,
        length: int,
        heads: int,
        dim: int,
        dtype: DTypeLike,
        *,
        v_dim: int | None = None,
    ) -> "KV":
        k, v = _empty(layers, batch, slots_for(length), heads, dim, v_dim, dtype)
        return cls(k=k, v=v, layer=jnp.array(0, jnp.int32))

    def update(
        self, k: Float[Array, "batch seq heads dim"], v: Float[Array, "batch seq heads v_dim"], at: Tokens
    ) -> tuple["KV", Stacked, Stacked, Tokens]:
        """Writes new keys and values. Returns the cache, this layer's keys and values, and where they stand."""
        positions = positions_of(at, k)
        where = _where(self, positions, self.k.shape)
        stored_k, stored_v = _write((self.k, self.v), where, (k, v))
        new = dataclasses.replace(self, k=stored_k, v=stored_v)
        table, first = _view(self, positions, self.k.shape[2])
        keys, values = (_read(x, self.layer, dtype, table) for x, dtype in ((new.k, k.dtype), (new.v, v.dtype)))
        index = jnp.arange(keys.shape[1])[None]
        spans = None
        if at.spans is not None:  # of this call's tokens alone: earlier ones have ended
            here = (jnp.arange(len(k))[:, None], jnp.where(positions < 0, index.size, positions - first))
            spans = jnp.full(keys.shape[:2], -1).at[here].set(at.spans)
        return new, keys, values, Tokens(None if self.window is None else first + index, spans=spans)

    def partition_specs(self, sizes: Mapping[str, int]) -> "KV":
        k, v = (_vector_specs(x, sizes, paged=self.table is not None) for x in (self.k, self.v))
        return eqx.tree_at(lambda c: (c.k, c.v, c.layer, c.table), self, (k, v, P(), _table_spec(self, sizes)), **LEAF)

    def in_int8(self) -> "KV":
        return eqx.tree_at(lambda c: (c.k, c.v), self, (_int8(self.k), _int8(self.v)))

    def widened(self, more: int) -> "KV":
        return self

    def paged(self, pages: PagesOf, slots: int, length: int) -> "KV":
        return _paged_kv(self, None, pages, slots, length)

    def of_rows(self) -> "KV":
        vectors = jax.tree.map(lambda _: self.table is None, (self.k, self.v))
        return eqx.tree_at(lambda c: (c.k, c.v), all_of_rows(self), vectors)


class WindowKV(AbstractCache):
    """Keys and values of the last `length` positions only, in a ring: index i holds a position p with p % length == i.

    It serves layers that look no further back. The caller still masks by position, since the ring may hold keys before
    the window of an early token.
    """

    k: Float[Array, "layers batch length heads dim"] | Int8Vectors
    v: Float[Array, "layers batch length heads v_dim"] | Int8Vectors
    layer: Int[Array, ""]
    spare: int = eqx.field(static=True, default=0)
    """The number of positions beyond those that the layers see, by `widened` and by `slots_for`."""
    rewinds: ClassVar[bool] = True  # by `spare` tokens

    @classmethod
    def init(
        cls,
        layers: int,
        batch: int,
        length: int,
        heads: int,
        dim: int,
        dtype: DTypeLike,
        spare: int = 0,
        *,
        v_dim: int | None = None,
    ) -> "WindowKV":
        slots = slots_for(length)
        k, v = _empty(layers, batch, slots, heads, dim, v_dim, dtype)
        return cls(k, v, jnp.array(0, jnp.int32), spare + slots - length)

    def update(
        self, k: Float[Array, "batch seq heads dim"], v: Float[Array, "batch seq heads v_dim"], at: Tokens
    ) -> tuple[
        "WindowKV",
        Float[Array, "batch keys heads dim"] | Stacked,
        Float[Array, "batch keys heads v_dim"] | Stacked,
        Tokens,
    ]:
        """Writes new keys and values. Returns the cache, the keys and values to attend to, and where they stand.

        One token gets the ring, and so do neighbouring tokens of each row, as many as the ring has to spare and one.
        More may overwrite keys that the first of them still see, so they get the old ring and their own keys.
        """
        batch, seq, length = *k.shape[:2], self.k.shape[2]
        positions = positions_of(at, k)
        last = jnp.max(positions, axis=1, keepdims=True)
        kept = (positions >= 0) & (positions > last - length)
        # An index of `length` is out of bounds, and so not written.
        where = (self.layer, _rows(batch), jnp.where(kept, positions % length, length))
        stored_k, stored_v = _write((self.k, self.v), where, (k, v))
        new = WindowKV(stored_k, stored_v, self.layer, self.spare)
        if seq <= 1 + self.spare and at.spans is None:
            k_at = Tokens(_in_ring(last, length))
            return new, _read(new.k, self.layer, k.dtype), _read(new.v, self.layer, v.dtype), k_at
        pairs = ((self.k, k), (self.v, v))
        keys, values = (
            jnp.concatenate([read(_read(old, self.layer, x.dtype)), _as_stored(old, x)], axis=1) for old, x in pairs
        )
        positions = jnp.where(positions < 0, NEVER, positions)
        first = jnp.min(positions, axis=1, keepdims=True)
        old = _in_ring(jnp.where(first == NEVER, -1, first - 1), length)
        spans = None if at.spans is None else jnp.concatenate([jnp.full(old.shape, -1), at.spans], axis=1)
        return new, keys, values, Tokens(jnp.concatenate([old, positions], axis=1), spans=spans)

    def partition_specs(self, sizes: Mapping[str, int]) -> "WindowKV":
        k, v = (_vector_specs(x, sizes) for x in (self.k, self.v))
        return eqx.tree_at(lambda c: (c.k, c.v, c.layer), self, (k, v, P()))

    def in_int8(self) -> "WindowKV":
        return eqx.tree_at(lambda c: (c.k, c.v), self, (_int8(self.k), _int8(self.v)))

    def widened(self, more: int) -> "WindowKV":
        assert isinstance(self.k, jax.Array)
        layers, batch, length, heads, dim = self.k.shape
        length, v_dim = length - self.spare + more, self.v.shape[-1]
        return WindowKV.init(layers, batch, length, heads, dim, self.k.dtype, more, v_dim=v_dim)

    def paged(self, pages: PagesOf, slots: int, length: int) -> KV:
        return _paged_kv(self, self.k.shape[2] - self.spare, pages, slots, length)

    def of_rows(self) -> "WindowKV":
        return all_of_rows(self)


class LatentKV(AbstractPagedCache):
    """The cache of multi-head latent attention (arXiv:2405.04434, section 2.1): at each position one latent vector,
    from which all heads' keys and values are made, and one rotary key. Index i holds position i."""

    latents: Float[Array, "layers batch length features"] | Int8Vectors
    """The first `rank` features are the latent, the others the rotary key. In 8 bits each has a scale of its own."""
    layer: Int[Array, ""]
    rank: int = eqx.field(static=True)
    table: Int[Array, "1 rows row_pages"] | None = None
    window: ClassVar[None] = None
    rewinds: ClassVar[bool] = True

    @classmethod
    def init(cls, layers: int, batch: int, length: int, rank: int, rope: int, dtype: DTypeLike) -> "LatentKV":
        latents = jnp.zeros((layers, batch, slots_for(length), rank + rope), dtype)
        return cls(latents=latents, layer=jnp.array(0, jnp.int32), rank=rank)

    def update(self, latents: Float[Array, "batch seq features"], at: Tokens) -> tuple["LatentKV", Stacked, Tokens]:
        """Writes new latents, each with its rotary key. Returns the cache, this layer's, as keys of one head, and where
        they stand."""
        where = _where(self, positions_of(at, latents), self.latents.shape)
        (new,) = _write((self.latents,), where, (latents,))
        found = _read(new, self.layer, latents.dtype, None if self.table is None else self.table[0])
        of_one_head = dataclasses.replace(found, stack=found.stack[:, :, :, None])
        return dataclasses.replace(self, latents=new), of_one_head, Tokens()

    def partition_specs(self, sizes: Mapping[str, int]) -> "LatentKV":
        specs = _vector_specs(self.latents, sizes, heads=False, paged=self.table is not None)
        return eqx.tree_at(
            lambda c: (c.latents, c.layer, c.table), self, (specs, P(), _table_spec(self, sizes)), **LEAF
        )

    def in_int8(self) -> "LatentKV":
        rope = self.latents.shape[3] - self.rank
        return eqx.tree_at(lambda c: c.latents, self, _int8(self.latents, self.rank, rope))

    def widened(self, more: int) -> "LatentKV":
        return self

    def paged(self, pages: PagesOf, slots: int, length: int) -> "LatentKV":
        assert isinstance(self.latents, jax.Array)
        layers, batch, _, features = self.latents.shape
        latents = jnp.zeros((layers, pages(None), slots, features), self.latents.dtype)
        return dataclasses.replace(self, latents=latents, table=_empty_table(batch, slots, length))

    def of_rows(self) -> "LatentKV":
        vectors = jax.tree.map(lambda _: self.table is None, self.latents)
        return eqx.tree_at(lambda c: c.latents, all_of_rows(self), vectors)


class NoCache(AbstractCache):
    """The cache of a layer that keeps nothing between calls, such as an MLP, or attention to another layer's keys."""

    layer: Int[Array, ""]
    rewinds: ClassVar[bool] = True

    def partition_specs(self, sizes: Mapping[str, int]) -> "NoCache":
        return eqx.tree_at(lambda c: c.layer, self, P())

    def in_int8(self) -> "NoCache":
        return self

    def widened(self, more: int) -> "NoCache":
        return self

    def paged(self, pages: PagesOf, slots: int, length: int) -> "NoCache":
        return self

    def of_rows(self) -> "NoCache":
        return all_of_rows(self)


def init_kv(
    layers: int,
    batch: int,
    length: int,
    heads: int,
    dim: int,
    dtype: DTypeLike,
    *,
    window: int | None,
    v_dim: int | None = None,
) -> KV | WindowKV:
    """Makes an empty cache for positions 0 to `length` - 1, of layers that see `window` of them back (None: all).

    Heads of keys have `dim` features, and those of values `v_dim` (None: as many).
    """
    if window is None or window >= length:
        return KV.init(layers, batch, length, heads, dim, dtype, v_dim=v_dim)
    return WindowKV.init(layers, batch, window, heads, dim, dtype, v_dim=v_dim)


def slots_for(length: int) -> int:
    """Returns the number of slots that a cache of so many positions has. On TPUs it is a multiple of 128.

    TPUs store narrow heads and latents with 128 slots in a row, and kernels take whole rows (`kernels.by_head`). Slots
    beyond the last position stay empty, and causality hides them; a ring keeps more positions.
    """
    return -(-length // LANES) * LANES if device().platform == "tpu" else length


def _empty(
    layers: int, batch: int, length: int, heads: int, dim: int, v_dim: int | None, dtype: DTypeLike
) -> tuple[Float[Array, "layers batch length heads dim"], Float[Array, "layers batch length heads v_dim"]]:
    of = lambda size: jnp.zeros((layers, batch, length, heads, size), dtype)
    return of(dim), of(v_dim or dim)


@runtime_checkable
class HasCache(Protocol):
    """A model, or a draft."""

    def init_cache(self, batch: int, length: int, dtype: DTypeLike) -> Any: ...


def init_cache(
    model: HasCache,
    batch: int,
    length: int,
    dtype: DTypeLike | None = None,
    *,
    widen: int = 0,
    pages: PagesOf | None = None,
    slots: int = 64,
) -> Any:
    """Makes an empty cache of a model, for positions 0 to `length` - 1.

    `dtype` None is the model's own, and may be any of floating-point numbers: attention then casts a layer of the cache
    to the model's at each call. On a CPU 16 bits are held as float32: to write a vector, XLA there converts all layers
    to float32 and back. "int8" keeps each vector in 8 bits (a head's key or value at a position; latent
    attention's two vectors): `update` quantises as it writes, and attention reads integers and scales. Windows keep
    `widen` more positions than they see: a caller that takes so many tokens back (speculative decoding) still finds the
    keys that these overwrote. With `pages`, vectors lie in pages of so many `slots`, for which the caller sets tables.

    Raises:
        ValueError: for any other dtype.
    """
    try:
        int8 = dtype is not None and jnp.dtype(dtype) == jnp.int8
        known = dtype is None or int8 or jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        known = int8 = False
    if not known:
        raise ValueError(f"cache_dtype={dtype!r} is neither int8 nor a floating-point dtype such as bfloat16.")
    own = next((a.dtype for a in jax.tree.leaves(eqx.filter(model, eqx.is_inexact_array))), jnp.dtype(jnp.float32))
    held = own if dtype is None or int8 else jnp.dtype(dtype)
    caches = model.init_cache(batch, length, jnp.float32 if device().platform == "cpu" and held.itemsize == 2 else held)
    caches = each(lambda cache: cache.widened(widen), caches)
    if pages is not None:
        caches = each(lambda cache: cache.paged(pages, slots, length), caches)
    return each(lambda cache: cache.in_int8(), caches) if int8 else caches


def each(function: Callable[[AbstractCache], Any], caches: Any) -> Any:
    """Maps each cache of a tree of caches."""
    is_cache = lambda node: isinstance(node, AbstractCache)
    return jax.tree.map(lambda node: function(node) if is_cache(node) else node, caches, is_leaf=is_cache)


def partition_specs(caches: Any, sizes: Mapping[str, int]) -> Any:
    """Replaces each array of a model's caches by its `PartitionSpec`, for a mesh whose axes have these sizes."""
    return each(lambda cache: cache.partition_specs(sizes), caches)


def _int8(x: Array | Int8Vectors, *parts: int) -> Int8Vectors:
    """Quantises vectors, in parts of so many features (none: in one)."""
    return x if isinstance(x, Int8Vectors) else Int8Vectors(*_quantized(x, parts or (x.shape[-1],)))


def _quantized(x: Float[Array, "*vectors dim"], parts: tuple[int, ...]) -> tuple[Array, Array, tuple[int, ...]]:
    """Returns the fields of `Int8Vectors`."""
    cuts = np.cumsum(parts)[:-1]
    quantized = [quantize(part, jnp.int8, "channel") for part in jnp.split(x, cuts, axis=-1)]
    values, scales = zip(*quantized, strict=True)
    scale = scales[0] if len(parts) == 1 else jnp.stack(scales, axis=-1)
    return jnp.concatenate(values, axis=-1), scale, parts


def _vector_specs(x: Any, sizes: Mapping[str, int], *, heads: bool = True, paged: bool = False) -> Any:
    """Specs of vectors [layers, batch, length, ...]: sequences are split over the batch's axes, heads over "tensor".

    Pages are not split, since any row may use any of them."""
    rows = () if paged else split_over(x.shape[1], BATCH, sizes)
    spec = P(None, rows, None, split_over(x.shape[3], (TENSOR,), sizes)) if heads else P(None, rows)
    of = lambda vectors: (vectors.values, vectors.scale)
    return eqx.tree_at(of, x, (spec, spec)) if isinstance(x, Int8Vectors) else spec


_Place = tuple[Int[Array, ""], Int[Array | np.ndarray, "batch _"], Int[Array, "batch seq"]]
"""The index of each token's vector in an array: the layer, the row or the page, and the slot."""


def _write(
    stores: tuple[Array | Int8Vectors, ...], where: _Place, new: tuple[Float[Array, "batch seq ..."], ...]
) -> tuple[Any, ...]:
    """Writes into arrays such as keys and values: on a GPU by one kernel, unless they are quantised first."""
    plain = tuple(store for store in stores if not isinstance(store, Int8Vectors))
    if plain:
        return kernels.cache_write(plain, new, *where)
    written = []
    for store, x in zip((store for store in stores if isinstance(store, Int8Vectors)), new, strict=True):
        values, scale, parts = _quantized(x, store.parts)
        values, scale = kernels.cache_write((store.values, store.scale), (values, scale), *where)
        written.append(Int8Vectors(values, scale, parts))
    return tuple(written)


def _read(
    store: Array | Int8Vectors, layer: Int[Array, ""], dtype: DTypeLike, table: Int[Array, "batch pages"] | None = None
) -> Stacked:
    if isinstance(store, Int8Vectors):
        return Stacked(store.values, layer, store.scale, store.parts, np.dtype(dtype), table)
    found = Stacked(store, layer, table=table)
    if store.dtype == dtype:
        return found
    found = dataclasses.replace(found, wide=np.dtype(dtype))  # attention takes one dtype
    return found if device().platform == "cpu" else Stacked.of(found.read())  # kernels read what is stored


def _as_stored(store: Array | Int8Vectors, new: Float[Array, "batch seq ..."]) -> Float[Array, "batch seq ..."]:
    """Rounds vectors as the cache does, so that tokens of one call see the keys that tokens of later calls see."""
    if not isinstance(store, Int8Vectors):
        return new.astype(store.dtype).astype(new.dtype)
    return read(_read(_int8(new[None], *store.parts), jnp.zeros((), jnp.int32), new.dtype))


def _in_ring(last: Int[Array, "batch 1"], length: int) -> Int[Array, "batch length"]:
    """Returns the position that each index of a ring holds after those up to `last`: `NEVER` where that is none.

    Where later tokens have been taken back, the keys at these indices are theirs. No query sees so far back.
    """
    held = last - (last - jnp.arange(length)[None]) % length
    return jnp.where(held < 0, NEVER, held)


def _empty_table(batch: int, slots: int, length: int) -> Int[Array, "1 rows row_pages"]:
    return jnp.zeros((1, batch, -(-length // slots)), jnp.int32)


def _table_spec(cache: AbstractPagedCache, sizes: Mapping[str, int]) -> P | None:
    return None if cache.table is None else P(None, split_over(cache.table.shape[1], BATCH, sizes))


def _paged_kv(cache: KV | WindowKV, window: int | None, pages: PagesOf, slots: int, length: int) -> KV:
    assert isinstance(cache.k, jax.Array) and isinstance(cache.v, jax.Array)
    layers, batch, _, heads, dim = cache.k.shape
    k, v = _empty(layers, pages(window), slots, heads, dim, cache.v.shape[-1], cache.k.dtype)
    return KV(k=k, v=v, layer=cache.layer, table=_empty_table(batch, slots, length), window=window)


def _where(cache: AbstractPagedCache, positions: Int[Array, "batch seq"], shape: tuple[int, ...]) -> _Place:
    """Returns the index of each token's vector in arrays of this shape. That of padding is out of bounds: it is not
    written, nor are tokens for which a row has no page."""
    _, rows, length, *_ = shape
    padding = positions < 0
    if cache.table is None:
        return cache.layer, _rows(len(positions)), jnp.where(padding, length, positions)
    number = jnp.where(padding, cache.table.shape[2], positions // length)
    page = jnp.take_along_axis(cache.table[0], number, axis=1, mode="fill", fill_value=rows)
    return cache.layer, page, positions % length


def _rows(batch: int) -> Int[np.ndarray, "batch 1"]:
    """Returns the number of each row of the batch; as a constant, which a GPU does not compute in each layer."""
    return np.arange(batch, dtype=np.int32)[:, None]


def _view(
    cache: KV, positions: Int[Array, "batch seq"], slots: int
) -> tuple[Int[Array, "batch pages"] | None, Int[Array, "batch 1"] | int]:
    """Returns the pages that the tokens of a call may see, and the position at which they begin.

    Layers with a window see a few pages, from the first one that the first token sees. The tokens of a row lie within
    as many positions as the call has tokens.
    """
    if cache.table is None or cache.window is None:
        return None if cache.table is None else cache.table[0], 0
    first = jnp.min(jnp.where(positions < 0, NEVER, positions), axis=1, keepdims=True)
    begin = jnp.maximum(jnp.where(first == NEVER, 0, first) - cache.window + 1, 0) // slots
    count = min(cache.table.shape[2], -(-(cache.window + positions.shape[1] - 2) // slots) + 1)
    table = jnp.take_along_axis(cache.table[0], begin + jnp.arange(count)[None], axis=1, mode="clip")
    return table, begin * slots


def positions_of(at: Tokens, new: Float[Array, "batch seq ..."]) -> Int[Array, "batch seq"]:
    """Returns the positions of a call's tokens.

    Raises:
        ValueError: for packed documents, which a cache would mix up.
    """
    if at.segments is not None:
        raise ValueError("A cache holds one document a row: leave segments out where there is one, or the cache.")
    return jnp.broadcast_to(jnp.arange(new.shape[1]), new.shape[:2]) if at.positions is None else at.positions
