"""The bounds of tests/close.py: what passes, what fails, and what a failure says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.close import as_exact, close


EPS = 2.0**-23
ONE = np.ones(3, np.float32)


def test_the_bound_is_the_number_of_roundings_of_the_largest_value():
    values = np.array([1e-3, -8.0], np.float32)
    close(values + np.float32([8 * 5 * EPS, 0]), values, terms=6)
    for wrong in (np.float32([8 * 7 * EPS, 0]), np.float32([0, -8 * 8 * EPS])):
        with pytest.raises(AssertionError, match=r"6 roundings of 8 in float32 allow 5\.72e-06"):
            close(values + wrong, values, terms=6)
    close(ONE + 100 * EPS, ONE, terms=11, size=10)
    with pytest.raises(AssertionError):
        close(ONE + 100 * EPS, ONE, terms=11)
    with pytest.raises(AssertionError):
        close(3.0001, 3.0, terms=100)
    close(3.00001, 3.0, terms=100)


def test_eps_is_that_of_the_coarser_type():
    rough = jnp.asarray([1.0078125, 1, 1], jnp.bfloat16)
    close(rough, ONE, terms=1)
    close(ONE, rough, terms=1)
    with pytest.raises(AssertionError, match="in bfloat16"):
        close(rough + jnp.asarray([2**-6, 0, 0], jnp.bfloat16), ONE, terms=1)
    with pytest.raises(AssertionError, match="in float32"):
        close(rough, ONE, terms=1, dtype=jnp.float32)
    with pytest.raises(AssertionError, match="in float64"):
        close(np.ones(2) + 1e-12, np.ones(2), terms=100, dtype=np.float64)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_nan_and_one_infinity_fail(wrong):
    bad = np.array([1, wrong, 1], np.float32)
    for pair in ((bad, ONE), (ONE, bad)):
        with pytest.raises(AssertionError, match="inf apart"):
            close(*pair, terms=1e6)
        with pytest.raises(AssertionError, match="inf apart"):
            as_exact(pair[0], ONE, pair[1])
    with pytest.raises(AssertionError):
        close(np.full(3, np.nan), np.full(3, np.nan), terms=1e6)
    with pytest.raises(AssertionError):
        close(-np.full(3, np.inf), np.full(3, np.inf), terms=1e6)


def test_equal_infinities_pass_and_do_not_count_for_the_size():
    masked = np.array([1, -np.inf, 1], np.float32)
    close(masked, masked, terms=1)
    with pytest.raises(AssertionError, match="2 roundings of 1 in"):
        close(masked + np.float32(1e-5), masked, terms=2)


def test_empty_arrays_and_zeros():
    close(np.zeros((0, 3)), np.zeros((0, 3)), terms=1)
    close(np.zeros(3), np.zeros(3), terms=1)
    with pytest.raises(AssertionError):
        close(np.full(3, 1e-30), np.zeros(3), terms=1e6)
    close(np.full(3, 1e-30), np.zeros(3), terms=1, size=1)


def test_shapes_have_to_be_equal():
    close(ONE, 1, terms=1)
    for shape in ((1,), (1, 3), (3, 1), (2,)):
        with pytest.raises(AssertionError, match="ours is"):
            close(ONE, np.ones(shape), terms=1e6)
    with pytest.raises(AssertionError, match="ours is"):
        close(1.0, ONE, terms=1e6)


def test_a_failure_names_its_place_in_the_tree():
    tree = {"a": [jnp.asarray(ONE), np.ones((2, 2))], "b": 1.0}
    close(tree, tree, terms=1)
    wrong = {"a": [jnp.asarray(ONE), np.array([[1, 1], [1.5, 1]])], "b": 1.0}
    with pytest.raises(AssertionError, match=r"^\['a'\]\[1\]\[1, 0\]: 1.5 and 1 are 0.5 apart"):
        close(wrong, tree, terms=1)
    with pytest.raises(AssertionError, match=r"^\['a'\]\[1\]\[1, 0\]: 1.5 and 1 are 0.5 apart; 4 times the error"):
        as_exact(wrong, tree, tree)
    with pytest.raises(ValueError):
        close({"a": 1.0}, {"a": 1.0, "b": 1.0}, terms=1)
    with pytest.raises(ValueError):
        close([jnp.asarray(ONE)], [jnp.asarray(ONE)] * 2, terms=1)


def test_a_list_of_numbers_is_an_array():
    close([1e-3 + 1e-7, 8.0], [1e-3, 8.0], terms=1)
    close(np.array([1e-3 + 1e-7, 8.0]), (1e-3, 8.0), terms=1)
    close([jnp.float32(1e-3), 8.0], [1e-3, 8.0], terms=1)
    with pytest.raises(AssertionError):  # apart, each is as large as itself
        close([jnp.float32(1e-3 + 1e-7), jnp.float32(8)], [jnp.float32(1e-3), jnp.float32(8)], terms=1)


def test_as_exact_is_by_the_error_of_the_plain_formula():
    exact = np.array([1.0, 2.0])
    plain = np.float32(exact) + np.float32([1e-5, 0])
    as_exact(np.float32(exact) + np.float32([0, 3.9e-5]), plain, exact)
    with pytest.raises(AssertionError):
        as_exact(np.float32(exact) + np.float32([0, 4.1e-5]), plain, exact)
    as_exact(np.float32(exact) + np.float32([0, EPS]), np.float32(exact), exact)
    with pytest.raises(AssertionError):
        as_exact(np.float32(exact) + np.float32([0, 4 * EPS]), np.float32(exact), exact)


def test_sums_in_two_orders_stay_within_the_bound_and_a_missing_term_does_not():
    random = np.random.RandomState(0)
    for _ in range(20):
        x, y = random.standard_normal((2, 300)).astype(np.float32)
        size = np.abs(x * y).sum(dtype=np.float64)
        backwards = np.add.reduce((x * y)[::-1]), np.cumsum(x * y, dtype=np.float32)[-1]
        for ours in backwards:
            close(ours, float(np.float64(x) @ np.float64(y)), terms=300, size=size)
        with pytest.raises(AssertionError):
            close(backwards[0] - np.abs(x * y).max(), float(np.float64(x) @ np.float64(y)), terms=300, size=size)


def test_jax_and_numpy_mix():
    close(jax.device_put(ONE), ONE.astype(np.float64), terms=1)
