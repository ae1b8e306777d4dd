"""Preference optimisation: the objective equals TRL's, is the same packed or not, and learns."""

import functools
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import train.tiny
import zoo
from tests.close import close
from tests.train import make_golden_trl as trl
from tests.train.batching import batches
from tests.train.conftest import Bigram, command, devices
from tests.train.test_loss import GIVEN, GOLDEN
from tests.zoo.programs import MODEL, thorough
from train import dpo
from train.data import preferences
from train.data.records import open_records
from train.state.optim import adamw
from train.state.state import init_state
from train.step.step import Recipe, jit_train_step, train_step
from train.watch.metrics import read_metrics
from zoo.nn.model import AbstractModel


pytestmark = pytest.mark.usefixtures("quick")

LOSSES = tuple(dpo.LOSSES)


class Given(AbstractModel):
    """A model whose logits are given."""

    logits: Any
    config: Any = None
    embed_tokens: Any = None
    layers: Any = None

    def forward(self, tokens, cache, at):
        return self.logits, None, ()

    def unembed(self, x):
        return x


@pytest.fixture(scope="module")
def rows():
    """Returns rows of two pairs, chosen beside rejected, with padding at the end, and a row of padding alone."""

    def row(a, padding):
        a = np.asarray(a[:, 1:] if a.ndim == 2 else a[:, :-1])
        pairs = np.concatenate([a[: trl.PAIRS], a[trl.PAIRS :]], axis=1)
        pairs = pairs.reshape(trl.PAIRS // 2, -1, *a.shape[2:])
        rest = np.full((3, 40, *a.shape[2:]), padding, a.dtype)
        rest[:2, : pairs.shape[1]] = pairs
        return jnp.asarray(rest)

    ones = np.ones_like(GIVEN["completion"])
    number = np.arange(2 * trl.PAIRS)[:, None]  # chosen ones, then rejected ones
    segments = row((number % 2 * 2 + 1 + number // trl.PAIRS) * ones, 0)
    batch = {"tokens": segments, "targets": row(GIVEN["tokens"], 0), "loss_mask": row(GIVEN["completion"], 0)}
    batch |= {"segments": segments, "positions": segments}
    assert segments[1, :32].tolist() == np.repeat([1, 2, 3, 4], 8).tolist()
    return batch, Given(row(GIVEN["logits"], 1e4)), Given(row(GIVEN["ref_logits"], 1e4))


@pytest.mark.parametrize("loss", ["dpo", "ipo", "orpo"])
def test_the_objective_equals_trl(rows, loss):
    batch, model, reference = rows
    o = dpo.DPOOptions.of(loss=loss, beta=trl.BETA)
    objective = lambda x, y: dpo.objective(Given(x), batch, Given(y), options=o)
    total, count, sums, _ = jax.jit(objective)(model.logits, reference.logits)
    assert count == trl.PAIRS
    orpo = np.mean(-np.array(GOLDEN["orpo_chosen_logps"]) - np.array(GOLDEN["orpo_odds_ratio"]))
    expected = orpo if loss == "orpo" else GOLDEN[loss][0]
    close([total, sums["loss"]], 2 * [trl.PAIRS * expected], terms=200)
    if loss == "dpo":
        looks = [sums[name] / trl.PAIRS for name in ("chosen_reward", "rejected_reward", "margin", "accuracy")]
        close(looks, GOLDEN["dpo_metrics"], terms=200)


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_not_there_counts_for_nothing(rows, loss):
    batch, model, reference = rows
    batch = batch | {"desirable": batch["loss_mask"]}
    objective = lambda x: dpo.objective(Given(x), batch, reference, options=dpo.DPOOptions.of(loss=loss))[0]
    value, gradient = jax.jit(jax.value_and_grad(objective))(model.logits)
    learnt = batch["loss_mask"] != 0
    learnt &= batch["segments"] % 2 == 1 if loss == "kto" else True  # KTO's second documents have no gradient
    assert jnp.isfinite(value) and jnp.array_equal(jnp.any(gradient != 0, axis=2), learnt)


def test_kto_in_microbatches(rows):
    """Microbatches give the same update, although KTO's baseline is that of the whole batch."""
    batch = {name: a[:2] for name, a in rows[0].items()}
    batch |= {"desirable": batch["loss_mask"] * (batch["segments"] < 3).astype(int), "tokens": batch["targets"]}
    random = np.random.RandomState(0)
    tables = [jnp.asarray(random.normal(size=(64, 64)), jnp.float32) for _ in range(2)]
    optimizer, objective = optax.sgd(1.0), functools.partial(dpo.objective, options=dpo.DPOOptions.of(loss="kto"))
    steps = [
        functools.partial(
            train_step,
            Recipe(
                optimizer=optimizer, schedule=optax.constant_schedule(1.0), compute_dtype=jnp.float32,
                objective=objective, microbatches=microbatches,
            ),
        )
        for microbatches in (1, 2)
    ]  # fmt: skip
    state = init_state(Bigram(tables[0]), optimizer)
    (whole, one), (parts, two) = (jax.jit(step)(state, batch, None, Bigram(tables[1])) for step in steps)
    assert one["kl"] > 0.5 and jnp.linalg.norm(whole.model.table - tables[0]) > 1e-3
    close(parts.model.table, whole.model.table, terms=200)
    for name, value in one.items():
        close({name: two[name]}, {name: value}, terms=200)


def test_the_embedded_preferences_follow_from_the_instructions():
    """Pairs have every third question and its answer. Rejected is half of the answer, or it with another one."""
    records = open_records(train.tiny.PREFERENCES, 0.0)[0]
    chats = [record.fields["messages"] for record in open_records(train.tiny.INSTRUCTIONS, 0.0)[0]]
    chats = [chat for chat in chats if len(chat) == 2]
    assert len(records) == len(chats) // 3
    for i, record in zip(range(0, len(chats), 3), records, strict=True):
        question, answer = chats[i]
        words = answer["content"].split(" ")
        half, two = words[: len(words) // 2], [*words, chats[(i + len(chats) // 2) % len(chats)][1]["content"]]
        rejected = {"role": "assistant", "content": " ".join(half if i % 2 else two)}
        assert record.fields == {"prompt": [question], "chosen": [answer], "rejected": [rejected]}


# ======================================================================================================================
# A tiny model and preferences: capitals over small letters.
# ======================================================================================================================


@pytest.fixture(scope="module")
def pairs(base):
    random = np.random.RandomState(0)
    words = ["".join(random.choice(list("abcdefgh"), random.randint(3, 5))) for _ in range(40)]
    lines = [json.dumps({"prompt": f"{word} ", "chosen": word.upper(), "rejected": word[::-1]}) for word in words]
    (base / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return base / "pairs.jsonl"


@pytest.fixture(scope="module")
def model(base):
    return zoo.load(base / "model", dtype="float32")


def rows_of(base, pairs, count, loss, **shape):
    """Returns the only batch of the first records, in eight rows of 64 tokens, whatever shape they were packed for."""
    (batch,) = batches(
        open_records(pairs, 0.0)[0][:count], zoo.tokenizer(base / "model"), vocab_size=64, unpaired=loss == "kto",
        kind=preferences.PREFERENCES, batch=8, **shape,
    )  # fmt: skip
    return {name: jnp.asarray(np.pad(a, ((0, 0), (0, 64 - a.shape[1])))) for name, a in batch.items()}


@pytest.mark.thorough
@pytest.mark.parametrize("loss", LOSSES)
def test_packing_changes_nothing(base, pairs, model, loss):
    reference = jax.tree.map(lambda a: jnp.asarray(np.asarray(a) * np.float32(0.99)), model)
    objective = jax.jit(functools.partial(dpo.objective, options=dpo.DPOOptions.of(loss=loss)))
    packed, spread = (rows_of(base, pairs, 4, loss, seq_len=seq_len) for seq_len in (64, 20))
    assert packed["segments"].max() > 4 > spread["segments"].max()
    _, counts, sums, _ = zip(*(objective(model, batch, reference) for batch in (packed, spread)), strict=True)
    assert counts[0] == counts[1] == (8 if loss == "kto" else 4)
    for name, value in sums[0].items():
        close({name: value}, {name: sums[1][name]}, terms=MODEL, size=6)  # a tenth of sums of log-probabilities


@pytest.mark.parametrize("loss", [thorough("orpo"), "kto"])  # without and with a reference model
def test_it_learns(base, pairs, model, loss):
    o, optimizer = (
        dpo.DPOOptions.of(loss=loss, beta=1.0 if loss == "orpo" else 0.1),
        adamw(optax.constant_schedule(1e-3)),
    )
    batch = rows_of(base, pairs, 8, loss, seq_len=64)
    state = init_state(model, optimizer)
    step = jit_train_step(
        state,
        Recipe(
            optimizer=optimizer, schedule=optax.constant_schedule(1e-3), compute_dtype=jnp.float32,
            objective=functools.partial(dpo.objective, options=o),
        ),
    )  # fmt: skip
    history = []
    for _ in range(24):
        state, metrics = step(state, batch, None, None if loss == "orpo" else model)
        history.append(metrics)
    first, last = jax.device_get((history[0], history[-1]))
    if loss == "kto":
        close([first["loss"], first["margin"]], [0.5, 0], terms=MODEL)
    assert last["loss"] < 0.7 * first["loss"] and last["margin"] > first["margin"] and last["accuracy"] > 0.9


def assert_learnt_from_the_start(out):
    """Checks that the run starts at its reference, the model without adapters, and learns."""
    before, first, *_, last = read_metrics(out / "metrics.jsonl")
    for name in ("loss", "margin"):
        want = np.log(2) * (name == "loss")
        # Rewards are a tenth of differences of sums up to about 180, in float32.
        close([before[f"validation_{name}"], first[name]], want, terms=100, size=18)
    assert last["margin"] > 0 and last["validation_loss"] < np.log(2)
    assert (out / "adapter/adapter_model.safetensors").exists()


@pytest.mark.thorough
def test_the_script_trains_adapters(base, pairs, tmp_path):
    command(
        "train.dpo", "--model", base / "model", "--data", pairs, "--out", tmp_path, "--lora.rank", 4, "--steps", 4,
        "--batch", 8, "--seq-len", 32, "--lr", 1e-2, "--eval-every", 4,
    )  # fmt: skip
    assert_learnt_from_the_start(tmp_path)


@pytest.mark.thorough
def test_the_embedded_model_learns_the_embedded_preferences(tmp_path, monkeypatch):
    """The embedded model learns the embedded preferences on a mesh."""
    devices(monkeypatch, 8)
    command(
        "train.dpo", "--out", tmp_path, "--lora.rank", 4, "--steps", 4, "--batch", 8, "--seq-len", 176, "--lr", 1e-3,
        "--eval-every", 4, "--mesh", "fsdp=4,tensor=2",
    )  # fmt: skip
    assert_learnt_from_the_start(tmp_path)
