"""Llama 4 beyond parity: chunks and their caches, checkpoints with a vision tower, and every form of config.json."""

import dataclasses
import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import convert.tensors
import zoo
from tests.close import close
from tests.zoo import tiny
from tests.zoo.programs import TOKENS, decode, error, forward, init_cache, noise, on_host, packed
from tests.zoo.tiny.llama4 import Llama4
from zoo.config import read, write
from zoo.models import llama4
from zoo.nn import moe
from zoo.nn.cache import KV, WindowKV


FACTS = pathlib.Path(__file__).parents[3] / "shared" / "models"
NAMES = tuple(tiny.MODULES["llama4"].CONFIGS)
GOLDEN = tiny.golden()


@pytest.fixture(scope="module")
def model(load):
    return load("llama4")


@pytest.mark.parametrize("name", NAMES)
def test_of_a_multimodal_checkpoint_the_text_model_is_read_and_saved(folders, tmp_path, name):
    text, wrapped = folders[name], Llama4(name).write(tmp_path / "wrapped")
    model = zoo.load(wrapped)
    assert model.config == zoo.config(text)
    zoo.save(on_host(model), tmp_path / "saved")
    before, after = convert.tensors.open_tensors(text), convert.tensors.open_tensors(tmp_path / "saved")
    assert before.keys() == after.keys()
    assert all(before[key].view().tobytes() == after[key].view().tobytes() for key in before)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "llama4_text" and config["architectures"] == ["Llama4ForCausalLM"]
    assert not config.keys() & {"text_config", "vision_config", "image_token_index"}
    assert zoo.config(tmp_path / "saved") == model.config


@pytest.mark.live
def test_transformers_saves_the_same_names(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs transformers and torch")
    config = tiny.CONFIGS["llama4-alternating"]
    transformers.Llama4ForCausalLM(transformers.Llama4TextConfig(**config)).save_pretrained(tmp_path)
    theirs = {tensor.name: tensor.shape for tensor in convert.tensors.open_tensors(tmp_path).values()}
    assert theirs == tiny.MODULES["llama4"].shapes(config)
    assert zoo.load(tmp_path).config == read(llama4.FAMILY, config)


@pytest.mark.live
@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
@pytest.mark.parametrize("name", ["llama4-scout", "llama4-maverick"])
def test_transformers_5_reads_and_writes_the_same_config(name):
    transformers = pytest.importorskip("transformers", reason="needs transformers and torch")
    released = transformers.Llama4Config(**json.loads((FACTS / f"{name}.json").read_text())["config"])
    seeing, blind = zoo.config(name), dataclasses.replace(zoo.config(name), vision=None)
    for config, expected in ((released, seeing), (released.text_config, blind)):
        assert read(llama4.FAMILY, json.loads(config.to_json_string())) == expected
    text, ours = released.text_config.to_dict(), write(blind, llama4.FAMILY, np.dtype(np.float32))
    back = transformers.Llama4TextConfig(**json.loads(json.dumps(ours))).to_dict()
    fields = set(ours) & set(text) - {"architectures"}
    assert {key: back[key] for key in fields} == {key: text[key] for key in fields}


def test_fp8_maverick_is_refused(tmp_path):
    stored = dict(quant_method="compressed-tensors", format="float-quantized")
    folder = Llama4("llama4-alternating").write(tmp_path / "fp8", quantization_config=stored)
    with pytest.raises(ValueError, match=r"'compressed-tensors'.*Load another repository"):
        zoo.load(folder)


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(layer_types=["sliding_attention"] * 8), "sliding_attention.*full_attention and chunked_attention"),
        (dict(no_rope_layers=[1, 0]), "fewer entries than the 8 layers"),
        (dict(for_llm_compressor=True), "for_llm_compressor=True"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        zoo.load(tiny.write(tmp_path, "llama4-alternating", **changes))


def test_a_model_without_experts():
    config = read(llama4.FAMILY, tiny.CONFIGS["llama4"] | dict(moe_layers=[], interleave_moe_layer_step=0))
    model = eqx.filter_eval_shape(lambda: llama4.Model(config, key=jax.random.key(0)))
    assert all(isinstance(block.feed_forward, llama4.MLP) for block in model.layers.period)


def test_a_token_sees_its_chunk_and_no_more():
    """With chunks of 8 in every layer, a token affects only the tokens after it in its own chunk."""
    chunked = dict(num_hidden_layers=2, no_rope_layers=[1, 1])
    config = read(llama4.FAMILY, tiny.CONFIGS["llama4"] | chunked)
    model, tokens = noise(lambda: llama4.Model(config, key=jax.random.key(0))), np.array(tiny.TOKENS)
    tokens[:, 11] += 1
    changed = np.asarray(forward(model, jnp.asarray(tokens))) != np.asarray(forward(model, TOKENS))
    assert np.flatnonzero(np.any(changed, axis=(0, 2))).tolist() == [11, 12, 13, 14, 15]


def test_chunked_layers_keep_one_chunk():
    """36 layers of Scout keep the last 8,192 positions, and 12 keep all 131,072: 30 % of a full cache."""
    model = eqx.filter_eval_shape(lambda: llama4.Model(zoo.config("llama4-scout"), key=jax.random.key(0)))
    cache = eqx.filter_eval_shape(lambda: model.init_cache(1, 131_072, jnp.bfloat16))[1]
    assert [type(part) for part in cache] == [WindowKV, WindowKV, WindowKV, KV]
    assert [part.k.shape for part in cache] == [(12, 1, 8192, 8, 128)] * 3 + [(12, 1, 131_072, 8, 128)]


@pytest.mark.thorough
def test_prefill_in_pieces(model):
    """Pieces may begin and end anywhere in a chunk of 8, and be shorter or longer than it."""
    start, parts, cache = 0, [], init_cache(model, 2, 40)
    for size in (5, 11, 1, 11, 1, 11):
        index = np.broadcast_to(np.arange(11), (2, 11))  # one program for all, with padding
        tokens = np.take(tiny.TOKENS, np.minimum(start + index[0], 39), axis=1)
        at = np.where(index < size, start + index, -1)
        logits, cache = decode(model, jnp.asarray(tokens), cache, jnp.asarray(at))
        parts.append(np.asarray(logits)[:, :size])
        start += size
    assert error(np.concatenate(parts, axis=1), GOLDEN["llama4"]) < 1e-4


@pytest.mark.thorough
def test_padding_is_harmless(model):
    """A row of padding alone is finite, and leaves the cache unchanged."""
    positions = jnp.asarray(np.array([range(11), [-1, -2, -9, -8, -10_000, *[-1] * 6]]))
    logits, cache = decode(model, TOKENS[:, :11], init_cache(model, 2, 40), positions)
    logits = np.asarray(logits)
    assert np.all(np.isfinite(logits))
    assert error(logits[0], GOLDEN["llama4"][0, :11]) < 1e-4
    positions = np.where(np.arange(11) < 1, [[30], [0]], -1)
    logits, _ = decode(model, TOKENS[:, :11], cache, jnp.asarray(positions))
    assert error(np.asarray(logits)[1, :1], GOLDEN["llama4"][1, :1]) < 1e-4


@pytest.mark.thorough
def test_what_the_routers_report(load):
    segments = jnp.asarray(np.where(np.arange(40) < 30, 1, 0)[None].repeat(2, axis=0))
    head, period, tail = packed(load("llama4-lists-new"), segments=segments)[2]
    assert head == (None,) and [isinstance(report, moe.Routing) for report in (*period, *tail)] == [True, False, True]
    for routing, layers in ((period[0], (2,)), (tail[0], ())):
        assert routing.load.shape == (*layers, 4)
        assert np.allclose(routing.tokens, 60) and np.allclose(np.asarray(routing.load).sum(-1), 120)
        close(np.asarray(routing.probability).sum(-1), 60, terms=100)
