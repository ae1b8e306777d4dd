"""DeepSeek's own features: two forms of latent attention, routers and their bias, MTP, 8 bits."""

import dataclasses
import functools
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import kernels
import zoo
from kernels import Tokens
from tests.close import close
from tests.train.conftest import command, devices
from tests.zoo import test_tiktoken, tiny
from tests.zoo.programs import MODEL, TOKENS, error, noise, on_host, packed, same, thorough
from tests.zoo.test_lora import assert_like_floats
from train.step.language import cross_entropy
from zoo import surgery
from zoo.config import read as read_config
from zoo.lora import LoRAExpertLinear, LoRALinear
from zoo.models import deepseek2, deepseek3
from zoo.nn.layers import AbstractExpertLinear, AbstractLinear, Embedding, RMSNorm
from zoo.nn.mtp import module_of
from zoo.quantized import QuantizedExpertLinear, QuantizedLinear, coded, dequantize_weight
from zoo.weights.checkpoint import skeleton


KEY, E4M3 = jax.random.key(0), ml_dtypes.float8_e4m3fn


@eqx.filter_jit
def hidden(model, tokens):
    """Returns logits, last features, and the routers' reports."""
    x, _, reports = model.hidden(tokens)
    return model.unembed(x), x, reports


@eqx.filter_jit
def further(model, x, following):
    """Returns logits and features of the MTP module, and its router's report."""
    x, _, report = model.mtp(x, model.embed_tokens(following), None, Tokens())
    return model.unembed(x), x, report


@pytest.fixture(scope="module")
def model_with_further(with_further):
    return zoo.load(with_further, parts=("mtp",))


def abstract(make, config):
    return eqx.filter_eval_shape(lambda: make(config, key=KEY))


def latent_attention(config):
    family = getattr(zoo, zoo.registry.family_of(config).name)
    return eqx.filter_eval_shape(lambda: family.Block(config, "dense", key=KEY)).self_attn


# Attention.


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
def test_the_cache_holds_576_numbers_a_token_and_layer(name):
    config = zoo.config(name)
    model = abstract(zoo.registry.family_of(config).Model, config)
    cache = eqx.filter_eval_shape(lambda: model.init_cache(3, 1000, jnp.bfloat16))
    stored = sum(x.size for x in jax.tree.leaves(cache) if x.dtype == jnp.bfloat16)
    assert stored == config.num_hidden_layers * 3 * 1000 * (512 + 64)


@pytest.mark.parametrize(
    "family, surgeon",
    [(deepseek2, "none"), thorough(deepseek2, "int8"), thorough(deepseek3, "none"), (deepseek3, "lora")],
)
def test_absorbed_equals_expanded(family, surgeon, monkeypatch):
    """A few tokens use the absorbed form; with much padding beside them, they use the expanded one."""
    config = read_config(family.FAMILY, tiny.CONFIGS[family.FAMILY.name])
    attention = noise(lambda: family.Block(config, "dense", key=KEY).self_attn, 0.2)
    if surgeon == "int8":
        attention = surgery.map_linears(attention, lambda m: QuantizedLinear.of(m, "int8"))
    if surgeon == "lora":
        adapt = functools.partial(LoRALinear.new, rank=3, alpha=3.0)
        attention = surgery.map_linears(attention, adapt, "kv_b_proj", key=KEY)
        attention = eqx.tree_at(lambda m: m.kv_b_proj.b, attention, jax.random.normal(KEY, (4 * 22, 3)))
    seen, run = [], kernels.attention
    monkeypatch.setattr(
        kernels,
        "attention",
        lambda q, k, v, *at, **kw: seen.append((k.shape, getattr(v, "shape", v))) or run(q, k, v, *at, **kw),
    )
    attend = eqx.filter_jit(lambda x, cache, positions: attention(x, cache, Tokens(positions)))

    x, padding = np.random.RandomState(0).standard_normal((2, 19, 32)).astype(np.float32), -np.ones((2, 15), int)
    before, at = np.array([[*range(12), *[-1] * 5], [*range(7), *[-1] * 10]]), np.array([[12, 13], [7, -1]])
    _, cache = attend(x[:, :17], zoo.nn.cache.LatentKV.init(1, 2, 16, 24, 8, jnp.float32), before)
    absorbed, few = attend(x[:, 17:], cache, at)
    expanded, many = attend(np.roll(x, 2, axis=1)[:, :17], cache, np.concatenate([at, padding], axis=1))
    assert seen == [((2, 16, 4, 18), (2, 16, 4, 12)), ((2, 16, 1, 32), 24)]
    absorbed, expanded = np.asarray(absorbed), np.asarray(expanded)
    assert np.abs(expanded[:, 0]).max() > 1 and not absorbed[1, 1].any()
    close(absorbed, expanded[:, :2], terms=MODEL)
    close(few.latents, many.latents, terms=100)


@pytest.mark.parametrize(
    "name, frequencies, scale",
    [
        ("deepseek-v2", {8: 0.1, 16: 0.0055, 24: 2.5e-5, 31: 3.33380353e-06}, 0.1147213868),
        ("deepseek-v3", {8: 0.1, 16: 0.0055, 24: 2.5e-5, 31: 3.33380353e-06}, 0.1352337789),
        ("kimi-k2", {8: 0.0668740347, 16: 0.00447213603, 24: 9.34593027e-06, 31: 8.76441277e-07}, 0.1308607999),
        ("kimi-k2.5", {8: 0.0668740347, 16: 0.00153729669, 24: 4.67296513e-06, 31: 4.38220638e-07}, 0.1446796258),
        ("mistral-small-4", {1: 0.749894202, 16: 0.00694711553, 31: 1.04181368e-06}, 0.1949694947),
    ],
)
def test_yarn(name, frequencies, scale):
    """Frequencies and scales equal transformers' for the released configurations."""
    config = zoo.config(name)
    attention = latent_attention(config)
    ours, magnitude = attention.rotary.frequencies()
    assert ours.shape == (32,) and magnitude == 1
    close({i: ours[i] for i in frequencies}, frequencies, terms=32)
    assert math.isclose(attention.scale, scale, rel_tol=1e-9)


def test_without_yarn_the_scale_is_plain():
    config = dataclasses.replace(zoo.config("deepseek-v3"), rope_scaling=None)
    assert latent_attention(config).scale == 192**-0.5


# Routers.


def choose(scores, config, group_score, hidden_score):
    """Returns the experts chosen for a token, by plain search."""
    groups = np.split(np.arange(len(scores)), config.n_group)
    kept = sorted(groups, key=lambda group: group_score(scores[group]))[-config.topk_group :]
    allowed = set(np.concatenate(kept).tolist())
    masked = [score if expert in allowed else hidden_score for expert, score in enumerate(scores)]
    return set(np.argsort(masked)[-config.num_experts_per_tok :].tolist())


class Named(eqx.Module):
    """Experts that each return a vector that names them."""

    names: jax.Array

    def __call__(self, x, sizes):
        return jnp.repeat(self.names, sizes, axis=0, total_repeat_length=len(x))


@eqx.filter_jit
def route(layer, x):
    """Returns the weight of each expert for each token, the report, and the router's logits."""
    silent = eqx.tree_at(lambda m: m.shared_experts.down_proj.weight, layer, replace_fn=jnp.zeros_like)
    named = Named(jnp.eye(layer.config.n_routed_experts, x.shape[1]))
    y, routing = eqx.tree_at(lambda m: m.experts, silent, named)(x[None], None)
    return y[0, :, : layer.config.n_routed_experts], routing, x @ layer.gate.weight.T


def layer_of(family, **changes):
    """Returns a mixture of experts."""
    config = tiny.CONFIGS[family.FAMILY.name] | dict(rope_scaling=None) | changes
    return noise(lambda: family.MoE(read_config(family.FAMILY, config), key=KEY))


@pytest.mark.parametrize("topk_method", ["greedy", "group_limited_greedy"])
def test_v2_router(topk_method):
    layer, x = layer_of(deepseek2, topk_method=topk_method), np.random.RandomState(0).standard_normal((50, 32))
    weights, routing, scores = jax.tree.map(np.asarray, route(layer, x.astype(np.float32)))
    scores = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    config = layer.config
    if topk_method == "greedy":
        config = dataclasses.replace(config, n_group=1, topk_group=1)
    for token, got in zip(scores, weights, strict=True):
        chosen = choose(token, config, np.max, 0)
        want = [4.0 * score if expert in chosen else 0 for expert, score in enumerate(token)]
        close(got, want, terms=100)
    close(routing.probability, scores.sum(axis=0), terms=100)
    assert routing.load.tolist() == (weights > 0).sum(axis=0).tolist() and routing.load.sum() == 50 * 3


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("level", [0.0, -3.0])
def test_v3_router(norm_topk_prob, level):
    """The router is right with biases so low that an unchosen group of zeros would win."""
    layer, x = layer_of(deepseek3, norm_topk_prob=norm_topk_prob), np.random.RandomState(0).standard_normal((50, 32))
    bias = (level + 0.3 * np.random.RandomState(1).standard_normal(12)).astype(np.float32)
    layer = eqx.tree_at(lambda m: m.gate.e_score_correction_bias.value, layer, jnp.asarray(bias))
    weights, routing, scores = jax.tree.map(np.asarray, route(layer, x.astype(np.float32)))
    scores, changed = 1 / (1 + np.exp(-scores)), 0
    best_two = lambda group: np.sort(group)[-2:].sum()
    for token, got in zip(scores, weights, strict=True):
        chosen = choose(token + bias, layer.config, best_two, -np.inf)
        changed += chosen != choose(token, layer.config, best_two, -np.inf)
        total = token[list(chosen)].sum() if norm_topk_prob else 1
        want = [2.5 * score / total if expert in chosen else 0 for expert, score in enumerate(token)]
        close(got, want, terms=100)
    assert changed > 10, "the bias matters"
    close(routing.probability, (scores / scores.sum(axis=1, keepdims=True)).sum(axis=0), terms=100)
    assert routing.load.tolist() == (weights > 0).sum(axis=0).tolist() and routing.load.sum() == 50 * 3


def test_padding_does_not_count(load):
    segments = jnp.asarray(np.where(np.arange(40) < 30, 1, 0)[None].repeat(2, axis=0))
    (head, (routing,), tail) = packed(load("deepseek3-kimi"), segments=segments)[2]
    assert head == (None,) and tail == ()
    routing = jax.tree.map(np.asarray, routing)
    assert (routing.tokens == 60).all() and (routing.load.sum(axis=1) == 180).all()
    close(routing.probability.sum(axis=1), 60, terms=100)


def test_the_bias_stays_float32(folders, tmp_path):
    model = zoo.load(folders["deepseek3"], dtype="bfloat16")
    gate = model.layers.period[0].mlp.gate
    assert gate.weight.dtype == jnp.bfloat16 and gate.e_score_correction_bias.value.dtype == jnp.float32
    half = eqx.filter_eval_shape(lambda: surgery.cast(model, jnp.float16))
    assert half.layers.period[0].mlp.gate.e_score_correction_bias.value.dtype == jnp.float32
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    zoo.save(on_host(model), tmp_path)
    before, after = (convert.tensors.open_tensors(path)[name] for path in (folders["deepseek3"], tmp_path))
    assert after.dtype == np.float32 and (before.view() == after.view()).all()


def test_rebalance_evens_the_load(load):
    @eqx.filter_jit
    def step(model):
        reports = model.hidden(TOKENS)[2]
        return deepseek3.rebalance(model, reports, 0.005), reports

    def imbalance(reports):
        """Returns the largest load divided by the mean load."""
        load = np.asarray(reports[1][0].load)
        return float((load.max(axis=1) / load.mean(axis=1)).max())

    model = load("deepseek3")
    moved, first = step(model)
    router = lambda model: model.layers.period[0].mlp.gate.e_score_correction_bias.value
    loads = np.asarray(first[1][0].load)
    change, short = np.asarray(router(moved)) - np.asarray(router(model)), loads.mean(axis=1, keepdims=True) - loads
    assert np.allclose(change[short != 0], 0.005 * np.sign(short[short != 0]), atol=1e-7)  # a mean is rounded
    assert same(eqx.tree_at(router, moved, router(model)), model)
    for _ in range(100):
        moved, last = step(moved)
    assert imbalance(first) > 2 and imbalance(last) < 1.3


# Multi-token prediction.


@pytest.mark.thorough
def test_further(model_with_further, further_tensors):
    """The MTP module equals a model with the module's layer as its only one, and the layer's input as its embedding."""
    model, t = model_with_further, further_tensors
    _, x, _ = hidden(model, TOKENS[:, :-1])
    _, ours, routing = further(model, x, TOKENS[:, 1:])

    def norm(y, name):
        return y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + 1e-5) * t[f"model.layers.3.{name}.weight"]

    embedded = t["model.embed_tokens.weight"][tiny.TOKENS[:, 1:]]
    both = np.concatenate([norm(embedded, "enorm"), norm(np.asarray(x), "hnorm")], axis=-1)
    layer_input = both @ t["model.layers.3.eh_proj.weight"].T
    changes = dict(vocab_size=78, num_hidden_layers=1, first_k_dense_replace=0)
    single = noise(lambda: deepseek3.Model(dataclasses.replace(model.config, **changes), key=KEY))
    parts = lambda m: (m.embed_tokens.weight, m.layers.period[0], m.norm.weight)
    stacked = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)[None]), model.mtp.block)
    last_norm = jnp.asarray(t["model.layers.3.shared_head.norm.weight"])
    single = eqx.tree_at(parts, single, (jnp.asarray(layer_input.reshape(78, 32)), stacked, last_norm))
    _, theirs, (_, (report,), _) = hidden(single, jnp.asarray(np.arange(78).reshape(2, 39)))
    close(ours, theirs, terms=MODEL)
    assert np.array_equal(routing.load, np.asarray(report.load)[0])


@pytest.mark.live
def test_further_is_transformers(with_further, model_with_further, monkeypatch):
    torch = pytest.importorskip("torch", reason="live parity needs transformers and torch")
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    layers, caches = transformers.modeling_layers, transformers.cache_utils
    if not hasattr(layers, "MtpModel"):
        pytest.skip("this transformers has no multi-token prediction")
    monkeypatch.setattr(
        transformers.DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.3.*"]
    )
    load = transformers.AutoModelForCausalLM.from_pretrained
    main = load(with_further, dtype="float32", attn_implementation="eager").eval()
    module = layers.MtpModel.from_pretrained(main).eval()
    tokens, positions = torch.tensor(tiny.TOKENS), torch.arange(1, 40)[None].repeat(2, 1)
    with torch.no_grad():
        states = main(tokens[:, :-1], output_hidden_states=True).hidden_states[-1]
        cache = caches.MtpCache(config=main.config.get_mtp_config())
        theirs = main.lm_head(module.forward_layer(0, states, positions, cache, input_ids=tokens[:, 1:])).numpy()
    _, x, _ = hidden(model_with_further, TOKENS[:, :-1])
    close(further(model_with_further, x, TOKENS[:, 1:])[0], theirs, terms=MODEL)


def test_without_mtp_nothing_changes(load, with_further, model_with_further):
    without = zoo.load(with_further)
    assert same(without, load("deepseek3"))
    with pytest.raises(ValueError, match=r'load a model whose FAMILY.parts has "mtp", with parts=\("mtp",\)'):
        module_of(without)
    assert same(eqx.tree_at(lambda m: m.mtp, model_with_further, None), without)
    assert error(hidden(model_with_further, TOKENS[:, :-1])[0], tiny.golden()["deepseek3"][:, :-1]) < 1e-4


def test_mtp_needs_the_module(folders, tmp_path):
    with pytest.raises(ValueError, match=r"lacks \d+ tensors .*model\.layers\.3\."):
        zoo.load(folders["deepseek3"], parts=("mtp",))
    with pytest.raises(ValueError, match="mtp needs num_nextn_predict_layers=1, not 0"):
        zoo.load(tiny.write(tmp_path, "deepseek3-kimi"), parts=("mtp",))


def test_mtp_shares_the_embedding(with_further, further_tensors, tmp_path):
    """The copies of embedding and head in the files are ignored, with the module or without it."""
    tensors = dict(further_tensors)
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
    tiny.write(tmp_path, "deepseek3")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    for parts in (("mtp",), ()):
        ours, theirs = zoo.load(tmp_path, parts=parts), zoo.load(with_further, parts=parts)
        assert same(ours, theirs)


def test_a_layer_is_not_taken_for_mtp(tmp_path):
    """If config.json states no MTP layer, one layer too many is an error."""
    folder = tiny.write(
        tmp_path, "deepseek3-kimi", num_hidden_layers=tiny.CONFIGS["deepseek3-kimi"]["num_hidden_layers"] - 1
    )
    with pytest.raises(ValueError, match="no place for"):
        zoo.load(folder)


def test_mtp_round_trip(model_with_further, further_tensors, tmp_path):
    zoo.save(on_host(model_with_further), tmp_path)
    after, before = convert.tensors.open_tensors(tmp_path), further_tensors
    copies = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert after.keys() == before.keys() - copies
    assert all((after[name].view() == before[name]).all() for name in after)
    assert same(zoo.load(tmp_path, parts=("mtp",)), model_with_further)


def test_mtp_has_rules_for_every_array(model_with_further):
    specs = surgery.partition_specs(model_with_further, deepseek3.FAMILY.partition_rules)
    assert specs.mtp.block.mlp.experts.up_proj.weight == jax.P("expert", "tensor", "fsdp")
    assert specs.mtp.block.mlp.shared_experts.up_proj.weight == jax.P("tensor", "fsdp")
    assert specs.layers.period[0].self_attn.q_a_proj.weight == jax.P("stage", None, "fsdp")


def test_mtp_loss(model_with_further):
    """The loss predicts token i + 2 at position i, equally in packed and separate documents. Its gradient reaches the
    whole module.
    """
    tokens = tiny.TOKENS
    segments, index = np.array([[1] * 19 + [2] * 19 + [0] * 2]), np.arange(19)
    positions = np.concatenate([index, index, np.zeros(2, int)])[None]
    batch = dict(tokens=tokens[:1], targets=np.roll(tokens[:1], -1, axis=1), segments=segments, positions=positions)
    batch = {key: jnp.asarray(value) for key, value in (batch | dict(loss_mask=(segments != 0).astype(int))).items()}

    def loss(mtp, model):
        model = eqx.tree_at(lambda m: m.mtp, model, mtp, is_leaf=lambda x: x is None)
        total, _, sums, _ = cross_entropy(model, batch, mtp_weight=1.0)
        return total, sums

    rest = eqx.tree_at(lambda m: m.mtp, model_with_further, None)
    gradient = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))
    (_, sums), gradients = gradient(model_with_further.mtp, rest)

    documents = np.zeros((2, 40), int)  # each with the target of its last token; the rest is ignored
    documents[:, :20] = tokens[0, :20], tokens[0, 19:39]
    _, x, _ = hidden(model_with_further, jnp.asarray(documents[:, :-1]))
    logits = np.asarray(further(model_with_further, x, jnp.asarray(documents[:, 1:]))[0], np.float64)[:, :18]
    logs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    close(sums["mtp_loss"], -np.take_along_axis(logs, documents[:, 2:20, None], axis=2).sum(), terms=MODEL)
    parts = jax.tree_util.tree_leaves_with_path(gradients)
    still = [surgery.path_name(path) for path, gradient in parts if not np.abs(gradient).max() > 0]
    assert still == ["block.mlp.gate.e_score_correction_bias.value"]


def test_rebalance_with_mtp(model_with_further):
    model = model_with_further
    _, x, reports = hidden(model, TOKENS[:, :-1])
    moved = deepseek3.rebalance(model, (*reports, (further(model, x, TOKENS[:, 1:])[2],)), 0.25)
    bias = lambda model: np.asarray(model.mtp.block.mlp.gate.e_score_correction_bias.value)
    assert set(np.abs(bias(moved) - bias(model)).round(6).tolist()) <= {0, 0.25}
    assert (bias(moved) != bias(model)).any()
    with pytest.raises(ValueError, match="zip"):
        deepseek3.rebalance(model, reports, 0.25)


# 8 bits, and Kimi.

WIDE = dict(
    hidden_size=160, intermediate_size=144, moe_intermediate_size=136, num_attention_heads=4, qk_nope_head_dim=40,
    q_lora_rank=140, kv_lora_rank=132, v_head_dim=36, n_routed_experts=4, num_experts_per_tok=2, n_group=2,
    topk_group=1, num_hidden_layers=3,
)  # fmt: skip
QUANTIZED = dict(quant_method="fp8", fmt="e4m3", activation_scheme="dynamic", weight_block_size=[128, 128])
PLAIN = ("norm", "gate.weight", "gate.e_score", "embed_tokens", "lm_head", "eh_proj")  # these are not in 8 bits


def in_blocks(name):
    return not any(part in name for part in PLAIN)


def spread(scales, shape):
    """Returns the scale of every number."""
    return scales.repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]


def write_wide(folder, tensors, **changes):
    tiny.write(folder, "deepseek3", **WIDE, **changes)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_fp8_is_read_as_stored(tmp_path):
    """fp8 is read as the same model as a checkpoint of its dequantised numbers."""
    random = np.random.RandomState(3)
    shapes = tiny.deepseek3.shapes(tiny.CONFIGS["deepseek3"] | WIDE)
    stored, plain = {}, {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape).astype(np.float32)
        if in_blocks(name):
            codes = (100 * noise).clip(-448, 448).astype(E4M3)
            scales = random.uniform(1e-4, 1e-3, [-(-n // 128) for n in shape]).astype(np.float32)
            stored |= {name: codes, f"{name}_scale_inv": scales}
            exact = codes.astype(np.float64) * spread(scales, shape)
            plain[name] = exact.astype(np.float32)
        else:
            stored[name] = plain[name] = tiny.deepseek3.values(name, noise)
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (2, 2)
    quantized = write_wide(tmp_path / "fp8", stored, quantization_config=QUANTIZED)
    models = [zoo.load(quantized, dtype="float32"), zoo.load(write_wide(tmp_path / "plain", plain))]
    assert same(*models)


@pytest.mark.thorough
@pytest.mark.parametrize("scales", ["float32", "bfloat16", "float8_e8m0fnu"])
def test_fp8_stays_as_it_is_stored(tmp_path, scales):
    """Blocks in fp8 are kept, stand for the numbers that are read without the option, and are saved bit by bit."""
    random = np.random.RandomState(3)
    shapes = tiny.deepseek3.shapes(tiny.CONFIGS["deepseek3"] | WIDE)
    tensors = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape).astype(np.float32)
        kind = np.float32 if name.endswith("_bias") else ml_dtypes.bfloat16
        tensors[name] = tiny.deepseek3.values(name, noise).astype(kind)
        if in_blocks(name):
            blocks = [-(-n // 128) for n in shape]
            factors = 2.0 ** random.randint(-13, -9, blocks) * random.uniform(1, 2, blocks)
            tensors[f"{name}_scale_inv"] = factors.astype(scales)
            tensors[name] = (100 * noise).clip(-448, 448).astype(E4M3)
    folder = write_wide(tmp_path / "fp8", tensors, quantization_config=QUANTIZED)
    for dtype in ("float32", None) if scales == "float32" else (None,):
        floats, kept = (zoo.load(folder, dtype=dtype, quantize=quantize) for quantize in (None, "stored"))
        linears = lambda model: dict(surgery.modules(model, (AbstractLinear, AbstractExpertLinear)))
        read = jax.jit(lambda linear, dtype=floats.embed_tokens.weight.dtype: coded(linear, dtype).read())
        for path, linear in linears(kept).items():
            assert linear.weight.dtype == (E4M3 if path.startswith("layers.") else linears(floats)[path].weight.dtype)
            if path.startswith("layers."):
                assert same(read(linear), linears(floats)[path].weight), path
        if scales == "float32":
            # In float32 only the order of sums differs; in bfloat16 these are rounded in other places, too.
            close(packed(kept)[0], packed(floats)[0], terms=MODEL if dtype else 8)
            if dtype:
                assert_like_floats(kept, floats)
        path, linear = linears(kept.layers).popitem()
        assert same(linears(surgery.cast(kept.layers, "float16"))[path].scale, linear.scale)
    zoo.save(on_host(kept), tmp_path / "saved")
    after = convert.tensors.open_tensors(tmp_path / "saved")
    assert after.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert after[name].dtype == tensor.dtype and after[name].view().tobytes() == tensor.tobytes(), name
    assert same(zoo.load(tmp_path / "saved", quantize="stored"), kept)
    if scales == "float32":
        split = zoo.load(folder, quantize="stored", mesh="fsdp=2,tensor=2,expert=2")
        assert same(split, kept)


def test_fp8_round_trip(tmp_path):
    shapes = tiny.deepseek3.shapes(tiny.CONFIGS["deepseek3"] | WIDE)
    shapes |= tiny.deepseek3.further_shapes(tiny.CONFIGS["deepseek3"] | WIDE)
    shapes = {name: shape for name, shape in shapes.items() if "3.embed_tokens" not in name and "head.head" not in name}
    random = np.random.RandomState(3)
    tensors = {
        name: tiny.deepseek3.values(name, random.standard_normal(s)).astype(np.float32) for name, s in shapes.items()
    }
    model = zoo.load(write_wide(tmp_path / "plain", tensors), parts=("mtp",))
    zoo.save(on_host(model), tmp_path / "fp8", fp8=True)
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"] == QUANTIZED
    saved = convert.tensors.open_tensors(tmp_path / "fp8")
    assert saved.keys() == tensors.keys() | {f"{name}_scale_inv" for name in tensors if in_blocks(name)}
    assert {name for name in tensors if saved[name].dtype == E4M3} == {name for name in tensors if in_blocks(name)}
    for name in filter(in_blocks, tensors):
        scale = spread(saved[f"{name}_scale_inv"].view(), tensors[name].shape)
        error = np.abs(saved[name].view().astype(np.float32) * scale - tensors[name])
        # Half a unit in the last of 4 binary digits; below 2**-6, where numbers are spaced by 2**-9, half of that.
        assert (error <= np.maximum(np.abs(tensors[name]) / 16, scale * 2.0**-10) * (1 + 1e-5)).all()
    again = zoo.load(tmp_path / "fp8", dtype="float32", parts=("mtp",))
    assert jax.tree.structure(again) == jax.tree.structure(model)
    largest = lambda a: np.abs(np.asarray(a)).max()
    away = jax.tree.map(lambda a, b: largest(np.asarray(a) - np.asarray(b)) / largest(a), model, again)
    assert (
        max(jax.tree.leaves(away)) < 1 / 16 and away.mtp.eh_proj.weight == 0 < away.mtp.block.mlp.experts.up_proj.weight
    )


FOUR_BITS = dict(num_bits=4, type="int", strategy="group", group_size=32, symmetric=True, dynamic=False, actorder=None)
GROUPS = {"group_0": dict(targets=["Linear"], weights=FOUR_BITS, input_activations=None, output_activations=None)}
INT4 = dict(
    quant_method="compressed-tensors", format="pack-quantized", quantization_status="compressed", kv_cache_scheme=None,
    config_groups=GROUPS, ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"],
)  # fmt: skip


@pytest.fixture(scope="module")
def int4(tmp_path_factory):
    """Returns folders of K2 Thinking, K2.5, and of a checkpoint of the numbers that these stand for.

    The values are unpacked here word by word, as compressed-tensors does.
    """
    name, root, random = "deepseek3-kimi", tmp_path_factory.mktemp("int4"), np.random.RandomState(4)
    changes = dict(moe_intermediate_size=64, model_type="kimi_k2", torch_dtype="bfloat16")
    packed, plain = {}, {}
    for tensor, shape in tiny.deepseek3.shapes(tiny.CONFIGS[name] | changes).items():
        value = tiny.deepseek3.values(tensor, random.standard_normal(shape))
        kind = np.float32 if tensor.endswith("_bias") else ml_dtypes.bfloat16
        if ".experts." not in tensor:
            packed[tensor] = plain[tensor] = value.astype(kind)
            continue
        words = random.randint(-(2**31), 2**31, (shape[0], shape[1] // 8)).astype(np.int32)
        scales = random.uniform(0.01, 0.04, (shape[0], shape[1] // 32)).astype(kind)
        codes = np.stack([(words >> 4 * n & 15) - 8 for n in range(8)], axis=-1).reshape(shape)
        plain[tensor] = (codes * scales.astype(np.float32).repeat(32, axis=1)).astype(kind)
        packed |= {f"{tensor}_packed": words, f"{tensor}_scale": scales, f"{tensor}_shape": np.int32(shape)}
    text = tiny.CONFIGS[name] | changes | {"quantization_config": INT4}
    sees = dict(
        architectures=["KimiK25ForConditionalGeneration"], model_type="kimi_k25", text_config=text, eos_token_id=3,
        vision_config={"vt_hidden_size": 8}, tie_word_embeddings=False, media_placeholder_token_id=5,
    )  # fmt: skip
    tower = {f"{part}.weight": np.ones((2, 2), np.float32) for part in ("vision_tower.a", "mm_projector.proj.0")}
    nested = {f"language_model.{tensor}": value for tensor, value in packed.items()} | tower
    files = {"packed": (text, packed), "nested": (sees, nested), "plain": (tiny.CONFIGS[name] | changes, plain)}
    for file, (config, tensors) in files.items():
        (root / file).mkdir()
        (root / file / "config.json").write_text(json.dumps(config))
        safetensors.numpy.save_file(tensors, root / file / "model.safetensors", metadata={"format": "pt"})
    return root


def experts_of(model):
    return dict(surgery.modules(model, AbstractExpertLinear))


@pytest.mark.thorough
def test_int4_is_read_as_stored(int4):
    """Experts in four bits are dequantised while they are read, or stay as they are, and stand for the same numbers."""
    plain = zoo.load(int4 / "plain")
    assert same(zoo.load(int4 / "packed"), plain) and same(zoo.load(int4 / "nested"), plain)
    others = lambda model: [x for _, x in surgery.modules(model, (AbstractLinear, Embedding, RMSNorm))]
    for dtype in (None, "float32"):
        floats, kept = (zoo.load(int4 / "packed", dtype=dtype, quantize=quantize) for quantize in (None, "stored"))
        assert same(zoo.load(int4 / "nested", dtype=dtype, quantize="stored"), kept)
        assert same(others(kept), others(floats))
        for (path, want), (_, codes) in zip(experts_of(floats).items(), experts_of(kept).items(), strict=True):
            assert type(codes) is QuantizedExpertLinear and codes.shape == want.shape, path
            assert codes.weight.nbytes * 2 == want.weight.size and codes.scale.dtype == want.weight.dtype
            assert same(dequantize_int4(codes.weight, codes.scale), want.weight), path
    close(packed(kept)[0], packed(floats)[0], terms=MODEL)
    split = zoo.load(int4 / "packed", dtype="float32", quantize="stored", mesh="fsdp=2,tensor=2,expert=2")
    assert same(split, kept) and not experts_of(split).popitem()[1].weight.sharding.is_fully_replicated


dequantize_int4 = jax.jit(lambda weight, scale: dequantize_weight(weight, scale, "int4"))


def test_int4_is_saved_as_stored(int4, tmp_path):
    model = zoo.load(int4 / "nested", quantize="stored")
    zoo.save(on_host(model), tmp_path)
    before, after = convert.tensors.open_tensors(int4 / "packed"), convert.tensors.open_tensors(tmp_path)
    assert before.keys() == after.keys()
    for name, tensor in before.items():
        assert (tensor.dtype, tensor.shape) == (after[name].dtype, after[name].shape), name
        assert tensor.view().tobytes() == after[name].view().tobytes(), name
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "kimi_k2" and saved["eos_token_id"] == 3 and "vision_config" not in saved
    assert "model.layers.0.mlp.up_proj" in saved["quantization_config"]["ignore"]
    assert same(zoo.load(tmp_path, quantize="stored"), model) and same(zoo.load(tmp_path), zoo.load(int4 / "plain"))
    with pytest.raises(ValueError, match="holds weights in int4"):
        zoo.save(model, tmp_path, fp8=True)


@pytest.mark.thorough
def test_adapters_over_int4(int4):
    """Experts' adapters have the gradients that they have over the floats that the codes stand for."""

    @eqx.filter_jit
    def gradients(linear, x):
        a, b = (np.random.RandomState(1).standard_normal(shape).astype("f") for shape in ((12, 2, 32), (12, 64, 2)))
        sizes = jnp.full(12, 2)
        return jax.grad(lambda ab: jnp.sum(jnp.sin(LoRAExpertLinear(linear, *ab, 0.1)(x, sizes))))((a, b))

    x, loaded = np.random.RandomState(2).standard_normal((24, 32)).astype("f"), []
    for quantize in None, "stored":
        experts = experts_of(zoo.load(int4 / "packed", dtype="float32", quantize=quantize))
        loaded.append(jax.tree.map(lambda leaf: leaf[0], experts["layers.period.0.mlp.experts.up_proj"]))
    wanted, got = (gradients(linear, x) for linear in loaded)
    for one, other in zip(wanted, got, strict=True):
        assert np.abs(one).max() > 0
        close(other, one, terms=100)


def test_what_cannot_stay_as_it_is_stored(int4, tmp_path):
    config = json.loads((int4 / "packed" / "config.json").read_text())
    tensors = safetensors.numpy.load_file(int4 / "packed" / "model.safetensors")

    def load(changes, weights=FOUR_BITS, dtype=None):
        groups = {"group_0": dict(targets=["Linear"], weights=weights)}
        changed = config | dict(quantization_config=INT4 | dict(config_groups=groups))
        (tmp_path / "config.json").write_text(json.dumps(changed))
        safetensors.numpy.save_file(tensors | changes, tmp_path / "model.safetensors")
        zoo.load(tmp_path, dtype=dtype, quantize="stored")

    with pytest.raises(ValueError, match=r"_scale in .* is bfloat16; float16 cannot hold .* choose dtype='float32'"):
        load({}, dtype="float16")
    scale = "model.layers.1.mlp.experts.3.up_proj.weight_scale"
    with pytest.raises(ValueError, match=r"experts.3.up_proj.weight in .* holds nothing but zeros"):
        load({scale: np.zeros_like(tensors[scale])})
    with pytest.raises(ValueError, match=r"experts.3.up_proj.weight_scale in .* holds NaN or infinities"):
        load({scale: np.full_like(tensors[scale], np.nan)})
    rows = {name: np.ascontiguousarray(x[:, :1]) for name, x in tensors.items() if name.endswith("_scale")}
    with pytest.raises(ValueError, match=r"experts.0.*_proj.weight in .* cannot stay as it is stored"):
        load(rows, FOUR_BITS | dict(group_size=None, strategy="channel"))


def test_kimi(tmp_path):
    """Kimi has another model_type, code of its own that is not needed, and stale tensors."""
    name = "deepseek3-kimi"
    folder = tiny.write(tmp_path / "kimi", name, model_type="kimi_k2", auto_map={"AutoConfig": "remote.Config"})
    stale = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    safetensors.numpy.save_file(tiny.tensors(name) | stale, folder / "model.safetensors")
    model = zoo.load(folder)
    assert model.config == zoo.config(tiny.write(tmp_path / "v3", name))
    assert error(packed(model)[0], tiny.golden()[name]) < 1e-4
    zoo.save(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["model_type"] == "kimi_k2" and "auto_map" not in saved


def test_glm_flash(load, tmp_path):
    """GLM-4.7-Flash has other defaults than V3, and its file in transformers lists its dense layers."""
    name = "deepseek3-glm"
    zoo.save(on_host(load(name)), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["model_type"] == "glm4_moe_lite" and saved["architectures"] == ["Glm4MoeLiteForCausalLM"]
    assert saved["mlp_layer_types"] == ["dense", "sparse", "sparse"]
    read = lambda **changes: read_config(deepseek3.FAMILY, tiny.CONFIGS[name] | changes)
    assert read(mlp_layer_types=["dense", "dense", "sparse"]) == read(first_k_dense_replace=2)
    for kinds in (["sparse", "dense", "sparse"], ["dense", "sparse"], "dense"):
        with pytest.raises(ValueError, match="does not list all layers, the dense ones first"):
            read(mlp_layer_types=kinds)
    plain = {key: value for key, value in tiny.CONFIGS[name].items() if key not in deepseek3.FLASH}
    assert dataclasses.asdict(read_config(deepseek3.FAMILY, plain)).items() >= deepseek3.FLASH.items()
    config = zoo.config("glm4.7-flash")
    size = lambda *parts: sum(x.size for x in jax.tree.leaves(skeleton(deepseek3.FAMILY, config, parts)))
    copies = 2 * config.vocab_size * config.hidden_size
    assert size("mtp") - size() + copies == 1_278_094_656, "the tensors that the Hub shows beyond the model's"


@pytest.mark.thorough
def test_kimi_trains(tmp_path, monkeypatch):
    """Kimi trains from tiktoken.model alone, and its export has that file, too."""
    devices(monkeypatch, 1)
    source = test_tiktoken.write(tiny.write(tmp_path / "kimi", "deepseek3-kimi", model_type="kimi_k2", vocab_size=527))
    (tmp_path / "a.jsonl").write_text('{"text": "hello world"}\n' * 40)
    command(
        "train.pretrain", "--model", source, "--data", tmp_path / "a.jsonl", "--out", tmp_path / "run", "--seq-len", 16,
        "--batch", 8, "--steps", 1,
    )  # fmt: skip
    exported = tmp_path / "run" / "model"
    assert zoo.tokenizer(exported).encode("hello") == zoo.tokenizer(source).encode("hello")
    assert zoo.config(exported) == zoo.config(source)
