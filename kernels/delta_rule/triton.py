"""The gated delta rule in chunks of tokens (`kernels.delta_rule.shared`) for NVIDIA GPUs, with a scan in Pallas-Triton.

A program has some columns of the state of one head, in registers, and loops over the chunks. The state is transposed,
[v_dim, dim], and so are all left operands, which stay in registers. Arrays that are loaded are right operands. They
have the axis that is summed over last, as Hopper's TF32 instructions require.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array

from kernels.backends import blocks
from kernels.backends.device import device, elsewhere
from kernels.backends.triton import SMALLEST, launch, load, store
from kernels.delta_rule import shared
from kernels.delta_rule.shared import CHUNK, Formula, Parts, Scan, fade_row, padded, scan_flops, turned


PLATFORMS = ("gpu",)
RANK = 2

WIDEST = 256  # features of a key


def refusal(q: Array, k: Array, v: Array, *more: Array, **options: Any) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_rule`, or None if it can."""
    if k.shape[3] > WIDEST:
        return f"its keys have at most {WIDEST} features, and these {k.shape[3]}"
    if not k.size or not v.size:
        return "it needs a token, a head and a feature at least"
    return shared.refusal(q, k, v, *more, **options) or elsewhere("gpu")


def forward(formula: Formula, parts: Parts, state: Array, keep: bool) -> tuple[Array, Array, Array | None]:
    """Implements `Scan.forward`. XLA computes the outputs, because they are products for all chunks at once."""
    (batch, heads, dim, v_dim), chunks = state.shape, len(parts.query)
    size, wide, v_wide = _sizes("forward", formula, dim, v_dim)
    operands = (
        padded(turned(parts.alone), v_wide, CHUNK),
        None if parts.less is None else padded(parts.less, CHUNK, wide),
        padded(turned(parts.key), wide, CHUNK),
        fade_row(parts, wide),
        padded(turned(state), v_wide, wide),
    )
    results = (chunks, batch, heads, v_wide, CHUNK), (chunks, batch, heads, v_wide, wide), (batch, heads, v_wide, wide)
    written, states, last = _launch(_forward_kernel, "forward", formula, size, operands, results)
    own = lambda x: turned(x)[..., :dim, :v_dim]
    states = own(states)
    out = formula.dot(parts.query, states) + formula.dot(parts.pairs, turned(written)[..., :v_dim])
    return out, own(last), states if keep else None


def _forward_kernel(
    formula: Formula,
    size: dict[str, int],
    alone_ref: Any,
    less_ref: Any,
    key_ref: Any,
    fade_ref: Any,
    state_ref: Any,
    written_ref: Any,
    states_ref: Any,
    last_ref: Any,
) -> None:
    program = _Program.of(formula, size, state_ref)

    def step(chunk: Array, state: list[Array]) -> list[Array]:
        here = chunk, *program.head
        program.store(state, states_ref, *here)
        written = load(alone_ref.at[*here, program.columns])
        if less_ref is not None:
            for part, piece in zip(program.parts, state, strict=True):
                written -= program.product(piece, load(less_ref.at[*here, :, part]))
        store(written_ref.at[*here, program.columns], written)
        return [
            load(fade_ref.at[*here, :, part]) * piece + program.product(written, load(key_ref.at[*here, part]))
            for part, piece in zip(program.parts, state, strict=True)
        ]

    state = lax.fori_loop(0, len(alone_ref), step, program.load(state_ref, *program.head))
    program.store(state, last_ref, *program.head)


def backward(formula: Formula, parts: Parts, d_out: Array, d_state: Array) -> tuple[Array, Array, Array]:
    """Implements `Scan.backward`."""
    (batch, heads, dim, v_dim), chunks = d_state.shape, len(parts.query)
    size, wide, v_wide = _sizes("backward", formula, dim, v_dim)
    operands = (
        padded(turned(d_out), v_wide, CHUNK),
        turned(parts.pairs),
        None if parts.less is None else padded(turned(parts.less), wide, CHUNK),
        padded(turned(parts.query), wide, CHUNK),
        padded(parts.key, CHUNK, wide),
        fade_row(parts, wide),
        padded(turned(d_state), v_wide, wide),
    )
    results = (chunks, batch, heads, v_wide, CHUNK), (chunks, batch, heads, v_wide, wide), (batch, heads, v_wide, wide)
    d_written, d_states, first = _launch(_backward_kernel, "backward", formula, size, operands, results)
    own = lambda x: turned(x)[..., :dim, :v_dim]
    return turned(d_written)[..., :v_dim], own(d_states), own(first)


def _backward_kernel(
    formula: Formula,
    size: dict[str, int],
    d_out_ref: Any,
    pairs_ref: Any,
    less_ref: Any,
    query_ref: Any,
    key_ref: Any,
    fade_ref: Any,
    d_state_ref: Any,
    d_written_ref: Any,
    d_states_ref: Any,
    first_ref: Any,
) -> None:
    program = _Program.of(formula, size, d_state_ref)

    def step(n: Array, d_state: list[Array]) -> list[Array]:
        here = len(d_out_ref) - 1 - n, *program.head
        program.store(d_state, d_states_ref, *here)
        d_out = load(d_out_ref.at[*here, program.columns])
        d_written = program.product(d_out, load(pairs_ref.at[here]))
        for part, piece in zip(program.parts, d_state, strict=True):
            d_written += program.product(piece, load(key_ref.at[*here, :, part]))
        store(d_written_ref.at[*here, program.columns], d_written)
        before = [
            load(fade_ref.at[*here, :, part]) * piece + program.product(d_out, load(query_ref.at[*here, part]))
            for part, piece in zip(program.parts, d_state, strict=True)
        ]
        if less_ref is None:
            return before
        return [
            piece - program.product(d_written, load(less_ref.at[*here, part]))
            for part, piece in zip(program.parts, before, strict=True)
        ]

    d_state = lax.fori_loop(0, len(d_out_ref), step, program.load(d_state_ref, *program.head))
    program.store(d_state, first_ref, *program.head)


delta_rule = functools.partial(shared.delta_rule, Scan(forward, backward))


class _Program(NamedTuple):
    """A program's share: some columns of one head's state. The state is a list of [columns, features of keys]."""

    formula: Formula
    head: tuple[Array, Array]  # the row of the batch, and the head
    columns: Any  # a slice
    parts: list[Any]  # slices of the features of keys

    @classmethod
    def of(cls, formula: Formula, size: dict[str, int], state_ref: Any) -> "_Program":
        wide = state_ref.shape[-1]
        parts = [pl.ds(start, min(size["dim"], wide)) for start in range(0, wide, size["dim"])]
        return cls(formula, (pl.program_id(2), pl.program_id(1)), pl.ds(pl.program_id(0) * size["v"], size["v"]), parts)

    def load(self, ref: Any, *which: Array) -> list[Array]:
        return [load(ref.at[*which, self.columns, part]) for part in self.parts]

    def store(self, state: list[Array], ref: Any, *which: Array) -> None:
        for part, piece in zip(self.parts, state, strict=True):
            store(ref.at[*which, self.columns, part], piece)

    def product(self, x: Array, y: Array) -> Array:
        """Multiplies [m, n] and the transpose of [k, n], in TF32, or as three TF32 products for nearly 24 bits."""
        precision, tf32 = self.formula.precision, lax.DotAlgorithmPreset
        if device().platform != "cpu":
            precision = tf32.TF32_TF32_F32 if precision == lax.Precision.HIGH else tf32.TF32_TF32_F32_X3
        elif precision == lax.Precision.HIGH:
            x, y = (lax.reduce_precision(a, exponent_bits=8, mantissa_bits=10) for a in (x, y))
        return lax.dot_general(x, y, (((1,), (1,)), ((), ())), precision=precision, preferred_element_type=jnp.float32)


def _sizes(kernel: str, formula: Formula, dim: int, v_dim: int) -> tuple[dict[str, int], int, int]:
    """Returns the sizes for a kernel, and the numbers of features of keys and of values, padded to fill its blocks."""
    wide, v_wide = (max(SMALLEST, pl.next_power_of_2(width)) for width in (dim, v_dim))
    dtype = jnp.bfloat16 if formula.precision == lax.Precision.HIGH else jnp.float32
    size = blocks.sizes(__name__, kernel, dtype, f"d{max(64, wide)}")
    size = size | {"v": min(size["v"], v_wide)}
    return size, wide, pl.cdiv(v_dim, size["v"]) * size["v"]


def _launch(
    kernel: Callable[..., None],
    name: str,
    formula: Formula,
    size: dict[str, int],
    operands: tuple[Array | None, ...],
    results: tuple[tuple[int, ...], ...],
) -> Any:
    """Runs a kernel once for each block of columns of the state, each head and each row of the batch."""
    batch, heads, v_wide, _ = results[-1]
    first, *matrices, fade, state = operands
    if formula.precision == lax.Precision.HIGH:  # rounds, because Hopper would truncate operands in shared memory
        matrices = [x if x is None else lax.reduce_precision(x, exponent_bits=8, mantissa_bits=10) for x in matrices]
    operands = first, *matrices, fade, state
    shapes = tuple(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in results)
    arrays = jax.tree.leaves((operands, shapes))
    return launch(
        functools.partial(kernel, formula, size),
        *operands,
        name=f"delta_rule_{name}",
        grid=(v_wide // size["v"], heads, batch),
        results=shapes,
        warps=size["warps"],
        stages=size["stages"],
        cost=pl.CostEstimate(
            flops=scan_flops((x.shape for x in matrices if x is not None), v_wide),
            transcendentals=0,
            bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays),
        ),
    )
