"""Rows and pages of a model's caches, as an engine handles them: rows come and go, and what they share lies in pages.

What a row has of its own, such as a recurrent state, is at the second axis of the arrays that `AbstractCache.of_rows`
names. The rest lies in pages, to which a row's table points. So this works for caches of every kind, in pages or not.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeGuard

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from zoo.nn.cache import AbstractCache, AbstractPagedCache, each


HostArray = Array | np.ndarray  # numpy when the host passes it in; a JAX array within the compiled function


def windows(caches: Any) -> tuple[int | None, ...]:
    """Returns the windows of caches in pages, in order; None: the layers see everything. Each has pages of its own."""
    found = jax.tree.leaves(caches, is_leaf=lambda node: isinstance(node, AbstractCache))
    return tuple(sorted({cache.window for cache in found if _in_pages(cache)}, key=lambda window: window or 0))


def with_tables(caches: Any, tables: Sequence[Int[HostArray, "batch pages"]]) -> Any:
    """Tells caches in pages which pages the rows have. There is a table for each of the `windows`."""
    of = {window: jnp.asarray(table)[None] for window, table in zip(windows(caches), tables, strict=True)}
    return _each_in_pages(lambda c: eqx.tree_at(lambda c: c.table, c, of[c.window]), caches)


def select(caches: Any, rows: Int[HostArray, " rows"]) -> Any:
    """Returns caches of these rows of the batch. What lies in pages stays there. A number that no row has gives any."""
    own, shared = eqx.partition(caches, _of_rows(caches))
    return eqx.combine(jax.tree.map(lambda x: x.at[:, rows].get(mode="clip"), own), shared)


def replace(caches: Any, rows: Int[HostArray, " rows"], new: Any) -> Any:
    """Puts back what `select` returned and calls have changed. A number that no row has is left out."""
    own, shared = eqx.partition(new, _of_rows(caches))
    return eqx.combine(_put(eqx.filter(caches, _of_rows(caches)), rows, own), shared)


def own(caches: Any, row: Int[HostArray, ""]) -> Any:
    """Copies what one row has of its own, with None in place of what lies in pages, and of tables."""
    found = eqx.filter(caches, _own(caches))
    return jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, row, 1, axis=1), found)


def with_own(caches: Any, rows: Int[HostArray, " rows"], one: Any) -> Any:
    """Puts what `own` returned into several rows. A number that no row has is left out."""
    old, shared = eqx.partition(caches, _own(caches))
    return eqx.combine(_put(old, rows, one), shared)


def all_in_pages(caches: Any) -> bool:
    """Whether rows have nothing of their own."""
    return not jax.tree.leaves(eqx.filter(caches, _own(caches)))


def copy_pages(caches: Any, pairs: Sequence[Int[HostArray, "pairs 2"]]) -> Any:
    """Copies pages, for each pair to the first from the second, for each of the `windows`. Numbers that no page has are
    left out."""
    of = dict(zip(windows(caches), pairs, strict=True))

    def one(cache: AbstractPagedCache) -> AbstractPagedCache:
        target, source = jnp.asarray(of[cache.window]).T
        in_pages = jax.tree.map(lambda of_rows: not of_rows, cache.of_rows())
        pages, rest = eqx.partition(cache, eqx.tree_at(lambda c: c.layer, in_pages, False))
        copied = lambda x: x.at[:, target].set(x.at[:, source].get(mode="clip"))
        return eqx.combine(jax.tree.map(copied, pages), rest)

    return _each_in_pages(one, caches)


def _in_pages(cache: Any) -> TypeGuard[AbstractPagedCache]:
    return isinstance(cache, AbstractPagedCache) and cache.table is not None


def _each_in_pages(function: Callable[[AbstractPagedCache], AbstractPagedCache], caches: Any) -> Any:
    return each(lambda cache: function(cache) if _in_pages(cache) else cache, caches)


def _of_rows(caches: Any) -> Any:
    return each(lambda cache: cache.of_rows(), caches)


def _own(caches: Any) -> Any:
    return _each_in_pages(lambda cache: eqx.tree_at(lambda c: c.table, cache, False), _of_rows(caches))


def _put(old: Any, rows: Int[HostArray, " rows"], new: Any) -> Any:
    return jax.tree.map(lambda x, of_rows: x.at[:, rows].set(of_rows), old, new)
