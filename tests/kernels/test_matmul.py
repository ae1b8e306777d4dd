"""kernels.int8_matmul and fp8_matmul: all implementations against a float64 oracle with the prescribed rounding."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import kernels
from kernels.backends.device import Device
from kernels.quantized_matmul import xla
from kernels.quantized_matmul.quantize import LARGEST, dequantize, quantize
from kernels.quantized_matmul.shared import SAVED, Formula
from kernels.stacked import Stacked
from tests.close import as_exact, close
from tests.kernels.oracle import thorough


IMPLEMENTATIONS = ["reference", "xla", "tpu", "triton"]
WITHOUT_TPU = ["reference", "xla", thorough("tpu"), "triton"]  # interpreting the TPU's kernels takes longest
QUICK = {"xla_backend_optimization_level": 0}  # compiling is nearly all of this file's time
FP8, FP8_WIDE = jnp.float8_e4m3fn, jnp.float8_e5m2
OPERATIONS = {jnp.int8: kernels.int8_matmul, FP8: kernels.fp8_matmul}


def rounded(x, dtype, granularity):
    """Returns the values and scales of `quantize`, and the numbers that they represent, group by group in numpy."""
    sizes = dict(tensor=x.shape, channel=(1, x.shape[1]), piece=(1, 128), block=(128, 128), mx=(1, 32))
    height, width = sizes[granularity]
    x, values = np.asarray(x, np.float32), np.zeros(x.shape, dtype)
    scales = np.ones([-(-x.shape[0] // height), -(-x.shape[1] // width)], np.float32)
    stands_for = np.zeros(x.shape)
    for i, j in np.ndindex(scales.shape):
        group = slice(i * height, (i + 1) * height), slice(j * width, (j + 1) * width)
        scale = np.abs(x[group]).max() * np.float32(1 / LARGEST[np.dtype(dtype)])
        if np.isfinite(scale) and scale < np.finfo(np.float32).tiny:
            scale = np.float32(1)
        elif granularity == "mx":
            power = scale.astype(jnp.float8_e8m0fnu).astype(np.float32)  # ml_dtypes rounds to the nearest
            scale = power if power >= scale else 2 * power
        scales[i, j] = scale if np.isfinite(scale) else np.nan
        exact = x[group] * (np.float32(1) / scales[i, j])
        values[group] = (np.rint(np.nan_to_num(exact)) if dtype == jnp.int8 else exact).astype(dtype)
        stands_for[group] = values[group].astype(np.float64) * np.float64(scales[i, j])
    return values, scales, stands_for


def oracle(x, w, d_out, dtype, granularity, activations, gradients):
    """Computes the output and the gradients of x and w, in float64."""
    shape = x.shape
    x, d_out = (np.asarray(a, np.float32).reshape(-1, a.shape[-1]) for a in (x, d_out))
    w = np.asarray(w, np.float32)
    of_rows = "piece" if granularity == "block" else granularity
    matrix = lambda w: rounded(w, dtype, granularity)[2]
    rows = lambda x: rounded(x, dtype, of_rows)[2]
    out = (rows(x) if activations else x.astype(np.float64)) @ matrix(w).T
    if gradients == "float":
        dx, dw = d_out @ matrix(w), d_out.astype(np.float64).T @ x
    elif dtype == FP8 and granularity not in ("block", "mx"):
        whole = lambda x, dtype=FP8: rounded(x, dtype, "tensor")[2]
        dx, dw = whole(d_out, FP8_WIDE) @ whole(w), whole(d_out, FP8_WIDE).T @ whole(x)
    else:
        dx, dw = rows(d_out) @ matrix(w.T).T, rows(d_out.T) @ matrix(x.T).T
    return out.reshape(*shape[:-1], -1), dx.reshape(shape), dw


MX_SIDES = dict(ins=192, outs=160)  # multiples of 32; the 150 rows of `arrays` are not


def arrays(rows=(3, 50), ins=200, outs=150, dtype=jnp.float32):
    """Returns x, w and the gradient of the output. Rows and columns differ much in size, so each scale matters."""
    rng = np.random.default_rng(0)
    one = lambda *shape: rng.normal(size=shape) * np.exp(rng.normal(size=(*shape[:-1], 1)) + rng.normal(size=shape[-1]))
    return [one(*shape).astype(dtype) for shape in ((*rows, ins), (outs, ins), (*rows, outs))]


def run(implementation, dtype, x, w, d_out, scale=None, **options):
    """Returns the output and the gradients of x, and of w if it has floats, in numpy."""
    return jax.device_get(_run(implementation, dtype, tuple(options.items()), x, w, d_out, scale))


@functools.partial(jax.jit, static_argnums=(0, 1, 2), compiler_options=QUICK)
def _run(implementation, dtype, options, x, w, d_out, scale):
    product = lambda x, w: OPERATIONS[dtype](x, w, scale, **dict(options), implementation=implementation)
    if scale is None:
        out, gradient = jax.vjp(product, x, w)
    else:
        out, gradient = jax.vjp(lambda x: product(x, w), x)
    return out, *gradient(d_out)


# Pairwise: any two values of any two options occur together.
CASES = [
    # dtype, granularity, activations, gradients
    (jnp.int8, "tensor", True, "quantized"),
    (FP8, "tensor", False, "float"),
    (jnp.int8, "channel", False, "float"),
    (FP8, "channel", True, "quantized"),
    (FP8, "block", True, "float"),
    (jnp.int8, "block", False, "quantized"),
    (FP8, "mx", True, "quantized"),
]
# Options of two of these cases, whose programs serve other tests, too.
FLOAT_ROWS = dict(granularity="channel", activations=False, gradients="float")  # int8
BY_BLOCKS = dict(granularity="block", activations=True, gradients="float")  # FP8


def case_of(implementation, dtype, granularity, *rest):
    """Returns a case, in the default tier if it is Triton's, or the reference's that Triton has not."""
    default = implementation == "triton" or (implementation == "reference" and granularity == "mx")
    marks = () if default else pytest.mark.thorough
    return pytest.param(implementation, dtype, granularity, *rest, marks=marks)


CASES_OF = [
    case_of(implementation, *case)
    for implementation in IMPLEMENTATIONS
    for case in CASES
    if implementation not in ("tpu", "triton") or case[1] != "mx"
]


@pytest.mark.parametrize("implementation, dtype, granularity, activations, gradients", CASES_OF)
def test_float32_equals_the_oracle(implementation, dtype, granularity, activations, gradients):
    options = dict(granularity=granularity, activations=activations, gradients=gradients)
    given = arrays(**MX_SIDES if granularity == "mx" else {})
    actual = run(implementation, dtype, *given, **options)
    close(actual, oracle(*given, dtype, **options), terms=400)


@pytest.mark.parametrize("rows", [(3, 50), (1,)])
def test_blackwell_multiplies_mxfp8_itself(monkeypatch, rows):
    """All three products are `jax.nn.scaled_matmul`, which gets whole groups of 32 and float8_e8m0fnu's scales.

    jax 0.10.2 has it for GPUs alone, so its definition stands in for it.
    """
    called = []

    def scaled_matmul(a, b, a_scale, b_scale, preferred_element_type):
        called.append((a.shape, b.shape))
        assert {a_scale.dtype, b_scale.dtype} == {jnp.dtype(jnp.float8_e8m0fnu)}
        assert all(values.shape[-1] == 32 * scale.shape[-1] for values, scale in ((a, a_scale), (b, b_scale)))
        exact = lambda x: x.astype(preferred_element_type)
        a, b = (exact(x) * jnp.repeat(exact(scale), 32, axis=-1) for x, scale in ((a, a_scale), (b, b_scale)))
        return jnp.einsum("bmk,bnk->bmn", a, b, precision="highest")

    monkeypatch.setattr(jax.nn, "scaled_matmul", scaled_matmul)
    monkeypatch.setattr(xla, "device", lambda: Device("gpu", "NVIDIA B200"))
    options = dict(granularity="mx", activations=True, gradients="quantized")
    given = x, w, d_out = arrays(rows=rows, **MX_SIDES)
    product = functools.partial(xla.quantized_matmul.__wrapped__, formula=Formula(FP8, **options))
    step = lambda x, w, d_out: (lambda out, gradient: (out, *gradient(d_out)))(*jax.vjp(product, x, w, None))
    actual = jax.device_get(jax.jit(step, compiler_options=QUICK)(x, w, d_out))[:3]
    close(actual, oracle(*given, FP8, **options), terms=400)
    tokens, padded = np.prod(rows), -(-np.prod(rows) // 32) * 32
    shape = lambda *sides: (1, *sides)
    assert called == [
        (shape(tokens, 192), shape(160, 192)),
        (shape(tokens, 160), shape(192, 160)),
        (shape(160, padded), shape(192, padded)),
    ]


def on_a_mesh(product, x, w, d_out, **axes):
    """Returns what `run` does, on four devices with these axes, of which `fsdp` splits x by rows and w by columns."""
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(*axes.values()), tuple(axes))
    on = lambda array, *spec: jax.device_put(array, NamedSharding(mesh, P(*spec)))
    step = lambda x, w, d_out: (lambda out, gradient: (out, *gradient(d_out)))(*jax.vjp(product, x, w))
    with jax.set_mesh(mesh):
        (choice,) = kernels.explain(product, x, w)
        given = on(x, "fsdp"), on(w, None, "fsdp"), on(d_out, "fsdp")
        return choice, jax.device_get(jax.jit(step, compiler_options=QUICK)(*given))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "dtype, gradients, axes", [(jnp.int8, "float", dict(fsdp=4)), (FP8, "quantized", dict(fsdp=2, context=2))]
)
def test_triton_on_a_mesh_that_splits_tokens(dtype, gradients, axes):
    options = dict(granularity="channel", activations=True, gradients=gradients)
    given = x, w, _ = arrays(rows=(4, 12), outs=152)
    product = functools.partial(OPERATIONS[dtype], **options)
    with kernels.prefer("triton"):
        choice, actual = on_a_mesh(product, *given, **axes)
        with jax.set_mesh(Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("fsdp", "tensor"))):
            (on_others,) = kernels.explain(product, x, w)
    assert choice.implementation == "triton" and on_others.implementation == "xla"
    assert on_others.others["triton"].startswith("on a mesh each device must have its own tokens")
    close(actual, oracle(*given, dtype, **options), terms=400)


@pytest.mark.skipif(jax.__version_info__ < (0, 12), reason="this jax has scaled_matmul for GPUs alone")
@pytest.mark.parametrize("rows", [(4, 64), (4, 8)])
def test_mxfp8_on_a_mesh(monkeypatch, rows):
    """Devices whose tokens are fewer than those that share a scale get whole groups, too."""
    monkeypatch.setattr(xla, "device", lambda: Device("gpu", "NVIDIA B200"))
    options = dict(granularity="mx", activations=True, gradients="quantized")
    given = arrays(rows=rows, **MX_SIDES)
    product = lambda x, w: kernels.fp8_matmul(x, w, implementation="xla", **options)
    _, actual = on_a_mesh(product, *given, fsdp=4)
    close(actual, oracle(*given, FP8, **options), terms=400)


@functools.cache
def in_bfloat16(implementation, dtype, **options):
    given = arrays(rows=(40,), ins=384, dtype=jnp.bfloat16)
    actual = run(implementation, dtype, *given, **options)
    assert {a.dtype for a in actual} == {jnp.dtype(jnp.bfloat16)}
    return actual, oracle(*given, dtype, **options)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "implementation, dtype, activations, gradients",
    [
        *((implementation, FP8, True, "quantized") for implementation in IMPLEMENTATIONS[1:]),
        *((implementation, jnp.int8, False, "float") for implementation in ("tpu", "triton")),
    ],
)
def test_bfloat16_is_as_exact_as_the_reference(implementation, dtype, activations, gradients):
    options = dict(granularity="block", activations=activations, gradients=gradients)
    ours, exact = in_bfloat16(implementation, dtype, **options)
    theirs, _ = in_bfloat16("reference", dtype, **options)
    as_exact(ours, theirs, exact)


@pytest.mark.parametrize(
    "implementation, dtype, granularity",
    # Pairwise, except that all are there for "tpu", which copies some stacks.
    [
        (implementation, dtype, granularity)
        for implementation in IMPLEMENTATIONS
        for dtype in (jnp.int8, FP8)
        for granularity in ("channel", "block")
        if implementation == "tpu" or (implementation == "triton") == ((dtype == jnp.int8) == (granularity == "block"))
    ],
)
def test_a_matrix_that_is_quantised_already(implementation, dtype, granularity):
    """The shape of the scale determines the granularity, and only x has a gradient. Few rows are those of a decode
    step.

    Half of the matrices are a layer of a stack, whose other layers may hold anything. "tpu" copies the layer if the
    features are no multiple of a piece.
    """
    stacked, ins = dtype == jnp.int8, 200 if dtype == FP8 else 256
    if implementation == "tpu":
        stacked = stacked == (granularity == "channel")
    x, w, d_out = arrays(rows=(7,), ins=ins)
    values, scales, _ = rounded(w, dtype, granularity)
    scale = (scales if granularity == "block" else scales[:, 0]).astype(jnp.bfloat16)  # as in a bfloat16 model
    spread = np.asarray(scale, np.float64).reshape(scales.shape)
    spread = np.kron(spread, np.ones((128, 128)))[:150, :ins] if granularity == "block" else spread
    stands_for = values.astype(np.float64) * spread
    if stacked:
        values = Stacked(np.stack([np.full_like(values, 100), values, np.full_like(values, 100)]), jnp.int32(1))
    actual = run(implementation, dtype, x, values, d_out, scale)
    close(actual, (np.float64(x) @ stands_for.T, np.float64(d_out) @ stands_for), terms=400)


@pytest.mark.parametrize("implementation", WITHOUT_TPU)
def test_quantised_gradients_of_a_matrix_that_is_quantised_already(implementation):
    """By channel, columns become rows in the backward pass, so the matrix is quantised again."""
    x, w, d_out = arrays()
    values, scales, stands_for = rounded(w, jnp.int8, "channel")
    options = dict(activations=True, gradients="quantized")
    actual = run(implementation, jnp.int8, x, values, d_out, scales[:, 0], **options)
    expected = oracle(x, stands_for.astype(np.float32), d_out, jnp.int8, "channel", **options)
    close(actual, expected[:2], terms=400)


def put(x, value, *index):
    """Returns a copy with this value at an index."""
    x = x.copy()
    x[index] = value
    return x


@pytest.mark.parametrize("implementation", WITHOUT_TPU)
@pytest.mark.parametrize("garbage", [np.nan, -np.inf])
def test_what_is_not_finite_becomes_nan_in_all_of_its_group(implementation, garbage):
    x, w, d_out = arrays()
    dirty_x, dirty_w = put(x, garbage, 0, 3, 199), put(w, garbage, 140, 5)
    out, dx, dw = run(implementation, FP8, x, w, d_out, **BY_BLOCKS)
    out_x, *_ = run(implementation, FP8, dirty_x, w, d_out, **BY_BLOCKS)
    np.testing.assert_array_equal(out_x, put(out, np.nan, 0, 3))
    out_w, dx_w, dw_w = run(implementation, FP8, x, dirty_w, d_out, **BY_BLOCKS)
    np.testing.assert_array_equal(out_w, put(out, np.nan, ..., slice(128, None)))
    np.testing.assert_array_equal(dx_w, put(dx, np.nan, ..., slice(0, 128)))
    np.testing.assert_array_equal(dw_w, dw)
    out_x, *_ = run(implementation, jnp.int8, dirty_x, w, d_out, **FLOAT_ROWS)
    assert not np.isfinite(out_x[0, 3]).any()
    assert np.isfinite(put(out_x, 0, 0, 3)).all()


@pytest.mark.parametrize("implementation", WITHOUT_TPU)
def test_zeros(implementation):
    x, w, d_out = arrays()
    x[0, 3], w[:128] = 0, 0
    out, *gradients = run(implementation, FP8, x, w, d_out, **BY_BLOCKS)
    assert not out[0, 3].any() and not out[..., :128].any() and out[0, 4, 128:].all()
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_long_sums_of_int8_do_not_overflow(implementation):
    """The sum 127 * 127 * 140,000 exceeds an int32, and the result is still right."""
    out = kernels.int8_matmul(jnp.ones((1, 140_000)), jnp.ones((2, 140_000)), activations=True)
    close(out, 140_000, terms=100)
    for other in ("tpu", "triton"):
        with pytest.raises(
            ValueError, match=rf"'{other}'\): it sums up int8 in int32, which 140000 terms may overflow"
        ):
            kernels.int8_matmul(jnp.ones((1, 140_000)), jnp.ones((2, 140_000)), activations=True, implementation=other)


@pytest.mark.parametrize("dtype", [jnp.int8, FP8])
def test_memory_does_not_grow_with_the_blocks(dtype):
    rows, ins, outs = 64, 4096, 256
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((rows, ins), (outs, ins)))
    product = functools.partial(OPERATIONS[dtype], granularity="block", activations=True, implementation="xla")
    memory = jax.jit(product).lower(x, w).compile().memory_analysis().temp_size_in_bytes
    assert memory < 4 * (5 * rows * ins + 5 * outs * ins) / 2 + 4 * 4 * rows * outs  # in 8, 16 and once in 32 bits
    assert memory < 4 * (ins / 128) * rows * outs * 4


def test_scales_of_whole_tensors_go_into_the_product(monkeypatch):
    """On GPUs with float8 each side is multiplied by its own scale, for XLA to hand both to cuBLASLt.

    Here it multiplies dequantised values, with scales in bfloat16.
    """
    given = arrays(rows=(48,), ins=384, outs=160, dtype=jnp.bfloat16)
    options = dict(granularity="tensor", activations=True, gradients="quantized")
    monkeypatch.setattr(xla, "device", lambda: Device("gpu", "NVIDIA H200"))
    product = functools.partial(xla.quantized_matmul.__wrapped__, formula=Formula(FP8, **options))
    step = lambda x, w, d_out: (lambda out, gradient: (out, *gradient(d_out)))(*jax.vjp(product, x, w, None))
    products = [e for e in jax.make_jaxpr(step)(*given).eqns if e.primitive.name == "dot_general"]
    assert [side.aval.dtype for product in products for side in product.invars] == 6 * [jnp.bfloat16]
    actual = jax.device_get(jax.jit(step, compiler_options=QUICK)(*given))[:3]
    # Of each side the scale and its product are rounded, and then the result.
    close(actual, oracle(*given, FP8, **options), terms=5, dtype=jnp.bfloat16)


@functools.cache
def gradients_inside_scan_checkpoint_and_vmap(implementation):
    x, w, _ = arrays(rows=(2, 20), ins=130, outs=130)

    def loss(x, layers):
        product = functools.partial(kernels.fp8_matmul, granularity="block", implementation=implementation)
        layer = lambda x, w: (jnp.tanh(product(x, w, activations=True, gradients="quantized")), None)
        return jnp.square(lax.scan(jax.checkpoint(layer), x, layers)[0]).sum()

    gradients = jax.vmap(jax.grad(loss, (0, 1)), (0, None))
    return jax.device_get(jax.jit(gradients, compiler_options=QUICK)(x, np.stack([w, 2 * w])))


@pytest.mark.thorough
@pytest.mark.parametrize("implementation", ["xla", "tpu"])  # JAX batches "triton" as it does "tpu"
def test_inside_scan_checkpoint_and_vmap(implementation):
    expected = gradients_inside_scan_checkpoint_and_vmap("reference")
    for ours, theirs in zip(gradients_inside_scan_checkpoint_and_vmap(implementation), expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-2, atol=2e-2 * np.abs(theirs).max())  # rounding may flip


def test_a_checkpoint_policy_can_keep_the_results():
    """A policy can keep the products' results; otherwise the backward pass would multiply again."""
    x, w, _ = arrays()

    def products(policy):
        layer = lambda x, w: jnp.sin(kernels.int8_matmul(jnp.sin(x), w, activations=True)).sum()
        gradient = jax.grad(jax.checkpoint(layer, policy=policy), (0, 1))
        return str(jax.make_jaxpr(gradient)(x, w)).count(" dot_general[")

    assert products(jax.checkpoint_policies.save_only_these_names(SAVED)) == 3
    assert products(jax.checkpoint_policies.nothing_saveable) == 4


def test_float64_stays_float64():
    with jax.enable_x64(True):
        x, w, d_out = arrays(dtype=jnp.float64)
        out, dx, _ = run(None, jnp.int8, x, w, d_out)
        stands_for = np.asarray(jax.jit(lambda w: dequantize(quantize(w, jnp.int8, "channel")))(w))
        assert stands_for.dtype == np.float64
        close((out, dx), (x @ stands_for.T, d_out @ stands_for), terms=400, dtype=np.float64)
        with pytest.raises(ValueError, match=r"'xla'\): it computes in float32, and x is float64"):
            run("xla", jnp.int8, x, w, d_out)


def test_nothing_to_multiply():
    x, w, _ = arrays()
    product = lambda operation, **options: jax.jit(functools.partial(operation, activations=True, **options))
    assert product(kernels.int8_matmul)(x[:0], w).shape == (0, 50, 150)
    assert not product(kernels.fp8_matmul, granularity="block")(x[..., :0], w[:, :0]).any()


compiled_quantize, compiled_dequantize = jax.jit(quantize, static_argnums=(1, 2)), jax.jit(dequantize)


def test_contradictions_are_refused(untyped):
    x, w, _ = map(jnp.asarray, arrays())
    values, scale = compiled_quantize(w, jnp.int8, "channel")
    for message, call in {
        "granularity='row' is none of 'tensor', 'channel', 'block'": lambda: kernels.int8_matmul(
            x, w, granularity="row"
        ),
        "gradients='int8' is none of 'float', 'quantized'": lambda: kernels.int8_matmul(x, w, gradients="int8"),
        "w is int8 already, so its scale must be given": lambda: kernels.int8_matmul(x, values),
        r"scale of one of the shapes \(\), \(150,\), \(2, 2\), not \(149,\)": lambda: kernels.int8_matmul(
            x, values, scale[1:]
        ),
        "w is float32, so its scale is found here: leave it out, or give w in int8": lambda: kernels.int8_matmul(
            x, w, scale
        ),
        "granularity='mx' is MXFP8's: take fp8_matmul": lambda: kernels.int8_matmul(x, w, granularity="mx"),
        r"sides in multiples of 32, not \(150, 200\)": lambda: kernels.fp8_matmul(x, w, granularity="mx"),
        "must have one dtype, not float32 and int8": lambda: kernels.fp8_matmul(x, values),
        "x is float8_e4m3fn, and its products would be too": lambda: kernels.fp8_matmul(x.astype(FP8), w),
        "x have 200 features, and w, .out, in., takes 150": lambda: kernels.int8_matmul(x, w.T),
        "'triton'.: it multiplies two sides in float8 by blocks or channels, not by tensor": lambda: kernels.fp8_matmul(
            x, w, granularity="tensor", activations=True, implementation="triton"
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            call()


shapes = st.sampled_from([(1, 1), (3, 130), (129, 5), (140, 260)])
dtypes = st.sampled_from([jnp.int8, FP8, FP8_WIDE])
granularities = st.sampled_from(["tensor", "channel", "piece", "block", "mx"])


@settings(derandomize=True, deadline=None, max_examples=24)
@given(shapes, dtypes, granularities, st.integers(-50, 38), st.integers(0, 9))
def test_quantize(shape, dtype, granularity, exponent, seed):
    """Results equal numpy's bit by bit, from the smallest numbers to the largest, with zeros and infinities."""
    rng = np.random.default_rng(seed)
    x = (rng.normal(size=shape) * 10.0**exponent).clip(-3e38, 3e38).astype(np.float32)
    x[rng.random(shape) < 0.3] = 0
    if seed == 0:
        x[0, 0] = np.inf
    values, scales, stands_for = rounded(x, dtype, granularity)
    scales = scales.reshape(dict(tensor=(), channel=shape[:1]).get(granularity, scales.shape))
    actual = compiled_quantize(x, dtype, granularity)
    np.testing.assert_array_equal(actual.scale, scales)
    finite = np.isfinite(stands_for)
    np.testing.assert_array_equal(np.asarray(actual.values)[finite], values[finite])
    np.testing.assert_allclose(compiled_dequantize(actual), stands_for, rtol=1e-6, atol=1e-38)


def test_bfloat16_products_of_float8_are_in_bfloat16():
    """Float8 products are in bfloat16, forward and backward. XLA writes them and reads them again to scale them, which
    takes half the bytes of float32.
    """
    x, w = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 32), (48, 32)))
    loss = lambda x, w: jnp.sum(kernels.fp8_matmul(x, w, activations=True, gradients="quantized", implementation="xla"))
    text = str(jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, w))
    kinds = re.findall(r":(\w+)\[[0-9,]*\] = dot_general", text)
    assert kinds == 3 * ["bf16"]
