"""Mistral Small 3 and Ministral 3 beyond the contract of test_vision.py: all forms of config.json, also of the text
model beneath a tower.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.zoo import make_golden, tiny
from tests.zoo.programs import TOKENS, error, forward, on_host
from tests.zoo.test_registry import FACTS
from tests.zoo.tiny.mistral3 import BESIDE, TOWER
from zoo.config import read, write
from zoo.models import mistral, mistral3


CASE = tiny.SEEING["mistral"]


@pytest.mark.skipif(not FACTS.is_dir(), reason="the recorded facts are not beside this checkout")
@pytest.mark.parametrize("name", ["ministral3-3b", "ministral3-8b", "ministral3-14b"])
def test_facts(name):
    """`test_registry.test_facts` does not find these names, because they end like the Hub's."""
    facts = json.loads((FACTS / f"{name}.json").read_text())["config"]
    assert all(
        read(mistral3.FAMILY, facts) == zoo.config(f"{name}-{kind}") for kind in ("base", "instruct", "reasoning")
    )


def test_without_its_tower_mistral_small_is_a_mistral(vision_folders, tmp_path):
    """The text model is saved as `zoo.models.mistral` reads it, with the same parameters, and computes the same."""
    text = zoo.load(vision_folders["mistral"])
    zoo.save(on_host(text), tmp_path)
    again = zoo.load(tmp_path)
    assert (type(text), type(again)) == (mistral3.Model, mistral.Model)
    ours, theirs = map(jax.tree_util.tree_leaves_with_path, (text, again))
    assert all(path == other and np.array_equal(a, b) for (path, a), (other, b) in zip(ours, theirs, strict=True))
    assert np.array_equal(forward(again, TOKENS), forward(text, TOKENS))


def test_text_for_long_contexts_beneath_a_tower(tmp_path):
    """Ministral 3's text config below a tower is saved in the form in which it was released."""
    text = {key: value for key, value in tiny.CONFIGS["ministral3"].items() if key not in BESIDE}
    config = zoo.config(CASE.write_config(tmp_path, text_config=text))
    assert config.llama_4_scaling_beta == 0.5 and config.vision is not None
    saved = write(config, mistral3.FAMILY, np.dtype(np.float32))
    assert saved["architectures"] == ["Mistral3ForConditionalGeneration"]
    rope = {key: value for key, value in text["rope_parameters"].items() if key != "type"}
    assert saved["text_config"]["model_type"] == "ministral3" and "rope_scaling" not in saved["text_config"]
    assert rope.items() <= saved["text_config"]["rope_parameters"].items()
    text["rope_parameters"] = dict(rope_type="default", rope_theta=1.0, llama_4_scaling_beta=0.5)
    with pytest.raises(ValueError, match="llama_4_scaling_beta needs the original_max_position_embeddings"):
        zoo.config(CASE.write_config(tmp_path, text_config=text))


ROPE = dict(  # transformers' for Ministral 3
    type="yarn", rope_theta=1e6, factor=16.0, original_max_position_embeddings=16384, max_position_embeddings=64,
    beta_fast=32.0, beta_slow=1.0, mscale_all_dim=1.0, mscale=1.0, llama_4_scaling_beta=0.1,
)  # fmt: skip
SAID = dict(rope_parameters=ROPE | dict(rope_type="yarn"))  # transformers' saved default
UNSAID = [{}, dict(rope_parameters=None), dict(rope_theta=5000.0), dict(rope_scaling=None)]
OLDER = dict(rope_scaling=ROPE | dict(llama_4_scaling_beta=0.5, original_max_position_embeddings=8))


def without_rope(folder, changes):
    """Writes the tiny Ministral 3 with these keys in place of its rope's, and without keys that have defaults."""
    tiny.write(folder, "ministral3")
    text = {key: value for key, value in tiny.CONFIGS["ministral3"].items() if key != "rope_parameters"}
    (folder / "config.json").write_text(json.dumps(text | changes))
    return folder


@pytest.mark.parametrize("changes", UNSAID)
def test_ministral_that_says_nothing_of_its_rope(changes, tmp_path):
    """A config without rope parameters means Ministral 3's own, and a `rope_theta` beside them is ignored."""
    said = zoo.config(without_rope(tmp_path, SAID))
    assert said.llama_4_scaling_beta == 0.1 and said.rope_theta == 1e6 and said.rope_scaling.factor == 16
    assert zoo.config(without_rope(tmp_path, changes)) == said


def test_what_absent_keys_of_ministral_mean(tmp_path):
    """Absent keys have other defaults than a Mistral's, and the rope may be under the older key."""
    absent = ("head_dim", "max_position_embeddings", "rms_norm_eps", "sliding_window")
    text = {key: value for key, value in tiny.CONFIGS["ministral3"].items() if key not in absent}
    config = read(mistral3.FAMILY, text)
    assert [getattr(config, key) for key in absent] == [128, 262_144, 1e-5, None]
    config = zoo.config(without_rope(tmp_path, OLDER))
    assert config.llama_4_scaling_beta == 0.5 and config.rope_scaling.original_max_position_embeddings == 8


@pytest.mark.live
@pytest.mark.parametrize("changes", [*UNSAID, SAID, OLDER])
def test_live_ropes_of_ministral(changes, tmp_path):
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    folder = without_rope(tmp_path, changes)
    assert error(zoo.load(folder)(jnp.asarray(tiny.TOKENS)), make_golden.logits(folder)) < 1e-4


@pytest.mark.live
def test_live_defaults_of_ministral():
    """transformers' saved default config.json is read with the same values."""
    transformers = pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    hub = transformers.Ministral3Config().to_dict()
    config = read(mistral3.FAMILY, hub)
    said = {key: value for key, value in hub.items() if hasattr(config, key) and not key.startswith("rope")}
    assert {key: getattr(config, key) for key in said} == said
    assert config.rope_scaling == mistral3.YARN and config.llama_4_scaling_beta == 0.1


def test_other_forms_of_the_file(tmp_path):
    """A newer form is read the same; unsupported features of the projector and unknown keys are refused."""
    vision = {key: value for key, value in TOWER.items() if key != "rope_theta"}
    newer = dict(vision_config=vision | dict(rope_parameters=dict(rope_theta=100.0, rope_type="axial")))
    expected = zoo.config(CASE.write_config(tmp_path / "older"))
    assert zoo.config(CASE.write_config(tmp_path, **newer, tie_word_embeddings=False)) == expected
    for changes, message in (
        (dict(vision_feature_layer=-2), "vision_feature_layer=-2, but only -1 is implemented"),
        (dict(multimodal_projector_bias=True), "multimodal_projector_bias=True, but only False"),
        (dict(sliding_window=8), "'sliding_window' beside text_config"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.config(CASE.write_config(tmp_path, **changes))
    with pytest.raises(ValueError, match=r'has no vision tower: leave parts=\("vision",\) out'):
        zoo.load(CASE.write(tmp_path, vision_config=None), parts=("vision",))
