"""Keys of config.json that are absent, null, or without effect on the model mean the same as in transformers."""

import dataclasses
import json
import logging
import re
import subprocess
import sys

import numpy as np
import pytest

import zoo
from convert.files import read_json
from tests import hurry
from tests.zoo import tiny
from zoo import registry
from zoo.config import read as read_config
from zoo.config import write as write_config
from zoo.models import nemotron_h
from zoo.nn.rope import DynamicScaling, Llama3Scaling, LongRopeScaling, YarnScaling
from zoo.nn.stack import Stack


def read(name, /, *without, **changes):
    """Returns the Config of a tiny checkpoint's config.json, without these keys and with these changes."""
    hub = {key: value for key, value in tiny.CONFIGS[name].items() if key not in without} | changes
    return read_config(registry.FAMILIES[hub["model_type"]], hub)


def test_the_same_key_absent_and_null():
    assert read("llama", "rms_norm_eps").rms_norm_eps == 1e-6
    assert read("llama", "num_key_value_heads").num_key_value_heads == 4
    assert (
        read("qwen3", "num_key_value_heads", num_attention_heads=32).num_key_value_heads == 32
    )  # transformers' default
    assert read("qwen3", num_key_value_heads=None).num_key_value_heads == 4
    assert read("qwen3", "head_dim", "max_window_layers").head_dim == 128
    assert read("deepseek3", "norm_topk_prob").norm_topk_prob
    assert not read("deepseek3", norm_topk_prob=None).norm_topk_prob
    with pytest.raises(ValueError, match="rope_interleave=False"):
        read("deepseek3", rope_interleave=None)


@pytest.mark.parametrize("key", ["rope_scaling", "text_config", "quantization_config"])
@pytest.mark.parametrize("value", [0, False, [], "", 3])
def test_objects_that_are_none(key, value):
    said = rf"says {key}={re.escape(repr(value))}; it needs an object in braces, or null"
    with pytest.raises(ValueError, match=said):
        read("llama", **{key: value})


def test_windows_of_qwen3_moe():
    """transformers ignores max_window_layers there: every layer slides."""
    config = read("qwen3_moe", use_sliding_window=True, sliding_window=4, max_window_layers=2)
    assert [config.window(n) for n in range(3)] == [4, 4, 4]


@pytest.mark.parametrize(
    "changes, scaling",
    [
        (dict(rope_scaling=dict(rope_type="yarn", factor=2.0)), YarnScaling(2.0, 64)),
        (
            dict(rope_scaling=dict(rope_type="yarn", factor=None, original_max_position_embeddings=16)),
            YarnScaling(4.0, 16),
        ),
        (dict(rope_scaling=dict(rope_type="yarn", factor=2), original_max_position_embeddings=8), YarnScaling(2.0, 8)),
        (
            dict(rope_scaling=dict(rope_type="llama3", factor=8, low_freq_factor=1, high_freq_factor=4)),
            Llama3Scaling(8.0, 1.0, 4.0, 64),
        ),
        (dict(rope_scaling=dict(type="dynamic", factor=3)), DynamicScaling(3.0, 64)),
        (
            dict(
                rope_scaling=dict(type="longrope", short_factor=[1] * 8, long_factor=[2] * 8),
                original_max_position_embeddings=16,
            ),
            LongRopeScaling((1.0,) * 8, (2.0,) * 8, 4.0, 16),
        ),
        (dict(rope_parameters=dict(rope_theta=5.0)), None),
        (dict(rope_parameters={}, rope_scaling={}), None),
        (
            dict(rope_scaling=dict(type="dynamic", factor=3), rope_parameters=dict(rope_type="linear", factor=2)),
            DynamicScaling(3.0, 64),
        ),
    ],
)
def test_rope(changes, scaling):
    config = read("llama-rope3", "rope_scaling", **dict(max_position_embeddings=64) | changes)
    assert config.rope_scaling == scaling
    written = write_config(config, zoo.llama.FAMILY, tiny.tensors("llama")["lm_head.weight"].dtype)
    assert read("llama-rope3", **written) == config


def test_longrope_of_phi():
    """LongRoPE has two older names. Its original context is 4096 unless the file says it beside `rope_scaling`."""
    hub = tiny.CONFIGS["phi3-long"]
    for name in "su", "yarn":
        assert read("phi3-long", rope_scaling=hub["rope_scaling"] | dict(type=name)) == read("phi3-long")
    config = read("phi3-long", "original_max_position_embeddings", max_position_embeddings=8192)
    assert (config.rope_scaling.original_max_position_embeddings, config.rope_scaling.factor) == (4096, 2.0)
    written = write_config(config, zoo.phi3.FAMILY, np.dtype(np.float32))
    assert written["original_max_position_embeddings"] == 4096
    assert read("phi3-long", **written) == config


def test_what_is_left_behind_is_named_in_one_line(tmp_path, load, folders, caplog):
    with caplog.at_level(logging.WARNING, "zoo"):
        model = zoo.load(folders["llama-dynamic"])
    (record,) = caplog.records
    skipped = "is_llama_config", "temperature", "transformers.js_config", "unsloth_fixed"
    file, reason = folders["llama-dynamic"] / "config.json", "skipped, since transformers 5.24.0 does not read them"
    assert record.getMessage() == f"{file}: {reason}: {', '.join(skipped)}"
    zoo.save(model, tmp_path)
    saved, stated = json.loads((tmp_path / "config.json").read_text()), tiny.CONFIGS["llama-dynamic"]
    stated = {k: v for k, v in stated.items() if k not in ("partial_rotary_factor", *skipped)}
    stated |= dict(num_key_value_heads=4)
    stated |= dict(rope_scaling=dict(rope_type="dynamic", factor=2.0), attention_bias=False, mlp_bias=False)
    assert saved == stated


def test_plans_of_layers():
    """A period becomes one run, with its first and last layers alone; a pattern without one becomes several runs."""
    assert Stack.plan(["full"] * 10_000) == (0, ((1, 10_000),))  # in linear time, like the next one
    assert Stack.plan([*"abcab"] * 2_000) == (0, ((5, 2_000),))
    assert Stack.plan("aaab" * 3 + "aa") == (0, ((4, 3),)) and Stack.plan("xx" + "ab" * 4 + "a") == (2, ((2, 4),))
    assert Stack.plan("aaa" + "b" * 8) == (3, ((1, 8),))  # a scan of three layers would save too little
    assert Stack.plan("abcdefgh") == (0, ((8, 1),)) and Stack.plan("a") == (0, ((1, 1),))
    patterns = {name: zoo.config(name).hybrid_override_pattern for name in nemotron_h.CONFIGS}
    assert Stack.plan(patterns["nemotron3-nano-30b-a3b"]) == (0, ((7, 5), (2, 3), (2, 1), (2, 4)))
    blocks = {name: len(p) - sum(n * (k - 1) for n, k in Stack.plan(p)[1]) for name, p in patterns.items()}
    assert blocks == {
        "nemotron-nano-9b-v2": 21, "nemotron-nano-9b-v2-base": 21, "nemotron3-nano-30b-a3b": 14,
        "nemotron3-nano-30b-a3b-base": 14, "nemotron3-super-120b-a12b": 24, "nemotron3.5-lightning-30b-a3b": 14,
    }  # fmt: skip

    def spared(kinds):
        """Returns the most blocks that one run saves, by a search through all runs."""
        n = len(kinds)
        runs = [(h, p, k) for h in range(n) for p in range(1, n - h) for k in range(2, (n - h) // p + 1)]
        return max((p * (k - 1) for h, p, k in runs if kinds[h : h + p] * k == kinds[h : h + p * k]), default=0)

    for text in ("aab", "abcabcab", "xabababy", "abacabad", "aaabaaab", "xyzabcabcabcz", "aabb", "abba", "abcxyabc"):
        start, runs = Stack.plan(text)
        assert max(n * (k - 1) for n, k in runs) == spared(text)
        end = start
        for n, k in runs:
            assert text[end : end + n] * k == text[end : end + n * k]
            end += n * k
        assert end <= len(text)


@pytest.mark.parametrize(
    "name, changes, words",
    [
        ("gpt3", dict(n_head=3), "n_embd 32 is no multiple of n_head 3"),
        ("qwen3_moe", dict(num_experts_per_tok=9), "num_experts_per_tok=9, which is more than num_experts=8"),
        ("deepseek3", dict(n_group=5), "experts cannot be chosen from topk_group . of n_group 5"),
        ("deepseek3", dict(num_experts_per_tok=7, topk_group=1), "experts cannot be chosen from topk_group 1"),
        ("gemma3-pattern", dict(sliding_window_pattern="2"), "sliding_window_pattern='2' is no number"),
        ("gemma3-pattern", dict(num_hidden_layers=10**9), "num_hidden_layers=1000000000 needs more than 0, and less"),
        ("gemma3", dict(query_pre_attn_scalar=True), "query_pre_attn_scalar=True; gemma3 needs int"),
        ("gemma3", dict(rope_scaling=dict(type="linear", factor=2.0)), "needs a rope_type"),
        ("gpt_oss", dict(rope_scaling="yarn"), "rope_scaling='yarn'; it needs an object"),
        ("llama", dict(num_attention_heads=2**40), "num_attention_heads=1099511627776; llama needs more than 0"),
        ("llama", dict(max_position_embeddings="64"), "max_position_embeddings='64'"),
        ("llama", dict(rope_interleaved=True), "rope_interleaved=True, but llama implements only False"),
        ("olmo3", dict(sliding_window=None), "sliding_attention, which needs a sliding_window"),
        ("olmo3", dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "beside rope_parameters"),
        ("phi3", dict(rope_scaling=dict(type="linear", factor=2.0)), "phi3 needs zoo.nn.rope.LongRopeScaling"),
        ("olmo3-new", dict(rope_parameters=dict(full_attention=dict(rope_theta=1e4))), "olmo3 needs one rope_theta"),
    ],
)
def test_refused(name, changes, words):
    with pytest.raises(ValueError, match=words):
        read(name, **changes)


@pytest.mark.live
@pytest.mark.parametrize("family", sorted(tiny.MODULES))
def test_defaults_are_transformers(family, tmp_path):
    """A config.json with only the required keys means the same as the full one that transformers makes of it."""
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers")
    configs = tiny.MODULES[family].CONFIGS.values()
    # Mixtures of Qwen3.5 and Qwen3-VL share a Config with dense models, and have the defaults of these.
    hub = next(hub for hub in configs if hub["model_type"] not in ("qwen3_5_moe_text", "qwen3_vl_moe_text"))
    module = registry.FAMILIES[hub["model_type"]]
    required = [f.name for f in dataclasses.fields(module.Config) if f.default is dataclasses.MISSING]
    wide = dict(
        hidden_size=1024, num_attention_heads=128, num_key_value_heads=128, n_routed_experts=256
    )  # equal to the defaults
    least = {key: wide.get(key, hub[key]) for key in required}
    if family == "qwen3_5":
        least["intermediate_size"] = 64  # for a dense model; mixtures share its Config and have none
    theirs = transformers.AutoConfig.for_model(hub["model_type"], **least)
    (tmp_path / "config.json").write_text(theirs.to_json_string(use_diff=False))
    full, least = read_json(tmp_path / "config.json"), least | {"model_type": hub["model_type"]}
    assert read_config(module, full) == read_config(module, least)
    for key in full.keys() & {f.name for f in dataclasses.fields(module.Config)} - least.keys():
        assert read_config(module, {k: v for k, v in full.items() if k != key}) == read_config(module, least), key


@pytest.mark.live
def test_changed_at_random():
    """Each of 250 changed files, of the 2,000 that `python -m tests.zoo.fuzz_config` makes, is refused in one sentence,
    or means the same as in transformers.
    """
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    command = [sys.executable, "-m", "tests.zoo.fuzz_config", "--mutations", "250"]
    done = subprocess.run(command, env=hurry.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    print(last)
    count = {kind: int(number) for number, kind in re.findall(r"(\d+) ([a-z ]+)", last)}
    assert min(count["refused"], count["equal"]) > 40 and count["different"] == count["tracebacks"] == 0
