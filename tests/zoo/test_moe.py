"""Mixtures of experts: grouping, what routers report and the losses made of it, cost, and experts in 8 bits."""

import contextlib
import fnmatch
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert.tensors
import zoo
from kernels import ragged_dot_xla
from tests.zoo import tiny
from zoo import mixtral, moe, surgery
from zoo.layers import ExpertLinear
from zoo.mesh import make_mesh


TOKENS = jnp.asarray(tiny.TOKENS)
SEGMENTS = jnp.asarray(np.arange(40)[None] < np.array([[29], [12]]), jnp.int32)  # right-padded
forward = eqx.filter_jit(lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: tiny.write(root / name, name) for name in ("mixtral", "qwen3_moe-dense-new", "gpt_oss-new")}


@eqx.filter_jit
def routings(model, tokens, segments=None):
    """What each router reports, sorted by layer or stack of layers."""
    reports = model.hidden(tokens, segments=segments)[1]
    return jax.tree.leaves(reports, is_leaf=lambda node: isinstance(node, moe.Routing))


def pooled(reports):
    """The reports of several layers as one."""
    single = [jax.tree.map(lambda x: x.sum(axis=0), r) if r.tokens.ndim else r for r in reports]
    return jax.tree.map(lambda *sums: sum(sums), *single)


# ------------------------------------------------------------------------------------------------------------- grouping


@pytest.mark.parametrize("text", [None, "fsdp=8", "expert=4,fsdp=2", "expert=2,context=2,tensor=2", "expert=8"])
def test_mix_equals_all_experts_at_once(text):
    """Value and gradients, on meshes too, with an expert that nobody chose, one that all of a sequence want, a token
    that chose one twice, and fewer sequences than devices."""
    random = np.random.RandomState(0)
    x, weights = (jnp.asarray(random.normal(size=shape), jnp.float32) for shape in ((3, 10, 8), (3, 10, 2)))
    chosen = jnp.asarray(random.choice([0, 1, 3, 4, 5, 6, 7], (3, 10, 2))).at[0, 3].set(4).at[1].set(5)
    experts = ExpertLinear(8, 8, 8, bias=True, key=jax.random.key(0))

    def dense(experts, x, weights):
        y = jnp.einsum("btd,eod->bteo", x, experts.weight) + experts.bias[None, None]
        return jnp.einsum("btk,btko->bto", weights, jnp.take_along_axis(y, chosen[..., None], axis=2))

    mix = lambda experts, x, weights: moe.mix(experts, x, chosen, weights)
    gradient = lambda f: jax.jit(jax.value_and_grad(lambda *a: jnp.sum(jnp.sin(f(*a))), (0, 1, 2)))
    with jax.set_mesh(make_mesh(text)) if text else contextlib.nullcontext():
        ours = gradient(mix)(experts, x, weights)
    for a, b in zip(*map(jax.tree.leaves, (ours, gradient(dense)(experts, x, weights))), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


# --------------------------------------------------------------------------------------------------------------- losses


@pytest.mark.parametrize("segments", [None, np.arange(30) % 3])
def test_losses_are_their_formulas(segments):
    random = np.random.RandomState(0)
    logits = random.normal(size=(30, 5)) + np.array([[2, 1, 0, -1, -2]])
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    chosen = np.argsort(-logits, axis=1)[:, :2]
    rows = lambda a, dtype=jnp.float32: jnp.asarray(a, dtype).reshape(3, 10, *a.shape[1:])
    routing = moe.Routing.of(
        rows(logits),
        rows(probability),
        rows(chosen, jnp.int32),
        None if segments is None else rows(segments, jnp.int32),
    )
    kept = slice(None) if segments is None else segments > 0
    share = [np.mean(chosen[kept] == expert) for expert in range(5)]
    balance = 5 * sum(f * p for f, p in zip(share, probability[kept].mean(axis=0), strict=True))
    z = np.mean(np.log(np.exp(logits[kept]).sum(axis=1)) ** 2)
    assert routing.balance_loss() == pytest.approx(balance, rel=1e-5) and balance > 1.1
    assert routing.z_loss() == pytest.approx(z, rel=1e-5)


def test_even_routing_costs_one():
    even = jnp.full((2, 5, 5), 0.2)
    chosen = jnp.arange(20).reshape(2, 5, 2) % 5
    assert moe.Routing.of(jnp.zeros((2, 5, 5)), even, chosen, None).balance_loss() == pytest.approx(1)


def test_no_token_at_all_costs_nothing():
    nothing = jnp.zeros((1, 4, 2), int)
    routing = moe.Routing.of(jnp.ones((1, 4, 3)), jnp.ones((1, 4, 3)) / 3, nothing, nothing[..., 0])
    assert routing.balance_loss() == 0 and routing.z_loss() == 0


@pytest.mark.parametrize("name, layers", [("mixtral", [3]), ("qwen3_moe-dense-new", [2]), ("gpt_oss-new", [1, 2, 2])])
def test_every_router_reports_and_padding_does_not_count(folders, name, layers):
    model = zoo.load(folders[name])
    reports = routings(model, TOKENS, SEGMENTS)
    assert [report.tokens.size for report in reports] == layers
    for report in reports:
        assert (report.tokens == 29 + 12).all()
        np.testing.assert_allclose(report.probability.sum(axis=-1), 29 + 12, rtol=1e-5)
        assert (report.load.sum(axis=-1) == (29 + 12) * model.config.num_experts_per_tok).all()
    others = routings(model, jnp.where(SEGMENTS > 0, TOKENS, 63 - TOKENS), SEGMENTS)
    for a, b in zip(jax.tree.leaves(reports), jax.tree.leaves(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.live
@pytest.mark.parametrize(
    "name, padded", [("mixtral", False), ("mixtral", True), ("qwen3_moe-dense-new", True), ("gpt_oss-new", True)]
)
def test_transformers_balance_loss(folders, name, padded):
    """Theirs is top_k times ours of all layers as one: what they divide by the tokens, we divide by the choices."""
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager")
    mask = SEGMENTS if padded else jnp.ones_like(SEGMENTS)
    with torch.no_grad():
        tokens, mask = (torch.tensor(np.asarray(a)) for a in (TOKENS, mask))
        loss = theirs.eval()(tokens, attention_mask=mask, output_router_logits=True).aux_loss
    model = zoo.load(folders[name])
    ours = pooled(routings(model, TOKENS, SEGMENTS if padded else None)).balance_loss()
    assert model.config.num_experts_per_tok * ours == pytest.approx(loss.item(), rel=1e-5)


def test_the_losses_teach_the_router_and_what_feeds_it():
    config = mixtral.Config(64, 32, 48, 1, 4, 2, 64, num_local_experts=4)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model, balance, z):
        (routing,) = routings(model, TOKENS)
        return jnp.sum(balance * routing.balance_loss() + z * routing.z_loss())

    for weights in ((1.0, 0.0), (0.0, 1.0)):
        gradients = gradient(mixtral.Model(config, key=jax.random.key(0)), *map(jnp.array, weights))
        leaves = jax.tree_util.tree_leaves_with_path(gradients)
        reached = {surgery.path_name(path).removeprefix("layers.period.0.") for path, g in leaves if (g != 0).any()}
        assert reached == {
            "block_sparse_moe.gate.weight", "post_attention_layernorm.weight", "input_layernorm.weight",
            "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
            "embed_tokens.weight",
        }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- cost


def layer(experts, width):
    config = mixtral.Config(64, 64, width, 1, 4, 2, 64, num_local_experts=experts)
    return mixtral.MoE(config, key=jax.random.key(0))


@jax.grad
def gradient(layer_and_x):
    layer, x = layer_and_x
    return jnp.sum(jnp.square(layer(x, None)[0]))


def test_memory_is_that_of_the_tokens():
    """What the compiled program needs beside weights, inputs and results. The 5 % are for the router's logits."""

    def temporary(fn, experts, tokens):
        arguments = jax.eval_shape(lambda: (layer(experts, 128), jnp.zeros((1, tokens, 64))))
        return jax.jit(fn).lower(arguments).compile().memory_analysis().temp_size_in_bytes

    for fn in (lambda layer_and_x: layer_and_x[0](layer_and_x[1], None)[0], gradient):
        few, many, longer = temporary(fn, 4, 512), temporary(fn, 32, 512), temporary(fn, 32, 1024)
        assert many < 1.05 * few and 1.9 * many < longer < 2.1 * many


def test_work_is_that_of_the_tokens(monkeypatch):
    """Multiplications of the three products, forward and backward, counted as they are done. Tiles of rows that are not
    full take some more, whatever the number of experts."""
    done, product = [], ragged_dot_xla._product

    def counted(x, y, axes):
        out = product(x, y, axes)
        jax.debug.callback(lambda: done.append(out.size * x.shape[axes[0]]))
        return out

    monkeypatch.setattr(ragged_dot_xla, "_product", counted)
    for experts, tokens in ((4, 128), (32, 128), (4, 256)):
        done.clear()
        x = jax.random.normal(jax.random.key(1), (1, tokens, 64))
        jax.block_until_ready(jax.jit(gradient)((layer(experts, 40), x)))  # of a width that no other test has traced
        jax.effects_barrier()
        least = 3 * 3 * 2 * tokens * 64 * 40
        assert least <= sum(done) < 2 * least


# --------------------------------------------------------------------------------------------------------------- 8 bits


def test_fp8_as_qwen_stores_it(tmp_path):
    """Every matrix of attention and experts has its scales, and nothing else."""
    folder = tiny.write(tmp_path / "plain", "qwen3_moe")
    model = zoo.load(folder)
    zoo.save(model, tmp_path / "fp8", fp8=True)
    stored = convert.tensors.open_tensors(tmp_path / "fp8")
    scaled = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    matrices = ("model.layers.*.self_attn.?_proj.weight", "model.layers.*.mlp.experts.*_proj.weight")
    assert scaled == {name for name in stored for pattern in matrices if fnmatch.fnmatch(name, pattern)}
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    back = zoo.load(tmp_path / "fp8", dtype="float32")
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(back), strict=True):
        assert (jnp.abs(a - b) <= jnp.abs(a) / 16 + 1e-5 * jnp.abs(a).max()).all()
