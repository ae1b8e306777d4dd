"""Models that take images, by one contract: they equal transformers in logits and features, with documents packed and
alone, in gradients, decoding, chats, files, and on a mesh.

`tests.zoo.tiny.SEEING` has the checkpoints, with prompts and pictures; golden/vision/ has transformers' numbers.
"""

import base64
import dataclasses
import json
import shutil

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pytest
import safetensors.numpy

import convert.tensors
import zoo
import zoo.serve.prompts
import zoo.vision.open
from tests.close import close
from tests.zoo import seeing, tiny
from tests.zoo.programs import MODEL, decode, error, on_host, same, skeleton, thorough
from tests.zoo.test_continue import assert_goes_on
from tests.zoo.test_images import png
from tests.zoo.test_serve import CHAT, Running
from tests.zoo.tiny import gemma3
from zoo.generation.decoding import Reading, check_rewinds, init_state, read
from zoo.generation.engine import Engine
from zoo.generation.images import batched_images, part_of_images
from zoo.generation.shapes import bucket, padded
from zoo.generation.speculative import ModelDraft
from zoo.nn.fields import is_ignorable
from zoo.nn.layers import AbstractLinear, Linear
from zoo.nn.model import Images
from zoo.serve.fields import Refusal, in_template_form
from zoo.surgery import modules, partition_specs, path_name
from zoo.text.prompts import encode_prompt
from zoo.weights.checkpoint import export, standard_names


TOWERS = ["gemma3-pattern", "gemma4", "llama4", "ministral3", "muse_glimmer", "qwen2_5_vl", "qwen3_vl"]
EACH = pytest.mark.parametrize("name", [*TOWERS, "qwen3_5"])
# Images that see both ways. Images of any shape, with positions on three axes, are decoded after in the default tier.
QUICK = ["gemma3-pattern"]
OTHERS = [name for name in [*TOWERS, "qwen3_5"] if name not in QUICK]
GRADIENTS = ["gemma3-pattern", "gemma4-shared", "llama4", "ministral3", "muse_glimmer", "qwen2_5_vl", "qwen3_vl"]
NEW = 3  # number of generated tokens
EVERY = pytest.mark.parametrize("name", tiny.SEEING)


def look(case, model, tokens=None, images=None, segments=None, counted=None, *, gradients=None):
    """Returns logits and features of the prompts, or of other rows, by one program; by default all tokens are of
    segment 1.

    It also returns gradients of the squared logits of the tokens that count, by default all tokens. The gradients are
    None except for the checkpoints of `GRADIENTS`.
    """
    if tokens is None:
        tokens, images = case.prompts, case.images()
    segments, counted = (np.ones_like(case.prompts) if given is None else given for given in (segments, counted))
    program = _with_gradients if (case.name in GRADIENTS if gradients is None else gradients) else _without
    arguments = case, *jax.device_put((images, tokens, segments, np.float32(counted)))
    (logits, features), gradients = on_host(program(model, *arguments))
    return logits, features, gradients


def _sum(model, case, images, tokens, segments, counted):
    logits = model.unembed(model.hidden(tokens, segments=segments, images=images)[0])
    squares = jnp.sum(jnp.square(logits.astype(jnp.float32)), axis=-1)
    return jnp.sum(squares * counted), (logits, case.features(model, images))


@eqx.filter_jit
def _with_gradients(*arguments):
    (_, out), gradients = eqx.filter_value_and_grad(_sum, has_aux=True)(*arguments)
    return out, gradients


@eqx.filter_jit
def _without(*arguments):
    return _sum(*arguments)[1], None


def flat(case, features):
    """Returns the features of all pictures one after another, without padding."""
    merged = case.room // features.shape[1]  # patches per feature
    counts = [len(picture) // merged for picture in case.pictures]
    return np.concatenate([np.asarray(x, np.float32)[:n] for x, n in zip(features, counts, strict=True)])


def assert_golden(case, logits, features):
    """Compares each row by itself, because rows differ in size."""
    golden = case.golden()
    for ours, theirs in zip(logits, golden.pop("logits"), strict=True):
        assert error(ours, theirs) < 1e-4
    assert features.keys() == golden.keys()
    for key, theirs in golden.items():
        close({key: flat(case, features[key])}, {key: theirs.reshape(-1, theirs.shape[-1])}, terms=MODEL)


@pytest.mark.parametrize(
    "name", [*QUICK, *map(thorough, [*OTHERS, "gemma4-dense", "mistral", "qwen3_vl-moe", "gemma4-shared"])]
)
def test_logits_and_features(load_vision, name):
    """Rows without an image, with one, and with several are right; of one shape, or of any shape with padding."""
    case = tiny.SEEING[name]
    logits, features, _ = look(case, load_vision(name))
    assert_golden(case, logits, features)


@pytest.mark.thorough
@pytest.mark.parametrize("name", TOWERS)
def test_ids_of_image_tokens_may_be_beyond_the_table(load_vision, name):
    """The embedding refuses such ids of text."""
    case, model = tiny.SEEING[name], load_vision(name)
    images, beyond = case.images(), model.config.vocab_size + 5
    assert (images.image >= 0).any()
    tokens, prompts = jax.device_put((np.where(images.image < 0, case.prompts, beyond), case.prompts))
    assert np.array_equal(model.embed_text(tokens, images), model.embed_text(prompts, images))
    with pytest.raises(ValueError, match=str(beyond)):
        model.embed_tokens(tokens)


def located(documents):
    """Yields a row's documents, each with its slice of the row."""
    at = 0
    for document in documents:
        _, start, stop, _ = document
        yield slice(at, at + stop - start), document
        at += stop - start


def pack(case, rows):
    """Returns the tokens, images and segments of rows of documents, which are pieces of the prompts."""
    images = case.images()
    whole = np.stack([case.prompts, images.image, images.feature, np.ones_like(case.prompts)])
    packed = np.zeros_like(whole)
    packed[1] = -1
    for row, documents in enumerate(rows):
        for here, (source, start, stop, segment) in located(documents):
            packed[:, row, here] = whole[:, source, start:stop]
            packed[3, row, here] = segment
    tokens, image, feature, segments = packed
    return tokens, Images(images.patches, images.grids, image, feature), segments


@pytest.mark.parametrize("name", [*QUICK, *map(thorough, [*OTHERS, "gemma4-shared"])])
def test_packed_documents_with_images_equal_each_alone(load_vision, name):
    """Logits are equal, and gradients of the first row's, whose documents have all of their images, or part of one."""
    case, model = tiny.SEEING[name], load_vision(name)
    golden, count, first = case.golden()["logits"], len(case.prompts), case.packed[0]
    in_first = (np.arange(count) == 0)[:, None] * np.ones_like(case.prompts)
    logits, _, gradients = look(case, model, *pack(case, case.packed), in_first)
    for row, documents in zip(logits, case.packed, strict=True):
        for here, (source, start, stop, segment) in located(documents):
            if segment and start == 0:
                assert error(row[here], golden[source, :stop]) < 1e-4
    alone = pack(case, [[(*piece, 1)] for *piece, _ in first] + [[]] * (count - len(first)))
    apart, _, expected = look(case, model, *alone, alone[-1])
    for own, (here, (_, start, stop, _)) in zip(apart, located(first), strict=False):
        close(logits[0, here], own[: stop - start], terms=MODEL)
    pairs = zip(jax.tree_util.tree_leaves_with_path(gradients), jax.tree.leaves(expected), strict=True)
    for (path, ours), theirs in pairs:
        if path_name(path).endswith(case.fixed):
            continue
        assert np.abs(ours).max() > 0, path_name(path)
        if pair := without_rounding(path_name(path), ours, theirs):
            close(*({path_name(path): x} for x in pair), terms=4 * MODEL)


def without_rounding(name, *gradients):
    """Removes gradients by what all keys have in common, which a softmax drops, so that they are 0 up to rounding.
    Returns None if nothing is left.
    """
    if name.endswith("k_proj.bias"):
        return None
    if name.endswith("attn.qkv.bias"):
        return [np.delete(np.asarray(x).reshape(-1, 3, x.shape[-1] // 3), 1, axis=1) for x in gradients]
    return gradients


def separate(case):
    """Returns the prompts of a case, and the images of each."""
    images, lengths = jax.tree.map(np.asarray, case.images()), case.lengths
    prompts = [prompt[:length].tolist() for prompt, length in zip(case.prompts, lengths, strict=True)]
    of_row = lambda x, row: x[row : row + 1]
    rows = [
        Images(images.patches, images.grids, of_row(images.image, n), of_row(images.feature, n))
        for n in range(len(prompts))
    ]
    return prompts, [part_of_images(row, 0, length) for row, length in zip(rows, lengths, strict=True)]


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma3-pattern", "llama4", "qwen3_vl", "qwen3_5"])
def test_texts_with_images_go_on(untyped, load_vision, name):
    """A turn may have images, and so may the text before it. Chunks end where images do."""
    case, model = tiny.SEEING[name], load_vision(name)
    prompts, images = separate(case)
    (prompt, seen), *_ = ((a, b) for a, b in zip(prompts, images, strict=True) if b is not None)
    start = int(np.argmax(seen.image[0] >= 0)) - 2  # a short prompt, since the models have few positions
    prompt, seen = prompt[start:], part_of_images(seen, start, len(prompt))
    engine = Engine(model, batch=2, max_tokens=2 * len(prompt) + 20, page=8, stride=4, chunk=8)
    assert_goes_on(engine, [prompt], prompt, [seen], seen)


@pytest.mark.parametrize("name", ["qwen3_5", *map(thorough, TOWERS)])
def test_decoding_after_images(untyped, load_vision, name):
    """Prompts of several lengths, each with its images, are prefilled at once; the rest is decoded token by token.

    Rows are as long as `zoo.generate` makes them.
    """
    case, model = tiny.SEEING[name], load_vision(name)
    golden, lengths = case.golden()["logits"], np.array(case.lengths)
    rows, seq = case.prompts.shape
    prompts, each = separate(case)
    longest = bucket(seq)
    tokens, counts = padded(prompts, rows, longest)
    images = batched_images(each, rows, longest)
    new = Reading(np.arange(rows, dtype=np.int32), tokens, np.zeros_like(counts), counts, images)
    state, _ = read(((model, None), new, []), init_state(model, None, rows, longest + NEW, None, None, None))
    first = np.asarray(state.logits)
    for row, length in enumerate(lengths):
        assert error(first[row], golden[row, length - 1]) < 1e-4
    cache, _ = state.caches
    for step in range(case.steps):
        at = np.where(lengths + step < seq, lengths + step, -1)[:, None]
        tokens = np.take_along_axis(case.prompts, np.maximum(at, 0), axis=1)
        logits, cache = decode(model, jax.device_put(tokens), cache, jax.device_put(at))
        logits = np.asarray(logits)
        for row in np.flatnonzero(at[:, 0] >= 0):
            assert error(logits[row, 0], golden[row, at[row, 0]]) < 1e-4
    if case.lags:
        *_, (lag,) = cache
        assert lag.tokens.tolist() == [list(case.lags)]
    check_rewinds(model)


@pytest.mark.parametrize("name", TOWERS)
def test_chats(load_vision, vision_folders, name):
    """The encoded chat has the right tokens for its images, and each of these has the right picture and feature."""
    case, model, folder = tiny.SEEING[name], load_vision(name), vision_folders[name]
    tokenizer = zoo.tokenizer(folder)
    for chat in case.chats(folder, tokenizer):
        ids, images = encode_prompt(model, tokenizer, chat.messages)
        assert ids == chat.ids
        assert np.array_equal(images.grids, chat.grids)
        assert images.patches.shape[:2] == (len(chat.pictures), chat.room)
        for ours, patches in zip(images.patches, chat.pictures, strict=True):
            assert np.abs(ours[: len(patches)] - patches).max() <= chat.within and not ours[len(patches) :].any()
        here, counts = np.isin(ids, case.ids), chat.grids.prod(axis=1) // 4
        assert images.image[0, here].tolist() == np.repeat(np.arange(len(counts)), counts).tolist()
        assert images.feature[0, here].tolist() == [n for count in counts for n in range(count)]
        assert (images.image[0, ~here] == -1).all()


@EVERY
def test_export_is_bit_equal(load_vision, vision_folders, name, tmp_path):
    """The config.json is also the same as the one that was read, except for a few keys."""
    case, model, folder = tiny.SEEING[name], load_vision(name), vision_folders[name]
    zoo.save(on_host(model), tmp_path)
    before, after = convert.tensors.open_tensors(folder), convert.tensors.open_tensors(tmp_path)
    assert before.keys() == after.keys()
    for key in before:
        assert before[key].dtype == after[key].dtype
        assert before[key].view().tobytes() == after[key].view().tobytes()
    assert zoo.config(tmp_path) == zoo.config(folder) == model.config

    told, written = (json.loads((path / "config.json").read_text()) for path in (folder, tmp_path))
    axes = lambda text: (text.get("rope_scaling") or text.get("rope_parameters") or {}).get("mrope_section")
    assert axes(written["text_config"]) == axes(told["text_config"])
    common = told["text_config"] | dict(dtype="float32", tie_word_embeddings=model.config.tie_word_embeddings)
    differ = []
    for part, beyond in (("text_config", None), ("vision_config", {}), (None, common)):
        old, new = (hub.pop(part) if part else hub for hub in (told, written))
        start = f"{part}." if part else ""
        differ += [start + key for key in old if not is_ignorable(key) and (key not in new or new[key] != old[key])]
        assert beyond is None or {key: new[key] for key in new.keys() - old.keys()}.items() <= beyond.items()
    assert sorted(differ) == sorted(case.restated)


@pytest.mark.parametrize("name", TOWERS)
def test_without_the_part_it_is_the_text_model(load_vision, vision_folders, name, tmp_path):
    """A checkpoint without its tower is read as a text model, and saved as one, under transformers' names."""
    case, model = tiny.SEEING[name], load_vision(name)
    text = zoo.load(vision_folders[name])
    assert text.vision is None and text.config == dataclasses.replace(model.config, vision=None)
    zoo.save(on_host(text), tmp_path)
    assert same(zoo.load(tmp_path), text)
    told = json.loads((tmp_path / "config.json").read_text())
    assert (told["model_type"], *told["architectures"]) == case.text_names
    assert not told.keys() & {"text_config", "vision_config", "image_token_id", "image_token_index"}
    beside = ("vision_", "multi_modal_projector.", "visual.", "model.visual.", "model.vision_", "model.embed_vision.")
    of_text = {k.replace("language_model.", ""): v for k, v in case.tensors().items() if not k.startswith(beside)}
    saved = convert.tensors.open_tensors(tmp_path)
    assert saved.keys() == of_text.keys()
    assert all(np.array_equal(saved[key].view(), of_text[key]) for key in saved)


@pytest.mark.parametrize("name", TOWERS)
def test_other_names_of_tensors(load_vision, vision_folders, name, tmp_path):
    """Tensors may have the names of other releases, and those that transformers writes."""
    case = tiny.SEEING[name]
    shutil.copy(vision_folders[name] / "config.json", tmp_path)
    for renamed in case.renamed:
        tensors = {}
        for key, value in case.tensors().items():
            start = next(filter(key.startswith, renamed), "")
            tensors[renamed.get(start, "") + key.removeprefix(start)] = value
        assert tensors.keys() != case.tensors().keys()
        safetensors.numpy.save_file(tensors, tmp_path / "model.safetensors")
        assert same(zoo.load(tmp_path, parts=("vision",)), load_vision(name))


@pytest.mark.parametrize("name", TOWERS)
def test_storage_in_8_bits_leaves_the_tower_alone(load_vision, vision_folders, name):
    small = zoo.load(vision_folders[name], parts=("vision",), quantize="int8")
    assert same(small.vision, load_vision(name).vision)
    assert not any(modules(small.layers, Linear))


def assert_split(case, model):
    """Checks that every linear map of the tower and the projector is split both ways, inwards or outwards."""
    linears = dict(modules(partition_specs(model, case.family.partition_rules).vision, AbstractLinear))
    for path, linear in linears.items():
        axes = ("fsdp", "tensor") if path.endswith(case.inward) else ("tensor", "fsdp")
        assert tuple(linear.weight)[-2:] == axes, path
    assert {end for path in linears for end in case.inward if path.endswith(end)} == set(case.inward)


@EVERY
def test_rules_of_a_mesh(load_vision, name):
    assert_split(tiny.SEEING[name], load_vision(name))


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["gemma3-pattern", "llama4", "ministral3", "muse_glimmer", "qwen2_5_vl", "qwen3_vl"])
def test_on_a_mesh(untyped, vision_folders, name):
    """The work is split by pictures; a last picture makes their number even, and a last row that of the rows."""
    case, mesh = tiny.SEEING[name], zoo.make_mesh("fsdp=2,tensor=2", jax.devices()[:4])
    model = zoo.load(vision_folders[name], parts=("vision",), mesh=mesh)
    for path, linear in modules(model.vision, AbstractLinear):
        assert {"fsdp", "tensor"} <= set(linear.weight.sharding.spec), path
    tokens, images = case.prompts, case.images()
    even = lambda x: jax.device_put(np.concatenate([x, x[: len(x) % 2]]))
    program = eqx.filter_jit(lambda model, tokens, images: (model(tokens, images=images), case.features(model, images)))
    with jax.set_mesh(mesh):
        logits, features = program(model, even(tokens), jax.tree.map(even, images))
    assert all(value.sharding.spec[0] == "fsdp" for value in features.values())
    logits, features = on_host((logits, features))
    assert_golden(case, logits[: len(tokens)], {key: x[: len(images.patches)] for key, x in features.items()})


@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for case in tiny.SEEING.values() for name in case.parameters])
def test_released_models(untyped, name):
    """The number of parameters equals the Hub's for the repository, and every matrix of the tower is split."""
    case = next(case for case in tiny.SEEING.values() if name in case.parameters)
    whole = skeleton(zoo.config(name), ("vision",))
    assert sum(array.size for array in jax.tree.leaves(whole)) == case.parameters[name]
    assert_split(case, whole)


@pytest.mark.parametrize("name", TOWERS)
def test_towers_that_are_not_known(name, tmp_path):
    case = tiny.SEEING[name]
    for changes, message in case.refused:
        folder = case.write_config(tmp_path, vision_config=case.config()["vision_config"] | changes)
        with pytest.raises(ValueError, match=message):
            zoo.config(folder)


@EACH
def test_models_without_their_tower(vision_folders, folders, name):
    """A model that is loaded without its tower takes no images, and a text model has no tower to load."""
    case = tiny.SEEING[name]
    with pytest.raises(ValueError, match=r'loaded without its vision tower, and so takes no images: parts=\("vision",'):
        zoo.load(vision_folders[name])(jnp.asarray(case.prompts), images=case.images())
    with pytest.raises(ValueError, match=r'has no vision tower: leave parts=\("vision",\) out'):
        zoo.load(folders[name], parts=("vision",))


@pytest.mark.live
@EVERY
def test_live(vision_folders, load_vision, name, tmp_path):
    """Golden values are transformers'; it reads our export; gradients equal its own; bfloat16 errors are alike."""
    pytest.importorskip("transformers", reason="live parity needs transformers and torch")
    case, model, folder = tiny.SEEING[name], load_vision(name), vision_folders[name]
    reference, golden = case.theirs(folder), case.golden()
    live = case.computed(reference)
    close(golden, dict(live), terms=MODEL)
    zoo.save(model, tmp_path / "ours")
    close(case.computed(case.theirs(tmp_path / "ours"))["logits"], live["logits"], terms=MODEL)
    reference.save_pretrained(tmp_path / "theirs")
    assert same(zoo.load(tmp_path / "theirs", parts=("vision",)), model)

    case.logits(reference).square().sum().backward()
    theirs = {case.tensor_name(key): value.grad.numpy() for key, value in reference.named_parameters()}
    _, _, gradients = look(case, model, gradients=True)
    ours = {key: get() for key, (_, _, get) in export(gradients, case.family).items()}
    fixed = {key for key in ours if key.endswith(case.fixed)}
    assert not any(ours[key].any() for key in fixed)
    ours = {key: gradient for key, gradient in ours.items() if key not in fixed}
    ours, theirs = (standard_names(gradients, case.family) for gradients in (ours, theirs))
    assert ours.keys() == theirs.keys()
    padding = reference.get_input_embeddings().padding_idx  # torch computes no gradient for this id
    for key, gradient in ours.items():
        if name == "qwen3_vl-moe" and "mlp.experts" in key:
            gradient = gradient.swapaxes(-1, -2)
        pair = gradient, theirs[key]
        if padding is not None and key.endswith(("embed_tokens.weight", "embed_tokens_per_layer.weight")):
            pair = [np.delete(x, padding, axis=0) for x in pair]
        if pair := without_rounding(key, *pair):
            close(*({key: x} for x in pair), terms=4 * MODEL)

    rounded = case.computed(case.theirs(folder, "bfloat16"))
    low = zoo.load(folder, parts=("vision",), dtype="bfloat16")
    logits, features, _ = look(case, low, gradients=False)
    assert all(value.dtype == jnp.bfloat16 for value in (logits, *features.values()))
    ours = {"logits": logits} | {key: flat(case, value) for key, value in features.items()}
    mean = lambda x, key: np.abs(np.asarray(x, np.float32).ravel() - live[key].ravel()).mean()
    for key, value in ours.items():
        assert mean(value, key) < 1.2 * mean(rounded[key], key), key


# --- Tests that are the same for all families: the server, and refusals.
def greedy(case, model, ids, images, new):
    """Returns the tokens that whole passes over a row choose, by the program of the prompts."""
    tokens, of_row = (np.zeros_like(case.prompts) for _ in range(2))
    image, feature = of_row - 1, of_row
    tokens[0, : len(ids)] = ids
    image[0, : len(ids)], feature[0, : len(ids)] = images.image[0], images.feature[0]
    more = len(case.pictures) - len(images.patches)
    patches, grids = (np.concatenate([x, x[:1].repeat(more, axis=0)]) for x in (images.patches, images.grids))
    for n in range(len(ids), len(ids) + new):
        logits, _, _ = look(case, model, tokens, Images(patches, grids, image, feature))
        tokens[0, n] = logits[0, n - 1].argmax()
    return tokens[0, len(ids) : len(ids) + new].tolist()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["qwen3_vl"])
def test_generation(untyped, load_vision, vision_folders, name):
    """Prompts have two images of other shapes each. There are as many as in `test_decoding_after_images`."""
    case, model, folder = tiny.SEEING[name], load_vision(name), vision_folders[name]
    tokenizer = zoo.tokenizer(folder)
    chat, _ = case.chats(folder, tokenizer)
    expected = greedy(case, model, *encode_prompt(model, tokenizer, chat.messages), NEW)
    prompts = [chat.messages] * len(case.prompts)
    assert zoo.generate(model, tokenizer, prompts, max_new_tokens=NEW) == [tokenizer.decode(expected)] * len(prompts)


@pytest.mark.thorough
def test_the_server(untyped, load_vision, vision_folders, monkeypatch):
    """OpenAI's clients may send an image, but not name a file, and a server whose model takes none refuses it."""
    case, model = tiny.SEEING["gemma3-pattern"], load_vision("gemma3-pattern")
    tokenizer = zoo.tokenizer(vision_folders["gemma3-pattern"])
    part = gemma3.url(PIL.Image.new("RGB", (30, 20), "red"))
    of = lambda part: seeing.ask(part, seeing.text("what is it"))
    with_url = lambda url: of({"type": "image_url", "image_url": {"url": url}})
    ids, held = encode_prompt(model, tokenizer, of(part))
    expected = greedy(case, model, ids, held, NEW)
    assert not set(expected) & set(tokenizer.eos)
    with Running(model, tokenizer) as server:
        said = server.ask(CHAT, messages=of(part), max_tokens=NEW, temperature=0)
        assert said["choices"][0]["message"]["content"] == tokenizer.decode(expected)
        for wrong, message in (
            ("/etc/passwd", "An image must be"),
            ("data:image/png;base64,AAAA", "no image of a kind"),
        ):
            status, answer = server.request(CHAT, {"messages": with_url(wrong)})
            assert status == 400 and message in answer
        monkeypatch.setattr(zoo.vision.open, "_rgb", lambda *_: pytest.fail("decoded"))
        bomb = "data:image/png;base64," + base64.b64encode(png(5_800, 5_800, 8, 2, [])).decode()
        for messages, code, message in (
            (with_url(bomb), None, "have more than 33,554,432 pixels"),
            (seeing.ask(*[part] * 129), None, "has 129 images, and 128 are the most"),
            (seeing.ask(*[part] * 60), "context_length_exceeded", "more than the 64 tokens that there is room for"),
            (seeing.ask(part, seeing.text("a" * 10**5)), "context_length_exceeded", "characters; the 64 tokens"),
        ):
            status, answer = server.request(CHAT, {"messages": messages})
            error = json.loads(answer)["error"]
            assert (status, error["code"]) == (400, code) and message in error["message"]
        monkeypatch.setattr(zoo.serve.prompts, "PATCHES", 10**3)
        assert "more than 1,000 bytes" in server.request(CHAT, {"messages": of(part)})[1]
        server.server._prompts._held[-1] = held  # as of a request in progress
        monkeypatch.setattr(zoo.serve.prompts, "HELD", held.patches.nbytes - 1)
        assert server.request(CHAT, {"messages": of(part)})[0] == 503
    (plain,) = in_template_form({"content": [part | {"path": "/etc/passwd"}]}, True)["content"]
    assert plain == part
    for kind in ("image", "video"):
        with pytest.raises(Refusal, match="An image must be"):
            in_template_form({"content": [part | {"type": kind, kind: ["/etc/passwd"]}]}, True)
    with pytest.raises(Refusal, match=r"this server takes no images \(--images\)"):
        in_template_form(of(part)[0], False)


def test_refusals(load, load_vision, vision_folders):
    case, model, text = tiny.SEEING["gemma3-pattern"], load_vision("gemma3-pattern"), load("gemma3-pattern")
    tokenizer = zoo.tokenizer(vision_folders["gemma3-pattern"])
    for part, message in (
        ({"type": "image"}, "says nowhere where it lies: give it one of image, path, url"),
        ({"type": "image", "path": "no.png"}, "'no.png' cannot be read"),
        ({"type": "image", "url": "https://example.org/a.png"}, "is not downloaded unless"),
    ):
        with pytest.raises(ValueError, match=message):
            zoo.generate(model, tokenizer, [seeing.ask(part)])
    for method in (tokenizer.encode_prompt, tokenizer.encode_chat):  # the server and training call these
        with pytest.raises(
            ValueError, match=r"A message holds an image\. zoo.generate, the chat and the server take it"
        ):
            method(seeing.ask(seeing.image(PIL.Image.new("RGB", (30, 20)))))
    with pytest.raises(ValueError, match=r"A model of qwen3 takes no images; docs/vision\.md lists those that do"):
        load("qwen3")(jnp.asarray(case.prompts), images=case.images())
    one = Images.of(case.pictures[:1], 9, case.prompts[1:2], case.ids)
    for engine, message in (
        (Engine(zoo.load(vision_folders["gemma3-pattern"]), batch=1, max_tokens=48), "takes no images"),
        (Engine(model, batch=1, max_tokens=48, draft=ModelDraft(text, 2)), "A draft takes no images"),
    ):
        with pytest.raises(ValueError, match=message):
            engine.submit(case.prompts[1].tolist(), zoo.Sampling(max_new_tokens=4), images=one)
    with pytest.raises(ValueError, match="2 images are 18 tokens, 9 each, but the prompts have 27 of them"):
        Images.of(case.pictures[:2], 9, case.prompts, 63)
