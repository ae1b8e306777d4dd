"""Partition specs, int8 and LoRA: applied from outside, to a model whose file knows nothing of them."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from kernels.mesh import split_attention
from kernels.tokens import Tokens
from tests.close import close
from tests.zoo.programs import MODEL, forward, noise, on_host, same
from zoo import surgery
from zoo.lora import LoRALinear
from zoo.nn.layers import AbstractLinear, Linear, RMSNorm
from zoo.quantized import LowPrecisionLinear, QuantizedLinear


TOKENS = jnp.asarray(np.random.RandomState(0).randint(0, 64, (8, 12)))
int8 = functools.partial(QuantizedLinear.of, format="int8")


@pytest.fixture(scope="module")
def model(load):
    return load("qwen3-window-head")


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


@eqx.filter_jit
def qlora(model):
    lora = functools.partial(LoRALinear.new, rank=4, alpha=8.0)
    quantized = surgery.map_linears(model, int8)
    return quantized, surgery.map_linears(quantized, lora, "layers.*.[qv]_proj", key=jax.random.key(1))


@pytest.fixture(scope="module")
def both(model):
    return qlora(model)


def test_int8(model, both):
    quantized, adapted = both
    pairs = zip(surgery.modules(model, AbstractLinear), surgery.modules(quantized, AbstractLinear), strict=True)
    for (_, full), (_, int8) in pairs:
        scale = np.asarray(int8.scale)[..., None]
        assert (np.abs(np.asarray(int8.weight, np.float32) * scale - np.asarray(full.weight)) <= 0.501 * scale).all()
    want, got = (np.asarray(forward(m, TOKENS)) for m in (model, quantized))
    assert 0 < np.abs(got - want).mean() < 0.1 * np.abs(want).mean()
    close(forward(adapted, TOKENS), got, terms=MODEL)  # a fresh LoRA changes nothing


def test_int8_of_a_zero_row():
    linear = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), noise(lambda: Linear(3, 2, key=jax.random.key(0))))
    assert not np.any(jax.jit(lambda linear, x: int8(linear)(x))(linear, np.ones((1, 3), np.float32)))


def test_only_lora_trains(load):
    _, adapted = qlora(load("qwen3"))
    is_lora = lambda m: isinstance(m, LoRALinear)
    mark = lambda m: eqx.tree_at(lambda m: (m.a, m.b), jax.tree.map(lambda _: False, m), (True, True))
    trained = jax.tree.map(lambda m: mark(m) if is_lora(m) else False, adapted, is_leaf=is_lora)
    train, frozen = eqx.partition(adapted, trained)

    def loss(train, tokens):
        model = eqx.combine(train, frozen)
        return optax.softmax_cross_entropy_with_integer_labels(model(tokens)[:, :-1], tokens[:, 1:]).mean()

    @eqx.filter_jit
    def step(train, tokens):
        value, gradients = eqx.filter_value_and_grad(loss)(train, tokens)
        return jax.tree.map(lambda p, g: p - 0.1 * g, train, gradients), value

    values = []
    for _ in range(30):
        train, value = step(train, TOKENS)
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]


def test_map_linears_refuses_a_pattern_without_match(model):
    with pytest.raises(ValueError, match=r"No linear matches 'layers.\*.w1'; the model has .*q_proj"):
        surgery.map_linears(model, int8, "layers.*.w1")


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["dense", "qlora"])
def test_sharded_equals_one_device(model, both, mesh, kind):
    """Values are equal, the batch stays split, and nothing is replicated unnoticed."""
    model = both[1] if kind == "qlora" else model
    want = forward(model, TOKENS)
    placed = jax.device_put(model, surgery.shardings(model, zoo.qwen3.FAMILY.partition_rules, mesh))
    with jax.set_mesh(mesh):
        got = forward(placed, jax.device_put(TOKENS, NamedSharding(mesh, P("fsdp"))))
    assert got.sharding.spec[0] == "fsdp"
    close(np.asarray(got), np.asarray(want), terms=MODEL)


def test_load_onto_a_mesh(folders, model, mesh):
    placed = zoo.load(folders["qwen3-window-head"], mesh=mesh)
    for (path, linear), (_, split) in zip(
        surgery.modules(model, AbstractLinear), surgery.modules(placed, AbstractLinear), strict=True
    ):
        assert (np.asarray(split.weight) == np.asarray(linear.weight)).all()
        part = split.weight.addressable_shards[0].data.shape
        assert np.prod(part) * 8 == split.weight.size, f"{path} is not split over all eight devices"


@eqx.filter_jit
def steps(model, tokens):
    """Returns logits of the last token from a decode step after the others, gradients, and the logits of all."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    _, cache = model.decode(tokens[:, :-1], model.init_cache(2, 12, jnp.float32), positions=positions[:, :-1])
    last, _ = model.decode(tokens[:, -1:], cache, positions=positions[:, -1:])

    @eqx.filter_grad(has_aux=True)
    def gradient(model):
        logits = model(tokens)
        return jnp.sum(jnp.sin(logits)), logits

    return last, gradient(model)


@pytest.mark.thorough
def test_key_value_heads_that_do_not_divide(tmp_path):
    """Two heads over three devices give the results of one device, and are saved like one device's."""
    config = zoo.qwen3.Config(66, 24, 24, 2, 6, 2, 8, 64, 2)
    model = noise(lambda: zoo.qwen3.Model(config, key=jax.random.key(0)))
    whole, mesh = steps(model, TOKENS[:2]), zoo.make_mesh("tensor=3", jax.devices()[:3])
    placed = jax.device_put(model, surgery.shardings(model, zoo.qwen3.FAMILY.partition_rules, mesh))
    split = {path: linear.weight.sharding.is_fully_replicated for path, linear in surgery.modules(placed, Linear)}
    assert {path.rpartition(".")[2] for path, replicated in split.items() if replicated} == {"k_proj", "v_proj"}
    heads = []

    def attend(q, k, v, **_):
        heads.append((q.shape[2], k.shape[2]))
        return q

    attention = lambda q, k: split_attention(attend, q, k, k, sinks=None, q_tokens=order, kv_tokens=order)
    order, shapes = Tokens(np.arange(12)[None]), [jax.ShapeDtypeStruct((2, 12, n, 8), jnp.float32) for n in (6, 2)]
    with jax.set_mesh(mesh):
        jax.eval_shape(attention, *shapes)
    assert heads == [(2, 2)]
    with jax.set_mesh(mesh):
        got = steps(placed, TOKENS[:2])
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(whole), strict=True):
        close(np.asarray(one), np.asarray(other), terms=MODEL)
    for each, folder in ((on_host(model), "whole"), (placed, "placed")):
        zoo.save(each, tmp_path / folder)
    for file in (tmp_path / "whole").iterdir():
        assert file.read_bytes() == (tmp_path / "placed" / file.name).read_bytes()


class Doubled(zoo.qwen3.MLP):
    """An MLP with the same fields and another result."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Wrapped(eqx.Module):
    inner: eqx.Module

    def __call__(self, x):
        return 2 * self.inner(x)


def remade(module, kind, **changes):
    """Returns a module of another class with the same fields, or of the same class with other fields."""
    new = object.__new__(kind)
    for field, value in (vars(module) | changes).items():
        object.__setattr__(new, field, value)
    return new


def with_scale(attention):
    return eqx.tree_at(lambda m: m.q_norm, attention, remade(attention.q_norm, RMSNorm, eps=0.5))


@pytest.mark.parametrize(
    ("field", "change", "message"),
    [
        ("mlp", lambda mlp: remade(mlp, Doubled), r"0\.mlp is a Doubled, and its family's a MLP\. A folder holds"),
        ("mlp", Wrapped, r"model\.layers\.head\.0\.mlp is a Wrapped, and its family's a MLP"),
        ("self_attn", with_scale, r"self_attn\.q_norm\.eps is 0\.5, and its family's 1e-06"),
    ],
)
def test_changed_models_are_not_saved(model, tmp_path, field, change, message):
    """A folder of a changed model would contain the original, or one that no family can read."""
    get = lambda m: getattr(m.layers.head[0], field)
    with pytest.raises(ValueError, match=message):
        zoo.save(eqx.tree_at(get, model, change(get(model))), tmp_path / "changed")
    assert not (tmp_path / "changed").exists()


def test_surgery_with_a_form_on_disk_is_saved(model, tmp_path):
    """Linear maps that train in 8 bits, and layers with remat, are saved as the plain model."""
    low = surgery.map_linears(model, functools.partial(LowPrecisionLinear, dtype="int8"), "layers.*")
    zoo.save(surgery.with_remat(low, jax.checkpoint), tmp_path)
    assert same(zoo.load(tmp_path), model)


def test_shardings_refuse(model):
    rules = {pattern: spec for pattern, spec in zoo.qwen3.FAMILY.partition_rules.items() if "up_proj" not in pattern}
    with pytest.raises(ValueError, match=r"No partition rule matches 'layers.*up_proj'"):
        surgery.partition_specs(model, rules)
    wide = jax.make_mesh((1, 8), ("fsdp", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    config = zoo.qwen3.Config(64, 32, 12, 1, 4, 2, 16, 64, 1)
    narrow = noise(lambda: zoo.qwen3.Model(config, key=jax.random.key(0)))
    with pytest.raises(ValueError, match=r"proj.weight of shape \(1, 12, 32\).*12 is not a multiple.*tensor=8"):
        surgery.shardings(narrow, zoo.qwen3.FAMILY.partition_rules, wide)


def with_up_proj(layer, new):
    return eqx.tree_at(lambda layer: layer.mlp.up_proj, layer, new)


def test_layers_one_by_one(model):
    """Layers before and in the scan are those of the model, and changed ones take their place."""
    layers = model.layers
    assert len(layers) == 7 and {index for _, index in map(layers.place, range(7))} >= {None, 0, 1}
    for n, layer in enumerate(layers):
        block, index = layers.place(n)
        weight, own = np.asarray(block.mlp.up_proj.weight), layer.mlp.up_proj
        assert np.array_equal(own.weight, weight if index is None else weight[index])
        zeros = jax.tree.map(lambda a: np.zeros(a.shape, a.dtype), own)
        new = surgery.with_layer(model, n, with_up_proj(layer, zeros)).layers
        assert all(bool(np.any(new[m].mlp.up_proj.weight)) == (m != n) for m in (0, 1, 2, 6))
    assert same(layers[-1], layers[6]) and same(surgery.with_layer(model, -1, layers[6]), model)


def test_layers_that_do_not_fit(model):
    with pytest.raises(IndexError):
        model.layers[7]
    quantized = with_up_proj(model.layers[3], int8(model.layers[3].mlp.up_proj))
    for n, layer in ((3, quantized), (1, surgery.cast(model.layers[1], "bfloat16"))):
        with pytest.raises(ValueError, match=f"^The new layer {n} has other modules, static fields, shapes or dtypes"):
            surgery.with_layer(model, n, layer)


def test_printed(model, both):
    """A line for each part, each kind of layer and its parts; sums over the layers; dtypes as stored."""
    lines = {line[:26].strip(): line[26:].split() for line in str(model).splitlines()}
    assert lines["layers 0-1, 3, 5 (4)"][0] == "Block" and lines["layers 2, 4, 6 (3)"][0] == "Block"
    size = sum(a.size for a in jax.tree.leaves(model))
    assert lines["all"] == ["Model", f"{size:,}", f"{4 * size / 1000:.3g}", "kB", "float32"]
    assert any("window=4" in " ".join(words) for words in lines.values())
    assert "int8, float32" in str(both[0])
    shapes = eqx.filter_eval_shape(lambda: model)
    assert str(shapes) == str(model)
