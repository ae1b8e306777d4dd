"""GRPO: its objective against the formulas written out, its rollouts, the script to its end, rewards that rise, and
runs that fail and resume as if undisturbed.
"""

import contextlib
import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import zoo
from tests.close import close
from tests.train.conftest import Bigram, command, devices, documents
from tests.zoo import tiny
from tests.zoo.programs import MODEL
from train import grpo
from train.base.stop import StopRequest
from train.data import prompts as prompts_
from train.data import rewards
from train.data.records import Record
from train.methods import rollouts
from train.methods.judges import Judge
from train.methods.texts import Text, few, packed, padding_rows, rows_of
from train.run.batches import Ahead
from train.state.state import init_state
from train.step.language import features
from train.step.microbatches import filled_up
from train.step.step import Recipe, jit_train_step
from train.step.task import Rolled
from zoo import lora
from zoo.generation import sampling
from zoo.generation.engine import Completion
from zoo.mesh import make_mesh
from zoo.nn.heads import ClassificationHead, RewardHead
from zoo.nn.moe import choices_of_each_token
from zoo.nn.routing import experts_of
from zoo.surgery import with_head


pytestmark = pytest.mark.usefixtures("quick")
VOWELS = """
def vowels(completion, record):
    return sum(c in "aeiou" for c in completion) / max(len(completion), 4)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    tiny.write(folder / "model", "qwen3", eos_token_id=63)
    tiny.write_tokenizer(folder / "model")
    prompts = [{"prompt": word + " "} for word in ("abc", "hello", "xyz", "quick", "brown", "fox", "lazy", "dog")]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "reward.py").write_text(VOWELS)
    return folder


def options(folder, out, **changes):
    return grpo.GRPOOptions.of(
        model=str(folder / "model"), data=str(folder / "prompts.jsonl"), reward=(f"{folder / 'reward.py'}:vowels",),
        out=out, prompts=4, group=4, max_new_tokens=6, seq_len=16, **changes,
    )  # fmt: skip


@pytest.fixture
def batch():
    random = np.random.RandomState(0)
    rows = padding_rows(4, 10)
    for row, (start, end) in enumerate([(2, 9), (1, 4), (3, 10), (4, 5)]):
        rows["tokens"][row, :end], rows["targets"][row, :end] = random.randint(0, 63, (2, end))
        rows["loss_mask"][row, start:end], rows["segments"][row, :end] = 1, 1
        rows["positions"][row, :end] = np.arange(end)
        rows["old"][row, start:end] = -4 + 0.3 * random.randn(end - start)
        rows["advantages"][row] = random.randn()
    return {name: jnp.asarray(a) for name, a in rows.items()}


# Every loss, both levels, and one and several microbatches, but not all combinations.
CASES = {
    "grpo": ("sequence", 2), "dapo": ("token", 1), "dr_grpo": ("token", 2), "cispo": ("token", 2), "sapo": ("token", 1)
}  # fmt: skip


def objective_options(folder, loss):
    return options(
        folder, pathlib.Path(), loss=loss, level=CASES[loss][0], kl=0.1, epsilon=0.1, epsilon_high=0.3, temperature=0.7
    )


def plain(model, batch, o, reference):
    """Computes each loss for its level, by the formulas, with all logits at once."""
    where = dict(positions=batch["positions"], segments=batch["segments"])

    def logps(model):
        logits = model.unembed(model.hidden(batch["tokens"], **where)[0]) / o.rollouts.temperature
        return jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]

    now, there, mask = logps(model), logps(reference), batch["loss_mask"].astype(jnp.float32)

    def losses_of(loss, level):
        log_ratio = (now - batch["old"]) * mask
        if level == "sequence":
            log_ratio = jnp.broadcast_to(log_ratio.sum(1, keepdims=True) / mask.sum(1, keepdims=True), log_ratio.shape)
        ratio, a = jnp.exp(log_ratio), batch["advantages"]
        losses = -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - o.epsilon, 1 + (o.epsilon_high or o.epsilon)) * a)
        if loss == "cispo":
            losses = -jax.lax.stop_gradient(jnp.minimum(ratio, 1 + o.epsilon_high)) * a * now
        if loss == "sapo":
            t = jnp.where(a > 0, 1.0, 1.05)
            losses = -a * jax.nn.sigmoid(t * (ratio - 1)) * 4 / t
        return (losses + o.kl * (jnp.exp(there - now) - (there - now) - 1)) * mask

    averages = {
        "grpo": lambda losses: jnp.mean(losses.sum(1) / mask.sum(1)),
        "dapo": lambda losses: losses.sum() / mask.sum(),
        "dr_grpo": lambda losses: losses.sum() / (len(losses) * o.rollouts.max_new_tokens),
    }
    averages |= {"cispo": averages["dapo"], "sapo": averages["grpo"]}
    return jnp.stack([averages[loss](losses_of(loss, level)) for loss, (level, _) in CASES.items()])


@pytest.fixture(scope="module")
def model(folder):
    return zoo.load(folder / "model", dtype="float32")


@pytest.fixture
def expected(folder, batch):
    """Returns a model, a reference, and loss -> its value and gradients by the formulas, from one program."""
    random = np.random.RandomState(1)
    tables = [random.normal(size=(64, 64)) for _ in range(2)]
    moved, model = (Bigram(jnp.asarray(a, jnp.float32)) for a in (tables[0], tables[0] + 0.1 * tables[1]))
    each = functools.partial(plain, batch=batch, o=objective_options(folder, "dapo"), reference=model)
    values, gradients = jax.jit(lambda model: (each(model), jax.jacrev(each)(model)))(moved)
    of_losses = {loss: (values[n], jax.tree.map(lambda a, n=n: a[n], gradients)) for n, loss in enumerate(CASES)}
    return moved, model, of_losses


def test_objective(folder, batch, expected):
    """The losses and their gradients equal the formulas, with a reference, in microbatches, too."""
    moved, model, of_losses = expected
    for loss, (_, parts) in CASES.items():
        o, (want, gradients) = objective_options(folder, loss), of_losses[loss]
        sgd, state = optax.sgd(1.0), init_state(moved, optax.sgd(1.0))
        step = jit_train_step(
            state,
            Recipe(
                optimizer=sgd, schedule=optax.constant_schedule(1.0), compute_dtype=jnp.float32,
                objective=functools.partial(grpo.objective, options=o), microbatches=parts,
            ),
        )  # fmt: skip
        state, metrics = step(state, batch, None, model)
        close({loss: metrics["loss"]}, {loss: want}, terms=MODEL)
        change = jax.tree.map(lambda a, b: np.asarray(a) - np.asarray(b), moved, state.model)
        close(gradients, change, terms=2 * MODEL)
        assert {"kl", "entropy", "clipped", "drift"} <= metrics.keys()
        assert metrics["clipped"] > 0 or loss in ("cispo", "sapo"), "in golden_trl.json CISPO clips some"


def random_batch():
    batch = packed(random_texts([9, 4, 12, 5]), 2, zoo.tokenizer("tiny"))
    far = np.random.RandomState(4).uniform(0.4, 1.8, batch["old"].shape)
    return batch | {"old": (batch["old"] * far).astype(np.float32)}


def random_texts(lengths):
    """Returns texts of these numbers of tokens, of which some are drawn."""
    random = np.random.RandomState(2)
    texts = []
    for length in lengths:
        drawn = random.rand(length) < 0.6
        drawn[0], drawn[-1] = False, True
        logprobs = [float(-4 + 0.3 * random.randn()) if each else None for each in drawn]
        texts.append(Text(random.randint(0, 63, length).tolist(), logprobs, float(random.randn())))
    return texts


@pytest.mark.thorough
def test_packed_texts_are_learnt_as_unpacked_ones(folder, model):
    """All losses and their gradients together, of a model with attention, equal those of a row for each text."""
    tokenizer, texts = zoo.tokenizer(folder / "model"), random_texts([9, 4, 12, 5, 3, 7, 2])
    shared, alone = filled_up(packed(texts, 3, tokenizer), 7), packed(texts, 7, tokenizer)
    assert shared["segments"].max(axis=1).tolist().count(0) == 4 and alone["segments"].max() == 1
    assert shared["segments"].max(axis=1).sum() == 7 and (shared["segments"] != 0).sum() == 42 - 7
    assert shared["tokens"].shape == alone["tokens"].shape == (7, 16)
    assert_learnt_alike(folder, model, shared, alone)


def test_a_row_has_128_texts_at_most(folder):
    """Two of 130 short texts beside a long one go to the row of the long one, though the other row has room."""
    tokenizer, texts = zoo.tokenizer(folder / "model"), random_texts([300, *[2] * 130])
    for short, counts in ((128, [1, 128]), (130, [3, 128])):
        rows = packed(texts[: 1 + short], 2, tokenizer)
        assert sorted(rows["segments"].max(axis=1)) == counts
        alone = packed(texts[: 1 + short], 1 + short, tokenizer)
        of_all = lambda arrays: sorted(arrays["tokens"][arrays["segments"] != 0].tolist())
        assert of_all(rows) == of_all(alone)


@pytest.mark.thorough
def test_texts_share_their_beginnings(folder, model):
    """Texts with one beginning are branches of one document, and are learnt as rows of their own."""
    random = np.random.RandomState(0)
    first, second = random.randint(0, 63, (2, 12)).tolist()

    def text(begun, drawn):
        ids, logprobs = random.randint(0, 63, drawn).tolist(), (-4 + 0.3 * random.randn(drawn)).tolist()
        return Text(begun + ids, [*[None] * len(begun), *logprobs], float(random.randn()))

    texts = [text(first, 5), text(second, 4), text(first, 2), text([*first, 1, 2], 3), text(second, 1), text([7, 8], 9)]
    tokenizer = zoo.tokenizer(folder / "model")
    one, alone = packed(texts, 1, tokenizer, branches=True), packed(texts, 6, tokenizer)
    assert one["segments"].max() == 3 and one["branches"].max() == 6
    saved = 2 * 11 + 11  # by three texts and by two: the last token before the drawn ones is in each
    assert (one["segments"] != 0).sum() == (alone["segments"] != 0).sum() - saved
    parts = packed(texts, 2, tokenizer, branches=True)  # a beginning may be in both rows
    assert parts["tokens"].shape[1] < one["tokens"].shape[1]
    assert_learnt_alike(folder, model, parts, alone)
    few_shared = packed([*texts[:3], text([9], 100)], 1, tokenizer, branches=True)
    assert "branches" not in few_shared, "it saves too little"
    spread = packed(texts, 6, tokenizer, branches=True)
    assert spread.keys() == alone.keys(), "no row has two texts"
    assert all((spread[name] == array).all() for name, array in alone.items())


def assert_learnt_alike(folder, model, batch, other):
    """Compares all losses, and their gradients together."""
    weights = dict(zip(CASES, (1.0, 0.3, 0.7, -0.4, 0.6), strict=True))

    @jax.jit
    @jax.value_and_grad
    def losses(model, batch):
        found = 0.0
        for loss, weight in weights.items():
            o = objective_options(folder, loss).changed(kl=0.0, high_entropy=0.5 if loss == "dapo" else 1.0)
            total, count, *_ = grpo.objective(model, batch, options=o)
            found += weight * total / count
        return found

    (value, gradients), (expected, of_each) = losses(model, batch), losses(model, other)
    close(value, expected, terms=MODEL)
    close(gradients, of_each, terms=2 * MODEL)


@pytest.mark.thorough
def test_router_replay(tmp_path, monkeypatch):
    """An update's experts are those that tokens had while sampling."""
    tiny.write(tmp_path / "model", "qwen3_moe", eos_token_id=63)
    tiny.write_tokenizer(tmp_path / "model")
    o = options(tmp_path, pathlib.Path(), router_replay=True)
    tokenizer, model = zoo.tokenizer(tmp_path / "model"), zoo.load(tmp_path / "model", dtype="float32")
    prompts = [prompts_.encode(Record("here", {"prompt": word}), tokenizer) for word in ("abc ", "hello ")]
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    with jax.set_mesh(mesh):
        (batch,), *_ = rollouts.rollout(
            model, prompts, 0, None, options=o.rollouts, rewards=o.rewards, judges=[lambda text, _: float(len(text))],
            tokenizer=tokenizer, mesh=mesh, rows=1, dtype="float32", seed=0,
        )  # fmt: skip
        batch = {name: jnp.asarray(a) for name, a in batch.items()}

        @jax.jit
        def own_of(model, batch):
            with choices_of_each_token():
                return experts_of(model.layers, features(model, batch)[1])

        own, there = own_of(model, batch), batch["segments"] != 0
        assert (batch["experts"][there] == own[there]).all() and batch["experts"].max() > 0
        sums = jax.jit(lambda batch: grpo.objective(model, batch, options=o)[2])
        others = batch | {"experts": jnp.flip(batch["experts"], axis=1)}
        drift, moved = (float(sums(each)["drift"]) / int(batch["loss_mask"].sum()) for each in (batch, others))
    close(drift, 0, terms=MODEL, size=np.log(64))  # a log-probability's size
    assert moved > 1e-3
    devices(monkeypatch, 2)
    with pytest.raises(ValueError, match="--router-replay needs a mesh without stage"):
        grpo.main(o.changed(mesh="stage=2"))


def test_exact_rollouts(folder):
    """The trainer's own log-probabilities take the place of the sampler's, and weights compare the two."""
    o = options(folder, pathlib.Path(), exact_rollouts=True, importance="truncate")
    model, batch = Bigram(jnp.asarray(np.random.RandomState(3).normal(size=(64, 64)), jnp.float32)), random_batch()
    mesh = make_mesh("fsdp=1", jax.devices()[:1])
    score = jax.jit(lambda model, batch: grpo.logprobs(model, batch, options=o)[0][0])
    with jax.set_mesh(mesh):
        (scored,), *_ = grpo.rescored(Rolled([batch], {}), model, mesh, score)
        found = {
            how: jax.jit(functools.partial(grpo.objective, options=o.changed(importance=how)))(model, scored)
            for how in ("none", "truncate", "icepop")
        }
    drawn = batch["loss_mask"] == 1
    assert found["none"][2]["drift"] == 0 < found["none"][2]["mismatch"]
    assert (scored["sampled"] == batch["old"]).all() and (scored["old"][~drawn] == 0).all()
    ratio = np.exp(scored["old"] - batch["old"])
    weights = {"none": 1, "truncate": np.minimum(ratio, 2), "icepop": np.where((ratio > 0.5) & (ratio < 5), ratio, 0)}
    assert (ratio[drawn] > 5).any() and (ratio[drawn] < 0.5).any()
    for how, weight in weights.items():
        close(found[how][0], -(weight * batch["advantages"])[drawn].sum(), terms=MODEL)


def test_numbers_of_rows(folder):
    assert [few(n) for n in (0, 1, 16, 17, 500, 513, 1024, 1025)] == [8, 8, 16, 24, 512, 544, 1024, 1088]
    assert [rows_of(n, 2) for n in (1, 32, 33, 64)] == [2, 2, 4, 4]
    with pytest.raises(ValueError, match=r"129 texts do not fit 1 rows of at most 128.*fewer --turns"):
        packed(random_texts([2] * 129), 1, zoo.tokenizer(folder / "model"))
    batch = {"tokens": np.ones((3, 2), int), "segments": np.ones((3, 2), int), "loss_mask": np.ones((3, 2), int)}
    filled = filled_up(batch, 4)
    assert len(filled["tokens"]) == 4 and filled["segments"].sum() == filled["loss_mask"].sum() == 6
    assert len(filled_up(batch, 3)["tokens"]) == 3


@pytest.mark.thorough
def test_the_reference_is_the_model_without_adapters(folder, model, batch):
    o, base = options(folder, pathlib.Path(), kl=0.1), model
    adapted = lora.add(base, rank=2, alpha=2.0, key=jax.random.key(0))
    moved = jax.tree.map(lambda a: a + 0.1, lora.split(adapted)[0])
    adapted = lora.combine(moved, lora.split(adapted)[1])
    loss = jax.jit(lambda model, reference: grpo.objective(model, batch, reference, options=o)[0])
    close(loss(adapted, None), loss(adapted, base), terms=MODEL)


def test_rollout(folder, model):
    """Rows hold prompts and completions, `old` has the model's own log-probabilities, and advantages are by group."""
    o = options(folder, pathlib.Path(), temperature=0.7, iterations=2, minibatches=2, compute_dtype="float32")
    tokenizer = zoo.tokenizer(folder / "model")
    words = ("abc ", "hello ", "x ", "fox ")
    prompts = [prompts_.encode(Record("here", {"prompt": word}), tokenizer) for word in words]
    mesh, judges = make_mesh("fsdp=1", jax.devices()[:1]), [rewards.find(name) for name in o.rewards.reward]
    sample = functools.partial(
        rollouts.rollout, model, prompts, folder=None, options=o.rollouts, rewards=o.rewards, judges=judges,
        tokenizer=tokenizer, mesh=mesh, rows=2, dtype="float32", seed=o.seed,
    )  # fmt: skip
    with jax.set_mesh(mesh):
        batches, numbers, _ = sample(n=3)
        again, other = sample(n=3).batches, sample(n=4).batches
        sums = jax.jit(lambda batch: grpo.objective(model, batch, options=o)[2])(batches[0])
    assert len(batches) == 4 and all(len(list(documents(batch))) == 8 for batch in batches)
    assert all(len(batch["tokens"]) == 2 for batch in batches), "completions share rows"
    assert all((a[name] == b[name]).all() for a, b in zip(batches, again, strict=True) for name in a)
    assert any(not np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(batches, other, strict=True))
    close(float(sums["drift"]) / batches[0]["loss_mask"].sum(), 0, terms=MODEL, size=np.log(64))
    found = {prompt.record["prompt"]: [] for prompt in prompts}
    for _, text in itertools.chain(*map(documents, batches[:2])):
        learnt, n = text["loss_mask"], len(text["tokens"])
        ids = [*text["tokens"].tolist(), int(text["targets"][-1])]
        assert (text["targets"][:-1] == text["tokens"][1:]).all() and (text["positions"] == np.arange(n)).all()
        start = learnt.argmax() + 1
        assert learnt[: start - 1].sum() == 0 and learnt[start - 1 :].all() and n + 1 - start <= 6
        assert (text["advantages"] == text["advantages"][0]).all()
        found[tokenizer.decode(ids[:start])].append((tokenizer.decode(ids[start:]), text["advantages"][0]))
    module = {}
    exec(VOWELS, module)
    for group in found.values():
        earned = np.array([module["vowels"](text, {}) for text, _ in group])
        advantages = (earned - earned.mean()) / (earned.std(ddof=1) + 1e-4)
        close([a for _, a in group], advantages, terms=50)
    assert 0 <= numbers["reward"] <= 1 and 1 <= numbers["length"] <= 6


def test_evaluations_draw_no_group_again(folder, model, tmp_path, monkeypatch):
    """A group of equal rewards is drawn again in a step, which has the folder of a run, and not in an evaluation."""
    o, tokenizer, drawn = options(folder, pathlib.Path(), redraws=2), zoo.tokenizer(folder / "model"), []

    def complete(model, prompts, *, samples, **_):
        drawn.append(len(prompts))
        return [[Completion([5], [-1.0], ended=True)] * samples for _ in prompts]

    monkeypatch.setattr(rollouts, "complete", complete)
    prompts = [prompts_.encode(Record("here", {"prompt": word}), tokenizer) for word in ("abc ", "x ")]
    for run, want in ((tmp_path, [2, 2, 2]), (None, [2])):
        drawn.clear()
        with jax.set_mesh(mesh := make_mesh("fsdp=1", jax.devices()[:1])):
            rolled = rollouts.rollout(
                model, prompts, 0, run, options=o.rollouts, rewards=o.rewards, judges=[lambda text, record: 1.0],
                tokenizer=tokenizer, mesh=mesh, rows=2, dtype="float32", seed=0,
            )  # fmt: skip
        assert drawn == want and ("without_signal" in rolled.numbers) == (run is not None)


def rewards_of(out):
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["reward"] for line in lines if "reward" in line]


def arguments(folder, out, *more):
    usual = {
        "model": folder / "model", "data": folder / "prompts.jsonl", "reward": f"{folder / 'reward.py'}:vowels",
        "prompts": 4, "group": 4, "max-new-tokens": 6, "seq-len": 16, "lr": 0.01, "out": out,
    }  # fmt: skip
    return [str(word) for name, value in usual.items() for word in (f"--{name}", value)] + [str(word) for word in more]


def test_the_script_in_short(folder, tmp_path):
    """The script draws completions, rewards them, and exports the model."""
    command("train.grpo", *arguments(folder, tmp_path / "run", "--steps", 1, "--hold-out", 0))
    lines = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    (line,) = [line for line in lines if "reward" in line]
    assert line["step"] == 1 and 0 <= line["reward"] <= 1 and 1 <= line["length"] <= 6 and 0 < line["padding"] < 1
    assert zoo.inspect(tmp_path / "run" / "model") == zoo.inspect(folder / "model")


@pytest.mark.thorough
def test_the_script(folder, tmp_path, capsys):
    """The script trains all weights off-policy, near a second copy of the model; a second call has nothing left to do.
    Half of the prompts are held out, and evaluated at each step.
    """
    more = ["--steps", 2, "--iterations", 2, "--minibatches", 2, "--kl", 0.1, "--compute-dtype", "float32"]
    more += ["--hold-out", 0.5, "--correct", 0.01, "--eval-every", 1]
    for _ in range(2):
        command("train.grpo", *arguments(folder, tmp_path / "run", *more))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "reward" in line] == [1, 2]
    assert all(
        0 < line["padding"] < 1 and line["kl"] >= 0 and 1 <= line["length"] <= 6 for line in lines if "reward" in line
    )
    assert [line["step"] for line in lines if 0 <= line["validation_reward"] <= 1] == [0, 1, 2]
    for line in lines:
        for kind in ("", "validation_") if line["step"] else ("validation_",):
            rates = [line[f"{kind}pass@{k}"] for k in (1, 2, 4)]
            assert rates == sorted(rates) and rates[0] >= 0 and rates[-1] <= 1
        assert (line["validation_pass@1"] > 0) == (line["validation_reward"] > 0), "a vowel is enough"
    assert any(line["validation_pass@1"] for line in lines)
    assert "validation_errors" not in lines[0] and "validation_generation_tokens_per_second" not in lines[0]
    said = capsys.readouterr().out
    assert "Going on from step 2" in said and "validation_reward: " in said
    before, after = zoo.load(folder / "model"), zoo.load(tmp_path / "run" / "model")
    assert not (np.asarray(before.embed_tokens.weight) == np.asarray(after.embed_tokens.weight)).all()


@pytest.fixture(scope="module")
def judges(folder):
    """Returns the folders of a reward model and of a classifier, which are random."""
    plain = zoo.load(folder / "model", head="embedding")
    for name, head in (
        ("reward", RewardHead(32, None, key=jax.random.key(1))),
        ("labels", ClassificationHead(32, ("good", "bad"), None, key=jax.random.key(2))),
    ):
        zoo.save(with_head(plain, head), folder / name)
    return folder / "reward", folder / "labels"


@pytest.mark.thorough
def test_models_as_rewards(folder, judges):
    """A reward model gives what it gives the whole text, and a classifier the probability of the label."""
    mesh, tokenizer = make_mesh("fsdp=2", jax.devices()[:2]), zoo.tokenizer(folder / "model")
    prompts = [prompts_.Prompt([], {"prompt": word}) for word in ("abc ", "xy ")]
    texts = [["fox", "a dog", ""], ["s", "lazy", "hello"]]
    for path, name, head, spoken in ((judges[0], "", "reward", True), (judges[1], ":bad", "classification", False)):
        judge = Judge.load(f"model:{path}{name}", mesh, dtype="float32", batch=4)
        found = judge.rate(prompts, texts)
        model, rate = zoo.load(path, head=head), jax.jit(lambda m, tokens, segments: m(tokens, segments=segments))
        for n, prompt in enumerate(prompts):
            for m, text in enumerate(texts[n]):
                ids = [*tokenizer.encode(prompt.record["prompt"] + text), *[tokenizer.eos[0]] * spoken]
                tokens, here = np.pad(ids, (0, 16 - len(ids)))[None], np.arange(16)[None] < len(ids)
                want = rate(model, tokens, here.astype(int))[0]
                want = want if spoken else jax.nn.softmax(want)[1]
                close(found[n, m], want, terms=MODEL, size=1)
    for name, said in (("", "name one of the labels, model:.*:good or others"), (":x", "has the labels good, bad")):
        with pytest.raises(ValueError, match=said):
            Judge.load(f"model:{judges[1]}{name}", mesh, dtype="float32", batch=4)


@pytest.mark.thorough
def test_a_reward_model_teaches(folder, judges, tmp_path):
    """GRPO against a reward model and a function: each reward is reported, and the dry run tries both."""
    more = ["--steps", 2, "--reward", f"model:{judges[0]}", f"{folder / 'reward.py'}:vowels"]
    command("train.grpo", *arguments(folder, tmp_path / "run", *more))
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        if "reward" in line:
            parts = [line[f"reward_model:{judges[0]}"], line[f"reward_{folder / 'reward.py'}:vowels"]]
            assert line["reward_errors"] == 0
            close(line["reward"], sum(parts), terms=10)
    command("train.grpo", *arguments(folder, tmp_path / "dry", *more, "--dry-run"))


@pytest.mark.thorough
@pytest.mark.parametrize("changes", [{}, {"lora": grpo.finetune.Lora(rank=8), "iterations": 2, "minibatches": 2}])
def test_the_reward_rises(folder, tmp_path, changes):
    """The reward rises from chance, 5 of 26 letters, to nearly 1: on- and off-policy, with all weights or adapters."""
    o = options(folder, tmp_path / "run", steps=40, lr=0.01, warmup=0, **changes)
    grpo.main(o.changed(group=8))
    earned = rewards_of(tmp_path / "run")
    assert np.mean(earned[:2]) < 0.4 and np.mean(earned[-3:]) > 0.9
    assert (tmp_path / "run" / ("adapter" if changes else "model")).is_dir()


@pytest.mark.thorough
@pytest.mark.parametrize("more", [[], ["--one-step-off"]])
def test_a_run_that_fails_goes_on_to_the_same_numbers(folder, tmp_path, monkeypatch, more):
    """A failed run resumes from its last checkpoint with the same samples and updates, bit by bit. For kill -9 see
    test_scripts.py.
    """
    usual = ["--prompts", 2, "--steps", 8, "--save-every", 2, "--iterations", 2]
    command_of = lambda out: arguments(folder, out, *usual, *more)
    command("train.grpo", *command_of(tmp_path / "whole"))
    asked = []

    def fail(stop):
        asked.append(stop)
        return 1 / (5 - len(asked)) and ""

    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, "agreed", fail)
        with pytest.raises(ZeroDivisionError):
            command("train.grpo", *command_of(tmp_path / "failed"))
    assert not (tmp_path / "failed" / "model").exists()
    command("train.grpo", *command_of(tmp_path / "failed"))
    numbers = lambda out: [
        {k: v for k, v in json.loads(line).items() if "second" not in k and "memory" not in k}
        for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    assert numbers(tmp_path / "failed") == numbers(tmp_path / "whole")
    stale = [line["staleness"] for line in numbers(tmp_path / "whole") if "staleness" in line]
    assert stale == ([1] * 7 if more else [])
    ours, theirs = (zoo.load(tmp_path / name / "model") for name in ("failed", "whole"))
    assert jax.tree.all(jax.tree.map(lambda a, b: (a == b).all(), ours, theirs))


@pytest.mark.thorough
@pytest.mark.parametrize("more", [[], ["--lora.rank", 2, "--exact-rollouts"]])
def test_sampling_on_other_devices(folder, tmp_path, monkeypatch, more):
    """Sampling on four of eight devices beside updates on the others gives the bits of sampling on the same four."""
    usual = ["--prompts", 2, "--steps", 3, "--one-step-off", "--mesh", "fsdp=4", "--eval-every", 2, "--hold-out", 0.5]
    start = lambda out, *own: command("train.grpo", *arguments(folder, tmp_path / out, *usual, *more, *own))
    rolled, places = grpo.rollout, []

    def rollout(model, *of, **options):
        places.append({device.id for a in jax.tree.leaves(model) for device in a.devices()})
        return rolled(model, *of, **options)

    monkeypatch.setattr("train.methods.rollouts.rollout", rollout)
    start("apart", "--sampling-mesh", "fsdp=4")
    assert places and all(place == {4, 5, 6, 7} for place in places)
    devices(monkeypatch, 4)
    start("shared")
    numbers = lambda out: [
        {k: v for k, v in json.loads(line).items() if "second" not in k and "memory" not in k and k != "mfu"}
        for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()
    ]
    assert numbers("apart") == numbers("shared") and [line.get("staleness") for line in numbers("apart")].count(1) == 2
    (name,) = {path.name for path in (tmp_path / "apart").iterdir()} & {"model", "adapter"}
    file = f"{name}/{'adapter_' if more else ''}model.safetensors"
    assert (tmp_path / "apart" / file).read_bytes() == (tmp_path / "shared" / file).read_bytes()


@pytest.mark.parametrize("first", [0, 1])
def test_rollouts_one_step_off(tmp_path, first):
    """A rollout is drawn with the weights before the update beside it, on its own devices if it has some, and comes
    back as it was after a failure.
    """
    mesh, asked = make_mesh("fsdp=1", jax.devices()[:1]), []
    there = make_mesh("fsdp=1", jax.devices()[first : first + 1])
    sgd = optax.sgd(1.0)

    def rollout(model, element, n, folder):
        assert model.table.devices() == {jax.devices()[first]}
        asked.append((float(model.table[0, 0]), element, n))
        return Rolled(
            [{"tokens": np.full((1, 2), n)}, {"old": np.full(3, 0.1, np.float32)}], {"reward": 0.5}, [{"a": n}]
        )

    state = init_state(Bigram(jax.device_put(jnp.full((2, 2), 7.0), NamedSharding(mesh, P()))), sgd)
    with contextlib.closing(Ahead(rollout, there, "float32", None, tmp_path, updates=2)) as ahead_of:
        assert ahead_of.take(3) is None
        ahead_of.begin(state, "x", 3)
        ahead_of.finish()
        ahead_of.finish()
        (first, second), *others = ahead_of.take(3)
        assert asked == [(7.0, "x", 3)] and others == [{"reward": 0.5, "staleness": 1}, [{"a": 3}]]
        assert first["tokens"].tolist() == [[3, 3]] and second["old"].dtype == np.float32
        (tmp_path / "checkpoints" / "8").mkdir(parents=True)  # of step 4
        assert ahead_of.take(4) is None and not list((tmp_path / "ahead").iterdir()), "nothing needs it any longer"


@pytest.mark.thorough
def test_the_loss_has_the_support_of_the_sampler(folder, model):
    """With top-k and top-p the tokens that are kept are the sampler's, and the first loss drifts from none of them."""
    o = options(folder, pathlib.Path(), top_k=12, top_p=0.8, temperature=1.3, compute_dtype="float32")
    tokenizer, mesh = zoo.tokenizer(folder / "model"), make_mesh("fsdp=1", jax.devices()[:1])
    prompts = [prompts_.encode(Record("", {"prompt": word}), tokenizer) for word in ("abc ", "hello ")]
    with jax.set_mesh(mesh):
        (batch,), *_ = rollouts.rollout(
            model, prompts, 0, None, options=o.rollouts, rewards=o.rewards, judges=[lambda *_: 1.0],
            tokenizer=tokenizer, mesh=mesh, rows=2, dtype="float32", seed=0,
        )  # fmt: skip
        sums = jax.jit(lambda batch: grpo.objective(model, batch, options=o)[2])(batch)
        x = features(model, jax.tree.map(jnp.asarray, batch))[0]
        settings = sampling.settings([sampling.Sampling(temperature=1.3, top_k=12, top_p=0.8)] * len(batch["tokens"]))
        filtered = np.asarray(settings.filtered(model.unembed(x)))
    learnt = batch["loss_mask"] != 0
    kept = np.any(batch["support"][..., None] == np.arange(64), axis=-2)
    assert (kept == np.isfinite(filtered))[learnt].all() and kept[learnt].sum(axis=-1).max() <= 12
    wanted = np.take_along_axis(np.asarray(jax.nn.log_softmax(filtered)), batch["targets"][..., None], -1)[..., 0]
    close(batch["old"][learnt], wanted[learnt], terms=MODEL)
    close(float(sums["drift"]) / learnt.sum(), 0, terms=MODEL, size=np.log(64))
    assert float(sums["entropy"]) < np.log(12) * learnt.sum()


def test_refusals(folder, tmp_path):
    for changes, message in (
        ({"minibatches": 3}, "4 x 4 completions can't be split into 3 minibatches"),
        ({"reward": ("exakt",)}, "'exakt' is no reward"),
        ({"reward_weights": (1.0, 2.0)}, "1 rewards need as many --reward-weights"),
        ({"seq_len": 7}, "No prompt has at most 2 tokens"),
        ({"group": 1}, "take 2 or more"),
        ({"overlong": 7}, "--overlong 7 is more than --max-new-tokens 6"),
        ({"top_p": 0.9}, "--top-p 0.9 needs --top-k"),
        ({"top_k": 4, "environment": "guess", "reward": grpo.RewardOptions().reward}, "leave them out with --environm"),
        ({"credit": "turn", "advantages": "rloo"}, "--credit turn compares turns as grpo does"),
        ({"importance": "icepop"}, "--importance icepop .* needs --exact-rollouts"),
        ({"router_replay": True}, "--router-replay: .* has no experts; leave it out"),
        ({"loss": "sapo", "level": "sequence"}, "--loss sapo has ratios of tokens"),
        ({"sampling_mesh": "fsdp=4", "mesh": "fsdp=4"}, "--sampling-mesh fsdp=4: .* add --one-step-off"),
        ({"sampling_mesh": "fsdp=-1"}, "--sampling-mesh fsdp=-1 has to take some of the 8 devices"),
        ({"sampling_mesh": "tensor=3", "one_step_off": True}, "4 heads can't be split by tensor = 3"),
        ({"patience": 1, "steps": 1}, "--patience 1 waits for a higher reward on held-out prompts, and there is none"),
    ):
        with pytest.raises(ValueError, match=message):
            grpo.main(options(folder, tmp_path).changed(**changes))
    with pytest.raises(ValueError, match="line 3: the record has neither a prompt nor messages"):
        prompts_.encode(Record("line 3", {"text": "x"}), zoo.tokenizer(folder / "model"))


def test_a_dry_run_tries_the_rewards(folder, tmp_path, monkeypatch):
    """A dry run names the record that lacks a field that a reward needs, before a model is loaded."""
    lines = [{"prompt": "a ", "answer": "1"}, {"prompt": "b ", "answer": "2"}, {"prompt": "c "}]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "own.py").write_text("def fails(completion, record):\n    return record['no']\n")
    start = lambda **changes: grpo.main(
        options(folder, tmp_path / "out", dry_run=True).changed(data=str(tmp_path / "data.jsonl"), **changes)
    )
    monkeypatch.setattr(grpo.finetune, "run", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"data\.jsonl, line 3: The reward needs a field `answer` in the record"):
        start(reward=("number",))
    with pytest.raises(ValueError, match=r"data\.jsonl, line 3: The reward needs a field `answer`"):
        start(reward=("exact",), hold_out=0.3)  # the record is held out
    with pytest.raises(ValueError, match=r"data\.jsonl, line 1: The reward python needs a field `tests`"):
        start(reward=("number", "python"))
    with pytest.raises(ValueError, match=r"line 1: --reward \S+own\.py:fails raises KeyError: 'no'\.$"):
        start(reward=(f"{tmp_path / 'own.py'}:fails",))
