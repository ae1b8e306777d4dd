"""Laguna's own: heads and ropes of each layer, and the keys of its files that repeat others."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import on_host
from zoo.config import read as read_config
from zoo.models import laguna


NAME = "laguna"
CONFIG, ELEMENTS = tiny.CONFIGS[NAME], tiny.CONFIGS["laguna-elements"]


def read(hub=CONFIG, **changes):
    return read_config(laguna.FAMILY, hub | changes)


@pytest.mark.parametrize(
    "name, full, magnitude",
    [
        ("laguna-xs-2", {1: 0.663601279, 8: 0.0275100935, 16: 2.20970851e-05}, 1.41588831),
        ("laguna-xs-2.1", {8: 0.0342941321, 16: 0.000293288584, 31: 9.41830649e-08}, 1.34657359),
    ],
)
def test_ropes(name, full, magnitude):
    """YaRN's frequencies of half a head in full layers are the recorded ones; in sliding layers whole heads turn."""
    rotary = zoo.config(name).rotary("full_attention")
    frequencies, factor = rotary.frequencies()
    assert rotary.dim == 64 and factor == pytest.approx(magnitude, rel=1e-7)
    close({i: frequencies[i] for i in full}, full, terms=32)
    assert zoo.config(name).rotary("sliding_attention") == zoo.nn.rope.Rotary(128, 10_000.0)


def test_heads_of_each_layer():
    """Full layers have 48 heads and cache all positions; sliding ones have 64 and cache 512; both have 8 of keys."""
    c = zoo.config("laguna-xs-2.1")
    model = eqx.filter_eval_shape(lambda: laguna.Model(c, key=jax.random.key(0)))
    blocks = (*model.layers.head, *model.layers.period, *model.layers.tail)
    heads = {(b.self_attn.window, b.self_attn.q_proj.shape[-2] // 128, b.self_attn.g_proj.shape[-2]) for b in blocks}
    assert heads == {(None, 48, 48), (512, 64, 64)}
    caches = jax.eval_shape(lambda: model.init_cache(1, c.max_position_embeddings, jnp.bfloat16))
    shapes = {cache.k.shape[1:] for part in caches for cache in part}
    assert shapes == {(1, 262_144, 8, 128), (1, 512, 8, 128)}
    assert c.attention_products(0, 8192) == 48 * 2 * 128 * 4096


def test_keys_that_repeat_others(load, tmp_path):
    """They may be absent, and are not saved; ropes are saved as transformers has them."""
    zoo.save(on_host(load(NAME)), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert not saved.keys() & {"partial_rotary_factor", "mlp_only_layers", "gating_types"}
    ropes = {kind: CONFIG["rope_parameters"][kind] for kind in ("full_attention", "sliding_attention")}
    assert saved["rope_parameters"] == ropes and saved["gating"] == "per-head"
    assert read(saved) == read() == read(gating="per-head")
    assert read(num_attention_heads=6, num_attention_heads_per_layer=None) != read()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(gating=False, gating_types=None), "gating=False"),
        (dict(gating="per-element"), r"gating_types=.* contradicts .*'per_element'"),
        (dict(partial_rotary_factor=1.0), "partial_rotary_factor=1.0 contradicts what other keys say, 0.5"),
        (dict(mlp_only_layers=[]), r"mlp_only_layers=\[\] contradicts"),
        (dict(mlp_layer_types=["sparse"] * 3, mlp_only_layers=None, layer_types=["full_attention"]), "has 1 entries"),
        (dict(num_attention_heads_per_layer=[4, 6, 5]), "has 5, which is no multiple of num_key_value_heads=2"),
        (dict(moe_apply_router_weight_on_input=True), "implements only False"),
        (dict(norm_topk_prob=False), "implements only True"),
    ],
)
def test_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        read(**changes)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(truncate=False), "has no truncate there"),  # transformers skips it there
        (dict(factor=None), "needs factor and original_max_position_embeddings"),
        (dict(rope_type="default"), 'numbers of YaRN in a rope of the rope_type "default"'),
        (dict(rope_type="linear"), "rope_type"),
        (dict(partial_rotary_factor=1.5), "at most 1, the whole head"),
        (dict(rope_theta=None), "needs rope_theta there"),
    ],
)
def test_refused_ropes(changes, words):
    ropes = ELEMENTS["rope_parameters"]
    with pytest.raises(ValueError, match=words):
        read(ELEMENTS, rope_parameters=ropes | dict(sliding_attention=ropes["sliding_attention"] | changes))
