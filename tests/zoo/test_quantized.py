"""Weights in fewer bits, and training in eight: the changes to a model, and no others."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from kernels.coded import NF4
from tests.close import close
from tests.zoo.programs import MODEL, forward, noise, same, thorough
from zoo import surgery
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Linear
from zoo.nn.stack import Stack
from zoo.quantized import (
    LowPrecisionExpertLinear,
    LowPrecisionLinear,
    QuantizedLinear,
    dequantize_weight,
    quantize,
    quantize_training,
    quantize_weight,
)


TOKENS = jnp.asarray(np.random.RandomState(0).randint(0, 64, (8, 12)))
FAMILIES = ["qwen2", "deepseek3"]  # with biases; with low ranks, routers, experts, and layers before the scan


@pytest.fixture(params=FAMILIES)
def model(request, load):
    return load(request.param)


def test_the_linears_of_layers_and_nothing_else(model):
    quantized = quantize_training(model, "fp8")
    in_layers = tuple(f"{path}." for path, _ in surgery.modules(model, Stack))
    for path, linear in surgery.modules(quantized, AbstractLinear):
        assert type(linear) is (LowPrecisionLinear if path.startswith(in_layers) else Linear)
    assert all(type(m) is LowPrecisionExpertLinear for _, m in surgery.modules(quantized, AbstractExpertLinear))
    named = lambda m: {surgery.path_name(p): a for p, a in jax.tree_util.tree_leaves_with_path(m)}
    assert named(quantized).keys() == named(model).keys()
    assert all(array is named(model)[path] for path, array in named(quantized).items())


@pytest.mark.thorough
@pytest.mark.parametrize("model, dtype, off", [("qwen2", "int8", 0.1), ("deepseek3", "fp8", 0.3)], indirect=["model"])
def test_it_computes_nearly_the_same(model, dtype, off):
    want, got = (np.asarray(forward(m, TOKENS)) for m in (model, quantize_training(model, dtype)))
    assert 0 < np.abs(got - want).mean() < off * np.abs(want).mean()


def test_mxfp8_computes_nearly_the_same_or_names_the_matrix(load):
    """The embedded model's matrices have sides of multiples of 32."""
    model = zoo.load("tiny", dtype="float32")
    want, got = (np.asarray(forward(m, TOKENS)) for m in (model, quantize_training(model, "mxfp8")))
    assert 0 < np.abs(got - want).mean() < 0.3 * np.abs(want).mean()
    with pytest.raises(ValueError, match=r"layers.period.0.self_attn.k_proj is 16 x 32. Take --matmul fp8"):
        quantize_training(load("qwen2"), "mxfp8")


def test_it_is_saved_as_it_was(model, tmp_path):
    for name, each in (("plain", model), ("quantized", quantize_training(model, "fp8"))):
        zoo.save(each, tmp_path / name)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "quantized")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "quantized" / name).read_bytes(), name


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_it_is_sharded_as_it_was(model):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = zoo.registry.family_of(model.config).partition_rules
    quantized = quantize_training(model, "int8")
    places = surgery.shardings(quantized, rules, mesh)
    assert jax.tree.leaves(places) == jax.tree.leaves(surgery.shardings(model, rules, mesh))
    placed = jax.device_put(quantized, places)
    with jax.set_mesh(mesh):
        got = forward(placed, jax.device_put(TOKENS, NamedSharding(mesh, P("fsdp"))))
    want = np.asarray(forward(quantized, TOKENS))
    assert got.sharding.spec[0] == "fsdp"
    assert np.abs(np.asarray(got) - want).mean() < 1e-2 * np.abs(want).mean()  # where rounding flips


# ------------------------------------------------------------------------------------------------------ stored weights


FORMATS = ["int8", "fp8", "nf4"]


@pytest.mark.parametrize(  # every pair of a model, a dtype and a format
    "name, dtype, format",
    [
        ("qwen2", "float32", "int8"),
        thorough("qwen2", "bfloat16", "fp8"),
        thorough("qwen2", "float32", "nf4"),
        thorough("mixtral", "bfloat16", "int8"),
        thorough("mixtral", "float32", "fp8"),
        ("mixtral", "bfloat16", "nf4"),
    ],
)
def test_stored(load, name, dtype, format):
    """No weight is further off than the format's widest gap allows; the loader rounds to the same bits."""
    model = load(name, dtype=dtype)
    linears = lambda m: surgery.modules(m, (AbstractLinear, AbstractExpertLinear))

    @eqx.filter_jit
    def store(model):
        stored = quantize(model, format)
        in_layers = {path: m for path, m in linears(stored) if path.startswith("layers.")}
        meant = {
            path: dequantize_weight(m.weight, m.scale.astype(jnp.float32), format) for path, m in in_layers.items()
        }
        return stored, meant

    stored, meant = store(model)
    for (path, plain), (_, new) in zip(linears(model), linears(stored), strict=True):
        if path not in meant:
            assert type(new) is Linear
            continue
        assert new.shape == plain.shape and (new.bias is None) == (plain.bias is None)
        weight = np.asarray(plain.weight, np.float32)
        got = np.asarray(meant[path])
        largest = np.abs(weight).reshape(*new.scale.shape, -1).max(axis=-1, keepdims=True)
        # Half of the widest gap between neighbours: 1 of 127, 32 of 448, and 1 - 0.696 of 1.
        step = {"int8": 0.5 / 127, "fp8": 16 / 448, "nf4": 0.152}[format]
        step += 2**-8 if dtype == "bfloat16" else 1e-6  # the rounding of the scale
        assert (np.abs(got - weight).reshape(*new.scale.shape, -1) <= step * largest).all()
    assert eqx.filter_eval_shape(forward, stored, TOKENS).dtype == dtype
    assert same(load(name, dtype=dtype, quantize=format), stored)


@pytest.mark.thorough
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_stored_computes_as_what_it_stands_for(load, format):
    """Linear maps and experts compute the same as with the codes' numbers as weights."""
    plain, stored = load("mixtral", dtype="float32"), load("mixtral", dtype="float32", quantize=format)
    kinds = (AbstractLinear, AbstractExpertLinear)
    each = [m for path, m in surgery.modules(stored, kinds) if path.startswith("layers.")]
    weights = lambda m: [linear.weight for path, linear in surgery.modules(m, kinds) if path.startswith("layers.")]
    meant = eqx.filter_jit(lambda each: [dequantize_weight(m.weight, m.scale, format) for m in each])(each)
    want, got = (np.asarray(forward(m, TOKENS)) for m in (eqx.tree_at(weights, plain, meant), stored))
    close(got, want, terms=MODEL)


@pytest.mark.thorough
@pytest.mark.parametrize("format", ["int8", "nf4"])  # with one scale a row, as in fp8, and with scales of blocks in it
def test_stored_on_a_mesh(folders, load, format):
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    want = load("mixtral", dtype="float32", quantize=format)
    with jax.set_mesh(mesh):
        got = zoo.load(folders["mixtral"], quantize=format, mesh=mesh)
        assert same(got, want)
        assert any(not a.sharding.is_fully_replicated for a in jax.tree.leaves(got) if a.dtype.itemsize == 1)
        close(forward(got, TOKENS), forward(want, TOKENS), terms=MODEL)


def test_nf4_by_hand():
    """Codes and bytes of two blocks are right, one of them all zeros; ties go to the lower code."""
    weight = np.concatenate([2 * np.asarray(NF4, np.float32).repeat(4), np.zeros(64, np.float32)])[None]
    coded = jax.jit(lambda weight: quantize_weight(weight, "nf4"))
    values, scale = map(np.asarray, coded(jnp.asarray(weight)))
    assert values.shape == (1, 64) and values.dtype == np.uint8
    assert scale.tolist() == [[2.0, 1.0]]
    assert values[0, :8].tolist() == [0x00, 0x00, 0x11, 0x11, 0x22, 0x22, 0x33, 0x33]
    assert (values[0, 32:] == 0x77).all()
    meant = jax.jit(lambda values, scale: dequantize_weight(values, scale, "nf4"))(values, scale)
    assert np.array_equal(meant, weight)
    with pytest.raises(ValueError, match="Rows of 3 weights"):
        quantize_weight(jnp.ones((2, 3)), "nf4")


@pytest.mark.live
def test_nf4_equals_bitsandbytes():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch = pytest.importorskip("torch")
    weight = np.random.RandomState(0).randn(8, 128).astype(np.float32)
    values, state = bitsandbytes.functional.quantize_4bit(torch.from_numpy(weight), quant_type="nf4")
    ours, scale = quantize_weight(jnp.asarray(weight), "nf4")
    assert (np.asarray(ours).ravel() == values.numpy().ravel()).all()
    np.testing.assert_array_equal(np.ravel(scale), state.absmax.numpy())
    meant = bitsandbytes.functional.dequantize_4bit(values, state).numpy()
    close(dequantize_weight(ours, scale, "nf4"), meant, terms=2)


@pytest.mark.parametrize("format", FORMATS)
def test_a_stored_weight_has_no_gradient(format):
    """The factor that it multiplies does have a gradient, that of the dequantised weights."""
    plain = noise(lambda: Linear(64, 8, key=jax.random.key(0)))
    stored = eqx.filter_jit(lambda linear: QuantizedLinear.of(linear, format))(plain)
    x = np.random.RandomState(1).standard_normal((2, 64)).astype(np.float32)
    both = lambda x: (jnp.sum(jnp.sin(stored(x))), jnp.sum(jnp.sin(x @ stored.matrix(x.dtype).T)))
    close(*jax.jit(jax.jacrev(both))(x), terms=100)
    cast = surgery.cast(stored, jnp.bfloat16)
    assert cast.weight.dtype == stored.weight.dtype and cast.scale.dtype == jnp.bfloat16
