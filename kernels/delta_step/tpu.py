"""One token of the gated delta rule for each row of a batch, over a cache of states, for TPUs, in Pallas.

It takes as long as reading and writing the states takes. A step of the grid has the states of a few heads, while those
of the next step are loaded. If a value's features do not fill registers (Mamba-2 has 64), XLA stores states transposed,
and the kernel takes them transposed: for another layout XLA would copy the cache.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from kernels.backends.device import device, elsewhere
from kernels.stacked import Slots


PLATFORMS = ("tpu",)
RANK = 2

LANES, SUBLANES = 128, 8  # of a register
LARGEST = 1 << 20  # bytes of a step's states: two in and two out take a quarter of the VMEM that all TPUs have


def refusal(q: Array, k: Array, v: Array, *_: object, **__: object) -> str | None:
    """Returns why this implementation cannot take these arguments of `delta_step`, or None if it can."""
    if v.dtype == jnp.float64:
        return "it computes in float32, and v is float64"
    if device().platform != "cpu" and k.shape[3] % LANES:
        return f"its keys have multiples of {LANES} features, and these {k.shape[3]}"
    if not k.size or not v.size:
        return "it needs a row, a head and a feature at least"
    if not _together(v.shape[2], k.shape[3], v.shape[3]):
        return f"no part of the {v.shape[2]} heads fills blocks of at most {LARGEST} bytes"
    return elsewhere("tpu")


def _together(heads: int, dim: int, v_dim: int) -> int:
    """Returns the number of heads of a step: the largest that fits and that a block may have, or 0 if none does."""
    sizes = [n for n in range(1, heads + 1) if heads % n == 0 and (n == heads or n % SUBLANES == 0)]
    return max((n for n in sizes if n * dim * v_dim * 4 <= LARGEST), default=0)


@functools.partial(jax.jit, static_argnames=("scale", "erase"))  # so that calls outside jit compile once, too
def delta_step(
    q: Float[Array, "batch 1 heads dim"],
    k: Float[Array, "batch 1 heads dim"],
    v: Float[Array, "batch 1 v_heads v_dim"],
    decay: Float[Array, "batch 1 v_heads"] | Float[Array, "batch 1 v_heads dim"],
    beta: Float[Array, "batch 1 v_heads"],
    restart: Bool[Array, "batch 1"],
    state: Slots,
    *,
    scale: float,
    erase: bool,
) -> tuple[Float[Array, "batch 1 v_heads v_dim"], Slots]:
    """Computes `kernels.delta_rule` for the only token of each row."""
    del restart
    (batch, _, heads, v_dim), dim = v.shape, k.shape[3]
    together = _together(heads, dim, v_dim)
    # All operands become vectors: a number for a head is repeated over a row of registers.
    q, k = (jnp.repeat(x, heads // k.shape[2], axis=2) for x in (q, k))
    beta, decay = beta[..., None], decay if decay.ndim == 4 else decay[..., None]
    fade = jnp.exp(decay.astype(jnp.float32))
    widths = (q, dim), (k, dim), (fade, dim), (v, v_dim), (beta, v_dim)
    vectors = [jnp.broadcast_to(x[:, 0].astype(jnp.float32), (batch, heads, width)) for x, width in widths]
    flipped = v_dim % LANES != 0
    stack = state.stack.swapaxes(-1, -2) if flipped else state.stack
    places = jnp.stack([jnp.broadcast_to(state.layer, batch), state.before, state.after])
    of_token = lambda x: pl.BlockSpec((None, together, x.shape[2]), lambda b, h, places: (b, h, 0))

    def of_state(slot: int) -> pl.BlockSpec:
        where = lambda b, h, places: (places[0, b], b, jnp.maximum(places[slot, b], 0), h, 0, 0)
        return pl.BlockSpec((None, None, None, together, *stack.shape[-2:]), where)

    out = jax.ShapeDtypeStruct((batch, heads, v_dim), jnp.float32)
    out, stack = pl.pallas_call(
        functools.partial(_kernel, scale, erase, flipped),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, heads // together),
            in_specs=[*map(of_token, vectors), of_state(1)],
            out_specs=[of_token(out), of_state(2)],
        ),
        out_shape=[out, jax.typeof(stack)],
        input_output_aliases={1 + len(vectors): 1},
        name="delta_step",
        interpret=device().platform == "cpu",
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel")),
        cost_estimate=pl.CostEstimate(
            flops=7 * batch * heads * dim * v_dim,
            transcendentals=0,
            bytes_accessed=2 * batch * heads * dim * v_dim * 4,
        ),
    )(places, *vectors, stack)
    stack = stack.swapaxes(-1, -2) if flipped else stack
    return out[:, None].astype(v.dtype), dataclasses.replace(state, stack=stack)


def _kernel(
    scale: float, erase: bool, flipped: bool, places: Any, q: Any, k: Any, fade: Any, v: Any, beta: Any, state: Any,
    out: Any, last: Any,
) -> None:  # fmt: skip
    """Computes the next states of a few heads, and the outputs that the queries read from them."""
    fresh = places[1, pl.program_id(0)] < 0
    of_keys = [x[...].T for x in (q, k, fade)]
    turned = lambda x: x.T if flipped else x
    for head in range(len(state)):
        query, key, fades = (x[:, head : head + 1] for x in of_keys)
        now, here = jnp.where(fresh, 0.0, turned(state[head])) * fades, pl.ds(head, 1)
        held = jnp.sum(now * key, axis=0, keepdims=True) if erase else 0.0
        now += key * (beta[here, :] * (v[here, :] - held))
        out[here, :] = scale * jnp.sum(now * query, axis=0, keepdims=True)
        last[head] = turned(now)
