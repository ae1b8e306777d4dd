"""Gemma 3 beyond parity and the contract of test_vision.py: image tokens that see each other, and the text model of a
checkpoint with a tower, which is read under every name in use, and saved as a text model.
"""

import json

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import zoo
from tests.zoo import make_golden, tiny
from tests.zoo.programs import error, same
from zoo.models import gemma3


OUTER = dict(
    model_type="gemma3", architectures=["Gemma3ForConditionalGeneration"], boi_token_index=61, eoi_token_index=62,
    image_token_index=63, mm_tokens_per_image=4, eos_token_id=[1, 9], torch_dtype="float32", initializer_range=0.02,
    vision_config=dict(model_type="siglip_vision_model", hidden_size=8, num_attention_heads=2),
)  # fmt: skip
BEGINNINGS = {  # prefixes of the text model's tensors, of its head and of the others
    "as released": ("language_model.model.", "language_model.lm_head.", ""),
    "as transformers 4.52 has it": ("model.language_model.", "lm_head.", "model."),
}
STRAY = ("vision_tower.vision_model.post_layernorm.weight", "multi_modal_projector.mm_input_projection_weight")


def wrap(folder, name, beginnings, **outer):
    """Writes the text checkpoint `name` as a part of a multimodal one."""
    text, head, other = BEGINNINGS[beginnings]
    plain = tiny.tensors(name)
    tensors = {head + "weight": plain.pop("lm_head.weight", plain["model.embed_tokens.weight"])}
    tensors |= {text + key.removeprefix("model."): value for key, value in plain.items()}
    tensors |= {other + key: np.ones(8, np.float16) for key in STRAY}
    folder.mkdir()
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    beside = ("architectures", "torch_dtype", "eos_token_id", "tie_word_embeddings")
    inner = {k: v for k, v in tiny.CONFIGS[name].items() if k not in beside}
    outer = dict(tie_word_embeddings=tiny.CONFIGS[name].get("tie_word_embeddings", True)) | outer
    (folder / "config.json").write_text(json.dumps(OUTER | dict(text_config=inner) | outer))
    return folder


def test_an_image_is_seen_both_ways(load_vision):
    """Without spans the logits of the prompts with images differ, so the tests above depend on them."""
    case = tiny.SEEING["gemma3-pattern"]
    golden = case.golden()

    @eqx.filter_jit
    def causal(model, tokens, images, features):
        x = model.embed_tokens(jnp.where(images.image < 0, tokens, 0)) * jnp.asarray(32**0.5)
        x, _, _ = model.layers(images.splice(x, features))
        return model.unembed(model.norm(x))

    arguments = jnp.asarray(case.prompts), case.images(), jnp.asarray(golden["features"])
    logits = causal(load_vision("gemma3-pattern"), *arguments)
    assert error(logits[0], golden["logits"][0]) < 1e-4
    assert all(error(logits[n], golden["logits"][n]) > 1e-2 for n in (1, 2))


@pytest.mark.parametrize("name", ["gemma3-pattern", "gemma3-new"])
def test_the_text_model_is_read_and_saved(folders, load, tmp_path, name):
    """The text model is read under any name, with a head that repeats the embedding, whatever the tower's tensors."""
    for n, beginnings in enumerate(BEGINNINGS):
        wrapped = zoo.load(wrap(tmp_path / str(n), name, beginnings))
        assert wrapped.config == load(name).config and same(wrapped, load(name))
    zoo.save(wrapped, tmp_path / "saved")
    saved, text = (convert.tensors.open_tensors(folder) for folder in (tmp_path / "saved", folders[name]))
    assert saved.keys() == text.keys()
    assert all(saved[key].view().tobytes() == text[key].view().tobytes() for key in text)
    config = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert config["model_type"] == "gemma3_text" and config["architectures"] == ["Gemma3ForCausalLM"]
    assert config["eos_token_id"] == [1, 9]
    assert not config.keys() & {"text_config", "vision_config", "image_token_index", "rope_parameters"}
    assert zoo.config(tmp_path / "saved") == load(name).config


@pytest.mark.parametrize("name", ["gemma3-pattern", "gemma3-new"])
def test_standard_form_is_final(name):
    once = gemma3.standard_form(OUTER | dict(text_config=tiny.CONFIGS[name]))
    assert gemma3.standard_form(once) == once


def test_unknown_things_are_refused(tmp_path):
    with pytest.raises(ValueError, match="'sliding_window' beside text_config"):
        zoo.load(wrap(tmp_path / "key", "gemma3-new", "as released", sliding_window=8))
    folder = wrap(tmp_path / "tensor", "gemma3-new", "as released")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    safetensors.numpy.save_file(tensors | {"audio_tower.weight": np.ones(8)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"no place for: audio_tower\.weight"):
        zoo.load(folder)


def test_a_scaled_local_rope_is_refused(tmp_path):
    ropes = tiny.CONFIGS["gemma3-new"]["rope_parameters"]
    both = dict(full_attention=ropes["full_attention"], sliding_attention=ropes["full_attention"])
    with pytest.raises(ValueError, match="sliding_attention, whose rope it does not scale"):
        zoo.config(tiny.write(tmp_path / "model", "gemma3-new", rope_parameters=both))


def test_two_forms_of_ropes_are_refused(tmp_path):
    scaled = dict(rope_type="linear", factor=2.0)
    with pytest.raises(ValueError, match=r"rope_scaling=.* beside rope_parameters: give one of the two"):
        zoo.config(tiny.write(tmp_path / "model", "gemma3-new", rope_scaling=scaled))


@pytest.mark.parametrize("tokens", [0, -4, 8])
def test_tokens_of_an_image_are_a_square(tokens):
    with pytest.raises(ValueError, match="is not the square of a divisor of 64"):
        gemma3.VisionConfig(gemma3.SIGLIP, mm_tokens_per_image=tokens)


@pytest.mark.live
def test_what_transformers_saves(tmp_path):
    """transformers' own multimodal model, read by us, has the same logits of text."""
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    import torch

    vision = dict(
        model_type="siglip_vision_model", hidden_size=16, intermediate_size=24, num_hidden_layers=1,
        num_attention_heads=2, image_size=28, patch_size=14, vision_use_head=False,
    )  # fmt: skip
    config = transformers.Gemma3Config(
        text_config=tiny.CONFIGS["gemma3-pattern"], vision_config=vision, mm_tokens_per_image=4, image_token_index=64
    )
    torch.manual_seed(0)
    model = transformers.Gemma3ForConditionalGeneration(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.3)
    model.save_pretrained(tmp_path)
    ours = eqx.filter_jit(lambda model, tokens: model(tokens))(zoo.load(tmp_path), jnp.asarray(tiny.TOKENS))
    theirs = make_golden.logits(tmp_path)
    assert np.abs(ours - theirs).max() < 1e-4 * np.abs(theirs).max()
