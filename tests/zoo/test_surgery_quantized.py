"""Training in eight bits, put into a model from outside: what changes of it, and that nothing else does."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from tests.zoo import tiny
from zoo import surgery
from zoo.layers import AbstractLinear, Linear
from zoo.stack import Stack


TOKENS = jnp.asarray(np.random.RandomState(0).randint(0, 64, (8, 12)))
FAMILIES = ["qwen2", "deepseek3"]  # with biases; with low ranks, routers, experts, and layers before the scan
forward = eqx.filter_jit(lambda model, tokens: model(tokens))


@pytest.fixture(scope="module", params=FAMILIES)
def model(request, tmp_path_factory):
    return zoo.load(tiny.write(tmp_path_factory.mktemp("checkpoint"), request.param))


def test_the_linears_of_layers_and_nothing_else(model):
    quantized = surgery.quantize_training(model, "fp8")
    in_layers = tuple(f"{path}." for path, _ in surgery.modules(model, Stack))
    for path, linear in surgery.modules(quantized, AbstractLinear):
        assert type(linear) is (surgery.QuantizedLinear if path.startswith(in_layers) else Linear)
    named = lambda m: {surgery.path_name(p): a for p, a in jax.tree_util.tree_leaves_with_path(m)}
    assert named(quantized).keys() == named(model).keys()
    assert all(array is named(model)[path] for path, array in named(quantized).items())


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
@pytest.mark.parametrize("dtype, off", [("int8", 0.1), ("fp8", 0.3)])
def test_it_computes_nearly_the_same(model, dtype, off):
    want, got = forward(model, TOKENS), forward(surgery.quantize_training(model, dtype), TOKENS)
    assert 0 < jnp.abs(got - want).mean() < off * jnp.abs(want).mean()


def test_it_is_saved_as_it_was(model, tmp_path):
    for name, each in (("plain", model), ("quantized", surgery.quantize_training(model, "fp8"))):
        zoo.save(each, tmp_path / name)
    files = [sorted(path.name for path in (tmp_path / name).iterdir()) for name in ("plain", "quantized")]
    assert files[0] == files[1]
    for name in files[0]:
        assert (tmp_path / "plain" / name).read_bytes() == (tmp_path / "quantized" / name).read_bytes(), name


@pytest.mark.parametrize("model", ["qwen2"], indirect=True)
def test_it_is_sharded_as_it_was(model):
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    rules = zoo.registry.family_of(model.config).PARTITION_RULES
    quantized = surgery.quantize_training(model, "int8")
    places = surgery.shardings(quantized, rules, mesh)
    assert jax.tree.leaves(places) == jax.tree.leaves(surgery.shardings(model, rules, mesh))
    placed = jax.device_put(quantized, places)
    with jax.set_mesh(mesh):
        got = forward(placed, jax.device_put(TOKENS, NamedSharding(mesh, P("fsdp"))))
    want = forward(quantized, TOKENS)
    assert got.sharding.spec[0] == "fsdp"
    assert jnp.abs(np.asarray(got) - want).mean() < 1e-2 * jnp.abs(want).mean()  # where rounding tips over
