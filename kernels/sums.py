"""Look-ups, permutations, biases and scales whose gradients are summed in float32 and rounded once.

Many tokens share a row of a table, a bias or a norm's weight, whose gradient is the sum of the tokens' gradients. XLA
sums in the dtype of the arrays, and in bfloat16 a sum stops growing at 256 times its terms. The forward results of
these functions equal those of indexing, `+` and `*`, bit for bit; only the gradients are summed differently. None of
them scatters: on GPUs a scatter of floats is a loop of atomic operations, in no fixed order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


FEW = 64  # rows that are looked up one by one on a TPU, where their width fills no register
LANES = 128  # numbers in a row of a TPU's register
BLOCK = 128  # sorted rows that one product sums: more cost more arithmetic, fewer add a level of blocks


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def spread(a: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """Computes `jnp.broadcast_to(a, shape)`."""
    return jnp.broadcast_to(a, shape)


spread.defvjp(
    lambda a, shape: (spread(a, shape), jnp.zeros((0, *a.shape), a.dtype)),
    lambda _, like, gradient: (_unspread(gradient, like.shape[1:]).astype(like.dtype),),
)


@jax.custom_vjp
def scaled(x: Float[Array, "..."], scale: Float[Array, "..."]) -> Float[Array, "..."]:
    """Computes `x * scale`, the scale broadcast to the shape of `x`. Its gradient's products are in float32, too."""
    return x * jnp.broadcast_to(scale, x.shape)


def _scaled_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, Array]:
    x, scale = residuals
    products = gradient.astype(_wide(x)) * x.astype(_wide(x))
    return gradient * jnp.broadcast_to(scale, x.shape), _unspread(products, scale.shape).astype(scale.dtype)


scaled.defvjp(lambda x, scale: (scaled(x, scale), (x, scale)), _scaled_backward)


@jax.custom_vjp
def lookup(table: Float[Array, " rows ..."], index: Int[Array, "..."]) -> Float[Array, "..."]:
    """Computes `table[index]`. Rows may be looked up any number of times."""
    if table.ndim == 2 and table.shape[1] % LANES and 1 < index.size <= FEW:
        return jax.lax.platform_dependent(table, index, tpu=_one_by_one, default=lambda table, index: table[index])
    return table[index]


def _one_by_one(table: Float[Array, "rows width"], index: Int[Array, "..."]) -> Float[Array, "... width"]:
    """Computes `table[index]` without a gather, for which XLA would copy a table that a TPU stores by its columns."""
    rows = [jax.lax.dynamic_slice_in_dim(table, each, 1) for each in index.reshape(-1)]
    return jnp.concatenate(rows).reshape(*index.shape, -1)


def _lookup_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    like, index = residuals
    rows = gradient.reshape(index.size, -1)
    sums = sums_of_rows(rows, index.reshape(-1), like.shape[1])
    return sums.astype(like.dtype).reshape(like.shape[1:]), None


lookup.defvjp(
    lambda table, index: (lookup(table, index), (jnp.zeros((0, *table.shape), table.dtype), index)), _lookup_backward
)


@jax.custom_vjp
def permuted(
    x: Float[Array, " rows ..."], index: Int[Array, " results"], back: Int[Array, "rows uses"]
) -> Float[Array, " results ..."]:
    """Computes `x[index]`, or 0 where the index is beyond the last row.

    `back` lists, for each row, the results that are copies of it, padded with indices beyond the last result.
    """
    return jnp.take(x, index, axis=0, mode="fill", fill_value=0)


def sum_of_uses(gradient: Float[Array, " results ..."], back: Int[Array, "rows uses"]) -> Float[Array, " rows ..."]:
    """Sums the gradients of each row's copies, which `back` lists as in `permuted`."""
    uses = jnp.take(gradient, back, axis=0, mode="fill", fill_value=0)
    return jnp.sum(uses.astype(_wide(uses)), axis=1).astype(gradient.dtype)


def _permuted_backward(back: Array, gradient: Array) -> tuple[Array, None, None]:
    return sum_of_uses(gradient, back), None, None


permuted.defvjp(lambda x, index, back: (permuted(x, index, back), back), _permuted_backward)


@jax.custom_vjp
def pick(values: Float[Array, "*rows options"], index: Int[Array, "*rows picked"]) -> Float[Array, "*rows picked"]:
    """Computes `jnp.take_along_axis(values, index, axis=-1)`."""
    return jnp.take_along_axis(values, index, axis=-1)


def _picked(values: Array, index: Array) -> tuple[Array, tuple[Array, Array]]:
    return pick(values, index), (index, jnp.zeros((0, values.shape[-1])))


def _pick_backward(residuals: tuple[Array, Array], gradient: Array) -> tuple[Array, None]:
    index, like = residuals
    here = jax.nn.one_hot(index, like.shape[1], dtype=bool)
    sums = jnp.sum(jnp.where(here, gradient[..., None].astype(_wide(gradient)), 0), axis=-2)
    return sums.astype(gradient.dtype), None


pick.defvjp(_picked, _pick_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def largest(values: Float[Array, "*rows options"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """Computes `jax.lax.top_k(values, k)`: the largest values, and their indices."""
    best, index = jax.lax.top_k(values, k)
    return best, index


def _largest(values: Array, k: int) -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    best, index = largest(values, k)
    return (best, index), _picked(values, index)[1]


largest.defvjp(_largest, lambda _, residuals, gradients: (_pick_backward(residuals, gradients[0])[0],))


def sums_of_rows(
    rows: Float[Array, "rows features"], index: Int[Array, " rows"], count: int
) -> Float[Array, "count features"]:
    """Sums, for each of `count` indices, the rows with that index, in float32 (float64 for float64 rows).

    For more than `BLOCK` indices the rows are sorted by index, and the runs of equal indices are summed block by block.
    Either way sums are matrix products with zeros and ones. So a row that is not finite may also make other sums NaN.
    """
    if count <= BLOCK:
        return _product("rc,rf->cf", jax.nn.one_hot(index, count, dtype=bool), rows)
    order, ids = jnp.argsort(index), jnp.arange(count, dtype=index.dtype)
    index = index[order]
    first = jnp.minimum(jnp.searchsorted(index, ids, method="sort"), len(index) - 1)
    return jnp.where((index[first] == ids)[:, None], _sums_of_runs(rows[order], index, first), 0)


def _sums_of_runs(rows: Array, index: Array, first: Array) -> Array:
    """Sums the runs of rows with equal index; each run begins at its row in `first`."""
    size = min(BLOCK, len(rows))
    rest = -len(rows) % size
    index = jnp.pad(index, (0, rest), mode="edge").reshape(-1, size)
    rows = jnp.pad(rows, ((0, rest), (0, 0))).reshape(*index.shape, -1)
    parts = _product("bij,bjf->bif", index[:, :, None] == index[:, None, :], rows)  # sums of runs, by block
    sums = parts.reshape(-1, rows.shape[-1])[first]
    if len(index) == 1:
        return sums
    # A run that continues in later blocks has its further parts in the blocks' first rows, which form runs again.
    begins, ends = index[:, 0], index[:, -1]
    goes_on = jnp.pad(begins[1:] == ends[:-1], (1, 0))
    after = jnp.minimum(
        jnp.arange(len(index), dtype=index.dtype) + (begins != ends).astype(index.dtype), len(index) - 1
    )
    more = _sums_of_runs(jnp.where(goes_on[:, None], parts[:, 0], 0), begins, after)
    more = jnp.where((begins[after] == ends)[:, None], more, 0)
    block = first // size
    return sums + jnp.where((index.reshape(-1)[first] == ends[block])[:, None], more[block], 0)


def _product(formula: str, which: Array, rows: Array) -> Array:
    """Sums rows by a product with booleans, in highest precision: multiplying a float32 by 1 must not round it."""
    highest = jax.lax.Precision.HIGHEST
    return jnp.einsum(formula, which.astype(rows.dtype), rows, precision=highest, preferred_element_type=_wide(rows))


def _unspread(a: Array, shape: tuple[int, ...]) -> Array:
    """Sums `a` to this shape, over the axes along which `jnp.broadcast_to` would have repeated it."""
    a = jnp.sum(a.astype(_wide(a)), axis=tuple(range(a.ndim - len(shape))))
    return jnp.sum(a, axis=tuple(n for n, size in enumerate(shape) if size != a.shape[n]), keepdims=True)


def _wide(a: Array) -> Any:
    """Returns the dtype of sums: float32, or float64 for float64."""
    return jnp.float64 if a.dtype == jnp.float64 else jnp.float32
