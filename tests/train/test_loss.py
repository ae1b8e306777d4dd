"""The losses: equal to TRL's, to their definitions on whole logits, and deaf to what is masked."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from tests.train import make_golden_trl as trl
from train import loss
from zoo.mesh import make_mesh


GOLDEN = json.loads(trl.FILE.read_text())
GIVEN = {name: jnp.asarray(a, jnp.int32 if a.dtype == int else None) for name, a in trl.inputs().items()}
MASK = GIVEN["completion"]
close = functools.partial(np.testing.assert_allclose, rtol=1e-5)


def completions(logits: jax.Array) -> jax.Array:
    """Log-probability of each row's completion."""
    found, _ = loss.logprobs(lambda x: x, logits[:, :-1], GIVEN["tokens"][:, 1:], chunk=20)
    return jnp.sum(jnp.where(MASK[:, 1:] != 0, found, 0), axis=1)


LENGTHS = jnp.sum(MASK[:, 1:], axis=1).astype(jnp.float32)
LOGPS = completions(GIVEN["logits"])
RATIOS = LOGPS - completions(GIVEN["ref_logits"])


# ======================================================================================================================
# TRL.
# ======================================================================================================================


def test_dpo_and_ipo_equal_trl():
    chosen, rejected = jnp.split(RATIOS, 2)
    close(jnp.mean(loss.dpo(chosen, rejected, beta=trl.BETA)), GOLDEN["dpo"][0])
    close(loss.dpo(chosen, rejected, beta=trl.BETA, label_smoothing=0.2), GOLDEN["dpo_smoothed"])
    close(jnp.mean(loss.ipo(*jnp.split(RATIOS / LENGTHS, 2), beta=trl.BETA)), GOLDEN["ipo"][0])


def test_orpo_equals_trl():
    chosen, rejected = jnp.split(LOGPS / LENGTHS, 2)
    close(chosen, GOLDEN["orpo_chosen_logps"])
    close(loss.orpo(chosen, rejected, beta=trl.BETA), -chosen - np.array(GOLDEN["orpo_odds_ratio"], np.float32))


@pytest.mark.parametrize("name, weights", [("kto", (1.0, 1.0)), ("kto_weighted", (0.7, 1.3))])
def test_kto_equals_trl(name, weights):
    baseline = loss.kto_baseline(GIVEN["kl_logps"] - GIVEN["ref_kl_logps"], jnp.full(2 * trl.PAIRS, True))
    losses = loss.kto(
        RATIOS, GIVEN["label"], baseline, beta=trl.BETA, desirable_weight=weights[0], undesirable_weight=weights[1]
    )
    close([jnp.mean(losses), baseline], GOLDEN[name])


def test_the_baseline_of_kto_is_not_negative_and_has_no_gradient():
    present = jnp.array([True, True, False])
    ratios = jnp.array([1.0, 2.0, jnp.nan])
    value, gradient = jax.value_and_grad(loss.kto_baseline)(ratios, present)
    assert value == 1.5 and not gradient.any()
    assert loss.kto_baseline(-ratios, present) == 0
    assert loss.kto_baseline(ratios, ~present & False) == 0


@pytest.mark.parametrize("name, scale", [("advantages", True), ("advantages_unscaled", False)])
def test_advantages_equal_trl(name, scale):
    advantages = loss.group_advantages(GIVEN["rewards"].reshape(-1, trl.GROUP), scale=scale)
    close(advantages.reshape(-1), GOLDEN[name], atol=1e-6)


@pytest.mark.parametrize(
    "name, how, level, beta",
    [
        ("grpo", "grpo", "token", 0.0),
        ("dapo", "dapo", "token", 0.0),
        ("dr_grpo", "dr_grpo", "token", 0.0),
        ("grpo_kl", "grpo", "token", 0.04),
        ("gspo", "grpo", "sequence", 0.0),
    ],
)
def test_policy_losses_equal_trl(name, how, level, beta):
    """The loss, the norm of its gradient, the fraction that is clipped, and the mean KL."""
    advantages = jnp.array(GOLDEN["advantages"])
    poison = lambda a: jnp.where(MASK != 0, a, jnp.nan)
    old, reference = poison(GIVEN["old"]), poison(GIVEN["ref"])

    def mean(values, how):
        total, count = loss.aggregate(values, MASK, how, max_length=trl.SEQ)
        return total / count

    def total(logps):
        losses, clipped = loss.clipped_policy(
            logps, old, advantages, MASK, epsilon_low=0.2, epsilon_high=0.28, level=level
        )
        kl = loss.kl_k3(logps, reference)
        looks = [mean(clipped.astype(jnp.float32), "dapo" if level == "token" else "grpo"), mean(kl, "dapo")]
        return mean(losses + beta * kl, how), looks

    (value, looks), gradient = jax.value_and_grad(total, has_aux=True)(GIVEN["logps"])
    close([value, jnp.linalg.norm(jnp.where(MASK != 0, gradient, 0)), *looks][: len(GOLDEN[name])], GOLDEN[name])


@pytest.mark.parametrize("name, beta", [("forward_kl", 0.0), ("jsd", 0.3), ("reverse_kl", 1.0)])
def test_divergences_equal_trl(name, beta):
    close(loss.divergence(GIVEN["logits"], GIVEN["ref_logits"], beta=beta, temperature=1.7)[0], GOLDEN[name])


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")  # TRL's own
def test_trl_still_computes_the_golden_numbers():
    pytest.importorskip("trl", reason="needs trl")
    for name, values in trl.numbers().items():
        np.testing.assert_allclose(values, GOLDEN[name], rtol=1e-6, err_msg=name)


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


def score(function, x, head):
    """A number that depends on every log-probability and every entropy."""
    logps, entropies = function(functools.partial(unembed, head), x, TARGETS)
    return jnp.sum(jnp.sin(logps) + jnp.cos(entropies)), (logps, entropies)


def naive(unembed, x, targets):
    logps = jax.nn.log_softmax(unembed(x))
    return jnp.take_along_axis(logps, targets[..., None], 2)[..., 0], -jnp.sum(jnp.exp(logps) * logps, axis=2)


EXPECTED = jax.value_and_grad(functools.partial(score, naive), (0, 1), has_aux=True)(X, HEAD)


@pytest.mark.parametrize("chunk", [8, 40, 1000])
def test_logprobs_are_those_of_whole_logits(chunk):
    function = functools.partial(score, functools.partial(loss.logprobs, chunk=chunk))
    found = jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))(X, HEAD)
    jax.tree.map(functools.partial(close, atol=1e-5), found, EXPECTED)


@pytest.mark.parametrize("axes", ["fsdp=8", "fsdp=2,context=2,tensor=2"])
def test_logprobs_on_a_mesh(axes):
    mesh = make_mesh(axes)
    with jax.set_mesh(mesh):
        place = lambda a, *spec: jax.device_put(a, NamedSharding(mesh, P(*spec)))
        x, head = place(X, "fsdp", "context"), place(HEAD, "tensor", "fsdp" if axes[5] == "2" else None)
        function = functools.partial(score, functools.partial(loss.logprobs, chunk=2))
        step = jax.jit(jax.value_and_grad(function, (0, 1), has_aux=True))
        found = step(x, head)
        assert found[0][1][0].sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp", "context")), 2)
    jax.tree.map(functools.partial(close, atol=1e-5), found, EXPECTED)


def test_logits_of_all_tokens_are_never_there():
    gradient = jax.jit(jax.grad(lambda x, head: score(functools.partial(loss.logprobs, chunk=16), x, head)[0], (0, 1)))
    text = gradient.lower(X, HEAD).compile().as_text()
    assert f"f32[{BATCH},2,{VOCAB}]" in text
    assert f"f32[{BATCH},{SEQ},{VOCAB}]" not in text and f"f32[6,{BATCH},2,{VOCAB}]" not in text


def test_words_that_cannot_be_have_no_part_in_the_entropy():
    head = lambda x: jnp.where(jnp.arange(VOCAB)[None, None] < 20, unembed(HEAD, x), -jnp.inf)
    small = lambda x: unembed(HEAD[:20], x)
    both = [
        jax.value_and_grad(lambda x, f=f: jnp.sum(jnp.stack(loss.logprobs(f, x, TARGETS % 20))))(X)
        for f in (head, small)
    ]
    jax.tree.map(functools.partial(close, atol=1e-5), *both)


def test_documents_are_summed_apart():
    segments = jnp.array([[1, 1, 1, 2, 2, 0], [1, 2, 3, 3, 3, 3]])
    mask = jnp.array([[0, 1, 1, 1, 0, 1], [1, 1, 0, 1, 1, 1]])
    values = jnp.where(mask != 0, jnp.arange(12.0).reshape(2, 6), jnp.nan)
    sums = functools.partial(loss.per_document, segments=segments, mask=mask, documents=4)
    assert sums(values).tolist() == [[3, 3, 0, 0], [6, 7, 30, 0]]
    gradient = jax.grad(lambda v: jnp.sum(jnp.square(sums(v))))(values)
    assert gradient.tolist() == [[0, 6, 6, 6, 0, 0], [12, 14, 0, 60, 60, 60]]


def test_divergences_by_chunks():
    student, teacher = (functools.partial(unembed, head) for head in (HEAD, HEAD[::-1]))
    divergence = functools.partial(loss.divergence, beta=0.0, temperature=2.0)
    chunked = lambda x: loss.by_chunks(lambda x, y: divergence(student(x), teacher(y)), x, Y, chunk=24)
    whole = lambda x: divergence(student(x), teacher(Y))
    gradient = lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x))))(X)
    close(chunked(X), whole(X), atol=1e-6)
    close(gradient(chunked), gradient(whole), atol=1e-6)


def test_all_logits_are_as_good_as_the_teacher():
    student, teacher = unembed(HEAD, X), unembed(HEAD, Y)
    values, indices = jax.lax.top_k(teacher, VOCAB)
    close(
        loss.divergence_top_k(student, values, indices, temperature=1.5),
        loss.divergence(student, teacher, beta=0.0, temperature=1.5),
        atol=1e-6,
    )


def test_few_logits_share_out_the_rest_of_the_mass():
    student, teacher = unembed(HEAD, X), unembed(HEAD, Y)
    values, indices = jax.lax.top_k(teacher, 3)
    kept = teacher >= values[..., -1:]
    close(
        loss.divergence_top_k(student, values, indices),
        loss.divergence(student, jnp.where(kept, teacher, -jnp.inf), beta=0.0),
        atol=1e-6,
    )
    gradient = jax.grad(lambda s: jnp.sum(loss.divergence_top_k(s, values, indices)))(student)
    assert jnp.all(jnp.where(kept, True, gradient > 0))  # the others are pushed down


def test_equal_distributions_do_not_diverge():
    logits = jnp.where(jnp.arange(VOCAB)[None, None] < 5, unembed(HEAD, X), -jnp.inf)
    for beta in (0.0, 0.4, 1.0):
        value, gradient = jax.value_and_grad(lambda s, b=beta: jnp.sum(loss.divergence(s, logits, beta=b)))(logits)
        assert abs(value) < 1e-5 and jnp.all(jnp.abs(gradient) < 1e-6)


def test_the_heads_gradient_is_added_up_over_chunks_in_float32():
    """In bfloat16 it would stop at 512."""
    x, head = jnp.ones((1, 2048, 4), jnp.bfloat16), jnp.ones((3, 4), jnp.bfloat16)
    total = lambda head: jnp.sum(loss.by_chunks(lambda x: jnp.einsum("bsd,vd->bsv", x, head), x, chunk=2))
    gradient = jax.jit(jax.grad(total))(head)
    assert gradient.dtype == jnp.bfloat16
    np.testing.assert_array_equal(gradient.astype(np.float32), 2048)
