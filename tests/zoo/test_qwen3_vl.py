"""Qwen3-VL beyond the contract of test_vision.py: rotary axes, DeepStack, videos, and forms of config.json."""

import equinox as eqx
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from kernels import Tokens
from tests.zoo import seeing, tiny
from tests.zoo.seeing.qwen3_vl import FILM
from zoo.models import qwen3_vl
from zoo.nn.rope import MultiAxisRotary, Rotary
from zoo.text.prompts import encode_prompt
from zoo.weights.checkpoint import skeleton


@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_videos_that_are_refused(load_vision, vision_folders, name):
    tokenizer = zoo.tokenizer(vision_folders[name])
    for changes, message in (
        (dict(video="film.mp4"), "A video is a list of its frames, each as an image"),
        (dict(fps=None), "A video says how many frames it has in a second"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_prompt(load_vision(name), tokenizer, seeing.ask(FILM | changes))


def test_axes():
    """Which axis each frequency turns by, as the published files say; without several coordinates it is `Rotary`."""
    axes = MultiAxisRotary(128, 5e6, None, (24, 20, 20)).axes
    assert np.bincount(axes).tolist() == [24, 20, 20] and axes[:6].tolist() == [0, 1, 2] * 2 and not axes[60:].any()
    assert np.bincount(MultiAxisRotary(64, 1e7, None, (11, 11, 10)).axes).tolist() == [11, 11, 10]
    x = jnp.asarray(np.random.RandomState(0).standard_normal((1, 5, 2, 16)), jnp.float32)
    own, plain, at = MultiAxisRotary(16, 1e4, None, (4, 2, 2)), Rotary(16, 1e4), jnp.arange(5)[None]
    for tokens in (Tokens(), Tokens(rotary=jnp.stack([at] * 3, axis=-1))):
        np.testing.assert_array_equal(own(x, tokens), plain(x, Tokens()))


def test_deepstack_of_a_released_model():
    """The tower finds what DeepStack takes, and the first three layers are by themselves."""
    whole = skeleton(qwen3_vl.FAMILY, zoo.config("qwen3-vl-2b"), ("vision",))
    look = lambda tower: tower.levels(jnp.zeros((2, 16, 1536)), jnp.array([[4, 4], [2, 2]]))
    assert [level.shape for level in eqx.filter_eval_shape(look, whole.vision)] == [(2, 4, 2048)] * 4
    assert len(whole.layers.head) == 3


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3_vl", dict(rope_scaling=dict(mrope_interleaved=False)), "mrope_interleaved=False, but only true is imp"),
        (
            "qwen3_vl",
            dict(architectures=["Qwen3ForCausalLM"]),
            "model_type='qwen3_vl_text' with architectures=.*is not implemented",
        ),
        ("qwen3_vl-moe", dict(num_experts=0), "num_experts=0, which qwen3_vl_moe_text needs"),
    ],
)
def test_text_models_that_are_refused(tmp_path, name, changes, message):
    with pytest.raises(ValueError, match=message):
        zoo.config(tiny.write(tmp_path, name, **changes))
