"""Norms of a few rows, for NVIDIA GPUs, in Pallas-Triton: one kernel for several arrays, or for two norms of a sum.

XLA takes a kernel for each array. It does put a norm, the sum with the residual and the sum's norm into one kernel, but
returns one result of it, and computes the other in a second one. Here one program has a row in registers.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from kernels.backends.device import elsewhere
from kernels.backends.triton import SMALLEST, Side, launch, load, store
from kernels.rms_norms import reference
from kernels.rms_norms.shared import Chain, Scaling, features
from kernels.stacked import Stacked


PLATFORMS = ("gpu",)
RANK = 2

MOST_ROWS = SMALLEST  # more rows are worth a kernel for each array
MOST_FEATURES = 1 << 14  # of a row
OF_A_WARP, MOST_WARPS = 512, 16  # features of a row, 16 of each thread


def refusal(chains: tuple[Chain, ...]) -> str | None:
    """Returns why this implementation cannot take these arguments of `rms_norms`, or None if it can."""
    if len(chains) == 1 and chains[0].residual is None:
        return "XLA norms a single array, in one kernel with what comes before and after it"
    for chain in chains:
        given = [chain.x] if chain.residual is None else [chain.x, chain.residual]
        if any(x.dtype.itemsize != 2 or x.dtype != chain.x.dtype for x in given):
            return f"it takes arrays of one dtype of 16 bits, and these are {', '.join(str(x.dtype) for x in given)}"
        if not chain.x.size:
            return "it needs a row and a feature at least"
        if (rows := chain.x.size // chain.x.shape[-1]) > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} rows, and x has {rows}"
        if (dim := features(chain.norm)) > MOST_FEATURES:
            return f"a program has a row of up to {MOST_FEATURES} features in registers, not of {dim}"
    return elsewhere("gpu")


@jax.custom_vjp
def rms_norms(chains: tuple[Chain, ...]) -> tuple[tuple[Float[Array, "*batch _"], ...], ...]:
    """Computes `kernels.rms_norms` and `kernels.add_and_norm` in Triton."""
    return _rms_norms(chains)


rms_norms.defvjp(
    lambda chains: (rms_norms(chains), chains),
    lambda chains, gradient: jax.vjp(reference.rms_norms, chains)[1](gradient),
)


@jax.jit  # so that calls outside jit compile once, too
def _rms_norms(chains: tuple[Chain, ...]) -> tuple[tuple[Array, ...], ...]:
    rows, dtype = chains[0].x.size // chains[0].x.shape[-1], chains[0].x.dtype
    flat = lambda x: None if x is None else x.reshape(rows, -1)
    widest = max(features(chain.norm) for chain in chains)
    size = sum(features(norm) for chain in chains for norm in chain.norms) * rows
    results = launch(
        functools.partial(_kernel, [[(norm.eps, norm.scaling) for norm in chain.norms] for chain in chains]),
        *((flat(c.x), flat(c.residual), [Stacked.of(norm.weight) for norm in c.norms]) for c in chains),
        name="rms_norms",
        grid=(rows, len(chains)),
        results=[[jax.ShapeDtypeStruct((rows, features(norm)), dtype) for norm in chain.norms] for chain in chains],
        warps=min(max(1, pl.next_power_of_2(widest) // OF_A_WARP), MOST_WARPS),
        stages=1,
        cost=pl.CostEstimate(flops=4 * size, transcendentals=rows, bytes_accessed=4 * size),
    )
    whole = lambda y, chain: y.reshape(*chain.x.shape[:-1], -1)
    return tuple(tuple(whole(y, chain) for y in ys) for ys, chain in zip(results, chains, strict=True))


def _kernel(formulas: list[list[tuple[float, Scaling]]], *refs: Any) -> None:
    """Computes one row of one chain."""
    row, given, made = pl.program_id(0), refs[: len(formulas)], refs[len(formulas) :]
    for number, chain in enumerate(zip(formulas, given, made, strict=True)):

        @pl.when(pl.program_id(1) == number)
        def _(chain: Any = chain) -> None:
            _row(row, *chain)


def _row(row: Array, formulas: list[tuple[float, Scaling]], given: Any, made: Any) -> None:
    x_ref, residual_ref, weights = given
    dim, dtype = made[0].shape[1], x_ref.dtype
    side = Side.of(jnp.int32(0), pl.next_power_of_2(dim), dim)
    read = lambda ref, n: load(ref.at[n, side.indices], side.own).astype(jnp.float32)
    write = lambda ref, y: store(ref.at[row, side.indices], y, side.own)

    def normed(x: Array, formula: tuple[float, Scaling], of: Stacked) -> Array:
        (eps, scaling), weight = formula, read(of.stack, of.layer[...])
        y = x * lax.rsqrt(jnp.sum(x * x) / dim + eps)
        if scaling == "rounded":
            y = y.astype(dtype).astype(jnp.float32)
        return (y * (1 + weight if scaling == "offset" else weight)).astype(dtype)

    y = normed(read(x_ref, row), formulas[0], weights[0])
    if residual_ref is not None:
        total = (read(residual_ref, row) + y.astype(jnp.float32)).astype(dtype)
        write(made[0], total)
        y = normed(total.astype(jnp.float32), formulas[1], weights[1])
    write(made[-1], y)
