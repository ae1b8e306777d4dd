"""Mistral's config.json beyond the contract of test_vision.py: every form of it, with a tower above the text model."""

import json

import numpy as np
import pytest

import zoo
from tests.zoo import seeing, tiny
from tests.zoo.seeing.mistral import BESIDE, TOWER
from tests.zoo.test_registry import FACTS
from zoo.config import read, write
from zoo.models import mistral


CASE = seeing.CHECKPOINTS["mistral"]


@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
@pytest.mark.parametrize("name", ["ministral3-3b", "ministral3-8b", "ministral3-14b"])
def test_facts(name):
    """These names end as the Hub's do, so that `test_registry.test_facts` does not find them."""
    facts = json.loads((FACTS / f"{name}.json").read_text())["config"]
    assert all(
        read(mistral.FAMILY, facts) == zoo.config(f"{name}-{kind}") for kind in ("base", "instruct", "reasoning")
    )


def test_text_for_long_contexts_beneath_a_tower(tmp_path):
    """Ministral 3's text part, as config.json is saved, in the form in which it was released."""
    text = {key: value for key, value in tiny.CONFIGS["ministral3"].items() if key not in BESIDE}
    config = zoo.config(CASE.write_config(tmp_path, text_config=text))
    assert config.llama_4_scaling_beta == 0.5 and config.vision is not None
    saved = write(config, mistral.FAMILY, np.dtype(np.float32))
    assert saved["architectures"] == ["Mistral3ForConditionalGeneration"]
    rope = {key: value for key, value in text["rope_parameters"].items() if key != "type"}
    assert saved["text_config"]["model_type"] == "ministral3" and "rope_scaling" not in saved["text_config"]
    assert rope.items() <= saved["text_config"]["rope_parameters"].items()
    text["rope_parameters"] = dict(rope_type="default", rope_theta=1.0, llama_4_scaling_beta=0.5)
    with pytest.raises(ValueError, match="llama_4_scaling_beta needs the original_max_position_embeddings"):
        zoo.config(CASE.write_config(tmp_path, text_config=text))


def test_other_forms_of_the_file(tmp_path):
    """A newer one is read alike; what is not implemented of the projector is refused, and an unknown key is."""
    vision = {key: value for key, value in TOWER.items() if key != "rope_theta"}
    newer = dict(vision_config=vision | dict(rope_parameters=dict(rope_theta=100.0, rope_type="axial")))
    expected = zoo.config(CASE.write_config(tmp_path / "older"))
    assert zoo.config(CASE.write_config(tmp_path, **newer, tie_word_embeddings=False)) == expected
    for changes, message in (
        (dict(vision_feature_layer=-2), "vision_feature_layer=-2, but only -1 is implemented"),
        (dict(multimodal_projector_bias=True), "multimodal_projector_bias=True, but only False"),
        (dict(audio_config={}), "'audio_config' beside text_config"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.config(CASE.write_config(tmp_path, **changes))
    with pytest.raises(ValueError, match=r'has no vision tower: leave parts=\("vision",\) out'):
        zoo.load(CASE.write(tmp_path, vision_config=None), parts=("vision",))
