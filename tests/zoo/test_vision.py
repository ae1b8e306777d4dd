"""Models that see equal transformers: logits, features, gradients, decoding, packing, files."""

import base64
import io
import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import safetensors.numpy
from jax.sharding import PartitionSpec as P

import convert.tensors
import zoo
from tests.zoo import seeing, tiny
from tests.zoo.programs import decode, error, same
from tests.zoo.test_serve import CHAT, Running
from zoo.generation.decoding import prefill
from zoo.generation.engine import Engine, joined, padded
from zoo.generation.speculative import ModelDraft
from zoo.models import gemma3
from zoo.nn.layers import Linear
from zoo.nn.model import Images
from zoo.serve.fields import Refusal, in_template_form
from zoo.surgery import modules, path_name
from zoo.vision.prompts import encode_prompt


GOLDEN = dict(np.load(seeing.GOLDEN))
TOKENS = jnp.asarray(seeing.PROMPTS)


def patches(pixels):
    """[images, channels, height, width] -> [images, patches, channels * 2 * 2]."""
    n, channels, height, width = pixels.shape
    cut = pixels.reshape(n, channels, height // 2, 2, width // 2, 2).transpose(0, 2, 4, 1, 3, 5)
    return cut.reshape(n, -1, channels * 4)


images_of = lambda *args: jax.tree.map(jnp.asarray, Images.of(*args))
IMAGES = images_of(patches(seeing.PIXELS), 9, seeing.PROMPTS, 63)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return seeing.write(tmp_path_factory.mktemp("seeing") / "gemma3")


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder, parts=("vision",))


@eqx.filter_jit
def run(model, tokens, images, segments=None):
    x, _, _ = model.hidden(tokens, segments=segments, images=images)
    return model.unembed(x), model.vision.tower(images.patches), model.vision(images.patches, images.grids)


look = eqx.filter_jit(lambda model, tokens, images: model(tokens, images=images))


def test_logits_and_features(model):
    for ours, name, bound in zip(
        run(model, TOKENS, IMAGES), ("logits", "tower", "features"), (1e-4, 1e-5, 1e-5), strict=True
    ):
        assert error(ours, GOLDEN[name]) < bound, name


def test_an_image_is_seen_both_ways(model):
    """Without spans the logits of the prompts with images are others, so the test above looks at them."""

    @eqx.filter_jit
    def causal(model, tokens, images):
        x = model.embed_tokens(jnp.where(images.image < 0, tokens, 0)) * jnp.asarray(32**0.5)
        x, _, _ = model.layers(images.instead_of(x, model.vision(images.patches, images.grids)))
        return model.unembed(model.norm(x))

    logits = causal(model, TOKENS, IMAGES)
    assert error(logits[0], GOLDEN["logits"][0]) < 1e-4
    assert all(error(logits[n], GOLDEN["logits"][n]) > 1e-2 for n in (1, 2))


def test_decoding_after_images(model):
    """Prompts of three lengths, each with its images, are read at once; then the rest is decoded token by token."""
    lengths, steps = np.array([17, 40, 30]), 10
    rows = [row[:length] for row, length in zip(seeing.PROMPTS, lengths, strict=True)]
    cut = patches(seeing.PIXELS)
    images = [None, Images.of(cut[:1], 9, rows[1][None], 63), Images.of(cut[1:], 9, rows[2][None], 63)]
    state = prefill(model, None, *padded([row.tolist() for row in rows], 3, 40), 40, None, joined(images, 3, 40))
    for row, length in enumerate(lengths):
        assert error(state.logits[row], GOLDEN["logits"][row, length - 1]) < 1e-4
    cache, _ = state.caches
    for step in range(steps):
        at = np.where(lengths + step < 40, lengths + step, -1)[:, None]
        tokens = np.take_along_axis(seeing.PROMPTS, np.maximum(at, 0), axis=1)
        logits, cache = decode(model, jnp.asarray(tokens), cache, jnp.asarray(at))
        for row in np.flatnonzero(at[:, 0] >= 0):
            assert error(logits[row, 0], GOLDEN["logits"][row, at[row, 0]]) < 1e-4


@pytest.fixture(scope="module")
def chatty(folder):
    return zoo.tokenizer(seeing.chatty(folder))


def test_chats_with_images(model, chatty):
    """Two images, one as Pillow's and one as a data URL; users' letters of a control token are text."""
    shown = [
        PIL.Image.fromarray(((pixels + 1) * 127.5).astype(np.uint8).transpose(1, 2, 0)) for pixels in seeing.PIXELS
    ]
    shown[1].save(file := io.BytesIO(), "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    parts = [
        {"type": "text", "text": "see<start_of_image>"},
        {"type": "image", "image": shown[0]},
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "text", "text": "what is it"},
    ]
    messages = [{"role": "user", "content": parts}]
    ids, images = encode_prompt(model, chatty, messages)
    inside = [60, 60, 61, *[63] * 9, 62, 60, 60]
    assert ids[-40:] == [*inside, *inside, *chatty.encode("what is it")] and ids.count(61) == 2
    want = np.stack([np.asarray(image, np.float32) / 127.5 - 1 for image in shown[:2]]).transpose(0, 3, 1, 2)
    assert np.abs(images.patches - patches(want)).max() < 1e-6

    expected, row = [], np.zeros((1, 64), int)
    row[0, : len(ids)] = ids
    of_row = jax.tree.map(jnp.asarray, joined([images], 1, 64))
    for n in range(len(ids), len(ids) + 3):
        logits = look(model, jnp.asarray(row), of_row)
        row[0, n] = logits[0, n - 1].argmax()
        expected.append(int(row[0, n]))
    assert not set(expected) & set(chatty.eos)
    assert zoo.generate(model, chatty, [messages], max_new_tokens=3) == [chatty.decode(expected)]
    for method in (chatty.encode_prompt, chatty.encode_chat):  # what the server and training call
        with pytest.raises(
            ValueError, match=r"A message holds an image\. zoo.generate, the chat and the server take it"
        ):
            method(messages)
    for part, message in (
        ({"type": "image"}, "says nowhere where it lies: give it one of image, path, url"),
        ({"type": "image", "path": "no.png"}, "'no.png' cannot be read"),
        ({"type": "image", "url": "https://example.org/a.png"}, "is not downloaded unless"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.generate(model, chatty, [{"role": "user", "content": [part]}])


def test_the_server(model, chatty):
    """An image as OpenAI's clients send it, a file that a client names, and a server whose model takes none."""
    PIL.Image.new("RGB", (30, 20), "red").save(file := io.BytesIO(), "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    question = {"type": "text", "text": "what is it"}
    of = lambda url: [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}, question]}]
    with Running(model, chatty) as server:
        said = server.ask(CHAT, messages=of(url), max_tokens=3, temperature=0)
        assert said["choices"][0]["message"]["content"] == zoo.generate(model, chatty, of(url), max_new_tokens=3)
        for wrong, message in (
            ("/etc/passwd", "An image must be"),
            ("data:image/png;base64,AAAA", "no image of a kind"),
        ):
            status, answer = server.request(CHAT, {"messages": of(wrong)})
            assert status == 400 and message in answer
    beside = of(url)[0]["content"][0] | {"path": "/etc/passwd"}
    (part,) = in_template_form({"content": [beside]}, True)["content"]
    assert part == of(url)[0]["content"][0]
    for kind in ("image", "video"):
        with pytest.raises(Refusal, match="An image must be"):
            in_template_form({"content": [{"type": kind, kind: ["/etc/passwd"], "image_url": {"url": url}}]}, True)
    with pytest.raises(Refusal, match=r"this server takes no images \(--images\)"):
        in_template_form(of(url)[0], False)


def test_packed_documents_with_images_equal_each_alone(model):
    """Logits and gradients: two documents with images in a row, the second cut off, beside text with padding."""
    row = np.concatenate([seeing.PROMPTS[2, :27], seeing.PROMPTS[1, 27:]])
    index = np.arange(40)
    prompts = np.stack([row, seeing.PROMPTS[0], seeing.PROMPTS[0]])
    segments = np.stack([np.where(index < 27, 1, 2), np.where(index < 30, 1, 0), np.where(index < 20, 1, 2)])
    images = images_of(patches(seeing.PIXELS[[1, 2, 0]]), 9, prompts, 63)

    @eqx.filter_jit
    @eqx.filter_value_and_grad(has_aux=True)
    def packed(model, tokens, images, segments, counted):
        logits = model.unembed(model.hidden(tokens, segments=segments, images=images)[0])
        return jnp.sum(jnp.sum(jnp.square(logits), axis=-1) * counted), logits

    (_, logits), gradients = packed(
        model, prompts, images, segments, (np.arange(3)[:, None] == np.zeros(40)).astype(np.float32)
    )
    assert error(logits[0, :27], GOLDEN["logits"][2, :27]) < 1e-4
    assert error(logits[1, :30], GOLDEN["logits"][0, :30]) < 1e-4
    alone = np.zeros_like(prompts)
    alone[0, :27], alone[1, :13] = row[:27], row[27:]
    lone = images_of(patches(seeing.PIXELS[[1, 2, 0]]), 9, alone, 63)
    ones = np.stack([index < 27, index < 13, index < 0]).astype(int)
    (_, apart), expected = packed(model, alone, lone, ones, ones.astype(np.float32))
    assert error(logits[0, 27:], apart[1, :13]) < 1e-5
    pairs = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True)
    for (path, ours), theirs in pairs:
        if not path_name(path).endswith("k_proj.bias"):  # whose gradient is 0 but for rounding: a softmax drops it
            assert error(ours, theirs) < 3e-5, path_name(path)
        assert np.abs(ours).max() > 0


@pytest.mark.parametrize("start", ["", "model."])
def test_names_that_transformers_writes(folder, model, tmp_path, start):
    """Since 4.52 all are within `model.`; 5.23 writes the tower without `vision_model.`, too."""
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    new = {"vision_tower.vision_model.": "vision_tower."} if start else {}
    names = {"vision_tower.": start + "vision_tower.", "multi_modal_projector.": start + "multi_modal_projector."} | new
    if start:
        names |= {"language_model.model.": "model.language_model.", "vision_tower.vision_model.": "model.vision_tower."}
    begin = sorted(names, key=len, reverse=True)
    old = {name: next((b for b in begin if name.startswith(b)), "") for name in tensors}
    renamed = {names.get(b, "") + name.removeprefix(b): tensors[name] for name, b in old.items()}
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
    assert written["architectures"] == read["architectures"]
    assert {k: v for k, v in read["vision_config"].items() if "dropout" not in k} == written["vision_config"]


def test_without_the_part_it_is_the_text_model(folder, tmp_path):
    text = zoo.load(folder)
    assert text.vision is None and text.config.vision is None
    assert same(text, zoo.load(tiny.write(tmp_path, seeing.TEXT)))


def test_storage_in_8_bits_leaves_the_tower_alone(folder, model):
    small = zoo.load(folder, parts=("vision",), quantize="int8")
    assert same(small.vision, model.vision)
    assert not any(modules(small.layers, Linear))


def test_on_a_mesh(folder):
    """The tower's matrices are split, and the work by images; the fourth image is there to make them even."""
    mesh = zoo.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    model = zoo.load(folder, parts=("vision",), mesh=mesh)
    fc1 = model.vision.tower.layers.period[0].mlp.fc1.weight
    assert fc1.sharding.spec == P("stage", "tensor", "fsdp")
    four = lambda x: jnp.concatenate([x, x[:1]])
    images = jax.tree.map(four, IMAGES)
    with jax.set_mesh(mesh):
        logits, tower, _ = run(model, four(TOKENS), images)
    assert tower.sharding.spec[0] == "fsdp"
    assert error(logits[:3], GOLDEN["logits"]) < 1e-4 and error(tower[:3], GOLDEN["tower"]) < 1e-5


@pytest.mark.parametrize("name", ["gemma3-4b", "gemma3-12b", "gemma3-27b"])
def test_number_of_parameters(name):
    """As the Hub shows it, of the repository."""
    whole = zoo.checkpoint.skeleton(gemma3.FAMILY, zoo.config(name), ("vision",))
    released = {"gemma3-4b": 4_300_079_472, "gemma3-12b": 12_187_325_040, "gemma3-27b": 27_432_406_640}
    assert sum(array.size for array in jax.tree.leaves(whole)) == released[name]


def test_refusals(folder, model, tmp_path):
    text = zoo.load(folder)
    with pytest.raises(ValueError, match=r'loaded without its vision tower, and so takes no images: parts=\("vision",'):
        text(TOKENS, images=IMAGES)
    with pytest.raises(ValueError, match="A model of qwen3 takes no images; load one that can, such as gemma3-4b-it"):
        zoo.load(tiny.write(tmp_path / "qwen3", "qwen3"))(TOKENS, images=IMAGES)
    with pytest.raises(ValueError, match=r'has no vision tower: leave parts=\("vision",\) out'):
        zoo.load(tiny.write(tmp_path / "text", seeing.TEXT), parts=("vision",))
    one = Images.of(patches(seeing.PIXELS[:1]), 9, seeing.PROMPTS[1:2], 63)
    for engine, message in (
        (Engine(text, batch=1, max_tokens=48), "takes no images"),
        (Engine(model, batch=1, max_tokens=48, draft=ModelDraft(text, 2)), "A draft takes no images"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(seeing.PROMPTS[1].tolist(), max_new_tokens=4, images=one)
    with pytest.raises(ValueError, match="2 images are 18 tokens, 9 each, but the prompts have 27 of them"):
        Images.of(patches(seeing.PIXELS[:2]), 9, seeing.PROMPTS, 63)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(hidden_act="gelu"), "vision_config says hidden_act='gelu', but only 'gelu_pytorch_tanh' is implemented"),
        (dict(cls_token=True), r"vision_config has the key 'cls_token' \(= True\), which is not known here"),
        (dict(hidden_size=25), "hidden_size=25, which is no multiple of num_attention_heads=2"),
        (dict(patch_size=5), "image_size=12, which is no multiple of patch_size=5"),
        (dict(image_size=8), "mm_tokens_per_image=9 is no square of a divisor of the 4 patches"),
        (dict(image_size="big"), "vision_config says image_size='big'; it needs int"),
    ],
)
def test_a_tower_that_is_not_known(tmp_path, changes, message):
    vision = seeing.CONFIG["vision_config"] | changes
    with pytest.raises(ValueError, match=message):
        zoo.config(seeing.write(tmp_path, vision_config=vision))


@pytest.mark.live
def test_live(folder, model, tmp_path):
    """The golden values are transformers'; its export is read; in bfloat16 the errors are like its own."""
    live = seeing.computed(seeing.theirs(folder))
    assert all(error(GOLDEN[name], live[name]) < 1e-5 for name in GOLDEN)
    zoo.save(model, tmp_path / "ours")
    assert error(seeing.computed(seeing.theirs(tmp_path / "ours"))["logits"], live["logits"]) < 1e-5
    seeing.theirs(folder).save_pretrained(tmp_path / "theirs")
    assert same(zoo.load(tmp_path / "theirs", parts=("vision",)), model)
    rounded = seeing.computed(seeing.theirs(folder, "bfloat16"))
    ours = run(zoo.load(folder, parts=("vision",), dtype="bfloat16"), TOKENS, IMAGES)
    mean = lambda x, name: np.abs(np.asarray(x, np.float32) - live[name]).mean()
    for value, name in zip(ours, ("logits", "tower", "features"), strict=True):
        assert value.dtype == jnp.bfloat16 and mean(value, name) < 1.2 * mean(rounded[name], name)
