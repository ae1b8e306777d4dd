"""Classifiers: the loss is of each text's last token, whatever its row, and what is trained is what is exported."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.train.batching import batches
from tests.train.conftest import command
from tests.zoo.programs import MODEL
from train import classify
from train.data import labelled
from train.data.labelled import LABELLED
from train.data.records import open_records
from train.evaluate import calibration
from train.watch.metrics import read_metrics
from zoo.nn.heads import ClassificationHead
from zoo.surgery import with_head


pytestmark = pytest.mark.usefixtures("quick")
LABELS = ("early", "late", "middle")


def label(word):
    return LABELS[0] if word[0] < "d" else LABELS[2] if word[0] < "g" else LABELS[1]


@pytest.fixture(scope="module")
def words(base):
    """Returns a file of words, labelled by their first letter."""
    random = np.random.RandomState(0)
    words = ["".join(random.choice(list("abcdefgh"), random.randint(3, 9))) for _ in range(120)]
    lines = [json.dumps({"text": word, "label": label(word)}) for word in words]
    (base / "labels.jsonl").write_text("\n".join(lines) + "\n")
    return base / "labels.jsonl"


def classes(model, base, texts):
    """Returns the label with the largest logit of each text."""
    tokenizer = zoo.tokenizer(base / "model")
    tokens, segments = np.zeros((len(texts), 16), np.int32), np.zeros((len(texts), 16), np.int32)
    for row, text in enumerate(texts):
        ids = tokenizer.encode(text)
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    logits = jax.jit(lambda m, t, s: m(t, segments=s))(model, tokens, segments)
    return logits, [model.head.labels[n] for n in np.argmax(logits, axis=-1)]


def test_the_loss(base, words, model):
    """It is the cross-entropy of the head's logits of each text alone, and the same however texts are packed."""
    judge = with_head(model, ClassificationHead(32, LABELS, None, key=jax.random.key(0)))
    records, _ = open_records(words, 0.0)
    options = dict(vocab_size=64, labels=LABELS, pad=None, kind=LABELLED, batch=8)
    packed, spread = (
        next(iter(batches(records[:8], zoo.tokenizer(base / "model"), seq_len=seq_len, **options)))
        for seq_len in (64, 12)
    )
    assert packed["segments"].max() > 4 > spread["segments"].max()
    fields = [records[n].fields for n in range(8)]
    logits, _ = classes(judge, base, [each["text"] for each in fields])
    logp = jax.nn.log_softmax(logits, axis=-1)
    want = -sum(float(logp[n, LABELS.index(each["label"])]) for n, each in enumerate(fields))
    for batch in packed, spread:
        total, count, sums, _ = jax.jit(classify.objective)(judge, jax.tree.map(jnp.asarray, batch))
        assert count == 8
        close([total, sums["loss"]], want, terms=MODEL)
    p = np.exp(np.asarray(logp))
    one = np.array([[each["label"] == name for name in LABELS] for each in fields])
    close(sums["brier_score"], ((p - one) ** 2).sum(), terms=MODEL)
    assert int(sums["accuracy"]) == (p.argmax(-1) == one.argmax(-1)).sum()


def arguments(base, words, out, *more):
    return (
        "train.classify", "--model", base / "model", "--data", words, "--out", out, "--steps", 20, "--batch", 4,
        "--seq-len", 32, "--lr", 1e-2, "--eval-every", 20, "--hold-out", 0.2, *more,
    )  # fmt: skip


LORA = ("--lora.rank", 4, "--steps", 60, "--eval-every", 60)


@pytest.mark.thorough
@pytest.mark.parametrize("more", [(), LORA], ids=["whole", "lora"])
def test_the_script(base, words, tmp_path, more):
    command(*arguments(base, words, tmp_path, *more))
    before, *_, last = read_metrics(tmp_path / "metrics.jsonl")
    assert last["validation_accuracy"] > 0.7 > before["validation_accuracy"]
    assert last["validation_brier_score"] < before["validation_brier_score"]
    if more:
        plain = zoo.load(base / "model", head="embedding")
        judge = with_head(plain, ClassificationHead(32, LABELS, None, key=jax.random.key(9)))
        model = zoo.peft.load(judge, tmp_path / "adapter")
    else:
        model = zoo.load(tmp_path / "model", head="classification")
    held_out = [record.fields for record in open_records(words, 0.2)[1]]
    _, found = classes(model, base, [each["text"] for each in held_out])
    right = np.mean([a == each["label"] for a, each in zip(found, held_out, strict=True)])
    assert model.head.labels == LABELS and right == pytest.approx(last["validation_accuracy"])
    if not more:  # a classifier goes on with its labels and its head
        command(*arguments(base, words, tmp_path / "more", "--model", tmp_path / "model", "--lr", 1e-9))
        first = read_metrics(tmp_path / "more" / "metrics.jsonl")[0]
        assert first["validation_loss"] == pytest.approx(last["validation_loss"], rel=1e-3)
        with pytest.raises(SystemExit, match="has the labels early late middle; leave them out"):
            command(*arguments(base, words, tmp_path / "no", "--model", tmp_path / "model", "--labels", "a", "b"))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"text": "abc"}, "line 1: a record must have a label"),
        ({"label": "early"}, "line 1: a record must have a label .*, and text .* or messages"),
        ({"text": "abc", "label": "never"}, "line 1 has the label 'never', which is none of early, late, middle"),
    ],
)
def test_bad_records(base, words, tmp_path, fields, said):
    (tmp_path / "bad.jsonl").write_text(json.dumps(fields) + "\n")
    more = ("--data", tmp_path / "bad.jsonl", "--labels", *LABELS, "--hold-out", 0.0)
    with pytest.raises(SystemExit, match=said):
        command(*arguments(base, words, tmp_path / "out", *more))


def test_what_is_refused(base, words, tmp_path):
    with pytest.raises(SystemExit, match="--data names records with a text"):
        command("train.classify", "--model", base / "model", "--out", tmp_path)
    with pytest.raises(SystemExit, match="--eval-tasks asks a language model"):
        command(*arguments(base, words, tmp_path, "--eval-tasks", "x.jsonl"))


def test_chats_are_rendered_and_labels_are_numbers(base, tmp_path):
    """Labels that are numbers are named by them, and a chat is what its template writes."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"text": "abc", "label": 1}) + "\n")
    (record,) = open_records(tmp_path / "data.jsonl", 0.0)[0]
    tokenizer = zoo.tokenizer("tiny")
    encode = lambda fields, **options: labelled.encode(
        record._replace(fields=fields), tokenizer, **dict(labels=("0", "1"), pad=None, seq_len=64) | options
    )
    assert encode({"text": "abc def", "label": 1}) == (tokenizer.encode("abc def"), 1, ())
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    assert encode({"messages": chat, "label": 0}) == (tokenizer.encode_all(chat), 0, ())
    cut = encode({"text": "abc def " * 9, "label": 1}, seq_len=3)
    assert cut.ids == tokenizer.encode("abc def " * 9)[:3]
    ends = encode({"text": "abc def", "label": 1}, pad=tokenizer.encode("abc def")[-1])
    assert ends.ids == tokenizer.encode("abc def")[:-1], "what heads take for padding is left out"


@pytest.mark.thorough
def test_several_labels(base, tmp_path):
    """Each label is learnt by its own, with transformers' loss, and the exported model says that there are several."""
    random = np.random.RandomState(0)
    words = ["".join(random.choice(list("abcdef"), random.randint(1, 5))) for _ in range(120)]
    lines = [json.dumps({"text": word, "labels": sorted({*word} & {"a", "b"})}) for word in words]
    (tmp_path / "labels.jsonl").write_text("\n".join(lines) + "\n")
    command(*arguments(base, tmp_path / "labels.jsonl", tmp_path / "run"))
    before, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert before["validation_loss"] == pytest.approx(np.log(2), abs=0.2) and last["validation_loss"] < 0.6
    model = zoo.load(tmp_path / "run" / "model", head="classification")
    assert model.head.several and model.head.labels == ("a", "b")
    held_out = [record.fields for record in open_records(tmp_path / "labels.jsonl", 0.2)[1]]
    logits, _ = classes(model, base, [each["text"] for each in held_out])
    right = np.array([[label in each["labels"] for label in "ab"] for each in held_out])
    loss = np.mean(np.log1p(np.exp(logits)) - right * np.asarray(logits))
    assert loss == pytest.approx(last["validation_loss"], rel=2e-2)
    assert np.mean(((logits > 0) == right).all(axis=1)) == pytest.approx(last["validation_accuracy"])
    with pytest.raises(SystemExit, match="has a label, and other records have several"):
        (tmp_path / "bad.jsonl").write_text(lines[0] + "\n" + json.dumps({"text": "a", "label": "a"}) + "\n")
        command(*arguments(base, tmp_path / "bad.jsonl", tmp_path / "bad", "--hold-out", 0))


def question(word):
    """Returns a record with a question about a word: its length, its first letter, or the number of its letters a."""
    match len(word) % 3:
        case 0:
            asked = {"type": "choice", "criteria": {"low": None, "high": "late"}}
            answer = ["low", "high"][word[0] > "d"]
        case 1:
            asked, answer = {"type": "noul", "instructions": "early"}, word[0] < "e"
        case _:
            asked, answer = {"type": "score", "criteria": ["no", "one", "many"]}, min(word.count("a"), 2)
    return {"state": word, "question": asked, "answer": answer}


@pytest.mark.thorough
def test_decisions(base, tmp_path):
    """A language model learns to answer questions in one pass; zoo.decide answers as the run did, with temperatures."""
    shutil.copytree(base / "model", tmp_path / "model")
    (tmp_path / "model" / "decision.json").write_text(json.dumps({"labels": {"noul": ["Y", "N"]}}))
    random = np.random.RandomState(0)
    words = ["".join(random.choice(list("abcdefgh"), random.randint(3, 6))) for _ in range(160)]
    (tmp_path / "asked.jsonl").write_text("".join(json.dumps(question(word)) + "\n" for word in words))
    more = ("--model", tmp_path / "model", "--seq-len", 64, "--steps", 30, "--eval-every", 30)
    command(*arguments(base, tmp_path / "asked.jsonl", tmp_path / "run", *more))
    before, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert last["validation_loss"] < before["validation_loss"]
    assert last["validation_calibrated_error"] >= 0 and last["validation_accuracy"] > before["validation_accuracy"]
    model, tokenizer = zoo.load(tmp_path / "run" / "model"), zoo.tokenizer(tmp_path / "run" / "model")
    settings = json.loads((tmp_path / "run" / "model" / "decision.json").read_text())
    assert settings["temperature"] == {
        kind: pytest.approx(last[f"validation_temperature_{kind}"]) for kind in ("choice", "noul", "score")
    }
    right = []
    for record in open_records(tmp_path / "asked.jsonl", 0.2)[1]:
        state, asked, answer = (record.fields[name] for name in ("state", "question", "answer"))
        found = zoo.decide(model, tokenizer, state, {"it": asked})["it"]
        match asked["type"]:
            case "noul":
                right.append((found["noul"] > 0.5) == answer)
            case _:
                best = max(found["probabilities"], key=found["probabilities"].get)
                right.append(best == str(answer))
    assert np.mean(right) == pytest.approx(last["validation_accuracy"])
    with pytest.raises(SystemExit, match="the answer 'middle' is none of low, high"):
        asked = question("abc") | {"answer": "middle"}
        (tmp_path / "bad.jsonl").write_text(json.dumps(asked) + "\n")
        command(*arguments(base, tmp_path / "bad.jsonl", tmp_path / "bad", *more, "--hold-out", 0))
    with pytest.raises(SystemExit, match="The labels Yes, No are not distinct single tokens"):
        command(*arguments(base, tmp_path / "asked.jsonl", tmp_path / "no"))


def test_calibration():
    """Probabilities of 0.75 that are right half of the time are off by 0.25, and a temperature mends that."""
    logits = np.log(np.array([[3.0, 1.0]] * 8, np.float32))
    arrays = logits, np.arange(8) % 2, np.zeros(8, int), np.ones(8, bool)
    found = calibration.Answers(*map(jnp.asarray, arrays))
    numbers = calibration.metrics(found, several=False)
    close(numbers["calibration_error"], 0.25, terms=10)
    assert numbers["temperature_choice"] == pytest.approx(10) and numbers["calibrated_error"] < 0.03
    found = found._replace(target=jnp.array([0, 1, 0, 0, 0, 1, 0, 0]))
    assert calibration.metrics(found, several=False)["temperature_choice"] == pytest.approx(1, abs=0.03)
