"""Fine-tuning: noise, mixtures, patience, adapters in checkpoints and files, and uploads; scripts run in process."""

import dataclasses
import json
import math
import shutil
import types

import equinox as eqx
import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from huggingface_hub.errors import HfHubHTTPError

import convert.hub
import zoo.__main__
from tests.train.conftest import devices, write_words
from tests.zoo import tiny
from train import finetune, loop, sft
from train.checkpoint import Checkpoints
from train.data import batches
from train.metrics import read_metrics
from train.neftune import NoisyEmbedding, noisy
from train.optim import adamw
from train.records import Record, weighted
from train.state import abstract_state, init_state
from train.step import cross_entropy, train_step
from train.stop import StopRequest
from zoo import lora, peft
from zoo.layers import Embedding
from zoo.surgery import modules


pytestmark = pytest.mark.usefixtures("quick")

LORA = finetune.Lora(rank=2)
forward = eqx.filter_jit(lambda model, tokens: model(tokens))


@pytest.fixture(scope="module")
def model(base):
    return zoo.load(base / "model", dtype="float32")


def run(base, out, **changes):
    """Runs `train.sft` and returns its metrics so far."""
    o = sft.Options(
        model=str(base / "model"), data=(base / "words.jsonl",), out=out, steps=8, seq_len=32, lr=1e-2, hold_out=0.0
    )
    sft.main(dataclasses.replace(o, **changes))
    return read_metrics(out / "metrics.jsonl") if out.exists() else []


def losses(metrics):
    return [line["loss"] for line in metrics if "loss" in line]


@pytest.fixture
def stop_after(monkeypatch):
    """`stop_after(n)`: the next run is told to stop by a SIGTERM in its n-th step; `stop_after(0)`: none is."""

    def stop_after(steps):
        class Stop(StopRequest):
            asked = 0

            def agreed(self):
                self.asked += 1
                return "SIGTERM" if self.asked == steps else ""

        monkeypatch.setattr(loop, "StopRequest", Stop)

    return stop_after


# ======================================================================================================================
# NEFTune.
# ======================================================================================================================

SEGMENTS = jnp.repeat(jnp.asarray([[1, 2, 0], [1, 1, 2]]), jnp.asarray([4, 9, 3]), axis=1)
LENGTHS = np.repeat([[4, 9, 3], [13, 13, 3]], [4, 9, 3], axis=1)  # of each token's document
WHERE = jnp.zeros(SEGMENTS.shape, int)


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt3"])
def test_noise_is_bounded_by_the_length_of_the_document(name, tmp_path):
    """And fills the bounds evenly; it is on the embeddings of tokens, not of positions, nor on a tied head."""
    model = zoo.load(tiny.write(tmp_path, name), dtype="float32")
    before = dict(modules(model, Embedding))
    after = dict(modules(noisy(model, SEGMENTS, alpha=5.0, key=jax.random.key(0)), Embedding))
    (path,) = (path for path, m in after.items() if isinstance(m, NoisyEmbedding))
    assert before[path].weight.shape[0] == model.config.vocab_size
    noise = np.asarray(after[path](WHERE) - before[path](WHERE))
    bounds = 5 / np.sqrt(LENGTHS * noise.shape[-1])
    relative = noise / bounds[..., None]
    assert 0.99 < np.abs(relative).max() <= 1 + 1e-5
    assert abs(relative.mean()) < 0.05 and abs(relative.std() - 3**-0.5) < 0.05
    x = jax.random.normal(jax.random.key(1), (2, 3, noise.shape[-1]))
    assert (after[path].attend(x) == before[path].attend(x)).all()


@pytest.fixture(scope="module")
def batch():
    """Four rows that are all the same."""
    tokens = np.random.RandomState(0).randint(0, 64, (1, 17)).repeat(4, axis=0)
    ones = np.ones((4, 16))
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "loss_mask": ones, "segments": ones}
    return {k: jnp.asarray(a, jnp.int32) for k, a in batch.items()} | {"positions": jnp.tile(jnp.arange(16), (4, 1))}


def test_noise_depends_on_the_step_and_the_microbatch(model, batch):
    """And on nothing else, so that a run goes on as if it had not been interrupted."""
    seen, optimizer = [], optax.sgd(0.0)

    def objective(noisy, part, others, remat):
        x = noisy.embed_tokens(part["tokens"])
        jax.debug.callback(lambda noise: seen.append(np.asarray(noise)), x - model.embed_tokens(part["tokens"]))
        return jnp.sum(x), ({"loss": jnp.sum(x)}, ())

    options = dict(optimizer=optimizer, schedule=lambda n: 0.0, compute_dtype=jnp.float32, objective=objective)
    step = jax.jit(lambda state: train_step(state, batch, microbatches=2, neftune=5.0, **options)[0])

    def noise_of(state):
        seen.clear()
        after = step(state)
        jax.effects_barrier()
        return after, list(seen)

    first, (one, other) = noise_of(init_state(model, optimizer))
    assert not np.allclose(one, other), "two microbatches"
    assert not np.allclose(one[0], one[1]), "two rows"
    _, again = noise_of(init_state(model, optimizer))
    assert all(any((a == b).all() for b in again) for a in (one, other)), "the same step"
    _, later = noise_of(first)
    assert not any(np.allclose(a, b) for a in (one, other) for b in later), "another step"


def test_noise_is_off_by_default(model, batch):
    """Without it the loss is that of the model, with it a different one, finite, whose gradients reach the table."""
    optimizer = optax.sgd(1e-3)
    options = dict(optimizer=optimizer, schedule=lambda n: 1e-3, compute_dtype=jnp.float32)
    total, _ = jax.jit(cross_entropy)(model, batch)
    step = jax.jit(lambda state, alpha: train_step(state, batch, neftune=alpha, **options), static_argnums=1)
    _, quiet = step(init_state(model, optimizer), 0.0)
    after, loud = step(init_state(model, optimizer), 5.0)
    np.testing.assert_allclose(quiet["loss"], total / (4 * 16), rtol=1e-5)
    assert loud["finite"] and abs(loud["loss"] - quiet["loss"]) > 1e-3
    assert (after.model.embed_tokens.weight != model.embed_tokens.weight).any()
    assert jax.tree.structure(after.model) == jax.tree.structure(model)


# ======================================================================================================================
# Data.
# ======================================================================================================================


def records(count, name="a"):
    return grain.MapDataset.source([Record(f"{name}{i}", {"text": f"{name}{i}"}) for i in range(count)])


@pytest.mark.parametrize(
    "sizes, weights, counts",
    [
        ((2, 6), (), (2, 6)),
        ((2, 6), (1.0, 1.0), (6, 6)),
        ((10, 10), (0.7, 0.3), (23, 10)),
        ((5, 3), (1.0, 3.0), (5, 15)),
        ((1, 1, 4), (2.0, 1.0, 1.0), (8, 4, 4)),
        ((7,), (0.1,), (7,)),
    ],
)
def test_shares(sizes, weights, counts):
    """As the weights say, to the next whole record, each record as often as any other of its set, or once more."""
    sets = [records(size, name) for size, name in zip(sizes, "abc", strict=False)]
    mixed = [record.where for record in weighted(sets, weights)]
    for size, name, count in zip(sizes, "abc", counts, strict=False):
        times = [mixed.count(f"{name}{i}") for i in range(size)]
        assert sum(times) == count and min(times) >= 1 and max(times) - min(times) <= 1
    assert len(mixed) == sum(counts)


@pytest.mark.parametrize("weights", [(1.0,), (1.0, 1.0, 1.0), (1.0, 0.0), (1.0, -2.0)])
def test_weights_that_fit_no_sets(weights):
    with pytest.raises(ValueError, match="2 data sets need as many positive weights, not"):
        weighted([records(2), records(3)], weights)


def test_packing_changes_no_loss(base, model):
    """Of rows with several examples, completions alone learnt, the loss is the mean over all targets of what the
    examples have by themselves."""
    fields = [json.loads(line) for line in (base / "words.jsonl").read_text().splitlines()[:20]]
    tokenizer = zoo.tokenizer(base / "model")
    source = grain.MapDataset.source([Record(f"record {i}", f) for i, f in enumerate(fields)])
    make = lambda **how: list(batches(source, tokenizer, vocab_size=64, seq_len=32, epochs=1, **how))
    sums = jax.jit(lambda batch: (cross_entropy(model, batch)[0], batch["loss_mask"].sum()))
    alone = [sums(row) for row in make(batch=1, packing="off")]
    (packed,) = make(batch=16)
    assert packed["segments"].max() > 1 and len(alone) == 20
    completions = [f["completion"] + "<end>" for f in fields]
    rows = zip(packed["targets"], packed["loss_mask"], packed["segments"], strict=True)
    learnt = [tokenizer.decode(t[(m > 0) & (s == n)].tolist(), special=True) for t, m, s in rows for n in {*s} - {0}]
    assert sorted(learnt) == sorted(completions)
    loss, targets = sums(packed)
    assert targets == sum(n for _, n in alone)
    np.testing.assert_allclose(loss, sum(total for total, _ in alone), rtol=1e-5)


def test_a_mixture_through_the_script(base, tmp_path, monkeypatch):
    """Two sets in the shares 3 to 1: one epoch has every completion of the first once, and fewer of the second."""
    write_words(tmp_path / "few.jsonl", 1, count=4, sign=lambda word: word[0])
    data, given = (base / "words.jsonl", tmp_path / "few.jsonl"), []
    monkeypatch.setattr(finetune, "run", lambda *_, data, **__: given.extend(data))
    run(base, tmp_path / "out", data=data, weights=(3.0, 1.0), steps=0, epochs=1)
    upper = [json.loads(line)["completion"] for line in data[0].read_text().splitlines()]
    want = sum(len(word) + 1 for word in upper) + 20 * 2  # a letter and the end
    assert sum(batch["loss_mask"].sum() for batch in given) == want
    with pytest.raises(ValueError, match="2 data sets need as many positive weights"):
        run(base, tmp_path / "out", data=data, weights=(3.0,))


# ======================================================================================================================
# Patience.
# ======================================================================================================================


@pytest.fixture(scope="module")
def impatient(base, tmp_path_factory):
    """Options of a run that memorises a few words, and gets worse at others; and what it left undisturbed."""
    folder = tmp_path_factory.mktemp("patience")
    write_words(folder / "data" / "train.jsonl", 2, count=6)
    write_words(folder / "data" / "valid.jsonl", 3, count=12)
    options = dict(
        data=(folder / "data",), steps=20, eval_every=2, patience=2, schedule="wsd", warmup=0, decay=0, lr=3e-2
    )
    return options, run(base, folder / "out", **options), folder / "out"


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def kept_model(out, step, like):
    """The model in the checkpoint of this step; `like` is another of its shapes."""
    identity = json.loads((out / "checkpoints" / str(step) / "meta.json").read_text())["identity"]
    state, _ = Checkpoints(out / "checkpoints", identity=identity).restore(
        abstract_state(like, adamw(lambda step: 0.0)), step=step
    )
    return state.model


def test_a_run_without_progress_ends(base, model, impatient, capsys):
    """Two looks after the best one, whose model is exported."""
    options, metrics, out = impatient
    looks = {line["step"]: line["validation_loss"] for line in metrics if "validation_loss" in line}
    best, last = min(looks, key=looks.get), max(looks)
    assert 0 < best == last - 4 and last < 20 and metrics[-1]["step"] == last
    assert eqx.tree_equal(zoo.load(out / "model"), kept_model(out, best, model))
    again = run(base, out, **options)
    assert again == metrics, "the same command finds that the run is over"
    said = capsys.readouterr().out.replace("\n", " ")
    assert f"not improved since step {best}, so the run ends at step {last}" in said
    assert f"The model of step {best} is exported" in said


def test_patience_survives_interruptions(base, impatient, tmp_path, stop_after):
    """The best model is not among the checkpoints that make room for newer ones."""
    options, metrics, out = impatient
    last = metrics[-1]["step"]
    stop_after(last - 3)  # a step after the best one
    run(base, tmp_path, **options)
    assert not (tmp_path / "model").exists()
    stop_after(0)
    assert losses(run(base, tmp_path, **options)) == losses(metrics)
    assert weights(tmp_path / "model") == weights(out / "model")


def test_patience_needs_validation(base, impatient, tmp_path):
    """And checkpoints of all looks, which a run that began without it has not kept."""
    with pytest.raises(ValueError, match="--patience 2 waits for a lower loss on validation data, and there is none"):
        run(base, tmp_path / "out", patience=2)
    options, _, out = impatient
    with pytest.raises(ValueError, match=r"identity\.patience is True, and now it is False"):
        run(base, out, **options | dict(patience=0))


# ======================================================================================================================
# Adapters.
# ======================================================================================================================


def adapted(base, out, **changes):
    """Runs `train.sft`, and returns its metrics and the model with adapters at its end."""
    models = []
    with pytest.MonkeyPatch.context() as patch:
        save = peft.save
        patch.setattr(loop.peft, "save", lambda model, *args, **kw: (models.append(model), save(model, *args, **kw)))
        metrics = run(base, out, **dict(lora=LORA, lr=3e-2) | changes)
    return metrics, *models


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("lora")
    return out, *adapted(base, out)


def stored(out, step=8):
    """Path -> how many numbers, of the arrays in a checkpoint."""
    state = json.loads((out / "checkpoints" / str(step) / "meta.json").read_text())["state"]
    return {path: math.prod(json.loads(text[text.index("[") :])) for path, text in state.items()}


def test_adapters_are_all_that_is_kept(model, tuned):
    """Weights are neither in the checkpoint, nor has the optimizer moments of them, nor do they change."""
    out, metrics, trained = tuned
    assert np.mean(losses(metrics)[-2:]) < losses(metrics)[0] - 0.3
    adapters, frozen = lora.split(trained)
    size = sum(a.size for a in jax.tree.leaves(adapters))
    assert size < 0.3 * sum(a.size for a in jax.tree.leaves(frozen))
    arrays = stored(out)
    assert sum(n for path, n in arrays.items() if path.startswith("model.")) == size
    assert sum(n for path, n in arrays.items() if path.startswith("opt_state.") and n > 1) == 2 * size
    assert all(path.endswith((".a", ".b")) for path, n in arrays.items() if n > 1)
    assert eqx.tree_equal(lora.bare(trained), model)


def test_the_adapter_on_disk_is_the_trained_one(base, model, tuned):
    out, _, trained = tuned
    assert not (out / "model").exists()
    tokens = jnp.asarray(tiny.TOKENS)
    logits = forward(trained, tokens)
    assert (forward(peft.load(model, out / "adapter"), tokens) == logits).all()
    assert jnp.abs(logits - forward(model, tokens)).max() > 0.1
    zoo.__main__.merge(str(base / "model"), out / "adapter", out / "merged")
    error = jnp.abs(forward(zoo.load(out / "merged"), tokens) - logits).max()
    assert error < 1e-5 * jnp.abs(logits).max()


@pytest.fixture(scope="module")
def rounded(base, tmp_path_factory):
    out = tmp_path_factory.mktemp("int8")
    return out, *adapted(base, out, quantize="int8")


def assert_over_rounded_weights(out, metrics, trained, tuned):
    """A checkpoint of QLoRA is as large as one of LoRA, and the losses are nearly the same."""
    assert any(modules(trained, zoo.quantized.StoredLinear))
    assert stored(out) == stored(tuned[0])
    assert np.mean(losses(metrics)[-2:]) < losses(metrics)[0] - 0.3
    assert 0 < np.abs(np.subtract(losses(metrics), losses(tuned[1]))).mean() < 0.2


def test_over_rounded_weights(rounded, tuned):
    assert_over_rounded_weights(*rounded, tuned)


@pytest.mark.slow
def test_over_weights_of_four_bits(base, tmp_path):
    slower = dict(lr=1e-2, hold_out=0.05)
    tuned = tmp_path / "float", *adapted(base, tmp_path / "float", **slower)
    assert_over_rounded_weights(tmp_path / "nf4", *adapted(base, tmp_path / "nf4", quantize="nf4", **slower), tuned)


def test_adapters_on_a_mesh(base, rounded, tmp_path, monkeypatch, stop_after):
    """The losses of one device, over rounded weights too."""
    devices(monkeypatch, 4)
    stop_after(2)
    metrics = run(base, tmp_path, mesh="fsdp=2,tensor=2", lora=LORA, quantize="int8", lr=3e-2)
    np.testing.assert_allclose(losses(metrics), losses(rounded[1])[:2], rtol=1e-4)


@pytest.mark.slow
def test_adapters_in_a_pipeline(base, tmp_path, monkeypatch):
    options = dict(steps=2, batch=12, lora=LORA)
    want = losses(run(base, tmp_path / "one", **options))
    devices(monkeypatch, 6)
    metrics = run(base, tmp_path / "many", mesh="stage=3,fsdp=2", **options)
    np.testing.assert_allclose(losses(metrics), want, rtol=1e-4)


def test_adapters_go_on_exactly(base, tuned, tmp_path, stop_after):
    out, metrics, _ = tuned
    stop_after(3)
    run(base, tmp_path, lora=LORA, lr=3e-2)
    assert not (tmp_path / "adapter").exists()
    stop_after(0)
    assert losses(run(base, tmp_path, lora=LORA, lr=3e-2)) == losses(metrics)
    file = "adapter/adapter_model.safetensors"
    assert (tmp_path / file).read_bytes() == (out / file).read_bytes()


@pytest.mark.parametrize(
    "changes, words",
    [
        (dict(lora=finetune.Lora(rank=4)), r"identity\.lora\.rank is 2, and now it is 4"),
        (
            dict(lora=finetune.Lora(rank=2, alpha=2.0)),
            r"identity\.lora\.scale \(alpha / rank\) is 2\.0, and now it is 1\.0",
        ),
        (dict(lora=finetune.Lora(rank=2, where="*.q_proj")), r"identity\.lora\.where is layers\.\*, and now .*q_proj"),
        (dict(lora=LORA, quantize="int8"), r"identity\.quantize is none, and now it is int8"),
        (dict(), r"identity\.lora\.rank is 2, and now it is 0"),
    ],
)
def test_other_adapters_are_refused(base, tuned, changes, words):
    with pytest.raises(ValueError, match=words):
        run(base, tuned[0], **changes)


def test_rounded_weights_are_not_trained(base, tmp_path):
    with pytest.raises(ValueError, match=r"--quantize nf4 keeps weights that are not trained; it needs --lora\.rank"):
        run(base, tmp_path / "out", quantize="nf4")
    assert not (tmp_path / "out").exists()


# ======================================================================================================================
# Uploads.
# ======================================================================================================================


@pytest.fixture
def hub(monkeypatch):
    """A Hub that writes down what it is asked, with the files it got; `hub.refuse` names what it does not do."""
    hub = types.SimpleNamespace(asked=[], refuse="")

    def answer(name, value):
        if hub.refuse == name:
            raise HfHubHTTPError("403 Forbidden", response=types.SimpleNamespace(headers={}, request=None))
        hub.asked.append((name, value))

    class Api:
        def create_repo(self, repo, *, private, exist_ok):
            answer("create", (repo, private, exist_ok))

        def upload_folder(self, *, folder_path, repo_id):
            answer("upload", (repo_id, sorted(file.name for file in folder_path.iterdir())))
            return types.SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit/1")

    monkeypatch.setattr(convert.hub, "HfApi", Api)
    return hub


CREATED = ("create", ("me/words", True, True))


def test_uploads(base, tuned, tmp_path, hub, monkeypatch, capsys):
    """The repository is made before the training, private, and filled after it: here of a run that is at its end."""
    out = shutil.copytree(tuned[0], tmp_path / "out")
    monkeypatch.setattr(loop, "run", lambda *a, run=loop.run, **kw: (hub.asked.append("run"), run(*a, **kw))[1])
    run(base, out, lora=LORA, lr=3e-2, push_to_hub="me/words")
    files = ["adapter_config.json", "adapter_model.safetensors"]
    assert hub.asked == [CREATED, "run", ("upload", ("me/words", files))]
    assert "https://hub/me/words/commit/1" in capsys.readouterr().out


def test_a_repository_that_cannot_be_made(base, tmp_path, hub):
    hub.refuse = "create"
    with pytest.raises(OSError, match=r"me/words can't be made on the Hub; is HF_TOKEN one that may write there.*403"):
        run(base, tmp_path / "out", steps=1, push_to_hub="me/words")
    assert not (tmp_path / "out").exists()


def test_an_upload_that_fails(base, model, tuned, tmp_path, hub):
    """Nothing is lost, and the same command tries again without training."""
    hub.refuse = "upload"
    out, metrics, _ = tuned
    out = shutil.copytree(out, tmp_path / "out")
    shutil.rmtree(out / "adapter")
    again = dict(lora=LORA, lr=3e-2, push_to_hub="me/words")
    with pytest.raises(OSError, match=f"{out}/adapter is not uploaded to me/words.*`hf upload me/words {out}/adapter`"):
        run(base, out, **again)
    assert peft.load(model, out / "adapter")
    hub.refuse = ""
    assert run(base, out, **again) == metrics
    name, (_, files) = hub.asked[-1]
    assert name == "upload" and files == ["adapter_config.json", "adapter_model.safetensors"]


def test_nothing_is_uploaded_before_the_end(base, tmp_path, hub, stop_after):
    stop_after(1)
    run(base, tmp_path / "out", lora=LORA, lr=3e-2, push_to_hub="me/words")
    run(base, tmp_path / "dry", lora=LORA, lr=3e-2, push_to_hub="me/words", dry_run=True)
    assert hub.asked == [CREATED] and not (tmp_path / "dry").exists()
