"""LFM2's config.json: keys by several names, kinds of layers by number, and the width of the MLP."""

import json

import numpy as np
import pytest

import zoo
from tests.zoo import tiny
from zoo.config import read, write
from zoo.models.lfm2 import FAMILY


HUB = tiny.CONFIGS["lfm2"]


@pytest.mark.parametrize(
    "name, width",
    [("lfm2-350m", 4608), ("lfm2-700m", 6912), ("lfm2-1.2b", 8192), ("lfm2-2.6b", 10752)],
)
def test_width_of_the_mlp(name, width):
    assert zoo.config(name).width == width


@pytest.mark.parametrize("multiplier, width", [(None, 48), (1.0, 48), (1.3, 64)])
def test_multiplier_of_the_width(multiplier, width):
    assert read(FAMILY, HUB | dict(block_ffn_dim_multiplier=multiplier)).width == width


def test_names_that_win():
    """Both are transformers' choice."""
    config = read(FAMILY, HUB | dict(intermediate_size=40, tie_word_embeddings=False))
    assert config.intermediate_size == 72 and config.tie_word_embeddings


def test_layers_by_number():
    without = {key: value for key, value in HUB.items() if key != "layer_types"}
    assert read(FAMILY, without | dict(full_attn_idxs=[2, 5])) == read(FAMILY, HUB)
    assert read(FAMILY, HUB | dict(full_attn_idxs=[0])) == read(FAMILY, HUB)
    assert set(read(FAMILY, without).layer_types) == {"full_attention"}


@pytest.mark.parametrize(
    "changes, sentence",
    [
        (dict(conv_dim=16), "config.json: it says conv_dim=16, but hidden_size=32."),
        (dict(theta=5.0), "config.json: it says theta=5.0, but rope_theta=10000.0."),
        (dict(theta=1e4, rope_theta=None, rope_parameters=dict(rope_theta=1e3)), "but rope_theta=1000.0."),
        (dict(block_norm_eps=1e-6), "but norm_eps=1e-05."),
        (dict(block_use_swiglu=False), "but lfm2 implements only True."),
        (dict(use_pos_enc=False), "but lfm2 implements only True."),
        (dict(block_ffn_dim_multiplier=1e30), "makes no width of an MLP."),
    ],
)
def test_refused(changes, sentence):
    with pytest.raises(ValueError) as refusal:
        read(FAMILY, HUB | changes)
    assert sentence in str(refusal.value)


def test_other_names_are_written():
    """Other libraries read them, and nothing else."""
    written = json.loads(json.dumps(write(read(FAMILY, HUB), FAMILY, np.dtype(np.float32))))
    initial = {"block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"}
    assert {key: written[key] for key in HUB.keys() - initial if key.startswith(("block_", "conv_"))} == {
        key: value for key, value in HUB.items() if key not in initial and key.startswith(("block_", "conv_"))
    }
    assert written["tie_embedding"] is True and written["num_heads"] == 4
