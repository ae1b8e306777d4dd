"""MiMo V2 Flash's own: how far its windows reach, caches of two shapes, and the two forms of its config.json."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import on_host, same
from zoo.config import read as read_config
from zoo.models import mimo_v2_flash
from zoo.nn.cache import WindowKV


FAMILY, NAME = tiny.MODULES["mimo_v2_flash"], "mimo_v2_flash"
CONFIG, NEW = tiny.CONFIGS[NAME], tiny.CONFIGS["mimo_v2_flash-new"]
SIZE = CONFIG["sliding_window_size"]


def read(hub=CONFIG, **changes):
    return read_config(mimo_v2_flash.FAMILY, hub | changes)


@pytest.mark.thorough
def test_the_window_is_the_size_and_the_token_itself():
    """A changed token changes what is one position before the window's edge, and at the edge, but not beyond it."""
    config = read(num_hidden_layers=1, hybrid_layer_pattern=[1], moe_layer_freq=[0])
    assert config.window(0) == SIZE + 1
    model = mimo_v2_flash.Model(config, key=jax.random.key(0))
    one = jnp.asarray(tiny.TOKENS[:1, : 2 * SIZE])
    both = model.hidden(jnp.concatenate([one, one.at[0, 0].set((one[0, 0] + 1) % 64)]))[0]
    changed = np.abs(np.asarray(both[0] - both[1])).max(axis=-1) > 1e-6
    assert changed.tolist() == [distance <= SIZE for distance in range(2 * SIZE)]
    assert changed[SIZE - 1] and changed[SIZE] and not changed[SIZE + 1]


def test_forms_of_the_window():
    """`sliding_window` counts the token's own position, as in transformers, and `sliding_window_size` wins over it."""
    without = {k: v for k, v in CONFIG.items() if k not in ("sliding_window", "sliding_window_size")}
    own = read() == read(sliding_window=SIZE + 1) == read(without, sliding_window=SIZE + 1)
    assert own and read(without, sliding_window=SIZE, attention_chunk_size=SIZE - 1).window(1) == SIZE
    assert zoo.config("mimo-v2-flash").window(1) == 129


@pytest.mark.live
def test_the_window_is_transformers(folders):
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    for name in FAMILY.CONFIGS:
        assert transformers.AutoConfig.from_pretrained(folders[name]).sliding_window == zoo.config(
            folders[name]
        ).window(1)


def test_caches():
    """Full layers cache 4 heads; sliding ones 8, of their window alone, here with 3 positions for rejected drafts."""
    c = zoo.config("mimo-v2-flash")
    model = eqx.filter_eval_shape(lambda: mimo_v2_flash.Model(c, key=jax.random.key(0)))
    init = lambda model: zoo.nn.cache.init_cache(model, 2, c.max_position_embeddings, jnp.bfloat16, widen=3)
    caches = [cache for part in eqx.filter_eval_shape(init, model) for cache in part]
    assert {(cache.k.shape[1:], cache.v.shape[1:]) for cache in caches} == {
        ((2, 262_144, 4, 192), (2, 262_144, 4, 128)),
        ((2, 129 + 3, 8, 192), (2, 129 + 3, 8, 128)),
    }
    assert sum(cache.k.shape[0] for cache in caches if isinstance(cache, WindowKV)) == 39


def test_ropes():
    """A third of each head turns; the frequencies are the recorded ones."""
    c = zoo.config("mimo-v2-flash")
    full, sliding = (mimo_v2_flash.Rotary(64, theta).frequencies()[0] for theta in (c.rope_theta, c.swa_rope_theta))
    assert int(c.partial_rotary_factor * c.head_dim) == 64
    close({i: full[i] for i in (1, 31)}, {1: 0.617528737, 31: 3.23871546e-07}, terms=32)
    close({i: sliding[i] for i in (1, 31)}, {1: 0.749894202, 31: 0.00013335215}, terms=32)


def test_forms_of_the_config(load, tmp_path):
    """The form of transformers 5 means the same; what is saved has both, of which neither needs the other."""
    zoo.save(on_host(load("mimo_v2_flash-new")), tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved.items() >= {key: NEW[key] for key in ("layer_types", "mlp_layer_types", "rms_norm_eps")}.items()
    assert saved["rope_parameters"] == NEW["rope_parameters"]
    assert saved["hybrid_layer_pattern"] == [0, 1, 0, 1, 0, 1] and saved["swa_v_head_dim"] == 16
    newer = {"layer_types", "mlp_layer_types", "rms_norm_eps", "rope_parameters"}
    assert read({k: v for k, v in saved.items() if k not in newer}) == read(saved) == read(NEW)
    assert read(NEW, hybrid_layer_pattern=[0, 1, 0, 1, 0, 1]) == read(NEW)
    assert read(attention_value_scale=None) == read(attention_value_scale=1.0) != read()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(attention_projection_layout="fused_qkv"), "attention_projection_layout='fused_qkv', but"),  # V2.5
        (dict(sliding_window=SIZE - 1), "sliding_window=4 contradicts sliding_window_size=5"),
        (dict(swa_head_dim=32), "swa_head_dim says head_dim=32, which contradicts head_dim=24"),
        (dict(layer_types=["full_attention"] * 3), r"contradicts hybrid_layer_pattern=\[0, 1, 1\]"),
        (dict(hybrid_layer_pattern=[0, 1]), "hybrid_layer_pattern has 2 entries"),
        (dict(hybrid_layer_pattern=[0, 1, 2]), "hybrid_layer_pattern"),
        (dict(swa_num_key_value_heads=3), "no multiple of swa_num_key_value_heads=3"),
        (dict(add_full_attention_sink_bias=True), "implements only False"),
        (dict(n_shared_experts=1), "implements only None"),
        (dict(mlp_layer_types=["dense", "moe", "moe"]), "mlp_layer_types=.*needs one of dense and sparse"),
        (dict(rope_parameters=NEW["rope_parameters"]), "rope_parameters says rope_theta=20000.0"),
        (dict(rope_parameters=dict(rope_type="default")), "one partial_rotary_factor"),
        (dict(n_group=5), "cannot be chosen from topk_group"),
    ],
)
def test_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        read(**changes)


def test_tensors_of_other_models(load, tmp_path):
    """Modules for further tokens are skipped; V2.5's one matrix for queries, keys and values is refused by name."""
    tensors = tiny.tensors(NAME)
    folder = tiny.write(tmp_path / "checkpoint", NAME)
    write = lambda more: safetensors.numpy.save_file(tensors | more, folder / "model.safetensors", {"format": "pt"})
    write({"model.mtp.layers.0.enorm.weight": np.ones(32, np.float32)})
    assert same(zoo.load(folder), load(NAME))
    write({"model.layers.0.self_attn.qkv_proj.weight": np.ones((176, 32), np.float32)})
    with pytest.raises(ValueError, match=r"model\.layers\.0\.self_attn\.qkv_proj\.weight"):
        zoo.load(folder)
