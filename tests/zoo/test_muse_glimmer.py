"""Muse Glimmer beyond the contracts of test_parity.py and test_vision.py: what its config.json means and refuses."""

import json

import pytest

import zoo
from tests.zoo import tiny


TEXT = tiny.CONFIGS["muse_glimmer"]
CASE = tiny.SEEING["muse_glimmer"]


def test_tied_embeddings_are_said_beside_text_config(tmp_path):
    text = CASE.config()["text_config"] | dict(tie_word_embeddings=True)
    assert not zoo.config(CASE.write_config(tmp_path, text_config=text)).tie_word_embeddings
    assert zoo.config(CASE.write_config(tmp_path, tie_word_embeddings=True)).tie_word_embeddings


@pytest.mark.parametrize(
    "changes, said",
    [
        (dict(layer_rope_theta=[5000.0] * 7 + [3.0]), "layer_rope_theta has 3.0, but only 0 and rope_theta"),
        (dict(layer_rope_theta=[0]), "layer_rope_theta has 1 entries"),
        (dict(layer_types=["full_attention"]), "layer_types has 1 entries"),
        (dict(sliding_window=None), "sliding_attention, which needs a sliding_window"),
    ],
)
def test_refused(tmp_path, changes, said):
    (tmp_path / "config.json").write_text(json.dumps(TEXT | changes))
    with pytest.raises(ValueError, match=said):
        zoo.config(tmp_path)
