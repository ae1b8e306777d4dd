"""The losses of post-training, as pure functions of arrays: preferences, policy gradients, distillation.

Each docstring names the source of its formula. `log` is natural. pi is the model that learns, and ref the model that pi
starts from. The log-probability of a completion is the sum of its tokens' log-probabilities.
"""

from collections.abc import Callable
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.cross_entropy.chunks import Chunks


T = TypeVar("T")
Unembed = Callable[[Float[Array, "batch seq embed"]], Float[Array, "batch seq vocab"]]
Mask = Int[Array, "batch seq"] | Bool[Array, "batch seq"]


# ======================================================================================================================
# Values of tokens and documents from features, without the logits of all tokens at once.
# ======================================================================================================================


def by_chunks(function: Callable[..., T], *arrays: Array, chunk: int = 2048) -> T:
    """Computes `function(*arrays)` in chunks of about `chunk` tokens on each device, so that logits need less memory.

    All arrays are [batch, seq, ...], and a chunk has the same positions of every sequence. `function` maps arrays
    [batch, size, ...] to such arrays, token by token. The backward pass recomputes each chunk, so only one chunk of
    logits exists at a time. The gradients of arrays that `function` closes over, such as the output head, are summed
    over the chunks in float32.
    """
    batch, seq = arrays[0].shape[:2]
    chunks = Chunks.of(batch, seq, chunk)
    return jax.tree.map(chunks.joined, by_parts(function, *map(chunks.cut, arrays)))


def by_parts(function: Callable[..., T], *parts: Any) -> T:
    """Computes `function(*part)` for each part along the first axis of `parts`, one after another, and stacks them.

    The backward pass recomputes each part, so only one exists at a time. The gradients of arrays that `function` closes
    over, such as a model's, are summed over the parts in float32.
    """
    converted, closed = jax.closure_convert(function, *jax.tree.map(lambda a: a[0], parts))
    wide = [a.astype(jnp.float32) if a.dtype.itemsize < 4 else a for a in closed]

    def step(_: None, part: tuple[Any, ...]) -> tuple[None, T]:
        # Rounded within the scan, so that the scan sums the gradients in float32.
        return None, converted(*part, *(w.astype(a.dtype) for w, a in zip(wide, closed, strict=True)))

    return jax.lax.scan(jax.checkpoint(step, prevent_cse=False), None, parts)[1]


def logprobs(
    unembed: Unembed, x: Float[Array, "batch seq embed"], targets: Int[Array, "batch seq"], *, chunk: int = 2048
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Computes each target's log-probability, and the entropy of the distribution at its position, in nats and float32.

    Gradients flow to `x` and to the arrays that `unembed` closes over. See `by_chunks`.
    """

    def numbers(x: Array, targets: Array) -> tuple[Array, Array]:
        logits = unembed(x).astype(jnp.float32)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        # A comparison instead of indexing works on a vocabulary that is split over devices.
        is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        p = jnp.exp(logits - log_z[..., None])
        expected = jnp.sum(p * jnp.where(p > 0, logits, 0), axis=-1)  # a logit can be -inf
        return jnp.sum(jnp.where(is_target, logits, 0), axis=-1) - log_z, log_z - expected

    return by_chunks(numbers, x, targets, chunk=chunk)


def logprobs_among(
    unembed: Unembed,
    x: Float[Array, "batch seq embed"],
    targets: Int[Array, "batch seq"],
    support: Int[Array, "batch seq kept"],
    *,
    chunk: int = 2048,
) -> tuple[Float[Array, "batch seq"], Float[Array, "batch seq"]]:
    """Computes what `logprobs` does, with the distribution over the tokens in `support` alone; -1 there is no token.

    So it is where tokens are drawn with top-k or top-p: the ratio of two models' probabilities is then that of the
    distributions that are drawn from.
    """

    def numbers(x: Array, targets: Array, support: Array) -> tuple[Array, Array]:
        logits = unembed(x).astype(jnp.float32)
        among = jnp.take_along_axis(logits, jnp.maximum(support, 0), axis=-1)
        among = jnp.where(support >= 0, among, -jnp.inf)
        log_z = jax.nn.logsumexp(among, axis=-1)
        p = jnp.exp(among - log_z[..., None])
        expected = jnp.sum(p * jnp.where(p > 0, among, 0), axis=-1)
        is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        return jnp.sum(jnp.where(is_target, logits, 0), axis=-1) - log_z, log_z - expected

    return by_chunks(numbers, x, targets, support, chunk=chunk)


def per_document(
    values: Float[Array, "batch seq"], segments: Int[Array, "batch seq"], mask: Mask, documents: int
) -> Float[Array, "batch documents"]:
    """Sums each document's values where `mask` is not 0. Other values do not count, even if they are NaN.

    Document d of a row has the tokens whose segment is d + 1; segment 0 is padding. `documents` is the largest number
    of documents in a row.
    """
    here = (segments[:, None, :] == jnp.arange(1, documents + 1)[None, :, None]) & (mask != 0)[:, None, :]
    return jnp.sum(jnp.where(here, values[:, None, :], 0), axis=-1)


def at_tokens(values: Float[Array, "batch documents"], segments: Int[Array, "batch seq"]) -> Float[Array, "batch seq"]:
    """Returns, at each token, the value of its document; 0 in padding. Documents are those of `per_document`."""
    here = segments[:, None, :] == jnp.arange(1, values.shape[1] + 1)[None, :, None]
    return jnp.sum(jnp.where(here, values[:, :, None], 0), axis=1)


def at_last(
    values: Int[Array, "batch seq"], segments: Int[Array, "batch seq"], mask: Mask, documents: int
) -> Int[Array, "batch documents"]:
    """Returns each document's largest value, such as its only one, where `mask` is not 0; -1 if there is none.

    `documents` is as for `per_document`; values are not negative.
    """
    here = (segments[:, None, :] == jnp.arange(1, documents + 1)[None, :, None]) & (mask != 0)[:, None, :]
    return jnp.max(jnp.where(here, values[:, None, :], -1), axis=-1)


# ======================================================================================================================
# Preferences. `chosen` and `rejected` are log-ratios of completions, log pi(y|x) - log ref(y|x), except in `orpo`.
# ======================================================================================================================


def dpo(
    chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: float, label_smoothing: float = 0.0
) -> Float[Array, "*pairs"]:
    """Computes direct preference optimisation, arXiv:2305.18290, eq. 7: -log sigmoid(beta (chosen - rejected)).

    `label_smoothing` e is the probability that a label is wrong. With it the loss is conservative DPO (Mitchell, "A
    note on DPO with noisy preferences", 2023): (1 - e) times that loss, plus e times the loss with chosen and rejected
    exchanged.
    """
    logit = beta * (chosen - rejected)
    return -(1 - label_smoothing) * jax.nn.log_sigmoid(logit) - label_smoothing * jax.nn.log_sigmoid(-logit)


def ipo(chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: float) -> Float[Array, "*pairs"]:
    """Computes identity preference optimisation, arXiv:2310.12036, eq. 17: (chosen - rejected - 1 / (2 beta))^2.

    The paper's tau is `beta`. Give log-ratios divided by the lengths of the completions: the paper has sums over
    tokens, but TRL, after asking the authors, takes means, and so does this project.
    """
    return jnp.square(chosen - rejected - 1 / (2 * beta))


def orpo(chosen: Float[Array, "*pairs"], rejected: Float[Array, "*pairs"], *, beta: float) -> Float[Array, "*pairs"]:
    """Computes odds ratio preference optimisation, arXiv:2403.07691, eq. 6 and 7, which needs no reference:

        -chosen - beta log sigmoid(log odds(chosen) - log odds(rejected)),   odds = p / (1 - p)

    where `chosen` and `rejected` are log p, the mean log-probability of a completion's tokens (eq. 1), and the paper's
    lambda is `beta`. The first term is the negative log-likelihood of the completion; TRL's includes the prompt, too.
    """
    chosen, rejected = (jnp.minimum(a, -1e-7) for a in (chosen, rejected))  # the odds of certainty are infinite
    log_odds = lambda log_p: log_p - jnp.log(-jnp.expm1(log_p))
    return -chosen - beta * jax.nn.log_sigmoid(log_odds(chosen) - log_odds(rejected))


def kto(
    ratios: Float[Array, "*completions"],
    desirable: Bool[Array, "*completions"],
    baseline: Float[Array, ""],
    *,
    beta: float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> Float[Array, "*completions"]:
    """Computes Kahneman-Tversky optimisation, arXiv:2402.01306, eq. 7, from completions' log-ratios:

    - desirable_weight (1 - sigmoid(beta (ratio - baseline))) for a desirable completion;
    - undesirable_weight (1 - sigmoid(beta (baseline - ratio))) for another.
    """
    sign = jnp.where(desirable, 1.0, -1.0)
    weight = jnp.where(desirable, desirable_weight, undesirable_weight)
    return weight * jax.nn.sigmoid(-beta * sign * (ratios - baseline))


def kto_baseline(mismatched: Float[Array, "*completions"], present: Bool[Array, "*completions"]) -> Float[Array, ""]:
    """Computes KTO's estimate of KL(pi || ref), arXiv:2402.01306, section 4.1. It has no gradient.

    The estimate is the mean log-ratio of `mismatched` completions, each of which stands after the prompt of another
    record, or 0 if the mean is negative. The mean is over completions that are `present`; other values are ignored.
    """
    total = jnp.sum(jnp.where(present, mismatched, 0))
    return jax.lax.stop_gradient(jnp.maximum(total / jnp.maximum(jnp.sum(present.astype(total.dtype)), 1), 0))


def bradley_terry(
    chosen: Float[Array, "*pairs"],
    rejected: Float[Array, "*pairs"],
    margin: Float[Array, "*pairs"],
    *,
    centre: float = 0.0,
) -> Float[Array, "*pairs"]:
    """Computes the loss of a reward model, arXiv:2203.02155, eq. 1: -log sigmoid(chosen - rejected), of two rewards.

    The chosen reward should exceed the other by a `margin`, which is taken from the difference (arXiv:2307.09288, eq.
    2). `centre` is the weight of (chosen + rejected)^2, which keeps rewards near 0 (arXiv:2312.09244, section 3).
    """
    return -jax.nn.log_sigmoid(chosen - rejected - margin) + centre * jnp.square(chosen + rejected)


# ======================================================================================================================
# Embeddings.
# ======================================================================================================================


def info_nce(
    scores: Float[Array, "anchors candidates"],
    own: Bool[Array, "anchors candidates"],
    counted: Bool[Array, "anchors candidates"],
    *,
    temperature: float,
) -> Float[Array, " anchors"]:
    """Computes InfoNCE, arXiv:1807.03748, eq. 4: -log of the softmax, over the candidates, at an anchor's own one.

    The logits are `scores` / `temperature`. Candidates that are not `counted` are left out; the `own` one counts.
    """
    logits = jnp.where(counted | own, scores / temperature, -jnp.inf)
    return jax.nn.logsumexp(logits, axis=1) - jnp.sum(jnp.where(own, logits, 0), axis=1)


def cosent(
    scores: Float[Array, " pairs"],
    labels: Float[Array, " pairs"],
    counted: Bool[Array, " pairs"],
    *,
    temperature: float,
) -> Float[Array, ""]:
    """Computes CoSENT, doi:10.1109/TASLP.2024.3402087: log(1 + the sum of exp((s_j - s_i) / `temperature`)).

    The sum is over all (i, j) of which i has the higher label, so it falls as `scores` get the order of `labels`. Pairs
    that are not `counted` are left out.
    """
    ordered = (labels[:, None] > labels[None]) & counted[:, None] & counted[None]
    wrong = jnp.where(ordered, (scores[None] - scores[:, None]) / temperature, -jnp.inf)
    return jax.nn.logsumexp(jnp.append(wrong.reshape(-1), 0.0))


# ======================================================================================================================
# Policy gradients. A document is one sampled sequence. `mask` is 1 at the tokens that were sampled, and advantages are
# those of tokens, equal along a document or a turn. For `segments` and `documents` see `per_document`.
# ======================================================================================================================


def group_advantages(rewards: Float[Array, "prompts group"], *, scale: bool = True) -> Float[Array, "prompts group"]:
    """Computes advantages: a reward minus the mean of its prompt's group, in standard deviations of the group.

    This is GRPO, arXiv:2402.03300, section 4.1.2; without `scale`, Dr. GRPO, arXiv:2503.20783, section 3.2, which does
    not divide. As in TRL, the deviation is that of a sample (divided by group - 1), and 1e-4 is added to it.
    """
    advantages = rewards - jnp.mean(rewards, axis=1, keepdims=True)
    return advantages / (jnp.std(rewards, axis=1, ddof=1, keepdims=True) + 1e-4) if scale else advantages


def leave_one_out(rewards: Float[Array, "prompts group"]) -> Float[Array, "prompts group"]:
    """Computes advantages: a reward minus the mean of the others of its prompt's group.

    This is RLOO, arXiv:2402.14740, section 3.
    """
    return rewards - (jnp.sum(rewards, axis=1, keepdims=True) - rewards) / (rewards.shape[1] - 1)


def advantages_of_each(
    rewards: Float[Array, "prompts group rewards"], weights: Float[Array, " rewards"]
) -> Float[Array, "prompts group"]:
    """Computes advantages of several rewards: each is normalised within its group, and their weighted sum once more.

    This is GDPO, arXiv:2601.05242: a reward with a small spread counts as much as one with a large spread. The sum is
    normalised over all completions. As in TRL, deviations are those of samples, and 1e-4 is added to them.
    """
    sums = jnp.tensordot(jax.vmap(group_advantages, in_axes=2, out_axes=2)(rewards), weights, axes=1)
    return (sums - jnp.mean(sums)) / (jnp.std(sums, ddof=1) + 1e-4)


def overlong(lengths: Int[Array, "*completions"], *, most: int, margin: int) -> Float[Array, "*completions"]:
    """Computes the soft punishment of long completions, DAPO, arXiv:2503.14476, eq. 13: a reward from -1 to 0.

    It is 0 up to `most` - `margin` tokens, and falls in a straight line to -1 at `most`, the largest number of tokens.
    """
    return jnp.clip((most - margin - lengths) / margin, -1.0, 0.0)


def returns_of_turns(
    rewards: Float[Array, "group turns"], present: Bool[Array, "group turns"]
) -> Float[Array, "group turns"]:
    """Computes the return of each turn: the sum of the rewards of this turn and of all later ones."""
    return jnp.flip(jnp.cumsum(jnp.flip(jnp.where(present, rewards, 0), axis=1), axis=1), axis=1)


def turn_advantages(
    rewards: Float[Array, "group turns"], present: Bool[Array, "group turns"], *, scale: bool = True
) -> Float[Array, "group turns"]:
    """Computes advantages of turns: a turn's return minus the mean of the group's returns at the same turn.

    As in `group_advantages` this is divided by the deviation if `scale`. Trajectories of the group that have ended
    before the turn, which are not `present`, do not count; a turn that one alone has reached has the advantage 0.
    Return-based advantages of turns: GTPO, arXiv:2511.14846, section 3, here without a discount.
    """
    returns = returns_of_turns(rewards, present)
    sum_of = lambda values: jnp.sum(jnp.where(present, values, 0), axis=0, keepdims=True)
    count = sum_of(jnp.ones_like(returns))
    centred = jnp.where(present, returns - sum_of(returns) / jnp.maximum(count, 1), 0)
    deviation = jnp.sqrt(sum_of(jnp.square(centred)) / jnp.maximum(count - 1, 1))
    return centred / (deviation + 1e-4) if scale else centred


def clipped_policy(
    logps: Float[Array, "batch seq"],
    old: Float[Array, "batch seq"],
    advantages: Float[Array, "batch seq"],
    mask: Mask,
    *,
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Computes each token's -min(ratio A, clip(ratio, 1 - epsilon_low, 1 + epsilon_high) A), and whether it is clipped.

    The ratio is pi / old: the probability under the model that learns, divided by that under the model that sampled
    (GRPO, arXiv:2402.03300, eq. 3; two epsilons: DAPO, arXiv:2503.14476, section 3.1). For GSPO, arXiv:2507.18071,
    eq. 5 and 7, give the `document_means` of both.
    """
    ratio, a = jnp.exp(jnp.where(mask != 0, logps - old, 0)), advantages
    clipped = (ratio < 1 - epsilon_low) & (a < 0) | (ratio > 1 + epsilon_high) & (a > 0)
    return -jnp.minimum(ratio * a, jnp.clip(ratio, 1 - epsilon_low, 1 + epsilon_high) * a), clipped


def cispo(
    logps: Float[Array, "batch seq"],
    old: Float[Array, "batch seq"],
    advantages: Float[Array, "batch seq"],
    mask: Mask,
    *,
    epsilon_high: float,
) -> tuple[Float[Array, "batch seq"], Bool[Array, "batch seq"]]:
    """Computes each token's -min(ratio, 1 + epsilon_high) A log pi, and whether its ratio is clipped.

    This is CISPO, arXiv:2506.13585, eq. 4 and 5, without a lower bound. The clipped ratio is a constant weight, so that
    no token is without a gradient.
    """
    ratio, a = jax.lax.stop_gradient(jnp.exp(jnp.where(mask != 0, logps - old, 0))), advantages
    return -jnp.minimum(ratio, 1 + epsilon_high) * a * logps, (ratio > 1 + epsilon_high) & (a > 0)


def sapo(
    logps: Float[Array, "batch seq"],
    old: Float[Array, "batch seq"],
    advantages: Float[Array, "batch seq"],
    mask: Mask,
    *,
    positive: float = 1.0,
    negative: float = 1.05,
) -> Float[Array, "batch seq"]:
    """Computes each token's -4 / t sigmoid(t (ratio - 1)) A: a gate in the place of clipping.

    This is SAPO, arXiv:2511.20347. t is `positive` where the advantage A is positive, and else `negative`.
    """
    ratio, a = jnp.exp(jnp.where(mask != 0, logps - old, 0)), advantages
    t = jnp.where(a > 0, positive, negative)
    return -4 / t * jax.nn.sigmoid(t * (ratio - 1)) * a


def importance(
    old: Float[Array, "batch seq"],
    sampled: Float[Array, "batch seq"],
    mask: Mask,
    how: Literal["truncate", "icepop"],
) -> Float[Array, "batch seq"]:
    """Computes the weight of each token's loss: its probability for the trainer, `old`, divided by the sampler's.

    Both are log-probabilities under the same weights, by two programs. "truncate" is truncated importance sampling
    (Yao et al., "Your efficient RL framework secretly brings you off-policy RL training", 2025): a weight is at most 2.
    "icepop" is IcePop, arXiv:2510.18855, section 3: tokens whose weight is below 0.5 or above 5 get 0.
    """
    ratio = jnp.exp(jnp.where(mask != 0, old - sampled, 0))
    return jnp.minimum(ratio, 2) if how == "truncate" else jnp.where((ratio >= 0.5) & (ratio <= 5), ratio, 0)


def of_high_entropy(entropy: Float[Array, "batch seq"], mask: Mask, share: float) -> Bool[Array, "batch seq"]:
    """Finds the `share` of tokens whose distributions have the highest entropy, arXiv:2506.01939, section 4."""
    on = mask != 0
    least = jnp.nanquantile(jnp.where(on, jax.lax.stop_gradient(entropy), jnp.nan), 1 - share)
    return on & (entropy >= least)


def kl_k3(logps: Float[Array, "*batch"], reference: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Estimates KL(pi || ref) from each token, without bias and never below 0: ref / pi - log(ref / pi) - 1.

    Sources: Schulman, "Approximating KL divergence", 2020; GRPO, arXiv:2402.03300, eq. 4. GRPO adds beta times this
    estimate to the loss.
    """
    return jnp.expm1(reference - logps) - (reference - logps)


def document_means(
    values: Float[Array, "batch seq"], segments: Int[Array, "batch seq"], mask: Mask, documents: int
) -> Float[Array, "batch seq"]:
    """Returns, at each token, the mean of its document's values where `mask` is not 0."""
    sums = per_document(values, segments, mask, documents)
    lengths = per_document(jnp.ones_like(values), segments, mask, documents)
    return at_tokens(sums / jnp.maximum(lengths, 1), segments)


def aggregate(
    values: Float[Array, "batch seq"],
    segments: Int[Array, "batch seq"],
    mask: Mask,
    how: Literal["grpo", "dapo", "dr_grpo"],
    *,
    documents: int,
    max_length: int = 0,
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Returns the sum of tokens' losses, and the count that divides it. Both add up over the parts of a batch.

    - "grpo": the mean of a sequence's tokens, then of sequences (arXiv:2402.03300, eq. 3).
    - "dapo": the mean of all tokens (arXiv:2503.14476, section 3.3).
    - "dr_grpo": the sum over tokens, divided by the number of sequences times `max_length`, the largest number of
      tokens of a completion (arXiv:2503.20783, section 3.2).
    """
    sums = per_document(values, segments, mask, documents)
    lengths = per_document(jnp.ones_like(values), segments, mask, documents)
    sequences = jnp.sum(lengths > 0).astype(values.dtype)
    match how:
        case "grpo":
            return jnp.sum(sums / jnp.maximum(lengths, 1)), sequences
        case "dapo":
            return jnp.sum(sums), jnp.sum(lengths)
        case "dr_grpo":
            return jnp.sum(sums), sequences * max_length


# ======================================================================================================================
# Distillation, for each token. Over all tokens: by_chunks(lambda x, y: divergence(student.unembed(x),
# teacher.unembed(y), beta=0.0), x, y).
# ======================================================================================================================


def divergence(
    student: Float[Array, "*batch vocab"],
    teacher: Float[Array, "*batch vocab"],
    *,
    beta: float,
    temperature: float = 1.0,
) -> Float[Array, "*batch"]:
    """Computes the divergence of two distributions in nats, from their logits divided by `temperature`.

    A `beta` of 0 gives the forward KL(teacher || student), and 1 the reverse KL(student || teacher). A `beta` between
    them gives the generalised Jensen-Shannon divergence of GKD, arXiv:2306.13649, eq. 1, with m = beta teacher + (1 -
    beta) student: beta KL(teacher || m) + (1 - beta) KL(student || m).
    """
    log_q, log_p = (jax.nn.log_softmax(a.astype(jnp.float32) / temperature, axis=-1) for a in (student, teacher))
    return _divergence(log_q, log_p, beta)


def divergence_of_some(
    log_q: Float[Array, "*batch some"], log_p: Float[Array, "*batch some"], *, beta: float
) -> Float[Array, "*batch"]:
    """Computes `divergence` with some tokens apart, and all others together as one more.

    This is at most the divergence over the whole vocabulary. `log_q` are the student's log-probabilities of these
    tokens, and `log_p` the teacher's; each is of a whole vocabulary, so that the others have what is left.
    """
    return _divergence(_with_rest(log_q), _with_rest(log_p), beta)


def divergence_top_k(
    student: Float[Array, "*batch vocab"],
    values: Float[Array, "*batch k"],
    indices: Int[Array, "*batch k"],
    *,
    temperature: float = 1.0,
) -> Float[Array, "*batch"]:
    """Computes the forward KL(teacher || student) from the teacher's k largest logits, `values`, and their `indices`.

    The teacher's distribution is the softmax of these logits alone, which gives all other tokens a probability of 0.
    The student's distribution is over the whole vocabulary, so the student also learns to avoid the other tokens.
    """
    log_p = jax.nn.log_softmax(values.astype(jnp.float32) / temperature, axis=-1)
    log_q = jax.nn.log_softmax(student.astype(jnp.float32) / temperature, axis=-1)
    return _kl(log_p, jnp.take_along_axis(log_q, indices, axis=-1))


def _divergence(
    log_q: Float[Array, "*batch words"], log_p: Float[Array, "*batch words"], beta: float
) -> Float[Array, "*batch"]:
    if beta == 0:
        return _kl(log_p, log_q)
    if beta == 1:
        return _kl(log_q, log_p)
    m = beta * jnp.exp(log_p) + (1 - beta) * jnp.exp(log_q)
    log_m = jnp.log(jnp.where(m > 0, m, 1))
    return beta * _kl(log_p, log_m) + (1 - beta) * _kl(log_q, log_m)


def _kl(log_p: Float[Array, "*batch words"], log_q: Float[Array, "*batch words"]) -> Float[Array, "*batch"]:
    p = jnp.exp(log_p)
    return jnp.sum(p * jnp.where(p > 0, log_p - log_q, 0), axis=-1)  # p can be 0, and log p -inf


def _with_rest(log_p: Float[Array, "*batch some"]) -> Float[Array, "*batch more"]:
    """Appends the logarithm of what is left of the probability, which is at least 1e-7."""
    total = jnp.minimum(jax.nn.logsumexp(log_p, axis=-1, keepdims=True), -1e-7)
    return jnp.concatenate([log_p, jnp.log(-jnp.expm1(total))], axis=-1)
