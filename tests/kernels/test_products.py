"""Products of one input with several matrices, against float64 numpy; and that they serve a layer's projections."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import kernels
from kernels import Stacked
from tests.close import close
from zoo.nn.layers import Linear, project


QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all of this file's time
OUTS = 70, 16, 5  # the rows of three matrices: more than a block, half of one, few


def normal(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(ml_dtypes.bfloat16)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
def test_layers_of_stacks(implementation):
    """Sums are rounded once; x has two rows of three tokens, and features that are no multiple of a block's."""
    x, stacks = normal(2, 3, 72), [normal(2, out, 72, seed=1) for out in OUTS]
    d_outs = tuple(normal(2, 3, out, seed=2) for out in OUTS)

    @jax.jit
    def both(x, stacks, d_outs):
        layers = lambda stacks: [Stacked(stack, jnp.int32(1)) for stack in stacks]
        product = lambda x, stacks: kernels.products(x, *layers(stacks), implementation=implementation)
        ys, gradients = jax.vjp(product, x, stacks)
        return ys, gradients(d_outs)

    ys, (dx, d_stacks) = both.lower(x, stacks, d_outs).compile(QUICK)(x, stacks, d_outs)
    wide = lambda a: np.asarray(a, np.float64)
    for y, stack in zip(ys, stacks, strict=True):
        want = wide(x) @ wide(stack[1]).T
        close(y, want, terms=3)
    want = sum(wide(d) @ wide(stack[1]) for d, stack in zip(d_outs, stacks, strict=True))
    close(dx, want, terms=4)
    assert not any(np.any(d[0]) for d in d_stacks) and all(np.all(d[1]) for d in d_stacks)


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("to_latent", [True, False], ids=["to latents", "from latents"])
def test_products_by_head(to_latent, implementation):
    """W are 70 or 20 of a head's 90 rows, latents have 136 features; the queries' last features are left out."""
    heads, latent, first, size = 3, 136, *((0, 70) if to_latent else (70, 20))
    x, stack = normal(2, 3, heads, 75 if to_latent else latent), normal(2, heads * 90, latent, seed=1)
    d_out = normal(2, 3, heads, latent if to_latent else size, seed=2)
    if implementation == "reference":  # in 16 bits XLA rounds sums on a CPU
        x, stack, d_out = (a.astype(np.float32) for a in (x, stack, d_out))

    @jax.jit
    def both(x, stack, d_out):
        matrix = lambda stack: Stacked(stack, jnp.int32(1))
        options = dict(to_latent=to_latent, implementation=implementation)
        y, gradients = jax.vjp(lambda x, s: kernels.head_products(x, matrix(s), first, size, **options), x, stack)
        return y, gradients(d_out)

    y, (dx, d_stack) = both.lower(x, stack, d_out).compile(QUICK)(x, stack, d_out)
    wide = lambda a: np.asarray(a, np.float64)
    w = wide(stack[1]).reshape(heads, 90, latent)[:, first : first + size]
    read = wide(x)[..., : size if to_latent else latent]
    want = np.einsum("bshn,hnr->bshr" if to_latent else "bshr,hvr->bshv", read, w)
    close(y, want, terms=3 if y.dtype == jnp.bfloat16 else latent)
    want = np.einsum("bshr,hnr->bshn" if to_latent else "bshv,hvr->bshr", wide(d_out), w)
    close(dx[..., : want.shape[-1]], want, terms=4 if dx.dtype == jnp.bfloat16 else latent)
    assert not np.any(dx[..., want.shape[-1] :]) and not np.any(d_stack[0]) and np.any(d_stack[1])


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("sizes", [None, (3, 0, 17, 2)], ids=["rows", "groups"])
def test_gated_products(sizes, implementation):
    """A group has more than a tile's rows and one has none. Rows without a group yield zeros, whatever they hold."""
    gate, up = (normal(2, *([4] if sizes else []), 70, 72, seed=seed) for seed in (1, 2))
    gate, up = (0.1 * w.astype(np.float32) for w in (gate, up))
    gate, up = (w.astype(ml_dtypes.bfloat16) for w in (gate, up))
    x = normal(24, 72) if sizes else normal(2, 3, 72)
    if sizes:
        x[22:] = np.nan
    group_sizes, d_out = None if sizes is None else jnp.array(sizes), normal(*x.shape[:-1], 70, seed=3)
    formula = lambda gate, up: (jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32)).astype(gate.dtype)

    @jax.jit
    def both(x, gate, up, d_out):
        hidden = lambda x, *stacks: kernels.gated_products(
            x, *(Stacked(s, jnp.int32(1)) for s in stacks), formula, group_sizes, implementation=implementation
        )
        y, gradients = jax.vjp(hidden, x, gate, up)
        return y, gradients(d_out)

    y, (dx, *d_stacks) = both.lower(x, gate, up, d_out).compile(QUICK)(x, gate, up, d_out)
    wide = lambda a: np.asarray(a, np.float64)
    of_row = np.repeat(np.arange(4), sizes) if sizes else slice(None)
    rows = wide(x)[:22] if sizes else wide(x)
    product = lambda w: np.einsum("ri,roi->ro" if sizes else "...i,oi->...o", rows, wide(w[1])[of_row])
    g, u = product(gate), product(up)
    want = g / (1 + np.exp(-g)) * u
    close(y[: len(want)], want, terms=8)
    assert not np.any(y[len(want) :])
    sigmoid = 1 / (1 + np.exp(-g))
    d = wide(d_out)[: len(want)]
    d_g, d_u = d * u * sigmoid * (1 + g * (1 - sigmoid)), d * g * sigmoid
    back = lambda d, w: np.einsum("ro,roi->ri" if sizes else "...o,oi->...i", d, wide(w[1])[of_row])
    want = back(d_g, gate) + back(d_u, up)
    close(dx[: len(want)], want, terms=8)
    assert all(not np.any(d[0]) and np.any(d[1]) for d in d_stacks)


def test_a_layer_projects_by_it():
    """Plain linear maps, with biases, in one call; others by themselves, each in its own way."""

    class Twice(Linear):
        def __call__(self, x):
            return 2 * super().__call__(x)

    x, key = jnp.asarray(normal(3, 8)), jax.random.key(0)
    in_half = lambda m: jax.tree.map(lambda a: (a + 1).astype(jnp.bfloat16), m)
    linears = [
        in_half(kind(8, 4, bias=bias, key=key)) for kind, bias in ((Linear, True), (Linear, False), (Twice, True))
    ]
    with kernels.prefer("triton"):
        calls = lambda *linears: [call[:2] for call in kernels.explain(lambda x: project(x, *linears), x)]
        assert calls(*linears[:2]) == [("products", "triton")] and calls(*linears) == []
        found = jax.jit(lambda x, linears: project(x, *linears))(x, linears[:2])
    for y, linear in zip(found, linears[:2], strict=True):
        close(y, linear(x), terms=4)
    assert all(jnp.array_equal(y, linear(x)) for y, linear in zip(project(x, *linears), linears, strict=True))


def test_refusals():
    x, w = jnp.zeros((17, 8), jnp.bfloat16), jnp.zeros((4, 8), jnp.bfloat16)
    with pytest.raises(ValueError, match="it takes up to 16 rows, and x has 17"):
        kernels.products(x, w, implementation="triton")
    with pytest.raises(ValueError, match="it multiplies numbers of 16 bits, and x is float32"):
        kernels.products(x.astype(jnp.float32), w.astype(jnp.float32), implementation="triton")
    with pytest.raises(ValueError, match=r"shape \(4, 8\) in float32, and x has rows of 8 features in bfloat16"):
        kernels.products(x, w, w.astype(jnp.float32))
