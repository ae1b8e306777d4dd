"""The pipeline alone: any number of rounds equals the layers one after another, with their reports."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.close import close
from tests.zoo.programs import thorough
from zoo.mesh import make_mesh
from zoo.nn.pipeline import Largest, pipeline


def run(layers, x, shared):
    def one(x, weight):
        x = x + jnp.tanh(jnp.einsum("bse,oe->bso", x, weight)) * shared["gain"][..., None]
        return x, (jnp.sum(x), Largest(-jnp.abs(x).min()))

    return jax.lax.scan(one, x, layers)


@pytest.mark.parametrize(
    ("text", "count"), [thorough("stage=2,fsdp=4", 8), ("stage=4,context=2", 12), thorough("stage=8", 8)]
)
def test_rounds(text, count):
    """There are four rounds, three, or one, with two or four microbatches for each stage."""
    random = np.random.RandomState(0)
    layers, x = (jnp.asarray(random.randn(*shape), jnp.float32) for shape in ((count, 8, 8), (16, 4, 8)))
    shared = {"gain": jnp.asarray(random.rand(16, 4), jnp.float32), "segments": None}

    def loss(function):
        def total(layers, x):
            y, reports = function(run, layers / 4, x, shared)
            # A cosine of whole sums would depend on how each of their 512 numbers is rounded.
            return jnp.sum(jnp.sin(y)) + jnp.sum(jnp.cos(reports[0] / 64)), (y, reports)

        return jax.jit(jax.value_and_grad(total, (0, 1), has_aux=True))

    with jax.set_mesh(make_mesh(text)):
        ours = loss(pipeline)(layers, x)
    for a, b in zip(*map(jax.tree.leaves, (ours, loss(lambda run, *args: run(*args))(layers, x))), strict=True):
        close(a, b, terms=512 + 12 * 8)
