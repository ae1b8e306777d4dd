"""GPT-3's recorded facts, GPT-2's files as OpenAI published them, the last position, and models without weights."""

import dataclasses
import json
import math
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.close import close
from tests.zoo import make_golden, tiny
from tests.zoo.programs import MODEL, TOKENS, forward, noise, same
from zoo import registry
from zoo.config import read
from zoo.models import gpt3


FACTS = pathlib.Path(__file__).parents[3] / "shared" / "models"


@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
def test_facts():
    """The facts use MaxText's names."""
    facts = {path.stem: json.loads(path.read_text()) for path in FACTS.glob("gpt3-*.json")}
    assert facts.keys() == registry.TOKENIZERS.keys()
    for name, fact in facts.items():
        c = zoo.config(name)
        ours = dict(
            vocab_size=c.vocab_size, base_emb_dim=c.hidden_size, base_mlp_dim=c.intermediate_size,
            base_num_decoder_layers=c.num_hidden_layers, base_num_query_heads=c.num_attention_heads,
            base_num_kv_heads=c.num_key_value_heads, head_dim=c.head_dim,
            trainable_position_size=c.max_position_embeddings, normalization_layer_epsilon=c.layer_norm_epsilon,
        )  # fmt: skip
        assert ours == {key: fact["config"][key] for key in ours}
        model = eqx.filter_eval_shape(lambda c=c: gpt3.Model(c, key=jax.random.key(0)))
        assert sum(math.prod(x.shape) for x in jax.tree.leaves(model)) == fact["verified_params"]


def test_the_released_config():
    """GPT-2 XL's config, which has the most keys, is read."""
    hub = dict(
        activation_function="gelu_new", architectures=["GPT2LMHeadModel"], attn_pdrop=0.1, bos_token_id=50256,
        embd_pdrop=0.1, eos_token_id=50256, initializer_range=0.02, layer_norm_epsilon=1e-05, model_type="gpt2",
        n_ctx=1024, n_embd=1600, n_head=25, n_layer=48, n_positions=1024, n_special=0, output_past=True,
        predict_special_tokens=True, resid_pdrop=0.1, summary_activation=None, summary_first_dropout=0.1,
        summary_proj_to_labels=True, summary_type="cls_index", summary_use_proj=True, vocab_size=50257,
        task_specific_params={"text-generation": {"do_sample": True, "max_length": 50}},
    )  # fmt: skip
    assert read(gpt3.FAMILY, hub) == zoo.config("gpt2-xl")


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(activation_function="relu"), "activation_function='relu'"),
        (dict(scale_attn_by_inverse_layer_idx=True), "scale_attn_by_inverse_layer_idx=True"),
        (dict(tie_word_embeddings=False), "tie_word_embeddings=False"),
    ],
)
def test_configs_that_are_refused(tmp_path, changes, words):
    with pytest.raises(ValueError, match=words):
        zoo.load(tiny.write(tmp_path, "gpt3", **changes))


def test_names_without_the_prefix_and_stale_buffers(load, tmp_path):
    """Names may be those of openai-community/gpt2, with the buffers that old versions of transformers add."""
    folder = tiny.write(tmp_path / "bare", "gpt3")
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in tiny.tensors("gpt3").items()}
    tensors |= {f"h.{n}.attn.bias": np.tri(40, dtype=bool)[None, None] for n in range(3)}
    tensors |= {f"h.{n}.attn.masked_bias": np.array(-1e4, np.float32) for n in range(3)}
    tensors["lm_head.weight"] = tensors["wte.weight"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    assert same(zoo.load(folder), load("gpt3"))
    tensors["h.0.attn.q_bias"] = tensors["ln_f.bias"]
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no place for: transformer\.h\.0\.attn\.q_bias"):
        zoo.load(folder)


def test_positions_end(load):
    model = load("gpt3")
    with pytest.raises(ValueError, match="41 positions are asked for, but the model has learned 40"):
        model(jnp.zeros((1, 41), jnp.int32))
    with pytest.raises(ValueError, match="41 positions"):
        model.init_cache(1, 41, jnp.float32)
    packed = jnp.asarray(np.arange(60)[None] % 30)  # two documents in a row that is longer than the table
    hidden = eqx.filter_eval_shape(lambda model: model.hidden(jnp.zeros((1, 60), int), positions=packed)[0], model)
    assert hidden.shape == (1, 60, 32)


@pytest.mark.thorough
def test_a_model_without_published_weights(tmp_path, monkeypatch):
    """The model is built, saved with the tokenizer of another family's checkpoint, and loaded; transformers agrees."""
    tiny.write_tokenizer(tiny.write(tmp_path / "tokenizer", "qwen3-tied"))
    monkeypatch.setitem(registry.TOKENIZERS, "gpt3-52k", str(tmp_path / "tokenizer"))
    tokenizer = zoo.tokenizer("gpt3-52k")
    config = dataclasses.replace(zoo.config("gpt3-52k"), source=tokenizer.folder)
    model = noise(lambda: gpt3.Model(config, key=jax.random.key(0)), 0.1)
    assert len(zoo.generate(model, tokenizer, ["ab"], max_new_tokens=3)) == 1
    zoo.save(model, tmp_path / "saved")
    hub = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert hub["model_type"] == "gpt2" and hub["eos_token_id"] == 2
    loaded = zoo.load(tmp_path / "saved")
    assert loaded.config == config and zoo.tokenizer(tmp_path / "saved").vocab_size == 64
    assert same(loaded, model)


@pytest.mark.live
def test_transformers_loads_a_model_built_here(tmp_path):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    model = gpt3.Model(zoo.config("gpt3-52k"), key=jax.random.key(0))
    zoo.save(model, tmp_path)
    theirs = make_golden.logits(tmp_path)
    close(forward(model, TOKENS), theirs, terms=MODEL)
