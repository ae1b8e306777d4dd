"""The gated delta rule in chunks of tokens (`kernels.delta_rule.shared`) for TPUs, with a scan in Pallas.

A step of the grid has one chunk of a few heads, whose products interleave. Their states stay in VMEM from the first
chunk to the last. A state is transposed, [v_dim, dim]: its decay is then a row, which a TPU broadcasts for free.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from kernels.backends.device import device, elsewhere
from kernels.delta_rule import shared
from kernels.delta_rule.shared import CHUNK, Formula, Parts, Scan, fade_row, padded, scan_flops, turned


PLATFORMS = ("tpu",)
RANK = 2

LANES = 128  # of a register
TOGETHER = 4  # heads of a step: a head's products wait for one another, and those of other heads fill the time
WIDEST = 512  # features of a key or a value: the blocks of a step take at most half of the VMEM that all TPUs have


def refusal(q: Array, k: Array, v: Array, *more: Array, **options: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_rule`, or None if it can."""
    if max(k.shape[3], v.shape[3]) > WIDEST:
        return f"its heads have at most {WIDEST} features, and these {k.shape[3]} and {v.shape[3]}"
    if not k.size or not v.size:
        return "it needs a token, a head and a feature at least"
    return shared.refusal(q, k, v, *more, **options) or elsewhere("tpu")


def forward(formula: Formula, parts: Parts, state: Array, keep: bool) -> tuple[Array, Array, Array | None]:
    """Implements `Scan.forward`."""
    dim, v_dim = state.shape[2:]
    out, last, *states = _launch(
        _forward_kernel, formula, parts, parts.alone, state, ("tokens", "first", *["states"] * keep)
    )
    own = lambda x: turned(x)[..., :dim, :v_dim]
    return out[..., :v_dim], own(last), own(states[0]) if keep else None


def _forward_kernel(
    formula: Formula, head: int, query: Any, pairs: Any, less: Any, key: Any, fade: Any, alone: Any, state: Any,
    out: Any, last: Any, *states: Any,
) -> None:  # fmt: skip
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        last[head] = state[head]

    before = last[head]
    for ref in states:
        ref[head] = before
    written = alone[head]
    if less is not None:
        written -= _dot(formula, less[head], before, 1, 1)
    out[head] = _dot(formula, query[head], before, 1, 1) + _dot(formula, pairs[head], written, 1, 0)
    last[head] = fade[head] * before + _dot(formula, written, key[head], 0, 0)


def backward(formula: Formula, parts: Parts, d_out: Array, d_state: Array) -> tuple[Array, Array, Array]:
    """Implements `Scan.backward`."""
    dim, v_dim = d_state.shape[2:]
    d_written, first, d_states = _launch(
        _backward_kernel, formula, parts, d_out, d_state, ("tokens", "first", "states")
    )
    own = lambda x: turned(x)[..., :dim, :v_dim]
    return d_written[..., :v_dim], own(d_states), own(first)


def _backward_kernel(
    formula: Formula, head: int, query: Any, pairs: Any, less: Any, key: Any, fade: Any, d_out: Any, d_state: Any,
    d_written: Any, first: Any, d_states: Any,
) -> None:  # fmt: skip
    @pl.when(pl.program_id(2) == 0)
    def _() -> None:
        first[head] = d_state[head]

    after = first[head]
    d_states[head] = after
    written = _dot(formula, pairs[head], d_out[head], 0, 0) + _dot(formula, key[head], after, 1, 1)
    d_written[head] = written
    before = fade[head] * after + _dot(formula, d_out[head], query[head], 0, 0)
    first[head] = before if less is None else before - _dot(formula, written, less[head], 0, 0)


delta_rule = functools.partial(shared.delta_rule, Scan(forward, backward))


def _dot(formula: Formula, x: Array, y: Array, x_axis: int, y_axis: int) -> Array:
    """Multiplies, summing over these axes: in float32, or as three products of high and low halves in bfloat16."""
    product = functools.partial(
        lax.dot_general,
        dimension_numbers=(((x_axis,), (y_axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    if formula.precision == lax.Precision.HIGHEST:
        return product(x, y, precision=lax.Precision.HIGHEST)

    def halves(x: Array) -> tuple[Array, Array]:
        high = x.astype(jnp.bfloat16)
        return high, (x - high.astype(jnp.float32)).astype(jnp.bfloat16)

    (x, x_rest), (y, y_rest) = halves(x), halves(y)
    product = functools.partial(product, precision=lax.Precision.DEFAULT)
    return product(x, y_rest) + product(x_rest, y) + product(x, y)


def _up(width: int) -> int:
    """Rounds a number of features up to whole registers, which the features take anyway."""
    return -(-width // LANES) * LANES


def _launch(
    kernel: Callable[..., None], formula: Formula, parts: Parts, tokens: Array, state: Array, results: tuple[str, ...]
) -> Any:
    """Runs `kernel(formula, head, ..., *results)` for each chunk and head, with Refs of several heads."""
    dim, v_dim = map(_up, state.shape[2:])
    of_tokens = lambda x: padded(x, CHUNK, _up(x.shape[-1]))
    less = None if parts.less is None else of_tokens(parts.less)
    matrices = of_tokens(parts.query), parts.pairs, less, of_tokens(parts.key)
    tokens, state = of_tokens(tokens), padded(turned(state), v_dim, dim)
    operands = *matrices, fade_row(parts, dim), tokens, state
    chunks, batch, heads = tokens.shape[:3]
    most = TOGETHER if formula.precision == lax.Precision.HIGH else 1  # float32 takes six products for one, and spills
    together = next(size for size in range(most, 0, -1) if heads % size == 0)
    backward = kernel is _backward_kernel
    shapes = {"tokens": tokens.shape, "first": state.shape, "states": (chunks, *state.shape)}
    out_shape = [jax.ShapeDtypeStruct(shapes[name], jnp.float32) for name in results]

    def spec(x: Any) -> pl.BlockSpec:
        if x.ndim == 4:
            return pl.BlockSpec((None, together, *x.shape[2:]), lambda b, h, n: (b, h, 0, 0))
        at = lambda b, h, n: (chunks - 1 - n if backward else n, b, h, 0, 0)
        return pl.BlockSpec((None, None, together, *x.shape[3:]), at)

    def run(operands: Any, *results: Any) -> None:
        for head in range(together):
            kernel(formula, head, *operands, *results)

    return pl.pallas_call(
        run,
        grid=(batch, heads // together, chunks),
        in_specs=[jax.tree.map(spec, operands)],
        out_specs=[spec(x) for x in out_shape],
        out_shape=out_shape,
        name=f"delta_rule_{'backward' if backward else 'forward'}",
        interpret=device().platform == "cpu",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=scan_flops((x.shape for x in jax.tree.leaves(matrices)), v_dim),
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((operands, out_shape))),
        ),
    )(operands)
