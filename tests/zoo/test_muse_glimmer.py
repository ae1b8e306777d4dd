"""Muse Glimmer's two forms of config.json and of tensors' names, and what its config refuses."""

import json

import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.zoo import tiny
from tests.zoo.programs import error, packed


GOLDEN = tiny.golden()
TEXT = tiny.CONFIGS["muse_glimmer"]


def test_published_form(tmp_path):
    """The text model is loaded from a checkpoint with a tower, and only the tie beside text_config counts."""
    outer = dict(model_type="muse_glimmer", architectures=["MuseGlimmerForConditionalGeneration"])
    nested = outer | dict(
        text_config=TEXT | dict(tie_word_embeddings=True), vision_config=dict(model_type="muse_glimmer_vision"),
        image_token_id=60, video_token_id=61, out_hidden_size=32, projector_hidden_act="gelu", projector_hidden_size=8,
    )  # fmt: skip
    tensors = {n.replace("model.", "model.language_model."): x for n, x in tiny.tensors("muse_glimmer").items()}
    towers = ("vision_tower.ln_pre.weight", "vision_adapter.fc1.weight", "vision_projection.weight")
    tensors |= {f"model.{name}": np.ones(2, np.float32) for name in towers}
    (tmp_path / "config.json").write_text(json.dumps(nested))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
    assert error(packed(zoo.load(tmp_path))[0], GOLDEN["muse_glimmer"]) < 1e-4


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(layer_rope_theta=[5000.0] * 7 + [3.0]), "layer_rope_theta has 3.0"),
        (dict(layer_rope_theta=[0]), "layer_rope_theta has 1 entries"),
        (dict(layer_types=["full_attention"]), "layer_types has 1 entries"),
    ],
)
def test_refused(tmp_path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps(TEXT | changes))
    with pytest.raises(ValueError, match=said):
        zoo.config(tmp_path)
