"""Qwen2.5-VL beyond the contract of test_vision.py: forms of config.json, windows of the tower, and refusals."""

import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from kernels import Tokens
from tests.close import close
from tests.zoo import tiny
from zoo.models import qwen2_5_vl
from zoo.nn.rope import Rotary
from zoo.vision.towers import qwen2_5_vl as towers


CASE = tiny.SEEING["qwen2_5_vl"]


def read(folder, hub):
    (folder / "config.json").write_text(json.dumps(hub))
    return zoo.config(folder)


def flat_form(hub):
    """Returns a config.json in the form of the released files."""
    text = {k: v for k, v in hub["text_config"].items() if k not in ("model_type", "rope_parameters")}
    rope = dict(type="mrope", mrope_section=hub["text_config"]["rope_parameters"]["mrope_section"])
    tower = hub["vision_config"] | dict(in_chans=3)
    outer = {key: value for key, value in hub.items() if key != "text_config"}
    return text | outer | dict(vision_config=tower, rope_theta=1000.0, rope_scaling=rope)


def test_forms_of_the_file(tmp_path):
    """The released form, transformers' own, and that with the text model's keys in both places mean the same."""
    hub = CASE.config()
    nested = read(tmp_path, hub)
    assert nested.vision is not None and nested.mrope_section == (1, 1, 2)
    assert read(tmp_path, flat_form(hub)) == nested
    own = dict.fromkeys(("image_token_id", "video_token_id")) | dict(vision_start_token_id=62)
    assert read(tmp_path, flat_form(hub) | dict(text_config=hub["text_config"] | own, hidden_size=8)) == nested
    tied = hub | dict(text_config=hub["text_config"] | dict(tie_word_embeddings=True))
    assert read(tmp_path, tied).tie_word_embeddings
    silent = read(tmp_path, {key: value for key, value in hub.items() if not key.endswith("token_id")}).vision
    assert silent.image_token_id == 151_655


def test_the_tower_of_seven_billion():
    """Seven layers with windows of 8 x 8 patches, and one without, four times."""
    tower = eqx.filter_eval_shape(towers.Tower, towers.Config(hidden_size=1280), key=jax.random.key(0))
    assert tower.blocks.runs == ((8, 4),) and [b.attn.windowed for b in tower.blocks.period] == [True] * 7 + [False]
    assert tower.config.window == 8 and sum(x.size for x in jax.tree.leaves(tower)) == 676_550_144


def test_sections():
    """The first frequencies turn by the first coordinate. Without several coordinates the result equals `Rotary`."""
    x = jnp.asarray(np.random.RandomState(0).standard_normal((1, 5, 2, 16)), jnp.float32)
    own, plain, at = qwen2_5_vl.SectionedRotary(16, 1e4, None, (4, 2, 2)), Rotary(16, 1e4), jnp.arange(5)[None]
    for tokens in (Tokens(), Tokens(rotary=jnp.stack([at] * 3, axis=-1))):
        close(own(x, tokens), plain(x, Tokens()), terms=16)
    still = jnp.zeros_like(at)
    turned = own(x, Tokens(rotary=jnp.stack([at, still, still], axis=-1)))
    close(turned[..., :4], plain(x, Tokens())[..., :4], terms=16)
    assert np.array_equal(turned[..., 4:8], x[..., 4:8])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            dict(rope_parameters=dict(mrope_section=[16, 24, 24])),
            r"mrope_section=\[16, 24, 24\] does not add up to half",
        ),
        (dict(mrope_section=[1, 1, 2]), "mrope_section stands in rope_scaling, and not beside it"),
        (dict(num_attention_heads=3), "hidden_size=32 is no multiple of num_attention_heads=3"),
        (dict(head_dim=8), "the key 'head_dim'"),
        (dict(hidden_act="gelu"), "hidden_act='gelu'"),
    ],
)
def test_text_models_that_are_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        zoo.load(tiny.write(tmp_path, "qwen2_5_vl", **changes))


def test_keys_beside_the_text_model_that_are_refused(tmp_path):
    for changes, message in (
        (dict(swiglu_limit=1.0), "config.json has 'swiglu_limit' beside text_config"),
        (dict(vision_config=CASE.config()["vision_config"] | dict(in_chans=1)), "in_chans=1, but only 3"),
    ):
        with pytest.raises(ValueError, match=message):
            read(tmp_path, CASE.config() | changes)
