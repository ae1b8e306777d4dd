"""Mixtures of experts: grouping, routers' reports and the losses from them, cost, and experts in 8 bits."""

import contextlib
import fnmatch
import json
import math
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import convert.tensors
import kernels
import zoo
from kernels.ragged_dot import SAVED
from kernels.stacked import Stacked
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import MODEL, TOKENS, noise, on_host, packed, thorough
from zoo import lora, surgery
from zoo.lora import LoRAExpertLinear
from zoo.mesh import make_mesh
from zoo.models import mixtral
from zoo.nn import moe, routing
from zoo.nn.layers import AbstractExpertLinear, ExpertLinear, biased
from zoo.quantized import QuantizedExpertLinear, quantize


WIDTH = 24  # width of the experts' hidden layer: in nf4 three blocks of 8
PADDED = (np.arange(40)[None] < np.array([[29], [12]])).astype(int)  # segments of right-padded rows


def routings(reports):
    """Returns each router's report, sorted by layer or stack of layers."""
    reports = jax.tree.leaves(reports, is_leaf=lambda node: isinstance(node, moe.Routing))
    return [jax.tree.map(np.asarray, report) for report in reports]


def pooled(reports):
    """Returns the reports of several layers as one."""
    single = [jax.tree.map(lambda x: x.sum(axis=0), r) if r.tokens.ndim else r for r in reports]
    return jax.tree.map(lambda *sums: sum(sums), *single)


# ------------------------------------------------------------------------------------------------------------- grouping


class Experts(eqx.Module):
    up: AbstractExpertLinear
    down: AbstractExpertLinear

    def __init__(self):
        self.up, self.down = (
            ExpertLinear(8, *sizes, bias=True, key=jax.random.key(0)) for sizes in ((8, WIDTH), (WIDTH, 8))
        )

    def __call__(self, x, sizes):
        return self.down(jnp.tanh(self.up(x, sizes)), sizes)


def summed(chosen, experts, x, weights):
    """Returns the sum of the sines of the chosen experts' outputs over tokens."""
    return jnp.sum(jnp.sin(moe.dispatch(experts, x, jnp.asarray(chosen), weights, lambda experts: experts.down)))


@pytest.fixture(scope="module")
def mixture():
    """Returns experts, tokens, choices and weights, with the value and gradients of `summed` by all experts at once.

    One expert is never chosen, all tokens of a sequence choose the same one, and one token chooses an expert twice.
    """
    random = np.random.RandomState(0)
    x, weights = (random.normal(size=shape).astype(np.float32) for shape in ((3, 10, 8), (3, 10, 2)))
    chosen = random.choice([0, 1, 3, 4, 5, 6, 7], (3, 10, 2))
    chosen[0, 3], chosen[1] = 4, 5
    experts = noise(Experts, 0.2)

    @jax.jit
    def dense(experts, x, weights):
        y = jnp.tanh(jnp.einsum("btd,eod->bteo", x, experts.up.weight) + experts.up.bias[None, None])
        y = jnp.einsum("bted,eod->bteo", y, experts.down.weight) + experts.down.bias[None, None]
        y = jnp.einsum("btk,btko->bto", weights, jnp.take_along_axis(y, jnp.asarray(chosen)[..., None], axis=2))
        return jnp.sum(jnp.sin(y))

    return (experts, x, weights), chosen, jax.value_and_grad(dense, (0, 1, 2))(experts, x, weights)


@pytest.mark.parametrize("text", [None, *map(thorough, ("fsdp=8", "expert=4,fsdp=2")), "expert=2,context=2,tensor=2"])
def test_dispatch_equals_all_experts_at_once(mixture, text):
    """Value and gradients are equal, also on meshes with more devices than there are sequences.

    On some the weights are a layer of a stack, with another layer of NaN: on a mesh as in training.
    """
    arguments, chosen, want = mixture

    def loss(experts, x, weights):
        if text != "expert=4,fsdp=2":
            experts = eqx.tree_at(lambda m: (m.up.weight, m.down.weight), experts, replace_fn=second)
        return summed(chosen, experts, x, weights)

    own = lambda weight: weight if text else None
    second = lambda weight: Stacked(jnp.stack([jnp.full_like(weight, jnp.nan), weight]), jnp.int32(1), own=own(weight))
    with jax.set_mesh(make_mesh(text)) if text else contextlib.nullcontext():
        ours = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(*arguments)
    for a, b in zip(*map(jax.tree.leaves, (ours, want)), strict=True):
        close(a, b, terms=300)


ROUTES = {  # of 8 sequences of 10 tokens: one for each device
    "even": np.arange(160).reshape(8, 10, 2) % 8,
    "skewed": np.random.RandomState(3).choice(8, (8, 10, 2), p=[0.4, 0.3, 0.1, 0.1, 0.1, 0, 0, 0]),
    "one device's": np.full((8, 10, 2), 6) + np.arange(2),
    "one expert's": np.zeros((8, 10, 2), int),
    "one sequence's skewed": np.where(np.arange(8)[:, None, None] == 5, 0, np.arange(160).reshape(8, 10, 2) % 8),
}


@pytest.mark.thorough
def test_no_token_is_dropped(mixture, monkeypatch):
    """Value and gradients are those of one device, however many rounds it takes, and also where outputs are kept."""
    monkeypatch.setattr(moe, "LEAST", 1)
    experts, random = mixture[0][0], np.random.RandomState(4)
    x, weights = (random.normal(size=shape).astype(np.float32) for shape in ((8, 10, 8), (8, 10, 2)))
    keep = jax.checkpoint_policies.save_only_these_names(SAVED)
    alone = jax.jit(jax.value_and_grad(summed, (1, 2, 3)))
    second = lambda weight: Stacked(jnp.stack([jnp.full_like(weight, jnp.nan), weight]), jnp.int32(1), own=weight)
    weights_of = lambda m: (m.up.weight, m.down.weight)
    stacked = lambda chosen, experts, *given: summed(
        chosen, eqx.tree_at(weights_of, experts, replace_fn=second), *given
    )
    split = jax.jit(jax.value_and_grad(jax.checkpoint(stacked, policy=keep), (1, 2, 3)))
    for chosen in ROUTES.values():
        want = alone(chosen, experts, x, weights)
        with jax.set_mesh(make_mesh("replica=2,expert=4")):
            ours = split(chosen, experts, x, weights)
        for a, b in zip(*map(jax.tree.leaves, (ours, want)), strict=True):
            close(a, b, terms=300)


@pytest.mark.thorough
@pytest.mark.parametrize("pairs", [128, 130])
def test_few_pairs_take_one_round(mixture, pairs):
    """Where each device has up to 128 pairs, all fit into the first round; beyond, one expert's take a further one."""
    experts, random = mixture[0][0], np.random.RandomState(4)
    shape = (8, pairs // 2)
    x, weights = (random.normal(size=(*shape, size)).astype(np.float32) for size in (8, 2))
    chosen = np.zeros((*shape, 2), np.int32)
    outputs = lambda *given: moe.dispatch(given[0], *given[1:], lambda experts: experts.down)
    want = jax.jit(outputs)(experts, x, chosen, weights)
    with jax.set_mesh(make_mesh("expert=4,fsdp=2")):
        ours = jax.jit(outputs)(experts, x, chosen, weights)
    np.testing.assert_allclose(ours, want, rtol=0, atol=2 * (8 + WIDTH) * np.finfo(np.float32).eps * np.abs(want).max())


def test_a_bias_of_few_and_of_many_rows():
    """Up to 256 rows find their experts by comparisons, more by repeating; an expert may have no row."""
    random = np.random.RandomState(0)
    bias = random.normal(size=(5, 3)).astype(np.float32)
    for rows in (256, 257):
        sizes = np.array([100, 0, 56, rows - 157, 1])
        y = random.normal(size=(rows, 3)).astype(np.float32)
        want = y + np.repeat(bias, sizes, axis=0)
        np.testing.assert_array_equal(biased(jnp.asarray(y), jnp.asarray(bias), jnp.asarray(sizes)), want)


def test_rounds_of_an_exchange(monkeypatch):
    """Even routing takes no further round. All devices agree, also where only one of them has more to send."""
    monkeypatch.setattr(moe, "LEAST", 1)
    mesh = make_mesh("expert=4,fsdp=2")
    local = lambda chosen: moe._Routes.of(chosen.reshape(-1, 2), 2, 4).further_rounds()[None]
    spec = P(("fsdp", "expert"))
    rounds = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False))
    # Of 20 rows a device has room for 7 in the first round, and for 2 in each further one.
    for name, most in (("even", 5), ("one device's", 20), ("one expert's", 20), ("one sequence's skewed", 20)):
        assert (rounds(ROUTES[name]) == -(-max(0, most - 7) // 2)).all()


@pytest.mark.thorough
def test_split_experts_adapted_and_quantised(mixture, monkeypatch):
    """Results equal one device's if "tensor" splits the hidden layer, with three blocks of nf4 for two devices."""
    monkeypatch.setattr(moe, "LEAST", 1)
    (_, *tokens), chosen, _ = mixture
    random, key = np.random.RandomState(2), jax.random.key(1)

    def make():
        experts = Experts()
        adapted = [
            LoRAExpertLinear.new(QuantizedExpertLinear.of(m, format), key, rank=2, alpha=2.0)
            for m, format in ((experts.up, "int8"), (experts.down, "nf4"))
        ]
        return eqx.tree_at(lambda m: (m.up, m.down), experts, adapted)

    codes = lambda a: jax.device_put(random.randint(-5, 6, a.shape).astype(a.dtype)) if a.dtype.itemsize == 1 else a
    experts = jax.tree.map(codes, noise(make, 0.2))
    trained, frozen = eqx.partition(experts, lambda a: a.dtype == jnp.float32)
    gradient = lambda trained, *tokens: summed(chosen, eqx.combine(trained, frozen), *tokens)
    gradient = jax.value_and_grad(gradient, (0, 1, 2))
    want = jax.jit(gradient)(trained, *tokens)
    with jax.set_mesh(make_mesh("fsdp=2,expert=2,tensor=2")):
        ours = jax.jit(lambda *arguments: gradient(*arguments))(trained, *tokens)
    for a, b in zip(*map(jax.tree.leaves, (ours, want)), strict=True):
        close(a, b, terms=300)  # scales of nf4 have no gradient


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name, text, implementation",
    [
        ("qwen3_moe", "tensor=2", "triton"),
        ("gpt_oss", "fsdp=2,tensor=2", "tpu"),
        ("llama4-alternating", "expert=2,tensor=2", "triton"),
    ],
)
def test_kernels_serve_split_experts(load, name, text, implementation):
    devices = math.prod(int(size) for size in re.findall("[0-9]+", text))
    with kernels.prefer(implementation), jax.set_mesh(make_mesh(text, jax.devices()[:devices])):
        calls = kernels.explain(load(name), TOKENS)
    assert {call.implementation for call in calls if call.operation == "ragged_dot"} == {implementation}


# --------------------------------------------------------------------------------------------------------------- replay


@eqx.filter_jit
def run(model, tokens, experts=None):
    """Returns the features, and each token's experts; with `experts` those of a replay."""
    if experts is not None:
        model = routing.replayed(model, experts)
    with moe.choices_of_each_token():
        x, _, reports = model.hidden(tokens)
    return x, routing.experts_of(model.layers, reports)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name",
    [
        "qwen3_moe",
        "deepseek2",
        "deepseek3",
        "gemma4",
        "gpt_oss",
        "granite4",
        "llama4-alternating",
        "mistral4",
        "qwen3_next",
    ],
)
def test_replayed_experts(load, name):
    """A model's own experts change nothing if they are given, and tokens go to others if these are given."""
    model = load(name)
    x, own = run(model, tiny.TOKENS)
    again, same = run(model, tiny.TOKENS, own)
    close(again, x, terms=MODEL)
    others = jnp.flip(own, axis=1)  # those of other tokens
    elsewhere, found = run(model, tiny.TOKENS, others)
    assert (same == own).all() and (others != own).any() and (found == others).all()
    assert np.isfinite(elsewhere).all() and np.abs(elsewhere - x).max() > 1e-3


@pytest.mark.thorough
def test_gradients_of_given_experts(load):
    """Outputs and gradients of a layer with given experts are those of the formula, written out."""
    layer, random = load("qwen3_moe").layers[0].mlp, np.random.RandomState(0)
    x = jnp.asarray(random.normal(size=(2, 5, layer.gate.weight.shape[1])), jnp.float32)
    count = len(layer.gate.weight)
    chosen = jnp.asarray(np.argsort(random.rand(2, 5, count))[..., : layer.top_k])

    def given(layer, x):
        with moe.given_experts(chosen):
            return layer(x, None)[0]

    def formula(layer, x):
        weights = jnp.take_along_axis(jax.nn.softmax(x @ layer.gate.weight.T), chosen, axis=-1)
        weights = weights / weights.sum(-1, keepdims=True) if layer.rescale else weights
        e, total = layer.experts, 0.0
        for n in range(count):
            gate, up = x @ e.gate_proj.weight[n].T, x @ e.up_proj.weight[n].T
            share = jnp.sum(jnp.where(chosen == n, weights, 0), axis=-1, keepdims=True)
            total += share * ((jax.nn.silu(gate) * up) @ e.down_proj.weight[n].T)
        return total

    gradients = lambda f: jax.jit(jax.value_and_grad(lambda *of: jnp.sum(jnp.sin(f(*of))), (0, 1)))(layer, x)
    close(gradients(given), gradients(formula), terms=300)


# --------------------------------------------------------------------------------------------------------------- losses


@jax.jit
def losses(*given):
    routing = moe.Routing.of(*given)
    return routing.balance_loss(), routing.sequence_loss(), routing.z_loss()


@pytest.mark.parametrize("segments", [None, np.arange(30) % 3])
def test_losses_are_their_formulas(segments):
    random = np.random.RandomState(0)
    logits = random.normal(size=(30, 5)) + np.array([[2, 1, 0, -1, -2]])
    probability = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    chosen = np.argsort(-logits, axis=1)[:, :2]
    rows = lambda a: jnp.asarray(a.reshape(3, 10, *a.shape[1:]))
    given = [rows(a) for a in (logits, probability, chosen)]
    balance_loss, sequence_loss, z_loss = losses(*given, None if segments is None else rows(segments))
    kept = slice(None) if segments is None else segments > 0
    share = [np.mean(chosen[kept] == expert) for expert in range(5)]
    balance = 2 * 5 * sum(f * p for f, p in zip(share, probability[kept].mean(axis=0), strict=True))
    z = np.mean(np.log(np.exp(logits[kept]).sum(axis=1)) ** 2)
    assert balance > 2.2
    close(balance_loss, balance, terms=60)
    close(z_loss, z, terms=60)
    each = []
    for row in np.arange(30).reshape(3, 10):
        own = row if segments is None else row[segments[row] > 0]
        share = [np.mean(chosen[own] == expert) for expert in range(5)]
        each += [5 * sum(f * p for f, p in zip(share, probability[own].mean(axis=0), strict=True))] * len(own)
    assert sequence_loss != balance_loss / 2
    close(sequence_loss, np.mean(each), terms=60)


def test_even_routing_costs_its_choices():
    logits, even, chosen = np.zeros((2, 5, 5)), np.full((2, 5, 5), 0.2), np.arange(20).reshape(2, 5, 2) % 5
    close(losses(*map(jnp.asarray, (logits, even, chosen)), None)[0], 2, terms=10)


def test_no_token_at_all_costs_nothing():
    given = np.ones((1, 4, 3)), np.full((1, 4, 3), 1 / 3), np.zeros((1, 4, 2), int), np.zeros((1, 4), int)
    assert losses(*map(jnp.asarray, given)) == (0, 0, 0)


@pytest.mark.thorough
@pytest.mark.parametrize("name, layers", [("mixtral-window-new", [3]), ("qwen3_moe", [3]), ("gpt_oss-new", [1, 2, 2])])
def test_every_router_reports_and_padding_does_not_count(load, name, layers):
    model = load(name)
    reports = routings(packed(model, segments=jnp.asarray(PADDED))[2])
    assert [report.tokens.size for report in reports] == layers
    for report in reports:
        assert (report.tokens == 29 + 12).all()
        close(report.probability.sum(axis=-1), 29 + 12, terms=60)
        assert (report.load.sum(axis=-1) == (29 + 12) * model.config.num_experts_per_tok).all()
    tokens = np.where(PADDED > 0, tiny.TOKENS, 63 - tiny.TOKENS)
    others = routings(packed(model, jnp.asarray(tokens), segments=jnp.asarray(PADDED))[2])
    for a, b in zip(jax.tree.leaves(reports), jax.tree.leaves(others), strict=True):
        close(a, b, terms=MODEL)


def test_a_cache_and_reports_stand_side_by_side(load):
    """Reports are the third result with a cache and without, where the cache is None."""
    shapes = eqx.filter_eval_shape
    cache, plain = shapes(lambda model: (model.init_cache(2, 40, jnp.float32), model.hidden(TOKENS)), load("mixtral"))
    cached = shapes(lambda model, cache: model.hidden(TOKENS, cache), load("mixtral"), cache)
    assert plain[1] is None and jax.tree.structure(cached[1]) == jax.tree.structure(cache)
    assert isinstance(plain[2][1][0], moe.Routing) and eqx.tree_equal(cached[2], plain[2])


@pytest.mark.live
@pytest.mark.parametrize(
    "name, padded", [("mixtral", False), ("mixtral", True), ("qwen3_moe-dense-new", True), ("gpt_oss-new", True)]
)
def test_transformers_balance_loss(folders, load, name, padded):
    """transformers' loss equals ours for all layers as one."""
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    torch = pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folders[name], attn_implementation="eager")
    segments = PADDED if padded else np.ones_like(PADDED)
    with torch.no_grad():
        tokens, mask = map(torch.tensor, (tiny.TOKENS, segments))
        loss = theirs.eval()(tokens, attention_mask=mask, output_router_logits=True).aux_loss
    model = load(name)
    ours = pooled(routings(packed(model, segments=jnp.asarray(segments))[2])).balance_loss()
    close(ours, loss.item(), terms=MODEL)


@pytest.mark.thorough
def test_the_losses_teach_the_router_and_what_feeds_it():
    config = mixtral.Config(64, 32, 48, 1, 4, 2, 64, num_local_experts=4)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(model, balance, z):
        _, (routing,), _ = model.hidden(TOKENS)[2]
        return jnp.sum(balance * routing.balance_loss() + z * routing.z_loss())

    model = noise(lambda: mixtral.Model(config, key=jax.random.key(0)))
    for weights in ((1.0, 0.0), (0.0, 1.0)):
        leaves = jax.tree_util.tree_leaves_with_path(on_host(gradient(model, *map(jax.device_put, weights))))
        reached = {surgery.path_name(path).removeprefix("layers.period.0.") for path, g in leaves if np.any(g)}
        assert reached == {
            "block_sparse_moe.gate.weight", "post_attention_layernorm.weight", "input_layernorm.weight",
            "self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight", "self_attn.o_proj.weight",
            "embed_tokens.weight",
        }  # fmt: skip


# ----------------------------------------------------------------------------------------------------------------- cost


def layer(experts, width):
    config = mixtral.Config(64, 64, width, 1, 4, 2, 64, num_local_experts=experts)
    return noise(lambda: mixtral.MoE(config, key=jax.random.key(0)), 0.1)


@jax.grad
def gradient(layer_and_x):
    layer, x = layer_and_x
    return jnp.sum(jnp.square(layer(x, None)[0]))


@pytest.mark.parametrize("change", [None, *map(thorough, ("int8", "adapters"))])
def test_decoding_leaves_experts_in_their_stack(load, change):
    """The scan over layers slices its inputs, and a kernel would need a copy of each slice."""
    model = load("mixtral")
    if change == "int8":
        model = eqx.filter_eval_shape(quantize, model, "int8")
    if change == "adapters":
        model = eqx.filter_eval_shape(lambda m: lora.add(m, rank=2, alpha=1.0, key=jax.random.key(0)), model)
    _, experts = next(surgery.modules(model, AbstractExpertLinear))
    shape = (experts.base if change == "adapters" else experts).weight.shape
    arrays, static = eqx.partition(model, lambda x: hasattr(x, "shape"))

    def decode(arrays, tokens):
        model = eqx.combine(arrays, static)
        return model.decode(tokens, model.init_cache(2, 8, jnp.float32), positions=jnp.zeros((2, 1), jnp.int32))[0]

    jaxpr = jax.make_jaxpr(decode)(arrays, jax.ShapeDtypeStruct((2, 1), jnp.int32)).jaxpr
    (scan,) = (e for e in jaxpr.eqns if e.primitive.name == "scan" and e.params["length"] == shape[0])
    operands = zip((v.aval.shape for v in scan.invars), (v.shape for v in scan.params["jaxpr"].in_avals), strict=True)
    assert {once for whole, once in operands if whole == shape} == {shape}


@pytest.mark.thorough
def test_memory_is_that_of_the_tokens():
    """The compiled program's temporary memory does not grow with experts. The 5 % are for the router's logits."""

    def temporary(fn, experts, tokens):
        arguments = jax.eval_shape(lambda: (layer(experts, 128), jnp.zeros((1, tokens, 64))))
        return jax.jit(fn).lower(arguments).compile().memory_analysis().temp_size_in_bytes

    forward = lambda layer_and_x: layer_and_x[0](layer_and_x[1], None)[0]
    assert temporary(forward, 32, 512) < 1.05 * temporary(forward, 4, 512)
    few, many, longer = temporary(gradient, 4, 512), temporary(gradient, 32, 512), temporary(gradient, 32, 1024)
    assert many < 1.05 * few and 1.9 * many < longer < 2.1 * many


def test_work_is_that_of_the_tokens(monkeypatch):
    """Multiplications of the three products, forward and backward, are counted as they are done. Partly filled tiles of
    rows take some more, whatever the number of experts.
    """
    done, product = [], jax.lax.dot_general

    def counted(x, y, dimension_numbers, **options):
        out = product(x, y, dimension_numbers, **options)
        jax.debug.callback(lambda: done.append(out.size * x.shape[dimension_numbers[0][0][0]]))
        return out

    monkeypatch.setattr(jax.lax, "dot_general", counted)  # only the kernel calls it by this name
    for experts, tokens in ((32, 128), (4, 256)):
        done.clear()
        x = jnp.asarray(np.random.RandomState(1).standard_normal((1, tokens, 64)), jnp.float32)
        jax.block_until_ready(jax.jit(gradient)((layer(experts, 40), x)))  # a width that no other test has traced
        jax.effects_barrier()
        least = 3 * 3 * 2 * tokens * 64 * 40
        assert least <= sum(done) < 2 * least


# --------------------------------------------------------------------------------------------------------------- 8 bits


def test_fp8_as_qwen_stores_it(load, tmp_path):
    """Every matrix of attention and experts has scales, and nothing else."""
    model = load("qwen3_moe")
    zoo.save(model, tmp_path / "fp8", fp8=True)
    stored = convert.tensors.open_tensors(tmp_path / "fp8")
    scaled = {name.removesuffix("_scale_inv") for name in stored if name.endswith("_scale_inv")}
    matrices = ("model.layers.*.self_attn.?_proj.weight", "model.layers.*.mlp.experts.*_proj.weight")
    assert scaled == {name for name in stored for pattern in matrices if fnmatch.fnmatch(name, pattern)}
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]["quant_method"] == "fp8"
    back = zoo.load(tmp_path / "fp8", dtype="float32")
    for a, b in zip(jax.tree.leaves(model), jax.tree.leaves(back), strict=True):
        a, b = np.asarray(a), np.asarray(b)
        assert (np.abs(a - b) <= np.abs(a) / 16 + 1e-5 * np.abs(a).max()).all()
