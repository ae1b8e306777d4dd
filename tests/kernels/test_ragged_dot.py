"""kernels.ragged_dot: every implementation against a loop in float64 numpy, and promises beyond the numbers.

The Pallas implementations are interpreted here, in blocks so small that a few rows make several of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu

import kernels
from kernels.quantized_matmul.quantize import dequantize, quantize
from kernels.ragged_dot.xla import tile_size
from kernels.stacked import Stacked
from kernels.tiles import Tile, Tiles, spans, with_rest
from tests.close import as_exact, close
from tests.kernels.oracle import thorough


IMPLEMENTATIONS = ["xla", "triton", "tpu", "reference"]
QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all of this file's time


def oracle(x, w, group_sizes, d_out):
    """Computes the output and the gradients of x and w in float64, one group after the other."""
    x, w, d_out = (np.asarray(a, np.float64) for a in (x, w, d_out))
    out, dx, dw = np.zeros(d_out.shape), np.zeros(x.shape), np.zeros(w.shape)
    ends = np.cumsum(group_sizes)
    for group, (start, end) in enumerate(zip(ends - group_sizes, ends, strict=True)):
        rows = slice(start, end)
        out[rows], dx[rows], dw[group] = x[rows] @ w[group].T, d_out[rows] @ w[group], d_out[rows].T @ x[rows]
    return out, dx, dw


def arrays(tokens=150, groups=5, in_features=24, out_features=40, dtype=jnp.float32):
    """Returns x, w and the gradient of the output, in numpy."""
    rng = np.random.default_rng(0)
    shapes = (tokens, in_features), (groups, out_features, in_features), (tokens, out_features)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def run(implementation, x, w, group_sizes, d_out):
    """Returns the output and the gradients of x and w, in numpy."""
    return jax.device_get(_run(implementation, x, w, np.asarray(group_sizes, np.int32), d_out))


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICK)
def _run(implementation, x, w, group_sizes, d_out):
    product = lambda x, w: kernels.ragged_dot(x, w, group_sizes, implementation=implementation)
    out, gradient = jax.vjp(product, x, w)
    return out, *gradient(d_out)


# Cases with equal numbers of rows and groups share a program.
CASES = {
    "sizes of all kinds": (150, [33, 0, 1, 96, 20]),
    "rows of no group": (150, [0, 40, 7, 0, 31]),
    "no row has a group": (150, [0, 0, 0, 0, 0]),
    "all rows in one of the groups": (150, [0, 0, 150, 0, 0]),
    "sizes beyond the rows": (150, [60, 60, 60, 60, 0]),
    "whole tiles": (150, [32, 0, 64, 0, 32]),
    "whole tiles of the largest size": (384, [128, 256]),
    "tiles of the largest size and parts of them": (384, [130, 169]),
    "one row and one group": (1, [1]),
    "a decode": (8, np.bincount([3, 3, 7, 19, 20, 28, 28, 31], minlength=32)),
}


@pytest.mark.parametrize(
    "case, implementation",
    # Only for "xla" do tiles grow with the groups.
    [
        thorough(case, name) if name == "tpu" and CASES[case][0] != 150 else (case, name)
        for case in CASES
        for name in IMPLEMENTATIONS
        if "of the largest size" not in case or name == "xla"
    ],
)
def test_float32_equals_the_oracle(case, implementation):
    tokens, group_sizes = CASES[case]
    x, w, d_out = arrays(tokens, len(group_sizes))
    true_sizes = np.diff(np.minimum(np.cumsum(group_sizes), tokens), prepend=0)
    expected = oracle(x, w, true_sizes, d_out)
    close(run(implementation, x, w, group_sizes, d_out), expected, terms=400)


@pytest.mark.parametrize("implementation", ["xla", "triton", thorough("tpu"), thorough("reference")])
def test_int8_matrices_of_a_layer_of_a_stack(implementation):
    """The product makes no float copy of all matrices. Only x has a gradient. Other layers may hold anything."""
    x, w, d_out = arrays()
    w, sizes = np.round(20 * w).astype(np.int8), jnp.array([33, 0, 1, 96, 20], jnp.int32)
    stack = np.stack([np.full_like(w, 100), w, np.full_like(w, 100)])

    @functools.partial(jax.jit, compiler_options=QUICK)
    def out_and_dx(x, stack, layer, d_out):
        product = lambda x: kernels.ragged_dot(x, Stacked(stack, layer), sizes, implementation=implementation)
        out, gradient = jax.vjp(product, x)
        return out, *gradient(d_out)

    actual = out_and_dx(x, stack, np.int32(1), d_out)
    close(actual, oracle(x, w, [33, 0, 1, 96, 20], d_out)[:2], terms=200)


@pytest.mark.parametrize("implementation", ["xla", "triton"])
def test_a_layer_of_a_stack(implementation):
    """A layer of a stack has the results and gradients of its matrices alone; other layers may hold anything.

    So does one whose gradient is that of `own`, an array that is not read.
    """
    x, w, d_out = arrays()
    expected = run(implementation, x, w, CASES["sizes of all kinds"][1], d_out)
    stack = np.stack([np.full_like(w, np.nan), w, np.full_like(w, np.nan)])
    sizes = jnp.array(CASES["sizes of all kinds"][1], jnp.int32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def of_stack(x, stack, layer, d_out):
        product = lambda x, w: kernels.ragged_dot(x, w, sizes, implementation=implementation)
        out, gradient = jax.vjp(lambda x, stack: product(x, Stacked(stack, layer)), x, stack)
        _, of_own = jax.vjp(lambda x, stack, own: product(x, Stacked(stack, layer, own=own)), x, stack, stack[0])
        return (out, *gradient(d_out)), of_own(d_out)

    (out, dx, d_stack), (_, none, d_own) = jax.device_get(of_stack(x, stack, np.int32(1), d_out))
    for ours, theirs in zip((out, dx, d_stack[1]), expected, strict=True):
        close(ours, theirs, terms=200)
    assert not np.any(d_stack[::2]) and not np.any(none)
    np.testing.assert_array_equal(d_own, d_stack[1])


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [jnp.int8, jnp.float8_e4m3fn])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_both_sides_rounded(implementation, dtype):
    """The output is that of the rounded sides. The gradients are those of the unrounded sides, whatever the rounding.
    Rows of no group may hold anything. The TPU rounds sums to bfloat16.
    """
    x, w, d_out = arrays()
    sizes = np.array([33, 0, 1, 96, 10], np.int32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def run(x, w, d_out):
        product = lambda x, w: kernels.rounded_ragged_dot(x, w, jnp.asarray(sizes), dtype, implementation)
        rounded = [dequantize(quantize(side, dtype, "channel")) for side in (x, w)]
        if dtype != jnp.int8:
            return [product(x, w)], rounded
        out, gradient = jax.vjp(product, x, w)
        return [out, *gradient(d_out)], rounded

    x[-1] = np.nan
    actual, (rounded_x, rounded_w) = run(x, w, d_out)
    x[-1] = 0
    (out, *_), (_, *gradients) = oracle(np.nan_to_num(rounded_x), rounded_w, sizes, d_out), oracle(x, w, sizes, d_out)
    expected = [out, *gradients][: len(actual)]
    rounds = implementation == "tpu"
    close(actual[0], expected[0], terms=3 if rounds else 200, dtype=jnp.bfloat16 if rounds else None)
    close(actual[1:], expected[1:], terms=200)
    assert np.linalg.norm(out - oracle(x, w, sizes, d_out)[0]) > 3e-3 * np.linalg.norm(out)


def test_int8_matrices_take_no_more_memory_than_one():
    x, w, sizes = (
        jax.ShapeDtypeStruct(*a) for a in [((64, 128), jnp.float32), ((256, 128, 128), jnp.int8), ((256,), jnp.int32)]
    )
    compiled = jax.jit(kernels.ragged_dot).lower(x, w, sizes).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * 128 * 128 / 4


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 50), min_size=5, max_size=5).filter(lambda sizes: sum(sizes) <= 150))
def test_any_group_sizes(group_sizes):
    x, w, d_out = arrays()
    expected = oracle(x, w, group_sizes, d_out)
    for implementation in IMPLEMENTATIONS:
        actual = run(implementation, x, w, group_sizes, d_out)
        close(actual, expected, terms=200)
        assert not any(np.asarray(rows)[sum(group_sizes) :].any() for rows in actual[:2])


@functools.cache
def in_bfloat16(implementation, in_features, out_features):
    tokens, group_sizes = 70, [33, 0, 1, 30]
    x, w, d_out = arrays(tokens, len(group_sizes), in_features, out_features, jnp.bfloat16)
    actual = run(implementation, x, w, group_sizes, d_out)
    assert {a.dtype for a in actual} == {x.dtype}
    return actual, oracle(x, w, group_sizes, d_out)


@pytest.mark.parametrize(
    "implementation, in_features, out_features",
    # Only a TPU's block sizes depend on the summed axis, and are this large.
    [("xla", 40, 72), ("triton", 40, 72), thorough("tpu", 136, 384), thorough("tpu", 384, 136)],
)
def test_bfloat16_is_as_exact_as_the_reference(implementation, in_features, out_features):
    """Several blocks of rows and of features, the last of which are not full, are as exact as the reference."""
    ours, exact = in_bfloat16(implementation, in_features, out_features)
    theirs, _ = in_bfloat16("reference", in_features, out_features)
    as_exact(ours, theirs, exact)


@pytest.mark.thorough
def test_tpu_without_races():
    """The kernel has no races in an interpreter that moves blocks as a TPU does and fills memory with NaN.

    Groups end within blocks of rows. There are several blocks of the summed axis, and of features on each side.
    """
    group_sizes = [20, 0, 25]
    x, w, d_out = arrays(50, 3, 512, 256)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(detect_races=True)):
        actual = run("tpu", x, w, group_sizes, d_out)
        close(actual, oracle(x, w, group_sizes, d_out), terms=600)
    assert interpreter.races is not None and not interpreter.races.races_found


# Rows 0-39 are group 0's, 40-99 group 2's and 100-129 group 4's, and tiles have 32 rows: all three end within a tile.
GROUP_SIZES = [40, 0, 60, 0, 30]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("garbage", [np.nan, np.inf])
def test_what_has_no_rows_or_no_group_may_hold_garbage(implementation, garbage):
    x, w, d_out = arrays()
    expected = run(implementation, x, w, GROUP_SIZES, d_out)
    x[130:], w[1::2], d_out[130:] = garbage, garbage, garbage
    for ours, theirs in zip(run(implementation, x, w, GROUP_SIZES, d_out), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


def with_nan(array, at):
    array = array.copy()
    array[at] = np.nan
    return array


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("row, group", [(0, 0), (39, 0), (40, 2), (99, 2), (129, 4)])
def test_a_nan_stays_in_its_row_and_its_group(implementation, row, group):
    x, w, d_out = arrays()
    out, dx, dw = run(implementation, x, w, GROUP_SIZES, d_out)
    for dirty, expected in [
        ((with_nan(x, row), w, GROUP_SIZES, d_out), (with_nan(out, row), dx, with_nan(dw, group))),
        ((x, w, GROUP_SIZES, with_nan(d_out, row)), (out, with_nan(dx, row), with_nan(dw, group))),
    ]:
        for ours, theirs in zip(run(implementation, *dirty), expected, strict=True):
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_nan_in_a_matrix_stays_in_its_rows(implementation):
    x, w, d_out = arrays()
    out, dx, dw = run(implementation, x, w, GROUP_SIZES, d_out)
    rows = slice(40, 100)
    expected = with_nan(out, rows), with_nan(dx, rows), dw
    for ours, theirs in zip(run(implementation, x, with_nan(w, 2), GROUP_SIZES, d_out), expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


plan = jax.jit(Tiles.of, static_argnums=(1, 2), static_argnames=("aligned", "empty"))
find = jax.jit(
    lambda sizes, tokens, size: jax.vmap(lambda n: Tile.nth(n, sizes, tokens, size))(jnp.arange(60, dtype=jnp.int32)),
    static_argnums=(1, 2),
)


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.lists(st.integers(0, 60), min_size=5, max_size=5), st.lists(st.integers(0, 127), max_size=8))
def test_the_work_is_that_of_the_rows(training, decode):
    """Tiles hold every row once, and only rows of one group. There are no more tiles than that takes."""
    for group_sizes, tokens in [(training, 150), (np.bincount(decode, minlength=128), 8)]:
        size = tile_size(tokens, len(group_sizes))
        groups = np.repeat(np.arange(len(group_sizes)), group_sizes)[:tokens]
        blocks = np.arange(len(groups)) // size
        for aligned, empty in [(False, False), (True, False), (True, True)]:
            tiles = plan(np.asarray(group_sizes, np.int32), tokens, size, aligned=aligned, empty=empty)
            group, first, end = (np.asarray(x)[: tiles.count] for x in (tiles.group, tiles.first, tiles.end))
            rows = np.concatenate([[], *map(np.arange, first, end)])
            np.testing.assert_array_equal(rows, np.arange(len(groups)))
            np.testing.assert_array_equal(np.repeat(group, end - first), groups)
            assert (np.asarray(tiles.first)[tiles.count :] == np.asarray(tiles.end)[tiles.count :]).all()
            counts = np.bincount(groups, minlength=len(group_sizes))
            if aligned:
                assert (first // size == (np.maximum(end, first + 1) - 1) // size).all()
                least = len(set(zip(groups, blocks, strict=True)))
            else:
                least = sum(-(-counts // size))
            assert len(group) == least + empty * sum(counts == 0)
            assert set(group) >= set(range(len(group_sizes)) if empty else groups)


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.lists(st.integers(0, 8), max_size=60), st.integers(0, 3))
def test_a_tile_is_found_by_itself(groups, rest):
    """There are 40 rows and 50 groups. Some rows belong to none, or groups would go beyond the rows."""
    sizes = np.bincount(groups, minlength=50).astype(np.int32)
    sizes[:rest] = 0
    padded = np.concatenate([sizes, np.int32([40]), np.zeros(13, np.int32)])  # as kernels load them
    ours, theirs = find(padded, 40, 4), plan(padded[:51], 40, 4)
    for own, of_all in zip(ours, (theirs.group, theirs.first, theirs.end), strict=True):
        np.testing.assert_array_equal(own[: theirs.count], of_all[: theirs.count])
    assert not np.any(np.asarray(ours.first)[theirs.count :] < np.asarray(ours.end)[theirs.count :])


def test_rows_beyond_the_groups_are_a_group():
    starts, ends = jax.jit(lambda sizes: spans(with_rest(sizes, 10), 10))(np.int32([3, 0, 4]))
    assert list(starts) == [0, 3, 3, 7] and list(ends) == [3, 3, 7, 10]


@pytest.mark.parametrize(
    "tokens, groups, size", [(1, 3, 1), (5, 1, 5), (8, 128, 8), (100, 10, 16), (1024, 64, 16), (9999, 2, 128)]
)
def test_tiles_are_as_large_as_the_mean_group(tokens, groups, size):
    assert tile_size(tokens, groups) == size


@pytest.mark.parametrize("dtype", [jnp.float32, thorough(jnp.bfloat16)])
def test_memory_and_flops_do_not_grow_with_the_groups(dtype):
    """The cost does not grow with groups. The reference holds [groups, tokens, out], a gather [tokens, out, in]."""
    tokens, in_features, out_features = 256, 128, 128

    def cost(groups, implementation):
        shapes = (tokens, in_features), (groups, out_features, in_features)
        x, w = (jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)
        loss = lambda *args: kernels.ragged_dot(*args, implementation=implementation).astype(jnp.float32).sum()
        compiled = (
            jax.jit(jax.grad(loss, (0, 1))).lower(x, w, jax.ShapeDtypeStruct((groups,), jnp.int32)).compile(QUICK)
        )
        dw_in_float32 = 0 if dtype == jnp.float32 else 4 * w.size
        return compiled.memory_analysis().temp_size_in_bytes - dw_in_float32, compiled.cost_analysis()["flops"]

    one_matrix = in_features * out_features
    memory, flops = cost(256, "xla")
    assert memory < 4 * (4 * tokens * (in_features + out_features) + 2 * one_matrix)
    if dtype == jnp.float32:
        assert cost(256, "reference")[0] > 256 * tokens * out_features  # so this test can fail
        # XLA counts the iterations of a loop once, and counts conversions as floating-point operations.
        assert flops < 1.5 * 2 * (2 * 8 * one_matrix)


def test_inside_scan_and_checkpoint():
    x, w, _ = arrays(groups=10, in_features=24, out_features=24)
    layers = w.reshape(2, 5, 24, 24), np.array([[70, 0, 10, 30, 40], [1, 2, 100, 3, 0]])

    def loss(x, w, sizes, implementation):
        def layer(x, layer):
            return jnp.tanh(kernels.ragged_dot(x, *layer, implementation=implementation)), None

        return jnp.square(lax.scan(jax.checkpoint(layer), x, (w, sizes))[0]).sum()

    gradients = lambda implementation: jax.jit(
        jax.grad(functools.partial(loss, implementation=implementation), (0, 1)), compiler_options=QUICK
    )(x, *layers)
    for ours, theirs in zip(gradients("xla"), gradients("reference"), strict=True):
        close(ours, theirs, terms=600)


@pytest.mark.thorough
def test_inside_vmap_and_while_loop():
    x, w, _ = arrays(groups=3, in_features=24, out_features=24)
    w, xs, sizes = jnp.asarray(w), np.stack([x, 2 * x]), np.array([[100, 0, 30], [1, 2, 3]])

    def squared(x, sizes, implementation):
        step = lambda state: (state[0] + 1, kernels.ragged_dot(state[1], w, sizes, implementation=implementation))
        return lax.while_loop(lambda state: state[0] < 2, step, (0, x))[1]

    ours, theirs = (
        jax.jit(jax.vmap(functools.partial(squared, implementation=name)), compiler_options=QUICK)(xs, sizes)
        for name in ("xla", "reference")
    )
    close(ours, theirs, terms=300)


def test_the_choice_of_implementation():
    def loops(*args, **kwargs):
        return "while" in str(jax.make_jaxpr(functools.partial(kernels.ragged_dot, **kwargs))(*args))

    (x, w, _), sizes = arrays(), np.int32(GROUP_SIZES)
    assert loops(x, w, sizes) and not loops(x, w, sizes, implementation="reference")
    assert jax.jit(kernels.ragged_dot)(x[:0], w, sizes).shape == (0, 40)
    assert not jax.jit(kernels.ragged_dot)(x, w[:0], sizes[:0]).any()


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x, w, d_out = arrays(dtype=jnp.float64)
        close(run(None, x, w, GROUP_SIZES, d_out), oracle(x, w, GROUP_SIZES, d_out), terms=200, dtype=np.float64)
        with pytest.raises(ValueError, match=r"'xla'\): it computes in float32, and x is float64"):
            run("xla", x, w, GROUP_SIZES, d_out)
        x, w, d_out = arrays()
        close(run("xla", x, w, GROUP_SIZES, d_out), oracle(x, w, GROUP_SIZES, d_out), terms=200)


def test_contradictions_are_refused():
    x, w, sizes = map(jnp.asarray, [*arrays()[:2], GROUP_SIZES])
    with pytest.raises(ValueError, match=r"no such implementation"):
        kernels.ragged_dot(x, w, sizes, implementation="cutlass")
    with pytest.raises(ValueError, match=r"'xla'\): it needs a row, a group and a feature at least"):
        kernels.ragged_dot(x[:0], w, sizes, implementation="xla")
    with pytest.raises(ValueError, match="one dtype, not float32 and bfloat16"):
        kernels.ragged_dot(x, w.astype(jnp.bfloat16), sizes)


@pytest.mark.parametrize(
    "implementation, w_shape, w_dtype, reason",
    [
        ("tpu", (2, 40, 300), jnp.bfloat16, "up to 256 features, or of a multiple of 128"),
        ("triton", (2, 1 << 16, (1 << 14) + 16), jnp.int8, "w, of 2 to 4 GB in 8 bits"),
    ],
)
def test_what_kernels_cannot_address_is_refused(implementation, w_shape, w_dtype, reason):
    x, w = jax.ShapeDtypeStruct((8, w_shape[2]), jnp.bfloat16), jax.ShapeDtypeStruct(w_shape, w_dtype)
    product = functools.partial(kernels.ragged_dot, implementation=implementation)
    with pytest.raises(ValueError, match=reason):
        jax.eval_shape(product, x, w, jax.ShapeDtypeStruct((2,), jnp.int32))


def test_shapes_that_do_not_fit_are_refused_where_nobody_checks_annotations(untyped):
    x, w, sizes = map(jnp.asarray, [*arrays()[:2], GROUP_SIZES])
    with pytest.raises(ValueError, match=r"x have 24 features, and w, \(groups, out, in\), takes 40"):
        kernels.ragged_dot(x, w.swapaxes(1, 2), sizes)
    with pytest.raises(ValueError, match="w has 5 groups: group_sizes must have one size for each, not 4"):
        kernels.ragged_dot(x, w, sizes[:4])
