"""Schedules by their numbers; AdamW against its formula written out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from train.optim import adamw, is_decayed, make_schedule, rewarmed
from zoo.models import qwen3
from zoo.nn.layers import Linear
from zoo.surgery import path_name


def rates(kind, **options):
    schedule = make_schedule(kind, peak=2.0, steps=10, **options)
    return [float(schedule(step)) for step in range(11)]


def test_cosine():
    got = rates("cosine", warmup=4, decay=0, final=0.1)
    fall = [2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * n / 6))) for n in range(7)]
    np.testing.assert_allclose(got, [0.5, 1.0, 1.5, 2.0, *fall], rtol=1e-5)


def test_warmup_stable_decay():
    np.testing.assert_allclose(rates("wsd", warmup=2, decay=4), [1, 2, 2, 2, 2, 2, 2, 1.5, 1, 0.5, 0], rtol=1e-5)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_no_warmup(kind):
    assert rates(kind, warmup=0, decay=10)[0] == 2


@pytest.mark.parametrize(("kind", "warmup", "decay"), [("cosine", 11, 0), ("wsd", 5, 6), ("wsd", -1, 1)])
def test_what_does_not_fit(kind, warmup, decay):
    with pytest.raises(ValueError, match=rf"warmup of {warmup} .* 10 steps"):
        rates(kind, warmup=warmup, decay=decay)


def test_only_the_matrices_of_linears_are_decayed():
    config = qwen3.Config(64, 32, 48, 3, 4, 2, 16, 64, 3)
    model = eqx.filter_eval_shape(lambda: qwen3.Model(config, key=jax.random.key(0)))
    decayed = jax.tree_util.tree_leaves_with_path(is_decayed(model))
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert {path_name(path).split(".")[-2] for path, decays in decayed if decays} == linears
    assert {path_name(path).split(".")[-2] for path, decays in decayed if not decays} >= {
        "embed_tokens",
        "q_norm",
        "norm",
    }
    bias = Linear(2, 3, bias=True, key=jax.random.key(0))
    assert is_decayed(bias).weight and not is_decayed(bias).bias


def test_rewarmed():
    """From the rate that there was, halfway in the first of two steps, then on the schedule."""
    schedule = rewarmed(lambda step: jnp.asarray(step, jnp.float32), start=10, rate=2.0, steps=2)
    np.testing.assert_allclose([schedule(step) for step in (10, 11, 12, 40)], [6, 11, 12, 40])


def test_adamw():
    """Three steps, of which the first gradient is clipped."""
    linear = Linear(3, 2, bias=True, key=jax.random.key(0))
    weight, bias = (np.asarray(a, np.float64) for a in (linear.weight, linear.bias))
    optimizer = adamw(lambda step: 0.1 / (step + 1), weight_decay=0.5, clip_norm=3.0, b1=0.8, b2=0.9, eps=1e-3)
    state, m, v = optimizer.init(linear), 0.0, 0.0
    for step, size in enumerate([10.0, 0.1, 0.2]):
        gradient = size * np.random.RandomState(step).randn(8)
        of_weight, of_bias = gradient[:6].reshape(2, 3), gradient[6:]
        tree = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (jnp.float32(of_weight), jnp.float32(of_bias)))
        updates, state = optimizer.update(tree, state, linear)
        linear = optax.apply_updates(linear, updates)
        gradient *= min(1, 3 / np.linalg.norm(gradient))
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        change = m / (1 - 0.8 ** (step + 1)) / (np.sqrt(v / (1 - 0.9 ** (step + 1))) + 1e-3)
        weight = weight - 0.1 / (step + 1) * (change[:6].reshape(2, 3) + 0.5 * weight)
        bias = bias - 0.1 / (step + 1) * change[6:]
        np.testing.assert_allclose(linear.weight, weight, rtol=1e-5)
        np.testing.assert_allclose(linear.bias, bias, rtol=1e-5)
