"""Schedules by their numbers; optimizers against their formulas written out."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.close import close
from train.planning.breakdown import kernels
from train.planning.hlo import collectives
from train.state.optim import (
    OPTIMIZERS,
    OptimizerOptions,
    adamw,
    is_decayed,
    make_optimizer,
    make_schedule,
    matrices,
    rounded,
)
from train.state.state import abstract_state
from zoo.mesh import make_mesh
from zoo.models import deepseek3, gpt_oss, qwen3
from zoo.nn.block import AbstractBlock
from zoo.nn.layers import Embedding, ExpertLinear, Linear
from zoo.nn.stack import Stack
from zoo.surgery import path_name


def rates(kind, **options):
    schedule = make_schedule(kind, peak=2.0, steps=10, **options)
    return [float(schedule(step)) for step in range(11)]


def test_cosine():
    got = rates("cosine", warmup=4, decay=0, final=0.1)
    fall = [2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * n / 6))) for n in range(7)]
    close(got, [0.5, 1.0, 1.5, 2.0, *fall], terms=8)


def test_warmup_stable_decay():
    close(rates("wsd", warmup=2, decay=4), [1, 2, 2, 2, 2, 2, 2, 1.5, 1, 0.5, 0], terms=8)


@pytest.mark.parametrize("kind", ["cosine", "wsd"])
def test_no_warmup(kind):
    assert rates(kind, warmup=0, decay=10)[0] == 2


@pytest.mark.parametrize(("kind", "warmup", "decay"), [("cosine", 11, 0), ("wsd", 5, 6), ("wsd", -1, 1)])
def test_what_does_not_fit(kind, warmup, decay):
    with pytest.raises(ValueError, match=rf"warmup of {warmup} .* 10 steps"):
        rates(kind, warmup=warmup, decay=decay)


def test_only_the_matrices_of_linears_are_decayed():
    config = qwen3.Config(64, 32, 48, 3, 4, 2, 16, 64, 3)
    model = eqx.filter_eval_shape(lambda: qwen3.Model(config, key=jax.random.key(0)))
    decayed = jax.tree_util.tree_leaves_with_path(is_decayed(model))
    linears = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert {path_name(path).split(".")[-2] for path, decays in decayed if decays} == linears
    assert {path_name(path).split(".")[-2] for path, decays in decayed if not decays} >= {
        "embed_tokens",
        "q_norm",
        "norm",
    }
    bias = Linear(2, 3, bias=True, key=jax.random.key(0))
    assert is_decayed(bias).weight and not is_decayed(bias).bias


def test_adamw():
    """Three steps equal the formula; the first gradient is clipped."""
    linear = Linear(3, 2, bias=True, key=jax.random.key(0))
    weight, bias = (np.asarray(a, np.float64) for a in (linear.weight, linear.bias))
    optimizer = adamw(lambda step: 0.1 / (step + 1), weight_decay=0.5, clip_norm=3.0, b1=0.8, b2=0.9, eps=1e-3)
    state, m, v = optimizer.init(linear), 0.0, 0.0
    for step, size in enumerate([10.0, 0.1, 0.2]):
        gradient = size * np.random.RandomState(step).randn(8)
        of_weight, of_bias = gradient[:6].reshape(2, 3), gradient[6:]
        tree = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (jnp.float32(of_weight), jnp.float32(of_bias)))
        updates, state = optimizer.update(tree, state, linear)
        linear = optax.apply_updates(linear, updates)
        gradient *= min(1, 3 / np.linalg.norm(gradient))
        m, v = 0.8 * m + 0.2 * gradient, 0.9 * v + 0.1 * gradient**2
        change = m / (1 - 0.8 ** (step + 1)) / (np.sqrt(v / (1 - 0.9 ** (step + 1))) + 1e-3)
        weight = weight - 0.1 / (step + 1) * (change[:6].reshape(2, 3) + 0.5 * weight)
        bias = bias - 0.1 / (step + 1) * change[6:]
        close(linear.weight, weight, terms=50)
        close(linear.bias, bias, terms=50)


def test_muon_is_for_matrices_of_layers():
    config = qwen3.Config(64, 32, 48, 3, 4, 2, 16, 64, 3)
    model = eqx.filter_eval_shape(lambda: qwen3.Model(config, key=jax.random.key(0)))
    told = {path_name(path): is_matrix for path, is_matrix in jax.tree_util.tree_leaves_with_path(matrices(model))}
    assert {path.split(".")[-2] for path, is_matrix in told.items() if is_matrix} == {
        "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"
    }  # fmt: skip
    assert not told["lm_head.weight"] and not told["embed_tokens.weight"]
    mlp = eqx.filter_eval_shape(lambda: gpt_oss.Model(gpt_oss.GPT_OSS_20B, key=jax.random.key(0)))
    told = {path_name(path): is_matrix for path, is_matrix in jax.tree_util.tree_leaves_with_path(matrices(mlp))}
    assert {path.split(".", 3)[3] for path, is_matrix in told.items() if is_matrix} == {
        *(f"self_attn.{name}_proj.weight" for name in "qkvo"), "mlp.experts.gate_up_proj.weight",
        "mlp.experts.down_proj.weight",
    }  # fmt: skip
    further = eqx.filter_eval_shape(
        lambda: deepseek3.Model(deepseek3.DEEPSEEK_V3, key=jax.random.key(0), parts=("mtp",))
    )
    told = {path_name(path): is_matrix for path, is_matrix in jax.tree_util.tree_leaves_with_path(matrices(further))}
    of = lambda start: {path.removeprefix(start) for path in told if path.startswith(start) and told[path]}
    assert of("mtp.block.") == of("layers.period.0.") != set() and told["mtp.eh_proj.weight"]


class Block(AbstractBlock):
    """Linear maps of a layer."""

    maps: dict

    def __call__(self, x, cache, at):
        raise NotImplementedError


class Tree(eqx.Module):
    """A model as an optimizer sees it: a stack of layers, an embedding, a head."""

    layers: Stack
    embed_tokens: Embedding
    lm_head: Linear


@pytest.fixture(scope="module")
def tree():
    layers, embed, head = jax.random.split(jax.random.key(0), 3)

    def block(layer, *, key):
        wide, tall, experts = jax.random.split(key, 3)
        return Block(
            {
                "wide": Linear(6, 4, bias=True, key=wide),
                "tall": Linear(3, 5, key=tall),
                "experts": ExpertLinear(3, 4, 5, bias=True, key=experts),
            }
        )

    layers = Stack(block, ["first", "other", "other"], key=layers)
    return Tree(layers, Embedding(7, 4, key=embed), Linear(4, 7, key=head))


def trained(tree, optimizer):
    """Returns path -> array after three steps with random gradients, the gradients, and the state. The first gradient
    is clipped to a norm of 3.
    """
    state, gradients = optimizer.init(tree), []
    update = jax.jit(lambda gradient, state, tree: optimizer.update(gradient, state, tree))
    arrays, structure = jax.tree.flatten(tree)
    for step, size in enumerate([10.0, 0.05, 0.1]):
        random = np.random.RandomState(step)
        drawn = [np.float32(size * random.randn(*a.shape)) for a in arrays]
        scale = min(1, 3 / np.sqrt(sum(np.sum(np.float64(a) ** 2) for a in drawn)))
        gradients.append(named(jax.tree.unflatten(structure, [scale * np.float64(a) for a in drawn])))
        updates, state = update(jax.tree.unflatten(structure, list(map(jnp.asarray, drawn))), state, tree)
        tree = optax.apply_updates(tree, updates)
    return named(tree), gradients, state


def named(tree):
    return {path_name(path): np.float64(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def adam(gradients, keep=lambda moment: moment):
    """Yields AdamW's direction for one array at every step; `keep` rounds the moments."""
    m = v = 0.0
    for t, g in enumerate(gradients, 1):
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g * g
        yield m / (1 - 0.9**t) / (np.sqrt(v / (1 - 0.95**t)) + 1e-8)
        m, v = keep(m), keep(v)


def muon(gradients):
    """Yields Muon's direction for one matrix (out, in) at every step: Newton and Schulz's iteration on the momentum."""
    m = 0.0
    for t, g in enumerate(gradients, 1):
        m = 0.95 * m + 0.05 * g
        x = 0.95 * m / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)  # Nesterov's
        x = x / np.linalg.norm(x)
        for _ in range(5):
            a = x @ x.T
            x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
        yield 0.2 * np.sqrt(max(g.shape)) * x


def expected(tree, gradients, direction):
    """Returns path -> array after steps of `direction(path, gradients)`, at learning rate 0.1 and decay 0.05."""
    decayed = {path: decays for path, decays in named(is_decayed(tree)).items()}
    arrays = {}
    for path, array in named(tree).items():
        for step in direction(path, [gradient[path] for gradient in gradients]):
            array = array - 0.1 * (step + 0.5 * decayed[path] * array)
        arrays[path] = array
    return arrays


SETTINGS = dict(weight_decay=0.5, clip_norm=3.0)


@pytest.mark.thorough
def test_muon(tree):
    """A stack's update equals that of each layer's, and each expert's, matrix alone; other parameters get AdamW's."""

    def direction(path, gradients):
        if not path.startswith("layers.") or path.endswith("bias"):
            return adam(gradients)
        alone = [
            list(muon(list(each))) for each in zip(*(g.reshape(-1, *g.shape[-2:]) for g in gradients), strict=True)
        ]
        return (np.stack(steps).reshape(gradients[0].shape) for steps in zip(*alone, strict=True))

    got, gradients, _ = trained(tree, OPTIMIZERS["muon"](lambda step: 0.1, **SETTINGS))
    close(got, expected(tree, gradients, direction), terms=200)


def compiled(layers, make, mesh, *spec):
    """Compiles Muon's update of a stack of `layers` linear maps, with weights split over eight devices by `spec`."""
    mesh = make_mesh(mesh)
    init = lambda: Stack(lambda n, *, key: Block({"map": make(key)}), ["block"] * layers, key=jax.random.key(0))
    place = lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, P(*spec)))
    model = jax.tree.map(place, eqx.filter_eval_shape(init))
    optimizer = OPTIMIZERS["muon"](lambda step: 0.1)
    state = abstract_state(model, optimizer)
    places = jax.tree.map(lambda a: a.sharding, (state.model, state.opt_state))
    update = jax.jit(lambda *args: optimizer.update(*args), out_shardings=places)
    with jax.set_mesh(mesh):
        return update.lower(state.model, state.opt_state, state.model).compile()


def test_muon_leaves_experts_where_they_are():
    """Each device orthogonalises its own experts' matrices: none is gathered, or orthogonalised twice."""
    program = compiled(3, lambda key: ExpertLinear(8, 4, 6, key=key), "expert=8", None, "expert").as_text()
    assert "all-reduce" in program and "all-gather" not in program  # the norm of all gradients


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "spec"),
    [
        ("fsdp=4,tensor=2", (None, "tensor", "fsdp")),
        ("stage=2,fsdp=4", ("stage", None, "fsdp")),
        ("replica=2,fsdp=4", (None, None, "fsdp")),  # ZeRO-1: a replica updates its own layers
    ],
)
def test_muon_gathers_a_layer_at_a_time(mesh, spec):
    """Memory holds a few copies of one layer's whole matrix, and of the device's own eighth of all 16 layers."""
    memory = compiled(16, lambda key: Linear(128, 128, key=key), mesh, *spec).memory_analysis()
    matrix = 4 * 128 * 128
    assert memory.temp_size_in_bytes < 6 * matrix + 4 * 16 * matrix / 8, memory


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "layers", "experts", "turns"),
    [
        ("fsdp=4,tensor=2", 12, 0, 2),  # four of the second turn's matrices are zeros
        ("replica=4,fsdp=2", 14, 0, 2),  # the replicas can't split the layers, and split the rows of matrices
        ("fsdp=2,expert=2,tensor=2", 3, 6, 3),  # three experts of each of three layers, for four devices
    ],
)
def test_devices_share_muons_matrices(mesh, layers, experts, turns):
    """A device computes five times three products of a whole matrix in a turn, and sends and gets its parts alone. The
    update is the formula's.
    """
    make = lambda key: ExpertLinear(experts, 64, 64, key=key) if experts else Linear(64, 64, key=key)
    spec = ("expert", "tensor", "fsdp") if experts else ("tensor", ("fsdp", "expert"))
    program = compiled(layers, make, mesh, None, *spec)
    found = [each for each in kernels(program.as_text()) if each.flops > 64**3]
    assert sum(k.flops * k.times for k in found) == turns * 5 * 3 * 2 * 64**3
    sent = sum(each.sent * each.times for each in collectives(program.as_text(), 8) if each.sent > 64)
    assert sent < 2 * 2 * turns * 4 * 64 * 64, "a matrix and its result, along one axis and then another"

    model = Stack(lambda n, *, key: Block({"map": make(key)}), ["block"] * layers, key=jax.random.key(0))
    model = jax.tree.map(lambda a: a / (2 * layers * max(experts, 1)) ** 0.5 / 64, model)
    state = OPTIMIZERS["muon"](lambda step: 0.1).init(model)
    given = jax.device_put((model, state, jax.tree.map(jnp.zeros_like, model)), program.input_shardings[0])
    (got,), (gradients,) = jax.tree.leaves(program(*given)[0]), jax.tree.leaves(model)
    want = [next(muon([np.float64(g)])) for g in gradients.reshape(-1, 64, 64)]
    close(got.reshape(-1, 64, 64), -0.1 * np.stack(want), terms=960)


def test_sgd(tree):
    def direction(path, gradients):
        trace = 0.0
        for gradient in gradients:
            trace = 0.9 * trace + gradient
            yield trace

    got, gradients, _ = trained(tree, OPTIMIZERS["sgd"](lambda step: 0.1, **SETTINGS))
    close(got, expected(tree, gradients, direction), terms=200)


def test_adafactor():
    """A matrix has sums of its rows and columns, and small arrays have a full second moment. No update exceeds 1."""
    tree = {"layers": Linear(130, 128, bias=True, key=jax.random.key(0))}

    def direction(path, gradients):
        rows = columns = v = 0.0
        for t, g in enumerate(gradients, 1):
            square, decay = g * g + 1e-30, 1 - t**-0.8
            if g.ndim > 1:
                rows = decay * rows + (1 - decay) * square.mean(1)
                columns = decay * columns + (1 - decay) * square.mean(0)
                step = g / np.sqrt(np.outer(rows / rows.mean(), columns))
            else:
                v = decay * v + (1 - decay) * square
                step = g / np.sqrt(v)
            yield step / max(1, np.sqrt((step * step).mean()))

    got, gradients, _ = trained(tree, OPTIMIZERS["adafactor"](lambda step: 0.1, **SETTINGS))
    close(got, expected(tree, gradients, direction), terms=200)


def test_moments_in_bfloat16(tree):
    """Both moments are rounded after every step, and nothing else is."""
    near = lambda moment: np.float64(np.asarray(moment, jnp.bfloat16))
    got, gradients, state = trained(tree, rounded(adamw(lambda step: 0.1, **SETTINGS), "bfloat16"))
    # Float32 moments may round to the other side of a tie in float64: half a unit in bfloat16's last place.
    close(got, expected(tree, gradients, lambda _, gradients: adam(gradients, near)), terms=1, dtype=jnp.bfloat16)
    dtypes = {path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(state)}
    assert {dtype for path, dtype in dtypes.items() if "count" not in path} == {jnp.dtype("bfloat16")}
    assert {dtype for path, dtype in dtypes.items() if "count" in path} == {jnp.dtype("int32")}


def test_options():
    o = OptimizerOptions(steps=4, lr=1.0, warmup=0, decay=0, weight_decay=0.0, optimizer="muon", moments="bfloat16")
    parameters = Block({"map": Linear(3, 2, bias=True, key=jax.random.key(0))})
    state = make_optimizer(o)[0].init(parameters)
    muon = state[1][0].inner_states["muon"].inner_state[0]
    assert muon.mu.maps["map"].weight.dtype == jnp.bfloat16 and isinstance(muon.mu.maps["map"].bias, optax.MaskedNode)
    with pytest.raises(ValueError, match="--moments bfloat16 is of no use to adafactor"):
        make_optimizer(OptimizerOptions(steps=4, lr=1.0, warmup=0, decay=0, optimizer="adafactor", moments="bfloat16"))
