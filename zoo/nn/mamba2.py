"""Mamba-2 (arXiv:2405.21060): a layer that remembers a matrix for each head, whose size does not grow with the text."""

import math

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PRNGKeyArray

import kernels
from kernels import Tokens, mesh
from kernels.sums import spread
from zoo.nn.layers import AbstractLinear, Conv1d, Linear, recomputed
from zoo.nn.mixer import AbstractMixer
from zoo.nn.recurrent import RecurrentCache, State, recur


class GroupedRMSNorm(eqx.Module):
    """Root mean square norm (arXiv:1910.07467) of x * silu(gate), over each of several groups of neighbouring features.

    Computed in float32 to the end.
    """

    weight: Float[Array, " dim"]
    eps: float = eqx.field(static=True)
    groups: int = eqx.field(static=True)

    def __init__(self, dim: int, groups: int, eps: float):
        self.weight, self.groups, self.eps = jnp.ones(dim), groups, eps

    @recomputed
    def __call__(self, x: Float[Array, "*batch dim"], gate: Float[Array, "*batch dim"]) -> Float[Array, "*batch dim"]:
        y = x.astype(jnp.float32) * jax.nn.silu(gate.astype(jnp.float32))
        y = y.reshape(*x.shape[:-1], self.groups, -1)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        return (y.reshape(x.shape) * jnp.broadcast_to(self.weight.astype(jnp.float32), x.shape)).astype(x.dtype)


class Mamba2(AbstractMixer):
    """A state space with a scalar decay for each head: the recurrence of `kernels.delta_rule` that erases nothing.

        S_t = exp(-dt_t exp(A_log)) S_{t-1} + dt_t B_t x_t^T,        y_t = S_t^T C_t + D x_t

    x, B and C come from a short convolution. Heads share B and C in groups of neighbours. The step dt is
    softplus(dt + dt_bias), between the two `time_step_limit`s.
    """

    in_proj: AbstractLinear  # rows: the gate, x, B, C, dt
    conv1d: Conv1d  # of x, B and C
    dt_bias: Float[Array, " heads"]
    A_log: Float[Array, " heads"]
    D: Float[Array, " heads"]
    norm: GroupedRMSNorm
    out_proj: AbstractLinear
    heads: int = eqx.field(static=True)
    head_dim: int = eqx.field(static=True)
    groups: int = eqx.field(static=True)
    state_size: int = eqx.field(static=True)
    time_step_limit: tuple[float, ...] = eqx.field(static=True)

    def __init__(
        self,
        hidden: int,
        *,
        heads: int,
        head_dim: int,
        groups: int,
        state_size: int,
        width: int,
        time_step_limit: tuple[float, ...],
        eps: float,
        bias: bool,
        conv_bias: bool,
        key: PRNGKeyArray,
    ):
        """Initialise random weights, in float32, the steps of all heads between 0.001 and 0.1, as in Mamba-2.

        Args:
            hidden: features of what it reads and returns.
            heads, head_dim: heads, and the features of x in each.
            groups: groups of heads, each with one B and one C of `state_size` features.
            width: tokens that the convolution sees, its own among them.
            time_step_limit: the least and the largest step.
            eps: of the norm.
            bias, conv_bias: whether the two projections have biases, and whether the convolution has one.
            key: random key.

        Raises:
            ValueError: if the groups do not divide the heads.
        """
        if heads % groups:
            raise ValueError(f"The {groups} groups of a Mamba-2 layer do not divide its {heads} heads.")
        into, conv, step, out = jax.random.split(key, 4)
        self.heads, self.head_dim, self.groups, self.state_size = heads, head_dim, groups, state_size
        self.time_step_limit = time_step_limit
        inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state_size
        self.in_proj = Linear(hidden, inner + channels + heads, bias=bias, key=into)
        self.conv1d = Conv1d(channels, width, bias=conv_bias, key=conv)
        dt = jnp.exp(jax.random.uniform(step, (heads,), minval=math.log(0.001), maxval=math.log(0.1)))
        self.dt_bias = dt + jnp.log(-jnp.expm1(-dt))  # of which softplus is dt
        self.A_log = jnp.log(jnp.arange(1.0, heads + 1))
        self.D = jnp.ones(heads)
        self.norm = GroupedRMSNorm(inner, groups, eps)
        self.out_proj = Linear(inner, hidden, bias=bias, key=out)

    def __call__(
        self, x: Float[Array, "batch seq embed"], cache: RecurrentCache | None, at: Tokens
    ) -> tuple[Float[Array, "batch seq embed"], RecurrentCache | None]:
        inner, of_state = self.heads * self.head_dim, self.groups * self.state_size
        split = lambda y, size: y.reshape(*y.shape[:2], -1, size)
        gate, xbc, dt = jnp.split(self.in_proj(x), [inner, 2 * inner + 2 * of_state], axis=-1)

        # With fewer groups than devices along "tensor", each device has a copy of its heads' group.
        groups = math.lcm(self.groups, mesh.split(mesh.TENSOR))
        copies = 1 if self.heads % groups else groups // self.groups

        def step(
            inputs: tuple[Array, Array], state: State, tail: Array | None, at: Tokens
        ) -> tuple[tuple[Array, Array], State, Array]:
            xbc, dt = inputs
            xbc, last = kernels.causal_conv(xbc, self.conv1d.weight[:, 0], at, tail=tail)
            xbc = xbc if self.conv1d.bias is None else xbc + spread(self.conv1d.bias, xbc.shape)
            x, b, c = jnp.split(jax.nn.silu(xbc), [inner, inner + of_state], axis=-1)
            x, b, c = split(x, self.head_dim), split(b, self.state_size), split(c, self.state_size)
            b, c = (jnp.repeat(a, copies, axis=2) for a in (b, c))
            dt = _steps(dt, self.dt_bias, self.time_step_limit)
            decay = dt * jnp.broadcast_to(-jnp.exp(self.A_log.astype(jnp.float32)), dt.shape)
            y, state = kernels.delta_rule(c, b, x, decay, dt, at, scale=1.0, state=state, erase=False)
            return (y, x), state, last

        (y, x), cache = recur(step, (xbc, dt), cache, at)
        return self.out_proj(_normed(self.norm, self.D, y, x, gate)), cache

    def init_cache(self, layers: int, batch: int, length: int, dtype: DTypeLike) -> RecurrentCache:
        channels, _, width = self.conv1d.weight.shape[-3:]
        state = self.heads, self.state_size, self.head_dim
        return RecurrentCache.init(layers, batch, state, (width - 1, channels), dtype)


@recomputed
def _normed(
    norm: GroupedRMSNorm,
    skip: Float[Array, " heads"],
    y: Float[Array, "batch seq heads dim"],
    x: Float[Array, "batch seq heads dim"],
    gate: Float[Array, "batch seq features"],
) -> Float[Array, "batch seq features"]:
    """Computes norm(y + skip * x, gate), in float32 until the result."""
    skips = jnp.broadcast_to(skip.astype(jnp.float32)[:, None], x.shape)
    y = y.astype(jnp.float32) + skips * x.astype(jnp.float32)
    return norm(y.reshape(gate.shape), gate).astype(gate.dtype)


def _steps(
    dt: Float[Array, "batch seq heads"], bias: Float[Array, " heads"], limit: tuple[float, ...]
) -> Float[Array, "batch seq heads"]:
    """Computes softplus(dt + bias), within the limits, in float32."""
    dt = dt.astype(jnp.float32) + jnp.broadcast_to(bias.astype(jnp.float32), dt.shape)
    return jnp.clip(jax.nn.softplus(dt), *limit)
