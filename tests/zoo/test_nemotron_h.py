"""Nemotron 3 Super's MTP module.

transformers drops it, so it is compared with a float64 oracle that computes the same as vLLM.
"""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import kernels
import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, on_host, same
from tests.zoo.test_speculative import PROMPTS, SHAPE, assert_greedy
from train.step.language import cross_entropy
from zoo import surgery
from zoo.models import nemotron_h
from zoo.weights.checkpoint import skeleton


FAMILY, NAME = tiny.MODULES["nemotron_h"], "nemotron_h"
CONFIG = tiny.CONFIGS[NAME]


@pytest.fixture(scope="module")
def tensors():
    """Returns the tensors of the checkpoint, including those of the MTP module."""
    random, out = np.random.RandomState(2), tiny.tensors(NAME)
    for name, shape in sorted(FAMILY.further_shapes(CONFIG).items()):
        out[name] = FAMILY.values(name, random.standard_normal(shape)).astype(np.float32)
    return out


@pytest.fixture(scope="module")
def folder(tensors, tmp_path_factory):
    folder = tiny.write(tmp_path_factory.mktemp("further"), NAME)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder, parts=("mtp",))


def test_round_trip(folder, model, tensors, load, tmp_path):
    """The module is skipped, or loaded, given rules, and exported bit by bit; its size is that of the Hub's files."""
    assert same(zoo.load(folder), load(NAME))
    zoo.save(on_host(model), tmp_path)
    after = convert.tensors.open_tensors(tmp_path)
    assert after.keys() == tensors.keys()
    assert all(np.array_equal(after[name].view(), tensors[name]) for name in after)
    specs = surgery.partition_specs(model, nemotron_h.FAMILY.partition_rules).mtp
    assert specs.layers[1].mixer.experts.up_proj.weight == jax.P("expert", "tensor", "fsdp")
    assert specs.layers[0].mixer.o_proj.weight == jax.P("fsdp", "tensor")
    config = zoo.config("nemotron3-super-120b-a12b")
    size = lambda *parts: sum(x.size for x in jax.tree.leaves(skeleton(nemotron_h.FAMILY, config, parts)))
    assert size("mtp") - size() == 2_942_324_736 + config.n_routed_experts, "those in bfloat16, and the router's bias"
    with pytest.raises(ValueError, match=r"needs num_nextn_predict_layers=1 .*, not 0 and '\*E'"):
        skeleton(nemotron_h.FAMILY, zoo.config("nemotron3-nano-30b-a3b"), ("mtp",))


def oracle(tensors, x, following):
    """Computes features of the token after the next, in float64."""
    t, c = {name.removeprefix("mtp.layers."): a.astype(np.float64) for name, a in tensors.items()}, CONFIG
    matrix = lambda y, name: y @ t[f"{name}.weight"].T
    norm = lambda y, name: y / np.sqrt(np.mean(y**2, -1, keepdims=True) + 1e-5) * t[f"{name}.weight"]
    mlp = lambda y, name: matrix(np.maximum(matrix(y, f"{name}.up_proj"), 0) ** 2, f"{name}.down_proj")
    batch, seq, _ = x.shape
    y = matrix(np.concatenate([norm(following, "0.enorm"), norm(x, "0.hnorm")], axis=-1), "0.eh_proj")

    normed, heads = norm(y, "0.norm"), lambda a: a.reshape(batch, seq, -1, c["head_dim"])
    q, k, v = (heads(matrix(normed, f"0.mixer.{name}_proj")) for name in "qkv")
    k, v = (np.repeat(a, q.shape[2] // a.shape[2], axis=2) for a in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(c["head_dim"])  # without positions
    scores = np.exp(np.where(np.tri(seq, dtype=bool), scores - scores.max(-1, keepdims=True), -np.inf))
    seen = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v)
    y = y + matrix(seen.reshape(batch, seq, -1), "0.mixer.o_proj")

    normed = norm(y, "1.norm")
    chances = 1 / (1 + np.exp(-matrix(normed, "1.mixer.gate")))
    biased = chances + t["1.mixer.gate.e_score_correction_bias"]
    chances = np.where(biased >= np.sort(biased, axis=-1)[..., -c["num_experts_per_tok"], None], chances, 0)
    chances *= c["routed_scaling_factor"] / chances.sum(-1, keepdims=True)
    latent = matrix(normed, "1.mixer.fc1_latent_proj")
    each = np.stack([mlp(latent, f"1.mixer.experts.{n}") for n in range(c["n_routed_experts"])], axis=-2)
    routed = matrix(np.einsum("bse,bsed->bsd", chances, each), "1.mixer.fc2_latent_proj")
    return norm(y + routed + mlp(normed, "1.mixer.shared_experts"), "1.final_layernorm")


@pytest.mark.thorough
def test_one_more_token_and_its_loss(model, tensors):
    """The module's features equal the oracle's, and its loss on packed documents reaches all of it."""
    batch = dict(tokens=TOKENS[:, :-1], targets=TOKENS[:, 1:], loss_mask=jnp.ones((2, 39), jnp.int32))
    batch["segments"] = jnp.asarray(np.broadcast_to(np.where(np.arange(39) < 17, 1, 2), (2, 39)), jnp.int32)
    batch["positions"] = kernels.counted(batch["segments"])
    parameters, fixed = eqx.partition(model.mtp, eqx.is_inexact_array)

    @jax.jit
    def run(parameters, rest):
        def loss(parameters):
            whole = eqx.tree_at(lambda m: m.mtp, rest, eqx.combine(parameters, fixed), is_leaf=lambda x: x is None)
            total, _, sums, reports = cross_entropy(whole, batch, mtp_weight=1.0)
            return total, (sums, nemotron_h.rebalance(whole, reports, 0.1).mtp)

        (_, (sums, balanced)), gradient = jax.value_and_grad(loss, has_aux=True)(parameters)
        x, _, _ = rest.hidden(batch["tokens"])
        following = rest.embed_tokens(batch["targets"])
        y, _, _ = eqx.combine(parameters, fixed)(x, following, None, Tokens())
        return x, y, sums, balanced, gradient

    x, y, sums, balanced, gradient = run(parameters, eqx.tree_at(lambda m: m.mtp, model, None))
    embedded = tensors["backbone.embeddings.weight"][tiny.TOKENS[:, 1:]]
    close(y, oracle(tensors, np.asarray(x, np.float64), embedded.astype(np.float64)), terms=MODEL)
    bias = lambda mtp: mtp.layers[1].mixer.gate.e_score_correction_bias
    moved = np.abs(np.asarray(bias(balanced).value) - bias(model.mtp).value)
    assert np.all((moved < 1e-6) | (np.abs(moved - 0.1) < 1e-6)) and moved.max() > 0.09
    gradient = eqx.tree_at(bias, gradient, None)
    assert sums["mtp_loss"] > 0 and all(np.abs(g).max() > 0 for g in jax.tree.leaves(gradient))


@pytest.mark.thorough
def test_greedy_with_mtp(model):
    """Mamba-2's states are rolled back together with the tokens."""
    assert_greedy(model, zoo.complete(model, PROMPTS, draft=zoo.MTPDraft(model, 2), **SHAPE))
