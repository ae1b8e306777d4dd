"""Llama 4's vision equals transformers': logits, features, gradients, decoding, packing, files."""

import dataclasses
import json
import pathlib
import string

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import tokenizers

import convert.tensors
import zoo
from tests.zoo import seeing_llama4 as tiles
from tests.zoo import tiny
from tests.zoo.programs import decode, error, same
from tests.zoo.seeing import theirs
from zoo.config import read, says_nothing
from zoo.generation.decoding import prefill
from zoo.generation.engine import joined, padded
from zoo.models import llama4
from zoo.nn.layers import Linear
from zoo.nn.model import Images
from zoo.surgery import modules, path_name
from zoo.vision.images import Llama4
from zoo.vision.prompts import encode_prompt


FACTS = pathlib.Path(__file__).parents[3] / "shared" / "models"
GOLDEN = dict(np.load(tiles.GOLDEN))


def patches(pixels):
    """[tiles, channels, height, width] -> [tiles, patches, channels * 2 * 2]."""
    n, channels, height, width = pixels.shape
    cut = pixels.reshape(n, channels, height // 2, 2, width // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(n, -1, channels * 4)


images_of = lambda *args: jax.tree.map(jnp.asarray, Images.of(*args))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiles.write(tmp_path_factory.mktemp("seeing") / "llama4", layers=4)


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder, parts=("vision",))


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def run(model, tokens, images, segments, counted):
    """A sum over the logits of tokens that are counted, with its gradients; and logits and features."""
    logits = model.unembed(model.hidden(tokens, segments=segments, images=images)[0])
    seen = model.vision.tower(images.patches), model.vision(images.patches, images.grids)
    return jnp.sum(jnp.sum(jnp.square(logits), axis=-1) * counted.astype(logits.dtype)), (logits, *seen)


def test_logits_and_features(model):
    ones = np.ones((3, 40), np.float32)
    (_, seen), _ = run(
        model, tiles.PROMPTS, images_of(patches(tiles.PIXELS), 9, tiles.PROMPTS, 61), ones.astype(int), ones
    )
    for ours, name, bound in zip(seen, ("logits", "tower", "features"), (1e-4, 1e-5, 1e-5), strict=True):
        assert error(ours, GOLDEN[name]) < bound, name


def test_packed_documents_with_images_equal_each_alone(model):
    """Logits and gradients: three documents in a row, of which two have a tile; in other rows text, and padding."""
    row = np.concatenate([tiles.PROMPTS[2, :14], tiles.PROMPTS[1, 29:], tiles.PROMPTS[0, :15]])
    index = np.arange(40)
    prompts = np.stack([row, tiles.PROMPTS[0], tiles.PROMPTS[0]])
    numbers = np.repeat([1, 2, 3], [14, 11, 15])
    segments = np.stack([numbers, np.where(index < 30, 1, 0), np.where(index < 20, 1, 2)])
    pixels = patches(tiles.PIXELS[[1, 0, 3, 2]])
    of_row = lambda rows: images_of(pixels, [9, 9, 0, 0], rows, 61)  # two tiles stand for nothing
    counted = (np.arange(3)[:, None] == np.zeros(40)).astype(np.float32)
    (_, (logits, *_)), gradients = run(model, prompts, of_row(prompts), segments, counted)
    assert error(logits[0, :14], GOLDEN["logits"][2, :14]) < 1e-4
    assert error(logits[1, :30], GOLDEN["logits"][0, :30]) < 1e-4
    alone, ones = np.zeros_like(prompts), np.zeros_like(prompts)
    for document in (1, 2, 3):
        own = row[numbers == document]
        alone[document - 1, : len(own)], ones[document - 1, : len(own)] = own, 1
    (_, (apart, *_)), expected = run(model, alone, of_row(alone), ones, ones.astype(np.float32))
    assert error(logits[0, 14:25], apart[1, :11]) < 1e-5 and error(logits[0, 25:], apart[2, :15]) < 1e-5
    pairs = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True)
    for (path, ours), other in pairs:
        if not path_name(path).endswith("k_proj.bias"):  # whose gradient is 0 but for rounding: a softmax drops it
            assert error(ours, other) < 3e-5, path_name(path)
        assert np.abs(ours).max() > 0, path_name(path)


def test_decoding_after_images(model):
    """Prompts of three lengths, each with its tiles, are read at once; then the rest is decoded token by token."""
    lengths, steps = np.array([37, 40, 36]), 4
    rows = [row[:length] for row, length in zip(tiles.PROMPTS, lengths, strict=True)]
    cut = patches(tiles.PIXELS)
    images = [None, Images.of(cut[:1], 9, rows[1][None], 61), Images.of(cut[1:], 9, rows[2][None], 61)]
    state = prefill(model, None, *padded([row.tolist() for row in rows], 3, 40), 40, None, joined(images, 3, 40))
    for row, length in enumerate(lengths):
        assert error(state.logits[row], GOLDEN["logits"][row, length - 1]) < 1e-4
    cache, _ = state.caches
    for step in range(steps):
        at = np.where(lengths + step < 40, lengths + step, -1)[:, None]
        tokens = np.take_along_axis(tiles.PROMPTS, np.maximum(at, 0), axis=1)
        logits, cache = decode(model, jnp.asarray(tokens), cache, jnp.asarray(at))
        for row in np.flatnonzero(at[:, 0] >= 0):
            assert error(logits[row, 0], GOLDEN["logits"][row, at[row, 0]]) < 1e-4


def test_chats_with_tiles(folder, model):
    """An image of two tiles and one of one: what stands for them, and which token is which feature of which tile."""
    vocabulary = {character: i for i, character in enumerate(" " + string.ascii_letters)}
    names = ("image_start", "tile_x_separator", "tile_y_separator", "image", "patch", "image_end")
    special = {f"<|{name}|>": id for id, name in enumerate(names, 57)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary | special, merges=[]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% for p in m.content %}"
        "{% if p.type == 'image' %}<|image|>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=template)))
    own = dict(size=dict(height=12, width=12), patch_size=2, max_patches=4)
    (folder / "preprocessor_config.json").write_text(json.dumps(own))

    wide, small = (PIL.Image.effect_noise(size, 90).convert("RGB") for size in ((24, 12), (12, 12)))
    parts = [dict(type="text", text="see"), *(dict(type="image", image=i) for i in (wide, small))]
    ids, images = encode_prompt(model, zoo.tokenizer(folder), [dict(role="user", content=parts)])
    assert ids[3:] == [*tiles.PROMPTS[2, 4:36], *tiles.PROMPTS[1, 29:], tiles.END]
    pixels = lambda image: Llama4.read(folder).normalize(np.asarray(image)).transpose(2, 0, 1)
    whole = wide.resize((12, 12), PIL.Image.Resampling.BILINEAR)
    shown = [wide.crop((0, 0, 12, 12)), wide.crop((12, 0, 24, 12)), whole, small]
    assert np.array_equal(images.patches, patches(np.stack([pixels(image) for image in shown])))
    here = np.flatnonzero(np.array(ids) == tiles.PATCH)
    assert images.image[0, here].tolist() == np.repeat(range(4), 9).tolist()
    assert images.feature[0, here].tolist() == list(range(9)) * 4
    assert (np.delete(images.image[0], here) == -1).all()


def test_export_is_bit_equal(folder, model, tmp_path):
    zoo.save(model, tmp_path)
    before, after = convert.tensors.open_tensors(folder), convert.tensors.open_tensors(tmp_path)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert before[name].view().tobytes() == after[name].view().tobytes()
    assert zoo.config(tmp_path) == zoo.config(folder) == model.config
    written, stated = (json.loads((f / "config.json").read_text()) for f in (tmp_path, folder))
    assert stated.keys() <= written.keys() and stated["text_config"].keys() - written["text_config"].keys() == set()
    assert written["architectures"] == stated["architectures"] and written["model_type"] == stated["model_type"]
    says = lambda config: {k: v for k, v in config["vision_config"].items() if not says_nothing(k)}
    assert says(written) == says(stated)


def test_without_the_part_it_is_the_text_model(folder, model):
    text = zoo.load(folder)
    assert text.vision is None and text.config == dataclasses.replace(model.config, vision=None)
    assert same((text.embed_tokens, text.layers, text.norm), (model.embed_tokens, model.layers, model.norm))


def test_storage_in_8_bits_leaves_the_tower_alone(folder, model):
    small = zoo.load(folder, parts=("vision",), quantize="int8")
    assert same(small.vision, model.vision)
    assert not any(modules(small.layers, Linear))


def test_on_a_mesh(folder):
    mesh = zoo.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    vision = zoo.load(folder, parts=("vision",), mesh=mesh).vision
    block, adapter = vision.tower.layers.period[0], vision.tower.vision_adapter
    for linear in (block.self_attn.q_proj, block.mlp.fc1, adapter.fc1, vision.projector.linear_1):
        assert linear.weight.sharding.spec[-2:] == ("tensor", "fsdp")
    for linear in (block.self_attn.o_proj, block.mlp.fc2, adapter.fc2):
        assert linear.weight.sharding.spec[-2:] == ("fsdp", "tensor")


@pytest.mark.slow
def test_a_mesh_computes_the_same(folder):
    """The work is split by tiles, although a tile's tokens, 37, can't be split; row 3 is there to make rows even."""
    mesh = zoo.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    model = zoo.load(folder, parts=("vision",), mesh=mesh)
    prompts = np.concatenate([tiles.PROMPTS, tiles.PROMPTS[:1]])
    images = images_of(patches(tiles.PIXELS), 9, prompts, 61)
    ones = np.ones((4, 40), np.float32)
    with jax.set_mesh(mesh):
        (_, (logits, tower, _)), _ = run(model, prompts, images, ones.astype(int), ones)
    assert tower.sharding.spec[0] == "fsdp"
    assert error(logits[:3], GOLDEN["logits"]) < 1e-4 and error(tower, GOLDEN["tower"]) < 1e-5


@pytest.mark.parametrize("name", tiny.MODULES["llama4"].PARAMETERS)
def test_number_of_parameters(name):
    """As the Hub shows it, of the repository."""
    whole = zoo.checkpoint.skeleton(llama4.FAMILY, zoo.config(name), ("vision",))
    released = {"llama4-scout": 108_641_793_536, "llama4-maverick": 401_583_781_376}
    assert sum(array.size for array in jax.tree.leaves(whole)) == released[name]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="silu"), "vision_config says hidden_act='silu', but only 'gelu' is implemented"),
        (dict(norm_eps=1e-6), "vision_config says norm_eps=1e-06, but only 1e-05 is implemented"),
        (dict(cls_token=True), r"vision_config has the key 'cls_token' \(= True\), which is not known here"),
        (dict(rope_parameters=dict(rope_type="yarn")), "vision_config has the key 'rope_parameters'"),
        (dict(hidden_size=20), r"hidden_size=20, which is no multiple of 4 \* num_attention_heads=2"),
        (dict(patch_size=5), "image_size=12, which is no multiple of patch_size=5"),
        (dict(pixel_shuffle_ratio=0.25), "pixel_shuffle_ratio=0.25, which is not one over a divisor of the 6 patches"),
        (dict(intermediate_size=48), "intermediate_size=48, but its adapter reads 96 features: those of 4 patches"),
        (dict(vision_output_dim=41), r"vision_output_dim \(40, 40, 41\), which must be equal"),
    ],
)
def test_a_tower_that_is_not_known(changes, message):
    vision = tiles.CONFIG["vision_config"] | changes
    hub = tiles.CONFIG | dict(text_config=tiny.CONFIGS[tiles.TEXT], vision_config=vision)
    with pytest.raises(ValueError, match=message):
        read(llama4.FAMILY, hub)


def test_refusals(folder, tmp_path):
    with pytest.raises(ValueError, match=r'loaded without its vision tower, and so takes no images: parts=\("vision",'):
        zoo.load(folder)(jnp.asarray(tiles.PROMPTS), images=images_of(patches(tiles.PIXELS), 9, tiles.PROMPTS, 61))
    with pytest.raises(ValueError, match=r'has no vision tower: leave parts=\("vision",\) out'):
        zoo.load(tiny.write(tmp_path, tiles.TEXT), parts=("vision",))


@pytest.mark.live
def test_live(folder, model, tmp_path):
    """The golden values are transformers'; its export is read; in bfloat16 the errors are like its own."""
    live = tiles.computed(theirs(folder))
    assert all(error(GOLDEN[name], live[name]) < 1e-5 for name in GOLDEN)
    zoo.save(model, tmp_path / "ours")
    assert error(tiles.computed(theirs(tmp_path / "ours"))["logits"], live["logits"]) < 1e-5
    theirs(folder).save_pretrained(tmp_path / "theirs")
    assert same(zoo.load(tmp_path / "theirs", parts=("vision",)), model)
    rounded = tiles.computed(theirs(folder, "bfloat16"))
    ones = np.ones((3, 40), np.float32)
    images = images_of(patches(tiles.PIXELS), 9, tiles.PROMPTS, 61)
    (_, ours), _ = run(
        zoo.load(folder, parts=("vision",), dtype="bfloat16"), tiles.PROMPTS, images, ones.astype(int), ones
    )
    mean = lambda x, name: np.abs(np.asarray(x, np.float32) - live[name]).mean()
    for value, name in zip(ours, ("logits", "tower", "features"), strict=True):
        assert value.dtype == jnp.bfloat16 and mean(value, name) < 1.2 * mean(rounded[name], name)
