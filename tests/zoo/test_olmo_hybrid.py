"""Olmo Hybrid, where its files differ: a rotary base of null, older names, and transformers' own way of saving."""

import json

import numpy as np
import pytest
import safetensors.numpy

import zoo
from tests.zoo import tiny
from tests.zoo.programs import same
from zoo.config import read, write
from zoo.models.olmo_hybrid import FAMILY


HUB = tiny.CONFIGS["olmo_hybrid"]
OLDER = {"input_layernorm": "attention_layer_norm", "post_attention_layernorm": "feedforward_layer_norm"}


@pytest.mark.parametrize(
    "rope, theta",
    [
        (dict(rope_theta=None), None),
        (dict(rope_parameters=dict(rope_theta=None, rope_type="default")), None),
        (dict(rope_parameters=None), 10000.0),
        (dict(rope_parameters=dict(rope_type="default")), 10000.0),
        (dict(rope_theta=5000), 5000.0),
    ],
)
def test_no_rotary_positions(rope, theta):
    """A base of null means none, as in transformers; a base that is absent is 10,000."""
    config = read(FAMILY, {key: value for key, value in HUB.items() if key != "rope_parameters"} | rope)
    assert config.rope_theta == theta
    written = write(config, FAMILY, np.dtype(np.float32))
    assert read(FAMILY, json.loads(json.dumps(written))) == config
    assert theta is not None or written["rope_parameters"] == {"rope_theta": None}


def test_older_names_of_norms(load, tmp_path):
    """They are read, also where transformers writes one of them in layers with attention."""

    def older(name):
        for new, old in OLDER.items():
            name = name.replace(f".{new}.", f".{old}.")
        return name

    tensors = {older(name): tensor for name, tensor in tiny.tensors("olmo_hybrid").items()}
    assert sum("_layer_norm." in name for name in tensors) == 6
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(HUB))
    assert same(zoo.load(tmp_path), load("olmo_hybrid"))


@pytest.mark.live
def test_transformers_own_save(load, theirs, tmp_path):
    """transformers 5.23 cuts the joined convolution into equal parts. Such a file is refused; cut as released, it is
    read.
    """
    theirs("olmo_hybrid").save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="conv1d"):
        zoo.load(tmp_path)
    tensors, released = safetensors.numpy.load_file(tmp_path / "model.safetensors"), tiny.tensors("olmo_hybrid")
    for layer in {name.partition("q_conv1d")[0] for name in tensors if "q_conv1d" in name}:
        names = [f"{layer}{part}_conv1d.weight" for part in "qkv"]
        joined = np.concatenate([tensors[name] for name in names])
        cuts = np.cumsum([len(released[name]) for name in names])[:-1]
        tensors |= dict(zip(names, np.split(joined, cuts), strict=True))
    safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert same(zoo.load(tmp_path), load("olmo_hybrid"))
