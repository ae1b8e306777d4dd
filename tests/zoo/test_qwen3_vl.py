"""Qwen3-VL beyond the contract of test_vision.py: rotary axes, DeepStack, videos, and forms of config.json."""

import dataclasses
import itertools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

import convert.tensors
import zoo
from convert.packed import quantize_blocks
from kernels import Tokens
from tests.close import close
from tests.zoo import seeing, tiny
from tests.zoo.programs import error, same
from tests.zoo.tiny.qwen3_vl import FILM, Qwen3VL
from zoo.models import qwen3_vl
from zoo.nn.block import AbstractBlock
from zoo.nn.rope import MultiAxisRotary, Rotary
from zoo.nn.stack import Stack
from zoo.text.prompts import encode_prompt
from zoo.weights import checkpoint
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
    """Each frequency turns by the published files' axis. Without several coordinates the result equals `Rotary`."""
    axes = MultiAxisRotary(128, 5e6, None, (24, 20, 20)).axes
    assert np.bincount(axes).tolist() == [24, 20, 20] and axes[:6].tolist() == [0, 1, 2] * 2 and not axes[60:].any()
    assert np.bincount(MultiAxisRotary(64, 1e7, None, (11, 11, 10)).axes).tolist() == [11, 11, 10]
    x = jnp.asarray(np.random.RandomState(0).standard_normal((1, 5, 2, 16)), jnp.float32)
    own, plain, at = MultiAxisRotary(16, 1e4, None, (4, 2, 2)), Rotary(16, 1e4), jnp.arange(5)[None]
    for tokens in (Tokens(), Tokens(rotary=jnp.stack([at] * 3, axis=-1))):
        close(own(x, tokens), plain(x, Tokens()), terms=16)


def test_deepstack_of_a_released_model():
    """The tower returns DeepStack's levels, and the first three layers are separate."""
    whole = skeleton(qwen3_vl.FAMILY, zoo.config("qwen3-vl-2b"), ("vision",))
    look = lambda tower: tower.levels(jnp.zeros((2, 16, 1536)), jnp.array([[4, 4], [2, 2]]))
    assert [level.shape for level in eqx.filter_eval_shape(look, whole.vision)] == [(2, 4, 2048)] * 4
    assert len(whole.layers.head) == 3


class Factor(AbstractBlock):
    factor: jax.Array

    def __call__(self, x, cache, at):
        return x * self.factor, None, None


@pytest.mark.parametrize("kinds", [[0, 1, 2, "dense"], [0, 1, 2], [0, 1, 2, "sparse", "dense"], [0, 1, 2, *"dd"]])
def test_deepstack_before_layers_that_do_not_repeat(kinds):
    """Each level is added after its own layer, wherever the stack has put that layer."""
    factor, keys = lambda key: 2 + jax.random.uniform(key), jax.random.split(jax.random.key(0), len(kinds))
    stack = Stack(lambda n, *, key: Factor(factor(key)), kinds, key=jax.random.key(0))
    x, *levels = jnp.asarray(np.random.RandomState(0).standard_normal((4, 2, 5, 3)), jnp.float32)
    expected = x
    for key, level in itertools.zip_longest(keys, levels, fillvalue=0):
        expected = expected * factor(key) + level
    close(stack(x, after=levels)[0], expected, terms=16)


def test_deepstack_into_layers_that_repeat():
    stack = Stack(lambda n, *, key: Factor(jnp.ones(())), [0, 1, 2, 2], key=jax.random.key(0))
    with pytest.raises(ValueError, match="`after` has 3 entries, but only 2 layers precede those that repeat"):
        stack(jnp.ones((2, 5, 3)), after=[jnp.ones((2, 5, 3))] * 3)


SHORT = {  # few layers: one more than levels, one fewer, and two kinds of which every second one is sparse
    "qwen3_vl-4-layers": dict(name="qwen3_vl", num_hidden_layers=4),
    "qwen3_vl-2-layers": dict(name="qwen3_vl", num_hidden_layers=2),
    "qwen3_vl-moe": dict(name="qwen3_vl-moe", num_hidden_layers=5, mlp_only_layers=[]),
}


def short(name):
    """Returns a checkpoint with three levels of DeepStack."""
    first = tiny.SEEING[SHORT[name]["name"]]
    names = dict(architecture=first.architecture, text_names=first.text_names)
    return Qwen3VL(**names, **SHORT[name], deep=[0, 2, 3], restated=(), parameters={})


def test_fewer_layers_than_levels_of_deepstack(untyped, tmp_path):
    case = short("qwen3_vl-2-layers")
    config = zoo.config(case.write_config(tmp_path))
    look = lambda model: model(jnp.asarray(case.prompts), images=case.images())
    assert eqx.filter_eval_shape(look, skeleton(qwen3_vl.FAMILY, config, ("vision",))).shape == (4, 40, 64)


@pytest.mark.live
@pytest.mark.parametrize("case", SHORT)
def test_live_with_few_layers_beside_deepstack(case, tmp_path):
    case = short(case)
    model = zoo.load(case.write(tmp_path), parts=("vision",))
    theirs = case.computed(case.theirs(tmp_path))["logits"]
    assert error(model(jnp.asarray(case.prompts), images=case.images()), theirs) < 1e-4


@pytest.mark.parametrize("width", [24, 16])
def test_experts_in_both_layouts(tmp_path, width):
    """The Hub's layout and transformers' are read. With width 16, gate_up_proj is square, and down_proj decides."""
    name = "qwen3_vl-moe"
    config = tiny.CONFIGS[name] | dict(moe_intermediate_size=width)
    hub = tiny.filled(tiny.MODULES["qwen3_vl"].shapes(config), np.random.RandomState(0))
    swapped = {key: x.swapaxes(1, 2).copy() if ".experts." in key else x for key, x in hub.items()}
    models = []
    for folder, tensors in (("hub", hub), ("theirs", swapped)):
        tiny.write(tmp_path / folder, name, moe_intermediate_size=width)
        safetensors.numpy.save_file(tensors, tmp_path / folder / "model.safetensors")
        models.append(zoo.load(tmp_path / folder))
    assert same(*models)
    zoo.save(models[1], tmp_path / "saved")
    assert zoo.inspect(str(tmp_path / "theirs")) == zoo.config(tmp_path / "theirs")
    saved = safetensors.numpy.load_file(tmp_path / "saved" / "model.safetensors")
    assert saved.keys() == hub.keys() and all(np.array_equal(saved[key], hub[key]) for key in hub)


def test_fp8_with_experts_one_by_one(tmp_path):
    """8-bit matrices are read as their dequantised values, saved in the same form, and read again."""
    name, rng = "qwen3_vl-moe", np.random.RandomState(0)
    config = tiny.CONFIGS[name] | dict(hidden_size=160, moe_intermediate_size=136, num_hidden_layers=4)
    tensors = {}
    for key, x in tiny.filled(tiny.MODULES["qwen3_vl"].shapes(config), rng).items():
        start, expert, kind = key.partition("experts.")
        kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        parts = np.split(x.swapaxes(1, 2), len(kinds), axis=1) if expert else ()
        for one, part in zip(kinds if expert else (), parts, strict=True):
            tensors |= {f"{start}experts.{n}.{one}.weight": matrix for n, matrix in enumerate(part)}
        tensors |= {} if expert else {key: x}
    stored, plain = {}, {}
    for key, x in tensors.items():
        if key.endswith("_proj.weight"):
            codes, scales = quantize_blocks(x)
            stored |= {key: codes, f"{key}_scale_inv": scales}
            spread = scales.repeat(128, axis=0).repeat(128, axis=1)[: len(x), : x.shape[1]]
            plain[key] = codes.astype(np.float32) * spread
        else:
            stored[key] = plain[key] = np.ascontiguousarray(x)
    models = []
    for folder, of, more in (("fp8", stored, dict(quantization_config=checkpoint.FP8)), ("plain", plain, {})):
        tiny.write(tmp_path / folder, name, **config, **more)
        safetensors.numpy.save_file(of, tmp_path / folder / "model.safetensors")
        models.append(zoo.load(tmp_path / folder, dtype="float32"))
    assert same(*models)
    zoo.save(models[0], tmp_path / "saved", fp8=True)
    assert convert.tensors.open_tensors(tmp_path / "saved").keys() == stored.keys()
    assert same(zoo.load(tmp_path / "saved", dtype="float32"), models[0])


@pytest.mark.parametrize(("name", "rope"), [("qwen3_vl", "rope_scaling"), ("qwen3_5", "rope_parameters")])
@pytest.mark.parametrize("absent", [lambda keys: dict.fromkeys(keys), lambda keys: {}], ids=["null", "missing"])
def test_keys_about_images_that_are_absent(tmp_path, name, rope, absent):
    """A config.json with null in the place of keys about images, or without them, means the released models' values."""
    case = tiny.SEEING[name]
    hub, axes = case.config(), ("mrope_interleaved", "mrope_section")
    text = {key: value for key, value in hub["text_config"].items() if key != rope}
    text[rope] = {key: value for key, value in hub["text_config"][rope].items() if key not in axes}
    text[rope] |= absent(["mrope_section"])
    ids = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    hub = {key: value for key, value in hub.items() if key not in ids} | absent(ids) | dict(text_config=text)
    (tmp_path / "config.json").write_text(json.dumps(hub))
    vision = zoo.config(tmp_path).vision
    released = next(iter(case.family.configs.values())).config.vision
    assert vision == dataclasses.replace(released, tower=vision.tower)


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
