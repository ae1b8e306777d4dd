"""The losses: equal to TRL's, and to their definitions on whole logits, and independent of masked tokens."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.close import close
from tests.train import make_golden_trl as trl
from train.step import loss
from zoo.mesh import make_mesh


GOLDEN = json.loads(trl.FILE.read_text())
GIVEN = {name: jnp.asarray(a, jnp.int32 if a.dtype == int else None) for name, a in trl.inputs().items()}
MASK = GIVEN["completion"]


def completions(logits: jax.Array) -> jax.Array:
    """Returns the log-probability of each row's completion."""
    found, _ = loss.logprobs(lambda x: x, logits[:, :-1], GIVEN["tokens"][:, 1:], chunk=20)
    return jnp.sum(jnp.where(MASK[:, 1:] != 0, found, 0), axis=1)


LENGTHS = np.asarray(MASK)[:, 1:].sum(axis=1).astype(np.float32)


@pytest.fixture(scope="module")
def logps():
    return jax.jit(completions)(GIVEN["logits"])


@pytest.fixture(scope="module")
def ratios(logps):
    return logps - jax.jit(completions)(GIVEN["ref_logits"])


# ======================================================================================================================
# TRL.
# ======================================================================================================================


def test_dpo_and_ipo_equal_trl(ratios):
    @jax.jit
    def losses(ratios, lengths):
        pair = jnp.split(ratios, 2)
        smoothed = loss.dpo(*pair, beta=trl.BETA, label_smoothing=0.2)
        return loss.dpo(*pair, beta=trl.BETA), smoothed, loss.ipo(*jnp.split(ratios / lengths, 2), beta=trl.BETA)

    dpo, smoothed, ipo = losses(ratios, LENGTHS)
    close(np.mean(dpo), GOLDEN["dpo"][0], terms=200)
    close(smoothed, GOLDEN["dpo_smoothed"], terms=200)
    close(np.mean(ipo), GOLDEN["ipo"][0], terms=200)


def test_orpo_equals_trl(logps):
    chosen, rejected = np.split(np.asarray(logps) / LENGTHS, 2)
    close(chosen, GOLDEN["orpo_chosen_logps"], terms=200)
    losses = jax.jit(functools.partial(loss.orpo, beta=trl.BETA))(chosen, rejected)
    close(losses, -chosen - np.array(GOLDEN["orpo_odds_ratio"], np.float32), terms=200)


@pytest.mark.parametrize("name, weights", [("kto", (1.0, 1.0)), ("kto_weighted", (0.7, 1.3))])
def test_kto_equals_trl(name, weights, ratios):
    @jax.jit
    def losses(ratios, kl):
        baseline = loss.kto_baseline(kl, jnp.full(2 * trl.PAIRS, True))
        weighted = dict(desirable_weight=weights[0], undesirable_weight=weights[1])
        return loss.kto(ratios, GIVEN["label"], baseline, beta=trl.BETA, **weighted), baseline

    found, baseline = losses(ratios, GIVEN["kl_logps"] - GIVEN["ref_kl_logps"])
    close([np.mean(found), baseline], GOLDEN[name], terms=200)


def test_the_baseline_of_kto_is_not_negative_and_has_no_gradient():
    present = np.array([True, True, False])
    ratios = np.array([1.0, 2.0, np.nan], np.float32)
    baseline = jax.jit(jax.value_and_grad(loss.kto_baseline))
    value, gradient = baseline(ratios, present)
    assert value == 1.5 and not np.any(gradient)
    assert baseline(-ratios, present)[0] == 0
    assert baseline(ratios, np.zeros_like(present))[0] == 0


@pytest.mark.parametrize("name, scale", [("advantages", True), ("advantages_unscaled", False)])
def test_advantages_equal_trl(name, scale):
    advantages = jax.jit(functools.partial(loss.group_advantages, scale=scale))
    close(np.ravel(advantages(np.reshape(GIVEN["rewards"], (-1, trl.GROUP)))), GOLDEN[name], terms=50)


def test_other_advantages_equal_trl():
    rewards, of_each = (np.reshape(GIVEN[name], (-1, trl.GROUP, *GIVEN[name].shape[1:])) for name in (
        "rewards", "rewards_of_each"
    ))  # fmt: skip
    close(np.ravel(jax.jit(loss.leave_one_out)(rewards)), GOLDEN["advantages_rloo"], terms=50)
    weights = np.array(trl.WEIGHTS, np.float32)
    close(np.ravel(jax.jit(loss.advantages_of_each)(of_each, weights)), GOLDEN["advantages_gdpo"], terms=100)


@pytest.mark.parametrize(
    "name, how, level, beta",
    [
        ("cispo", "dapo", "token", 0.0),
        ("sapo", "grpo", "token", 0.0),
        ("high_entropy", "dapo", "token", 0.0),
        ("grpo", "grpo", "token", 0.0),
        ("dapo", "dapo", "token", 0.0),
        ("dr_grpo", "dr_grpo", "token", 0.0),
        ("grpo_kl", "grpo", "token", 0.04),
        ("gspo", "grpo", "sequence", 0.0),
    ],
)
def test_policy_losses_equal_trl(name, how, level, beta):
    """The loss, the norm of its gradient, the clipped fraction, and the mean KL equal TRL's."""
    advantages = jnp.broadcast_to(jnp.asarray(np.array(GOLDEN["advantages"], np.float32))[:, None], MASK.shape)
    texts = dict(segments=jnp.ones_like(MASK), mask=MASK, documents=1)
    poison = lambda a: jnp.asarray(np.where(np.asarray(MASK) != 0, a, np.float32(np.nan)))
    old, reference = poison(GIVEN["old"]), poison(GIVEN["ref"])

    def mean(values, how):
        total, count = loss.aggregate(values, how=how, max_length=trl.SEQ, **texts)
        return total / count

    def total(logps):
        drawn = logps, old, advantages, MASK
        if level == "sequence":
            drawn = (*(loss.document_means(a, **texts) for a in drawn[:2]), *drawn[2:])
        losses, clipped = loss.clipped_policy(*drawn, epsilon_low=0.2, epsilon_high=0.28)
        if name == "cispo":
            losses, clipped = loss.cispo(*drawn, epsilon_high=trl.CISPO_HIGH - 1)
        if name == "sapo":
            losses = loss.sapo(*drawn)
        if name == "high_entropy":
            losses = jnp.where(loss.of_high_entropy(poison(GIVEN["entropy"]), MASK, trl.HIGH_ENTROPY), losses, 0)
        kl = loss.kl_k3(logps, reference)
        looks = [mean(clipped.astype(jnp.float32), "dapo" if level == "token" else "grpo"), mean(kl, "dapo")]
        return mean(losses + beta * kl, how), looks

    (value, looks), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(GIVEN["logps"])
    norm = np.linalg.norm(np.asarray(gradient)[np.asarray(MASK) != 0])
    close([value, norm, *looks][: len(GOLDEN[name])], GOLDEN[name], terms=200)


def test_the_punishment_of_long_completions_equals_trl():
    most, margin = trl.OVERLONG
    close(loss.overlong(jnp.asarray(trl.LENGTHS), most=most, margin=margin), GOLDEN["overlong"], terms=4)


@pytest.mark.parametrize("name, beta", [("forward_kl", 0.0), ("jsd", 0.3), ("reverse_kl", 1.0)])
def test_divergences_equal_trl(name, beta):
    divergence = jax.jit(functools.partial(loss.divergence, beta=beta, temperature=1.7))
    close(divergence(GIVEN["logits"], GIVEN["ref_logits"])[0], GOLDEN[name], terms=200)


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_trl_still_computes_the_golden_numbers():
    pytest.importorskip("trl", reason="needs trl")
    for name, values in trl.numbers().items():
        close({name: values}, {name: GOLDEN[name]}, terms=100)


# ======================================================================================================================
# Definitions.
# ======================================================================================================================

random = np.random.RandomState(1)
BATCH, SEQ, EMBED, VOCAB = 8, 12, 6, 32
X, Y = (jnp.asarray(random.randn(BATCH, SEQ, EMBED), jnp.float32) for _ in range(2))
HEAD = jnp.asarray(random.randn(VOCAB, EMBED), jnp.float32)
TARGETS = jnp.asarray(random.randint(0, VOCAB, (BATCH, SEQ)), jnp.int32)


def unembed(head, x):
    return 5 * jnp.tanh(jnp.einsum("bse,ve->bsv", x, head) / 5)


LOGITS, TEACHERS = (5 * np.tanh(np.asarray(x) @ np.asarray(HEAD).T / 5) for x in (X, Y))


def score(function, x, head):
    """Returns a number that depends on every log-probability and every entropy."""
    logps, entropies = function(functools.partial(unembed, head), x, TARGETS)
    return jnp.sum(jnp.sin(logps) + jnp.cos(entropies)), (logps, entropies)


def naive(unembed, x, targets):
    logps = jax.nn.log_softmax(unembed(x))
    return jnp.take_along_axis(logps, targets[..., None], 2)[..., 0], -jnp.sum(jnp.exp(logps) * logps, axis=2)


@pytest.fixture(scope="module")
def expected():
    return jax.jit(jax.value_and_grad(functools.partial(score, naive), (0, 1), has_aux=True))(X, HEAD)


@pytest.mark.parametrize("chunk", [8, *(pytest.param(n, marks=pytest.mark.thorough) for n in (40, 1000))])
def test_logprobs_are_those_of_whole_logits(chunk, expected):
    function = functools.partial(score, functools.partial(loss.logprobs, chunk=chunk))
    found = jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(X, HEAD)
    close(found, expected, terms=300)


@pytest.mark.parametrize("axes", [pytest.param("fsdp=8", marks=pytest.mark.thorough), "fsdp=2,context=2,tensor=2"])
def test_logprobs_on_a_mesh(axes, expected):
    mesh = make_mesh(axes)
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
        x, head = place(X, "fsdp", "context"), place(HEAD, "tensor", "fsdp" if axes[5] == "2" else None)
        function = functools.partial(score, functools.partial(loss.logprobs, chunk=2))
        step = jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))
        found = step(x, head)
        assert found[0][1][0].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "context")), 2)
    close(found, expected, terms=300)


def test_logits_of_all_tokens_are_never_there():
    gradient = jax.jit(jax.grad(lambda x, head: score(functools.partial(loss.logprobs, chunk=16), x, head)[0], (0, 1)))
    text = gradient.lower(X, HEAD).compile().as_text()
    assert f"f32[{BATCH},2,{VOCAB}]" in text
    assert f"f32[{BATCH},{SEQ},{VOCAB}]" not in text and f"f32[6,{BATCH},2,{VOCAB}]" not in text


def test_words_that_cannot_be_have_no_part_in_the_entropy():
    head = lambda x: jnp.where(jnp.arange(VOCAB)[None, None] < 20, unembed(HEAD, x), -jnp.inf)
    small = lambda x: unembed(HEAD[:20], x)
    both = [
        jax.jit(jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.stack(loss.logprobs(f, x, TARGETS % 20)))))(X)
        for f in (head, small)
    ]
    close(*both, terms=300)


def test_logprobs_among_some_tokens():
    """They are those of the logits of these tokens alone, and so is their gradient."""
    draw = np.random.RandomState(3)
    support = np.stack([np.stack([draw.permutation(VOCAB)[:7] for _ in range(SEQ)]) for _ in range(BATCH)])
    support[..., 0] = TARGETS
    support[..., 1:] = np.where(support[..., 1:] == TARGETS[..., None], -1, support[..., 1:])
    support[..., 5:] = np.where(draw.rand(BATCH, SEQ, 2) < 0.5, -1, support[..., 5:])
    kept = np.any(support[..., None] == np.arange(VOCAB), axis=-2)
    among = lambda x: loss.logprobs_among(functools.partial(unembed, HEAD), x, TARGETS, jnp.asarray(support), chunk=16)
    whole = lambda x: loss.logprobs(lambda x: jnp.where(kept, unembed(HEAD, x), -jnp.inf), x, TARGETS, chunk=10**6)
    summed = lambda f: lambda x: (jnp.sum(jnp.sin(jnp.stack(f(x)))), f(x))
    both = [jax.jit(jax.grad(summed(f), has_aux=True))(X) for f in (among, whole)]
    close(*both, terms=300)


def test_advantages_of_turns():
    """A turn's return is compared with those of the trajectories that have reached the same turn."""
    draw = np.random.RandomState(4)
    rewards, lengths = draw.rand(5, 4).astype(np.float32), [4, 2, 3, 2, 1]
    present = np.arange(4) < np.array(lengths)[:, None]
    for scale in (True, False):
        found = jax.jit(functools.partial(loss.turn_advantages, scale=scale))(rewards, present)
        for turn in range(4):
            there = np.flatnonzero(present[:, turn])
            returns = np.array([rewards[n, turn : lengths[n]].sum() for n in there])
            wanted = returns - returns.mean()
            if scale:
                wanted /= (returns.std(ddof=1) if len(there) > 1 else 0) + 1e-4
            close(np.asarray(found)[there, turn], wanted, terms=50)
            assert not np.any(np.asarray(found)[~present[:, turn], turn])
    alone = loss.turn_advantages(jnp.asarray(rewards[:, :1]), jnp.ones((5, 1), bool))
    close(alone[:, 0], loss.group_advantages(jnp.asarray(rewards[None, :, 0]))[0], terms=50)  # of one turn: GRPO


def test_documents_are_summed_apart():
    segments = jnp.asarray(np.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]], np.int32))
    mask = jnp.asarray(np.array([[0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1]], np.int32))
    values = np.where(np.asarray(mask) != 0, np.arange(12, dtype=np.float32).reshape(2, 6), np.float32(np.nan))

    @functools.partial(jax.grad, has_aux=True)
    def square(values):
        sums = loss.per_document(values, segments=segments, mask=mask, documents=4)
        return jnp.sum(jnp.square(sums)), sums

    gradient, sums = jax.jit(square)(values)
    assert sums.tolist() == [[3, 3, 0, 0], [6, 7, 30, 0]]
    assert gradient.tolist() == [[0, 6, 6, 6, 0, 0], [12, 14, 0, 60, 60, 60]]


def test_divergences_by_chunks():
    student, teacher = (functools.partial(unembed, head) for head in (HEAD, HEAD[::-1]))
    divergence = functools.partial(loss.divergence, beta=0.0, temperature=2.0)
    chunked = lambda x: loss.by_chunks(lambda x, y: divergence(student(x), teacher(y)), x, Y, chunk=24)
    whole = lambda x: divergence(student(x), teacher(Y))
    summed = lambda f: lambda x: (jnp.sum(jnp.sin(f(x))), f(x))
    (there, values), (by_chunks, chunk_values) = (
        jax.jit(jax.grad(summed(f), has_aux=True))(X) for f in (whole, chunked)
    )
    close(chunk_values, values, terms=200)
    close(by_chunks, there, terms=200)


def test_all_logits_are_as_good_as_the_teacher():
    @jax.jit
    def both(student, teacher):
        top = loss.divergence_top_k(student, *jax.lax.top_k(teacher, VOCAB), temperature=1.5)
        return top, loss.divergence(student, teacher, beta=0.0, temperature=1.5)

    close(*both(LOGITS, TEACHERS), terms=200)


def test_few_logits_share_out_the_rest_of_the_mass():
    least = np.sort(TEACHERS)[..., -3:-2]
    kept = least <= TEACHERS

    @jax.jit
    @functools.partial(jax.grad, has_aux=True)
    def top(student):
        found = loss.divergence_top_k(student, *jax.lax.top_k(TEACHERS, 3))
        return jnp.sum(found), (found, loss.divergence(student, jnp.where(kept, TEACHERS, -jnp.inf), beta=0.0))

    gradient, values = top(LOGITS)
    close(*values, terms=200)
    assert np.all(np.asarray(gradient)[~kept] > 0)  # the others are pushed down


def test_equal_distributions_do_not_diverge():
    logits = jnp.asarray(np.where(np.arange(VOCAB) < 5, LOGITS, np.float32(-np.inf)))
    for beta in (0.0, 0.4, 1.0):
        divergence = lambda s, beta=beta: jnp.sum(loss.divergence(s, logits, beta=beta))
        value, gradient = jax.jit(jax.value_and_grad(divergence))(logits)
        close((value, gradient), (0.0, jnp.zeros_like(gradient)), terms=200, size=1)


def test_the_heads_gradient_is_added_up_over_chunks_in_float32():
    """The sum over chunks is exact; in bfloat16 it would stop at 512."""
    x, head = jnp.ones((1, 2048, 4), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    total = lambda head: jnp.sum(loss.by_chunks(lambda x: jnp.einsum("bsd,vd->bsv", x, head), x, chunk=2))
    gradient = jax.jit(jax.grad(total))(head)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient.astype(np.float32), 2048)
