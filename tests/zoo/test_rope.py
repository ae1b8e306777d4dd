"""Rotary frequencies against transformers' values for the published configurations, to float32 rounding."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from kernels import Tokens
from tests.close import close
from zoo.nn.rope import LinearScaling, Llama3Scaling, Rotary, YarnScaling


GOLDEN = {
    "lfm2-1.2b": {1: 0.649381638, 31: 1.53992653e-06},
    "llama3-8b": {1: 0.814617217, 32: 0.00141421345, 48: 5.31829573e-05, 63: 2.4551407e-06},
    "llama3.1-8b": {16: 0.0376060307, 32: 0.000524846022, 48: 6.64786967e-06, 63: 3.06892588e-07},
    "llama3.2-1b": {8: 0.0376060307, 16: 0.000429556705, 24: 1.66196742e-06, 31: 9.41830649e-08},
    "llama3.2-3b": {32: 0.000429556705, 48: 1.66196742e-06, 63: 7.67231469e-08},
    "olmo3-7b": {32: 0.000395147857, 48: 6.64786967e-06, 63: 3.06892588e-07},  # of full attention
    "phi4-14b": {1: 0.823487818, 32: 0.002, 63: 4.85738838e-06},
}
MAGNITUDES = {"olmo3-7b": 1.2079441542}  # where it is not 1


@pytest.mark.parametrize("name", GOLDEN)
def test_published(name):
    c = zoo.config(name)
    frequencies, magnitude = Rotary(c.head_dim, c.rope_theta, c.rope_scaling).frequencies()
    assert magnitude == pytest.approx(MAGNITUDES.get(name, 1.0), rel=1e-9) and frequencies.dtype == np.float32
    close({i: frequencies[i] for i in GOLDEN[name]}, GOLDEN[name], terms=32)


@pytest.mark.parametrize(
    "name, short, long",
    [
        (
            "phi4-mini",
            {1: 0.825404167, 24: 0.01, 47: 0.000121152749},
            {1: 0.73807466, 24: 0.000682979298, 36: 3.06654401e-05, 47: 2.53616804e-06},
        ),
        (
            "phi3.5-mini",
            {1: 0.809219778, 24: 0.00502512651, 47: 4.2659427e-05},
            {1: 0.743607283, 24: 0.00019864917, 47: 1.86848786e-06},
        ),
    ],
)
def test_longrope(name, short, long):
    """The frequencies change between 4,096 and 4,097 tokens, and the magnitude does not."""
    c = zoo.config(name)
    frequencies, magnitude = Rotary(
        int(c.head_dim * c.partial_rotary_factor), c.rope_theta, c.rope_scaling
    ).frequencies()
    assert magnitude == pytest.approx(1.190238071, rel=1e-9) and c.cache_limit == 4096
    both = np.asarray(c.rope_scaling.stretched(frequencies, jnp.array([[4096], [4097]])))
    for row, golden in zip(both, (short, long), strict=True):
        close({i: row[i] for i in golden}, golden, terms=32)


def test_a_part_of_the_frequencies():
    """In LFM3's layers with full attention the slower half of the frequencies does not turn."""
    c = zoo.config("lfm3-1.7b")
    full, sliding = (zoo.lfm3.Attention(c, n, key=jax.random.key(0)).rotary for n in (2, 4))
    assert (full.turning, sliding.turning) == (32, 64)
    golden = {1: 0.805842221, 16: 0.0316227786}
    close({i: full.frequencies()[0][i] for i in golden}, golden, terms=32)
    close(sliding.frequencies()[0][32], 0.01, terms=32)


def test_a_step_instead_of_a_ramp():
    """In Llama 4 Scout's config, low and high factor are equal."""
    frequencies, _ = Rotary(128, 500_000.0, Llama3Scaling(16.0, 1.0, 1.0, 8192)).frequencies()
    golden = {32: 0.00141421345, 48: 3.32393483e-06, 63: 1.53446294e-07}
    close({i: frequencies[i] for i in golden}, golden, terms=32)


DEEPSEEK = dict(mscale=1.0, mscale_all_dim=1.0)


@pytest.mark.parametrize(
    "scaling, theta, dim, golden, magnitude",
    [
        (YarnScaling(40.0, 4096, **DEEPSEEK), 1e4, 64, {8: 0.1, 16: 0.0055, 31: 3.33380353e-06}, 1.0),
        (YarnScaling(32.0, 4096, truncate=False), 1.5e5, 64, {8: 0.0508132726, 16: 0.000456483918}, 1.34657359),
        (YarnScaling(32.0, 4096, 1.0, 1.0, **DEEPSEEK), 5e4, 64, {16: 0.00447213603, 24: 9.34593027e-06}, 1.0),
        (LinearScaling(8.0), 1e6, 128, {0: 0.125, 32: 0.000125, 63: 1.5511722e-07}, 1.0),
    ],
)
def test_scalings(scaling, theta, dim, golden, magnitude):
    frequencies, factor = Rotary(dim, theta, scaling).frequencies()
    close({i: frequencies[i] for i in golden}, golden, terms=32)
    assert factor == pytest.approx(magnitude, rel=1e-6)


def test_a_part_of_each_head():
    """The first 8 of 12 features are rotated like heads of 8, and the others stay."""
    x = jnp.asarray(np.random.RandomState(0).standard_normal((1, 5, 2, 12)), jnp.float32)
    y = Rotary(8, 1e4)(x, Tokens())
    close(y[..., :8], Rotary(8, 1e4)(x[..., :8], Tokens()), terms=16)
    np.testing.assert_array_equal(y[..., 8:], x[..., 8:])
    assert np.abs(y - x)[:, 1:, :, :8].max() > 0.1
