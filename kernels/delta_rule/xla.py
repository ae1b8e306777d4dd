"""The gated delta rule in chunks of tokens (`kernels.delta_rule.shared`), with a scan in plain JAX."""

import functools

import jax
from jaxtyping import Array

from kernels.delta_rule import shared
from kernels.delta_rule.shared import Formula, Parts, Scan, refusal, turned  # noqa: F401 (dispatch asks for refusal)


PLATFORMS = ("cpu", "gpu", "tpu")
RANK = 3


def forward(formula: Formula, parts: Parts, state: Array, keep: bool) -> tuple[Array, Array, Array | None]:
    """Implements `Scan.forward`."""
    dot = formula.dot

    def step(state: Array, chunk: Parts) -> tuple[Array, tuple[Array, Array | None]]:
        written = chunk.alone if chunk.less is None else chunk.alone - dot(chunk.less, state)
        out = dot(chunk.query, state) + dot(chunk.pairs, written)
        return chunk.fade * state + dot(turned(chunk.key), written), (out, state if keep else None)

    state, (out, states) = jax.lax.scan(step, state, parts)
    return out, state, states


def backward(formula: Formula, parts: Parts, d_out: Array, d_state: Array) -> tuple[Array, Array, Array]:
    """Implements `Scan.backward`."""
    dot = formula.dot

    def step(after: Array, chunk: tuple[Parts, Array]) -> tuple[Array, tuple[Array, Array]]:
        parts, d_out = chunk
        d_written = dot(turned(parts.pairs), d_out) + dot(parts.key, after)
        before = parts.fade * after + dot(turned(parts.query), d_out)
        if parts.less is not None:
            before -= dot(turned(parts.less), d_written)
        return before, (d_written, after)

    d_state, (d_written, d_states) = jax.lax.scan(step, d_state, (parts, d_out), reverse=True)
    return d_written, d_states, d_state


delta_rule = functools.partial(shared.delta_rule, Scan(forward, backward))
