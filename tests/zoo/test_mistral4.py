"""Mistral Small 4's own features: files with a tower, the rope's keys, and queries that grow."""

import json

import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.zoo import make_golden, tiny
from tests.zoo.programs import error, on_host, packed, same
from zoo.config import read
from zoo.models import mistral3, mistral4
from zoo.registry import family_for


VISION = dict(image_token_index=10, vision_config={"model_type": "pixtral"}, projector_hidden_act="gelu")


def wrapped(name, **changes):
    """Returns the config.json of a model with a tower."""
    text = {key: value for key, value in tiny.CONFIGS[name].items() if key not in ("architectures", "eos_token_id")}
    outer = dict(architectures=["Mistral3ForConditionalGeneration"], model_type="mistral3", eos_token_id=7)
    return outer | VISION | {"text_config": text} | changes


@pytest.mark.parametrize("beginning", ["language_model.model.", "model.language_model."])
def test_files_with_a_tower(load, tmp_path, beginning):
    """The text model is read from both forms of names, and saved as a text model."""
    (tmp_path / "config.json").write_text(json.dumps(wrapped("mistral4")))
    rename = lambda name: beginning + name.removeprefix("model.") if name.startswith("model.") else name
    tensors = {rename(name): tensor for name, tensor in tiny.tensors("mistral4").items()}
    if beginning == "language_model.model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    tower = {f"{part}.a.weight": np.ones((2, 2), np.float32) for part in ("vision_tower", "multi_modal_projector")}
    safetensors.numpy.save_file(tensors | tower, tmp_path / "model.safetensors")
    model = zoo.load(tmp_path)
    assert same(model, load("mistral4"))
    zoo.save(on_host(model), tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert (saved["model_type"], saved["architectures"]) == ("mistral4", ["Mistral4ForCausalLM"])
    assert saved["eos_token_id"] == 7 and saved["rope_parameters"]["llama_4_scaling_beta"] == 0.5
    with pytest.raises(ValueError, match="mistral4 has no part 'vision'"):
        zoo.load(tmp_path, parts=("vision",))


def test_the_family_of_a_file_with_a_tower():
    """It is told by the type of the text model."""
    assert family_for(wrapped("mistral4")) is mistral4.FAMILY
    assert family_for({"model_type": "mistral3", "text_config": {"model_type": "mistral"}}) is mistral3.FAMILY
    assert family_for({"model_type": "mistral3"}) is mistral3.FAMILY
    assert family_for({"model_type": "other", "text_config": {"model_type": "mistral4"}}) is None


def change(**changes):
    """Returns the config of a file with these changes."""
    return read(mistral4.FAMILY, tiny.CONFIGS["mistral4"] | changes)


def test_null_is_false():
    assert change().norm_topk_prob and not change(norm_topk_prob=None).norm_topk_prob
    with pytest.raises(ValueError, match="rope_interleave=False, but mistral4 implements only True"):
        change(rope_interleave=None)


def test_keys_of_the_rope():
    """A file without rope_parameters has those of Mistral Small 4. What is not YaRN's is read, or must fit."""
    rope = tiny.CONFIGS["mistral4"]["rope_parameters"]
    released, bare = zoo.config("mistral-small-4"), change(rope_parameters=None)
    assert (bare.rope_scaling, bare.llama_4_scaling_beta) == (released.rope_scaling, released.llama_4_scaling_beta)
    without = {key: value for key, value in rope.items() if key != "llama_4_scaling_beta"}
    assert change(rope_parameters=without).llama_4_scaling_beta is None
    with pytest.raises(ValueError, match=r"partial_rotary_factor=0.25, but qk_rope_head_dim=8 of 16 turn"):
        change(rope_parameters=rope | dict(partial_rotary_factor=0.25))
    with pytest.raises(ValueError, match="rope_scaling=None; mistral4 needs YarnScaling"):
        change(rope_parameters=dict(rope_type="default", rope_theta=1e4))


@pytest.mark.live
def test_left_padding(load, theirs):
    """transformers counts padding among the positions by which queries grow, so its padded rows are other ones."""
    torch = pytest.importorskip("torch")
    padded, mask = np.zeros((1, 40), int), np.ones((1, 40), int)
    padded[0, 9:], mask[0, :9] = tiny.TOKENS[0, :31], 0
    with torch.no_grad():
        shifted = theirs("mistral4")(torch.tensor(padded), attention_mask=torch.tensor(mask)).logits[0, 9:].numpy()
    alone = make_golden.logits(theirs("mistral4"))[0, :31]
    assert error(shifted, alone) > 1e-3
    ours = np.asarray(packed(load("mistral4"), padded.repeat(2, axis=0), mask.repeat(2, axis=0))[0])
    assert error(ours[0, 9:], alone) < 1e-4
