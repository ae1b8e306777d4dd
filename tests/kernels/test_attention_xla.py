"""Promises of "xla" beyond its numbers (test_attention.py): memory, skipped blocks, use in transformations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels import Causal, Chunk, Full, sliding
from kernels.attention import xla
from kernels.masks import Segments
from kernels.tokens import Tokens
from tests.close import close
from tests.kernels.oracle import QUICK, SCALE, TERMS, arrays, packed


def test_memory_is_linear_in_the_sequence():
    """Forward and backward take linear memory, with every option that could lead to building a mask."""

    def temporaries(seq, implementation):
        x = [jax.ShapeDtypeStruct((1, seq, 2, 32), jnp.float32)] * 3
        ids = [jax.ShapeDtypeStruct((1, seq), jnp.int32)] * 4

        def loss(q, k, v, *ids):
            at, kv = Tokens(ids[0], ids[2]), Tokens(ids[1], ids[3])
            return kernels.attention(
                q, k, v, at, kv, scale=SCALE, mask=sliding(99), implementation=implementation
            ).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2))).lower(*x, *ids).compile(QUICK).memory_analysis().temp_size_in_bytes

    assert temporaries(4096, "reference") > 4096 * 4096 * 4  # so this test can fail
    once, twice = temporaries(4096, "xla"), temporaries(8192, "xla")
    assert twice < 2.1 * once
    assert twice < 8192 * 8192 * 4 / 10


def test_inside_a_sharded_scanned_rematerialised_model():
    """The batch stays split over eight devices, nothing is gathered, and the numbers equal the reference's."""
    q, k, v, _ = arrays(batch=8, seq=160, dim=8)
    segments = np.repeat([[1, 2, 0]], 8, axis=0).repeat([70, 60, 30], axis=1).astype(np.int32)

    def loss(q, k, v, segments, implementation):
        def layer(x, scale):
            at = Tokens(segments=segments)
            x = kernels.attention(x, k * scale, v, at, scale=SCALE, implementation=implementation)
            return x, None

        return jnp.square(jax.lax.scan(jax.checkpoint(layer), q, jnp.array([1.0, 2.0]))[0]).sum()

    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = NamedSharding(mesh, P("data"))
    gradient = lambda implementation, **options: jax.jit(
        jax.grad(functools.partial(loss, implementation=implementation), (0, 1, 2)), compiler_options=QUICK, **options
    )
    compiled = gradient("xla", in_shardings=split).lower(q, k, v, segments).compile()
    actual = compiled(*jax.device_put((q, k, v, segments), split))
    expected = gradient("reference")(q, k, v, segments)
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.sharding.is_equivalent_to(split, 4)
        close(ours, theirs, terms=TERMS)
    assert "all-gather" not in compiled.as_text()


@pytest.mark.parametrize(
    "options, blocks",
    [
        (dict(mask=Full()), 16),
        (dict(), 4 + 3 + 2 + 1),
        (dict(mask=sliding(128)), 4 + 3),
        (dict(mask=Causal() & Chunk(256)), 1 + 2 + 1 + 2),
        (dict(mask=Full() & Segments(), **packed([256, 128, 128])), 4 + 1 + 1),
        (dict(mask=Causal() & Segments(), **packed([256, 128, 128])), 3 + 1 + 1),
    ],
)
def test_blocks_that_nobody_sees_are_skipped(options, blocks):
    sequence = xla.Blocks.of(4 * xla.BLOCK)
    indices = np.arange(sequence.length)[None]
    q, kv = (Tokens(options.get(f"{side}_positions", indices), options.get(f"{side}_segments")) for side in ("q", "kv"))
    visible_blocks = jax.jit(xla.visible_blocks, static_argnums=(0, 1, 3))
    first, end = visible_blocks(options.get("mask", Causal()), sequence, q, sequence, kv)
    assert (end - first).sum() == blocks
