"""Fine-tuning: data, mixtures and patience; scripts run in this process."""

import json

import equinox as eqx
import grain
import jax
import pytest

import zoo
from tests.close import close
from tests.train.batching import batches
from tests.train.conftest import losses, run, write_words
from tests.zoo.programs import MODEL
from train.data.records import Record
from train.run import finetune
from train.state.checkpoint import Checkpoints
from train.state.optim import adamw
from train.state.state import abstract_state
from train.step.language import cross_entropy


pytestmark = pytest.mark.usefixtures("quick")


# ======================================================================================================================
# Data.
# ======================================================================================================================


def test_packing_changes_no_loss(base, model):
    """The loss of rows with several examples, learning completions only, equals the mean over all targets of the
    examples alone.
    """
    fields = [json.loads(line) for line in (base / "words.jsonl").read_text().splitlines()[:20]]
    tokenizer = zoo.tokenizer(base / "model")
    source = grain.MapDataset.source([Record(f"record {i}", f) for i, f in enumerate(fields)])
    make = lambda **how: list(batches(source, tokenizer, vocab_size=64, seq_len=32, epochs=1, **how))
    sums = jax.jit(lambda batch: cross_entropy(model, batch)[:2])
    alone = [sums(row) for row in make(batch=1, packing="off")]
    (packed,) = make(batch=16)
    assert packed["segments"].max() > 1 and len(alone) == 20
    completions = [f["completion"] + "<end>" for f in fields]
    rows = zip(packed["targets"], packed["loss_mask"], packed["segments"], strict=True)
    learnt = [tokenizer.decode(t[(m > 0) & (s == n)].tolist(), special=True) for t, m, s in rows for n in {*s} - {0}]
    assert sorted(learnt) == sorted(completions)
    loss, targets = sums(packed)
    assert targets == sum(n for _, n in alone)
    close(loss, sum(total for total, _ in alone), terms=MODEL)


def test_a_mixture_through_the_script(base, tmp_path, monkeypatch):
    """Two sets have the shares 3 to 1 in every step, and an epoch has every row of the first set once."""
    write_words(tmp_path / "few.jsonl", 1, count=4, sign=lambda word: word[0])
    data, given = (str(base / "words.jsonl"), str(tmp_path / "few.jsonl")), []
    monkeypatch.setattr(finetune, "run", lambda o, config, mesh, tokenizer, task, **_: given.extend(task.data))
    run(base, tmp_path / "out", data=data, weights=(3.0, 1.0), packing="off", batch=4, steps=0, epochs=1)
    many, learnt = (base / "words.jsonl").read_text().count("\n"), [batch["loss_mask"].sum(1) for batch in given]
    assert all((lengths == 2).sum() == 1 for lengths in learnt)  # a letter and the end token
    assert len(given) == many // 3
    with pytest.raises(ValueError, match="2 data sets need as many positive weights"):
        run(base, tmp_path / "out", data=data, weights=(3.0,))


# ======================================================================================================================
# Patience.
# ======================================================================================================================


@pytest.fixture(scope="module")
def impatient(base, tmp_path_factory):
    """Returns options of a run that memorises a few words and gets worse at others, its metrics, and its folder."""
    folder = tmp_path_factory.mktemp("patience")
    write_words(folder / "data" / "train.jsonl", 2, count=6)
    write_words(folder / "data" / "valid.jsonl", 3, count=12)
    options = dict(
        data=(str(folder / "data"),), steps=20, eval_every=2, patience=2, schedule="wsd", warmup=0, decay=0, lr=3e-2
    )
    return options, run(base, folder / "out", **options), folder / "out"


def weights(folder):
    return (folder / "model.safetensors").read_bytes()


def kept_model(out, step, like):
    """Returns the model in the checkpoint of this step; `like` is a model of the same shapes."""
    identity = json.loads((out / "checkpoints" / str(step) / "meta.json").read_text())["identity"]
    state, _ = Checkpoints(out / "checkpoints", identity=identity).restore(
        abstract_state(like, adamw(lambda step: 0.0)), step=step
    )
    return state.model


@pytest.mark.thorough
def test_a_run_without_progress_ends(base, model, impatient, capsys):
    """The run ends two evaluations after the best one, whose model is exported."""
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
    assert f"{looks[best]:.3f} at best, {looks[best]:.3f} of the model" in said


@pytest.mark.thorough
def test_patience_survives_interruptions(base, impatient, tmp_path, stop_after):
    """The best model's checkpoint is not removed to make room for newer ones."""
    options, metrics, out = impatient
    last = metrics[-1]["step"]
    stop_after(last - 3)  # a step after the best one
    run(base, tmp_path, **options)
    assert not (tmp_path / "model").exists()
    stop_after(0)
    assert losses(run(base, tmp_path, **options)) == losses(metrics)
    assert weights(tmp_path / "model") == weights(out / "model")


@pytest.mark.thorough
def test_the_best_without_patience(base, model, impatient, tmp_path):
    """All steps are run, and the model with the lowest loss is exported."""
    options, _, _ = impatient
    metrics = run(base, tmp_path, **options | dict(patience=0, eval_every=5, best="validation_loss"))
    looks = {line["step"]: line["validation_loss"] for line in metrics if "validation_loss" in line}
    step = min(looks, key=looks.get)
    assert list(looks) == [0, 5, 10, 15, 20] and step < 20
    assert eqx.tree_equal(zoo.load(tmp_path / "model"), kept_model(tmp_path, step, model))


@pytest.mark.thorough
def test_patience_needs_validation(base, impatient, tmp_path):
    """Patience also needs the checkpoints of all evaluations, which a run that began without it has not kept."""
    with pytest.raises(ValueError, match="--patience 2 waits for a lower loss on validation data, and there is none"):
        run(base, tmp_path / "out", patience=2)
    options, _, out = impatient
    with pytest.raises(ValueError, match=r"identity\.patience is True, and now it is False"):
        run(base, out, **options | dict(patience=0))


# ======================================================================================================================
# The full state of another run.
# ======================================================================================================================


@pytest.mark.thorough
def test_a_run_begins_with_the_state_of_another(base, tmp_path, capsys):
    """A run may begin at any of another's steps, with the same steps from there. Other data begin at their start."""
    first, branch = tmp_path / "first", tmp_path / "branch"
    whole = losses(run(base, first, save_every=3))
    assert sorted(path.name for path in (first / "checkpoints").iterdir()) == ["6", "8"]
    before = sorted(first.rglob("*"))
    assert losses(run(base, branch, load_state=f"{first}@6")) == whole[6:], "bit for bit"
    assert sorted(first.rglob("*")) == before
    assert weights(branch / "model") == weights(first / "model")
    assert "at step 6 and at its place in the data" in " ".join(capsys.readouterr().out.split())
    (branch / "checkpoints" / "8" / "meta.json").rename(tmp_path / "gone")  # its own one comes first, or ends the run
    with pytest.raises(OSError, match=r"No checkpoint in .*branch/checkpoints is undamaged"):
        run(base, branch, load_state=f"{first}@6")
    write_words(tmp_path / "other" / "words.jsonl", 1)
    other = str(tmp_path / "other" / "words.jsonl"), tmp_path / "moved"
    other = run(base, other[1], load_state=f"{first}@6", data=other[:1], save_every=0)
    assert {path.name for path in (tmp_path / "moved" / "checkpoints").iterdir()} == {"7", "8"}, "continuously"
    assert [line["step"] for line in other] == [6, 7, 8] and losses(other) != whole[6:]
    assert "at the beginning of the data, which is other" in " ".join(capsys.readouterr().out.split())


@pytest.mark.thorough
@pytest.mark.parametrize(
    "source, changes, said",
    [
        (
            "",
            {},
            r"The state of --load-state .* is of step 20, and --steps 20 counts from the same beginning: give more",
        ),
        ("@7", {}, r"--load-state: .*out has no undamaged checkpoint of step 7; it has those of steps \d"),
        ("/none", {}, r"out/none has no undamaged checkpoint; none\."),
        ("", {"optimizer": "sgd"}, r"its state\.opt_state.* --load-state needs the same model, adapters, --optimizer"),
    ],
)
def test_a_state_that_cannot_be_loaded(base, impatient, tmp_path, source, changes, said):
    options, metrics, out = impatient
    options = options | {"patience": 0, "steps": metrics[-1]["step"]} | changes
    said = said.replace("20", str(metrics[-1]["step"]))
    with pytest.raises((ValueError, OSError), match=said):
        run(base, tmp_path / "new", load_state=f"{out}{source}", **options)
