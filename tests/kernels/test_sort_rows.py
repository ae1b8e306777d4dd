"""kernels.sort_rows: every implementation against numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from tests.close import close


# Groups that rows choose, and the number of groups. Some groups are chosen by no row, and one row may choose one twice.
RANDOM = np.random.default_rng(0)
CASES = {
    "one row": (RANDOM.permutation(128)[None, :8], 128),
    "one pair, one group": (np.zeros((1, 1), int), 1),
    "ties": (RANDOM.integers(0, 4, (7, 3)), 40),
    "one group for all": (np.full((5, 2), 6), 7),
    "as many pairs as one kernel sorts": (RANDOM.integers(3, 9, (32, 8)), 11),
}


@pytest.mark.parametrize(
    "case, implementation",
    [(case, name) for case in CASES for name in ("reference", "triton")] + [("more pairs", "reference")],
)
def test_rows_and_gradients_equal_numpy(case, implementation):
    chosen, groups = (CASES | {"more pairs": (RANDOM.integers(0, 9, (43, 6)), 11)})[case]
    (tokens, choices), dim = chosen.shape, 70
    x = np.random.default_rng(1).normal(size=(tokens, dim)).astype(jnp.bfloat16)
    d_rows = np.random.default_rng(2).normal(size=(tokens * choices, dim)).astype(jnp.bfloat16)

    @jax.jit
    def run(x, chosen, d_rows):
        sort = lambda x: kernels.sort_rows(x, chosen, groups, implementation=implementation)
        rows, pull, found = jax.vjp(lambda x: ((found := sort(x)).rows, found), x, has_aux=True)
        return found, rows, *pull(d_rows)

    found, rows, dx = jax.device_get(run(x, chosen.astype(np.int32), d_rows))
    order = np.argsort(chosen.reshape(-1), kind="stable")
    place = np.argsort(order).reshape(chosen.shape)
    np.testing.assert_array_equal(found.order, order)
    np.testing.assert_array_equal(found.place, place)
    np.testing.assert_array_equal(found.sizes, np.bincount(chosen.reshape(-1), minlength=groups))
    np.testing.assert_array_equal(found.rows, x[order // choices])
    np.testing.assert_array_equal(rows, found.rows)
    close(dx, d_rows[place].astype(np.float64).sum(axis=1), terms=3)


def test_one_kernel_sorts_few_pairs():
    x, chosen = jnp.zeros((86, 4)), jnp.zeros((86, 3), jnp.int32)
    with pytest.raises(ValueError, match="compares each pair with all others, which is for 256 pairs at most, not 258"):
        kernels.sort_rows(x, chosen, 5, implementation="triton")
