"""The state between steps, by its place and its dtype: --offload optimizer, and --weights-dtype bfloat16."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from tests.close import close
from tests.train.conftest import losses, run
from train.base import places
from train.planning import ahead
from train.state import offload
from train.state.mesh import abstract_model
from train.state.optim import OPTIMIZERS, rounded
from train.state.rounding import rounded_like, stochastic
from train.state.state import Lora, StateOptions, TrainState, abstract_state, init_state
from train.step.update import updated
from train.watch import memory
from zoo.mesh import make_mesh
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import Float32, Linear
from zoo.registry import family_of
from zoo.weights.checkpoint import skeleton


pytestmark = pytest.mark.usefixtures("quick")


def numbers(metrics):
    """Returns metrics without times and memory."""
    return [{k: v for k, v in line.items() if "second" not in k and "memory" not in k} for line in metrics]


def bits(tree):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


def exported(folder):
    return zoo.load(folder / "model", dtype="float32")


# -------------------------------------------------------------------------------------------------------- --offload


@pytest.mark.thorough
def test_an_offloaded_run_is_the_same(base, tmp_path, stop_after, capsys):
    """A run is the same with offloading, also if it is interrupted: the state's place is no part of a run."""
    stop_after(0)
    plain = run(base, tmp_path / "plain", steps=6, eval_every=3)
    assert "In its host's" not in capsys.readouterr().out
    stop_after(3)
    run(base, tmp_path / "away", steps=6, eval_every=3, offload="optimizer")
    stop_after(0)
    away = run(base, tmp_path / "away", steps=6, eval_every=3, offload="optimizer")
    assert numbers(away) == numbers(plain) and len(losses(away)) == 6
    assert bits(exported(tmp_path / "plain")) == bits(exported(tmp_path / "away"))
    told = " ".join(capsys.readouterr().out.split())
    assert "Memory of a device: optimizer 0.0 MiB, batch" in told and "In its host's: " in told


class Layer(AbstractBlock):
    weights: Linear

    def __call__(self, x, cache, at):
        return x, None, None


class Small(eqx.Module):
    """A layer's matrices, a head's, and an array that stays in float32."""

    layer: Layer
    head: Linear
    bias: Float32

    def __init__(self):
        random = np.random.RandomState(0)
        weight = lambda *shape: jnp.asarray(random.randn(*shape), jnp.float32)
        linear = lambda *shape: eqx.tree_at(lambda m: m.weight, Linear(4, 4, key=jax.random.key(0)), weight(*shape))
        self.layer, self.head, self.bias = Layer(linear(3, 4, 4)), linear(4, 4), Float32(weight(4))


def placed(text="fsdp=1"):
    mesh = make_mesh(text, jax.devices()[: 1 if text == "fsdp=1" else 8])
    return jax.device_put(Small(), NamedSharding(mesh, P()))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["adamw", "muon", "adafactor", "sgd"])
def test_one_parameter_after_another(name):
    """The update of one parameter after another equals that of all at once, bit for bit, and so does the state after a
    step that is not fine. Every array stays in its memory: step counts, and arrays that are always float32, stay on the
    device. XLA of jax 0.10.2 rounds some arrays this small differently in the last place.
    """
    exact = jax.__version_info__ >= (0, 12) or name in ("adafactor", "sgd")
    optimizer = OPTIMIZERS[name](optax.linear_schedule(0.1, 0.2, 5))
    optimizer = rounded(optimizer, "bfloat16") if name == "sgd" else optimizer
    model = placed()
    gradients = jax.tree.map(lambda a: jnp.sin(7 * a), model)
    rebalance = lambda m: eqx.tree_at(lambda m: m.bias.value, m, m.bias.value + 1)
    clip = lambda m: eqx.tree_at(lambda m: m.head.weight, m, m.head.weight * 0.5)
    step = jax.jit(functools.partial(updated, optimizer=optimizer, rebalance=rebalance, clip=clip))
    here, away = (init_state(model, optimizer, StateOptions(offload=kind)) for kind in ("none", "optimizer"))
    kinds = jax.tree.map(lambda a: a.sharding.memory_kind, away)
    assert kinds.model.layer.weights.weight == kinds.model.head.weight == "pinned_host"
    assert kinds.model.bias.value == kinds.step == "device"
    at = jax.tree.map(lambda a: a.sharding, away)
    moved = jax.jit(functools.partial(updated, optimizer=optimizer, rebalance=rebalance, clip=clip), out_shardings=at)
    for fine in (True, False, True):
        here = step(here, gradients, jnp.float32(2.0), jnp.bool_(fine))
        away = moved(away, gradients, jnp.float32(2.0), jnp.bool_(fine))
        if exact:
            assert bits(here) == bits(away)
        else:
            close(here, away, terms=50)
    assert jax.tree.map(lambda a: a.sharding.memory_kind, away) == kinds and int(away.step) == 3
    assert (np.asarray(away.model.head.weight) != np.asarray(model.head.weight)).all()


def test_bytes_by_memory():
    """Bytes are counted by memory, of a device and of its host, for a state and for the shapes of one."""
    model, optimizer = placed(), OPTIMIZERS["adamw"](lambda step: 0.1)
    for state in (init_state, abstract_state):
        away = state(model, optimizer, StateOptions(offload="optimizer"))
        assert ahead.host_bytes(away) == 4 * (3 * 64 + 2 * 4) and ahead.device_bytes(away) == 4 * (4 + 3)
    low = abstract_state(model, optimizer, StateOptions(offload="optimizer", weights_dtype="bfloat16"))
    assert ahead.host_bytes(low) == 4 * (2 * 68) and ahead.device_bytes(low) == 2 * 64 + 4 * (4 + 3)
    kinds = {"parameters": 2**20, "offloaded": 3 * 2**20}
    assert memory.sentence(kinds).endswith("an unknown amount. In its host's: 3.0 MiB.")


def test_a_plan_counts_what_the_host_keeps():
    config, mesh = zoo.config("tiny"), make_mesh("fsdp=8")
    shape: Any = dict(batch=8, seq=64, remat="full", microbatches=1)
    size = sum(a.size for a in jax.tree.leaves(skeleton(family_of(config), config)))
    for weights_dtype, here, away in (("float32", 0, 12), ("bfloat16", 2, 8)):
        kept = StateOptions(offload="optimizer", weights_dtype=weights_dtype)
        program = ahead.training(abstract_model(config, family_of(config), mesh), mesh, **shape, kept=kept)
        assert sum(map(ahead.host_bytes, program.kinds.values())) == pytest.approx(away * size / 8, rel=0.01)
        assert ahead.device_bytes(program.kinds["parameters"]) == pytest.approx(here * size / 8, rel=0.01)


def test_a_device_without_its_hosts_memory_is_refused(monkeypatch):
    monkeypatch.setattr(offload, "HOST", "none_such")
    with pytest.raises(ValueError, match="--offload optimizer: cpu can't use its host's memory"):
        abstract_state(placed(), OPTIMIZERS["sgd"](lambda step: 0.1), StateOptions(offload="optimizer"))


def test_places_on_gpus_that_are_not_here():
    """Shardings for GPUs that are not at hand keep their kinds of memory, and differ by them."""
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    shape = lambda place: jax.ShapeDtypeStruct((4, 4), jnp.float32, sharding=place(mesh, P("fsdp")))
    away, here = places.explicit((shape(places.HostPlace), shape(NamedSharding)))
    assert [a.sharding.memory_kind for a in (away, here)] == ["pinned_host", "device"]
    assert offload.is_on_host(away) and away.sharding != here.sharding != shape(NamedSharding).sharding
    with places.forgotten():
        assert away.sharding.memory_kind is None
    assert away.sharding.memory_kind == "pinned_host"
    assert places.explicit(shape(NamedSharding)).sharding.memory_kind == "device"


# -------------------------------------------------------------------------------------------------- --weights-dtype


@pytest.mark.parametrize("over", ["places", "steps"])
def test_the_mean_of_many_roundings_is_the_value(over):
    """The mean is within five standard deviations of the value, and each rounded number is one of the two nearest."""
    count = 40_000
    parts = np.array([0, 1 / 65536, 0.1, 0.25, 0.5, 0.75, 65535 / 65536])
    for size in (1, -3, 1e-30, 1e38):
        low = np.array([size], jnp.bfloat16)
        further = (low.view(np.uint16) + np.uint16(1)).view(jnp.bfloat16)
        low, further = low.astype(np.float64), further.astype(np.float64)
        values = (low + parts * (further - low)).astype(np.float32)
        if over == "places":
            found = stochastic(jnp.tile(values, (count, 1)), jnp.uint32(3))
        else:
            old = jnp.zeros(len(parts), jnp.bfloat16)
            found = jax.jit(jax.vmap(rounded_like, (None, None, 0)))(old, jnp.asarray(values), jnp.arange(count))
        found = np.asarray(found).astype(np.float64)
        assert np.isin(found, [low, further]).all()
        share = (values - low) / (further - low)
        error = np.mean(found == further, axis=0) - share
        assert (np.abs(error) <= 5 * np.sqrt(share * (1 - share) / count) + 1e-12).all()


def test_exact_values_stay():
    every = jnp.arange(2**16, dtype=jnp.uint16)
    values = jax.lax.bitcast_convert_type(every, jnp.bfloat16).astype(jnp.float32)
    kept = stochastic(values, jnp.uint32(0))
    nan = jnp.isnan(values)
    assert (jax.lax.bitcast_convert_type(kept, jnp.uint16) == every)[~nan].all() and jnp.isnan(kept[nan]).all()


def test_neighbours_steps_and_arrays_are_rounded_independently():
    """Halves are rounded up or down: no two of these 2^16 decisions agree more or less often than by chance."""
    old = {name: jnp.zeros((256, 256), jnp.bfloat16) for name in "ab"}
    half = jax.tree.map(lambda a: jnp.full(a.shape, 1.00390625), old)  # half a unit above 1
    now, later = (jax.jit(rounded_like)(old, half, jnp.int32(step)) for step in (1000, 1001))
    up = lambda a: np.asarray(a > 1).astype(np.float64) * 2 - 1
    a = up(now["a"])
    pairs = [(a, up(now["b"])), (a, up(later["a"]))]
    pairs += [(a[:-n], a[n:]) for n in (1, 2, 64)] + [(a[:, :-n], a[:, n:]) for n in (1, 2, 64)]
    assert all(abs((one * other).mean()) < 5 * one.size**-0.5 for one, other in pairs)


def test_the_update_has_no_generator_of_random_numbers():
    """Random bits are made in the loop that updates the weights: the program writes none of them."""
    optimizer = OPTIMIZERS["adamw"](optax.constant_schedule(1e-3))
    model = Linear(64, 32, bias=False, key=jax.random.key(0))
    model = eqx.tree_at(lambda m: m.weight, model, replace_fn=lambda weight: weight.astype(jnp.bfloat16))
    state = TrainState(jnp.int32(0), model, optimizer.init(jax.tree.map(lambda a: a.astype(jnp.float32), model)))
    step = functools.partial(updated, optimizer=optimizer, rebalance=lambda model: model)
    lowered = jax.jit(step).lower(state, model, jnp.float32(1), jnp.bool(True))
    assert "threefry" not in lowered.as_text() and "rng" not in lowered.as_text()
    written = [line for line in lowered.compile().as_text().splitlines() if re.search(r"= u\d+\[32,64\]", line)]
    assert not any("fusion(" in line for line in written)


def test_random_bits_follow_from_the_step_and_the_array():
    """Random bits depend neither on the mesh nor on other arrays. Other arrays and other steps have other bits."""
    mesh = make_mesh("fsdp=4,tensor=2")
    new = jnp.full((64, 64), 1.001953125)  # a quarter of a unit above 1
    old = {"a": jnp.ones((64, 64), jnp.bfloat16), "b": jnp.ones((64, 64), jnp.bfloat16), "c": jnp.ones(())}
    tree = {"a": new, "b": new, "c": jnp.float32(1.001)}
    steps = jnp.arange(7)
    one = jax.jit(rounded_like)(old, tree, steps[5])
    assert one["a"].dtype == jnp.bfloat16 and float(one["c"]) == float(tree["c"])
    assert (one["a"] != one["b"]).any() and (one["a"] != rounded_like(old, tree, steps[6])["a"]).any()
    split = jax.device_put(new, NamedSharding(mesh, P("fsdp", "tensor")))
    assert bits(jax.jit(rounded_like)({"b": old["b"]}, {"b": split}, steps[5])) == bits(one["b"])


@pytest.mark.thorough
def test_bfloat16_weights_go_on_as_if_never_stopped(base, tmp_path, stop_after):
    """bfloat16 weights, with moments in bfloat16 too, learn and resume; float32 weights are refused for such a run."""
    small = functools.partial(run, base, steps=6, weights_dtype="bfloat16", moments="bfloat16", freeze=("*norm*",))
    stop_after(0)
    whole = small(tmp_path / "whole")
    stop_after(3)
    small(tmp_path / "parts")
    stop_after(0)
    assert numbers(small(tmp_path / "parts")) == numbers(whole) and losses(whole)[-1] < losses(whole)[0]
    assert bits(exported(tmp_path / "whole")) == bits(exported(tmp_path / "parts"))
    with pytest.raises(ValueError, match=r"is bfloat16.* and now it is float32.* Set --weights-dtype back"):
        run(base, tmp_path / "parts", steps=6, moments="bfloat16", freeze=("*norm*",))


def test_adapters_are_small_enough(base, tmp_path):
    with pytest.raises(ValueError, match="--weights-dtype bfloat16 is of no use to adapters"):
        run(base, tmp_path / "run", weights_dtype="bfloat16", lora=Lora(rank=2))
