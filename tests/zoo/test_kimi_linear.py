"""Kimi Linear's own features: delta attention, against the recurrence in float64; its config.json; its biases."""

import equinox as eqx
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import convert.tensors
import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo import make_golden, tiny
from tests.zoo.programs import TOKENS, noise, packed, same
from zoo import surgery
from zoo.config import read, write
from zoo.models import kimi_linear


CONFIG = read(kimi_linear.FAMILY, tiny.CONFIGS["kimi_linear"])


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def recurrence(layer, x):
    """Computes the layer's output for one document [seq, embed], token by token in float64, by the paper's formulas."""
    w = {surgery.path_name(p).removesuffix(".weight"): np.asarray(a, np.float64) for p, a in leaves(layer)}
    size, width = CONFIG.linear_attn_config.num_heads, CONFIG.linear_attn_config.short_conv_kernel_size
    heads = lambda a: a.reshape(size, -1)
    state, before = 0, {name: np.zeros((width - 1, 32)) for name in "qkv"}
    for t in x:
        inputs = {name: np.vstack([before[name], w[f"{name}_proj"] @ t]) for name in "qkv"}
        before = {name: a[1:] for name, a in inputs.items()}
        sums = {name: np.sum(a.T * w[f"{name}_conv1d"][:, 0], axis=1) for name, a in inputs.items()}
        q, k, v = (heads(a * sigmoid(a)) for a in sums.values())
        q, k = (a / np.sqrt(np.sum(a**2, axis=1, keepdims=True) + 1e-6) for a in (q, k))
        rate = np.logaddexp(0, heads(w["f_b_proj"] @ w["f_a_proj"] @ t + w["dt_bias.value"]))
        state = state * np.exp(-np.exp(w["A_log.value"][0, 0]) * rate)[..., None]
        error = v - np.einsum("hkv,hk->hv", state, k)
        state = state + sigmoid(w["b_proj"] @ t)[:, None, None] * k[..., None] * error[:, None]
        y = np.einsum("hkv,hk->hv", state, q) / np.sqrt(q.shape[1])
        y = y / np.sqrt(np.mean(y**2, axis=1, keepdims=True) + CONFIG.rms_norm_eps) * w["o_norm"]
        yield w["o_proj"] @ np.ravel(y * sigmoid(heads(w["g_b_proj"] @ w["g_a_proj"] @ t)))


def leaves(tree):
    return jax.tree_util.tree_leaves_with_path(tree)


def test_delta_attention_is_the_recurrence():
    """Two documents in a row, across chunks of tokens, with padding after them, have the same outputs as alone.

    transformers' own code lets the second document see the first.
    """
    layer = noise(lambda: kimi_linear.DeltaAttention(CONFIG, key=jax.random.key(0)))
    layer = eqx.tree_at(lambda m: m.dt_bias.value, layer, replace_fn=lambda a: a - 3)  # so that states last
    x = np.random.RandomState(0).standard_normal((1, 75, 32)).astype(np.float32)
    segments = np.repeat([1, 2, 0], [37, 33, 5])[None]
    y = eqx.filter_jit(lambda layer, x: layer(x, None, Tokens(segments=jnp.asarray(segments)))[0])(layer, x)
    documents = [np.stack([*recurrence(layer, x[0, part].astype(np.float64))]) for part in (np.s_[:37], np.s_[37:70])]
    want = np.concatenate(documents)
    assert np.abs(want).max() > 1
    close(np.asarray(y)[0, :70], want, terms=300)
    leaked = np.stack([*recurrence(layer, x[0, 36:39].astype(np.float64))])[1:]
    assert np.abs(leaked - want[37:39]).max() > 0.01 * np.abs(want).max(), "one token more would be seen"


def test_decays_and_biases_stay_in_float32():
    model = jax.eval_shape(lambda: surgery.cast(kimi_linear.Model(CONFIG, key=jax.random.key(0)), jnp.bfloat16))
    names = {surgery.path_name(path).split(".")[-2] for path, a in leaves(model) if a.dtype == jnp.float32}
    assert names == {"A_log", "dt_bias", "e_score_correction_bias"}


@pytest.mark.thorough
def test_rebalance(load):
    model = load("kimi_linear")
    moved = kimi_linear.rebalance(model, packed(model)[2], 0.25)
    biases = lambda model: np.concatenate([np.ravel(a) for p, a in leaves(model) if "e_score" in surgery.path_name(p)])
    assert set(np.abs(biases(moved) - biases(model)).round(6).tolist()) == {0, 0.25} and len(biases(model)) == 5 * 12


def changed(**changes):
    return read(kimi_linear.FAMILY, tiny.CONFIGS["kimi_linear"] | changes)


def test_both_forms_of_the_file():
    """transformers writes its own keys beside the Hub's; saving writes only the Hub's, which other programs read."""
    kinds = ["linear_attention" if n in (1, 2, 4) else "full_attention" for n in range(1, 7)]
    theirs = dict(layer_types=kinds, linear_head_dim=8, linear_num_heads=4, linear_conv_kernel_dim=4)
    theirs |= dict(mlp_layer_types=["dense"] + ["sparse"] * 5, qk_head_dim=18)
    assert changed(**theirs) == CONFIG
    assert changed(**theirs, linear_attn_config=None) == CONFIG
    hub = write(CONFIG, kimi_linear.FAMILY, np.dtype(ml_dtypes.bfloat16))
    assert hub["linear_attn_config"] == {
        "head_dim": 8, "num_heads": 4, "short_conv_kernel_size": 4, "kda_layers": (1, 2, 4),
        "full_attn_layers": (3, 5, 6),
    }  # fmt: skip
    assert not theirs.keys() & hub.keys()


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (dict(linear_num_heads=2), "it says num_heads twice, in linear_attn_config and outside of it"),
        (dict(layer_types=["full_attention"] * 6), "it says full_attn_layers twice|it says kda_layers twice"),
        (dict(num_hidden_layers=7), "each layer from 1 to num_hidden_layers=7 once in its full_attn_layers or kda"),
        (dict(mlp_layer_types=["sparse"] * 5 + ["dense"]), "needs 6 layers, of which the first are dense"),
        (dict(mlp_layer_types=["sparse"] * 6), "first_k_dense_replace and mlp_layer_types differ"),
        (dict(layer_types=3), "has the key 'layer_types'"),
        (dict(linear_attn_config=3), "says linear_attn_config=3; kimi_linear needs LinearAttention"),
        (dict(linear_attn_config={"head_dim": 8}), "kimi_linear needs full_attn_layers, kda_layers there"),
        (dict(linear_attn_config={"heads": 8}), "kimi_linear has no heads there"),
        (dict(mla_use_nope=False), "mla_use_nope=False, but kimi_linear implements only True"),
        (dict(q_lora_rank=20), "q_lora_rank=20, but kimi_linear implements only None"),
        (dict(num_expert_group=5), "cannot be chosen from topk_group 1 of num_expert_group 5"),
    ],
)
def test_what_is_refused(changes, sentence):
    with pytest.raises(ValueError, match=sentence):
        changed(**changes)


def test_sizes_inside_are_checked():
    for wrong in (0, "8", 2.5):
        nested = tiny.CONFIGS["kimi_linear"]["linear_attn_config"] | dict(head_dim=wrong)
        with pytest.raises(ValueError, match="kimi_linear's head_dim needs"):
            changed(linear_attn_config=nested)


@pytest.mark.live
def test_what_transformers_saves(theirs, load, tmp_path):
    """transformers names the tensors of the dense layer as if it had experts."""
    theirs("kimi_linear").save_pretrained(tmp_path)
    assert "model.layers.0.block_sparse_moe.up_proj.weight" in convert.tensors.open_tensors(tmp_path)
    assert same(zoo.load(tmp_path), load("kimi_linear"))
    assert make_golden.logits(tmp_path).shape == (*TOKENS.shape, 64)
