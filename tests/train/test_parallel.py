"""Every family along every axis of a mesh, on eight devices that are not really there: numbers, places, collectives."""

import functools
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import safetensors.numpy

import kernels
import zoo
from kernels.mesh import BATCH
from tests.zoo import tiny
from train.mesh import balanced, check_mesh, keeps_order, put_batch
from train.remat import REMAT
from train.router import routings_of
from train.state import init_state
from train.step import cross_entropy, features, jit_train_step
from zoo import surgery
from zoo.mesh import make_mesh
from zoo.models import FAMILIES
from zoo.nn.model import AbstractMixtureConfig
from zoo.registry import family_of


ROWS, SEQ = 24, 32
WIDTH = 72  # of the widest activations: keys of all heads in DeepSeek's

SPLIT, EXPERTS = "fsdp=2,context=2,tensor=2", "expert=2,context=2,tensor=2"
STAGES = {2: "stage=2,replica=2,fsdp=2", 3: "stage=3,replica=2"}  # by how often the layers repeat
WEIGHTS, COPIES = "fsdp=2,tensor=4", "replica=2,fsdp=4"


def axes(family):
    """Two meshes that have every axis for a family: weights and tokens are split, or experts, and then layers."""
    return EXPERTS if issubclass(FAMILIES[family].Config, AbstractMixtureConfig) else SPLIT, "stage"


FIRST = {family: next(iter(module.CONFIGS)) for family, module in tiny.MODULES.items()}
MESHES = [(name, text) for family, name in FIRST.items() for text in axes(family)]
MESHES += [("nemotron_h-mlp-new", "stage")]
# What is split in yet another way: a mixture's weights along fsdp, layers of two kinds, and what replicas do.
MESHES += [
    *((name, WEIGHTS) for name in ("deepseek2", "gpt_oss", "llama4-alternating", "qwen3_moe")),
    ("mixtral", COPIES), ("qwen3-window-tail", SPLIT), ("qwen3-window-tail", "stage"),
]  # fmt: skip
# By default every axis, and every kind of layer that is split in a way of its own: dense ones, learnt positions,
# latents, experts. The others are slow.
FAST = [("llama", SPLIT), ("llama", "stage"), ("gpt3", SPLIT), ("deepseek2", WEIGHTS), ("qwen3_moe", EXPERTS)]
CASES = [pytest.param(*case, marks=[] if case in FAST else pytest.mark.slow) for case in MESHES]


def make_batch():
    """Two documents to a row, of other lengths in each, and padding behind them."""
    random, index = np.random.RandomState(2), np.arange(SEQ)[None]  # a seed with which no router is at a tie
    tokens, cut = random.randint(0, 64, (ROWS, SEQ)), random.randint(5, 25, (ROWS, 1))
    first = np.where(index < cut, 0, np.where(index < 30, cut, 30))  # of each token's document, or of the padding
    arrays = dict(
        tokens=tokens, targets=np.roll(tokens, -1, axis=1), loss_mask=tokens + index < 80,
        segments=np.where(index < cut, 1, 2) * (index < 30), positions=index - first,
    )  # fmt: skip
    return {name: a.astype(np.int32) for name, a in arrays.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: tiny.write(root / name, name) for name in dict(MESHES)}


def load(folder, **options):
    """The tiny checkpoint with half its weights. As it is, half a unit in the last place of gpt-oss's moves its
    gradients by 3e-5, and so would any other order of adding up."""
    return jax.tree.map(
        lambda a: jnp.asarray(np.asarray(a) / 2) if eqx.is_inexact_array(a) else a, zoo.load(folder, **options)
    )


def compiled(model, batch, places=None):
    """The gradients of a sum over the batch, with its logits and reports: a program, and the parameters for it."""
    parameters, fixed = eqx.partition(model, eqx.is_inexact_array)

    def loss(parameters, batch):
        model = eqx.combine(parameters, fixed)
        x, reports = features(surgery.with_remat(model, REMAT["dots"]), batch)
        total, _ = kernels.cross_entropy(model.unembed, x, batch["targets"], batch["loss_mask"])
        return total, (model.unembed(x), reports)

    program = jax.value_and_grad(loss, has_aux=True)
    out = places and ((None, None), places)
    return jax.jit(program, out_shardings=out).lower(parameters, batch).compile(), parameters


@functools.cache
def alone(folder):
    batch = make_batch()
    program, parameters = compiled(load(folder), batch)
    return program(parameters, batch)


def distance(a, b) -> float:
    """The Frobenius norm of the difference, as a part of that of `b`."""
    a, b = (np.concatenate([np.ravel(x).astype(np.float64) for x in jax.tree.leaves(tree)]) for tree in (a, b))
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(("name", "text"), CASES)
def test_split_equals_whole(folders, name, text):
    (loss, (logits, reports)), gradients = alone(folders[name])
    model, batch = load(folders[name]), make_batch()
    if text == "stage":
        text = next(text for n, text in STAGES.items() if any(repeats % n == 0 for _, repeats in model.layers.runs))
    mesh = make_mesh(text, jax.devices()[: math.prod(int(n) for n in re.findall("[0-9]+", text))])
    family = family_of(model.config)
    check_mesh(mesh, model, family, batch=ROWS, seq_len=SEQ)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, surgery.shardings(model, family.partition_rules, mesh))
        places = jax.tree.map(lambda a: a.sharding, eqx.filter(placed, eqx.is_inexact_array))
        batch = put_batch(batch, mesh, model)
        program, parameters = compiled(placed, batch, places)
        (our_loss, (our_logits, our_reports)), our_gradients = program(parameters, batch)

    size = mesh.shape
    shares, parts = math.prod(size[axis] for axis in BATCH), size["context"]
    order = slice(None) if keeps_order(mesh, model) else np.argsort(balanced(SEQ, parts))
    assert float(our_loss) == pytest.approx(float(loss), rel=1e-5)
    assert distance(our_logits[:, order], logits) < 1e-5
    assert distance(our_gradients, gradients) < 1e-5
    if routings_of(reports):
        assert distance(our_reports, reports) < 1e-5

    # Each device has its own tokens, nothing of the others', and the collectives are those that it takes.
    assert math.prod(our_logits.addressable_shards[0].data.shape[:2]) == ROWS * SEQ // (shares * parts)
    found = list(collectives(program.as_text()))
    kinds = {kind for kind, _ in found}
    weights = max(math.prod(a.shape[-3:]) for a in jax.tree.leaves(parameters))
    tokens = ROWS // shares * SEQ
    assert max(elements for _, elements in found) <= max(weights, tokens * WIDTH), "more than its own activations"
    assert ("all-gather" in kinds) >= (size["fsdp"] * size["context"] * size["expert"] > 1)
    assert ("collective-permute" in kinds) >= (size["stage"] > 1)
    assert ("reduce-scatter" in kinds) >= (size["context"] > 1)
    assert ("all-to-all" in kinds) >= (size["expert"] > 1)


@pytest.mark.slow
def test_a_step_with_tokens_in_order(tmp_path):
    """A whole training step of a hybrid, with its module for one more token and chunks of logits."""
    files, random = tiny.MODULES["qwen3_5"], np.random.RandomState(0)
    two = dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    hub = tiny.CONFIGS["qwen3_5"] | two
    shapes = files.shapes(hub) | files.further_shapes(hub)
    value = lambda name: files.values(name, random.standard_normal(shapes[name])).astype(np.float32)
    tiny.write(tmp_path, "qwen3_5", **two)
    safetensors.numpy.save_file({name: value(name) for name in shapes}, tmp_path / "model.safetensors")
    model, batch, mesh = load(tmp_path, parts=("mtp",)), make_batch(), make_mesh("fsdp=2,context=2,tensor=2")
    rate = optax.constant_schedule(1e4)  # so that a step is the gradients, with no digits lost to the weights
    sgd = optax.sgd(rate)

    def after(model, batch):
        state = init_state(model, sgd)
        objective = functools.partial(cross_entropy, chunk=40, z_loss=1e-3, mtp_weight=0.3)
        options = dict(optimizer=sgd, schedule=rate, compute_dtype=jnp.float32, objective=objective)
        state, metrics = jit_train_step(state, **options)(state, batch)
        return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.model, model), metrics

    change, metrics = after(model, batch)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, surgery.shardings(model, FAMILIES["qwen3_5"].partition_rules, mesh))
        our_change, our_metrics = after(placed, put_batch(batch, mesh, model))
    assert distance(our_change, change) < 1e-5 and np.linalg.norm(change.mtp.fc.weight) > 0
    for name, value in metrics.items():
        assert float(our_metrics[name]) == pytest.approx(float(value), rel=1e-5), name


def collectives(text):
    """Kind and number of elements of each array that a compiled program's collectives make."""
    for result, kind in re.findall(
        r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(", text
    ):
        for dtype, shape in re.findall(r"([a-z]+[0-9]+)\[([0-9,]*)\]", result):
            if dtype.startswith("f"):
                yield kind, math.prod(int(n) for n in shape.split(",") if n)
