"""Training on images: their places in rows, their patches, refusals, and a run of train.sft."""

import base64
import io
import json
from typing import Any

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest

import zoo
from tests.close import close
from tests.train.batching import batches
from tests.train.conftest import command, devices, documents
from tests.zoo.programs import MODEL, same
from tests.zoo.tiny import SEEING
from train.data import pictures, preferences
from train.data.packing import encode, pack, prompts_of
from train.data.prompts import encode as encode_record
from train.data.records import Record, open_records
from train.methods import rollouts, scores
from train.planning import ahead
from train.state.mesh import abstract_model, put_batch
from train.step.language import features
from train.step.microbatches import split
from train.step.mtp import mtp_loss
from zoo.generation.generate import Encoded
from zoo.text.prompts import encode_prompt
from zoo.vision.open import image_size, open_image


COLOURS = ("red", "blue", "white", "green")
TEXT = {"type": "text", "text": "what is it"}


def png(colour, size=(20, 14)):
    PIL.Image.new("RGB", size, colour).save(file := io.BytesIO(), "PNG")
    return file.getvalue()


def asks(*images):
    return [{"role": "user", "content": [*({"type": "image", **image} for image in images), TEXT]}]


def chat(answer, *images):
    return [*asks(*images), {"role": "assistant", "content": answer}]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return SEEING["gemma3-pattern"].write(tmp_path_factory.mktemp("seeing"))


@pytest.fixture(scope="module")
def tokenizer(checkpoint):
    return zoo.tokenizer(checkpoint, parts=("vision",))


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Writes records with images as paths, in base64, in a column, two in a chat, and a chat without any."""
    folder = tmp_path_factory.mktemp("data")
    (folder / "images").mkdir()
    for colour in COLOURS:
        (folder / f"images/{colour}.png").write_bytes(png(colour))
    red, blue = {"path": "images/red.png"}, {"image": "images/blue.png"}
    white = {"base64": base64.b64encode(png("white")).decode()}
    records = [
        {"messages": chat("red", red)},
        {"messages": [*chat("blue", blue), *chat("red", red)]},
        {"messages": [{"role": "user", "content": "what"}, {"role": "assistant", "content": "text"}]},
        {"conversations": chat("white", white)},
        {"messages": chat("green", {}), "images": ["images/green.png"]},
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def of(data, tokenizer, **options):
    records, _ = open_records(data / "train.jsonl", 0.0)
    options = dict(vocab_size=64, seq_len=60, batch=2, epochs=1) | options
    return batches(records, tokenizer, **options)


def test_a_batch_has_the_images_of_its_rows(checkpoint, tokenizer, data):
    """Each document's tokens and patches, as packed, equal the result of `encode_prompt`."""
    model = zoo.load(checkpoint, parts=("vision",))
    found = {}
    for batch in of(data, tokenizer):
        rows, slots, *_ = batch["patches"].shape
        assert slots in (1, 2, 4) and batch["grids"].shape == (rows, slots, 2) and (batch["grids"] == 6).all()
        for row, number in ((r, n) for r in range(rows) for n in set(batch["segments"][r].tolist()) - {0}):
            here = batch["segments"][row] == number
            ids = [*batch["tokens"][row][here].tolist(), batch["targets"][row][here].tolist()[-1]]
            used = [slot for slot in dict.fromkeys(batch["image"][row][here].tolist()) if slot >= 0]
            learnt = batch["targets"][row][here & (batch["loss_mask"][row] == 1)].tolist()
            patches = batch["patches"][row][used]
            found[tokenizer.decode(learnt)] = ids, patches, batch["feature"][row][here][batch["image"][row][here] >= 0]
    assert found.keys() == {"red", "bluered", "text", "white", "green"}
    for answers in ("red", "bluered", "white", "green"):
        colours = [colour for colour in ("blue", "red", "white", "green") if colour in answers]
        turns = [turn for colour in colours for turn in chat(colour, {"image": png(colour)})]
        ids, images = encode_prompt(model, tokenizer, turns, add_generation_prompt=False)
        assert found[answers][0] == ids and np.array_equal(found[answers][1], images.patches)
        assert found[answers][2].tolist() == [*range(9)] * len(colours)
    assert found["text"][1].size == 0


@pytest.mark.thorough
def test_features_of_a_batch(checkpoint, tokenizer, data):
    """The model gets each row's own images, on a mesh and in microbatches, too."""
    model = zoo.load(checkpoint, parts=("vision",))
    batch = next(iter(of(data, tokenizer, packing="off", batch=4)))
    run = eqx.filter_jit(lambda model, batch: features(model, batch)[0])
    mesh = zoo.make_mesh("fsdp=2", jax.devices()[:2])
    with jax.set_mesh(mesh):
        placed = put_batch(batch, mesh, model)
        together = np.asarray(run(model, placed))
        parts = split(placed, 2)
        halves = np.asarray(jax.lax.map(lambda part: features(model, part)[0], parts))
    close(halves.swapaxes(0, 1).reshape(together.shape), together, terms=MODEL)
    for row in range(4):
        alone = {name: jnp.asarray(array[[row]]) for name, array in batch.items()}
        used = batch["segments"][row] > 0
        close(run(model, alone)[0][used], together[row][used], terms=MODEL)


def test_a_row_never_holds_a_part_of_an_image(tokenizer, data):
    """An example longer than a row ends before an image that would be cut; the shortest row has no image at all."""
    two = open_records(data / "train.jsonl", 0.0)[0][1]
    ((ids, _, _, places),) = encode(two, tokenizer, vocab_size=64)
    for seq in range(5, len(ids)):
        (batch,) = batches(grain.MapDataset.source([two]), tokenizer, vocab_size=64, seq_len=seq, batch=1, epochs=1)
        kept = int((batch["segments"] > 0).sum())
        assert [int((batch["image"] == slot).sum()) for slot in range(2)] in ([0, 0], [9, 0], [9, 9])
        assert kept in (seq, len(ids) - 1) or (places[kept, 0] and places[kept, 1] == 0 and kept + 9 > seq)


def test_images_of_a_column(tokenizer, tmp_path):
    """Images may be bytes beside messages whose parts have all keys, mostly empty, as in Hugging Face's datasets."""
    part = lambda kind, text: {"type": kind, "text": text}
    user = {"role": "user", "content": [part("image", None), part("text", "what is it"), part("image", None)]}
    turns = [user, {"role": "assistant", "content": [part("text", "red")]}]
    images = [{"bytes": png(colour), "path": None} for colour in ("red", "blue")]
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist([{"messages": turns, "images": images}]), tmp_path / "train.parquet"
    )
    (record,) = open_records(tmp_path, 0.0)[0]
    (example,) = encode(record, tokenizer, vocab_size=64, completions_only=False)
    assert example.ids.count(63) == 18 and example.places[:, 0].max() == 2
    found = pictures.pictures_of(record.fields["messages"], record, tokenizer.processor)
    for picture, colour in zip(found, ("red", "blue"), strict=True):
        assert np.array_equal(picture.patches, tokenizer.processor(open_image(png(colour))).patches)


def test_image_tokens_are_never_targets(tokenizer):
    """All other tokens are targets if prompts are learnt, too."""
    record = Record("line 1", {"messages": chat("red", {"base64": base64.b64encode(png("red")).decode()})})
    (example,) = encode(record, tokenizer, vocab_size=64, completions_only=False)
    assert example.ids.count(63) == 9 and example.mask == [int(id != 63) for id in example.ids]


def test_packing_opens_no_image(tokenizer, data, monkeypatch):
    number = sum(len(batch["tokens"]) for batch in of(data, tokenizer))
    monkeypatch.setattr(pictures, "open_image", None)
    packed = list(pack(open_records(data / "train.jsonl", 0.0)[0], tokenizer, vocab_size=64, seq_len=60))
    assert number - 1 <= len(packed) <= number


def test_sizes_are_read_without_pixels():
    turned = PIL.Image.new("RGB", (30, 20))
    turned.getexif()[0x0112] = 6
    turned.save(file := io.BytesIO(), "JPEG", exif=turned.getexif())
    whole = file.getvalue()
    assert image_size(whole) == open_image(whole).shape[:2] == (30, 20)
    assert image_size(png("red")[:60]) == (14, 20)  # its pixels are cut off


@pytest.mark.thorough
def test_samples_see_the_images(checkpoint, tokenizer, data):
    model = zoo.load(checkpoint, parts=("vision",))
    records, _ = open_records(data / "train.jsonl", 0.0)
    prompts = prompts_of(records, tokenizer, vocab_size=64)
    assert [None if p.images is None else len(p.images.patches) for p in prompts] == [1, 1, None]
    ids, images = encode_prompt(model, tokenizer, asks({"image": png("red")}))
    shown = zip(jax.tree.leaves(prompts[0].images), jax.tree.leaves(images), strict=True)
    assert prompts[0].ids == ids and all(np.array_equal(ours, theirs) for ours, theirs in shown)
    assert zoo.generate(model, tokenizer, prompts[:1], max_new_tokens=3) == [
        zoo.generate(model, tokenizer, Encoded(ids, images), max_new_tokens=3)
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"messages": chat("a", {"path": "no.png"})}, r"line 7: .*no.png' cannot be read"),
        ({"messages": chat("a", {})}, "line 7: An image of a message says nowhere where it lies"),
        ({"messages": chat("a", {"url": "https://example.org/a.png"})}, "line 7: .* is not downloaded"),
    ],
)
def test_records_that_cannot_be_used(tokenizer, fields, message):
    with pytest.raises(ValueError, match=message):
        encode(Record("line 7", fields), tokenizer, vocab_size=64)


def test_refusals(checkpoint, tokenizer, data, tmp_path):
    plain = zoo.tokenizer(checkpoint)
    with pytest.raises(ValueError, match="the chat has an image: --vision loads the vision tower"):
        encode(Record("line 7", {"messages": chat("a", {"image": png("red")})}), plain, vocab_size=64)
    with pytest.raises(ValueError, match="--packing concat would cut images"):
        of(data, tokenizer, packing="concat")
    (tmp_path / "cut.png").write_bytes(png("red", (300, 300))[:200])
    record = Record("line 7", {"messages": chat("a", {"path": "cut.png"})}, tmp_path)
    with pytest.raises(ValueError, match=r"line 7: .*cut.png is damaged or cut off"):
        next(iter(batches(grain.MapDataset.source([record]), tokenizer, vocab_size=64, seq_len=40, batch=1, epochs=1)))
    model = zoo.load(checkpoint, parts=("vision",))
    with pytest.raises(ValueError, match="--mtp-weight is not for chats with images"):
        mtp_loss(model, jnp.zeros((1, 1, 32)), {"patches": jnp.zeros((1, 1, 1, 1))}, lambda *_: None)
    for script in (
        ["train.distill", "--teacher", "tiny"],
        ["train.pretrain", "--model", "tiny", "--data", data],
    ):
        with pytest.raises(SystemExit, match="--vision: "):
            command(*script, "--vision", "--out", tmp_path / "out")


def test_pairs(tokenizer, data):
    """Both documents of a pair see the prompt's images, from a prompt or from what chosen and rejected share."""
    red, blue = ({"path": f"images/{colour}.png"} for colour in ("red", "blue"))
    answers = lambda *words: [[{"role": "assistant", "content": word}] for word in words]
    (a, b), (c, d) = answers("red", "blue"), answers("blue", "white")
    plain = [{"role": "user", "content": "what"}]
    fields = [
        {"prompt": asks(red), "chosen": a, "rejected": b},
        {"chosen": asks({}) + c, "rejected": asks({}) + d, "images": ["images/blue.png"]},
        {"chosen": plain + c, "rejected": plain + d},
    ]
    records = grain.MapDataset.source([Record(f"line {n}", each, data) for n, each in enumerate(fields)])
    options = dict(vocab_size=64, seq_len=80, epochs=1)
    (batch,) = batches(records, tokenizer, kind=preferences.PREFERENCES, batch=4, **options)
    of = lambda colour: tokenizer.processor(open_image(data / f"images/{colour}.png")).patches
    patches, found = {colour: of(colour) for colour in ("red", "blue")}, []
    for row, number in ((r, n) for r in range(4) for n in set(batch["segments"][r].tolist()) - {0}):
        here = batch["segments"][row] == number
        learnt = batch["targets"][row][here & (batch["loss_mask"][row] == 1)].tolist()
        slots = [slot for slot in dict.fromkeys(batch["image"][row][here].tolist()) if slot >= 0]
        shown = [batch["patches"][row, slot] for slot in slots]
        seen = [name for picture in shown for name in patches if np.array_equal(picture, patches[name])]
        features = batch["feature"][row][here][batch["image"][row][here] >= 0]
        assert features.tolist() == [*range(9)] * len(slots)
        found.append((number % 2, tokenizer.decode(learnt), *seen))
    assert sorted(found) == [
        (0, "blue", "red"),
        (0, "white"),
        (0, "white", "blue"),
        (1, "blue"),
        (1, "blue", "blue"),
        (1, "red", "red"),
    ]
    looked = preferences.survey(records, tokenizer, vocab_size=64, seq_len=40)
    assert looked.shortened == 2
    wrong = Record("line 7", {"prompt": asks(red), "chosen": asks(blue), "rejected": b}, data)
    with pytest.raises(ValueError, match="line 7: a completion holds an image, and only prompts may"):
        preferences.encode_pairs(wrong, wrong, tokenizer, vocab_size=64, unpaired=False)


@pytest.mark.thorough
def test_rollouts(checkpoint, tokenizer, data):
    """Answers are sampled given the images, and the rows that learn from them have the same images."""
    mesh = zoo.make_mesh("fsdp=1", jax.devices()[:1])
    model = zoo.load(checkpoint, parts=("vision",), mesh=mesh)
    asked = {"messages": chat("red", {"path": "images/red.png"})}
    plain = {"prompt": [{"role": "user", "content": "what"}], "answer": "b"}
    prompts = [encode_record(Record("here", fields, data), tokenizer) for fields in (asked, plain)]
    assert prompts[0].record["answer"] == "red" and prompts[1].images is None
    ids, images = encode_prompt(model, tokenizer, asks({"image": png("red")}))
    o = rollouts.RolloutOptions(group=2, max_new_tokens=3, temperature=0.0, rollout_batch=4)
    own: Any = dict(rewards=scores.RewardOptions(reward=("one",)), rows=2, dtype="float32", seed=0)
    judges = [lambda text, record: 1.0]
    with jax.set_mesh(mesh):
        (batch,), *_ = rollouts.rollout(
            model, prompts, 0, None, options=o, tokenizer=tokenizer, mesh=mesh, judges=judges, **own
        )
        expected = zoo.generate(model, tokenizer, Encoded(ids, images), max_new_tokens=3)
    found = list(documents(batch))
    shown = [(row, text) for row, text in found if (text["image"] >= 0).any()]
    assert len(found) == 4 and len(shown) == 2 and len(batch["tokens"]) == 2
    for row, text in shown:
        assert tokenizer.decode(text["targets"][text["loss_mask"] == 1].tolist()) == expected
        here = text["image"][: len(ids)]
        assert np.array_equal(batch["patches"][row, here.max()][None], images.patches)
        assert np.array_equal(np.where(here < 0, here, 0), images.image[0])


@pytest.mark.thorough
def test_a_plan_counts_the_tower(checkpoint):
    """A plan counts the tower's parameters and a batch's images, and its compiled step takes the batch's arrays."""
    config, family = zoo.config(checkpoint), zoo.gemma3.FAMILY
    mesh = zoo.make_mesh("fsdp=2", jax.devices()[:2])
    shape = dict(batch=4, seq=32, remat="full", microbatches=1)
    model = lambda n: abstract_model(config, family, mesh, ahead.parts_of(n))
    text, seeing = (ahead.training(model(n), mesh, **shape, images=n) for n in (0, 2))
    whole = zoo.load(checkpoint, parts=("vision",))
    size = lambda tree: sum(a.size for a in jax.tree.leaves(tree))
    assert size(seeing.kinds["parameters"]) - size(text.kinds["parameters"]) == size(whole.vision) > 0
    batch = seeing.kinds["batch"]
    assert batch["patches"].shape == (4, 2, 36, 12) and batch["grids"].shape == (4, 2, 2)
    assert ahead.device_bytes(batch) - ahead.device_bytes(text.kinds["batch"]) == 2 * (4 * 2 * (36 * 12 + 2) + 8 * 32)
    with jax.set_mesh(mesh):
        assert "patches" in seeing.function.lower(*seeing.arguments).as_text(debug_info=True)
    held = ahead.decoding(config, family, mesh, batch=2, seq=32, images=1)
    assert size(held.kinds["parameters"]) == size(whole)


@pytest.mark.thorough
def test_fine_tuning(checkpoint, data, tmp_path, monkeypatch):
    """The tower learns, too, or stays unchanged with --freeze; the resulting model sees."""
    devices(monkeypatch, 2)
    given = dict(model=checkpoint, data=data / "train.jsonl", hold_out=0.2, seq_len=60, batch=2, lr=1e-2)
    given |= dict(compute_dtype="float32")
    flags = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), value)]
    same_run = ("train.sft", "--vision", *flags)
    command(*same_run, "--steps", 3, "--out", tmp_path / "run")
    before, after = (zoo.load(folder, parts=("vision",)) for folder in (checkpoint, tmp_path / "run/model"))
    assert not same(before.vision, after.vision) and not same(before.layers, after.layers)
    command(*same_run, "--steps", 2, "--out", tmp_path / "frozen", "--freeze", "vision.*")
    frozen = zoo.load(tmp_path / "frozen/model", parts=("vision",))
    assert same(before.vision, frozen.vision) and not same(before.layers, frozen.layers)
    tokenizer = zoo.tokenizer(tmp_path / "frozen/model")
    answer = zoo.generate(frozen, tokenizer, asks({"image": png("red")}), max_new_tokens=2)
    assert isinstance(answer, str)
    losses = [json.loads(line).get("loss") for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    losses = [loss for loss in losses if loss is not None]
    assert losses[-1] < losses[0]

    pairs = {"prompt": asks({"path": "images/red.png"}), "chosen": chat("red")[1:], "rejected": chat("blue")[1:]}
    (tmp_path / "pairs.jsonl").write_text((json.dumps(pairs) + "\n") * 4)
    (tmp_path / "images").symlink_to(data / "images")
    given |= dict(data=tmp_path / "pairs.jsonl", steps=1)
    flags = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), value)]
    command("train.dpo", "--vision", *flags, "--out", tmp_path / "dpo")
    for name in ("hold_out", "batch"):
        given.pop(name)
    given |= dict(data=data / "train.jsonl", prompts=2, group=2, max_new_tokens=2, reward="exact")
    flags = [part for name, value in given.items() for part in ("--" + name.replace("_", "-"), value)]
    command("train.grpo", "--vision", *flags, "--out", tmp_path / "grpo")
    assert all((tmp_path / run / "model/model.safetensors").exists() for run in ("dpo", "grpo"))
