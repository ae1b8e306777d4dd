"""Scores of completions: rewards that fail, advantages, groups that are drawn again, pass@k and maj@k."""

import dataclasses
import itertools

import numpy as np
import pytest

from tests.close import close
from train.data import prompts as prompts_
from train.data import rewards
from train.methods import scores


def test_what_is_tried_of_rewards():
    """A user's reward is called once, with the record's own answer, and its result is shown."""
    calls = []
    prompts = [(f"line {n}", prompts_.Prompt([0], {"answer": str(n)})) for n in range(3)]
    own = lambda completion, record: calls.append((completion, record)) or 0.5
    names = ("exact", "own.py:own")
    assert scores.try_rewards(prompts, names, [rewards.exact, own]) == {"exact": 1.0, "own.py:own": 0.5}
    assert calls == [("0", {"answer": "0"})]
    with pytest.raises(ValueError, match=r"line 0: --reward own\.py:own gives nan, and has to give a finite number"):
        scores.try_rewards(prompts, names, [rewards.exact, lambda *_: float("nan")])


class Everything:
    """An object that equals all others, and converts to a number."""

    def __eq__(self, other):
        return True

    def __float__(self):
        return 1.0


def test_rewards_that_raise_score_0(recwarn):
    """Errors of rewards are counted, and the first is named. A record without a required field still ends the run."""

    def ratio(completion, record):
        return 1 / len(completion)

    o = scores.RewardOptions(reward=("ratio", "number"))
    prompts = [prompts_.Prompt([1], {"answer": 2})]
    found, errors = scores.score([["ab", "", "9" * 5000]], prompts, o, [ratio, rewards.number])
    close(found, [[[0.5, 0], [0, 0], [1 / 5000, 0]]], terms=2)
    assert errors == 1
    (warning,) = [str(w.message) for w in recwarn if "ratio" in str(w.message)]
    assert warning == "The reward ratio raises ZeroDivisionError: division by zero, for ''. Such count as 0."
    found, errors = scores.score([["a", "b", "c"]], prompts, o, [lambda *_: float("nan"), rewards.exact])
    assert errors == 3 and not found.any()
    for worth in ("1" * 90_000_000, Everything(), np.array([1.0]), None):
        with pytest.warns(UserWarning, match=f"it returned a {type(worth).__name__}, and must return a number") as told:
            found, errors = scores.score([["a", "b", "c"]], prompts, o, [lambda *_, w=worth: w, rewards.number])
        assert errors == 3 and not found.any() and len(str(told[0].message)) < 200
    found, _ = scores.score([["a", "b", "c"]], prompts, o, [lambda *_: np.float32(0.5), lambda *_: True])
    assert (found == [0.5, 1]).all()
    with pytest.raises(rewards.BadRecord, match="needs a field `answer`"):
        scores.score([["a", "b", "c"]], [prompts_.Prompt([1], {})], o, [ratio, rewards.exact])


def test_pass_at():
    """pass@k is the share of all choices of k completions that contain a correct one, averaged over prompts."""
    correct = np.array([[1, 0, 0, 1, 0, 0], [0, 0, 0, 0, 0, 0], [0, 1, 0, 0, 0, 0]], bool)
    assert list(scores.pass_at(correct)) == ["pass@1", "pass@2", "pass@4", "pass@6"]
    for name, value in scores.pass_at(correct).items():
        k = int(name.removeprefix("pass@"))
        shares = [np.mean([any(chosen) for chosen in itertools.combinations(row, k)]) for row in correct]
        close(value, np.mean(shares), terms=100, dtype=np.float64)


def test_majorities():
    """maj@k is the share of the groups of k whose most frequent answer is correct; ties count by halves and so on."""
    answers = [[1, 1, 2, 3, 3, 3, 2, 2], [None, None, 5, 4, None, None, None, None]]
    correct = np.array([[a == 1 for a in answers[0]], [a == 4 for a in answers[1]]])
    found = scores.majority_at(answers, correct)
    assert found == {"maj@4": (1 + 0 + 0.5 + 0) / 4, "maj@8": (0 + 0.5) / 2}  # 1 1 2 3; 3 3 3 2 2 2 1 1 has no 1 on top
    o = scores.RewardOptions(reward=("regex:.*", "number"))
    texts, each = [["it is 2", "2.0", "#### 3", "none"]], np.array([[[1, 1], [1, 1], [1, 0], [1, 0]]], np.float32)
    assert scores.majorities(texts, each, o) == {"maj@4": 1.0}
    assert scores.majorities(texts, each[..., :1], scores.RewardOptions()) == {}


def test_long_completions_lose_reward():
    """The punishment is one more reward, with the weight 1, and no part of what is correct."""
    o = scores.RewardOptions(reward=("a", "b"), reward_weights=(0.5, 0.5), overlong=3)
    assert o.names == ("a", "b", "overlong") and o.weights == (0.5, 0.5, 1.0) and o.least_correct == 1.0
    each = np.array([[[1, 1, -1], [1, 0, 0]]], np.float32)
    assert o.correct_of(each).tolist() == [[True, False]]
    np.testing.assert_allclose(scores.advantages_of(each, o), [-(0.5**0.5), 0.5**0.5], atol=1e-3)


def test_advantages():
    """Advantages of several rewards, as the options say."""
    each = np.random.RandomState(0).rand(3, 4, 2).astype(np.float32)
    of = lambda **values: scores.advantages_of(
        each, scores.RewardOptions(reward=("a", "b"), reward_weights=(1.0, 0.5), **values)
    )
    total = each @ np.array([1.0, 0.5], np.float32)
    others = (total.sum(1, keepdims=True) - total) / 3
    close(of(advantages="rloo"), (total - others).reshape(-1), terms=20)
    close(of(scale_rewards=False), (total - total.mean(1, keepdims=True)).reshape(-1), terms=20)
    scaled = (each - each.mean(1, keepdims=True)) / (each.std(1, ddof=1, keepdims=True) + 1e-4)
    sums = (scaled @ np.array([1.0, 0.5])).reshape(-1)
    close(of(advantages="gdpo"), (sums - sums.mean()) / (sums.std(ddof=1) + 1e-4), terms=100)


def test_groups_without_signal_are_drawn_again():
    o, asked = scores.RewardOptions(reward=("a",)), []

    def draw(numbers, seed):
        asked.append((numbers, seed))
        worth = [[[0.0], [float(m == 4 or len(asked) == 2)]] for m in numbers]
        return [f"{m} by {seed}" for m in numbers], np.array(worth, np.float32)

    each = np.zeros((6, 2, 1), np.float32)
    each[:3, 0] = 1
    groups, found = scores.with_signal(draw, list("abcdef"), each, o, 3, 7)
    first, second = 7 + 2**20, 7 + 2**21
    assert asked == [([3, 4, 5, 3], first), ([3, 5], second)] and not scores.dull(found, o).any()
    assert groups == ["a", "b", "c", f"3 by {second}", f"4 by {first}", f"5 by {second}"]
    assert scores.with_signal(draw, list("abcdef"), each, o, 0, 7)[0] == list("abcdef")


def test_what_is_correct():
    """A reward of --correct counts as correct, or by default the sum of the positive weights."""
    o = scores.RewardOptions(reward=("a", "b", "c"), reward_weights=(0.7, 0.3, -1.0))
    assert o.least_correct == 1.0 and scores.RewardOptions().least_correct == 1.0
    assert dataclasses.replace(o, correct=0.0).least_correct == 0.0
