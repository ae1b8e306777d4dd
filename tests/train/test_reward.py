"""Reward models: the loss equals TRL's, packing changes nothing, and what is trained is what is exported."""

import functools
import json

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import zoo
from tests.close import close
from tests.train import make_golden_trl as trl
from tests.train.batching import batches
from tests.train.conftest import command, devices
from tests.zoo.programs import MODEL
from train import reward
from train.data import preferences
from train.data.record import Record
from train.data.records import open_records
from train.step import loss
from train.watch.metrics import read_metrics
from zoo.nn.heads import RewardHead
from zoo.orbax import to_hub
from zoo.surgery import with_head


pytestmark = pytest.mark.usefixtures("quick")
REWARDS = np.random.RandomState(0).standard_normal((2, 7)).astype(np.float32)
MARGINS = np.array([0.0, 1.5, 0.0, -0.5, 3.0, 0.25, 0.0], np.float32)


@pytest.fixture(scope="module")
def pairs(base):
    """Returns a file of words: capitals are chosen, and the word backwards is rejected. The first four have margins."""
    random = np.random.RandomState(0)
    words = ["".join(random.choice(list("abcdefgh"), random.randint(3, 5))) for _ in range(64)]
    fields = [{"prompt": f"{word} ", "chosen": word.upper(), "rejected": word[::-1]} for word in words]
    lines = [json.dumps(pair | ({"margin": 0.5 * n} if n < 4 else {})) for n, pair in enumerate(fields)]
    (base / "pairs.jsonl").write_text("\n".join(lines) + "\n")
    return base / "pairs.jsonl"


@pytest.fixture(scope="module")
def judge(model):
    return with_head(model, RewardHead(32, None, key=jax.random.key(0)))


def rows_of(base, pairs, count, seq_len):
    """Returns the only batch of the first records, in eight rows of 64 tokens, whatever length they were packed for."""
    (batch,) = batches(
        open_records(pairs, 0.0)[0][:count], zoo.tokenizer(base / "model"), vocab_size=64, scored=True,
        kind=preferences.PREFERENCES, batch=8, seq_len=seq_len,
    )  # fmt: skip
    return {name: jnp.asarray(np.pad(a, ((0, 0), (0, 64 - a.shape[1])))) for name, a in batch.items()}


def test_the_loss():
    chosen, rejected = REWARDS
    found = loss.bradley_terry(*map(jnp.asarray, (chosen, rejected, MARGINS)), centre=0.1)
    close(found, np.log1p(np.exp(rejected + MARGINS - chosen)) + 0.1 * (chosen + rejected) ** 2, terms=20)


@pytest.mark.live
def test_the_loss_equals_trls():
    torch = pytest.importorskip("torch")
    trainer = pytest.importorskip("trl.trainer.reward_trainer").RewardTrainer
    logits = torch.tensor(REWARDS.reshape(-1, 1), dtype=torch.float64)
    stand_in = trl.Trainer(args=trl.Namespace(center_rewards_coefficient=0.1), _total_train_tokens=0, _tp_size=1)
    inputs = {"attention_mask": torch.ones(14, 3), "margin": torch.tensor(MARGINS, dtype=torch.float64)}
    want = trainer.compute_loss(stand_in, lambda **_: trl.Namespace(logits=logits), inputs)
    found = loss.bradley_terry(*jnp.asarray(REWARDS), jnp.asarray(MARGINS), centre=0.1)
    close(jnp.mean(found), want, terms=50)


def test_packing_changes_nothing(base, pairs, judge):
    """Sums and gradients are those of the pairs alone, each reward that of a whole document's last token."""
    objective = jax.jit(functools.partial(reward.objective, centre=0.1))
    packed, spread = (rows_of(base, pairs, 4, seq_len) for seq_len in (64, 20))
    assert packed["segments"].max() > 4 > spread["segments"].max()
    for batch in (packed, spread):
        ends = batch["loss_mask"] > 0
        assert sorted(batch["margin"][ends].tolist()) == [0, 0, 0.5, 0.5, 1, 1, 1.5, 1.5]
    _, counts, sums, _ = zip(*(objective(judge, batch) for batch in (packed, spread)), strict=True)
    assert counts[0] == counts[1] == 4
    for name, value in sums[0].items():
        close({name: value}, {name: sums[1][name]}, terms=MODEL)
    tokenizer, chosen = zoo.tokenizer(base / "model"), 0.0
    records, _ = open_records(pairs, 0.0)
    for n in range(4):
        fields = records[n].fields
        ids = [*tokenizer.encode(fields["prompt"] + fields["chosen"]), tokenizer.eos[0]]
        padded = np.zeros((1, 16), np.int32)
        padded[0, : len(ids)] = ids
        chosen += jax.jit(lambda m, t, s: m(t, segments=s))(judge, padded, (np.arange(16)[None] < len(ids)).astype(int))
    close(sums[0]["chosen_reward"], chosen[0], terms=MODEL)
    without = objective(judge, packed | {"margin": jnp.zeros_like(packed["margin"])})[2]
    assert sums[0]["loss"] > without["loss"] + 1 and sums[0]["margin"] == without["margin"]


def test_bad_margins_are_named(base):
    record = Record("pairs.jsonl:3", {"prompt": "", "chosen": "a", "rejected": "b", "margin": "much"})
    with pytest.raises(ValueError, match=r"pairs.jsonl:3: margin is 'much', and must be a number"):
        preferences.encode_pairs(
            record, record, zoo.tokenizer(base / "model"), vocab_size=64, unpaired=False, scored=True
        )


def arguments(base, pairs, out, *more):
    return (
        "train.reward", "--model", base / "model", "--data", pairs, "--out", out, "--steps", 8, "--batch", 8,
        "--seq-len", 32, "--lr", 1e-2, "--eval-every", 8, "--hold-out", 0.2, *more,
    )  # fmt: skip


@pytest.mark.thorough
def test_the_script(base, pairs, tmp_path, capsys):
    """A run learns to rank pairs, and exports a model that ranks as it did; its checkpoint becomes the same model."""
    command(*arguments(base, pairs, tmp_path))
    before, *_, last = read_metrics(tmp_path / "metrics.jsonl")
    assert before["validation_loss"] == pytest.approx(np.log(2), abs=0.1)
    assert last["validation_accuracy"] > 0.9 and last["validation_loss"] < 0.5
    model = zoo.load(tmp_path / "model", head="reward")
    held_out = open_records(pairs, 0.2)[1]
    ranked = [rewards(model, base, record.fields) for record in held_out]
    assert np.mean([chosen > rejected for chosen, rejected in ranked]) == pytest.approx(last["validation_accuracy"])
    to_hub(tmp_path, tmp_path / "hub")
    again = zoo.load(tmp_path / "hub", head="reward")
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), again, model))


def rewards(model, base, fields):
    """Returns the rewards of the chosen and of the rejected completion of a record."""
    tokenizer = zoo.tokenizer(base / "model")
    tokens, segments = np.zeros((2, 16), np.int32), np.zeros((2, 16), np.int32)
    for row, name in enumerate(("chosen", "rejected")):
        ids = [*tokenizer.encode(fields["prompt"] + fields[name]), tokenizer.eos[0]]
        tokens[row, : len(ids)], segments[row, : len(ids)] = ids, 1
    return jax.jit(lambda m, t, s: m(t, segments=s))(model, tokens, segments)


@pytest.mark.thorough
def test_adapters(base, pairs, tmp_path):
    """The head is trained and stored with the adapters."""
    command(*arguments(base, pairs, tmp_path, "--lora.rank", 4))
    last = read_metrics(tmp_path / "metrics.jsonl")[-1]
    assert last["validation_accuracy"] > 0.8
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["task_type"] == "SEQ_CLS" and config["modules_to_save"] == ["score"]
    plain = zoo.load(base / "model", head="embedding")
    judge = zoo.peft.load(with_head(plain, RewardHead(32, None, key=jax.random.key(9))), tmp_path / "adapter")
    ranked = [rewards(judge, base, record.fields) for record in open_records(pairs, 0.2)[1]]
    assert np.mean([chosen > rejected for chosen, rejected in ranked]) == pytest.approx(last["validation_accuracy"])
    with pytest.raises(ValueError, match=r"no place for: base_model\.model\.score\.weight"):
        zoo.peft.load(zoo.load(base / "model"), tmp_path / "adapter")
    other = eqx.tree_at(lambda m: m.head.score.weight, judge, jnp.zeros((2, 32)))
    with pytest.raises(ValueError, match=r"score\.weight of shape \(1, 32\); that of the model's head is \(2, 32\)"):
        zoo.peft.load(zoo.lora.bare(other), tmp_path / "adapter")


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # PEFT's own
def test_transformers_reads_the_result(base, pairs, tmp_path):
    """transformers gives the same rewards, of the exported model and of the exported adapter."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    command(*arguments(base, pairs, tmp_path / "whole"))
    command(*arguments(base, pairs, tmp_path / "lora", "--lora.rank", 4))
    load = lambda folder: transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, num_labels=1, dtype="float32", attn_implementation="eager"
    )
    fields = open_records(pairs, 0.0)[0][0].fields
    tokenizer = zoo.tokenizer(base / "model")
    ids = [*tokenizer.encode(fields["prompt"] + fields["chosen"]), tokenizer.eos[0]]
    plain = zoo.load(base / "model", head="embedding")
    judge = zoo.peft.load(with_head(plain, RewardHead(32, None, key=jax.random.key(9))), tmp_path / "lora" / "adapter")
    for ours, theirs in (
        (zoo.load(tmp_path / "whole" / "model", head="reward"), load(tmp_path / "whole" / "model")),
        (judge, peft.PeftModel.from_pretrained(load(base / "model"), tmp_path / "lora" / "adapter")),
    ):
        with torch.no_grad():
            want = theirs.eval()(torch.tensor([ids])).logits[0, 0].item()
        close(rewards(ours, base, fields)[0], want, terms=MODEL)


def test_what_is_refused(base, pairs, tmp_path):
    with pytest.raises(SystemExit, match="--vision: a reward is given to text"):
        command(*arguments(base, pairs, tmp_path, "--vision"))
    with pytest.raises(SystemExit, match="--eval-tasks asks a language model"):
        command(*arguments(base, pairs, tmp_path, "--eval-tasks", "x.jsonl"))
    (tmp_path / "labels.jsonl").write_text(json.dumps({"prompt": "a ", "completion": "b", "label": True}) + "\n")
    with pytest.raises(SystemExit, match="has a completion and a label"):
        command(*arguments(base, pairs, tmp_path, "--data", tmp_path / "labels.jsonl", "--hold-out", 0.0))


@pytest.mark.thorough
def test_on_a_mesh(base, pairs, tmp_path, monkeypatch):
    """Losses on eight devices are those on one."""
    command(*arguments(base, pairs, tmp_path / "one"))
    devices(monkeypatch, 8)
    command(*arguments(base, pairs, tmp_path / "eight", "--mesh", "fsdp=4,tensor=2"))
    one, eight = (
        [line["loss"] for line in read_metrics(tmp_path / name / "metrics.jsonl") if "loss" in line]
        for name in ("one", "eight")
    )
    close(one, eight, terms=len(one) * MODEL)
