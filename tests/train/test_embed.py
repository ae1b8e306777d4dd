"""Embeddings: the loss equals sentence-transformers', in parts as in one, and what is trained is what is exported."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.train.batching import batches
from tests.train.conftest import command, devices
from tests.zoo.programs import MODEL
from train import embed, mine
from train.data import groups
from train.data.groups import Group
from train.data.records import open_records
from train.evaluate import retrieval
from train.evaluate.retrieval import Texts
from train.step import loss
from train.watch.metrics import read_metrics
from zoo.nn.heads import EmbeddingHead, normalized
from zoo.surgery import with_head


pytestmark = pytest.mark.usefixtures("quick")
RANDOM = np.random.RandomState(0)
VECTORS = RANDOM.standard_normal((6, 3, 8)).astype(np.float32)  # of six groups of an anchor, a positive, a negative
VECTORS /= np.linalg.norm(VECTORS, axis=-1, keepdims=True)
NUMBERS = np.arange(18).reshape(6, 3)


def options(**changes):
    return embed.EmbedOptions.of(**dict(negatives=1, temperature=0.1) | changes)


@pytest.fixture(scope="module")
def words(base):
    """Returns a file of words, in small letters and in capitals, with another word as the negative."""
    random = np.random.RandomState(0)
    words = ["".join(random.choice(list("abcdefgh"), random.randint(3, 6))) for _ in range(80)]
    records = [{"anchor": w, "positive": w.upper(), "negative": [w[::-1].upper()]} for w in words]
    (base / "groups.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return base / "groups.jsonl"


def test_the_loss():
    """It is the cross-entropy of the positive among all candidates; the ranks are those of sorted cosines."""
    losses, better = embed.compared(jnp.asarray(VECTORS), jnp.asarray(NUMBERS), options())
    scores = VECTORS[:, 0] @ VECTORS[:, 1:].reshape(12, 8).T
    logits = scores / 0.1
    own = logits[np.arange(6), np.arange(6) * 2]
    close(losses, np.log(np.exp(logits).sum(axis=1)) - own, terms=30, size=10)
    assert better.tolist() == (logits > own[:, None]).sum(axis=1).tolist()
    both, _ = embed.compared(jnp.asarray(VECTORS), jnp.asarray(NUMBERS), options(symmetric=True))
    back = (VECTORS[:, 1] @ VECTORS[:, 0].T) / 0.1
    want = (np.asarray(losses) + np.log(np.exp(back).sum(axis=1)) - np.diag(back)) / 2
    close(both, want, terms=30, size=10)


def test_what_is_not_counted():
    """Texts that equal the positive, positives of equal anchors, near texts by --margin, and texts that are absent."""
    compared = lambda numbers, **changes: embed.compared(
        jnp.asarray(VECTORS), jnp.asarray(numbers), options(**changes)
    )[0]
    logits = VECTORS[:, 0] @ VECTORS[:, 1:].reshape(12, 8).T / 0.1
    own = logits[np.arange(6), np.arange(6) * 2]
    nll = lambda counted: np.log(np.where(counted, np.exp(logits), 0).sum(axis=1)) - own
    numbers = NUMBERS.copy()
    numbers[2, 1] = numbers[0, 1]  # equal positives
    counted = np.ones((6, 12), bool)
    counted[0, 4] = counted[2, 0] = False
    close(compared(numbers), nll(counted), terms=30, size=10)
    numbers = NUMBERS.copy()
    numbers[3, 0] = numbers[1, 0]  # equal anchors
    counted = np.ones((6, 12), bool)
    counted[1, 6] = counted[3, 2] = False  # but not the other's negative
    close(compared(numbers), nll(counted), terms=30, size=10)
    numbers = NUMBERS.copy()
    numbers[5] = -1
    counted = np.ones((6, 12), bool)
    counted[:, 10:] = False
    close(compared(numbers)[:5], nll(counted)[:5], terms=30, size=10)
    counted = logits <= own[:, None] + 0.5
    close(compared(NUMBERS, margin=0.05), nll(counted), terms=30, size=10)


@pytest.mark.live
@pytest.mark.parametrize("symmetric", [False, True])
def test_the_loss_equals_sentence_transformers(symmetric):
    torch = pytest.importorskip("torch")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    vectors = [torch.tensor(VECTORS[:, n], requires_grad=True) for n in range(2 if symmetric else 3)]
    both = dict(directions=("query_to_doc", "doc_to_query"), partition_mode="per_direction") if symmetric else {}
    theirs = losses.MultipleNegativesRankingLoss(None, scale=10.0, **both)
    want = theirs.compute_loss_from_embeddings(vectors, None)
    want.backward()
    o, numbers = options(symmetric=symmetric, negatives=len(vectors) - 2), jnp.asarray(NUMBERS[:, : len(vectors)])
    value = lambda v: jnp.mean(embed.compared(normalized(v), numbers, o)[0])
    found, gradient = jax.value_and_grad(value)(jnp.asarray(VECTORS[:, : len(vectors)]))
    close(found, want.item(), terms=50, size=10)
    for n, vector in enumerate(vectors):
        close(gradient[:, n], vector.grad, terms=200)


@pytest.mark.live
def test_losses_of_scores_equal_sentence_transformers():
    torch = pytest.importorskip("torch")
    losses = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    scores = RANDOM.standard_normal((6, 2)).astype(np.float32)
    cosine = lambda a, b: torch.nn.functional.cosine_similarity(a, b) * 10
    theirs = {
        "cosent": (losses.CoSENTLoss(None, scale=10.0), 1),
        "distill": (losses.DistillKLDivLoss(None, similarity_fct=cosine, temperature=1.0), 2),
    }
    for name, (their, candidates) in theirs.items():
        vectors = [torch.tensor(VECTORS[:, n] * 2, requires_grad=True) for n in range(1 + candidates)]
        labels = torch.tensor(scores[:, :candidates])
        want = their.compute_loss_from_embeddings(vectors, labels)
        want.backward()
        o = options(loss=name, negatives=candidates - 1)

        def value(v, o=o, candidates=candidates):
            labels = jnp.asarray(np.pad(scores[:, :candidates], ((0, 0), (1, 0))))
            return embed.of_groups(Texts(v, jnp.asarray(NUMBERS[:, : 1 + candidates]), labels), o)[0] / 6

        found, gradient = jax.value_and_grad(value)(jnp.asarray(VECTORS[:, : 1 + candidates] * 2))
        close({name: found}, {name: want.item()}, terms=50, size=10)
        for n, vector in enumerate(vectors):
            close({name: gradient[:, n]}, {name: vector.grad}, terms=200)


def test_losses_of_scores():
    """cosent punishes each pair of cosines in the wrong order, and leaves out groups that are absent."""
    scores = np.array([3.0, 1.0, 2.0, 2.0, 0.0, 9.0], np.float32)
    cosines = (VECTORS[:, 0] * VECTORS[:, 1]).sum(-1)
    labels = jnp.asarray(np.stack([0 * scores, scores], axis=1))
    numbers = NUMBERS[:, :2].copy()
    numbers[5] = -1
    texts = Texts(jnp.asarray(VECTORS[:, :2]), jnp.asarray(numbers), labels)
    found, _ = embed.of_groups(texts, options(loss="cosent", negatives=0))
    wrong = [np.exp((cosines[j] - cosines[i]) / 0.1) for i in range(5) for j in range(5) if scores[i] > scores[j]]
    close(found, 5 * np.log(1 + sum(wrong)), terms=50, size=10)


def test_metrics():
    """Ranks are among distinct texts, without other right ones; correlations are scipy's."""
    vectors, numbers = VECTORS.copy(), NUMBERS.copy()
    vectors[2, 1:], numbers[2, 1:] = vectors[0, 1:], numbers[0, 1:]  # texts that stand twice count once
    numbers[3, 0], vectors[3, 0] = numbers[1, 0], vectors[1, 0]  # an anchor with two positives
    flat, count = vectors[:, 1:].reshape(-1, 8), np.ones(12, bool)
    count[4:6] = False
    want = []
    for n in range(6):
        others = count.copy()
        others[[2, 6] if n in (1, 3) else []] = False
        want.append(1 + np.count_nonzero(flat[others] @ vectors[n, 0] > vectors[n, 1] @ vectors[n, 0] + 1e-6))
    assert retrieval.ranks(vectors, numbers).tolist() == want
    texts = Texts(*map(jnp.asarray, (vectors, numbers, np.zeros((6, 3), np.float32))))
    found = retrieval.metrics(texts, loss="contrastive")
    close(found["recall@1"], np.mean(np.array(want) == 1), terms=10)
    close(found["mrr"], np.mean(1 / np.array(want)), terms=10)
    stats = pytest.importorskip("scipy.stats")
    a, b = (RANDOM.randint(0, n, 20).astype(np.float32) for n in (5, 9))
    close(retrieval.spearman(a, b), stats.spearmanr(a, b).statistic, terms=50)


def rows_of(base, words, count, seq_len):
    """Returns the only batch of the first records, in eight rows of 96 tokens, whatever length they were packed for."""
    (batch,) = batches(
        open_records(words, 0.0)[0][:count], zoo.tokenizer(base / "model"), vocab_size=64, texts=3, pad=None,
        kind=groups.EMBEDDED, batch=8, seq_len=seq_len,
    )  # fmt: skip
    return {name: jnp.asarray(np.pad(a, ((0, 0), (0, 96 - a.shape[1])))) for name, a in batch.items()}


@pytest.mark.thorough
def test_packing_and_parts_change_nothing(base, words, model):
    """The loss and its gradients are the same for one group a row and for several, and read at once or in parts."""
    embedder = with_head(model, EmbeddingHead())
    packed, spread = (rows_of(base, words, 8, seq_len) for seq_len in (96, 21))
    assert packed["segments"].max() > 9 > spread["segments"].max()

    @functools.partial(jax.jit, static_argnums=2)
    def value(model, batch, parts):
        def total(model):
            o = options(widths=(16,))
            total, count, sums, _ = embed.objective(model, batch, options=o, parts=parts)
            return total, (count, sums)

        return jax.value_and_grad(total, has_aux=True)(model)

    (whole, (count, sums)), gradient = value(embedder, packed, 1)
    assert count == 8
    for batch, parts in ((spread, 1), (packed, 4)):
        (total, (_, others)), other = value(embedder, batch, parts)
        close(total, whole, terms=MODEL)
        for name, number in sums.items():
            close({name: others[name]}, {name: number}, terms=MODEL)
        for a, b in zip(jax.tree.leaves(other), jax.tree.leaves(gradient), strict=True):
            close(a, b, terms=2 * MODEL)
    records, _ = open_records(words, 0.0)
    texts = [groups.group(records[n]) for n in range(8)]
    tokenizer = zoo.tokenizer(base / "model")
    flat = zoo.embed(embedder, tokenizer, [text for g in texts for text in (g.anchor, g.positive, *g.negatives)])
    vectors = jnp.asarray(flat.reshape(8, 3, 32))
    numbers = np.array([[groups.hashed(text) for text in (g.anchor, g.positive, *g.negatives)] for g in texts])
    o, halves = options(), vectors[..., :16]
    halves = halves / jnp.linalg.norm(halves, axis=-1, keepdims=True)
    want = sum(float(jnp.sum(embed.compared(v, jnp.asarray(numbers), o)[0])) for v in (halves, vectors)) / 2
    close(whole, want, terms=MODEL)


def arguments(base, words, out, *more):
    return (
        "train.embed", "--model", base / "model", "--data", words, "--out", out, "--steps", 20, "--batch", 8,
        "--seq-len", 48, "--lr", 3e-3, "--eval-every", 20, "--hold-out", 0.2, "--negatives", 1, *more,
    )  # fmt: skip


@pytest.mark.thorough
def test_the_script(base, words, tmp_path):
    """A run learns to find the positives; the exported model finds as many as the run did."""
    command(*arguments(base, words, tmp_path))
    command(*arguments(base, words, tmp_path))  # it finds its checkpoint, and has nothing left to do
    before, *_, last = read_metrics(tmp_path / "metrics.jsonl")
    assert last["validation_mrr"] > before["validation_mrr"] and last["validation_loss"] < before["validation_loss"]
    model, tokenizer = zoo.load(tmp_path / "model", head="embedding"), zoo.tokenizer(tmp_path / "model")
    held_out = [groups.group(record) for record in open_records(words, 0.2)[1]]
    anchors, positives = (zoo.embed(model, tokenizer, [g[n] for g in held_out]) for n in range(2))
    negatives = zoo.embed(model, tokenizer, [g.negatives[0] for g in held_out])
    scores = anchors @ np.concatenate([positives, negatives]).T
    rank = (scores > np.diag(scores)[:, None] + 1e-6).sum(axis=1) + 1
    assert np.mean(1 / rank) == pytest.approx(last["validation_mrr"], abs=0.02)
    assert np.mean(rank <= 10) == pytest.approx(last["validation_recall@10"], abs=0.02)


@pytest.mark.thorough
def test_scores_are_learnt(base, words, tmp_path):
    """Cosines get the order of the records' scores."""
    words = [groups.group(record).anchor for record in open_records(words, 0.0)[0]]
    pairs = [(word, [word, words[n - 1]][n % 2].upper(), 1 - n % 2) for n, word in enumerate(words)]
    lines = [json.dumps({"sentence1": a, "sentence2": b, "score": score}) + "\n" for a, b, score in pairs]
    (tmp_path / "scores.jsonl").write_text("".join(lines))
    run = arguments(base, tmp_path / "scores.jsonl", tmp_path / "run", "--loss", "cosent", "--negatives", 0)
    command(*run)
    before, *_, last = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert last["validation_spearman"] > before["validation_spearman"] + 0.05


@pytest.mark.thorough
def test_adapters_and_meshes(base, words, tmp_path, monkeypatch):
    """Adapters are trained, and losses on eight devices are those on one, in parts, too."""
    mesh, parts = ("--mesh", "fsdp=4,tensor=2"), ("--microbatches", 2)
    runs = {"one": (), "parts": parts, "eight": mesh, "parts of eight": mesh + parts}
    command(*arguments(base, words, tmp_path / "int8", "--lora.rank", 4, "--quantize", "int8"))
    assert (tmp_path / "int8" / "adapter").is_dir()
    found = {}
    for name, more in runs.items():
        if name == "eight":
            devices(monkeypatch, 8)
        command(*arguments(base, words, tmp_path / name, "--lora.rank", 4, *more))
        found[name] = [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
    for name in runs:
        close({name: found[name]}, {name: found["one"]}, terms=len(found[name]) * MODEL)
    config = json.loads((tmp_path / "one" / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "FEATURE_EXTRACTION"
    assert zoo.peft.load(zoo.load(base / "model", head="embedding"), tmp_path / "one" / "adapter").head is not None


def test_records(base, tmp_path):
    """A group has as many texts as it is asked for; prompts are put before, and long texts lose their ends."""
    (tmp_path / "data.jsonl").write_text(json.dumps({"anchor": "a", "positive": "b"}) + "\n")
    (record,) = open_records(tmp_path / "data.jsonl", 0.0)[0]
    tokenizer = zoo.tokenizer(base / "model")
    tokenizer.prompts = {"query": "ask "}
    encode = lambda fields, texts=3, seq_len=30: [
        tokenizer.decode(ids[:-1])
        for ids, _ in groups.encode(record._replace(fields=fields), tokenizer, texts=texts, pad=None, seq_len=seq_len)
    ]
    pair = {"anchor": "red", "positive": "blue"}
    assert encode(pair) == ["ask red", "blue", "blue"]
    assert encode(pair | {"negative": ["x", "y"]}) == ["ask red", "blue", "x"]
    assert encode(pair | {"negative": "x"}, texts=2) == ["ask red", "blue"]
    assert encode(pair | {"negative_1": "x", "negative_2": "y"}, texts=4) == ["ask red", "blue", "x", "y"]
    assert encode({"sentence1": "red", "sentence2": "blue"}, texts=2) == ["ask red", "blue"]
    assert encode({"question": "red", "answer": "blue"}, texts=2, seq_len=10) == ["ask r", "blue"]
    chat = [{"role": "user", "content": "red"}, {"role": "assistant", "content": "blue"}]
    assert encode({"messages": chat}, texts=2) == ["ask red", "blue"]
    for fields, said in (
        ({"anchor": "a"}, "line 1: a record must have anchor and positive"),
        (pair | {"negative": [1]}, "line 1: a record must have anchor and positive"),
        (pair | {"positive": ""}, "line 1: a text is empty"),
        (pair | {"score": "high"}, "line 1: a record must have anchor and positive"),
    ):
        with pytest.raises(ValueError, match=said):
            encode(fields)
    scored = lambda fields: groups.encode(
        record._replace(fields=fields), tokenizer, texts=3, scored=True, pad=None, seq_len=30
    )
    assert [text.score for text in scored(pair | {"negative": "x", "scores": [2, -1.5]})] == [0, 2, -1.5]
    for fields in (pair | {"negative": "x", "score": 1.0}, pair | {"scores": [1.0, 2.0]}):
        with pytest.raises(ValueError, match=r"line 1 has . negatives and . scores, fewer than are read"):
            scored(fields)


def test_what_is_refused(base, words, tmp_path):
    for more, said in (
        (("--widths", 32), "--widths 32: the model has 32 features"),
        (("--eval-tasks", "x.jsonl"), "--eval-tasks asks a language model"),
        (("--vision",), "--vision: texts are embedded"),
        (("--loss", "cosent"), "--loss cosent reads pairs with a score: leave out --negatives"),
        (("--loss", "distill", "--negatives", 0), "--loss distill compares the texts of a group: give --negatives"),
    ):
        with pytest.raises(SystemExit, match=said):
            command(*arguments(base, words, tmp_path, *more))


def test_hard_negatives_are_mined(base, words, tmp_path):
    """They are the texts nearest to the anchor, but for right ones and those near to the positive's cosine."""
    lines = words.read_text().splitlines()[:12]
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    out = tmp_path / "mined.jsonl"
    command("train.mine", tmp_path / "pairs.jsonl", "--model", base / "model", "--out", out, "--negatives", 3)
    found = [json.loads(line) for line in out.read_text().splitlines()]
    model, tokenizer = zoo.load(base / "model", head="embedding"), zoo.tokenizer(base / "model")
    before = list(map(json.loads, lines))
    texts = list(dict.fromkeys(text for each in before for text in (each["positive"], *each["negative"])))
    cosines = zoo.embed(model, tokenizer, [each["anchor"] for each in before]) @ zoo.embed(model, tokenizer, texts).T
    for row, each, mined in zip(cosines, before, found, strict=True):
        limit = row[texts.index(each["positive"])]
        near = sorted((n for n in range(len(texts)) if row[n] <= limit - 0.05 * abs(limit)), key=lambda n: -row[n])
        own = [texts[n] for n in near[:3]]
        assert mined["negative"] == [*each["negative"], *(text for text in own if text not in each["negative"])]


def test_anchors_are_compared_some_at_a_time():
    """Beyond 1,024 anchors there are further products, and each anchor has the negatives that it has alone."""
    random, number = np.random.RandomState(0), 1030
    texts = [str(n) for n in range(40)]
    anchors, vectors = (
        np.array(normalized(jnp.asarray(random.randn(count, 8), jnp.float32))) for count in (number, 40)
    )
    pairs = [Group(str(n), texts[n % 40], (), ()) for n in range(number)]
    found = list(mine.mine(pairs, texts, anchors, vectors, negatives=3, margin=0.05))
    for n in (0, 1023, 1024, number - 1):
        (alone,) = mine.mine(pairs[n : n + 1], texts, anchors[n : n + 1], vectors, negatives=3, margin=0.05)
        assert found[n] == alone
    assert len(found) == number and len({*map(tuple, found)}) > 100


def test_info_nce_leaves_out_what_is_not_counted():
    scores = jnp.asarray([[1.0, 2.0, 3.0]])
    own, counted = jnp.asarray([[True, False, False]]), jnp.asarray([[False, True, False]])
    found = loss.info_nce(scores, own, counted, temperature=0.5)
    close(found, np.log(np.exp(2) + np.exp(4)) - 2, terms=10)
