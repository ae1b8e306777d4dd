"""kernels.top_k: every implementation finds what `jax.lax.top_k` finds, with the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels


RANDOM = np.random.default_rng(0)
NEVER = np.where(RANDOM.random((5, 24)) < 0.7, -np.inf, RANDOM.normal(size=(5, 24)))  # rows of few finite logits
# Logits, k, and the rest of a rule; True: with a bias.
CASES = {
    "128 options, softmax": (RANDOM.normal(size=(3, 128)), 8, dict(score="softmax"), False),
    "32 options of 16 bits, ties": (RANDOM.integers(-2, 2, (4, 32)).astype(jnp.bfloat16), 4, {}, False),
    "256 options in 8 groups": (RANDOM.normal(size=(2, 256)), 8, dict(score="sigmoid", groups=8, kept=4), True),
    "ties within and between groups": (RANDOM.integers(-1, 1, (6, 24)), 5, dict(groups=6, kept=3), True),
    "groups that are no power of 2": (RANDOM.normal(size=(3, 21)), 4, dict(groups=3, kept=1), True),
    "minus infinity": (NEVER, 12, {}, False),
    "minus infinity in groups": (NEVER, 8, dict(groups=4, kept=2), False),
    "NaN and zeros of both signs": (np.array([[0, -0.0, np.nan, 0, -np.inf, np.inf, -0.0]]), 6, {}, False),
    "all of few": (RANDOM.normal(size=(1, 3)), 3, dict(score="sigmoid"), True),
    "one of one": (np.ones((2, 1)), 1, {}, False),
}


def expected(ranked, k, groups=1, kept=1):
    """Finds the k best by whole sorts, among the options of the best groups."""
    by_group = ranked.reshape(len(ranked), groups, -1)
    best = jax.lax.top_k(jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1), kept)[1] if groups > 1 else [[0]]
    is_kept = np.any(np.asarray(best)[:, :, None] == np.arange(groups), axis=1)
    return jax.lax.top_k(jnp.where(is_kept[..., None], by_group, -jnp.inf).reshape(ranked.shape), k)[1]


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_equals_top_k(case, implementation):
    logits, k, rule, biased = CASES[case]
    logits = jnp.asarray(logits, None if logits.dtype == jnp.bfloat16 else jnp.float32)
    bias = jnp.asarray(np.random.default_rng(1).normal(size=logits.shape[1]).round(), jnp.float32) if biased else None
    score = rule.get("score")
    formula = {"softmax": jax.nn.softmax, "sigmoid": jax.nn.sigmoid, None: lambda logits: logits}[score]
    d_scores, d_values = (jnp.asarray(RANDOM.normal(size=(len(logits), n)), logits.dtype) for n in (logits.shape[1], k))

    @jax.jit
    def run(logits, d_scores, d_values):
        find = lambda x: kernels.top_k(x[:, None], k, bias=bias, implementation=implementation, **rule)
        _, pull, found = jax.vjp(lambda x: ((found := find(x))[:2], found), logits, has_aux=True)
        return found, pull((d_scores[:, None], d_values[:, None]))[0]

    @jax.jit
    def plainly(logits, indices, d_scores, d_values):
        choose = lambda x: ((scores := formula(x)), jnp.take_along_axis(scores, indices, axis=-1))
        (scores, _), pull = jax.vjp(choose, logits)
        return scores, pull((d_scores, d_values))[0]

    found, gradient = run(logits, d_scores, d_values)
    scores = found.scores[:, 0]
    ranked = scores if bias is None else scores + bias[None]
    indices = expected(ranked, k, **{name: n for name, n in rule.items() if name != "score"})
    np.testing.assert_array_equal(found.indices[:, 0], indices)
    np.testing.assert_array_equal(found.values[:, 0], jnp.take_along_axis(scores, indices, axis=-1))
    want, want_gradient = plainly(logits, indices, d_scores, d_values)
    np.testing.assert_allclose(scores.astype(jnp.float32), want.astype(jnp.float32), rtol=1e-6)
    np.testing.assert_allclose(gradient.astype(jnp.float32), want_gradient.astype(jnp.float32), rtol=1e-5, atol=1e-6)


def test_what_cannot_be_found():
    logits = jnp.zeros((33, 24))
    with pytest.raises(ValueError, match="9 of 24 options cannot be found in 1 of 3 groups"):
        kernels.top_k(logits, 9, groups=3)
    with pytest.raises(ValueError, match="one option after the other, which is for 256 at most, not 264"):
        kernels.top_k(logits, 8, implementation="triton")
    with pytest.raises(ValueError, match="1024 at most, not 2048"):
        kernels.top_k(jnp.zeros((1, 1040)), 8, implementation="triton")
