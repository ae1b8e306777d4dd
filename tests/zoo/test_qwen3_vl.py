"""Qwen3-VL and Qwen3.5 see as in transformers: logits, features, gradients, decoding, packing, files."""

import functools
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
from kernels import Tokens
from tests.zoo import seeing_qwen3_vl as seeing
from tests.zoo import tiny
from tests.zoo.programs import decode, error, same
from zoo.checkpoint import skeleton
from zoo.generation.decoding import check_rewinds, prefill
from zoo.generation.engine import joined, padded
from zoo.models import qwen3_5, qwen3_vl
from zoo.nn.layers import Linear
from zoo.nn.model import Images
from zoo.nn.rope import MultiAxisRotary, Rotary
from zoo.surgery import modules, path_name
from zoo.vision.images import Qwen3VL, Qwen3VLVideo
from zoo.vision.prompts import encode_prompt


GOLDEN = dict(np.load(seeing.GOLDEN))
ALL = np.ones_like(seeing.PROMPTS)
ONES = jnp.asarray(ALL)


def images_of(image=seeing.BELONGS, feature=seeing.FEATURE):
    """All pictures, of tokens that belong to them."""
    return Images(*map(jnp.asarray, (seeing.patches(), seeing.GRIDS, image, feature)))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("seeing")
    return {name: seeing.write(root / name, name) for name in seeing.CHECKPOINTS}


@pytest.fixture(scope="module")
def models(folders):
    return functools.cache(lambda name: zoo.load(folders[name], parts=("vision",)))


@pytest.fixture(scope="module")
def model(models):
    return models("qwen3_vl")


def flat(features):
    """Those of all pictures, without padding."""
    return np.concatenate([np.asarray(x)[: grid.prod() // 4] for x, grid in zip(features, seeing.GRIDS, strict=True)])


def look(model, tokens=seeing.PROMPTS, images=None, segments=ALL, counted=ALL):
    """Gradients of the squared logits of the counted tokens; logits; features."""
    images = images_of() if images is None else images
    arrays = jnp.asarray(tokens), images, jnp.asarray(segments), jnp.asarray(counted, jnp.float32)
    (_, (logits, features)), gradients = _look(model, *arrays)
    return gradients, logits, features


@eqx.filter_jit
@eqx.filter_value_and_grad(has_aux=True)
def _look(model, tokens, images, segments, counted):
    logits = model.unembed(model.hidden(tokens, segments=segments, images=images)[0])
    features = model.vision.levels(images.patches, images.grids)
    return jnp.sum(jnp.sum(jnp.square(logits.astype(jnp.float32)), axis=-1) * counted), (logits, features)


@eqx.filter_jit
def run(model, tokens, images, segments=ONES):
    """Logits and features."""
    x, _, _ = model.hidden(tokens, segments=segments, images=images)
    return model.unembed(x), model.vision.levels(images.patches, images.grids)


def assert_golden(name, logits, features):
    """Of each row by itself, for they are of different sizes."""
    for ours, theirs in zip(logits, GOLDEN[f"{name} logits"], strict=True):
        assert error(ours, theirs) < 1e-4
    assert len(features) == 1 + len(seeing.CHECKPOINTS[name][1])
    for n, level in enumerate(features):
        assert error(flat(level), GOLDEN[f"{name} features {n}"]) < 1e-5


def test_logits_and_features(model):
    """Rows without an image, with one, with two of other shapes, and with a video and an image."""
    assert_golden("qwen3_vl", *look(model)[1:])


@pytest.mark.slow
def test_logits_and_features_of_a_mixture(models):
    assert_golden("qwen3_vl-moe", *run(models("qwen3_vl-moe"), jnp.asarray(seeing.PROMPTS), images_of()))


# Two documents with three images in a row, beside text with padding, a video cut off before text, and a row as it is.
INDEX = np.arange(40)
IDS = np.stack([np.where(INDEX < 13, 1, 2), np.where(INDEX < 30, 1, 0), np.where(INDEX < 24, 1, 2), ALL[0]])


def pack(array):
    """The rows of PROMPTS, or of what is told of their tokens, as packed in that way."""
    both, cut = np.concatenate([array[1, :13], array[2, :27]]), np.concatenate([array[3, :24], array[0, :16]])
    return np.stack([both, array[0], cut, array[3]])


def assert_packed(name, logits):
    golden = GOLDEN[f"{name} logits"]
    wanted = (
        (logits[0, :13], golden[1, :13]),
        (logits[0, 13:], golden[2, :27]),
        (logits[1, :30], golden[0, :30]),
        (logits[2, :24], golden[3, :24]),
        (logits[2, 24:], golden[0, :16]),
        (logits[3], golden[3]),
    )
    assert all(error(*pair) < 1e-4 for pair in wanted)


def test_packed_documents_with_images_equal_each_alone(model):
    """Logits, and gradients of the first row's."""
    images, first = images_of(pack(seeing.BELONGS), pack(seeing.FEATURE)), np.arange(4)[:, None] == np.zeros(40)
    gradients, logits, _ = look(model, pack(seeing.PROMPTS), images, IDS, first)
    assert_packed("qwen3_vl", logits)
    lone = np.stack([INDEX < 0, INDEX < 13, INDEX < 27, INDEX < 0]).astype(int)
    expected, _, _ = look(model, segments=lone, counted=lone)
    pairs = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True)
    for (path, ours), theirs in pairs:
        if path_name(path).endswith("attn.qkv.bias"):  # of the keys' it is 0 but for rounding: a softmax drops it
            ours, theirs = (np.delete(np.asarray(x).reshape(-1, 3, 16), 1, axis=1) for x in (ours, theirs))
        assert error(ours, theirs) < 3e-5, path_name(path)
        assert np.abs(ours).max() > 0


def test_a_hybrid(models):
    """Qwen3.5: as it is, and packed."""
    model = models("qwen3_5")
    assert_golden("qwen3_5", *run(model, jnp.asarray(seeing.PROMPTS), images_of()))
    images = images_of(pack(seeing.BELONGS), pack(seeing.FEATURE))
    assert_packed("qwen3_5", run(model, jnp.asarray(pack(seeing.PROMPTS)), images, jnp.asarray(IDS))[0])


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_5"])
def test_decoding_after_images(models, name):
    """Prompts of four lengths, each with its images, are read at once; then the rest is decoded token by token."""
    model, golden = models(name), GOLDEN[f"{name} logits"]
    lengths, steps = np.array([17, 13, 27, 38]), 5
    rows = [row[:length].tolist() for row, length in zip(seeing.PROMPTS, lengths, strict=True)]
    images = images_of(np.where(lengths[:, None] > INDEX, seeing.BELONGS, -1))
    state = prefill(model, None, *padded(rows, 4, 40), 40, None, images)
    for row, length in enumerate(lengths):
        assert error(state.logits[row], golden[row, length - 1]) < 1e-4
    cache, _ = state.caches
    for step in range(steps):
        at = np.where(lengths + step < 40, lengths + step, -1)[:, None]
        tokens = np.take_along_axis(seeing.PROMPTS, np.maximum(at, 0), axis=1)
        logits, cache = decode(model, jnp.asarray(tokens), cache, jnp.asarray(at))
        for row in np.flatnonzero(at[:, 0] >= 0):
            assert error(logits[row, 0], golden[row, at[row, 0]]) < 1e-4
    *_, (lag,) = cache
    assert lag.tokens.tolist() == [[0, 6 - 3, (4 - 4) + (6 - 3), 2 * (4 - 2) + (1 - 1)]]
    check_rewinds(model)


def test_axes():
    """Which axis each frequency turns by, as the published files say; without several coordinates it is `Rotary`."""
    axes = MultiAxisRotary(128, 5e6, None, (24, 20, 20)).axes
    assert np.bincount(axes).tolist() == [24, 20, 20] and axes[:6].tolist() == [0, 1, 2] * 2 and not axes[60:].any()
    assert np.bincount(MultiAxisRotary(64, 1e7, None, (11, 11, 10)).axes).tolist() == [11, 11, 10]
    x = jnp.asarray(np.random.RandomState(0).standard_normal((1, 5, 2, 16)), jnp.float32)
    own, plain, at = MultiAxisRotary(16, 1e4, None, (4, 2, 2)), Rotary(16, 1e4), jnp.arange(5)[None]
    for tokens in (Tokens(), Tokens(rotary=jnp.stack([at] * 3, axis=-1))):
        np.testing.assert_array_equal(own(x, tokens), plain(x, Tokens()))


@pytest.mark.parametrize("name", seeing.CHECKPOINTS)
def test_export_is_bit_equal(folders, models, tmp_path, name):
    """And config.json says the same as the one that was read."""
    folder, model = folders[name], models(name)
    zoo.save(model, tmp_path)
    before, after = convert.tensors.open_tensors(folder), convert.tensors.open_tensors(tmp_path)
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype
        assert before[key].view().tobytes() == after[key].view().tobytes()
    assert zoo.config(tmp_path) == zoo.config(folder) == model.config
    written, told = (json.loads((f / "config.json").read_text()) for f in (tmp_path, folder))
    for stated, ours in ((told, written), (told["vision_config"], written["vision_config"])):
        skipped = ("text_config", "vision_config", "initializer_range")
        assert {key: value for key, value in stated.items() if key not in skipped}.items() <= ours.items()
    assert seeing.rope(written["text_config"])["mrope_section"] == seeing.rope(told["text_config"])["mrope_section"]


def test_another_beginning_of_the_towers_names(folders, model, tmp_path):
    shutil.copy(folders["qwen3_vl"] / "config.json", tmp_path)
    renamed = {key.replace("model.visual.", "visual."): value for key, value in seeing.tensors("qwen3_vl").items()}
    safetensors.numpy.save_file(renamed, tmp_path / "model.safetensors")
    assert same(zoo.load(tmp_path, parts=("vision",)), model)


def test_without_the_part_it_is_the_text_model(folders, tmp_path):
    """Read as such, and saved as such, by the name that transformers has for it."""
    text = zoo.load(folders["qwen3_vl"])
    assert text.vision is None and text.config.vision is None
    zoo.save(text, tmp_path)
    assert same(zoo.load(tmp_path), text)
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["model_type"], told["architectures"]) == ("qwen3_vl_text", ["Qwen3VLTextModel"])
    assert "vision_config" not in told and "image_token_id" not in told
    assert set(convert.tensors.open_tensors(tmp_path)) == set(tiny.MODULES["qwen3_vl"].shapes(told))


def test_storage_in_8_bits_leaves_the_tower_alone(folders, model):
    small = zoo.load(folders["qwen3_vl"], parts=("vision",), quantize="int8")
    assert same(small.vision, model.vision)
    assert not any(modules(small.layers, Linear))


def test_on_a_mesh(folders):
    """The tower's matrices are split, and the work by pictures."""
    mesh = zoo.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    model = zoo.load(folders["qwen3_vl"], parts=("vision",), mesh=mesh)
    assert model.vision.blocks.head[0].mlp.linear_fc1.weight.sharding.spec == P("tensor", "fsdp")
    with jax.set_mesh(mesh):
        logits, features = run(model, jnp.asarray(seeing.PROMPTS), images_of())
    assert features[0].sharding.spec[0] == "fsdp"
    assert_golden("qwen3_vl", logits, features)


NAMES = {
    "qwen3-vl-2b": 2_127_532_032, "qwen3-vl-4b": 4_437_815_808, "qwen3-vl-8b": 8_767_123_696,
    "qwen3-vl-32b": 33_357_390_064, "qwen3-vl-30b-a3b": 31_070_754_032, "qwen3-vl-235b-a22b": 235_670_022_896,
    "qwen3.5-0.8b": 852_985_920, "qwen3.5-2b": 2_213_241_664, "qwen3.5-4b": 4_539_265_536,
    "qwen3.5-9b": 9_409_813_744, "qwen3.5-27b": 27_356_728_560, "qwen3.5-35b-a3b": 35_107_181_936,
    "qwen3.5-122b-a10b": 122_562_817_776, "qwen3.5-397b-a17b": 396_802_360_816, "qwen3.6-27b": 27_356_728_560,
    "qwen3.6-35b-a3b": 35_107_181_936, "qwen3.8-27b": 27_356_728_560,
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_number_of_parameters(name):
    """As the Hub shows it, of the repository; of Qwen3.5's without the module that predicts one more token."""
    family = qwen3_vl.FAMILY if "vl" in name else qwen3_5.FAMILY
    whole = skeleton(family, zoo.config(name), ("vision",))
    assert sum(array.size for array in jax.tree.leaves(whole)) == NAMES[name]


def test_deepstack_of_a_released_model():
    """The tower finds what DeepStack takes, and the first three layers are by themselves."""
    whole = skeleton(qwen3_vl.FAMILY, zoo.config("qwen3-vl-2b"), ("vision",))
    look = lambda tower: tower.levels(jnp.zeros((2, 16, 1536)), jnp.array([[4, 4], [2, 2]]))
    assert [level.shape for level in eqx.filter_eval_shape(look, whole.vision)] == [(2, 4, 2048)] * 4
    assert len(whole.layers.head) == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="gelu"), "vision_config says hidden_act='gelu', but only 'gelu_pytorch_tanh' is implemented"),
        (dict(window_size=8), r"vision_config has the key 'window_size' \(= 8\), which is not known here"),
        (dict(hidden_size=20), "hidden_size=20, which is no multiple of four times num_heads=2"),
        (dict(num_position_embeddings=8), "num_position_embeddings=8, no square"),
        (
            dict(deepstack_visual_indexes=[3, 5]),
            r"deepstack_visual_indexes=\[3, 5\], which do not rise from 0 to depth=5",
        ),
        (dict(out_hidden_size=16), "out_hidden_size=16, but the text model's hidden_size is 32"),
    ],
)
def test_a_tower_that_is_not_known(tmp_path, changes, message):
    tower = seeing.config("qwen3_vl")["vision_config"] | changes
    with pytest.raises(ValueError, match=message):
        zoo.config(seeing.write(tmp_path, "qwen3_vl", vision_config=tower))


def test_refusals(folders, tmp_path):
    with pytest.raises(ValueError, match="loaded without its vision tower, and so takes no images"):
        zoo.load(folders["qwen3_vl"])(jnp.asarray(seeing.PROMPTS), images=images_of())
    with pytest.raises(ValueError, match=r'has no vision tower: leave parts=\("vision",\) out'):
        zoo.load(tiny.write(tmp_path / "text", "qwen3_vl"), parts=("vision",))
    with pytest.raises(ValueError, match=r"mrope_interleaved=False, but only true is implemented"):
        zoo.config(tiny.write(tmp_path / "axes", "qwen3_vl", rope_scaling=dict(mrope_interleaved=False)))
    with pytest.raises(ValueError, match=r"model_type='qwen3_vl_text' with architectures=.*is not implemented"):
        zoo.config(tiny.write(tmp_path / "name", "qwen3_vl", architectures=["Qwen3ForCausalLM"]))
    with pytest.raises(ValueError, match=r"num_experts=0, which qwen3_vl_moe_text needs"):
        zoo.config(tiny.write(tmp_path / "dense", "qwen3_vl-moe", num_experts=0))


TEMPLATE = (  # as Qwen3-VL's writes images and videos
    "{% for m in messages %}{{ m.role + ' ' }}{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' or 'image' in p or 'image_url' in p %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif p.type == 'video' or 'video' in p %}"
    "<|vision_start|><|video_pad|><|vision_end|>{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %} assistant {% endif %}"
)
SPECIAL = {"<|image_pad|>": 60, "<|video_pad|>": 61, "<|vision_start|>": 62, "<|vision_end|>": 63}


@pytest.fixture(scope="module")
def chatty(folders):
    """The checkpoint with a tokenizer of 60 characters and those tokens, the template, and what prepares images."""
    vocabulary = {character: i for i, character in enumerate(" <>." + string.ascii_letters[:46] + string.digits)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary | SPECIAL, merges=[]))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    folder = folders["qwen3_vl"]
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(chat_template=TEMPLATE)))
    own = dict(size=dict(shortest_edge=16, longest_edge=96), patch_size=2, merge_size=2, temporal_patch_size=2)
    for file in ("preprocessor_config.json", "video_preprocessor_config.json"):
        (folder / file).write_text(json.dumps(own))
    return zoo.tokenizer(folder)


def test_chats(model, chatty):
    """Two images of other shapes, and a video; what is generated is what whole passes over the row say."""
    shades = np.random.RandomState(8).randint(0, 256, (12, 30, 3), np.uint8)
    shown = [PIL.Image.fromarray(shades[:, :width]) for width in (8, 30)]
    parts = [{"type": "image", "image": image} for image in shown]
    messages = [{"role": "user", "content": [parts[0], {"type": "text", "text": "and"}, parts[1]]}]
    ids, images = encode_prompt(model, chatty, messages)
    sizes = [(3, 2), (1, 3)]  # in features; the second image is made smaller
    assert images.grids.tolist() == [[6, 4], [2 * sizes[1][0], 2 * sizes[1][1]]]
    inside = [[62, *[60] * (rows * columns), 63] for rows, columns in sizes]
    start, end = chatty.encode("user "), chatty.encode(" assistant ")
    assert ids == [*start, *inside[0], *chatty.encode("and"), *inside[1], *end]
    processed = [Qwen3VL.read(model.config.source)(np.asarray(image)) for image in shown]
    for n, one in enumerate(processed):
        np.testing.assert_array_equal(images.patches[n, : len(one.patches)], one.patches)

    frames = [PIL.Image.fromarray(shades[n : n + 8, :8]) for n in range(3)]
    film = {"type": "video", "video": frames, "fps": 2}
    ids_of_both, of_both = encode_prompt(model, chatty, [{"role": "user", "content": [parts[0], film]}])
    video = Qwen3VLVideo.read(model.config.source)([np.asarray(frame) for frame in frames], [0.0, 0.5, 1.0])
    (pairs, rows, columns), count = video.grids[0], int(video.grids[0].prod()) // 8
    assert pairs == 2 and of_both.grids.tolist() == [[6, 4], [rows, columns], [rows, columns]]
    times = ["<0.2 seconds>", "<1.0 seconds>"]
    stamped = [id for time in times for id in (*chatty.encode(time), 62, *[61] * count, 63)]
    assert ids_of_both == [*start, *inside[0], 62, *stamped, 63, *end]
    for n, patches in enumerate(np.split(video.patches, 2), start=1):
        np.testing.assert_array_equal(of_both.patches[n, : len(patches)], patches)
    where = np.flatnonzero(np.array(ids_of_both) == 61)
    assert of_both.image[0, where].tolist() == [1] * count + [2] * count
    for changes, message in (
        (dict(video="film.mp4"), "A video is a list of its frames, each as an image"),
        (dict(fps=None), "A video says how many frames it has in a second"),
    ):
        with pytest.raises(ValueError, match=message):
            encode_prompt(model, chatty, [{"role": "user", "content": [film | changes]}])

    expected, row, of_row = [], np.zeros((1, 64), int), jax.tree.map(jnp.asarray, joined([images], 1, 64))
    row[0, : len(ids)] = ids
    look = eqx.filter_jit(lambda model, tokens, images: model(tokens, images=images))
    for n in range(len(ids), len(ids) + 3):
        row[0, n] = look(model, jnp.asarray(row), of_row)[0, n - 1].argmax()
        expected.append(int(row[0, n]))
    assert zoo.generate(model, chatty, [messages], max_new_tokens=3) == [chatty.decode(expected)]


@pytest.mark.live
@pytest.mark.parametrize("name", seeing.CHECKPOINTS)
def test_live(folders, models, name, tmp_path):
    """The golden values are transformers', and its export is read; gradients are its own; errors in bfloat16 too."""
    reference, family = seeing.theirs(folders[name]), zoo.registry.family_of(zoo.config(folders[name]))
    live = seeing.computed(reference)
    assert all(error(GOLDEN[f"{name} {key}"], live[key]) < 1e-5 for key in live)
    model = models(name)
    zoo.save(model, tmp_path / "ours")
    assert error(seeing.computed(seeing.theirs(tmp_path / "ours"))["logits"], live["logits"]) < 1e-5
    reference.save_pretrained(tmp_path / "theirs")
    if name == "qwen3_vl-moe":  # experts the other way round than on the Hub, where it turns them as it reads them
        with pytest.raises(ValueError, match=r"experts\.gate_up_proj in .* has shape \(6, 48, 32\)"):
            zoo.load(tmp_path / "theirs", parts=("vision",))
    else:
        assert same(zoo.load(tmp_path / "theirs", parts=("vision",)), model)

    seeing.logits_of(reference).square().sum().backward()
    theirs = {key: value.grad.numpy() for key, value in reference.named_parameters()}
    ours = zoo.checkpoint.export(look(model)[0], family)
    assert ours.keys() == theirs.keys()
    for key, (_, _, get) in ours.items():
        gradient = get().swapaxes(-1, -2) if "mlp.experts" in key else get()  # which transformers has transposed
        wanted = theirs[key]
        if key.endswith(("attn.qkv.bias", "k_proj.bias")):
            continue  # in part 0 but for rounding
        assert error(gradient, wanted) < 1e-4, key

    rounded = seeing.computed(seeing.theirs(folders[name], "bfloat16"))
    logits, features = run(zoo.load(folders[name], parts=("vision",), dtype="bfloat16"), seeing.PROMPTS, images_of())
    mean = lambda x, key: np.abs(np.asarray(x, np.float32) - live[key]).mean()
    for value, key in ((logits, "logits"), *((flat(x), f"features {n}") for n, x in enumerate(features))):
        assert value.dtype == jnp.bfloat16 and mean(value, key) < 1.2 * mean(rounded[key], key), key
