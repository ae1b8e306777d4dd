"""Norms of a few rows of several arrays, for NVIDIA GPUs, in Pallas-Triton: one kernel, where XLA takes one for each.

A program has one row of one array in registers.
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
from kernels.rms_norms.shared import Norm, Scaling, features
from kernels.stacked import Stacked


PLATFORMS = ("gpu",)
RANK = 2

MOST_ROWS = SMALLEST  # as in `kernels.products`, whose results are normed
MOST_FEATURES = 1 << 14
OF_A_WARP, MOST_WARPS = 512, 16  # features: 16 of each thread, and 32 of the widest rows


def refusal(pairs: tuple[tuple[Float[Array, "*batch _"], Norm], ...]) -> str | None:
    """Returns why this implementation cannot take these arguments of `rms_norms`, or None if it can."""
    if len(pairs) == 1:
        return "XLA norms a single array, in one kernel with the sums before it"
    for x, norm in pairs:
        if x.dtype.itemsize != 2:
            return f"it norms numbers of 16 bits, and x is {x.dtype}"
        if not x.size or not features(norm):
            return "it needs a row and a feature at least"
        if (rows := x.size // x.shape[-1]) > MOST_ROWS:
            return f"it takes up to {MOST_ROWS} rows, and x has {rows}"
        if (width := features(norm)) > MOST_FEATURES:
            return f"a program has a row in registers, of {MOST_FEATURES} features at most, not {width}"
    return elsewhere("gpu")


@jax.custom_vjp
def rms_norms(pairs: tuple[tuple[Float[Array, "*batch _"], Norm], ...]) -> tuple[Float[Array, "*batch _"], ...]:
    """Computes `kernels.rms_norms` in Triton."""
    return _rms_norms(pairs)


rms_norms.defvjp(
    lambda pairs: (rms_norms(pairs), pairs),
    lambda pairs, d_ys: jax.vjp(reference.rms_norms, pairs)[1](d_ys),
)


@jax.jit  # so that calls outside jit compile once, too
def _rms_norms(pairs: tuple[tuple[Array, Norm], ...]) -> tuple[Array, ...]:
    xs, norms = zip(*pairs, strict=True)
    rows, widths = xs[0].size // xs[0].shape[-1], [features(norm) for norm in norms]
    ys = launch(
        functools.partial(_kernel, [(norm.eps, norm.scaling) for norm in norms]),
        *(x.reshape(rows, -1) for x in xs),
        *(Stacked.of(norm.weight) for norm in norms),
        name="rms_norms",
        grid=(rows, len(xs)),
        results=[jax.ShapeDtypeStruct((rows, width), x.dtype) for x, width in zip(xs, widths, strict=True)],
        warps=min(pl.cdiv(pl.next_power_of_2(max(widths)), OF_A_WARP), MOST_WARPS),
        stages=1,
        cost=pl.CostEstimate(
            flops=4 * rows * sum(widths), bytes_accessed=(4 * rows + 2) * sum(widths), transcendentals=rows * len(xs)
        ),
    )
    return tuple(y.reshape(*x.shape[:-1], -1) for x, y in zip(xs, ys, strict=True))


def _kernel(formulas: list[tuple[float, Scaling]], *refs: Any) -> None:
    """Norms one row of one of the arrays."""
    row, count = pl.program_id(0), len(formulas)
    for number, ((eps, scaling), *of_one) in enumerate(
        zip(formulas, refs[:count], refs[count : 2 * count], refs[2 * count :], strict=True)
    ):

        @pl.when(pl.program_id(1) == number)
        def _(of_one: Any = of_one, eps: float = eps, scaling: Scaling = scaling) -> None:
            x_ref, weight_ref, y_ref = of_one
            width = y_ref.shape[1]
            feature = Side.of(jnp.int32(0), pl.next_power_of_2(width), width)
            read = lambda ref, n: load(ref.at[n, feature.indices], feature.own).astype(jnp.float32)
            x, weight = read(x_ref, row), read(weight_ref.stack, weight_ref.layer[...])
            y = x * lax.rsqrt(jnp.sum(x * x) / width + eps)
            if scaling == "rounded":
                y = y.astype(y_ref.dtype).astype(jnp.float32)
            y *= 1 + weight if scaling == "offset" else weight
            store(y_ref.at[row, feature.indices], y.astype(y_ref.dtype), feature.own)
