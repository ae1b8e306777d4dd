"""Finds the best options of a few rows, for NVIDIA GPUs, in Pallas-Triton: one kernel for a router's step of decoding.

One program, a single warp, serves a row. Scores are compared as integers, in whose order NaN is the largest number and
-0 is less than 0, as in `jax.lax.top_k`. The best option is found k times, each time without those found before.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from kernels.backends.device import elsewhere
from kernels.backends.triton import Side, launch, load_block, store, store_block
from kernels.stacked import Stacked
from kernels.tiles import FEW
from kernels.top_k.shared import Best, Score, best, scores_of


PLATFORMS = ("gpu",)
RANK = 2

MOST_OPTIONS = 1024  # 32 for each thread, in registers
LEAST = -(2**31)  # below the order of all numbers
OF_MINUS_INFINITY = -0x7F800001  # its order


def refusal(
    logits: Float[Array, "*rows options"],
    bias: Float[Array, " options"] | Stacked | None,
    *,
    k: int,
    score: Score | None,
    groups: int,
    kept: int,
    normalise: float | None,
) -> str | None:
    """Returns why this implementation cannot take these arguments of `top_k`, or None if it can."""
    if logits.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"it takes numbers of 32 or 16 bits, and logits are {logits.dtype}"
    if not logits.size:
        return "it needs a row at least"
    if (pairs := k * logits.size // logits.shape[-1]) > FEW:
        return f"it finds one option after the other, which is for {FEW} at most, not {pairs}"
    if (options := _padded(groups) * _padded(logits.shape[-1] // groups)) > MOST_OPTIONS:
        return f"a program has all options of a row in registers, {MOST_OPTIONS} at most, not {options}"
    return elsewhere("gpu")


def top_k(
    logits: Float[Array, "*rows options"],
    bias: Float[Array, " options"] | Stacked | None,
    *,
    k: int,
    score: Score | None,
    groups: int,
    kept: int,
    normalise: float | None,
) -> Best:
    """Computes `kernels.top_k`."""
    return _top_k(logits, bias, k, score, groups, kept, normalise)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4, 5, 6))
def _top_k(logits: Array, bias: Array | Stacked | None, *rule: Any) -> Best:
    return _best(logits, bias, *rule)


def _forward(logits: Array, bias: Array | Stacked | None, *rule: Any) -> tuple[Best, tuple[Array, Array]]:
    found = _top_k(logits, bias, *rule)
    return found, (logits, found.indices)


def _backward(*given: Any) -> Any:
    _, score, _, _, normalise, (logits, indices), gradient = given
    formula = lambda logits: best(scores_of(logits, score), indices, normalise)[:2]
    return *jax.vjp(formula, logits)[1](gradient[:2]), None  # None: zeros


_top_k.defvjp(_forward, _backward)


@functools.partial(jax.jit, static_argnums=(2, 3, 4, 5, 6))  # so that calls outside jit compile once, too
def _best(
    logits: Array,
    bias: Array | Stacked | None,
    k: int,
    score: Score | None,
    groups: int,
    kept: int,
    normalise: float | None,
) -> Best:
    options, dtype = logits.shape[-1], logits.dtype if score is None else jnp.float32
    rows = logits.size // options
    scores, values, indices = launch(
        functools.partial(_kernel, score, kept, normalise),
        logits.reshape(rows, groups, -1),
        None if bias is None else _by_group(Stacked.of(bias), groups),
        name="top_k",
        grid=(rows,),
        results=(
            jax.ShapeDtypeStruct((rows, groups, options // groups), dtype),
            jax.ShapeDtypeStruct((rows, k), dtype),
            jax.ShapeDtypeStruct((rows, k), jnp.int32),
        ),
        warps=1,
        stages=1,
        cost=pl.CostEstimate(flops=0, transcendentals=logits.size, bytes_accessed=8 * logits.size),
    )
    of_rows = lambda a: a.reshape(*logits.shape[:-1], -1)
    return Best(*map(of_rows, (scores, values, indices)))


def _by_group(bias: Stacked, groups: int) -> Stacked:
    return Stacked(bias.stack.reshape(len(bias.stack), groups, -1), bias.layer)


def _kernel(
    score: Score | None,
    kept: int,
    normalise: float | None,
    logits_ref: Any,
    bias_ref: Stacked | None,
    scores_ref: Any,
    values_ref: Any,
    indices_ref: Any,
) -> None:
    (_, groups, each), row = logits_ref.shape, pl.program_id(0)
    shape = _padded(groups), _padded(each)
    group, option = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    all_groups, options = Side.of(jnp.int32(0), shape[0], groups), Side.of(jnp.int32(0), shape[1], each)
    own = (group < groups) & (option < each)

    logits = load_block(logits_ref, all_groups, options, row).astype(jnp.float32)
    scores = jnp.where(own, _scores_of(jnp.where(own, logits, -jnp.inf), score), 0)
    store_block(scores_ref, scores, all_groups, options, row)
    ranked = (
        scores
        if bias_ref is None
        else scores + load_block(bias_ref.stack, all_groups, options, bias_ref.layer[...]).astype(jnp.float32)
    )
    order = jnp.where(own, _order(ranked), LEAST)
    if groups > 1:
        order = jnp.where(own & ~_is_kept(order, option, kept)[:, None], OF_MINUS_INFINITY, order)

    number, k = group * each + option, values_ref.shape[1]
    place = jnp.arange(_padded(k), dtype=jnp.int32)

    def find(n: Array, found: tuple[Array, Array]) -> tuple[Array, Array]:
        order, values = found
        index = jnp.min(jnp.where(order == jnp.max(order), number, groups * each))
        here = own & (number == index)
        indices_ref[row, n] = index
        return jnp.where(here, LEAST, order), jnp.where(place == n, jnp.sum(jnp.where(here, scores, 0)), values)

    _, values = lax.fori_loop(0, k, find, (order, jnp.zeros(len(place), jnp.float32)))
    if normalise is not None:
        values /= jnp.sum(values) + normalise
    places = Side.of(jnp.int32(0), len(place), k)
    store(values_ref.at[row, places.indices], values.astype(values_ref.dtype), places.own)


def _scores_of(logits: Float[Array, "groups options"], score: Score | None) -> Float[Array, "groups options"]:
    """Computes `shared.scores_of` in a kernel, of logits in float32 that are -inf where there is no option."""
    if score == "softmax":
        power = jnp.exp(logits - jnp.max(logits))
        return power / jnp.sum(power)
    return jax.nn.sigmoid(logits) if score == "sigmoid" else logits


def _is_kept(order: Int[Array, "groups options"], option: Array, kept: int) -> Array:
    """Returns which groups have the largest sums of their two highest scores, which have this order."""
    first = jnp.max(order, axis=1)
    where = jnp.min(jnp.where(order == first[:, None], option, order.shape[1]), axis=1)
    second = jnp.max(jnp.where(option == where[:, None], LEAST, order), axis=1)
    total = jnp.where(first == LEAST, LEAST, _order(_number(first) + _number(second)))
    number = jnp.arange(len(total), dtype=jnp.int32)
    mine, other, before = total[:, None], total[None], number[None] < number[:, None]
    return jnp.sum(((other > mine) | ((other == mine) & before)).astype(jnp.int32), axis=1) < kept


def _order(x: Float[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Maps float32 to integers of the same order."""
    return _flipped(lax.bitcast_convert_type(x, jnp.int32))


def _number(order: Int[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Inverts `_order`."""
    return lax.bitcast_convert_type(_flipped(order), jnp.float32)


def _flipped(bits: Int[Array, "*shape"]) -> Int[Array, "*shape"]:
    """Inverts all bits but the sign of negative numbers, which float32 stores as a sign and a magnitude."""
    return jnp.where(bits < 0, bits ^ jnp.int32(2**31 - 1), bits)


def _padded(size: int) -> int:
    return pl.next_power_of_2(size)
