"""What is DeepSeek's alone: two forms of latent attention, routers and their bias, one more token, 8 bits."""

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
from tests.zoo import tiny
from train.step import cross_entropy
from zoo import deepseek2, deepseek3, surgery
from zoo.lora import LoRALinear
from zoo.quantized import StoredLinear


TOKENS, KEY = jnp.asarray(tiny.TOKENS), jax.random.key(0)
E4M3 = ml_dtypes.float8_e4m3fn

forward = eqx.filter_jit(lambda model, tokens: model(tokens))
hidden = eqx.filter_jit(lambda model, tokens, **kwargs: model.hidden(tokens, **kwargs))
further = eqx.filter_jit(lambda model, x, following, **kwargs: model.further(x, following, **kwargs))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny.write(tmp_path_factory.mktemp("deepseek3"), "deepseek3")


def abstract(make, config):
    return eqx.filter_eval_shape(lambda: make(config, key=KEY))


# Attention.


@pytest.mark.parametrize("name", ["deepseek-v2-lite", "deepseek-v3", "kimi-k2"])
def test_the_cache_holds_576_numbers_a_token_and_layer(name):
    config = zoo.config(name)
    model = abstract(zoo.registry.family_of(config).Model, config)
    cache = eqx.filter_eval_shape(lambda: model.init_cache(3, 1000, jnp.bfloat16))
    stored = sum(x.size for x in jax.tree.leaves(cache) if x.dtype == jnp.bfloat16)
    assert stored == config.num_hidden_layers * 3 * 1000 * (512 + 64)


@pytest.mark.parametrize("surgeon", ["none", "int8", "lora"])
@pytest.mark.parametrize("family", [deepseek2, deepseek3])
def test_absorbed_equals_expanded(family, surgeon, monkeypatch):
    """One token is absorbed; with padding beside it, it is expanded."""
    config = zoo._config.read(family, tiny.CONFIGS[family.__name__.removeprefix("zoo.")])
    attention = eqx.filter_jit(family.Attention)(config, key=KEY)
    attention = jax.tree.map(lambda a: 10 * a, attention)  # weights of about 0.2, for else every token looks everywhere
    if surgeon == "int8":
        attention = surgery.map_linears(attention, lambda m: StoredLinear(m, "int8"))
    if surgeon == "lora":
        adapt = functools.partial(LoRALinear.new, rank=3, alpha=3.0)
        attention = surgery.map_linears(attention, adapt, "kv_b_proj", key=KEY)
        attention = eqx.tree_at(lambda m: m.kv_b_proj.b, attention, jax.random.normal(KEY, (4 * 22, 3)))
    seen, run = [], kernels.attention
    monkeypatch.setattr(
        kernels, "attention", lambda q, k, v, **kw: seen.append((k.shape, v.shape)) or run(q, k, v, **kw)
    )
    attend = eqx.filter_jit(lambda x, cache, positions: attention(x, cache, positions, None))

    x, empty = jax.random.normal(KEY, (2, 14, 32)), zoo.cache.LatentKV.empty(1, 2, 16, 24, 8, jnp.float32)
    before, at = jnp.array([[*range(12)], [*range(7), *[-1] * 5]]), jnp.array([[12], [7]])
    _, cache = attend(x[:, :12], empty, before)
    absorbed, one = attend(x[:, 12:13], cache, at)
    expanded, other = attend(x[:, 12:], cache, jnp.concatenate([at, -jnp.ones_like(at)], axis=1))
    assert seen[1:] == [((2, 16, 1, 32), (2, 16, 1, 24)), ((2, 16, 4, 18), (2, 16, 4, 12))]
    assert jnp.abs(expanded).max() > 1
    assert jnp.abs(absorbed - expanded[:, :1]).max() < 1e-5 * jnp.abs(expanded).max()
    assert (one.c_kv == other.c_kv).all() and (one.k_pe == other.k_pe).all()


@pytest.mark.parametrize(
    "name, frequencies, scale",
    [
        ("deepseek-v2", {8: 0.1, 16: 0.0055, 24: 2.5e-5, 31: 3.33380353e-06}, 0.1147213868),
        ("deepseek-v3", {8: 0.1, 16: 0.0055, 24: 2.5e-5, 31: 3.33380353e-06}, 0.1352337789),
        ("kimi-k2", {8: 0.0668740347, 16: 0.00447213603, 24: 9.34593027e-06, 31: 8.76441277e-07}, 0.1308607999),
    ],
)
def test_yarn(name, frequencies, scale):
    """Against what transformers makes of the released configurations."""
    config = zoo.config(name)
    attention = abstract(zoo.registry.family_of(config).Attention, config)
    ours, magnitude = attention.rotary.frequencies()
    assert ours.shape == (32,) and magnitude == 1
    assert all(math.isclose(ours[i], value, rel_tol=1e-6) for i, value in frequencies.items())
    assert math.isclose(attention.scale, scale, rel_tol=1e-9)


def test_without_yarn_the_scale_is_plain():
    config = dataclasses.replace(zoo.config("deepseek-v3"), rope_scaling=None)
    assert abstract(deepseek3.Attention, config).scale == 192**-0.5


# Routers.


def choose(scores, config, group_score, hidden_score):
    """The experts chosen for a token, by plain search."""
    groups = np.split(np.arange(len(scores)), config.n_group)
    kept = sorted(groups, key=lambda group: group_score(scores[group]))[-config.topk_group :]
    allowed = set(np.concatenate(kept).tolist())
    masked = [score if expert in allowed else hidden_score for expert, score in enumerate(scores)]
    return set(np.argsort(masked)[-config.num_experts_per_tok :].tolist())


class Named(eqx.Module):
    """Experts each of whom returns a vector that names it."""

    names: jax.Array

    def __call__(self, x, sizes):
        return jnp.repeat(self.names, sizes, axis=0, total_repeat_length=len(x))


@eqx.filter_jit
def route(layer, x):
    """The weight of each expert for each token, and the report."""
    silent = eqx.tree_at(lambda m: m.shared_experts.down_proj.weight, layer, replace_fn=jnp.zeros_like)
    named = Named(jnp.eye(layer.config.n_routed_experts, x.shape[1]))
    y, routing = eqx.tree_at(lambda m: m.experts, silent, named)(x[None], None)
    return y[0, :, : layer.config.n_routed_experts], routing


def layer_of(family, **changes):
    """A mixture of experts."""
    config = tiny.CONFIGS[family.__name__.removeprefix("zoo.")] | dict(rope_scaling=None) | changes
    layer = eqx.filter_jit(family.MoE)(zoo._config.read(family, config), key=KEY)
    return eqx.tree_at(lambda m: m.gate.weight, layer, replace_fn=lambda w: 10 * w)


@pytest.mark.parametrize("topk_method", ["greedy", "group_limited_greedy"])
def test_v2_router(topk_method):
    layer, x = layer_of(deepseek2, topk_method=topk_method), jax.random.normal(KEY, (50, 32))
    weights, routing = route(layer, x)
    scores = np.asarray(jax.nn.softmax(x @ layer.gate.weight.T))
    config = layer.config
    if topk_method == "greedy":
        config = dataclasses.replace(config, n_group=1, topk_group=1)
    for token, got in zip(scores, weights, strict=True):
        chosen = choose(token, config, np.max, 0)
        want = [4.0 * score if expert in chosen else 0 for expert, score in enumerate(token)]
        assert np.allclose(got, want, rtol=1e-5)
    assert np.allclose(routing.probability, scores.sum(axis=0), rtol=1e-5)
    assert routing.load.tolist() == (weights > 0).sum(axis=0).tolist() and routing.load.sum() == 50 * 3


@pytest.mark.parametrize("norm_topk_prob", [True, False])
@pytest.mark.parametrize("level", [0.0, -3.0])
def test_v3_router(norm_topk_prob, level):
    """With biases so low that an unchosen group of zeros would win."""
    layer, x = layer_of(deepseek3, norm_topk_prob=norm_topk_prob), jax.random.normal(KEY, (50, 32))
    bias = level + 0.3 * jax.random.normal(jax.random.key(1), (12,))
    layer = eqx.tree_at(lambda m: m.gate.e_score_correction_bias.value, layer, bias)
    weights, routing = route(layer, x)
    scores, bias, changed = np.asarray(jax.nn.sigmoid(x @ layer.gate.weight.T)), np.asarray(bias), 0
    best_two = lambda group: np.sort(group)[-2:].sum()
    for token, got in zip(scores, weights, strict=True):
        chosen = choose(token + bias, layer.config, best_two, -np.inf)
        changed += chosen != choose(token, layer.config, best_two, -np.inf)
        total = token[list(chosen)].sum() if norm_topk_prob else 1
        want = [2.5 * score / total if expert in chosen else 0 for expert, score in enumerate(token)]
        assert np.allclose(got, want, rtol=1e-5)
    assert changed > 10, "the bias matters"
    assert np.allclose(routing.probability, (scores / scores.sum(axis=1, keepdims=True)).sum(axis=0), rtol=1e-5)
    assert routing.load.tolist() == (weights > 0).sum(axis=0).tolist() and routing.load.sum() == 50 * 3


def test_padding_does_not_count(folder):
    model, segments = zoo.load(folder), jnp.where(jnp.arange(40) < 30, 1, 0)[None].repeat(2, axis=0)
    (head, (routing,), tail) = hidden(model, TOKENS, segments=segments)[1]
    assert head == (None,) and tail == ()
    assert (routing.tokens == 60).all() and (routing.load.sum(axis=1) == 180).all()
    assert np.allclose(routing.probability.sum(axis=1), 60)


def test_the_bias_stays_float32(folder, tmp_path):
    model = zoo.load(folder, dtype="bfloat16")
    gate = model.layers.period[0].mlp.gate
    assert gate.weight.dtype == jnp.bfloat16 and gate.e_score_correction_bias.value.dtype == jnp.float32
    assert surgery.cast(model, jnp.float16).layers.period[0].mlp.gate.e_score_correction_bias.value.dtype == jnp.float32
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    zoo.save(model, tmp_path)
    before, after = (convert.tensors.open_tensors(path)[name] for path in (folder, tmp_path))
    assert after.dtype == np.float32 and (before.view() == after.view()).all()


def test_rebalance_evens_the_load(folder):
    model = zoo.load(folder)

    @eqx.filter_jit
    def step(model):
        reports = model.hidden(TOKENS)[1]
        return deepseek3.rebalance(model, reports, 0.005), reports

    def imbalance(reports):
        """The largest load over the mean one."""
        load = reports[1][0].load
        return float((load.max(axis=1) / load.mean(axis=1)).max())

    moved, first = step(model)
    router = lambda model: model.layers.period[0].mlp.gate.e_score_correction_bias.value
    error = first[1][0].load.mean(axis=1, keepdims=True) - first[1][0].load
    assert np.allclose(router(moved) - router(model), 0.005 * np.sign(error), atol=1e-7)
    still = eqx.tree_at(router, moved, router(model))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), still, model))
    for _ in range(100):
        moved, last = step(moved)
    assert imbalance(first) > 2 and imbalance(last) < 1.3


# One more token.


def further_tensors(name="deepseek3"):
    """A checkpoint's tensors, with the module's."""
    tensors, random = tiny.tensors(name), np.random.RandomState(2)
    shapes = sorted(tiny.deepseek3.further_shapes(tiny.CONFIGS[name]).items())
    tensors |= {n: tiny.deepseek3.values(n, random.standard_normal(shape)).astype(np.float32) for n, shape in shapes}
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.3.shared_head.head.weight"] = tensors["lm_head.weight"]
    return tensors


@pytest.fixture(scope="module")
def with_further(tmp_path_factory):
    folder = tiny.write(tmp_path_factory.mktemp("further"), "deepseek3")
    safetensors.numpy.save_file(further_tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_further(with_further):
    """Against a model whose embedding is what the module's layer gets, and whose only layer is that one."""
    model, t = zoo.load(with_further, mtp=True), further_tensors()
    x, _ = hidden(model, TOKENS[:, :-1])
    ours, routing = further(model, x, TOKENS[:, 1:])

    def norm(y, name):
        return y / np.sqrt((y**2).mean(axis=-1, keepdims=True) + 1e-5) * t[f"model.layers.3.{name}.weight"]

    embedded = t["model.embed_tokens.weight"][tiny.TOKENS[:, 1:]]
    both = np.concatenate([norm(embedded, "enorm"), norm(np.asarray(x), "hnorm")], axis=-1)
    layer_input = both @ t["model.layers.3.eh_proj.weight"].T
    changes = dict(vocab_size=78, num_hidden_layers=1, first_k_dense_replace=0)
    single = eqx.filter_jit(deepseek3.Model)(dataclasses.replace(model.config, **changes), key=KEY)
    parts = lambda m: (m.embed_tokens.weight, m.layers.period[0], m.norm.weight)
    stacked = jax.tree.map(lambda a: a[None], model.mtp.block)
    last_norm = jnp.asarray(t["model.layers.3.shared_head.norm.weight"])
    single = eqx.tree_at(parts, single, (jnp.asarray(layer_input.reshape(78, 32)), stacked, last_norm))
    theirs, (_, (report,), _) = hidden(single, jnp.arange(78).reshape(2, 39))
    assert jnp.abs(ours - theirs).max() < 1e-5 * jnp.abs(theirs).max()
    assert (routing.load == report.load[0]).all()


@pytest.mark.live
def test_further_is_transformers(with_further, monkeypatch):
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
    model = zoo.load(with_further, mtp=True)
    x, _ = hidden(model, TOKENS[:, :-1])
    ours = model.unembed(further(model, x, TOKENS[:, 1:])[0])
    assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def test_without_mtp_nothing_changes(with_further, folder):
    logits = [forward(zoo.load(path), TOKENS) for path in (with_further, folder)]
    assert (logits[0] == logits[1]).all()
    with pytest.raises(ValueError, match="mtp=True"):
        zoo.load(with_further).further(jnp.zeros((1, 2, 32)), jnp.zeros((1, 2), int))
    assert (forward(zoo.load(with_further, mtp=True), TOKENS) == logits[0]).all()


def test_mtp_needs_the_module(folder, tmp_path):
    with pytest.raises(ValueError, match=r"lacks \d+ tensors .*model\.layers\.3\."):
        zoo.load(folder, mtp=True)
    with pytest.raises(ValueError, match="num_nextn_predict_layers=1, not 0"):
        zoo.load(tiny.write(tmp_path, "deepseek3-kimi"), mtp=True)


def test_mtp_shares_the_embedding(with_further, tmp_path):
    """The copies of embedding and head in the files are not looked at, with the module or without it."""
    tensors = further_tensors()
    tensors["model.layers.3.embed_tokens.weight"] = tensors["model.embed_tokens.weight"] + 1
    tiny.write(tmp_path, "deepseek3")
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    for mtp in (True, False):
        ours, theirs = zoo.load(tmp_path, mtp=mtp), zoo.load(with_further, mtp=mtp)
        assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), ours, theirs))


def test_a_layer_is_not_taken_for_mtp(tmp_path):
    """Where config.json says that there is none, one layer too many is one layer too many."""
    folder = tiny.write(
        tmp_path, "deepseek3-kimi", num_hidden_layers=tiny.CONFIGS["deepseek3-kimi"]["num_hidden_layers"] - 1
    )
    with pytest.raises(ValueError, match="no place for"):
        zoo.load(folder)


def test_mtp_round_trip(with_further, tmp_path):
    model = zoo.load(with_further, mtp=True)
    zoo.save(model, tmp_path)
    after, before = convert.tensors.open_tensors(tmp_path), further_tensors()
    copies = {"model.layers.3.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}
    assert after.keys() == before.keys() - copies
    assert all((after[name].view() == before[name]).all() for name in after)
    again = zoo.load(tmp_path, mtp=True)
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), again, model))


def test_mtp_has_rules_for_every_array(with_further):
    specs = surgery.partition_specs(zoo.load(with_further, mtp=True), deepseek3.PARTITION_RULES)
    assert specs.mtp.block.mlp.experts.up_proj.weight == jax.P("expert", "tensor", "fsdp")
    assert specs.mtp.block.mlp.shared_experts.up_proj.weight == jax.P("tensor", "fsdp")
    assert specs.layers.period[0].self_attn.q_a_proj.weight == jax.P("stage", None, "fsdp")


def test_mtp_loss(with_further):
    """Of packed documents as of separate ones: of token i + 2 at position i. Its gradient reaches all of the module."""
    model = zoo.load(with_further, mtp=True)
    segments = jnp.array([[1] * 19 + [2] * 19 + [0] * 2])
    positions = jnp.concatenate([jnp.arange(19), jnp.arange(19), jnp.zeros(2, int)])[None]
    batch = dict(tokens=TOKENS[:1], targets=jnp.roll(TOKENS[:1], -1, axis=1), segments=segments, positions=positions)
    batch["loss_mask"] = (segments != 0).astype(jnp.int32)
    loss = lambda model: cross_entropy(model, batch, mtp_weight=1.0)
    (_, (sums, _)), gradients = eqx.filter_jit(eqx.filter_value_and_grad(loss, has_aux=True))(model)

    documents = jnp.stack([TOKENS[0, :20], TOKENS[0, 19:39]])  # each with the token that its last one predicts
    x, _ = hidden(model, documents[:, :-1])
    logits = model.unembed(further(model, x, documents[:, 1:])[0])[:, :-1]
    want = -jnp.take_along_axis(jax.nn.log_softmax(logits), documents[:, 2:, None], axis=2).sum()
    assert np.isclose(sums["mtp_loss"], want, rtol=1e-5)
    parts = jax.tree_util.tree_leaves_with_path(gradients.mtp)
    still = [surgery.path_name(path) for path, gradient in parts if not jnp.abs(gradient).max() > 0]
    assert still == ["block.mlp.gate.e_score_correction_bias.value"]


def test_rebalance_with_mtp(with_further):
    model = zoo.load(with_further, mtp=True)
    x, reports = hidden(model, TOKENS[:, :-1])
    moved = deepseek3.rebalance(model, (reports, further(model, x, TOKENS[:, 1:])[1]), 0.25)
    bias = lambda model: model.mtp.block.mlp.gate.e_score_correction_bias.value
    assert set(np.abs(np.asarray(bias(moved) - bias(model))).round(6).tolist()) <= {0, 0.25}
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
PLAIN = ("norm", "gate.weight", "gate.e_score", "embed_tokens", "lm_head", "eh_proj")  # what is not in 8 bits


def in_blocks(name):
    return not any(part in name for part in PLAIN)


def spread(scales, shape):
    """The scale of every number."""
    return scales.repeat(128, axis=0).repeat(128, axis=1)[: shape[0], : shape[1]]


def write_wide(folder, tensors, **changes):
    tiny.write(folder, "deepseek3", **WIDE, **changes)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_fp8_is_read_as_stored(tmp_path):
    """The same as from a checkpoint of the numbers that it stands for."""
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
    assert jax.tree.all(jax.tree.map(lambda a, b: a.dtype == b.dtype and (a == b).all(), *models))
    logits = [forward(model, TOKENS) for model in models]
    assert jnp.abs(logits[0]).max() > 1 and (logits[0] == logits[1]).all()


def test_fp8_round_trip(tmp_path):
    shapes = tiny.deepseek3.shapes(tiny.CONFIGS["deepseek3"] | WIDE)
    shapes |= tiny.deepseek3.further_shapes(tiny.CONFIGS["deepseek3"] | WIDE)
    shapes = {name: shape for name, shape in shapes.items() if "3.embed_tokens" not in name and "head.head" not in name}
    random = np.random.RandomState(3)
    tensors = {
        name: tiny.deepseek3.values(name, random.standard_normal(s)).astype(np.float32) for name, s in shapes.items()
    }
    model = zoo.load(write_wide(tmp_path / "plain", tensors), mtp=True)
    zoo.save(model, tmp_path / "fp8", fp8=True)
    assert json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"] == QUANTIZED
    saved = convert.tensors.open_tensors(tmp_path / "fp8")
    assert saved.keys() == tensors.keys() | {f"{name}_scale_inv" for name in tensors if in_blocks(name)}
    assert {name for name in tensors if saved[name].dtype == E4M3} == {name for name in tensors if in_blocks(name)}
    for name in filter(in_blocks, tensors):
        scale = spread(saved[f"{name}_scale_inv"].view(), tensors[name].shape)
        error = np.abs(saved[name].view().astype(np.float32) * scale - tensors[name])
        # Half a unit in the last of 4 binary digits; below 2**-6, where these are as fine as they get, of 2**-9.
        assert (error <= np.maximum(np.abs(tensors[name]) / 16, scale * 2.0**-10) * (1 + 1e-5)).all()
    again = zoo.load(tmp_path / "fp8", dtype="float32", mtp=True)
    assert jax.tree.structure(again) == jax.tree.structure(model)
    away = jax.tree.map(lambda a, b: jnp.abs(a - b).max() / jnp.abs(a).max(), model, again)
    assert (
        max(jax.tree.leaves(away)) < 1 / 16 and away.mtp.eh_proj.weight == 0 < away.mtp.block.mlp.experts.up_proj.weight
    )


def test_kimi(tmp_path):
    """Another model_type, code of its own that is not needed, and tensors left from it."""
    name = "deepseek3-kimi"
    folder = tiny.write(tmp_path / "kimi", name, model_type="kimi_k2", auto_map={"AutoConfig": "remote.Config"})
    stale = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    safetensors.numpy.save_file(tiny.tensors(name) | stale, folder / "model.safetensors")
    model = zoo.load(folder)
    assert model.config == zoo.config(tiny.write(tmp_path / "v3", name))
    logits, golden = forward(model, TOKENS), tiny.golden()[name]
    assert np.abs(logits - golden).max() < 1e-4 * np.abs(golden).max()
    zoo.save(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert saved["model_type"] == "kimi_k2" and "auto_map" not in saved
