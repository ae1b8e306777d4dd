"""Mistral Small 3.1 with its tower equals transformers: logits, features, gradients, decoding, packing, files."""

import json
import shutil
import string

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
import tokenizers
from jax.sharding import PartitionSpec as P

import convert.tensors
import zoo
from tests.zoo import seeing_mistral as seeing
from tests.zoo import tiny
from tests.zoo.programs import decode, error, same
from tests.zoo.test_registry import FACTS
from zoo.config import read, write
from zoo.models import mistral
from zoo.nn.layers import Linear
from zoo.nn.model import Images
from zoo.surgery import modules, partition_specs, path_name
from zoo.vision.images import patchify
from zoo.vision.prompts import encode_prompt


GOLDEN = dict(np.load(seeing.GOLDEN))
COUNTS = seeing.GRIDS.prod(axis=1)  # of patches
PATCHES = np.zeros((3, 32, 12), np.float32)  # the largest picture has 24
for rows, pixels in zip(PATCHES, seeing.PIXELS, strict=True):
    cut = patchify(pixels.transpose(1, 2, 0)[None], 2, merge_size=2)
    rows[: len(cut)], rows[len(cut) :] = cut, 7.0  # what is beyond must not matter


def images_of(prompts, which=(0, 1, 2)):
    """These pictures, in the order of their tokens."""
    here = prompts == seeing.IMAGE
    image, feature = np.full(prompts.shape, -1), np.zeros(prompts.shape, int)
    image[here] = np.repeat(np.arange(len(which)), COUNTS[list(which)] // 4)
    feature[here] = np.concatenate([np.arange(COUNTS[n] // 4) for n in which])
    given = PATCHES[list(which)], seeing.GRIDS[list(which)], image, feature
    return Images(*map(jnp.asarray, given))


IMAGES = images_of(seeing.PROMPTS)
ONES = np.ones_like(seeing.PROMPTS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeing.write(tmp_path_factory.mktemp("seeing") / "mistral")


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder, parts=("vision",))


@eqx.filter_jit
def run(model, tokens, images, segments, counted):
    """Logits, features of patches and of tokens; and gradients of the logits of those tokens that count."""

    @eqx.filter_grad(has_aux=True)
    def gradients(model):
        logits = model.unembed(model.hidden(tokens, segments=segments, images=images)[0])
        return jnp.sum(jnp.sum(jnp.square(logits.astype(jnp.float32)), axis=-1) * counted), logits

    tower = model.vision.tower(images.patches, mistral.pixtral.places(images.grids, images.patches.shape[1], 2))
    given, logits = gradients(model)
    return (logits, tower, model.vision(images.patches, images.grids)), given


def in_a_row(tower, features):
    """As transformers has them: of all pictures one after another, and patches row by row."""
    back = [np.argsort(np.arange(r * c).reshape(r // 2, 2, c // 2, 2).swapaxes(1, 2).ravel()) for r, c in seeing.GRIDS]
    tower = [np.asarray(x, np.float32)[order] for x, order in zip(tower, back, strict=True)]
    return np.concatenate(tower), np.concatenate([x[: n // 4] for x, n in zip(features, COUNTS, strict=True)])


def test_logits_and_features(model):
    """Of rows with no image, one and two, all of other shapes, with padding that is not 0."""
    (logits, *features), _ = run(model, seeing.PROMPTS, IMAGES, ONES, np.float32(ONES))
    assert error(logits, GOLDEN["logits"]) < 1e-4
    for ours, name in zip(in_a_row(*features), ("tower", "features"), strict=True):
        assert error(ours, GOLDEN[name]) < 1e-5, name


def test_packed_documents_with_images_equal_each_alone(model):
    """Logits and gradients: two documents with images in a row, beside text with padding."""
    prompts, index = seeing.PROMPTS.copy(), np.arange(24)
    prompts[0] = np.concatenate([seeing.PROMPTS[2, :14], seeing.PROMPTS[1, 14:]])
    prompts[1:] = seeing.PROMPTS[0]
    segments = np.stack([np.where(index < 14, 1, 2), np.where(index < 20, 1, 0), index * 0])
    first = np.float32(np.arange(3)[:, None] == 0) * np.ones(24, np.float32)
    (logits, *_), gradients = run(model, prompts, images_of(prompts, (1, 2, 0)), segments, first)
    assert error(logits[0, :14], GOLDEN["logits"][2, :14]) < 1e-4
    assert error(logits[1, :20], GOLDEN["logits"][0, :20]) < 1e-4
    alone = np.zeros_like(prompts)
    alone[0, :14], alone[1, :10] = prompts[0, :14], prompts[0, 14:]
    ones = np.stack([index < 14, index < 10, index < 0]).astype(int)
    (apart, *_), expected = run(model, alone, images_of(alone, (1, 2, 0)), ones, np.float32(ones))
    assert error(logits[0, 14:], apart[1, :10]) < 1e-5
    pairs = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True)
    for (path, ours), theirs in pairs:
        assert error(ours, theirs) < 3e-5, path_name(path)
        assert np.abs(ours).max() > 0


def test_decoding_after_images(model):
    """Rows of two lengths are read at once; then the rest is decoded token by token."""
    lengths = np.array([10, 24, 13])
    positions = np.where(np.arange(24) < lengths[:, None], np.arange(24), -1)
    cache = model.init_cache(3, 24, jnp.float32)
    read = eqx.filter_jit(
        lambda model, tokens, cache, at, images: model.hidden(tokens, cache, positions=at, images=images)
    )
    _, cache, _ = read(model, jnp.asarray(seeing.PROMPTS), cache, jnp.asarray(positions), IMAGES)
    for step in range(11):
        at = np.where(lengths + step < 24, lengths + step, -1)[:, None]
        tokens = np.take_along_axis(seeing.PROMPTS, np.maximum(at, 0), axis=1)
        logits, cache = decode(model, jnp.asarray(tokens), cache, jnp.asarray(at))
        for row in np.flatnonzero(at[:, 0] >= 0):
            assert error(logits[row, 0], GOLDEN["logits"][row, at[row, 0]]) < 1e-4


def test_a_chat_with_images(folder, model):
    """It becomes the third prompt with its pictures, filled up to a power of two of patches."""
    special = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
    letters = string.ascii_letters + string.digits[:9]
    vocabulary = dict(zip(letters, [n for n in range(64) if n not in special.values()], strict=True))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary | special, merges=[]))
    tokenizer.add_special_tokens(list(special))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{% for p in m.content %}"
        "{% if p.type == 'image' %}[IMG]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=template)))
    own = dict(size=dict(longest_edge=32), patch_size=2, image_mean=[seeing.MEAN] * 3, image_std=[seeing.STD] * 3)
    (folder / "preprocessor_config.json").write_text(json.dumps(own))
    (folder / "processor_config.json").write_text(json.dumps(dict(patch_size=2, spatial_merge_size=2)))
    chatty, prompt = zoo.tokenizer(folder), seeing.PROMPTS[2].tolist()
    text = lambda ids: {"type": "text", "text": chatty.decode(ids)}
    shown = [{"type": "image", "image": PIL.Image.fromarray(levels)} for levels in seeing.LEVELS[1:]]
    messages = [{"role": "user", "content": [text(prompt[:2]), *shown, text(prompt[13:])]}]
    ids, images = encode_prompt(model, chatty, messages)
    assert ids == prompt
    assert np.array_equal(images.image[0], np.where(IMAGES.image[2] < 0, -1, IMAGES.image[2] - 1))
    assert np.array_equal(images.feature[0], IMAGES.feature[2]) and np.array_equal(images.grids[:2], seeing.GRIDS[1:])
    assert images.patches.shape == (2, 16, 12)
    for ours, theirs, count in zip(images.patches, PATCHES[1:], COUNTS[1:], strict=False):
        assert np.abs(ours[:count] - theirs[:count]).max() < 1e-6


@pytest.mark.parametrize("start", ["", "model."])
def test_names_that_transformers_writes(folder, model, tmp_path, start):
    """Since 4.52 a model's own are all within `model.`, and before that the head alone is not."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    old = {"language_model.model.": f"{start}language_model.", "language_model.lm_head.": "lm_head."} if start else {}
    old |= {name: start + name for name in ("vision_tower.", "multi_modal_projector.")}
    begin = lambda name: next((pair for pair in old.items() if name.startswith(pair[0])), ("", ""))
    renamed = {begin(name)[1] + name.removeprefix(begin(name)[0]): value for name, value in tensors.items()}
    shutil.copy(folder / "config.json", tmp_path)
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    assert same(zoo.load(tmp_path, parts=("vision",)), model)


def test_export_is_bit_equal(folder, model, tmp_path):
    zoo.save(model, tmp_path)
    before, after = convert.tensors.open_tensors(folder), convert.tensors.open_tensors(tmp_path)
    assert before.keys() == after.keys()
    for name in before:
        assert before[name].dtype == after[name].dtype
        assert before[name].view().tobytes() == after[name].view().tobytes()
    assert zoo.config(tmp_path) == zoo.config(folder) == model.config
    written, read = (json.loads((f / "config.json").read_text()) for f in (tmp_path, folder))
    ends = {key: read["text_config"].pop(key) for key in ("bos_token_id", "eos_token_id")}  # where tokenizers look
    assert read.pop("text_config").items() <= written.pop("text_config").items()
    says = lambda part: {key: value for key, value in part.items() if "dropout" not in key and "initial" not in key}
    assert says(read.pop("vision_config")) == written.pop("vision_config")
    assert written == read | ends | {"tie_word_embeddings": False}


def test_without_the_part_it_is_the_text_model(folder, tmp_path):
    text = zoo.load(folder)
    assert text.vision is None and text.config.vision is None
    zoo.save(text, tmp_path)
    names, config = convert.tensors.open_tensors(tmp_path).keys(), json.loads((tmp_path / "config.json").read_text())
    assert names == tiny.MODULES["mistral"].shapes(seeing.TEXT).keys()
    assert config["architectures"] == ["MistralForCausalLM"] and not config.keys() & {"text_config", "vision_config"}
    assert same(zoo.load(tmp_path), text)


def test_storage_in_8_bits_leaves_the_tower_alone(folder, model):
    small = zoo.load(folder, parts=("vision",), quantize="int8")
    assert same(small.vision, model.vision)
    assert not any(modules(small.layers, Linear))


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("mistral-small-3.1-24b", 24_011_361_280),
        ("ministral3-3b-instruct", 3_849_090_048),
        ("ministral3-8b-instruct", 8_918_026_240),
        ("ministral3-14b-instruct", 13_945_031_680),
        ("devstral-small-2-24b", 24_011_361_280),
    ],
)
def test_released_sizes(name, count):
    """Parameters as the Hub shows them, of the repository; and every matrix of the tower is split."""
    whole = zoo.checkpoint.skeleton(mistral.FAMILY, zoo.config(name), ("vision",))
    assert sum(array.size for array in jax.tree.leaves(whole)) == count
    specs = partition_specs(whole, mistral.FAMILY.partition_rules).vision
    assert specs.tower.layers.period[0].feed_forward.down_proj.weight == P("stage", "fsdp", "tensor")
    assert specs.projector.linear_1.weight == P("tensor", "fsdp")


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
    text = {key: value for key, value in tiny.CONFIGS["ministral3"].items() if key not in seeing.BESIDE}
    config = zoo.config(seeing.write(tmp_path, text_config=text))
    assert config.llama_4_scaling_beta == 0.5 and config.vision is not None
    saved = write(config, mistral.FAMILY, np.dtype(np.float32))
    assert saved["architectures"] == ["Mistral3ForConditionalGeneration"]
    rope = {key: value for key, value in text["rope_parameters"].items() if key != "type"}
    assert saved["text_config"]["model_type"] == "ministral3" and "rope_scaling" not in saved["text_config"]
    assert rope.items() <= saved["text_config"]["rope_parameters"].items()
    text["rope_parameters"] = dict(rope_type="default", rope_theta=1.0, llama_4_scaling_beta=0.5)
    with pytest.raises(ValueError, match="llama_4_scaling_beta needs the original_max_position_embeddings"):
        zoo.config(seeing.write(tmp_path, text_config=text))


@pytest.mark.slow
def test_on_a_mesh(folder):
    """The tower's matrices are split, and the work by pictures; the fourth is there to make them even."""
    mesh = zoo.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    model = zoo.load(folder, parts=("vision",), mesh=mesh)
    four = lambda x: jnp.concatenate([x, x[:1]])
    images = jax.tree.map(four, IMAGES)
    with jax.set_mesh(mesh):
        ones = np.ones((4, 24), int)
        (logits, tower, _), _ = run(model, four(jnp.asarray(seeing.PROMPTS)), images, ones, np.float32(ones))
    assert tower.sharding.spec[0] == "fsdp"
    assert error(logits[:3], GOLDEN["logits"]) < 1e-4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="gelu"), "vision_config says hidden_act='gelu', but only 'silu' is implemented"),
        (dict(hidden_act=None), "hidden_act"),
        (dict(cls_token=True), r"vision_config has the key 'cls_token' \(= True\), which is not known here"),
        (dict(head_dim=4), r"hidden_size=16, which is not num_attention_heads=2 times a head_dim that .* \(4\)"),
        (dict(head_dim=None, num_attention_heads=8), r"num_attention_heads=8 times .* multiple of 4 \(2\)"),
        (dict(rope_parameters=dict(rope_theta=1e4, rope_type="yarn")), "only a rope_theta is implemented"),
    ],
)
def test_a_tower_that_is_not_known(tmp_path, changes, message):
    vision = seeing.CONFIG["vision_config"] | changes
    with pytest.raises(ValueError, match=message):
        zoo.config(seeing.write(tmp_path, vision_config=vision))


def test_other_forms_of_the_file(folder, tmp_path):
    """A newer one is read alike; what is not implemented of the projector is refused, and an unknown key is."""
    vision = {key: value for key, value in seeing.CONFIG["vision_config"].items() if key != "rope_theta"}
    newer = dict(vision_config=vision | dict(rope_parameters=dict(rope_theta=100.0, rope_type="axial")))
    assert zoo.config(seeing.write(tmp_path, **newer, tie_word_embeddings=False)) == zoo.config(folder)
    for changes, message in (
        (dict(vision_feature_layer=-2), "vision_feature_layer=-2, but only -1 is implemented"),
        (dict(multimodal_projector_bias=True), "multimodal_projector_bias=True, but only False"),
        (dict(audio_config={}), "'audio_config' beside text_config"),
        (dict(vision_config=None), None),
    ):
        seeing.write(tmp_path, **changes)
        if message:
            with pytest.raises(ValueError, match=message):
                zoo.config(tmp_path)
    with pytest.raises(ValueError, match=r'has no vision tower: leave parts=\("vision",\) out'):
        zoo.load(tmp_path, parts=("vision",))


@pytest.mark.live
def test_live(folder, model, tmp_path):
    """The golden values are transformers'; its export is read, and ours by it; in bfloat16 errors are like its own."""
    live = seeing.computed(seeing.theirs(folder))
    assert all(error(GOLDEN[name], live[name]) < 1e-5 for name in GOLDEN)
    zoo.save(model, tmp_path / "ours")
    assert error(seeing.computed(seeing.theirs(tmp_path / "ours"))["logits"], live["logits"]) < 1e-5
    seeing.theirs(folder).save_pretrained(tmp_path / "theirs")
    assert same(zoo.load(tmp_path / "theirs", parts=("vision",)), model)
    rounded = seeing.computed(seeing.theirs(folder, "bfloat16"))
    low = zoo.load(folder, parts=("vision",), dtype="bfloat16")
    (logits, *features), _ = run(low, seeing.PROMPTS, IMAGES, ONES, np.float32(ONES))
    mean = lambda x, name: np.abs(np.asarray(x, np.float32) - live[name]).mean()
    assert logits.dtype == jnp.bfloat16
    for value, name in zip((logits, *in_a_row(*features)), ("logits", "tower", "features"), strict=True):
        assert mean(value, name) < 1.2 * mean(rounded[name], name), name
