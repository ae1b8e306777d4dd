"""Meshes of eight fake devices: each axis's effect on numbers, places and collectives.

Each effect of an axis is tested once, in the family with most of it, and every two axes meet in some mesh. That all
families can be split in this way is tested by their shapes.
"""

import functools
import itertools
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
from kernels.mesh import BATCH, REPLICA
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, by_mechanism
from train.state.mesh import abstract_model, balanced, check_mesh, keeps_order, put_batch
from train.state.remat import REMAT
from train.state.state import init_state
from train.step.language import cross_entropy, features
from train.step.router import routings_of
from train.step.step import Recipe, jit_train_step
from zoo import surgery
from zoo.config import read
from zoo.mesh import AXES, make_mesh
from zoo.models import FAMILIES
from zoo.nn import moe
from zoo.nn.model import AbstractMixtureConfig
from zoo.registry import family_of


ROWS, SEQ = 24, 32
WIDTH = 80  # widest activations of a token: two rows for experts, of 32 features each, with room for 1.25 times these

SPLIT, EXPERTS, STAGES = "fsdp=2,context=2,tensor=2", "expert=2,context=2,tensor=2", "stage=3,replica=2"
WEIGHTS = "fsdp=2,tensor=4"
FAST = [
    ("llama", SPLIT),  # dense layers
]
THOROUGH = [
    ("llama", STAGES),
    ("qwen3_moe", EXPERTS),
    ("gpt3", SPLIT),  # learnt positions
    ("qwen3-window-tail", "replica=2,context=2,tensor=2"),  # windows over the edges of parts; layers after the scan
    ("olmo2", SPLIT),  # norms over the queries and keys of all heads, which "tensor" splits
    ("muse_glimmer-lists", SPLIT),  # gates of heads, whose keys are those of one head
    ("phi3", SPLIT),  # queries, keys and values of one matrix
    ("deepseek2", WEIGHTS),  # latents, whole on each device; more devices along tensor than key/value heads
    ("gpt_oss", EXPERTS),  # sinks, and the biases of experts
    ("mimo_v2_flash", EXPERTS),  # sinks in some layers; values narrower than keys
    ("laguna", EXPERTS),  # layers with different numbers of heads, gates of each head
    ("mixtral", "replica=2,fsdp=2,expert=2"),
    ("llama4-alternating", "stage=2,expert=2,tensor=2"),  # layers of two kinds in a pipeline, chunks of attention
    ("nemotron_h", "stage=2,fsdp=2,tensor=2"),  # groups of states
    ("nemotron_h-mlp-new", "stage=3,context=2"),  # three scans, of which one is a pipeline; states between devices
    ("kimi_linear", EXPERTS),  # tokens in order: convolutions, delta rules and attention
    ("lfm2_moe", EXPERTS),  # convolutions between two gates, of one matrix
    ("lfm3", SPLIT),  # convolutions that reach far into another device's part
]
CASES = [*FAST, *(pytest.param(*case, marks=pytest.mark.thorough) for case in THOROUGH)]
SMALLER = {  # a layer of each kind, or two of each for a pipeline
    "gpt_oss": dict(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"]),
    "llama4-alternating": dict(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0]),
    "nemotron_h": dict(num_hidden_layers=4, hybrid_override_pattern="MEME"),
    "kimi_linear": dict(
        num_hidden_layers=2,
        linear_attn_config=tiny.kimi_linear.LINEAR | dict(kda_layers=[1], full_attn_layers=[2]),
    ),
    "lfm2_moe": dict(num_hidden_layers=2, layer_types=["conv", "full_attention"], num_dense_layers=1),
    "lfm3": dict(num_hidden_layers=3),
    "qwen3_5": dict(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]),
}


def write(folder, name):
    """Writes the tiny checkpoint, perhaps with fewer layers, and with the MTP module if the family has one."""
    module, changes = tiny.MODULES[tiny.FAMILIES[name]], SMALLER.get(name, {})
    tiny.write(folder, name, **changes)
    hub, random, values = tiny.CONFIGS[name] | changes, np.random.RandomState(0), getattr(module, "values", tiny.values)
    shapes = module.shapes(hub) | (module.further_shapes(hub) if name == "qwen3_5" else {})
    tensors = {n: values(n, random.standard_normal(shape)).astype(np.float32) for n, shape in shapes.items()}
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def make_batch():
    """Returns rows of two documents, whose lengths differ by row, and padding."""
    random, index = np.random.RandomState(2), np.arange(SEQ)[None]  # a seed with which no router is at a tie
    tokens, cut = random.randint(0, 64, (ROWS, SEQ)), random.randint(5, 25, (ROWS, 1))
    first = np.where(index < cut, 0, np.where(index < 30, cut, 30))  # start of each token's document or padding
    arrays = dict(
        tokens=tokens, targets=np.roll(tokens, -1, axis=1), loss_mask=tokens + index < 80,
        segments=np.where(index < cut, 1, 2) * (index < 30), positions=index - first,
    )  # fmt: skip
    return {name: a.astype(np.int32) for name, a in arrays.items()}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: write(root / name, name) for name, _ in FAST + THOROUGH}


def load(folder, **options):
    """Loads the tiny checkpoint with halved weights. With whole ones, half a unit in the last place of gpt-oss's
    weights, or any other order of adding up, moves its gradients by 3e-5.
    """
    return jax.tree.map(
        lambda a: jnp.asarray(np.asarray(a) / 2) if eqx.is_inexact_array(a) else a, zoo.load(folder, **options)
    )


def compiled(model, batch, places=None):
    """Returns a program for the gradients of a sum over the batch, with its logits and reports, and its parameters."""
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


def flat(tree) -> np.ndarray:
    """Returns all numbers: some gradients of a single tensor are 0 but for rounding."""
    return np.concatenate([np.ravel(x) for x in jax.tree.leaves(tree)])


def mesh_of(text):
    return make_mesh(text, jax.devices()[: math.prod(int(n) for n in re.findall("[0-9]+", text))])


def test_every_two_axes_meet():
    meshes = [{axis for axis, size in mesh_of(text).shape.items() if size > 1} for _, text in FAST + THOROUGH]
    assert all(any({*pair} <= mesh for mesh in meshes) for pair in itertools.combinations(AXES, 2))


@pytest.mark.parametrize("name", by_mechanism(next(iter(module.CONFIGS)) for module in tiny.MODULES.values()))
def test_every_family_can_be_split(name):
    """No device has much more than its share of the parameters, among the devices of a replica."""
    family = FAMILIES[tiny.FAMILIES[name]]
    config = read(family, tiny.CONFIGS[name])
    texts = ["replica=2,fsdp=4", SPLIT, "stage=2,context=2", "stage=3,tensor=2"]
    texts += ["replica=2,expert=2,fsdp=2", EXPERTS] * issubclass(family.Config, AbstractMixtureConfig)
    found = {}
    for mesh in map(mesh_of, texts):
        model = abstract_model(config, family, mesh)
        if any(repeats % mesh.shape["stage"] == 0 for _, repeats in model.layers.runs):
            check_mesh(mesh, model, family, batch=ROWS, seq_len=SEQ)
            arrays = jax.tree.leaves(model)
            parts = [math.prod(a.sharding.shard_shape(a.shape)) for a in arrays]
            found[mesh] = sum(parts) * mesh.size // mesh.shape[REPLICA] / sum(a.size for a in arrays)
    assert len(found) == len(texts) - 1, "either two or three stages"
    few = lambda mesh: 2.5 if mesh.shape["stage"] == 3 else 1.4  # three stages divide neither embeddings nor a tail
    assert all(1 <= share < few(mesh) for mesh, share in found.items()), found


@pytest.mark.parametrize(("name", "text"), CASES)
def test_split_equals_whole(folders, monkeypatch, name, text):
    monkeypatch.setattr(moe, "LEAST", 1)  # so that few tokens, too, need further rounds
    (loss, (logits, reports)), gradients = alone(folders[name])
    model, batch = load(folders[name]), make_batch()
    mesh = mesh_of(text)
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
    close(our_loss, loss, terms=MODEL)
    close(our_logits[:, order], logits, terms=MODEL)
    close(flat(our_gradients), flat(gradients), terms=2 * MODEL)
    if routings_of(reports):
        close(jax.tree.leaves(our_reports), jax.tree.leaves(reports), terms=MODEL)

    # Each device has only its own tokens, and the collectives are those expected.
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


@pytest.mark.thorough
def test_a_step_with_tokens_in_order(tmp_path):
    """A whole training step of a hybrid, with its MTP module and chunks of logits, equals one device's."""
    model, batch, mesh = (
        load(write(tmp_path, "qwen3_5"), parts=("mtp",)),
        make_batch(),
        make_mesh("fsdp=2,context=2,tensor=2"),
    )
    rate = optax.constant_schedule(1e4)  # with it a step is the gradients, and no digits are lost to the weights
    sgd = optax.sgd(rate)

    def after(model, batch):
        state = init_state(model, sgd)
        objective = functools.partial(cross_entropy, chunk=40, z_loss=1e-3, mtp_weight=0.3)
        options = dict(optimizer=sgd, schedule=rate, compute_dtype=jnp.float32, objective=objective)
        state, metrics = jit_train_step(state, Recipe(**options))(state, batch)
        return jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), state.model, model), metrics

    change, metrics = after(model, batch)
    with jax.set_mesh(mesh):
        placed = jax.device_put(model, surgery.shardings(model, FAMILIES["qwen3_5"].partition_rules, mesh))
        our_change, our_metrics = after(placed, put_batch(batch, mesh, model))
    assert np.linalg.norm(change.mtp.fc.weight) > 0
    close(flat(our_change), flat(change), terms=2 * MODEL)
    for name, value in metrics.items():
        close({name: our_metrics[name]}, {name: value}, terms=2 * MODEL)


def collectives(text):
    """Yields kind and number of elements of each array that a compiled program's collectives make."""
    for result, kind in re.findall(
        r"= (.*?) (all-gather|all-reduce|all-to-all|reduce-scatter|collective-permute)\(", text
    ):
        for dtype, shape in re.findall(r"([a-z]+[0-9]+)\[([0-9,]*)\]", result):
            if dtype.startswith("f"):
                yield kind, math.prod(int(n) for n in shape.split(",") if n)
