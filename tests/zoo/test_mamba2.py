"""Mamba-2's layer against its recurrence, one token after the other in float64, with documents packed into a row."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from kernels import Tokens
from tests.close import close
from tests.zoo.programs import noise
from zoo.mesh import make_mesh
from zoo.nn.mamba2 import Mamba2


HEADS, DIM, GROUPS, STATE, WIDTH, LIMIT = 4, 6, 2, 5, 3, (0.1, 0.9)


def recurrence(layer, x):
    """Returns the outputs [tokens, features] of a document with these inputs."""
    p = jax.tree.map(lambda a: np.asarray(a, np.float64), layer)
    silu = lambda a: a / (1 + np.exp(-a))
    inner, of_state = HEADS * DIM, GROUPS * STATE
    gate, xbc, dt = np.split(x @ p.in_proj.weight.T + p.in_proj.bias, [inner, 2 * inner + 2 * of_state], axis=1)
    inputs = np.concatenate([np.zeros((WIDTH - 1, xbc.shape[1])), xbc])
    state, found = np.zeros((HEADS, STATE, DIM)), []
    for t in range(len(x)):
        now = silu(np.sum(inputs[t : t + WIDTH] * p.conv1d.weight[:, 0].T, axis=0) + p.conv1d.bias)
        x_t, b, c = np.split(now, [inner, inner + of_state])
        x_t, y = x_t.reshape(HEADS, DIM), np.zeros((HEADS, DIM))
        steps = np.clip(np.log1p(np.exp(dt[t] + p.dt_bias)), *LIMIT)
        for h in range(HEADS):
            key, query = (a.reshape(GROUPS, STATE)[h // (HEADS // GROUPS)] for a in (b, c))
            state[h] = np.exp(-steps[h] * np.exp(p.A_log[h])) * state[h] + steps[h] * np.outer(key, x_t[h])
            y[h] = query @ state[h] + p.D[h] * x_t[h]
        y = (y.reshape(-1) * silu(gate[t])).reshape(GROUPS, -1)
        y = y / np.sqrt(np.mean(y**2, axis=1, keepdims=True) + layer.norm.eps)
        found.append(y.reshape(-1) * p.norm.weight)
    return np.array(found) @ p.out_proj.weight.T + p.out_proj.bias


def make(groups):
    sizes: Any = dict(heads=HEADS, head_dim=DIM, groups=groups, state_size=STATE, width=WIDTH, time_step_limit=LIMIT)
    return noise(lambda: Mamba2(16, **sizes, eps=1e-5, bias=True, conv_bias=True, key=jax.random.key(0)))


def test_documents_are_the_recurrence():
    layer = make(GROUPS)
    x, lengths = np.random.RandomState(3).standard_normal((1, 24, 16)), (9, 1, 11)  # and three tokens of padding
    segments = np.repeat([1, 2, 3, 0], [*lengths, 3])[None]
    x[0, -3:] = np.nan
    run = eqx.filter_jit(lambda layer, x, segments: layer(x, None, Tokens(segments=segments))[0])
    ours = run(layer, jnp.asarray(x, jnp.float32), jnp.asarray(segments))
    for start, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
        close(ours[0, start : start + length], recurrence(layer, x[0, start : start + length]), terms=300)


def test_heads_of_one_group_are_split():
    """Heads are split over "tensor", although all of them share a group's keys and queries."""
    with jax.set_mesh(make_mesh("fsdp=4,tensor=2")):
        program = jax.make_jaxpr(lambda x: make(groups=1)(x, None, Tokens())[0])(jnp.ones((4, 24, 16)))
    split = [e.params["jaxpr"].invars for e in program.jaxpr.eqns if e.primitive.name == "shard_map"]
    assert (1, 24, HEADS // 2, DIM) in [v.aval.shape for values in split for v in values]
