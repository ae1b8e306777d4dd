"""Sums of gradients in bfloat16, against float64: no worse than the exact sum rounded once, with unchanged values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kernels
from kernels.sums import largest, lookup, permuted, pick, scaled, spread, sums_of_rows
from tests.close import close


TOKENS, FEATURES, K = 2048, 4, 2
RANDOM = np.random.RandomState(0)
# Half of the tokens are the same one. The others are distributed like words, and some tokens are missing.
TEXT = np.where(np.arange(TOKENS) % 2, 3, RANDOM.zipf(1.3, TOKENS) % 700)
ORDER = RANDOM.permutation(TOKENS * K)
BACK = np.argsort(ORDER).reshape(TOKENS, K)
PICKED = RANDOM.rand(TOKENS, 8).argsort(axis=1)[:, :K]


def rounded(*shape, mean=0.0):
    """Returns normal noise that bfloat16 represents exactly, in float64."""
    return np.asarray(jnp.asarray(RANDOM.normal(mean, 1, shape), jnp.bfloat16), np.float64)


def added(index, rows, count):
    sums = np.zeros((count, *rows.shape[1:]))
    np.add.at(sums, index, rows)
    return sums


# By operation: the function, its array, the expected result, and the array's gradient from the result's gradient.
ROWS = rounded(TOKENS, FEATURES)
CASES = {
    "lookup": (
        lambda a: lookup(a, jnp.asarray(TEXT)), rounded(700, FEATURES), lambda a: a[TEXT],
        lambda g: added(TEXT, g, 700),
    ),
    "lookup of few": (
        lambda a: lookup(a, jnp.asarray(TEXT % 7)), rounded(7, FEATURES), lambda a: a[TEXT % 7],
        lambda g: added(TEXT % 7, g, 7),
    ),
    "spread": (
        lambda a: spread(a, (TOKENS, FEATURES)), rounded(FEATURES), lambda a: np.tile(a, (TOKENS, 1)),
        lambda g: g.sum(axis=0),
    ),
    "spread inside": (
        lambda a: spread(a, (4, TOKENS, 2)), rounded(4, 1, 2), lambda a: np.tile(a, (1, TOKENS, 1)),
        lambda g: g.sum(axis=1, keepdims=True),
    ),
    "scaled": (
        lambda a: scaled(jnp.asarray(ROWS, a.dtype), a), rounded(FEATURES), lambda a: ROWS * a,
        lambda g: (g * ROWS).sum(axis=0),
    ),
    "scaled rows": (
        lambda a: scaled(jnp.asarray(ROWS.T, a.dtype), a), rounded(FEATURES, 1), lambda a: ROWS.T * a,
        lambda g: (g * ROWS.T).sum(axis=1, keepdims=True),
    ),
    "permuted": (
        lambda a: permuted(a, jnp.asarray(ORDER // K), jnp.asarray(BACK)), rounded(TOKENS, FEATURES),
        lambda a: a[ORDER // K], lambda g: added(ORDER // K, g, TOKENS),
    ),
    "pick": (
        lambda a: pick(a, jnp.asarray(PICKED)), rounded(TOKENS, 8), lambda a: np.take_along_axis(a, PICKED, axis=1),
        lambda g: (g[..., None] * (PICKED[..., None] == np.arange(8))).sum(axis=1),
    ),
    "largest": (
        lambda a: largest(a, K)[0], np.tile(np.arange(8.0)[PICKED.sum(axis=1) % 8], (8, 1)).T + np.arange(8) / 8,
        lambda a: np.sort(a, axis=1)[:, : -K - 1 : -1], lambda g: np.pad(g[:, ::-1], ((0, 0), (8 - K, 0))),
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def results():
    """Returns, for every case, the gradient of the result, the result and the gradient, all in bfloat16."""
    gradients = {name: rounded(*case[2](case[1]).shape, mean=0.5) for name, case in CASES.items()}

    @jax.jit
    def run(arrays, gradients):
        pulled = {name: jax.vjp(CASES[name][0], a) for name, a in arrays.items()}
        return {name: (y, pull(gradients[name])[0]) for name, (y, pull) in pulled.items()}

    low = lambda arrays: {name: jnp.asarray(a, jnp.bfloat16) for name, a in arrays.items()}
    found = run(low({name: case[1] for name, case in CASES.items()}), low(gradients))
    return {name: (gradients[name], *found[name]) for name in CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_gradient_is_summed_in_float32_and_rounded_once(results, name):
    _, array, values, exact = CASES[name]
    gradient, y, got = results[name]
    want, once = exact(gradient), lambda a: np.asarray(jnp.asarray(a, jnp.bfloat16), np.float64)
    assert y.dtype == got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(y, np.float64), once(values(array)))
    error = np.linalg.norm(np.asarray(got, np.float64) - want)
    assert error <= 1.2 * np.linalg.norm(once(want) - want) + 1e-6 * np.linalg.norm(want)


def test_equal_tokens_add_up():
    """The sum of 1,000 equal tokens' gradients is exact; in bfloat16 it would stop at 256."""
    table, tokens = np.zeros((200, 1), jnp.bfloat16), jnp.full(1000, 7)
    sums = jax.jit(jax.grad(lambda table: jnp.sum(lookup(table, tokens).astype(jnp.float32))))
    got = np.asarray(sums(table), np.float32)
    assert got[7] == 1000 and got.sum() == 1000


@pytest.mark.parametrize("length", [1, 128, 20_000])
@pytest.mark.parametrize("kind", ["even", "runs"])
def test_sums_of_rows(length, kind):
    """Sums are right in one block, in a few, and in blocks of blocks, for runs within blocks and across them."""
    index = np.sort(RANDOM.randint(0, 300, length)) if kind == "even" else np.arange(length) // 5000 + 40
    rows = RANDOM.normal(size=(length, 1))
    shuffled = RANDOM.permutation(length)
    got = jax.jit(sums_of_rows, static_argnums=2)(
        jnp.asarray(rows[shuffled], jnp.float32), jnp.asarray(index[shuffled]), 300
    )
    # Three levels of blocks of 128.
    close(got, added(index, rows, 300), terms=3 * 128, size=added(index, np.abs(rows), 300).max())


@pytest.mark.parametrize("out", (96, 40), ids=("wide", "narrow"))
def test_a_cpu_transposes_the_narrow_factor_of_a_weights_gradient(out):
    rows, features = 64, 48
    x, w, up = rounded(2, rows // 2, features), rounded(out, features), rounded(2, rows // 2, out)
    loss = lambda x, w, up: jnp.sum(jax.nn.silu(kernels.product(x, w)) * up)
    step = jax.jit(jax.grad(loss, argnums=(0, 1)))
    arrays = [jnp.asarray(a, jnp.float32) for a in (x, w, up)]
    y = x @ w.T
    sigmoid = 1 / (1 + np.exp(-y))
    d_y = up * sigmoid * (1 + y * (1 - sigmoid))
    for actual, expected in zip(step(*arrays), (d_y @ w, np.einsum("bso,bsi->oi", d_y, x)), strict=True):
        close(actual, expected, terms=200)
    program = step.lower(*arrays).compile().as_text()
    transposed = [size for size in (features, out) if f"f32[{size},{rows}]" in program]
    assert transposed == [min(features, out)]
