"""kernels.rms_norms: every implementation rounds as each norm does, and has its gradients, against float64 numpy."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kernels
from kernels import Stacked
from tests.close import close
from zoo.nn.layers import Float32RMSNorm, OffsetRMSNorm, RMSNorm


QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all of this file's time
NORMS = {RMSNorm: 72, Float32RMSNorm: 16, OffsetRMSNorm: 90}  # by kind: the features that are normed, of 90


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16)


def wide(a):
    return np.asarray(a, np.float64)


def in_half(a):
    return wide(a.astype(np.float32).astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_equals_each_norm(implementation):
    """The second layer's weights of stacks of three, and two rows of three tokens."""
    xs = [normal(2, 3, 90, seed=n) for n in range(3)]
    stacks = [normal(3, dim, seed=3 + n) for n, dim in enumerate(NORMS.values())]
    d_ys = tuple(normal(2, 3, dim, seed=6 + n) for n, dim in enumerate(NORMS.values()))

    @jax.jit
    def both(xs, stacks, d_ys):
        def normed(xs, stacks):
            of_layer = lambda norm, stack: eqx.tree_at(lambda m: m.weight, norm, Stacked(stack, jnp.int32(1)))
            norms = [of_layer(kind(dim, 1e-2), stack) for (kind, dim), stack in zip(NORMS.items(), stacks, strict=True)]
            return kernels.rms_norms(*zip(xs, norms, strict=True), implementation=implementation)

        ys, gradients = jax.vjp(normed, xs, stacks)
        return ys, gradients(d_ys)

    ys, (d_xs, d_stacks) = both.lower(xs, stacks, d_ys).compile(QUICK)(xs, stacks, d_ys)
    for kind, x, stack, d_y, y, d_x, d_stack in zip(NORMS, xs, stacks, d_ys, ys, d_xs, d_stacks, strict=True):
        dim, factor = stack.shape[1], wide(stack[1]) + (kind is OffsetRMSNorm)
        x, d_y = wide(x)[..., :dim], wide(d_y)
        inverse = 1 / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-2)
        hat = x * inverse
        want = in_half((in_half(hat) if kind is RMSNorm else hat) * factor)
        assert np.mean(wide(y) == want) > 0.99 and np.all(np.abs(wide(y) - want) <= 2**-7 * np.abs(want))
        d_hat = d_y * factor
        want = inverse * (d_hat - hat * np.mean(d_hat * hat, axis=-1, keepdims=True))
        assert not np.any(d_x[..., dim:])
        close(d_x[..., :dim], want, terms=4)
        want = np.sum(d_y * hat, axis=(0, 1))
        assert not np.any(d_stack[::2])
        close(d_stack[1], want, terms=4)


def test_refusals():
    x, norm, wider = jnp.zeros((17, 8), jnp.bfloat16), RMSNorm(8, 1e-6), RMSNorm(9, 1e-6)
    ask = lambda *pairs: kernels.rms_norms(*pairs, implementation="triton")
    with pytest.raises(ValueError, match="it takes up to 16 rows, and x has 17"):
        ask((x, norm), (x, norm))
    with pytest.raises(ValueError, match="XLA norms a single array"):
        ask((x[:2], norm))
    with pytest.raises(ValueError, match="it norms numbers of 16 bits, and x is float32"):
        ask((x[:2].astype(jnp.float32), norm), (x[:2], norm))
    with pytest.raises(ValueError, match=r"9 features is given an array of the shape \(17, 8\), beside one"):
        kernels.rms_norms((x, norm), (x, wider))
