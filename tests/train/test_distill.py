"""Distillation: the objective against the formulas written out, stored logits, and a student that learns."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.train.conftest import Bigram, command
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from train import distill
from train.data.records import open_records
from train.methods import teacher


pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Returns a folder with a teacher, a student that is another model, and texts."""
    folder, random = tmp_path_factory.mktemp("base"), np.random.RandomState(0)
    for name in ("qwen3", "llama"):
        tiny.write(folder / name, name, eos_token_id=63)
        tiny.write_tokenizer(folder / name)
    words = ["".join(random.choice(list("abcdefgh"), 6)) for _ in range(60)]
    (folder / "words.jsonl").write_text("".join(json.dumps({"text": word}) + "\n" for word in words))
    return folder


def options(folder, **changes):
    usual = dict(
        model=str(folder / "qwen3"), teacher=(str(folder / "llama"),), data=(str(folder / "words.jsonl"),), seq_len=16,
        batch=8, warmup=0, lr=3e-3,
    )  # fmt: skip
    return distill.DistillOptions.of(**usual | changes)


@pytest.fixture(scope="module")
def batch():
    random = np.random.RandomState(1)
    lengths, rows = [7, 5, 4], np.ones((2, 1))
    arrays = {
        "tokens": random.randint(0, 63, (2, 16)), "targets": random.randint(0, 63, (2, 16)),
        "loss_mask": random.rand(2, 16) < 0.6, "segments": np.repeat([1, 2, 0], lengths) * rows,
        "positions": np.concatenate([np.arange(n) for n in lengths]) * rows,
    }  # fmt: skip
    return {name: jnp.asarray(array, jnp.int32) for name, array in arrays.items()}


def logits(model, batch):
    return model.unembed(model.hidden(batch["tokens"], positions=batch["positions"], segments=batch["segments"])[0])


@pytest.fixture(scope="module")
def models(folder):
    """Returns the student and its teacher."""
    return [zoo.load(folder / name, dtype="float32") for name in ("qwen3", "llama")]


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_objective(folder, batch, beta):
    random = np.random.RandomState(2)
    student, larger = (Bigram(jnp.asarray(random.normal(size=(64, 64)), jnp.float32)) for _ in range(2))
    o = options(folder, beta=beta, temperature=2.0, weight=0.7)

    def plain(student):
        log_q, log_p = (jax.nn.log_softmax(logits(m, batch) / 2.0) for m in (student, larger))
        q, p = jnp.exp(log_q), jnp.exp(log_p)
        m = jnp.log(beta * p + (1 - beta) * q) if 0 < beta < 1 else log_p
        each = {
            0.3: beta * p * (log_p - m) + (1 - beta) * q * (log_q - m),
            1.0: q * (log_q - log_p),
        }[beta].sum(-1)
        data = -jnp.take_along_axis(jax.nn.log_softmax(logits(student, batch)), batch["targets"][..., None], -1)[..., 0]
        return jnp.sum((0.7 * 4.0 * each + 0.3 * data) * batch["loss_mask"].astype(jnp.float32))

    def ours(student):
        total, _, sums, _ = distill.objective(student, batch, larger, options=o)
        return total, sums

    (total, sums), gradients = jax.jit(jax.value_and_grad(ours, has_aux=True))(student)
    want, their_gradients = jax.jit(jax.value_and_grad(plain))(student)
    close(total, want, terms=MODEL)
    close(gradients, their_gradients, terms=2 * MODEL)
    assert sums["loss"] == total and {"divergence", "cross_entropy", "accuracy"} <= sums.keys()


@pytest.mark.thorough
def test_all_logits_stored_are_the_teacher(folder, models, batch):
    (student, larger), o = models, options(folder, temperature=1.5)
    values, indices = jax.jit(functools.partial(teacher.top_k, k=64))(larger, batch)
    stored = batch | {"top_values": values, "top_indices": indices}
    objective = jax.jit(lambda batch, larger: distill.objective(student, batch, larger, options=o)[0])
    close(objective(stored, None), objective(batch, larger), terms=MODEL)
    assert (indices[..., 0] == jax.jit(lambda batch: jnp.argmax(logits(larger, batch), axis=-1))(batch)).all()


def losses_of(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


@pytest.mark.thorough
def test_the_student_learns(folder, tmp_path):
    """The student learns beside the teacher or from all its stored logits, with equal losses up to half precision."""
    o = options(folder, steps=12, out=tmp_path / "online", packing="off", seed=3, lr=1e-2)
    distill.main(o)
    online = losses_of(o.out)
    assert online[-1] < 0.5 * online[0]

    command(
        "train.distill", "--model", o.model, "--teacher", *o.teacher, "--data", *o.data, "--seq-len", 16, "--batch", 8,
        "--store", tmp_path / "logits", "--top-k", 64, "--packing", "off", "--epochs", 1,
    )  # fmt: skip
    rows, about = teacher.read(tmp_path / "logits")
    records, _ = open_records(o.data[0], o.mixture.hold_out)
    assert len(rows) == len(records) and about["top_k"] == 64
    assert rows[0]["top_values"].shape == (16, 64) and rows[0]["top_values"].dtype == np.float16
    distill.main(o.changed(teacher=(), logits=tmp_path / "logits", out=tmp_path / "offline"))
    offline = losses_of(tmp_path / "offline")
    assert offline[-1] < 0.5 * offline[0]
    np.testing.assert_allclose(offline[0], online[0], rtol=0.2)  # other rows, since the data are in another order


def test_refusals(folder, tmp_path):
    both = dict(teacher=("tiny",), logits=tmp_path)
    for changes, message in (
        (both, "Give --teacher"),
        ({"teacher": ()}, "Give --teacher"),
        ({"teacher": ("tiny",)}, "tiny has 2048 tokens, and .* 64"),
        ({"teacher": (), "logits": tmp_path, "beta": 1.0}, "needs all of the teacher's logits"),
    ):
        with pytest.raises(ValueError, match=message):
            distill.main(options(folder, **changes))
    with pytest.raises(OSError, match=r"has no teacher\.json"):
        distill.main(options(folder, teacher=(), logits=tmp_path))
