"""Places of every optimizer's arrays on eight devices, for a dense model, a mixture and adapters. Compiles nothing."""

import math

import equinox as eqx
import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from train.state.optim import OPTIMIZERS, rounded
from train.state.state import abstract_state, moment_sharding, split_frozen
from zoo import lora
from zoo.mesh import make_mesh
from zoo.models import qwen3, qwen3_moe
from zoo.surgery import path_name, shardings


SIZES = dict(
    vocab_size=512, hidden_size=256, num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=4, head_dim=32,
    max_position_embeddings=64,
)  # fmt: skip
MIXTURE = dict(intermediate_size=256, moe_intermediate_size=128, num_experts=8, num_experts_per_tok=2)
MESHES = ["replica=2,fsdp=2,tensor=2", "fsdp=8", "replica=8", "fsdp=4,expert=2"]


@pytest.fixture(scope="module")
def models():
    """Returns shapes of models to train. Matrices are large enough for Adafactor to sum over their rows and columns."""
    dense = qwen3.Config(**SIZES, intermediate_size=384)
    mixture = qwen3_moe.Config(**SIZES, **MIXTURE)
    make = lambda family, config: eqx.filter_eval_shape(family.Model, config, key=jax.random.key(0))
    models = {"dense": make(qwen3, dense), "mixture": make(qwen3_moe, mixture)}
    add = lambda model: lora.add(model, rank=16, alpha=1.0, key=jax.random.key(0))
    models["adapters"] = eqx.filter_eval_shape(add, models["mixture"])
    return {name: (model, qwen3 if name == "dense" else qwen3_moe) for name, model in models.items()}


def placed(models, name, text):
    """Returns the trained part of the model, with its places on the mesh."""
    model, family = models[name]
    places = shardings(model, family.FAMILY.partition_rules, make_mesh(text))
    return lora.split(jax.tree.map(lambda a, p: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=p), model, places))[0]


def arrays(tree):
    return {path_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def parts(array):
    """Returns the number of different parts of an array on all devices."""
    return math.prod(array.shape) // math.prod(array.sharding.shard_shape(array.shape))


def optimizers():
    for name, make in OPTIMIZERS.items():
        yield name, make(lambda step: 0.1)
        if name != "adafactor":
            yield f"{name}, bfloat16", rounded(make(lambda step: 0.1), "bfloat16")


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["dense", "mixture", "adapters"])
@pytest.mark.parametrize("text", MESHES)
def test_no_optimizer_copies_a_matrix_to_every_device(models, name, text):
    """Each array is split at least as its parameter is, and over the replicas. No matrix lies whole on a device unless
    its parameter does: norms, routers, and sides of adapters that no rule splits.
    """
    model = placed(models, name, text)
    parameters, replicas = arrays(model), make_mesh(text).shape["replica"]
    for optimizer, transform in optimizers():
        kept = {path: a for path, a in arrays(abstract_state(model, transform).opt_state).items() if a.ndim > 1}
        assert kept, optimizer
        for path, array in kept.items():
            parameter = next(a for end, a in parameters.items() if path.endswith(end))
            assert parts(array) == replicas * parts(parameter), (optimizer, path)
            if replicas > 1 or (name != "adapters" and not path.endswith(("norm.weight", "gate.weight"))):
                assert not array.sharding.is_fully_replicated, (optimizer, path)


def test_places_by_name(models):
    """Moments are split like their parameter, and both over the replicas. Sums are split like the remaining axis, and
    over all axes that are left.
    """
    model = placed(models, "dense", "replica=2,fsdp=2,tensor=2")
    weight = model.layers.period[0].self_attn.q_proj.weight
    assert weight.shape == (3, 256, 256) and weight.sharding.spec == P("stage", "tensor", "fsdp")
    end = "layers.period.0.self_attn.k_proj.weight"  # (3, 128, 256), with the same spec
    specs = lambda name: {
        path.removesuffix(f".{end}"): (array.shape, array.sharding.spec)
        for path, array in arrays(abstract_state(model, OPTIMIZERS[name](lambda step: 0.1)).opt_state).items()
        if path.endswith(end)
    }
    whole = (3, 128, 256), P("stage", ("tensor", "replica"), "fsdp")
    parameter = arrays(abstract_state(model, OPTIMIZERS["sgd"](lambda step: 0.1)).model)[end]
    assert (parameter.shape, parameter.sharding.spec) == whole
    assert specs("adamw") == {"1.0.mu": whole, "1.0.nu": whole}
    assert specs("muon") == {"1.0.inner_states.muon.inner_state.0.mu": whole}
    assert specs("sgd") == {"1.0.trace": whole}
    assert specs("adafactor") == {
        "1.0.0.v_row": ((3, 128), P("stage", ("tensor", "fsdp", "replica"))),
        "1.0.0.v_col": ((3, 256), P("stage", ("fsdp", "tensor", "replica"))),
        "1.0.0.v": ((1,), P()),
    }


def test_replicas_share_experts_before_layers():
    """A replica updates a part of each layer's experts, but of other matrices its own layers."""
    mesh = make_mesh("replica=2,expert=2,fsdp=2")
    at = lambda shape, *spec: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, P(*spec)))
    spec = lambda parameter: moment_sharding(parameter, parameter.shape).spec
    experts, matrix = (
        at((4, 8, 16, 32), "stage", "expert", "tensor", "fsdp"),
        at((4, 16, 32), "stage", "tensor", "fsdp"),
    )
    assert spec(experts) == P("stage", ("expert", "replica"), "tensor", "fsdp")
    assert spec(matrix) == P(("stage", "replica"), "tensor", "fsdp")


def test_bytes(models):
    """Moments take the floats for each parameter that `train.plan` counts and docs/optimizers.md states."""
    model = placed(models, "dense", "fsdp=8")
    size = sum(a.size for a in jax.tree.leaves(model))
    others = size - sum(a.size for path, a in arrays(model).items() if path.startswith("layers.") and "_proj" in path)
    count = lambda transform: sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(abstract_state(model, transform)))
    of = {name: (count(transform) - 4 * size) / 4 for name, transform in optimizers()}
    about = lambda n: pytest.approx(n, abs=20)  # plus the numbers of steps
    assert of["adamw"] == about(2 * size) and of["adamw, bfloat16"] == about(size)
    assert of["muon"] == about(size + others) and of["sgd"] == about(size)
    assert of["adafactor"] < 0.02 * size


def test_paths_of_adamw(models):
    """Paths equal those in checkpoints from before there were other optimizers, which therefore still resume."""
    model = placed(models, "dense", "fsdp=8")
    state = arrays(abstract_state(model, OPTIMIZERS["adamw"](lambda step: 0.1)))
    moments = {f"opt_state.1.0.{moment}.{path}" for moment in ("mu", "nu") for path in arrays(model)}
    counts = {"step", "opt_state.1.0.count", "opt_state.1.2.count"}
    assert state.keys() == moments | counts | {f"model.{path}" for path in arrays(model)}


def test_optax_says_what_is_a_parameter():
    """A tree that has the parameters' structure but holds none of them is copied to all devices, whatever its ranks."""
    mesh = make_mesh("fsdp=8")
    model = {"weight": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=jax.NamedSharding(mesh, P("fsdp", None)))}
    noise = {"weight": np.zeros((8, 8), np.float32)}
    transform = optax.chain(
        optax.trace(0.9), optax.GradientTransformation(lambda parameters: noise, lambda u, s, p=None: (u, s))
    )
    moment, other = abstract_state(model, transform).opt_state
    assert moment.trace["weight"].sharding.spec == P("fsdp", None)
    assert other["weight"].sharding.spec == P()


def test_nothing_is_kept_of_frozen_weights(models):
    model = placed(models, "mixture", "fsdp=4,expert=2")
    trained, frozen = split_frozen(model, ["embed_tokens.*", "*.experts.*"])
    assert arrays(frozen).keys() == {path for path in arrays(model) if "experts" in path or "embed_tokens" in path}
    assert arrays(trained).keys() == arrays(model).keys() - arrays(frozen).keys()
    for optimizer, transform in optimizers():
        kept = arrays(abstract_state(trained, transform))
        assert not any(path.endswith(tuple(arrays(frozen))) for path in kept), optimizer
