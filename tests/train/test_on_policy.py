"""Distillation on policy: divergences from teachers, rows of completions, tokens aligned by text, and the script."""

import itertools
import json
import string

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

import zoo
from tests.close import close
from tests.train import make_golden_trl as trl
from tests.train.conftest import Bigram, command, devices, losses, unspaced
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from train import distill
from train.data.prompts import Prompt
from train.data.records import Record
from train.methods import alignment, on_policy
from train.methods.on_policy import Rows, Teacher, Teachers
from train.step import loss
from train.watch.metrics import read_metrics


pytestmark = pytest.mark.usefixtures("quick")
GOLDEN = json.loads(trl.FILE.read_text())
GIVEN = {name: jnp.asarray(a, jnp.int32 if a.dtype == int else None) for name, a in trl.inputs().items()}


@pytest.fixture(scope="module")
def folder(base):
    """Returns a folder with a student, `model`, a teacher of the same tokens, and `other`, one of other tokens."""
    for name in ("teacher", "other"):
        tiny.write(base / name, "llama", eos_token_id=63)
        tiny.write_tokenizer(base / name)
    characters = string.digits + string.ascii_letters[:-1] + " "  # in another order, and Z is missing
    vocabulary = {character: n for n, character in enumerate(characters)} | {"ab": 62, "<end>": 63}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[("a", "b")]))
    found.add_special_tokens(["<end>"])
    found.decoder = tokenizers.decoders.Fuse()
    found.save(str(base / "other" / "tokenizer.json"))
    return base


@pytest.fixture(scope="module")
def both(folder):
    return zoo.tokenizer(folder / "model"), zoo.tokenizer(folder / "other")


def rows(tokenizer, **changes):
    usual = dict(
        vocab_size=64, teachers=[""], tokenizers=[None], hint=None, completions=True, rows=2, seq_len=16, room=12,
        parts=1,
    )  # fmt: skip
    return Rows(tokenizer, **usual | changes)


# ======================================================================================================================
# The loss.
# ======================================================================================================================


@pytest.mark.parametrize("name, beta", [("gkd", 0.3), ("gkd_reverse", 1.0)])
def test_the_loss_of_completions_equals_trl(folder, name, beta):
    """The objective on completions, whose teacher is another table, equals GKD's loss, and the norm of its gradient."""
    rows = GIVEN["tokens"].shape[0]
    tokens = jnp.arange(rows * trl.SEQ, dtype=jnp.int32).reshape(rows, -1)  # each place has a row of the table
    tables = (GIVEN[name].reshape(-1, trl.VOCAB) for name in ("logits", "ref_logits"))
    student, teacher = map(Bigram, tables)
    mask = jnp.concatenate([GIVEN["completion"][:, 1:], jnp.zeros((rows, 1), jnp.int32)], axis=1)
    batch = dict(tokens=tokens, targets=tokens, loss_mask=mask, segments=jnp.ones_like(tokens))
    o = distill.DistillOptions.of(teacher="t", beta=beta, on_policy=1.0)

    def mean(student):
        total, count, *_ = distill.objective(student, batch, Teachers((Teacher(teacher),)), options=o)
        return total / count.astype(jnp.float32)

    value, gradient = jax.jit(jax.value_and_grad(mean))(student)
    close([value, jnp.linalg.norm(gradient.table)], GOLDEN[name], terms=200)


@pytest.mark.parametrize("name, beta", [("top_k_forward", 0.0), ("top_k_jsd", 0.3), ("top_k_reverse", 1.0)])
def test_the_largest_logits_equal_trl(name, beta):
    def found(student, teacher):
        log_q, log_p = (jax.nn.log_softmax(logits / 1.7) for logits in (student, teacher))
        log_p, at = jax.lax.top_k(log_p, trl.TOP_K)
        return loss.divergence_of_some(jnp.take_along_axis(log_q, at, axis=-1), log_p, beta=beta)

    close(jax.jit(found)(GIVEN["logits"], GIVEN["ref_logits"])[0], GOLDEN[name], terms=200)


@pytest.fixture(scope="module")
def made():
    """Returns a student, two teachers, and a batch in which each has two rows."""
    random = np.random.RandomState(0)
    tables = [Bigram(jnp.asarray(2 * random.normal(size=(64, 64)), jnp.float32)) for _ in range(3)]
    integers = lambda most: jnp.asarray(random.randint(0, most, (4, 10)), jnp.int32)
    batch = dict(
        tokens=integers(64), targets=integers(64), loss_mask=integers(2), segments=jnp.ones((4, 10), jnp.int32)
    )
    return *tables, batch | {"teacher": jnp.asarray([[0], [1], [1], [0]], jnp.int32) * jnp.ones((1, 10), jnp.int32)}


@pytest.mark.thorough
def test_each_row_has_its_teacher(made):
    student, first, second, batch = made

    def found(each, rows, top_k=None):
        part = {name: array[rows] for name, array in batch.items()}
        given = Teachers(tuple(map(Teacher, each)))
        made = lambda student: given.divergences(
            student, student.table[part["tokens"]], part, beta=1.0, temperature=1.0, top_k=top_k
        )
        weighted = lambda student: jnp.sum(jnp.sin(made(student)) * part["loss_mask"].astype(jnp.float32))
        return jax.jit(jax.value_and_grad(weighted))(student)

    whole = found([first, second], np.arange(4))
    apart = [found([each], np.array(rows)) for each, rows in ((first, [0, 3]), (second, [1, 2]))]
    close(whole[0], apart[0][0] + apart[1][0], terms=200)
    close(whole[1].table, apart[0][1].table + apart[1][1].table, terms=200)
    of_all = found([first], np.array([0, 3]), top_k=64)
    close(of_all[0], apart[0][0], terms=MODEL)
    assert abs(found([first], np.array([0, 3]), top_k=2)[0] - of_all[0]) > 0.1


@pytest.mark.thorough
def test_a_teacher_with_other_tokens(made):
    """A teacher whose ids are the student's in another order, and without some, says the same of those they share."""
    student, first, _, batch = made
    order = np.random.RandomState(1).permutation(64)
    table = first.table[:, order]  # the student's token order[n] is this one's n
    shared = np.flatnonzero(order < 50)
    ends = jnp.array([60]), jnp.array(np.flatnonzero(order == 60))
    other = Teacher(Bigram(table), (jnp.asarray(order[shared]), jnp.asarray(shared)), ends)
    how = dict(beta=0.3, temperature=2.0, top_k=None)
    x = student.table[batch["tokens"]]
    found = jax.jit(lambda: Teachers((other,)).divergences(student, x, batch, **how))()
    log_q, log_p = (jax.nn.log_softmax(each.table[batch["tokens"]] / 2) for each in (student, first))
    some = lambda a: jnp.concatenate([a[..., :50], a[..., 60:61]], axis=-1)
    close(found, loss.divergence_of_some(some(log_q), some(log_p), beta=0.3), terms=200)


# ======================================================================================================================
# Rows.
# ======================================================================================================================


def test_rows(both):
    """A document has a prompt with a completion, of which the completion is learnt."""
    made = rows(both[0])
    question = made.question(Record("here", {"prompt": "abc ", "completion": "ABC"}))
    batch, share = made.batch([question], [question.completion])
    assert share == 1.0 and made.fits(question) and batch.keys() == made.padding(2).keys()
    ids = [*both[0].encode("abc ABC"), 63]
    assert batch["tokens"][0, :7].tolist() == ids[:-1] and batch["targets"][0, :7].tolist() == ids[1:]
    assert batch["loss_mask"].tolist() == [[0] * 3 + [1] * 4 + [0], [0] * 8]
    assert batch["segments"].sum() == 7 and batch["positions"][0, 6] == 6


def test_a_hint_is_read_by_the_teacher_alone(both):
    made = rows(both[0], hint="completion")
    question = made.question(Record("here", {"prompt": "abc ", "completion": "AB"}))
    batch, _ = made.batch([question], [question.completion])
    read = [*both[0].encode("AB\n\nabc AB"), 63]
    assert batch["teacher_tokens"][0, : len(read)].tolist() == read and batch["teacher_segments"].sum() == len(read)
    assert batch["loss_mask"].sum() == 3
    for place in np.flatnonzero(batch["loss_mask"][0]):
        assert read[batch["teacher_at"][0, place] + 1] == batch["targets"][0, place]
    turns = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    hinted = on_policy.hinted(Record("here", {"messages": turns}), "answer", Prompt([], {"answer": "two"}), both[0])
    assert hinted.fields["messages"] == [{"role": "user", "content": "two\n\none"}]
    with pytest.raises(ValueError, match="line 3: there is no text in the field 'h', which --hint names"):
        rows(both[0], hint="h").question(Record("line 3", {"prompt": "abc ", "completion": "AB"}))


def test_teachers_of_records(both):
    made = rows(both[0], teachers=["words", "b"], tokenizers=[None, None], rows=4, parts=2)
    record = lambda where, **more: made.question(Record(where, {"prompt": "abc ", "completion": "A"} | more))
    questions = [
        record("x/b.jsonl, line 1"),
        record("x/words.jsonl, line 1"),
        record("b.jsonl, line 2", teacher="words"),
        record("b.jsonl, line 3"),
    ]
    assert [question.teacher for question in questions] == [1, 0, 0, 1]
    batch, _ = made.batch(questions, [question.completion for question in questions])
    teachers = [set(row[mask == 1].tolist()) for row, mask in zip(batch["teacher"], batch["loss_mask"], strict=True)]
    assert teachers == [{0}, {1}, {0}, {1}]  # parts: 02, 13
    with pytest.raises(ValueError, match=r"no --teacher is named 'c'; .* is one of words, b"):
        record("c.jsonl, line 1")


@pytest.mark.thorough
def test_packed_completions_are_learnt_as_unpacked_ones(folder, both, model):
    """Loss and gradients equal those of a row for each completion, with hints and teachers of same and other tokens."""
    usual = dict(hint="hint", teachers=["same", "other"], tokenizers=[None, both[1]], room=16)
    words = ("ab", "c"), ("d", "efg"), ("hab", "i"), ("j", "kl"), ("mnopq", "r"), ("s", "tab")
    teachers = itertools.cycle(["same", "other", "other"])
    records = [
        Record("here", {"prompt": prompt, "completion": answer, "teacher": name, "hint": 2 * answer})
        for (prompt, answer), name in zip(words, teachers, strict=False)
    ]

    def made(**changes):
        made = rows(both[0], **usual | changes)
        questions = [made.question(record) for record in records]
        batch, share = made.batch(questions, [question.completion for question in questions])
        width = lambda name: 32 if name.startswith("teacher_") and name != "teacher_at" else 16
        pad = lambda name, a: np.pad(a, ((0, 6 - len(a)), (0, width(name) - a.shape[1])))
        return {name: pad(name, a) for name, a in batch.items()}, share

    (shared, share), (alone, same_share) = made(rows=2, parts=2), made(rows=6)
    assert shared["segments"].max(axis=1).sum() == 6 and alone["segments"].max() == 1 and share == same_share < 1
    assert shared["teacher_segments"].max(axis=1).sum() == 6 and shared["tokens"].shape == alone["tokens"].shape
    assert shared["loss_mask"].sum() == alone["loss_mask"].sum() > 10
    random = np.random.RandomState(0)
    other = Bigram(jnp.asarray(2 * random.normal(size=(64, 64)), jnp.float32))
    aligned = alignment.Alignment.of(*both)
    ids = [jnp.asarray(each) for each in (aligned.ours, aligned.theirs, aligned.our_ends, aligned.their_ends)]
    same = jax.tree.map(lambda a: a + 0.1 * jnp.asarray(random.normal(size=a.shape), a.dtype), model)
    teachers = Teachers((Teacher(same), Teacher(other, (ids[0], ids[1]), (ids[2], ids[3]))))
    o = distill.DistillOptions.of(teacher="t", beta=0.3, on_policy=1.0)

    @jax.jit
    @jax.value_and_grad
    def mean(model, batch):
        total, count, *_ = distill.objective(model, batch, teachers, options=o)
        return total / count.astype(jnp.float32)

    (value, gradients), (expected, of_each) = mean(model, shared), mean(model, alone)
    close(value, expected, terms=MODEL)
    close(gradients, of_each, terms=2 * MODEL)
    assert value > 0.1 and max(float(abs(g).max()) for g in jax.tree.leaves(gradients)) > 0.01


def test_alignment(both):
    """Tokens are compared where both tokenizers have read the same text."""
    ours, theirs = both
    found = alignment.Alignment.of(ours, theirs)
    text = lambda tokenizer, ids: [tokenizer.decode([id]) for id in ids.tolist()]
    assert text(ours, found.ours) == text(theirs, found.theirs) and len(found.ours) == 62  # not Z, and no end
    tokens = [*ours.encode("abc"), 63]
    ids, pairs = alignment.matches(ours, ours.encode("x"), tokens, theirs, theirs.encode("x"))
    assert theirs.decode(ids) == "abc" and len(ids) == 2
    assert pairs == [(0, 0), (2, 1), (3, 2)]  # a or ab; c; the end
    assert alignment.matches(ours, [], ours.encode("aZ"), theirs, [])[1] == []  # the teacher has no Z
    made = rows(ours, tokenizers=[theirs])
    batch, share = made.batch(
        [made.question(Record("", {"prompt": "abc ", "completion": "ab"}))], [[*ours.encode("ab"), 63]]
    )
    assert share == pytest.approx(2 / 3) and batch["loss_mask"][0].tolist() == [0] * 3 + [1, 0, 1] + [0] * 2
    assert batch["teacher_at"][0, [3, 5]].tolist() == [2, 3]  # its prompt has the tokens ab, c and a space


def test_tokenizers_that_do_not_align(both, tmp_path):
    (tmp_path / "few").mkdir()
    few = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "<unk>": 2}, merges=[], unk_token="<unk>"))
    few.decoder = tokenizers.decoders.Fuse()
    few.save(str(tmp_path / "few" / "tokenizer.json"))
    with pytest.raises(ValueError, match=r"its tokens can't be aligned with those of .*model; take a teacher whose"):
        alignment.Alignment.of(both[0], zoo.tokenizer(tmp_path / "few"))


# ======================================================================================================================
# The script.
# ======================================================================================================================


def options(folder, out, **changes):
    usual = dict(
        model=str(folder / "model"), teacher=(str(folder / "teacher"),), data=(str(folder / "words.jsonl"),), out=out,
        on_policy=1.0, seq_len=24, max_new_tokens=8, batch=8, warmup=0, lr=1e-2, steps=3,
    )  # fmt: skip
    return distill.DistillOptions.of(**usual | changes)


@pytest.mark.thorough
def test_the_script(folder, tmp_path):
    """Half of the steps have the student's completions; held-out prompts always do."""
    distill.main(options(folder, tmp_path, on_policy=0.5, seed=1, steps=4, eval_every=2, best="validation_divergence"))
    lines = read_metrics(tmp_path / "metrics.jsonl")
    shares = [line["on_policy"] for line in lines if "loss" in line]
    assert set(shares) == {0.0, 1.0} and len(shares) == 4
    assert all(("length" in line) == bool(line["on_policy"]) for line in lines if "loss" in line)
    assert len([line for line in lines if line.get("validation_divergence", -1) >= 0]) == 3


def test_refusals(folder, tmp_path):
    for changes, message in (
        ({"on_policy": 1.5}, "is a share of the steps"),
        ({"on_policy": 0.0, "hint": "answer"}, "above 0 with --hint"),
        ({"teacher": ()}, "--on-policy needs a --teacher; or a --hint"),
        ({"weight": 0.5}, "--weight does not go with --on-policy"),
        ({"store": tmp_path}, "--store does not go with --on-policy"),
        ({"teacher": ("a=tiny", "tiny")}, "of several, each has a name of its own"),
        ({"max_new_tokens": 24}, "No prompt has at most 1 tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            distill.main(options(folder, tmp_path / "run").changed(**changes))
    with pytest.raises(ValueError, match="Several teachers need --on-policy"):
        distill.main(options(folder, tmp_path / "run", on_policy=0.0, teacher=("a=tiny", "b=tiny")))


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes",
    [
        {"teacher": ("other",), "steps": 60},
        {"teacher": ("words=teacher", "b=other"), "mesh": "fsdp=2,context=2", "microbatches": 2},
        {
            "teacher": (), "hint": "completion", "lora": distill.finetune.Lora(rank=8), "mesh": "fsdp=2,context=2",
            "steps": 100,
        },
    ],
    ids=["other tokens", "several teachers", "hint"],
)  # fmt: skip
def test_the_student_learns(folder, tmp_path, changes, monkeypatch):
    """The divergence from the teacher falls on the student's own completions."""
    devices(monkeypatch, 4 if "mesh" in changes else 1)
    place = lambda name: "=".join([*name.split("=")[:-1], str(folder / name.split("=")[-1])])
    changes = changes | {"teacher": tuple(map(place, changes["teacher"]))} if "teacher" in changes else changes
    o = options(folder, tmp_path / "run", **{"steps": 30} | changes)
    distill.main(o)
    found = losses(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert np.mean(found[-3:]) < 0.6 * np.mean(found[:2])


@pytest.mark.thorough
def test_a_run_that_is_stopped_goes_on_to_the_same_numbers(folder, tmp_path, stop_after):
    run = lambda out: distill.main(options(folder, out, on_policy=0.5, steps=6, save_every=2))
    run(tmp_path / "whole")
    stop_after(3)
    with pytest.raises(SystemExit):
        run(tmp_path / "stopped")
    stop_after(0)
    run(tmp_path / "stopped")
    numbers = lambda out: [
        {k: v for k, v in line.items() if "second" not in k and "memory" not in k}
        for line in read_metrics(out / "metrics.jsonl")
    ]
    assert numbers(tmp_path / "stopped") == numbers(tmp_path / "whole")


@pytest.mark.thorough
def test_a_dry_run(folder, tmp_path, capsys):
    arguments = [
        "--model",
        folder / "model",
        "--hint",
        "completion",
        "--on-policy",
        1,
        "--data",
        folder / "words.jsonl",
    ]
    command("train.distill", *arguments, "--seq-len", 32, "--max-new-tokens", 8, "--out", tmp_path / "x", "--dry-run")
    assert "Memoryofadevice" in unspaced(capsys.readouterr().out)
