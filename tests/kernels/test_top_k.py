"""kernels.top_k: every implementation finds what `jax.lax.top_k` finds, with the same gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels import Stacked
from tests.close import close


QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all of this file's time
RANDOM = np.random.default_rng(0)
NEVER = np.where(RANDOM.random((5, 24)) < 0.7, -np.inf, RANDOM.normal(size=(5, 24)))  # rows of few finite logits
GROUPED: dict = dict(groups=8, kept=4)
# Logits, k, and the rest of a rule; True: with a bias.
CASES = {
    "128 options, softmax": (RANDOM.normal(size=(3, 128)), 8, dict(score="softmax", normalise=0.0), False),
    "32 options of 16 bits, ties": (RANDOM.integers(-2, 2, (4, 32)).astype(jnp.bfloat16), 4, {}, False),
    "256 options in 8 groups": (RANDOM.normal(size=(2, 256)), 8, GROUPED | dict(score="sigmoid", normalise=0.5), True),
    "ties within and between groups": (RANDOM.integers(-1, 1, (6, 24)), 5, dict(groups=6, kept=3), True),
    "groups that are no power of 2": (RANDOM.normal(size=(3, 21)), 4, dict(groups=3, kept=1), True),
    "minus infinity": (NEVER, 12, {}, False),
    "minus infinity in groups": (NEVER, 8, dict(groups=4, kept=2), False),
    "NaN and zeros of both signs": (np.array([[0, -0.0, np.nan, 0, -np.inf, np.inf, -0.0]]), 6, {}, False),
    "all of few": (RANDOM.normal(size=(1, 3)), 3, dict(score="sigmoid"), True),
}


def first(ranked, k):
    """Returns the indices of the k largest of each row, as `jax.lax.top_k`: -0 is less than 0, and NaN is largest."""
    bits = ranked.astype(np.float32).view(np.int32)
    order = np.where(bits < 0, bits ^ np.int32(2**31 - 1), bits).astype(np.int64)
    return np.argsort(-order, axis=-1, kind="stable")[..., :k]


def expected(ranked, k, groups=1, kept=1):
    """Returns the k best of each row, among the options of the best groups."""
    by_group = ranked.reshape(len(ranked), groups, -1)
    if groups > 1:
        totals = np.take_along_axis(by_group, first(by_group, 2), axis=-1).sum(axis=-1)
        is_kept = np.any(first(totals, kept)[:, :, None] == np.arange(groups), axis=1)
        by_group = np.where(is_kept[..., None], by_group, -np.inf)
    return first(by_group.reshape(ranked.shape), k)


def formula(logits, score):
    """Returns scores, and the function that maps their gradient to that of the logits."""
    if score == "sigmoid":
        scores = 1 / (1 + np.exp(-logits))
        return scores, lambda d: d * scores * (1 - scores)
    if score == "softmax":
        scores = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        return scores, lambda d: scores * (d - (d * scores).sum(axis=-1, keepdims=True))
    return logits, lambda d: d


@pytest.mark.parametrize("implementation", ["reference", "triton"])
@pytest.mark.parametrize("case", CASES)
def test_equals_top_k(case, implementation):
    logits, k, rule, biased = CASES[case]
    logits = logits if logits.dtype == jnp.bfloat16 else logits.astype(np.float32)
    plus, groups = rule.get("normalise"), {name: rule[name] for name in ("groups", "kept") if name in rule}
    bias = RANDOM.normal(size=logits.shape[1]).round().astype(np.float32) if biased else None
    d_scores, d_values = (RANDOM.normal(size=(len(logits), n)).astype(logits.dtype) for n in (logits.shape[1], k))

    @jax.jit
    def run(logits, bias, d_scores, d_values):
        of_layer = None if bias is None else Stacked(bias, jnp.int32(1))
        find = lambda x: kernels.top_k(x[:, None], k, bias=of_layer, implementation=implementation, **rule)
        _, pull, found = jax.vjp(lambda x: ((found := find(x))[:2], found), logits, has_aux=True)
        return found, pull((d_scores[:, None], d_values[:, None]))[0]

    given = logits, None if bias is None else np.stack([-bias, bias]), d_scores, d_values
    found, gradient = jax.device_get(run.lower(*given).compile(QUICK)(*given))
    scores, values, indices = (a[:, 0] for a in found)
    np.testing.assert_array_equal(indices, expected(scores if bias is None else scores + bias, k, **groups))
    best = np.take_along_axis(scores, indices, axis=-1)
    if plus is None:
        np.testing.assert_array_equal(values, best)
    else:
        total = best.sum(axis=-1, keepdims=True) + plus
        close(values, best / total, terms=20)
        d_values = (d_values - (d_values * values).sum(axis=-1, keepdims=True)) / total
    want, pull = formula(logits.astype(np.float64), rule.get("score"))
    if "score" in rule:
        close(scores, want, terms=20)
    else:
        np.testing.assert_array_equal(scores.astype(np.float64), want)
    total = d_scores.astype(np.float64)
    np.put_along_axis(total, indices, np.take_along_axis(total, indices, axis=-1) + d_values, axis=-1)
    close(gradient, pull(total), terms=3 if logits.dtype == jnp.bfloat16 else 40)


def test_what_cannot_be_found():
    logits = jnp.zeros((33, 24))
    with pytest.raises(ValueError, match="9 of 24 options cannot be found in 1 of 3 groups"):
        kernels.top_k(logits, 9, groups=3)
    with pytest.raises(ValueError, match="one option after the other, which is for 256 at most, not 264"):
        kernels.top_k(logits, 8, implementation="triton")
    with pytest.raises(ValueError, match="1024 at most, not 2048"):
        kernels.top_k(jnp.zeros((1, 1040)), 8, implementation="triton")
